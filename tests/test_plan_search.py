"""The planner against the compiler: budgets are kept, and no named policy that fits is faster."""

import dataclasses

import pytest
from workloads import plans

from remat_kit import get_policy, get_target
from remat_kit._plan.front import front, knee, not_beaten
from remat_kit._plan.make import plan, plan_with
from remat_kit._plan.search import MOST_COMPILES, Planner
from remat_kit._step import Workload

GPU = get_target("h100-sxm-80gb")
CPU = get_target("cpu")
SHAPE = (("size", "tiny"), ("width", 256), ("seq", 512), ("batch", 4), ("layers", 3), ("dropout", 0.0))


@pytest.fixture(scope="module")
def small():
    return Planner.of(plans.stack("full"), CPU)


def test_at_most_five_compiles_and_the_budget_is_kept(small):
    def planned(budget):
        before = small.compiles
        found = plan_with(small, budget)
        assert small.compiles - before <= MOST_COMPILES
        assert len(found.tried) <= MOST_COMPILES + 1  # and an answer that was compiled for another budget
        return found

    least = planned(1)
    assert not least.fits
    assert small.compiles > 0
    fastest = planned(None)
    assert fastest.fits
    middle = (least.need_bytes + fastest.need_bytes) // 2
    found = planned(middle)
    assert found.fits
    assert found.need_bytes <= middle
    assert fastest.step_s <= found.step_s <= least.step_s
    assert found.margin_bytes == middle - found.need_bytes


def test_what_does_not_fit_says_what_holds_it(small):
    found = plan_with(small, 1000)
    assert found.margin_bytes is not None
    assert found.margin_bytes < 0
    assert any("held by" in reason for reason in found.reasons)
    assert any("the floor" in reason for reason in found.reasons)


def test_random_bits_that_must_not_be_made_twice_are_kept():
    planner = Planner.of(plans.masked("full"), CPU)
    found = plan_with(planner, None)
    assert found.fits
    assert "full" not in {policy.name for policy in planner.policies()}
    assert "full" not in {each.name for each in found.tried}
    assert not any("every block again" in reason for reason in found.reasons)
    (kind,) = planner.found.kinds.values()
    ops = kind.graph.derivative.flat.ops
    random = {position for position, op in enumerate(ops) if op.primitive == "random_bits"}
    assert random
    compiled = [each.choice.solutions for each in planner.plans_so_far()]
    assert compiled
    for solutions in compiled:
        assert not any(random & solution.again for solution in solutions)


def test_a_front_has_no_plan_that_another_beats(small):
    found = front(small, 4)
    compiled = [(each.need_bytes, each.seconds) for each in small.plans_so_far()]
    shown = [(each.need_bytes, each.step_s) for each in found]
    assert len(shown) > 1
    assert set(shown) <= set(compiled)
    assert shown == sorted(shown)
    assert shown[0][0] == min(need for need, _ in compiled)
    assert shown[-1][1] == min(seconds for _, seconds in compiled)
    for need, seconds in shown:
        better = [each for each in compiled if each[0] <= need and each[1] <= seconds and each != (need, seconds)]
        assert not better


def test_the_knee_is_near_both_ends(small):
    plan = plan_with(small, None)
    plans = [
        dataclasses.replace(plan, need_bytes=need, step_s=seconds)
        for need, seconds in ((100, 2.0), (110, 1.1), (200, 1.0), (190, 1.05), (115, 1.6))
    ]
    assert knee(plans) is plans[1]
    # None of these is beaten but the last, in whatever order they come.
    assert not_beaten(plans) == [plans[0], plans[1], plans[3], plans[2]]
    assert not_beaten([plans[1], plans[1]]) == [plans[1]]


def test_the_same_plan_twice_is_the_same_text():
    one, other = (plan(plans.stack("full"), CPU, 5 * 2**20) for _ in range(2))
    assert one.dumps() == other.dumps()


def test_a_named_policy_that_is_faster_is_never_passed_over(small):
    for policy in small.policies():
        small.named(policy)
    budget = 64 * 2**20
    fitting = [each for each in small.named_so_far() if each.fits(budget)]
    assert fitting
    assert plan_with(small, budget).step_s <= min(each.seconds for each in fitting) * (1 + 1e-9)


@pytest.mark.slow
def test_a_plan_for_a_gpu_by_its_budget():
    step = Workload("models.transformer:gpt", SHAPE).build(get_policy("full"), "cuda")
    fastest = plan(step, GPU)
    assert fastest.fits
    assert fastest.best_policy is not None
    assert fastest.best_policy.step_s is not None
    assert fastest.step_s <= fastest.best_policy.step_s
    assert {each.name for each in fastest.tried} > {"all again"}
