"""The need of decisions that were not compiled, from those that were; and what is tried when nothing seems to fit."""

import dataclasses
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import planned

from remat_kit._plan.choose import Choice
from remat_kit._plan.make import plan_with
from remat_kit._plan.measured import NeedModel, Needs
from remat_kit._plan.solve import Solution

X = jnp.ones((2, 4))


def keeping(stack: int) -> Choice:
    return Choice(("a",), (Solution(frozenset({stack}), frozenset(), frozenset(), 1.0, stack, 0, 10),), (1,))


def seen(stack: int, need: int) -> NeedModel:
    """A program that keeps so many bytes and needs so many, at a peak in its blocks."""
    compiled = SimpleNamespace(need_bytes=need, blocks_bytes=need, update_bytes=0, other_bytes=0, gap_bytes=0)
    return NeedModel(keeping(stack), cast(Any, compiled))


def test_a_compiled_program_is_predicted_exactly():
    needs = Needs((seen(0, 1000), seen(100, 1300)))
    assert needs.need_bytes(keeping(0)) == 1000
    assert needs.need_bytes(keeping(100)) == 1300  # the first alone would say 1100


def test_between_two_programs_the_nearer_counts_more():
    needs = Needs((seen(0, 1000), seen(100, 1300)))
    # The first says 1000 and what is kept beyond it, the second 1300 less what is not kept.
    assert needs.need_bytes(keeping(50)) == 1150
    near, far = needs.need_bytes(keeping(10)), needs.need_bytes(keeping(90))
    assert 1010 < near < 1020
    assert 1280 < far < 1290


def test_limits_refer_to_the_program_whose_need_is_the_nearest():
    needs = Needs((seen(0, 1000), seen(100, 1300)))
    assert needs.at(1100).seen == keeping(0)
    assert needs.at(1200).seen == keeping(100)


def one_block(weights, x):
    layer = jax.tree.map(lambda each: each[0], weights["layers"])
    return jnp.sum(jax.checkpoint(planned.layer)(x @ weights["in"], layer) ** 2)


def test_a_named_policy_near_the_budget_is_tried_when_no_plan_fits(monkeypatch):
    planner = planned.planner_of(one_block, planned.weights(layers=1), X)
    budget = plan_with(planner, 1).need_bytes - 1
    named = planner.named

    def packed_better(policy):
        """One policy fits, though by the model it should not."""
        candidate = named(policy)
        if policy.name != "dots_saveable" or candidate.compiled is None:
            return candidate
        return dataclasses.replace(candidate, compiled=dataclasses.replace(candidate.compiled, need_bytes=budget))

    monkeypatch.setattr(planner, "named", packed_better)
    found = plan_with(planner, budget)
    assert found.best_policy is not None
    assert found.best_policy.name == "dots_saveable"
    assert "as dots_saveable" in {each.name for each in found.tried}


def empty_bits(weights, x):
    """Random bits that must not be made again, of which there are none."""

    def layer(x, own):
        noise = jax.random.uniform(jax.random.key(0, impl="rbg"), (0, 4))
        return planned.layer(x, own) + jnp.sum(noise * x[:1]), None

    return jnp.sum(jax.lax.scan(layer, x @ weights["in"], weights["layers"])[0] ** 2)


def test_a_block_that_leaves_no_decision_keeps_what_autodiff_keeps():
    found = plan_with(planned.planner_of(empty_bits, planned.weights(layers=3), X), None)
    assert found.fits
    assert not any(each.name == "all again" for each in found.tried)
    assert not any(block.checkpointed for block in found.blocks)
