"""The experiments that need a GPU or much time, run in small: their code must not rot until the day they are needed."""

import dataclasses
import json

import pytest
from fuzz import small_seed

from experiments import analyzer_speed, gpu_validation, overhead, policy_sweep, sharded_sweep
from models.config import configure
from models.sharding import check_mesh
from remat_kit import parse_policies
from remat_kit._communication import Collective
from remat_kit._record import dump, load
from remat_kit._step import parse_option
from remat_kit._target import get_target

SMALLEST = ("size=tiny", "layers=1", "dropout=0.0")


@pytest.fixture
def tiny(monkeypatch):
    workloads = {"tiny": ("models.transformer:gpt", {"size": "tiny", "layers": 1, "dropout": 0.0})}
    monkeypatch.setattr(gpu_validation, "WORKLOADS", workloads)


def test_gpu_validation_measures_a_cell_on_whatever_is_attached(tiny):
    row = gpu_validation.run_cell("tiny", "full", rounds=5)
    assert row["attached"]["need_bytes"] == sum(
        sign * row["attached"][f"{part}_bytes"] for part, sign in
        (("argument", 1), ("output", 1), ("alias", -1), ("temp", 1))
    )  # fmt: skip
    assert row["measured_step_s"]["p10"] <= row["measured_step_s"]["median"] <= row["measured_step_s"]["p90"]
    assert row["allocator_peak_bytes"] is None  # the CPU's allocator does not count
    assert json.loads(json.dumps(row, default=str))["policy"] == "full"
    header, _, line = gpu_validation.table([row]).splitlines()
    assert line.count("|") == header.count("|")
    assert "| tiny | full | - |" in line  # this machine's CPU is no described GPU


def test_gpu_validation_keeps_going_after_a_cell_that_fails():
    row = gpu_validation.spawn("GPT naive scanned", "no_such_policy", rounds=5, seconds=120)
    assert "there is no policy 'no_such_policy'" in row["error"]
    assert "no_such_policy" in gpu_validation.table([row])


def test_gpu_validation_reports_a_cell_that_takes_too_long():
    assert "not done within 0 s" in gpu_validation.spawn("GPT naive scanned", "full", rounds=5, seconds=0.1)["error"]


def test_gpu_validation_covers_six_policies_of_three_workloads():
    assert len(gpu_validation.POLICIES) >= 6
    assert len(gpu_validation.WORKLOADS) >= 3


def test_kept_results_render_again(tmp_path, monkeypatch):
    for path in policy_sweep.RESULTS.glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    kept = (policy_sweep.RESULTS / "policy_sweep.md").read_text()
    monkeypatch.setattr(policy_sweep, "RESULTS", tmp_path)
    policy_sweep.render()
    assert (tmp_path / "policy_sweep.md").read_text() == kept


def test_every_kept_row_adds_up_and_agrees_with_xla():
    rows = [row for path in policy_sweep.RESULTS.glob("*.json") if path.stem in policy_sweep.SWEEPS
            for row in load(path.read_text())]  # fmt: skip
    assert len(rows) == sum(len(parse_policies(policies)) for _, _, policies in policy_sweep.SWEEPS.values())
    for row in rows:
        assert row.error is None
        assert row.need_bytes == row.argument_bytes + row.output_bytes - row.alias_bytes + row.temp_bytes
        assert row.live_peak_bytes == row.xla_peak_bytes == sum(row.categories.values())
        assert row.live_peak_bytes <= row.need_bytes


@pytest.mark.slow
def test_overhead_compares_the_sweep_with_bare_compiles(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["overhead.py", "--target", "cpu", "--policies", "full", *SMALLEST])
    overhead.main()  # its exit status is about time, which no test asserts
    result = json.loads(capsys.readouterr().out)
    assert result["cells"] == 1
    assert result["sweep_cpu_s"] > 0
    assert result["bare_cpu_s"] > 0


def test_analyzer_speed_times_every_stage(tmp_path):
    # In a process of its own, where the garbage collector, which runs before each stage, has little to go through.
    (tmp_path / "gpt-22b-small-1.hlo.pb").write_bytes(small_seed())
    row = json.loads(analyzer_speed.in_child(str(tmp_path), "--policy", "small", "--measure", "1"))
    assert row["seconds"].keys() == row["memory_bytes"].keys() == analyzer_speed.stages().keys()
    assert all(0 < seconds < float("inf") for seconds in row["seconds"].values())
    assert row["instructions"] > row["events"] > 0
    lines = analyzer_speed.table(
        {1: row}, {kind: dict.fromkeys(row["seconds"], 1.0) for kind in ("seconds", "memory_bytes")}
    )
    assert len({len(line) for line in lines.splitlines()}) == 1


def test_the_exponent_of_a_power_is_found():
    assert analyzer_speed.exponent([(size, 3 * size**1.5) for size in (10, 20, 40, 80)]) == pytest.approx(1.5)


@pytest.mark.parametrize("name", sharded_sweep.SWEEPS)
def test_sharded_sweeps_have_six_policies_and_meshes_that_divide_the_model(name):
    chosen = sharded_sweep.SWEEPS[name]
    assert len(parse_policies(chosen.policies)) >= 6
    workload, *options = chosen.workload
    given = dict(map(parse_option, options))
    style = workload.partition(":")[2]
    check_mesh(configure(style, **given), dict(get_target(chosen.target, chosen.mesh).mesh))


def test_the_table_of_collectives_has_a_row_for_each_policy(tmp_path, monkeypatch):
    kept = load((policy_sweep.RESULTS / "gpt2-small.json").read_text())[:2]
    one = Collective("all-reduce", "forward", "blocks/mlp", "bf16[8,64]", 1024, 8, 48, False, 2e-3, 5e-4)
    again = dataclasses.replace(one, phase="recompute", again=True, count=24)
    rows = [
        dataclasses.replace(kept[0], collectives=(one,), recompute_hidden_s=0.0, recompute_exposed_s=0.0),
        dataclasses.replace(kept[1], collectives=(one, again), recompute_hidden_s=1e-3, recompute_exposed_s=2e-3),
    ]
    (tmp_path / "gpt-22b-tensor.json").write_text(dump(rows))
    monkeypatch.setattr(sharded_sweep, "RESULTS", tmp_path)
    sharded_sweep.render()
    lines = (tmp_path / "sharded_sweep.md").read_text().splitlines()
    (head,) = [line for line in lines if line.startswith("| policy | all-reduce, forward | all-reduce, recompute |")]
    table = lines[lines.index(head) + 2 :][:2]
    assert [line.split("|")[2:4] for line in table] == [[" 48 ", " 0 "], [" 48 ", " 24 "]]
    assert "1.0 ms" in table[1] or "1.00 ms" in table[1]
