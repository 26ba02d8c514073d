"""What a step keeps from forward to backward, each figure against a count by hand."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from remat_kit import remat
from remat_kit._saved import saved_values

# Activations are [4, 8] float32.
LAYERS = 3
VALUE = 4 * 8 * 4


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


X, W, STACK = array(4, 8), array(8, 8), array(LAYERS, 8, 8)
WEIGHTS = [W] * LAYERS


def block(x, w):
    """Two matmuls, tagged before each nonlinearity. Without remat backward keeps five values: x, cos(up), sin(up),
    cos(down), and the weight, which is an argument."""
    return jnp.sin(checkpoint_name(jnp.sin(checkpoint_name(x @ w, "up")) @ w, "down"))


def scanned(policy, f=block):
    wrapped = remat(policy)(f)
    return lambda x, stack: lax.scan(lambda x, w: (wrapped(x, w), None), x, stack)[0].sum()


def unrolled(policy, f=block, around=lambda f: f):
    wrapped = around(remat(policy)(f))

    def loss(x, weights):
        x = 2 * x  # so that the first block's input is a value of forward, as it is in a scan
        for i, w in enumerate(weights):
            with jax.named_scope(f"block_{i}"):
                x = wrapped(x, w)
        return x.sum()

    return loss


def saved(loss, *args, argnums=(0, 1)):
    return saved_values(jax.make_jaxpr(jax.grad(loss, argnums))(*args))


POLICIES = [
    # policy, values on the device and on the host that one block keeps
    ("none", 4, 0),
    ("full", 1, 0),  # exactly its input
    ("save(up)", 2, 0),
    ("save(up,down)", 3, 0),
    ("save(nothing_of_this_name)", 1, 0),
    ("offload(up)", 1, 1),
    ("offload(up,down)", 1, 2),
    ("save(down)|offload(up)", 2, 1),
    ("dots_saveable", 3, 0),
    ("dots_with_no_batch_dims_saveable", 3, 0),
    ("offload_dots_with_no_batch_dims", 1, 2),
]


@pytest.mark.parametrize(("policy", "on_device", "on_host"), POLICIES)
def test_a_scanned_block(policy, on_device, on_host, remat3):
    kept = saved(scanned(policy), X, STACK)
    assert kept.device_bytes == LAYERS * on_device * VALUE
    assert kept.host_bytes == LAYERS * on_host * VALUE
    assert kept.device_bytes_per_block == on_device * VALUE
    assert len(kept.values) == on_device + on_host  # each stacked over the layers
    assert {value.count for value in kept.values} == {LAYERS}
    assert {value.bytes for value in kept.values} == {LAYERS * VALUE}


@pytest.mark.parametrize(("policy", "on_device", "on_host"), POLICIES)
def test_an_unrolled_block_keeps_what_a_scanned_one_keeps(policy, on_device, on_host, remat3):
    kept = saved(unrolled(policy), X, WEIGHTS)
    assert kept.device_bytes == LAYERS * on_device * VALUE
    assert kept.host_bytes == LAYERS * on_host * VALUE
    assert kept.device_bytes_per_block == on_device * VALUE


def test_full_keeps_exactly_the_stacked_input():
    (value,) = saved(scanned("full"), X, STACK).values
    assert (value.bytes, value.count, value.on_host) == (LAYERS * VALUE, LAYERS, False)
    assert value.shape == "f32[3,4,8]"


def test_a_value_on_the_host_says_so():
    on_host = [value for value in saved(scanned("offload(up)"), X, STACK).values if value.on_host]
    assert [value.bytes for value in on_host] == [LAYERS * VALUE]
    assert "host" in on_host[0].shape


def test_the_largest_comes_first():
    def loss(x, w):
        return jnp.sin(jnp.tile(jnp.sin(x @ w), (3, 1))).sum() + jnp.sin(x[:1] @ w).sum()

    sizes = [value.bytes for value in saved(loss, X, W).values]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == 3 * VALUE


@pytest.mark.parametrize("policy", ["none", "full", "save(up)"])
def test_blocks_that_share_one_jaxpr_keep_their_own_values(policy):
    # Jitted once, called for each block: JAX gives all calls the same jaxpr with the same variables.
    plain, shared = (saved(unrolled(policy, around=around), X, WEIGHTS) for around in (lambda f: f, jax.jit))
    assert shared.device_bytes == plain.device_bytes
    assert shared.device_bytes_per_block == plain.device_bytes_per_block


def test_two_calls_of_one_jitted_function_keep_two_values():
    sin = jax.jit(jnp.sin)
    # Backward needs cos of the two inputs.
    assert saved(lambda x: sin(sin(x)).sum(), X, argnums=0).device_bytes == 2 * VALUE


def test_two_scans_of_one_jitted_stack_keep_two_stacks():
    stack = jax.jit(lambda x, ws: lax.scan(lambda x, w: (remat("full")(block)(x, w), None), x, ws)[0])
    kept = saved(lambda x, ws: stack(stack(x, ws), ws).sum(), X, STACK)
    assert kept.device_bytes == 2 * LAYERS * VALUE


def test_a_jitted_gradient_keeps_the_same():
    loss = scanned("save(up)")
    plain = saved_values(jax.make_jaxpr(jax.grad(loss, (0, 1)))(X, STACK))
    jitted = saved_values(jax.make_jaxpr(jax.jit(jax.jit(jax.grad(jax.jit(loss), (0, 1)))))(X, STACK))
    assert jitted.device_bytes == plain.device_bytes == 2 * LAYERS * VALUE
    assert jitted.device_bytes_per_block == plain.device_bytes_per_block


@pytest.mark.parametrize("policy", ["none", "full"])
def test_microbatches_keep_what_one_of_them_keeps(policy):
    def gradient(w, x):
        return jax.grad(lambda w, x: jnp.sin(remat(policy)(block)(2 * x, w)).sum())(w, x)

    def accumulated(w, xs):
        return lax.scan(lambda total, x: (total + gradient(w, x), None), w, xs)[0]

    one = saved_values(jax.make_jaxpr(gradient)(W, X))
    assert one.device_bytes > 0
    # The values of a microbatch are gone when the next one starts.
    assert saved_values(jax.make_jaxpr(accumulated)(W, array(5, 4, 8))).device_bytes == one.device_bytes


@pytest.mark.parametrize(
    "through",
    [
        lambda y: y,
        lambda y: checkpoint_name(y, "h"),
        lambda y: y.reshape(8, 4).reshape(4, 8),
        lambda y: checkpoint_name(y.reshape(32), "h").reshape(4, 8),
        lambda y: y[None].squeeze(0),
        lambda y: lax.optimization_barrier(y),
        lambda y: lax.optimization_barrier((y, jnp.ones(3)))[0],
        lambda y: jax.jit(lambda y: y)(y),
    ],
)
def test_a_value_under_another_name_or_shape_is_not_a_second_buffer(through):
    def loss(x, w):
        y = 2 * x
        return (y @ w).sum() + (through(y) @ w).sum()

    # Both matmuls keep y, and it is one buffer; the weight is an argument.
    kept = saved(loss, X, W)
    assert kept.device_bytes == VALUE
    assert len(kept.values) == 1


def test_arguments_are_there_anyway():
    for view in (
        lambda x: x,
        lambda x: checkpoint_name(x, "h"),
        lambda x: x.reshape(2, 16).reshape(4, 8),
        lambda x: jax.jit(lambda x: x.reshape(4, 8))(x),
    ):
        kept = saved(lambda x, w, view=view: (view(x) @ w).sum(), X, W)
        assert (kept.device_bytes, kept.host_bytes, kept.values) == (0, 0, ())
        assert kept.device_bytes_per_block is None
    # A cast argument is a new buffer.
    cast = saved(lambda x, w: (x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).sum(), X, W)
    assert cast.device_bytes == (4 * 8 + 8 * 8) * 2


def test_without_a_derivative_nothing_is_saved():
    assert saved_values(jax.make_jaxpr(block)(X, W)).values == ()
    assert saved_values(jax.make_jaxpr(lambda x, w: jax.jvp(lambda x: block(x, w), (x,), (x,)))(X, W)).values == ()


def test_no_block_repeats():
    assert saved(lambda x, w: block(x, w).sum(), X, W).device_bytes_per_block is None


def test_what_is_saved_outside_of_blocks_is_no_blocks():
    def loss(x, stack):
        logits = jnp.tanh(lax.scan(lambda x, w: (remat("full")(block)(x, w), None), x, stack)[0])
        return jax.nn.logsumexp(logits @ jnp.ones((8, 100))).sum()

    kept = saved(loss, X, STACK)
    assert kept.device_bytes_per_block == VALUE
    assert kept.device_bytes > LAYERS * VALUE


def test_of_two_stacks_the_larger_one_counts():
    def loss(x, small, large):
        x = scanned_part("full")(x, small)
        return scanned_part("none")(x, large).sum()

    def scanned_part(policy):
        wrapped = remat(policy)(block)
        return lambda x, stack: lax.scan(lambda x, w: (wrapped(x, w), None), x, stack)[0]

    kept = saved(loss, X, STACK, array(5, 8, 8), argnums=(0, 1, 2))
    assert kept.device_bytes == LAYERS * VALUE + 5 * 4 * VALUE
    assert kept.device_bytes_per_block == 4 * VALUE


def test_low_precision_counts_its_own_bytes():
    def half(x, w):
        up = (x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.bfloat16)
        return jnp.sin(checkpoint_name(up, "up")).astype(jnp.float32)

    kept = saved(scanned("save(up)", half), X, STACK)
    assert kept.device_bytes_per_block == VALUE + VALUE // 2
