"""The sections of the HTML report that are plain text, tables and bars. Each takes a record and returns markup."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from remat_kit._explanation import CATEGORIES, Advice, Explanation, Floor, Moment
from remat_kit._record import Record
from remat_kit._report import html_data, rows
from remat_kit._units import format_bytes, format_flops, format_seconds

_FIT_CLASSES = {"yes": "good", "tight": "warn", "no": "bad"}
_SHOWN_ANYWAY = 0.0005
"""A category with a smaller share than this is listed, with the others like it, in one line."""
_HOST_ROWS = 6
"""Holders of host memory that are shown one by one."""


def title(record: Record) -> str:
    """The document's title: workload, policy, target."""
    parts = (record.workload, record.policy and f"policy {record.policy}", record.target)
    return escape(" · ".join(part for part in parts if part) or "remat-kit")


def source(kind: str) -> str:
    """The mark that says where a figure comes from: compiled, counted, predicted or measured."""
    return f'<span class="source">{escape(kind)}</span>'


def code(text: str) -> str:
    """An identifier, which may break after a slash."""
    return f"<code>{escape(text).replace('/', '/<wbr>')}</code>" if text else '<span class="none">not known</span>'


def swatch(colour: str) -> str:
    """A small square in a category's colour."""
    return f'<i class="swatch" style="background:{colour}"></i>'


def table(heads: Sequence[str], body: Iterable[str], caption: str, kind: str = "") -> str:
    """A table of rows that are markup already; a head that begins with `>` is that of a column of figures."""
    cells = "".join(
        f'<th scope="col" class="num">{head[1:]}</th>' if head.startswith(">") else f'<th scope="col">{head}</th>'
        for head in heads
    )
    return (
        f'<div class="scroll"><table class="{kind}"><caption>{caption}</caption><thead><tr>{cells}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def head(record: Record) -> str:
    """Title, settings, the four figures that matter, and the moment of the peak."""
    options = rows.options_text(record.options)
    settings = [
        ("policy", record.policy),
        ("target", rows.target_text(record)),
        ("GEMM backend", record.gemm_backend),
        ("XLA's own remat", record.xla_remat),
        *record.versions.items(),
        *record.compile_options.items(),
    ]
    pairs = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(str(value))}</dd></div>"
        for name, value in settings
        if value and value != rows.NOT_KNOWN
    )
    warned = len(record.warnings)
    link = f'<a href="#notes">{warned} warning{"s" if warned != 1 else ""}</a>' if warned else ""
    failed = f'<p class="failed"><strong>Failed:</strong> {escape(record.error)}</p>' if record.error else ""
    figures = "".join(_figures(record))
    return (
        f'<p class="kicker">Device memory of one training step{f" · {link}" if link else ""}</p>'
        f"<h1>{escape(record.workload or 'unnamed step')}</h1>"
        + (f'<p class="options"><code>{escape(options)}</code></p>' if options else "")
        + f'<dl class="settings">{pairs}</dl>{failed}'
        + (f'<div class="figures">{figures}</div>' if figures else "")
        + (f'<p class="effect">{escape(record.effect)}</p>' if record.effect else "")
        + _moment(record)
    )


def _figure(name: str, kind: str, value: str, notes: Iterable[str], exact: str = "") -> str:
    number, _, unit = value.rpartition(" ")
    lines = "".join(f"<p>{note}</p>" for note in notes)
    hover = f' title="{escape(exact)}"' if exact else ""
    return (
        f'<section class="figure"><h2>{name} {source(kind)}</h2>'
        f'<p class="value"{hover}>{escape(number)} <small>{escape(unit)}</small></p>{lines}</section>'
    )


def _figures(record: Record) -> Iterable[str]:
    if record.need_bytes is not None:
        yield _figure("Need", "compiled", format_bytes(record.need_bytes), _fit(record), f"{record.need_bytes:,} bytes")
    if record.live_peak_bytes is not None:
        notes = [f"in {escape(record.live_peak_phase)}"] if record.live_peak_phase else []
        if record.need_bytes:
            notes.append(f"{record.live_peak_bytes / record.need_bytes:.1%} of the need is alive at once")
        exact = f"{record.live_peak_bytes:,} bytes"
        yield _figure("Live peak", "compiled", format_bytes(record.live_peak_bytes), notes, exact)
    if record.saved_bytes is not None:
        notes = []
        if record.saved_bytes_per_block is not None:
            notes.append(f"{format_bytes(record.saved_bytes_per_block)} a block")
        if record.saved_host_bytes:
            notes.append(f"{format_bytes(record.saved_host_bytes)} more waits on the host")
        if together := rows.together(record):
            notes.append(together.removeprefix(", "))
        yield _figure("Saved for backward", "counted", format_bytes(record.saved_bytes), notes)
    if record.predicted_step_s is not None or record.measured_step_s is not None:
        measured = record.measured_step_s
        seconds = measured.median if measured else record.predicted_step_s or 0.0
        notes = []
        if measured and record.predicted_step_s is not None:
            notes.append(f"{format_seconds(record.predicted_step_s)} {source('predicted')}")
        if measured:
            notes.append(f"{format_seconds(measured.p10)} to {format_seconds(measured.p90)}, {escape(measured.device)}")
        if record.recompute_flops is not None and record.model_flops:
            notes.append(f"+{rows.recompute_percent(record)} FLOPs recomputed {source('counted')}")
        yield _figure("Step time", "measured" if measured else "predicted", format_seconds(seconds), notes)


def _fit(record: Record) -> Iterable[str]:
    if record.fits is None:
        return
    kind, words = _FIT_CLASSES.get(record.fits, "warn"), rows.FIT_WORDS.get(record.fits, record.fits)
    yield f'<strong class="{kind}">{escape(words)}</strong>'
    if record.margin_bytes is not None and record.capacity_bytes:
        used = min(1.0, max(0.0, 1 - record.margin_bytes / record.capacity_bytes))
        side = "over" if record.margin_bytes < 0 else "left of"
        size = format_bytes(record.capacity_bytes)
        yield f'<span class="meter {kind}" aria-hidden="true"><i style="width:{used:.2%}"></i></span>'
        yield f"{format_bytes(abs(record.margin_bytes))} {side} {size} for a process"


def _moment(record: Record) -> str:
    explanation = record.explanation
    if explanation is None:
        if record.error or record.live_peak_bytes is None:
            return ""
        return (
            '<p class="empty">This record says how large the peak is, not what it is made of: an earlier version wrote '
            "it, or the step was not explained. Analyze the step again with <code>--json</code> and render that.</p>"
        )
    peak = explanation.peak
    shares = (
        ("to a category", record.attributed_share),
        ("to a module", explanation.module_share),
        ("to a source line", explanation.source_share),
    )
    known = "".join(
        f'<div><dt>{name}</dt><dd>{share:.1%}<span class="meter" aria-hidden="true">'
        f'<i style="width:{min(1.0, max(0.0, share)):.2%}"></i></span></dd></div>'
        for name, share in shares
        if share is not None
    )
    moment = f'<dl class="moment">{_places(peak)}</dl>'
    if peak.event < 0:
        moment = '<p class="empty">All of the step: the program has no temporaries that come and go.</p>'
    return (
        f'<div class="peak"><section><h2>The moment of the peak {source("compiled")}</h2>{moment}</section>'
        f"<section><h2>Bytes at the peak that are attributed {source('compiled')}</h2>"
        f'<dl class="shares">{known}</dl></section></div>'
    )


def _places(peak: Moment) -> str:
    places = (
        ("Phase", escape(peak.phase)),
        ("Block", code(peak.block) if peak.block else "outside of blocks"),
        ("Module", code(peak.module)),
        ("Source", code(peak.source)),
        ("Instruction", code(peak.instruction) + (f" in {code(peak.computation)}" if peak.computation else "")),
        ("Event", f"{peak.event:,} of {peak.events:,} of the heap trace"),
    )
    return "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in places)


def why(record: Record) -> str:
    """What holds the peak by category, the floor, the advice, and what the need adds up to."""
    explanation = record.explanation
    side = [
        _advice(explanation.advice) if explanation else "",
        _floor(explanation.floor, record.live_peak_bytes) if explanation else "",
    ]
    if record.live_peak_bytes is None and record.need_bytes is None:
        return ""
    return (
        '<section id="why" class="section"><h2>Why</h2><div class="columns">'
        f"<div>{_bars(record)}{_need(record)}{_host(explanation)}</div><div>{''.join(side)}</div></div></section>"
    )


def _bars(record: Record) -> str:
    total = record.live_peak_bytes
    if not record.categories or total is None:
        return '<p class="empty">The live peak is not known: there is no heap trace of all temporaries.</p>'
    colours = html_data.colours_of(html_data.categories_of(record))
    ranked = rows.categories(record)
    shown = [item for item in ranked if item[1] >= total * _SHOWN_ANYWAY and item[1]]
    rest = [item for item in ranked if item not in shown and item[1]]
    largest = max((count for _, count in shown), default=0)
    lines = [
        f'<tr><th scope="row">{swatch(colours[name])}{escape(name)}'
        f"<small>{escape(CATEGORIES.get(name, 'a label of the step'))}</small></th>"
        f'<td class="bar"><i style="width:{count / largest:.2%};background:{colours[name]}"></i></td>'
        f'<td class="num">{format_bytes(count)}</td><td class="num">{count / max(1, total):.1%}</td></tr>'
        for name, count in shown
    ]
    if rest:
        names = ", ".join(escape(name) for name, _ in rest)
        lines.append(
            f'<tr><th scope="row">{len(rest)} more<small>{names}</small></th><td></td>'
            f'<td class="num">{format_bytes(sum(count for _, count in rest))}</td>'
            f'<td class="num">&lt; {_SHOWN_ANYWAY:.2%} each</td></tr>'
        )
    lines.append(
        f'<tr class="sum"><th scope="row">live peak</th><td></td><td class="num">{format_bytes(total)}</td>'
        '<td class="num">100%</td></tr>'
    )
    return table(
        ("category", '<span class="hidden">bar</span>', ">bytes", ">share"),
        lines,
        f"What is alive at the peak {source('compiled')}",
        "bars",
    )


def _advice(advice: Sequence[Advice]) -> str:
    if not advice:
        return '<h3>What would lower it</h3><p class="empty">The analyzer found no step that would lower the need.</p>'
    steps = "".join(
        f"<li><p><span><strong>{escape(each.kind)}</strong>{f' {code(each.what)}' if each.what else ''}</span>"
        f'<span class="saves">−{format_bytes(each.bytes)}</span></p><p>{escape(each.how)}</p></li>'
        for each in advice
    )
    return f'<h3>What would lower the need, each by itself {source("predicted")}</h3><ol class="advice">{steps}</ol>'


def _floor(floor: Floor | None, peak: int | None) -> str:
    if floor is None:
        return ""
    where = ", ".join(part for part in (escape(floor.transient_phase), code(floor.transient_module)
                                        if floor.transient_module else "") if part)  # fmt: skip
    parts = (
        ("arguments", floor.argument_bytes),
        ("outputs", floor.output_bytes),
        ("constants", floor.constant_bytes),
        (f"most at one moment that no policy moves{f'<small>{where}</small>' if where else ''}", floor.transient_bytes),
    )
    lines = [_sum_row(name, count) for name, count in parts if count]
    lines.append(_sum_row("floor", floor.bytes, last=True))
    above = peak is not None and peak > floor.bytes
    rest = f"<p>{format_bytes((peak or 0) - floor.bytes)} of the live peak is above it.</p>" if above else ""
    return table(("part", ">bytes"), lines, f"The floor: no policy gets below {source('compiled')}", "sums") + rest


def _need(record: Record) -> str:
    if record.need_bytes is None:
        return ""
    parts = rows.need_parts(record)
    lines = [_sum_row(name, count, sign.replace("-", "−")) for sign, name, count in parts if count is not None]
    lines.append(_sum_row("need", record.need_bytes, last=True))
    besides: Mapping[str, int | None] = {
        "constants, besides": record.constant_bytes,
        "on the host, besides": rows.host_bytes(record),
    }
    lines += [_sum_row(name, count) for name, count in besides.items() if count]
    return table(("part", ">bytes"), lines, f"What the need adds up to {source('compiled')}", "sums")


def _host(explanation: Explanation | None) -> str:
    if explanation is None or not explanation.host_holders:
        return ""
    ordered = sorted(explanation.host_holders, key=lambda each: -each.bytes)
    lines = [
        _sum_row(f"{escape(each.category)}<small>{code(each.module or each.shape)}</small>", each.bytes)
        for each in ordered[:_HOST_ROWS]
    ]
    if rest := ordered[_HOST_ROWS:]:
        lines.append(_sum_row(f"{len(rest):,} more", sum(each.bytes for each in rest)))
    lines.append(_sum_row("on the host", sum(each.bytes for each in ordered), last=True))
    return table(("part", ">bytes"), lines, f"Host memory at its own live peak {source('compiled')}", "sums")


def _sum_row(name: str, count: int, sign: str = "", last: bool = False) -> str:
    kind = ' class="sum"' if last else ""
    return (
        f'<tr{kind}><th scope="row">{name}</th>'
        f'<td class="num" title="{count:,} bytes"><span class="sign">{sign}</span> {format_bytes(count)}</td></tr>'
    )


def notes(record: Record) -> str:
    """Warnings, assumptions, FLOPs, the words that say where a figure comes from."""
    warnings = "".join(f"<li>{escape(text)}</li>" for text in record.warnings)
    assumed = "".join(f"<li>{escape(text)}</li>" for text in record.assumptions)
    spent = rows.spent_text(record)
    return (
        '<section id="notes" class="section"><h2>Notes</h2><div class="columns"><div>'
        f"<h3>Warnings</h3>{f'<ul class=warnings>{warnings}</ul>' if warnings else '<p>None.</p>'}"
        f"<h3>Assumed</h3>{f'<ul>{assumed}</ul>' if assumed else '<p>Nothing.</p>'}</div><div>"
        f"{_program(record.explanation, record)}"
        "<h3>Where a figure comes from</h3><dl class='sources'>"
        "<div><dt>compiled</dt><dd>XLA's buffer assignment, and its heap trace, replayed</dd></div>"
        "<div><dt>counted</dt><dd>on the jaxpr: matmuls, convolutions, fused attention; saved values</dd></div>"
        "<div><dt>predicted</dt><dd>a model: a roofline, or what an advice would save</dd></div>"
        "<div><dt>measured</dt><dd>on an attached device</dd></div></dl>"
        f"{f'<p>{spent[0].upper()}{spent[1:]}.</p>' if spent else ''}</div></div></section>"
    )


def _program(explanation: Explanation | None, record: Record) -> str:
    lines = []
    if record.step_flops is not None and record.recompute_flops is not None:
        again = f" of them {format_flops(record.recompute_flops)} again" if record.recompute_flops else " none again"
        lines.append(("FLOPs of the step", f"{format_flops(record.step_flops)},{again}", "counted"))
    if explanation is not None:
        program = explanation.program
        lines += [
            ("instructions", f"{program.instructions:,}", "compiled"),
            ("matmul FLOPs", format_flops(program.matmul_flops), "compiled"),
            ("donated arguments", format_bytes(program.donated_bytes), "compiled"),
            ("blocks of temporary memory", f"{program.temp_allocations:,}", "compiled"),
        ]
        if program.xla_remat_clones:
            lines.append(("instructions that XLA's remat cloned", f"{program.xla_remat_clones:,}", "compiled"))
    body = "".join(
        f'<tr><th scope="row">{name} {source(kind)}</th><td class="num">{escape(value)}</td></tr>'
        for name, value, kind in lines
    )
    return table(("figure", ">value"), (body,), "The program", "sums") if lines else ""
