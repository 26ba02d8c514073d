"""`remat-kit report`: renders saved records again. Needs no JAX and runs nothing."""

from pathlib import Path
from typing import Annotated

import typer

from remat_kit import _record
from remat_kit._errors import RematKitError
from remat_kit._report import markdown, plot, table, text
from remat_kit.cli import _input, _output

_FORMATS = ("table", "text", "markdown")


def command(
    files: Annotated[list[str], typer.Argument(metavar="FILE...", help="files that --json wrote; - is standard input")],
    form: Annotated[
        str | None,
        typer.Option("--format", metavar="|".join(_FORMATS), help="by default text for one record, else a table"),
    ] = None,
    json_file: _input.JsonOption = None,
    plot_file: _input.PlotOption = None,
    force: _input.ForceOption = False,
) -> None:
    """Show records that were saved with --json; several files are shown together."""
    if form is not None and form not in _FORMATS:
        raise RematKitError(f"--format is {form!r}. Give one of {', '.join(_FORMATS)}.")
    if plot_file:
        plot.check_suffix(Path(plot_file))
    for name in (json_file, plot_file):
        _output.check(name, force)
    records = [record for name in files for record in _output.read_records(name)]
    form = form or ("text" if len(records) == 1 else "table")
    if json_file:
        _output.write(json_file, _record.dump(records))
    if form == "text":
        shown = "\n".join(text.render(record) for record in records)
    elif form == "markdown":
        shown = markdown.render(records)
    else:
        shown = table.render(records, _output.width(table.DEFAULT_WIDTH))
    _output.show(shown, json_file)
    if plot_file:
        _output.write(plot_file, plot.render(records, Path(plot_file).suffix))
