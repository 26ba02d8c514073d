"""Ways in which rematerialization goes wrong for real users, and that they do not go wrong here."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from remat_kit import remat
from remat_kit._jaxpr import count_flops, count_work
from remat_kit._saved import saved_values

KEY = jax.random.key(0)
X = jnp.ones((4, 8))

WIDTH, LAYERS, BATCH = 256, 8, 1024
STACK = (
    jax.ShapeDtypeStruct((LAYERS, WIDTH, 4 * WIDTH), jnp.float32),
    jax.ShapeDtypeStruct((LAYERS, 4 * WIDTH, WIDTH), jnp.float32),
)
INPUT = jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)
MATMUL = 2 * BATCH * WIDTH * 4 * WIDTH


def mlp(x, w):
    return x + checkpoint_name(jax.nn.gelu(checkpoint_name(x @ w[0], "up")) @ w[1], "down"), None


def scanned(policy):
    layer = remat(policy)(mlp)
    return jax.grad(lambda ws, x: jax.lax.scan(layer, x, ws)[0].sum())


def unrolled(policy):
    layer = remat(policy)(mlp)

    def loss(ws, x):
        for i in range(LAYERS):
            x, _ = layer(x, jax.tree.map(lambda w, i=i: w[i], ws))
        return x.sum()

    return jax.grad(loss)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        return jnp.tanh(nn.Dropout(0.5, deterministic=not train)(nn.Dense(8)(x)))


class Model(nn.Module):
    block: type = Block
    keyword: bool = False

    @nn.compact
    def __call__(self, x, train):
        for _ in range(2):
            x = self.block()(x, train=train) if self.keyword else self.block()(x, train)
        return x.sum()


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("keyword", [True, False])
def test_r13_static_flags_of_linen_need_no_numbers(keyword, train):
    model = Model(remat("full")(Block), keyword)
    params = model.init(KEY, X, False)
    loss, grads = jax.value_and_grad(lambda p: model.apply(p, X, train, rngs={"dropout": KEY}))(params)
    expected = jax.value_and_grad(lambda p: Model(Block).apply(p, X, train, rngs={"dropout": KEY}))(params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), (loss, grads), expected)


def test_r14_static_flags_by_keyword():
    f = remat("full")(lambda x, flag=False: jnp.sin(x) if flag else x)
    np.testing.assert_array_equal(f(X, flag=True), jnp.sin(X))
    np.testing.assert_array_equal(f(X, flag=False), X)
    np.testing.assert_array_equal(f(X), X)
    np.testing.assert_allclose(jax.grad(lambda x: f(x, flag=True).sum())(X), jnp.cos(X), rtol=1e-6)


@pytest.mark.parametrize("policy", ["none", "full", "dots_saveable"])
def test_r15_module_names_and_initial_values_stay(policy):
    plain = Model(Block).init(KEY, X, False)["params"]
    wrapped = Model(remat(policy)(Block)).init(KEY, X, False)["params"]
    assert sorted(wrapped) == ["Block_0", "Block_1"]
    jax.tree.map(np.testing.assert_array_equal, wrapped, plain)
    # A checkpoint of the one loads into the other, and draws the same dropout.
    out = [Model(b).apply({"params": plain}, X, True, rngs={"dropout": KEY}) for b in (Block, remat(policy)(Block))]
    np.testing.assert_allclose(*out, rtol=1e-6)


def test_r16_bound_methods_of_nnx():
    class Bound(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(8, 8, rngs=rngs)

        def block(self, x):
            return jnp.tanh(self.linear(x))

    module = Bound(nnx.Rngs(0))
    np.testing.assert_allclose(remat("full")(module.block)(X), module.block(X), rtol=1e-6)
    grads = [nnx.grad(lambda m, w=wrap: w(m.block)(X).sum())(module) for wrap in (lambda f: f, remat("full"))]
    for one, other in zip(*map(jax.tree.leaves, grads), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


@pytest.mark.parametrize(
    ("policy", "recomputed"),
    [("none", 0), ("full", 1), ("save(up)", 0), ("save(down)", 1), ("dots_saveable", 0)],
)
def test_r18_a_scan_counts_all_its_layers(policy, recomputed, remat3):
    # Forward 2 matmuls a layer, backward 4 less the first layer's gradient of the input where it is not wanted: a scan
    # computes it for every layer, an unrolled stack not for the first. Of the two, "up" alone is ever needed again.
    scan, loop = (count_work(jax.make_jaxpr(f(policy))(STACK, INPUT)) for f in (scanned, unrolled))
    assert scan.flops == LAYERS * (6 + recomputed) * MATMUL
    assert loop.flops == scan.flops - MATMUL
    assert scan.recomputed_flops == loop.recomputed_flops == LAYERS * recomputed * MATMUL


def test_r18_flops_do_not_depend_on_how_the_scan_is_compiled():
    def loss(unroll):
        layer = remat("full")(mlp)
        return jax.grad(lambda ws, x: jax.lax.scan(layer, x, ws, unroll=unroll)[0].sum(), (0, 1))

    assert {count_flops(jax.make_jaxpr(loss(unroll))(STACK, INPUT)) for unroll in (1, 2, True)} == {LAYERS * 7 * MATMUL}


def test_r26_offloaded_bytes_are_on_the_host(remat3):
    carried, up = BATCH * WIDTH * 4, BATCH * 4 * WIDTH * 4
    offloaded = saved_values(jax.make_jaxpr(scanned("offload(up)"))(STACK, INPUT))
    assert (offloaded.device_bytes, offloaded.host_bytes) == (LAYERS * carried, LAYERS * up)
    kept = saved_values(jax.make_jaxpr(scanned("save(up)"))(STACK, INPUT))
    assert (kept.device_bytes, kept.host_bytes) == (LAYERS * (carried + up), 0)
