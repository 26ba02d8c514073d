"""The store: the rows of finished cells in a folder, one file a row, safe against a kill at any moment.

A row is written to a temporary file beside its place, flushed to the disk, and renamed. So a file under its
final name is always whole, there is one file a key, and sweeps that share a store cannot harm each other:
both write the same row to the same name.
"""

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from remat_kit._errors import OutputError, RematKitError
from remat_kit._fingerprint import digest_file
from remat_kit._record import Record

DEFAULT_FOLDER = ".remat-kit"
_STALE_S = 3600.0
_TEMPORARY = ".tmp-"


def default_folder() -> Path:
    """`$REMAT_KIT_STORE`, or `.remat-kit` in the current directory."""
    return Path(os.environ.get("REMAT_KIT_STORE") or DEFAULT_FOLDER)


class Store:
    """Rows by key. A row that stands is never changed; only a failed one is replaced, by a later trial.

    Attributes:
      folder: holds `records/`, `measurements/` and `logs/`.
      warn: is called with one line for each file that cannot be read; such a row counts as missing.
    """

    def __init__(self, folder: Path, warn: Callable[[str], None] = lambda line: None):
        """Opens the store, and makes the folder. Raises OutputError when it cannot be written."""
        self.folder = folder
        self.warn = warn
        try:
            for name in ("records", "measurements", "logs"):
                (folder / name).mkdir(parents=True, exist_ok=True)
            if not (folder / ".gitignore").exists():
                write_atomically(folder / ".gitignore", "*\n")
            for leftover in folder.rglob(f"{_TEMPORARY}*"):
                # Younger ones may belong to another sweep that is writing now.
                with contextlib.suppress(FileNotFoundError):
                    if time.time() - leftover.stat().st_mtime > _STALE_S:
                        leftover.unlink()
        except OSError as error:
            raise OutputError(
                f"cannot write to the store {folder}: {error.strerror}. Name another folder with --store."
            ) from error

    def get(self, key: str) -> Record | None:
        """The row of `key`; None when there is none, its file is damaged, or a source file that made it has changed."""
        path = self.folder / "records" / f"{key}.json"
        data = self._read(path, key)
        if data is None:
            return None
        try:
            if any(digest_file(Path(source)) != digest for source, digest in data.get("sources", {}).items()):
                return None
            return Record.from_json(data["record"])
        except (RematKitError, KeyError, TypeError, AttributeError) as error:
            return self._damaged(path, str(error))

    def put(
        self, key: str, record: Record, cell: Mapping[str, Any], sources: Mapping[str, str] | None = None
    ) -> Record:
        """The row that the store holds now: `record`, or one without an error that came before it.

        `cell` is kept beside the row for whoever looks into the folder; `sources` are the files, with the digests of
        their content, that the row holds for.
        """
        before = self.get(key)
        if before is not None and before.error is None:
            return before
        path = self.folder / "records" / f"{key}.json"
        self._write(path, {"key": key, "cell": cell, "sources": dict(sources or {}), "record": record.to_json()})
        return record

    def get_measurement(self, key: str) -> dict[str, Any] | None:
        """What was measured under `key`; None when nothing was or its file is damaged."""
        path = self.folder / "measurements" / f"{key}.json"
        data = self._read(path, key)
        if data is not None and not isinstance(data.get("measurement"), dict):
            return self._damaged(path, "it holds no measurement")
        return None if data is None else data["measurement"]

    def put_measurement(self, key: str, measurement: Mapping[str, Any]) -> None:
        """Keeps what was measured under `key`, in the place of an earlier measurement."""
        self._write(self.folder / "measurements" / f"{key}.json", {"key": key, "measurement": dict(measurement)})

    def put_log(self, key: str, text: str) -> Path:
        """The file that now holds what the cell's process printed."""
        path = self.folder / "logs" / f"{key}.log"
        self._write(path, text)
        return path

    def log_path(self, key: str) -> Path | None:
        """The file with what a failed cell's process printed, if there is one."""
        path = self.folder / "logs" / f"{key}.log"
        return path if path.exists() else None

    def _read(self, path: Path, key: str) -> dict[str, Any] | None:
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            return self._damaged(path, str(error))
        if not isinstance(data, dict) or data.get("key") != key:
            return self._damaged(path, "it is not the row of its name")
        return data

    def _damaged(self, path: Path, why: str) -> None:
        self.warn(f"{path} is damaged and counts as missing: {why}")

    def _write(self, path: Path, data: Mapping[str, Any] | str) -> None:
        text = data if isinstance(data, str) else json.dumps(data, indent=1, default=str) + "\n"
        try:
            write_atomically(path, text)
        except OSError as error:
            raise OutputError(
                f"cannot write {path}: {error.strerror}. Rows before it are kept; make room and run again."
            ) from error


def write_atomically(path: Path, content: str | bytes) -> None:
    """Writes the file whole or not at all, whatever happens, and on the disk when this returns."""
    data = content.encode("utf-8") if isinstance(content, str) else content
    descriptor, name = tempfile.mkstemp(prefix=_TEMPORARY, dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes files that only the owner can read; a result is a file like any other.
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
