"""`trace`: a step's jaxpr for a target, and all that is counted on it.

This is the only file that may touch `jax._src`: JAX asks the attached GPU for its cuDNN when it traces fused
attention, and there is no public way to answer for a GPU that is described and not there.
"""

import contextlib
import functools
import inspect
import os
import pathlib
import shutil
import site
import sys
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

from remat_kit._collector import without_collection
from remat_kit._errors import RematKitError, TargetError
from remat_kit._explanation import Checkpoint
from remat_kit._jaxpr import (
    Work,
    count_work,
    least_precise,
    lowest_precision,
    tag_of,
    walk,
)
from remat_kit._policy import Policy
from remat_kit._policy_check import check_host_memory, check_policy
from remat_kit._regions import checkpoint_regions
from remat_kit._saved import Saved, saved_values
from remat_kit._scopes import nnx_scopes
from remat_kit._sharding import abstract_arguments, mesh_of, result_shardings, sharding_warnings
from remat_kit._step import Step
from remat_kit._target import Target

_CUDNN_VERSION = 91000
"""What a described GPU is said to have, 9.10.0: the oldest cuDNN that XLA in jax 0.11 supports in full."""


@dataclass(frozen=True)
class TracedStep:
    """A step as a jaxpr for a target.

    Attributes:
      step: what was traced.
      target: what it was traced for.
      traced: JAX's own Traced, from which it is lowered.
      args: its arguments without data, each leaf with its sharding on the target's devices.
      work: matmuls and FLOPs, counted on the jaxpr.
      saved: what is kept from forward to backward, counted on the jaxpr.
      checkpoints: its checkpointed regions, found on the jaxpr.
      precision: the least precise floating-point type that matmuls take or that waits for backward; a comparison's
        tolerance follows it.
      tags: every tensor name in it.
      warnings: what a reader of the figures has to know.
      trace_s: seconds that JAX took to trace.
    """

    step: Step
    target: Target
    traced: Any
    args: tuple[Any, ...]
    work: Work
    saved: Saved
    precision: str
    tags: frozenset[str]
    warnings: tuple[str, ...]
    trace_s: float
    checkpoints: tuple[Checkpoint, ...] = ()


@without_collection()
def trace(step: Step, target: Target, policy: Policy | None = None) -> TracedStep:
    """The step as a jaxpr for `target`, with what is counted on it. Nothing is allocated.

    With `policy`, the policy that the step was built with, its names are checked against the model's. Raises
    PolicyError when none of them occurs, TargetError when the target's compiler is not installed.
    """
    devices = device_mesh(target)
    args = abstract_arguments(step, devices)
    start = time.perf_counter()
    with cudnn_of(target), mesh_of(devices), nnx_scopes():
        traced = jax.jit(step.fn, donate_argnums=step.donate).trace(*args)
        if devices.size > 1:
            # JAX finds the jaxpr of the first call again: nothing is traced twice.
            results = result_shardings(step, args, traced.out_info)
            traced = jax.jit(step.fn, donate_argnums=step.donate, out_shardings=results).trace(*args)
    trace_s = time.perf_counter() - start
    jaxpr = traced.jaxpr
    tags = frozenset(tag for equation in walk(jaxpr) if (tag := tag_of(equation.eqn)))
    warnings = check_policy(policy, jaxpr, tags) if policy else ()
    warnings += sharding_warnings(step, args, devices)
    saved = saved_values(jaxpr)
    if saved.host_bytes:
        warnings += check_host_memory(target, devices)
    waiting = {value.dtype for value in saved.values if not value.dtype.startswith("key")}
    precision = least_precise(lowest_precision(jaxpr), *sorted(waiting))
    regions = checkpoint_regions(jaxpr)
    work = count_work(jaxpr)
    return TracedStep(step, target, traced, args, work, saved, precision, tags, warnings, trace_s, regions)


def device_mesh(target: Target) -> Mesh:
    """The devices to compile for: the target's own where it is attached, else compile-only ones.

    Raises TargetError when there are too few devices, or no CUDA plugin to compile with.
    """
    names, sizes = (tuple(axis) for axis in zip(*target.mesh, strict=True))
    if target.attached:
        try:
            devices = jax.devices(target.chip.platform)
        except (RuntimeError, AssertionError) as error:
            setting = f" JAX_PLATFORMS is {jax.config.jax_platforms!r}." if jax.config.jax_platforms else ""
            raise TargetError(
                f"target {target.name!r} needs a {target.chip.platform} device here, and JAX finds none: "
                f"{_first_line(error)}.{setting} "
                "Name a GPU instead (remat-kit targets lists them); it need not be attached."
            ) from error
        if len(devices) < target.num_devices:
            flag = f"XLA_FLAGS=--xla_force_host_platform_device_count={target.num_devices}"
            more = f"set {flag} before JAX starts, " * (target.chip.platform == "cpu")
            raise TargetError(
                f"the mesh {dict(target.mesh)} needs {target.num_devices} devices, {len(devices)} are attached. "
                f"Use a smaller mesh, {more}or name a GPU, of which there can be any number."
            )
        # As `topologies.make_mesh` does it: the same step must trace alike for a described target and here.
        kinds = (AxisType.Auto,) * len(names)
        return jax.make_mesh(sizes, names, axis_types=kinds, devices=devices[: target.num_devices])
    _check_toolchain(target)
    try:
        topology = _topology(target.xla_config(), target.num_devices)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        raise TargetError(
            f"cannot compile for {target.name!r} here: {_first_line(error)}. Compiling for a GPU that is not there "
            "needs JAX's CUDA plugin (Linux, x86-64): pip install 'remat-kit[compile]'. If it is installed, JAX had "
            "started before and dropped it for want of a GPU: import remat_kit first, or set JAX_PLATFORMS=cpu. "
            "Without it, use --target cpu: matmuls and saved bytes stay true, XLA's memory figures are the CPU's."
        ) from error
    return topologies.make_mesh(topology, sizes, names)


def _check_toolchain(target: Target) -> None:
    """Raises TargetError when ptxas or libdevice is missing: XLA would die of it, in some versions by a crash."""
    if "xla_gpu_cuda_data_dir" in os.environ.get("XLA_FLAGS", ""):
        return
    packages = [pathlib.Path(folder) for folder in site.getsitepackages() + sys.path if folder]
    roots = [package / "nvidia" / name for package in packages for name in ("cu13", "cuda_nvcc")]
    roots += [pathlib.Path(os.environ.get("CUDA_DIR", "/usr/local/cuda")), pathlib.Path("/usr/local/cuda")]
    missing = []
    if not any((root / "nvvm/libdevice/libdevice.10.bc").exists() for root in roots):
        missing.append("libdevice")
    if not any((root / "bin/ptxas").exists() for root in roots) and not shutil.which("ptxas"):
        missing.append("ptxas")
    if missing:
        raise TargetError(
            f"cannot compile for {target.name!r} here: {' and '.join(missing)} of the CUDA toolkit not found. "
            "pip install 'remat-kit[compile]' brings both; a toolkit elsewhere is named by "
            "XLA_FLAGS=--xla_gpu_cuda_data_dir=FOLDER."
        )


@functools.cache
def _topology(config: str, num_devices: int) -> Any:
    # Cached: two meshes over different device objects of one description do not mix in one program.
    return topologies.get_topology_desc(
        platform="cuda", topology_name="", target_config=config, topology=f"1x1x{num_devices}"
    )


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


Rewrite = Callable[[Any, Sequence[Any]], Sequence[Any]]
"""From the jaxpr of a function that is about to be differentiated, and its arguments, to its results."""

_rewriting = jax.make_user_context(None)
"""A part of the keys of JAX's caches. Without it, a jitted step that had been traced would not be traced again to be
rewritten, and one that was rewritten would stay so."""


class Differentiated(BaseException):
    """Stops a function that is about to differentiate something; see `losses_stopped`."""


@contextlib.contextmanager
def losses_stopped() -> Iterator[None]:
    """While it is open, `jax.grad`, `jax.vjp` and their kin raise Differentiated before they do anything."""

    def stop(traceable: Callable[..., Any]) -> Callable[..., Any]:
        raise Differentiated

    with _losses_replaced(stop, object()):
        yield


@contextlib.contextmanager
def losses_rewritten(rewrite: Rewrite, owner: Hashable) -> Iterator[None]:
    """While it is open, what `jax.grad`, `jax.vjp` and their kin differentiate is run by `rewrite` instead.

    A derivative inside of another is left alone. What jitted functions are traced to meanwhile is found again by the
    same `owner` alone, and then without `rewrite`.
    """
    inside = [False]

    def replaced(traceable: Callable[..., Any]) -> Callable[..., Any]:
        if inside[0]:
            return traceable

        @functools.wraps(traceable)
        def run(*arguments: Any) -> Any:
            leaves, structure = jax.tree.flatten(arguments)
            results: list[Any] = []

            def flat(*leaves: Any) -> list[Any]:
                found, shape = jax.tree.flatten(traceable(*jax.tree.unflatten(structure, leaves)))
                arrays = [isinstance(each, jax.Array) for each in found]
                others = [None if array else each for each, array in zip(found, arrays, strict=True)]
                results[:] = [shape, arrays, others]
                return [each for each, array in zip(found, arrays, strict=True) if array]

            inside[0] = True
            try:
                made = iter(rewrite(jax.make_jaxpr(flat)(*leaves), leaves))
            finally:
                inside[0] = False
            shape, arrays, others = results
            return jax.tree.unflatten(
                shape, [next(made) if array else other for array, other in zip(arrays, others, strict=True)]
            )

        return run

    with _losses_replaced(replaced, owner):
        yield


@contextlib.contextmanager
def _losses_replaced(replace: Callable[[Callable[..., Any]], Callable[..., Any]], owner: Hashable) -> Iterator[None]:
    """While it is open, another function is differentiated in reverse mode in the place of each.

    JAX calls the function once, below `jax.grad` and all its kin; there is no public place for that.
    """
    try:
        from jax._src.interpreters import ad as autodiff
    except ImportError as error:
        raise _moved("its derivatives", error) from error
    linearize = getattr(autodiff, "linearize", None)
    if linearize is None or "traceable" not in inspect.signature(linearize).parameters:
        raise _moved("its derivatives", "linearize")

    @functools.wraps(linearize)
    def replaced(traceable: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return linearize(replace(traceable) if kwargs.get("is_vjp") else traceable, *args, **kwargs)

    autodiff.linearize = replaced
    try:
        with _rewriting(owner):
            yield
    finally:
        autodiff.linearize = linearize


def _moved(what: str, error: object) -> RematKitError:
    return RematKitError(
        f"this JAX ({jax.__version__}) has moved {what}: {error}. Use a version of JAX that remat-kit is tested with."
    )


@contextlib.contextmanager
def cudnn_of(target: Target) -> Iterator[None]:
    """While it is open, JAX's question for cuDNN and compute capability is answered for a described GPU."""
    if target.attached:
        yield
        return
    try:
        from jax._src.cudnn import fused_attention_stablehlo as fused
    except ImportError as error:
        raise _moved("its fused attention", error) from error
    ours = target.compute_capability

    def at_least(capability: str) -> bool:
        return ours >= tuple(int(part) for part in capability.split("."))

    def exactly(capability: str) -> bool:
        return ours == tuple(int(part) for part in capability.split("."))

    answers = {
        "check_cudnn_version": lambda: _CUDNN_VERSION,
        "check_compute_capability": at_least,
        "is_cuda_compute_capability_equal": exactly,
    }
    asked = {name: getattr(fused, name) for name in answers if hasattr(fused, name)}
    try:
        for name in asked:
            setattr(fused, name, answers[name])
        yield
    finally:
        for name, function in asked.items():
            setattr(fused, name, function)
