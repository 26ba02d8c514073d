"""One file without a name that holds values in a directory, up to a limit of bytes.

The file has no entry in the directory: on Linux it is made without one (`O_TMPFILE`), elsewhere the entry is removed
as soon as the file is open. The system gives its blocks back when the process ends, however it ends, so there is
nothing to clean up after a kill, and processes that share a directory cannot meet. Where the entry has to be removed,
a kill in between leaves an empty file, which the next start removes.
"""

import bisect
import contextlib
import errno
import os
import secrets
import shutil
import weakref
from dataclasses import dataclass
from pathlib import Path

from remat_kit._errors import DiskError
from remat_kit._units import format_bytes

BLOCK = 4096
"""Bytes to which places in the file are rounded: a page, and a block of most file systems."""
_PREFIX, _SUFFIX = "remat-kit-", ".offload"
_LARGEST_CALL = 1 << 30
"""Bytes of one call: Linux moves a little less than 2 GiB at once."""


@dataclass(frozen=True, slots=True)
class Extent:
    """A place in the file: `size` bytes at `offset`, both multiples of BLOCK."""

    offset: int
    size: int


class Extents:
    """Which parts of a file are free. Best fit, neighbours are joined, the file grows at its end up to `limit`."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.end = 0
        self._offsets: list[int] = []  # of the free parts, ascending
        self._sizes: dict[int, int] = {}

    @property
    def used(self) -> int:
        """Bytes that are taken."""
        return self.end - sum(self._sizes.values())

    def take(self, size: int) -> Extent | None:
        """A place of `size` bytes, rounded up to BLOCK; None where that is above the limit."""
        size = max(BLOCK, -(-size // BLOCK) * BLOCK)
        fitting = [(free, offset) for offset, free in self._sizes.items() if free >= size]
        if fitting:
            free, offset = min(fitting)
            self._remove(offset)
            if free > size:
                self._add(offset + size, free - size)
            return Extent(offset, size)
        last = self._offsets[-1] if self._offsets else self.end
        start = last if last + self._sizes.get(last, 0) == self.end else self.end
        if start + size > self.limit:
            return None
        if start < self.end:
            self._remove(start)
        self.end = start + size
        return Extent(start, size)

    def give_back(self, extent: Extent) -> None:
        """The place is free again."""
        offset, size = extent.offset, extent.size
        place = bisect.bisect_left(self._offsets, offset)
        after = self._offsets[place] if place < len(self._offsets) else self.end
        before = self._offsets[place - 1] + self._sizes[self._offsets[place - 1]] if place else 0
        assert before <= offset <= offset + size <= after, "a place is given back twice"
        if place < len(self._offsets) and self._offsets[place] == offset + size:
            size += self._remove(offset + size)
        if place and self._offsets[place - 1] + self._sizes[self._offsets[place - 1]] == offset:
            offset = self._offsets[place - 1]
            size += self._remove(offset)
        self._add(offset, size)

    def trim(self) -> int:
        """Where the last part that is taken ends: what is behind it is no longer part of the file."""
        if self._offsets and self._offsets[-1] + self._sizes[self._offsets[-1]] == self.end:
            self.end = self._offsets[-1]
            self._remove(self.end)
        return self.end

    def _add(self, offset: int, size: int) -> None:
        bisect.insort(self._offsets, offset)
        self._sizes[offset] = size

    def _remove(self, offset: int) -> int:
        self._offsets.pop(bisect.bisect_left(self._offsets, offset))
        return self._sizes.pop(offset)


class Storage:
    """The file. `take` and `give_back` need one caller at a time; `write` and `read` do not.

    Raises DiskError when the directory is not there or cannot be written to.
    """

    def __init__(self, directory: Path, limit: int) -> None:
        self.directory, self.limit = directory, limit
        self._extents = Extents(limit)
        self._file = _Descriptor(_open(directory))
        _open_files.add(self._file)

    @property
    def used_bytes(self) -> int:
        """Bytes of the values in it, rounded up to BLOCK each."""
        return self._extents.used

    @property
    def file_bytes(self) -> int:
        """Bytes that the file takes on the disk."""
        return os.fstat(self.descriptor).st_blocks * 512

    @property
    def descriptor(self) -> int:
        """Of the open file. Raises DiskError in a process that was forked, which has none."""
        if self._file.number < 0:
            raise DiskError(
                f"the file in {self.directory} belongs to the process that this one was forked from, or is closed. "
                "Make the policy (disk_offload) in the process that runs the step."
            )
        return self._file.number

    def take(self, size: int) -> Extent:
        """A place of at least `size` bytes whose blocks are there, so that writing to it cannot fill the disk.

        Raises DiskError when that is above the limit, or when the disk is full.
        """
        before = self._extents.end
        extent = self._extents.take(size)
        if extent is None:
            raise DiskError(
                f"{format_bytes(size)} more do not fit in the limit of {format_bytes(self.limit)} for "
                f"{self.directory}, of which {format_bytes(self.used_bytes)} hold values that backward has not read. "
                "Give a larger limit, or keep more layers off the disk. Values of a forward pass whose gradient is not "
                "computed stay until clear() is called."
            )
        grown = self._extents.end - before
        try:
            if grown > 0 and hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self.descriptor, before, grown)
        except OSError as error:
            if error.errno != errno.EOPNOTSUPP:  # then a full disk shows when it is written to
                failure = self._failed(error, "reserve", size)
                self._extents.give_back(extent)
                with contextlib.suppress(OSError):
                    os.ftruncate(self.descriptor, self._extents.trim())
                raise failure from error
        return extent

    def give_back(self, extent: Extent) -> None:
        """The place may be taken again. The file keeps its size until `empty`."""
        self._extents.give_back(extent)

    def empty(self) -> None:
        """Everything is free, and the blocks go back to the disk. No place may be in use."""
        self._extents = Extents(self.limit)
        with contextlib.suppress(OSError):  # what cannot be cut now goes when the file is closed
            os.ftruncate(self.descriptor, 0)

    def write(self, extent: Extent, data: memoryview) -> None:
        """All of `data` (bytes) to a place. Raises DiskError when the system does not take it."""
        done = 0
        while done < len(data):
            try:
                count = os.pwrite(self.descriptor, data[done : done + _LARGEST_CALL], extent.offset + done)
            except OSError as error:
                raise self._failed(error, "write", len(data)) from error
            if not count:
                raise self._failed(OSError(errno.EIO, "the system wrote nothing"), "write", len(data))
            done += count

    def read(self, extent: Extent, data: memoryview) -> None:
        """Fills `data` (bytes) from a place. Raises DiskError when the system fails or the file ends too soon."""
        done = 0
        while done < len(data):
            try:
                count = os.preadv(self.descriptor, [data[done : done + _LARGEST_CALL]], extent.offset + done)
            except OSError as error:
                raise self._failed(error, "read", len(data)) from error
            if not count:
                raise DiskError(
                    f"a short read from {self.directory}: {done} of {len(data)} bytes came back, the file ends at "
                    f"{os.fstat(self.descriptor).st_size}. Something else has cut the file, or the disk fails: look at "
                    "the system's log, and use another directory."
                )
            done += count

    def close(self) -> None:
        """The file is gone, and its blocks go back to the disk."""
        self._file.close()

    def _failed(self, error: OSError, what: str, size: int) -> DiskError:
        text = f"cannot {what} {format_bytes(size)} in {self.directory}: {error.strerror or error}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(self.directory).free
            return DiskError(
                f"{text}. The disk has {format_bytes(free)} free, and {format_bytes(self.file_bytes)} are taken "
                "here. Free some space, use a directory on a larger disk, or keep more layers off the disk."
            )
        if error.errno == errno.EFBIG:
            return DiskError(
                f"{text}. The largest file that this process may write is smaller: raise it (ulimit -f), or use "
                "another file system."
            )
        return DiskError(f"{text}. Look at the system's log, and use a directory on another disk.")


class _Descriptor:
    """A file descriptor that is closed when nothing holds it any more."""

    def __init__(self, number: int) -> None:
        self.number = number

    def close(self) -> None:
        number, self.number = self.number, -1
        if number >= 0:
            os.close(number)

    __del__ = close


_open_files: "weakref.WeakSet[_Descriptor]" = weakref.WeakSet()


def _close_inherited() -> None:
    # A forked process shares the file: it would keep the blocks when its parent has ended.
    for each in list(_open_files):
        each.close()


os.register_at_fork(after_in_child=_close_inherited)


def _open(directory: Path) -> int:
    """A descriptor of a new file without a name in `directory`."""
    if not directory.is_dir():
        what = "is a file" if directory.exists() else "is not there"
        raise DiskError(
            f"the directory for values on disk, {directory}, {what}. Make it first (it is not made here, so that a "
            "disk which is not mounted is noticed), or name another one."
        )
    _remove_leftovers(directory)
    try:
        if hasattr(os, "O_TMPFILE"):
            with contextlib.suppress(IsADirectoryError, NotADirectoryError):  # file systems without it say so
                return _without_name(directory)
        return _with_name_removed(directory)
    except OSError as error:
        raise DiskError(
            f"cannot make a file in {directory}: {error.strerror or error}. "
            "Name a directory that this user may write to, on a disk with space."
        ) from error


def _without_name(directory: Path) -> int:
    try:
        return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.EINVAL):
            raise IsADirectoryError from error
        raise


def _with_name_removed(directory: Path) -> int:
    path = directory / f"{_PREFIX}{os.getpid()}-{secrets.token_hex(8)}{_SUFFIX}"
    number = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        path.unlink(missing_ok=True)  # another start may have taken it for a leftover, which is as good
    except OSError:
        os.close(number)
        raise
    return number


def _remove_leftovers(directory: Path) -> None:
    """Removes files whose process was killed before it had removed the name. No process needs one of these names."""
    for path in directory.glob(f"{_PREFIX}*{_SUFFIX}"):
        with contextlib.suppress(OSError):
            path.unlink()
