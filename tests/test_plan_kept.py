"""What no name in a model's code reaches can be kept: values that a derivative uses itself."""

import jax
import jax.numpy as jnp
import planned
import pytest
from planned import X, plan_of, planner_of, runs_of

from remat_kit._plan.solve import evaluate

W = planned.weights()


@jax.custom_vjp
def normalized(x):
    return x / jnp.exp(jnp.log(jnp.sum(jnp.exp(x), -1, keepdims=True)))


def _forward(x):
    log_sum = jnp.log(jnp.sum(jnp.exp(x), -1, keepdims=True))
    return x / jnp.exp(log_sum), (x, log_sum)


def _backward(residuals, g):
    x, log_sum = residuals
    scale = jnp.exp(-log_sum)
    return (g * scale - jnp.exp(x - log_sum) * jnp.sum(g * x, -1, keepdims=True) * scale,)


normalized.defvjp(_forward, _backward)

# Each uses in its derivative what no name in the model's code reaches: its own output, or a value of its rule.
KEPT = {
    "exp": (lambda x: jnp.exp(x), "exp"),
    "tanh": (lambda x: jnp.tanh(x), "tanh"),
    "rsqrt": (lambda x: x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1.0), "rsqrt"),
    "logistic": (lambda x: jax.nn.sigmoid(x), "logistic"),
    "softmax": (lambda x: jax.nn.softmax(x), "exp"),
    "custom_vjp": (normalized, "log"),
}


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.parametrize("stack", ["scan", "unrolled"])
def test_what_a_derivative_uses_itself_can_be_kept(name, stack, remat3):
    function, primitive = KEPT[name]

    def block(x, w):
        return x + function(x @ w["up"]) @ w["down"]

    def loss(w, x):
        x = x @ w["in"]
        layers = w["layers"]
        if stack == "scan":
            return jnp.sum(jax.lax.scan(lambda x, w: (block(x, w), None), x, layers)[0])
        for number in range(4):
            x = block(x, jax.tree.map(lambda leaf: leaf[number], layers))  # noqa: B023
        return jnp.sum(x)

    found = planner_of(loss, W, X)
    ((kind, of),) = found.found.kinds.items()
    flat = of.graph.derivative.flat
    made = [n for n, v in of.graph.values.items() if v.place and flat.ops[v.place[0]].primitive == primitive]
    nothing, everything = evaluate(of.graph, ()), evaluate(of.graph, made)
    assert nothing is not None
    assert everything is not None
    assert set(made) & everything.kept

    def runs(solution):
        step = plan_of(found, {kind: solution}).apply(jax.value_and_grad(loss))
        return runs_of(primitive, jax.make_jaxpr(step)(W, X))

    forward = runs_of(primitive, jax.make_jaxpr(loss)(W, X))
    backward = runs_of(primitive, jax.make_jaxpr(jax.value_and_grad(loss))(W, X)) - forward
    assert forward == 4  # one in each layer
    assert runs(nothing) == 2 * forward + backward
    assert runs(everything) == forward + backward
