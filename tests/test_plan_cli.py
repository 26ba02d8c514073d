"""`remat-kit plan` from end to end, and what it says of bad input."""

import json
from pathlib import Path

import pytest

from remat_kit import Plan
from remat_kit._plan import search
from remat_kit.cli import main

STACK = "workloads.plans:stack"


@pytest.fixture
def failing(capsys: pytest.CaptureFixture[str]):
    """The message of a command that fails, which is one line and no traceback."""

    def run(*arguments: str) -> str:
        assert main(["plan", *arguments]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert "Traceback" not in err
        assert err.startswith("error: ")
        return err

    return run


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """As many entries as XLA was asked."""
    asked: list[None] = []
    compile_step = search.compile_step

    def counted(*args, **kwargs):
        asked.append(None)
        return compile_step(*args, **kwargs)

    monkeypatch.setattr(search, "compile_step", counted)
    return asked


@pytest.mark.parametrize(
    ("budget", "said"),
    [
        ("-3GiB", "below 0"),
        ("0", "no memory"),
        ("40parsecs", "not a size in bytes"),
        ("lots", "not a size in bytes"),
        ("900%", "of which one process can use"),
        ("-10%", "no memory"),
    ],
)
def test_a_budget_that_is_none(failing, budget: str, said: str) -> None:
    message = failing(STACK, "--budget", budget)
    assert said in message
    assert f"the budget is {budget!r}" in message


def test_a_step_without_a_block(failing) -> None:
    message = failing("workloads.plans:no_block", "--budget", "1GiB")
    assert "found no block to plan" in message
    assert "--where" in message


def test_a_step_without_a_derivative(failing) -> None:
    assert "the step differentiates nothing" in failing("workloads.plans:no_derivative", "--budget", "1GiB")


def test_a_pattern_that_fits_nothing_or_is_none(failing) -> None:
    assert "'nothing_like_it' fits" in failing(STACK, "--where", "nothing_like_it")
    assert "not a regular expression" in failing(STACK, "--where", "(")


def test_a_plan_that_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str], compiles: list[None]) -> None:
    files = ["--json", str(tmp_path / "plan.json"), "--python", str(tmp_path / "plan.py")]
    assert main(["plan", STACK, "layers=3", "--budget", "64MiB", *files]) == 0
    out, err = capsys.readouterr()
    plan = Plan.loads((tmp_path / "plan.json").read_text())
    # Each program is said when it is compiled, beside the answer.
    said = [line for line in err.splitlines() if line.startswith("compiled ")]
    assert len(said) == len(compiles)
    assert said[0].startswith("compiled all again: need ")
    assert plan.fits
    assert plan.options == {"layers": 3}
    assert plan.budget_bytes == 64 * 2**20
    assert 1 <= len(compiles) <= 5
    assert "fits" in out.splitlines()[0]
    assert f"{plan.need_bytes:,} bytes" in out
    assert plan.reasons
    unwrapped = " ".join(out.split())
    assert all(" ".join(reason.split()) in unwrapped for reason in plan.reasons)
    assert "def planned(loss)" in (tmp_path / "plan.py").read_text()
    assert json.loads((tmp_path / "plan.json").read_text())["version"] == 1
    # Written once: a second run does not overwrite, and says so before any work.
    assert main(["plan", STACK, "--budget", "64MiB", *files]) == 2
    assert "--force" in capsys.readouterr().err


def test_a_budget_below_the_floor_has_a_status_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", STACK, "--budget", "100KiB", "--json", str(tmp_path / "plan.json")]) == 3
    out, _ = capsys.readouterr()
    plan = Plan.loads((tmp_path / "plan.json").read_text())
    assert not plan.fits
    assert plan.need_bytes > 100 * 1024
    assert "DOES NOT FIT" in out
    assert "Nothing smaller was found" in out
    assert "held by" in out


def test_without_a_budget_the_front_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", STACK]) == 0
    out, _ = capsys.readouterr()
    assert "<- knee" in out
