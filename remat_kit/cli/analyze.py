"""`remat-kit analyze`: one policy of a workload, or one program in a file, in this process, with every figure."""

import contextlib
import dataclasses
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from remat_kit import _diff, _record, _xprof
from remat_kit._errors import RematKitError
from remat_kit._report import diff as diff_report
from remat_kit._report import explanation_markdown, html, text
from remat_kit.cli import _files, _input, _output

if TYPE_CHECKING:
    from remat_kit._cell import Cell

_FORMATS = ("text", "markdown")
# What says how to build and compile a step, and so means nothing of a program that is there already.
_OF_WORKLOADS = {
    "options": "KEY=VALUE",
    "against": "--against",
    "mesh": "--mesh",
    "xla_remat": "--xla-remat",
    "gemm": "--gemm",
    "autotune_results": "--autotune-results",
    "xla_options": "--xla-option",
}


def command(
    context: typer.Context,
    subject: Annotated[
        str,
        typer.Argument(
            metavar="WORKLOAD|FILE|FOLDER",
            help="module:function to compile; or an XLA dump, a profile folder, a file that --json wrote",
            show_default=False,
        ),
    ],
    options: _input.OptionsArgument = None,
    target: Annotated[
        str | None, typer.Option(help="what to compile for, or to judge a file for; a workload by default for cpu")
    ] = None,
    policy: Annotated[str | None, typer.Option(help="`remat-kit policies` lists them; full by default")] = None,
    against: Annotated[
        str | None, typer.Option(metavar="POLICY", help="compile this one too, and show what differs from it")
    ] = None,
    module: _input.ModuleOption = None,
    mesh: _input.MeshOption = None,
    xla_remat: _input.XlaRematOption = "off",
    gemm: Annotated[str, typer.Option(metavar="cublas|triton", help="who multiplies on a GPU target")] = "cublas",
    autotune_results: _input.AutotuneOption = None,
    xla_options: _input.XlaOption = None,
    form: Annotated[str, typer.Option("--format", metavar="|".join(_FORMATS), help="of the report")] = "text",
    json_file: _input.JsonOption = None,
    html_file: _input.HtmlOption = None,
    xprof: Annotated[
        str | None, typer.Option(metavar="DIR", help="also write a profile folder for XProf's memory viewer")
    ] = None,
    force: _input.ForceOption = False,
) -> None:
    """Report what one policy of a workload costs for a target and why; or the same of a program in a file.

    A workload is compiled in this process and nothing is kept, so an error of the workload shows where it comes from.
    A file is only read.
    """
    if form not in _FORMATS:
        raise RematKitError(f"--format is {form!r}. Give one of {', '.join(_FORMATS)}.")
    taken = _output.check_all((json_file, html_file), force)
    if xprof is not None:
        _xprof.check(xprof, force)

    if _files.is_file(subject):
        _files.refuse(context, _OF_WORKLOADS, f"only a workload is compiled, and {subject} is a file. Leave it out.")
        if xprof is not None and _files.holds_records(subject):
            raise RematKitError(f"--xprof: {subject} is a saved report, which does not hold the program. Give a dump.")
        given, base = _files.read(subject, target, module, policy), None
    else:
        _files.refuse(context, {"module": "--module"}, f"{subject} is a workload, which is one program. Leave it out.")
        if ":" not in subject:
            raise RematKitError(
                f"there is no file or folder {subject!r}, and a workload is module:function, e.g. "
                "models.transformer:gpt. Give one of them."
            )
        _input.check_workload(subject)
        typed = (subject, _input.parse_options(options), target or "cpu", mesh)
        given, base = _compile(typed, policy or "full", against, gemm, (xla_remat, autotune_results, xla_options))
    _show(given, base, form, json_file, html_file, xprof, force, taken)


def _compile(
    typed: tuple[str, tuple[tuple[str, Any], ...], str, str | None],
    policy: str,
    against: str | None,
    gemm: str,
    rest: tuple[str, str | None, list[str] | None],
) -> tuple[_files.Given, _record.Record | None]:
    """The policy's record and program, and the record of the policy that it is compared with."""
    from remat_kit import _cell, _policy

    chosen = [_policy.get_policy(name).name for name in (policy, against) if name is not None]
    _input.check_target(typed[2], typed[3])
    if gemm == "both":
        raise RematKitError("analyze compiles once, so --gemm is cublas or triton. For both, use remat-kit sweep.")
    compile_options = _input.parse_compile_options(rest[0], gemm, *rest[1:])
    if os.getcwd() not in sys.path and "" not in sys.path:
        # A console script has its own folder there; a workload comes from where the user is.
        sys.path.insert(0, os.getcwd())
    # Standard output is for the report, or for JSON: what the workload prints goes elsewhere.
    with contextlib.redirect_stdout(sys.stderr):
        inspected = _cell.inspect_workload(typed)
        cells = _cell.make_cells(typed[0], typed[1], chosen, compile_options, inspected)
        given, *others = [_analyzed(cell) for cell in cells]
    if not others:
        return given, None
    from remat_kit._effect import effect

    base = others[0].record
    record = dataclasses.replace(given.record, effect=effect(given.record, base).text)
    return dataclasses.replace(given, record=record), base


def _analyzed(cell: "Cell") -> _files.Given:
    """Like `_cell.run_cell`, and with the program."""
    from remat_kit import _cell
    from remat_kit._analyze import analyze
    from remat_kit._policy import get_policy
    from remat_kit._step import Workload

    compiled = _cell.compile_cell(cell)
    record = analyze(compiled, Workload(cell.workload, cell.options), get_policy(cell.policy))
    return _files.Given(record, compiled.hlo_proto)


def _show(
    given: _files.Given,
    base: _record.Record | None,
    form: str,
    json_file: str | None,
    html_file: str | None,
    xprof: str | None,
    force: bool,
    taken: str | None,
) -> None:
    """Prints the report and writes the files. Everything is rendered before anything is written."""
    record = given.record
    difference = _diff.diff(base, record) if base else None
    if form == "markdown":
        shown = explanation_markdown.render(record)
        compared = diff_report.markdown(difference) if difference else ""
    else:
        shown = text.render(record)
        compared = diff_report.text(difference) if difference else ""
    page = html.render(record, difference, base) if html_file else None
    if xprof and given.data is not None:
        _xprof.write(xprof, given.data, force)
    if json_file:
        _output.write(json_file, _record.dump([record, base] if base else record))
    if html_file and page is not None:
        _output.write(html_file, page)
    written = f"\nwritten for XProf; open it with: xprof --logdir {shlex.quote(str(Path(xprof)))}\n" if xprof else ""
    # The list first: it may be long, and the report is what one wants to see. Markdown is for a file or a comment.
    aside = _output.STDOUT if form == "markdown" else taken
    _output.show(given.listing and given.listing + "\n", aside)
    _output.show("\n".join(part for part in (shown, compared) if part), taken)
    _output.show(written, aside)
