"""Advice that is followed: the need falls by what was promised, as the compiler counts it."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from captured import H100, NO_DROPOUT, TINY_ON_GPU, compiled, gpt, sharded
from jax.sharding import PartitionSpec

from models import transformer
from remat_kit import CompiledStep, Record, Step, Workload, analyze
from remat_kit._explanation import Advice
from remat_kit._hlo.proto import parse

KEPT = 0.8
"""The share of a promise that has to be kept."""


def record_of(step: CompiledStep) -> Record:
    return analyze(step, Workload("advice:model"), "none")


def first_advice(record: Record) -> Advice:
    assert record.explanation is not None
    return record.explanation.advice[0]


def assert_kept(before: Record, after: Record, advice: Advice) -> None:
    assert (before.need_bytes or 0) - (after.need_bytes or 0) >= KEPT * advice.bytes


BIG_BATCH: dict[str, Any] = {"batch": 64, "seq": 128, "layers": 6}


def test_recompute_the_blocks():
    options: dict[str, Any] = NO_DROPOUT | BIG_BATCH | {"size": "tiny"}
    before, after = (
        record_of(compiled(transformer.gpt(policy, **options), "cpu", policy)) for policy in ("none", "full")
    )
    advice = first_advice(before)
    assert advice.kind == "recompute"
    assert "most of it blocks/" in advice.how
    assert_kept(before, after, advice)
    # What is left to recompute once they are is little.
    assert after.explanation is not None
    rest = sum(each.bytes for each in after.explanation.advice if each.kind == "recompute")
    assert rest < 0.1 * advice.bytes


@functools.cache
def mlp(donate: bool) -> CompiledStep:
    """Adam on a wide MLP with a small batch: the state is nearly all of it. For the CPU."""
    optimizer = optax.adam(1e-3)
    params = {f"layer_{i}": jax.ShapeDtypeStruct((512, 512), jnp.float32) for i in range(6)}

    def step(params: Any, state: Any, x: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            return jnp.square(functools.reduce(lambda x, w: jnp.tanh(x @ w), params.values(), x)).mean()

        updates, new = optimizer.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), new

    args = (params, jax.eval_shape(optimizer.init, params), jax.ShapeDtypeStruct((8, 512), jnp.float32))
    labels = {"params": 0, "opt_state": 1, "batch": 2}
    return compiled(Step(step, args, donate=(0, 1) if donate else (), labels=labels), "cpu")


def test_donate_the_state():
    before, after = record_of(mlp(donate=False)), record_of(mlp(donate=True))
    advice = first_advice(before)
    assert (advice.kind, advice.what) == ("donate", "optimizer state and parameters")
    # All of the state but for activations that had been in the memory of the results: 16 KiB each.
    assert 0 <= 3 * 6 * 512 * 512 * 4 + 4 - advice.bytes <= 7 * 8 * 512 * 4
    assert_kept(before, after, advice)
    assert after.explanation is not None
    assert "donate" not in [each.kind for each in after.explanation.advice]


@functools.cache
def language_model(chunks: int) -> CompiledStep:
    """Three layers and a vocabulary of 8,192 at 2,048 positions, with the loss in `chunks` parts. For the CPU."""
    width, vocabulary, positions = 64, 8192, 2048

    def step(params: Any, x: jax.Array, targets: jax.Array) -> Any:
        def head(matrix: jax.Array, x: jax.Array, targets: jax.Array) -> jax.Array:
            return optax.softmax_cross_entropy_with_integer_labels(x @ matrix, targets).sum()

        def loss(params: Any) -> jax.Array:
            h = x
            for layer in range(3):
                with jax.named_scope(f"block_{layer}"):
                    h = h + jnp.tanh(h @ params[f"block_{layer}"])
            if chunks == 1:
                return head(params["head"], h, targets)
            parts = h.reshape(chunks, -1, width), targets.reshape(chunks, -1)

            def add(total: jax.Array, part: Any) -> tuple[jax.Array, None]:
                return total + jax.checkpoint(head)(params["head"], *part), None

            return jax.lax.scan(add, jnp.zeros(()), parts)[0]

        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))

    params = {f"block_{layer}": jax.ShapeDtypeStruct((width, width), jnp.float32) for layer in range(3)}
    params["head"] = jax.ShapeDtypeStruct((width, vocabulary), jnp.float32)
    args = (
        params,
        jax.ShapeDtypeStruct((positions, width), jnp.float32),
        jax.ShapeDtypeStruct((positions,), jnp.int32),
    )
    return compiled(Step(step, args, donate=(0,), labels={"params": 0, "batch": 1}), "cpu")


def test_chunk_the_loss_head():
    before, after = record_of(language_model(1)), record_of(language_model(8))
    advice = first_advice(before)
    assert advice.kind == "chunk the loss head"
    assert before.categories["loss head"] > 0.8 * (before.live_peak_bytes or 0)
    assert_kept(before, after, advice)


@pytest.mark.slow
def test_shard_the_state():
    options: dict[str, Any] = TINY_ON_GPU | {"width": 256, "vocabulary": 2048, "batch": 8}
    before = record_of(compiled(transformer.gpt("full", **options), H100, "full"))

    def place(path: str, shape: tuple[int, ...]) -> PartitionSpec:
        divisible = [axis for axis, size in enumerate(shape) if size % 8 == 0 and size >= 256]
        return PartitionSpec(*[None] * divisible[-1], "d") if path.startswith("[0]") and divisible else PartitionSpec()

    after = record_of(sharded(transformer.gpt("full", **options), "d=8", place))
    advice = first_advice(before)
    assert advice.kind == "shard"
    assert_kept(before, after, advice)


@pytest.mark.slow
def test_offload_an_activation():
    before, after = record_of(gpt("minimal", **BIG_BATCH)), record_of(gpt("minimal_offloaded", **BIG_BATCH))
    assert before.explanation is not None
    offloads = [each for each in before.explanation.advice if each.kind == "offload"]
    # One tensor of those that the policy moves: it moves the others as well.
    assert offloads
    assert_kept(before, after, offloads[0])


def test_nothing_is_advised_without_a_heap_trace():
    step = mlp(donate=False)
    assert first_advice(record_of(step))
    proto = parse(step.hlo_proto)
    del proto.buffer_assignment.heap_simulator_traces[:]
    record = record_of(dataclasses.replace(step, hlo_proto=proto.SerializeToString()))
    assert (record.live_peak_bytes, record.explanation) == (None, None)


def test_nothing_is_advised_where_nothing_helps():
    step = Step(lambda x: x * 2, (jax.ShapeDtypeStruct((1024,), jnp.float32),), donate=(0,))
    record = record_of(compiled(step, "cpu"))
    assert record.explanation is not None
    assert (record.live_peak_bytes, record.explanation.advice) == (4096, ())


def test_wrap_the_layers_where_no_block_repeats():
    """Layers in one function without names: nothing tells them apart, and half of what they keep is promised."""

    def step(wrap: Any) -> Step:
        def layer(x: Any, w: Any) -> Any:
            return jnp.sin(jnp.tanh(x @ w))

        def fn(ws: Any, x: Any) -> Any:
            def loss(ws: Any) -> Any:
                return jnp.square(functools.reduce(wrap(layer), ws, x)).mean()

            return jax.tree.map(lambda w, g: w - 0.1 * g, ws, jax.grad(loss)(ws))

        ws = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 12
        args = (ws, jax.ShapeDtypeStruct((4096, 64), jnp.float32))
        return Step(fn, args, donate=(0,), labels={"params": 0, "batch": 1})

    before, after = (record_of(compiled(step(wrap), "cpu")) for wrap in (lambda f: f, jax.checkpoint))
    advice = first_advice(before)
    assert (advice.kind, advice.what) == ("recompute", "the layers")
    assert "no block repeats" in advice.how
    assert_kept(before, after, advice)
    assert after.explanation is not None
    assert "recompute" not in [each.kind for each in after.explanation.advice]
