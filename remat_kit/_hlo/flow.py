"""Where a value goes: through tuples, loops, calls and updates in place, to the instructions that read it."""

from collections import defaultdict
from dataclasses import dataclass, field

from remat_kit._hlo.module import Computation, Instruction, Module

Index = tuple[int, ...]
"""A position in the tuples of an instruction's result, () for the whole of it."""

Value = tuple[Instruction, Index]
"""What an instruction puts at an index of its result."""

_STEPS = 60
"""Steps of all walks together, for each instruction of the program."""
_VIEWS = 32
"""Views of views that are looked through."""
_PASSES_WHOLE = frozenset({"bitcast", "optimization-barrier", "opt-barrier", "domain", "add-dependency"})


@dataclass(slots=True)
class Uses:
    """What becomes of one value.

    Attributes:
      readers: instructions that read it, each once, in no order; takes: the number of the operand that it is of each.
      loops: whiles that it enters, is written in, or comes out of; states: where in the state of each.
      writes: instructions that write a part of it in place.
    """

    readers: dict[int, Instruction] = field(default_factory=dict)
    takes: dict[int, int] = field(default_factory=dict)
    loops: dict[int, Instruction] = field(default_factory=dict)
    states: dict[int, Index] = field(default_factory=dict)
    writes: dict[int, Instruction] = field(default_factory=dict)

    def enters(self, loop: Instruction, where: Index) -> None:
        """Notes a loop, and where in its state the value is."""
        self.loops[loop.id] = loop
        self.states.setdefault(loop.id, where)


class Flow:
    """The ways that values take through a module. Built once, asked often."""

    def __init__(self, module: Module) -> None:
        self._callers: dict[int, list[Instruction]] = defaultdict(list)
        for instruction in module.instructions.values():
            for called in dict.fromkeys(instruction.called):
                if not called.is_fusion:
                    self._callers[called.id].append(instruction)
        self._home: dict[int, Computation] = {
            each.root.id: each for each in module.computations.values() if not each.is_fusion
        }
        # XLA may say that a loop's state is defined at the parameter of its body, or of its condition.
        self._loop_of_parameter = callers_of_parameters(module, ("while",))
        # A program of a compiler is far from it; a file made to be hard is cut short, and less of it attributed.
        self._steps_left = _STEPS * (len(module.instructions) + 1000)
        self._users: dict[int, tuple[dict[int, list[Instruction]], list[Instruction]]] = {}
        self._in_place: dict[int, dict[int, Index]] = {}

    def uses(self, instruction: Instruction, index: Index = ()) -> Uses:
        """What becomes of the value that `instruction` puts at `index` of its result."""
        found = Uses()
        seen = {(instruction.id, index)}
        stack = [(instruction, index)]
        while stack and self._steps_left > 0:
            at, where = stack.pop()
            steps = self._steps(at, where, found)
            for step in steps:
                key = (step[0].id, step[1])
                if key not in seen:
                    seen.add(key)
                    stack.append(step)
            self._steps_left -= 1 + len(at.users) + len(steps)
        return found

    def _steps(self, at: Instruction, where: Index, found: Uses) -> list[Value]:
        """Where the value at `where` of `at` is next; readers and loops go to `found`."""
        taken, others = self._split_users(at)
        steps: list[Value] = []
        if where:
            steps += [(user, where[1:]) for user in taken.get(where[0], ())]
        else:
            steps += [(user, ()) for users in taken.values() for user in users]
        for user in others:
            opcode = user.opcode
            if opcode in _PASSES_WHOLE:
                steps.append((user, where))
            elif opcode == "tuple":
                steps += [(user, (n, *where)) for n, operand in enumerate(user.operands) if operand is at]
            elif opcode == "while":
                found.enters(user, where)
                steps.append((user, where))
                steps += [(called.parameters[0], where) for called in user.called if called.parameters]
            elif opcode in ("call", "async-start"):
                steps += self._into_call(user, at, where)
                if opcode == "async-start":
                    found.readers[user.id] = user
            elif opcode == "conditional":
                for number, operand in enumerate(user.operands):
                    if operand is at and 0 < number <= len(user.called) and user.called[number - 1].parameters:
                        steps.append((user.called[number - 1].parameters[0], where))
            elif (into := self._written_in_place(user, at)) is not None:
                found.writes[user.id] = user
                steps.append((user, into))
            else:
                found.readers[user.id] = user
                found.takes.setdefault(user.id, user.operands.index(at))
        loop = self._loop_of_parameter.get(at.id)
        if loop is not None:
            found.enters(loop, where)
            steps.append((loop, where))
            steps += [(called.parameters[0], where) for called in loop.called if called.parameters]
        home = self._home.get(at.id)
        for caller in self._callers.get(home.id, ()) if home else ():
            if caller.opcode == "while":
                found.enters(caller, where)
                steps.append((caller, where))
                steps += [(called.parameters[0], where) for called in caller.called if called.parameters]
            elif caller.opcode in ("call", "conditional"):
                steps.append((caller, where))
            elif caller.opcode == "async-start":
                steps += [(user, where) for user in caller.users if user.opcode == "async-done"]
        return steps

    @staticmethod
    def _into_call(user: Instruction, at: Instruction, where: Index) -> list[Value]:
        return [
            (called.parameters[number], where)
            for called in user.called
            for number, operand in enumerate(user.operands)
            if operand is at and number < len(called.parameters) and not called.is_fusion
        ]

    def _split_users(self, at: Instruction) -> tuple[dict[int, list[Instruction]], list[Instruction]]:
        """Users by the element that they take out of the tuple, and those that take it whole."""
        known = self._users.get(at.id)
        if known is None:
            taken: dict[int, list[Instruction]] = {}
            others = []
            for user in at.users:
                if user.opcode == "get-tuple-element":
                    taken.setdefault(user.tuple_index, []).append(user)
                else:
                    others.append(user)
            known = self._users[at.id] = (taken, others)
        return known

    def _written_in_place(self, user: Instruction, at: Instruction) -> Index | None:
        """Where in the result of `user` its operand `at` is, when `user` only writes a part of it anew."""
        places = self._in_place.get(user.id)
        if places is None:
            places = self._in_place[user.id] = places_written(user)
        if places:
            for number, operand in enumerate(user.operands):
                if operand is at and number in places:
                    return places[number]
        return None


def callers_of_parameters(module: Module, opcodes: tuple[str, ...]) -> dict[int, Instruction]:
    """Id of a parameter -> the instruction, of one of the opcodes, that calls the computation it belongs to."""
    return {
        parameter.id: caller
        for caller in module.instructions.values()
        if caller.opcode in opcodes
        for called in caller.called
        for parameter in called.parameters
    }


def places_written(instruction: Instruction) -> dict[int, Index]:
    """Operand number -> index of the result that holds that operand with a part of it written anew."""
    if instruction.opcode in ("dynamic-update-slice", "scatter"):
        return {0: ()}
    if instruction.opcode != "fusion" or not instruction.called:
        return {}
    root = instruction.called[0].root
    whole = root.opcode != "tuple"
    found: dict[int, Index] = {}
    for number, output in enumerate((root,) if whole else root.operands):
        at = skip_bitcasts(output)
        if at.opcode in ("dynamic-update-slice", "scatter"):
            base = skip_bitcasts(at.operands[0])
            if base.opcode == "parameter":
                found[base.parameter_number] = () if whole else (number,)
    return found


def skip_bitcasts(instruction: Instruction) -> Instruction:
    """What `instruction` is another view of."""
    for _ in range(_VIEWS):
        if instruction.opcode not in ("bitcast", "reshape") or not instruction.operands:
            break
        instruction = instruction.operands[0]
    return instruction


def skip_copies(instruction: Instruction) -> Instruction:
    """What `instruction` is a copy or another view of."""
    for _ in range(_VIEWS):
        if instruction.opcode not in ("bitcast", "reshape", "copy", "transpose") or not instruction.operands:
            break
        instruction = instruction.operands[0]
    return instruction
