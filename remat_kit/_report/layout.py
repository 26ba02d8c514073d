"""Rows and tables of plain text: columns as wide as what is in them, what is too long broken or shortened."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH = 120
"""Columns of a page: reports are read in terminals, logs and code blocks."""
_CUT = "…"
_NAME = 36
"""Columns for the name in a row of name and value."""


def row(name: str, value: str, note: str = "") -> str:
    """A line of name, value and note; a long note goes on below itself."""
    start = f"  {name:<{_NAME}}{value:>14}"
    if not note:
        return start.rstrip()
    return textwrap.fill(note, WIDTH, initial_indent=f"{start}  ", subsequent_indent=" " * (len(start) + 2),
                         break_on_hyphens=False)  # fmt: skip


def shorten(text: str, width: int) -> str:
    """`text`, with a part in its middle left out when it is longer than `width`.

    More is kept of its end; of a source line the file's name and the number, and what else there is room for.
    """
    if len(text) <= width:
        return text
    folder, slash, name = text.rpartition("/")
    if ":" in name:  # a source line: what goes first is the folder, then the function
        room = width - len(name) - len(slash) - len(_CUT)
        line = name.partition(" (")[0]
        for shorter in (folder[: max(room, 0)] + _CUT + slash + name, name, line):
            if len(shorter) <= width:
                return shorter
        text = line
    head = (width - 1) // 3
    return text[:head] + _CUT + text[len(text) - (width - 1 - head) :]


@dataclass(frozen=True)
class TextColumn:
    """A column: its head, its cells, and how narrow it may become before the page overflows."""

    head: str
    cells: tuple[str, ...]
    right: bool = False
    least: int = 1000
    """Wider cells are shortened to no less than this when the page is full; by default never."""


def table(columns: Sequence[TextColumn], width: int = WIDTH, indent: str = "  ", gap: str = "  ") -> list[str]:
    """The lines of a table. The widest columns that may be shortened give way first."""
    widths = [max(map(len, (column.head, *column.cells))) for column in columns]
    room = width - len(indent) - len(gap) * (len(columns) - 1)
    while sum(widths) > room:
        flexible = [index for index, column in enumerate(columns) if widths[index] > column.least]
        if not flexible:
            break
        widest = max(flexible, key=lambda index: widths[index])
        column = columns[widest]
        # A cell may lose more than it must, a function's name for example: the others then keep theirs.
        widths[widest] = max(len(shorten(cell, widths[widest] - 1)) for cell in (column.head, *column.cells))
    lines = []
    for row in zip(*((column.head, *column.cells) for column in columns), strict=True):
        cells = [
            f"{shorten(cell, size):>{size}}" if column.right else f"{shorten(cell, size):<{size}}"
            for cell, size, column in zip(row, widths, columns, strict=True)
        ]
        lines.append((indent + gap.join(cells)).rstrip())
    return lines
