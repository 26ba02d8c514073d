"""A real sweep, killed at random moments: what comes out at the end is what an undisturbed one gives."""

import dataclasses
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from remat_kit._record import Record, load
from remat_kit._store import Store

POLICIES = "none,full,everything_saveable,dots_saveable,save(mlp_up),offload(mlp_up),dots_saveable|offload(mlp_up)"


def start(store: Path, *more: str) -> subprocess.Popen[str]:
    """A sweep of seven policies on its way, in a process of its own."""
    command = [sys.executable, "-m", "remat_kit", "sweep", "workloads.steps:fine", "--policies", POLICIES]
    tests = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tests.parent), str(tests)])}
    return subprocess.Popen(
        [*command, "--store", str(store), *more],
        cwd=tests, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def finish(store: Path) -> list[Record]:
    """The rows of the sweep when it is left in peace, without what the clock tells."""
    process = start(store, "--json", "-")
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    return [dataclasses.replace(row, trace_s=None, compile_s=None, analyze_s=None) for row in load(out)]


def records(store: Path) -> int:
    """How many cells of a sweep are in its store."""
    return len(list((store / "records").glob("*.json")))


# 20 kills at any moment are in test_sweep.py, with cells that take no time; here the cells compile.
@pytest.mark.slow
def test_a_sweep_killed_8_times_gives_the_rows_of_one_that_was_not(tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    moments, killed = random.Random(seed), tmp_path / "killed"
    midway = set()
    for attempt in range(8):
        process = start(killed)
        assert process.stderr is not None
        if attempt % 5:  # most of them among the cells, which come after the plan; the others at any time before
            while "are in the store" not in (line := process.stderr.readline()):
                assert line, f"seed {seed}: the sweep ended by itself"
        if attempt in {2, 4, 6}:  # however slow the machine, some of them come after a cell is done
            before = records(killed)
            while records(killed) == before and process.poll() is None:
                time.sleep(0.01)
        time.sleep(moments.uniform(0.0, 1.2))
        process.kill()
        process.communicate()
        midway.add(records(killed))
    rows = finish(killed)
    assert len(midway) > 2, f"seed {seed}: the kills did not come in the middle: {sorted(midway)} rows"
    assert len(rows) == 7
    assert rows == finish(tmp_path / "undisturbed"), f"seed {seed}"
    files = list((killed / "records").glob("*.json"))
    assert len(files) == len({file.stem for file in files}) == 7
    store = Store(killed)
    assert all(store.get(file.stem) is not None for file in files)
