"""Reports are rendered from saved records: golden files, and sums that add up."""

import dataclasses
import itertools
import os
import re
from pathlib import Path

import pytest

from remat_kit._errors import OutputError
from remat_kit._record import MeasuredTime, Record, dump, load
from remat_kit._report import markdown, plot, table, text
from remat_kit._report.plot import _spread
from remat_kit._units import GiB, MiB, parse_bytes

GOLDEN = Path(__file__).parent / "golden"


def _record(policy: str, temp: int, seconds: float, recompute: int, **changes: object) -> Record:
    argument, output, alias = 1500 * MiB, 1490 * MiB, 1488 * MiB
    need = argument + output - alias + temp
    capacity = 74 * GiB
    record = Record(
        workload="models.transformer:gpt",
        options={"batch": 8, "size": "gpt2-small"},
        policy=policy,
        target="h100-sxm-80gb",
        mesh={"device": 1},
        versions={"jax": "0.12.0", "jaxlib": "0.12.0", "flax": "0.12.12", "plugin": "0.12.0"},
        argument_bytes=argument,
        output_bytes=output,
        alias_bytes=alias,
        temp_bytes=temp,
        need_bytes=need,
        live_peak_bytes=need - 100 * MiB,
        live_peak_phase="backward",
        categories={"params": 500 * MiB, "optimizer": 900 * MiB, "activations": need - 1500 * MiB},
        attributed_share=1.0,
        saved_bytes=temp // 2,
        saved_bytes_per_block=temp // 24,
        model_flops=7 * 10**12,
        step_flops=7 * 10**12 + recompute,
        recompute_flops=recompute,
        recomputed_matmuls=6,
        predicted_step_s=seconds,
        predicted_breakdown_s={"matmul": seconds / 2, "memory": seconds / 4, "collective": 0.0, "launch": seconds / 4},
        trace_s=0.2,
        compile_s=8.0,
        analyze_s=0.1,
        capacity_bytes=capacity,
        fits="yes" if need < capacity * 3 // 4 else "tight" if need < capacity else "no",
        margin_bytes=capacity - need,
        assumptions=("Nothing else uses the device.",),
    )
    return dataclasses.replace(record, **changes)  # type: ignore[arg-type]


_TIME = MeasuredTime(0.061, 0.060, 0.064, "NVIDIA H100", 20)
RECORDS = [
    _record("none", 78 * GiB, 0.060, 0, warnings=("a warning",)),
    _record("full", 2 * GiB, 0.045, 2 * 10**12, measured_step_s=_TIME, measured_peak_bytes=5 * GiB),
    _record("dots_saveable", 60 * GiB, 0.044, 0, warnings=("a warning",)),
    _record("minimal", 3 * GiB, 0.0430, 10**11, host_temp_bytes=GiB, saved_host_bytes=GiB),
    _record("save(a)|save(b)", 3 * GiB + MiB, 0.0431, 10**11),
    _record("offload_block_input", GiB, 0.2, 0, effect="*moves* the input"),
    dataclasses.replace(
        Record("models.transformer:gpt", {"batch": 8, "size": "gpt2-small"}, "broken", "h100-sxm-80gb", {}, {}),
        error="the process died of SIGABRT",
        mesh={"device": 1},
    ),
]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("table.txt", table.render(RECORDS)),
        ("table-narrow.txt", table.render(RECORDS, width=100)),
        ("table.md", markdown.render(RECORDS)),
        ("record.txt", text.render(RECORDS[1])),
        ("record-offload.txt", text.render(RECORDS[3])),
        ("record-too-large.txt", text.render(RECORDS[0])),
        ("record-failed.txt", text.render(RECORDS[-1])),
    ],
)
def test_golden(name: str, content: str) -> None:
    """Write them again with REMAT_KIT_GOLDEN=write, and read the difference."""
    path = GOLDEN / name
    if os.environ.get("REMAT_KIT_GOLDEN") == "write":
        path.write_text(content)
    assert content == path.read_text()


def test_a_report_is_the_same_after_a_way_through_json() -> None:
    assert table.render(load(dump(RECORDS))) == table.render(RECORDS)
    assert [text.render(record) for record in load(dump(RECORDS))] == [text.render(record) for record in RECORDS]


def _figures(report: str, begin: str) -> list[tuple[str, float]]:
    """The signed figures of a section up to the line with its sum, which comes last."""
    lines = report.split(begin)[1].splitlines()[1:]
    found = []
    for line in lines:
        match = re.match(r"  ([+\-=]?) ?(\S.*?)\s{2,}([\d.,]+) (B|KiB|MiB|GiB|ms|s|µs|[A-Z]*FLOP)\b", line)
        assert match, line
        amount = float(match[3].replace(",", ""))
        units = {"ms": 1e-3, "s": 1.0, "µs": 1e-6, "FLOP": 1.0, "GFLOP": 1e9, "TFLOP": 1e12}
        value = amount * units[match[4]] if match[4] in units else float(parse_bytes(f"{amount} {match[4]}"))
        found.append((match[1], value))
        if match[1] == "=":
            return found
    raise AssertionError(f"no sum after {begin!r}")


@pytest.mark.parametrize("record", RECORDS[:-1], ids=lambda record: record.policy)
@pytest.mark.parametrize("section", ["Need (", "Live peak (", "FLOPs (", "Step time ("])
def test_columns_add_up(record: Record, section: str) -> None:
    *parts, (_, total) = _figures(text.render(record), section)
    added = sum(-value if sign == "-" else value for sign, value in parts)
    assert added == pytest.approx(total, rel=0.005)


def test_every_figure_says_where_it_comes_from() -> None:
    report = text.render(RECORDS[1])
    for section in (
        "Need (compiled",
        "Live peak (compiled",
        "Saved from forward to backward (counted",
        "FLOPs (counted",
        "Step time (predicted",
        "Measured on NVIDIA H100, 20 rounds",
    ):
        assert section in report
    lines = table.render(RECORDS).splitlines()
    start = next(index for index, line in enumerate(lines) if "need GiB" in line)
    head = lines[start : start + 2]
    for name, source in (("need GiB", "compiled"), ("recomputed", "counted"), ("step ms", "predicted")):
        end = head[0].index(name) + len(name)
        assert head[1][:end].endswith(source)


def test_the_table_marks_the_front_what_dominates_and_ties() -> None:
    rows = table.render(RECORDS).splitlines()
    lines = {line.split()[0]: line for line in rows if line.startswith(" ")}
    assert lines["none"].endswith("dominated by minimal")
    assert lines["dots_saveable"].endswith("dominated by minimal")
    assert lines["minimal"].endswith("* on the front, ties save(a)|save(b)")
    assert lines["full"].endswith("* on the front")
    assert lines["broken:"] == "  broken: the process died of SIGABRT"


def test_gemm_backends_are_not_compared_with_each_other() -> None:
    rows = [RECORDS[1], dataclasses.replace(RECORDS[1], gemm_backend="triton", predicted_step_s=0.5)]
    lines = [line for line in table.render(rows).splitlines() if line.startswith(" full")]
    assert [line.split()[1] for line in lines] == ["cublas", "triton"]
    assert all(line.endswith("* on the front") for line in lines)


def test_small_needs_are_shown_in_a_smaller_unit() -> None:
    small = dataclasses.replace(RECORDS[1], need_bytes=3 * MiB, live_peak_bytes=2 * MiB, measured_peak_bytes=None)
    assert "need MiB" in table.render([small])
    assert " 3.00 " in table.render([small])


def test_a_program_from_a_file_has_its_name_in_the_place_of_a_policy() -> None:
    programs = [dataclasses.replace(RECORDS[0], policy="", workload=name) for name in ("jit_step", "jit_eval")]
    lines = table.render(programs).splitlines()
    assert lines[3].split()[0] == "program"
    assert [line.split()[0] for line in lines[5:7]] == ["jit_step", "jit_eval"]


def test_nothing_to_show() -> None:
    assert table.render([]) == markdown.render([]) == "no records\n"
    only = table.render(RECORDS[-1:])
    assert "broken: the process died of SIGABRT" in only
    assert "front" not in only


# The plot.


@pytest.mark.parametrize(("suffix", "magic"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".SVG", b"<?xml")])
def test_a_plot_is_a_file_of_its_kind(suffix: str, magic: bytes) -> None:
    assert plot.render(RECORDS, suffix).startswith(magic)


def test_a_plot_names_every_policy_the_front_and_the_capacity() -> None:
    picture = plot.render(RECORDS, ".svg").decode()
    for record in RECORDS[:-1]:
        assert f"<!-- {record.policy} -->" in picture
    for words in ("Pareto front", "dominated", "one process can allocate 74.0 GiB", "step time, ms (predicted)"):
        assert f"<!-- {words} -->" in picture
    assert "broken" not in picture
    assert plot.render(RECORDS, ".svg").decode() == picture


@pytest.mark.parametrize("records", [[], RECORDS[-1:], RECORDS[:1]])
def test_a_plot_of_few_rows(records: list[Record]) -> None:
    assert plot.render(records, ".png").startswith(b"\x89PNG")


def test_labels_are_apart_and_inside() -> None:
    for wanted in ([], [0.5], [0.5] * 10, [0.98, 0.99, 1.0], [0.0, 0.01, 0.02, 0.9], [0.3] * 40):
        heights = _spread(list(wanted))
        gaps = [b - a for a, b in itertools.pairwise(heights)]
        assert all(gap >= min(0.048, 1 / len(wanted)) - 1e-9 for gap in gaps)
        assert all(-1e-9 <= height <= 1 + 1e-9 for height in heights)


def test_a_plot_of_another_kind() -> None:
    with pytest.raises(OutputError, match=r"cannot be written as 'a.pdf'. Use a name that ends in .png or .svg"):
        plot.check_suffix(Path("a.pdf"))


def test_reports_need_no_jax() -> None:
    for file in Path(table.__file__).parent.glob("*.py"):
        assert not re.search(r"^\s*(import|from) jax", file.read_text(), re.MULTILINE), file
