"""What changed between two records, as text and in Markdown."""

from collections.abc import Iterable, Sequence
from typing import Any

from remat_kit._diff import Change, Diff, RowChange
from remat_kit._report import markdown_parts as md
from remat_kit._report.layout import TextColumn, table
from remat_kit._report.rows import UNKNOWN, figure_text
from remat_kit._units import format_bytes

LARGEST = 20
"""Rows that are shown one by one; the others are one line with their sum."""


def text(diff: Diff) -> str:
    """The difference as text. The columns of each table add up to its last line."""
    lines = [f"before: {diff.before}", f"after:  {diff.after}"]
    lines += [f"note: {note}" for note in diff.notes]
    for title, body in _sections(diff):
        lines += ["", title, *body]
    return "\n".join(lines) + "\n"


def markdown(diff: Diff) -> str:
    """The difference in Markdown: a summary of one table, and the details folded away."""
    lines = [f"### {headline(diff)}", "", f"before: {md.code(diff.before)}  ", f"after: {md.code(diff.after)}", ""]
    lines += [line for note in diff.notes for line in (f"> {md.escape(note)}", "")]
    totals = [*diff.need[-1:], *([diff.live_peak] if diff.live_peak.before != diff.live_peak.after else [])]
    totals += [each for each in diff.figures if each.unit in ("s", "FLOP")]
    totals = totals or [diff.live_peak]
    lines += md.table(("", "before", "after", "change"), map(_cells, totals), left=1)
    if diff.rows:
        lines += ["", "What grew most, and what shrank most:", ""]
        grown = [row for row in diff.rows if row.difference > 0][:3]
        shrunk = [row for row in diff.rows if row.difference < 0][:3]
        lines += [f"- {signed(row.difference, 'bytes')} {_row_words(row)}" for row in (*grown, *shrunk)]
    for title, body in _sections(diff):
        lines += md.details(title, md.fenced("\n".join(body)))
    return "\n".join(lines) + "\n"


def headline(diff: Diff) -> str:
    """One line: by how much the need changed."""
    need = diff.need[-1] if diff.need else diff.live_peak
    change = need.difference
    if change is None:
        return f"{need.name}: not known on both sides"
    share = f" ({change / need.before:+.1%})" if need.before and change else ""
    if not change:
        return f"{need.name} stays {format_bytes(need.after)}"
    return f"{need.name} {signed(change, 'bytes')}{share}, to {format_bytes(need.after)}"


def value_text(value: Any, unit: str) -> str:
    """A figure or a setting as it is shown."""
    return UNKNOWN if value is None or value == "" else figure_text(value, unit)


def signed(difference: Any, unit: str) -> str:
    """A difference with its sign; "=" for none, "" where there is nothing to subtract."""
    if difference is None:
        return ""
    if not difference:
        return "="
    return ("+" if difference > 0 else "-") + value_text(abs(difference), unit)


def _sections(diff: Diff) -> Iterable[tuple[str, list[str]]]:
    """Title and lines of each table."""
    if diff.need:
        *parts, total = diff.need
        signs = ("", "+ ", "- ", "+ ")
        named = [(f"{sign}{part.name}", part) for sign, part in zip(signs, parts, strict=True)]
        yield "Need (compiled)", _table([*named, ("= need", total)])
    if diff.categories:
        changed = [each for each in diff.categories if each.difference]
        same = [each for each in diff.categories if not each.difference]
        named = [(each.name, each) for each in changed]
        if same:
            sums = (sum(each.before for each in same), sum(each.after for each in same))
            named.append((f"{len(same)} without a change", Change("", *sums)))
        yield "Live peak by category (compiled)", _table([*named, ("= live peak", diff.live_peak)])
    elif diff.live_peak.before != diff.live_peak.after:
        yield "Live peak (compiled)", _table([("live peak", diff.live_peak)])
    if diff.rows:
        yield "What changed at the live peak (compiled; - where it is not there)", _rows(diff.rows)
    for title, changes in (("Other figures", diff.figures), ("What else is different", diff.settings)):
        if changes:
            yield title, _table([(each.name, each) for each in changes])
    if not diff.rows and not diff.figures and not diff.settings and not diff.notes:
        yield "Nothing else is different", []


def _cells(change: Change, name: str = "") -> tuple[str, str, str, str]:
    return (
        name or change.name,
        value_text(change.before, change.unit),
        value_text(change.after, change.unit),
        signed(change.difference, change.unit),
    )


def _table(named: Sequence[tuple[str, Change]]) -> list[str]:
    """Lines with name, before, after and change."""
    cells = [_cells(change, name) for name, change in named]
    columns = list(zip(*cells, strict=True))
    settings = all(change.unit == "text" for _, change in named)
    return table(
        [
            TextColumn("", columns[0]),
            TextColumn("before", columns[1], right=not settings, least=20),
            TextColumn("after", columns[2], right=not settings, least=20),
            *([] if settings else [TextColumn("change", columns[3], right=True)]),
        ]
    )


def _rows(rows: Sequence[RowChange]) -> list[str]:
    """The largest changes, a line with the sum of the others, and the sum of all, which is the live peak's change."""
    shown, rest = (rows, ()) if len(rows) <= LARGEST + 1 else (rows[:LARGEST], rows[LARGEST:])
    cells = [
        (
            row.category,
            row.modules,
            row.source,
            _shape(row),
            value_text(row.before_bytes, "bytes") if row.before_buffers else UNKNOWN,
            value_text(row.after_bytes, "bytes") if row.after_buffers else UNKNOWN,
            signed(row.difference, "bytes"),
        )
        for row in shown
    ]
    for name, some in ((f"{len(rest):,} more", rest), ("= all", rows)):
        if some:
            before, after = (sum(getattr(row, side) for row in some) for side in ("before_bytes", "after_bytes"))
            texts = (value_text(before, "bytes"), value_text(after, "bytes"), signed(after - before, "bytes"))
            cells.append((name, "", "", "", *texts))
    columns = list(zip(*cells, strict=True))
    return table(
        [
            TextColumn("category", columns[0], least=19),
            TextColumn("module", columns[1], least=14),
            TextColumn("source", columns[2], least=18),
            TextColumn("shape", columns[3], least=20),
            TextColumn("before", columns[4], right=True),
            TextColumn("after", columns[5], right=True),
            TextColumn("change", columns[6], right=True),
        ]
    )


def _shape(row: RowChange) -> str:
    """The shape, with the number of buffers where it changed or is more than one."""
    if not row.before_buffers or not row.after_buffers or row.before_buffers == row.after_buffers:
        count = max(row.before_buffers, row.after_buffers)
        return f"{count:,} x {row.shapes}" if count > 1 else row.shapes
    return f"{row.before_buffers:,} -> {row.after_buffers:,} x {row.shapes}"


def _row_words(row: RowChange) -> str:
    places = [md.code(place) for place in (row.modules, row.source, _shape(row)) if place]
    return f"{md.escape(row.category)} ({row.kind}) {', '.join(places)}".rstrip()
