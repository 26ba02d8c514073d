"""Decisions for all blocks of a step together: which of each kind's solutions at which block, under limits on bytes."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from remat_kit._plan.milp import Rows, minimize
from remat_kit._plan.solve import Solution

_GAP = 1e-4
"""Relative, of the time that decisions cost: far less than the model is sure of."""
_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Choice:
    """A solution for each block, in the order in which they run.

    Attributes:
      kinds, solutions: of each block.
      repeats: how often each one's scan runs it.
    """

    kinds: tuple[str, ...]
    solutions: tuple[Solution, ...]
    repeats: tuple[int, ...]

    @property
    def seconds(self) -> float:
        """What recomputing and keeping costs each time the loss is differentiated, by the model."""
        return sum(each.seconds * times for each, times in zip(self.solutions, self.repeats, strict=True))

    @property
    def kept_bytes(self) -> int:
        """Bytes on the device that all blocks keep from forward to backward."""
        return sum(each.stack_bytes for each in self.solutions)

    @property
    def backward_bytes(self) -> int:
        """The most that is kept and worked with at once while blocks run backward, the last one first."""
        total = most = 0
        for each in self.solutions:
            total += each.stack_bytes
            most = max(most, total + each.working_bytes)
        return most


@dataclass(frozen=True, slots=True)
class _Run:
    """Blocks of one kind that follow each other: they differ in place only, so counts of solutions say all."""

    kind: str
    count: int
    repeats: int


def choose(
    kinds: Sequence[str],
    repeats: Mapping[str, int],
    frontiers: Mapping[str, Sequence[Solution]],
    kept_bytes: float | None,
    backward_bytes: float | None,
) -> Choice | None:
    """The solutions that take the least time within limits on `Choice.kept_bytes` and `Choice.backward_bytes`.

    `kinds` are those of the blocks in the order in which they run. None when nothing is within the limits. Within a run
    of equal blocks those whose backward works with most come first, since backward reaches them last, when what the
    others keep is free: no other order needs less.
    """
    runs = [_Run(kind, len(list(group)), repeats[kind]) for kind, group in itertools.groupby(kinds)]
    columns = [(number, each) for number, run in enumerate(runs) for each in frontiers[run.kind]]
    width = len(columns)
    unit = float(max(1, sum(max(each.bytes for each in frontiers[run.kind]) * run.count for run in runs)))
    rows: list[np.ndarray] = []
    most: list[float] = []
    counts = np.zeros((len(runs), 2 * width))
    for position, (number, solution) in enumerate(columns):
        run = runs[number]
        counts[number, position] = 1.0
        used = np.zeros(2 * width)  # a solution is used where it is counted
        used[position], used[width + position] = 1.0, -run.count
        rows.append(used)
        most.append(0.0)
        if backward_bytes is not None:
            row = np.zeros(2 * width)
            for other, (earlier, each) in enumerate(columns):
                comes_first = earlier == number and each.working_bytes >= solution.working_bytes
                if earlier < number or comes_first:
                    row[other] = each.stack_bytes / unit
            row[width + position] = solution.working_bytes / unit
            rows.append(row)
            most.append(backward_bytes / unit)
    if kept_bytes is not None:
        rows.append(np.array([*(each.stack_bytes / unit for _, each in columns), *[0.0] * width]))
        most.append(kept_bytes / unit)
    seconds = np.array([each.seconds * runs[number].repeats for number, each in columns])
    cost = np.concatenate([seconds, np.zeros(width)]) + 1e-9 * max(float(seconds.max()), 1e-12)
    upper = np.array([*(float(runs[number].count) for number, _ in columns), *[1.0] * width])
    whole = np.ones(2 * width)
    numbers = [run.count for run in runs]
    limits = [Rows(counts, numbers, numbers), Rows(np.array(rows), most=most)]
    found = minimize(cost, limits, upper, whole, _GAP, _SECONDS)
    if found is None:
        return None
    chosen: list[Solution] = []
    for number in range(len(runs)):
        own = [
            each for position, (of, each) in enumerate(columns) if of == number for _ in range(round(found[position]))
        ]
        chosen += sorted(own, key=lambda each: (-each.working_bytes, each.stack_bytes))
    return Choice(tuple(kinds), tuple(chosen), tuple(repeats[kind] for kind in kinds))
