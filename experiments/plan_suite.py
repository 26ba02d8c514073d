"""Plans against named policies: workloads x budgets x targets, each cell confirmed by the compiler.

    python experiments/plan_suite.py [--only TEXT] [--targets h100-sxm-80gb,a100-sxm-80gb] [--results FILE]

For each workload and target every named policy is compiled, then a plan for each budget: the smallest need that is
reached, shares of the way from there to the need of policy `none`, and that need. In each cell: the plan's compiled
need, whether it is within the budget, its predicted step time beside that of the fastest named policy that fits, how
many programs were compiled for it, and whether the plan writes loops over blocks out, which it may. A workload on a
target is a process of its own: one that the compiler kills costs its own cells. Rows are kept as they come
(experiments/results/plan_suite.json) and the table is printed from them. Exits with 1 when a plan is over its budget,
slower than a named policy that fits, or took more than 5 compiles, and when a workload failed.
"""

import argparse
import dataclasses
import json
import math
import os
import pathlib
import subprocess
import sys
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "experiments/results/plan_suite.json"
TARGETS = ("h100-sxm-80gb", "a100-sxm-80gb")
SHARES = (0.0, 0.03, 0.1, 0.3, 0.6, 1.0)
"""Budgets, as shares of the way from the smallest need to that of policy `none`."""
WORKLOADS: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT naive scanned": ("models.transformer:gpt", {"size": "gpt2-small"}),
    "GPT naive unrolled": ("models.transformer:gpt", {"size": "gpt2-small", "layers": 6, "stack": "unroll"}),
    "Llama fused": (
        "models.transformer:llama",
        {"size": "llama-1b", "layers": 8, "heads": 16, "kv_heads": 4, "seq": 4096, "batch": 4, "attention": "fused",
         "vocabulary": 32000},
    ),
    "ViT 1024x1024": ("models.vision:vit", {"size": "vit-b16", "batch": 4}),
    "U-Net": ("models.unet:unet", {"size": "base", "levels": 3}),
    "MoE": ("models.moe:moe", {"size": "gpt2-small-8e"}),
}  # fmt: skip
LIMIT_S = 3 * 3600


def run(name: str, target_name: str) -> list[dict[str, Any]]:
    """The rows of one workload on one target, in this process."""
    from remat_kit import Workload, get_policy, get_target
    from remat_kit._plan.make import REUSED, plan_with
    from remat_kit._plan.search import Planner

    spec, options = WORKLOADS[name]
    target = get_target(target_name)
    workload = Workload(spec, tuple(options.items()))
    planner = Planner.of(workload.build(get_policy("full"), target.chip.platform), target, unroll=True)
    policies = [planner.named(policy) for policy in planner.policies()]
    for each in policies:
        print(f"  {each.name:34} {each.need_bytes / 2**30:8.3f} GiB {each.seconds * 1e3:8.2f} ms", file=sys.stderr)
    floor = plan_with(planner, 1, workload)
    none = next(each for each in policies if each.name == "none")
    high = int(none.need_bytes) if none.compiled else target.chip.memory_bytes
    rows = []
    for share in SHARES:
        budget = floor.need_bytes + int(share * (high - floor.need_bytes))
        before = planner.compiles
        plan = plan_with(planner, budget, workload)
        fitting = [each for each in policies if each.fits(budget)]
        best = min(fitting, key=lambda each: each.seconds, default=None)
        said = [each.predicted_need_bytes / each.need_bytes - 1 for each in plan.tried
                if each.predicted_need_bytes and each.need_bytes]  # fmt: skip
        rows.append(
            {
                "workload": name,
                "target": target_name,
                "share": share,
                "budget_bytes": budget,
                "need_bytes": plan.need_bytes,
                "fits": plan.fits,
                "step_s": plan.step_s,
                "recompute_flops": plan.recompute_flops,
                "unrolled": bool(plan.unrolled),
                "policy": best.name if best else None,
                "policy_need_bytes": best.need_bytes if best else None,
                "policy_step_s": best.seconds if best else None,
                "ratio": plan.step_s / best.seconds if best else None,
                "compiles": sum(not each.name.endswith(REUSED) for each in plan.tried),
                "new_compiles": planner.compiles - before,
                "prediction_errors": said,
                "holds": list(plan.reasons) if not plan.fits else [],
                "tried": [dataclasses.asdict(each) for each in plan.tried],
                "kept": [
                    f"{kept.how} {kept.name} {kept.shape}" for block in plan.blocks[:1] for kept in block.kept[:8]
                ],
            }
        )
        print(_line(rows[-1]), file=sys.stderr, flush=True)
    return rows


def _line(row: dict[str, Any]) -> str:
    policy = f"{row['policy_step_s'] * 1e3:8.2f}  {row['policy']}" if row["policy"] else f"{'-':>8}  none fits"
    ratio = f"{row['ratio'] - 1:+7.1%}" if row["ratio"] else f"{'-':>7}"
    return (
        f"{row['workload']:20} {row['target']:14} {row['budget_bytes'] / 2**30:8.3f} {row['need_bytes'] / 2**30:8.3f} "
        f"{'fits' if row['fits'] else 'OVER':4} {row['step_s'] * 1e3:8.2f} {ratio} {row['compiles']:2} "
        f"{'unrolled' if row['unrolled'] else '':8}  {policy}"
    )


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as text, with the geometric mean of the ratios and where nothing was gained."""
    names = f"{'workload':20} {'target':14} {'budget':>8} {'need':>8}"
    head = f"{names}      {'step ms':>8} {'gain':>7} {'n':>2} {'loops':8}  {'policy ms':>8}"
    lines = [head, *map(_line, rows)]
    ratios = [row["ratio"] for row in rows if row["ratio"]]
    if ratios:
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        lines.append(f"geometric mean over {len(ratios)} cells: {mean - 1:+.1%}; GiB, GiB, compiled; times predicted")
        lines.append(f"nothing gained (less than 0.5%) in {sum(ratio > 0.995 for ratio in ratios)} of them")
    return "\n".join(lines)


def main() -> int:
    """0 when all was planned and each plan keeps to its budget, is no slower than a named policy that fits, and took at
    most 5 compiles.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="workloads with this in their name")
    parser.add_argument("--targets", default=",".join(TARGETS))
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS)
    parser.add_argument("--one", nargs=2, metavar=("WORKLOAD", "TARGET"), help="only these rows, as JSON")
    parser.add_argument("--table", action="store_true", help="only print the table of the kept rows")
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(run(*arguments.one)))
        return 0
    rows = json.loads(arguments.results.read_text()) if arguments.results.exists() else []
    failed = False
    for target in arguments.targets.split(",") if not arguments.table else ():
        for name in WORKLOADS:
            if arguments.only and arguments.only not in name:
                continue
            command = [sys.executable, __file__, "--one", name, target]
            environment = dict(os.environ, PYTHONPATH=str(ROOT), JAX_PLATFORMS="cpu")
            try:
                done = subprocess.run(
                    command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, timeout=LIMIT_S, text=True
                )
                if done.returncode:
                    raise subprocess.SubprocessError(f"it ended with status {done.returncode}")
                found = json.loads(done.stdout.splitlines()[-1])  # the solver may print before it
            except (subprocess.SubprocessError, json.JSONDecodeError, IndexError) as error:
                print(f"{name} on {target} failed: {error}", file=sys.stderr)
                failed = True
                continue
            rows = [row for row in rows if (row["workload"], row["target"]) != (name, target)] + found
            arguments.results.write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rows))
    bad = [row for row in rows if not row["fits"] or row["compiles"] > 5 or (row["ratio"] or 0) > 1.0]
    return int(failed or bool(bad))


if __name__ == "__main__":
    sys.exit(main())
