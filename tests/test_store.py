"""The store keeps whole rows, one a key, whatever happened to the files or the writer."""

import dataclasses
import json
import os
import stat
import threading
from pathlib import Path

import pytest
from workloads.cells import cell, record

from remat_kit._cell import Cell
from remat_kit._errors import OutputError
from remat_kit._store import Store, default_folder, write_atomically

CELL = cell(size=1)


def _put(store: Store, one: Cell, **changes: object) -> None:
    store.put(one.key, dataclasses.replace(record(one), **changes), one.to_json())  # type: ignore[arg-type]


def test_a_row_comes_back_as_it_was(tmp_path: Path) -> None:
    store = Store(tmp_path / "a" / "b")
    assert store.get(CELL.key) is None
    _put(store, CELL)
    assert store.get(CELL.key) == record(CELL)
    assert Store(tmp_path / "a" / "b").get(CELL.key) == record(CELL)


def test_a_good_row_is_never_changed_and_a_failed_one_is_replaced(tmp_path: Path) -> None:
    store = Store(tmp_path)
    _put(store, CELL, error="first")
    _put(store, CELL, error="second")
    assert store.get(CELL.key).error == "second"  # type: ignore[union-attr]
    _put(store, CELL)
    _put(store, CELL, error="late")
    assert store.get(CELL.key) == record(CELL)
    assert len(list((tmp_path / "records").iterdir())) == 1


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b'{"key": "',
        b"\xff\xfe\x00",
        b"[]",
        b'{"key": "another", "record": {}}',
        json.dumps({"key": CELL.key, "record": None}).encode(),
        json.dumps({"key": CELL.key, "record": {"schema_version": 99}}).encode(),
        json.dumps({"key": CELL.key, "record": {"schema_version": 1}}).encode(),
        json.dumps({"key": CELL.key}).encode(),
    ],
)
def test_a_damaged_row_is_missing_with_one_line_about_it(tmp_path: Path, content: bytes) -> None:
    lines: list[str] = []
    store = Store(tmp_path, warn=lines.append)
    (tmp_path / "records" / f"{CELL.key}.json").write_bytes(content)
    assert store.get(CELL.key) is None
    assert len(lines) == 1
    assert "is damaged and counts as missing" in lines[0]
    assert "\n" not in lines[0]
    _put(store, CELL)
    assert store.get(CELL.key) == record(CELL)


def test_measurements_and_logs(tmp_path: Path) -> None:
    lines: list[str] = []
    store = Store(tmp_path, warn=lines.append)
    assert store.get_measurement("ab") is None
    store.put_measurement("ab", {"x": 1})
    assert store.get_measurement("ab") == {"x": 1}
    (tmp_path / "measurements" / "cd.json").write_text('{"key": "cd"}')
    assert store.get_measurement("cd") is None
    assert "holds no measurement" in lines[0]
    assert store.log_path("ab") is None
    assert store.put_log("ab", "words").read_text() == "words"
    assert store.log_path("ab") == tmp_path / "logs" / "ab.log"


def test_what_a_killed_writer_left_is_removed_when_it_is_old(tmp_path: Path) -> None:
    Store(tmp_path)
    old, young = tmp_path / "records" / ".tmp-old", tmp_path / "records" / ".tmp-young"
    old.write_text("{")
    young.write_text("{")
    os.utime(old, (0, 0))
    Store(tmp_path)
    assert not old.exists()
    assert young.exists()


def test_many_writers_of_one_row_leave_one_whole_row(tmp_path: Path) -> None:
    stores = [Store(tmp_path) for _ in range(4)]
    threads = [
        threading.Thread(target=lambda s=s: [_put(s, CELL, error=f"{n}") for n in range(20)])  # type: ignore[misc]
        for s in stores
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert stores[0].get(CELL.key).error == "19"  # type: ignore[union-attr]
    assert [path.name for path in (tmp_path / "records").iterdir()] == [f"{CELL.key}.json"]


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"cannot write to the store .*file.*Name another folder with --store"):
        Store(tmp_path / "file")


def test_the_folder_is_hidden_from_git_and_can_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Store(tmp_path)
    assert (tmp_path / ".gitignore").read_text() == "*\n"
    monkeypatch.delenv("REMAT_KIT_STORE", raising=False)
    assert default_folder() == Path(".remat-kit")
    monkeypatch.setenv("REMAT_KIT_STORE", "/elsewhere")
    assert default_folder() == Path("/elsewhere")


def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_atomically(path, "old")
    assert stat.S_IMODE(path.stat().st_mode) & 0o400

    def fail(*_: object) -> None:
        raise OSError("no space")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="no space"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
