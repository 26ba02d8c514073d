"""Names, phases and types of a jaxpr's equations."""

import functools

import jax
import jax.numpy as jnp
import pytest
from test_jaxpr import W, X, array, block, work

from remat_kit import POLICIES, remat
from remat_kit._jaxpr import count_work, lowest_precision, nbytes, tag_of, walk
from remat_kit._phase import phase_of

# ---- names, phases, types


def test_tags(remat3):
    def tags(policy):
        gradient = jax.grad(lambda x, w: remat(policy)(block)(x, w).sum())
        return sorted(tag for equation in walk(jax.make_jaxpr(gradient)(X, W)) if (tag := tag_of(equation.eqn)))

    for policy in ("none", "full", "save_qkv_proj", "qkv_proj_offloaded"):
        assert set(tags(policy)) == {"query_proj", "out_proj"}, policy
    for equation in walk(jax.make_jaxpr(lambda x: jnp.sin(x))(X)):
        assert tag_of(equation.eqn) is None


@pytest.mark.parametrize(
    ("stack", "phase"),
    [
        ("", "update"),
        ("jit(step)/adam/mul", "update"),
        ("jit(step)/jvp(Block_0)/dot_general", "forward"),
        ("jit(step)/transpose(jvp(Block_0))/dot_general", "backward"),
        ("transpose(jvp(checkpoint))/rematted_computation/Block_0", "recompute"),
        ("jvp(M)/while/body/closed_call", "forward"),
    ],
)
def test_phase_of(stack, phase):
    assert phase_of(stack) == phase


def test_scopes_are_joined_from_the_outside():
    def f(x, w):
        with jax.named_scope("model"):
            return jax.jit(lambda x: jax.named_call(lambda x: x @ w, name="block")(x))(x)

    (dot,) = [e for e in walk(jax.make_jaxpr(f)(X, W)) if e.primitive == "dot_general"]
    assert dot.stack.index("model") < dot.stack.index("block")


@pytest.mark.parametrize(
    ("f", "dtypes", "name"),
    [
        (lambda x: x + 1, (jnp.float32,), "float32"),
        (lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), (jnp.float32,), "bfloat16"),
        (lambda x: x.astype(jnp.float32) * 2, (jnp.bfloat16,), "bfloat16"),  # the argument alone is imprecise
        (lambda x, y: x.astype(jnp.float32) + y, (jnp.float16, jnp.float32), "float16"),
        (lambda x: x.astype(jnp.float8_e4m3fn).astype(jnp.float32), (jnp.float32,), "float8_e4m3fn"),
        (lambda x: x + 1, (jnp.int8,), "float32"),
        # Where there are matmuls, their operands count, and not a cast beside them.
        (lambda x: (x @ x) + x.astype(jnp.bfloat16).astype(jnp.float32), (jnp.float32,), "float32"),
        (lambda x: (x.astype(jnp.bfloat16) @ x.astype(jnp.bfloat16)).astype(jnp.float32), (jnp.float32,), "bfloat16"),
        (lambda x: jax.jit(lambda y: y.astype(jnp.float16).sum())(x) * jnp.float32(1), (jnp.float32,), "float16"),
    ],
)  # fmt: skip
def test_lowest_precision(f, dtypes, name):
    assert lowest_precision(jax.make_jaxpr(f)(*(array(4, 4, dtype=dtype) for dtype in dtypes))) == name


def test_bytes_of_a_value():
    def f(*values):
        return values

    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 3))
    jaxpr = jax.make_jaxpr(f)(array(3, 5), array(2, dtype=jnp.bfloat16), array(7, dtype=bool), array(), keys)
    # A threefry key is two 32-bit words.
    assert [nbytes(var) for var in jaxpr.jaxpr.invars] == [60, 4, 7, 4, 24]


@pytest.mark.parametrize("wrap", [jax.jit, functools.partial(jax.checkpoint, policy=None)])
def test_open_and_closed_jaxprs_count_the_same(wrap):
    closed = jax.make_jaxpr(wrap(block))(X, W)
    assert count_work(closed) == count_work(closed.jaxpr)


def test_every_policy_has_a_count(remat3):
    for policy in POLICIES:
        matmuls, recomputed = work(jax.grad(lambda x, w, p=policy: remat(p)(block)(x, w).sum(), (0, 1)), X, W)
        assert matmuls == 6 + recomputed
        assert 0 <= recomputed <= 2
