"""Explanations of whole steps: beside XProf, beside the step's own pytrees, and read again from the file alone."""

import math
import pathlib
from typing import Any

import jax
import pytest
from captured import CAPTURED
from hlo_samples import Sample
from test_hlo_heap import xprof

from remat_kit import CompiledStep, Record, Workload, analyze
from remat_kit._analyze import need_bytes
from remat_kit._explanation import UNKNOWN, Explanation
from remat_kit._hlo.anatomy import Anatomy, anatomy
from remat_kit._hlo.heap import replay
from remat_kit._hlo.line import Line
from remat_kit._hlo.module import Module
from remat_kit._hlo.proto import parse
from remat_kit._program import analyze_module
from remat_kit._report import text

QUICK = ("cpu",)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CAPTURED]
)
@pytest.mark.filterwarnings("ignore")
def test_a_program_is_explained(name: str, tmp_path: pathlib.Path):
    # One test a program: compiling it is what takes the time.
    step = CAPTURED[name]()
    record = analyze(step, Workload(f"captured:{name}"), "none")
    found = record.explanation
    assert found is not None
    the_totals_are_those_of_xla(step, record)
    the_live_peak_is_explained_to_the_byte(step, record, found, tmp_path)
    the_state_is_exact(step, record)
    the_file_alone_tells_the_same(step, record)
    the_time_line_adds_up(step, record, found)
    nothing_lies_below_the_floor(record, found)
    if name == "vision":
        gradients_are_exact_when_the_optimizer_starts(step)


def the_totals_are_those_of_xla(step: CompiledStep, record: Record) -> None:
    stats = step.executable.memory_analysis()
    assert record.argument_bytes == stats.argument_size_in_bytes
    assert record.output_bytes == stats.output_size_in_bytes
    assert record.alias_bytes == stats.alias_size_in_bytes
    assert record.temp_bytes == stats.temp_size_in_bytes
    assert record.host_temp_bytes == stats.host_temp_size_in_bytes
    assert record.need_bytes == need_bytes(step.memory)
    assert 0 < (record.live_peak_bytes or 0) <= (record.need_bytes or 0) + (record.constant_bytes or 0)
    if step.traced.target.chip.platform != "cpu":
        assert record.live_peak_bytes == record.xla_peak_bytes == stats.peak_memory_in_bytes


def the_live_peak_is_explained_to_the_byte(
    step: CompiledStep, record: Record, found: Explanation, folder: pathlib.Path
) -> None:
    # XProf's own replay of the same file.
    sample = Sample(step.hlo_proto, step.executable.memory_analysis())
    assert (record.live_peak_bytes, found.peak.event) == xprof(sample, folder)
    # Every way to sum it up is the live peak.
    assert sum(record.categories.values()) == record.live_peak_bytes
    assert sum(holder.bytes for holder in found.holders) == record.live_peak_bytes
    live = [buffer for buffer in found.buffers if buffer.born <= found.peak.event < buffer.dies]
    assert sum(buffer.bytes for buffer in live) == record.live_peak_bytes
    assert sum(holder.buffers for holder in found.holders) == len(live)
    # What is said of it.
    assert record.attributed_share == 1 - record.categories.get(UNKNOWN, 0) / (record.live_peak_bytes or 1)
    assert record.attributed_share >= 0.99
    assert found.module_share >= 0.97
    assert found.source_share >= 0.97
    shown = text.render(record)
    assert f"attributed: category {record.attributed_share:.1%}, module {found.module_share:.1%}" in shown


def the_state_is_exact(step: CompiledStep, record: Record) -> None:
    state, batch = parts_of(step)
    assert record.categories["parameters"] == bytes_of(state[0])
    assert record.categories["optimizer state"] == bytes_of(state[1])
    assert record.categories["batch"] == bytes_of(batch)


def the_file_alone_tells_the_same(step: CompiledStep, record: Record) -> None:
    alone = analyze_module(step.hlo_proto, "file")
    assert (alone.need_bytes, alone.live_peak_bytes) == (record.need_bytes, record.live_peak_bytes)
    for category in ("parameters", "optimizer state", "saved activations", "gradients"):
        assert alone.categories.get(category, 0) == record.categories.get(category, 0), category


def the_time_line_adds_up(step: CompiledStep, record: Record, found: Explanation) -> None:
    heap, line = replay(parse(step.hlo_proto)), found.timeline
    assert line is not None
    assert found.peak.event in line.events
    totals = [sum(column) for column in zip(*line.bytes.values(), strict=True)]
    assert totals == [heap.timeline[event] for event in line.events]
    assert max(totals) == record.live_peak_bytes
    assert len(line.phases) == len(line.modules) == len(line.instructions) == len(line.events)


def nothing_lies_below_the_floor(record: Record, found: Explanation) -> None:
    floor = found.floor
    assert floor is not None
    assert floor.bytes == floor.argument_bytes + floor.output_bytes + floor.constant_bytes + floor.transient_bytes
    assert 0 < floor.bytes <= (record.live_peak_bytes or 0)


def gradients_are_exact_when_the_optimizer_starts(step: CompiledStep) -> None:
    # Clipping by the norm of all gradients needs every one of them before the first parameter changes.
    proto = parse(step.hlo_proto)
    found = anatomy(Module.from_proto(proto), proto, replay(proto))
    line = Line(found)
    gradients = line.bytes[line.categories.index("gradients")]
    starts = next(
        event
        for event in range(line.events)
        if (at := line.instruction(event)) and at.op_name.endswith("/lt")  # whether the norm is above the limit
    )
    # XLA puts some of them where a donated parameter has been, since a transposed copy of it is all that is still read.
    in_place = sum(size for category, size in values_in_the_place_of_arguments(found, proto) if category == "gradients")
    assert in_place > 0
    (params, _), _ = parts_of(step)
    assert int(gradients[starts]) + in_place == bytes_of(params)


def values_in_the_place_of_arguments(found: Anatomy, proto: Any) -> list[tuple[str, int]]:
    """(category, bytes) of every other value that lives in an argument's memory."""
    makers = {buffer.id: (buffer.defined_at, buffer.size) for buffer in proto.buffer_assignment.logical_buffers}
    values = []
    for buffer in found.buffers:
        for member in buffer.group if buffer.kind == "parameter" else ():
            place, size = makers[member]
            maker = found.module.instructions[place.instruction_id]
            if maker.opcode != "parameter":
                index = tuple(place.shape_index)
                alone = buffer._replace(kind="temp", instruction_id=maker.id, shape_index=index)
                values.append((found.attributor.of(alone, [(maker, index)]).category, size))
    return values


def parts_of(step: CompiledStep) -> tuple[tuple[Any, Any], Any]:
    """((parameters, optimizer state), batch) among the arguments of a captured step."""
    args = step.traced.step.args
    if hasattr(args[0], "opt_state"):
        return (args[0].params, args[0].opt_state), args[1]
    return (args[0], args[1]), args[2:]


def bytes_of(tree: Any) -> int:
    """Bytes of a pytree on one device."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        shape = leaf.sharding.shard_shape(leaf.shape) if getattr(leaf, "sharding", None) else leaf.shape
        total += math.prod(shape) * leaf.dtype.itemsize
    return total
