"""`Plan.apply` with `nnx.value_and_grad` of a module whose state changes in place."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import planned
import pytest
from flax import nnx
from planned import X, jit, plan_of, random_solutions

from remat_kit import Step, get_target
from remat_kit._errors import PlanError
from remat_kit._jaxpr import count_work
from remat_kit._plan.search import Planner


def assert_close(got, expected):
    jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-6), got, expected)


class Layer(nnx.Module):
    """Two products, a batch normalization and a dropout: its state changes."""

    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(4, 6, rngs=rngs), nnx.Linear(6, 4, rngs=rngs)
        self.norm, self.drop = nnx.BatchNorm(6, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return x + self.down(self.drop(jnp.tanh(self.norm(self.up(x)))))


class Model(nnx.Module):
    """Three layers."""

    def __init__(self, rngs):
        self.first = nnx.Linear(4, 4, rngs=rngs)
        self.layers = nnx.List([Layer(rngs) for _ in range(3)])

    def __call__(self, x):
        x = self.first(x)
        for own in self.layers:
            x = own(x)
        return jnp.sum(x**2)


def of_state(change=lambda step: step):
    """(step on the state of a model, the state): results are the loss, the gradients and what changed in the state."""
    definition, state = nnx.split(Model(nnx.Rngs(0)))
    step = change(nnx.value_and_grad(lambda model, x: model(x)))

    def run(state, x):
        model = nnx.merge(definition, state)
        value, grads = step(model, x)
        changed = nnx.state(model, (nnx.BatchStat, nnx.RngCount))
        return value, nnx.to_pure_dict(grads), nnx.to_pure_dict(changed)

    return run, nnx.to_pure_dict(state)


def test_a_step_of_a_module_whose_state_changes():
    run, state = of_state()
    found = Planner.of(Step(run, (state, X)), get_target("cpu"))
    assert (len(found.found.sites), len(found.found.kinds)) == (3, 1)
    solutions = random_solutions(found, 1)
    plan = plan_of(found, solutions)
    expected = jit(run)(state, X)
    for planned_step in (plan.apply(run), of_state(plan.apply)[0]):
        assert_close(jit(planned_step)(state, X), expected)
        again = count_work(jax.make_jaxpr(planned_step)(state, X)).recomputed_flops
        assert again == planned.flops_again(found, solutions)


def test_a_loss_that_changes_its_module_is_refused():
    run, state = of_state()
    found = Planner.of(Step(run, (state, X)), get_target("cpu"))
    plan = plan_of(found, random_solutions(found, 1))
    with pytest.raises(PlanError, match=r"changes one of its arguments in place.*step that differentiates it"):
        nnx.value_and_grad(plan.apply(lambda model, x: model(x)))(Model(nnx.Rngs(0)), X)
