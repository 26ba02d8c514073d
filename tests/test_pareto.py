"""The Pareto front of need against step time, who dominates whom, and ties."""

import random
from dataclasses import replace

from workloads import cells as fake

from remat_kit._pareto import NEED_TOLERANCE, TIME_TOLERANCE, standings, step_seconds, time_tolerance
from remat_kit._record import MeasuredTime, Record


def _rows(**points: tuple[int | None, float | None]) -> list[Record]:
    base = fake.record(fake.cell())
    return [
        replace(base, policy=name, need_bytes=need, predicted_step_s=seconds)
        for name, (need, seconds) in points.items()
    ]


def test_the_front_what_dominates_and_ties() -> None:
    a, b, c, d, e, f = standings(
        _rows(a=(1000, 2.0), b=(2000, 1.0), c=(2000, 2.1), d=(2500, 1.5), e=(2001, 1.001), f=(None, None))
    )
    assert f is None
    assert a
    assert b
    assert c
    assert d
    assert e
    assert (a.on_front, a.dominated_by, a.ties) == (True, None, ())
    assert (b.on_front, b.ties) == (True, ("e",))
    assert (e.on_front, e.ties) == (True, ("b",))
    assert (c.on_front, c.dominated_by) == (False, "b")  # the faster one of a and b
    assert (d.on_front, d.dominated_by) == (False, "b")


def test_some_row_is_always_on_the_front() -> None:
    numbers = random.Random(0)
    for _ in range(200):
        points = {str(n): (numbers.randint(1000, 1030), numbers.uniform(1.0, 1.05)) for n in range(8)}
        assert any(standing and standing.on_front for standing in standings(_rows(**points)))


def test_the_fastest_is_on_the_front_although_small_steps_lead_to_it() -> None:
    # b is within 1% of a in time and c of b, and each needs more: b falls to a, c is 1.07% faster than a and stays.
    a, b, c = standings(_rows(a=(1000, 94.76), b=(1100, 94.33), c=(1200, 93.76)))
    assert a
    assert b
    assert c
    assert (a.on_front, b.dominated_by, c.on_front) == (True, "a", True)


def test_the_front_holds_the_best_need_and_the_best_time() -> None:
    numbers = random.Random(1)
    for _ in range(200):
        points = {str(n): (numbers.randint(1000, 1100), numbers.uniform(1.0, 1.1)) for n in range(8)}
        rows = standings(_rows(**points))
        front = [point for point, row in zip(points.values(), rows, strict=True) if row and row.on_front]
        for axis, tolerance in ((0, NEED_TOLERANCE), (1, TIME_TOLERANCE)):
            best = min(point[axis] for point in points.values())
            assert min(point[axis] for point in front) <= best * (1 + tolerance)


def test_measured_times_count_only_on_the_target_itself() -> None:
    time_s = MeasuredTime(0.5, 0.4, 0.6, "cpu", 3)
    here = [replace(record, measured_step_s=time_s) for record in _rows(a=(1, 1.0), b=(2, 1.0))]
    assert step_seconds(here) == ([0.5, 0.5], "measured")
    there = [replace(record, target="l4") for record in here]
    assert step_seconds(there) == ([1.0, 1.0], "predicted")
    assert step_seconds([here[0], replace(here[1], measured_step_s=None)])[1] == "predicted"


def test_measured_times_tie_within_their_own_spread() -> None:
    noisy = MeasuredTime(0.5, 0.4, 0.6, "cpu", 3)
    here = [replace(record, measured_step_s=noisy) for record in _rows(a=(1000, 1.0), b=(1000, 1.0))]
    here[1] = replace(here[1], measured_step_s=replace(noisy, median=0.58))
    assert time_tolerance(here) > 0.17
    first, second = standings(here)
    assert first
    assert second
    assert (first.ties, second.ties) == (("b",), ("a",))
    assert time_tolerance(_rows(a=(1000, 1.0))) == TIME_TOLERANCE
