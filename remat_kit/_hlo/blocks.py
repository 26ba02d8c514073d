"""The repeated blocks of a program: loops over stacked layers, and scopes that occur with several numbers."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from remat_kit._hlo.module import Computation, Instruction, Module
from remat_kit._hlo.scope import module_path, split_number
from remat_kit._phase import BACKWARD, FORWARD, RECOMPUTE

CALLS = frozenset({"while", "call", "conditional", "async-start"})

_MOST = 0.8
"""What share of a loop's named instructions has to be in a scope for the loop to be called by it."""
_LEAST_SHARE = 0.05
"""A stack of numbered scopes counts as blocks when it holds at least this share of the named instructions."""
_STEPS = 24
"""Copies, tuples and loops that a value is followed back through to the argument that it is made of."""
_OPERANDS = 8
"""Operands of a copy or slice: itself and where."""
_MEMBERS = 8
"""Members of stacks that one value is said to be made of."""
_NESTING = 3
"""Loops in loops whose names a loop is called by."""
_PRODUCTS = ("dot", "conv_general", "ragged_dot")
_OPAQUE = ("call", "attention", "kernel")
_LINEAR = frozenset({
    "dot_general", "conv_general_dilated", "add", "add_any", "reshape", "transpose", "broadcast_in_dim", "squeeze",
    "convert_element_type", "reduce_sum", "copy", "neg", "sharding_constraint", "pad", "slice", "rev",
})  # fmt: skip
"""What one linear layer consists of, forward and backward: `Dense_0` is no block."""
_PASSED_ON = frozenset({"tuple", "get-tuple-element", "parameter", "constant", "while", "call", "conditional"})
_VIEWS = frozenset({
    "copy", "convert", "bitcast", "transpose", "reshape", "fusion", "dynamic-slice", "slice", "copy-start",
    "copy-done", "all-gather", "all-gather-start", "all-gather-done",
})  # fmt: skip

Stack = tuple[tuple[str, ...], str]
"""(path around, name without number) of numbered scopes."""


@dataclass(slots=True)
class Blocks:
    """The repeated blocks of a module.

    Attributes:
      of: the block of each instruction that is in one, by id.
      layer_loops: the whiles that run the layers of a scanned stack, by id, with the block's name.
      inner_loops: the whiles inside of those that run the layers of one segment, by id, with their trips.
      stacks: the numbers that each kind of unrolled block occurs with.
    """

    of: dict[int, str] = field(default_factory=dict)
    layer_loops: dict[int, str] = field(default_factory=dict)
    inner_loops: dict[int, int] = field(default_factory=dict)
    stacks: Mapping[Stack, frozenset[int]] = field(default_factory=dict)


def find_blocks(
    module: Module, computations: Sequence[Computation], phases: Mapping[int, str], parameters: frozenset[int]
) -> Blocks:
    """The blocks of `module`. `parameters` are the numbers of the arguments that may hold one layer a turn."""
    found = Blocks(stacks=_chained(_numbered_stacks(module), computations, phases))
    loops = _Loops(module, computations, parameters)
    named = {each.id: _name_of_loop(each) for each in loops.of_layers(phases, unrolled=bool(found.stacks))}
    waiting: list[Instruction] = []
    # Outermost first, and what a loop runs belongs to the block of the loop.
    inherited: dict[int, tuple[str, bool]] = {}
    for computation in reversed(computations):
        around, in_loop = inherited.get(computation.id, ("", False))
        for each in computation.instructions:
            name = name_of(each)
            block, scanned = around, in_loop
            if not around:
                block = _block_in(module_path(name), found.stacks) if name else _of_operand(each, found.of)
                if not block and not name and each.opcode not in _PASSED_ON:
                    waiting.append(each)
                if not block and each.id in named:
                    block = found.layer_loops[each.id] = named[each.id]
                    scanned = True
            elif in_loop and each.opcode == "while" and loops.takes_layers(each):
                found.inner_loops[each.id] = each.trip_count or 1
            if block:
                found.of[each.id] = block
                if each.opcode in CALLS:
                    inherited.update((called.id, (block, scanned)) for called in each.called)
    # A nameless copy or cast before the block that reads it.
    for each in reversed(waiting):
        if each.id not in found.of:
            block = next((found.of.get(user.id, "") for user in each.users), "")
            if block and each.operands:
                found.of[each.id] = block
    return found


def name_of(instruction: Instruction) -> str:
    """The instruction's own name, or that of the last thing fused into it that has one; "" without.

    A copy that XLA made of an argument has the argument's name, which is no path.
    """
    if "/" in instruction.op_name:
        return instruction.op_name
    for called in instruction.called:
        if called.is_fusion:
            for each in reversed(called.instructions):
                if "/" in each.op_name:
                    return each.op_name
    return ""


def _of_operand(each: Instruction, known: Mapping[int, str]) -> str:
    if each.opcode in _PASSED_ON or not each.operands:
        return ""
    return known.get(max(each.operands, key=lambda operand: operand.shape.bytes).id, "")


def _block_in(path: tuple[str, ...], stacks: Mapping[Stack, frozenset[int]]) -> str:
    for position, part in enumerate(path):
        split = split_number(part)
        if split and (path[:position], split[0]) in stacks:
            return part
    return ""


def _numbered_stacks(module: Module) -> dict[Stack, frozenset[int]]:
    """Scopes that occur with several numbers, hold much of the program, and are more than one layer's product."""
    counts = Counter(
        each.op_name
        for each in module.instructions.values()
        if each.opcode not in ("parameter", "constant") and "/" in each.op_name
    )
    members: dict[Stack, Counter[int]] = defaultdict(Counter)
    operations: dict[Stack, set[str]] = defaultdict(set)
    for name, count in counts.items():
        path = module_path(name)
        for position, part in enumerate(path):
            if split := split_number(part):
                members[path[:position], split[0]][split[1]] += count
                operations[path[:position], split[0]].add(name.rpartition("/")[2])
    least = _LEAST_SHARE * counts.total()
    return {
        stack: frozenset(numbers)
        for stack, numbers in members.items()
        if len(numbers) > 1 and numbers.total() >= least and _is_more_than_a_layer(operations[stack])
    }


def _is_more_than_a_layer(operations: set[str]) -> bool:
    """Whether there is a product and something that is not linear: not so in a dense layer, nor in a norm."""
    has_product = any(each.startswith(_PRODUCTS) or any(word in each for word in _OPAQUE) for each in operations)
    return has_product and not operations <= _LINEAR


def _chained(
    stacks: Mapping[Stack, frozenset[int]], computations: Sequence[Computation], phases: Mapping[int, str]
) -> dict[Stack, frozenset[int]]:
    """Those of which one takes what another has made: several heads or experts beside each other are no blocks."""
    left = set(stacks)
    for computation in computations:
        # The members whose results a value is made of, by way of what is in no member.
        members: dict[int, frozenset[tuple[Stack, int]]] = {}
        for each in computation.instructions:
            if not left:
                break
            made_of = frozenset[tuple[Stack, int]]()
            for operand in each.operands:
                more = members.get(operand.id)
                if more and len(made_of) < _MEMBERS:
                    made_of |= more
            if phases.get(each.id) in (BACKWARD, RECOMPUTE):
                continue
            own = frozenset(_members(module_path(name_of(each)), left))
            for stack, number in own:
                if any(other == stack and before != number for other, before in made_of):
                    left.discard(stack)
            members[each.id] = own or made_of
    return {stack: numbers for stack, numbers in stacks.items() if stack not in left}


def _members(path: tuple[str, ...], stacks: Collection[Stack]) -> Iterator[tuple[Stack, int]]:
    for position, part in enumerate(path):
        if (split := split_number(part)) and (path[:position], split[0]) in stacks:
            yield (path[:position], split[0]), split[1]


class _Loops:
    """Which whiles run over layers."""

    def __init__(self, module: Module, computations: Sequence[Computation], parameters: frozenset[int]) -> None:
        self._all = [
            each
            for computation in computations
            for each in computation.instructions
            if each.opcode == "while" and each.called and each.operands and (each.trip_count or 0) > 1
        ]
        self._arguments = {each.id for each in module.entry.parameters if each.parameter_number in parameters}
        self._loop_of = {
            parameter.id: each for each in self._all for called in each.called for parameter in called.parameters
        }
        self._sides: dict[int, set[tuple[int, ...]]] = defaultdict(set)
        self._direct: set[int] = set()
        for each in self._all:
            if sides := self._stacked_parameters(each):
                self._direct.add(each.id)
                self._sides[each.trip_count or 0] |= sides

    def of_layers(self, phases: Mapping[int, str], unrolled: bool) -> list[Instruction]:
        """Loops that are all of one phase of the differentiated part and take one layer's parameters a turn.

        Not those over microbatches, nor the optimizer's, nor over the chunks of a loss. Where none takes stacked
        parameters and nothing is unrolled: those that hand an activation on from turn to turn.
        """
        pure = [each for each in self._all if _is_of_one_phase(each, phases)]
        found = [each for each in pure if self.takes_layers(each)]
        if found or unrolled:
            return found
        forward = {each.trip_count for each in pure if phases.get(each.id) == FORWARD and _hands_on(each)}
        return [each for each in pure if each.trip_count in forward]

    def takes_layers(self, loop: Instruction) -> bool:
        """Whether it takes stacked parameters, or, like backward's, casts or gradients of the size of such ones."""
        length = loop.trip_count or 0
        known = self._sides.get(length)
        return loop.id in self._direct or (
            known is not None
            and any(each.dims[:1] == (length,) and tuple(sorted(each.dims)) in known for each in loop.shape.elements)
        )

    def _stacked_parameters(self, loop: Instruction) -> set[tuple[int, ...]]:
        """Sides, in order of size, of the arguments of the step in its state that have an axis of its length."""
        return {
            tuple(sorted(element.dims))
            for position, element in enumerate(loop.shape.elements)
            if len(element.dims) > 1
            and element.dims[0] == loop.trip_count
            and self._is_argument(loop.operands[0], (position,))
        }

    def _is_argument(self, at: Instruction, index: tuple[int, ...]) -> bool:
        for _ in range(_STEPS):
            if at.opcode == "get-tuple-element":
                at, index = at.operands[0], (at.tuple_index, *index)
            elif at.opcode == "tuple" and index and index[0] < len(at.operands):
                at, index = at.operands[index[0]], index[1:]
            elif at.opcode in ("while", "optimization-barrier", "opt-barrier") and index and at.operands:
                at = at.operands[0]
            elif at.opcode == "parameter":
                if at.id not in self._loop_of:
                    return at.id in self._arguments
                at = self._loop_of[at.id].operands[0]
            elif at.opcode in _VIEWS:
                large = [operand for operand in at.operands[:_OPERANDS] if operand.shape.num_elements > 1]
                if len(large) != 1 or len(at.operands) > _OPERANDS:
                    return False
                at, index = large[0], ()
            else:
                return False
        return False


def _is_of_one_phase(loop: Instruction, phases: Mapping[int, str]) -> bool:
    seen = {phases.get(each.id) for each in loop.called[0].instructions}
    forward, backward = FORWARD in seen, BACKWARD in seen or RECOMPUTE in seen
    return forward != backward


def _hands_on(loop: Instruction) -> bool:
    """Whether more than a scalar goes on from turn to turn: not so in a sum over the chunks of a loss."""
    root = loop.called[0].root
    return root.opcode == "tuple" and any(
        each.shape.num_elements > 1
        and each.shape.dims[:1] != (loop.trip_count,)
        and not (each.opcode == "get-tuple-element" and each.tuple_index == position)
        for position, each in enumerate(root.operands)
    )


def _name_of_loop(loop: Instruction) -> str:
    """The scope that most of the loop's instructions share below its own, else its own, else `layers`."""
    outer = module_path(loop.op_name)
    deeper = Counter(
        path[len(outer)]
        for each in _inside(loop)
        if len(path := module_path(each.op_name)) > len(outer) and path[: len(outer)] == outer
    )
    if deeper and deeper.most_common(1)[0][1] >= _MOST * deeper.total():
        return deeper.most_common(1)[0][0]
    return outer[-1] if outer else "layers"


def _inside(loop: Instruction) -> Iterator[Instruction]:
    """What runs in a loop, and in the loops in it."""
    level, seen = [loop], {loop.called[0].id}
    for _ in range(_NESTING):
        deeper = []
        for outer in level:
            for each in outer.called[0].instructions:
                yield each
                if each.opcode == "while" and each.called and each.called[0].id not in seen:
                    seen.add(each.called[0].id)
                    deeper.append(each)
        level = deeper
