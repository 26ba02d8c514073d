"""Broken HloProto files: mutators over seed files, and the check that whatever is read is refused or adds up.

`case(seeds, number)` is the file of a case number, the same wherever it runs. `examine` is what is under test.
"""

import dataclasses
import json
import math
import random
from collections.abc import Sequence
from typing import Any

from fuzz_structured import CHANGES, Mutator
from hlo_samples import CHIP, add, hand_made

from remat_kit._errors import RematKitError
from remat_kit._explain import explain
from remat_kit._explanation import Explanation
from remat_kit._hlo.anatomy import anatomy
from remat_kit._hlo.heap import Heap, LiveBuffer, replay
from remat_kit._hlo.module import Module
from remat_kit._hlo.proto import parse
from remat_kit._hlo.roofline import Prediction, predict

REFUSED, ANSWERED = "refused", "answered"


def examine(data: bytes) -> str:
    """Whether a file is refused or answered. Raises anything else than RematKitError when the toolkit is at fault.

    Everything that reads a stranger's file belongs into this function.
    """
    try:
        proto = parse(data)
        module = Module.from_proto(proto)
        heap = replay(proto)
        prediction = predict(module, CHIP)
        explanation = explain(anatomy(module, proto, heap))
    except RematKitError:
        return REFUSED
    check_heap(heap)
    check_prediction(prediction)
    check_explanation(explanation, heap)
    return ANSWERED


def check_heap(heap: Heap) -> None:
    """What is alive at the peak adds up to the peak, and what is alive at any time to the time line."""
    check_stretches(heap.buffers, heap.timeline)
    alive = sum(each.bytes for each in heap.live)
    assert alive == max(heap.timeline, default=heap.throughout_bytes)
    assert heap.peak_bytes in (None, alive)
    assert heap.throughout_bytes == sum(heap.throughout.values())
    assert heap.host_peak_bytes in (None, sum(each.bytes for each in heap.host_live))


def check_explanation(explanation: Explanation, heap: Heap) -> None:
    """Its sums, and that it can be written down."""
    alive = sum(each.bytes for each in heap.live)
    assert sum(holder.bytes for holder in explanation.holders) == alive
    assert 0.0 <= explanation.module_share <= 1.0
    assert all(step.bytes >= 0 for step in explanation.advice)
    if (line := explanation.timeline) is not None:
        totals = [sum(column) for column in zip(*line.bytes.values(), strict=True)]
        assert totals == [heap.timeline[event] for event in line.events]
    if explanation.floor is not None:
        assert explanation.floor.bytes <= alive
    json.dumps(dataclasses.asdict(explanation))


def check_stretches(buffers: Sequence[LiveBuffer], timeline: Sequence[int]) -> None:
    changes = [0] * (len(timeline) + 1)
    for each in buffers:
        assert 0 <= each.born <= each.dies <= len(timeline)
        changes[each.born] += each.bytes
        changes[each.dies] -= each.bytes
    total = 0
    for change, expected in zip(changes, timeline, strict=False):
        total += change
        assert total == expected


def check_prediction(prediction: Prediction) -> None:
    assert math.isfinite(prediction.seconds)
    assert math.isclose(prediction.seconds, sum(prediction.breakdown.values()), abs_tol=1e-12)
    exposed = sum(row.exposed_s * row.executions for row in prediction.rows)
    assert math.isclose(prediction.seconds, exposed, rel_tol=1e-6, abs_tol=1e-12)
    assert all(value >= 0 for value in prediction.breakdown.values())
    assert prediction.flops == sum(row.flops * row.executions for row in prediction.rows)


def small_seed() -> bytes:
    """A program with one of everything: a loop, fusions, products, collectives, copies, frames, two heap traces."""

    def body(computation: Any) -> int:
        add(computation, 1, "parameter", (8, 8))
        add(computation, 2, "dot", (8, 8), (1, 1)).dot_dimension_numbers.lhs_contracting_dimensions.append(1)
        return 2

    def condition(computation: Any) -> int:
        add(computation, 11, "parameter", (8, 8))
        add(computation, 12, "constant", (), dtype=1)
        return 12

    def fused(computation: Any) -> int:
        add(computation, 21, "parameter", (8, 8))
        add(computation, 22, "parameter", (2, 8), parameter_number=1)
        add(computation, 23, "constant", (), dtype=4)
        add(computation, 24, "bitcast", (8, 8), (21,))
        add(computation, 25, "dynamic-update-slice", (8, 8), (24, 22, 23, 23))
        add(computation, 26, "tuple", (), (25, 21), tuple_of=[(11, (8, 8), 0), (11, (8, 8), 0)])
        return 26

    def main(computation: Any) -> int:
        add(computation, 31, "parameter", (8, 8)).metadata.op_name = "x['w']"
        add(computation, 32, "parameter", (2, 8), parameter_number=1)
        loop = {"known_trip_count": {"n": "4"}}
        add(computation, 33, "while", (8, 8), (31,), called_computation_ids=[1, 2], config=loop)
        pair = [(11, (8, 8), 0), (11, (8, 8), 0)]
        add(computation, 34, "fusion", (), (33, 32), called_computation_ids=[3], tuple_of=pair, fusion_kind="kLoop")
        add(computation, 35, "get-tuple-element", (8, 8), (34,), tuple_index=0)
        product = {"gemm_backend_config": {"dot_dimension_numbers": {"lhs_contracting_dimensions": ["1"]}}}
        target = {"custom_call_target": "__cublas$lt$matmul", "config": product}
        add(computation, 36, "custom-call", (), (35, 35), tuple_of=[(11, (8, 8), 0), (2, (64,), 0)], **target)
        add(computation, 37, "get-tuple-element", (8, 8), (36,))
        add(computation, 38, "copy-start", (), (37,), tuple_of=[(11, (8, 8), 5), (11, (8, 8), 0), (8, (), 0)])
        add(computation, 39, "copy-done", (8, 8), (38,), space=5)
        group = add(computation, 40, "all-reduce-start", (8, 8), (37,))
        group.collective_device_list.iota_replica_group_list.num_devices_per_group = 8
        add(computation, 41, "all-reduce-done", (8, 8), (40,)).metadata.stack_frame_id = 2
        mask = {"intermediate_tensor_shape": {"dimensions": ["1", "1", "8", "8"]}, "mask_type": "CAUSAL"}
        fmha = {"custom_call_target": "__cudnn$fmhaSoftmax", "config": {"cudnn_fmha_backend_config": mask}}
        add(computation, 42, "custom-call", (8, 8), (37, 37, 41), **fmha)
        add(computation, 43, "tuple", (), (42, 41), tuple_of=pair)
        return 43

    proto = hand_made(body=body, condition=condition, fused=fused, main=main)
    module = proto.hlo_module
    for computation in module.computations:
        if not computation.is_fusion_computation:
            entry = module.schedule.sequences.add(key=computation.id)
            entry.value.instruction_ids.extend(each.id for each in computation.instructions)
    frames = module.stack_frame_index
    frames.file_names.append("/home/me/train.py")
    frames.function_names.append("step")
    frames.file_locations.add(file_name_id=1, function_name_id=1, line=7)
    frames.stack_frames.add(file_location_id=1)
    frames.stack_frames.add(file_location_id=1, parent_frame_id=1)
    buffers = proto.buffer_assignment
    places = {1: 33, 2: 34, 3: 36, 4: 41, 5: 42, 6: 38, 7: 31, 8: 43}
    for number, instruction in places.items():
        buffers.logical_buffers.add(
            id=number, size=256, color=5 * (number == 6)
        ).defined_at.instruction_id = instruction
    events = [
        (0, 1, 0), (0, 2, 0), (2, 3, 1), (1, 1, 0), (2, 4, 3), (1, 4, 0), (1, 3, 0), (2, 5, 1), (1, 2, 0), (1, 5, 0),
    ]  # fmt: skip
    for index, (color, members) in enumerate(((0, (1, 2, 3, 4, 5)), (5, (6,)))):
        block = buffers.buffer_allocations.add(index=index, size=1024, color=color)
        for number in members:
            block.assigned.add(logical_buffer_id=number, size=256)
        trace = buffers.heap_simulator_traces.add(buffer_allocation_index=index)
        for kind, number, canonical in events if index == 0 else [(0, 6, 0), (1, 6, 0)]:
            name = f"{'x'}.{places[number]}"
            event = trace.events.add(kind=kind, buffer_id=number, computation_name="main", instruction_name=name)
            event.share_with_canonical_id = canonical
    donated = buffers.buffer_allocations.add(
        index=2, size=256, is_entry_computation_parameter=True, maybe_live_out=True
    )
    donated.assigned.add(logical_buffer_id=7, size=256)
    buffers.buffer_allocations.add(index=3, size=16, maybe_live_out=True).assigned.add(logical_buffer_id=8, size=16)
    buffers.buffer_allocations.add(index=4, size=4, is_thread_local=True)
    return proto.SerializeToString()


def case(seeds: Sequence[bytes], number: int) -> bytes:
    """The file of a case: one of the seeds, with one to four mutations."""
    rng = random.Random(number)
    data = rng.choice(seeds)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        data = rng.choice(MUTATORS)(data, rng, seeds)
    return data


def flip_bytes(data: bytes, rng: random.Random, seeds: Sequence[bytes]) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 4, 30))):
        if changed:
            changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


def truncate(data: bytes, rng: random.Random, seeds: Sequence[bytes]) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def splice(data: bytes, rng: random.Random, seeds: Sequence[bytes]) -> bytes:
    """A piece of another seed in the place of a piece of this one, or beside it."""
    other = rng.choice(seeds)
    start, length = rng.randrange(len(other) + 1), rng.choice((1, 16, 256, 10_000))
    at = rng.randrange(len(data) + 1)
    return data[:at] + other[start : start + length] + data[at + rng.choice((0, length)) :]


MUTATORS: tuple[Mutator, ...] = (flip_bytes, truncate, splice, *CHANGES)
