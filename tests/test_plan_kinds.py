"""Blocks that compute the same are decided together only where backward needs the same of them, as often."""

import jax
import jax.numpy as jnp
import planned
import pytest

from remat_kit._jaxpr import count_work
from remat_kit._plan.solve import evaluate

X = jnp.ones((2, 4))
FROZEN = planned.unstacked(planned.weights(layers=1))["layers"][0]
"""Weights of one layer, given to each loss but differentiated in none."""


def layer_of(layers, number):
    return jax.tree.map(lambda each: each[number], layers)


def every_value(graph):
    return [number for number, value in graph.values.items() if value.may_keep and not value.is_input]


def through(x, layers, numbers):
    for number in numbers:
        x = planned.layer(x, layer_of(layers, number))
    return x


def raw_input(weights, frozen, x):
    """The first layer takes the data, which is not differentiated."""
    return jnp.sum(through(x, weights["layers"], range(4)) ** 2)


def frozen_layer(weights, frozen, x):
    """The last layer has weights that are not differentiated."""
    x = x @ weights["in"]
    for own in (*weights["layers"], frozen):
        x = planned.layer(x, own)
    return jnp.sum(x**2)


def teacher(weights, frozen, x):
    """Backward goes through one of two equal networks."""

    def network(x):
        return planned.scanned()(weights, x)

    return (network(x) - jax.lax.stop_gradient(network(x + 1))) ** 2


def two_lengths(weights, frozen, x):
    """Two scans of the same layer, one longer than the other."""
    x = x @ weights["in"]
    for part in (slice(0, 2), slice(2, 5)):
        layers = jax.tree.map(lambda each, part=part: each[part], weights["layers"])
        x, _ = jax.lax.scan(lambda x, own: (planned.layer(x, own), None), x, layers)
    return jnp.sum(x**2)


def scan_and_call(weights, frozen, x):
    """One layer in a scan, and called once behind it."""
    layer = jax.checkpoint(planned.layer)
    first = jax.tree.map(lambda each: each[:3], weights["layers"])
    x, _ = jax.lax.scan(lambda x, own: (layer(x, own), None), x @ weights["in"], first)
    return jnp.sum(layer(x, layer_of(weights["layers"], 3)) ** 2)


LOSSES = {
    raw_input: [1, 3],
    frozen_layer: [5, 1],
    teacher: [1],
    two_lengths: [1, 1],
    scan_and_call: [1, 1],
}


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
@pytest.mark.parametrize("keeps", [False, True])
def test_the_model_counts_the_products_that_run_again(loss, keeps):
    weights = planned.weights(layers=5)
    given = planned.unstacked(weights) if loss is frozen_layer else weights, FROZEN, X
    planner = planned.planner_of(loss, *given)
    assert sorted(len(kind.instances) for kind in planner.found.kinds.values()) == sorted(LOSSES[loss])
    solutions = {
        name: evaluate(kind.graph, every_value(kind.graph) if keeps else ())
        for name, kind in planner.found.kinds.items()
    }
    plan = planned.plan_of(planner, solutions)
    step = plan.apply(jax.value_and_grad(loss))
    counted = count_work(jax.make_jaxpr(step)(*given)).recomputed_flops
    assert planned.flops_again(planner, solutions) == counted
    assert (counted == 0) == keeps
    for ours, theirs in zip(*map(jax.tree.leaves, (step(*given), jax.value_and_grad(loss)(*given))), strict=True):
        assert jnp.allclose(ours, theirs, rtol=1e-5)
