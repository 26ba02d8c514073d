"""The table of records in Markdown, for a README or an issue."""

from collections.abc import Sequence

from remat_kit._record import Record
from remat_kit._report import rows


def render(records: Sequence[Record]) -> str:
    """A Markdown table with the columns of the text table, and failed rows listed below it."""
    if not records:
        return "no records\n"
    shown = [record for record in records if record.need_bytes is not None]
    lines = [f"**{rows.title(records)}**", ""]
    if shown:
        columns = rows.columns(shown)
        heads = [f"{column.name} ({column.source})" if column.source else column.name for column in columns]
        lines.append(_line(heads))
        lines.append(_line(["---" if column.left else "---:" for column in columns]))
        lines += [_line([column.cells[index] for column in columns]) for index in range(len(shown))]
        lines += [line for note in rows.notes(shown) for line in ("", _escape(note))]
    failed = rows.failures(records)
    if failed:
        lines += ["", "Failed:", ""]
        lines += [f"- {_escape(line)}" for line in failed]
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(_escape(cell) for cell in cells)} |"


def _escape(text: str) -> str:
    """Only what would end a cell or begin emphasis: a README is read as it is written, too."""
    return text.replace("|", "\\|").replace("*", "\\*")
