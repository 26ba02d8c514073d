"""The search for the largest value of an option with which a step still fits, in few compiles.

`next_value` says which value to compile next, given what came of those before, and `verdict` what is then known. Both
are functions of plain values and compile nothing themselves.

An answer is proved by two compiles: of the value, which fits, and of the next one, which does not. What is taken for
granted is that the need grows with the value: nothing is looked for beyond the first value that does not fit.
"""

import bisect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

UNBOUNDED = 2**20
"""The largest value that is looked at where nothing else bounds it."""
_FARTHEST = 8
"""How many times the largest value known so far the next one may be, as guesses far outside are worth little."""


@dataclass(frozen=True)
class Foreseen:
    """What tracing tells of one value; nothing is compiled for it.

    Attributes:
      value: of the option.
      argument_bytes: on one device.
      live_bytes: what is alive at once by the jaxpr, arguments left out: right in how it grows rather than in itself.
    """

    value: int
    argument_bytes: int
    live_bytes: int


@dataclass(frozen=True)
class Trial:
    """One compiled value: what it needs, constants included, or why there is no such figure."""

    value: int
    need_bytes: int | None
    error: str | None = None


@dataclass(frozen=True)
class Problem:
    """What is looked for: the largest multiple of `step` from `least` to `most` that needs at most `limit_bytes`.

    Attributes:
      least, most: multiples of `step`.
      compiles: how many values may be compiled.
      foreseen: what tracing tells of some values, in ascending order; may be empty.
    """

    least: int
    most: int
    step: int
    limit_bytes: int
    compiles: int = 6
    foreseen: tuple[Foreseen, ...] = ()

    def __post_init__(self) -> None:
        assert 0 < self.least <= self.most
        assert self.least % self.step == 0 == self.most % self.step
        assert self.compiles >= 2
        assert [each.value for each in self.foreseen] == sorted({each.value for each in self.foreseen})


Kind = Literal["proved", "bound", "fails above", "bracket", "nothing fits", "failed"]


@dataclass(frozen=True)
class Verdict:
    """What is known after some compiles.

    Attributes:
      kind: "proved" (`value` fits, `value + step` does not), "bound" (`value` fits and is the largest that was to be
        looked at), "fails above" (`value` fits, `value + step` cannot be compiled), "bracket" (the border is somewhere
        between `value` and `above`), "nothing fits" (the smallest does not), "failed" (the smallest fails to compile).
      value: the largest that fits; None when none is known.
      above: the smallest beyond it that does not fit or cannot be compiled; None when none is known.
      odd: two values of which the smaller one needs more bytes than the larger one, None when there are none.
    """

    kind: Kind
    value: int | None
    above: int | None
    odd: tuple[int, int] | None


def verdict(problem: Problem, trials: Sequence[Trial]) -> Verdict:
    """What `trials` prove."""
    low, high = _bracket(problem, trials)
    odd = _odd(trials)
    last = next((trial for trial in trials if trial.value == high), None)
    if low is None:
        if (last and last.need_bytes is None and high == problem.least) or not any(t.need_bytes for t in trials):
            return Verdict("failed", None, high, odd)
        return Verdict("nothing fits" if high == problem.least else "bracket", None, high, odd)
    if high is None:
        return Verdict("bound" if low == problem.most else "bracket", low, None, odd)
    if high - low > problem.step:
        return Verdict("bracket", low, high, odd)
    assert last is not None
    return Verdict("proved" if last.need_bytes is not None else "fails above", low, high, odd)


def next_value(problem: Problem, trials: Sequence[Trial]) -> int | None:
    """The value to compile next; None when the answer is known, or `problem.compiles` are spent."""
    if len(trials) >= problem.compiles:
        return None
    low, high = _bracket(problem, trials)
    if low == problem.most or high == problem.least or (low and high and high - low <= problem.step):
        return None
    if trials and all(trial.need_bytes is None for trial in trials):
        # Either the value was too large for the compiler, or nothing compiles at all.
        return problem.least
    first = problem.least if low is None else low + problem.step
    last = problem.most if high is None else high - problem.step
    known = [each.value for each in (*problem.foreseen, *trials)]
    if high is None and known:
        last = min(last, max(first, _down(_FARTHEST * max(known), problem.step)))
    guess = _guess(problem, trials, first, last)
    if guess == last and any(trial.value == high and trial.need_bytes is None for trial in trials):
        # What failed there was not the need, of which alone there is a model.
        return _down((first + last) // 2, problem.step)
    if _stuck(problem, trials):
        return _down((first + last) // 2, problem.step)
    far = _slow(problem, trials)
    if low is not None and high is not None:
        far = min(far, (high - low) // (2 * problem.step))
    if far and _fits(problem, trials[-1]):
        return min(max(guess, first + (far - 1) * problem.step), last)
    if far:
        return max(min(guess, last - (far - 1) * problem.step), first)
    return guess


def expected_largest(problem: Problem) -> int:
    """The largest value that is expected to fit by what was traced alone; `problem.least` when none is."""
    return _guess(problem, (), problem.least, problem.most)


def predicted_need(problem: Problem, trials: Sequence[Trial], value: int) -> int | None:
    """What `value` is expected to need by the model that `next_value` uses; None when nothing is known yet."""
    if not problem.foreseen and not any(trial.need_bytes is not None for trial in trials):
        return None
    return round(_model(problem, trials)(value))


def _stuck(problem: Problem, trials: Sequence[Trial]) -> bool:
    """Whether four compiles have not made the bracket half as wide."""
    (low, high), (old_low, old_high) = _bracket(problem, trials), _bracket(problem, trials[:-4])
    if low is None or high is None or old_low is None or old_high is None:
        return False
    return 2 * (high - low) > old_high - old_low


def _slow(problem: Problem, trials: Sequence[Trial]) -> int:
    """How many steps the next value is to be away from the last one at least; 0 for no matter.

    Above 0 where four values in a row came nearer to the border from one side by moves that do not become short.

    A model that is right moves less and less. This one is not: the next move is twice the last one.
    """
    ends = trials[-4:]
    if len(ends) < 4 or len({_fits(problem, trial) for trial in ends}) > 1:
        return 0
    moves = [abs(after.value - before.value) // problem.step for before, after in itertools.pairwise(ends)]
    return 2 * moves[-1] if all(4 * after > before for before, after in itertools.pairwise(moves)) else 0


def _bracket(problem: Problem, trials: Sequence[Trial]) -> tuple[int | None, int | None]:
    """The largest value that fits, and the smallest beyond it that does not."""
    fits = [trial.value for trial in trials if _fits(problem, trial)]
    low = max(fits, default=None)
    high = min(
        (trial.value for trial in trials if not _fits(problem, trial) and trial.value > (low or 0)), default=None
    )
    return low, high


def _fits(problem: Problem, trial: Trial) -> bool:
    return trial.need_bytes is not None and trial.need_bytes <= problem.limit_bytes


def _odd(trials: Sequence[Trial]) -> tuple[int, int] | None:
    known = sorted((trial.value, trial.need_bytes) for trial in trials if trial.need_bytes is not None)
    pairs = ((a, b) for (a, more), (b, less) in itertools.pairwise(known) if more > less)
    return next(pairs, None)


def _guess(problem: Problem, trials: Sequence[Trial], first: int, last: int) -> int:
    """The largest value from `first` to `last` that is expected to fit; `first` when none is."""
    if not problem.foreseen and not any(trial.need_bytes is not None for trial in trials):
        return first
    need = _model(problem, trials)
    number = bisect.bisect_right(range(first, last + 1, problem.step), problem.limit_bytes, key=need)
    return first + max(number - 1, 0) * problem.step


def _model(problem: Problem, trials: Sequence[Trial]) -> Callable[[int], float]:
    """The expected need of a value, exact where it was compiled as far as the points nearest to the limit go."""
    arguments, live = _foreseen(problem)
    known = [(trial.value, trial.need_bytes) for trial in trials if trial.need_bytes is not None]

    def size(value: float) -> float:
        return arguments(value) + live(value)

    if not known:
        return size
    if len(known) == 1:
        ((value, need),) = known
        factor = (need - arguments(value)) / live(value) if live(value) > 0 else 0.0
        if factor <= 0:
            return lambda other: need * other / value
        return lambda other: arguments(other) + factor * live(other)
    if len({size(value) for value, _ in known}) < len(known):
        # By the jaxpr nothing grows, so there is the value alone to go by.
        return _curve(sorted((float(value), float(need)) for value, need in known), problem.limit_bytes, 0.0)
    near, need = min(known, key=lambda point: abs(point[1] - problem.limit_bytes))
    # An eighth of what it is in proportion: the kinks of real programs are smaller.
    least = (need - arguments(near)) / live(near) / 8 if problem.foreseen and live(near) > 0 else 0.0
    curve = _curve(sorted((size(value), float(need)) for value, need in known), problem.limit_bytes, least)
    return lambda value: curve(size(value))


def _curve(points: Sequence[tuple[float, float]], limit: float, least_slope: float) -> Callable[[float], float]:
    """Need against foreseen size, near the limit: the parabola through the three nearest points if it rises
    where it is asked, else the line through two.
    """
    below = [point for point in points if point[1] <= limit]
    above = [point for point in points if point[1] > limit]
    pair = [*below[-1:], *above[:1]] if below and above else (below[-2:] or above[:2])
    slope = _slope(*pair)
    if not (below and above):  # neighbours on a plateau say nothing of what comes after it
        slope = max(slope, least_slope)
    x0, y0 = pair[-1] if below and not above else pair[0]
    if len(points) >= 3:
        three = sorted(sorted(points, key=lambda point: abs(point[1] - limit))[:3])
        xs, ys = zip(*three, strict=True)
        if all(a < b for a, b in itertools.pairwise(ys)) and _rises(xs, ys):
            return lambda x: _newton(xs, ys, x) if xs[0] <= x <= xs[-1] else y0 + slope * (x - x0)
    return lambda x: y0 + slope * (x - x0)


def _rises(xs: Sequence[float], ys: Sequence[float]) -> bool:
    """Whether the parabola through three points rises from the first to the last."""
    first, second = (ys[1] - ys[0]) / (xs[1] - xs[0]), (ys[2] - ys[1]) / (xs[2] - xs[1])
    bend = (second - first) / (xs[2] - xs[0])
    return first - bend * (xs[1] - xs[0]) > 0 and second + bend * (xs[2] - xs[1]) > 0


def _slope(a: tuple[float, float], b: tuple[float, float]) -> float:
    return (b[1] - a[1]) / (b[0] - a[0])


def _foreseen(problem: Problem) -> tuple[Callable[[float], float], Callable[[float], float]]:
    """Argument bytes and live bytes of any value: through what was traced by parabolas; without, the value itself."""
    found = problem.foreseen
    if not found:
        return (lambda value: 0.0), (lambda value: float(value))
    if len(found) == 1:
        only = found[0]
        return (lambda value: float(only.argument_bytes)), (lambda value: only.live_bytes * value / only.value)
    values = [each.value for each in found]
    arguments, live = [each.argument_bytes for each in found], [each.live_bytes for each in found]
    return (lambda value: _through(values, arguments, value)), (lambda value: _through(values, live, value))


def _through(xs: Sequence[int], ys: Sequence[int], x: float) -> float:
    """The parabola (of two points the line) through the three points around `x`, at `x`: exact for polynomials.

    Outside of the points, where a parabola may turn back, it goes on as a line if it would fall.
    """
    if x > xs[-1]:
        slope = (ys[-1] - ys[-2]) / (xs[-1] - xs[-2])
        straight = ys[-1] + slope * (x - xs[-1])
        return max(straight, _newton(xs[-3:], ys[-3:], x))
    place = bisect.bisect_left(xs, x)
    start = max(0, min(place - 2 if place >= 2 else place - 1, len(xs) - 3))
    return _newton(xs[start : start + 3], ys[start : start + 3], x)


def _newton(xs: Sequence[int], ys: Sequence[int], x: float) -> float:
    """The polynomial through the points, by divided differences."""
    table = [float(y) for y in ys]
    for order in range(1, len(xs)):
        for place in range(len(xs) - 1, order - 1, -1):
            table[place] = (table[place] - table[place - 1]) / (xs[place] - xs[place - order])
    total = table[-1]
    for place in range(len(xs) - 2, -1, -1):
        total = total * (x - xs[place]) + table[place]
    return total


def _down(value: int, step: int) -> int:
    return value // step * step
