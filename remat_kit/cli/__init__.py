"""The command line `remat-kit`: one file a command, and here what puts them together."""

import io
import sys
from collections.abc import Sequence

import typer

from remat_kit._errors import RematKitError
from remat_kit.cli import analyze, diff, plan, policies, report, sweep, targets
from remat_kit.cli import max as largest

app = typer.Typer(
    name="remat-kit",
    help="What each rematerialization policy costs, for a GPU that need not be there.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for name, module in {
    "sweep": sweep,
    "analyze": analyze,
    "diff": diff,
    "plan": plan,
    "max": largest,
    "report": report,
    "policies": policies,
    "targets": targets,
}.items():
    app.command(name)(module.command)


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0 all fine, 1 some cells failed, 2 bad input, 130 stopped with Ctrl-C.

    Only a user's mistake is caught here; an error of ours shows its traceback.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a character shows another one
    try:
        app(args=list(arguments) if arguments is not None else None, prog_name="remat-kit")
    except RematKitError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0
