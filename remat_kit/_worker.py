"""The process that starts tasks: it imports JAX once, then forks a fresh process for each task.

Forking costs a few milliseconds where a new interpreter with JAX and Flax in it costs a second. It is sound
because this process has one thread, never initialises a backend, and never runs anything of the user's.

It runs as a script and imports only the standard library until it is told what to preload. It talks to its
parent over one socket and enforces the limits of each task; it alone reaps the tasks, so a process id that it
kills is never another process's. When the parent is gone, whatever the reason, the socket closes, and this
process kills every task with its descendants and ends. When this process is gone, the kernel kills the tasks.
"""

import contextlib
import ctypes
import dataclasses
import faulthandler
import gc
import importlib
import inspect
import json
import os
import pickle
import resource
import signal
import socket
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import IO, Any

POLL_S = 0.1
"""How often limits are checked. A task can exceed its memory limit for this long."""
LOG_TAIL_BYTES = 64 * 1024
LOG_MAX_BYTES = 64 * 1024**2
"""A task that prints more than this loses what it printed before; nothing else happens to it."""
_PR_SET_PDEATHSIG = 1


@dataclass
class _Task:
    """A running task. Its two files have no name, so there is nothing to clean up after a kill."""

    number: int
    pid: int
    started: float
    timeout_s: float
    memory_limit: int
    result: IO[bytes]
    log: IO[bytes]
    reason: str | None = None
    """Why this process killed the task: "timeout" or "memory"."""
    seen_bytes: int = 0


def main(fd: int) -> None:
    """Serves tasks on the socket `fd` until the parent closes it."""
    wake, wake_write = socket.socketpair()
    with Connection(fd) as parent, wake, wake_write:
        setup = parent.recv()
        sys.path[:] = setup["path"]
        for name in setup["preload"]:
            # What is missing or broken here is reported by the task that needs it.
            with contextlib.suppress(Exception):
                importlib.import_module(name)
        gc.collect()
        gc.freeze()
        # A task that ends interrupts the wait below.
        wake.setblocking(False)
        wake_write.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_write.fileno(), warn_on_full_buffer=False)
        tasks: list[_Task] = []
        try:
            parent.send({"threads": _count_threads()})
            _serve(parent, (wake, wake_write), setup, tasks)
        except (EOFError, OSError):
            # The parent is gone: nobody wants the results.
            for task in tasks:
                _kill(task)
        finally:
            signal.set_wakeup_fd(-1)


def _serve(
    parent: Connection, wakes: tuple[socket.socket, socket.socket], setup: dict[str, Any], tasks: list[_Task]
) -> None:
    while True:
        ready = wait([parent, wakes[0]], POLL_S if tasks else None)
        if wakes[0] in ready:
            with contextlib.suppress(BlockingIOError):
                wakes[0].recv(4096)
        if parent in ready:
            tasks.append(_start(parent.recv(), tasks, parent, wakes, setup))
        for task in [task for task in tasks if _has_ended(task)]:
            tasks.remove(task)
            parent.send(_finish(task))
        for task in tasks:
            _enforce(task)


def _start(
    request: dict[str, Any],
    others: list[_Task],
    parent: Connection,
    wakes: tuple[socket.socket, ...],
    setup: dict[str, Any],
) -> _Task:
    """The task, forked and running."""
    result = tempfile.TemporaryFile("a+b", buffering=0)  # noqa: SIM115
    log = tempfile.TemporaryFile("a+b", buffering=0)  # noqa: SIM115
    me = os.getpid()
    pid = os.fork()
    if pid == 0:
        # Nothing may return from here into the loop above: this is another process.
        status = 1
        try:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            _isolate(me, log)
            parent.close()
            for wake in wakes:
                wake.close()
            for other in others:
                other.result.close()
                other.log.close()
            _set_environment(setup["environment"])
            sys.path[:] = setup["task_path"]
            faulthandler.enable(2)
            faulthandler.dump_traceback_later(request["timeout_s"], file=2)
            status = _run(request["call"], result)
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            # No exit handlers: those are the parent's, and tearing XLA down takes time for nothing.
            os._exit(status)
    return _Task(request["number"], pid, time.monotonic(), request["timeout_s"], request["memory_limit"], result, log)


def _isolate(starter: int, log: IO[bytes]) -> None:
    """Gives this new process its own session, its own standard streams, and an end when its starter ends."""
    os.setsid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != starter:
            os._exit(1)
        # If the machine runs out of memory all the same, the kernel should take a task and not the sweep.
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)


def _set_environment(changes: dict[str, str | None]) -> None:
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _run(call: bytes, result: IO[bytes]) -> int:
    """The exit status after writing what the call returns, or each thing it yields, as lines of JSON."""

    def write(line: dict[str, Any]) -> None:
        result.write(json.dumps(line, default=_to_json).encode() + b"\n")

    try:
        function, argument = pickle.loads(call)
        produced = function(argument)
        for value in produced if inspect.isgenerator(produced) else (produced,):
            write({"value": value})
        write({"done": True})
        return 0
    except BaseException as error:
        traceback.print_exc()
        write({"error": _one_line(error), "ours": any(c.__name__ == "RematKitError" for c in type(error).__mro__)})
        return 1


def _to_json(value: Any) -> Any:
    if hasattr(value, "to_json"):
        return value.to_json()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return str(value)


def _one_line(error: BaseException) -> str:
    """Our own messages whole, without the name of the class; of others the first line, with it."""
    if any(c.__name__ == "RematKitError" for c in type(error).__mro__):
        return " ".join(str(error).split())
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return text if len(text) <= 400 else text[:397] + "..."


def _has_ended(task: _Task) -> bool:
    """True when the task has ended. It stays a zombie until `_finish`, so its id stays its own."""
    return os.waitid(os.P_PID, task.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _finish(task: _Task) -> dict[str, Any]:
    """What became of the task; kills what it left behind in its session, then reaps it."""
    _kill(task)
    _, status, usage = os.wait4(task.pid, 0)
    with task.result, task.log:
        task.result.seek(0)
        size = task.log.seek(0, os.SEEK_END)
        task.log.seek(max(0, size - LOG_TAIL_BYTES))
        return {
            "number": task.number,
            "exit": os.waitstatus_to_exitcode(status),
            "reason": task.reason,
            "seen_bytes": task.seen_bytes,
            "seconds": time.monotonic() - task.started,
            "cpu_s": usage.ru_utime + usage.ru_stime,
            "result": task.result.read(),
            "log": task.log.read(LOG_TAIL_BYTES),
        }


def _enforce(task: _Task) -> None:
    """Kills the task when it is over a limit."""
    if task.reason:
        return
    # Half a second more than the limit, in which the task writes to its log where it hangs.
    if time.monotonic() - task.started > task.timeout_s + 0.5:
        task.reason = "timeout"
    with contextlib.suppress(OSError, IndexError, ValueError), open(f"/proc/{task.pid}/statm") as file:
        task.seen_bytes = int(file.read().split()[1]) * resource.getpagesize()
        if task.seen_bytes > task.memory_limit:
            task.reason = "memory"
    if task.reason:
        _kill(task)
    elif os.fstat(task.log.fileno()).st_size > LOG_MAX_BYTES:
        os.ftruncate(task.log.fileno(), 0)


def _kill(task: _Task) -> None:
    # The group is the task's own from its first instruction on; before that, only the process can be killed.
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(task.pid, signal.SIGKILL)


def _count_threads() -> int:
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return 1


if __name__ == "__main__":
    main(int(sys.argv[1]))
