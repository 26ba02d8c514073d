"""A compiled program as a graph: modules, computations, instructions and their shapes.

Built once from an HloProto, in one pass and in linear time (42,000 instructions take about a third of a second);
afterwards everything common is a plain attribute. What only few instructions have (windows, dimension numbers,
replica groups) is read from the message when asked.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from remat_kit._collector import without_collection
from remat_kit._errors import RematKitError
from remat_kit._hlo.frames import Frame, Frames
from remat_kit._phase import phase_of

HOST_MEMORY = 5
"""XLA:GPU's memory space of pinned host memory, written S(5) in a text dump."""

# XLA's PrimitiveType: number -> (name, bits of one element). Tokens and opaque values take no memory.
_TYPES: dict[int, tuple[str, int]] = {
    1: ("pred", 8), 2: ("s8", 8), 3: ("s16", 16), 4: ("s32", 32), 5: ("s64", 64),
    6: ("u8", 8), 7: ("u16", 16), 8: ("u32", 32), 9: ("u64", 64),
    10: ("f16", 16), 11: ("f32", 32), 12: ("f64", 64), 13: ("tuple", 0), 14: ("opaque", 0), 15: ("c64", 64),
    16: ("bf16", 16), 17: ("token", 0), 18: ("c128", 128), 19: ("f8e5m2", 8), 20: ("f8e4m3fn", 8),
    21: ("s4", 4), 22: ("u4", 4), 23: ("f8e4m3b11fnuz", 8), 24: ("f8e5m2fnuz", 8), 25: ("f8e4m3fnuz", 8),
    26: ("s2", 2), 27: ("u2", 2), 28: ("f8e4m3", 8), 29: ("f8e3m4", 8), 30: ("s1", 1), 31: ("u1", 1),
    32: ("f4e2m1fn", 4), 33: ("f8e8m0fnu", 8), 34: ("buffer", 0),
}  # fmt: skip

# Operands without which an instruction cannot be told apart.
_LEAST_OPERANDS = {"get-tuple-element": 1, "dynamic-update-slice": 2, "scatter": 3, "copy-start": 1}
_LARGEST = 2**63 - 1


def phase(op_name: str) -> str:
    """The phase that `phase_of` reads from the name of an instruction; "unknown" when it has no name.

    A name says where an instruction came from, not what XLA made of it: a fused instruction carries one name of
    several, and an operation that XLA merged out of forward and recompute keeps either.
    """
    return phase_of(op_name) if op_name else "unknown"


@dataclass(frozen=True, slots=True)
class Shape:
    """The type of a value.

    Attributes:
      dtype: XLA's name, e.g. "bf16"; "tuple" for a tuple, "token" for a token.
      dims: sizes; () for a scalar or a tuple.
      elements: the shapes of a tuple's elements.
      memory_space: 0 default, 5 pinned host memory, others for collectives.
      minor_to_major: dimension numbers from the fastest varying one.
      bytes: of the whole value. A tuple is the sum of its elements, its table of pointers not counted.
      num_elements: of all arrays in it together.
    """

    dtype: str
    dims: tuple[int, ...] = ()
    elements: tuple["Shape", ...] = ()
    memory_space: int = 0
    minor_to_major: tuple[int, ...] = ()
    bytes: int = 0
    num_elements: int = 0

    @property
    def size(self) -> int:
        """The number of elements of an array; 0 for a tuple or a token."""
        return _product(self.dims) if self.dtype not in ("tuple", "token", "opaque") else 0

    @property
    def is_host(self) -> bool:
        """Whether it lives in pinned host memory."""
        return self.memory_space == HOST_MEMORY

    def leaves(self) -> Iterator[tuple[tuple[int, ...], "Shape"]]:
        """The arrays in it, each with its index into the tuples around it."""
        if self.dtype != "tuple":
            yield (), self
        for position, element in enumerate(self.elements):
            for index, leaf in element.leaves():
                yield (position, *index), leaf

    def __str__(self) -> str:
        if self.dtype == "tuple":
            return f"({', '.join(map(str, self.elements))})"
        return f"{self.dtype}[{','.join(map(str, self.dims))}]" + (f"{{S({self.memory_space})}}" * bool(self.is_host))


def _product(dims: tuple[int, ...]) -> int:
    """The product of sizes that are at least 0; some number above 8 · `_LARGEST` when it is above that."""
    if 0 in dims:
        return 0
    total = 1
    for size in dims:
        total *= size
        if total > 8 * _LARGEST:
            break
    return total


def shape_of(proto: Any) -> Shape:
    """The Shape of a ShapeProto. Raises RematKitError for a type that this version does not know."""
    number = proto.element_type
    if number not in _TYPES:
        raise RematKitError(f"the module has a value of XLA's type number {number}, known are 1 to 34. {_NEXT}")
    dtype, bits = _TYPES[number]
    if number in (13, 34):
        elements = tuple(map(shape_of, proto.tuple_shapes))
        size, count = (sum(each.bytes for each in elements), sum(each.num_elements for each in elements))
        return Shape(dtype, elements=elements, bytes=size, num_elements=count)
    dims = tuple(proto.dimensions)
    if dims and min(dims) < 0:
        raise RematKitError(f"the module has a value with a side of {min(dims)}, sizes are at least 0. {_NEXT}")
    layout = proto.layout
    order, space, packed = tuple(layout.minor_to_major), layout.memory_space, layout.element_size_in_bits
    # Types below a byte take a byte an element unless the layout packs them.
    width = (packed or max(bits, 8)) if bits else 0
    count = _product(dims)
    size = (count * width + 7) // 8
    if not 0 <= size <= _LARGEST:
        raise RematKitError(f"the module has a value of {size} bytes, {dtype}{list(dims[:8])}. {_NEXT}")
    return Shape(dtype, dims, (), space, order, size, count if bits else 0)


@dataclass(slots=True, eq=False, repr=False)
class Instruction:
    """One instruction. Read it, do not change it.

    Attributes:
      id, name, opcode: as XLA has them; ids are unique in the module.
      shape: of the result.
      operands: the instructions whose results it takes, in order.
      users: the instructions of the same computation that take its result.
      called: the computations it calls: a fusion's, a while's body and condition, a reduction's combiner, ...
      op_name: JAX's name with the module path in it, "" when there is none. See `phase`.
      frame_id: for `Module.source`; 0 when there is none.
      custom_call_target: "" unless it is a custom call.
      proto: the HloInstructionProto, for what is not here.
    """

    id: int
    name: str
    opcode: str
    shape: Shape
    operands: tuple["Instruction", ...]
    called: tuple["Computation", ...]
    op_name: str
    frame_id: int
    custom_call_target: str
    proto: Any
    users: list["Instruction"] = field(default_factory=list)

    def __repr__(self) -> str:
        return f"<{self.name} = {self.shape} {self.opcode}>"

    @property
    def phase(self) -> str:
        """See `phase`."""
        return phase(self.op_name)

    @property
    def parameter_number(self) -> int:
        """For a parameter."""
        return self.proto.parameter_number

    @property
    def tuple_index(self) -> int:
        """For a get-tuple-element."""
        return self.proto.tuple_index

    @property
    def backend_config(self) -> bytes:
        """XLA:GPU's own notes on the instruction, mostly JSON text; b"" when there are none."""
        return self.proto.backend_config

    def config(self) -> dict[str, Any]:
        """The backend config as a JSON object; {} when there is none or it is not JSON."""
        raw = self.proto.backend_config
        if not raw.startswith(b"{"):
            return {}
        try:
            parsed = json.loads(raw)
        except (ValueError, RecursionError):
            return {}
        return parsed if isinstance(parsed, dict) else {}

    @property
    def trip_count(self) -> int | None:
        """How often a while runs its body, None when XLA does not know."""
        known = self.config().get("known_trip_count")
        try:
            trips = int(known["n"]) if isinstance(known, dict) else -1
        except (KeyError, TypeError, ValueError, OverflowError):
            return None
        return trips if 0 <= trips <= _LARGEST else None

    @property
    def group_size(self) -> int | None:
        """How many devices take part in one group of a collective, None when the instruction does not say."""
        proto = self.proto
        groups = proto.collective_device_list.replica_groups or proto.replica_groups
        if groups:
            return max(len(group.replica_ids) for group in groups)
        for iota in (proto.collective_device_list.iota_replica_group_list, proto.iota_collective_device_list):
            if iota.num_devices_per_group > 0:
                return iota.num_devices_per_group
        mesh = proto.mesh_axes_replica_group_list
        if not mesh.axes:
            return None
        sizes = [each.size for each in mesh.mesh.axes]
        taken = [
            axis.sub_axis_info.size or (sizes[axis.mesh_axis_index] if 0 <= axis.mesh_axis_index < len(sizes) else 1)
            for axis in mesh.axes
        ]
        total = _product(tuple(taken)) if min(taken) > 0 else 0
        return total if 0 < total <= _LARGEST else None


@dataclass(slots=True, eq=False, repr=False)
class Computation:
    """A function of the program: instructions in dependency order, operands before users.

    Attributes:
      id, name: as XLA has them.
      instructions: in dependency order.
      root: its result.
      is_fusion: whether it is the inside of a fusion, compiled into one kernel.
      schedule: the order in which they run; that of `instructions` for a computation without a schedule.
      parameters: by number.
    """

    id: int
    name: str
    instructions: tuple[Instruction, ...]
    root: Instruction
    is_fusion: bool
    schedule: tuple[Instruction, ...]
    parameters: tuple[Instruction, ...]

    def __repr__(self) -> str:
        return f"<computation {self.name}, {len(self.instructions)} instructions>"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Module:
    """A compiled program.

    Attributes:
      name: e.g. "jit_step".
      computations: by id, callees before callers.
      by_name: the same by name.
      entry: where it begins.
      instructions: every instruction by id.
      input_output_alias: (output index, parameter number, parameter index) of each donated buffer that is reused.
      frames: source positions.
      num_devices: how many devices run it together.
    """

    name: str
    computations: dict[int, Computation]
    by_name: dict[str, Computation]
    entry: Computation
    instructions: dict[int, Instruction]
    input_output_alias: tuple[tuple[tuple[int, ...], int, tuple[int, ...]], ...]
    frames: Frames
    num_devices: int

    def __repr__(self) -> str:
        return f"<module {self.name}, {len(self.instructions)} instructions>"

    @property
    def platform(self) -> str:
        """ "cuda" or "cpu", by the notes that each backend leaves on its kernels; "" when there are none."""
        for each in self.instructions.values():
            if each.custom_call_target.startswith(("__cublas", "__cudnn")):
                return "cuda"
            if each.opcode in ("fusion", "while"):
                notes = each.config()
                if "operation_queue_id" in notes:
                    return "cuda"
                if "outer_dimension_partitions" in notes or "fusion_config" in notes:
                    return "cpu"
        return ""

    def source(self, instruction: Instruction) -> Frame | None:
        """The user's line that an instruction comes from, None when the module does not say. See `Frames.user`."""
        return self.frames.user(instruction.frame_id)

    @staticmethod
    def from_proto(proto: Any) -> "Module":
        """The module of an HloProto message of `proto.parse`.

        Raises RematKitError when the module contradicts itself: an operand or a called computation that does not
        stand before its user, an id twice, an entry or a root that is not there.
        """
        with without_collection():
            return Module._from_proto(proto.hlo_module)

    @staticmethod
    def _from_proto(source: Any) -> "Module":
        sequences = {entry.key: entry.value.instruction_ids for entry in source.schedule.sequences}
        computations: dict[int, Computation] = {}
        instructions: dict[int, Instruction] = {}
        shapes: dict[bytes, Shape] = {}
        for each in source.computations:
            if each.id in computations:
                raise RematKitError(f"two computations of the module have the id {each.id}. {_NEXT}")
            computations[each.id] = _computation(each, sequences.get(each.id), computations, instructions, shapes)
        entry = computations.get(source.entry_computation_id)
        if entry is None or entry.is_fusion:
            raise RematKitError(f"the module has no computation {source.entry_computation_id}, its entry. {_NEXT}")
        aliases = tuple(
            (tuple(each.output_shape_index), each.parameter_number, tuple(each.parameter_shape_index))
            for each in source.input_output_alias.entries
        )
        by_name = {each.name: each for each in computations.values()}
        devices = source.device_assignment
        num_devices = max(1, devices.replica_count) * max(1, devices.computation_count)
        frames = Frames.from_proto(source.stack_frame_index)
        return Module(source.name, computations, by_name, entry, instructions, aliases, frames, num_devices)


def _computation(
    source: Any,
    sequence: Any,
    computations: dict[int, Computation],
    instructions: dict[int, Instruction],
    shapes: dict[bytes, Shape],
) -> Computation:
    """One computation; its instructions are added to `instructions`, shapes seen for the first time to `shapes`."""
    mine: dict[int, Instruction] = {}
    for proto in source.instructions:
        identifier, metadata = proto.id, proto.metadata
        opcode = proto.opcode
        try:
            operands = tuple([mine[number] for number in proto.operand_ids])
            called = tuple([computations[number] for number in proto.called_computation_ids])
        except KeyError as error:
            raise RematKitError(
                f"instruction {proto.name!r} uses {error.args[0]}, which does not stand before it. {_NEXT}"
            ) from None
        if len(operands) < _LEAST_OPERANDS.get(opcode, 0):
            raise RematKitError(f"instruction {proto.name!r} ({opcode}) has {len(operands)} operands. {_NEXT}")
        if proto.tuple_index < 0 or proto.parameter_number < 0:
            raise RematKitError(f"instruction {proto.name!r} ({opcode}) has a number below 0. {_NEXT}")
        if identifier in instructions:
            raise RematKitError(f"two instructions of the module have the id {identifier}. {_NEXT}")
        key = proto.shape.SerializeToString()
        shape = shapes.get(key)
        if shape is None:
            shape = shapes[key] = shape_of(proto.shape)
        target = proto.custom_call_target if opcode == "custom-call" else ""
        instruction = Instruction(
            identifier, proto.name, opcode, shape, operands, called, metadata.op_name, metadata.stack_frame_id, target,
            proto,
        )  # fmt: skip
        mine[identifier] = instructions[identifier] = instruction
        for operand in operands:
            if not operand.users or operand.users[-1] is not instruction:
                operand.users.append(instruction)
    every = tuple(mine.values())
    if source.root_id not in mine:
        raise RematKitError(f"computation {source.name!r} has no instruction {source.root_id}, its root. {_NEXT}")
    schedule = every
    if sequence is not None:
        try:
            schedule = tuple([mine[number] for number in sequence])
        except KeyError as error:
            raise RematKitError(
                f"the schedule of {source.name!r} has the unknown instruction {error.args[0]}. {_NEXT}"
            ) from None
        if len(schedule) > len(mine):
            raise RematKitError(f"the schedule of {source.name!r} has an instruction twice. {_NEXT}")
    parameters = [each for each in every if each.opcode == "parameter"]
    parameters.sort(key=lambda each: each.parameter_number)
    return Computation(
        source.id, source.name, every, mine[source.root_id], source.is_fusion_computation, schedule, tuple(parameters)
    )


_NEXT = "Dump it again (xla_dump_hlo_as_proto=True) and give the unchanged *after_optimizations.hlo.pb."
