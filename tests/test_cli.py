"""The command line: what it does with good input, and what it says about bad input."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from test_report import RECORDS

from remat_kit import POLICIES
from remat_kit._record import dump, load
from remat_kit._target import CHIPS
from remat_kit.cli import main

TESTS = Path(__file__).parent
FINE = "workloads.steps:fine"


@pytest.fixture(autouse=True)
def _in_the_folder_of_the_workloads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(TESTS)
    monkeypatch.setenv("REMAT_KIT_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def errors(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command that must exit with 2, and returns the one line that it prints."""

    def run(*arguments: str) -> str:
        assert main(arguments) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert "Traceback" not in err
        return err

    return run


# Bad input: nothing has been started when it is refused.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((FINE, "--policies", "none,fulll"), "error: there is no policy 'fulll'. Did you mean 'full'? Policies: none"),
        ((FINE, "--policies", ","), "error: no policy in ','. Give a comma-separated list or 'all'."),
        ((FINE, "--target", "h100"), "error: 'h100' is not a target. Did you mean 'h100-pcie-80gb' or 'h100-sxm-80gb'"),
        ((FINE, "--target", "attached-x100"), "error: 'attached-x100' is not a target."),
        ((FINE, "--mesh", "data"), "error: 'data' in 'data' is not a mesh axis. Write axis=size"),
        (("steps",), "error: 'steps' is not a workload. Write module:function"),
        (("workloads.nothing:f",), "error: cannot import 'workloads.nothing' of workload 'workloads.nothing:f'"),
        (("workloads.steps:fien",), "has no function 'fien'. Did you mean 'fine'?"),
        ((FINE, "widht=3"), f"error: workload {FINE} has no option 'widht'. Did you mean 'width'?"),
        ((FINE, "width"), "error: 'width' is not an option. Write key=value"),
        ((FINE, "width=1", "width=2"), "error: option 'width' is given twice: 1 and 2. Give it once."),
        ((FINE, "--gemm", "mkl"), "error: --gemm is 'mkl'. Give cublas, triton or both."),
        ((FINE, "--xla-remat", "maybe"), "error: xla_remat is 'maybe'. Give 'on' or 'off'."),
        ((FINE, "--xla-option", "x"), "error: --xla-option 'x' is not an option of XLA. Write key=value."),
        ((FINE, "--autotune-results", "nowhere"), "error: there is no autotune results file 'nowhere'."),
        ((FINE, "--jobs", "0"), "error: --jobs and --timeout are 0 and 600. Give numbers above 0"),
        ((FINE, "--memory-limit", "much"), "error: 'much' is not a size in bytes."),
        (
            (FINE, "--plot", "a.pdf"),
            "error: a plot cannot be written as 'a.pdf'. Use a name that ends in .png or .svg.",
        ),
        ((FINE, "--json", "no/such/folder.json"), "there is no folder no/such. Make it first."),
        ((FINE, "--json", "workloads"), "error: workloads is a folder. Name a file in it."),
        ((FINE, "--store", "test_cli.py"), "error: cannot write to the store test_cli.py"),
    ],
)
def test_sweep_refuses(arguments: tuple[str, ...], message: str, errors: Callable[..., str], tmp_path: Path) -> None:
    assert message in errors("sweep", *arguments)
    records = tmp_path / "store" / "records"
    assert not records.exists() or not list(records.iterdir())


@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_existing_output_is_refused_before_any_cell_runs(
    option: str, errors: Callable[..., str], tmp_path: Path
) -> None:
    path = tmp_path / "out.svg"
    path.write_text("precious")
    message = errors("sweep", FINE, "--policies", "none", option, str(path))
    assert f"{path} exists and is not overwritten. Name another file, or allow it with --force." in message
    assert path.read_text() == "precious"
    assert not (tmp_path / "store").exists()


def test_a_folder_that_is_not_writable(
    errors: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Permissions do not hold for root, who runs the tests in many containers.
    monkeypatch.setattr(os, "access", lambda *_: False)
    message = errors("sweep", FINE, "--json", str(tmp_path / "out.json"))
    assert f"the folder {tmp_path} is not writable. Name a file elsewhere." in message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read"),
        ("{", "not JSON"),
        ('{"schema_version": 99}', "schema_version is 99, known are 1 to"),
        ('{"schema_version": 1}', "this record lacks fields"),
    ],
)
def test_report_refuses(content: str | None, message: str, errors: Callable[..., str], tmp_path: Path) -> None:
    path = tmp_path / "in.json"
    if content is not None:
        path.write_text(content)
    error = errors("report", str(path))
    assert message in error
    assert str(path) in error


def test_an_unknown_format_or_command(errors: Callable[..., str]) -> None:
    assert "--format is 'pdf'. Give one of table, text, markdown, html." in errors("report", "x", "--format", "pdf")
    assert "No such command" in errors("swep")


def test_analyze_refuses_the_same(errors: Callable[..., str]) -> None:
    assert "Did you mean 'full'?" in errors("analyze", FINE, "--policy", "fulll")
    assert "none of them is in the model" in errors("analyze", FINE, "--policy", "save(nothing)")
    assert "has no option 'widht'" in errors("analyze", FINE, "widht=3")


# Good input.


def test_a_sweep_from_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = [str(tmp_path / name) for name in ("rows.json", "plot.svg")]
    command = ["sweep", FINE, "layers=3", "--policies", "none,full,save(mlp_up)", "--jobs", "2", "--measure"]
    assert main([*command, "--json", names[0], "--plot", names[1]]) == 0
    out, err = capsys.readouterr()
    assert "3 cells: 0 are in the store, 3 to run" in err
    assert "[3/3]" in err
    assert "measuring 3 steps in turns" in err
    records = load(Path(names[0]).read_text())
    assert [record.policy for record in records] == ["none", "full", "save(mlp_up)"]
    assert [record.recomputed_matmuls for record in records] == [0, 3, 0]
    for record in records:
        assert record.need_bytes is not None
        assert record.measured_step_s is not None
        assert f"\n {record.policy} " in out
    assert Path(names[1]).read_text().startswith("<?xml")

    # Again: nothing runs, the rows are the same; --json - leaves standard output to the JSON.
    assert main([*command, "--json", "-"]) == 0
    out, err = capsys.readouterr()
    assert load(out) == records
    assert "3 are in the store, 0 to run" in err
    assert "* on the front" in err

    # The saved records give the same table, and may be overwritten when that is allowed.
    assert main(["report", names[0], "--json", names[0], "--force"]) == 0
    assert capsys.readouterr().out in err
    assert load(Path(names[0]).read_text()) == records


def test_a_row_is_made_again_when_a_module_that_was_imported_late_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "late.py").write_text(
        "def train(policy):\n    from late_model import build\n    return build(policy)\n"
    )
    model = (
        "import jax, remat_kit\n"
        "def build(policy):\n"
        "    return remat_kit.Step(lambda x: (x @ x).sum(), (jax.ShapeDtypeStruct((SIZE, SIZE), 'float32'),))\n"
    )
    needs = []
    for size, known in ((8, 0), (8, 1), (16, 0)):
        (tmp_path / "late_model.py").write_text(model.replace("SIZE", str(size)))
        assert main(["sweep", "late:train", "--policies", "none", "--json", "-"]) == 0
        out, err = capsys.readouterr()
        assert f"1 cells: {known} are in the store" in err
        needs.append(load(out)[0].argument_bytes)
    assert needs == [8 * 8 * 4, 8 * 8 * 4, 16 * 16 * 4]


def test_a_sweep_with_failed_cells_exits_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["sweep", "workloads.steps:only_none", "--policies", "none,full,save(nothing)", "--json", "-"]
    assert main(command) == 1
    out, err = capsys.readouterr()
    errors = {record["policy"]: record["error"] for record in json.loads(out)}
    assert errors == {"none": None, "full": "ValueError: not with full", "save(nothing)": errors["save(nothing)"]}
    assert "\n  full: ValueError: not with full\n" in err
    assert "run the same command with --retry-failed" in err
    (log,) = [line.strip() for line in err.splitlines() if line.strip().endswith(".log")][:1]
    assert "in only_none" in Path(log).read_text()
    assert main(command) == 1
    assert "2 of those in the store failed before; --retry-failed runs them again" in capsys.readouterr().err


def test_a_policy_without_effect_in_the_model_costs_its_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", FINE, "--policies", "save(nothing)", "--json", "-"]) == 1
    (row,) = json.loads(capsys.readouterr().out)
    assert "names nothing, and none of them is in the model" in row["error"]


def test_analyze_prints_a_report_and_writes_one_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "record.json"
    assert main(["analyze", FINE, "--policy", "full", "--json", str(path)]) == 0
    out = capsys.readouterr().out
    assert "= need" in out
    assert json.loads(path.read_text())["policy"] == "full"
    assert main(["report", str(path)]) == 0
    assert capsys.readouterr().out == out
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("form", ["table", "text", "markdown"])
def test_report_renders_saved_records(form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    files[0].write_text(dump(RECORDS[:2]))
    files[1].write_text(dump(RECORDS[2]))
    arguments = ["report", *map(str, files), "--format", form]
    assert main([*arguments, "--plot", str(tmp_path / "p.png")]) == 0
    out = capsys.readouterr().out
    assert all(record.policy in out for record in RECORDS[:3])
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    assert main([*arguments, "--json", "-"]) == 0
    assert load(capsys.readouterr().out) == RECORDS[:3]


def test_policies_and_targets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command, names in (("policies", list(POLICIES)), ("targets", [*CHIPS, "cpu"])):
        assert main([command, "--json", str(tmp_path / command)]) == 0
        out = capsys.readouterr().out
        data = json.loads((tmp_path / command).read_text())
        assert [row["name"] for row in data] == names
        assert set(names) <= set(out.split())
    assert data[0]["sources"]["memory_bytes"]


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f" {name} " in out for name in ("sweep", "analyze", "diff", "report", "policies", "targets"))


def test_ctrl_c_keeps_what_is_done_and_leaves_no_process(tmp_path: Path) -> None:
    # Under a shell that started the tests in the background, Ctrl-C is ignored unless it is asked for.
    start = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from remat_kit.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", start, "sweep", "workloads.steps:loops_unless_none"]
    process = subprocess.Popen(
        [*command, "--policies", "none,full"], stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": ""}
    )
    assert process.stderr is not None
    while "[1/2] none" not in (line := process.stderr.readline()):
        assert line, "it ended early"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err == f"stopped; finished rows are kept in {tmp_path / 'store'}, run the same command to go on\n"
    (row,) = (tmp_path / "store" / "records").iterdir()
    assert json.loads(row.read_text())["record"]["policy"] == "none"
