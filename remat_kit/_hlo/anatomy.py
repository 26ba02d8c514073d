"""Every buffer of a program along its schedule, with what is known of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from remat_kit._hlo.arguments import ROLES, argument_blocks, infer_categories, module_paths, origin_bits
from remat_kit._hlo.attribution import Argument, Attribution, Attributor
from remat_kit._hlo.flow import Flow, Value
from remat_kit._hlo.heap import Heap, LiveBuffer
from remat_kit._hlo.module import Module
from remat_kit._hlo.structure import Structure, structure_of


@dataclass(frozen=True)
class Anatomy:
    """A module's buffers with what is known of each, the working value of this file.

    Attributes:
      buffers, attributions: all that is ever alive on the device, side by side.
      structure: phases and blocks of the program.
      makers: logical buffer id -> (instruction, index of its result) that defines it.
    """

    module: Module
    heap: Heap
    structure: Structure
    attributor: Attributor
    buffers: tuple[LiveBuffer, ...]
    attributions: tuple[Attribution, ...]
    makers: Mapping[int, Value]


def anatomy(module: Module, proto: Any, heap: Heap, argument_categories: Mapping[str, str] | None = None) -> Anatomy:
    """Every buffer of a program with its category, module, source line and phase. Linear in the program.

    `argument_categories` is what the step says of its arguments, where there is a step: the category of each by the
    name of its leaf.
    """
    names = {
        parameter.parameter_number: parameter.op_name.replace("\\'", "'")  # XLA escapes the quotes of a path
        for parameter in module.entry.parameters
    }
    argument_categories = argument_categories or {}
    categories = {number: argument_categories[name] for number, name in names.items() if name in argument_categories}
    roles = categories
    flow = Flow(module)
    if not all(categories.get(number) in ROLES for number in names):  # a label of the step's own says no role
        said = {number: category for number, category in categories.items() if category in ROLES}
        roles = infer_categories(module, flow) | said
        categories = roles | categories
    ranks = {parameter.parameter_number: len(parameter.shape.dims) for parameter in module.entry.parameters}
    paths = module_paths(names, categories, ranks)
    structure = structure_of(module, {number: origin_bits(role) for number, role in roles.items()})
    blocks = argument_blocks(paths, structure.stacks)
    arguments = {number: Argument(categories[number], paths[number], blocks[number], roles[number]) for number in names}
    attributor = Attributor(module, flow, structure, arguments)
    makers = _makers(module, proto)
    attributions = tuple(attributor.of(buffer, _group(buffer, makers)) for buffer in heap.buffers)
    return Anatomy(module, heap, structure, attributor, heap.buffers, attributions, makers)


def _makers(module: Module, proto: Any) -> dict[int, Value]:
    """Logical buffer id -> (instruction, index of its result) that defines it."""
    instructions = module.instructions
    found = {}
    for buffer in proto.buffer_assignment.logical_buffers:
        place = buffer.defined_at
        maker = instructions.get(place.instruction_id)
        if maker is not None:
            found[buffer.id] = (maker, tuple([max(0, position) for position in place.shape_index]))
    return found


def _group(buffer: LiveBuffer, makers: Mapping[int, Value]) -> list[Value]:
    order = (buffer.buffer_id, *(member for member in buffer.group[:64] if member != buffer.buffer_id))
    return [makers[member] for member in order if member in makers]
