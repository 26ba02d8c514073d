"""Run a compiled step on the attached device: its time, its memory, and whether its gradients are right."""

import math
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from remat_kit._compile import CompiledStep
from remat_kit._errors import MeasurementError
from remat_kit._jaxpr import least_precise
from remat_kit._record import MeasuredTime
from remat_kit._sharding import mesh_of, place
from remat_kit._step import Step, replacements
from remat_kit._trace import TracedStep, device_mesh


def real_args(step: Step, seed: int = 0) -> tuple[Any, ...]:
    """Real arguments of `step`: its own where they are arrays, else what its `init` makes of `seed`.

    Raises MeasurementError when the arguments are abstract and there is no `init`.
    """
    if step.init is not None:
        return step.init(seed)
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(step.args)):
        raise MeasurementError(
            "this step has abstract arguments and no init, so there is nothing to run it on. "
            "Give Step(init=...), a function of a seed that returns real arguments, or measure without --measure."
        )
    return jax.tree.map(jnp.copy, step.args)


def measure_interleaved(
    steps: Mapping[str, CompiledStep], args: tuple[Any, ...], *, rounds: int = 20, seconds: float = 60.0
) -> Iterator[tuple[str, MeasuredTime]]:
    """For each name of `steps`, the time of one step, when all of them have been measured; see `take_turns`."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for name, elapsed in take_turns(steps, args, rounds=rounds, seconds=seconds):
        if elapsed is not None:
            times[name].append(elapsed)
    for name, compiled in steps.items():
        yield name, summarize(times[name], device_name(compiled))


def take_turns(
    steps: Mapping[str, CompiledStep], args: tuple[Any, ...], *, rounds: int, seconds: float
) -> Iterator[tuple[str, float | None]]:
    """(name, None) before each call of a step, and (name, seconds) after each one that counts.

    One call each in a round, in a random order every round, so that whatever slows the machine for a while slows all
    of them, and none has always the same one before it. Two warm-up calls each do not count. It stops after `rounds`
    rounds, or after `seconds` once 5 rounds are done. `args` are used up: a step's donated arguments are replaced by
    its outputs of the same shapes, so one state serves all steps. On a mesh they are put where the steps want them.
    """
    names = list(steps)
    args = place(args, steps[names[0]].traced.args)
    start, order = time.perf_counter(), random.Random(0)
    for turn in range(-2, rounds):
        order.shuffle(names)
        for name in names:
            yield name, None
            elapsed, args = run_once(steps[name], args)
            if turn >= 0:
                yield name, elapsed
        if turn == -1:
            start = time.perf_counter()
        if turn >= 4 and time.perf_counter() - start > seconds:
            break


def summarize(seconds: Sequence[float], device: str) -> MeasuredTime:
    """Median, 10th and 90th percentile of measured times."""
    p10, median, p90 = np.percentile(seconds, [10, 50, 90])
    return MeasuredTime(float(median), float(p10), float(p90), device, len(seconds))


def device_name(compiled: CompiledStep) -> str:
    """What the measured device calls itself."""
    return device_mesh(compiled.traced.target).devices.flat[0].device_kind


def run_once(compiled: CompiledStep, args: tuple[Any, ...]) -> tuple[float, tuple[Any, ...]]:
    """Seconds of one call, and the arguments for the next one."""
    jax.block_until_ready(args)
    start = time.perf_counter()
    outputs = jax.block_until_ready(compiled.executable(*args))
    return time.perf_counter() - start, _next_args(compiled.traced.step, args, outputs)


def check_can_repeat(traced: TracedStep) -> None:
    """Raises MeasurementError when the step gives nothing back for an argument that it donates."""
    _next_args(traced.step, traced.args, traced.traced.out_info)


def _next_args(step: Step, args: tuple[Any, ...], outputs: Any) -> tuple[Any, ...]:
    """`args` with each donated one, which is gone now, replaced by an output of the same structure, each used once."""
    leaves, found = jax.tree.leaves(outputs), replacements(step, outputs)
    fresh = list(args)
    for position in step.donate:
        if position not in found:
            raise MeasurementError(
                f"the step donates argument {position} and returns nothing of its shape, so it cannot run twice. "
                "Return the new state as one output, or leave the argument out of Step.donate to measure it."
            )
        structure = jax.tree.structure(args[position])
        first = found[position]
        fresh[position] = jax.tree.unflatten(structure, leaves[first : first + structure.num_leaves])
    return tuple(fresh)


def allocator_peak(compiled: CompiledStep, args: tuple[Any, ...]) -> int | None:
    """The most bytes that the device's allocator had in use during one call, `args` included.

    None where the device does not count, or where something before the call had more in use: the allocator keeps
    one highest mark since the process began. So call it in a process of its own.
    """
    device = device_mesh(compiled.traced.target).devices.flat[0]
    args = jax.block_until_ready(place(args, compiled.traced.args))
    before = (device.memory_stats() or {}).get("peak_bytes_in_use")
    jax.block_until_ready(compiled.executable(*args))
    after = (device.memory_stats() or {}).get("peak_bytes_in_use")
    return int(after) if before is not None and after is not None and after > before else None


@dataclass(frozen=True)
class GradientCheck:
    """How far loss and gradients are from those of policy `none`, as a share of their norm."""

    loss_error: float
    worst_leaf: str
    worst_error: float
    tolerance: float


def tolerance_of(precision: str) -> float:
    """The relative difference that recomputation may make in arithmetic of `precision`: eps^(2/3).

    XLA fuses a recomputed value otherwise than the saved one, so some results round differently. One rounding
    is eps; the sum of many stays below the square root of eps. bfloat16 0.039, float16 0.0098, float32
    2.4e-5, float64 3.7e-11.
    """
    return float(jnp.finfo(precision).eps) ** (2 / 3)


def loss_and_gradients(traced: TracedStep, seed: int = 0) -> Any:
    """(loss, gradients) of `traced` on the arguments that `seed` gives, as NumPy arrays.

    Raises MeasurementError when the step does not say how to get them: its outputs are no substitute, since an
    optimizer like Adam hides the size of a gradient.
    """
    if traced.step.loss_and_grads is None:
        raise MeasurementError(
            "this step has no loss_and_grads, so its gradients cannot be compared with policy none. "
            "Give Step(loss_and_grads=...), a function of the step's arguments that returns (loss, gradients)."
        )
    args = place(real_args(traced.step, seed), traced.args)
    with mesh_of(device_mesh(traced.target)):
        return jax.device_get(jax.jit(traced.step.loss_and_grads)(*args))


def check_gradients(traced: TracedStep, reference: TracedStep, seed: int = 0, *, expected: Any = None) -> GradientCheck:
    """The difference between a step's loss and gradients and the reference's on the same inputs.

    `expected` is what `loss_and_gradients` gave for the reference, if it is known already. Raises MeasurementError
    when the difference is above what the precision of the steps explains, or not finite.
    """
    precision = least_precise(traced.precision, reference.precision)
    tolerance = tolerance_of(precision)
    wanted = loss_and_gradients(reference, seed) if expected is None else expected
    got = loss_and_gradients(traced, seed)
    if jax.tree.structure(got) != jax.tree.structure(wanted):
        raise MeasurementError(
            "the gradients have another structure than under policy none: "
            f"{jax.tree.structure(got)} against {jax.tree.structure(wanted)}. A policy must not change the parameters."
        )
    leaves = jax.tree_util.tree_leaves_with_path(wanted)
    total = math.sqrt(sum(_norm(leaf) ** 2 for _, leaf in leaves[1:]))
    errors = {}
    for (path, correct), actual in zip(leaves, jax.tree.leaves(got), strict=True):
        # A gradient that is zero but for rounding (a key's bias under softmax) has no scale of its own.
        scale = _norm(correct) + (0.01 * total if path != leaves[0][0] else 0.0)
        errors[jax.tree_util.keystr(path)] = _norm(_host(actual) - _host(correct)) / max(scale, 1e-30)
    worst = max(errors, key=lambda path: errors[path] if math.isfinite(errors[path]) else math.inf)
    check = GradientCheck(next(iter(errors.values())), worst, errors[worst], tolerance)
    if not check.worst_error <= tolerance:
        raise MeasurementError(
            f"{worst or 'the loss'} differs from policy none by {check.worst_error:.2g} of its norm, and "
            f"{precision} explains at most {tolerance:.2g}: the gradients are wrong. "
            "Report it to JAX with this policy; do not train with it."
        )
    return check


def _host(leaf: Any) -> np.ndarray:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf).astype(np.float64)


def _norm(leaf: Any) -> float:
    return float(np.linalg.norm(_host(leaf).ravel()))
