"""What can be said of the values of an option without compiling: which are accepted, and how bytes grow with them.

Each function runs in a process of its own, as cells do: it imports the user's module, and tracing may fail or hang.
"""

import inspect
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from remat_kit._border import Foreseen, Problem, expected_largest
from remat_kit._cell import Cell
from remat_kit._errors import PolicyError, RematKitError, TargetError, WorkloadError

_STEPS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 48, 56, 64, 96, 112, 128, 192, 256, 512, 1024)
_STEPS_OF = {"seq": (128, 64, 32, 16, 8, 4, 2, 1)}
"""What values may have to be multiples of, the first that is accepted counts. Kernels like sequences of whole tiles."""
_TRACES = 14
"""How many values are traced at most on the way up, and how many more between one accepted and one refused."""
_BEYOND = 2
"""Tracing ends where the foreseen bytes are this many times the limit: the factor to the real need is not known yet."""


@dataclass(frozen=True)
class Asked:
    """What `foresee` is asked.

    Attributes:
      cell: whose workload, policy, target and mesh are meant; its own value of `option`, if any, is replaced.
      option: the option of the workload; least, most: its bounds; limit_bytes: what the step may need.
      step: what values are multiples of; None to find it out.
    """

    cell: Cell
    option: str
    least: int
    most: int
    step: int | None
    limit_bytes: int


def room(asked: tuple[str, str | None, str, str | None]) -> dict[str, Any]:
    """`{"limit_bytes", "pool_bytes", "capacity_bytes"}` of (target, mesh, "yes" or "tight", budget or None).

    Raises PlanError for a budget that is none, or beyond what one process can allocate on the device.
    """
    from remat_kit._plan.budget import parse_budget
    from remat_kit._target import capacity, get_target

    name, mesh, fits, budget = asked
    target = get_target(name, mesh)
    found = capacity(target)
    given = parse_budget(budget, target)
    limit = given or (found.pool_bytes if fits == "yes" else found.capacity_bytes)
    return {"limit_bytes": limit, "pool_bytes": found.pool_bytes, "capacity_bytes": found.capacity_bytes}


def check_option(asked: tuple[str, str]) -> None:
    """Raises WorkloadError unless the option of the workload can be a whole number, by its annotation or default."""
    from remat_kit._step import Workload

    spec, option = asked
    parameter = inspect.signature(Workload(spec).function()).parameters.get(option)
    if parameter is None:  # **options takes it
        return
    default, annotation = parameter.default, parameter.annotation
    if annotation is not parameter.empty:
        text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
        whole = re.search(r"\b(int|Any|object|SupportsIndex|Integral)\b", str(annotation)) or text in ("int", "Any")
        kind = text if isinstance(annotation, type) else str(annotation)
    else:
        whole = default in (parameter.empty, None) or (isinstance(default, int) and not isinstance(default, bool))
        kind = type(default).__name__
    if not whole:
        raise WorkloadError(
            f"option {option!r} of {spec} is a {kind}, and max looks for the largest whole number. "
            "Name an option that is one, e.g. batch, seq or layers."
        )


def foresee(asked: Asked) -> Iterator[dict[str, Any]]:
    """What tracing tells, as it comes, from small values to where the step is foreseen to need twice the limit.

    Yields `{"step": N}` once: accepted values are taken to be its multiples, and `"why"` beside it when it is not the
    usual one; for each traced value `{"value", "argument_bytes", "live_bytes"}`; and when the workload or JAX refuse a
    value, `{"accepted": A, "refused": R, "error": ...}` with the largest accepted value below and the smallest refused
    one. Raises what the smallest value is refused with when none is accepted, and PolicyError or TargetError for what
    has nothing to do with values.
    """
    seen: dict[int, Foreseen | str] = {}
    step = None
    refusal = ""
    for candidate in (asked.step,) if asked.step else _STEPS_OF.get(asked.option, _STEPS):
        first = -(-asked.least // candidate) * candidate
        if first > asked.most:
            continue
        results = [_look(asked, value, seen) for value in (first, first + candidate) if value <= asked.most]
        if isinstance(results[0], str):
            refusal = refusal or f"{asked.option}={first} is refused: {results[0]}"
            continue
        if step is None:
            step = candidate
        if not isinstance(results[-1], str):
            step = candidate
            break
        refusal = refusal or f"{asked.option}={first + candidate} is refused: {results[-1]}"
        if asked.step:
            break
    if step is None:
        raise RematKitError(refusal or f"no multiple of {asked.step} is between {asked.least} and {asked.most}.")
    ours = asked.step or _STEPS_OF.get(asked.option, _STEPS)[0]
    yield {"step": step} | ({"why": refusal} if step != ours and refusal else {})
    accepted = sorted(value for value, found in seen.items() if not isinstance(found, str) and value % step == 0)
    for value in accepted:
        yield _line(seen[value])
    yield from _climb(asked, step, accepted[-1], seen)


def _climb(asked: Asked, step: int, value: int, seen: dict[int, Foreseen | str]) -> Iterator[dict[str, Any]]:
    """From the largest value that was traced up to twice the limit, to the bound, or to what is refused."""
    most = asked.most // step * step
    for _ in range(_TRACES):
        top = _problem(asked, step, most, seen, _BEYOND * asked.limit_bytes)
        found = seen[value]
        assert isinstance(found, Foreseen)
        if value >= most or found.argument_bytes + found.live_bytes > _BEYOND * asked.limit_bytes:
            break
        # Not far beyond what is needed: an unrolled stack takes long to trace.
        wanted = min(4 * value, max(expected_largest(top) + step, 2 * value), most)
        higher = wanted // step * step
        refused = _look(asked, higher, seen)
        if isinstance(refused, str):
            yield from _edge(asked, step, value, higher, seen)
            return
        value = higher
        yield _line(refused)
    # Once more where the border is foreseen, as the values on the way are far apart.
    near = expected_largest(_problem(asked, step, most, seen, asked.limit_bytes))
    if near not in seen and not isinstance(found := _look(asked, near, seen), str):
        yield _line(found)


def _edge(asked: Asked, step: int, low: int, high: int, seen: dict[int, Foreseen | str]) -> Iterator[dict[str, Any]]:
    """Where acceptance ends, between `low`, which is accepted, and `high`, which is not."""
    for _ in range(_TRACES):
        if high - low <= step:
            break
        middle = (low + high) // 2 // step * step
        found = _look(asked, middle, seen)
        if isinstance(found, str):
            high = middle
        else:
            low = middle
            yield _line(found)
    yield {"accepted": low, "refused": high, "error": seen[high]}


def _problem(asked: Asked, step: int, most: int, seen: dict[int, Foreseen | str], limit_bytes: int) -> Problem:
    known = tuple(found for _, found in sorted(seen.items()) if not isinstance(found, str) and found.value % step == 0)
    return Problem(-(-asked.least // step) * step, most, step, limit_bytes, foreseen=known)


def _line(found: Foreseen | str) -> dict[str, Any]:
    assert isinstance(found, Foreseen)
    return {"value": found.value, "argument_bytes": found.argument_bytes, "live_bytes": found.live_bytes}


def _look(asked: Asked, value: int, seen: dict[int, Foreseen | str]) -> Foreseen | str:
    """What tracing tells of a value, or one line on why it is refused; kept in `seen`.

    Raises what has nothing to do with the value: a policy that the model has no names for, a target that is missing.
    """
    if value not in seen:
        try:
            seen[value] = _trace(asked, value)
        except (PolicyError, TargetError):
            raise
        except Exception as error:
            text = " ".join(str(error).split())
            seen[value] = text if isinstance(error, RematKitError) else f"{type(error).__name__}: {text}"[:400]
    return seen[value]


def _trace(asked: Asked, value: int) -> Foreseen:
    import jax

    from remat_kit._cell import trace_cell
    from remat_kit._jaxpr import nbytes
    from remat_kit._live import live_bytes

    traced = trace_cell(asked.cell.with_option(asked.option, value))
    jaxpr = traced.traced.jaxpr
    whole = share = 0
    for leaf, var in zip(jax.tree.leaves(traced.args), jaxpr.jaxpr.invars, strict=True):
        shard = leaf.sharding.shard_shape(leaf.shape) if leaf.sharding else leaf.shape
        whole += nbytes(var)
        share += nbytes(var) * math.prod(shard) // max(1, math.prod(leaf.shape))
    live = live_bytes(jaxpr)
    # Arguments in shards mean that the work is shared, too.
    return Foreseen(value, share, live // traced.target.num_devices if share < whole else live)
