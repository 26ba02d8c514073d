"""Targets: the machine that a step is compiled for and predicted on. It need not be attached.

Each GPU is one data file in `targets/`, with the source of every figure beside it.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Chip:
    """One GPU model, or this machine's CPU. Rates are peaks; the efficiencies say what of them is usable.

    Attributes:
      name: what the command line calls it, e.g. `h100-sxm-80gb`.
      title: what a report calls it.
      platform: JAX's platform to compile for, "cuda" or "cpu".
      memory_bytes: what the driver shows as device memory.
      flops_per_s: dense matrix-unit peak by operand type: "bf16", "f16", "tf32", "f32", "f64", "f8", "s8".
        A type that is absent cannot be multiplied on the matrix units.
      vector_flops_per_s: f32 peak outside the matrix units.
      memory_bytes_per_s: device memory bandwidth.
      host_bytes_per_s: host link, one direction.
      link_bytes_per_s: link between devices, one direction; 0 where there is none.
      launch_s: time between two kernels that does not depend on their size.
      efficiency: usable fraction of each peak: "matmul", "memory", "host", "link".
      xla: fields of XLA's GpuDeviceInfoProto that the compiler is told.
      sources: where each figure comes from.
    """

    name: str
    title: str
    platform: str
    memory_bytes: int
    flops_per_s: Mapping[str, float]
    vector_flops_per_s: float
    memory_bytes_per_s: float
    host_bytes_per_s: float
    link_bytes_per_s: float
    launch_s: float
    efficiency: Mapping[str, float]
    xla: Mapping[str, object]
    sources: Mapping[str, str]


@dataclass(frozen=True)
class Target:
    """A chip and how many of them: what `compile_step` compiles for.

    Attributes:
      chip: the device model.
      attached: compile with this machine's own device of that platform rather than with a description.
      mesh: axis names and sizes; one device is `(("device", 1),)`.
    """

    chip: Chip
    attached: bool = False
    mesh: tuple[tuple[str, int], ...] = (("device", 1),)
