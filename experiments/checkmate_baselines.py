"""Schedules in stages, their replay, and Chen et al.'s two heuristics as Checkmate generalizes them to any graph.

A schedule has a stage for each node of a training graph, in which that node runs for the first time, other nodes run
again, in the order of the graph, and the rest of memory waits (Jain et al., MLSys 2020, section 4.2). It is given by
what waits between stages; what has to run follows.

The heuristics choose *checkpoints* among the forward nodes. What waits then is as in the paper's published artifact,
with which its table was made: a checkpoint from its first run to the end of the step; all of a segment, the nodes from
one checkpoint to the next, in the forward pass until the next one is there, and in backward, where the whole segment
runs again at once, until its last gradient, its gradients included. A leaner execution of the same checkpoints exists,
and so these are bounds on the table's columns and not on what checkpoints can do.
"""

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from experiments.layer_graphs import Graph


@dataclass(frozen=True, eq=False)
class Schedule:
    """A schedule of a graph's N nodes.

    Attributes:
      graph: of which it is one.
      waits: bool [N, N]; stage by node, which results are in memory when a stage begins.
      runs: bool [N, N]; stage by node, which nodes run in it.
    """

    graph: Graph
    waits: np.ndarray
    runs: np.ndarray

    @cached_property
    def cost(self) -> float:
        """Of all runs, in the unit of the graph's costs."""
        return float(self.runs.sum(0) @ np.array(self.graph.cost))

    @cached_property
    def peak_bytes(self) -> int:
        """The most that is in memory at once, each result while its node runs and until its last use."""
        return replay(self.graph, self.steps())[1]

    def steps(self) -> Iterator[tuple[str, int]]:
        """The schedule as ("run", node) and ("free", node), each result freed as early as the stages allow."""
        graph, count = self.graph, len(self.graph)
        readers = graph.readers()
        present: set[int] = set()
        for stage in range(count):
            runs = self.runs[stage]
            after = set(np.flatnonzero(self.waits[stage + 1])) if stage + 1 < count else set()
            last = {
                node: max((reader for reader in readers[node] if runs[reader]), default=-1)
                for node in {*present, *np.flatnonzero(runs)}
            }
            for node in sorted(node for node in present if last[node] < 0 and node not in after):
                present.remove(node)
                yield "free", node
            for node in map(int, np.flatnonzero(runs)):
                present.add(node)
                yield "run", node
                for each in sorted({*graph.inputs[node], node}):
                    if each in present and each not in after and last[each] <= node:
                        present.remove(each)
                        yield "free", each


def replay(graph: Graph, steps: Iterator[tuple[str, int]]) -> tuple[float, int]:
    """(cost, peak bytes) of running steps one after the other. Knows nothing of stages.

    Raises ValueError when an operand is missing, a result is freed that is not there, or a node never ran.
    """
    present: set[int] = set()
    ran: set[int] = set()
    cost, held, peak = 0.0, 0, 0
    for what, node in steps:
        if what == "free":
            if node not in present:
                raise ValueError(f"{graph.names[node]} is freed and not there")
            present.remove(node)
            held -= graph.bytes[node]
            continue
        missing = [graph.names[each] for each in graph.inputs[node] if each not in present]
        if missing:
            raise ValueError(f"{graph.names[node]} runs without {', '.join(missing)}")
        if node not in present:
            present.add(node)
            held += graph.bytes[node]
        ran.add(node)
        cost += graph.cost[node]
        peak = max(peak, held)
    if len(ran) < len(graph):
        raise ValueError(f"never run: {', '.join(graph.names[node] for node in range(len(graph)) if node not in ran)}")
    return cost, peak


def complete(graph: Graph, waits: np.ndarray) -> Schedule:
    """The cheapest schedule in which these results wait, bool [N, N]: what runs is new, needed, or has to wait."""
    count = len(graph)
    waits = np.tril(waits, -1)
    runs = np.eye(count, dtype=bool)
    runs[:-1] |= waits[1:] & ~waits[:-1]
    for stage in range(count):
        for node in range(stage, -1, -1):
            if runs[stage, node]:
                for each in graph.inputs[node]:
                    if not waits[stage, each]:
                        runs[stage, each] = True
    return Schedule(graph, waits, runs)


def segments_schedule(graph: Graph, checkpoints: Collection[int]) -> Schedule:
    """The schedule of these forward nodes as checkpoints; see the module's docstring for what waits when."""
    count, forward = len(graph), graph.forward
    last = count - 1
    waits = np.zeros((count, count), dtype=bool)
    for node, inputs in enumerate(graph.inputs):
        waits[node, list(inputs)] = True
        for each in inputs:
            if each >= forward:
                waits[each + 1 : node + 1, each] = True
    bounds = sorted(checkpoints)
    for node in bounds:
        waits[node + 1 :, node] = True
    for start, end in zip([0, *bounds], [*bounds, forward + 1], strict=True):
        for node in range(start, end):
            waits[node + 1 : end + 1, node] = True
            waits[max(last - end + 1, node + 1) : last - start + 1, node] = True
            if node < forward:
                waits[last - node + 1 : last - start + 1, last - node] = True
    return complete(graph, waits)


def everything(graph: Graph) -> Schedule:
    """The schedule that runs each node once."""
    readers = graph.readers()
    waits = np.zeros((len(graph), len(graph)), dtype=bool)
    for node, after in enumerate(readers):
        waits[node + 1 : max(after, default=node) + 1, node] = True
    return complete(graph, waits)


def articulation_points(graph: Graph) -> list[int]:
    """The forward nodes without which the first and the last one, or input and output, are not connected."""
    found = []
    for node in range(graph.forward):
        # Nodes are in a topological order, so a node separates when no edge leads past it.
        if not any(each < node for later in range(node + 1, graph.forward) for each in graph.inputs[later]):
            found.append(node)
    return found


def sqrt_checkpoints(candidates: list[int]) -> list[int]:
    """Each k-th candidate for k = floor(sqrt(how many there are))."""
    k = math.isqrt(len(candidates))
    return candidates[k - 1 :: k]


def greedy_checkpoints(graph: Graph, candidates: Collection[int], segment_bytes: float) -> list[int]:
    """The candidates at which the bytes of results since the last one exceed a segment's."""
    chosen, gathered = [], 0
    for node in range(graph.forward):
        gathered += graph.bytes[node]
        if node in candidates and gathered > segment_bytes:
            chosen.append(node)
            gathered = 0
    return chosen


def baselines(graph: Graph) -> dict[str, list[Schedule]]:
    """The schedules of each heuristic: √n has one, greedy one for each of 300 sizes of a segment, equal ones left out.

    The sizes are 0 to 3 times the peak of √n over all nodes. `ap` takes articulation points as candidates, `linear` all
    forward nodes; on a chain they are one.
    """
    found = {}
    kinds = {"linear": list(range(graph.forward)), "ap": articulation_points(graph)}
    unit = segments_schedule(graph, sqrt_checkpoints(kinds["linear"])).peak_bytes
    for kind, candidates in kinds.items():
        found[f"sqrt {kind}"] = [segments_schedule(graph, sqrt_checkpoints(candidates))]
        allowed = frozenset(candidates)
        sets = {tuple(greedy_checkpoints(graph, allowed, unit * step / 100)) for step in range(300)}
        found[f"greedy {kind}"] = [segments_schedule(graph, each) for each in sorted(sets)]
    return found
