"""Files that once broke the analysis or took too long, and a few hundred broken ones. `experiments/fuzz_analyzer.py`
runs as many as wanted."""

import json
from typing import Any

import pytest
from fuzz import ANSWERED, REFUSED, case, examine, small_seed
from hlo_samples import add, hand_made

from remat_kit._errors import RematKitError
from remat_kit._hlo.module import Module
from remat_kit._hlo.proto import parse

CASES = 300
LONG = 5_000


def one(fill: Any, **before: Any) -> Any:
    """A program whose entry is filled by `fill`, with computations before it; of one buffer, so that it has a heap."""
    proto = hand_made(**before, main=fill)
    proto.buffer_assignment.buffer_allocations.add(size=1, maybe_live_out=True)
    return proto


def alone(opcode: str, change: Any = None, operands: int = 0, **more: Any) -> Any:
    """A program of one instruction of some parameters; `change` gets it."""

    def main(computation: Any) -> int:
        for number in range(operands):
            add(computation, 10 + number, "parameter", (8, 8), parameter_number=number)
        instruction = add(computation, 9, opcode, (8, 8), range(10, 10 + operands), **more)
        if change is not None:
            change(instruction)
        return 9

    return one(main)


def a_shape_of_very_many_sides() -> Any:
    # Their product took minutes before it was found to be too large.
    return alone("parameter", lambda each: each.shape.dimensions.extend([2**62] * LONG * 40))


def a_shape_of_very_many_sides_that_is_empty() -> Any:
    return alone("parameter", lambda each: each.shape.dimensions.extend([2**62] * LONG * 40 + [0]))


def an_entry_that_is_fused() -> Any:
    proto = alone("parameter")
    proto.hlo_module.computations[0].is_fusion_computation = True
    return proto


def a_product_that_contracts_one_side_very_often() -> Any:
    def change(each: Any) -> None:
        each.dot_dimension_numbers.lhs_contracting_dimensions.extend([1] * LONG)

    return alone("dot", change, operands=2)


def a_mesh_of_very_many_axes() -> Any:
    def change(each: Any) -> None:
        each.mesh_axes_replica_group_list.mesh.axes.add(size=2**40)
        for _ in range(LONG):
            each.mesh_axes_replica_group_list.axes.add()

    return alone("all-reduce", change, operands=1)


def a_group_of_less_than_no_devices() -> Any:
    def change(each: Any) -> None:
        each.collective_device_list.iota_replica_group_list.num_devices_per_group = -8

    return alone("all-reduce", change, operands=1)


def a_schedule_with_an_instruction_very_often() -> Any:
    proto = alone("add", operands=2)
    proto.hlo_module.schedule.sequences.add(key=1).value.instruction_ids.extend([9] * LONG)
    return proto


def levels(opcode: str, count: int, calls: int, last: str = "exponential", **more: Any) -> Any:
    """Computations that each call the one before `calls` times, and an entry that calls the last."""

    def level(number: int) -> Any:
        def fill(computation: Any) -> int:
            start = 100 * number
            add(computation, start, "parameter", (8, 8))
            if number == 0:
                add(computation, start + 1, last, (8, 8), (start, start)[: 2 if last == "dot" else 1])
                return start + 1
            for call in range(1, calls + 1):
                below = {"called_computation_ids": [number], **more}
                add(computation, start + call, opcode, (8, 8), (start + call - 1,), **below)
            return start + calls

        return fill

    names = {f"fused{number}" if opcode == "fusion" else f"level{number}": level(number) for number in range(count)}

    def main(computation: Any) -> int:
        add(computation, 10**7, "parameter", (8, 8))
        add(computation, 10**7 + 1, opcode, (8, 8), (10**7,), called_computation_ids=[count], **more)
        return 10**7 + 1

    return one(main, **names)


def loops_in_loops_that_run_for_ever() -> Any:
    return levels("while", 40, 1, config={"known_trip_count": {"n": str(2**62)}})


def fusions_with_exponentially_many_products() -> Any:
    return levels("fusion", 60, 2, last="dot")


def fusions_with_exponentially_much_arithmetic() -> Any:
    return levels("fusion", 2_000, 2)


def a_long_chain_of_fusions() -> Any:
    # Went through Python's stack.
    return levels("fusion", 3_000, 1)


def a_long_chain_of_calls() -> Any:
    return levels("call", 3_000, 1)


def results_that_are_views_of_views() -> Any:
    def fused(computation: Any) -> int:
        add(computation, 1, "parameter", (8,))
        for number in range(2, LONG):
            add(computation, number, "bitcast", (8,), (number - 1,))
        add(computation, LONG, "tuple", (), range(2, LONG), tuple_of=[(11, (8,), 0)] * (LONG - 2))
        return LONG

    def main(computation: Any) -> int:
        add(computation, 10**7, "parameter", (8,))
        add(computation, 10**7 + 1, "fusion", (8,), (10**7,), called_computation_ids=[1])
        return 10**7 + 1

    return one(main, fused=fused)


def a_wide_tuple_with_as_many_users() -> Any:
    def main(computation: Any) -> int:
        add(computation, 1, "parameter", (), tuple_of=[(11, (8,), 0)] * LONG)
        for number in range(2, LONG):
            add(computation, number, "add", (8,), (1, 1))
        return 2

    return one(main)


def one_start_of_very_many_computations() -> Any:
    def body(computation: Any) -> int:
        for number in range(1, 1_000):
            add(computation, number, "iota", (8,))
        return 1

    def main(computation: Any) -> int:
        add(computation, 10**7, "async-start", (8,), called_computation_ids=[1] * LONG)
        return 10**7

    return one(main, body=body)


def very_many_heaps() -> Any:
    proto = alone("parameter")
    buffers = proto.buffer_assignment
    for number in range(10, LONG):
        buffers.logical_buffers.add(id=number, size=1)
        buffers.buffer_allocations.add(index=number, size=1, color=number).assigned.add(logical_buffer_id=number)
        buffers.heap_simulator_traces.add(buffer_allocation_index=number).events.add(kind=0, buffer_id=number)
    return proto


def a_buffer_at_a_place_below_0() -> Any:
    proto = alone("parameter")
    buffers = proto.buffer_assignment
    place = buffers.logical_buffers.add(id=1, size=8).defined_at
    place.instruction_id = 9
    place.shape_index.append(-6)
    buffers.buffer_allocations[0].assigned.add(logical_buffer_id=1)
    return proto


def more_bytes_than_can_be_counted() -> Any:
    proto = alone("parameter")
    for number in range(1, 4):
        proto.buffer_assignment.buffer_allocations.add(index=number, size=2**62, maybe_live_out=True)
    return proto


def a_fusion_that_calls_one_computation_very_often() -> Any:
    def fused(computation: Any) -> int:
        for number in range(1, 200):
            add(computation, number, "iota", (8,))
        return 1

    def main(computation: Any) -> int:
        add(computation, 10**7, "fusion", (8,), called_computation_ids=[1] * LONG * 40)
        return 10**7

    return one(main, fused0=fused)


def notes(text: bytes, opcode: str = "while", **more: Any) -> Any:
    return alone(opcode, lambda each: setattr(each, "backend_config", text), operands=3, **more)


@pytest.mark.parametrize(
    ("make", "outcome"),
    [
        (a_shape_of_very_many_sides, REFUSED),
        (a_shape_of_very_many_sides_that_is_empty, ANSWERED),
        (an_entry_that_is_fused, REFUSED),
        (a_product_that_contracts_one_side_very_often, ANSWERED),
        (a_mesh_of_very_many_axes, ANSWERED),
        (a_group_of_less_than_no_devices, ANSWERED),
        (a_schedule_with_an_instruction_very_often, REFUSED),
        (loops_in_loops_that_run_for_ever, REFUSED),
        (fusions_with_exponentially_many_products, REFUSED),
        (fusions_with_exponentially_much_arithmetic, REFUSED),
        (a_long_chain_of_fusions, ANSWERED),
        (a_long_chain_of_calls, ANSWERED),
        (results_that_are_views_of_views, ANSWERED),
        (a_wide_tuple_with_as_many_users, ANSWERED),
        (one_start_of_very_many_computations, ANSWERED),
        (very_many_heaps, ANSWERED),
        (a_buffer_at_a_place_below_0, REFUSED),
        (more_bytes_than_can_be_counted, REFUSED),
        (a_fusion_that_calls_one_computation_very_often, ANSWERED),
    ],
)
def test_files_that_broke_the_analysis(make, outcome):
    assert examine(make().SerializeToString()) == outcome


@pytest.mark.parametrize(
    "text",
    [
        b'{"known_trip_count":{"n":1e400}}',
        b'{"known_trip_count":{"n":NaN}}',
        b'{"a":' * 200_000,
        b'{"n":' + b"9" * 5_000,
    ],
)
def test_notes_that_broke_the_analysis(text):
    proto = notes(text)
    assert Module.from_proto(parse(proto.SerializeToString())).entry.root.trip_count is None
    assert examine(proto.SerializeToString()) == ANSWERED


def test_a_product_with_an_infinite_dimension_in_its_notes():
    config = {"gemm_backend_config": {"dot_dimension_numbers": {"lhs_contracting_dimensions": [float("inf")]}}}
    proto = notes(
        json.dumps(config).replace("Infinity", "1e400").encode(), "custom-call", custom_call_target="__cublas$"
    )
    assert examine(proto.SerializeToString()) == ANSWERED


def test_messages_of_what_is_larger_than_anything():
    for make, message in (
        (loops_in_loops_that_run_for_ever, "more than 2\\^63 times"),
        (fusions_with_exponentially_many_products, "more arithmetic in it than a kernel can have"),
        (a_schedule_with_an_instruction_very_often, "has an instruction twice"),
    ):
        with pytest.raises(RematKitError, match=message):
            examine_or_raise(make().SerializeToString())


def examine_or_raise(data: bytes) -> None:
    from hlo_samples import CHIP

    from remat_kit._hlo.roofline import predict

    predict(Module.from_proto(parse(data)), CHIP)


def test_the_seed_is_answered():
    assert examine(small_seed()) == ANSWERED


def test_broken_files_are_refused_or_add_up():
    seeds = [small_seed()]
    outcomes = [examine(case(seeds, number)) for number in range(CASES)]
    # Both happen often, or the mutations are too weak or too strong to find anything.
    assert min(outcomes.count(REFUSED), outcomes.count(ANSWERED)) > CASES // 10
