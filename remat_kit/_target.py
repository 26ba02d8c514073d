"""Targets: the machine that a step is compiled for and predicted on. It need not be attached.

Each GPU is one data file in `targets/`, with the source of every figure beside it. Importing this module and
asking for a described target starts no JAX backend; only the target `attached` does.
"""

import functools
import importlib.resources
import math
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

from remat_kit._errors import TargetError, did_you_mean
from remat_kit._units import GiB, format_bytes

EFFICIENCY: Mapping[str, float] = {"matmul": 0.75, "memory": 0.88, "host": 0.84, "link": 0.80}
"""Usable fraction of each peak of a GPU: starting points, not measurements. Large bf16 matmuls reach 70-80% of the
dense peak, streaming kernels 85-92% of the memory bandwidth, pinned copies 80-88% of one direction of the host
link; 0.80 of a link is assumed without a source."""

LAUNCH_SECONDS = 2.5e-6
"""From one kernel's start to the next when both are empty, launched one by one: an assumption. CUDA graphs lower it."""

DEFAULT_POOL_PERCENT = 75
"""The part of a GPU's memory that JAX takes for itself when nothing is configured."""

CONTEXT_BYTES = 1 * GiB
"""Left to the CUDA context, to library handles (cuBLAS, cuDNN) and to NCCL: an assumption."""

USABLE_PERCENT = 95
"""Of what the allocator holds at most. The rest is lost to rounding (256 bytes a buffer) and to fragmentation, since
the temp heap must find one contiguous block: an assumption."""

POOL_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
"""What sets JAX's part of the memory: the name, and the older one. jaxlib refuses to see both."""

_EVERY_CUDA_GPU: Mapping[str, object] = {
    "threads_per_block_limit": 1024,
    "threads_per_warp": 32,
    "shared_memory_per_block": 49152,
    "block_dim_limit_x": 2**31 - 1,
    "block_dim_limit_y": 65535,
    "block_dim_limit_z": 65535,
    "thread_dim_limit_x": 1024,
    "thread_dim_limit_y": 1024,
    "thread_dim_limit_z": 64,
    "registers_per_core_limit": 65536,
    "registers_per_block_limit": 65536,
}
"""Fields of GpuDeviceInfoProto that are alike in all of XLA's own files from compute capability 7.0 to 12.0."""

_ENUM_FIELDS = frozenset({"feature_extension"})


@dataclass(frozen=True)
class Chip:
    """One GPU model, or this machine's CPU. Rates are peaks; the efficiencies say what of them is usable.

    Attributes:
      name: what the command line calls it, e.g. `h100-sxm-80gb`.
      title: what a report calls it; for a GPU, the name that its driver reports.
      platform: JAX's platform to compile for, "cuda" or "cpu".
      memory_bytes: what the driver shows as device memory; usually less than what the model is called after.
      flops_per_s: dense matrix-unit peak by operand type: "bf16", "f16", "tf32", "f32", "f64", "f8", "s8",
        with f32 accumulation where there is a choice. A type that is absent cannot be multiplied on the matrix units.
      vector_flops_per_s: f32 peak outside the matrix units.
      memory_bytes_per_s: device memory bandwidth.
      host_bytes_per_s: host link, one direction.
      link_bytes_per_s: NVLink to the other devices of the machine, one direction; 0 where there is none.
      launch_s: time between two kernels that does not depend on their size.
      efficiency: usable fraction of each peak: "matmul", "memory", "host", "link".
      xla: fields of XLA's GpuDeviceInfoProto that the compiler is told, `device_memory_size` excepted, which is
        `memory_bytes`. Empty for a CPU.
      sources: where each figure comes from, by field, or by `field.key` for one entry of a mapping.
    """

    name: str
    title: str
    platform: str
    memory_bytes: int
    flops_per_s: Mapping[str, float] = field(hash=False)
    vector_flops_per_s: float
    memory_bytes_per_s: float
    host_bytes_per_s: float
    link_bytes_per_s: float
    launch_s: float
    efficiency: Mapping[str, float] = field(hash=False)
    xla: Mapping[str, object] = field(hash=False)
    sources: Mapping[str, str] = field(hash=False)


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

    @property
    def name(self) -> str:
        """What `get_target` takes to give this chip again: `h100-sxm-80gb`, `cpu`, `attached-h100-sxm-80gb`."""
        return f"attached-{self.chip.name}" if self.attached and self.chip.platform != "cpu" else self.chip.name

    @property
    def num_devices(self) -> int:
        """The product of the mesh's sizes."""
        return math.prod(size for _, size in self.mesh)

    @property
    def compute_capability(self) -> tuple[int, int]:
        """CUDA's (major, minor) of the chip; (0, 0) for a CPU."""
        version = self.chip.xla.get("cuda_compute_capability", {})
        assert isinstance(version, Mapping)
        return int(version.get("major", 0)), int(version.get("minor", 0))

    def xla_config(self) -> str:
        """A text-format GpuTargetConfigProto: the argument `target_config` of JAX's `get_topology_desc`.

        It describes one device; `topology="1x1xN"` says how many there are. The versions of cuDNN and CUDA are
        those of XLA's own files. The buffers of the steps that were tried depend neither on them nor on the rates of
        the execution units, which some of XLA's files have too and which are left out here.

        Raises TargetError for a CPU, which has no such description.
        """
        if self.chip.platform != "cuda":
            raise TargetError(
                f"target {self.name!r} is not a GPU and has no XLA GPU description. "
                f"Compile with the attached backend, or choose one of {', '.join(CHIPS)}."
            )
        return _text_proto(
            {
                "gpu_device_info": {**self.chip.xla, "device_memory_size": self.chip.memory_bytes},
                "platform_name": "CUDA",
                "dnn_version_info": {"major": 9, "minor": 10, "patch": 0},
                "runtime_version": {"major": 12, "minor": 8, "patch": 0},
                "device_description_str": self.chip.title,
            }
        )


@dataclass(frozen=True)
class Capacity:
    """How much of a device one process can use, by `assumptions`, each a sentence for a reader.

    Attributes:
      memory_bytes: device memory, or physical RAM.
      pool_bytes: what an executable can get when nothing is configured.
      capacity_bytes: what an executable can get at most, with the pool raised as far as it goes.
    """

    memory_bytes: int
    pool_bytes: int
    capacity_bytes: int
    assumptions: tuple[str, ...]


@dataclass(frozen=True)
class Fit:
    """Whether a program fits on a target, by `assumptions`, each a sentence for a reader.

    Attributes:
      fits: "yes" (within JAX's default pool), "tight" (only with a larger pool) or "no".
      margin_bytes: `capacity_bytes` less what is needed; negative when it does not fit.
      capacity_bytes: what an executable can get at most.
    """

    fits: Literal["yes", "tight", "no"]
    margin_bytes: int
    capacity_bytes: int
    assumptions: tuple[str, ...]


def get_target(name: str, mesh: str | None = None) -> Target:
    """The target called `name`, on one device or on the devices of `mesh`, e.g. `"data=2,fsdp=4"`.

    Names are those of `CHIPS`; `cpu`, this machine's CPU; `attached`, the device that JAX uses here by default; and
    `attached-` with the name of a chip, which insists that the attached device is that one.

    Raises TargetError for a name or a mesh that is none, and for an attached device that is not described.
    """
    axes = (("device", 1),) if mesh is None else parse_mesh(mesh)
    if name in CHIPS:
        return Target(CHIPS[name], mesh=axes)
    if name == "cpu":
        return Target(_cpu(), attached=True, mesh=axes)
    if name == "attached" or name.removeprefix("attached-") in CHIPS:
        return _attached(name, axes)
    allowed = [*CHIPS, "cpu", "attached"]
    lowered = name.lower()
    longer = [known for known in allowed if lowered and known.startswith(lowered)]
    hint = f" Did you mean {' or '.join(map(repr, longer))}?" if longer else did_you_mean(lowered, allowed)
    raise TargetError(f"{name!r} is not a target.{hint} Targets: {', '.join(allowed)}.")


def parse_mesh(text: str) -> tuple[tuple[str, int], ...]:
    """`(("data", 2), ("fsdp", 4))` from `"data=2,fsdp=4"`. Raises TargetError when the text is not a mesh."""
    axes: list[tuple[str, int]] = []
    for part in text.split(","):
        axis, _, size = (piece.strip() for piece in part.partition("="))
        if not (axis.isidentifier() and size.isascii() and size.isdigit() and int(size) > 0):
            raise TargetError(
                f"{part.strip()!r} in {text!r} is not a mesh axis. Write axis=size with a size of 1 or more, "
                "separated by commas, e.g. data=2,fsdp=4."
            )
        if axis in dict(axes):
            raise TargetError(f"mesh {text!r} has axis {axis!r} twice. Give each axis its own name.")
        axes.append((axis, int(size)))
    return tuple(axes)


def capacity(target: Target) -> Capacity:
    """What one process can allocate on one device of `target`. An estimate from `memory_bytes` alone.

    It leaves out other processes, other live arrays and other executables.
    """
    memory = target.chip.memory_bytes
    if target.chip.platform == "cpu":
        share = memory // target.num_devices
        said = [f"All of the {format_bytes(memory)} of physical RAM counts; other processes use some of it."]
        if target.num_devices > 1:
            said.append(f"The {target.num_devices} devices of the mesh share it evenly.")
        return Capacity(memory, share, share, tuple(said))
    highest = max(0, memory - CONTEXT_BYTES) * USABLE_PERCENT // 100
    return Capacity(
        memory_bytes=memory,
        pool_bytes=min(memory * DEFAULT_POOL_PERCENT // 100 * USABLE_PERCENT // 100, highest),
        capacity_bytes=highest,
        assumptions=(
            f"Nothing else uses the {format_bytes(memory)} of the device.",
            f"JAX takes {DEFAULT_POOL_PERCENT}% of it unless {POOL_VARIABLES[0]} (older name: {POOL_VARIABLES[1]}) "
            "is set; a JAX whose pool grows by itself does not need that.",
            f"{format_bytes(CONTEXT_BYTES)} is left to the CUDA context, to library handles and to NCCL.",
            f"{100 - USABLE_PERCENT}% of either is lost to rounding and to fragmentation.",
        ),
    )


def judge_fit(need_bytes: int, target: Target) -> Fit:
    """Whether an executable that allocates `need_bytes` fits on each device of `target`.

    "yes" when it fits in JAX's default pool, "tight" when it fits in `capacity_bytes` only, "no" above that. What
    the need is compared with is `capacity(target)`, an estimate.
    """
    assert need_bytes >= 0
    room = capacity(target)
    margin = room.capacity_bytes - need_bytes
    if need_bytes <= room.pool_bytes:
        return Fit("yes", margin, room.capacity_bytes, room.assumptions)
    if margin < 0:
        return Fit("no", margin, room.capacity_bytes, room.assumptions)
    wanted = math.ceil(1000 * need_bytes * 100 / (USABLE_PERCENT * room.memory_bytes))
    highest = 1000 * (room.memory_bytes - CONTEXT_BYTES) // room.memory_bytes
    advice = f"Set {POOL_VARIABLES[0]}={min(wanted, highest) / 1000:.3f}: the default pool is too small."
    return Fit("tight", margin, room.capacity_bytes, (*room.assumptions, advice))


def _load_chips() -> Mapping[str, Chip]:
    """Every described GPU by name, in alphabetical order. Takes about 6 ms."""
    folder = importlib.resources.files("remat_kit") / "targets"
    files = sorted((file for file in folder.iterdir() if file.name.endswith(".toml")), key=lambda file: file.name)
    ours = {
        "launch_s": "an assumption, LAUNCH_SECONDS in remat_kit/_target.py",
        "efficiency": "starting points to calibrate, EFFICIENCY in remat_kit/_target.py",
    }
    chips: dict[str, Chip] = {}
    for file in files:
        data: dict[str, Any] = tomllib.loads(file.read_text("utf-8"))
        name = file.name.removesuffix(".toml")
        data |= {"xla": {**_EVERY_CUDA_GPU, **data["xla"]}, "sources": {**data["sources"], **ours}}
        chips[name] = Chip(name=name, platform="cuda", launch_s=LAUNCH_SECONDS, efficiency=EFFICIENCY, **data)
    return MappingProxyType(chips)


@functools.cache
def _cpu() -> Chip:
    """This machine's CPU. Its memory is read from the system; its rates are a generic guess for the core count."""
    cores = os.cpu_count() or 1
    guess = "a generic guess, uncalibrated: not a property of this machine"
    f32 = cores * 8 * 2 * 2 * 2.5e9
    return Chip(
        name="cpu",
        title=f"CPU with {cores} threads (rates uncalibrated)",
        platform="cpu",
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        flops_per_s={"bf16": f32, "f16": f32, "f32": f32, "f64": f32 / 2},
        vector_flops_per_s=f32,
        memory_bytes_per_s=40e9,
        host_bytes_per_s=40e9,
        link_bytes_per_s=0.0,
        launch_s=2e-6,
        efficiency={"matmul": 0.5, "memory": 0.7, "host": 0.7, "link": 1.0},
        xla={},
        sources={
            "memory_bytes": "physical RAM, from os.sysconf; a container may allow less",
            "flops_per_s": f"{guess}; threads x 8 lanes x 2 FMA units x 2 x 2.5 GHz, for bf16 and f16 by way of f32",
            "vector_flops_per_s": f"{guess}; as flops_per_s",
            "memory_bytes_per_s": f"{guess}; two channels of DDR4",
            "host_bytes_per_s": f"{guess}; a copy within the same memory",
            "link_bytes_per_s": "there is one CPU",
            "launch_s": guess,
            "efficiency": guess,
        },
    )


def _attached(name: str, mesh: tuple[tuple[str, int], ...]) -> Target:
    """The target of JAX's default device here, with the memory that it really has. Starts JAX's backend."""
    import jax  # here, since a described target needs none of it

    try:
        devices = jax.devices()
    except RuntimeError as error:
        raise TargetError(
            f"target {name!r}: JAX cannot start its default backend: {error}. Unset JAX_PLATFORMS, or choose 'cpu'."
        ) from error
    device, wanted = devices[0], name.removeprefix("attached-")
    num_devices = math.prod(size for _, size in mesh)
    if num_devices > len(devices):
        raise TargetError(
            f"the mesh has {num_devices} devices, but {len(devices)} are attached. "
            "Make it smaller, or choose a described target, which may have any number."
        )
    kind = device.device_kind
    if device.platform == "cpu" and wanted == "attached":
        return Target(_cpu(), attached=True, mesh=mesh)
    chip = next((chip for chip in CHIPS.values() if _bare(chip.title) == _bare(kind)), None)
    if chip is None or wanted not in ("attached", chip.name):
        what = "is not described" if wanted == "attached" else f"is not {wanted!r}"
        raise TargetError(
            f"target {name!r}: the attached device is {kind!r} ({device.platform}), which {what}. "
            f"Choose the described GPU that is nearest to it: {', '.join(CHIPS)}."
        )
    memory, source = _live_memory(device, chip)
    sources = {**chip.sources, "memory_bytes": source}
    return Target(replace(chip, memory_bytes=memory, sources=sources), attached=True, mesh=mesh)


def _live_memory(device: Any, chip: Chip) -> tuple[int, str]:
    """The device's memory in bytes and where the figure comes from.

    JAX tells the limit of its pool, not the memory: of the pool itself and of what it would be a fraction of, the
    one that is nearer to the described memory is meant. Without a pool (the `platform` allocator) there is neither.
    """
    limit = (device.memory_stats() or {}).get("bytes_limit")
    if not limit:
        return chip.memory_bytes, f"{chip.sources['memory_bytes']}; the attached device did not tell its own"
    set_to = next((os.environ[variable] for variable in POOL_VARIABLES if os.environ.get(variable)), None)
    fraction = float(set_to) if set_to else DEFAULT_POOL_PERCENT / 100
    memory = min(limit, round(limit / fraction), key=lambda size: abs(size - chip.memory_bytes))
    return memory, f"the attached device: JAX's pool is limited to {format_bytes(limit)}"


def _bare(kind: str) -> str:
    """A GPU's name without the maker, which older drivers leave out."""
    return kind.removeprefix("NVIDIA ").strip()


def _text_proto(message: Mapping[str, Any], indent: str = "") -> str:
    lines: list[str] = []
    for key, value in message.items():
        if isinstance(value, Mapping):
            lines.append(f"{indent}{key} {{\n{_text_proto(value, indent + '  ')}{indent}}}\n")
        elif isinstance(value, str) and key not in _ENUM_FIELDS:
            lines.append(f'{indent}{key}: "{value}"\n')
        else:
            lines.append(f"{indent}{key}: {value}\n")
    return "".join(lines)


CHIPS: Mapping[str, Chip] = _load_chips()
"""Every described GPU by name, in alphabetical order. Immutable."""
