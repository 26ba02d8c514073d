"""The kept comparison of `remat-kit max` with exhaustive compilation says what the documentation says of it."""

import json

import pytest

from experiments import max_exhaustive

ROWS = json.loads(max_exhaustive.RESULTS.read_text())


def test_every_case_and_policy_is_there():
    found = {(row["workload"], row["option"], row["policy"]) for row in ROWS}
    cases = max_exhaustive.CASES.values()
    assert len(found) == len(ROWS)
    assert found == {(case.workload, case.option, policy) for case in cases for policy in case.policies}
    assert len({case.workload for case in cases}) >= 3


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['workload']} {row['option']} {row['policy']}")
def test_the_answer_is_that_of_compiling_all(row):
    needs = {int(value): need for value, need in row["exhaustive"].items()}
    fitting = [value for value, need in needs.items() if need <= row["limit_bytes"]]
    assert row["kind"] == "proved"
    assert row["value"] == max(fitting)
    assert all(value <= row["value"] for value in fitting)
    assert sorted(fitting) == sorted(value for value in needs if value <= row["value"]), "all up to the answer fit"
    assert row["value"] + row["step"] in needs
    assert row["compiles"] == len(row["tried"]) <= max_exhaustive.MOST_COMPILES
    for each in row["tried"]:
        assert each["need_bytes"] == needs.get(each["value"], each["need_bytes"]), "the same program has the same need"
