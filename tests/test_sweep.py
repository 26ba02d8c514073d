"""A sweep: each cell in its own process, no cell can harm another, no kill can harm the rows."""

import os
import random
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from workloads import cells as fake

from remat_kit import CompileOptions, _fingerprint
from remat_kit._cell import Inspected, inspect_workload, make_cells
from remat_kit._errors import RematKitError, WorkloadError
from remat_kit._pool import Pool, Task
from remat_kit._record import MeasuredTime, Record
from remat_kit._store import Store
from remat_kit._sweep import Limits, Row, Watcher, inspect, measure, sweep
from remat_kit._units import MiB

TESTS = Path(__file__).parent


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool() as pool:
        yield pool


def _store_content(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in (folder / "records").iterdir()}


# What one bad cell costs.

_LIMITS = Limits(timeout_s=20.0, memory_bytes=900 * MiB)
_BAD = {
    "raises": (_LIMITS, "ArithmeticError: the first line of the error"),
    "aborts": (_LIMITS, "the process died of SIGABRT; it last printed: F0000 check failed: this cannot be"),
    "loops": (replace(_LIMITS, timeout_s=1.0), "did not finish within 1 s and was killed; allow more with --timeout"),
    "allocates": (_LIMITS, "more than the 900.00 MiB allowed, and was killed; allow more with --memory-limit"),
    "exits": (_LIMITS, "workloads.steps:exits called sys.exit(0)"),
}


@pytest.mark.parametrize("name", _BAD)
def test_a_bad_cell_costs_its_row_and_no_other(name: str, pool: Pool, tmp_path: Path) -> None:
    limits, message = _BAD[name]
    store = Store(tmp_path)
    cells = [fake.cell(), fake.cell(workload=f"workloads.steps:{name}"), fake.cell(policy="full")]
    before, bad, after = sweep(cells, store, pool, limits=limits, run=fake.builds)
    assert before.record == fake.record(cells[0])
    # Both need the same, as is said of the rows that come out and not of those in the store.
    assert after.record == replace(fake.record(cells[2]), effect=after.record.effect)
    assert (after.record.effect or "").startswith("no effect: ")
    assert store.get(cells[2].key) == fake.record(cells[2])
    assert bad.record.error is not None
    assert message in bad.record.error
    assert "\n" not in bad.record.error
    assert bad.record.need_bytes is None
    assert store.get(cells[1].key) == bad.record
    if name in ("raises", "loops", "exits"):
        assert bad.log is not None
        assert f"in {name}" in bad.log.read_text()  # the stack says where


def test_garbage_on_both_streams_does_no_harm(pool: Pool, tmp_path: Path) -> None:
    one = fake.cell(workload="workloads.steps:prints_garbage")
    (row,) = sweep([one], Store(tmp_path), pool, run=fake.builds)
    assert row.record == fake.record(one)


def test_a_cell_that_returns_no_record(pool: Pool, tmp_path: Path) -> None:
    (row,) = sweep([fake.cell()], Store(tmp_path), pool, run=fake.returns_nonsense)
    assert "the cell returned no record: this is not a remat-kit record" in (row.record.error or "")


def test_a_cell_that_kills_what_started_it(tmp_path: Path) -> None:
    cells = [fake.cell(size=size) for size in range(2)]
    with Pool(["workloads.cells"]) as pool:
        (killed,) = sweep(cells[:1], Store(tmp_path), pool, run=fake.kills_starter)
        (fine,) = sweep(cells[1:], Store(tmp_path), pool, run=fake.immediate)
    assert "the process that starts tasks died" in (killed.record.error or "")
    assert fine.record == fake.record(cells[1])


# What tasks share: nothing.


def test_tasks_inherit_nothing_from_one_another_and_leave_nothing_behind(pool: Pool) -> None:
    tasks = [Task(str(n), fake.remembers, None) for n in range(3)]
    assert [outcome.values for outcome in pool.run(tasks, jobs=2)] == [(False,)] * 3
    (left,) = pool.run([Task("leaves", fake.leaves_process, None)])
    _wait_for(lambda: not _alive(left.values[0]))


def test_the_starter_has_one_thread_so_that_forking_is_sound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONWARNINGS", "error")
    with Pool() as pool:
        (outcome,) = pool.run([Task("x", fake.remembers, None)])
        assert pool._starter is not None
        assert pool._starter.threads == 1
        assert (outcome.log, pool._close()) == ("", "")


def test_a_task_sees_the_users_environment_and_current_folder(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "3")
    monkeypatch.chdir(tmp_path)
    with Pool(["workloads.cells"]) as fresh:
        (outcome,) = fresh.run([Task("x", fake.environment, "OPENBLAS_NUM_THREADS")])
    assert outcome.values == ({"value": "3", "cwd_importable": True},)


# Rows in the store.


class Count(Watcher):
    def __init__(self) -> None:
        self.plan: tuple[int, ...] = ()
        self.ran: list[str] = []
        self.left: list[float] = []

    def planned(self, cells: int, reused: int, failed_before: int) -> None:
        self.plan = (cells, reused, failed_before)

    def finished(self, row: Row, done: int, total: int, seconds: float, seconds_left: float) -> None:
        self.ran.append(row.cell.policy)
        self.left.append(seconds_left)


def test_a_second_run_does_what_is_missing_and_failed_rows_wait_to_be_asked_for(pool: Pool, tmp_path: Path) -> None:
    lines: list[str] = []
    store = Store(tmp_path, warn=lines.append)
    names = ["none", "full", "dots_saveable"]
    cells = [fake.cell(policy, "workloads.steps:only_none") for policy in names]

    def again(retry_failed: bool = False) -> tuple[Count, list[Row]]:
        count, asked = Count(), [*cells, cells[0]]
        return count, sweep(asked, store, pool, run=fake.builds, watcher=count, retry_failed=retry_failed)

    count, first = again()
    assert (count.plan, count.ran, count.left[-1]) == ((3, 0, 0), names, 0.0)
    count, second = again()
    assert (count.plan, count.ran) == ((3, 3, 2), [])
    assert [row.record for row in second] == [row.record for row in first]
    assert all(row.reused for row in second)
    assert second[1].log == first[1].log
    count, _ = again(retry_failed=True)
    assert (count.plan, count.ran) == ((3, 1, 0), ["full", "dots_saveable"])
    (tmp_path / "records" / f"{cells[0].key}.json").write_text("{")
    count, _ = again()
    assert (count.plan, count.ran) == ((3, 2, 2), ["none"])
    assert sum("is damaged" in line for line in lines) >= 1


def test_two_sweeps_on_one_store(tmp_path: Path) -> None:
    runs = [_start(tmp_path, count=6) for _ in range(2)]
    assert [run.communicate(timeout=60)[0].splitlines()[-1] for run in runs] == ["rows 6", "rows 6"]
    assert len(_store_content(tmp_path)) == 6


# Kills.


def _start(folder: Path, count: int, mark: str = "") -> "subprocess.Popen[str]":
    environment = {**os.environ, "PYTHONPATH": str(TESTS), "MARK": mark}
    command = [sys.executable, "-m", "workloads.cells", str(folder), str(count), "2"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def _alive(pid: int) -> bool:
    try:
        # A zombie that nobody has reaped yet is not alive.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _marked(mark: str) -> list[int]:
    """Processes that were started with MARK=mark."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"MARK={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:
            continue
    return [pid for pid in found if _alive(pid)]


def _wait_for(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


@pytest.mark.slow
def test_rows_survive_20_kills_at_random_moments(tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    moments = random.Random(seed)
    count, kills, jobs = 160, 20, 2  # at most 7 cells end between two kills, so some are left for the end
    folder, undisturbed = tmp_path / "killed", tmp_path / "undisturbed"
    for attempt in range(kills):
        mark = uuid.uuid4().hex
        process = _start(folder, count, mark)
        assert process.stdout is not None
        if attempt % 5:
            assert process.stdout.readline() == "finished\n", f"seed {seed}"
        time.sleep(moments.uniform(0.0, 0.15))
        process.kill()
        process.wait()
        process.stdout.close()
        _wait_for(lambda mark=mark: not _marked(mark))
    between = len(_records(folder)) if folder.exists() else 0
    assert 0 < between < count, f"seed {seed}: the kills came before or after all the work"

    for where in (folder, undisturbed):
        assert _start(where, count).communicate(timeout=60)[0].endswith(f"rows {count}\n")
    # The cells name the file in which they note that they ran, so keys differ between the folders; rows do not.
    rows = [
        sorted((record.need_bytes, record.predicted_step_s) for record in _records(where))
        for where in (folder, undisturbed)
    ]
    assert rows[0] == rows[1], f"seed {seed}"
    assert len(rows[0]) == count
    ran = (folder / "notes").read_text().splitlines()
    assert len(set(ran)) == count
    assert len(ran) <= count + kills * jobs, f"seed {seed}: cells whose row was stored ran again"


def _records(folder: Path) -> list[Record]:
    store = Store(folder)
    found = [store.get(path.stem) for path in (folder / "records").glob("*.json")]
    return [record for record in found if record is not None]


# Keys and fingerprints.


def test_a_key_follows_everything_that_a_row_depends_on() -> None:
    one = fake.cell(size=1, name="x")
    changes = (
        {"workload": "a:b"},
        {"options": (("size", 2),)},
        {"policy": "full"},
        {"target": "l4"},
        {"mesh": (("data", 2),)},
        {"compile_options": fake.Options(gemm="triton")},
        {"compile_options": fake.Options(xla_options=(("a", "b"),))},
        {"versions": (("jax", "2"),)},
        {"fingerprint": (("workload", "1" * 64),)},
    )
    keys = [one.key, *(replace(one, **change).key for change in changes)]  # type: ignore[arg-type]
    assert len(set(keys)) == len(keys)
    assert fake.cell(name="x", size=1).key == one.key
    # The same in every process and on every machine: stores are kept.
    assert one.key == "ca40454923eb42b86e6c39bf528eb9dd93be4f3d50f558c4edab24654223f172"


def test_an_autotune_file_counts_by_its_content(tmp_path: Path) -> None:
    seen = Inspected("l4", "cuda", (("device", 1),), ())
    keys = []
    for name, content in (("a", "x"), ("b", "x"), ("c", "y")):
        (tmp_path / name).write_text(content)
        choice = fake.Options(autotune_results=str(tmp_path / name))
        (one,) = make_cells("a:b", [], ["none"], [choice], seen)  # type: ignore[list-item]
        keys.append(one.key)
    assert keys[0] == keys[1] != keys[2]


def test_a_gpu_has_a_cell_for_each_gemm_backend_and_a_cpu_one() -> None:
    choices = [fake.Options(gemm=gemm) for gemm in ("cublas", "triton")]
    for platform, expected in (("cuda", 4), ("cpu", 2)):
        seen = Inspected("x", platform, (("device", 1),), ())
        cells = make_cells("a:b", [("y", 1), ("x", 2)], ["none", "full"], choices, seen)  # type: ignore[arg-type]
        assert len({cell.key for cell in cells}) == expected
        assert cells[0].options == (("x", 2), ("y", 1))


def test_the_policy_that_leaves_all_to_xla_is_compiled_with_its_own_pass() -> None:
    seen = Inspected("l4", "cuda", (("device", 1),), ())
    cells = make_cells("a:b", [], ["none", "xla_auto"], [CompileOptions()], seen)
    assert [cell.compile_options.xla_remat for cell in cells] == ["off", "on"]
    assert len({cell.key for cell in cells}) == 2


def test_settings_that_change_a_program_are_in_the_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    before = _fingerprint.environment()
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/somewhere")
    assert _fingerprint.environment() == before
    monkeypatch.setenv("JAX_ENABLE_X64", "1")
    assert "JAX_ENABLE_X64=1" in _fingerprint.environment()


def test_the_digest_of_a_workload_follows_its_package_and_what_it_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "someones"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "steps.py").write_text("import beside\ndef build(policy): ...\n")
    (package / "other.py").write_text("x = 1\n")
    (tmp_path / "beside.py").write_text("y = 1\n")
    (tmp_path / "unrelated.py").write_text("")
    monkeypatch.chdir(tmp_path)

    def digest(pool: Pool) -> str:
        return dict(inspect(pool, "someones.steps:build", (), "cpu", None, Limits()).digests)["workload"]

    with Pool() as fresh:
        first = digest(fresh)
        (tmp_path / "unrelated.py").write_text("changed")
        assert digest(fresh) == first
        for path in (package / "other.py", tmp_path / "beside.py"):
            path.write_text(path.read_text() + "z = 2\n")
            assert digest(fresh) != first
            first = digest(fresh)


# Before any cell runs.


@pytest.mark.parametrize(
    ("workload", "options", "message"),
    [
        ("workloads.nothing:fine", {}, r"cannot import 'workloads.nothing' .*No module named.*install its package"),
        ("workloads.steps:fien", {}, r"has no function 'fien'. Did you mean 'fine'\?"),
        ("workloads.steps:not_a_function", {}, "has no function 'not_a_function'"),
        ("workloads.steps:fine", {"widht": 3}, r"has no option 'widht'. Did you mean 'width'\? Options: width, layers"),
        ("workloads.broken_import:x", {}, "importing workload .* failed: RuntimeError: broken on purpose"),
        (
            "workloads.aborting_import:x",
            {},
            "cannot import 'workloads.aborting_import' .*: the process died of SIGABRT",
        ),
    ],
)
def test_a_workload_that_cannot_be_used(workload: str, options: dict[str, int], message: str, pool: Pool) -> None:
    with pytest.raises(RematKitError, match=message):
        inspect(pool, workload, tuple(options.items()), "cpu", None, Limits())


def test_the_same_in_this_process() -> None:
    with pytest.raises(WorkloadError, match="broken on purpose"):
        inspect_workload(("workloads.broken_import:x", (), "cpu", None))


# Measuring.


def test_a_measurement_that_dies_costs_its_policy(pool: Pool, tmp_path: Path) -> None:
    store = Store(tmp_path)
    names = ["none", "full", "dots_saveable", "save(a)"]
    cells = [fake.cell(policy) for policy in names]
    rows = sweep(cells, store, pool, run=fake.immediate)
    measured = {row.cell.policy: row.record for row in measure(rows, store, pool, run=fake.measures)}
    for name in ("none", "save(a)"):
        assert measured[name].measured_step_s == MeasuredTime(0.25, 0.2, 0.3, "cpu", 3)
        assert (measured[name].measured_peak_bytes, measured[name].warnings) == (77, ("warm",))
        assert measured[name].error is None
    assert (measured["full"].error or "").startswith("measuring: the process died of SIGABRT")
    assert measured["dots_saveable"].error == "the gradients differ"
    assert measured["full"].need_bytes == 1000  # what the compiler said stays
    # The store has it all: nothing runs, and the rows without a measurement are as they were.
    again = measure(rows, store, pool, run=fake.measures_nothing)
    assert {row.cell.policy: row.record for row in again} == measured
    assert [store.get(cell.key) for cell in cells] == [replace(row.record, effect=None) for row in rows]
    # With another set of policies it is another measurement.
    (alone,) = measure(rows[:1], store, pool, run=fake.measures)
    assert alone.record == measured["none"]


def test_what_fails_before_any_cell_is_measured_fails_once_for_all(pool: Pool, tmp_path: Path) -> None:
    store = Store(tmp_path)
    rows = sweep([fake.cell("none"), fake.cell("full")], store, pool, run=fake.immediate)
    measured = measure(rows, store, pool, run=fake.measures_nothing)
    assert {row.record.error for row in measured} == {"measuring: AssertionError: nothing was to be measured"}
    retried = measure(rows, store, pool, run=fake.measures, retry_failed=True)
    assert (retried[1].record.error or "").startswith("measuring: the process died of SIGABRT")
    assert retried[0].record.error is None
