"""Loops over blocks written out: the same results, each turn a block of its own."""

import dataclasses
import json

import chex
import jax
import jax.numpy as jnp
import planned
import pytest
from planned import LOSSES, X, jit, plan_of, planner_of, random_solutions
from workloads import plans

from remat_kit import PlanError, Step, get_target
from remat_kit._plan import unroll
from remat_kit._plan.choose import Choice
from remat_kit._plan.describe import block_plans
from remat_kit._plan.find import find_sites
from remat_kit._plan.layout import flat_of, lay_out
from remat_kit._plan.make import plan_with
from remat_kit._plan.plan import Plan
from remat_kit._plan.python import to_maxtext, to_python
from remat_kit._plan.search import MOST_COMPILES, UNROLLED, Planner

W = planned.weights()
LOOPS = ("scan", "scan of checkpoints", "checkpoint of a scan")


def with_outputs(w, x):
    """A loop that runs backward, counts its turns, draws random bits, and gives something out in each turn."""

    def turn(carried, layer):
        x, number, key = carried
        x = planned.layer(x, layer)
        mask = jax.random.bernoulli(jax.random.fold_in(key, number), 0.7, x.shape)
        x = jnp.where(mask, x, 0.0)
        return (x, number + 1, key), (jnp.sum(x, -1), number)

    carried = (x @ w["in"], 0, jax.random.key(3))
    (x, _, _), (sums, numbers) = jax.lax.scan(turn, carried, w["layers"], reverse=True)
    return jnp.sum(x**2) + jnp.sum(sums * (1 + numbers)[:, None])


def two_loops(w, x):
    x = x @ w["in"]
    x = jax.lax.scan(lambda x, w: (planned.layer(x, w), None), x, w["layers"])[0]
    x = jax.lax.scan(lambda x, w: (jnp.tanh(planned.layer(x, w)), None), x, w["layers"])[0]
    return jnp.sum(x**2)


def microbatches(w, xs):
    return jnp.sum(jax.lax.map(lambda x: LOSSES["scan"](w, x), xs))


def written_out(loss, *args):
    jaxpr = jax.make_jaxpr(loss)(*args)
    sites = find_sites(jaxpr)
    loops = unroll.loops_over_blocks(jaxpr, sites)
    return unroll.unrolled(jaxpr, loops), unroll.sites_of_turns(jaxpr, sites, loops)


@pytest.mark.parametrize("loss", [*(LOSSES[name] for name in LOOPS), with_outputs, two_loops])
def test_turns_are_equal_blocks_and_nothing_is_left_of_the_loop(loss):
    jaxpr, sites = written_out(loss, W, X)
    assert not any(op.primitive == "scan" for op in flat_of(jaxpr).ops)
    instances = list(lay_out(jaxpr, sites).instances())
    assert len(instances) == (8 if loss is two_loops else 4)
    # The first turn may begin with a constant, and what the last one counts is read by nobody.
    assert len({each.kind for each in instances}) == {with_outputs: 3, two_loops: 2}.get(loss, 1)
    parameters = [each.lasting for each in instances]
    assert all(len(each) >= 3 for each in parameters), "rows of parameters live as long as parameters"


@pytest.mark.parametrize("loss", [*(LOSSES[name] for name in LOOPS), with_outputs, two_loops])
def test_loss_and_gradients_stay(loss):
    planner = planner_of(loss, W, X, unroll=True)
    plan = plan_of(planner, random_solutions(planner, 5))
    assert plan.unrolled
    expected = jit(jax.value_and_grad(loss))(W, X)
    chex.assert_trees_all_close(jit(jax.value_and_grad(plan.apply(loss)))(W, X), expected, rtol=1e-5, atol=1e-6)
    step = jit(plan.apply(jax.value_and_grad(loss)))
    chex.assert_trees_all_close(step(W, X), expected, rtol=1e-5, atol=1e-6)


def test_blocks_of_one_loop_may_keep_different_values():
    planner = planner_of(LOSSES["scan"], W, X, unroll=True)
    (kind,) = planner.found.kinds
    keeps = [random_solutions(planner, seed)[kind] for seed in (1, 2, 3, 2)]
    choice = Choice(planner.kinds, tuple(keeps), (1,) * 4)
    plan = dataclasses.replace(plan_of(planner, {kind: keeps[0]}), blocks=block_plans(planner, choice))
    assert [len(block.sites) for block in plan.blocks] == [1, 2, 1]
    expected = jit(jax.value_and_grad(LOSSES["scan"]))(W, X)
    found = jit(jax.value_and_grad(plan.apply(LOSSES["scan"])))(W, X)
    chex.assert_trees_all_close(found, expected, rtol=1e-5)


def test_gradients_of_stacked_parameters_are_put_together_once():
    """Each row's own would be an array as large as all, added to the others."""
    planner = planner_of(LOSSES["scan"], W, X, unroll=True)
    plan = plan_of(planner, random_solutions(planner, 0))
    jaxpr = jax.make_jaxpr(jax.grad(plan.apply(LOSSES["scan"])))(W, X)
    assert planned.runs_of("concatenate", jaxpr) == len(W["layers"])
    assert not planned.runs_of("dynamic_update_slice", jaxpr)
    assert not planned.runs_of("pad", jaxpr)


def test_loops_around_loops_stay():
    """Only the loop that runs blocks is written out, and only when it is in no other."""
    xs = jnp.stack([X, X])
    for loss, args in ((microbatches, (W, xs)), (LOSSES["segments"], (W, X))):
        jaxpr = jax.make_jaxpr(loss)(*args)
        assert unroll.loops_over_blocks(jaxpr, find_sites(jaxpr)) == ()
        step = Step(jax.value_and_grad(loss), args)
        assert Planner.of(step, get_target("cpu"), unroll=True).unrolled is None


def test_a_loop_that_would_be_too_long_stays(monkeypatch):
    jaxpr = jax.make_jaxpr(LOSSES["scan"])(W, X)
    monkeypatch.setattr(unroll, "MOST_OPERATIONS", 40)
    assert unroll.loops_over_blocks(jaxpr, find_sites(jaxpr)) == ()


def test_a_plan_file_and_plain_python_write_them_out_too(assert_same_program):
    planner = planner_of(with_outputs, W, X, unroll=True)
    plan = plan_of(planner, random_solutions(planner, 7))
    again = Plan.loads(plan.dumps())
    assert again == plan
    assert json.loads(plan.dumps())["unrolled"] == list(plan.unrolled)
    namespace = {"__name__": "planned_by"}
    exec(compile(to_python(plan), "planned_by.py", "exec"), namespace)
    ours = jax.make_jaxpr(jax.value_and_grad(again.apply(with_outputs)))(W, X)
    theirs = jax.make_jaxpr(jax.value_and_grad(namespace["planned"](with_outputs)))(W, X)
    assert_same_program(theirs, ours)


def test_maxtext_is_told():
    planner = planner_of(LOSSES["scan"], W, X, unroll=True)
    plan = plan_of(planner, random_solutions(planner, 0))
    bare = dataclasses.replace(plan, blocks=tuple(dataclasses.replace(each, kept=()) for each in plan.blocks))
    assert to_maxtext(bare) == "scan_layers: false\nremat_policy: custom"
    assert to_maxtext(dataclasses.replace(bare, unrolled=())) == "remat_policy: custom"


def test_another_model_is_refused():
    planner = planner_of(LOSSES["scan"], W, X, unroll=True)
    plan = plan_of(planner, random_solutions(planner, 0))
    fewer = {**W, "layers": jax.tree.map(lambda leaf: leaf[:3], W["layers"])}
    with pytest.raises(PlanError, match="the plan is for another model"):
        jax.make_jaxpr(plan.apply(LOSSES["scan"]))(fewer, X)
    with pytest.raises(PlanError, match="should be a scan and is not"):
        jax.make_jaxpr(plan.apply(LOSSES["unrolled"]))(W, X)


def test_the_planner_writes_loops_out_where_that_is_faster():
    step = plans.stack("full")
    planner = Planner.of(step, get_target("cpu"), unroll=True)
    allowed, least = plan_with(planner, None), plan_with(planner, 1)
    assert len(least.tried) <= MOST_COMPILES
    assert not least.fits
    assert not any(each.name.endswith(UNROLLED) for each in least.tried), "it needs no less"
    assert any("were not written out" in reason for reason in least.reasons)
    assert len(allowed.tried) <= MOST_COMPILES
    tried = {each.name.endswith(UNROLLED): each for each in sorted(allowed.tried, key=lambda each: -(each.step_s or 0))}
    assert set(tried) == {True, False}
    assert tried[True].step_s < tried[False].step_s
    assert allowed.unrolled
    assert allowed.step_s == tried[True].step_s
    assert any("are written out" in reason for reason in allowed.reasons)


def test_it_says_why_no_loop_is_written_out():
    step = Step(jax.value_and_grad(microbatches), (W, jnp.stack([X, X])))
    found = plan_with(Planner.of(step, get_target("cpu"), unroll=True), None)
    assert not found.unrolled
    assert any("No loop is written out: there is none" in reason for reason in found.reasons)
