"""What is alive when: a replay of the heap trace that XLA's buffer assignment leaves in an HloProto.

Two kinds of allocation make up a program's device memory. Parameters, live-outs and constants exist from the first
kernel to the last. The temporary heap is one block (or a few) whose trace says, event by event, which logical
buffer begins and ends. The *live peak* is the largest sum of both. It is at most what the executable allocates
(`argument + output - alias + temp`), because a packed heap has gaps, and it is what explains a figure, not what
decides whether a step fits.

Rules of the trace (XLA `hlo.proto`, HeapSimulatorTrace): ALLOC begins a region of memory for a buffer, SHARE_WITH
puts a buffer into the region of another one (and revives the region when it had ended), FREE takes a buffer out of
its region, which ends with its last buffer.

Beside two other figures:
  XProf's memory viewer shows, for one memory color, the same bytes at the same event (checked to the byte).
  XLA's `peak_memory_in_bytes` is the sum of all allocations without a trace, thread-locals left out, plus the
    LARGEST trace, whatever its memory: `Heap.xla_peak_bytes`. With one trace on the device it equals
    `peak_bytes`. With several (collective memory beside the default one) it leaves the smaller ones out; with a
    host trace that is larger than the device's it is about host memory. Offloading by itself changes nothing: as
    long as the device trace is the largest, both figures are device memory only.
Thread-local allocations (the scalars of a reduction's combiner) live in registers: they are in neither figure.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from remat_kit._errors import RematKitError
from remat_kit._hlo.order import flat_positions

HOST_COLOR = 5
"""XLA:GPU's memory space of pinned host memory. Every other color (0 default, others for collectives) is on the
device."""

_ALLOC, _FREE, _SHARE = 0, 1, 2
_NEXT = "Dump the module again (xla_dump_hlo_as_proto=True) and give the unchanged *after_optimizations.hlo.pb."


@dataclass(frozen=True, slots=True)
class LiveBuffer:
    """One region of memory that is alive at the live peak.

    Attributes:
      buffer_id: the logical buffer that it was made for, -1 when XLA names none.
      bytes: its size.
      instruction: name of the instruction that defines the buffer, "" when the module does not say.
      instruction_id: its id in the module.
      shape_index: where in the instruction's result, () for the whole of it.
      kind: "temp" (the heap), "parameter", "live_out", "constant", or "fixed" (a single buffer outside the heap).
      color: memory space.
      group: every logical buffer that is ever put into this region, the defining one included; their
        instructions often carry the source name that the first one lacks.
      parameter: entry parameter number for kind "parameter", else None.
      born, dies: index in the time line of the first event at which it is alive and of the first one at which it is
        not; 0 and the number of events for what lives throughout.
    """

    buffer_id: int
    bytes: int
    instruction: str
    instruction_id: int
    shape_index: tuple[int, ...]
    kind: str
    color: int
    group: tuple[int, ...]
    parameter: int | None
    born: int
    dies: int


@dataclass(frozen=True, slots=True)
class Heap:
    """The live bytes of a compiled program along its schedule. Bytes; "device" is every memory color but the host's.

    Attributes:
      peak_bytes: the live peak on the device, or None when the program packs temporaries without leaving a trace of
        them. Exact with at most one device trace. With several, whose events are merged along the
        schedule, the end of a buffer is only known up to the next event of its own trace, and the later bound is
        taken: the figure is then an upper bound, at most the sum of the traces' peaks.
      peak_event: index into `timeline` of the first event that reaches the peak; None without a trace.
      peak_instruction, peak_computation: the instruction that the compiler was placing then, "" without a trace.
      live: what is alive at the peak, largest first; their bytes add up to `peak_bytes` (without a peak: what lives
        throughout).
      throughout_bytes: parameters, live-outs and constants (each allocation once, donated ones in one piece).
      throughout: the same by kind; adds up to `throughout_bytes`.
      thread_local_bytes: in no figure, see the module's docstring.
      timeline: device bytes alive after each event, `throughout_bytes` included.
      timeline_instructions: the instruction of each event. For FREE it is the one that defined the buffer.
      color_peak_bytes: live peak of each memory color by itself, as XProf shows it.
      host_peak_bytes: live peak of pinned host memory; 0 without offloading; None as for `peak_bytes`.
      xla_peak_bytes: what `memory_analysis().peak_memory_in_bytes` says for this program on a GPU target.
    """

    peak_bytes: int | None
    peak_event: int | None
    peak_instruction: str
    peak_computation: str
    live: tuple[LiveBuffer, ...]
    throughout_bytes: int
    throughout: dict[str, int]
    thread_local_bytes: int
    timeline: tuple[int, ...]
    timeline_instructions: tuple[str, ...]
    color_peak_bytes: dict[int, int]
    host_peak_bytes: int | None
    xla_peak_bytes: int


@dataclass(slots=True)
class _Region:
    """A region of one heap trace: who is in it now, who has ever been, and when it lived last."""

    root: int
    members: dict[int, None]
    holders: int = 0
    born: int = 0
    dies: int = 0


class _Replay:
    """The regions of one memory along a sequence of events; `live` is the sum of those that are alive."""

    def __init__(self, sizes: dict[int, int]) -> None:
        self.sizes = sizes
        self.homes: dict[int, _Region] = {}
        self.holding: set[int] = set()
        self.live = 0
        self.time = 0

    def step(self, event: Any) -> None:
        """Applies one event. Raises RematKitError when it contradicts those before it."""
        buffer, kind = event.buffer_id, event.kind
        if buffer not in self.sizes:
            raise RematKitError(f"the heap trace names the unknown logical buffer {buffer}. {_NEXT}")
        if kind == _FREE:
            if buffer not in self.holding:
                raise RematKitError(f"the heap trace frees logical buffer {buffer}, which is not alive. {_NEXT}")
            self.holding.remove(buffer)
            region = self.homes[buffer]
            region.holders -= 1
            if not region.holders:
                self.live -= self.sizes[region.root]
                region.dies = self.time
        elif kind in (_ALLOC, _SHARE):
            if buffer in self.holding:
                raise RematKitError(f"the heap trace begins logical buffer {buffer} while it is alive. {_NEXT}")
            if kind == _ALLOC:
                region = _Region(buffer, {})
            elif event.share_with_canonical_id in self.homes:
                region = self.homes[event.share_with_canonical_id]
            else:
                canonical = event.share_with_canonical_id
                raise RematKitError(
                    f"the heap trace puts logical buffer {buffer} into {canonical}, which never began. {_NEXT}"
                )
            self.homes[buffer] = region
            self.holding.add(buffer)
            region.members[buffer] = None
            if not region.holders:
                self.live += self.sizes[region.root]
                region.born = self.time
            region.holders += 1
        else:
            raise RematKitError(f"the heap trace has an event of the unknown kind {kind}. {_NEXT}")
        self.time += 1

    def alive(self) -> list[_Region]:
        """The regions that are alive now, each once."""
        regions = {id(region): region for buffer in self.holding for region in (self.homes[buffer],)}
        return list(regions.values())


def replay(proto: Any) -> Heap:
    """The live bytes of the program of `proto`, an HloProto message of `proto.parse`. Linear in the trace.

    Where temporaries are packed into an allocation that has no trace, `peak_bytes`, `peak_event` and
    `host_peak_bytes` are None; what lives throughout is known all the same. The file that XLA:CPU dumps has its trace
    with jaxlib 0.12, so that it is answered in full; what XLA itself makes of it there, `peak_memory_in_bytes`, is
    arguments and results only, since that is computed after the trace was dropped.

    Raises RematKitError when the buffer assignment is missing or contradicts itself.
    """
    assignment = proto.buffer_assignment
    if not assignment.buffer_allocations:
        raise RematKitError(f"this HloProto has no buffer assignment. {_NEXT}")
    sizes = {buffer.id: buffer.size for buffer in assignment.logical_buffers}
    if len(sizes) != len(assignment.logical_buffers):
        raise RematKitError(f"two logical buffers share one id. {_NEXT}")
    colors = {allocation.index: allocation.color for allocation in assignment.buffer_allocations}
    negative = [size for size in sizes.values() if size < 0]
    negative += [allocation.size for allocation in assignment.buffer_allocations if allocation.size < 0]
    if negative:
        raise RematKitError(f"the buffer assignment has a size of {negative[0]} bytes. {_NEXT}")
    by_color: dict[int, list[Any]] = {}
    traced = _traced_allocations(assignment)
    for trace, allocation in zip(assignment.heap_simulator_traces, traced, strict=True):
        by_color.setdefault(colors[allocation], []).append(trace)

    module = proto.hlo_module
    fixed, unknown, thread_local_bytes = _fixed_allocations(assignment, frozenset(traced))
    device = [trace for color, traces in by_color.items() if color != HOST_COLOR for trace in traces]
    throughout: dict[str, int] = {}
    fixed_by_color: dict[int, int] = {}
    for kind, allocation in fixed:
        if allocation.color != HOST_COLOR:
            throughout[kind] = throughout.get(kind, 0) + allocation.size
        fixed_by_color[allocation.color] = fixed_by_color.get(allocation.color, 0) + allocation.size
    throughout_bytes = sum(throughout.values())

    events = list(_merged(device, module))
    run = _Replay(sizes)
    timeline = []
    for event in events:
        run.step(event)
        timeline.append(throughout_bytes + run.live)
    peak = max(timeline, default=throughout_bytes)
    at = timeline.index(peak) if timeline else None

    color_peaks = {
        color: fixed_by_color.get(color, 0) + _peak_of(by_color.get(color, []), module, sizes)
        for color in sorted({*by_color, *fixed_by_color})
    }
    largest = max((_peak_of([trace], module, sizes) for trace in assignment.heap_simulator_traces), default=0)
    lives = _live_at(events, at, sizes, assignment, module, fixed)
    unknown_device = any(allocation.color != HOST_COLOR for allocation in unknown)
    unknown_host = len(unknown) > 0
    return Heap(
        peak_bytes=None if unknown_device else peak,
        peak_event=at,
        peak_instruction=events[at].instruction_name if at is not None else "",
        peak_computation=events[at].computation_name if at is not None else "",
        live=lives,
        throughout_bytes=throughout_bytes,
        throughout=throughout,
        thread_local_bytes=thread_local_bytes,
        timeline=tuple(timeline),
        timeline_instructions=tuple(event.instruction_name for event in events),
        color_peak_bytes=color_peaks,
        host_peak_bytes=None if unknown_host else color_peaks.get(HOST_COLOR, 0),
        xla_peak_bytes=sum(fixed_by_color.values()) + sum(allocation.size for allocation in unknown) + largest,
    )


def _traced_allocations(assignment: Any) -> list[int]:
    """The index of the allocation that each heap trace packs: the one that holds the trace's buffers.

    The index that the trace itself names is that of an earlier numbering in some versions of XLA (jaxlib 0.11.2, of
    the host's trace); it serves where no allocation holds the buffers.
    """
    known = {allocation.index for allocation in assignment.buffer_allocations}
    holder = {
        each.logical_buffer_id: allocation.index
        for allocation in assignment.buffer_allocations
        for each in allocation.assigned
    }
    found = []
    for trace in assignment.heap_simulator_traces:
        homes = (holder[event.buffer_id] for event in trace.events if event.buffer_id in holder)
        allocation = next(homes, trace.buffer_allocation_index)
        if allocation not in known:
            raise RematKitError(f"a heap trace is of the unknown allocation {allocation}. {_NEXT}")
        found.append(allocation)
    return found


def _fixed_allocations(assignment: Any, traced: frozenset[int]) -> tuple[list[tuple[str, Any]], list[Any], int]:
    """Allocations that live throughout with their kind, those of which only the size is known, thread-local bytes."""
    fixed: list[tuple[str, Any]] = []
    unknown: list[Any] = []
    thread_local_bytes = 0
    for allocation in assignment.buffer_allocations:
        if allocation.index in traced:
            continue
        if allocation.is_thread_local:
            thread_local_bytes += allocation.size
        elif allocation.is_entry_computation_parameter:
            fixed.append(("parameter", allocation))
        elif allocation.maybe_live_out:
            fixed.append(("live_out", allocation))
        elif allocation.is_constant:
            fixed.append(("constant", allocation))
        elif len(allocation.assigned) <= 1:
            fixed.append(("fixed", allocation))
        else:
            unknown.append(allocation)
    return fixed, unknown, thread_local_bytes


def _merged(traces: list[Any], module: Any) -> Iterator[Any]:
    """The events of several traces in one order along the schedule; those of one trace keep theirs."""
    if len(traces) == 1:
        return iter(traces[0].events)
    positions = flat_positions(module)
    keyed = [list(zip(_keys(trace, positions), trace.events, strict=True)) for trace in traces]
    return (event for _, event in heapq.merge(*keyed, key=lambda pair: pair[0]))


def _keys(trace: Any, positions: dict[str, int]) -> list[tuple[float, int]]:
    """A sort key for each event, ascending. Only the begin of a buffer names its place in the schedule."""
    keys: list[tuple[float, int]] = [(float("inf"), 0)] * len(trace.events)
    coming: float = float("inf")
    for index in range(len(trace.events) - 1, -1, -1):
        event = trace.events[index]
        if event.kind != _FREE:
            coming = min(coming, positions.get(event.instruction_name, coming))
        keys[index] = (coming, 0 if event.kind == _FREE else 1)
    highest: tuple[float, int] = (-1.0, 0)
    for index, key in enumerate(keys):
        highest = keys[index] = max(highest, key)
    return keys


def _peak_of(traces: list[Any], module: Any, sizes: dict[int, int]) -> int:
    run, peak = _Replay(sizes), 0
    for event in _merged(traces, module):
        run.step(event)
        peak = max(peak, run.live)
    return peak


def _live_at(
    events: list[Any], at: int | None, sizes: dict[int, int], assignment: Any, module: Any, fixed: list[tuple[str, Any]]
) -> tuple[LiveBuffer, ...]:
    """What is alive on the device after event `at`, largest first."""
    instructions = {
        instruction.id: (instruction.name, instruction.opcode)
        for computation in module.computations
        for instruction in computation.instructions
    }
    buffers = {buffer.id: buffer for buffer in assignment.logical_buffers}
    live: list[LiveBuffer] = []

    def add(
        root: int, size: int, kind: str, group: tuple[int, ...], parameter: int | None, born: int, dies: int
    ) -> None:
        place = buffers[root].defined_at
        name = place.instruction_name or instructions.get(place.instruction_id, ("", ""))[0]
        index, color = tuple(place.shape_index), buffers[root].color
        live.append(
            LiveBuffer(root, size, name, place.instruction_id, index, kind, color, group, parameter, born, dies)
        )

    for kind, allocation in fixed:
        group = tuple(assigned.logical_buffer_id for assigned in allocation.assigned)
        if allocation.color == HOST_COLOR:
            continue
        parameter = allocation.parameter_number if kind == "parameter" else None
        if not group:
            color = allocation.color
            live.append(LiveBuffer(-1, allocation.size, "", -1, (), kind, color, (), parameter, 0, len(events)))
            continue
        if any(buffer not in buffers for buffer in group):
            raise RematKitError(f"allocation {allocation.index} holds an unknown logical buffer. {_NEXT}")

        def rank(buffer: int, kind: str = kind) -> tuple[bool, int]:
            opcode = instructions.get(buffers[buffer].defined_at.instruction_id, ("", ""))[1]
            return ((opcode == "parameter") == (kind == "parameter"), sizes[buffer])

        add(max(group, key=rank), allocation.size, kind, group, parameter, 0, len(events))

    run = _Replay(sizes)
    regions: list[tuple[_Region, int]] = []
    pending: dict[int, int] = {}
    for index, event in enumerate(events):
        run.step(event)
        if index == at:
            regions = [(region, region.born) for region in run.alive()]
            pending = {id(region): len(events) for region, _ in regions}
        elif at is not None and index > at and event.kind == _FREE:
            region = run.homes[event.buffer_id]
            if not region.holders and pending.get(id(region)) == len(events):
                pending[id(region)] = index
    for region, born in regions:
        add(region.root, sizes[region.root], "temp", tuple(region.members), None, born, pending[id(region)])
    return tuple(sorted(live, key=lambda buffer: (-buffer.bytes, buffer.buffer_id)))
