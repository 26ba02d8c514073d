"""The cheapest schedule of a graph under a budget of memory, as an integer program, with a proof of its gap.

`optimal_schedule` takes any training graph (`layer_graphs.Graph`: cost, bytes and operands of each node, in an order)
and returns the cheapest schedule in stages whose peak stays within a budget, and a lower bound on every such schedule;
`optimum_of_layers` takes forward layers alone.
The space is that of Checkmate (Jain et al., MLSys 2020): in stage t node t runs for the first time; other nodes run
again in the order of the graph; results wait from one stage to the next. The program is another one:

- what may wait or run again is limited to stages in which something later can still read it;
- memory is one row for each node that may run in each stage. A result that waits into the next stage is there from its
  run on, one that waits from the last stage is there until its last use, so both are counted by the variables that
  decide them; one more variable, continuous, for each edge and stage says that the operand is still held when the
  edge's reader runs. There are no variables for freeing, and the relaxation is tight;
- loss and gradients run once (`Graph.forward` says where they begin), and in the forward pass nothing runs again unless
  `forward_again`. On a chain neither is known to lose anything, and tests compare with all schedules of small graphs.
  On a graph with branches a long wait for a gradient or a skip could be worth a second run under a tight budget.

Whatever the program says is replayed (`checkmate_baselines.replay`) before it is returned.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.optimize
import scipy.sparse

from experiments.checkmate_baselines import Schedule, complete
from experiments.layer_graphs import Graph, training_graph


@dataclass(frozen=True)
class Optimum:
    """What is known of the cheapest schedule under a budget.

    Attributes:
      schedule: the cheapest one found; None when none was.
      bound: no schedule of the space within the budget costs less; infinite when there is none.
    """

    schedule: Schedule | None
    bound: float

    @property
    def gap(self) -> float:
        """How much more than the bound the schedule costs, relative to the schedule; 0 when there provably is none."""
        if self.schedule is None:
            return 0.0 if math.isinf(self.bound) else 1.0
        return max(0.0, 1 - self.bound / self.schedule.cost)


def optimal_schedule(
    graph: Graph,
    budget_bytes: int,
    *,
    gap: float = 1e-4,
    seconds: float = 60.0,
    at_most: Schedule | None = None,
    forward_again: bool = False,
) -> Optimum:
    """The cheapest schedule of a graph within a budget, to a relative gap or as far as it is known after some seconds.

    `at_most` is a schedule within the budget that is known; one that costs more is not looked for, and it is returned
    when nothing cheaper is found. Costs and bytes must not be negative.
    """
    return _Program(graph, budget_bytes, forward_again).solve(gap, seconds, at_most)


def optimum_of_layers(
    cost: Sequence[float], size: Sequence[int], inputs: Sequence[Sequence[int]], budget_bytes: int, **options: Any
) -> Optimum:
    """The optimum of a step of training whose forward layers have these costs, bytes and operands (earlier layers).

    The gradient of a layer has its bytes and twice its cost (`layer_graphs.training_graph`); `options` are those of
    `optimal_schedule`.
    """
    names = [str(layer) for layer in range(len(cost))]
    return optimal_schedule(training_graph(names, inputs, cost, size), budget_bytes, **options)


def relaxed_bound(graph: Graph, budget_bytes: int, forward_again: bool = False) -> tuple[float, np.ndarray | None]:
    """(lower bound, fractions of what waits [N, N]) by the program's linear relaxation; (inf, None) if infeasible."""
    return _Program(graph, budget_bytes, forward_again, by_differences=True).relaxation()


class _Program:
    """Columns and rows. `wait[t, v]`, `run[t, v]`: a column's number, or -1 for never and -2 for always.

    `by_differences` writes a row of memory as what differs from the row before: a tenth of the coefficients, and the
    relaxation is solved four times as fast. Branch and bound is faster with whole rows, which are knapsacks.
    """

    def __init__(self, graph: Graph, budget: int, forward_again: bool, by_differences: bool = False) -> None:
        self.graph = graph
        self.forward_again = forward_again
        self.by_differences = by_differences
        self.budget = budget
        self.readers = graph.readers()
        self.count = len(graph)
        self.width = 0
        self.least: list[tuple[list[int], list[float], float]] = []
        self.integer: list[bool] = []
        self.last = self._last_use()
        self._columns()
        self._logic()
        self._memory()

    def _last_use(self) -> list[int]:
        """The last stage in which something may still read each node."""
        last = list(range(self.count))
        for node in reversed(range(self.count)):
            for reader in self.readers[node]:
                last[node] = max(last[node], last[reader] if reader < self.graph.forward else reader)
        return last

    def _column(self, integer: bool) -> int:
        self.width += 1
        self.integer.append(integer)
        return self.width - 1

    def _columns(self) -> None:
        graph, count = self.graph, self.count
        self.wait = np.full((count + 1, count), -1)
        self.run = np.full((count, count), -1)
        for node in range(count):
            self.run[node, node] = -2
            if node >= graph.forward:
                self.wait[node + 1 : self.last[node] + 1, node] = -2
                continue
            begin = node + 1
            if not self.forward_again:
                # It waits for its last reader of the forward pass; from there to backward it waits or does not.
                reader = max((each for each in self.readers[node] if each <= graph.forward), default=node)
                begin = graph.forward + 1
                self.wait[node + 1 : reader + 1, node] = -2
                self.wait[reader + 1 : begin + 1, node] = self._column(True)
            for stage in range(begin, self.last[node] + 1):
                self.run[stage, node] = self._column(True)
                if self.forward_again or stage > begin:
                    self.wait[stage, node] = self._column(True)

    def _at_least(self, terms: Sequence[tuple[int, float]], constant: float, least: float = 0.0) -> None:
        """A row: the sum of terms and the constant is at least `least`; a term is a column, -1 (0) or -2 (1)."""
        columns: dict[int, float] = {}
        for column, factor in terms:
            if column == -2:
                constant += factor
            elif column >= 0:
                columns[column] = columns.get(column, 0.0) + factor
        columns = {column: factor for column, factor in columns.items() if factor}
        low = sum(min(factor, 0.0) for factor in columns.values())
        if constant + low >= least - 1e-12:
            return
        self.least.append((list(columns), list(columns.values()), least - constant))

    def _logic(self) -> None:
        wait, run = self.wait, self.run
        for stage in range(self.count):
            for node in range(stage + 1):
                there = [(int(wait[stage, node]), 1.0), (int(run[stage, node]), 1.0)]
                self._at_least([*there, (int(wait[stage + 1, node]), -1.0)], 0.0)
                if node < stage and wait[stage, node] != -1 and run[stage, node] != -1:
                    self._at_least([(column, -1.0) for column, _ in there], 1.0)
                for reader in self.readers[node]:
                    if reader <= stage:
                        self._at_least([*there, (int(run[stage, reader]), -1.0)], 0.0)

    def _memory(self) -> None:
        """Rows for what is in memory, as parts of the budget, while each node runs."""
        graph, wait, run = self.graph, self.wait, self.run
        sizes = [size / self.budget for size in graph.bytes]
        for stage in range(self.count):
            held = self._held(stage)
            before, used = -1, {}
            for node in range(stage + 1):
                if run[stage, node] == -1:
                    continue
                terms = [(int(wait[stage, node]), sizes[node]), (int(run[stage, node]), sizes[node])]
                terms += [(held[each](node), sizes[each]) for each in range(node)]
                terms += [(int(wait[stage, each]), sizes[each]) for each in range(node + 1, stage)]
                now: dict[int, float] = {}
                for column, size in terms:
                    if column != -1:
                        now[column] = now.get(column, 0.0) + size
                if sum(now.values()) <= 1:
                    continue
                if not self.by_differences:
                    self._at_least([(column, -size) for column, size in now.items()], 1.0)
                    continue
                changed = {column for column in now.keys() | used.keys() if now.get(column) != used.get(column)}
                more = [(column, used.get(column, 0.0) - now.get(column, 0.0)) for column in changed]
                held_now = self._column(False)
                self._at_least([(held_now, 1.0), (before, -1.0), *more], 0.0)
                before, used = held_now, now

    def _held(self, stage: int) -> list[Callable[[int], int]]:
        """For each node, from a later node the column that says that it is still in memory while that one runs."""
        found: list[Callable[[int], int]] = []
        for node in range(stage + 1):
            after = int(self.wait[stage + 1, node])
            readers = [each for each in self.readers[node] if each <= stage and self.run[stage, each] != -1]
            columns: list[tuple[int, int]] = []
            for reader in reversed(readers):
                at = int(self.run[stage, reader])
                if after == -2 or at == -2:
                    after = -2
                elif after == -1:
                    after = at
                else:
                    both = self._column(False)
                    self._at_least([(both, 1.0), (after, -1.0)], 0.0)
                    self._at_least([(both, 1.0), (at, -1.0)], 0.0)
                    after = both
                columns.append((reader, after))
            beyond = int(self.wait[stage + 1, node])
            columns.reverse()

            def column_at(node: int, columns: list[tuple[int, int]] = columns, beyond: int = beyond) -> int:
                return next((column for reader, column in columns if reader >= node), beyond)

            found.append(column_at)
        return found

    def _cost(self) -> tuple[np.ndarray, float]:
        """(cost of each column, cost of what always runs)."""
        cost, constant = np.zeros(self.width), 0.0
        for stage, node in zip(*np.nonzero(self.run != -1), strict=True):
            if self.run[stage, node] == -2:
                constant += self.graph.cost[node]
            else:
                cost[self.run[stage, node]] += self.graph.cost[node]
        return cost, constant

    def _solve(self, integer: bool, options: dict[str, object], most: float | None = None) -> Any:
        cost, constant = self._cost()
        rows = list(self.least)
        if most is not None:
            used = np.flatnonzero(cost)
            rows.append((used.tolist(), (-cost[used] / constant).tolist(), -(most - constant) / constant))
        indices = [each for columns, _, _ in rows for each in columns]
        data = [each for _, factors, _ in rows for each in factors]
        starts = np.cumsum([0] + [len(columns) for columns, _, _ in rows])
        matrix = scipy.sparse.csr_array((data, indices, starts), shape=(len(rows), self.width))
        return scipy.optimize.milp(
            cost / constant,
            constraints=(matrix, np.array([least for _, _, least in rows]), np.inf),
            integrality=np.array(self.integer, float) * integer,
            bounds=scipy.optimize.Bounds(0, 1),
            options=options,
        )

    def _waits(self, values: np.ndarray) -> np.ndarray:
        wait = self.wait[:-1]
        return np.where(wait == -2, 1.0, np.where(wait == -1, 0.0, values[np.maximum(wait, 0)]))

    def solve(self, gap: float, seconds: float, at_most: Schedule | None) -> Optimum:
        constant = self._cost()[1]
        most = at_most.cost * (1 + 1e-9) if at_most is not None else None
        answer = self._solve(True, {"mip_rel_gap": gap, "time_limit": seconds}, most)
        if answer.status == 2:
            return Optimum(None, math.inf) if at_most is None else Optimum(at_most, at_most.cost)
        bound = (1 + (answer.mip_dual_bound or 0.0)) * constant
        if answer.x is None:
            return Optimum(at_most, max(bound, constant))
        found = complete(self.graph, self._waits(answer.x) > 0.5)
        assert found.peak_bytes <= self.budget * (1 + 1e-6), "the program and the replay disagree"
        if at_most is not None and at_most.cost < found.cost:
            found = at_most
        return Optimum(found, min(bound, found.cost))

    def relaxation(self) -> tuple[float, np.ndarray | None]:
        answer = self._solve(False, {})
        if answer.x is None:
            return math.inf, None
        return (1 + answer.fun) * self._cost()[1], self._waits(answer.x)
