"""Files and streams that commands write to: checked before any work, written whole or not at all."""

import contextlib
import io
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from rich import box
from rich.console import Console
from rich.table import Table

from remat_kit._errors import OutputError, RematKitError
from remat_kit._record import Record, load
from remat_kit._store import write_atomically

STDOUT = "-"
MIN_WIDTH = 80
_STREAMS = ("/dev/fd/", "/dev/std", "/proc/")


def check(name: str | None, force: bool) -> None:
    """Raises OutputError when `name` is not a file that may be written; `-` and None always may."""
    if name is None or name == STDOUT:
        return
    if not name:
        raise OutputError("the name of an output is empty. Name a file, or leave the option out.")
    path = Path(name)
    if _is_stream(path):
        return
    if path.is_dir():
        raise OutputError(f"{name} is a folder. Name a file in it.")
    if path.exists() and not path.is_file():
        raise OutputError(f"{name} is neither a file nor a pipe. Name a file.")
    if path.exists() and not force:
        raise OutputError(f"{name} exists and is not overwritten. Name another file, or allow it with --force.")
    if not path.parent.is_dir():
        raise OutputError(f"cannot write {name}: there is no folder {path.parent}. Make it first.")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise OutputError(f"cannot write {name}: the folder {path.parent} is not writable. Name a file elsewhere.")


def check_all(names: Sequence[str | None], force: bool) -> str | None:
    """Checks each like `check`, and returns `-` when one is standard output: what `show` prints then goes elsewhere.

    Raises OutputError when two of them are one file, or standard output.
    """
    for name in names:
        check(name, force)
    if names.count(STDOUT) > 1:
        raise OutputError("two outputs are -, which is standard output. Give one of them a file.")
    paths = [Path(name).resolve() for name in names if name not in (None, STDOUT) and not _is_stream(Path(name))]
    for path in paths:
        if paths.count(path) > 1:
            raise OutputError(f"two outputs are {path}, and one would overwrite the other. Name another file.")
    return STDOUT if STDOUT in names else None


def write(name: str, content: str | bytes) -> None:
    """Writes `content` to the file, or to standard output for `-`."""
    if name == STDOUT:
        assert isinstance(content, str)
        _print(content, sys.stdout)
        return
    path = Path(name)
    try:
        if _is_stream(path):
            path.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
        else:
            write_atomically(path.resolve(), content)  # the file that a link leads to, not the link
    except OSError as error:
        raise OutputError(f"cannot write {name}: {error.strerror}. Name a file elsewhere.") from error


def show(text: str, taken: str | None) -> None:
    """Prints a report: on standard output, unless `taken` says that a file goes there."""
    _print(text, sys.stderr if taken == STDOUT else sys.stdout)


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
    where = "standard input" if name == STDOUT else name
    try:
        text = sys.stdin.read() if name == STDOUT else Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise RematKitError(f"cannot read {where}: {reason}. Give a file that --json wrote.") from error
    try:
        return load(text)
    except RematKitError as error:
        raise RematKitError(f"{where}: {error}") from error
    except RecursionError as error:
        raise RematKitError(f"{where}: nested too deeply to be a record. Give a file that --json wrote.") from error


def _is_stream(path: Path) -> bool:
    """Whether it is a device or a pipe, e.g. /dev/null or /dev/fd/63: written as it is, never replaced by a file."""
    return path.is_char_device() or path.is_fifo() or str(path.absolute()).startswith(_STREAMS)


def _print(text: str, stream: TextIO) -> None:
    """Writes to standard output or error. A pipe that nobody reads any more is left to who called us."""
    try:
        stream.write(text)
        stream.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        # What the stream still holds would fail once more when Python closes it.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        raise OutputError(f"cannot write {stream.name}: {error.strerror}. Write to a file elsewhere.") from error
