"""Advice for models of many kinds that is followed, and advice that would make no sense."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from attributed import BATCH, cross_entropy, spec, training, unrolled, unrolled_loss, weights
from captured import compiled
from test_advice import assert_kept, first_advice, record_of

from models import transformer
from remat_kit import Record, Step
from remat_kit._explanation import Floor

# Promises are made of the program alone: once is enough, with the newest JAX.
pytestmark = pytest.mark.slow

MATRICES = ("q", "k", "v", "o")


def advice_of(record: Record, kind: str) -> int:
    """Bytes that the advice of a kind promises; 0 without it."""
    assert record.explanation is not None
    return sum(each.bytes for each in record.explanation.advice if each.kind == kind)


@functools.cache
def deep_mlp(scan: bool, recompute: bool) -> Record:
    """Twelve gelu layers with a small model and many rows."""

    def layer(h: jax.Array, p: Any) -> jax.Array:
        return h + jax.nn.gelu(h @ p["up"]) @ p["down"]

    def loss(p: Any, x: jax.Array) -> jax.Array:
        f = jax.checkpoint(layer) if recompute else layer
        if scan:
            x, _ = jax.lax.scan(lambda h, p: (f(h, p), None), x, p)
        else:
            for number, each in enumerate(p):
                with jax.named_scope(f"layer_{number}"):
                    x = f(x, each)
        return jnp.square(x).mean()

    def one(*first: int) -> Any:
        return {"up": spec(*first, 32, 128), "down": spec(*first, 128, 32)}

    step = training(loss, one(12) if scan else [one()] * 12, (spec(2048, 32),))
    return record_of(compiled(step, "cpu"))


@functools.cache
def attention_model(length: int, recompute: bool) -> Record:
    """Four layers of naive attention over [B, length, 64] with a head over the mean: a ViT, or one long sequence."""

    def norm(h: jax.Array) -> jax.Array:
        return (h - h.mean(-1, keepdims=True)) * jax.lax.rsqrt(h.var(-1, keepdims=True) + 1e-5)

    def attend(h: jax.Array, p: Any) -> jax.Array:
        q, k, v = (jnp.stack(jnp.split(norm(h) @ p[name], 4, -1), 1) for name in "qkv")
        mixed = jax.nn.softmax(q @ k.swapaxes(-1, -2) / 4) @ v
        return h + jnp.concatenate(jnp.unstack(mixed, axis=1), -1) @ p["o"]

    def block(h: jax.Array, p: Any) -> jax.Array:
        h = attend(h, p)
        return h + jax.nn.gelu(norm(h) @ p["up"]) @ p["down"]

    def loss(p: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        h = x @ p["patch"]
        for number, each in enumerate(p["blocks"]):
            with jax.named_scope(f"block_{number}"):
                h = (jax.checkpoint(block) if recompute else block)(h, each)
        return cross_entropy(h.mean(1) @ p["head"], y)

    one = {name: spec(64, 64) for name in MATRICES} | {"up": spec(64, 256), "down": spec(256, 64)}
    params = {"patch": spec(48, 64), "blocks": [one] * 4, "head": spec(64, 100)}
    rows = 1024 // length
    step = training(loss, params, (spec(rows, length, 48), spec(rows, dtype=jnp.int32)))
    return record_of(compiled(step, "cpu"))


@functools.cache
def several_heads(chunks: int) -> Record:
    """Three blocks and three large classifiers beside each other."""

    def head(h: jax.Array, matrix: jax.Array, y: jax.Array) -> jax.Array:
        return cross_entropy(h @ matrix, y)

    def loss(p: Any, x: jax.Array, ys: jax.Array) -> jax.Array:
        for number in range(3):
            with jax.named_scope(f"block_{number}"):
                x = x + jnp.tanh(x @ p["blocks"][number])
        total = jnp.zeros(())
        for number in range(3):
            with jax.named_scope(f"out_{number}"):
                matrix, y = p["out"][number], ys[number]
                if chunks == 1:
                    total += head(x, matrix, y)
                    continue
                parts = (x.reshape(chunks, -1, 64), y.reshape(chunks, -1))
                add = functools.partial(_add, jax.checkpoint(head), matrix)
                total += jax.lax.scan(add, jnp.zeros(()), parts)[0]
        return total

    params = {"blocks": [spec(64, 64)] * 3, "out": [spec(64, 2048)] * 3}
    step = training(loss, params, (spec(2048, 64), spec(3, 2048, dtype=jnp.int32)), optimizer=optax.sgd(0.1))
    return record_of(compiled(step, "cpu"))


def _add(head: Any, matrix: jax.Array, total: jax.Array, part: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
    return total + head(part[0], matrix, part[1]), None


@functools.cache
def state_of(name: str, donate: bool) -> Record:
    """Wide layers, few rows, and an optimizer."""
    clip = optax.clip_by_global_norm(1.0)
    optimizer = {
        "sgd": optax.sgd(0.1),
        "clipped sgd": optax.chain(clip, optax.sgd(0.1)),
        "clipped momentum": optax.chain(clip, optax.sgd(0.1, momentum=0.9)),
        "clipped adam": optax.chain(clip, optax.adam(1e-3)),
    }[name]

    def loss(p: Any, x: jax.Array) -> jax.Array:
        for number, w in enumerate(p):
            with jax.named_scope(f"layer_{number}"):
                x = jnp.tanh(x @ w)
        return jnp.square(x).mean()

    step = training(loss, [spec(384, 384)] * 6, (spec(16, 384),), optimizer, donate=(0, 1) if donate else ())
    return record_of(compiled(step, "cpu"))


@pytest.mark.parametrize("scan", [False, True], ids=["unrolled", "scanned"])
def test_recompute_a_deep_mlp(scan: bool):
    before, after = deep_mlp(scan, recompute=False), deep_mlp(scan, recompute=True)
    advice = first_advice(before)
    assert advice.kind == "recompute"
    assert_kept(before, after, advice)
    # It is recomputed already.
    assert advice_of(after, "recompute") < 0.1 * advice.bytes


@pytest.mark.parametrize("length", [64, 512], ids=["vision", "long"])
def test_recompute_attention(length: int):
    before, after = attention_model(length, recompute=False), attention_model(length, recompute=True)
    advice = first_advice(before)
    assert advice.kind == "recompute"
    assert_kept(before, after, advice)
    assert advice_of(after, "recompute") < 0.1 * advice.bytes


def test_chunk_several_heads():
    before, after = several_heads(1), several_heads(8)
    advice = first_advice(before)
    assert advice.kind == "chunk the loss head"
    assert_kept(before, after, advice)
    # It is in chunks already.
    assert advice_of(after, "chunk the loss head") == 0


@pytest.mark.parametrize("name", ["sgd", "clipped sgd", "clipped momentum", "clipped adam"])
def test_donate_where_gradients_are_in_the_memory_of_the_results(name: str):
    # Clipping by the norm of all gradients needs them all at once, and with donation in memory of their own.
    before, after = state_of(name, donate=False), state_of(name, donate=True)
    assert before.explanation is not None
    donate = next(each for each in before.explanation.advice if each.kind == "donate")
    assert_kept(before, after, donate)
    assert advice_of(after, "donate") == 0


def test_nothing_that_cannot_be():
    # Gradients have the types of the parameters, which the caller still needs; logits may have that of the batch.
    only_gradients = Step(jax.grad(unrolled_loss), (weights(), *BATCH), labels={"params": 0, "batch": 1})
    assert advice_of(record_of(compiled(only_gradients, "cpu")), "donate") == 0
    params = weights() | {"head": spec(24, 20)}
    evaluated = record_of(compiled(Step(unrolled, (params, BATCH[0]), labels={"params": 0, "batch": 1}), "cpu"))
    assert {advice_of(evaluated, kind) for kind in ("donate", "recompute", "offload")} == {0}
    # The CPU has no other memory to offload to.
    assert [advice_of(deep_mlp(scan, recompute=False), "offload") for scan in (False, True)] == [0, 0]


@pytest.mark.parametrize("stack", ["scan", "unroll"])
def test_no_policy_goes_below_the_floor_of_another(stack: str):
    options: dict[str, Any] = {"size": "tiny", "batch": 64, "seq": 128, "dropout": 0.0, "attention_dropout": 0.0}
    policies = ("none", "full", "dots_saveable", "selective_attention")
    records = [record_of(compiled(transformer.gpt(each, stack=stack, **options), "cpu", each)) for each in policies]
    floors = [floor_of(each) for each in records]
    assert max(each.bytes for each in floors) <= min(each.live_peak_bytes or 0 for each in records)
    # What the arguments are does not depend on it at all.
    assert len({each.argument_bytes for each in floors}) == 1


def floor_of(record: Record) -> Floor:
    """The floor of a record that has one."""
    assert record.explanation is not None
    assert record.explanation.floor is not None
    return record.explanation.floor
