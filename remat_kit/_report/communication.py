"""What the devices of a mesh send each other, as lines of the text report."""

from collections.abc import Iterable, Sequence

from remat_kit._communication import Collective
from remat_kit._record import Record
from remat_kit._report import rows
from remat_kit._report.layout import TextColumn, row, table
from remat_kit._units import format_bytes

MOST = 24
"""Rows of the table; the rest is one line."""


def lines(record: Record) -> Iterable[str]:
    """The table of collectives, longest first, with their sum, and what of the recomputation they hide."""
    shown = record.collectives
    if not shown:
        return
    yield "Collectives (compiled; bytes that one device hands in each time; seconds of a step predicted)"
    yield from table(columns(shown[:MOST]))
    if len(shown) > MOST:
        yield f"  and {len(shown) - MOST} kinds more, {sum(each.count for each in shown[MOST:]):,} a step"
    for name, value, note in sums(record):
        yield row(name, value, note)


def sums(record: Record) -> list[tuple[str, str, str]]:
    """Name, value and note of each sum over all collectives, and of the recomputation that they hide."""
    shown = record.collectives
    total, again = sum(each.count for each in shown), sum(each.count for each in shown if each.again)
    found = [("= a step", f"{total:,}", f"{again:,} of them again, to recompute")]
    seconds = [each.seconds for each in shown if each.seconds is not None]
    exposed = [each.exposed_s for each in shown if each.exposed_s is not None]
    if seconds:
        waited = f"{rows.seconds_text(sum(exposed))} of it exposed, the rest behind kernels"
        found.append(("  taking", rows.seconds_text(sum(seconds)), waited))
    if record.recompute_hidden_s is not None and record.recompute_exposed_s is not None:
        both = record.recompute_hidden_s + record.recompute_exposed_s
        found += [
            ("kernels that recompute", rows.seconds_text(both), ""),
            ("  while a collective is under way", rows.seconds_text(record.recompute_hidden_s), "hidden behind it"),
            ("  while none is", rows.seconds_text(record.recompute_exposed_s), "not hidden"),
        ]
    return found


def columns(shown: Sequence[Collective]) -> list[TextColumn]:
    """The columns of the table, a row for each of `shown`."""

    def column(head: str, cells: Iterable[str], right: bool = False, least: int = 1000) -> TextColumn:
        return TextColumn(head, tuple(cells), right, least)

    return [
        column("kind", (each.kind for each in shown)),
        column("phase", (each.phase + (" (again)" if each.again else "") for each in shown)),
        column("module", (each.module for each in shown), least=14),
        column("handed in", (each.shape for each in shown), least=14),
        column("bytes", (format_bytes(each.bytes) for each in shown), right=True),
        column("devices", (f"{each.devices:,}" for each in shown), right=True),
        column("count", (f"{each.count:,}" for each in shown), right=True),
        column("total", (rows.seconds_text(each.seconds) for each in shown), right=True),
        column("exposed", (rows.seconds_text(each.exposed_s) for each in shown), right=True),
    ]
