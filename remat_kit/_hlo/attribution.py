"""Whose a buffer is: its category, module path, source line and phase, by where its value comes from and goes to.

Names decide little. An argument's category is what the step says it holds, or, for a file without its step, what the
program does with it. A temporary's category follows from the phase in which it is made, the phases in which it is
read, and what it is made of (`structure.py`, `flow.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from remat_kit._explanation import UNKNOWN
from remat_kit._hlo.flow import Flow, Uses, Value, skip_copies
from remat_kit._hlo.frames import Frame
from remat_kit._hlo.heap import LiveBuffer
from remat_kit._hlo.module import Instruction, Module, Shape
from remat_kit._hlo.origin import Origin, Origins
from remat_kit._hlo.structure import (
    AFTER_BACKWARD_BLOCK,
    AFTER_FORWARD_BLOCK,
    ARGUMENT,
    GRADIENT,
    ORIGINS,
    PARAMETER,
    PHASES,
    Structure,
    bits_at,
)
from remat_kit._phase import BACKWARD, FORWARD, RECOMPUTE, UPDATE

_COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-", "ragged-all-to-all")
_COLLECTIVE_COLOR = 1
_CASTING = frozenset({"copy", "convert", "bitcast", "transpose", "reshape"})
_SUMS = 2
"""Sums of gradients that are looked through for what they update."""
_CASTS = 2
"""Casts of casts that are looked through for what reads a value."""
_VIEWS = frozenset({"parameter", "dynamic-slice", "slice", "bitcast", "reshape", "copy"})


@dataclass(frozen=True, slots=True)
class Attribution:
    """What is known of one buffer. `module` and `block` are "" and `source` is None when the program does not say.

    Attributes:
      category: a key of `_explanation.CATEGORIES`, or the label of an argument.
      module: path of the module; block: the repeated block it belongs to.
      source: the user's line; phase: in which it is made.
      shape: of the value; layers: how many layers are stacked in it.
    """

    category: str
    module: str
    block: str
    source: Frame | None
    phase: str
    shape: Shape | None
    layers: int


@dataclass(frozen=True, slots=True)
class Argument:
    """What is known of one argument: its category, the path of the module that owns it, and the block of that.

    `role` is the category that its label stands for: one of parameters, optimizer state, batch and arguments.
    """

    category: str
    module: str
    block: str = ""
    role: str = ""


class Attributor:
    """Answers for the buffers of one module. Built once, asked for each buffer; equal questions are answered once."""

    def __init__(self, module: Module, flow: Flow, structure: Structure, arguments: Mapping[int, Argument]) -> None:
        self.module = module
        self.flow = flow
        self.structure = structure
        self.arguments = arguments
        self.origins = Origins(
            module,
            {
                parameter.id: tuple(known.module.split("/"))
                for parameter in module.entry.parameters
                if (known := arguments.get(parameter.parameter_number)) and known.module
            },
        )
        self.parameter_shapes = frozenset(
            str(parameter.shape)
            for parameter in module.entry.parameters
            if (known := arguments.get(parameter.parameter_number)) and known.category == "parameters"
        )
        self._owned = {known.module: known.block for known in arguments.values() if known.block}
        self._lengths = {
            loop: module.instructions[loop].trip_count or 1 for loop in (*structure.layer_loops, *structure.inner_loops)
        }
        self._has_blocks = bool(structure.blocks)
        self._known: dict[Any, Attribution] = {}

    def of(self, buffer: LiveBuffer, group: Sequence[Value]) -> Attribution:
        """What is known of `buffer`; `group` are the values that its region ever holds, its own first."""
        key = (buffer.kind, buffer.parameter, buffer.instruction_id, buffer.shape_index, buffer.color)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._of(buffer, group)
        return known

    def _of(self, buffer: LiveBuffer, group: Sequence[Value]) -> Attribution:
        maker, index = group[0] if group else (None, ())
        if maker is None:
            category = {"constant": "constants", "live_out": "outputs"}.get(buffer.kind, UNKNOWN)
            return Attribution(category, "", "", None, "unknown", None, 1)
        uses = self.flow.uses(maker, index)
        if maker.opcode == "while":
            uses.enters(maker, index)
        shape = element_of(maker.shape, index)
        layers = self._layers(shape, uses)
        if buffer.kind == "parameter":
            return self._argument(buffer, maker, shape, layers, uses)
        bits = bits_at(self.structure.bits.get(maker.id, 0), index)
        phase = self._phase(group, uses, bits)
        # Zeros are made for the loop that begins with them, not for the place of the loop.
        begins = [(each, uses.states[each.id]) for each in uses.loops.values()] if not bits & ORIGINS else []
        origin = self._origin([*begins[:1], *group], uses)
        if buffer.kind == "constant":
            category = "constants"
        elif buffer.kind == "live_out":
            category = "outputs"
        else:
            category = self._category(buffer, maker, bits, shape, layers, phase, uses)
        block = self._block(group, uses, layers)
        if category == "gradients" and (owner := self._updated_with(shape, uses)):
            return Attribution(category, owner.module, owner.block, origin.source, phase, shape, layers)
        if category == "gradients" and (made := self._summed_up(maker, index)):
            origin = made.or_else(origin)
        module = "/".join(origin.path)
        if category == "parameter copies" and not block:
            block = self._owned.get(module, "")
        return Attribution(category, module, block, origin.source, phase, shape, layers)

    def _updated_with(self, shape: Shape, uses: Uses, depth: int = 0) -> Argument | None:
        """The argument that a gradient updates: the one of its size that its reader in the update takes as well.

        That is the parameter, or the optimizer's state for it. The reader may also add up gradients, whose sum then
        tells.
        """
        readers = [reader for number, reader in uses.readers.items() if self.structure.phases.get(number) == UPDATE]
        owners: dict[bool, set[tuple[str, str]]] = {True: set(), False: set()}
        for reader in readers:
            for operand in map(skip_copies, reader.operands):
                known = self.arguments.get(operand.parameter_number) if self._is_argument(operand) else None
                if known and known.role != "batch" and operand.shape.size == shape.size:
                    owners[known.role == "parameters"].add((known.module, known.block))
        for found in owners.values():
            if len(found) == 1:
                return Argument("", *found.pop())
        if depth == _SUMS or any(owners.values()):
            return None
        sums = [reader for reader in readers if reader.shape.size == shape.size][:8]
        known = {self._updated_with(shape, self.flow.uses(reader), depth + 1) for reader in sums} - {None}
        return known.pop() if len(known) == 1 else None

    def _summed_up(self, maker: Instruction, index: tuple[int, ...]) -> Origin | None:
        """Where the gradients come from that the step adds up itself, one microbatch after the other."""
        real = self.origins.maker_of(maker, index)
        if self.structure.phases.get(real.id) != UPDATE:
            return None
        made = [each for each in real.operands[:8] if self.structure.phases.get(each.id) in (BACKWARD, RECOMPUTE)]
        return self.origins.of(made[0]) if made else None

    def _is_argument(self, operand: Instruction) -> bool:
        return operand.opcode == "parameter" and self.structure.phases.get(operand.id) == ARGUMENT

    def _argument(self, buffer: LiveBuffer, maker: Instruction, shape: Shape, layers: int, uses: Uses) -> Attribution:
        number = buffer.parameter if buffer.parameter is not None else maker.parameter_number
        known = self.arguments.get(number) or Argument(UNKNOWN, "")
        # The first that uses it, and forward before all: what comes first after it moves from compile to compile.
        phases = self.structure.phases
        readers = sorted(uses.readers.values(), key=lambda reader: (phases.get(reader.id) != FORWARD, reader.id))
        source = next((frame for reader in readers if (frame := self._line_that_reads(reader, uses))), None)
        return Attribution(known.category, known.module, known.block, source, ARGUMENT, shape, layers)

    def _line_that_reads(self, reader: Instruction, uses: Uses) -> Frame | None:
        """The user's line that reads a value: in a fusion, which has lines of all sorts, of the operation that does."""
        number = uses.takes.get(reader.id, -1)
        for called in reader.called:
            if called.is_fusion and 0 <= number < len(called.parameters):
                inner = called.parameters[number]
                while inner.users and inner.opcode in _VIEWS:  # a layer of a stack, say
                    inner = inner.users[0]
                if source := self.module.source(inner):
                    return source
        return self.origins.of(reader).source

    def _category(
        self, buffer: LiveBuffer, maker: Instruction, bits: int, shape: Shape, layers: int, phase: str, uses: Uses
    ) -> str:
        for writer in uses.writes.values():  # what is written into it later is part of it
            bits |= bits_at(self.structure.bits.get(writer.id, 0), ())
        if not bits & ORIGINS:  # zeros that a loop begins its sums with
            for loop, where in uses.states.items():
                bits |= bits_at(self.structure.bits.get(loop, 0), where)
        origin = bits & ORIGINS
        read_in = self._read_in(uses, shape, through_casts=phase in (BACKWARD, RECOMPUTE))
        if is_host_copy(maker):
            return "host-offloaded"
        if phase in (BACKWARD, RECOMPUTE) and UPDATE in read_in:
            return "gradients"
        if phase == UPDATE and origin == GRADIENT and str(shape) in self.parameter_shapes:
            return "gradients"
        if buffer.color == _COLLECTIVE_COLOR or maker.opcode.startswith(_COLLECTIVES):
            return "collective buffers"
        if origin == PARAMETER and phase != UPDATE:
            return "parameter copies"
        in_block = maker.id in self.structure.blocks
        if not in_block and phase in (BACKWARD, RECOMPUTE) and self._is_stack_for_backward(shape, uses):
            return "saved activations"  # laid out anew, or cast, before backward's loop takes it layer by layer
        outside = self._has_blocks and not in_block and layers == 1
        if phase == FORWARD:
            head = outside and bits & AFTER_FORWARD_BLOCK and maker.id not in self.structure.feeding
            if read_in & {BACKWARD, RECOMPUTE}:
                return "loss head" if head else "saved activations"
            return "loss head" if head else "forward workspace"
        if phase == BACKWARD:
            head = outside and not bits & AFTER_BACKWARD_BLOCK
            return "loss head" if head else "backward workspace"
        if phase == RECOMPUTE:
            return "recompute workspace"
        return "other temporaries" if phase == UPDATE else UNKNOWN

    def _read_in(self, uses: Uses, shape: Shape, through_casts: bool) -> set[str]:
        """The phases that read a value, if asked by way of a cast or another layout."""
        found = set()
        waiting = [(uses, 0 if through_casts else _CASTS)]
        while waiting:
            at, depth = waiting.pop()
            for reader in at.readers.values():
                found.add(self.structure.phases.get(reader.id, "unknown"))
                if depth < _CASTS and reader.shape.size == shape.size and _is_cast(reader):
                    waiting.append((self.flow.uses(reader), depth + 1))
        return found

    def _is_stack_for_backward(self, shape: Shape, uses: Uses) -> bool:
        """Whether a backward loop over the layers reads it one layer a turn and nothing writes into it."""
        loops = [loop for number, loop in uses.loops.items() if number in self.structure.layer_loops]
        return (
            not uses.writes
            and bool(loops)
            and all(self.structure.phases.get(loop.id) in (BACKWARD, RECOMPUTE) for loop in loops)
            and shape.dims[:1] == (loops[0].trip_count,)
        )

    def is_layer_of_stack(self, maker: Instruction) -> bool:
        """Whether backward's loop over the layers has taken it, as it is or cast, out of what forward has stacked."""
        structure = self.structure
        if structure.phases.get(maker.id) != BACKWARD or maker.id not in structure.blocks:
            return False
        large = [each for each in maker.operands[:8] if each.shape.num_elements > 1]
        if maker.opcode not in ("fusion", "dynamic-slice") or len(large) != 1 or len(maker.operands) > 8:
            return False
        length = large[0].shape.dims[0] if large[0].shape.dims else 0
        return length in self._lengths.values() and large[0].shape.size == length * maker.shape.size

    def _phase(self, group: Sequence[Value], uses: Uses, bits: int) -> str:
        """Of the maker, else of what writes into the buffer, of the others in its region, or of its first reader.

        Zeros that a loop begins with are of the phase of the loop: XLA makes equal ones once.
        """
        phases = self.structure.phases
        if not bits & ORIGINS:
            around = {phases.get(loop, "unknown") for loop in uses.states}
            if found := next((phase for phase in PHASES if phase in around), ""):
                return found

        def told(number: int) -> str:
            phase = phases.get(number, "unknown")
            return phase if phase not in ("unknown", ARGUMENT) else ""

        makers = [each.id for each, _ in group]
        if own := next(map(told, makers[:1]), ""):  # nearly always: no need to sort the readers
            return own
        others = (*sorted(uses.writes), *makers, *sorted(uses.readers))
        return next(filter(None, map(told, others)), "unknown")

    def _origin(self, group: Sequence[Value], uses: Uses) -> Origin:
        """Path and line of its maker, of the others in its region, or of its readers: the first that tells."""
        best = Origin((), None)
        readers = [(uses.readers[number], ()) for number in sorted(uses.readers)[:8]]
        for maker, index in (*group, *readers):
            best = best.or_else(self.origins.of(maker, index))
            if best.path and best.source:
                break
        return best

    def _block(self, group: Sequence[Value], uses: Uses, layers: int) -> str:
        """Of the maker; of a stack of layers the loop's; of something nameless that of the others in its region."""
        blocks = self.structure.blocks
        if block := blocks.get(group[0][0].id):
            return block
        if layers > 1:
            return min(name for loop, name in self.structure.layer_loops.items() if loop in uses.loops)
        if not self.origins.of(*group[0]).path:
            return next((block for each, _ in group if (block := blocks.get(each.id))), "")
        return ""

    def _layers(self, shape: Shape, uses: Uses) -> int:
        """How many layers are stacked in a value: the lengths of the layers' loops that it goes through, else 1."""
        lengths = {self._lengths[loop] for loop in uses.loops if loop in self._lengths}
        if not shape.dims or shape.dims[0] not in lengths:
            return 1
        segments = {loop for loop in uses.loops if loop in self.structure.layer_loops}
        inner = {self._lengths[loop] for loop in self.structure.inner_loops} if segments else set()
        return shape.dims[0] * (shape.dims[1] if len(shape.dims) > 2 and shape.dims[1] in inner else 1)


def _is_cast(instruction: Instruction) -> bool:
    """Whether it only changes type or layout."""
    if len(instruction.operands) != 1:
        return False
    if instruction.opcode == "fusion" and instruction.called:
        inside = instruction.called[0].instructions
        return len(inside) < 8 and all(each.opcode in _CASTING or each.opcode == "parameter" for each in inside)
    return instruction.opcode in _CASTING


def element_of(shape: Shape, index: tuple[int, ...]) -> Shape:
    """The shape at `index` of a tuple; the shape itself where the index leads nowhere."""
    for position in index:
        if position >= len(shape.elements):
            break
        shape = shape.elements[position]
    return shape


def is_host_copy(maker: Instruction) -> bool:
    """Whether `maker` brings something from host memory to the device, or is the start of a copy there."""
    if not maker.opcode.startswith(("copy", "async-", "dynamic-slice", "fusion")):
        return False
    spaces = {leaf.is_host for operand in maker.operands for _, leaf in operand.shape.leaves()}
    return True in spaces and (maker.opcode != "fusion" or maker.shape.bytes > 0)
