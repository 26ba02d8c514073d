"""Explanations and differences as text and Markdown: golden files, lines that add up, pages that do not overflow."""

import dataclasses
import json
import os
import re
from pathlib import Path

import pytest
from explanations import EDITED, EXPLANATION, HOLDERS, RECORD, explained, holder

from remat_kit._diff import diff
from remat_kit._explanation import Advice, Explanation
from remat_kit._record import Record, dump, load
from remat_kit._report import diff as diff_report
from remat_kit._report import explanation, explanation_markdown, markdown, table, text
from remat_kit._report.layout import WIDTH, TextColumn, shorten
from remat_kit._report.layout import table as layout_table
from remat_kit._units import GiB, MiB, parse_bytes

GOLDEN = Path(__file__).parent / "golden"
DIFF = diff(RECORD, EDITED)
BYTES = re.compile(r"([+-]?)([\d,.]+) (B|KiB|MiB|GiB)\b")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("explained.txt", text.render(RECORD)),
        ("explained.md", explanation_markdown.render(RECORD)),
        ("explained.json", dump(RECORD)),
        ("diff.txt", diff_report.text(DIFF)),
        ("diff.md", diff_report.markdown(DIFF)),
        ("diff.json", json.dumps(DIFF.to_json(), indent=1) + "\n"),
    ],
)
def test_golden(name: str, content: str) -> None:
    """Write them again with REMAT_KIT_GOLDEN=write, and read the difference."""
    path = GOLDEN / name
    if os.environ.get("REMAT_KIT_GOLDEN") == "write":
        path.write_text(content)
    assert content == path.read_text()


def test_the_saved_record_renders_the_same() -> None:
    (record,) = load((GOLDEN / "explained.json").read_text())
    assert record == RECORD
    assert text.render(record) == (GOLDEN / "explained.txt").read_text()


def _amounts(line: str) -> list[float]:
    """The bytes in a line, with their signs."""
    found = BYTES.findall(line)
    return [float(parse_bytes(f"{amount.replace(',', '')} {unit}")) * (-1 if sign == "-" else 1)
            for sign, amount, unit in found]  # fmt: skip


def _section(report: str, begin: str) -> list[str]:
    """The lines of a section below its title, up to its sum."""
    lines = report.split(begin)[1].splitlines()[1:]
    end = next(index for index, line in enumerate(lines) if line.startswith("  = "))
    return lines[: end + 1]


@pytest.mark.parametrize("begin", ["Live peak (", "What holds it (", "Host memory at", "Floor ("])
@pytest.mark.parametrize("record", [RECORD, EDITED], ids=["sample", "edited"])
def test_lines_add_up(begin: str, record: Record) -> None:
    *parts, total = [_amounts(line)[0] for line in _section(text.render(record), begin) if _amounts(line)]
    assert len(parts) >= 2
    assert sum(parts) == pytest.approx(total, rel=0.005)


def test_shares_of_the_holders_add_up() -> None:
    lines = _section(text.render(RECORD), "What holds it (")[1:]
    *parts, total = [float(line.rsplit(None, 1)[1].rstrip("%")) for line in lines]
    assert total == 100.0
    assert sum(parts) == pytest.approx(100, abs=0.05 * len(parts))


@pytest.mark.parametrize("begin", ["Need (", "Live peak by category (", "What changed at the live peak ("])
@pytest.mark.parametrize("column", [0, 1, 2], ids=["before", "after", "change"])
def test_columns_of_a_difference_add_up(begin: str, column: int) -> None:
    lines = _section(diff_report.text(DIFF), begin)[1:]
    figures = []
    for line in lines:
        words = re.split(r"\s{2,}", line.strip())[-3:]
        amount = _amounts(words[column])
        figures.append((line.lstrip()[0], amount[0] if amount else 0.0))
    *parts, (_, total) = figures
    assert sum(-value if sign == "-" else value for sign, value in parts) == pytest.approx(total, abs=0.02 * GiB)


def test_many_holders_are_one_line_at_the_end() -> None:
    many = tuple(holder("gradients", (50 - number) * MiB, f"m{number}") for number in range(40))
    shown, rest = explanation.split(many)
    assert (len(shown), len(rest)) == (12, 28)
    assert sum(each.bytes for each in (*shown, *rest)) == sum(each.bytes for each in many)
    lines = _section(text.render(explained(many)), "What holds it (")
    assert len(lines) == 1 + 12 + 2
    assert lines[-2].split()[:2] == ["28", "more"]
    # A rest of one is no shorter than the one.
    assert explanation.split(many[:13]) == (list(many[:13]), [])


def test_many_changes_are_one_line_at_the_end() -> None:
    before = tuple(holder("gradients", MiB, f"m{number}") for number in range(40))
    after = tuple(dataclasses.replace(each, bytes=each.bytes + (40 - index) * MiB) for index, each in enumerate(before))
    lines = _section(diff_report.text(diff(explained(before), explained(after))), "What changed at the live peak (")
    assert len(lines) == 1 + 20 + 2
    assert lines[-2].split()[:2] == ["20", "more"]
    *parts, total = [_amounts(line)[-1] for line in lines[1:]]
    assert sum(parts) == pytest.approx(total, rel=0.005)


def test_pages_are_no_wider_than_they_should_be() -> None:
    long = "/home/someone/a/very/long/path/to/some/library/that/nobody/knows/file_with_a_long_name.py:1234 (function)"
    wide = (
        holder(
            "a label of the step's own that is long", 1023 * MiB, "layer_*/" * 12, long, "recompute", "f32[8,8]" * 9
        ),
        *HOLDERS,
    )
    changed = tuple(dataclasses.replace(each, bytes=each.bytes * 2) for each in wide)
    for report in (text.render(explained(wide)), diff_report.text(diff(explained(wide), explained(changed)))):
        lines = [line for line in report.splitlines() if not line.startswith(("before:", "after:"))]
        assert max(map(len, lines)) <= WIDTH
        assert "name.py:1234" in report


@pytest.mark.parametrize(
    ("content", "width", "expected"),
    [
        ("short", 5, "short"),
        ("layer_*/attention/query", 15, "laye…tion/query"),
        ("models/parts/attention.py:12 (f)", 24, "mod…/attention.py:12 (f)"),
        ("models/parts/attention.py:12 (f)", 20, "attention.py:12 (f)"),
        ("models/parts/attention.py:12 (f)", 17, "attention.py:12"),
        ("models/parts/attention.py:12 (f)", 12, "att…on.py:12"),
    ],
)
def test_what_is_too_long_is_shortened_in_the_middle(content: str, width: int, expected: str) -> None:
    assert shorten(content, width) == expected
    assert len(expected) <= width


def test_a_table_takes_room_from_the_widest_column_that_may_give() -> None:
    columns = [
        TextColumn("a", ("x" * 40,), least=10),
        TextColumn("b", ("y" * 20,), least=5),
        TextColumn("c", ("z" * 9,)),
    ]
    lines = layout_table(columns, width=45)
    assert [len(line) for line in lines][1] == 45
    assert lines[1].endswith("z" * 9)


def test_every_report_says_how_much_is_attributed() -> None:
    expected = "category 100.0%, module 100.0%, source line 71.2%"
    assert f"  attributed: {expected}" in text.render(RECORD)
    assert f"Attributed: {expected}." in explanation_markdown.render(RECORD)


def test_the_floor_names_its_parts() -> None:
    report = text.render(RECORD)
    lines = _section(report, "Floor (compiled: no policy can bring the live peak below; a bound, not a promise)")
    assert [line.split("  ")[1].strip() for line in lines] == [
        "arguments", "+ outputs", "+ constants", "+ largest transient", "= floor",
    ]  # fmt: skip
    assert lines[3].endswith("in backward, head")
    assert "floor" not in text.render(explained(changes={"floor": None})).lower()


def test_what_there_is_not_is_left_out() -> None:
    bare = explained(changes={"host_holders": (), "floor": None, "advice": ()})
    for report in (text.render(bare), explanation_markdown.render(bare)):
        assert "Host memory" not in report
        assert "Next steps" not in report


def test_a_program_without_temporaries_has_no_moment_of_its_peak() -> None:
    throughout = dataclasses.replace(EXPLANATION.peak, event=-1, phase="unknown", module="", block="", source="")
    report = text.render(explained(changes={"peak": throughout, "floor": None}, live_peak_phase=None))
    assert "= live peak" in report
    assert "moment:" not in report


def test_a_program_without_a_heap_trace_has_no_live_peak() -> None:
    report = text.render(
        dataclasses.replace(RECORD, explanation=None, live_peak_bytes=None, live_peak_phase=None, categories={})
    )
    assert "Need (compiled" in report
    assert "Live peak" not in report


def test_a_program_from_a_file_claims_no_policy_or_settings() -> None:
    record = explained(
        workload="jit_step", options={}, policy="", target="", mesh={}, versions={}, xla_remat="unknown",
        gemm_backend="unknown", fits=None, predicted_step_s=None, recompute_flops=None,
    )  # fmt: skip
    assert text.render(record).splitlines()[:3] == ["jit_step", "", "Need (compiled: XLA's buffer assignment)"]
    assert explanation_markdown.render(record).startswith("### jit\\_step\n\n- **need 3.35 GiB**; live peak")


def test_a_record_without_explanation_has_its_categories() -> None:
    report = text.render(dataclasses.replace(RECORD, explanation=None))
    assert "saved activations" in report
    assert "What holds it" not in report


def test_markdown_is_short_first_and_has_the_text_report_in_it() -> None:
    report = explanation_markdown.render(RECORD)
    summary = report.partition("<details>")[0]
    assert len(summary.splitlines()) < 20
    assert text.render(RECORD) in report
    assert report.count("<details>") == report.count("</details>") == 5


@pytest.mark.parametrize("render", [explanation_markdown.render, lambda record: markdown.render([record])])
def test_markdown_tables_have_as_many_cells_in_each_line(render) -> None:
    odd = holder("a|b*c", MiB, "layer_*/x|y", "m/a_b.py:1 (<lambda>)", "forward", "f32[8]{1,0}")
    record = explained((odd, *HOLDERS), policy="save(a)|save(b)")
    counts: list[set[int]] = [set()]
    for line in render(record).splitlines():
        if line.startswith("|"):
            counts[-1].add(len(re.findall(r"(?<!\\)\|", line)))
        elif counts[-1]:
            counts.append(set())
    assert all(len(count) == 1 for count in counts if count)


def test_what_comes_from_a_program_is_no_markup() -> None:
    advice = Advice("donate", "<script>", 1, "[click](http://x) `code` *now*\n\n# title")
    report = explanation_markdown.render(explained(changes={"advice": (advice,)}))
    assert "\\<script\\>" in report.partition("<details>")[0]
    assert "\\[click\\](http://x) \\`code\\` \\*now\\* # title" in report


def test_differences_say_what_could_not_be_compared() -> None:
    found = diff(dataclasses.replace(RECORD, explanation=None), EDITED)
    assert "note: before has no explanation" in diff_report.text(found)
    assert "> before has no explanation" in diff_report.markdown(found)
    assert "What changed at the live peak" not in diff_report.text(found)


def test_a_difference_of_nothing() -> None:
    found = diff(RECORD, RECORD)
    assert "Nothing else is different" in diff_report.text(found)
    assert diff_report.markdown(found).startswith("### need stays 3.35 GiB\n")


def test_differences_of_records_without_figures() -> None:
    empty = Record("w:f", {}, "none", "cpu", {}, {})
    for before, after, figures in (
        (empty, empty, ("-", "-")),
        (empty, RECORD, ("-", "3.35 GiB")),
        (RECORD, empty, ("3.35 GiB", "-")),
    ):
        found = diff(before, after)
        assert diff_report.headline(found) == "live peak: not known on both sides"
        plain, marked = diff_report.text(found), diff_report.markdown(found)
        lines = [line.split() for line in plain.splitlines() if line.startswith("  live peak")]
        assert lines == ([] if before is after else [["live", "peak", *" ".join(figures).split()]])
        assert f"| live peak | {figures[0]} | {figures[1]} |  |" in marked
        for side, record in (("before", before), ("after", after)):
            note = f"{side} has no live peak: its program has no heap trace of all its temporaries"
            assert (f"note: {note}" in plain, f"> {note}" in marked) == (record is empty,) * 2
        assert ("step time, predicted" in plain, "step time, predicted" in marked) == (before is not after,) * 2
        assert ("What else is different" in plain) == (before is not after)


def test_a_brief_explanation_renders_the_same() -> None:
    brief = dataclasses.replace(RECORD, explanation=EXPLANATION.brief())
    assert isinstance(brief.explanation, Explanation)
    assert text.render(brief) == text.render(RECORD)
    assert table.render([brief]) == table.render([RECORD])
