"""`remat-kit max`: what is traced, what is compiled, what is said of it."""

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from workloads import cells as fake
from workloads import sized

import remat_kit as rk
from experiments import max_exhaustive
from remat_kit._border import UNBOUNDED
from remat_kit._cell import Cell
from remat_kit._errors import PolicyError, RematKitError, WorkloadError
from remat_kit._foresee import Asked, check_option, foresee, room
from remat_kit._live import live_bytes
from remat_kit._max import Answer, Largest, Question, find_largest
from remat_kit._pool import Pool
from remat_kit._report.max import render
from remat_kit._store import Store
from remat_kit._sweep import Limits
from remat_kit.cli import main

TESTS = Path(__file__).parent
MLP = "workloads.sized:mlp"


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool() as pool:
        yield pool


def _cells(*policies: str, **options: Any) -> list[Cell]:
    return [fake.cell(policy, MLP, batch=1, **options) for policy in policies]


def _find(pool: Pool, folder: Path, cells: list[Cell], limit: int = 3000, **more: Any) -> list[Largest]:
    more = {"run": sized.needs, "look": sized.sees} | more
    question = more.pop("question", Question("batch"))
    return find_largest(cells, question, limit, Store(folder), pool, **more)


# The search over cells, with stand-ins for tracing and compiling.


def test_each_policy_has_its_answer_and_a_second_run_compiles_nothing(pool: Pool, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    cells = _cells("none", "full", "dots_saveable", notes=str(notes))
    found = _find(pool, tmp_path, cells, limits=Limits(jobs=2))
    # (3000 - 1000 bytes) / 100, 30 and 60 bytes for each of the batch.
    assert [(each.policy, each.kind, each.value, each.above) for each in found] == [
        ("none", "proved", 20, 21),
        ("full", "proved", 66, 67),
        ("dots_saveable", "proved", 33, 34),
    ]
    ran = notes.read_text().splitlines()
    assert len(ran) == len(set(ran)) == sum(len(each.tried) for each in found)
    for each in found:
        assert len(each.tried) <= 4
        assert each.record is not None
        assert each.above_record is not None
        assert (each.record.need_bytes or 0) + 100 <= 3000 < (each.above_record.need_bytes or 0) + 100
        assert not any(tried.reused for tried in each.tried)
        # The need of the answer and of the next one were foreseen to the byte, since the stand-in is a line.
        last = list(each.tried).pop()
        assert last.predicted_need_bytes == last.need_bytes
        assert each.items == "samples"
        assert each.throughput == pytest.approx(each.value / (0.5 + each.value / 100))  # pyright: ignore
    again = _find(pool, tmp_path, cells)
    assert notes.read_text().splitlines() == ran
    assert [each.value for each in again] == [20, 66, 33]
    assert all(tried.reused for each in again for tried in each.tried)


def test_multiples_and_bounds(pool: Pool, tmp_path: Path) -> None:
    (each,) = _find(pool, tmp_path, _cells("full"), question=Question("batch", multiple_of=8))
    assert (each.kind, each.value, each.above, each.step) == ("proved", 64, 72, 8)
    (each,) = _find(pool, tmp_path, _cells("full"), question=Question("batch", at_most=30))
    assert (each.kind, each.value, each.above, len(each.tried)) == ("bound", 30, None, 1)
    assert each.reason == "batch=30 is the largest that was looked at"
    (each,) = _find(pool, tmp_path, _cells("full"), question=Question("batch", at_least=70))
    assert (each.kind, each.value, each.above, len(each.tried)) == ("nothing fits", None, 70, 1)
    assert each.reason == "nothing fits: batch=70, the smallest, needs 3.03 KiB"
    (each,) = _find(pool, tmp_path, _cells("full"), question=Question("batch", compiles=2))
    assert each.kind == "bracket"
    assert "not decided after 2 compiles" in each.reason


def test_a_compile_that_dies_costs_its_policy_alone(pool: Pool, tmp_path: Path) -> None:
    cells = _cells("none", "full", "dots_saveable")
    fine, dying, failed = _find(
        pool, tmp_path, cells, 2900, run=sized.dies_above_20, question=Question("batch", compiles=9)
    )
    assert (fine.kind, fine.value, fine.above) == ("proved", 19, 20)
    assert (dying.kind, dying.value, dying.above) == ("fails above", 20, 21)
    assert "batch=21 fails: the process died of SIGABRT" in dying.reason
    assert (failed.kind, failed.value, len(failed.tried)) == ("failed", None, 2)
    assert "batch=1: the process died of SIGABRT" in failed.reason


def test_tracing_that_dies_costs_its_guesses_alone(pool: Pool, tmp_path: Path) -> None:
    found = _find(pool, tmp_path, _cells("none", "dots_saveable"), look=sized.sees_less)
    assert [(each.kind, each.value) for each in found] == [("proved", 20), ("failed", None)]
    assert found[1].reason == "there is nothing to save"


def test_a_size_that_the_workload_refuses_ends_the_search(pool: Pool, tmp_path: Path) -> None:
    none, full = _find(pool, tmp_path, _cells("none", "full"), look=sized.sees_a_bound)
    assert (none.kind, none.value) == ("proved", 20)
    assert (full.kind, full.value, full.above, len(full.tried)) == ("refused above", 24, 25, 1)
    assert full.reason == "batch=25 is refused: ValueError: there are 24 positions"


# What tracing tells.


def _asked(limit: int, least: int = 1, most: int = UNBOUNDED, step: int | None = None, **options: Any) -> Asked:
    policy = options.pop("policy", "none")
    option = options.pop("option", "batch")
    return Asked(fake.cell(policy, MLP, **options), option, least, most, step, limit)


def test_tracing_goes_up_to_twice_the_limit() -> None:
    first, *lines = foresee(_asked(200_000))
    assert first == {"step": 1}
    # Weights of 2 x 32 x 32 and a batch of B x 8 x 32 floats.
    assert all(line["argument_bytes"] == 8192 + 1024 * line["value"] for line in lines)
    values = [line["value"] for line in lines]
    assert values[:2] == [1, 2]
    largest = max(lines, key=lambda line: line["value"])
    assert 400_000 < largest["argument_bytes"] + largest["live_bytes"] < 1_600_000
    before = max((line for line in lines if line is not largest), key=lambda line: line["value"])
    per_sample = (largest["live_bytes"] - before["live_bytes"]) / (largest["value"] - before["value"])
    assert 4 * 1024 <= per_sample <= 7 * 1024, "the input and tanh of both blocks, the gradient and what is made of it"


def test_on_a_mesh_bytes_are_those_of_one_device() -> None:
    def lines(**mesh: int) -> dict[int, Any]:
        options = {"size": "tiny", "layers": 2, "heads": 8, "optimizer": "sgd", "dropout": 0.0}
        cell = fake.cell("full", "models.transformer:gpt", **options)
        cell = dataclasses.replace(cell, target="h100-sxm-80gb", platform="cuda", mesh=tuple(mesh.items()))
        found = foresee(Asked(cell, "batch", 8, 16, 8, 2**20))
        return {line["value"]: line for line in found if "argument_bytes" in line}

    one, eight = lines(device=1), lines(fsdp=8)
    assert eight[8]["argument_bytes"] == pytest.approx(one[8]["argument_bytes"] / 8, rel=0.02)
    assert eight[16]["live_bytes"] == pytest.approx(one[16]["live_bytes"] / 8, rel=0.02)


def test_the_step_is_learned_from_what_is_refused() -> None:
    lines = list(foresee(_asked(200_000, even=True)))
    assert lines[0] == {"step": 2, "why": "batch=1 is refused: ValueError: batch 1 is odd"}
    assert all(line["value"] % 2 == 0 for line in lines[1:])
    # An option called seq counts in tiles of 128, others in ones.
    assert next(foresee(_asked(200_000, option="seq"))) == {"step": 128}
    assert next(foresee(_asked(200_000, option="seq", most=100)))["step"] == 64
    assert next(foresee(_asked(200_000, option="seq", step=10))) == {"step": 10}


@pytest.mark.parametrize("highest", [1, 2, 3, 20, 77])
def test_the_largest_accepted_value_is_found(highest: int) -> None:
    lines = list(foresee(_asked(2_000_000, highest=highest)))
    edge = {"accepted": highest, "refused": highest + 1, "error": f"ValueError: batch {highest + 1} is above {highest}"}
    assert lines[-1] == edge


def test_what_no_value_changes_is_raised() -> None:
    with pytest.raises(RematKitError, match="batch=1 is refused: ValueError: batch 1 is above 0"):
        list(foresee(_asked(200_000, highest=0)))
    with pytest.raises(PolicyError, match="none of them is in the model"):
        list(foresee(_asked(200_000, policy="save(nothing)")))


def test_live_bytes() -> None:
    x = jax.ShapeDtypeStruct((256,), jnp.float32)  # 1 KiB

    def chain(x: Any) -> Any:
        return jnp.cos(jnp.sin(jnp.tanh(x)))

    # A value and the one that is made of it.
    assert live_bytes(jax.make_jaxpr(chain)(x)) == 2 * 1024

    def kept(x: Any) -> Any:
        a, b = jnp.sin(x), jnp.cos(x)
        return jnp.tanh(b) * a

    # sin and cos wait for the product beside tanh; the product is made when cos is gone.
    assert live_bytes(jax.make_jaxpr(kept)(x)) == 3 * 1024

    def loop(x: Any) -> Any:
        return jax.lax.scan(lambda carry, _: (chain(carry), carry), x, None, length=7)

    # The stack of 7 and the carry out, and in a turn the chain's two.
    assert live_bytes(jax.make_jaxpr(loop)(x)) == (7 + 1 + 2) * 1024


def test_what_a_step_may_need() -> None:
    pool = room(("h100-sxm-80gb", None, "yes", None))
    all_of_it = room(("h100-sxm-80gb", None, "tight", None))
    assert pool["limit_bytes"] == pool["pool_bytes"] < all_of_it["limit_bytes"] == all_of_it["capacity_bytes"]
    assert room(("h100-sxm-80gb", None, "yes", "40GiB"))["limit_bytes"] == 40 * 2**30


def test_which_options_are_whole_numbers() -> None:
    for name in ("batch", "layers", "highest"):
        check_option((MLP, name))
    for name, kind in (("kind", "str"), ("rate", "float"), ("even", "bool")):
        with pytest.raises(WorkloadError, match=f"option '{name}' of {MLP} is a {kind}, and max looks for the largest"):
            check_option((MLP, name))
    bare = "workloads.sized:without_annotations"
    check_option((bare, "size"))
    check_option((bare, "anything"))
    for name, kind in (("flag", "bool"), ("name", "str")):
        with pytest.raises(WorkloadError, match=f"option '{name}' of {bare} is a {kind}"):
            check_option((bare, name))


def test_items_of_a_step() -> None:
    step = sized.mlp(rk.get_policy("none"), batch=3)
    assert dict(step.items) == {"tokens": 24, "sequences": 3}
    for wrong in (0, 2.5, True):
        with pytest.raises(WorkloadError, match=f"Step.items says that a step processes {wrong} tokens"):
            dataclasses.replace(step, items={"tokens": wrong})


# The command.


@pytest.fixture(autouse=True)
def _in_the_folder_of_the_workloads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(TESTS)
    monkeypatch.setenv("REMAT_KIT_STORE", str(tmp_path / "store"))


@pytest.fixture
def errors(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command that must exit with 2, and returns what it prints."""

    def run(*arguments: str) -> str:
        assert main(arguments) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert "Traceback" not in err
        return err

    return run


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("foo", MLP), f"error: workload {MLP} has no option 'foo'. Options: batch, width"),
        (("bach", MLP), f"error: workload {MLP} has no option 'bach'. Did you mean 'batch'?"),
        (("kind", MLP), f"error: option 'kind' of {MLP} is a str, and max looks for the largest whole number."),
        (("a b", MLP), "error: 'a b' is not an option. Name one of the workload's, e.g. batch."),
        (("batch", "sized"), "error: 'sized' is not a workload. Write module:function"),
        (("batch", MLP, "batch=4"), "error: option 'batch' is what to make large, and it is given as 4. Leave it out"),
        (("batch", MLP, "--policies", "none,fulll"), "error: there is no policy 'fulll'. Did you mean 'full'?"),
        (("batch", MLP, "--mesh", "data"), "error: 'data' in 'data' is not a mesh axis. Write axis=size"),
        (("batch", MLP, "--target", "h100"), "error: 'h100' is not a target."),
        (("batch", MLP, "--at-least", "9", "--at-most", "3"), "error: --at-least is 9 and --at-most 3, and nothing is"),
        (("batch", MLP, "--at-least", "0"), f"error: --at-least is 0. Give a number from 1 to {UNBOUNDED}."),
        (("batch", MLP, "--multiple-of", "0"), "error: --multiple-of is 0. Give a number from 1 to"),
        (
            ("batch", MLP, "--multiple-of", "8", "--at-least", "9", "--at-most", "15"),
            "error: no multiple of 8 is from --at-least 9 to --at-most 15. Widen the bounds",
        ),
        (("batch", MLP, "--compiles", "1"), "error: --compiles is 1. Give at least 2"),
        (("batch", MLP, "--fits", "no"), "error: --fits is 'no'. Give yes (JAX's default pool) or tight"),
        (("batch", MLP, "--fits", "yes", "--budget", "1GiB"), "error: --fits and --budget are both given"),
        (("batch", MLP, "--budget", "40 bananas"), "error: the budget is '40 bananas': '40 bananas' is not a size"),
        (("batch", MLP, "--target", "l4", "--budget", "80GiB"), "error: the budget is '80GiB', and l4 has 2"),
        (("batch", MLP, "--jobs", "0"), "error: --jobs and --timeout are 0 and 600."),
        (("batch", MLP, "--json", "no/such/folder.json"), "there is no folder no/such. Make it first."),
    ],
)
def test_max_refuses(arguments: tuple[str, ...], message: str, errors: Callable[..., str], tmp_path: Path) -> None:
    assert message in errors("max", *arguments)
    records = tmp_path / "store" / "records"
    assert not records.exists() or not list(records.iterdir())


def test_max_from_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On the CPU, against every batch near the answer, compiled one by one."""
    name = str(tmp_path / "max.json")
    command = ["max", "batch", MLP, "even=true", "--policies", "none,full", "--budget", "150KiB"]
    assert main([*command, "--json", name]) == 0
    out, err = capsys.readouterr()
    answer = json.loads(Path(name).read_text())
    assert answer["limit_bytes"] == 150 * 1024
    assert [each["policy"] for each in answer["largest"]] == ["none", "full"]
    for each in answer["largest"]:
        assert each["kind"] == "proved"
        assert each["step"] == 2
        assert len(each["tried"]) <= 6
        assert each["record"]["options"]["batch"] == each["value"] == each["above"] - 2
        needs = [_need(each["policy"], each["value"] + 2 * offset) for offset in (-2, -1, 0, 1, 2)]
        assert [need <= 150 * 1024 for need in needs] == [True, True, True, False, False]
        for record, need in ((each["record"], needs[2]), (each["above_record"], needs[3])):
            assert record["need_bytes"] + (record["constant_bytes"] or 0) == need
        assert each["items"] == "tokens"
        assert each["throughput"] == each["value"] * 8 / each["record"]["predicted_step_s"]
        assert f"{each['policy']}, batch={each['value']}: need" in err
        assert f"batch={each['above']} needs" in out
        assert f"{each['policy']}: batch counts in multiples of 2, as batch=1 is refused: ValueError: batch 1 is" in out
    assert f"Largest batch of {MLP} even=True for cpu\nwithin the budget 150KiB, 150.00 KiB\n" in out
    assert main(["max", "batch", MLP, "--budget", "9KiB", "--policies", "none"]) == 3
    assert "nothing fits: batch=1, the smallest, needs" in capsys.readouterr().out


@pytest.mark.slow
def test_the_experiment_agrees_in_small(tmp_path: Path) -> None:
    case = max_exhaustive.Case(MLP, "width=16", "batch", "40KiB", policies=("none",), target="cpu")
    row = max_exhaustive.compare(case, "none", tmp_path)
    assert row["agrees"]
    assert row["compiles"] <= max_exhaustive.MOST_COMPILES
    assert row["value"] == row["largest_compiled"]
    assert {row["value"] - 1, row["value"], row["value"] + 1} <= set(row["exhaustive"])
    assert max_exhaustive.around(30, 1) == [1, 6, 11, 16, 21, 26, 27, 28, 29, 30, 31, 32, 33, 36, 41, 46]


def _need(policy: str, batch: int) -> int:
    target = rk.get_target("cpu")
    workload = rk.Workload(MLP, (("batch", batch),))
    compiled = rk.compile_step(rk.trace(workload.build(rk.get_policy(policy), "cpu"), target))
    record = rk.analyze(compiled, workload=workload, policy=policy)
    assert record.need_bytes is not None
    return record.need_bytes + (record.constant_bytes or 0)


def test_the_report(pool: Pool, tmp_path: Path) -> None:
    cells = _cells("none", "full", "dots_saveable")
    found = _find(pool, tmp_path, cells, 2900, run=sized.dies_above_20, question=Question("batch"))
    found[0] = dataclasses.replace(found[0], odd=(12, 13))
    text = render(Answer(MLP, {"width": 8}, "l4", {"fsdp": 8}, Question("batch"), 2900, "2.83 KiB", tuple(found)))
    lines = text.splitlines()
    assert lines[:2] == [f"Largest batch of {MLP} width=8 for l4 x (fsdp=8)", "within 2.83 KiB"]
    rows = {line.split()[0]: line.split() for line in lines[4:7]}
    # 19 samples in 0.69 s.
    assert rows["none"][1:7] == ["19", "2.83", "KiB", "690.0", "28", "<"]
    assert rows["full"][1].startswith((">=", "20"))
    assert rows["dots_saveable"][1:4] == ["-", "-", "-"]
    assert "dots_saveable: batch=1: the process died of SIGABRT" in " ".join(text.split())
    assert "none: batch=12 needs more than batch=13, so the need is not monotone here" in " ".join(text.split())
    assert max(map(len, lines)) <= 120
