"""`compile_step`: XLA's program for a target, with the buffer assignment that the analysis reads."""

import contextlib
import importlib.util
import pathlib
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from remat_kit._errors import CompileError, TargetError
from remat_kit._jaxpr import primitive_of, walk
from remat_kit._trace import TracedStep

ON, OFF = "on", "off"
GEMMS = ("cublas", "triton")


_OURS = {
    "xla_disable_hlo_passes": "Give --xla-remat on or off; other passes are left as XLA has them.",
    "xla_gpu_enable_triton_gemm": "Give --gemm cublas or --gemm triton.",
    "xla_gpu_load_autotune_results_from": "Give --autotune-results FILE.",
    "xla_dump_to": "The compiled module is read from it; set it in XLA_FLAGS of another run to keep a dump.",
    "xla_dump_hlo_as_proto": "The compiled module is read from it; leave it out.",
}
"""Options of XLA that `for_xla` sets, and what to give instead."""


@dataclass(frozen=True)
class CompileOptions:
    """How XLA compiles, as far as it moves memory or time.

    Attributes:
      xla_remat: "off" turns XLA's own rematerialization pass off, "on" leaves it as a job would have it.
      gemm: who multiplies on a GPU target: "cublas" or "triton". Without a device nothing is autotuned, and
        the choice moves memory; a live device mixes both by timing.
      autotune_results: a file with the autotuning results of one's own device
        (`xla_gpu_dump_autotune_results_to`); Triton then competes with cuBLAS as it did there.
      xla_options: any other `compiler_options` of XLA, as (name, value) pairs.
    """

    xla_remat: str = OFF
    gemm: str = "cublas"
    autotune_results: str | None = None
    xla_options: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if self.xla_remat not in (ON, OFF):
            raise CompileError(f"xla_remat is {self.xla_remat!r}. Give 'on' or 'off'.")
        if self.gemm not in GEMMS:
            raise CompileError(f"gemm is {self.gemm!r}. Give one of {', '.join(GEMMS)}.")
        if self.autotune_results and not pathlib.Path(self.autotune_results).is_file():
            raise CompileError(
                f"there is no autotune results file {self.autotune_results!r}. "
                "Write one on your device with XLA_FLAGS=--xla_gpu_dump_autotune_results_to=FILE."
            )

        for name, _ in self.xla_options:
            if instead := _OURS.get(name):
                raise CompileError(f"XLA's option {name} is set by remat-kit. {instead}")

    def for_xla(self, platform: str) -> dict[str, Any]:
        """XLA's `compiler_options` for a platform. The user's own come last and win."""
        options: dict[str, Any] = {}
        if self.xla_remat == OFF:
            options["xla_disable_hlo_passes"] = "rematerialization"
        if platform == "cuda":
            if self.autotune_results:
                options["xla_gpu_load_autotune_results_from"] = self.autotune_results
            else:
                options["xla_gpu_enable_triton_gemm"] = self.gemm == "triton"
        return options | {name: _typed(value) for name, value in self.xla_options}

    def gemm_backend(self, platform: str) -> str:
        """The record's word for who multiplies: "cublas", "triton", "autotuned", or "cpu"."""
        if platform != "cuda":
            return platform
        return "autotuned" if self.autotune_results else self.gemm


def _typed(value: str) -> bool | int | float | str:
    """XLA refuses a flag's value in a type that is not the flag's own."""
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value


@dataclass(frozen=True)
class MemoryStats:
    """XLA's own totals of an executable, bytes on one device and in its host's memory."""

    argument: int
    output: int
    alias: int
    temp: int
    host_argument: int
    host_output: int
    host_temp: int
    peak: int
    """`peak_memory_in_bytes`. Wrong on the CPU backend, where it leaves temporaries out."""


@dataclass(frozen=True)
class CompiledStep:
    """A compiled step.

    Attributes:
      traced: what was compiled.
      options: how.
      memory: XLA's totals.
      hlo_proto: the serialized HloProto after optimization, buffer assignment included.
      executable: JAX's Compiled; it runs only where the target is attached.
      compile_s: seconds for lowering and compiling.
    """

    traced: TracedStep
    options: CompileOptions
    memory: MemoryStats
    hlo_proto: bytes
    executable: Any
    compile_s: float


def compile_step(traced: TracedStep, options: CompileOptions | None = None) -> CompiledStep:
    """The program that XLA makes of `traced` for its target.

    Raises TargetError when the GPU cannot run the program (bf16 matmuls on a V100 or T4), CompileError when
    XLA refuses it for another reason.
    """
    options = options or CompileOptions()
    _check_target(traced)
    platform = traced.target.chip.platform
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="remat-kit-") as folder:
        compiler_options = {"xla_dump_to": folder, "xla_dump_hlo_as_proto": True} | options.for_xla(platform)
        with _without_compilation_cache():
            try:
                executable = traced.traced.lower().compile(compiler_options=compiler_options)
            except jax.errors.JaxRuntimeError as error:
                raise _explained(error, traced) from error
        compile_s = time.perf_counter() - start
        protos = sorted(pathlib.Path(folder).glob("*after_optimizations.hlo.pb"), key=lambda path: path.stat().st_size)
        if not protos:
            raise CompileError(
                "XLA wrote no HloProto for the compiled step. Leave xla_dump_to and xla_dump_hlo_* out of "
                f"--xla-option; got {dict(options.xla_options)}."
            )
        hlo_proto = protos[-1].read_bytes()
    stats = executable.memory_analysis()
    memory = MemoryStats(
        argument=stats.argument_size_in_bytes,
        output=stats.output_size_in_bytes,
        alias=stats.alias_size_in_bytes,
        temp=stats.temp_size_in_bytes,
        host_argument=stats.host_argument_size_in_bytes,
        host_output=stats.host_output_size_in_bytes,
        host_temp=stats.host_temp_size_in_bytes,
        peak=stats.peak_memory_in_bytes,
    )
    return CompiledStep(traced, options, memory, hlo_proto, executable, compile_s)


@contextlib.contextmanager
def _without_compilation_cache() -> Iterator[None]:
    """While it is open, nothing comes from JAX's persistent cache: a hit would compile nothing and write no proto."""
    enabled = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # JAX asks once whether there is a cache, and remembers the answer
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", enabled)
        compilation_cache.reset_cache()


def _check_target(traced: TracedStep) -> None:
    """Raises TargetError for what XLA would refuse late, or die of (a V100 with CUDA 13, in some versions)."""
    target = traced.target
    if target.chip.platform == "cuda" and "bf16" not in target.chip.flops_per_s and traced.precision == "bfloat16":
        raise TargetError(
            f"{target.chip.title} has no bfloat16 matmuls, and this step has some. "
            "Build the step in float16 or float32, or name a GPU of compute capability 8.0 or later (a100 and on)."
        )
    if not target.attached:
        calls = sorted({name for each in walk(traced.traced.jaxpr) if (name := primitive_of(each.eqn)) in _CALLBACKS})
        if calls:
            raise TargetError(
                f"this step calls back into Python ({', '.join(calls)}), as disk offloading does, and XLA compiles "
                f"that only for a device that is there, which {target.name!r} is not. Use --target attached on a "
                "machine with the GPU, or --target cpu; or give the step without it: policy full recomputes as much."
            )
    if not target.attached and target.compute_capability < _OLDEST_OF_CUDA_13 and not _has_cuda_12():
        capability = ".".join(map(str, target.compute_capability))
        raise TargetError(
            f"{target.chip.title} (compute capability {capability}) is older than what CUDA 13 compiles for. "
            "Name a newer GPU, or install the CUDA 12 plugin: pip install 'jax[cuda12]'."
        )


_CALLBACKS = frozenset({"io_callback", "pure_callback"})
_OLDEST_OF_CUDA_13 = (7, 5)


def _has_cuda_12() -> bool:
    return importlib.util.find_spec("jax_plugins.xla_cuda12") is not None


def _explained(error: Exception, traced: TracedStep) -> TargetError | CompileError:
    text = str(error).strip()
    first = text.splitlines()[0] if text else type(error).__name__
    if "ALG_DOT_BF16" in text:
        return TargetError(
            f"{traced.target.chip.title} cannot run this step's bfloat16 matmuls: {first} "
            "Build the step in float16 or float32, or name a GPU of compute capability 8.0 or later (a100 and on)."
        )
    return CompileError(
        f"XLA refused the step for {traced.target.name!r}: {first} "
        "Look at the step with policy none and --target cpu to see whether it compiles at all."
    )
