"""A table of records, one row a policy, with the Pareto front of need against step time marked."""

import io
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from remat_kit._record import Record
from remat_kit._report import rows

DEFAULT_WIDTH = 160
_STANDING_WIDTH = 44


def render(records: Sequence[Record], width: int = DEFAULT_WIDTH) -> str:
    """The table as text, with failed rows and warnings listed below it.

    Notes are broken at `width`. Rows are as long as they need to be: figures that are broken cannot be read,
    and a terminal that is too narrow can be scrolled or widened.
    """
    if not records:
        return "no records\n"
    table = Table(title=Text(rows.title(records)), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    shown = [record for record in records if record.need_bytes is not None]
    columns = rows.columns(shown) if shown else []
    for column in columns:
        header = Text(f"{column.name}\n{column.source}" if column.source else column.name)
        last = column is columns[-1]
        table.add_column(
            header,
            justify="left" if column.left else "right",
            no_wrap=not last,
            max_width=_STANDING_WIDTH if last else None,
        )
    for index in range(len(shown)):
        table.add_row(*(Text(column.cells[index]) for column in columns))

    out = io.StringIO()
    console, wide = (
        Console(file=out, width=columns_wide, color_system=None, force_terminal=False, legacy_windows=False)
        for columns_wide in (width, 10 * DEFAULT_WIDTH)
    )
    if shown:
        wide.print(table)
        console.print(Text("\n".join(rows.notes(shown))))
    for heading, lines in (("failed", rows.failures(records)), ("warnings", rows.warnings(records))):
        if lines:
            console.print(Text(f"\n{heading}:"))
            for line in lines:
                # An error is one line, whatever the width: it is there to be copied.
                console.print(Text(f"  {line}"), soft_wrap=True)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"
