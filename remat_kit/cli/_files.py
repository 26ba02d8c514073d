"""What commands read instead of compiling: saved records, XLA dumps and profile folders."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from remat_kit import _modules
from remat_kit._errors import RematKitError, TargetError
from remat_kit._record import Record
from remat_kit.cli import _input, _output

if TYPE_CHECKING:
    from remat_kit._target import Target


SHOWN = 10
"""Modules that are listed before a report: the largest. Of a training script's dump the rest is small change."""


@dataclass(frozen=True)
class Given:
    """What a file or folder gave.

    Attributes:
      record: its record. data: the program, None of a saved record.
      listing: the modules that are there, the chosen one marked; "" of a saved record.
    """

    record: Record
    data: bytes | None = None
    listing: str = ""


def is_file(text: str) -> bool:
    """Whether an argument means a file or a folder, and not a workload: it exists, or is written like one."""
    return bool(text) and (
        text == _output.STDOUT or text.endswith((".pb", ".json")) or "/" in text or "\\" in text or Path(text).exists()
    )


def holds_records(text: str) -> bool:
    """Whether the file is one that --json wrote, by its name or else by how it begins."""
    path = Path(text)
    if text == _output.STDOUT or path.suffix == ".json":
        return True
    if path.suffix == ".pb" or not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            return file.read(64).lstrip()[:1] in (b"{", b"[")
    except OSError:
        return False  # the one that reads it says why


def read(
    text: str, target: str | None = None, module: str | None = None, policy: str | None = None, lines: int = SHOWN
) -> Given:
    """The record of a saved report, or of a program, which is analyzed here without compiling it.

    `target` is what a program's fit and step time are judged for; `policy` chooses among saved records, `module`
    among programs, of which the `lines` largest are listed. Raises RematKitError when there is nothing to choose, or
    nothing to choose from.
    """
    if not text:
        raise RematKitError("the name of a file or folder is empty. Give a file that --json wrote, or an XLA dump.")
    if holds_records(text):
        for name, value in (("--target", target), ("--module", module)):
            if value is not None:
                raise RematKitError(f"{name} {value} is for programs, and {text} is a saved report, which has its own. "
                                    "Leave it out.")  # fmt: skip
        return Given(one_record(_output.read_records(text), policy, text))
    if policy is not None:
        raise RematKitError(
            f"--policy {policy} is for workloads and saved reports, and {text} is a program, which was compiled with "
            "its own. Leave it out."
        )
    judged = described_target(target)
    modules = _modules.find_modules(text)
    chosen = _modules.choose(modules, module)
    data = _modules.read(chosen)

    # Here, so that saved reports are read without NumPy.
    from remat_kit._program import analyze_module

    record = analyze_module(data, chosen.name, judged)
    return Given(record, data, _modules.listing(modules, chosen, lines) + "\n")


def one_record(records: Sequence[Record], policy: str | None, where: str) -> Record:
    """The one record, or that of `policy`. Raises RematKitError, with what there is, when that is none or several."""
    found = [record for record in records if policy is None or record.policy == policy]
    if len(found) == 1:
        return found[0]
    if not records:
        raise RematKitError(f"{where} holds no record. Give a file that --json wrote.")
    if not any(record.policy for record in records):
        what = f"holds {len(records)} record{'s' if len(records) > 1 else ''} of programs, which have no policy"
        raise RematKitError(f"{where} {what}. Give a file that holds one, and no policy.")
    names = ", ".join(dict.fromkeys(record.policy or f"no policy ({record.workload})" for record in records))
    if not found:
        raise RematKitError(f"{where} holds no record of policy {policy!r}. It has: {names}.")
    if policy is None:
        raise RematKitError(f"{where} holds {len(found)} records. Choose one by its policy: {names}.")
    raise RematKitError(
        f"{where} holds {len(found)} records of policy {policy!r}. Give a file in which it is there once."
    )


def described_target(name: str | None) -> "Target | None":
    """The target that a program is judged for. Starts no backend, so an attached device is none."""
    if name is None:
        return None
    if name.partition("-")[0] == "attached":
        raise TargetError(
            f"--target {name} asks this machine's device, and a program in a file is not compiled again for it. "
            "Give a described target; `remat-kit targets` lists them."
        )
    from remat_kit._target import get_target

    _input.check_target(name, None)
    return get_target(name)


def refuse(context: typer.Context, names: Mapping[str, str], why: str) -> None:
    """Raises RematKitError when one of the options was given; `names` maps parameters to what the user types."""
    given = []
    for parameter, typed in names.items():
        source = context.get_parameter_source(parameter)
        if source is not None and source.name == "COMMANDLINE":
            given.append(typed)
    if given:
        raise RematKitError(f"{', '.join(given)}: {why}")


def titled(title: str, where: str) -> str:
    """A side of a comparison, with the file that it came from."""
    return f"{title} ({where})" if title else where
