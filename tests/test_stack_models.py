"""Policies for stacks on the reference models: NNX and Linen, scanned and unrolled, with dropout."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract import build, initial_values, reference, run_equations, traced, worst_error
from flax import nnx

from models.transformer import gpt
from remat_kit import get_policy, get_target, remat_scan, scan_stack, trace, unroll_stack
from remat_kit._measure import tolerance_of
from remat_kit._saved import saved_values

# Two layers of the tiny GPT in float32: activations [2, 32, 64].
BORDER = 2 * 32 * 64 * 4
VARIANTS = ("gpt-naive-scan", "gpt-naive-unroll", "linen-scan", "linen-unroll")


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("policy", ["segments(1)", "segments(2,selective_attention)", "first(1)"])
def test_loss_and_gradients_with_dropout(policy, variant):
    # Other masks in backward than in forward, or than without a checkpoint, would be seen in every gradient.
    got = run_equations(traced(policy, variant).traced.jaxpr, initial_values("none", variant))
    assert worst_error(jax.device_get(got), reference(variant)) <= tolerance_of("float32") / 10
    assert traced(policy, variant).warnings == ()


@pytest.mark.parametrize("variant", VARIANTS)
def test_parameters_are_where_they_were(variant):
    shapes = [
        jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), build(policy, variant).args[0].params)
        for policy in ("none", "segments(2)")
    ]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("stack", ["scan", "unroll"])
def test_a_segment_is_what_a_report_calls_a_block(stack):
    step = gpt("segments(2)", size="tiny", layers=4, stack=stack, compute_dtype="float32", optimizer="sgd")
    assert trace(step, get_target("cpu"), get_policy("segments(2)")).saved.device_bytes_per_block == BORDER


# ---- small modules of one's own


class Block(nnx.Module):
    """A dense layer with dropout, whose key is a state of the module's own, and a count of its calls."""

    def __init__(self, rngs):
        self.dense = nnx.Linear(8, 8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, deterministic=False, rngs=rngs)
        self.calls = nnx.BatchStat(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.calls[...] = self.calls[...] + 1
        return x + self.dropout(jnp.tanh(self.dense(x)))


@pytest.mark.parametrize("policy", ["segments(2)", "segments(2,full)", "first(3)", "segments(auto)"])
def test_state_of_modules_in_a_list(policy):
    def run(policy):
        blocks = nnx.List(Block(nnx.Rngs(i)) for i in range(5))

        def loss(blocks, x):
            x, _ = unroll_stack(policy, lambda x, block: (block(x), None), x, list(blocks))
            return (x * x).sum()

        value, grads = nnx.value_and_grad(loss)(blocks, jnp.ones((2, 8)))
        return value, jax.tree.leaves(nnx.to_pure_dict(grads)), jax.tree.leaves(nnx.to_pure_dict(nnx.state(blocks)))

    got, expected = run(policy), run("none")
    np.testing.assert_allclose(got[0], expected[0], rtol=1e-6)
    for ours, theirs in zip(got[1], expected[1], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(got[2], expected[2], strict=True):  # each block was called once, its key has moved on once
        assert bool(jnp.all(ours == theirs))


def test_nnx_scan_runs_in_segments():
    blocks = nnx.vmap(lambda key: nnx.Linear(8, 8, rngs=nnx.Rngs(key)))(jax.random.split(jax.random.key(0), 6))
    definition, state = nnx.split(blocks)
    run = nnx.scan(lambda x, block: jnp.tanh(block(x)), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)

    def loss(policy):
        stack = remat_scan(policy)(run) if policy else run
        return lambda state, x: stack(2 * x, nnx.merge(definition, state)).sum()

    x = jnp.ones((4, 8))
    jaxpr = jax.make_jaxpr(jax.grad(loss("segments(3)")))(state, x)
    assert saved_values(jaxpr).device_bytes == 3 * 4 * 8 * 4
    found, expected = (jax.grad(loss(policy))(state, x) for policy in ("segments(3)", None))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected)


class Dense(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        x = nn.Dropout(0.5, deterministic=False)(nn.Dense(8)(x))
        return x + jnp.tanh(x), x.sum()


class Scanned(nn.Module):
    policy: str

    @nn.compact
    def __call__(self, x):
        stacked = nn.scan(Dense, {"params": 0}, split_rngs={"params": True, "dropout": True}, length=6)
        return remat_scan(self.policy)(stacked())(x, None)


class ByHand(Scanned):
    @nn.compact
    def __call__(self, x):
        stacked = nn.scan(Dense, {"params": 0}, split_rngs={"params": True, "dropout": True}, length=6)
        return stacked()(x, None)


@pytest.mark.parametrize("policy", ["segments(3)", "segments(4,full)", "first(2)"])
def test_a_scanned_linen_module_keeps_parameters_and_masks(policy):
    keys, x = {"params": jax.random.key(0), "dropout": jax.random.key(1)}, jnp.ones((2, 8))
    variables = ByHand("").init(keys, x)
    jax.tree.map(np.testing.assert_array_equal, Scanned(policy).init(keys, x), variables)

    def results(module):
        def loss(variables):
            y, sums = module.apply(variables, x, rngs={"dropout": keys["dropout"]})
            return (y * y).sum() + (sums * jnp.arange(6)).sum()

        return jax.value_and_grad(loss)(variables)

    got, expected = results(Scanned(policy)), results(ByHand(""))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, expected)


def test_scan_stack_in_a_linen_method_over_its_own_parameters():
    class Stack(nn.Module):
        @nn.compact
        def __call__(self, x):
            ws = self.param("ws", nn.initializers.lecun_normal(), (6, 8, 8))
            return scan_stack("segments(2)", lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0]

    x = jnp.ones((2, 8))
    variables = Stack().init(jax.random.key(0), x)
    assert jax.grad(lambda v: jnp.sum(jnp.asarray(Stack().apply(v, x))))(variables)["params"]["ws"].shape == (6, 8, 8)
