"""Bytes and FLOPs of one kernel: what it reads, writes and computes when it runs once."""

from dataclasses import dataclass

from remat_kit._errors import RematKitError
from remat_kit._hlo.matmul import Matmul, matmul_of
from remat_kit._hlo.module import Computation, Instruction

FREE = frozenset({
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id",
    "add-dependency", "opt-barrier", "domain", "async-update", "get-dimension-size",
})  # fmt: skip
"""Opcodes that run no kernel."""

FREE_CALLS = frozenset({
    "AllocateBuffer", "CreateBuffer", "PinSelf", "Pin", "Unpin", "Sharding", "SPMDFullToShardShape",
    "SPMDShardToFullShape", "MoveToHost", "MoveToDevice", "annotate_device_placement", "LayoutConstraint",
    "xla.sdy.FuncResultSharding", "NopReturnToken",
})  # fmt: skip
"""Custom calls that are notes for the compiler, or make a buffer without touching it."""

_MOVES = FREE | {
    "broadcast", "reshape", "transpose", "slice", "dynamic-slice", "dynamic-update-slice", "gather", "concatenate",
    "pad", "iota", "copy", "convert", "reverse", "bitcast-convert", "custom-call", "dot", "convolution", "call",
    "fusion",
}  # fmt: skip
_VIEWS = ("bitcast", "reshape")
_CALLS = ("fusion", "call")
_UPDATES = ("dynamic-update-slice", "scatter")
_MOST_FLOPS, _MOST_MATMULS = 2**200, 10_000


@dataclass(frozen=True, slots=True)
class Cost:
    """One execution of a kernel.

    Attributes:
      matmuls: its matrix products.
      vector_flops: arithmetic outside the matrix units, one for each element of each operation (a transcendental
        counts as one, too).
      device_bytes: read from and written to device memory.
      host_bytes: moved over the host link.
      unknown: name of a custom call whose FLOPs are not known, else "".
    """

    matmuls: tuple[Matmul, ...]
    vector_flops: int
    device_bytes: int
    host_bytes: int
    unknown: str = ""


@dataclass(frozen=True, slots=True)
class _Inside:
    """A computation run as one kernel: elements read of each parameter, bytes written of each result, arithmetic."""

    wanted: tuple[int, ...]
    written: dict[tuple[int, ...], int]
    vector_flops: int
    matmuls: tuple[Matmul, ...]
    unknown: str


class Costs:
    """Costs of a module's kernels. What is known of a fused computation is kept for its next caller."""

    def __init__(self) -> None:
        self._insides: dict[int, _Inside] = {}

    def of(self, instruction: Instruction) -> Cost:
        """The cost of an instruction that runs as one kernel: a fusion, a custom call, or an operation by itself.

        Bytes: each array that is read or written once, whatever the caches hold. What is only sliced or gathered
        counts as the part that is taken. A dynamic-update-slice or scatter at the end of a kernel is done in place:
        it writes the update and leaves the rest alone, the buffer that it goes into is not read. That is how XLA
        runs it whenever the buffer is not needed any more, as in a loop's carry; otherwise a copy precedes it, which
        is an instruction of its own. A library call's workspace is not counted, nor is what is read twice because
        it fell out of the caches.
        """
        if instruction.opcode in _CALLS and instruction.called:
            inside = self._insides.get(instruction.called[0].id) or self._inside(instruction.called[0])
            wanted, written = inside.wanted, inside.written
            flops, matmuls, unknown = inside.vector_flops, inside.matmuls, inside.unknown
        else:
            size = instruction.shape.num_elements
            in_place = instruction.opcode in _UPDATES
            wanted = tuple(
                self._wanted_of(instruction, position, size, in_place) for position in range(len(instruction.operands))
            )
            written = _writes(instruction, (), in_place)
            matmul = matmul_of(instruction)
            matmuls = () if matmul is None else (matmul,)
            flops, unknown = _vector_flops(instruction, size), _unknown(instruction)
        device = host = 0
        read: dict[int, int] = {}
        for operand, elements in zip(instruction.operands, wanted, strict=False):
            size = operand.shape.num_elements
            part = -(-operand.shape.bytes * elements // size) if size else 0
            read[operand.id] = max(read.get(operand.id, 0), part)
        for operand in {operand.id: operand for operand in instruction.operands}.values():
            part = read.get(operand.id, 0)
            host, device = (host + part, device) if operand.shape.is_host else (host, device + part)
        for index, leaf in instruction.shape.leaves():
            part = written.get(index, leaf.bytes)
            host, device = (host + part, device) if leaf.is_host else (host, device + part)
        return Cost(matmuls, flops, device, host, unknown)

    def _inside(self, computation: Computation) -> _Inside:
        """What one run of a fused computation reads, writes and computes."""
        waiting = [computation]
        while waiting:  # Those that it calls come first, without recursion: a chain of calls can be long.
            last = waiting[-1]
            inner = [each.called[0] for each in last.instructions if each.opcode in _CALLS and each.called]
            missing = [each for each in inner if each.id not in self._insides]
            waiting += missing
            if not missing:
                waiting.pop()
                if last.id not in self._insides:
                    self._insides[last.id] = self._look_inside(last)
        return self._insides[computation.id]

    def _look_inside(self, computation: Computation) -> _Inside:
        wanted: dict[int, int] = {}
        written: dict[tuple[int, ...], int] = {}
        in_place: set[int] = set()
        cores: dict[int, Instruction] = {}
        root = computation.root
        results = enumerate(root.operands) if root.opcode == "tuple" else [(-1, root)]
        for position, result in results:
            wanted[result.id] = result.shape.num_elements
            index = () if position < 0 else (position,)
            core = _core(result, cores)
            if core.opcode in _UPDATES and _core(core.operands[0], cores).opcode == "parameter":
                in_place.add(core.id)
            written |= _writes(core, index, core.id in in_place)
        flops, unknown = 0, ""
        matmuls: list[Matmul] = []
        for instruction in reversed(computation.instructions):
            amount = wanted.get(instruction.id, 0)
            if not amount or instruction.opcode == "tuple":
                if instruction.opcode == "tuple" and instruction is not root and amount:
                    wanted |= {operand.id: operand.shape.num_elements for operand in instruction.operands}
                continue
            if instruction.opcode == "get-tuple-element":
                source = instruction.operands[0]
                wanted[source.id] = source.shape.num_elements
                continue
            for position, operand in enumerate(instruction.operands):
                more = self._wanted_of(instruction, position, amount, instruction.id in in_place)
                wanted[operand.id] = min(operand.shape.num_elements, wanted.get(operand.id, 0) + more)
            if instruction.opcode in _CALLS and instruction.called:
                inner = self._insides[instruction.called[0].id]
                size = instruction.shape.num_elements
                flops += inner.vector_flops * amount // size if size else 0
                matmuls += inner.matmuls
                unknown = unknown or inner.unknown
            else:
                flops += _vector_flops(instruction, amount)
                matmul = matmul_of(instruction)
                matmuls += [] if matmul is None else [matmul]
                unknown = unknown or _unknown(instruction)
            if flops > _MOST_FLOPS or len(matmuls) > _MOST_MATMULS:
                raise RematKitError(
                    f"computation {computation.name!r} has more arithmetic in it than a kernel can have. "
                    "Dump the module again (xla_dump_hlo_as_proto=True) and give the unchanged file."
                )
        taken = tuple(wanted.get(parameter.id, 0) for parameter in computation.parameters)
        return _Inside(taken, written, flops, tuple(matmuls), unknown)

    def _wanted_of(self, user: Instruction, position: int, amount: int, in_place: bool) -> int:
        """How many elements of an operand `user` reads to make `amount` elements of its result."""
        operand = user.operands[position]
        full, opcode = operand.shape.num_elements, user.opcode
        if opcode in ("slice", "dynamic-slice", "gather"):
            return min(full, amount) if position == 0 else full
        if opcode == "dynamic-update-slice":
            kept = 0 if in_place else full - min(full, user.operands[1].shape.num_elements)
            return kept if position == 0 else full
        if opcode == "scatter" and in_place:
            inputs = (len(user.operands) - 1) // 2
            # An update of part of the buffer reads what it adds to.
            return user.operands[inputs + 1 + position].shape.num_elements if position < inputs else full
        if opcode in ("broadcast", "pad", "concatenate"):
            return min(full, amount)
        size = user.shape.num_elements
        if not size:
            return full
        if opcode in _CALLS and user.called:
            inner = self._insides[user.called[0].id].wanted
            full = inner[position] if position < len(inner) else full
        return min(full, -(-full * amount // size))


def _core(instruction: Instruction, known: dict[int, Instruction]) -> Instruction:
    """What a result is before it is looked at in another shape. `known` keeps the answers."""
    path = []
    while instruction.opcode in _VIEWS and instruction.operands and instruction.id not in known:
        path.append(instruction.id)
        instruction = instruction.operands[0]
    core = known.get(instruction.id, instruction)
    known.update(dict.fromkeys(path, core))
    return core


def _writes(core: Instruction, index: tuple[int, ...], in_place: bool) -> dict[tuple[int, ...], int]:
    """Bytes written of those parts of a result that are not written in full, by index."""
    if core.opcode == "get-tuple-element" and _is_workspace(core.operands[0], core.tuple_index):
        return {index: 0}
    if core.opcode == "custom-call":
        return {(*index, i): 0 for i in range(len(core.shape.elements)) if _is_workspace(core, i)}
    if in_place and core.opcode == "dynamic-update-slice":
        return {index: core.operands[1].shape.bytes}
    if in_place:
        inputs = (len(core.operands) - 1) // 2
        parts = [update.shape.bytes for update in core.operands[inputs + 1 :]]
        return {index: parts[0]} if not core.shape.elements else {(*index, i): part for i, part in enumerate(parts)}
    return {}


def _is_workspace(call: Instruction, position: int) -> bool:
    """Whether an element of a library call's result is scratch memory: bytes, at the end."""
    elements = call.shape.elements
    if call.opcode != "custom-call" or not call.custom_call_target.startswith(("__cublas$", "__cudnn$")):
        return False
    return position == len(elements) - 1 and position > 0 and elements[position].dtype in ("s8", "u8")


def _vector_flops(instruction: Instruction, amount: int) -> int:
    """Arithmetic outside the matrix units, one for each element of the result, or of what is reduced to it."""
    if instruction.opcode in _MOVES:
        return 0
    if instruction.opcode in ("reduce", "reduce-window", "scatter") and instruction.operands:
        return instruction.operands[0 if instruction.opcode != "scatter" else -1].shape.num_elements
    return amount


def _unknown(instruction: Instruction) -> str:
    target = instruction.custom_call_target
    return target if target and not target.startswith(("__cublas$", "__cudnn$", "__cub$")) else ""
