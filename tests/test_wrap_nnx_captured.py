"""Values that NNX modules capture (sow) are the same with and without rematerialization."""

import jax
import jax.numpy as jnp
from flax import nnx
from test_wrap_nnx import X, full, unchanged

# ---- captured values


class Sower(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        x = jnp.tanh(self.linear(x))
        self.sow(nnx.Intermediate, "hidden", x)
        return x


class Two(nnx.Module):
    def __init__(self, block, rngs):
        self.a, self.b = block(rngs), block(rngs)

    def __call__(self, x):
        return self.b(self.a(x))


def test_captured_values(assert_same_tree):
    captured = []
    for wrap in (unchanged, full):
        model = Two(wrap(Sower), nnx.Rngs(0))
        captured.append(nnx.capture(model, nnx.Intermediate)(X))
        assert not hasattr(model.a, "hidden")
    assert_same_tree(captured[1], captured[0], atol=1e-6)
    assert len(jax.tree.leaves(captured[1][1])) == 2


def test_captured_values_under_a_gradient(assert_same_tree):
    def run(wrap):
        model = Two(wrap(Sower), nnx.Rngs(0))

        def loss(model):
            out, captured = nnx.capture(model, nnx.Intermediate)(X)
            return (out**2).sum(), captured

        return nnx.value_and_grad(loss, has_aux=True)(model)

    (got, grads), (expected, expected_grads) = run(full), run(unchanged)
    assert_same_tree(got, expected, atol=1e-6)
    assert_same_tree(jax.tree.leaves(grads), jax.tree.leaves(expected_grads), atol=1e-5)
    assert len(jax.tree.leaves(got[1])) == 2


def test_captured_outputs_of_methods(assert_same_tree):
    captured = [
        nnx.capture(Two(wrap(Sower), nnx.Rngs(0)), method_outputs=nnx.Intermediate)(X) for wrap in (unchanged, full)
    ]
    assert_same_tree(captured[1], captured[0], atol=1e-6)
