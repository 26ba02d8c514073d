"""The traced program of a wrapped function is that of a hand-written jax.checkpoint, and XLA does not undo it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from test_wrap_functions import Kind, W, X, block, full

from remat_kit import POLICIES, Region, remat, save
from remat_kit._jaxpr import count_work
from remat_kit._lower import lower

# ---- the program


@pytest.mark.parametrize("policy", [*POLICIES.values(), save("a")], ids=str)
def test_the_program_is_that_of_jax_checkpoint(policy, remat3, assert_same_program):
    def tagged(x, w):
        y = checkpoint_name(x @ w, "a")
        return jnp.tanh(jnp.tanh(y) @ w)

    by_hand = (
        tagged if policy.region is Region.NOTHING else jax.checkpoint(tagged, policy=lower(policy), prevent_cse=True)
    )
    programs = [
        jax.make_jaxpr(transform(lambda x, w, f=f: f(f(x, w), w).sum()))(X, W)
        for f in (remat(policy)(tagged), by_hand)
        for transform in (lambda loss: loss, lambda loss: jax.value_and_grad(loss, (0, 1)))
    ]
    assert_same_program(programs[0], programs[2])
    assert_same_program(programs[1], programs[3])


def test_the_program_with_flags_is_that_of_jax_checkpoint(remat3, assert_same_program):
    by_hand = jax.checkpoint(block, static_argnums=(2, 3))
    for flag in (True, False):
        ours = jax.make_jaxpr(
            jax.grad(lambda x, w, flag=flag: full(block)(x, flag=flag, w=w, kind=Kind.TANH).sum(), (0, 1))
        )
        theirs = jax.make_jaxpr(jax.grad(lambda x, w, flag=flag: by_hand(x, w, flag, Kind.TANH).sum(), (0, 1)))
        # By keyword, arguments come in the order of their names; here that is flag, kind, w.
        assert_same_program(ours(X, W), theirs(X, W))


def test_the_comparison_of_programs_sees_a_difference(assert_same_program):
    ours = jax.make_jaxpr(full(block))(X, W)
    for other in (block, jax.checkpoint(block, prevent_cse=False), jax.checkpoint(lambda x, w: block(x, w) + 1)):
        with pytest.raises(AssertionError):
            assert_same_program(ours, jax.make_jaxpr(other)(X, W))


def test_repeated_calls_trace_and_compile_once():
    traces = []

    @full
    def traced(x, w, flag):
        traces.append(flag)
        return jnp.tanh(x @ w) if flag else x

    @jax.jit
    def step(x, w):
        return jax.grad(lambda w: traced(x, w, True).sum() + traced(x, w, flag=False).sum())(w)

    for _ in range(3):
        step(X, W)
    assert sorted(traces) == [False, True]
    assert step._cache_size() == 1


def test_a_repeated_block_is_traced_once_as_with_jax_checkpoint():
    counts = {}
    for name, wrap in (("ours", full), ("by hand", functools.partial(jax.checkpoint, static_argnums=(2,)))):
        traces = []

        def traced(x, w, flag, traces=traces):
            traces.append(1)
            return jnp.tanh(x @ w) if flag else x

        wrapped = wrap(traced)
        jax.make_jaxpr(lambda x, w, f=wrapped: f(f(f(x, w, True), w, True), w, True))(X, W)
        counts[name] = len(traces)
    assert counts == {"ours": 1, "by hand": 1}


def test_wrapping_again_compiles_once():
    @jax.jit
    def step(x, w):
        return jax.grad(lambda w: remat("dots_saveable")(block)(x, w).sum())(w)

    for _ in range(3):
        step(X, W)
    assert step._cache_size() == 1


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_composition(wrap, remat3, assert_same_tree):
    stacked = jnp.stack([W, W / 2, -W])

    def layers(f):
        def loss(w, x):
            x, _ = jax.lax.scan(lambda x, w: (f(x, w, flag=True), None), x, w)
            return jax.vmap(lambda row: f(row[None], w[0], False)[0])(x).sum()

        return wrap(jax.value_and_grad(loss))(stacked, X)

    assert_same_tree(layers(full(block)), layers(block), atol=2e-6)


def test_forward_mode_and_second_derivatives(remat3, assert_same_tree):
    wrapped = full(block)
    assert_same_tree(
        jax.jvp(lambda x: wrapped(x, W), (X,), (X,)), jax.jvp(lambda x: block(x, W), (X,), (X,)), atol=1e-5
    )
    hessian = [jax.hessian(lambda s, f=f: f(X * s, W).sum())(1.0) for f in (wrapped, block)]
    np.testing.assert_allclose(*hessian, rtol=1e-4)


# ---- XLA does not undo it

LAYERS, WIDTH, ROWS = 6, 64, 512
STACK = (
    jax.ShapeDtypeStruct((LAYERS, WIDTH, 4 * WIDTH), jnp.float32),
    jax.ShapeDtypeStruct((LAYERS, 4 * WIDTH, WIDTH), jnp.float32),
)


def mlp(x, w):
    return x + jax.nn.gelu(x @ w[0]) @ w[1], None


def scanned(policy, unroll):
    layer = remat(policy)(mlp)
    return lambda ws, x: jax.lax.scan(layer, x, ws, unroll=unroll)[0].sum()


def looped(policy):
    layer = remat(policy)(mlp)

    def loss(ws, x):
        for i in range(LAYERS):
            x, _ = layer(x, jax.tree.map(lambda w, i=i: w[i], ws))
        return x.sum()

    return loss


@pytest.mark.parametrize(
    ("stack", "in_program"),
    [
        (lambda policy: scanned(policy, 1), 1),  # the body of the loop appears once
        (lambda policy: scanned(policy, 2), 2),  # two layers in the body
        (lambda policy: scanned(policy, True), LAYERS),
        (looped, LAYERS),
    ],
    ids=["scan", "scan unrolled by 2", "scan fully unrolled", "layers unrolled"],
)
def test_the_recomputation_survives_xla(stack, in_program):
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    temp, recomputed = {}, {}
    for policy in ("none", "full"):
        gradient = jax.grad(stack(policy))
        compiled = jax.jit(gradient).lower(STACK, x).compile()
        temp[policy] = compiled.memory_analysis().temp_size_in_bytes
        instructions = compiled.as_text().splitlines()
        recomputed[policy] = sum(" dot(" in line and "rematted_computation" in line for line in instructions)
        # Of a layer's two matmuls the first runs again; the second only enters a sum, backward needs no value of it.
        assert count_work(jax.make_jaxpr(gradient)(STACK, x)).recomputed_matmuls == (LAYERS if policy == "full" else 0)
    assert recomputed == {"none": 0, "full": in_program}
    # none keeps at least 3 hidden values a layer (512 x 256 floats each), full the layer's input of a quarter of one.
    assert temp["none"] > 3 * temp["full"]
