"""Every buffer of a program along its schedule, with what is known of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from remat_kit._hlo.arguments import argument_blocks, infer_categories, module_paths, origin_bits
from remat_kit._hlo.attribution import Argument, Attribution, Attributor
from remat_kit._hlo.flow import Value
from remat_kit._hlo.heap import Heap, LiveBuffer
from remat_kit._hlo.module import Module
from remat_kit._hlo.structure import Structure, structure_of


@dataclass(frozen=True)
class Anatomy:
    """A module's buffers with what is known of each, the working value of this file.

    Attributes:
      buffers, attributions: all that is ever alive on the device, side by side.
      structure: phases and blocks of the program.
    """

    module: Module
    heap: Heap
    structure: Structure
    attributor: Attributor
    buffers: tuple[LiveBuffer, ...]
    attributions: tuple[Attribution, ...]


def anatomy(module: Module, proto: Any, heap: Heap, said: Mapping[str, str] | None = None) -> Anatomy:
    """Every buffer of a program with its category, module, source line and phase. Linear in the program.

    `said` is what the step says of its arguments, where there is a step: the category of each by the name of its leaf.
    """
    names = {
        parameter.parameter_number: parameter.op_name.replace("\\'", "'")  # XLA escapes the quotes of a path
        for parameter in module.entry.parameters
    }
    said = said or {}
    categories = {number: said[name] for number, name in names.items() if name in said}
    if len(categories) < len(names):
        categories = infer_categories(module) | categories
    paths = module_paths(names, categories)
    blocks = argument_blocks(paths)
    arguments = {number: Argument(categories[number], paths[number], blocks.get(number, "")) for number in names}
    structure = structure_of(module, {number: origin_bits(category) for number, category in categories.items()})
    attributor = Attributor(module, structure, arguments)
    makers = _makers(module, proto)
    attributions = tuple(attributor.of(buffer, _group(buffer, makers)) for buffer in heap.buffers)
    return Anatomy(module, heap, structure, attributor, heap.buffers, attributions)


def _makers(module: Module, proto: Any) -> dict[int, Value]:
    """Logical buffer id -> (instruction, index of its result) that defines it."""
    instructions = module.instructions
    found = {}
    for buffer in proto.buffer_assignment.logical_buffers:
        place = buffer.defined_at
        maker = instructions.get(place.instruction_id)
        if maker is not None:
            found[buffer.id] = (maker, tuple(place.shape_index))
    return found


def _group(buffer: LiveBuffer, makers: Mapping[int, Value]) -> list[Value]:
    order = (buffer.buffer_id, *(member for member in buffer.group[:64] if member != buffer.buffer_id))
    return [makers[member] for member in order if member in makers]
