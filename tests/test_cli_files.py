"""The commands on files that users bring: dumps, profile folders, saved reports; and comparisons."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from explanations import EDITED, RECORD
from hlo_samples import gemm, step
from test_modules import program
from test_report import RECORDS

from remat_kit._hlo.heap import replay
from remat_kit._hlo.proto import parse
from remat_kit._record import dump, load
from remat_kit._report import diff as diff_report
from remat_kit._report import explanation_markdown, text
from remat_kit.cli import _files, main

TESTS = Path(__file__).parent
FINE = "workloads.steps:fine"


@pytest.fixture(autouse=True)
def _in_the_folder_of_the_workloads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(TESTS)
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def errors(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command that must exit with 2 and write nothing to standard output, and returns what it says."""

    def run(*arguments: object) -> str:
        assert main([str(argument) for argument in arguments]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert "Traceback" not in err
        return err

    return run


@pytest.fixture(scope="session")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An XLA dump of a small program and of a training step, compiled for an H100."""
    folder = tmp_path_factory.mktemp("dump")
    (folder / "module_0001.jit__lambda.sm_9.0_gpu_after_optimizations.hlo.pb").write_bytes(gemm(True).data)
    (folder / "module_0002.jit_update.sm_9.0_gpu_after_optimizations.hlo.pb").write_bytes(step("full").data)
    (folder / "module_0002.jit_update.before_optimizations.hlo.pb").write_bytes(program(assigned=False))
    return folder


@pytest.fixture
def saved(tmp_path: Path) -> dict[str, Path]:
    """Saved reports: the sample, the sample after an edit, and both in one file."""
    contents = {"before": RECORD, "after": EDITED, "both": [RECORD, EDITED]}
    files = {name: tmp_path / f"{name}.json" for name in contents}
    for name, content in contents.items():
        files[name].write_text(dump(content))
    return files


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        (FINE, False),
        ("models.transformer:gpt", False),
        ("steps", False),
        ("nowhere.hlo.pb", True),
        ("nowhere.json", True),
        ("no/where", True),
        ("workloads", True),  # it is there
        ("-", True),
    ],
)
def test_what_is_a_file(argument: str, expected: bool) -> None:
    assert _files.is_file(argument) is expected


# Analyze.


def test_a_dump_is_analyzed_without_its_policy(dumps: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "record.json"
    assert main(["analyze", str(dumps), "--json", str(out)]) == 0
    shown = capsys.readouterr().out
    first, second, _ = shown.split("\n", 2)
    assert first.startswith("* jit_update ")
    assert first.endswith("module_0002.jit_update.sm_9.0_gpu_after_optimizations.hlo.pb")
    assert second.startswith("  jit__lambda")
    (record,) = load(out.read_text())
    heap = replay(step("full").proto)
    assert (record.workload, record.policy, record.target) == ("jit_update", "", "")
    assert (record.need_bytes, record.live_peak_bytes) == (heap.need_bytes, heap.peak_bytes)
    assert (record.fits, record.predicted_step_s) == (None, None)
    assert shown.endswith(text.render(record))


def test_a_module_is_chosen_and_judged_for_a_target(dumps: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["analyze", str(dumps), "--module", "jit__lambda", "--target", "h100-sxm-80gb", "--json", "-"]
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    (record,) = load(out)
    assert (record.workload, record.target, record.fits) == ("jit__lambda", "h100-sxm-80gb", "yes")
    assert "* jit__lambda" in err


def test_a_profile_that_was_written_here_is_read_again(
    dumps: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log"
    assert main(["analyze", str(dumps), "--xprof", str(log)]) == 0
    assert f"written for XProf; open it with: xprof --logdir {log}" in capsys.readouterr().out
    (file,) = log.rglob("*.hlo_proto.pb")
    assert file.read_bytes() == step("full").data
    assert main(["analyze", str(log)]) == 0
    assert capsys.readouterr().out.startswith("* jit_update")


def test_a_saved_report_is_shown(saved: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyze", str(saved["before"])]) == 0
    assert capsys.readouterr().out == text.render(RECORD)
    assert main(["analyze", str(saved["both"]), "--policy", "full", "--format", "markdown"]) == 0
    assert capsys.readouterr().out == explanation_markdown.render(EDITED)


def test_a_file_starts_no_backend(dumps: Path) -> None:
    code = (
        "import sys; from remat_kit.cli import main; "
        f"status = main(['analyze', {str(dumps)!r}, '--target', 'h100-sxm-80gb']); "
        "from jax._src import xla_bridge; sys.exit(status or bool(xla_bridge._backends))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "jit_update" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("batch=8",), "error: KEY=VALUE: only a workload is compiled, and"),
        (("--against", "none"), "error: --against: only a workload is compiled, and"),
        (("--gemm", "cublas", "--mesh", "data=2"), "error: --mesh, --gemm: only a workload is compiled, and"),
        (("--policy", "full"), "error: --policy full is for workloads and saved reports, and"),
        (
            ("--module", "jit_lambada"),
            "error: there is no module 'jit_lambada'. Did you mean 'jit__lambda'? There are:",
        ),
        (("--module", "jit"), "error: --module 'jit' fits 2 modules."),
        (("--target", "h100"), "error: 'h100' is not a target. Did you mean"),
        (("--target", "attached"), "error: --target attached asks this machine's device, and a program in a file"),
        (("--format", "pdf"), "error: --format is 'pdf'. Give one of text, markdown."),
        (("--json", "-", "--html", "-"), "error: two outputs are -, which is standard output. Give one of them a file"),
    ],
)
def test_analyze_refuses_for_files(
    arguments: tuple[str, ...], message: str, dumps: Path, errors: Callable[..., str]
) -> None:
    assert message in errors("analyze", dumps, *arguments)


def test_analyze_refuses_for_saved_reports(saved: dict[str, Path], errors: Callable[..., str], tmp_path: Path) -> None:
    assert "holds 2 records. Choose one by its policy: selective_attention, full." in errors("analyze", saved["both"])
    assert "holds no record of policy 'none'. It has: selective_attention, full." in errors(
        "analyze", saved["both"], "--policy", "none"
    )
    assert "--target cpu is for programs, and" in errors("analyze", saved["before"], "--target", "cpu")
    assert "--module x is for programs, and" in errors("analyze", saved["before"], "--module", "x")
    assert "is a saved report, which does not hold the program. Give a dump." in errors(
        "analyze", saved["before"], "--xprof", tmp_path / "log"
    )
    assert "no/where.json: No such file or directory" in errors("analyze", "no/where.json")
    saved["both"].write_text(dump([RECORD, RECORD]))
    assert "holds 2 records of policy 'selective_attention'. Give a file in which it is there once." in errors(
        "analyze", saved["both"], "--policy", "selective_attention"
    )
    saved["both"].write_text("[]")
    assert "holds no record. Give a file that --json wrote." in errors("analyze", saved["both"])


def test_analyze_refuses_files_that_hold_nothing(tmp_path: Path, errors: Callable[..., str]) -> None:
    (tmp_path / "a.hlo.pb").write_bytes(b"")
    assert "a.hlo.pb: it is empty." in errors("analyze", tmp_path / "a.hlo.pb")
    assert "there is no file or folder no/where. Give the *after_optimizations" in errors("analyze", "no/where")


def test_analyze_refuses_for_workloads(errors: Callable[..., str]) -> None:
    assert f"error: --module: {FINE} is a workload, which is one program. Leave it out." in errors(
        "analyze", FINE, "--module", "x"
    )
    assert "there is no policy 'fulll'. Did you mean 'full'?" in errors("analyze", FINE, "--against", "fulll")


def test_outputs_are_checked_before_any_work(dumps: Path, errors: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text("precious")
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "file").write_text("precious")
    assert "page.html exists and is not overwritten." in errors("analyze", dumps, "--html", tmp_path / "page.html")
    assert "log is not empty" in errors("analyze", dumps, "--xprof", tmp_path / "log", "--json", tmp_path / "x.json")
    assert "log is not empty" in errors("analyze", FINE, "--xprof", tmp_path / "log")
    assert sorted(os.listdir(tmp_path)) == ["log", "page.html"]
    assert (tmp_path / "page.html").read_text() == "precious"


def test_a_policy_against_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(tmp_path / name) for name in ("rows.json", "page.html")]
    command = ["analyze", FINE, "--policy", "full", "--against", "none", "--json", files[0], "--html", files[1]]
    assert main([*command, "--xprof", str(tmp_path / "log")]) == 0
    out = capsys.readouterr().out
    record, base = load(Path(files[0]).read_text())
    assert (record.policy, base.policy) == ("full", "none")
    assert record.effect
    assert record.effect in " ".join(out.split())
    assert "before: workloads.steps:fine, policy none, cpu\nafter:  workloads.steps:fine, policy full, cpu\n" in out
    assert "<html" in Path(files[1]).read_text()
    (file,) = (tmp_path / "log").rglob("*.hlo_proto.pb")
    assert replay(parse(file.read_bytes())).need_bytes == record.need_bytes
    # The saved rows give the same comparison.
    assert main(["diff", files[0], files[0], "--before-policy", "none", "--policy", "full"]) == 0
    compared = capsys.readouterr().out.splitlines()
    assert compared[2:] == out[out.index("before: ") :].splitlines()[2 : len(compared)]


# Diff.


def test_a_difference_of_saved_reports(
    saved: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from remat_kit._diff import diff

    sides = [str(saved["before"]), str(saved["after"])]
    expected = diff_report.text(diff(RECORD, EDITED)).splitlines()
    assert main(["diff", *sides, "--json", str(tmp_path / "diff.json"), "--html", str(tmp_path / "diff.html")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{expected[0]} ({sides[0]})"
    assert lines[2:] == expected[2:]
    data = json.loads((tmp_path / "diff.json").read_text())
    assert (data["diff_version"], len(data["rows"])) == (1, 4)
    assert "<html" in (tmp_path / "diff.html").read_text()
    assert main(["diff", *sides, "--format", "markdown"]) == 0
    assert capsys.readouterr().out.startswith("### need +131.00 MiB (+3.8%), to 3.48 GiB\n")
    both = str(saved["both"])
    assert main(["diff", both, both, "--before-policy", "selective_attention", "--policy", "full"]) == 0
    assert capsys.readouterr().out.splitlines()[2:] == expected[2:]


def test_a_difference_of_programs(dumps: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.hlo.pb"
    other.write_bytes(step("none").data)
    assert main(["diff", str(dumps), str(other), "--before-module", "jit_update", "--json", "-"]) == 0
    out, err = capsys.readouterr()
    data = json.loads(out)
    peaks = [replay(step(policy).proto).peak_bytes for policy in ("full", "none")]
    assert [data["live_peak"][side] for side in ("before", "after")] == peaks
    assert sum(row["difference_bytes"] for row in data["rows"]) == peaks[1] - peaks[0]
    assert err.count("* jit_update") == 2
    assert f"before: jit_update ({dumps})" in err


def test_a_difference_of_a_saved_report_and_a_program(
    saved: dict[str, Path], dumps: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--policy", "full", "--module", "jit_update", "--target", "h100-sxm-80gb", "--json", "-"]
    assert main(["diff", str(saved["both"]), str(dumps), *options]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["live_peak"] == {
        "name": "live peak", "before": EDITED.live_peak_bytes, "after": replay(step("full").proto).peak_bytes,
        "unit": "bytes",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("sides", "option", "message"),
    [
        (("before", "after"), "--target", "--target x says nothing here: "),
        (("before", "after"), "--module", "is a saved report. Leave it out; policies choose among saved reports"),
        (("before", "dump"), "--before-module", "is a program. Leave it out;"),
        (("dump", "before"), "--before-policy", "--before-policy x says nothing here: "),
        (("dump", "dump"), "--policy", "--policy x says nothing here: "),
    ],
)
def test_diff_refuses_what_is_for_the_other_kind(
    sides: tuple[str, str], option: str, message: str, saved: dict[str, Path], dumps: Path, errors: Callable[..., str]
) -> None:
    places = {**saved, "dump": dumps}
    extra = ("--before-module", "jit_update") if sides == ("dump", "dump") else ()
    assert message in errors("diff", places[sides[0]], places[sides[1]], option, "x", *extra)


def test_diff_refuses(saved: dict[str, Path], errors: Callable[..., str]) -> None:
    one, both = saved["before"], saved["both"]
    assert f"both sides are {one}. Say what to compare it with, by --before-policy" in errors("diff", one, one)
    assert "holds 2 records. Choose one by its policy" in errors("diff", one, both)
    assert "--format is 'table'. Give one of text, markdown." in errors("diff", one, both, "--format", "table")
    assert "there is no file or folder nowhere.pb" in errors("diff", one, "nowhere.pb")


# Report.


def test_report_renders_one_record(saved: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(saved["before"]), "--format", "markdown"]) == 0
    assert capsys.readouterr().out == explanation_markdown.render(RECORD)
    assert main(["report", str(saved["both"]), "--policy", "full"]) == 0
    assert capsys.readouterr().out == text.render(EDITED)
    assert main(["report", str(saved["before"]), "--format", "html", "--html", str(tmp_path / "page.html")]) == 0
    assert capsys.readouterr().out == (tmp_path / "page.html").read_text()
    assert main(["report", str(saved["before"]), "--html", "-"]) == 0
    out, err = capsys.readouterr()
    assert "<html" in out
    assert err == text.render(RECORD)


def test_report_of_one_page_needs_one_record(
    saved: dict[str, Path], tmp_path: Path, errors: Callable[..., str]
) -> None:
    page = tmp_path / "page.html"
    for arguments in (("--format", "html"), ("--html", page)):
        assert "holds 2 records. Choose one by its policy" in errors("report", saved["both"], *arguments)
    assert "holds no record of policy 'none'" in errors("report", saved["both"], "--policy", "none")
    assert not page.exists()


def test_report_of_a_policy_keeps_all_its_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.json"
    path.write_text(dump([*RECORDS[:2], RECORDS[1]]))
    assert main(["report", str(path), "--policy", "full", "--json", "-"]) == 0
    assert load(capsys.readouterr().out) == [RECORDS[1], RECORDS[1]]
