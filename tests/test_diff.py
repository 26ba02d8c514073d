"""Differences of records: rows matched by what stays, sums that are the change of the live peak."""

import dataclasses
import json

import pytest
from explanations import EDITED, EXPLANATION, HOLDERS, RECORD, explained, holder

from remat_kit._diff import DIFF_VERSION, diff, title
from remat_kit._record import Record, dump, load
from remat_kit._units import MiB


def rows(before, after):
    """kind, source before the edit is not kept, difference in bytes."""
    found = diff(explained(tuple(before)), explained(tuple(after)))
    total = sum(row.difference for row in found.rows)
    assert total == found.live_peak.difference == sum(each.difference for each in found.categories)
    return [(row.kind, row.source, row.difference) for row in found.rows]


def at(line, size, function="f", file="m/x.py", **rest):
    return holder("saved activations", size, "blocks/mlp", f"{file}:{line} ({function})", shape="f32[8]", **rest)


def test_an_edit():
    found = diff(RECORD, EDITED)
    assert [(row.kind, row.module, row.difference // MiB) for row in found.rows] == [
        ("grew", "blocks/mlp", 576),
        ("went", "blocks/attention", -432),
        ("shrank", "blocks/mlp/up", -37),
        ("came", "blocks/norm", 24),
    ]
    assert {each.name: each.difference // MiB for each in found.categories if each.difference} == {
        "saved activations": 168,
        "gradients": -37,
    }
    assert sum(row.difference for row in found.rows) == found.live_peak.difference == 131 * MiB
    assert sum(each.difference for each in found.categories) == 131 * MiB
    assert found.notes == ()


def test_the_parts_of_the_need_add_up_on_both_sides():
    argument, output, alias, temp, need = diff(RECORD, EDITED).need
    for side in ("before", "after", "difference"):
        values = [getattr(each, side) for each in (argument, output, alias, temp, need)]
        assert values[0] + values[1] - values[2] + values[3] == values[4]


def test_what_else_changed():
    found = diff(RECORD, EDITED)
    assert {each.name: (each.before, each.after) for each in found.settings} == {
        "policy": ("selective_attention", "full"),
        "XLA's remat": ("off", "fired"),
        "GEMM backend": ("cublas", "triton"),
        "option seq": (None, 1024),
        "version of jax": ("0.12.0", "0.12.1"),
        "compile option xla_gpu_autotune_level": (None, "0"),
    }
    assert {each.name: each.difference for each in found.figures if each.unit in ("count", "FLOP")} == {
        "recomputed FLOPs": 2 * 10**12 - 309_237_645_312,
        "blocks of temporary memory": 1,
        "instructions": 80,
    }
    assert {"donated arguments", "step time, predicted", "room left"} <= {each.name for each in found.figures}


@pytest.mark.parametrize(
    ("field", "value", "name"),
    [
        ("workload", "other:step", "workload"),
        ("target", "a100-sxm-80gb", "target"),
        ("mesh", {"device": 1, "data": 4}, "mesh axis data"),
    ],
)
def test_other_settings_are_named(field, value, name):
    assert [each.name for each in diff(RECORD, dataclasses.replace(RECORD, **{field: value})).settings] == [name]


def test_the_same_record_has_no_difference():
    found = diff(RECORD, RECORD)
    assert (found.rows, found.figures, found.settings, found.notes) == ((), (), (), ())
    assert len(found.categories) == len(RECORD.categories)


# Which rows are the same.


def test_a_line_that_moved_is_the_same_row():
    assert rows([at(10, 5)], [at(14, 7)]) == [("grew", "m/x.py:14 (f)", 2)]
    assert rows([at(10, 5)], [at(14, 5)]) == []


def test_a_checkout_in_another_folder_is_the_same_row():
    assert rows([at(10, 5, file="/a/x.py")], [at(10, 5, file="/b/c/x.py")]) == []


@pytest.mark.parametrize(
    "change",
    [{"category": "gradients"}, {"shape": "bf16[8]"}, {"shape": "f32[8,1]"}, {"source": "m/x.py:10 (g)"},
     {"source": "m/y.py:10 (f)"}, {"source": ""}, {"module": "blocks/norm", "shape": "f32[9]"},
     {"shape": "f32[9]", "source": "m/x.py:11 (f)"}, {"module": "norm", "source": "m/x.py:11 (f)"}],
)  # fmt: skip
def test_whatever_else_differs_makes_another_row(change):
    found = rows([at(10, 5)], [dataclasses.replace(at(10, 5), **change)])
    assert sorted(kind for kind, *_ in found) == ["came", "went"]


def changed(before, after):
    found = diff(explained(tuple(before)), explained(tuple(after)))
    return [(row.kind, row.modules, row.shapes, row.difference) for row in found.rows]


def test_another_batch_is_the_same_row():
    # Two of one line keep their order, as numbers: 8 before 12, and 16 before 24.
    before = [dataclasses.replace(at(10, 5), shape="f32[8,4]"), dataclasses.replace(at(10, 6), shape="f32[12,4]")]
    after = [dataclasses.replace(at(10, 10), shape="f32[16,4]"), dataclasses.replace(at(10, 12), shape="f32[24,4]")]
    grown = [("grew", "blocks/mlp", "f32[12->24,4]", 6), ("grew", "blocks/mlp", "f32[8->16,4]", 5)]
    assert changed(before, after) == grown
    assert [(size, -change) for _, _, size, change in changed(after, before)] == [
        ("f32[24->12,4]", 6),
        ("f32[16->8,4]", 5),
    ]
    # With a third it is not known which became which.
    assert {kind for kind, *_ in changed(before, [*after, dataclasses.replace(at(10, 1), shape="f32[2,4]")])} == {
        "came",
        "went",
    }


def test_another_name_of_a_module_is_the_same_row():
    renamed = dataclasses.replace(at(10, 5), module="blocks/ffn")
    assert changed([at(10, 5)], [renamed]) == [("same", "blocks/mlp -> blocks/ffn", "f32[8]", 0)]
    # Two modules that run one line could be either.
    others = [renamed, dataclasses.replace(renamed, module="blocks/out")]
    assert len(changed([at(10, 5), dataclasses.replace(at(10, 5), module="blocks/in")], others)) == 4


def test_lines_of_one_function_keep_their_order():
    # Line 14 is there on both sides, but of the later side it is what was line 10 before.
    assert rows([at(10, 5), at(14, 100)], [at(14, 5), at(18, 100)]) == []
    # An edit between them moves the second alone.
    assert rows([at(10, 5), at(14, 100)], [at(10, 5), at(20, 100)]) == []


def test_a_line_that_came_is_told_from_those_that_moved():
    before = [at(10, 5), at(14, 100), at(20, 30)]
    after = [at(12, 1), at(13, 5), at(17, 100), at(23, 30)]
    assert rows(before, after) == [("came", "m/x.py:12 (f)", 1)]
    assert rows(after, before) == [("went", "m/x.py:12 (f)", -1)]


def test_without_a_shift_that_fits_lines_are_paired_in_order():
    assert rows([at(10, 5)], [at(12, 5), at(19, 7)]) == [("came", "m/x.py:19 (f)", 7)]


def test_the_phase_and_the_number_of_buffers_do_not_make_another_row():
    assert rows([at(10, 5)], [at(10, 5, phase="recompute")]) == []
    assert rows([at(10, 5), at(10, 3, phase="recompute")], [at(10, 8)]) == [("same", "m/x.py:10 (f)", 0)]
    assert rows([at(10, 6)], [at(10, 6, buffers=2)]) == [("same", "m/x.py:10 (f)", 0)]


def test_an_argument_is_the_same_wherever_it_is_used():
    before = [at(10, 5, phase="argument"), at(12, 2, phase="argument")]
    assert rows(before, [at(30, 7, function="g", phase="argument", buffers=2)]) == []
    assert rows(before, [at(30, 9, function="g", phase="argument")]) == [("grew", "m/x.py:30 (g)", 2)]


def test_sources_that_are_no_lines():
    assert rows([holder("constants", 4, source="<string>")], [holder("constants", 6, source="<string>")]) == [
        ("grew", "<string>", 2)
    ]


def test_files_of_one_name_in_two_folders_stay_apart():
    before = [at(10, 5, file="a/x.py"), at(10, 7, file="b/x.py")]
    assert rows(before, before) == []
    assert sum(difference for *_, difference in rows(before, before[:1])) == -7


# What cannot be compared is said.


def test_a_side_without_an_explanation():
    old = dataclasses.replace(RECORD, explanation=None)
    found = diff(old, EDITED)
    assert found.rows == ()
    assert found.notes == ("before has no explanation, so rows of the live peak are not compared: analyze it again",)
    assert sum(each.difference for each in found.categories) == found.live_peak.difference
    assert found.need
    assert diff(EDITED, old).notes[0].startswith("after has no explanation")


def test_categories_of_another_version_are_not_compared():
    old = dataclasses.replace(RECORD, explanation=None, schema_version=1, categories={"made in forward": 3})
    found = diff(old, RECORD)
    assert found.categories == ()
    assert "the sides have categories of different versions, which are not compared" in found.notes
    assert diff(old, old).categories != ()


def test_a_side_that_failed_or_has_no_live_peak():
    failed = Record("w:f", {}, "full", "cpu", {}, {}, error="it died")
    found = diff(failed, RECORD)
    assert found.notes == ("before failed: it died",)
    assert (found.need, found.categories, found.rows, found.live_peak.difference) == ((), (), (), None)
    unknown = dataclasses.replace(RECORD, live_peak_bytes=None)
    assert diff(RECORD, unknown).notes == (
        "after has no live peak: its program has no heap trace of all its temporaries",
    )
    assert diff(RECORD, unknown).rows == ()


def test_titles_leave_out_what_is_not_known():
    assert title(RECORD) == "models.transformer:gpt batch=8 size=gpt2-small, policy selective_attention, h100-sxm-80gb"
    assert title(Record("jit_step", {}, "", "", {}, {})) == "jit_step"


def test_the_json_form_is_versioned_and_whole():
    data = json.loads(json.dumps(diff(RECORD, EDITED).to_json()))
    assert data["diff_version"] == DIFF_VERSION == 1
    assert data["rows"][0]["kind"] == "grew"
    assert data["rows"][0]["difference_bytes"] == 576 * MiB
    assert (
        sum(row["difference_bytes"] for row in data["rows"]) == data["live_peak"]["after"] - data["live_peak"]["before"]
    )


def test_the_difference_is_the_same_after_a_way_through_json():
    before, after = load(dump([RECORD, EDITED]))
    assert diff(before, after) == diff(RECORD, EDITED)


def test_the_sample_adds_up():
    for record in (RECORD, EDITED):
        assert record.explanation
        assert sum(each.bytes for each in record.explanation.holders) == record.live_peak_bytes
        assert sum(record.categories.values()) == record.live_peak_bytes
    assert EXPLANATION.holders == HOLDERS
