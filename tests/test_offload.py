"""Offloading to pinned host memory: which bytes leave the device, to the byte, and backends that cannot."""

import dataclasses
import functools
from typing import Any

import hlo_samples
import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

from remat_kit import Step, TargetError, compile_step, get_policy, get_target, remat, trace
from remat_kit._hlo.heap import replay
from remat_kit._hlo.module import Module
from remat_kit._hlo.proto import parse
from remat_kit._hlo.roofline import predict
from remat_kit._overlap import Overlap, overlap
from remat_kit._policy_check import check_host_memory

LAYERS, BATCH, WIDTH, HIDDEN = 4, 256, 128, 512
INPUT, UP = BATCH * WIDTH * 4, BATCH * HIDDEN * 4
H100 = "h100-sxm-80gb"


def block(x: Any, w: Any) -> Any:
    """x [B, W] through w[0] [W, H] and w[1] [H, W]."""
    x = checkpoint_name(x, "input")
    hidden = jax.nn.gelu(checkpoint_name(x @ w[0], "up"))
    return x + hidden @ w[1]


def step(policy: str, stack: str) -> Step:
    """A training step, the first layer of which takes what an embedding makes."""
    wrapped = remat(policy)(block)

    def loss(params: Any, x: Any) -> Any:
        x = x @ params[2]
        if stack == "scan":
            x, _ = jax.lax.scan(lambda x, w: (wrapped(x, w), None), x, params[:2])
        else:
            for number in range(LAYERS):
                x = wrapped(x, (params[0][number], params[1][number]))
        return jnp.sum(x * x)

    def update(params: Any, x: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value

    def init(seed: int) -> Any:
        keys = jax.random.split(jax.random.key(seed), 4)
        shapes = (LAYERS, WIDTH, HIDDEN), (LAYERS, HIDDEN, WIDTH), (WIDTH, WIDTH), (BATCH, WIDTH)
        *params, x = (jax.random.normal(key, shape) / 16 for key, shape in zip(keys, shapes, strict=True))
        return tuple(params), x

    args = jax.eval_shape(init, 0)
    labels = {"params": 0, "batch": 1}
    return Step(update, args, (0,), labels=labels, init=init, loss_and_grads=jax.value_and_grad(loss))


@functools.cache
def compiled(policy: str, stack: str) -> tuple[Any, Any, Overlap]:
    """The step traced and compiled for an H100: (the compiled step, its heap, its copies)."""
    hlo_samples.mesh()
    made = compile_step(trace(step(policy, stack), get_target(H100), get_policy(policy)))
    proto = parse(made.hlo_proto)
    module = Module.from_proto(proto)
    return made, replay(proto), overlap(module, predict(module, made.traced.target.chip))


PAIRS = [("full", "offload(input)", INPUT), ("save(up)", "offload(up)", UP)]


@pytest.mark.parametrize(("kept", "moved", "size"), PAIRS)
@pytest.mark.parametrize("stack", ["scan", "unroll"])
def test_on_the_jaxpr_the_bytes_that_a_policy_names_change_places(kept, moved, size, stack):
    before, after = (trace(step(policy, stack), get_target("cpu")).saved for policy in (kept, moved))
    assert before.host_bytes == 0
    assert after.host_bytes == LAYERS * size  # of a scan, its carry; unrolled, each layer's input
    assert before.device_bytes - after.device_bytes == LAYERS * size


@pytest.mark.slow
@pytest.mark.parametrize(("kept", "moved", "size"), PAIRS)
def test_in_a_compiled_scan_they_do_to_the_byte(kept, moved, size):
    before, after = compiled(kept, "scan"), compiled(moved, "scan")
    assert before[0].memory.host_temp == before[1].host_peak_bytes == 0
    assert after[0].memory.host_temp == after[1].host_peak_bytes == LAYERS * size
    # Constants are numbers of a few bytes that a loop with copies has more of; they are no part of what is kept.
    peaks = [heap.peak_bytes - heap.throughout.get("constant", 0) for _, heap, _ in (before, after)]
    assert peaks[0] - peaks[1] == LAYERS * size
    # Where the heap is packed, buffers begin at multiples of 128 bytes and leave gaps.
    packed = before[0].memory.temp - after[0].memory.temp
    assert abs(packed - LAYERS * size) <= 1024
    assert not before[2].trips
    (trip,) = after[2].trips
    assert (trip.bytes, trip.count, trip.late) == (size, LAYERS, False)


@pytest.mark.slow
@pytest.mark.parametrize(("kept", "moved", "size"), PAIRS)
def test_in_compiled_unrolled_layers_what_goes_late_is_not_gone(kept, moved, size):
    _, before, none = compiled(kept, "unroll")
    _, after, copies = compiled(moved, "unroll")
    assert not none.trips
    assert [(trip.bytes, trip.count) for trip in copies.trips] == [(size, 1)] * LAYERS
    late = sum(trip.late for trip in copies.trips)
    # XLA makes the copies when backward is about to take the values: they leave no room before.
    assert late >= LAYERS - 1
    assert after.host_peak_bytes < LAYERS * size
    assert before.peak_bytes - after.peak_bytes <= (LAYERS - late) * size
    said = copies.advice()[0]
    assert f"({late} values) leave for the host only when backward has begun" in said
    assert "Scan the layers" in said


@pytest.mark.parametrize("stack", ["scan", "unroll"])
@pytest.mark.parametrize("moved", [moved for _, moved, _ in PAIRS])
def test_gradients_stay_those_of_keeping_everything(assert_same_tree, moved, stack):
    plain, offloaded = step("none", stack), step(moved, stack)
    assert plain.init is not None
    args = plain.init(0)
    expected = jax.jit(plain.loss_and_grads)(*args)
    assert_same_tree(jax.jit(offloaded.loss_and_grads)(*args), expected, atol=1e-5)


def test_on_the_cpu_a_warning_says_that_nothing_is_lowered():
    (warning,) = trace(step("offload(up)", "scan"), get_target("cpu"), get_policy("offload(up)")).warnings
    assert "on the CPU that is the same memory" in warning
    assert "Name a GPU as --target" in warning
    assert not trace(step("save(up)", "scan"), get_target("cpu")).warnings


def test_a_device_without_pinned_memory_is_refused(monkeypatch: pytest.MonkeyPatch):
    class Memory:
        kind = "device"

    class Device:
        device_kind, platform = "Some Accelerator", "cuda"

        def addressable_memories(self):
            return [Memory()]

    class Mesh:
        devices = type("Devices", (), {"flat": [Device()]})

    target = dataclasses.replace(get_target(H100), attached=True)
    message = (
        r"offloads values to pinned host memory, and Some Accelerator \(cuda\) has none for JAX: its memories are "
        r"device\. Use a policy that keeps or recomputes these values, e\.g\. save"
    )
    with pytest.raises(TargetError, match=message):
        check_host_memory(target, Mesh())  # pyright: ignore[reportArgumentType]
