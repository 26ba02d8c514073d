"""The kept results of the planner's experiments: what they promise holds in every row, and the tables are theirs."""

import json
import math

import pytest

from experiments import plan_measured, plan_suite
from remat_kit._plan.make import REUSED

SUITE = json.loads(plan_suite.RESULTS.read_text())
MEASURED = json.loads(plan_measured.RESULTS.read_text())


def name_of(row):
    return f"{row['workload']}, {row['target']}, {row['share']}"


def geometric_mean(ratios):
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def test_every_workload_was_planned_for_every_budget_and_target():
    cells = {(row["workload"], row["target"], row["share"]) for row in SUITE}
    assert len(cells) == len(SUITE)
    assert cells == {
        (workload, target, share)
        for workload in plan_suite.WORKLOADS for target in plan_suite.TARGETS for share in plan_suite.SHARES
    }  # fmt: skip


@pytest.mark.parametrize("row", SUITE, ids=name_of)
def test_a_plan_keeps_to_its_budget_or_says_what_holds_the_memory(row):
    assert row["fits"] == (row["need_bytes"] <= row["budget_bytes"])
    assert row["fits"] or row["holds"]
    assert row["compiles"] <= 5


@pytest.mark.parametrize("row", [row for row in SUITE if row["policy"]], ids=name_of)
def test_a_plan_is_never_slower_than_a_named_policy_that_fits(row):
    assert row["policy_need_bytes"] <= row["budget_bytes"]
    assert row["step_s"] <= row["policy_step_s"]


def test_the_need_is_known_to_two_percent_before_the_last_correction():
    errors = {}
    for row in SUITE:
        own = [each for each in row["tried"] if each["predicted_need_bytes"] and not each["name"].endswith(REUSED)]
        if any(not each["fits"] for each in own[:-1]):  # one was over the budget, and another was made for it
            errors[name_of(row)] = own[-1]["predicted_need_bytes"] / own[-1]["need_bytes"] - 1
    assert len(errors) > len(SUITE) / 6
    assert not {name: error for name, error in errors.items() if abs(error) > 0.02}


def test_the_mean_is_at_least_five_percent_below_the_best_named_policy():
    assert geometric_mean([row["ratio"] for row in SUITE if row["ratio"]]) <= 0.95


def test_a_loop_is_written_out_somewhere_and_not_everywhere():
    looped = [row for row in SUITE if row["workload"] not in ("GPT naive unrolled", "U-Net")]
    assert {row["unrolled"] for row in looped} == {True, False}
    assert not any(row["unrolled"] for row in SUITE if row not in looped)


def test_the_table_says_the_mean_and_where_nothing_was_gained():
    ratios = [row["ratio"] for row in SUITE if row["ratio"]]
    text = plan_suite.table(SUITE)
    assert f"over {len(ratios)} cells: {geometric_mean(ratios) - 1:+.1%}" in text
    assert f"in {sum(ratio > 0.995 for ratio in ratios)} of them" in text


def test_measured_plans_are_faster_than_named_policies_and_losses_are_said():
    ratios = [row["plan_s"]["median"] / row["policy_s"]["median"] for row in MEASURED]
    assert {row["workload"] for row in MEASURED} == set(plan_measured.WORKLOADS)
    assert geometric_mean(ratios) <= 0.97
    lines = plan_measured.table(MEASURED).splitlines()[1:-1]
    assert [" loss " in line for line in lines] == [ratio > 1 for ratio in ratios]
