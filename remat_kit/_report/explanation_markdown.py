"""One record in Markdown, for a pull request or an issue: a short summary, and the details folded away."""

from collections.abc import Iterable, Sequence

from remat_kit._explanation import Explanation, Holder
from remat_kit._record import Record
from remat_kit._report import rows, text
from remat_kit._report.explanation import floor_parts, moment_text, shape_text, shares_text, split
from remat_kit._report.markdown_parts import code, details, escape, fenced, table
from remat_kit._report.rows import share_text
from remat_kit._units import format_bytes, format_seconds

_NAMED = 3
"""Categories that the summary names."""


def render(record: Record) -> str:
    """The record in Markdown. All figures are those of the text report, which is in it as the last detail."""
    policy = f", policy {code(record.policy)}" if record.policy else ""
    lines = [f"### {escape(rows.title([record]))}{policy}", ""]
    if record.error:
        lines += [f"**Failed:** {escape(record.error)}", ""]
    lines += [line for line in _summary(record) if line]
    if record.explanation:
        lines += _explained(record, record.explanation)
    lines += details("The whole report", fenced(text.render(record)))
    return "\n".join(lines).rstrip("\n") + "\n"


def _summary(record: Record) -> Iterable[str]:
    """One line for each of need, time and cost of recomputation, as far as they are known."""
    if record.need_bytes is not None:
        fits = f" ({escape(rows.fits_text(record))})" if record.fits else ""
        peak = f"; live peak {format_bytes(record.live_peak_bytes)}" if record.live_peak_bytes is not None else ""
        phase = rows.phase_words(record).removeprefix(",") if peak else ""
        yield f"- **need {format_bytes(record.need_bytes)}**{fits}{peak}{phase} (compiled)"
    if record.predicted_step_s is not None:
        yield f"- step {format_seconds(record.predicted_step_s)} (predicted)"
    if (measured := record.measured_step_s) is not None:
        yield f"- step {format_seconds(measured.median)} (measured on {escape(measured.device)})"
    if record.recompute_flops is not None:
        yield f"- recomputed {rows.recompute_percent(record)} of the model's FLOPs (counted)"
    if record.effect:
        yield f"- {escape(record.effect)}"
    for warning in record.warnings:
        yield f"- warning: {escape(warning)}"


def _explained(record: Record, explanation: Explanation) -> list[str]:
    total = sum(each.bytes for each in explanation.holders)
    largest = [
        f"{escape(name)} {format_bytes(count)} ({share_text(count, total)})"
        for name, count in rows.categories(record)[:_NAMED]
    ]
    lines = [f"- most of the live peak: {', '.join(largest)}"] if largest else []
    if explanation.floor:
        lines.append(f"- no policy can bring the live peak below {format_bytes(explanation.floor.bytes)} (a bound)")
    if explanation.advice:
        lines += ["", "Next steps, with an estimate of how far the need falls:", ""]
        lines += [
            f"{number}. **{escape(each.kind)}** {escape(each.what)}: {format_bytes(each.bytes)}. {escape(each.how)}"
            for number, each in enumerate(explanation.advice, start=1)
        ]
    cells = [(escape(name), format_bytes(count), share_text(count, total)) for name, count in rows.categories(record)]
    cells.append(("**live peak**", f"**{format_bytes(total)}**", ""))
    body = table(("category", "bytes", "share"), cells, left=1)
    body += ["", f"Attributed: {shares_text(record, explanation)}."]
    if moment := moment_text(explanation.peak):
        body += ["", f"Moment: {escape(moment)}."]
    lines += details("The live peak by category", body)
    lines += details("What holds it", _holders(explanation.holders, total, "live peak"))
    if explanation.host_holders:
        host = sum(each.bytes for each in explanation.host_holders)
        lines += details("Host memory", _holders(explanation.host_holders, host, "on the host"))
    if explanation.floor:
        cells = [(name, format_bytes(count), escape(where)) for name, count, where in floor_parts(explanation.floor)]
        cells.append(("**floor**", f"**{format_bytes(explanation.floor.bytes)}**", "a bound, not a promise"))
        lines += details(
            "The floor", [f"| {' | '.join(row)} |" for row in (("", "bytes", ""), ("---", "---:", "---"), *cells)]
        )
    return lines


def _holders(holders: Sequence[Holder], total: int, name: str) -> list[str]:
    shown, rest = split(holders)
    cells = [
        (
            escape(each.category),
            code(each.module),
            code(each.source),
            each.phase,
            code(shape_text(each)),
            format_bytes(each.bytes),
            share_text(each.bytes, total),
        )
        for each in shown
    ]
    if rest:
        size = sum(each.bytes for each in rest)
        cells.append((f"{len(rest):,} more", "", "", "", "", format_bytes(size), share_text(size, total)))
    cells.append((f"**{name}**", "", "", "", "", f"**{format_bytes(total)}**", share_text(total, total)))
    return table(("category", "module", "source", "phase", "shape", "bytes", "share"), cells, left=5)
