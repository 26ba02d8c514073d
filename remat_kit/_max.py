"""The largest value of an option with which a step fits, for each policy: traced first, then few compiles.

Compiles are cells of a sweep: each in a process of its own, kept in the store. One that fails costs its policy that
answer alone, and a search that is stopped goes on where it was.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from remat_kit._border import UNBOUNDED, Foreseen, Problem, Trial, Verdict, next_value, predicted_need, verdict
from remat_kit._cell import Cell, run_cell_and_tell_sources
from remat_kit._errors import RematKitError, WorkloadError
from remat_kit._foresee import Asked, check_option, foresee, room
from remat_kit._pool import Pool, Task
from remat_kit._record import Record
from remat_kit._store import Store
from remat_kit._sweep import Limits, Watcher, sweep

FITS = ("yes", "tight")
_ROOM_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Question:
    """What is looked for. Raises RematKitError when bounds cross or hold no multiple of `multiple_of`.

    Attributes:
      option: of the workload, e.g. "batch".
      at_least, at_most: bounds; None is no upper one.
      multiple_of: of what values are multiples; None to find it out: 128 for an option `seq`, 1 for others, and
        where the workload refuses these, the first number whose multiples it accepts.
      fits: "yes" (JAX's default pool) or "tight" (all that one process can allocate); budget: as a user writes it, in
        the place of `fits`.
      compiles: for each policy, at most.
    """

    option: str
    at_least: int = 1
    at_most: int | None = None
    multiple_of: int | None = None
    fits: str = "yes"
    budget: str | None = None
    compiles: int = 6

    def __post_init__(self) -> None:
        if not self.option.isidentifier():
            raise WorkloadError(f"{self.option!r} is not an option. Name one of the workload's, e.g. batch.")
        for name in ("at_least", "at_most", "multiple_of"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= UNBOUNDED:
                raise RematKitError(f"--{name.replace('_', '-')} is {value}. Give a number from 1 to {UNBOUNDED}.")
        if self.at_most is not None and self.at_most < self.at_least:
            raise RematKitError(
                f"--at-least is {self.at_least} and --at-most {self.at_most}, and nothing is between them. "
                "Give the smaller one first."
            )
        if self.multiple_of and -(-self.at_least // self.multiple_of) * self.multiple_of > self.most:
            raise RematKitError(
                f"no multiple of {self.multiple_of} is from --at-least {self.at_least} to --at-most {self.most}. "
                "Widen the bounds, or give a smaller --multiple-of."
            )
        if self.fits not in FITS:
            raise RematKitError(f"--fits is {self.fits!r}. Give yes (JAX's default pool) or tight (a larger one).")
        if self.compiles < 2:
            raise RematKitError(
                f"--compiles is {self.compiles}. Give at least 2: an answer takes one that fits and one that does not."
            )

    @property
    def most(self) -> int:
        """The largest value that is looked at."""
        return self.at_most or UNBOUNDED


@dataclass(frozen=True)
class Tried:
    """One compiled value, with what was foreseen for it before, and whether the store had it."""

    value: int
    need_bytes: int | None
    predicted_need_bytes: int | None
    predicted_step_s: float | None
    reused: bool
    error: str | None


@dataclass(frozen=True)
class Largest:
    """The answer for one policy.

    Attributes:
      kind: as Verdict has it, and "refused above": the workload accepts no larger value.
      value: the largest that fits, None when none is known; above: the smallest known beyond it that does not.
      step: values are multiples of it; step_reason: what was refused, where it is not the usual one.
      odd: two compiled values of which the smaller needs more: the need is not monotone.
      throughput: items a second at `value`, predicted; items: what they are. None when the step does not say.
      tried: every compiled value, in that order.
      record, above_record: rows of `value` and `above` where these were compiled.
      reason: one sentence: what is proved, or what went wrong.
    """

    policy: str
    gemm_backend: str
    kind: str
    value: int | None
    above: int | None
    step: int
    step_reason: str | None
    odd: tuple[int, int] | None
    items: str | None
    throughput: float | None
    tried: tuple[Tried, ...]
    record: Record | None
    above_record: Record | None
    reason: str

    def to_json(self) -> dict[str, Any]:
        """A JSON object with every field."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Answer:
    """The answers for all policies, and what was asked.

    Attributes:
      limit_bytes: what the step may need; limit: the same in words.
    """

    workload: str
    options: Mapping[str, Any]
    target: str
    mesh: Mapping[str, int]
    question: Question
    limit_bytes: int
    limit: str
    largest: tuple[Largest, ...]

    def to_json(self) -> dict[str, Any]:
        """A JSON object with every field, records included."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Room:
    """Bytes that the step may need, and why these."""

    limit_bytes: int
    words: str


def check_question(
    pool: Pool, question: Question, workload: str, target: str, mesh: str | None, limits: Limits
) -> Room:
    """What the step may need; raises RematKitError when the option is no whole number, or the budget is none.

    In a process of its own, since it imports the workload and may look at the attached device.
    """
    from remat_kit._units import format_bytes

    timeout = min(_ROOM_TIMEOUT_S, limits.timeout_s)
    asked = (target, mesh, question.fits, question.budget)
    tasks = [
        Task("option", check_option, (workload, question.option), timeout, limits.memory_limit),
        Task("room", room, asked, timeout, limits.memory_limit),
    ]
    outcomes = {outcome.name: outcome for outcome in pool.run(tasks)}
    for outcome in outcomes.values():
        if outcome.error:
            raise RematKitError(outcome.error)
    found = outcomes["room"].values[0]
    limit = found["limit_bytes"]
    if question.budget:
        return Room(limit, f"the budget {question.budget}, {format_bytes(limit)}")
    if question.fits == "yes":
        return Room(
            limit,
            f"JAX's default pool, {format_bytes(limit)}; with --fits tight and a larger pool "
            f"{format_bytes(found['capacity_bytes'])}",
        )
    return Room(limit, f"{format_bytes(limit)}, which takes a larger pool than JAX's default")


def find_largest(
    cells: Sequence[Cell],
    question: Question,
    limit_bytes: int,
    store: Store,
    pool: Pool,
    *,
    limits: Limits | None = None,
    run: Callable[[Cell], Any] = run_cell_and_tell_sources,
    look: Callable[[Asked], Any] = foresee,
    retry_failed: bool = False,
    watcher: Watcher | None = None,
) -> list[Largest]:
    """The answer for each of `cells`, which differ in policy or compile options; their own value of the option counts
    for nothing.

    Policies are searched side by side: a round compiles the next value of each that has no answer yet.
    """
    limits = limits or Limits()
    asked = [
        Asked(cell, question.option, question.at_least, question.most, question.multiple_of, limit_bytes)
        for cell in cells
    ]
    tasks = [Task(str(n), look, each, limits.timeout_s, limits.memory_limit) for n, each in enumerate(asked)]
    outcomes = {int(outcome.name): outcome for outcome in pool.run(tasks, limits.jobs)}
    searches = [
        _Search(cell, question, limit_bytes, outcomes[number].values, outcomes[number].error)
        for number, cell in enumerate(cells)
    ]
    while wanted := {number: cell for number, search in enumerate(searches) if (cell := search.wanted()) is not None}:
        rows = sweep(list(wanted.values()), store, pool, limits=limits, run=run, retry_failed=retry_failed,
                     watcher=watcher)  # fmt: skip
        by_key = {row.cell.key: row for row in rows}
        for number, cell in wanted.items():
            row = by_key[cell.key]
            searches[number].add(row.record, row.reused)
    return [search.answer() for search in searches]


class _Search:
    """One policy's search while it runs: what was foreseen, and what was compiled so far."""

    def __init__(self, cell: Cell, question: Question, limit_bytes: int, lines: Sequence[Any], error: str | None):
        self.cell, self.question, self.error = cell, question, error
        self.refused = next((line for line in lines if "refused" in line), None)
        stepped = next((line for line in lines if "step" in line), {})
        self.step = stepped.get("step") or question.multiple_of or 1
        self.why_step = stepped.get("why")
        traced = {
            line["value"]: Foreseen(line["value"], line["argument_bytes"], line["live_bytes"])
            for line in lines
            if "live_bytes" in line
        }
        self.problem: Problem | None = None
        if traced:
            # What was not traced to its end, because it took too long, is compiled without.
            self.error = None
            least = -(-question.at_least // self.step) * self.step
            most = self.refused["accepted"] if self.refused else question.most // self.step * self.step
            foreseen = tuple(traced[value] for value in sorted(traced))
            self.problem = Problem(least, most, self.step, limit_bytes, question.compiles, foreseen)
        self.trials: list[Trial] = []
        self.tried: list[Tried] = []
        self.records: dict[int, Record] = {}

    def wanted(self) -> Cell | None:
        """The cell to compile next."""
        value = next_value(self.problem, self.trials) if self.problem else None
        return None if value is None else self.cell.with_option(self.question.option, value)

    def add(self, record: Record, reused: bool) -> None:
        """The row of the cell that was wanted."""
        assert self.problem is not None
        value = dict(record.options)[self.question.option]
        need = None if record.need_bytes is None or record.error else record.need_bytes + (record.constant_bytes or 0)
        foreseen = predicted_need(self.problem, self.trials, value)
        self.trials.append(Trial(value, need, record.error))
        self.tried.append(Tried(value, need, foreseen, record.predicted_step_s, reused, record.error))
        self.records[value] = record

    def answer(self) -> Largest:
        """What is known in the end."""
        options = self.cell.compile_options
        found = verdict(self.problem, self.trials) if self.problem else Verdict("failed", None, None, None)
        kind: str = found.kind
        above = found.above
        if kind == "bound" and self.refused:
            kind, above = "refused above", self.refused["refused"]
        record = self.records.get(found.value) if found.value is not None else None
        items, count = _items(record)
        throughput = count / record.predicted_step_s if record and count and record.predicted_step_s else None
        return Largest(
            policy=self.cell.policy,
            gemm_backend=options.gemm_backend(self.cell.platform),
            kind=kind,
            value=found.value,
            above=above,
            step=self.step,
            step_reason=self.why_step,
            odd=found.odd,
            items=items,
            throughput=throughput,
            tried=tuple(self.tried),
            record=record,
            above_record=self.records.get(above) if above is not None else None,
            reason=self._reason(kind, found.value, above),
        )

    def _reason(self, kind: str, value: int | None, above: int | None) -> str:
        from remat_kit._units import format_bytes

        name = self.question.option
        needs = {trial.value: format_bytes(trial.need_bytes) for trial in self.trials if trial.need_bytes is not None}
        errors = {trial.value: trial.error for trial in self.trials if trial.error}
        match kind:
            case "proved":
                return f"{name}={above} needs {needs[above]}"  # pyright: ignore[reportArgumentType]
            case "bound":
                return f"{name}={value} is the largest that was looked at"
            case "refused above":
                assert self.refused is not None
                return f"{name}={above} is refused: {self.refused['error']}"
            case "fails above":
                return f"{name}={above} fails: {errors[above]}"  # pyright: ignore[reportArgumentType]
            case "nothing fits":
                return f"nothing fits: {name}={above}, the smallest, needs {needs[above]}"  # pyright: ignore
            case "bracket":
                low = f"{value} fits" if value is not None else "none that fits is known"
                if above is None:
                    return f"not decided after {len(self.trials)} compiles: {low}, and larger ones may"
                what = f"needs {needs[above]}" if above in needs else f"fails: {errors[above]}"
                return f"not decided after {len(self.trials)} compiles: {low}, {above} {what}"
        failed = [f"{name}={trial.value}: {trial.error}" for trial in self.trials]
        return failed[-1] if failed else self.error or "nothing was found"


def _items(record: Record | None) -> tuple[str | None, int | None]:
    """What a step of `record` processes, and how many: what it says itself, else its option `batch` in samples."""
    if record is None:
        return None, None
    for name, count in record.items.items():
        return name, count
    batch = record.options.get("batch")
    return ("samples", batch) if isinstance(batch, int) and not isinstance(batch, bool) else (None, None)
