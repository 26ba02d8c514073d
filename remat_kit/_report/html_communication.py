"""The section of the HTML report on what the devices of a mesh send each other: a table, no script."""

from html import escape

from remat_kit._record import Record
from remat_kit._report import communication, html_parts


def section(record: Record) -> str:
    """The table of all collectives, and what of them and of the recomputation is hidden; "" where there are none."""
    if not record.collectives:
        return ""
    columns = communication.columns(record.collectives)
    heads = [f">{column.head}" if column.right else column.head for column in columns]
    body = (
        "<tr>" + "".join(
            f'<td class="num">{escape(cell)}</td>' if column.right else f"<td>{escape(cell)}</td>"
            for cell, column in zip(cells, columns, strict=True)
        ) + "</tr>"
        for cells in zip(*(column.cells for column in columns), strict=True)
    )  # fmt: skip
    marks = f"{html_parts.source('compiled')} {html_parts.source('predicted')}"
    caption = "Bytes that one device hands in each time (compiled), seconds of a step (predicted)"
    sums = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(' '.join(part for part in (value, note) if part))}</dd></div>"
        for name, value, note in communication.sums(record)
    )
    return (
        f'<section id="collectives" class="section"><h2>Collectives {marks}</h2>'
        f"{html_parts.table(heads, body, caption)}<dl class='sources'>{sums}</dl></section>"
    )
