"""Rematerialization policies for JAX, and what each of them costs on a GPU that need not be there.

The public API is the list below and nothing else. A name is imported when it is first used: the command line and the
process that starts a sweep's cells need neither JAX nor Flax, which take a second to import.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from remat_kit import names as names
    from remat_kit._analyze import analyze as analyze
    from remat_kit._compile import CompiledStep as CompiledStep
    from remat_kit._compile import CompileOptions as CompileOptions
    from remat_kit._compile import compile_step as compile_step
    from remat_kit._diff import Diff as Diff
    from remat_kit._diff import diff as diff
    from remat_kit._disk.offload import DiskOffload as DiskOffload
    from remat_kit._disk.offload import disk_offload as disk_offload
    from remat_kit._effect import Effect as Effect
    from remat_kit._effect import effect as effect
    from remat_kit._enable.front import disable_remat as disable_remat
    from remat_kit._enable.front import enable_remat as enable_remat
    from remat_kit._errors import CompileError as CompileError
    from remat_kit._errors import DiskError as DiskError
    from remat_kit._errors import MeasurementError as MeasurementError
    from remat_kit._errors import OutputError as OutputError
    from remat_kit._errors import PlanError as PlanError
    from remat_kit._errors import PolicyError as PolicyError
    from remat_kit._errors import RematKitError as RematKitError
    from remat_kit._errors import TargetError as TargetError
    from remat_kit._errors import WorkloadError as WorkloadError
    from remat_kit._explanation import CATEGORIES as CATEGORIES
    from remat_kit._explanation import Explanation as Explanation
    from remat_kit._measure import allocator_peak as allocator_peak
    from remat_kit._measure import check_gradients as check_gradients
    from remat_kit._measure import measure_interleaved as measure_interleaved
    from remat_kit._measure import real_args as real_args
    from remat_kit._plan.auto import auto_remat as auto_remat
    from remat_kit._plan.make import plan as plan
    from remat_kit._plan.plan import Plan as Plan
    from remat_kit._policy import POLICIES as POLICIES
    from remat_kit._policy import Policy as Policy
    from remat_kit._policy import Region as Region
    from remat_kit._policy import Rule as Rule
    from remat_kit._policy import every as every
    from remat_kit._policy import first as first
    from remat_kit._policy import get_policy as get_policy
    from remat_kit._policy import offload as offload
    from remat_kit._policy import parse_policies as parse_policies
    from remat_kit._policy import save as save
    from remat_kit._policy import save_kernels as save_kernels
    from remat_kit._policy import segments as segments
    from remat_kit._policy import union as union
    from remat_kit._program import analyze_file as analyze_file
    from remat_kit._record import Record as Record
    from remat_kit._stack import remat_scan as remat_scan
    from remat_kit._stack import scan_stack as scan_stack
    from remat_kit._stack import unroll_stack as unroll_stack
    from remat_kit._step import Step as Step
    from remat_kit._step import Workload as Workload
    from remat_kit._target import CHIPS as CHIPS
    from remat_kit._target import Target as Target
    from remat_kit._target import get_target as get_target
    from remat_kit._trace import TracedStep as TracedStep
    from remat_kit._trace import trace as trace
    from remat_kit._wrap import remat as remat

_HOME = {
    "analyze": "_analyze",
    "CompiledStep": "_compile",
    "CompileOptions": "_compile",
    "compile_step": "_compile",
    "Diff": "_diff",
    "diff": "_diff",
    "DiskOffload": "_disk.offload",
    "disk_offload": "_disk.offload",
    "Effect": "_effect",
    "effect": "_effect",
    "disable_remat": "_enable.front",
    "enable_remat": "_enable.front",
    "CompileError": "_errors",
    "DiskError": "_errors",
    "MeasurementError": "_errors",
    "OutputError": "_errors",
    "PlanError": "_errors",
    "PolicyError": "_errors",
    "RematKitError": "_errors",
    "TargetError": "_errors",
    "WorkloadError": "_errors",
    "CATEGORIES": "_explanation",
    "Explanation": "_explanation",
    "allocator_peak": "_measure",
    "check_gradients": "_measure",
    "measure_interleaved": "_measure",
    "real_args": "_measure",
    "POLICIES": "_policy",
    "Policy": "_policy",
    "Region": "_policy",
    "Rule": "_policy",
    "every": "_policy",
    "first": "_policy",
    "get_policy": "_policy",
    "offload": "_policy",
    "parse_policies": "_policy",
    "save": "_policy",
    "save_kernels": "_policy",
    "segments": "_policy",
    "union": "_policy",
    "auto_remat": "_plan.auto",
    "plan": "_plan.make",
    "Plan": "_plan.plan",
    "analyze_file": "_program",
    "Record": "_record",
    "remat_scan": "_stack",
    "scan_stack": "_stack",
    "unroll_stack": "_stack",
    "Step": "_step",
    "Workload": "_step",
    "CHIPS": "_target",
    "Target": "_target",
    "get_target": "_target",
    "TracedStep": "_trace",
    "trace": "_trace",
    "remat": "_wrap",
}
"""Public name -> the file that it lives in. The same names as above, which type checkers and editors read."""


__all__ = ["names", *_HOME]  # pyright: ignore[reportUnsupportedDunderAll]


if not os.path.exists("/dev/nvidiactl"):
    # Without a GPU the plugin's own check of NVIDIA's libraries fails when JAX starts: JAX prints a traceback and drops
    # the plugin, and then nothing can be compiled for a GPU that is not there.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"remat_kit.{_HOME[name]}"), name)
    if name == "names":
        return importlib.import_module("remat_kit.names")
    raise AttributeError(f"module 'remat_kit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(["names", *_HOME])
