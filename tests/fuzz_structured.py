"""Mutators of HloProto files that know what is in them: references, sizes, loops, sharing, notes in JSON."""

import json
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

from google.protobuf.message import DecodeError, EncodeError
from hlo_samples import add

from remat_kit._hlo.proto import MESSAGES

NUMBERS = (0, 1, -1, 2, 3, 7, 127, 255, 2**31 - 1, -(2**31), 2**32, 2**40, 2**62, 2**63 - 1, -(2**63), -2)
OPCODES = (
    "parameter", "constant", "tuple", "get-tuple-element", "fusion", "while", "conditional", "call", "custom-call",
    "dot", "convolution", "copy-start", "copy-done", "all-reduce-start", "all-reduce-done", "all-gather", "async-start",
    "async-done", "dynamic-update-slice", "dynamic-slice", "scatter", "reduce", "bitcast", "reshape", "add", "pad", "",
)  # fmt: skip

Mutator = Callable[[bytes, random.Random, Sequence[bytes]], bytes]
"""From a file, a source of chance and all seed files to another file."""


def structured(change: Callable[[Any, random.Random], None]) -> Mutator:
    """A mutator that changes the parsed message; a file that is no message any more stays as it is."""

    def mutate(data: bytes, rng: random.Random, seeds: Sequence[bytes]) -> bytes:
        proto = MESSAGES["HloProto"]()
        try:
            proto.ParseFromString(data)
            change(proto, rng)
            return proto.SerializeToString()
        except (DecodeError, EncodeError, IndexError, ValueError):
            # IndexError: there is nothing of the kind to change.
            return data

    return mutate


def change_fields(proto: Any, rng: random.Random) -> None:
    """Numbers, texts, orders and repetitions anywhere in the message."""
    for _ in range(rng.choice((1, 1, 2, 5, 20))):
        message = proto
        while True:
            fields = [(field, value) for field, value in message.ListFields() if field.message_type is not None]
            if not fields or rng.random() < 0.12:
                break
            field, value = rng.choice(fields)
            message = value if not field.is_repeated else rng.choice(value)
        change_field(message, rng.choice(message.DESCRIPTOR.fields), rng)


def change_field(message: Any, field: Any, rng: random.Random) -> None:
    value = getattr(message, field.name)
    if field.is_repeated:
        items = list(value)
        how = rng.randrange(6)
        if not items or how == 0:
            del value[:]
        elif how == 1:
            del value[rng.randrange(len(items))]
        elif how == 2:
            value.extend([rng.choice(items)] * rng.choice((1, 1, 5, 1000 if field.message_type is None else 20)))
        elif how == 3:
            rng.shuffle(items)
            kept = [
                each if field.message_type is None else type(each).FromString(each.SerializeToString())
                for each in items
            ]
            del value[:]
            value.extend(kept)
        elif field.message_type is None and not isinstance(items[0], str):
            value[rng.randrange(len(items))] = number_for(field, items, rng)
        else:
            value.append(items[rng.randrange(len(items))])
    elif field.message_type is not None:
        message.ClearField(field.name)
    elif isinstance(value, str):
        setattr(message, field.name, rng.choice((*OPCODES, "x" * 1000, "\0", "while.1", value + ".remat")))
    elif isinstance(value, bytes):
        setattr(message, field.name, changed_json(value, rng))
    elif isinstance(value, bool):
        setattr(message, field.name, not value)
    else:
        setattr(message, field.name, number_for(field, [value], rng))


def number_for(field: Any, items: Sequence[int], rng: random.Random) -> int:
    number = rng.choice((rng.choice(NUMBERS), rng.choice(items) + rng.choice((-1, 1)), rng.randrange(50)))
    bits = 31 if field.type == field.TYPE_INT32 else 63
    return number if -(2**bits) <= number < 2**bits else 0


def changed_json(value: bytes, rng: random.Random) -> bytes:
    words = (
        b"-1",
        b"0",
        b"9" * 30,
        b"9" * 5000,
        b"null",
        b"[]",
        b"{}",
        b"1e400",
        b"NaN",
        b'"x"',
        b"[" * 5000,
        b'"' + b"9" * 18 + b'"',
    )
    places = list(re.finditer(rb'"?\d+"?|\{|\[|"[a-zA-Z_]+"', value))
    if not places:
        return rng.choice(
            (b"{", b"{}", b"[]", b"\xff", b'{"known_trip_count":{"n":"1000000000000"}}', b'{"a":' * 200_000)
        )
    place = rng.choice(places)
    return value[: place.start()] + rng.choice(words) + value[place.end() :]


def with_huge_loops(proto: Any, rng: random.Random) -> None:
    """Every loop runs as often as can be written down."""
    trips = rng.choice((2**62, 2**63 - 1, 10**30, -5, 0))
    for computation in proto.hlo_module.computations:
        for instruction in computation.instructions:
            if instruction.opcode == "while":
                instruction.backend_config = json.dumps({"known_trip_count": {"n": str(trips)}}).encode()


def with_nested_callers(proto: Any, rng: random.Random) -> None:
    """A chain of computations that each call the one before, once or more often, as the new entry."""
    module = proto.hlo_module
    opcode = rng.choice(("while", "call", "fusion", "async-start", "conditional"))
    called = module.entry_computation_id
    for level in range(rng.choice((3, 3, 40, 300, 2_000))):
        identifier = 10_000 + level
        computation = module.computations.add(name=f"level{level}", id=identifier, root_id=10**6 + 10 * level)
        computation.is_fusion_computation = opcode == "fusion"
        for copy in range(rng.choice((1, 2, 2, 3))):
            more = {"config": {"known_trip_count": {"n": str(rng.choice((1, 3, 2**62)))}}} if opcode == "while" else {}
            add(computation, 10**6 + 10 * level + copy, opcode, (8, 8), called_computation_ids=[called, called], **more)
        called = identifier
    top = module.computations.add(name="top", id=9_999, root_id=2 * 10**6)
    add(top, 2 * 10**6, opcode, (8, 8), called_computation_ids=[called])
    module.entry_computation_id = 9_999


def with_repeated_references(proto: Any, rng: random.Random) -> None:
    """Hundreds of thousands of references, a byte or two each, to what is there once."""
    count = rng.choice((1_000, 1_000, 1_000, 200_000))
    computation = rng.choice(proto.hlo_module.computations)
    instruction = rng.choice(computation.instructions)
    field = rng.choice(
        ("operand_ids", "called_computation_ids", "dimensions", "schedule", "contracting", "dims", "groups")
    )
    if field == "schedule":
        sequence = rng.choice(proto.hlo_module.schedule.sequences).value.instruction_ids
        sequence.extend([rng.choice(sequence)] * count)
    elif field == "contracting":
        numbers = instruction.dot_dimension_numbers.lhs_contracting_dimensions
        numbers.extend([rng.choice((0, 1))] * count)
        if rng.random() < 0.5:
            instruction.opcode = "dot"
    elif field == "dims":
        instruction.shape.dimensions.extend([rng.choice((1, 2, 0, 2**62))] * count)
    elif field == "groups":
        mesh = instruction.mesh_axes_replica_group_list
        mesh.mesh.axes.add(size=2**40)
        for _ in range(count // 100):
            mesh.axes.add()
    else:
        numbers = getattr(instruction, field)
        numbers.extend([rng.choice(numbers) if numbers else 1] * count)


def with_sharing(proto: Any, rng: random.Random) -> None:
    """SHARE events that point forward, at themselves, in circles, and very many of them."""
    trace = rng.choice(proto.buffer_assignment.heap_simulator_traces)
    known = [buffer.id for buffer in proto.buffer_assignment.logical_buffers]
    for _ in range(rng.choice((1, 3, 2_000))):
        event = trace.events.add(kind=rng.choice((0, 1, 2, 2, 2, 3)), buffer_id=rng.choice(known))
        event.share_with_canonical_id = rng.choice(known)


def with_circles(proto: Any, rng: random.Random) -> None:
    """Operands, called computations and frames that point at themselves or at what stands behind them."""
    module = proto.hlo_module
    computation = rng.choice(module.computations)
    instruction = rng.choice(computation.instructions)
    what = rng.randrange(4)
    if what == 0 and instruction.operand_ids:
        instruction.operand_ids[0] = rng.choice((instruction.id, computation.root_id))
    elif what == 1:
        instruction.called_computation_ids.append(rng.choice((computation.id, module.entry_computation_id)))
    elif what == 2:
        frames = module.stack_frame_index.stack_frames
        for number in range(1, len(frames) + 1):
            frames[number - 1].parent_frame_id = rng.choice((number, rng.randrange(1, len(frames) + 1)))
    else:
        for number in range(1, rng.choice((3, 100, 20_000))):
            module.stack_frame_index.stack_frames.add(file_location_id=1, parent_frame_id=number + 1)


def with_huge_sizes(proto: Any, rng: random.Random) -> None:
    """Sizes of buffers, allocations and dimensions at and beyond the limits."""
    for buffer in proto.buffer_assignment.logical_buffers:
        if rng.random() < 0.3:
            buffer.size = rng.choice((0, 2**62, 2**63 - 1))
    for computation in proto.hlo_module.computations:
        for instruction in computation.instructions:
            for number in range(len(instruction.shape.dimensions)):
                if rng.random() < 0.2:
                    instruction.shape.dimensions[number] = rng.choice((0, 1, 2**20, 2**40, 2**58))


def with_chains_of_views(proto: Any, rng: random.Random) -> None:
    """A fused computation whose results are all views of views of one value."""
    count = rng.choice((10, 10, 100, 4_000))
    fused = [each for each in proto.hlo_module.computations if each.is_fusion_computation]
    computation = rng.choice(fused)
    last = computation.root_id
    for number in range(count):
        last = add(computation, 3 * 10**6 + number, "bitcast", (8, 8), (last,)).id
    results = [last] * (count // 2) if rng.random() < 0.5 else [3 * 10**6 + number for number in range(count)]
    add(computation, 4 * 10**6, "tuple", (), results, tuple_of=[(11, (8, 8), 0)] * len(results))
    computation.root_id = 4 * 10**6


def with_wide_tuples(proto: Any, rng: random.Random) -> None:
    """A tuple of very many elements that as many instructions take."""
    computation = rng.choice(proto.hlo_module.computations)
    count = rng.choice((10, 10, 100, 5_000))
    add(computation, 5 * 10**6, "custom-call", (), (), tuple_of=[(11, (8,), 0)] * count, custom_call_target="__cublas$")
    for number in range(1, count):
        opcode = rng.choice(("get-tuple-element", "get-tuple-element", "add"))
        add(computation, 5 * 10**6 + number, opcode, (8,), (5 * 10**6,), tuple_index=number)
    results = range(5 * 10**6 + 1, 5 * 10**6 + count)
    add(computation, 6 * 10**6, "tuple", (), results, tuple_of=[(11, (8,), 0)] * count)
    computation.root_id = 6 * 10**6


def with_many_traces(proto: Any, rng: random.Random) -> None:
    """Very many small heaps, each of its own memory or all of one, or one heap repeated."""
    buffers = proto.buffer_assignment
    alike, repeated = rng.random() < 0.5, rng.random() < 0.3
    for number in range(1_000, 1_000 + rng.choice((3, 3, 100, 3_000))):
        buffers.logical_buffers.add(id=number, size=number)
        color = 1 if alike else number
        buffers.buffer_allocations.add(index=number, size=number, color=color).assigned.add(logical_buffer_id=number)
        trace = buffers.heap_simulator_traces.add(buffer_allocation_index=number)
        for kind in rng.choice(((0, 1), (0,), (0, 1, 0, 1))):
            trace.events.add(kind=kind, buffer_id=1_000 if repeated else number, instruction_name="fusion.34")


def deep_tuple(data: bytes, rng: random.Random, seeds: Sequence[bytes]) -> bytes:
    """A shape of tuples in tuples, deeper than a parser likes, in an instruction put before the others."""
    shape = b"\x10\x0b"
    for _ in range(rng.choice((10, 50, 90, 95, 99, 101, 3_000))):
        shape = b"\x10\x0d" + field_bytes(4, shape)
    instruction = field_bytes(1, b"deep") + field_bytes(2, b"parameter") + field_bytes(3, shape) + b"\x98\x02\x05"
    computation = field_bytes(1, b"deep") + field_bytes(2, instruction) + b"\x28\x4d\x30\x05"
    return data + field_bytes(1, field_bytes(3, computation))


def field_bytes(number: int, content: bytes) -> bytes:
    """A length-delimited field as protobuf writes it; `number` is below 16."""
    length, size = len(content), b""
    while length > 127:
        size += bytes([length & 127 | 128])
        length >>= 7
    return bytes([number << 3 | 2]) + size + bytes([length]) + content


CHANGES: tuple[Mutator, ...] = (
    deep_tuple,
    *[structured(change_fields)] * 8,
    structured(with_huge_loops),
    structured(with_nested_callers),
    structured(with_repeated_references),
    structured(with_sharing),
    structured(with_circles),
    structured(with_huge_sizes),
    structured(with_chains_of_views),
    structured(with_wide_tuples),
    structured(with_many_traces),
)
