"""`remat-kit diff`: what changed between two saved reports, or between two programs."""

import dataclasses
import json
from typing import Annotated

import typer

from remat_kit import _diff
from remat_kit._errors import RematKitError
from remat_kit._report import diff as diff_report
from remat_kit._report import html
from remat_kit.cli import _files, _input, _output

_FORMATS = ("text", "markdown")
_LISTED = 3  # modules of each side: what differs is what one wants to see


def command(
    before: Annotated[
        str, typer.Argument(metavar="BEFORE", help="a file that --json wrote, an XLA dump or a profile folder")
    ],
    after: Annotated[str, typer.Argument(metavar="AFTER", help="the same, of the later version")],
    policy: Annotated[str | None, typer.Option(help="which record of a saved sweep")] = None,
    before_policy: Annotated[
        str | None, typer.Option(metavar="POLICY", help="which record of BEFORE; by default as --policy")
    ] = None,
    module: _input.ModuleOption = None,
    before_module: Annotated[
        str | None, typer.Option(metavar="NAME", help="which program of BEFORE; by default as --module")
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="what programs are judged for; `remat-kit targets` lists them")
    ] = None,
    form: Annotated[str, typer.Option("--format", metavar="|".join(_FORMATS), help="of the report")] = "text",
    json_file: _input.JsonOption = None,
    html_file: _input.HtmlOption = None,
    force: _input.ForceOption = False,
) -> None:
    """Show which tensors grew, shrank, came or went at the live peak, and what else differs. Compiles nothing."""
    if form not in _FORMATS:
        raise RematKitError(f"--format is {form!r}. Give one of {', '.join(_FORMATS)}.")
    taken = _output.check_all((json_file, html_file), force)
    saved = [_files.holds_records(where) for where in (before, after)]
    if before == after == _output.STDOUT:
        raise RematKitError("both sides are -, and standard input can be read once. Give one of them a file.")
    if before == after and not (before_policy if saved[0] else before_module):
        option = "--before-policy" if saved[0] else "--before-module"
        raise RematKitError(f"both sides are {before}. Say what to compare it with, by {option} or another file.")
    for name, value, used in (
        ("--policy", policy, any(saved)),
        ("--before-policy", before_policy, saved[0]),
        ("--module", module, not all(saved)),
        ("--before-module", before_module, not saved[0]),
        ("--target", target, not all(saved)),
    ):
        if value is not None and not used:
            kinds = ["a saved report" if each else "a program" for each in saved]
            raise RematKitError(
                f"{name} {value} says nothing here: {before} is {kinds[0]}, {after} is {kinds[1]}. Leave it out; "
                "policies choose among saved reports, modules and targets are for programs."
            )
    old = _read(before, saved[0], before_policy or policy, before_module or module, target)
    new = _read(after, saved[1], policy, module, target)
    found = _diff.diff(old.record, new.record)
    found = dataclasses.replace(
        found, before=_files.titled(found.before, before), after=_files.titled(found.after, after)
    )
    shown = diff_report.markdown(found) if form == "markdown" else diff_report.text(found)
    page = html.render(new.record, found, old.record) if html_file else None
    if json_file:
        _output.write(json_file, json.dumps(found.to_json(), indent=1, default=str) + "\n")
    if html_file and page is not None:
        _output.write(html_file, page)
    # Markdown is for a file or a comment: the lists of modules go elsewhere.
    lists = "".join(part + "\n" for part in (old.listing, new.listing) if part)
    _output.show(lists, _output.STDOUT if form == "markdown" else taken)
    _output.show(shown, taken)


def _read(where: str, saved: bool, policy: str | None, module: str | None, target: str | None) -> _files.Given:
    """One side: each option goes to the kind of side that it is for."""
    return _files.read(where, policy=policy) if saved else _files.read(where, target, module, lines=_LISTED)
