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


def render(records: Sequence[Record], width: int = DEFAULT_WIDTH) -> str:
    """The table as text of at most `width` columns, with failed rows and warnings listed below it."""
    if not records:
        return "no records\n"
    table = Table(title=Text(rows.title(records)), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    shown = [record for record in records if record.need_bytes is not None]
    columns = rows.columns(shown) if shown else []
    for column in columns:
        header = Text(f"{column.name}\n{column.source}" if column.source else column.name)
        table.add_column(header, justify="left" if column.left else "right", overflow="fold", vertical="top")
    for index in range(len(shown)):
        table.add_row(*(Text(column.cells[index]) for column in columns))

    out = io.StringIO()
    console = Console(file=out, width=width, color_system=None, force_terminal=False, legacy_windows=False)
    if shown:
        console.print(table)
        console.print(Text("\n".join(rows.notes(shown))))
    for heading, lines in (("failed", rows.failures(records)), ("warnings", rows.warnings(records))):
        if lines:
            console.print(Text(f"\n{heading}:"))
            for line in lines:
                # An error is one line, whatever the width: it is there to be copied.
                console.print(Text(f"  {line}"), soft_wrap=True)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"
