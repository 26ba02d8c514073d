"""Explanations of whole steps: beside XProf, beside the step's own pytrees, and read again from the file alone."""

import math
import pathlib
from typing import Any

import jax
import pytest
from captured import CAPTURED, captured
from hlo_samples import Sample
from test_hlo_heap import xprof

from remat_kit import Record, Workload, analyze
from remat_kit._analyze import analyze_module
from remat_kit._explanation import UNKNOWN
from remat_kit._hlo.anatomy import Anatomy, anatomy
from remat_kit._hlo.heap import replay
from remat_kit._hlo.line import Line
from remat_kit._hlo.module import Module
from remat_kit._hlo.proto import parse
from remat_kit._report import text

QUICK = ("cpu",)
each_module = pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CAPTURED]
)


def record_of(name: str) -> Record:
    return analyze(captured(name), Workload(f"captured:{name}"), "none")


def anatomy_of(name: str) -> Anatomy:
    proto = parse(captured(name).hlo_proto)
    return anatomy(Module.from_proto(proto), proto, replay(proto))


def bytes_of(tree: Any) -> int:
    """Bytes of a pytree on one device."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        shape = leaf.sharding.shard_shape(leaf.shape) if getattr(leaf, "sharding", None) else leaf.shape
        total += math.prod(shape) * leaf.dtype.itemsize
    return total


@each_module
@pytest.mark.filterwarnings("ignore")
def test_the_live_peak_is_explained_to_the_byte(name: str, tmp_path: pathlib.Path):
    step, record = captured(name), record_of(name)
    found = record.explanation
    assert found is not None
    # XProf's own replay of the same file.
    sample = Sample(step.hlo_proto, step.executable.memory_analysis())
    assert (record.live_peak_bytes, found.peak.event) == xprof(sample, tmp_path)
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
    assert f"{record.attributed_share:.1%}" in shown
    assert f"{found.module_share:.1%}" in shown


@each_module
def test_the_state_is_exact(name: str):
    record, step = record_of(name), captured(name).traced.step
    state = step.args[:2] if name == "vision" else (step.args[0].params, step.args[0].opt_state)
    batch = step.args[2:] if name == "vision" else step.args[1]
    assert record.categories["parameters"] == bytes_of(state[0])
    assert record.categories["optimizer state"] == bytes_of(state[1])
    assert record.categories["batch"] == bytes_of(batch)


@each_module
def test_the_file_alone_tells_the_same(name: str):
    record, step = record_of(name), captured(name)
    alone = analyze_module(step.hlo_proto, name)
    assert (alone.need_bytes, alone.live_peak_bytes) == (record.need_bytes, record.live_peak_bytes)
    for category in ("parameters", "optimizer state", "saved activations", "gradients"):
        assert alone.categories.get(category, 0) == record.categories.get(category, 0), category


@each_module
def test_the_time_line_adds_up(name: str):
    found, step = record_of(name).explanation, captured(name)
    assert found is not None
    assert found.timeline is not None
    heap, line = replay(parse(step.hlo_proto)), found.timeline
    assert found.peak.event in line.events
    totals = [sum(column) for column in zip(*line.bytes.values(), strict=True)]
    assert totals == [heap.timeline[event] for event in line.events]
    assert max(totals) == heap.peak_bytes
    assert len(line.phases) == len(line.modules) == len(line.instructions) == len(line.events)


@each_module
def test_nothing_lies_below_the_floor(name: str):
    record = record_of(name)
    assert record.explanation is not None
    floor = record.explanation.floor
    assert floor is not None
    assert floor.bytes == floor.arguments + floor.outputs + floor.constants + floor.transient
    assert 0 < floor.bytes <= (record.live_peak_bytes or 0)


@pytest.mark.slow
def test_gradients_are_exact_when_the_optimizer_starts():
    # Clipping by the norm of all gradients needs every one of them before the first parameter changes.
    step = captured("vision").traced.step
    found = anatomy_of("vision")
    line = Line(found)
    gradients = line.bytes[line.categories.index("gradients")]
    starts = next(
        event
        for event in range(line.events)
        if (at := line.instruction(event)) and at.op_name.endswith("/lt")  # whether the norm is above the limit
    )
    # XLA puts some of them where a donated parameter has been, since a transposed copy of it is all that is still read.
    in_place = sum(size for category, size in values_in_the_place_of_arguments(found) if category == "gradients")
    assert in_place > 0
    assert int(gradients[starts]) + in_place == bytes_of(step.args[0])


def values_in_the_place_of_arguments(found: Anatomy) -> list[tuple[str, int]]:
    """(category, bytes) of every other value that lives in an argument's memory."""
    makers = {
        buffer.id: (buffer.defined_at, buffer.size)
        for buffer in parse(captured("vision").hlo_proto).buffer_assignment.logical_buffers
    }
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
