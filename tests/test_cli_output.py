"""What the commands do with odd names, devices, pipes and full disks: one clear message, and nothing lost."""

import io
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from explanations import RECORD
from test_cli_files import _in_the_folder_of_the_workloads, dumps, errors, saved

from remat_kit._record import dump
from remat_kit.cli import _output, main

__all__ = ["_in_the_folder_of_the_workloads", "dumps", "errors", "saved"]


def test_a_device_is_written_and_not_replaced() -> None:
    assert main(["report", "golden/explained.json", "--json", os.devnull, "--force"]) == 0
    assert Path(os.devnull).is_char_device()


def test_a_pipe_is_written_and_not_replaced(tmp_path: Path) -> None:
    pipe, found = tmp_path / "pipe.json", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: found.append(pipe.read_text()), daemon=True)
    reader.start()
    assert main(["report", "golden/explained.json", "--json", str(pipe)]) == 0
    reader.join(10)
    assert "need_bytes" in found[0]
    assert pipe.is_fifo()


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "link.json").symlink_to("file.json")
    (tmp_path / "file.json").write_text("old")
    assert main(["report", "golden/explained.json", "--json", str(tmp_path / "link.json"), "--force"]) == 0
    assert (tmp_path / "link.json").is_symlink()
    assert (tmp_path / "file.json").read_text() != "old"


def test_names_that_are_none(saved: dict[str, Path], dumps: Path, errors: Callable[..., str]) -> None:
    for option in ("--json", "--html"):
        assert "the name of an output is empty" in errors("analyze", dumps, option, "")
    assert "the name of a file or folder is empty" in errors("diff", "", saved["before"])
    assert "there is no file or folder ''" in errors("analyze", "")
    assert "there is no file or folder 'steps', and a workload is module:function" in errors("analyze", "steps")


def test_one_file_for_two_outputs(saved: dict[str, Path], tmp_path: Path, errors: Callable[..., str]) -> None:
    same = tmp_path / ".." / tmp_path.name / "x"
    assert "and one would overwrite the other" in errors("report", saved["both"], "--html", same, "--json", same)
    assert "and one would overwrite the other" in errors(
        "analyze", saved["before"], "--html", same, "--json", tmp_path / "x"
    )
    assert not (tmp_path / "x").exists()


def test_a_disk_that_is_full(saved: dict[str, Path]) -> None:
    for more in ((), ("--json", "-")):
        with open("/dev/full", "w") as full:
            done = subprocess.run(
                [sys.executable, "-m", "remat_kit", "report", str(saved["before"]), *more],
                stdout=full,
                stderr=subprocess.PIPE,
                text=True,
                check=False,
            )
        assert done.returncode == 2
        last = done.stderr.splitlines()[-1]
        assert last == "error: cannot write <stdout>: No space left on device. Write to a file elsewhere."
        assert "Traceback" not in done.stderr


def test_json_that_is_no_record(tmp_path: Path, errors: Callable[..., str]) -> None:
    (tmp_path / "deep.json").write_text("[" * 100_000)
    assert "deep.json: nested too deeply to be a record. Give a file" in errors("report", tmp_path / "deep.json")


def test_standard_input_is_named(errors: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert "error: standard input: not JSON" in errors("report", "-")
    assert "both sides are -, and standard input can be read once" in errors("diff", "-", "-", "--policy", "full")


def test_records_without_a_policy(
    dumps: Path, tmp_path: Path, errors: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["analyze", str(dumps), "--json", str(tmp_path / "one.json")]) == 0
    capsys.readouterr()
    (one,) = _output.read_records(str(tmp_path / "one.json"))
    (tmp_path / "two.json").write_text(dump([one, one]))
    (tmp_path / "mixed.json").write_text(dump([one, RECORD]))
    end = "records of programs, which have no policy. Give a file that holds one, and no policy."
    assert f"two.json holds 2 {end}" in errors("analyze", tmp_path / "two.json")
    assert "of programs, which have no policy" in errors("analyze", tmp_path / "one.json", "--policy", "full")
    assert "Choose one by its policy: no policy (jit_update), " in errors("analyze", tmp_path / "mixed.json")


def test_markdown_is_alone_on_standard_output(dumps: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "a log"
    assert main(["analyze", str(dumps), "--format", "markdown", "--xprof", str(log)]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("### ")
    assert err.startswith("* jit_update")
    assert f"xprof --logdir '{log}'" in err
    other = dumps / "module_0001.jit__lambda.sm_9.0_gpu_after_optimizations.hlo.pb"
    assert main(["diff", str(dumps), str(other), "--format", "markdown"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("### ")
    assert err.count("* jit_") == 2
