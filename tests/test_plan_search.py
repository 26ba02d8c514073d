"""The planner against the compiler: budgets are kept, and no named policy that fits is faster."""

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
    least = plan_with(small, 1)
    assert not least.fits
    fastest = plan_with(small, None)
    assert fastest.fits
    middle = (least.need_bytes + fastest.need_bytes) // 2
    found = plan_with(small, middle)
    for each in (least, fastest, found):
        assert len(each.tried) <= MOST_COMPILES
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
    (block,) = found.blocks
    assert not any(each.name.startswith("random") for each in block.again)
    assert not block.checkpointed or any("[128,64]" in each.shape for each in block.kept)


def test_a_front_has_no_plan_that_another_beats(small):
    found = front(small, 4)
    assert not_beaten(found) == list(found)
    assert knee(found) in found
    assert [each.need_bytes for each in found] == sorted(each.need_bytes for each in found)


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
