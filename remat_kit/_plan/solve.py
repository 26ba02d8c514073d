"""The best decisions for one block, as an integer program, and what any decisions come to."""

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import scipy.sparse

from remat_kit._plan.graph import Graph, Step
from remat_kit._plan.milp import Rows, minimize

_TINY = 1e-12
"""Seconds that each decision costs beside its own: of equal answers the one that does least."""
_MOMENTS = 6
_COLUMNS = 3000
"""Moments of a block's backward that the integer program looks at: so many, or fewer (but two) where each operation's
column for each moment would be more than so many columns. What comes of its answer is counted at all moments."""
GAP = 2e-3
"""How far from the optimum a plan's decisions for a block may be, in the time that they cost. For a block of a thousand
operations the proof of half as much takes up to three times as long, and found the same decisions."""
_LEAST_OFFLOADED = 1 << 20
"""Bytes from which a value may be moved to the host; a copy of less is all start-up."""


@dataclass(frozen=True, slots=True)
class Solution:
    """Decisions for one block and what they come to in the model.

    Attributes:
      kept: numbers of the values that are kept on the device; offloaded: those moved to the host.
      again: positions of the operations that run again.
      seconds: what recomputing and keeping costs in one run of the block.
      stack_bytes: kept on the device, of all runs that its scan makes; host_bytes: in host memory.
      working_bytes: the most that recomputed values and gradients hold at once while the block's backward runs.
      is_bare: the block is not checkpointed at all, and autodiff keeps what it keeps.
    """

    kept: frozenset[int]
    offloaded: frozenset[int]
    again: frozenset[int]
    seconds: float
    stack_bytes: int
    host_bytes: int
    working_bytes: int
    is_bare: bool = False

    @property
    def bytes(self) -> int:
        """Kept and working bytes together."""
        return self.stack_bytes + self.working_bytes


def evaluate(graph: Graph, kept: Collection[int], offloaded: Collection[int] = ()) -> Solution | None:
    """What backward computes again and holds when these values are kept; None when it needs what must not run again.

    Inputs of the block that backward or a recomputation takes are kept whatever `kept` says.
    """
    have = {*kept, *offloaded}
    again: set[int] = set()
    taken: set[int] = set()
    waiting = list(graph.needed)
    while waiting:
        number = waiting.pop()
        value = graph.values[number]
        if number in taken or value.free:
            continue
        taken.add(number)
        if number in have or value.is_input:
            continue
        step = graph.steps[number]
        if not step.may_run_again:
            return None
        if step.position not in again:
            again.add(step.position)
            waiting += [each for each in step.inputs if each in graph.values]
    held = {number for number in taken if number in have or graph.values[number].is_input}
    on_host = held & set(offloaded)
    on_device = held - on_host
    seconds = sum(step.again_s for step in graph.ops if step.position in again)
    seconds += sum(graph.values[number].save_s for number in on_device) + _exposed_s(graph, on_host)
    return Solution(
        kept=frozenset(on_device),
        offloaded=frozenset(on_host),
        again=frozenset(again),
        seconds=seconds,
        stack_bytes=graph.repeats * sum(graph.values[number].bytes for number in on_device),
        host_bytes=graph.repeats * sum(graph.values[number].bytes for number in on_host),
        working_bytes=_working_bytes(graph, again, on_device, on_host),
    )


def bare(graph: Graph) -> Solution | None:
    """The block without a checkpoint: autodiff keeps what backward takes, and nothing stands in the way of fusions.

    Out of a scan that is what other decisions are compared with, so it costs no time; in one, each residual is stacked.
    """
    found = evaluate(graph, graph.needed)
    if found is None:
        return None
    if graph.repeats > 1:
        return dataclasses.replace(found, is_bare=True)
    return dataclasses.replace(found, is_bare=True, seconds=0.0, stack_bytes=graph.bare_bytes)


def _exposed_s(graph: Graph, offloaded: Collection[int]) -> float:
    """Seconds that copies to the host and back take beyond the block's forward and backward, which run beside them."""
    copy_s = sum(graph.values[number].bytes for number in offloaded) / graph.host_bytes_per_s
    return max(0.0, copy_s - graph.forward_s) + max(0.0, copy_s - 2 * graph.forward_s)


def _working_bytes(graph: Graph, again: Collection[int], on_device: Collection[int], on_host: Collection[int]) -> int:
    """The most that recomputed values, slices of stacks, host copies and gradients hold in backward at once.

    XLA runs an operation again when its result is first taken: by a linear operation, or by another one that runs again
    for one. Backward goes from the latest linear operation to the earliest, and a value lives from then on to `until`.
    """
    born = _births(graph, again)
    spans: list[tuple[int, int, int]] = []
    for number, value in graph.values.items():
        if value.until < 0:  # only what runs again takes it, in passing
            continue
        if value.resident and value.place[0] in again:
            spans.append((value.until, born[number], value.resident))
        elif number in on_host or (graph.repeats > 1 and number in on_device):
            spans.append((value.until, value.since, value.bytes if number in on_host else value.resident))
    return max(
        gradients + sum(size for until, birth, size in spans if until <= at <= birth)
        for at, gradients in _positions(graph)
    )


def _births(graph: Graph, again: Collection[int]) -> dict[int, int]:
    """Value -> the linear operation at which backward first has it."""
    born = {number: value.since for number, value in graph.values.items()}
    for step in reversed(graph.ops):
        if step.position in again:
            birth = max(born.get(number, -1) for number in step.outputs)
            for number in step.inputs:
                if number in born:
                    born[number] = max(born[number], birth)
    return born


def _positions(graph: Graph) -> Sequence[tuple[int, int]]:
    """Where in the block's backward memory is counted: (position of a linear operation, bytes of gradients then)."""
    last = max((value.until for value in graph.values.values()), default=0)
    return graph.gradients or ((last, 0),)


@dataclass(frozen=True, slots=True)
class Limits:
    """What the decisions for one block have to keep to.

    Attributes:
      copies: how many blocks with these decisions are kept at once, beside the runs of a scan.
      kept_bytes: most bytes that all copies keep; None for no limit.
      total_bytes: most bytes that they keep, with what the block's backward works with.
      price: seconds that each byte of the latter costs.
      save_factor: on the seconds that keeping a value costs.
      offload: whether values may be moved to the host.
    """

    copies: int = 1
    kept_bytes: float | None = None
    total_bytes: float | None = None
    price: float = 0.0
    save_factor: float = 1.0
    offload: bool = False


NO_LIMITS = Limits()


def optimum(graph: Graph, limits: Limits = NO_LIMITS, gap: float = 0.0, seconds: float = 20.0) -> Solution | None:
    """The decisions that take the least time within limits: exact to the relative `gap`, or the best after `seconds`.

    A value is kept or computed again where backward or a recomputation takes it; an operation that runs again takes its
    operands. With these rows alone the program is a minimum cut; the limits make it an integer program (HiGHS). None
    when nothing is within the limits, or backward needs what must not run again.
    """
    return _Program(graph, limits).solve(gap, seconds)


class _Program:
    """Columns: is a value kept, does an operation run again, is a value moved to the host; for each moment of backward
    that is looked at, has an operation run again by then; then the seconds that copies to the host and back take beyond
    what they run beside, and the bytes of the fullest moment.
    """

    def __init__(self, graph: Graph, limits: Limits) -> None:
        self.graph, self.limits = graph, limits
        self.values = [n for n, value in graph.values.items() if not value.free and (value.may_keep or value.is_input)]
        moved = [n for n in self.values if graph.values[n].bytes >= _LEAST_OFFLOADED] if limits.offload else []
        count = len(self.values) + len(graph.ops)
        self.column = {number: position for position, number in enumerate(self.values)}
        self.steps = {step.position: len(self.values) + position for position, step in enumerate(graph.ops)}
        self.host = {number: count + position for position, number in enumerate(moved)}
        self.moments = _moments(graph)
        count += len(moved)
        self.by_then = {
            (moment, step.position): count + number * len(graph.ops) + position
            for number, (moment, _) in enumerate(self.moments)
            for position, step in enumerate(graph.ops)
        }
        self.width = count + len(self.by_then) + 3
        every = limits.copies * graph.repeats * sum(graph.values[number].bytes for number in self.values)
        self.unit = float(max(every, 1))
        self.copies = limits.copies * graph.repeats
        self.second = max([graph.forward_s / 10, *(step.again_s for step in graph.ops)])  # the unit of time

    def solve(self, gap: float, seconds: float) -> Solution | None:
        continuous = len(self.by_then) + 3  # whole by themselves where the decisions are
        whole = np.concatenate([np.ones(self.width - continuous), np.zeros(continuous)])
        rows = [self._needs(), *self._bytes(), *self._copies()]
        found = minimize(self._cost(), rows, self._upper(), whole, gap, seconds)
        if found is None:
            return None
        chosen = [number for number in self.values if found[self.column[number]] > 0.5]
        return evaluate(self.graph, chosen, [number for number, column in self.host.items() if found[column] > 0.5])

    def _cost(self) -> np.ndarray:
        cost = np.full(self.width, _TINY)
        for number in self.values:
            cost[self.column[number]] += self.graph.values[number].save_s * self.limits.save_factor
        for step in self.graph.ops:
            cost[self.steps[step.position]] += step.again_s
        cost[-3:-1] = self.second if self.host else 0.0
        cost[-1] = self.limits.price * self.unit / self.copies
        return cost

    def _upper(self) -> np.ndarray:
        upper = np.ones(self.width)
        for step in self.graph.ops:
            upper[self.steps[step.position]] = float(step.may_run_again)
        upper[-3:-1] = np.inf if self.host else 0.0
        total = self.limits.total_bytes
        upper[-1] = np.inf if total is None else max(0.0, total / self.unit)
        return upper

    def _there(self, number: int, moment: int | None = None) -> list[int]:
        """The columns of which one has to be chosen for a value to be there in backward, or by a moment of it."""
        step = self.graph.steps.get(number)
        again = None
        if step is not None:
            again = self.steps[step.position] if moment is None else self.by_then[moment, step.position]
        return [column for column in (self.column.get(number), self.host.get(number), again) if column is not None]

    def _needs(self) -> Rows:
        """What backward takes is there, and what an operation takes that runs again; the same by each moment."""
        graph = self.graph
        rows: list[tuple[list[int], list[int]]] = [(self._there(number), []) for number in graph.needed]
        for step in graph.ops:
            rows += [(self._there(number), [self.steps[step.position]]) for number in self._operands(step)]
        for moment, _ in self.moments:
            needed = [number for number in graph.needed if graph.values[number].since >= moment]
            rows += [(self._there(number, moment), []) for number in needed]
            for step in graph.ops:
                taker = [self.by_then[moment, step.position]]
                rows += [(self._there(number, moment), taker) for number in self._operands(step)]
        indices = [each for there, taker in rows for each in (*there, *taker)]
        data = [sign for there, taker in rows for sign in (*[1.0] * len(there), *[-1.0] * len(taker))]
        starts = np.cumsum([0] + [len(there) + len(taker) for there, taker in rows])
        matrix = scipy.sparse.csr_array((data, indices, starts), shape=(len(rows), self.width))
        return Rows(matrix, least=[0.0 if taker else 1.0 for _, taker in rows])

    def _operands(self, step: Step) -> list[int]:
        values = self.graph.values
        return [number for number in dict.fromkeys(step.inputs) if number in values and not values[number].free]

    def _bytes(self) -> list[Rows]:
        """What is kept and held at each moment of backward is at most the last column; what is kept is limited."""
        graph = self.graph
        kept = np.zeros(self.width)
        for number, position in self.column.items():
            kept[position] = self.copies * graph.values[number].bytes / self.unit
        matrix = np.tile(kept, (len(self.moments), 1))
        for row, (moment, _) in enumerate(self.moments):
            for number, value in graph.values.items():
                if not 0 <= value.until <= moment:
                    continue
                if value.resident and (moment, value.place[0]) in self.by_then:
                    matrix[row, self.by_then[moment, value.place[0]]] += value.resident / self.unit
                if value.since >= moment and graph.repeats > 1 and number in self.column:
                    matrix[row, self.column[number]] += value.resident / self.unit
                if value.since >= moment and number in self.host:
                    matrix[row, self.host[number]] += value.bytes / self.unit
        matrix[:, -1] = -1.0
        gradients = np.array([size / self.unit for _, size in self.moments])
        found = [Rows(matrix, most=-gradients)]
        if self.limits.kept_bytes is not None:
            most = self.limits.kept_bytes / self.unit
            found.append(Rows(kept[None], most=[most]))
        return found

    def _copies(self) -> list[Rows]:
        """Copies to the host beyond the block's forward, and back beyond its backward; see `_exposed_s`."""
        if not self.host:
            return []
        matrix = np.zeros((2, self.width))
        for number, column in self.host.items():
            matrix[:, column] = self.graph.values[number].bytes / self.graph.host_bytes_per_s / self.second
        matrix[0, -3] = matrix[1, -2] = -1.0
        room = self.graph.forward_s / self.second
        return [Rows(matrix, most=[room, 2 * room])]


def _moments(graph: Graph) -> Sequence[tuple[int, int]]:
    """The moments of backward that the integer program looks at: those that can be the fullest."""
    everything = {step.position for step in graph.ops}
    born = _births(graph, everything)
    count = min(_MOMENTS, max(2, _COLUMNS // max(1, len(everything))))

    def most(place: tuple[int, int]) -> int:
        at, gradients = place
        alive = (
            value.resident for number, value in graph.values.items() if 0 <= value.until <= at <= born.get(number, -1)
        )
        return gradients + sum(alive)

    return sorted(sorted(_positions(graph), key=most, reverse=True)[:count])


def frontier(
    graph: Graph, copies: int = 1, points: int = 8, save_factor: float = 1.0, offload: bool = False
) -> tuple[Solution, ...]:
    """Decisions from the fewest bytes to the least time: none takes more time and as many bytes as another.

    Optima under limits on what `copies` of the block keep, alone and together with what its backward works with.
    """
    fastest = optimum(graph, Limits(copies, save_factor=save_factor, offload=offload))
    if fastest is None:  # nothing may be decided, but autodiff can always keep what backward takes
        return tuple(each for each in [bare(graph)] if each is not None)
    # So dear that bytes decide, and time only between equal ones.
    dear = 1e3 * (fastest.seconds + sum(step.again_s for step in graph.ops)) / max(1, fastest.bytes)
    least = optimum(graph, Limits(copies, price=dear, save_factor=save_factor, offload=offload)) or fastest
    barest = evaluate(graph, ()) or least  # keeps the least, though what it computes again may hold more at once
    found = {fastest, least, barest} | {each for each in [bare(graph)] if each is not None}
    for kind, lowest in (("total_bytes", least), ("kept_bytes", barest)):
        low, high = _bytes_of(lowest, copies, kind), _bytes_of(fastest, copies, kind)
        for step in range(points):
            limit = low + (high - low) * (step / points) ** 2  # the first bytes buy the most
            if limit < high:
                bounds = Limits(copies, save_factor=save_factor, offload=offload, **{kind: limit})
                found |= {each for each in [optimum(graph, bounds, gap=GAP)] if each is not None}
    return tuple(sorted(_not_dominated(found), key=lambda each: (each.stack_bytes, each.working_bytes)))


def _bytes_of(solution: Solution, copies: int, kind: str) -> int:
    return copies * solution.stack_bytes + (solution.working_bytes if kind == "total_bytes" else 0)


def _not_dominated(solutions: Collection[Solution]) -> list[Solution]:
    """Those that no other one equals or beats in all figures; of equal ones, one."""
    figures = {
        (each.seconds, each.stack_bytes, each.working_bytes): each
        for each in sorted(solutions, key=lambda each: each.is_bare)
    }

    def is_beaten(ours: tuple[float, int, int]) -> bool:
        return any(theirs != ours and all(a <= b for a, b in zip(theirs, ours, strict=True)) for theirs in figures)

    return [each for ours, each in figures.items() if not is_beaten(ours)]
