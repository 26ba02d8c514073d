"""What is alive when: a replay of the heap trace that XLA's buffer assignment leaves in an HloProto.

Two kinds of allocation make up a program's device memory. Parameters, live-outs and constants exist from the first
kernel to the last (`allocations.py`). The temporary heap is one block (or a few) whose trace says, event by event,
which logical buffer begins and ends (`events.py`). The *live peak* is the largest sum of both. It is at most what the
executable allocates (`argument + output - alias + temp`), because a packed heap has gaps, and it is what explains a
figure, not what decides whether a step fits.

A region of memory holds several logical buffers, one after the other and some at the same time: an instruction that
works in place has its result in the region of its operand. Its owner is the newest buffer in it, whose value is the
one that the memory holds.

Beside two other figures:
  XProf's memory viewer shows, for one memory color, the same bytes at the same event (checked to the byte).
  XLA's `peak_memory_in_bytes` is the sum of all allocations without a trace, thread-locals left out, plus the
    LARGEST trace, whatever its memory: `Heap.xla_peak_bytes`. With one trace on the device it equals
    `peak_bytes`. With several (collective memory beside the default one) it leaves the smaller ones out; with a
    host trace that is larger than the device's it is about host memory. Offloading by itself changes nothing: as
    long as the device trace is the largest, both figures are device memory only.
Thread-local allocations (the scalars of a reduction's combiner) live in registers: they are in neither figure.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

from remat_kit._errors import RematKitError
from remat_kit._hlo.allocations import HOST_COLOR, Fixed, allocations
from remat_kit._hlo.events import NEXT, Line, Schedule, Trace, replayed

_LARGEST = 2**63 - 1


class LiveBuffer(NamedTuple):
    """One stretch of time in which a region of memory holds one value. A tuple, because there are very many.

    Attributes:
      region: number of the region in the program; stretches of one region never overlap.
      buffer_id: the logical buffer that owns the region, -1 when XLA names none. The owner is the newest begun one
        that is still alive in it; of an allocation that lives throughout, the one that is most like its kind.
      bytes: size of the region, which is that of the buffer that began it.
      instruction: name of the instruction that defines the owner, "" when the module does not say.
      instruction_id: its id in the module.
      shape_index: where in the instruction's result, () for the whole of it.
      kind: "temp" (the heap), "parameter", "live_out", "constant", or "fixed" (a single buffer outside the heap).
      color: memory space.
      group: every logical buffer that is ever put into this region, the owner included, the one that began it first;
        their instructions often carry the source name that the owner's lacks.
      parameter: entry parameter number for kind "parameter", else None.
      born, dies: index in the time line of the first event at which the region holds it and of the first one at
        which it does not; 0 and the number of events for what lives throughout.
    """

    region: int
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
      buffers: all that is ever alive on the device, by the time of birth; the bytes of those alive after an event add
        up to `timeline` there.
      live: those of them that are alive at the peak, largest first; their bytes add up to `peak_bytes` (without a
        peak: what lives throughout).
      throughout_bytes: parameters, live-outs and constants (each allocation once, donated ones in one piece).
      throughout: the same by kind; adds up to `throughout_bytes`.
      thread_local_bytes: in no figure, see the module's docstring.
      timeline: device bytes alive after each event, `throughout_bytes` included.
      timeline_instructions: the instruction of each event. For FREE it is the one that defined the buffer.
      timeline_computations: the computation of each event, likewise.
      color_peak_bytes: live peak of each memory color by itself, as XProf shows it.
      host_peak_bytes: live peak of pinned host memory; 0 without offloading; None as for `peak_bytes`.
      host_buffers, host_live: as `buffers` and `live`, for pinned host memory and the events of its own traces.
      xla_peak_bytes: what `memory_analysis().peak_memory_in_bytes` says for this program on a GPU target.
      argument_bytes, output_bytes, alias_bytes, temp_bytes, host_temp_bytes: what `memory_analysis()` says on a GPU
        target, see `allocations.py`. Constants and thread-locals are in none of them.
      num_temp_allocations: how many device allocations make up `temp_bytes`.
    """

    peak_bytes: int | None
    peak_event: int | None
    buffers: tuple[LiveBuffer, ...]
    live: tuple[LiveBuffer, ...]
    throughout_bytes: int
    throughout: dict[str, int]
    thread_local_bytes: int
    timeline: tuple[int, ...]
    timeline_instructions: tuple[str, ...]
    timeline_computations: tuple[str, ...]
    color_peak_bytes: dict[int, int]
    host_peak_bytes: int | None
    host_buffers: tuple[LiveBuffer, ...]
    host_live: tuple[LiveBuffer, ...]
    xla_peak_bytes: int
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    host_temp_bytes: int
    num_temp_allocations: int

    @property
    def need_bytes(self) -> int:
        """What the executable allocates on the device before its first kernel."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes


def replay(proto: Any) -> Heap:
    """The live bytes of the program of `proto`, an HloProto message of `proto.parse`. Linear in the trace.

    Where temporaries are packed into an allocation that has no trace, `peak_bytes`, `peak_event` and
    `host_peak_bytes` are None; what lives throughout is known all the same. The file that XLA:CPU dumps has its trace
    with jaxlib 0.12, so that it is answered in full; what XLA itself makes of it there, `peak_memory_in_bytes`, is
    arguments and results only, since that is computed after the trace was dropped.

    Raises RematKitError when the buffer assignment is missing or contradicts itself.
    """
    assignment, module = proto.buffer_assignment, proto.hlo_module
    if not assignment.buffer_allocations:
        raise RematKitError(f"this HloProto has no buffer assignment. {NEXT}")
    buffers = {buffer.id: buffer for buffer in assignment.logical_buffers}
    sizes = {identifier: buffer.size for identifier, buffer in buffers.items()}
    if len(sizes) != len(assignment.logical_buffers):
        raise RematKitError(f"two logical buffers share one id. {NEXT}")
    if sizes and min(sizes.values()) < 0:
        raise RematKitError(f"the buffer assignment has a size of {min(sizes.values())} bytes. {NEXT}")
    known = allocations(assignment, sizes)
    schedule = Schedule(module)
    colored = [(color, replayed(trace, sizes)) for trace, color in known.traces]

    on_device = [each for each in known.fixed if each.color != HOST_COLOR]
    throughout: dict[str, int] = {}
    for each in on_device:
        throughout[each.kind] = throughout.get(each.kind, 0) + each.size
    throughout_bytes = sum(throughout.values())
    by_color: dict[int, int] = {}
    for each in known.fixed:
        by_color[each.color] = by_color.get(each.color, 0) + each.size
    fixed_bytes = sum(by_color.values())
    traces: dict[int, list[Trace]] = {}
    for color, trace in colored:
        traces.setdefault(color, []).append(trace)
    for color, own in traces.items():
        by_color[color] = by_color.get(color, 0) + schedule.line(own).peak

    stretches = _Stretches(buffers, sizes, module)
    device = schedule.line([trace for color, trace in colored if color != HOST_COLOR])
    host = schedule.line(traces.get(HOST_COLOR, []))
    device_colors = [color for color, _ in colored if color != HOST_COLOR]
    device_buffers = stretches.of(on_device, device, device_colors)
    in_host = [each for each in known.fixed if each.color == HOST_COLOR]
    host_buffers = stretches.of(in_host, host, [HOST_COLOR] * len(host.traces))

    timeline = tuple([throughout_bytes + live for live in device.live])
    peak = max(timeline, default=throughout_bytes)
    if peak > _LARGEST:
        raise RematKitError(f"the program holds {peak} bytes at once. {NEXT}")
    at = timeline.index(peak) if timeline else None
    unknown_device = any(color != HOST_COLOR for _, color in known.unknown)
    unknown_bytes = sum(size for size, _ in known.unknown)
    return Heap(
        peak_bytes=None if unknown_device else peak,
        peak_event=at,
        buffers=device_buffers,
        live=_alive(device_buffers, at),
        throughout_bytes=throughout_bytes,
        throughout=throughout,
        thread_local_bytes=known.thread_local_bytes,
        timeline=timeline,
        timeline_instructions=tuple(device.instructions),
        timeline_computations=tuple(device.computations),
        color_peak_bytes=dict(sorted(by_color.items())),
        host_peak_bytes=None if known.unknown else by_color.get(HOST_COLOR, 0),
        host_buffers=host_buffers,
        host_live=_alive(host_buffers, host.live.index(host.peak) if host.live else None),
        xla_peak_bytes=fixed_bytes + unknown_bytes + max((trace.peak for _, trace in colored), default=0),
        argument_bytes=known.argument_bytes,
        output_bytes=known.output_bytes,
        alias_bytes=known.alias_bytes,
        temp_bytes=known.temp_bytes,
        host_temp_bytes=known.host_temp_bytes,
        num_temp_allocations=known.num_temp_allocations,
    )


def _alive(buffers: Iterable[LiveBuffer], at: int | None) -> tuple[LiveBuffer, ...]:
    """Those that are alive after event `at`, largest first; without events all of them."""
    alive = [each for each in buffers if at is None or each.born <= at < each.dies]
    return tuple(sorted(alive, key=lambda buffer: (-buffer.bytes, buffer.buffer_id)))


class _Stretches:
    """Makes the stretches of one memory after the other, with regions numbered throughout."""

    def __init__(self, buffers: dict[int, Any], sizes: dict[int, int], module: Any) -> None:
        self._buffers = buffers
        self._sizes = sizes
        # Fused computations have no buffers of their own.
        scheduled = [computation for computation in module.computations if not computation.is_fusion_computation]
        self._instructions = {each.id: each for computation in scheduled for each in computation.instructions}
        self._places: dict[int, tuple[str, int, tuple[int, ...]]] = {-1: ("", -1, ())}
        self._next = 0

    def of(self, fixed: list[Fixed], line: Line, colors: list[int]) -> tuple[LiveBuffer, ...]:
        """What is ever alive in one memory, by birth: allocations that live throughout, and traces with their color."""
        found: list[LiveBuffer] = []
        end, sizes, place = len(line.live), self._sizes, self._place
        for region, each in enumerate(fixed, start=self._next):
            owner = self._owner(each)
            found.append(
                LiveBuffer(
                    region, owner, each.size, *place(owner), each.kind, each.color, each.buffers, each.parameter, 0, end
                )
            )
        self._next += len(fixed)
        for trace, places, color in zip(line.traces, line.places, colors, strict=True):
            groups, first = trace.groups, self._next
            for region, owner, born, dies in trace.stretches:
                group = groups[region]
                found.append(
                    LiveBuffer(
                        first + region, owner, sizes[group[0]], *place(owner), "temp", color, group, None,
                        places[born], places[dies],
                    )
                )  # fmt: skip
            self._next += len(groups)
        found.sort(key=attrgetter("born"))
        return tuple(found)

    def _place(self, buffer: int) -> tuple[str, int, tuple[int, ...]]:
        """Name and id of the instruction that defines a buffer, and where in its result."""
        place = self._places.get(buffer)
        if place is None:
            defined = self._buffers[buffer].defined_at
            identifier = defined.instruction_id
            instruction = self._instructions.get(identifier)
            name = instruction.name if instruction else defined.instruction_name
            index = tuple(defined.shape_index)
            if index and min(index) < 0:
                raise RematKitError(f"logical buffer {buffer} is at {list(index)} of a result. {NEXT}")
            place = self._places[buffer] = (name, identifier, index)
        return place

    def _owner(self, fixed: Fixed) -> int:
        """The buffer that stands for an allocation: of a parameter a parameter, else the largest; -1 without any."""
        if len(fixed.buffers) <= 1:
            return next(iter(fixed.buffers), -1)

        def rank(buffer: int) -> tuple[bool, int]:
            instruction = self._instructions.get(self._buffers[buffer].defined_at.instruction_id)
            is_parameter = instruction is not None and instruction.opcode == "parameter"
            return is_parameter == (fixed.kind == "parameter"), self._sizes[buffer]

        return max(fixed.buffers, key=rank)
