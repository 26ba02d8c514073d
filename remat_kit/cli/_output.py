"""Files and streams that commands write to: checked before any work, written whole or not at all."""

import io
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from remat_kit._errors import OutputError, RematKitError
from remat_kit._record import Record, load
from remat_kit._store import write_atomically

STDOUT = "-"
MIN_WIDTH = 80


def check(name: str | None, force: bool) -> None:
    """Raises OutputError when `name` is not a file that may be written; `-` and None always may."""
    if name is None or name == STDOUT:
        return
    path = Path(name)
    if path.is_dir():
        raise OutputError(f"{name} is a folder. Name a file in it.")
    if path.exists() and not force:
        raise OutputError(f"{name} exists and is not overwritten. Name another file, or allow it with --force.")
    if not path.parent.is_dir():
        raise OutputError(f"cannot write {name}: there is no folder {path.parent}. Make it first.")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise OutputError(f"cannot write {name}: the folder {path.parent} is not writable. Name a file elsewhere.")


def check_all(names: Sequence[str | None], force: bool) -> str | None:
    """Checks each like `check`, and returns `-` when one is standard output: what `show` prints then goes elsewhere.

    Raises OutputError when two of them are standard output.
    """
    for name in names:
        check(name, force)
    if names.count(STDOUT) > 1:
        raise OutputError("two outputs are -, which is standard output. Give one of them a file.")
    return STDOUT if STDOUT in names else None


def write(name: str, content: str | bytes) -> None:
    """Writes `content` to the file, or to standard output for `-`."""
    if name == STDOUT:
        assert isinstance(content, str)
        sys.stdout.write(content)
        sys.stdout.flush()
        return
    try:
        write_atomically(Path(name), content)
    except OSError as error:
        raise OutputError(f"cannot write {name}: {error.strerror}. Name a file elsewhere.") from error


def show(text: str, taken: str | None) -> None:
    """Prints a report: on standard output, unless `taken` says that a file goes there."""
    stream = sys.stderr if taken == STDOUT else sys.stdout
    stream.write(text)
    stream.flush()


def show_table(table: Table, taken: str | None) -> None:
    """Prints a table like `show`, as wide as the terminal, with the lines of a plain text."""
    table.box, table.pad_edge = box.SIMPLE_HEAD, False
    out = io.StringIO()
    Console(file=out, width=width(160), color_system=None, highlight=False).print(table)
    show("\n".join(line.rstrip() for line in out.getvalue().strip("\n").splitlines()) + "\n", taken)


def width(default: int) -> int:
    """The columns that a table may take: the terminal's, or `default` where there is none."""
    return max(MIN_WIDTH, shutil.get_terminal_size((default, 24)).columns)


def read_records(name: str) -> list[Record]:
    """The records of a file that --json wrote, or of standard input for `-`."""
    try:
        text = sys.stdin.read() if name == STDOUT else Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise RematKitError(f"cannot read {name}: {reason}. Give a file that --json wrote.") from error
    try:
        return load(text)
    except RematKitError as error:
        raise RematKitError(f"{name}: {error}") from error
