"""How a program is built: the phase of each instruction, its loops, its repeated blocks, and what values come from."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from remat_kit._hlo.module import Computation, Instruction, Module
from remat_kit._hlo.scope import module_path, split_number
from remat_kit._phase import BACKWARD, FORWARD, RECOMPUTE

UNKNOWN = "unknown"
ARGUMENT = "argument"

Bits = int | tuple[int, ...]
"""Bits of a value; of a tuple, of each element."""

_PASSED_ON = frozenset({"bitcast", "optimization-barrier", "opt-barrier", "async-done"})
_TURNS = 16
"""How often one computation runs at most. Bits only come on, so a few turns do; a hostile file could ask for more."""
_CALLS = frozenset({"while", "call", "conditional", "async-start"})

# What a value is made of, as bits. In backward everything that depends on an activation is a gradient.
PARAMETER, STATE, BATCH, GRADIENT = 1, 2, 4, 8
ORIGINS = PARAMETER | STATE | BATCH | GRADIENT
AFTER_FORWARD_BLOCK, AFTER_BACKWARD_BLOCK = 16, 32

_MOST = 0.8
"""What share of a loop's named instructions has to be in a scope for the loop to be called by it."""
_LEAST_SHARE = 0.05
"""A stack of numbered scopes counts as blocks when it holds at least this share of the named instructions."""


@dataclass(slots=True)
class Structure:
    """What is known of a module beside its instructions.

    Attributes:
      phases: of every instruction outside of fused computations, by id.
      blocks: the repeated block of each such instruction, for those that are in one.
      layer_loops: the whiles that run the layers of a scanned stack, by id, with the block's name.
      bits: what each value is made of, and which blocks it depends on; one number an element for a tuple.
    """

    phases: dict[int, str] = field(default_factory=dict)
    blocks: dict[int, str] = field(default_factory=dict)
    layer_loops: dict[int, str] = field(default_factory=dict)
    bits: dict[int, Bits] = field(default_factory=dict)


def structure_of(module: Module, origins: Mapping[int, int]) -> Structure:
    """The structure of `module`. `origins` says what each parameter of its entry holds, as bits; others are a batch."""
    computations = _running(module)
    found = Structure(_phases(module, computations))
    _find_blocks(module, computations, found)
    _Origins(found, computations, origins).run(module.entry)
    return found


def _running(module: Module) -> list[Computation]:
    """The computations that run as such, callees before callers: not the inside of fusions, nor combiners."""
    reached = {module.entry.id}
    for computation in reversed(module.computations.values()):
        if computation.id in reached:
            for each in computation.instructions:
                if each.opcode in _CALLS:
                    reached.update(called.id for called in each.called if not called.is_fusion)
    return [each for each in module.computations.values() if each.id in reached]


def _phases(module: Module, computations: Sequence[Computation]) -> dict[int, str]:
    """Phase by instruction id. What has no name is of the phase of its largest operand, else of its first user."""
    phases: dict[int, str] = {}
    waiting: list[Instruction] = []
    entry = module.entry.id
    for computation in computations:
        for each in computation.instructions:
            if each.opcode == "parameter":
                phases[each.id] = ARGUMENT if computation.id == entry else UNKNOWN
                continue
            phase = named_phase(each)
            if phase == UNKNOWN and each.operands:
                largest = max(each.operands, key=lambda operand: operand.shape.bytes)
                phase = phases.get(largest.id, UNKNOWN)
            if phase in (UNKNOWN, ARGUMENT):
                phase = UNKNOWN
                waiting.append(each)
            phases[each.id] = phase
    for each in reversed(waiting):
        known = (phases.get(user.id, UNKNOWN) for user in each.users)
        phases[each.id] = next((phase for phase in known if phase not in (UNKNOWN, ARGUMENT)), UNKNOWN)
    return phases


def named_phase(instruction: Instruction) -> str:
    """The phase that the instruction's own name tells, or that of the last thing fused into it that has a name.

    A copy that XLA made of an argument has the argument's name, which tells no phase.
    """
    if "/" in instruction.op_name:
        return instruction.phase
    for called in instruction.called:
        if called.is_fusion:
            for each in reversed(called.instructions):
                if "/" in each.op_name:
                    return each.phase
    return UNKNOWN


def _find_blocks(module: Module, computations: Sequence[Computation], found: Structure) -> None:
    stacks = _numbered_stacks(module)
    layer_loops = [
        each
        for computation in computations
        for each in computation.instructions
        if each.opcode == "while" and each.called and _is_layer_loop(each, found.phases)
    ]
    lengths = {each.trip_count for each in layer_loops if _takes_stacked_parameters(each)}
    # Backward's loop may take casts of the parameters that forward has stacked, so it is known by its length.
    named = {each.id: _name_of_loop(each) for each in layer_loops if not lengths or each.trip_count in lengths}
    # Outermost first, and what a loop runs belongs to the block of the loop.
    inherited: dict[int, str] = {}
    for computation in reversed(computations):
        around = inherited.get(computation.id, "")
        for each in computation.instructions:
            block = around or _block_in(module_path(each.op_name), stacks)
            if not block and each.id in named:
                block = found.layer_loops[each.id] = named[each.id]
            if block:
                found.blocks[each.id] = block
                if each.opcode in _CALLS:
                    inherited.update((called.id, block) for called in each.called)


def _is_layer_loop(loop: Instruction, phases: Mapping[int, str]) -> bool:
    """A loop that is all of one phase of the differentiated part: not one over microbatches, nor the optimizer's."""
    seen = {phases.get(each.id, UNKNOWN) for each in loop.called[0].instructions}
    forward, backward = FORWARD in seen, BACKWARD in seen or RECOMPUTE in seen
    return forward != backward and (loop.trip_count or 0) > 1


def _takes_stacked_parameters(loop: Instruction) -> bool:
    """Whether it is given arguments of the step with an axis of its own length: parameters of one layer a turn.

    A loop over the chunks of a loss is not.
    """
    state = loop.operands[0] if loop.operands else None
    if state is None or state.opcode != "tuple":
        return False
    return any(_is_stacked_argument(element, loop.trip_count or 0) for element in state.operands)


def _is_stacked_argument(value: Instruction, length: int) -> bool:
    for _ in range(8):
        if value.shape.dims[:1] != (length,):
            return False
        if value.opcode == "parameter":
            return True
        if value.opcode not in ("copy", "convert", "bitcast", "fusion", "transpose") or len(value.operands) != 1:
            return False
        value = value.operands[0]
    return False


def _name_of_loop(loop: Instruction) -> str:
    """The scope that most of the loop's instructions share below its own, else its own, else `layers`."""
    outer = module_path(loop.op_name)
    deeper = Counter(
        path[len(outer)]
        for each in loop.called[0].instructions
        if len(path := module_path(each.op_name)) > len(outer) and path[: len(outer)] == outer
    )
    if deeper and deeper.most_common(1)[0][1] >= _MOST * deeper.total():
        return deeper.most_common(1)[0][0]
    return outer[-1] if outer else "layers"


def _numbered_stacks(module: Module) -> frozenset[tuple[tuple[str, ...], str]]:
    """(path around, name without number) of scopes that occur with several numbers and hold much of the program."""
    members: dict[tuple[tuple[str, ...], str], Counter[int]] = defaultdict(Counter)
    total = 0
    counts = Counter(
        module_path(each.op_name)
        for each in module.instructions.values()
        if each.opcode not in ("parameter", "constant") and "/" in each.op_name
    )
    for path, count in counts.items():
        total += count
        for position, part in enumerate(path):
            if split := split_number(part):
                members[path[:position], split[0]][split[1]] += count
                break
    return frozenset(
        key for key, numbers in members.items() if len(numbers) > 1 and numbers.total() >= _LEAST_SHARE * total
    )


def _block_in(path: tuple[str, ...], stacks: frozenset[tuple[tuple[str, ...], str]]) -> str:
    for position, part in enumerate(path):
        split = split_number(part)
        if split and (path[:position], split[0]) in stacks:
            return part
    return ""


class _Origins:
    """Carries bits from the parameters of the entry along the program, until nothing changes.

    A tuple has bits for each element; tuples in tuples are taken as one element. A computation runs again when what
    it is given, or what something that it calls results in, has more bits than before.
    """

    def __init__(self, structure: Structure, computations: Sequence[Computation], origins: Mapping[int, int]) -> None:
        self.structure = structure
        self.origins = origins
        # What is called runs before its caller, which would otherwise run again for each of them.
        self.order = {each.id: position for position, each in enumerate(computations)}
        self.computations = {each.id: each for each in computations}
        self.arguments: dict[int, dict[int, Bits]] = defaultdict(dict)
        self.results: dict[int, Bits] = {}
        self.callers: dict[int, set[int]] = defaultdict(set)
        self.dirty: set[int] = set()

    def run(self, entry: Computation) -> None:
        """Fills `Structure.bits`."""
        self.dirty.add(entry.id)
        turns: Counter[int] = Counter()
        while self.dirty:
            identifier = min(self.dirty, key=self.order.__getitem__)
            self.dirty.remove(identifier)
            turns[identifier] += 1
            if turns[identifier] > _TURNS:
                continue
            result = self._evaluate(self.computations[identifier], identifier == entry.id)
            if result != self.results.get(identifier):
                self.results[identifier] = result
                self.dirty |= self.callers[identifier]

    def _evaluate(self, computation: Computation, is_entry: bool) -> Bits:
        bits, phases, blocks = self.structure.bits, self.structure.phases, self.structure.blocks
        given = self.arguments[computation.id]
        for each in computation.instructions:
            opcode = each.opcode
            if opcode == "parameter":
                number = each.parameter_number
                value: Bits = self.origins.get(number, BATCH) if is_entry else given.get(number, 0)
            elif opcode == "get-tuple-element":
                value = bits_at(bits[each.operands[0].id], (each.tuple_index,))
            elif opcode == "tuple":
                value = tuple([flat_bits(bits[operand.id]) for operand in each.operands])
            elif opcode in _CALLS and each.called:
                value = self._call(each, computation)
            elif opcode in _PASSED_ON and len(each.operands) == 1:
                value = bits[each.operands[0].id]
            else:
                value = 0
                for operand in each.operands:
                    value |= flat_bits(bits[operand.id])
                phase = phases[each.id]
                if phase == BACKWARD and value & (BATCH | GRADIENT):
                    value = value & ~ORIGINS | GRADIENT
                if each.id in blocks and value & ORIGINS:  # constants of several blocks are merged into one
                    if phase == FORWARD:
                        value |= AFTER_FORWARD_BLOCK
                    elif phase in (BACKWARD, RECOMPUTE):
                        value |= AFTER_BACKWARD_BLOCK
            bits[each.id] = value
        return bits[computation.root.id]

    def _call(self, call: Instruction, computation: Computation) -> Bits:
        """Hands operands on to what is called, and takes what it results in so far."""
        operands = [self.structure.bits[operand.id] for operand in call.operands]
        value: Bits = operands[0] if call.opcode == "while" and operands else 0
        for number, called in enumerate(call.called):
            if called.id not in self.computations:
                continue
            self.callers[called.id].add(computation.id)
            handed = operands[number + 1 : number + 2] if call.opcode == "conditional" else operands
            given = self.arguments[called.id]
            for position, bits in enumerate(handed):
                merged = _union(given.get(position, 0), bits)
                if merged != given.get(position):
                    given[position] = merged
                    self.dirty.add(called.id)
            if called.id not in self.results:
                self.dirty.add(called.id)
            is_condition = call.opcode == "while" and number > 0
            if not is_condition:
                value = _union(value, self.results.get(called.id, 0))
        return value


def flat_bits(value: Bits) -> int:
    """The bits of a whole value."""
    if isinstance(value, int):
        return value
    total = 0
    for element in value:
        total |= element
    return total


def bits_at(value: Bits, index: tuple[int, ...]) -> int:
    """The bits of the element at `index`."""
    if isinstance(value, int):
        return value
    return value[index[0]] if index and index[0] < len(value) else flat_bits(value)


def _union(left: Bits, right: Bits) -> Bits:
    if isinstance(left, tuple) and isinstance(right, tuple) and len(left) == len(right):
        return left if left == right else tuple([one | other for one, other in zip(left, right, strict=True)])
    if isinstance(left, tuple) and right == 0:
        return left
    if isinstance(right, tuple) and left == 0:
        return right
    return flat_bits(left) | flat_bits(right)
