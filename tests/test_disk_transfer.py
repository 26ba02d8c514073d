"""Values on disk without JAX: the file, its free places, the threads, and every way in which a disk fails."""

import contextlib
import errno
import itertools
import os
import random
import resource
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from remat_kit import DiskError
from remat_kit._disk import storage
from remat_kit._disk.storage import BLOCK, Extent, Extents, Storage
from remat_kit._disk.transfer import Transfer

MIB = 2**20


def kinds(arrays):
    return [(array.shape, array.dtype) for array in arrays]


def values(number, size=5000):
    return [np.full(size, number, np.uint8), np.array(number, np.float32)]


@pytest.fixture
def transfer(tmp_path: Path):
    made = Transfer(tmp_path, 64 * BLOCK, MIB)
    yield made
    made.close()
    assert not made._in_memory
    assert os.listdir(tmp_path) == []


def descriptor(transfer: Transfer) -> int:
    return transfer._storage.descriptor


def test_places_are_reused_joined_and_end_at_the_limit():
    free = Extents(10 * BLOCK)
    a, b, c = free.take(1), free.take(2 * BLOCK), free.take(BLOCK + 1)
    assert (a, b, c) == (Extent(0, BLOCK), Extent(BLOCK, 2 * BLOCK), Extent(3 * BLOCK, 2 * BLOCK))
    assert free.used == free.end == 5 * BLOCK
    free.give_back(a)
    free.give_back(c)
    assert free.take(BLOCK) == Extent(0, BLOCK)  # the smallest place that is large enough
    assert free.take(7 * BLOCK) == Extent(3 * BLOCK, 7 * BLOCK)  # the free end grows
    assert free.take(1) is None
    free.give_back(b)
    free.give_back(Extent(0, BLOCK))
    assert free.take(3 * BLOCK) == Extent(0, 3 * BLOCK)  # two neighbours became one
    assert free.trim() == 10 * BLOCK
    free.give_back(Extent(3 * BLOCK, 7 * BLOCK))
    assert free.trim() == free.end == 3 * BLOCK


def test_places_never_overlap_whatever_the_order():
    chance = random.Random(0)
    free, taken = Extents(200 * BLOCK), []
    for _ in range(2000):
        if taken and chance.random() < 0.5:
            free.give_back(taken.pop(chance.randrange(len(taken))))
        elif (extent := free.take(chance.randrange(1, 9 * BLOCK))) is not None:
            taken.append(extent)
        taken.sort(key=lambda each: each.offset)
        assert all(one.offset + one.size <= other.offset for one, other in itertools.pairwise(taken))
        assert free.used == sum(each.size for each in taken)
        assert free.end <= 200 * BLOCK
    for extent in taken:
        free.give_back(extent)
    assert free.used == free.trim() == 0


@pytest.mark.parametrize("memory", [1, 12_000, MIB], ids=["one", "two", "all"])
def test_what_is_taken_is_what_was_put(tmp_path: Path, memory: int):
    transfer = Transfer(tmp_path, MIB, memory)
    for _ in range(3):
        numbers = [transfer.put(values(each)) for each in range(20)]
        assert transfer.traffic().values == 20
        assert memory == MIB or transfer.traffic().memory_bytes <= max(memory, 5120)
        for each, number in reversed(list(enumerate(numbers))):
            first, second = transfer.take(number, kinds(values(each)))
            assert first.tolist() == [each] * 5000
            assert second == each
            assert second.shape == ()
    transfer.wait()
    traffic = transfer.traffic()
    assert (traffic.values, traffic.value_bytes, traffic.memory_bytes) == (0, 0, 0)
    assert traffic.put == traffic.taken == 60
    assert traffic.file_bytes <= 44 * BLOCK  # other rounds take the places of the first, but for two being written
    transfer.close()


def test_a_file_has_no_name_and_goes_with_its_transfer(tmp_path: Path):
    transfer = Transfer(tmp_path, MIB, 1)
    transfer.put(values(1))
    transfer.wait()
    assert os.listdir(tmp_path) == []
    number = descriptor(transfer)
    assert os.fstat(number).st_nlink == 0
    del transfer
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)


def test_without_nameless_files_a_name_is_removed_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(storage, "_without_name", lambda _: (_ for _ in ()).throw(IsADirectoryError))
    leftover, other = tmp_path / "remat-kit-1-ab.offload", tmp_path / "remat-kit-notes.txt"
    leftover.touch()
    other.touch()
    transfer = Transfer(tmp_path, MIB, 1)
    number = transfer.put(values(7))
    transfer.wait()
    assert os.listdir(tmp_path) == [other.name]
    assert transfer.take(number, kinds(values(7)))[1] == 7
    transfer.close()


def test_reading_ahead_makes_place_for_what_is_put(tmp_path: Path):
    transfer = Transfer(tmp_path, MIB, 12_000)
    numbers = []
    for each in range(4):
        numbers.append(transfer.put(values(each)))
        transfer.wait()
    transfer.take(numbers.pop(), kinds(values(0)))
    transfer.wait()
    assert transfer.traffic().memory_bytes == 2 * 5120  # two were read ahead
    transfer.put(values(9, 9000))
    assert transfer.traffic().memory_bytes <= 12_000
    assert [transfer.take(each, kinds(values(0)))[1] for each in reversed(numbers)] == [2, 1, 0]
    transfer.close()


def test_a_number_gives_its_value_once(transfer: Transfer):
    number = transfer.put(values(1))
    transfer.take(number, kinds(values(1)))
    with pytest.raises(DiskError, match=rf"value {number}, which is not there: it was read before.*jax\.vjp once"):
        transfer.take(number, kinds(values(1)))
    with pytest.raises(DiskError, match=r"value 0, which no forward pass has written"):
        transfer.take(0, kinds(values(1)))
    number = transfer.put(values(1))
    with pytest.raises(DiskError, match=r"as float32\[2\], and it is uint8\[5000\], float32\[\]"):
        transfer.take(number, [((2,), np.dtype("float32"))])


def test_a_step_that_fails_leaves_nothing_and_the_next_one_runs(transfer: Transfer):
    numbers = [transfer.put(values(each)) for each in range(3)]
    with pytest.raises(DiskError, match=r"600\.00 KiB more do not fit in the limit of 256\.00 KiB for .* of which "
                                        r"24\.00 KiB hold values.*larger limit.*clear\(\)"):  # fmt: skip
        transfer.put([np.zeros(600 * 1024, np.uint8)])
    transfer.wait()
    traffic = transfer.traffic()
    assert (traffic.values, traffic.memory_bytes, traffic.file_bytes) == (0, 0, 0)
    with pytest.raises(DiskError, match=r"not there any more: a step failed: 600\.00 KiB more.*Run the step again"):
        transfer.take(numbers[0], kinds(values(0)))
    number = transfer.put(values(5))
    assert transfer.take(number, kinds(values(5)))[1] == 5


def test_cleared_values_are_gone(transfer: Transfer):
    number = transfer.put(values(1))
    transfer.clear()
    assert transfer.traffic().file_bytes == 0
    with pytest.raises(DiskError, match=r"not there any more: the policy's clear\(\) was called"):
        transfer.take(number, kinds(values(1)))


def test_what_was_closed_away_is_said_by_the_next_transfer(tmp_path: Path):
    first = Transfer(tmp_path, 64 * BLOCK, MIB)
    number = first.put(values(1))
    first.close()
    second = Transfer(tmp_path, 64 * BLOCK, MIB, first.dropped)
    with pytest.raises(DiskError, match=r"not there any more: the policy's close\(\) was called\. Run the step again"):
        second.take(number, kinds(values(1)))
    second.close()


def no_memory(*_: object) -> None:
    raise MemoryError


def test_no_host_memory_to_read_into_is_an_error_and_nobody_waits(transfer: Transfer, monkeypatch: pytest.MonkeyPatch):
    first, second = transfer.put(values(1)), transfer.put(values(2))
    transfer.wait()
    with monkeypatch.context() as patch:
        patch.setattr("remat_kit._disk.transfer.np.empty", no_memory)
        with pytest.raises(DiskError, match=r"no host memory for 5\.00 KiB on their way from disk"):
            transfer.take(second, kinds(values(2)))  # has a thread read the first one ahead
        transfer.wait()
    assert transfer.traffic().memory_bytes == 0
    with pytest.raises(DiskError, match="a step failed: no host memory"):
        transfer.take(first, kinds(values(1)))
    assert transfer.take(transfer.put(values(3)), kinds(values(3)))[1] == 3


def flip(number: int, at: int) -> None:
    byte = os.pread(number, 1, at)
    os.pwrite(number, bytes([byte[0] ^ 1]), at)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda number: os.ftruncate(number, 4000), r"a short read from .*: 4000 of 5120 bytes came back, the file ends"
         r" at 4000\. Something else has cut the file"),
        (lambda number: flip(number, 4999), r"5\.00 KiB read from .* are not what was written: their checksums differ"),
    ],
    ids=["short", "flipped"],
)  # fmt: skip
def test_what_comes_back_wrong_is_an_error(transfer: Transfer, harm, message: str):
    number = transfer.put(values(1))
    transfer.wait()
    harm(descriptor(transfer))
    with pytest.raises(DiskError, match=message):
        transfer.take(number, kinds(values(1)))
    assert transfer.traffic().values == 0


def test_what_was_read_ahead_wrong_is_an_error_when_it_is_asked_for(transfer: Transfer):
    first, second = transfer.put(values(1)), transfer.put(values(2))
    transfer.wait()
    place = transfer._values[first].extent.offset
    flip(descriptor(transfer), place)
    assert transfer.take(second, kinds(values(2)))[1] == 2  # has the first one read ahead
    transfer.wait()
    assert transfer.traffic().memory_bytes == 0
    with pytest.raises(DiskError, match=r"read from .* are not what was written: their checksums differ"):
        transfer.take(first, kinds(values(1)))


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (errno.EIO, r"cannot write 5\.00 KiB in .*: Input/output error\. Look at the system's log"),
        (
            errno.ENOSPC,
            r"cannot write .*: No space left on device\. The disk has .* free, and .* are taken here\. Free",
        ),
    ],
)
def test_an_error_while_writing_comes_when_the_value_is_asked_for(
    transfer: Transfer, monkeypatch: pytest.MonkeyPatch, number: int, message: str
):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "pwrite", fail)
    first, second = transfer.put(values(1)), transfer.put(values(2))
    transfer.wait()
    with pytest.raises(DiskError, match=message):
        transfer.take(second, kinds(values(2)))
    with pytest.raises(DiskError, match="not there any more: a step failed: cannot write"):
        transfer.take(first, kinds(values(1)))


def test_a_value_that_is_still_in_memory_need_not_be_written(transfer: Transfer, monkeypatch: pytest.MonkeyPatch):
    gate, write = threading.Event(), os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda *args: gate.wait(60) and write(*args))
    numbers = [transfer.put(values(each)) for each in range(4)]
    for each, number in reversed(list(enumerate(numbers))):
        assert transfer.take(number, kinds(values(each)))[1] == each
    gate.set()
    transfer.wait()
    assert transfer.traffic().written_bytes <= 2 * 5120  # the two that threads had begun
    assert transfer.traffic().read_bytes == 0


@contextlib.contextmanager
def full_disk(folder: Path):
    """A disk of 256 KiB: a tmpfs where this user may mount one, else a limit on the size of files."""
    disk = folder / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]
    if shutil.which("mount") and not subprocess.run(mount, capture_output=True, check=False).returncode:
        try:
            yield disk, r"No space left on device\. The disk has .* free, and .* are taken here\. Free some space"
        finally:
            subprocess.run(["umount", "-l", str(disk)], check=False)
        return
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (256 * 1024, before[1]))
    try:
        yield disk, r"File too large\. The largest file that this process may write is smaller: raise it"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_an_error_before_anything_is_written(tmp_path: Path):
    with full_disk(tmp_path) as (disk, message):
        transfer = Transfer(disk, 2**40, MIB)
        numbers = []
        with pytest.raises(DiskError, match=r"cannot reserve 97\.75 KiB in .*: " + message):
            numbers += [transfer.put(values(each, 100_000)) for each in range(4)]
        transfer.wait()
        assert transfer.traffic().file_bytes == 0
        number = transfer.put(values(1, 100_000))  # there is space again
        assert transfer.take(number, kinds(values(1, 100_000)))[1] == 1
        transfer.close()
        assert os.listdir(disk) == []


def test_directories_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(DiskError, match=r"the directory for values on disk, .*/none, is not there\. Make it first"):
        Storage(tmp_path / "none", MIB)
    (tmp_path / "file").touch()
    with pytest.raises(DiskError, match=r".*/file, is a file\. Make it first"):
        Storage(tmp_path / "file", MIB)

    def refuse(*_, **__):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "open", refuse)  # root may write everywhere
    with pytest.raises(
        DiskError, match=r"cannot make a file in .*: Permission denied\. Name a directory that this user"
    ):
        Storage(tmp_path, MIB)


FORK = """
import os, sys
from pathlib import Path
import numpy as np
from remat_kit import DiskError
from remat_kit._disk.transfer import Transfer

transfer, kinds = Transfer(Path(sys.argv[1]), 2**20, 2**20), [((10,), np.dtype("float64"))]
number = transfer.put([np.ones(10)])
transfer.wait()
child = os.fork()
if not child:
    try:
        transfer.take(number, kinds)
    except DiskError as error:
        print(transfer._storage._file.number, error, flush=True)
    os._exit(0)
os.waitpid(child, 0)
print(transfer.take(number, kinds)[0].sum())
"""


def test_a_forked_process_has_no_part_in_its_parents_file(tmp_path: Path):
    # In a process of its own, since JAX is against forks where it was imported.
    command = [sys.executable, "-W", "ignore", "-c", FORK, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[1])
    child, parent = done.stdout.splitlines()
    assert child.startswith("-1 the values in")
    assert "belong to the process that this one was forked from. Make the policy" in child
    assert parent == "10.0"


def test_many_threads_share_one_transfer(tmp_path: Path):
    transfer = Transfer(tmp_path, 16 * MIB, 20_000)
    wrong = []

    def run(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(20):
            given = [values(chance.randrange(256), chance.randrange(1, 9000)) for _ in range(6)]
            numbers = [transfer.put(each) for each in given]
            for number, value in reversed(list(zip(numbers, given, strict=True))):
                got = transfer.take(number, kinds(value))
                wrong.extend(seed for one, other in zip(got, value, strict=True) if not np.array_equal(one, other))

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert not wrong
    transfer.wait()
    assert (transfer.traffic().values, transfer.traffic().memory_bytes) == (0, 0)
    transfer.close()
