"""Cells that need no JAX, and functions to run them with: what a sweep does is tested apart from XLA."""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from remat_kit._cell import Cell
from remat_kit._pool import Pool
from remat_kit._record import Record
from remat_kit._store import Store
from remat_kit._sweep import Limits, Row, Watcher, sweep


@dataclasses.dataclass(frozen=True)
class Options:
    """The fields of CompileOptions that a cell reads."""

    xla_remat: str = "off"
    gemm: str = "cublas"
    autotune_results: str | None = None
    xla_options: tuple[tuple[str, str], ...] = ()

    def gemm_backend(self, platform: str) -> str:
        return self.gemm if platform == "cuda" else platform


def cell(policy: str = "none", workload: str = "workloads.steps:fine", **options: Any) -> Cell:
    return Cell(
        workload=workload,
        options=tuple(sorted(options.items())),
        policy=policy,
        target="cpu",
        platform="cpu",
        mesh=(("device", 1),),
        compile_options=Options(),  # pyright: ignore[reportArgumentType]
        versions=(("jax", "1"),),
        fingerprint=(("workload", "0" * 64),),
    )


def record(cell: Cell) -> Record:
    """A record that depends on the cell alone."""
    size = int(dict(cell.options).get("size", 0))
    return dataclasses.replace(cell.failed(""), error=None, need_bytes=1000 + size, predicted_step_s=1.0 / (1 + size))


def quick(cell: Cell) -> Record:
    """50 ms of sleep. Notes in a file, if an option names one, that it ran."""
    notes = dict(cell.options).get("notes")
    if notes:
        with open(notes, "a") as file:
            file.write(f"{cell.key}\n")
    time.sleep(0.05)
    return record(cell)


def immediate(cell: Cell) -> Record:
    return record(cell)


def builds(cell: Cell) -> Record:
    """Builds the step of the workload and goes no further."""
    from remat_kit import get_policy
    from remat_kit._step import Workload

    Workload(cell.workload, cell.options).build(get_policy(cell.policy), cell.platform)
    return record(cell)


def returns_nonsense(cell: Cell) -> Any:
    return {"schema_version": 99}


def kills_starter(cell: Cell) -> Record:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(10)
    return record(cell)


def leaves_process(argument: Any) -> int:
    """Starts a process that would go on, and returns its id."""
    return subprocess.Popen(["sleep", "1000"]).pid


def remembers(argument: Any) -> bool:
    """True when an earlier task of the pool changed this process."""
    seen = hasattr(sys, "remembered")
    sys.remembered = True  # type: ignore[attr-defined]
    return seen


def environment(name: str) -> dict[str, Any]:
    return {"value": os.environ.get(name), "cwd_importable": os.getcwd() in sys.path}


def measures(cells: Sequence[Cell]) -> Iterator[dict[str, Any]]:
    """Measures each cell; dies at one whose policy is `full`, and says that `dots_saveable` is wrong."""
    for one in cells:
        yield {"running": one.key}
        if one.policy == "full":
            os.abort()
        if one.policy == "dots_saveable":
            yield {"key": one.key, "error": "the gradients differ"}
            continue
        time_s = {"median": 0.25, "p10": 0.2, "p90": 0.3, "device": "cpu", "rounds": 3}
        yield {"key": one.key, "measured_step_s": time_s, "measured_peak_bytes": 77, "warnings": ["warm"]}


def measures_nothing(cells: Sequence[Cell]) -> Iterator[dict[str, Any]]:
    raise AssertionError("nothing was to be measured")


class Announce(Watcher):
    """Prints a line when a cell has ended."""

    def finished(self, row: Row, done: int, total: int, seconds: float, seconds_left: float) -> None:
        print("finished", flush=True)


def main(folder: str, count: int, jobs: int) -> None:
    """A whole sweep of quick cells: what the tests kill."""
    cells = [cell(size=size, notes=str(Path(folder) / "notes")) for size in range(count)]
    with Pool(preload=["workloads.cells"]) as pool:
        rows = sweep(cells, Store(Path(folder)), pool, limits=Limits(jobs=jobs), run=quick, watcher=Announce())
    print(f"rows {len(rows)}", flush=True)


if __name__ == "__main__":
    # Under its importable name, so that the functions can be found from another process.
    from workloads import cells

    cells.main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
