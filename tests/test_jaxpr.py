"""Matmuls and FLOPs counted on a jaxpr, each against a count by hand."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from remat_kit import remat
from remat_kit._jaxpr import count_flops, count_work, walk

# Three layers of [8, 8] weights on [4, 8] activations: one matmul is 2·4·8·8 FLOP.
LAYERS = 3
MATMUL = 2 * 4 * 8 * 8


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


X, W, STACK = array(4, 8), array(8, 8), array(LAYERS, 8, 8)


def flops(f, *args):
    return count_flops(jax.make_jaxpr(f)(*args))


def work(f, *args):
    """(matmuls, recomputed matmuls) of `f`, and the FLOPs agree when all matmuls have one size."""
    counted = count_work(jax.make_jaxpr(f)(*args))
    assert counted.flops == counted.matmuls * MATMUL
    assert counted.recomputed_flops == counted.recomputed_matmuls * MATMUL
    return counted.matmuls, counted.recomputed_matmuls


def phases(f, *args):
    """How many matmuls run in each phase."""
    counted = dict.fromkeys(("forward", "recompute", "backward", "update"), 0)
    for equation in walk(jax.make_jaxpr(f)(*args)):
        if equation.primitive == "dot_general":
            counted[equation.phase] += equation.executions
    return counted


# ---- one equation


@pytest.mark.parametrize(
    ("spec", "left", "right", "by_hand"),
    [
        ("ij,jk->ik", (3, 5), (5, 7), 2 * 3 * 5 * 7),
        ("bij,bjk->bik", (2, 3, 5), (2, 5, 7), 2 * 2 * 3 * 5 * 7),
        ("bthc,bshc->bhts", (2, 4, 3, 5), (2, 6, 3, 5), 2 * 2 * 3 * 4 * 6 * 5),
        ("ikl,klj->ij", (3, 5, 7), (5, 7, 2), 2 * 3 * 5 * 7 * 2),
        ("i,i->", (9,), (9,), 2 * 9),
        ("i,j->ij", (3,), (4,), 2 * 3 * 4),  # an outer product contracts nothing
        ("ij,jk->ik", (0, 5), (5, 7), 0),
    ],
)
def test_dot_general(spec, left, right, by_hand):
    dot = {"i,j->ij": lambda a, b: lax.dot_general(a, b, (((), ()), ((), ())))}.get(
        spec, lambda a, b: jnp.einsum(spec, a, b)
    )
    assert flops(dot, array(*left), array(*right)) == by_hand


NHWC = ("NHWC", "HWIO", "NHWC")


def conv(groups=1, stride=1, dilation=1):
    def f(x, kernel):
        return lax.conv_general_dilated(
            x, kernel, (stride, stride), "SAME", rhs_dilation=(dilation, dilation), dimension_numbers=NHWC,
            feature_group_count=groups,
        )  # fmt: skip

    return f


@pytest.mark.parametrize(
    ("options", "kernel", "by_hand"),
    [
        # [2, 8, 8, 4] images to 6 channels: each of the 2·8·8·6 outputs sums over a 3·3 window and its input channels.
        ({}, (3, 3, 4, 6), 2 * (2 * 8 * 8 * 6) * 9 * 4),
        ({"groups": 2}, (3, 3, 2, 6), 2 * (2 * 8 * 8 * 6) * 9 * 2),
        ({"groups": 4}, (3, 3, 1, 8), 2 * (2 * 8 * 8 * 8) * 9 * 1),  # depthwise
        ({"stride": 2}, (3, 3, 4, 6), 2 * (2 * 4 * 4 * 6) * 9 * 4),
        ({"dilation": 2}, (3, 3, 4, 6), 2 * (2 * 8 * 8 * 6) * 9 * 4),  # the holes of the kernel are not multiplied
    ],
)
def test_convolution_and_both_its_gradients(options, kernel, by_hand):
    x, kernel = array(2, 8, 8, 4), array(*kernel)
    assert flops(conv(**options), x, kernel) == by_hand
    for argument in (0, 1):  # each gradient multiplies every pair that forward multiplied, once
        gradient = jax.grad(lambda x, k: conv(**options)(x, k).sum(), argument)
        counted = count_work(jax.make_jaxpr(gradient)(x, kernel))
        assert (counted.matmuls, counted.flops) == (2, 2 * by_hand)


def test_transposed_convolution():
    def f(x, k):
        return lax.conv_transpose(x, k, (2, 2), "SAME", dimension_numbers=NHWC)

    # Each of the 2·8·8·4 inputs meets the 3·3 window and the 6 output channels; the zeros between inputs do not count.
    assert flops(f, array(2, 8, 8, 4), array(3, 3, 4, 6)) == 2 * (2 * 8 * 8 * 4) * 9 * 6


def test_a_convolution_with_other_dimension_numbers():
    x, kernel = array(2, 4, 8), array(6, 4, 3)
    assert flops(lambda x, k: lax.conv_general_dilated(x, k, (1,), "SAME"), x, kernel) == 2 * (2 * 6 * 8) * 3 * 4


def test_ragged_dot_and_both_its_gradients():
    x, w, sizes = array(8, 4), array(3, 4, 5), array(3, dtype=jnp.int32)
    by_hand = 2 * 8 * 4 * 5  # each row meets the matrix of its own group
    assert flops(lax.ragged_dot, x, w, sizes) == by_hand
    for argument in (0, 1):
        gradient = jax.grad(lambda x, w, sizes: lax.ragged_dot(x, w, sizes).sum(), argument)
        counted = count_work(jax.make_jaxpr(gradient)(x, w, sizes))
        assert (counted.matmuls, counted.flops) == (2, 2 * by_hand)


def test_elementwise_work_is_not_counted():
    assert flops(lambda x: jnp.cumsum(jax.nn.softmax(jnp.sort(jnp.tanh(x)) @ jnp.ones((8, 1)), axis=0)), X) == 2 * 4 * 8
    assert flops(lambda x: (jnp.tanh(x) + x).sum(), X) == 0


# ---- control flow


def layers(x, stack):
    return lax.scan(lambda x, w: (jnp.sin(x @ w), None), x, stack)[0]


def unrolled(x, stack):
    for i in range(LAYERS):
        x = jnp.sin(x @ stack[i])
    return x


def test_a_scan_counts_its_length():
    assert work(layers, X, STACK) == work(unrolled, X, STACK) == (LAYERS, 0)
    assert work(layers, X, array(0, 8, 8)) == (0, 0)
    assert work(lambda x, s: lax.scan(lambda x, w: (jnp.sin(x @ w), None), x, s, unroll=True)[0], X, STACK) == (3, 0)
    gradients = [jax.grad(lambda x, s, f=f: f(x, s).sum(), (0, 1)) for f in (layers, unrolled)]
    assert work(gradients[0], X, STACK) == work(gradients[1], X, STACK) == (3 * LAYERS, 0)


def test_a_scan_in_a_scan_counts_both_lengths():
    def nested(x, stack):
        return lax.scan(lambda x, _: (layers(x, stack), None), x, length=5)[0]

    assert work(nested, X, STACK) == (5 * LAYERS, 0)
    executions = {e.executions for e in walk(jax.make_jaxpr(nested)(X, STACK)) if e.primitive == "dot_general"}
    assert executions == {5 * LAYERS}


def test_of_a_conditional_the_costliest_branch_counts():
    def branches(i, x, w):
        return lax.switch(i, [lambda x: x, lambda x: x @ w @ w @ w, lambda x: x @ w], x)

    assert work(branches, array(dtype=jnp.int32), X, W) == (3, 0)

    def in_a_branch(p, x, stack):
        return lax.cond(p, lambda x: layers(x, stack), lambda x: x @ stack[0] @ stack[1], x)

    assert work(in_a_branch, array(dtype=bool), X, STACK) == (3, 0)
    assert work(lambda p, x, w: lax.cond(p, jnp.sin, jnp.cos, x @ w), array(dtype=bool), X, W) == (1, 0)


def test_a_while_counts_once():
    assert work(lambda x, w: lax.while_loop(lambda x: x[0, 0] < 3, lambda x: x @ w, x), X, W) == (1, 0)
    # With a static number of iterations JAX makes it a loop whose length is known where it can be differentiated.
    assert work(jax.grad(lambda x, w: lax.fori_loop(0, 7, lambda _, x: x @ w, x).sum()), X, W) == (14, 0)


def test_custom_derivatives():
    @jax.custom_vjp
    def with_vjp(x, w):
        return x @ w

    with_vjp.defvjp(lambda x, w: (x @ w, (x, w)), lambda saved, g: (g @ saved[1].T, saved[0].T @ g))

    @jax.custom_jvp
    def with_jvp(x, w):
        return x @ w

    with_jvp.defjvp(lambda p, t: (with_jvp(*p), t[0] @ p[1] + p[0] @ t[1]))
    for f in (with_vjp, with_jvp):
        assert work(f, X, W) == (1, 0)
        assert work(jax.jit(f), X, W) == (1, 0)
        assert work(jax.grad(lambda x, w, f=f: jnp.sin(f(x, w)).sum(), (0, 1)), X, W) == (3, 0)


def test_a_linear_solve_counts_what_it_runs():
    # custom_linear_solve holds the operator, its transpose and two solvers; only one solver runs forward.
    def solve(a, b):
        return lax.custom_linear_solve(lambda v: a @ v, b, lambda _, b: a @ (a @ b), lambda _, b: a @ b)

    assert flops(solve, W, array(8)) == 2 * (2 * 8 * 8)


def test_calls_in_calls_and_shared_functions_count_as_often_as_they_run():
    shared = jax.jit(lambda x, w: jnp.sin(x @ w))

    def five_times(x, w):
        for _ in range(5):
            x = shared(x, w)  # one jaxpr, printed once, run five times
        return x

    assert work(five_times, X, W) == (5, 0)
    assert work(jax.jit(lambda x, w: jax.jit(five_times)(shared(x, w), w)), X, W) == (6, 0)
    # Forward 5, backward 5 for the inputs and 5 for the weight.
    assert work(jax.grad(lambda x, w: five_times(x, w).sum(), (0, 1)), X, W) == (15, 0)


def test_vmap_multiplies():
    assert flops(jax.vmap(lambda x, w: x @ w, (0, None)), array(7, 4, 8), W) == 7 * MATMUL
    assert flops(jax.vmap(lambda x, w: x @ w), array(7, 4, 8), array(7, 8, 8)) == 7 * MATMUL


def test_a_pallas_kernel_counts_each_point_of_its_grid():
    def kernel(x_ref, w_ref, out_ref):
        out_ref[...] = x_ref[...] @ w_ref[...]

    def matmul(x, w):
        return pl.pallas_call(
            kernel,
            out_shape=array(16, 32),
            grid=(2, 4),
            in_specs=[pl.BlockSpec((8, 16), lambda i, j: (i, 0)), pl.BlockSpec((16, 8), lambda i, j: (0, j))],
            out_specs=pl.BlockSpec((8, 8), lambda i, j: (i, j)),
            interpret=True,
        )(x, w)

    assert flops(matmul, array(16, 16), array(16, 32)) == 2 * 16 * 16 * 32


@pytest.mark.parametrize("devices", [1, 4])
def test_shards_together_count_what_the_whole_counts(devices):
    mesh = AbstractMesh((devices,), ("d",), axis_types=(AxisType.Auto,))
    sharded = jax.shard_map(lambda x, w: x @ w, mesh=mesh, in_specs=(P("d"), P()), out_specs=P("d"))
    assert flops(sharded, array(8, 8), W) == 2 * MATMUL


# ---- rematerialization


def block(x, w):
    """Two matmuls, tagged before each nonlinearity."""
    return jnp.sin(checkpoint_name(jnp.sin(checkpoint_name(x @ w, "query_proj")) @ w, "out_proj"))


@pytest.mark.parametrize(
    ("policy", "recomputed"),
    [
        ("none", 0),
        ("full", 2),  # both: the last nonlinearity needs its input
        ("everything_saveable", 0),
        ("dots_saveable", 0),
        ("dots_with_no_batch_dims_saveable", 0),
        ("save_qkv_proj", 1),  # the second matmul
        ("save_out_proj", 1),  # the first
        ("save_dot_except_mlp", 0),  # both are kept
        ("qkv_proj_offloaded", 1),
        ("minimal_offloaded", 0),
        ("offload_block_input", 2),
        ("selective_attention", 0),
    ],
)
def test_recomputed_matmuls_of_a_block_of_two(policy, recomputed, remat3):
    wrapped = remat(policy)(block)
    one = jax.grad(lambda x, w: wrapped(x, w).sum(), (0, 1))
    # Forward 2, backward 2 for each of them.
    assert work(one, X, W) == (6 + recomputed, recomputed)
    assert phases(one, X, W) == {"forward": 2, "recompute": recomputed, "backward": 4, "update": 0}
    scan = jax.grad(lambda x, s: lax.scan(lambda x, w: (wrapped(x, w), None), x, s)[0].sum(), (0, 1))
    assert work(scan, X, STACK) == (LAYERS * (6 + recomputed), LAYERS * recomputed)
    assert phases(scan, X, STACK) == {
        "forward": 2 * LAYERS, "recompute": LAYERS * recomputed, "backward": 4 * LAYERS, "update": 0
    }  # fmt: skip


def test_the_last_matmul_of_a_block_is_not_recomputed_when_nothing_needs_it(remat3):
    linear_at_the_end = remat("full")(lambda x, w: jnp.sin(x @ w) @ w)
    assert work(jax.grad(lambda x, w: linear_at_the_end(x, w).sum(), (0, 1)), X, W) == (6 + 1, 1)


def test_remat_in_remat(remat3):
    full = remat("full")
    nested = full(lambda x, w: full(block)(x, w))
    # The outer recomputation needs none of the block's values, only its input; the inner one runs both matmuls.
    assert work(jax.grad(lambda x, w: nested(x, w).sum(), (0, 1)), X, W) == (6 + 2, 2)
    behind = full(lambda x, w: full(block)(x, w) @ w)
    # For the weight after it, the outer recomputation runs the block (2), and its backward runs it again (2).
    assert work(jax.grad(lambda x, w: behind(x, w).sum(), (0, 1)), X, W) == (9 + 4, 4)


@pytest.mark.parametrize(
    "around",
    [
        lambda f: jax.jit(f),
        lambda f: lambda x, w: jax.vmap(f, (0, None))(x[:, None], w)[:, 0],
        lambda f: lambda x, w: lax.cond(x[0, 0] > 0, f, lambda x, w: x, x, w),
        lambda f: lambda x, w: jax.jit(remat("full")(jax.jit(block)))(x, w),
    ],
    ids=["jit", "vmap", "cond", "jit in remat in jit"],
)
def test_recomputation_inside_other_transformations(around, remat3):
    f = around(remat("full")(block))
    assert work(jax.grad(lambda x, w: f(x, w).sum(), (0, 1)), X, W) == (8, 2)


def test_a_microbatched_step_counts_each_microbatch(remat3):
    def accumulated(xs, w):
        gradient = jax.grad(lambda w, x: remat("full")(block)(x, w).sum())
        return lax.scan(lambda total, x: (total + gradient(w, x), None), w, xs)[0]

    # Gradient of the weight alone: backward is 2 + 1, the input's is not needed.
    assert work(accumulated, array(5, 4, 8), W) == (5 * (2 + 2 + 3), 5 * 2)


def test_forward_alone_recomputes_nothing(remat3):
    wrapped = remat("full")(block)
    assert work(wrapped, X, W) == (2, 0)
    assert work(lambda x, s: lax.scan(lambda x, w: (wrapped(x, w), None), x, s)[0], X, STACK) == (6, 0)
    assert phases(wrapped, X, W) == {"forward": 0, "recompute": 0, "backward": 0, "update": 2}


def test_what_is_outside_of_the_derivative_is_update(remat3):
    def step(w, x):
        loss, gradient = jax.value_and_grad(lambda w: remat("full")(block)(x, w).sum())(w)
        return w - gradient @ w, loss

    # The gradient of the weight alone: forward 2, recomputed 2, backward 3; the update's one has [8, 8] operands.
    assert phases(jax.jit(step), W, X) == {"forward": 2, "recompute": 2, "backward": 3, "update": 1}
    total = count_work(jax.make_jaxpr(step)(W, X))
    assert total.flops == 7 * MATMUL + 2 * 8 * 8 * 8
    assert total.flops - total.recomputed_flops == flops(
        lambda w, x: w - jax.grad(lambda w: block(x, w).sum())(w) @ w, W, X
    )
