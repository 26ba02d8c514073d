"""Progress of a sweep on standard error: a bar on a terminal, a line for each row elsewhere."""

import sys
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from remat_kit._cell import Cell
from remat_kit._report import rows
from remat_kit._sweep import Row, Watcher
from remat_kit._units import format_bytes, format_seconds


def progress() -> "Lines | Bar":
    """What suits standard error; a context manager."""
    return Bar() if sys.stderr.isatty() else Lines()


def _time_left(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"


def _result(row: Row) -> str:
    record = row.record
    if record.error:
        return f"FAILED: {record.error}"
    if record.need_bytes is None:
        return "done"
    return f"need {format_bytes(record.need_bytes)}, predicted {rows.seconds_text(record.predicted_step_s)}"


def _name(cell: Cell) -> str:
    gemm = cell.compile_options.gemm
    return cell.policy if gemm == "cublas" else f"{cell.policy} ({gemm})"


class Lines(Watcher):
    """One line for each row: for a log, a pipe, a continuous integration run."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        pass

    def say(self, line: str) -> None:
        """A line of its own."""
        print(line, file=sys.stderr, flush=True)

    def planned(self, cells: int, reused: int, failed_before: int) -> None:
        self.say(f"{cells} cells: {reused} are in the store, {cells - reused} to run")
        if failed_before:
            self.say(f"{failed_before} of those in the store failed before; --retry-failed runs them again")

    def finished(self, row: Row, done: int, total: int, seconds: float, seconds_left: float) -> None:
        left = f", about {_time_left(seconds_left)} left" if done < total else ""
        self.say(f"[{done}/{total}] {_name(row.cell)}: {_result(row)} ({format_seconds(seconds)}{left})")

    def measuring(self, cells: int) -> None:
        self.say(f"measuring {cells} steps in turns on the attached device")


class Tries(Lines):
    """One line for each value that was compiled in a search for the largest one."""

    def __init__(self, option: str) -> None:
        self._option = option

    def planned(self, cells: int, reused: int, failed_before: int) -> None:
        pass  # how many there will be is not known

    def finished(self, row: Row, done: int, total: int, seconds: float, seconds_left: float) -> None:
        value = dict(row.cell.options)[self._option]
        self.say(f"{_name(row.cell)}, {self._option}={value}: {_result(row)} ({format_seconds(seconds)})")


class Bar(Lines):
    """A bar that stays below what is printed, with the time left."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=console,
            redirect_stdout=False,
        )
        self._task = self._progress.add_task("starting", total=None, left="")
        self._running: list[str] = []

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._progress.stop()

    def say(self, line: str) -> None:
        self._progress.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def planned(self, cells: int, reused: int, failed_before: int) -> None:
        super().planned(cells, reused, failed_before)
        self._progress.update(self._task, total=cells - reused)

    def started(self, cell: Cell) -> None:
        self._running.append(_name(cell))
        self._progress.update(self._task, description=", ".join(self._running))

    def finished(self, row: Row, done: int, total: int, seconds: float, seconds_left: float) -> None:
        super().finished(row, done, total, seconds, seconds_left)
        self._running.remove(_name(row.cell))
        left = f"about {_time_left(seconds_left)} left" if done < total else ""
        self._progress.update(self._task, completed=done, description=", ".join(self._running) or "done", left=left)
