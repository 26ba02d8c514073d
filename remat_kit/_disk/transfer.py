"""Values on their way to the disk and back, by threads beside the computation.

`put` copies a value and returns at once; a thread writes it. `take` gives a value back once, and has the one that was
put before it read ahead, since backward takes them in the reverse order. A value that was not yet written, or was read
ahead, comes from memory. A number is given out once in a process, so what comes back is what was put under it, or an
error: there is no way to an older value. Checksums tell when the disk gives something else than it was given.
"""

import enum
import itertools
import os
import queue
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from remat_kit._disk.packing import Kind, apart, places, text, together
from remat_kit._disk.storage import Extent, Storage
from remat_kit._errors import DiskError
from remat_kit._units import format_bytes

WRITERS, READERS = 2, 1
"""Threads. Writing and checksums run outside of Python's lock, so two keep most disks busy."""
_numbers = itertools.count(1)  # of all values of this process; 0 is none, as memory that was never written reads

AHEAD = 2
"""How many values are read ahead, at most."""


class State(enum.Enum):
    """Where a value is."""

    WAITING = "in memory, to be written"
    WRITING = "in memory, being written"
    ON_DISK = "on the disk"
    READING = "on the disk, being read ahead"
    READ = "in memory, read ahead"


@dataclass(frozen=True)
class Traffic:
    """What went through a directory since the policy was made. Bytes and seconds.

    Attributes:
      values: how many there are now that backward has not read; value_bytes: theirs.
      memory_bytes: of them in host memory, waiting to be written or read ahead.
      file_bytes: what the file takes on the disk.
      written_bytes, read_bytes: moved to and from the disk; values that backward asked for before they were written
        were not.
      put, taken: how many values were handed in and given back.
      waited_s: for how long the computation had to wait, for memory in forward and for the disk in backward.
    """

    values: int
    value_bytes: int
    memory_bytes: int
    file_bytes: int
    written_bytes: int
    read_bytes: int
    put: int
    taken: int
    waited_s: float


@dataclass(slots=True, eq=False)
class _Value:
    """One value. `taken`: nobody will ask for it again, so the thread that works on it gives its place back."""

    kinds: tuple[Kind, ...]
    size: int
    extent: Extent
    data: np.ndarray | None
    state: State = State.WAITING
    checksum: int = 0
    taken: bool = False
    error: DiskError | None = None


@dataclass(slots=True)
class _Counts:
    written: int = 0
    read: int = 0
    put: int = 0
    taken: int = 0
    waited_s: float = 0.0


class Transfer:
    """The values of one policy. `put`, `take` and the others may be called from any thread.

    Attributes:
      memory: bytes of host memory for values that wait to be written or were read ahead. One value may always.
      dropped: values up to this number were given up, here or by the transfer before this one, and why.
    """

    def __init__(self, directory: Path, limit: int, memory: int, dropped: tuple[int, str] = (0, "")) -> None:
        self.memory = memory
        self._process = os.getpid()
        self._storage = Storage(directory, limit)
        self._values: dict[int, _Value] = {}  # in the order in which they were put
        self._in_memory = 0
        self._pending = 0  # writes and reads that a thread has not finished
        self._counts = _Counts()
        self.dropped = dropped
        self._given_up = False  # the file is to be emptied when nothing uses it any more
        self._changed = threading.Condition()
        self._writes, self._reads = queue.SimpleQueue(), queue.SimpleQueue()
        for jobs, count in ((self._writes, WRITERS), (self._reads, READERS)):
            for _ in range(count):
                threading.Thread(target=_work, args=(jobs,), name="remat-kit disk", daemon=True).start()
            weakref.finalize(self, _stop, jobs, count)

    def put(self, arrays: Sequence[np.ndarray]) -> int:
        """The number under which copies of the arrays can be taken. Waits while memory is full of unwritten values.

        Raises DiskError when they do not fit under the limit or on the disk; every value is then given up.
        """
        self._check_process()
        kinds = tuple((array.shape, array.dtype) for array in arrays)
        _, size = places(kinds)
        with self._changed:
            self._wait(lambda: self._has_room(size))
            try:
                extent = self._storage.take(size)
            except DiskError as error:
                raise self._give_up(error) from error
            self._in_memory += size
        try:
            data = together(arrays, kinds)
        except MemoryError as error:
            with self._changed:
                self._in_memory -= size
                self._storage.give_back(extent)
                raise self._give_up(
                    DiskError(f"no host memory for {format_bytes(size)} on their way to disk")
                ) from error
        value = _Value(kinds, size, extent, data)
        number = next(_numbers)
        with self._changed:
            self._values[number] = value
            self._counts.put += 1
            self._start(self._writes, self._write, value)
        return number

    def take(self, number: int, kinds: Sequence[Kind]) -> list[np.ndarray]:
        """The arrays that were put under a number, of these shapes and types. They are gone then.

        Raises DiskError when there are none under it, when they could not be written or read, and when what came back
        is not what was written; every value is then given up.
        """
        self._check_process()
        with self._changed:
            value = self._values.get(number)
            if value is None or value.kinds != tuple(kinds):
                raise self._give_up(self._unknown(number, value, kinds))
            del self._values[number]
            self._wait(lambda: value.state is not State.READING)
            value.taken = True
            self._counts.taken += 1
            self._read_ahead(number)
            data = value.data
            if data is None:
                self._pending += 1  # so that nothing empties the file meanwhile
            else:
                self._in_memory -= value.size
                if value.state is not State.WRITING:  # else the thread that writes it gives the place back
                    self._storage.give_back(value.extent)
                self._settle()
        if data is None:
            start = time.monotonic()
            data = self._fill(value)
            with self._changed:
                self._counts.waited_s += time.monotonic() - start
                self._pending -= 1
                self._storage.give_back(value.extent)
                if data is None or value.error is not None:
                    raise self._give_up(value.error or DiskError("a value could not be read"))
                self._settle()
        return apart(data, kinds)

    def wait(self) -> None:
        """Returns when no thread writes or reads any more."""
        with self._changed:
            self._changed.wait_for(lambda: not self._pending)

    def clear(self, why: str = "the policy's clear() was called") -> None:
        """Gives up every value that has not been read, and gives the disk back. Asking for one is an error then."""
        with self._changed:
            self._drop(why)
            self._changed.wait_for(lambda: not self._pending)
            self._settle()

    def close(self) -> None:
        """As `clear`, and the file is gone."""
        self.clear("the policy's close() was called")
        self._storage.close()

    def traffic(self) -> Traffic:
        """What there is and what went through."""
        with self._changed:
            counts = self._counts
            return Traffic(
                values=len(self._values),
                value_bytes=sum(value.size for value in self._values.values()),
                memory_bytes=self._in_memory,
                file_bytes=self._storage.file_bytes,
                written_bytes=counts.written,
                read_bytes=counts.read,
                put=counts.put,
                taken=counts.taken,
                waited_s=counts.waited_s,
            )

    # What follows is called with the lock held, unless it says otherwise.

    def _wait(self, until: Callable[[], bool]) -> None:
        start = time.monotonic()
        self._changed.wait_for(until)
        self._counts.waited_s += time.monotonic() - start

    def _has_room(self, size: int) -> bool:
        """Whether `size` more bytes may be in memory, for which what was read ahead makes place."""
        if self._in_memory + size > self.memory:
            for value in self._values.values():
                if value.state is State.READ:
                    value.state, value.data = State.ON_DISK, None
                    self._in_memory -= value.size
        return not self._in_memory or self._in_memory + size <= self.memory

    def _read_ahead(self, number: int) -> None:
        """Has the values read that were put before `number`, as far as memory goes."""
        before = (value for each, value in reversed(self._values.items()) if each < number)
        for value in itertools.islice(before, AHEAD):
            if value.state is State.ON_DISK and value.error is None and self._in_memory + value.size <= self.memory:
                value.state = State.READING
                self._in_memory += value.size
                self._start(self._reads, self._read, value)

    def _start(self, jobs: queue.SimpleQueue, job: Callable[[_Value], None], value: _Value) -> None:
        self._pending += 1
        jobs.put((job, value))

    def _write(self, value: _Value) -> None:
        """A writing thread, without the lock."""
        with self._changed:
            data = None if value.taken else value.data
            if data is not None:
                value.state = State.WRITING
        if data is not None:
            try:
                value.checksum = zlib.crc32(data)
                self._storage.write(value.extent, memoryview(data))
            except (DiskError, MemoryError, OSError) as error:
                value.error = _as_disk_error(error)
        with self._changed:
            self._pending -= 1
            if data is not None:
                value.state = State.ON_DISK
                self._counts.written += value.size
                if value.taken:
                    self._storage.give_back(value.extent)
                else:
                    value.data = None
                    self._in_memory -= value.size
            self._settle()

    def _read(self, value: _Value) -> None:
        """A reading thread, without the lock."""
        data = self._fill(value)
        with self._changed:
            self._pending -= 1
            if value.taken:
                self._in_memory -= value.size
                self._storage.give_back(value.extent)
            elif value.error is not None:
                value.state = State.ON_DISK
                self._in_memory -= value.size
            else:
                value.state, value.data = State.READ, data
            self._settle()

    def _fill(self, value: _Value) -> np.ndarray | None:
        """The bytes of a value from the disk, or None and `value.error`. Without the lock."""
        if value.error is None:
            try:
                data = np.empty(value.size, np.uint8)
                self._storage.read(value.extent, memoryview(data))
                if zlib.crc32(data) != value.checksum:
                    value.error = DiskError(
                        f"{format_bytes(value.size)} read from {self._storage.directory} are not what was written: "
                        "their checksums differ. Something else writes to the file, or the disk fails: look at the "
                        "system's log, and use a directory on another disk."
                    )
                with self._changed:
                    self._counts.read += value.size
                return data
            except MemoryError:
                value.error = DiskError(f"no host memory for {format_bytes(value.size)} on their way from disk")
            except (DiskError, OSError) as error:
                value.error = _as_disk_error(error)
        return None

    def _settle(self) -> None:
        """After something has ended: whoever waits looks again, and a file that was given up goes back to the disk."""
        if self._given_up and not (self._pending or self._values or self._storage.used_bytes):
            self._storage.empty()
            self._given_up = False
        self._changed.notify_all()

    def _drop(self, why: str) -> None:
        """Gives up every value; asking for one is an error that says why."""
        for value in self._values.values():
            value.taken = True
            if value.data is not None:
                self._in_memory -= value.size
            if value.state in (State.WAITING, State.ON_DISK, State.READ):
                self._storage.give_back(value.extent)
        self._values.clear()
        self.dropped = next(_numbers), why
        self._given_up = True
        self._settle()

    def _give_up(self, error: DiskError) -> DiskError:
        """The error, after every value was given up: a step that fails leaves nothing behind."""
        self._drop(f"a step failed: {error}")
        return error

    def _unknown(self, number: int, value: _Value | None, kinds: Sequence[Kind]) -> DiskError:
        what = f"backward asks {self._storage.directory} for value {number}"
        last, why = self.dropped
        if value is not None:
            return DiskError(f"{what} as {text(kinds)}, and it is {text(value.kinds)}. {_REPORT}")
        if not number:
            return DiskError(f"{what}, which no forward pass has written. {_REPORT}")
        if number <= last:
            return DiskError(f"{what}, which is not there any more: {why}. Run the step again.")
        return DiskError(
            f"{what}, which is not there: it was read before, and a value is removed when backward has read it. "
            "Backward of one forward pass runs once under disk offloading: call the function of jax.vjp once, or use "
            "another policy for jax.jacrev and for several pulls through one forward pass."
        )

    def _check_process(self) -> None:
        """Without the lock, which a forked process may have inherited locked."""
        if os.getpid() != self._process:
            raise DiskError(
                f"the values in {self._storage.directory} belong to the process that this one was forked from. "
                "Make the policy (disk_offload) in the process that runs the step."
            )


_REPORT = "This is a fault of remat-kit or of XLA: report it with the step."


def _work(jobs: queue.SimpleQueue) -> None:
    """What a thread does until it is given nothing. It holds the transfer only while there is work."""
    while (job := jobs.get()) is not None:
        function, value = job
        function(value)
        del job, function, value


def _stop(jobs: queue.SimpleQueue, threads: int) -> None:
    for _ in range(threads):
        jobs.put(None)


def _as_disk_error(error: Exception) -> DiskError:
    return error if isinstance(error, DiskError) else DiskError(f"{type(error).__name__}: {error}")
