"""sweep(): the rows of many cells, each made in a process of its own and kept in a store.

A cell that fails, in whatever way, costs its row. What the store has is not made again.
"""

import dataclasses
import hashlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from remat_kit._cell import Cell, Inspected, inspect_workload, measure_cells, measure_peak, run_cell_and_tell_sources
from remat_kit._effect import with_effects
from remat_kit._errors import RematKitError, WorkloadError
from remat_kit._pool import DEFAULT_TIMEOUT_S, Outcome, Pool, Task
from remat_kit._record import MeasuredTime, Record
from remat_kit._store import Store

_INSPECT_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Limits:
    """What a sweep may use.

    Attributes:
      jobs: cells at a time.
      timeout_s: seconds a cell.
      memory_bytes: resident bytes a cell; None is an equal share of 9/10 of this machine's memory.
    """

    jobs: int = 1
    timeout_s: float = DEFAULT_TIMEOUT_S
    memory_bytes: int | None = None

    @property
    def memory_limit(self) -> int:
        """Resident bytes a cell."""
        return self.memory_bytes or machine_memory_bytes() * 9 // 10 // self.jobs


@dataclass(frozen=True)
class Row:
    """A cell and its record; `reused` when the store had it, `log` when its process left one."""

    cell: Cell
    record: Record
    reused: bool
    log: Path | None


class Watcher:
    """What a sweep tells while it runs. This one is silent; another may override any method."""

    def planned(self, cells: int, reused: int, failed_before: int) -> None:
        """The sweep begins: `reused` of `cells` rows are in the store, `failed_before` of those with an error."""

    def started(self, cell: Cell) -> None:
        """A cell's process begins."""

    def finished(self, row: Row, done: int, total: int, seconds: float, seconds_left: float) -> None:
        """A cell ended after `seconds`: `done` of `total`; `seconds_left` is an estimate."""

    def measuring(self, cells: int) -> None:
        """The measurement of so many cells begins."""


def inspect(
    pool: Pool, workload: str, options: tuple[tuple[str, Any], ...], target: str, mesh: str | None, limits: Limits
) -> Inspected:
    """What the cells of this workload depend on; see `inspect_workload`. Raises RematKitError."""
    timeout = min(_INSPECT_TIMEOUT_S, limits.timeout_s)
    task = Task("inspect", inspect_workload, (workload, options, target, mesh), timeout, limits.memory_limit)
    (outcome,) = pool.run([task])
    if outcome.error is None:
        return Inspected.from_json(outcome.values[0])
    if outcome.ours:
        raise RematKitError(outcome.error)
    module = workload.partition(":")[0]
    raise WorkloadError(
        f"cannot import {module!r} of workload {workload!r}: {outcome.error}. Try: python -c 'import {module}'"
    )


def sweep(
    cells: Sequence[Cell],
    store: Store,
    pool: Pool,
    *,
    limits: Limits = Limits(),
    run: Callable[[Cell], Any] = run_cell_and_tell_sources,
    retry_failed: bool = False,
    watcher: Watcher | None = None,
) -> list[Row]:
    """The rows of `cells`, in their order, each made in its own process unless the store has it.

    A row that failed before counts as done unless `retry_failed`. Rows are stored as they come: a sweep
    that is stopped, by whatever, goes on where it was when it is run again. What a policy did against the row of
    policy `none` needs all rows, so it is in the rows returned and not in those stored.
    """
    watcher = watcher or Watcher()
    unique = {cell.key: cell for cell in cells}
    rows: dict[str, Row] = {}
    for key, cell in unique.items():
        record = store.get(key)
        if record is not None and not (retry_failed and record.error):
            rows[key] = Row(cell, record, True, store.log_path(key) if record.error else None)
    watcher.planned(len(unique), len(rows), sum(row.record.error is not None for row in rows.values()))

    todo = [Task(key, run, unique[key], limits.timeout_s, limits.memory_limit) for key in unique if key not in rows]
    begin = time.monotonic()
    for done, outcome in enumerate(
        pool.run(todo, limits.jobs, started=lambda task: watcher.started(unique[task.name])), start=1
    ):
        row = rows[outcome.name] = _keep(store, unique[outcome.name], outcome)
        left = (time.monotonic() - begin) / done * (len(todo) - done)
        watcher.finished(row, done, len(todo), outcome.seconds, left)
    found = [rows[key] for key in unique]
    records = with_effects([row.record for row in found])
    return [dataclasses.replace(row, record=record) for row, record in zip(found, records, strict=True)]


def _keep(store: Store, cell: Cell, outcome: Outcome) -> Row:
    """The row of an outcome, stored; with what the process printed when it failed."""
    record, error = None, outcome.error
    if error is None:
        try:
            record = Record.from_json(outcome.values[0])
        except (ValueError, TypeError, IndexError) as problem:
            error = f"the cell returned no record: {problem}"
    if record is None:
        record = cell.failed(" ".join((error or "").split()))
    log = store.put_log(cell.key, outcome.log) if record.error and outcome.log else None
    sources = outcome.values[1].get("sources") if error is None and len(outcome.values) > 1 else None
    return Row(cell, store.put(cell.key, record, cell.to_json(), sources), False, log)


def measure(
    rows: Sequence[Row],
    store: Store,
    pool: Pool,
    *,
    limits: Limits = Limits(),
    run: Callable[[Sequence[Cell]], Iterator[Mapping[str, Any]]] = measure_cells,
    retry_failed: bool = False,
    watcher: Watcher | None = None,
) -> list[Row]:
    """`rows` with the measured time and memory of each that compiled, from the attached device.

    All are measured in one process, in turns, so that they see the same clocks and the same neighbours; a
    sweep with another set of policies is another measurement. A cell whose step kills the process is left
    out and the others start again. With `retry_failed` a measurement in which one failed is made again, whole.
    """
    cells = {row.cell.key: row.cell for row in rows if row.record.error is None}
    group = hashlib.sha256("\n".join(sorted(cells)).encode()).hexdigest()
    names = {key: hashlib.sha256(f"{group}\n{key}".encode()).hexdigest() for key in cells}
    stored = {key: store.get_measurement(name) for key, name in names.items()}
    found = {key: value for key, value in stored.items() if value is not None}
    failed = any(value.get("error") for value in found.values())
    if len(found) < len(cells) or (failed and retry_failed):
        found = {}
        (watcher or Watcher()).measuring(len(cells))
    while len(found) < len(cells):
        todo = [cell for key, cell in cells.items() if key not in found]
        task = Task("measure", run, todo, limits.timeout_s * len(todo), limits.memory_limit * limits.jobs)
        (outcome,) = pool.run([task])
        fresh = {value["key"]: value for value in outcome.values if value.get("key") in cells}
        missing = [cell.key for cell in todo if cell.key not in fresh]
        if missing:
            running = [value["running"] for value in outcome.values if value.get("running") in missing]
            # What fails before any cell's turn fails for each of them.
            for blamed in running[-1:] or missing:
                fresh[blamed] = {"key": blamed, "error": f"measuring: {outcome.error or 'no result came'}"}
                store.put_log(blamed, outcome.log)
        for key, value in fresh.items():
            if value.get("platform") == "cuda":
                found_more = _measured_peak(pool, cells[key], limits)
                value |= found_more | {"warnings": [*value.get("warnings", []), *found_more.get("warnings", [])]}
            store.put_measurement(names[key], value)
        found |= fresh
    return [_measured(row, found[row.cell.key], store) if row.cell.key in found else row for row in rows]


def _measured_peak(pool: Pool, cell: Cell, limits: Limits) -> dict[str, Any]:
    (outcome,) = pool.run([Task("peak", measure_peak, cell, limits.timeout_s, limits.memory_limit * limits.jobs)])
    if outcome.error is None:
        return outcome.values[0]
    return {"warnings": [f"the allocator's highest mark could not be measured: {outcome.error}"]}


def _measured(row: Row, measurement: Mapping[str, Any], store: Store) -> Row:
    time_s = measurement.get("measured_step_s")
    error = measurement.get("error")
    record = dataclasses.replace(
        row.record,
        measured_step_s=MeasuredTime(**time_s) if time_s else None,
        measured_peak_bytes=measurement.get("measured_peak_bytes"),
        warnings=(*row.record.warnings, *measurement.get("warnings", ())),
        error=error,
    )
    return dataclasses.replace(row, record=record, log=store.log_path(row.cell.key) if error else row.log)


def machine_memory_bytes() -> int:
    """This machine's memory, or what its container may use of it."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdigit() else total
