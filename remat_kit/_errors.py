"""The errors that remat-kit raises for what a user gave it.

Each message says what came in, what is allowed, and what to do next. A broken invariant of our own is an
`assert`, never one of these.
"""

import difflib
from collections.abc import Iterable


class RematKitError(ValueError):
    """Something that the user gave is not usable. The command line prints the message and exits with 2."""


class PolicyError(RematKitError):
    """A policy that does not exist, is not a policy, or cannot act on this model."""


class TargetError(RematKitError):
    """A target that does not exist, or for which this machine or this program cannot be compiled."""


class WorkloadError(RematKitError):
    """A workload that cannot be imported, does not build a Step, or was given an option it does not have."""


class OutputError(RematKitError):
    """A file that cannot be written, or that exists and may not be overwritten."""


class DiskError(RematKitError):
    """Values that cannot be kept on disk, or that did not come back from there as they were."""


class MeasurementError(RematKitError):
    """A step that cannot be measured here, or whose loss or gradients differ from policy `none`."""


class PlanError(RematKitError):
    """A plan that cannot be made, read, or applied to this function."""


class CompileError(RematKitError):
    """XLA refused the program for this target."""


def did_you_mean(got: str, allowed: Iterable[str]) -> str:
    """`" Did you mean 'full'?"` when one of `allowed` is close to `got`, else the empty string."""
    close = difflib.get_close_matches(got, list(allowed), n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""
