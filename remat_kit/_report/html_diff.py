"""The section of the HTML report that says what changed between two records."""

from collections.abc import Sequence
from html import escape

from remat_kit._diff import Change, Diff, RowChange
from remat_kit._report import html_data, html_parts, rows
from remat_kit._units import format_bytes

_MOST_ROWS = 15
"""Rows of holders that stand in the report at once; the others are folded away below them."""


def section(diff: Diff | None) -> str:
    """What changed by category, by holder, in figures and in settings; "" without a difference to show."""
    if diff is None:
        return ""
    parts = [_headline(diff), *(f'<p class="empty">{escape(note)}</p>' for note in diff.notes)]
    parts += [_categories(diff), _rows(diff.rows), _changes(diff)]
    return f'<section id="changes" class="section"><h2>What changed</h2>{"".join(parts)}</section>'


def _headline(diff: Diff) -> str:
    need = next((change for change in diff.need if change.name == "need"), None)
    figures = "".join(
        f'<section class="figure"><h3>{escape(change.name.capitalize())} {html_parts.source("compiled")}</h3>'
        f'<p class="value {_side(change.difference)}">{_delta(change)}</p>'
        f"<p>{_value(change.before, change.unit)} → {_value(change.after, change.unit)}</p></section>"
        for change in (need, diff.live_peak)
        if change is not None and change.difference is not None
    )
    return (
        f'<dl class="sides"><div><dt>before</dt><dd>{escape(diff.before)}</dd></div>'
        f"<div><dt>after</dt><dd>{escape(diff.after)}</dd></div></dl>"
        + (f'<div class="figures">{figures}</div>' if figures else "")
    )


def _categories(diff: Diff) -> str:
    changed = [change for change in diff.categories if change.difference]
    if not changed:
        return '<p class="empty">No category differs at the live peak.</p>' if diff.categories else ""
    colours = html_data.colours_of([change.name for change in diff.categories])
    largest = max(abs(change.difference) for change in changed)
    lines = [
        f'<tr><th scope="row">{html_parts.swatch(colours[change.name])}{escape(change.name)}</th>'
        f'<td class="num">{_value(change.before, "bytes")}</td><td class="num">{_value(change.after, "bytes")}</td>'
        f'<td class="num {_side(change.difference)}">{_delta(change)}</td>'
        f"{_two_sided(change.difference, largest, colours[change.name])}</tr>"
        for change in changed
    ]
    total = diff.live_peak
    lines.append(
        f'<tr class="sum"><th scope="row">live peak</th><td class="num">{_value(total.before, "bytes")}</td>'
        f'<td class="num">{_value(total.after, "bytes")}</td>'
        f'<td class="num {_side(total.difference)}">{_delta(total)}</td><td></td></tr>'
    )
    heads = ("category", ">before", ">after", ">difference", '<span class="hidden">bar</span>')
    caption = f"By category, at the live peak {html_parts.source('compiled')}"
    return html_parts.table(heads, lines, caption, "changes")


def _two_sided(difference: int, largest: int, colour: str) -> str:
    width = abs(difference) / largest / 2 if largest else 0.0
    edge = "left" if difference > 0 else "right"
    return f'<td class="bar two"><i style="width:{width:.2%};{edge}:50%;background:{colour}"></i></td>'


def _rows(changed: Sequence[RowChange]) -> str:
    if not changed:
        return ""
    colours = html_data.colours_of(list(dict.fromkeys(row.category for row in changed)))
    lines = [_row(row, colours[row.category]) for row in changed]
    heads = ("", "category", "module and source", "shape", ">before", ">after", ">difference")
    caption = f"By holder, at the live peak {html_parts.source('compiled')}"
    shown = html_parts.table(heads, lines[:_MOST_ROWS], caption, "holders")
    if len(lines) <= _MOST_ROWS:
        return shown
    rest = html_parts.table(heads, lines[_MOST_ROWS:], "The others", "holders")
    return f"{shown}<details><summary>{len(lines) - _MOST_ROWS:,} smaller changes</summary>{rest}</details>"


def _row(row: RowChange, colour: str) -> str:
    counts = [
        f"{format_bytes(size)}<small>{buffers:,} buffer{'s' if buffers != 1 else ''}</small>" if buffers else "–"
        for size, buffers in ((row.before_bytes, row.before_buffers), (row.after_bytes, row.after_buffers))
    ]
    change = Change("", row.before_bytes, row.after_bytes)
    return (
        f'<tr><td class="kind {row.kind}">{row.kind}</td>'
        f"<td>{html_parts.swatch(colour)}{escape(row.category)}</td>"
        f"<td>{html_parts.code(row.modules)}{f'<small>{escape(row.source)}</small>' if row.source else ''}</td>"
        f"<td>{html_parts.code(row.shapes)}</td>"
        f'<td class="num">{counts[0]}</td><td class="num">{counts[1]}</td>'
        f'<td class="num {_side(row.difference)}">{_delta(change)}</td></tr>'
    )


def _changes(diff: Diff) -> str:
    tables = []
    parts = [change for change in diff.need if change.difference]
    for caption, changes, source in (
        (f"Need {html_parts.source('compiled')}", parts, None),
        ("Other figures that differ", diff.figures, _source),
        ("Settings that differ", diff.settings, None),
    ):
        lines = [
            f'<tr><th scope="row">{escape(change.name)}{source(change) if source else ""}</th>'
            f'<td class="num">{_value(change.before, change.unit)}</td>'
            f'<td class="num">{_value(change.after, change.unit)}</td>'
            f'<td class="num">{_delta(change)}</td></tr>'
            for change in changes
        ]
        if lines:
            tables.append(html_parts.table(("what", ">before", ">after", ">difference"), lines, caption, "changes"))
    return f'<div class="tables">{"".join(tables)}</div>' if tables else ""


def _source(change: Change) -> str:
    """Where a figure of `Diff.figures` comes from; the need's table says it in its caption."""
    if change.unit == "text":
        return ""
    named = (kind for kind in ("predicted", "measured") if kind in change.name)
    counted = change.name.startswith(("saved", "model FLOPs", "recomputed"))
    kind = next(named, "counted" if counted else "compiled")
    return f" {html_parts.source(kind)}"


def _value(value: object, unit: str) -> str:
    if value is None:
        return "–"
    if not isinstance(value, int | float) or unit == "text":
        return escape(str(value)) or "–"
    return _number(value, unit)


def _number(value: float, unit: str) -> str:
    return f"{'−' if value < 0 else ''}{rows.figure_text(abs(value), unit)}"


def _delta(change: Change) -> str:
    difference = change.difference
    if difference is None:
        return ""
    if not difference:
        return "±0"
    return ("+" if difference > 0 else "") + _number(difference, change.unit)


def _side(difference: int | float | None) -> str:
    return "" if not difference else "more" if difference > 0 else "less"
