"""Which module and which of the user's lines a value comes from, where XLA left the name out as well."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from remat_kit._hlo.flow import callers_of_parameters
from remat_kit._hlo.frames import Frame
from remat_kit._hlo.module import Instruction, Module
from remat_kit._hlo.scope import module_path

_REACH = 6
"""How many instructions away a name may come from. Nameless ones are copies and broadcasts beside a named one."""
_INSIDE = 400
"""Operations of one fusion that are asked for their name."""
_DEPTH = 24
"""How many tuples, loops and writes in place a value is followed back through."""
_TURNS = ("while/body/dynamic_slice", "while/body/jit(dynamic_index_in_dim)/dynamic_slice")
"""How the name of a scan's own slice of its stacked inputs ends."""


@dataclass(frozen=True, slots=True)
class Origin:
    """A module path, outermost first, and a source line; () and None when unknown."""

    path: tuple[str, ...]
    source: Frame | None

    def or_else(self, other: "Origin") -> "Origin":
        """This one, with what it lacks from `other`."""
        return Origin(self.path or other.path, self.source or other.source)


_NOWHERE = Origin((), None)


class Origins:
    """Answers for the values of one module; each is looked up once.

    `arguments` are the module paths of the entry's parameters, which are the last to be asked.
    """

    def __init__(self, module: Module, arguments: dict[int, tuple[str, ...]]) -> None:
        self.module = module
        self.arguments = arguments
        # The state of a loop is the parameter of its body and of its condition.
        self._loops = callers_of_parameters(module, ("while",))
        self._calls = callers_of_parameters(module, ("async-start", "call"))
        self._root = _name_of_root(module, {path[0] for path in arguments.values() if path})
        self._known: dict[tuple[int, tuple[int, ...]], Origin] = {}

    def of(self, instruction: Instruction, index: tuple[int, ...] = ()) -> Origin:
        """Of the value at `index` of the instruction's result.

        Of what really makes it, behind tuples, loops and writes into a stack of layers: from its name, from what is
        fused into it, or from its neighbours in the data flow.
        """
        key = (instruction.id, index)
        known = self._known.get(key)
        if known is None:
            maker, start = self._maker(instruction, index)
            found = self._named(maker, start)
            if not found.path or not found.source:
                found = found.or_else(self._near(maker))
            if maker is not instruction:
                found = found.or_else(self._named(instruction, None))
            if not found.path and found.source and found.source.function:
                found = Origin((_function(found.source),), found.source)
            known = self._known[key] = found
        return known

    def loop_of(self, instruction: Instruction) -> Instruction:
        """The loop whose state the parameter `instruction` is; else the instruction itself."""
        return self._loops.get(instruction.id, instruction)

    def maker_of(self, instruction: Instruction, index: tuple[int, ...] = ()) -> Instruction:
        """What makes the value, behind tuples, loops and writes into a stack of layers."""
        return self._maker(instruction, index)[0]

    def _maker(self, at: Instruction, index: tuple[int, ...]) -> tuple[Instruction, Instruction | None]:
        """What makes the value, and, when that is a fusion, the operation inside it."""
        for _ in range(_DEPTH):
            opcode = at.opcode
            if opcode == "get-tuple-element":
                at, index = at.operands[0], (at.tuple_index, *index)
            elif opcode == "tuple" and index and index[0] < len(at.operands):
                at, index = at.operands[index[0]], index[1:]
            elif opcode == "while" and index and at.called:
                at = at.operands[0] if _stays(at, index[0]) and at.operands else at.called[0].root
            elif opcode == "parameter" and index and at.id in self._loops:
                at = self.loop_of(at)
            elif opcode == "parameter" and at.id in self._calls:
                call = self._calls[at.id]
                if at.parameter_number >= len(call.operands):
                    return at, None
                at = call.operands[at.parameter_number]
            elif opcode == "async-done" and at.operands and at.operands[0].called:
                at = at.operands[0].called[0].root
            elif opcode == "call" and at.called:
                at = at.called[0].root
            elif opcode == "dynamic-update-slice":
                at, index = at.operands[1], ()
            elif opcode == "dynamic-slice" and _is_one_turn(at):
                at, index = at.operands[0], ()
            elif opcode == "bitcast" and at.operands:
                at = at.operands[0]
            elif opcode == "fusion" and at.called:
                inside, outside = _inside(at.called[0].root, index)
                if outside is not None and outside < len(at.operands):
                    at, index = at.operands[outside], ()
                elif len(at.operands) == 1 and inside.op_name.endswith("/while"):
                    at, index = at.operands[0], ()  # a loop's stack, laid out anew
                else:
                    return at, inside
            else:
                return at, None
        return at, None

    def _named(self, instruction: Instruction, inside: Instruction | None) -> Origin:
        """By its own name, or that of the operations fused into it, nearest first."""
        own = self._own(instruction)
        if inside is None:
            return own
        found = _NOWHERE
        for each in _backwards(inside):
            if "/" in each.op_name and not _is_bookkeeping(each):
                found = self._own(each)
                break
        return found.or_else(own) if found.path else own.or_else(found)

    def _own(self, instruction: Instruction) -> Origin:
        path = module_path(instruction.op_name) if "/" in instruction.op_name else ()
        if len(path) > 1 and path[0] == self._root:
            path = path[1:]
        source = self.module.source(instruction)
        if instruction.opcode == "parameter":
            path = self.arguments.get(instruction.id, ())
        elif not path and source and source.function and not _is_bookkeeping(instruction):
            # Outside of all modules and scopes: the function that the line is in.
            path = (_function(source),)
        return Origin(path, source)

    def _near(self, instruction: Instruction) -> Origin:
        """The nearest named one among what it is made of, then among what reads it."""
        found = _NOWHERE
        for backwards in (True, False):
            frontier, seen = [instruction], {instruction.id}
            for _ in range(_REACH):
                around = [(each.operands if backwards else each.users)[:8] for each in frontier]
                frontier = [other for others in around for other in others if other.id not in seen][:32]
                for other in frontier:
                    seen.add(other.id)
                    if other.opcode != "constant":  # one for all that are equal, with the name of any
                        found = found.or_else(self._own(other))
                if (found.path and found.source) or not frontier:
                    break
            if found.path and found.source:
                break
        return found


def _name_of_root(module: Module, heads: set[str]) -> str:
    """The scope of the outermost module, which is in no argument's path: `Model` of `Model/Block_0`; "" without one."""
    names = {each.op_name for each in module.instructions.values() if "/" in each.op_name}
    roots = Counter(
        path[0] for name in names if len(path := module_path(name)) > 1 and path[1] in heads and path[0] not in heads
    )
    return roots.most_common(1)[0][0] if roots else ""


def _function(source: Frame) -> str:
    return f"{source.function.rpartition('<locals>.')[2]}()"


def _is_bookkeeping(instruction: Instruction) -> bool:
    """Sums of gradients that autodiff adds, and writes into stacks: their line is that of the whole derivative."""
    return instruction.op_name.endswith(("/add_any", "/dynamic_update_slice"))


def _stays(loop: Instruction, position: int) -> bool:
    """Whether a loop hands on an element of its state as it is."""
    root = loop.called[0].root
    element = root.operands[position] if root.opcode == "tuple" and position < len(root.operands) else root
    return (
        element.opcode == "get-tuple-element"
        and element.tuple_index == position
        and element.operands[0].opcode == "parameter"
    )


def _is_one_turn(instruction: Instruction) -> bool:
    """Whether it is what a scan takes of its stacked inputs each turn, which says nothing of its own."""
    return bool(instruction.operands) and instruction.op_name.endswith(_TURNS)


def _inside(root: Instruction, index: tuple[int, ...]) -> tuple[Instruction, int | None]:
    """The operation of a fusion that makes the value, or the number of the operand that it only passes on."""
    at = root
    if at.opcode == "tuple" and index and index[0] < len(at.operands):
        at = at.operands[index[0]]
    for _ in range(_DEPTH):
        if at.opcode == "dynamic-update-slice":
            at = at.operands[1]
        elif at.opcode in ("bitcast", "reshape", "copy") or (at.opcode == "dynamic-slice" and _is_one_turn(at)):
            if not at.operands:
                break
            at = at.operands[0]
        else:
            break
    return at, at.parameter_number if at.opcode == "parameter" else None


def _backwards(start: Instruction) -> Iterator[Instruction]:
    """Operations of a fused computation from `start` back to its parameters, each once, nearest first."""
    frontier, seen = [start], {start.id}
    while frontier and len(seen) < _INSIDE:
        yield from frontier
        following = []
        for each in frontier:
            for operand in each.operands:
                if operand.id not in seen:
                    seen.add(operand.id)
                    following.append(operand)
        frontier = following
