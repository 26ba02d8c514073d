"""Runs functions in processes of their own, so that whatever happens in one costs that one only.

`_worker.py` is the other side: a process that forks one task each. This side stays light: it imports
neither JAX nor anything of the user's.
"""

import itertools
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from remat_kit import _units, _worker

PRELOAD = (
    *("jax", "jax.experimental.topologies", "flax.linen", "flax.nnx", "optax"),
    *("remat_kit", "remat_kit._cell", "remat_kit._analyze", "remat_kit._measure"),
)
"""Imported once, before any task is forked. None of them may start a thread or initialise a backend."""
DEFAULT_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Task:
    """One call in a process of its own.

    Attributes:
      name: what identifies the task to the caller.
      function: `function(argument)`, importable by name. It returns one value, or is a generator of
        values; values are anything that JSON can hold, or have a method `to_json`.
      argument: anything that can be pickled.
      timeout_s: after this many seconds the task is killed.
      memory_limit: resident bytes after which the task is killed, looked at ten times a second. Linux only.
    """

    name: str
    function: Callable[[Any], Any]
    argument: Any
    timeout_s: float = DEFAULT_TIMEOUT_S
    memory_limit: int = sys.maxsize


@dataclass(frozen=True)
class Outcome:
    """What became of a task.

    Attributes:
      name: of the task.
      values: what the function returned (one value) or yielded before it ended (any number).
      error: None, or one line that says how the task failed.
      ours: the error is a RematKitError, so its message is written for the user.
      log: the end of what the task printed, to standard output or standard error.
      seconds: wall-clock time; cpu_s: processor time, both of the task's process alone.
    """

    name: str
    values: tuple[Any, ...]
    error: str | None
    ours: bool
    log: str
    seconds: float
    cpu_s: float


class Pool:
    """A context manager; leaving it kills every task that still runs, with its descendants."""

    def __init__(self, preload: Iterable[str] = PRELOAD):
        self._preload = tuple(preload)
        self._starter: _Starter | None = None
        self._numbers = itertools.count()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._close()

    def run(
        self, tasks: Iterable[Task], jobs: int = 1, started: Callable[[Task], None] = lambda task: None
    ) -> Iterator[Outcome]:
        """The outcomes of `tasks`, in the order in which they end, at most `jobs` running at a time.

        No task's end ever raises. Closing the iterator early leaves tasks running until the pool is left.
        """
        running: dict[int, Task] = {}
        for task in tasks:
            number = next(self._numbers)
            if self._starter is None:
                self._starter = _Starter(self._preload)
            try:
                self._starter.send(number, task)
            except OSError:
                # The starter died with what it ran; that is found out below, and the task goes to a new one.
                yield from self._lost(running)
                self._starter = _Starter(self._preload)
                self._starter.send(number, task)
            running[number] = task
            started(task)
            while len(running) >= jobs:
                yield from self._next(running)
        while running:
            yield from self._next(running)

    def _next(self, running: dict[int, Task]) -> Iterator[Outcome]:
        assert self._starter is not None
        try:
            message = self._starter.receive()
        except (EOFError, OSError):
            yield from self._lost(running)
            return
        if message["number"] in running:  # or else it is left from a run that the caller gave up
            yield _outcome(running.pop(message["number"]), message)

    def _lost(self, running: dict[int, Task]) -> Iterator[Outcome]:
        log = self._close()
        lost = list(running.values())
        running.clear()
        for task in lost:
            error = "the process that starts tasks died while this one ran; see the log, and run it again"
            yield Outcome(task.name, (), error, False, log, 0.0, 0.0)

    def _close(self) -> str:
        starter, self._starter = self._starter, None
        return starter.close() if starter else ""


class _Starter:
    """The `_worker.py` process and the socket to it."""

    def __init__(self, preload: tuple[str, ...]):
        self._connection, theirs = Pipe()
        self._log = tempfile.TemporaryFile("a+b", buffering=0)  # noqa: SIM115
        # OpenBLAS starts its threads when NumPy is imported; a process that forks should have one thread.
        single = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(Path(_worker.__file__)), str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env={**os.environ, **single},
            # Ctrl-C goes to a terminal's foreground processes: it is for the parent, which then ends this one.
            start_new_session=True,
        )
        theirs.close()
        self._ready = False
        here = os.getcwd()
        path = [entry or here for entry in sys.path]
        self._connection.send(
            {
                "path": path,
                # A workload is imported from the current directory, like a script of the user's own.
                "task_path": path if here in path else [here, *path],
                "preload": preload,
                "environment": {name: os.environ.get(name) for name in single},
            }
        )

    def send(self, number: int, task: Task) -> None:
        """Starts a task."""
        call = pickle.dumps((task.function, task.argument))
        request = {
            "number": number,
            "call": call,
            "timeout_s": task.timeout_s,
            "memory_limit": task.memory_limit,
        }
        self._connection.send(request)

    def receive(self) -> dict[str, Any]:
        """What became of the task that ended next."""
        if not self._ready:
            self.threads = self._connection.recv()["threads"]
            self._ready = True
        return self._connection.recv()

    def close(self) -> str:
        """What the process printed, which is nothing unless something is wrong; kills all its tasks."""
        connection: Connection = self._connection
        connection.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        with self._log:
            self._log.seek(0)
            return self._log.read().decode(errors="replace")


def _outcome(task: Task, message: dict[str, Any]) -> Outcome:
    # The last piece is empty, or a line that was cut off.
    lines = [json.loads(text) for text in message["result"].split(b"\n")[:-1]]
    values = tuple(line["value"] for line in lines if "value" in line)
    last = lines[-1] if lines else {}
    log = message["log"].decode(errors="replace")
    error: str | None = None
    if message["reason"] == "timeout":
        error = f"did not finish within {task.timeout_s:g} s and was killed; allow more with --timeout"
    elif message["reason"] == "memory":
        error = (
            f"used {_units.format_bytes(message['seen_bytes'])} of this machine's memory, more than the "
            f"{_units.format_bytes(task.memory_limit)} allowed, and was killed; allow more with --memory-limit"
        )
    elif "error" in last:
        error = last["error"]
    elif message["exit"] < 0:
        error = f"the process died of {_signal_name(-message['exit'])}{_last_words(log)}"
    elif not last.get("done"):
        error = f"the process exited with status {message['exit']} before it was done{_last_words(log)}"
    ours = bool(last.get("ours")) and error == last.get("error")
    return Outcome(task.name, values, error, ours, log, message["seconds"], message["cpu_s"])


def _signal_name(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
    return f"{name} (most likely the kernel, out of memory)" if number == signal.SIGKILL else name


def _last_words(log: str) -> str:
    """The last line that the process printed itself, not the stack that Python adds when it crashes."""
    printed = log.split("Fatal Python error:")[0]
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    if not lines:
        return ""
    text = "".join(character if character.isprintable() else "?" for character in lines[-1])
    return f"; it last printed: {text if len(text) <= 200 else text[:197] + '...'}"
