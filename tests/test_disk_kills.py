"""A training loop that is killed at random moments leaves nothing on the disk, and disturbs nobody there."""

import contextlib
import multiprocessing
import os
import random
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import disk_training
import pytest


@contextlib.contextmanager
def disk_of_its_own(folder: Path) -> Iterator[bool]:
    """Whether `folder` is a disk of its own now, whose used bytes are those of its files."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)]
    if shutil.which("mount") and not subprocess.run(mount, capture_output=True, check=False).returncode:
        try:
            yield True
        finally:
            subprocess.run(["umount", "-l", str(folder)], check=False)
    else:
        yield False


def used(folder: Path) -> int:
    """Bytes of the disk that are in use."""
    disk = os.statvfs(folder)
    return (disk.f_blocks - disk.f_bfree) * disk.f_frsize


@pytest.mark.slow
def test_20_kills_leave_nothing_behind_and_a_living_process_alone(tmp_path: Path):
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["jax", "flax", "remat_kit._disk.offload", "remat_kit._wrap", "stacks"])

    def start(named: bool):
        here, there = processes.Pipe()
        process = processes.Process(target=disk_training.train, args=(str(tmp_path), named, there), daemon=True)
        process.start()
        there.close()
        return process, here

    midway = 0
    with disk_of_its_own(tmp_path) as is_alone:
        survivor, channel = start(named=False)
        assert channel.recv() == "running"
        for attempt in range(20):
            named = bool(attempt % 2)
            victim, signal = start(named)
            if attempt % 5:  # most of them in the middle of steps, the others at any time before
                assert signal.recv() == "running", f"seed {seed}"
                midway += 1
            time.sleep(chance.uniform(0.0, 0.1))
            victim.kill()
            victim.join()
            assert victim.exitcode == -9, f"seed {seed}: the loop ended by itself"
            # A name may stay only where the file had one, for a moment, and then until the next start.
            assert not os.listdir(tmp_path) or named, f"seed {seed}"
        channel.send("stop")
        steps, wrong = channel.recv()
        survivor.join()
        assert os.listdir(tmp_path) == [], f"seed {seed}"
        assert not is_alone or used(tmp_path) == 0, f"seed {seed}"
    assert midway == 16
    assert steps > 0
    assert not wrong
