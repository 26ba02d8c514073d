"""XLA's own rematerialization pass: what doing nothing gives, and a candidate of the planner."""

import dataclasses

import pytest
from captured import TINY_ON_GPU, small_memory
from hlo_samples import skip_without_plugin

from models import transformer
from remat_kit import POLICIES, CompileOptions, Plan, get_target
from remat_kit._plan import make
from remat_kit._plan.make import plan_with
from remat_kit._plan.own_pass import LIMIT_OPTION, options_under
from remat_kit._plan.search import XLA_AUTO, Candidate, Planner
from remat_kit._report.plan import render

GPU = get_target("h100-sxm-80gb")
MEMORY = GPU.chip.memory_bytes
FIXED = MEMORY // 10  # XLA's limit is then 8/10 less 1/10 of the memory


@pytest.mark.parametrize(
    ("budget", "percent"), [(FIXED + MEMORY * 7 // 100 + 100, "10"), (FIXED + MEMORY * 7 // 10 + 100, "100")]
)
def test_xlas_limit_is_the_budget_less_inputs_and_outputs(budget, percent):
    options = options_under(budget, FIXED, GPU, CompileOptions(xla_options=(("a", "b"),)))
    assert options is not None
    assert options.xla_remat == "on"
    assert options.xla_options == (("a", "b"), (LIMIT_OPTION, percent))
    assert "xla_disable_hlo_passes" not in options.for_xla("cuda")


def test_where_xlas_pass_cannot_be_told_a_budget():
    asked = CompileOptions()
    assert options_under(float("inf"), FIXED, GPU, asked) is None
    assert options_under(FIXED + 1, FIXED, GPU, asked) is None
    assert options_under(MEMORY, MEMORY, GPU, asked) is None
    assert options_under(10**9, 0, get_target("cpu"), asked) is None
    own = CompileOptions(xla_options=((LIMIT_OPTION, "95"),))
    assert options_under(FIXED + MEMORY // 10, FIXED, GPU, own) is None


@pytest.fixture(scope="module")
def planner():
    skip_without_plugin()
    step = transformer.gpt("none", stack="unroll", batch=64, **TINY_ON_GPU)
    return Planner.of(step, small_memory(2**28))


def none_of(planner: Planner) -> Candidate:
    return planner.named(POLICIES["none"])


def test_it_is_compiled_once_a_limit_and_needs_less_than_no_checkpoint(planner):
    planner.all_again()
    none = none_of(planner)
    budget = none.need_bytes * 0.8
    found = planner.xla_auto(budget)
    assert found is not None
    assert found.compiled is not None
    assert found.need_bytes < none.need_bytes
    before = planner.compiles
    assert planner.xla_auto(budget) is found
    assert planner.compiles == before
    assert found not in planner.named_so_far()
    assert found not in planner.plans_so_far()


def test_it_is_tried_where_no_checkpoint_is_over_the_budget_and_taken_where_it_is_fastest(planner, monkeypatch):
    budget = int(none_of(planner).need_bytes * 0.8)
    plan = plan_with(planner, budget)
    own = planner.xla_auto(budget)
    assert own is not None
    assert XLA_AUTO in {each.name for each in plan.tried}
    assert plan.fits
    assert not own.fits(budget) or plan.step_s <= own.seconds
    compiled_by_xla = own.compiled
    assert compiled_by_xla is not None
    key = next(key for key, each in planner._candidates.items() if each is own)

    def made_with(seconds: float) -> Plan:
        """The plan, if the pass took so long."""
        prediction = dataclasses.replace(compiled_by_xla.prediction, seconds=seconds)
        compiled = dataclasses.replace(compiled_by_xla, prediction=prediction, need_bytes=budget)
        monkeypatch.setitem(planner._candidates, key, dataclasses.replace(own, compiled=compiled))
        return plan_with(planner, budget)

    slow = made_with(plan.step_s * 2)
    assert slow.compiler_options == {}
    assert "compiler options" not in render(slow)
    taken = made_with(slow.step_s / 2)
    assert taken.step_s == slow.step_s / 2
    assert dict(own.options) == taken.compiler_options
    assert all(not block.checkpointed for block in taken.blocks)
    assert f"{LIMIT_OPTION}=" in " ".join(taken.reasons)
    assert "compiler options" in render(taken)
    # A plan without a budget has nothing to tell it.
    assert XLA_AUTO not in {each.name for each in plan_with(planner, None).tried}


def test_the_last_compile_is_that_of_a_faster_named_policy(planner, monkeypatch):
    again = planner.all_again()
    search = make._Search(planner, int(none_of(planner).need_bytes * 0.8))
    search._add(again)
    monkeypatch.setattr(make, "MOST_COMPILES", 2)
    search._own_pass()
    assert [each.name for each in search.tried] == [again.name, XLA_AUTO]
    search.tried.pop()
    at_once = dataclasses.replace(again.compiled.prediction, seconds=0.0)
    compiled = dataclasses.replace(again.compiled, prediction=at_once)
    search.best_policy = dataclasses.replace(again, compiled=compiled, is_policy=True)
    search._own_pass()
    assert [each.name for each in search.tried] == [again.name]
