"""XLA's own rematerialization pass as a candidate: how it is told a budget."""

import dataclasses

from remat_kit._compile import ON, CompileOptions
from remat_kit._target import Target

LIMIT_OPTION = "xla_gpu_memory_limit_slop_factor"
"""The percentage of XLA's memory limit that its scheduler and its rematerialization pass keep to."""
_BASE_PERCENT = 80
"""Of the device's memory: where XLA's limit begins. Inputs and outputs come off, then the percentage of the rest."""


def options_under(budget: float, fixed_bytes: int, target: Target, options: CompileOptions) -> CompileOptions | None:
    """How a step is compiled so that XLA's own pass keeps its temporaries within a budget in bytes.

    `fixed_bytes` are inputs and outputs of the step, aliased ones counted once. None where the pass cannot be told:
    on the CPU, without a budget, when the budget is below one percent of the limit, or when the options set it already.
    """
    limit = target.chip.memory_bytes * _BASE_PERCENT // 100 - fixed_bytes
    if target.chip.platform != "cuda" or limit <= 0 or budget == float("inf"):
        return None
    percent = int((budget - fixed_bytes) * 100 // limit)
    if percent < 1 or LIMIT_OPTION in dict(options.xla_options):
        return None
    own = (*options.xla_options, (LIMIT_OPTION, str(percent)))
    return dataclasses.replace(options, xla_remat=ON, xla_options=own)
