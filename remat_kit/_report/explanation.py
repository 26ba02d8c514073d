"""The text of an explanation: the live peak by category, who holds it, how low it could go, and what to do next."""

import textwrap
from collections.abc import Iterable, Sequence

from remat_kit._explanation import Explanation, Floor, Holder, Moment
from remat_kit._record import Record
from remat_kit._report.layout import WIDTH, TextColumn, row, table
from remat_kit._report.rows import NOT_KNOWN, UNKNOWN, categories, phase_words, share_text
from remat_kit._units import format_bytes

LARGEST = 12
"""Holders that are shown one by one; the others are one line with their sum."""


def lines(record: Record, explanation: Explanation) -> Iterable[str]:
    """The lines of the report on `explanation`, which is that of `record`."""
    total = sum(each.bytes for each in explanation.holders)
    yield from _categories(record, explanation, total)
    yield ""
    yield "What holds it (compiled; by category, module, source line and shape; * is any block)"
    yield from holders_table(explanation.holders, total, "= live peak")
    if explanation.host_holders:
        host = sum(each.bytes for each in explanation.host_holders)
        yield ""
        yield "Host memory at its own live peak (compiled)"
        yield from holders_table(explanation.host_holders, host, "= on the host")
    if explanation.floor:
        yield ""
        yield from _floor(explanation.floor, total)
    if explanation.advice:
        yield ""
        yield from _advice(explanation)


def moment_text(moment: Moment) -> str:
    """`backward, in blocks/mlp, at models/x.py:12 (f)`, as far as it is known."""
    parts = [moment.phase if moment.phase != NOT_KNOWN else ""]
    inside = moment.module or moment.block
    parts += [f"in {inside}" if inside else "", f"at {moment.source}" if moment.source else ""]
    return ", ".join(part for part in parts if part)


def event_text(moment: Moment) -> str:
    """`loop_fusion.114 of region_12.while_body, event 2,841 of 5,102`; "" where the program has no trace."""
    if moment.event < 0:
        return ""
    return f"{moment.instruction} of {moment.computation}, event {moment.event:,} of {moment.events:,}"


def shares_text(record: Record, explanation: Explanation) -> str:
    """How much of the live peak's bytes is attributed, by category, module and source line."""
    category = UNKNOWN if record.attributed_share is None else f"{record.attributed_share:.1%}"
    return f"category {category}, module {explanation.module_share:.1%}, source line {explanation.source_share:.1%}"


def shape_text(holder: Holder) -> str:
    """The shape, with the number of buffers when there are several: `24 x bf16[8,768]`."""
    return f"{holder.buffers:,} x {holder.shape}" if holder.buffers > 1 else holder.shape


def split(holders: Sequence[Holder], largest: int = LARGEST) -> tuple[list[Holder], list[Holder]]:
    """The holders that are shown one by one, and the rest; a rest of one is shown."""
    ordered = sorted(holders, key=lambda each: -each.bytes)
    return (ordered, []) if len(ordered) <= largest + 1 else (ordered[:largest], ordered[largest:])


def holders_table(holders: Sequence[Holder], total: int, name: str) -> list[str]:
    """A table of the largest holders, a line with the sum of the rest, and a line with the sum of all."""
    shown, rest = split(holders)
    remainder = sum(each.bytes for each in rest)
    ends = [(f"{len(rest):,} more", remainder)] if rest else []
    ends.append((name, total))
    blank = ("",) * len(ends)
    return table(
        [
            TextColumn("category", (*(each.category for each in shown), *(label for label, _ in ends)), least=19),
            TextColumn("module", (*(each.module for each in shown), *blank), least=16),
            TextColumn("source", (*(each.source for each in shown), *blank), least=24),
            TextColumn("phase", (*(each.phase for each in shown), *blank)),
            TextColumn("shape", (*(shape_text(each) for each in shown), *blank), least=20),
            TextColumn(
                "bytes",
                (*(format_bytes(each.bytes) for each in shown), *(format_bytes(size) for _, size in ends)),
                right=True,
            ),
            TextColumn(
                "share",
                (*(share_text(each.bytes, total) for each in shown), *(share_text(size, total) for _, size in ends)),
                right=True,
            ),
        ]
    )


def floor_parts(floor: Floor) -> list[tuple[str, int, str]]:
    """What adds up to the floor: name, bytes, where."""
    where = ", ".join(part for part in (floor.transient_phase, floor.transient_module) if part)
    return [
        ("arguments", floor.argument_bytes, ""),
        ("outputs", floor.output_bytes, ""),
        ("constants", floor.constant_bytes, ""),
        ("largest transient", floor.transient_bytes, f"in {where}" if where else ""),
    ]


def _categories(record: Record, explanation: Explanation, total: int) -> Iterable[str]:
    yield f"Live peak (compiled: XLA's heap trace, replayed){phase_words(record)}"
    for name, count in categories(record):
        yield row(name, format_bytes(count), f"{share_text(count, total):>6}")
    yield row("= live peak", format_bytes(total), f"{total:,} bytes")
    yield f"  attributed: {shares_text(record, explanation)}"
    if moment := moment_text(explanation.peak):
        yield from _wrapped("moment: ", moment)
    if event := event_text(explanation.peak):
        yield from _wrapped("        ", event)


def _floor(floor: Floor, total: int) -> Iterable[str]:
    yield "Floor (compiled: no policy can bring the live peak below; a bound, not a promise)"
    for number, (name, count, where) in enumerate(floor_parts(floor)):
        yield row(f"{'+ ' if number else ''}{name}", format_bytes(count), where)
    yield row("= floor", format_bytes(floor.bytes), f"{share_text(floor.bytes, total)} of the live peak")


def _advice(explanation: Explanation) -> Iterable[str]:
    yield "Next steps (by how much the need falls, each by itself, is an estimate)"
    for number, advice in enumerate(explanation.advice, start=1):
        yield row(f"{number}. {advice.kind}", format_bytes(advice.bytes), advice.what)
        yield from _wrapped("     ", advice.how)


def _wrapped(lead: str, text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=f"  {lead}", subsequent_indent=" " * (len(lead) + 2),
                         break_on_hyphens=False)  # fmt: skip
