"""`Plan.apply` on plain JAX functions: results stay, what is kept and computed again is what the plan says."""

import functools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import planned
import pytest
from planned import LOSSES, X, jit, plan_of, planner_of, random_solutions, some_plan

from remat_kit import Step, get_target
from remat_kit._errors import PlanError, RematKitError
from remat_kit._jaxpr import count_work
from remat_kit._plan.plan import Plan
from remat_kit._plan.search import Planner
from remat_kit._plan.solve import evaluate
from remat_kit._saved import saved_values

W = planned.weights()
CPU = get_target("cpu")


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


@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradients_stay(name):
    value, (grads, _) = expected()
    got = jit(plan(name).apply(value_and_grad(LOSSES[name])))(W, X)
    assert jax.tree.structure(got) == jax.tree.structure((value, grads))
    assert_close(got, (value, grads))


@pytest.mark.parametrize("name", ["scan", "unrolled"])
def test_loss_and_gradients_stay_with_a_plan_that_was_read(name, remat3):
    value, (grads, _) = expected()
    step, applied = value_and_grad(LOSSES[name]), Plan.loads(plan(name).dumps())
    got = jit(applied.apply(step))(W, X)
    assert jax.tree.structure(got) == jax.tree.structure((value, grads))
    assert_close(got, (value, grads))


@pytest.mark.parametrize("name", LOSSES)
def test_the_step_and_its_loss_are_planned_alike(name):
    of_step = jax.make_jaxpr(plan(name).apply(value_and_grad(LOSSES[name])))(W, X)
    of_loss = jax.make_jaxpr(value_and_grad(plan(name).apply(LOSSES[name])))(W, X)
    assert count_work(of_step) == count_work(of_loss)
    assert saved_values(of_step) == saved_values(of_loss)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", LOSSES)
def test_what_runs_again_and_what_is_kept_is_what_the_model_says(name, seed):
    found = planner(name)
    solutions = random_solutions(found, seed)
    traced = jax.make_jaxpr(plan_of(found, solutions).apply(value_and_grad(LOSSES[name])))(W, X)
    assert count_work(traced).recomputed_flops == planned.flops_again(found, solutions)
    # Beside the blocks, the square at the end keeps its float32 [3, 4]; the argument is there anyway.
    assert saved_values(traced).device_bytes == planned.bytes_kept(found, solutions) + 4 * 3 * 4


def test_what_runs_again_with_remat3(remat3):
    for name in ("scan", "unrolled"):
        solutions = random_solutions(planner(name), 1)
        traced = jax.make_jaxpr(plan_of(planner(name), solutions).apply(value_and_grad(LOSSES[name])))(W, X)
        assert count_work(traced).recomputed_flops == planned.flops_again(planner(name), solutions)


def test_offloaded_values_wait_in_host_memory():
    found = planner("scan")
    ((kind, of),) = found.found.kinds.items()
    wide = [n for n, v in of.graph.values.items() if v.may_keep and v.place and v.bytes == 4 * 3 * 6]
    solution = evaluate(of.graph, (), wide)
    assert solution is not None
    assert solution.offloaded
    applied = Plan.loads(plan_of(found, {kind: solution}).dumps())
    assert {kept.how for block in applied.blocks for kept in block.kept} == {"offload"}
    saved = saved_values(jax.make_jaxpr(applied.apply(value_and_grad(LOSSES["scan"])))(W, X))
    assert saved.host_bytes == solution.host_bytes


def microbatched(w, xs):
    """Gradients of two microbatches. The carried loss has a weak type at first, so JAX traces the body twice."""

    def turn(carry, x):
        value, grads = jax.value_and_grad(LOSSES["scan"])(w, x)
        return (carry[0] + value, jax.tree.map(jnp.add, carry[1], grads)), None

    return jax.lax.scan(turn, (0.0, jax.tree.map(jnp.zeros_like, w)), xs)[0]


def test_microbatches():
    xs = jnp.stack([X, 2 * X])
    found = Planner.of(Step(microbatched, (W, xs)), CPU)
    solutions = random_solutions(found, 1)
    applied = plan_of(found, solutions).apply(microbatched)
    assert_close(jit(applied)(W, xs), jit(microbatched)(W, xs))
    work = count_work(jax.make_jaxpr(applied)(W, xs))
    assert work.recomputed_flops == 2 * planned.flops_again(found, solutions)


def test_a_step_that_differentiates_two_functions_is_refused():
    def step(w, x):
        return jax.grad(LOSSES["scan"])(w, x), jax.grad(lambda w, x: jnp.sum(x @ w["in"]))(w, x)

    with pytest.raises(RematKitError, match=r"differentiates several functions.*jax\.grad"):
        Planner.of(Step(step, (W, X)), CPU)
    with pytest.raises(PlanError, match="another model"):
        jax.make_jaxpr(plan().apply(step))(W, X)


def test_a_step_that_differentiates_one_function_twice():
    def step(w, x):
        first = jax.grad(LOSSES["scan"])(w, x)
        return jax.grad(LOSSES["scan"])(jax.tree.map(lambda leaf, by: leaf + 0.1 * by, w, first), x)

    found = Planner.of(Step(step, (W, X)), CPU)
    applied = plan_of(found, random_solutions(found, 1)).apply(step)
    assert_close(jit(applied)(W, X), jit(step)(W, X))


def test_a_step_without_a_derivative_is_refused():
    with pytest.raises(RematKitError, match=r"differentiates nothing.*jax\.grad"):
        Planner.of(Step(LOSSES["scan"], (W, X)), CPU)


def test_a_step_whose_blocks_are_not_differentiated_is_refused():
    def loss(w, x):
        return LOSSES["scan"](jax.lax.stop_gradient(w), x) + jnp.sum(w["in"] ** 2)

    with pytest.raises(RematKitError, match="backward goes through none of the step's blocks"):
        planner_of(loss, W, X)


def test_blocks_that_are_not_differentiated_are_left_alone():
    def loss(w, x, frozen):
        return LOSSES["scan"](w, jax.lax.scan(lambda x, w: (jnp.sin(planned.layer(x, w)), None), x, frozen)[0])

    step = jax.value_and_grad(loss)
    found = Planner.of(Step(step, (W, X, W["layers"])), CPU)
    assert len(found.found.sites) == 1
    solutions = random_solutions(found, 1)
    work = count_work(jax.make_jaxpr(plan_of(found, solutions).apply(step))(W, X, W["layers"]))
    assert work.recomputed_flops == planned.flops_again(found, solutions)


def test_a_derivative_inside_of_the_loss_is_left_alone():
    def loss(w, x):
        def energy(x):
            return jnp.sum(jnp.tanh(x))

        return LOSSES["scan"](w, jax.grad(energy)(x))

    applied = some_plan(loss, W, X).apply(value_and_grad(loss))
    assert_close(jit(applied)(W, X), jit(value_and_grad(loss))(W, X))


def test_an_error_of_the_loss_itself_stays_what_it_is():
    def loss(w, x):
        raise ValueError("x is odd")

    plan = planned.some_plan(LOSSES["scan"], W, X)
    with pytest.raises(ValueError, match=r"^x is odd"):
        plan.apply(loss)(W, X)
