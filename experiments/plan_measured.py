"""Plans against named policies on this machine's CPU: measured step times, not predicted ones.

    python experiments/plan_measured.py [--only TEXT] [--rounds 15] [--results FILE]

The rates of the CPU are calibrated first by a short benchmark (matrix products, a streaming sum, the start of a small
program), and plans are made for a target with these rates. For each workload and budget, the plan and the fastest named
policy that fits (by predicted time: that is what a user would choose) run in turns in one process, in a random order in
every round. A row has both medians with the 10th and 90th percentile; a loss is listed as a loss. A workload is a
process of its own. Writes experiments/results/plan_measured.json and prints the table.
"""

import argparse
import dataclasses
import json
import math
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "experiments/results/plan_measured.json"
SHARES = (0.05, 0.3, 1.0)
"""Budgets, as shares of the way from the smallest need to that of policy `none`."""
_SMALL = {"size": "tiny", "compute_dtype": "float32"}
WORKLOADS: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT naive scanned": (
        "models.transformer:gpt", {**_SMALL, "layers": 4, "width": 256, "heads": 4, "seq": 256, "batch": 8}
    ),
    "GPT naive unrolled": (
        "models.transformer:gpt",
        {**_SMALL, "layers": 3, "width": 256, "heads": 4, "seq": 256, "batch": 8, "stack": "unroll"},
    ),
    "Llama fused": (
        "models.transformer:llama",
        {**_SMALL, "layers": 4, "width": 256, "heads": 4, "kv_heads": 2, "mlp_width": 512, "seq": 256, "batch": 8,
         "attention": "fused"},
    ),
    "ViT": (
        "models.vision:vit", {**_SMALL, "image": 128, "patch": 8, "layers": 4, "width": 192, "heads": 4, "batch": 4}
    ),
    "U-Net": ("models.unet:unet", {**_SMALL, "image": 64, "width": 32, "batch": 4}),
    "MoE": ("models.moe:moe", {**_SMALL, "layers": 3, "width": 192, "heads": 4, "seq": 256, "batch": 4}),
}  # fmt: skip


def best_of(function: Callable[[], Any], rounds: int = 7) -> float:
    """Seconds of the fastest of several calls, after one that does not count."""
    import jax

    jax.block_until_ready(function())
    found = math.inf
    for _ in range(rounds):
        start = time.perf_counter()
        jax.block_until_ready(function())
        found = min(found, time.perf_counter() - start)
    return found


def calibrated_target() -> Any:
    """This machine's CPU with rates that were measured here, so that every efficiency is 1."""
    import jax
    import jax.numpy as jnp

    from remat_kit import get_target

    side, size = 1536, 32 * 2**20
    square, stream, scalar = jnp.ones((side, side)), jnp.ones(size), jnp.ones(8)
    product = jax.jit(lambda x: x @ x)
    flops = 2 * side**3 / best_of(lambda: product(square))
    added = jax.jit(lambda x: x + 1.0)
    bytes_per_s = 2 * 4 * size / best_of(lambda: added(stream))
    small = jnp.ones(2**16)
    vector = jax.jit(lambda x: jnp.sin(x * 1.5) * jnp.cos(x))
    vector_per_s = 5 * 2**16 / best_of(lambda: vector(small))
    launch = (
        best_of(lambda: added(scalar), rounds=50) / 10
    )  # a kernel inside a program costs less than a call from Python
    target = get_target("cpu")
    chip = dataclasses.replace(
        target.chip,
        flops_per_s=dict.fromkeys(target.chip.flops_per_s, flops),
        vector_flops_per_s=vector_per_s,
        memory_bytes_per_s=bytes_per_s,
        launch_s=launch,
        efficiency={"matmul": 1.0, "memory": 1.0, "host": 1.0, "link": 1.0},
    )
    print(f"  calibrated: {flops:.3g} FLOP/s, {bytes_per_s:.3g} B/s, vector {vector_per_s:.3g}/s", file=sys.stderr)
    return dataclasses.replace(target, chip=chip)


def run(name: str, rounds: int) -> list[dict[str, Any]]:
    """The rows of one workload, in this process."""
    from remat_kit import Workload, compile_step, get_policy, real_args, trace
    from remat_kit._measure import summarize, take_turns
    from remat_kit._plan.make import plan_with
    from remat_kit._plan.search import Planner

    spec, options = WORKLOADS[name]
    target, workload = calibrated_target(), Workload(spec, tuple(options.items()))
    step = workload.build(get_policy("full"), "cpu")
    planner = Planner.of(step, target)
    policies = [planner.named(policy) for policy in planner.policies()]
    floor = plan_with(planner, 1, workload)
    high = next(int(each.need_bytes) for each in policies if each.name == "none")
    rows, compiled, plans = [], {}, {}
    for share in SHARES:
        budget = floor.need_bytes + int(share * (high - floor.need_bytes))
        plan = plan_with(planner, budget, workload)
        best = min((each for each in policies if each.fits(budget)), key=lambda each: each.seconds, default=None)
        if best is None:
            continue
        key = json.dumps(plan.to_json()["blocks"], sort_keys=True)
        plans.setdefault(key, f"plan {len(plans) + 1}")
        if plans[key] not in compiled:
            compiled[plans[key]] = compile_step(trace(dataclasses.replace(step, fn=plan.apply(step.fn)), target))
        if best.name not in compiled:
            compiled[best.name] = compile_step(trace(workload.build(get_policy(best.name), "cpu"), target))
        rows.append(
            {"workload": name, "share": share, "budget_bytes": budget, "need_bytes": plan.need_bytes,
             "plan": plans[key], "policy": best.name, "predicted_s": plan.step_s, "policy_predicted_s": best.seconds}
        )  # fmt: skip
    times: dict[str, list[float]] = {each: [] for each in compiled}
    for each, seconds in take_turns(compiled, real_args(step), rounds=rounds, seconds=240.0):
        if seconds is not None:
            times[each].append(seconds)
    for row in rows:
        for role in ("plan", "policy"):
            row[f"{role}_s"] = dataclasses.asdict(summarize(times[row[role]], "cpu"))
        row["ratio"] = row["plan_s"]["median"] / row["policy_s"]["median"]
        print(_line(row), file=sys.stderr, flush=True)
    return rows


def _line(row: dict[str, Any]) -> str:
    def spread(times: dict[str, Any]) -> str:
        return f"{times['median'] * 1e3:8.1f} ({times['p10'] * 1e3:.1f} to {times['p90'] * 1e3:.1f})"

    verdict = "loss" if row["ratio"] > 1.0 else ""
    return (
        f"{row['workload']:20} {row['budget_bytes'] / 2**20:8.1f} {spread(row['plan_s']):28} "
        f"{spread(row['policy_s']):28} {row['ratio'] - 1:+7.1%} {verdict:5} {row['policy']}"
    )


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as text with the geometric mean of the measured ratios."""
    head = f"{'workload':20} {'budget':>8} {'plan ms, measured':28} {'policy ms, measured':28} {'gain':>7}"
    lines = [head, *map(_line, rows)]
    if rows:
        mean = math.exp(sum(math.log(row["ratio"]) for row in rows) / len(rows))
        lines.append(
            f"geometric mean over {len(rows)} cells: {mean:.3f}; budgets in MiB; median (10th to 90th percentile)"
        )
    return "\n".join(lines)


def main() -> int:
    """0 when the geometric mean is at most 0.97."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="workloads with this in their name")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS)
    parser.add_argument("--one", metavar="WORKLOAD", help="only these rows, as JSON")
    parser.add_argument("--table", action="store_true", help="only print the table of the kept rows")
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(run(arguments.one, arguments.rounds)))
        return 0
    rows = json.loads(arguments.results.read_text()) if arguments.results.exists() else []
    for name in WORKLOADS if not arguments.table else ():
        if arguments.only and arguments.only not in name:
            continue
        command = [sys.executable, __file__, "--one", name, "--rounds", str(arguments.rounds)]
        environment = dict(os.environ, PYTHONPATH=str(ROOT), JAX_PLATFORMS="cpu")
        try:
            found = json.loads(subprocess.check_output(command, cwd=ROOT, env=environment, timeout=7200, text=True))
        except (subprocess.SubprocessError, json.JSONDecodeError) as error:
            print(f"{name} failed: {error}", file=sys.stderr)
            continue
        rows = [row for row in rows if row["workload"] != name] + found
        arguments.results.write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rows))
    return int(not rows or math.exp(sum(math.log(row["ratio"]) for row in rows) / len(rows)) > 0.97)


if __name__ == "__main__":
    sys.exit(main())
