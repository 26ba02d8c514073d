"""How a program is built: the phase of each instruction, its loops, its repeated blocks, and what values come from."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from remat_kit._hlo.blocks import CALLS, Stack, find_blocks, name_of
from remat_kit._hlo.module import Computation, Instruction, Module
from remat_kit._phase import BACKWARD, FORWARD, RECOMPUTE, UPDATE, phase_of

UNKNOWN = "unknown"
ARGUMENT = "argument"

Bits = int | tuple[int, ...]
"""Bits of a value; of a tuple, of each element."""

_PASSED_ON = frozenset({"bitcast", "optimization-barrier", "opt-barrier", "async-done"})
PHASES = (FORWARD, RECOMPUTE, BACKWARD, UPDATE)
DIFFERENTIATED = frozenset({FORWARD, RECOMPUTE, BACKWARD})
_TURNS = 16
"""How often one computation runs at most. Bits only come on, so a few turns do; a hostile file could ask for more."""

# What a value is made of, as bits. In backward everything that depends on an activation is a gradient.
PARAMETER, STATE, BATCH, GRADIENT = 1, 2, 4, 8
ORIGINS = PARAMETER | STATE | BATCH | GRADIENT
AFTER_FORWARD_BLOCK, AFTER_BACKWARD_BLOCK = 16, 32


@dataclass(slots=True)
class Structure:
    """What is known of a module beside its instructions.

    Attributes:
      phases: of every instruction outside of fused computations, by id.
      blocks: the repeated block of each such instruction, for those that are in one.
      layer_loops, inner_loops, stacks: see `Blocks`.
      feeding: what forward makes and a block's forward depends on.
      bits: what each value is made of, and which blocks it depends on; one number an element for a tuple.
    """

    phases: dict[int, str] = field(default_factory=dict)
    blocks: dict[int, str] = field(default_factory=dict)
    layer_loops: dict[int, str] = field(default_factory=dict)
    inner_loops: dict[int, int] = field(default_factory=dict)
    stacks: Mapping[Stack, frozenset[int]] = field(default_factory=dict)
    feeding: set[int] = field(default_factory=set)
    bits: dict[int, Bits] = field(default_factory=dict)


def structure_of(module: Module, origins: Mapping[int, int]) -> Structure:
    """The structure of `module`. `origins` says what each parameter of its entry holds, as bits; others are a batch."""
    computations = running(module)
    phases = phases_of(module, computations)
    held = 0
    for bits in origins.values():
        held |= bits
    if held & PARAMETER and not held & STATE and not DIFFERENTIATED & set(phases.values()):
        # A model that is only evaluated: nothing is updated.
        phases = {number: FORWARD if phase == UPDATE else phase for number, phase in phases.items()}
    parameters = frozenset(number for number, bits in origins.items() if bits & PARAMETER)
    blocks = find_blocks(module, computations, phases, parameters)
    feeding = _feeding(computations, phases, blocks.of)
    found = Structure(phases, blocks.of, blocks.layer_loops, blocks.inner_loops, blocks.stacks, feeding)
    _Origins(found, computations, origins).run(module.entry)
    return found


def running(module: Module) -> list[Computation]:
    """The computations that run as such, callees before callers: not the inside of fusions, nor combiners."""
    reached = {module.entry.id}
    for computation in reversed(module.computations.values()):
        if computation.id in reached:
            for each in computation.instructions:
                if each.opcode in CALLS:
                    reached.update(called.id for called in each.called if not called.is_fusion)
    return [each for each in module.computations.values() if each.id in reached]


def phases_of(module: Module, computations: Sequence[Computation]) -> dict[int, str]:
    """Phase by instruction id. What has no name is of the phase of its largest operand, else of its earliest user.

    So are constants that JAX has moved out of the differentiated part, and what is made of nothing else.
    """
    phases: dict[int, str] = {}
    waiting: list[Instruction] = []
    constant: set[int] = set()
    entry = module.entry.id
    for computation in computations:
        for each in computation.instructions:
            if each.opcode == "parameter":
                phases[each.id] = ARGUMENT if computation.id == entry else UNKNOWN
                continue
            name = name_of(each)
            phase = phase_of(name) if name else UNKNOWN
            if phase == UNKNOWN and each.operands:
                largest = max(each.operands, key=lambda operand: (operand.id not in constant, operand.shape.bytes))
                phase = phases.get(largest.id, UNKNOWN)
            if all(operand.id in constant for operand in each.operands) and not each.called[1:]:
                constant.add(each.id)
            if phase in (UNKNOWN, ARGUMENT):
                phase = UNKNOWN
                waiting.append(each)
            elif phase == UPDATE and each.id in constant:
                waiting.append(each)
            phases[each.id] = phase
    for each in reversed(waiting):
        known = {phases.get(user.id, UNKNOWN) for user in each.users}
        phases[each.id] = next((phase for phase in PHASES if phase in known), phases[each.id])
    return phases


def _feeding(computations: Sequence[Computation], phases: Mapping[int, str], blocks: Mapping[int, str]) -> set[int]:
    """What forward makes and a block's forward depends on, within its own computation."""
    found: set[int] = set()
    for computation in computations:
        for each in reversed(computation.instructions):
            for user in each.users:
                if (phases[user.id] == FORWARD and user.id in blocks) or (
                    user.id in found and phases[each.id] not in (BACKWARD, RECOMPUTE)
                ):
                    found.add(each.id)
                    break
    return found


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
            elif opcode in CALLS and each.called:
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
            if call.opcode == "while" and operands:
                handed = [_carried(operands[0], self.results.get(call.called[0].id, 0))]
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


def _carried(initial: Bits, result: Bits) -> Bits:
    """A loop's state from turn to turn: a sum that begins with zeros is what is added; else it stays what it was.

    So a parameter that is updated in each turn stays a parameter.
    """
    if isinstance(initial, tuple) and isinstance(result, tuple) and len(initial) == len(result):
        return tuple([one if one & ORIGINS else one | other for one, other in zip(initial, result, strict=True)])
    return initial


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
