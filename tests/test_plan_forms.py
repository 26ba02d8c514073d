"""`Plan.apply` on every way to differentiate a loss, and with JAX's caches."""

import functools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import planned
from planned import LOSSES, X, jit, plan_of, planner_of, random_solutions

from remat_kit._saved import saved_values

W = planned.weights()


@functools.cache
def planner(name):
    return planner_of(LOSSES[name], W, X)


@functools.cache
def plan(name="scan"):
    return plan_of(planner(name), random_solutions(planner(name), 3))


@functools.cache
def expected():
    return jit(jax.value_and_grad(LOSSES["scan"], argnums=(0, 1)))(W, X)


def assert_close(got, expected):
    jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-6), got, expected)


def value_and_grad(loss):
    return jax.value_and_grad(loss)


def is_planned(function, *args, name="scan"):
    """Whether a function keeps what the plan says, which differs from what it keeps without one."""
    with_plan = saved_values(jax.make_jaxpr(plan(name).apply(value_and_grad(LOSSES[name])))(W, X)).device_bytes
    without = saved_values(jax.make_jaxpr(value_and_grad(LOSSES[name]))(W, X)).device_bytes
    assert with_plan != without
    return saved_values(jax.make_jaxpr(function)(*args)).device_bytes == with_plan


class TestForms:
    """Ways to differentiate, all on the plan of one loss."""

    loss = staticmethod(LOSSES["scan"])

    def test_has_aux(self):
        def loss(w, x):
            value = self.loss(w, x)
            return value, {"twice": 2 * value, "text": "a", "none": None, "number": 3}

        step = plan().apply(jax.value_and_grad(loss, has_aux=True))
        (value, aux), grads = step(W, X)  # what is not an array comes through as it is
        assert_close((value, grads), (expected()[0], expected()[1][0]))
        assert_close(aux.pop("twice"), 2 * value)
        assert aux == {"text": "a", "none": None, "number": 3}
        assert is_planned(lambda w, x: step(w, x)[1], W, X)

    def test_vjp(self):
        def step(w, x):
            value, pull = jax.vjp(lambda w: self.loss(w, x), w)
            return value, pull(jnp.float32(1.0))[0]

        assert_close(jit(plan().apply(step))(W, X), (expected()[0], expected()[1][0]))
        assert is_planned(plan().apply(step), W, X)

    def test_keywords_and_what_is_not_an_array(self):
        def loss(w, *, x, square=False, name="a"):
            assert name == "b"
            assert isinstance(square, bool)
            return self.loss(w, x) ** (2 if square else 1)

        step = jax.value_and_grad(lambda w, x: plan().apply(loss)(w, x=x, name="b"))
        assert_close(jit(step)(W, X), (expected()[0], expected()[1][0]))
        assert is_planned(step, W, X)
        assert is_planned(partial(plan().apply(jax.value_and_grad(loss)), x=X, name="b"), W)

    def test_a_loss_that_closes_over_traced_values(self):
        def step(w, x):
            same = 2 * x / 2
            return jax.value_and_grad(lambda w: self.loss(w, same))(w)

        assert_close(jit(plan().apply(step))(W, X), (expected()[0], expected()[1][0]))

        def of_closed(w, x):
            return plan().apply(lambda x: self.loss(w, x))(x)

        assert_close(jit(jax.grad(of_closed))(W, X), expected()[1][0])
        assert is_planned(value_and_grad(of_closed), W, X)

    def test_several_arguments(self):
        step = plan().apply(jax.value_and_grad(self.loss, argnums=(0, 1)))
        assert_close(jit(step)(W, X), expected())
        assert is_planned(step, W, X)

    def test_a_number_of_python(self):
        def loss(scale, w, x):
            return scale * self.loss(w, x)

        got = jit(plan().apply(jax.grad(loss, (0, 1))))(2.0, W, X)
        assert_close(got, (expected()[0], jax.tree.map(lambda leaf: 2 * leaf, expected()[1][0])))

    def test_forward_mode(self):
        tangents = jax.tree.map(jnp.ones_like, W)
        for run in (jax.jvp, jax.linearize):
            if run is jax.jvp:
                found = jax.jvp(plan().apply(lambda w: self.loss(w, X)), (W,), (tangents,))
            else:
                value, push = jax.linearize(plan().apply(lambda w: self.loss(w, X)), W)
                found = value, push(tangents)
            assert_close(found, jax.jvp(lambda w: self.loss(w, X), (W,), (tangents,)))

    def test_second_derivative(self):
        def along(loss):
            def gradient(t):
                return jax.grad(lambda w: loss(w, X))(jax.tree.map(lambda leaf: t * leaf, W))

            return jit(jax.grad(lambda t: jnp.sum(gradient(t)["in"] ** 2)))(1.0)

        np.testing.assert_allclose(along(plan().apply(self.loss)), along(self.loss), rtol=1e-3)

    def test_vmap(self):
        batch = jnp.stack([X, 2 * X])
        alone = jit(jax.vmap(jax.value_and_grad(self.loss), (None, 0)))(W, batch)
        got = jit(jax.vmap(jax.value_and_grad(plan().apply(self.loss)), (None, 0)))(W, batch)
        assert_close(got, alone)
        got = jit(jax.vmap(plan().apply(jax.value_and_grad(self.loss)), (None, 0)))(W, batch)
        assert_close(got, alone)

    def test_without_a_derivative(self):
        assert_close(jit(plan().apply(self.loss))(W, X), expected()[0])


class TestJit:
    """JAX's caches: what was traced with a plan is not taken for what was not, nor the other way round."""

    def test_a_step_that_was_traced_before(self):
        step = jax.jit(value_and_grad(LOSSES["scan"]))
        assert not is_planned(step, W, X)
        assert is_planned(plan().apply(step), W, X)
        assert not is_planned(step, W, X)

    def test_a_step_with_a_jitted_function_in_it(self):
        inner = jax.jit(value_and_grad(LOSSES["scan"]))
        step = plan().apply(lambda w, x: inner(w, x))
        for _ in range(2):  # the second time, the inner function comes out of JAX's cache
            assert_close(jit(step)(W, X), (expected()[0], expected()[1][0]))
            assert is_planned(step, W, X)
        assert not is_planned(inner, W, X)

    def test_a_planned_step_is_compiled_once(self):
        step = jax.jit(value_and_grad(LOSSES["scan"]))
        applied = plan().apply(step)
        applied(W, X)
        before = step._cache_size()
        applied(W, X)
        assert step._cache_size() == before

    def test_a_jitted_loss(self):
        assert is_planned(value_and_grad(jax.jit(plan().apply(LOSSES["scan"]))), W, X)
        assert is_planned(value_and_grad(plan().apply(jax.jit(LOSSES["scan"]))), W, X)
