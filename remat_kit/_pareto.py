"""Which rows are worth a look: the Pareto front of need against step time, who dominates whom, and ties."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from remat_kit._record import Record

NEED_TOLERANCE = 0.005
"""Needs that differ by less are equal here: allocators round, and autotuning moves temporaries."""
TIME_TOLERANCE = 0.01
"""Step times that differ by less are equal here: a prediction is not that exact. Measured ones: `time_tolerance`."""


@dataclass(frozen=True)
class Standing:
    """Where a row stands among the others.

    Attributes:
      on_front: no other row dominates it.
      dominated_by: the policy of a row that is no worse in need and in time, and better in one; or None.
      ties: the policies of rows whose need and time are both equal to its own, within the tolerances.
    """

    on_front: bool
    dominated_by: str | None = None
    ties: tuple[str, ...] = ()


def step_seconds(records: Sequence[Record]) -> tuple[list[float | None], str]:
    """The step time of each record that they are compared by, and "measured" or "predicted".

    Measured only when all rows that compiled were measured on the target itself; the time on this machine's
    CPU says nothing about a GPU that is not there.
    """
    compiled = [record for record in records if record.need_bytes is not None]
    here = all(record.target == "cpu" or record.target.startswith("attached") for record in compiled)
    if compiled and here and all(record.measured_step_s for record in compiled):
        return [record.measured_step_s.median if record.measured_step_s else None for record in records], "measured"
    return [record.predicted_step_s for record in records], "predicted"


def time_tolerance(records: Sequence[Record]) -> float:
    """The relative difference of step times that counts as none.

    For measured times it is the spread that is usual among them (half of the range from the 10th to the 90th
    percentile, the median of the rows), when that is more than TIME_TOLERANCE. One figure for all rows, since
    with one for each pair dominance could go round in circles.
    """
    _, source = step_seconds(records)
    times = [record.measured_step_s for record in records if record.measured_step_s]
    if source != "measured" or not times:
        return TIME_TOLERANCE
    return max(TIME_TOLERANCE, statistics.median((time.p90 - time.p10) / 2 / time.median for time in times))


def standings(records: Sequence[Record]) -> list[Standing | None]:
    """The standing of each record; None for a record without a need or a time.

    Records are compared with those of the same workload, target and GEMM backend: between those there is no
    choice to make. A policy with XLA's own rematerialization is a choice like any other.
    """
    seconds, _ = step_seconds(records)
    tolerance = time_tolerance(records)
    groups: dict[str, dict[int, tuple[int, float]]] = {}
    for index, (record, second) in enumerate(zip(records, seconds, strict=True)):
        if record.need_bytes is not None and second is not None:
            key = (record.workload, dict(record.options), record.target, dict(record.mesh), record.gemm_backend)
            groups.setdefault(repr(key), {})[index] = (record.need_bytes, second)
    result: list[Standing | None] = [None] * len(records)
    for points in groups.values():
        front: list[int] = []
        # Whatever dominates a row comes before it in this order, see `_dominates`.
        for i in sorted(points, key=lambda i: _weight(points[i], tolerance)):
            better = [j for j in front if _dominates(points[j], points[i], tolerance)]
            if not better:
                front.append(i)
            fastest = min(better, key=lambda j: points[j][::-1], default=None)
            ties = tuple(_name(records, j) for j in points if j != i and _ties(points[i], points[j], tolerance))
            result[i] = Standing(not better, None if fastest is None else _name(records, fastest), ties)
    return result


def _name(records: Sequence[Record], index: int) -> str:
    several = len({record.xla_remat == "off" for record in records}) > 1
    record = records[index]
    return f"{record.policy} (XLA's remat {record.xla_remat})" if several else record.policy


def _dominates(a: tuple[int, float], b: tuple[int, float], tolerance: float) -> bool:
    """`a` is better than `b` in need or time by more than the tolerance, and worse in neither by more.

    With tolerances this is not transitive: a chain of small steps can lead from a slow row to a fast one. So only rows
    of the front are asked whether they dominate another. It has no cycles: `_weight` is lower on the better side.
    """
    need, time = (1 + NEED_TOLERANCE), (1 + tolerance)
    no_worse = a[0] <= b[0] * need and a[1] <= b[1] * time
    better = a[0] * need < b[0] or a[1] * time < b[1]
    return no_worse and better


def _weight(point: tuple[int, float], tolerance: float) -> float:
    """log need + log time in units of their tolerances."""
    need, time = (max(value, 1e-12) for value in point)
    return math.log(need) / math.log1p(NEED_TOLERANCE) + math.log(time) / math.log1p(tolerance)


def _ties(a: tuple[int, float], b: tuple[int, float], tolerance: float) -> bool:
    pairs = ((a[0], b[0], NEED_TOLERANCE), (a[1], b[1], tolerance))
    return all(max(x, y) <= min(x, y) * (1 + allowed) for x, y, allowed in pairs)
