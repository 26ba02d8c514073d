"""Records: what is written is what is read."""

import dataclasses
import json

import numpy as np
import pytest

from remat_kit import RematKitError
from remat_kit._record import SCHEMA_VERSION, MeasuredTime, Record, dump, load

SMALLEST = Record(
    workload="models.transformer:gpt",
    options={"size": "tiny", "batch": 8, "dropout": 0.1, "fused": False, "seed": None},
    policy="full",
    target="cpu",
    mesh={"data": 1},
    versions={"jax": "0.12.0"},
)
FULL = dataclasses.replace(
    SMALLEST,
    xla_remat="fired",
    gemm_backend="triton",
    compile_options={"xla_dump_to": "x"},
    argument_bytes=3,
    output_bytes=3,
    alias_bytes=2,
    temp_bytes=2**53 + 1,  # no float holds it
    need_bytes=2**53 + 5,
    live_peak_phase="backward",
    categories={"params": 3, "saved": 4},
    attributed_share=0.5,
    predicted_step_s=0.1,
    predicted_breakdown_s={"matmul": 0.1},
    measured_step_s=MeasuredTime(0.1, 0.09, 0.12, "cpu", 5),
    fits="no",
    margin_bytes=-1,
    warnings=("one", "two"),
    error="it broke\nhere",
)


@pytest.mark.parametrize("record", [SMALLEST, FULL])
def test_a_record_survives_json(record):
    assert load(dump(record)) == [record]
    assert load(dump([record, record])) == [record, record]
    assert load(dump((record,))) == [record]
    assert load(dump([])) == []


def test_one_record_is_an_object_and_several_are_a_list():
    assert isinstance(json.loads(dump(SMALLEST)), dict)
    assert isinstance(json.loads(dump([SMALLEST])), list)
    assert dump(SMALLEST).endswith("\n")


def test_unknown_is_null_and_not_zero():
    data = json.loads(dump(SMALLEST))
    assert data["need_bytes"] is None
    assert data["schema_version"] == SCHEMA_VERSION
    assert list(data) == [field.name for field in dataclasses.fields(Record)]


def test_the_documented_fields_are_there():
    documented = (
        "schema_version workload options policy target mesh versions xla_remat gemm_backend compile_options "
        "argument_bytes output_bytes alias_bytes temp_bytes host_temp_bytes need_bytes live_peak_bytes "
        "live_peak_phase categories attributed_share saved_bytes model_flops step_flops recompute_flops "
        "predicted_step_s predicted_breakdown_s measured_step_s measured_peak_bytes trace_s compile_s analyze_s "
        "fits margin_bytes effect warnings error"
    )
    assert set(documented.split()) <= {field.name for field in dataclasses.fields(Record)}


def test_fields_of_a_newer_writer_are_left_out():
    data = FULL.to_json() | {"a_field_of_tomorrow": 1}
    assert Record.from_json(data) == FULL
    data["measured_step_s"] = {**data["measured_step_s"], "a_field_of_tomorrow": 1}
    assert Record.from_json(data) == FULL


def test_a_record_of_an_older_writer_has_defaults_for_what_came_later():
    data = SMALLEST.to_json()
    del data["effect"], data["warnings"], data["recomputed_matmuls"]
    assert Record.from_json(data) == SMALLEST


@pytest.mark.parametrize("version", [0, SCHEMA_VERSION + 1, "1", None, 1.0])
def test_another_schema_version_is_refused(version):
    data = SMALLEST.to_json() | {"schema_version": version}
    with pytest.raises(RematKitError, match="not a remat-kit record of a known version: schema_version is "):
        Record.from_json(data)


@pytest.mark.parametrize("text", ["3", "[3]", '"full"', "{}", "null"])
def test_json_that_is_no_record_is_refused(text):
    with pytest.raises(RematKitError, match=r"not a remat-kit record.*schema_version is None, known are 1 to"):
        load(text)


def test_text_that_is_no_json_is_refused():
    with pytest.raises(RematKitError, match=r"not JSON: .*Give a file that --json wrote"):
        load("need_bytes: 3")


def test_a_missing_field_is_named():
    data = SMALLEST.to_json()
    del data["policy"]
    with pytest.raises(RematKitError, match=r"lacks fields: .*policy.*Write it again with --json"):
        Record.from_json(data)


@pytest.mark.parametrize(("field", "value"), [("warnings", None), ("measured_step_s", 0.5), ("measured_step_s", {})])
def test_a_malformed_field_is_an_error_of_ours_or_empty(field, value):
    data = SMALLEST.to_json() | {field: value}
    try:
        record = Record.from_json(data)
    except RematKitError:
        return
    assert record == SMALLEST


def test_numbers_of_numpy_stay_numbers():
    record = dataclasses.replace(
        SMALLEST, need_bytes=np.int64(5), options={"batch": np.int32(8), "rate": np.float32(0.5)}
    )
    (read,) = load(dump(record))
    assert read.need_bytes == 5
    assert read.options == {"batch": 8, "rate": 0.5}


def test_a_record_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SMALLEST.policy = "none"  # pyright: ignore[reportAttributeAccessIssue]
