"""Offloaded values of a compiled program: how long their copies take, how much of that the step waits for, and why.

A value goes to the host by one copy and comes back by another. Between them is its window: the time that the link has
for other values, and in which the value takes no device memory. Times are those of the roofline (`predict`), a model.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from remat_kit._hlo.flow import Flow
from remat_kit._hlo.module import Computation, Instruction, Module
from remat_kit._hlo.roofline import Prediction, Row
from remat_kit._phase import BACKWARD, RECOMPUTE
from remat_kit._units import format_bytes, format_seconds

_LEAST = 0.01
"""Waiting for a smaller share of the step is not worth a sentence."""


@dataclass(frozen=True)
class Trip:
    """One value, or one of each turn of a loop, that goes to the host and comes back.

    Attributes:
      out, back: XLA's names of the copies; back is "" when nothing on the device reads it again.
      bytes: of one value; count: how many there are, the turns of the loop.
      link_s: what both copies of one value take on the link.
      exposed_s: what of it the step waits for.
      window_s: from the end of the copy out to the start of the copy back; of a loop's values, that of the one made
        last, which is the shortest. None where the program does not tell, or nothing comes back.
      longest_window_s: of a loop's values, that of the one made first; else equal to window_s.
      late: the copy out starts when backward has begun, so the value was on the device all through forward.
      loop: the loop that makes it, "" outside of loops. One turn is one layer.
    """

    out: str
    back: str
    bytes: int
    count: int
    link_s: float
    exposed_s: float
    window_s: float | None
    longest_window_s: float | None
    late: bool
    loop: str


@dataclass(frozen=True)
class Kept:
    """The last layers' values kept on the device: how many values, what that saves, what it costs."""

    values: int
    saves_s: float
    costs_bytes: int


@dataclass(frozen=True)
class Overlap:
    """All offloaded values of a program, in the order in which they are made.

    Attributes:
      step_s: of the whole step, predicted.
    """

    trips: tuple[Trip, ...]
    step_s: float

    @property
    def link_s(self) -> float:
        """What all copies take on the link, one behind the other."""
        return sum(trip.link_s * trip.count for trip in self.trips)

    @property
    def exposed_s(self) -> float:
        """What of it the step waits for."""
        return sum(trip.exposed_s * trip.count for trip in self.trips)

    def keep_last(self, budget_bytes: int | None = None) -> Kept:
        """What keeping values on the device saves, from the last one made on, until one's copies are hidden anyway.

        The last value made is the first that backward wants, so it has the shortest window. No more than `budget_bytes`
        are kept. Values whose copies out come late are on the device already and are passed over. An estimate: what a
        copy that is gone leaves of the link to others is not counted.
        """
        on_time = [trip for trip in reversed(self.trips) if not trip.late]
        values, saves, costs = 0, 0.0, 0
        for _, group in itertools.groupby(on_time, key=lambda trip: trip.loop or trip.out):
            layer = list(group)  # all that one turn of a loop, or one copy, takes to the host
            exposed = sum(trip.exposed_s for trip in layer)
            cost = sum(trip.bytes for trip in layer)
            turns = count = layer[0].count
            if budget_bytes is not None:
                count = min(count, max(0, budget_bytes - costs) // cost)
            if exposed <= 0 or not count:
                break
            values, saves, costs = values + count * len(layer), saves + count * exposed, costs + count * cost
            if count < turns:
                break
        return Kept(values, saves, costs)

    def advice(self, budget_bytes: int | None = None) -> tuple[str, ...]:
        """What to do about it, one sentence each; () where nothing is offloaded or what is waited for is small."""
        said = []
        late = [trip for trip in self.trips if trip.late]
        if late:
            total = sum(trip.bytes * trip.count for trip in late)
            count, saves = sum(trip.count for trip in late), sum(trip.exposed_s * trip.count for trip in late)
            said.append(
                f"of the offloaded values, {format_bytes(total)} ({_values(count)}) leave for the host only when "
                "backward has begun, as XLA orders this program: until then they are on the device, and offloading "
                "them does not lower the need at the end of forward. Scan the layers (jax.lax.scan, nn.scan, "
                "nnx.scan), since a loop copies what a turn makes in that turn; or keep these values: saves "
                f"{format_seconds(saves)}"
            )
        if self.exposed_s >= _LEAST * self.step_s:
            waits = (
                f"the step waits {format_seconds(self.exposed_s)} of {format_seconds(self.step_s)} (predicted) for "
                f"copies to and from the host, which take {format_seconds(self.link_s)} of the link"
            )
            kept = self.keep_last(budget_bytes)
            if kept.values:
                waits += (
                    f"; keep the last {_values(kept.values)} on the device: saves {format_seconds(kept.saves_s)}, "
                    f"costs {format_bytes(kept.costs_bytes)}"
                )
            said.append(waits)
        return tuple(said)


def overlap(module: Module, prediction: Prediction) -> Overlap:
    """The offloaded values of `module`, with the times of `prediction`, which is of the same module.

    Linear in the program but for the ways of the copied values. A copy to the host that nothing on the device reads
    again, as of an offloaded state, is no trip and is left out.
    """
    clock = _Clock(module, {row.name: row for row in prediction.rows})
    flow = Flow(module)
    backs = {copy.start.id: copy for copy in clock.copies if not copy.is_out}
    outs = sorted((copy for copy in clock.copies if copy.is_out), key=clock.place)
    trips = []
    for out in outs:
        readers = flow.uses(out.value).readers
        found = [backs[number] for number in readers if number in backs]
        if found:
            trips.append(clock.trip(out, min(found, key=clock.place)))
    return Overlap(tuple(trips), prediction.seconds)


@dataclass(frozen=True, slots=True, eq=False)
class _Copy:
    """One copy over the host link: what issues it, the host's value for one that goes out, and when it runs, in
    seconds from the start of its computation."""

    start: Instruction
    value: Instruction
    row: Row
    is_out: bool
    home: Computation
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class _Loop:
    """A loop that the entry runs: when it begins, how long a turn takes, how many there are."""

    name: str
    begin_s: float
    turn_s: float
    turns: int


class _Clock:
    """When things run: the roofline's compute stream and host link, with the times of its rows."""

    def __init__(self, module: Module, rows: Mapping[str, Row]) -> None:
        self._module, self._rows = module, rows
        self._totals: dict[int, float] = {}
        self._backward: dict[int, float] = {}  # when the first loop or product of backward runs in a computation
        self._loops: dict[int, _Loop] = {}  # by the id of the body
        self.copies: list[_Copy] = []
        wrapped = {called.id for each in module.instructions.values() if each.opcode == "async-start"
                   for called in each.called}  # fmt: skip
        for computation in module.computations.values():
            if not computation.is_fusion:
                self._run(computation, is_wrapped=computation.id in wrapped)

    def place(self, copy: _Copy) -> float:
        """When it runs first, in seconds from the start of the step, as far as that is known."""
        loop = self._loops.get(copy.home.id)
        return copy.begin_s + (loop.begin_s if loop else 0.0)

    def trip(self, out: _Copy, back: _Copy) -> Trip:
        """What becomes of a value that `out` takes to the host and `back` brings back."""
        shortest = longest = None
        entry = self._module.entry.id
        there, here = self._loops.get(out.home.id), self._loops.get(back.home.id)
        if out.home is back.home:
            shortest = longest = max(0.0, back.begin_s - out.end_s)
        elif there and here and there.turns == here.turns:
            # Backward takes first what was made last.
            begin, end, others = here.begin_s + back.begin_s, there.begin_s + out.end_s, there.turns - 1
            shortest = max(0.0, begin - end - others * there.turn_s)
            longest = max(0.0, begin - end + others * here.turn_s)
        begun = self._backward.get(out.home.id)
        late = begun is not None and out.begin_s >= begun
        if there and (begun := self._backward.get(entry)) is not None:
            late = late or there.begin_s >= begun
        return Trip(
            out=out.row.name,
            back=back.row.name,
            bytes=out.row.bytes,
            count=out.row.executions,
            link_s=out.row.seconds + back.row.seconds,
            exposed_s=out.row.exposed_s + back.row.exposed_s,
            window_s=shortest,
            longest_window_s=longest,
            late=late,
            loop=there.name if there else "",
        )

    def _is_work(self, instruction: Instruction) -> bool:
        """A loop or a product, of which backward has some. XLA clears memory for gradients at any time before."""
        row = self._rows.get(instruction.name)
        return instruction.opcode == "while" or (row is not None and row.flops > 0)

    def _run(self, computation: Computation, is_wrapped: bool) -> None:
        """Runs one computation once. Those that it calls were run before."""
        now = link = 0.0
        pending: dict[int, Row] = {}
        for each in computation.schedule:
            if each.phase in (BACKWARD, RECOMPUTE) and self._is_work(each):
                self._backward.setdefault(computation.id, now)
            if each.opcode == "while":
                turns = 1 if each.trip_count is None else each.trip_count
                for called in each.called[:1]:
                    turn = self._totals.get(called.id, 0.0)
                    if computation is self._module.entry:
                        self._loops[called.id] = _Loop(each.name, now, turn, turns)
                    now += turns * turn
                continue
            if each.opcode in ("call", "conditional"):
                now += max((self._totals.get(called.id, 0.0) for called in each.called), default=0.0)
                continue
            if each.opcode.endswith("-done"):
                row = pending.pop(each.operands[0].id, None) if each.operands else None
                now += row.exposed_s if row else 0.0
                continue
            inner = each.called[0].root if each.opcode == "async-start" and each.called else each
            row = self._rows.get(inner.name)
            if row is None:
                continue
            beside = each.opcode.endswith("-start") and row.kind in ("host_copy", "collective")
            if row.kind == "host_copy" and not is_wrapped:
                begin = max(link, now) if beside else now
                link = begin + row.seconds
                done = next((user for user in each.users if user.opcode == "copy-done"), inner)
                is_out = any(leaf.is_host for _, leaf in done.shape.leaves())
                self.copies.append(_Copy(each, done, row, is_out, computation, begin, link))
            if beside:
                pending[each.id] = row
            else:
                now += row.exposed_s
        self._totals[computation.id] = now + sum(row.exposed_s for row in pending.values())


def _values(count: int) -> str:
    return "1 value" if count == 1 else f"{count} values"
