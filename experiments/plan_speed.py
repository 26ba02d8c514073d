"""How long does planning take, compiles aside, and does it grow slower than the model?

    python experiments/plan_speed.py [--depths 12,96] [--results FILE]

  solve: a block of about a thousand operations (six layers of GPT-2 small as one block), solved under several limits on
    bytes to within the gap to the optimum that plans are allowed; seconds of each, the longest counts.
  growth: a step of unrolled GPT-2 small at several depths, each in RUNS fresh processes in turn, after a model of two
    layers to warm up; the least seconds of each part count. JAX's own trace of the step, which any use of the model
    pays, and beside it what a plan adds to a trace of its own: blocks found and made explicit, graphs, solutions of
    each kind, and the choice among them for every layer under a budget half way.
Seconds are of CPU, so that work beside it does not count. Prints a table, writes experiments/results/plan_speed.json,
and exits with 1 when a solve takes longer than SOLVE_LIMIT_S or the deepest model more than GROWTH_LIMIT times the
planning of the shallowest.
"""

import argparse
import gc
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "experiments/results/plan_speed.json"
TARGET = "h100-sxm-80gb"
SOLVE_LIMIT_S = 1.0
GROWTH_LIMIT = 2.0
RUNS = 5
SHARES = (0.0, 0.1, 0.2, 0.35, 0.5, 0.75)


def planner_of(policy: str, layers: int, where: str | None = None) -> tuple[Any, Any]:
    """A step of unrolled GPT-2 small, and what makes its planner."""
    from remat_kit import Workload, get_policy, get_target
    from remat_kit._plan.search import Planner

    options = {"size": "gpt2-small", "stack": "unroll", "layers": layers}
    step = Workload("models.transformer:gpt", tuple(options.items())).build(get_policy(policy), "cuda")
    return step, lambda: Planner.of(step, get_target(TARGET), where=where)


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    """What a function returns, and seconds of CPU. What was there before is no work of Python's collector meanwhile."""
    gc.collect()
    gc.freeze()
    start = time.process_time()
    return function(), time.process_time() - start


def solves() -> dict[str, Any]:
    """The times of exact optima of a block of about a thousand operations."""
    from remat_kit._plan.solve import GAP, Limits, evaluate, optimum

    _, planner = planner_of("none", 6, where="Transformer")
    (kind,) = planner().found.kinds.values()
    graph = kind.graph
    least, most = evaluate(graph, ()), optimum(graph)
    assert least is not None
    assert most is not None
    found = []
    for share in SHARES:
        limit = least.bytes + (most.bytes - least.bytes) * share
        solution, seconds = timed(lambda limit=limit: optimum(graph, Limits(total_bytes=limit), GAP))
        found.append({"share": share, "seconds": seconds, "found": solution is not None})
    return {"operations": len(graph.ops), "solves": found}


def depth(layers: int) -> dict[str, float]:
    """Seconds of planning one depth, by part."""
    from remat_kit import get_target, trace

    target = get_target(TARGET)
    warm, plan_warm = planner_of("full", 2)
    trace(warm, target)
    plan_warm().frontiers()
    step, make_planner = planner_of("full", layers)
    _, trace_s = timed(lambda: trace(step, target))
    planner, survey_s = timed(make_planner)
    frontiers, solve_s = timed(planner.frontiers)
    low = planner._choice({name: own[0] for name, own in frontiers.items()})
    high = planner._choice({name: own[-1] for name, own in frontiers.items()})

    def pick() -> Any:
        from remat_kit._plan.choose import choose

        kept, backward = ((getattr(low, name) + getattr(high, name)) / 2 for name in ("kept_bytes", "backward_bytes"))
        return planner.blocks_of(choose(planner.kinds, planner.repeats, frontiers, kept, backward))

    _, choose_s = timed(pick)
    return {"layers": layers, "trace_s": trace_s, "survey_s": survey_s, "solve_s": solve_s, "choose_s": choose_s}


def least_of(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    """The least seconds of each part, as other work on the machine only adds to them, and what a plan adds by them."""
    least = {name: min(run[name] for run in runs) for name in runs[0]}
    plan_s = max(0.0, least["survey_s"] - least["trace_s"]) + least["solve_s"] + least["choose_s"]
    return {**least, "plan_s": plan_s}


def table(result: dict[str, Any]) -> str:
    """The result as text."""
    solve = result["solve"]
    longest = max(each["seconds"] for each in solve["solves"])
    lines = [f"{solve['operations']} operations in a block: {longest:.2f} s for the slowest of its solves", ""]
    lines.append(
        f"{'layers':>6} {'trace':>8} {'survey':>8} {'solve':>8} {'choose':>8} {'plan beside trace':>18}   s of CPU"
    )
    for each in result["growth"]:
        parts = " ".join(f"{each[name]:8.2f}" for name in ("trace_s", "survey_s", "solve_s", "choose_s"))
        lines.append(f"{each['layers']:6} {parts} {each['plan_s']:18.2f}")
    first, last = result["growth"][0], result["growth"][-1]
    lines.append(f"{last['layers']} layers against {first['layers']}: {last['plan_s'] / first['plan_s']:.2f} times")
    return "\n".join(lines)


def main() -> int:
    """0 when planning is as fast as it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depths", default="12,96", help="numbers of layers, from few to many")
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS)
    parser.add_argument("--part", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        print(json.dumps(solves() if arguments.part == "solve" else depth(int(arguments.part))))
        return 0
    environment = dict(os.environ, PYTHONPATH=str(ROOT), JAX_PLATFORMS="cpu")

    def part(name: str) -> Any:
        command = [sys.executable, __file__, "--part", name]
        return json.loads(subprocess.check_output(command, cwd=ROOT, env=environment, text=True))

    depths = arguments.depths.split(",")
    runs = [[part(each) for each in depths] for _ in range(RUNS)]
    growth = [least_of(of_depth) for of_depth in zip(*runs, strict=True)]
    result = {"solve": part("solve"), "growth": growth, "runs": runs}
    arguments.results.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))
    longest = max(each["seconds"] for each in result["solve"]["solves"])
    grown = result["growth"][-1]["plan_s"] / result["growth"][0]["plan_s"]
    return int(longest > SOLVE_LIMIT_S or grown > GROWTH_LIMIT)


if __name__ == "__main__":
    sys.exit(main())
