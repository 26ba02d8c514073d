"""The allocations of XLA's buffer assignment: which live throughout, which hold a heap trace, what they add up to.

XLA's `memory_analysis()` on a GPU target is a sum over these allocations, so it can be had from the file alone:
`argument_size` are the entry parameters, `output_size` what may be live out, `alias_size` what is both,
`temp_size` what is neither, nor a constant, nor thread-local. Each counts an allocation once and in full.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from remat_kit._errors import RematKitError
from remat_kit._hlo.events import NEXT

HOST_COLOR = 5
"""XLA:GPU's memory space of pinned host memory. Every other color (0 default, others for collectives) is on the
device."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """An allocation that lives throughout.

    Attributes:
      kind: "parameter", "live_out", "constant", or "fixed" (a single buffer outside the heap).
      size: bytes.
      color: memory space.
      buffers: the logical buffers in it, () when XLA names none.
      parameter: entry parameter number for kind "parameter", else None.
    """

    kind: str
    size: int
    color: int
    buffers: tuple[int, ...]
    parameter: int | None


@dataclass(slots=True)
class Allocations:
    """Every allocation of a program, by what is known of it. Bytes; "device" is every color but the host's.

    Attributes:
      fixed: those that live throughout.
      unknown: (size, color) of those that pack several buffers and have no trace.
      traces: (HeapSimulatorTrace, color) of each heap.
      thread_local_bytes: those that live in registers.
      argument_bytes, output_bytes, alias_bytes, temp_bytes, host_temp_bytes: as in the module's docstring; all but
        the last are on the device.
      num_temp_allocations: how many allocations make up `temp_bytes`.
    """

    fixed: list[Fixed]
    unknown: list[tuple[int, int]]
    traces: list[tuple[Any, int]]
    thread_local_bytes: int = 0
    argument_bytes: int = 0
    output_bytes: int = 0
    alias_bytes: int = 0
    temp_bytes: int = 0
    host_temp_bytes: int = 0
    num_temp_allocations: int = 0


def allocations(assignment: Any, sizes: Mapping[int, int]) -> Allocations:
    """The allocations of a BufferAssignmentProto, with the `sizes` of all logical buffers.

    Raises RematKitError when an allocation holds a buffer that does not exist, or a trace is of no allocation.
    """
    rows = [(each, each.index, each.color) for each in assignment.buffer_allocations]
    holding = {index: tuple([each.logical_buffer_id for each in row.assigned]) for row, index, _ in rows}
    traced = heaps(assignment.heap_simulator_traces, holding)
    colors = {index: color for _, index, color in rows}
    found = Allocations([], [], [(trace, colors[packed[0]]) for trace, packed in traced])
    under_trace = {index for _, packed in traced for index in packed}
    for row, index, color in rows:
        size, buffers = row.size, holding[index]
        if size < 0:
            raise RematKitError(f"the buffer assignment has a size of {size} bytes. {NEXT}")
        kind = _kind(row)
        if color != HOST_COLOR:
            # What is donated is an argument and an output.
            argument, output = row.is_entry_computation_parameter, row.maybe_live_out
            found.argument_bytes += size * argument
            found.output_bytes += size * output
            found.alias_bytes += size * (argument and output)
            found.temp_bytes += size * (kind == "temp")
            found.num_temp_allocations += kind == "temp"
        else:
            found.host_temp_bytes += size * (kind == "temp")
        if index in under_trace:
            continue
        if not sizes.keys() >= set(buffers):
            raise RematKitError(f"allocation {index} holds an unknown logical buffer. {NEXT}")
        if kind == "thread_local":
            found.thread_local_bytes += size
        elif kind == "temp" and len(buffers) > 1:
            found.unknown.append((size, color))
        else:
            parameter = row.parameter_number if kind == "parameter" else None
            found.fixed.append(Fixed("fixed" if kind == "temp" else kind, size, color, buffers, parameter))
    return found


def _kind(row: Any) -> str:
    """What an allocation is there for; what is several things at once is the first of them."""
    if row.is_thread_local:
        return "thread_local"
    if row.is_entry_computation_parameter:
        return "parameter"
    if row.maybe_live_out:
        return "live_out"
    return "constant" if row.is_constant else "temp"


def heaps(traces: Iterable[Any], holding: Mapping[int, tuple[int, ...]]) -> list[tuple[Any, tuple[int, ...]]]:
    """The heap traces, each with the indices of the allocations that it packs: those that hold its buffers.

    `holding` are the logical buffers of each allocation, by its index.

    A heap that XLA splits into blocks (`xla_multiheap_size_constraint_per_heap`) repeats its trace for each of them;
    it is given once, with all of them. The index that a trace itself names is that of an earlier numbering in some
    versions of XLA (jaxlib 0.11.2, of the host's trace); it serves where no allocation holds the buffers.

    Raises RematKitError when a trace is of no allocation or shares a buffer with another one.
    """
    holder: dict[int, int] = {}
    for index, buffers in holding.items():
        holder.update(dict.fromkeys(buffers, index))
    found: list[tuple[Any, tuple[int, ...]]] = []
    owner: dict[int, int] = {}  # which trace each buffer is in
    for trace in traces:
        buffers = dict.fromkeys([event.buffer_id for event in trace.events])
        packed = tuple({holder[buffer]: None for buffer in buffers if buffer in holder})
        packed = packed or (trace.buffer_allocation_index,)
        if packed[0] not in holding:
            raise RematKitError(f"a heap trace is of the unknown allocation {packed[0]}. {NEXT}")
        before = {owner[buffer] for buffer in buffers if buffer in owner}
        if before:
            if any(list(found[number][0].events) != list(trace.events) for number in before):
                raise RematKitError(f"two heap traces hold the same logical buffer. {NEXT}")
            continue
        owner.update(dict.fromkeys(buffers, len(found)))
        found.append((trace, packed))
    return found
