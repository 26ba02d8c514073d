"""One heap trace of XLA's buffer assignment, read once and replayed once; several laid along one time line.

Rules of the trace (XLA `hlo.proto`, HeapSimulatorTrace): ALLOC begins a region of memory for a buffer, SHARE_WITH
puts a buffer into the region of another one (and revives the region when it had ended), FREE takes a buffer out of
its region, which ends with its last buffer.
"""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from remat_kit._errors import RematKitError
from remat_kit._hlo.order import flat_positions

NEXT = "Dump the module again (xla_dump_hlo_as_proto=True) and give the unchanged *after_optimizations.hlo.pb."
_ALLOC, _FREE, _SHARE = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Trace:
    """A replayed heap trace. Regions are numbered from 0 in the order in which they begin.

    Attributes:
      live: bytes alive after each event.
      stretches: (region, owner, first event, event after the last) of each stretch of time in which one logical
        buffer owns a region.
      groups: every logical buffer ever put into each region, the one that began it first.
      instructions, computations: names of each event.
      begins: whether each event begins a buffer.
    """

    live: list[int]
    stretches: list[tuple[int, int, int, int]]
    groups: list[tuple[int, ...]]
    instructions: list[str]
    computations: list[str]
    begins: list[bool]

    @property
    def peak(self) -> int:
        """The most bytes that are alive after any event; 0 without events."""
        return max(self.live, default=0)


@dataclass(slots=True, eq=False)
class _Region:
    """Who has ever been in a region, who is in it now (oldest first), and since when the newest of these owns it.

    A buffer that is freed while it is not the newest stays in `holders` until it comes up.
    """

    number: int
    size: int
    members: dict[int, None]
    holders: list[int]
    since: int


def replayed(trace: Any, sizes: Mapping[int, int]) -> Trace:
    """The replay of one HeapSimulatorTrace with the `sizes` of all logical buffers. Linear in its events.

    Raises RematKitError when an event contradicts those before it.
    """
    regions: list[_Region] = []
    homes: dict[int, _Region] = {}  # where each buffer was put last
    held: dict[int, _Region] = {}  # the same for those that are alive
    stretches: list[tuple[int, int, int, int]] = []
    lives: list[int] = []
    instructions: list[str] = []
    computations: list[str] = []
    begins: list[bool] = []
    live = 0
    for time, event in enumerate(trace.events):
        buffer, kind = event.buffer_id, event.kind
        if buffer not in sizes:
            raise RematKitError(f"the heap trace names the unknown logical buffer {buffer}. {NEXT}")
        if kind == _FREE:
            region = held.pop(buffer, None)
            if region is None:
                raise RematKitError(f"the heap trace frees logical buffer {buffer}, which is not alive. {NEXT}")
            holders = region.holders
            if holders[-1] == buffer:
                stretches.append((region.number, buffer, region.since, time))
                region.since = time
                while holders and held.get(holders[-1]) is not region:
                    holders.pop()
                if not holders:
                    live -= region.size
        elif kind in (_ALLOC, _SHARE):
            if buffer in held:
                raise RematKitError(f"the heap trace begins logical buffer {buffer} while it is alive. {NEXT}")
            if kind == _ALLOC:
                region = _Region(len(regions), sizes[buffer], {}, [], time)
                regions.append(region)
            else:
                region = homes.get(event.share_with_canonical_id)
                if region is None:
                    canonical = event.share_with_canonical_id
                    raise RematKitError(
                        f"the heap trace puts logical buffer {buffer} into {canonical}, which never began. {NEXT}"
                    )
            homes[buffer] = held[buffer] = region
            region.members[buffer] = None
            if region.holders:
                stretches.append((region.number, region.holders[-1], region.since, time))
            else:
                live += region.size
            region.holders.append(buffer)
            region.since = time
        else:
            raise RematKitError(f"the heap trace has an event of the unknown kind {kind}. {NEXT}")
        lives.append(live)
        instructions.append(event.instruction_name)
        computations.append(event.computation_name)
        begins.append(kind != _FREE)
    end = len(lives)
    stretches += [(each.number, each.holders[-1], each.since, end) for each in regions if each.holders]
    return Trace(lives, stretches, [tuple(each.members) for each in regions], instructions, computations, begins)


@dataclass(frozen=True, slots=True)
class Line:
    """Several traces along one time line.

    Attributes:
      traces: in the order given.
      places: for each trace the index in the line of each of its events, and the length of the line at the end.
      live: bytes alive after each event of the line.
      instructions, computations: names of each event.
    """

    traces: tuple[Trace, ...]
    places: tuple[Sequence[int], ...]
    live: list[int]
    instructions: list[str]
    computations: list[str]

    @property
    def peak(self) -> int:
        """The most bytes that are alive after any event; 0 without events."""
        return max(self.live, default=0)


class Schedule:
    """The order in which a module's instructions run, worked out when it is first needed."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._positions: dict[str, int] | None = None

    def line(self, traces: Sequence[Trace]) -> Line:
        """The events of `traces` in one order along the schedule; those of one trace keep theirs."""
        if len(traces) == 1:
            only = traces[0]
            return Line((only,), (range(len(only.live) + 1),), only.live, only.instructions, only.computations)
        keys = [self._keys(trace) for trace in traces]
        numbered = [[(key, number, local) for local, key in enumerate(keys[number])] for number in range(len(traces))]
        places: list[list[int]] = [[] for _ in traces]
        line = Line(tuple(traces), tuple(places), [], [], [])
        live, last = 0, [0] * len(traces)
        for place, (_, number, local) in enumerate(heapq.merge(*numbered)):
            trace = traces[number]
            places[number].append(place)
            live += trace.live[local] - last[number]
            last[number] = trace.live[local]
            line.live.append(live)
            line.instructions.append(trace.instructions[local])
            line.computations.append(trace.computations[local])
        for each in places:
            each.append(len(line.live))
        return line

    def _keys(self, trace: Trace) -> list[tuple[float, int]]:
        """A sort key for each event, ascending. Only the begin of a buffer names its place in the schedule."""
        if self._positions is None:
            self._positions = flat_positions(self._module)
        keys: list[tuple[float, int]] = [(float("inf"), 0)] * len(trace.live)
        coming: float = float("inf")
        for index in range(len(keys) - 1, -1, -1):
            if trace.begins[index]:
                coming = min(coming, self._positions.get(trace.instructions[index], coming))
            keys[index] = (coming, int(trace.begins[index]))
        highest: tuple[float, int] = (-1.0, 0)
        for index, key in enumerate(keys):
            highest = keys[index] = max(highest, key)
        return keys
