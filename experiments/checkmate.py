"""Checkmate's table of ratios again: √n, greedy and LP rounding against the optimum, for five networks.

    python -m experiments.checkmate [--networks VGG16,...] [--costs flops,...] [--points 8]

Jain et al. (MLSys 2020) give by network the geometric mean over budgets of a heuristic's cost relative to the optimum.
What their published artifact does to get it, and what is done here:

- Budgets: `points` evenly from the least that a forward node needs to the peak of keeping everything, `points` more
  from half to one and a half of the smallest peak found, two at the peak of keeping everything, and one at the largest
  peak of any schedule. Those for which a heuristic has no schedule do not count for it. The artifact takes 32 points
  (64 for VGG), so with fewer the last three count in proportion; and it has the peak of the optimum that was found in
  the place of the budget. Of the two largest graphs budgets below every heuristic's smallest peak are left out, which
  leaves the columns of √n and greedy as they are; that of rounding is over fewer budgets than the artifact's.
- A heuristic's cost at a budget is that of its cheapest schedule within. √n is over articulation points, as the table
  says. Greedy is over all forward nodes: the artifact passes the flag for those where it says articulation points. On
  the three chains there is no difference; the other kinds are in the results too.
- LP rounding: the linear relaxation at 0.9 of the budget, waiting results rounded at 0.1, 0.2, ... 0.9, what runs
  completed, the cheapest within the budget. The relaxation here is tighter than theirs.
- Optimum: theirs from Gurobi with an hour a budget; here `checkmate_solver`, in seconds to minutes with HiGHS, and each
  value comes with a bound. The best schedule found is taken, so ratios can be too small by at most the largest gap in
  the results and never too large. Where a gap is above 2%, the budget does not count: the tightest ones of ResNet50,
  whose integer program is left out. Greedy is at its worst there, so its figure is a little small.
- Costs: theirs were measured, and are not published. `layer_graphs` has three models; results are kept for all of them.
  None was fitted to the table.

Not reached within 0.1 with any of them are four of fifteen figures: √n of MobileNet and ResNet50, √n and greedy of
VGG19. What costs they need can be told from √n, which runs a known part of forward again while the optimum runs little:
forward has to be about 0.2 of a step for MobileNet and ResNet50, 0.4 for VGG16 and 0.8 for VGG19; it is 1/3 where
backward costs twice the forward. The first two would fit times in which the backward of batch normalization and of
depthwise convolutions is slow; that is a guess. The rows of VGG16 and VGG19, which differ by three convolutions, cannot
come from one model of cost.
"""

import argparse
import json
import math
import pathlib
import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from experiments.checkmate_baselines import Schedule, baselines, complete, everything, segments_schedule
from experiments.checkmate_solver import optimal_schedule, relaxed_bound
from experiments.layer_graphs import COSTS, NETWORKS, Graph, network_graph

RESULTS = pathlib.Path(__file__).parent / "results" / "checkmate.json"
PAPER = {
    "MobileNet": {"sqrt": 1.14, "greedy": 1.07, "rounding": 1.06},
    "VGG16": {"sqrt": 1.28, "greedy": 1.06, "rounding": 1.01},
    "VGG19": {"sqrt": 1.54, "greedy": 1.39, "rounding": 1.00},
    "U-Net": {"sqrt": 1.27, "greedy": 1.23, "rounding": 1.03},
    "ResNet50": {"sqrt": 1.20, "greedy": 1.25, "rounding": 1.05},
}
COLUMNS = {"sqrt": "sqrt ap", "greedy": "greedy linear", "rounding": "rounding"}
"""The table's columns, and which of the heuristics here each is."""
TOLERANCE = 0.1
THRESHOLDS = tuple(np.arange(1, 10) / 10)
PROVEN = 0.02
LARGE = 100
"""Above so many nodes budgets below every heuristic's are left out."""
LARGEST = 200
"""Above so many nodes the integer program is left out: rounded relaxations alone are the upper bound."""
DENSE = {"VGG16": 64, "VGG19": 64}
"""The artifact's points; 32 for the others."""


def cheapest(schedules: Iterable[Schedule], budget_bytes: float) -> Schedule | None:
    """The cheapest of the schedules whose peak is within the budget."""
    fitting = (each for each in schedules if each.peak_bytes <= budget_bytes)
    return min(fitting, key=lambda each: each.cost, default=None)


def rounded(graph: Graph, waits: np.ndarray) -> list[Schedule]:
    """Schedules from a relaxation's fractions of what waits, one a threshold."""
    return [complete(graph, waits >= threshold - 1e-9) for threshold in THRESHOLDS]


class Sweep:
    """The optimum and the heuristics of one graph at any budgets.

    `found` gathers every schedule that the relaxation or the program gave, since one that is within a budget is also
    within each larger one.
    """

    def __init__(self, graph: Graph, seconds: float = 60.0, gap: float = 0.01) -> None:
        self.graph = graph
        self.seconds = seconds
        self.gap = gap
        self.once = everything(graph)
        self.heuristics = baselines(graph)
        self.keep_all = segments_schedule(graph, range(graph.forward))
        self.found: list[Schedule] = [self.once]
        self.rounding: list[Schedule] = []
        self.bounds: dict[int, float] = {}

    def solve(self, budget: int) -> None:
        """Finds a bound, the optimum as far as the gap asks, and rounded schedules for a budget."""
        if budget in self.bounds:
            return
        if budget >= self.once.peak_bytes:
            self.bounds[budget] = self.once.cost
            self.rounding.append(self.once)
            return
        bound, waits = relaxed_bound(self.graph, budget)
        self.bounds[budget] = bound
        if waits is None:
            return
        self.found += rounded(self.graph, waits)
        lower = relaxed_bound(self.graph, int(0.9 * budget))[1]
        if lower is not None:
            more = rounded(self.graph, lower)
            self.found += more
            self.rounding += more
        best = cheapest(self.found, budget)
        if len(self.graph) < LARGEST and (best is None or best.cost > bound * (1 + self.gap)):
            answer = optimal_schedule(self.graph, budget, gap=self.gap, seconds=self.seconds)
            self.bounds[budget] = max(bound, answer.bound)
            self.found += [answer.schedule] if answer.schedule is not None else []

    def budgets(self, points: int) -> list[int]:
        """Solves the evenly spread budgets, and then those around the smallest peak found; all of them, ascending."""
        top, low = self.keep_all.peak_bytes, self.graph.smallest_budget()
        chosen = [each for schedules in self.heuristics.values() for each in schedules]
        least = min(each.peak_bytes for each in chosen) if len(self.graph) > LARGE else 0
        spread = [math.ceil(low + (top - low) * step / points) for step in range(points)]
        spread = [budget for budget in spread if budget >= least]
        for budget in reversed(spread):
            self.solve(budget)
        known = [*self.found, *chosen]
        smallest = min(each.peak_bytes for each in known)
        around = [math.ceil(smallest * (0.5 + step / points)) for step in range(points)]
        around = [budget for budget in around if budget >= least]
        largest = max(each.peak_bytes for each in known)
        for budget in reversed([*around, top, largest]):
            self.solve(budget)
        return sorted([*spread, *around, top, top, largest])

    def rows(self, budgets: Sequence[int]) -> list[dict[str, Any]]:
        """By budget that has a schedule: bytes; relative to running all once the optimum, its bound, the heuristics."""
        rows: list[dict[str, Any]] = []
        kinds = {**self.heuristics, "rounding": self.rounding}
        everyone = [*self.found, *(each for schedules in kinds.values() for each in schedules)]
        for budget in budgets:
            best = cheapest(everyone, budget)
            if best is None:
                continue
            costs = {kind: cheapest(schedules, budget) for kind, schedules in kinds.items()}
            rows.append({
                "budget_bytes": budget,
                "optimum": best.cost / self.once.cost,
                "bound": min(self.bounds[budget], best.cost) / self.once.cost,
                **{kind: each.cost / self.once.cost if each else None for kind, each in costs.items()},
            })  # fmt: skip
        return rows


def ratios(network: str, points: int, rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The geometric mean of each heuristic's cost relative to the optimum, over budgets for which it has a schedule.

    The last three rows count as much as they do among the artifact's points.
    """
    found = {}
    weights = [1.0] * (len(rows) - 3) + [points / DENSE.get(network, 32)] * 3
    proven = [
        (row, weight) for row, weight in zip(rows, weights, strict=True) if 1 - row["bound"] / row["optimum"] <= PROVEN
    ]
    for kind in rows[0]:
        if kind in {"budget_bytes", "optimum", "bound"}:
            continue
        counted = [(math.log(row[kind] / row["optimum"]), weight) for row, weight in proven if row[kind] is not None]
        found[kind] = math.exp(sum(log * weight for log, weight in counted) / sum(weight for _, weight in counted))
    return found


def run(network: str, cost: str, points: int, seconds: float = 60.0) -> dict[str, Any]:
    """The sweep of one network with one model of cost, as it is kept."""
    began = time.monotonic()
    sweep = Sweep(network_graph(network, cost), seconds)
    rows = sweep.rows(sweep.budgets(points))
    gaps = [1 - row["bound"] / row["optimum"] for row in rows]
    return {
        "network": network,
        "cost": cost,
        "points": points,
        "nodes": len(sweep.graph),
        "ratios": {kind: round(ratio, 4) for kind, ratio in ratios(network, points, rows).items()},
        "largest_gap": round(max(gap for gap in gaps if gap <= PROVEN), 5),
        "unproven": sum(gap > PROVEN for gap in gaps),
        "seconds": round(time.monotonic() - began, 1),
        "rows": [{key: value if value is None else round(value, 5) for key, value in row.items()} for row in rows],
    }


def summary(sweeps: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each figure of the paper's table: the figure, what each model of cost gives, which are within 0.1."""
    cells = []
    for network, columns in PAPER.items():
        for column, figure in columns.items():
            ours = {each["cost"]: each["ratios"].get(COLUMNS[column]) for each in sweeps if each["network"] == network}
            within = [cost for cost, ratio in ours.items() if ratio is not None and abs(ratio - figure) <= TOLERANCE]
            cells.append({"network": network, "column": column, "paper": figure, "ours": ours, "within": within})
    return cells


def table(sweeps: Sequence[dict[str, Any]]) -> str:
    """The summary as Markdown."""
    lines = [f"| network | column | paper | {' | '.join(COSTS)} |", "|---|---|---|" + "---|" * len(COSTS)]
    for cell in summary(sweeps):
        shown = []
        for cost in COSTS:
            ratio = cell["ours"].get(cost)
            shown.append("-" if ratio is None else f"{ratio:.2f}{'' if cost in cell['within'] else ' (no)'}")
        lines.append(f"| {cell['network']} | {cell['column']} | {cell['paper']:.2f} | {' | '.join(shown)} |")
    return "\n".join(lines)


def main() -> None:
    """Runs the sweeps one after the other and keeps each as soon as it is there; others in the file stay."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--costs", default=",".join(COSTS))
    parser.add_argument("--points", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=60.0, help="for one budget's integer program")
    arguments = parser.parse_args()
    for network in arguments.networks.split(","):
        for cost in arguments.costs.split(","):
            new = run(network, cost, arguments.points, arguments.seconds)
            old = json.loads(RESULTS.read_text())["sweeps"] if RESULTS.exists() else []
            sweeps = [each for each in old if (each["network"], each["cost"]) != (network, cost)] + [new]
            sweeps.sort(key=lambda each: (list(NETWORKS).index(each["network"]), list(COSTS).index(each["cost"])))
            kept = {"tolerance": TOLERANCE, "summary": summary(sweeps), "sweeps": sweeps}
            RESULTS.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
            print(network, cost, new["ratios"], "gap", new["largest_gap"], f"{new['seconds']} s", flush=True)
    print(table(json.loads(RESULTS.read_text())["sweeps"]))


if __name__ == "__main__":
    main()
