"""The comparison with PyTorch's activation memory budget, from what is kept of PyTorch's side: no PyTorch is needed."""

import json

import pytest

from experiments import against_torch

ONE = 2 * 2048 * 768 * 768
"""FLOPs of a projection from width to width of 4 sequences of 512 tokens."""
BATCHED = 2 * 4 * 12 * 512 * 512 * 64
"""FLOPs of attention's scores, and of its context."""


@pytest.fixture(scope="module")
def torch_side():
    return json.loads(against_torch.TORCH.read_text())


@pytest.fixture(scope="module")
def rows(torch_side):
    return against_torch.compare(torch_side)


def test_the_kept_budgets_of_torch_add_up(torch_side):
    settings = torch_side["settings"]
    assert (settings["solver"], settings["runtime_estimator"]) == ("dp", "flops")
    assert [row["budget"] for row in torch_side["rows"]] == [number / 20 for number in range(21)]
    for row in torch_side["rows"]:
        assert row["saved_bytes"] == sum(each["bytes"] for each in row["saved"])
        assert row["free_inputs"] == 16  # the parameters, as PyTorch knows them
        assert row["forward_flops"] == 4 * ONE + 8 * ONE + 2 * BATCHED
        assert row["backward_flops"] == 2 * row["forward_flops"] + row["recomputed_flops"]
    first, last = torch_side["rows"][0], torch_side["rows"][-1]
    assert first["saved_bytes"] == last["recomputed_flops"] == 0
    # Budget 0 computes all again but the last projection, whose result backward does not take.
    assert first["recomputed_flops"] == first["forward_flops"] - 4 * ONE
    assert len(first["recomputed"]) == 7


def test_both_blocks_compute_the_same(torch_side):
    apart = against_torch.differences(torch_side)
    assert len(apart) == 18  # the output, the gradients of 16 parameters and of the input
    assert max(apart.values()) < against_torch.NEAR


def test_at_the_bytes_of_each_budget_our_plan_recomputes_no_more_flops(rows, torch_side):
    assert len(rows) == len(torch_side["rows"])
    for row in rows:
        assert row.our_bytes <= row.torch_bytes, row
        assert row.our_flops <= row.torch_flops, row
        assert row.is_not_worse
    assert rows[-1].our_flops == 0


def test_the_kept_table_is_not_worse_and_renders(rows):
    kept = json.loads(against_torch.OUT.read_text())
    assert [row["budget"] for row in kept["rows"]] == [row.budget for row in rows]
    assert all(row["not_worse"] for row in kept["rows"])
    for ours, row in zip(rows, kept["rows"], strict=True):
        assert against_torch.as_json(ours).keys() == row.keys()
        assert (ours.torch_bytes, ours.torch_flops) == (row["torch_saved_bytes"], row["torch_recomputed_flops"])
        assert ours.our_flops == row["our_recomputed_flops"]
    lines = against_torch.table(rows).splitlines()
    assert len(lines) == 1 + len(rows)
    assert all(line.endswith(" yes") for line in lines[1:])


def test_a_budget_in_which_we_are_worse_fails(torch_side, tmp_path, monkeypatch, capsys):
    better = torch_side["rows"][0] | {"recomputed_flops": 4 * ONE}
    changed = tmp_path / "torch.json"
    changed.write_text(json.dumps(torch_side | {"rows": [better, torch_side["rows"][-1]]}))
    out = tmp_path / "out.json"
    monkeypatch.setattr("sys.argv", ["against_torch.py", "--torch", str(changed), "--out", str(out)])
    assert against_torch.main() == 1
    assert [row["not_worse"] for row in json.loads(out.read_text())["rows"]] == [False, True]
    assert capsys.readouterr().out.count(" NO") == 1


def test_other_shapes_than_those_of_torch_are_refused(torch_side):
    other = torch_side | {"sizes": torch_side["sizes"] | {"seq": 256}}
    with pytest.raises(AssertionError, match="the blocks differ"):
        against_torch.compare(other)
