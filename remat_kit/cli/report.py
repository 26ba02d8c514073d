"""`remat-kit report`: renders saved records again. Needs no JAX and runs nothing."""

from pathlib import Path
from typing import Annotated

import typer

from remat_kit import _record
from remat_kit._errors import RematKitError
from remat_kit._report import explanation_markdown, html, markdown, plot, table, text
from remat_kit.cli import _files, _input, _output

_FORMATS = ("table", "text", "markdown", "html")


def command(
    files: Annotated[list[str], typer.Argument(metavar="FILE...", help="files that --json wrote; - is standard input")],
    form: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="|".join(_FORMATS),
            help="by default text for one record, else a table; html is of one record",
        ),
    ] = None,
    policy: Annotated[str | None, typer.Option(help="only the record of this policy")] = None,
    json_file: _input.JsonOption = None,
    html_file: _input.HtmlOption = None,
    plot_file: _input.PlotOption = None,
    force: _input.ForceOption = False,
) -> None:
    """Show records that were saved with --json; several files are shown together."""
    if form is not None and form not in _FORMATS:
        raise RematKitError(f"--format is {form!r}. Give one of {', '.join(_FORMATS)}.")
    if plot_file:
        plot.check_suffix(Path(plot_file))
    taken = _output.check_all((json_file, html_file, plot_file), force)
    records = [record for name in files for record in _output.read_records(name)]
    if form == "html" or html_file:
        records = [_files.one_record(records, policy, ", ".join(files))]
    elif policy is not None:
        # Where there is none, this says what there is.
        records = [each for each in records if each.policy == policy] or [
            _files.one_record(records, policy, ", ".join(files))
        ]
    page = html.render(records[0]) if form == "html" or html_file else ""
    form = form or ("text" if len(records) == 1 else "table")
    if json_file:
        _output.write(json_file, _record.dump(records))
    if form == "text":
        shown = "\n".join(text.render(record) for record in records)
    elif form == "html":
        shown = page
    elif form == "markdown":
        # Several records are a table; of one there is room for all.
        shown = explanation_markdown.render(records[0]) if len(records) == 1 else markdown.render(records)
    else:
        shown = table.render(records, _output.width(table.DEFAULT_WIDTH))
    _output.show(shown, taken)
    if html_file:
        _output.write(html_file, page)
    if plot_file:
        _output.write(plot_file, plot.render(records, Path(plot_file).suffix))
