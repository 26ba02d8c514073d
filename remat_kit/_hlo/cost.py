"""Bytes and FLOPs of one kernel: what it reads, writes and computes when it runs once."""

from dataclasses import dataclass

from remat_kit._hlo.matmul import Matmul, matmul_of
from remat_kit._hlo.module import Computation, Instruction, Shape

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
_UPDATES = ("dynamic-update-slice", "scatter")


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
        if instruction.opcode in ("fusion", "call") and instruction.called:
            inside = self._inside(instruction.called[0])
            wanted, written = inside.wanted, inside.written
            flops, matmuls, unknown = inside.vector_flops, inside.matmuls, inside.unknown
        else:
            size = _size(instruction.shape)
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
            size = _size(operand.shape)
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
        known = self._insides.get(computation.id)
        if known is not None:
            return known
        wanted: dict[int, int] = {}
        written: dict[tuple[int, ...], int] = {}
        in_place: set[int] = set()
        root = computation.root
        results = enumerate(root.operands) if root.opcode == "tuple" else [(-1, root)]
        for position, result in results:
            wanted[result.id] = _size(result.shape)
            index = () if position < 0 else (position,)
            core = _core(result)
            if core.opcode in _UPDATES and _core(core.operands[0]).opcode == "parameter":
                in_place.add(core.id)
            written |= _writes(core, index, core.id in in_place)
        flops, unknown = 0, ""
        matmuls: list[Matmul] = []
        for instruction in reversed(computation.instructions):
            amount = wanted.get(instruction.id, 0)
            if not amount or instruction.opcode == "tuple":
                if instruction.opcode == "tuple" and instruction is not root and amount:
                    wanted |= {operand.id: _size(operand.shape) for operand in instruction.operands}
                continue
            if instruction.opcode == "get-tuple-element":
                source = instruction.operands[0]
                wanted[source.id] = _size(source.shape)
                continue
            for position, operand in enumerate(instruction.operands):
                more = self._wanted_of(instruction, position, amount, instruction.id in in_place)
                wanted[operand.id] = min(_size(operand.shape), wanted.get(operand.id, 0) + more)
            if instruction.opcode in ("fusion", "call") and instruction.called:
                inner = self._inside(instruction.called[0])
                size = _size(instruction.shape)
                flops += inner.vector_flops * amount // size if size else 0
                matmuls += inner.matmuls
                unknown = unknown or inner.unknown
            else:
                flops += _vector_flops(instruction, amount)
                matmul = matmul_of(instruction)
                matmuls += [] if matmul is None else [matmul]
                unknown = unknown or _unknown(instruction)
        taken = tuple(wanted.get(parameter.id, 0) for parameter in computation.parameters)
        inside = self._insides[computation.id] = _Inside(taken, written, flops, tuple(matmuls), unknown)
        return inside

    def _wanted_of(self, user: Instruction, position: int, amount: int, in_place: bool) -> int:
        """How many elements of an operand `user` reads to make `amount` elements of its result."""
        operand = user.operands[position]
        full, opcode = _size(operand.shape), user.opcode
        if opcode in ("slice", "dynamic-slice", "gather"):
            return min(full, amount) if position == 0 else full
        if opcode == "dynamic-update-slice":
            kept = 0 if in_place else full - min(full, _size(user.operands[1].shape))
            return kept if position == 0 else full
        if opcode == "scatter" and in_place:
            inputs = (len(user.operands) - 1) // 2
            # An update of part of the buffer reads what it adds to.
            return _size(user.operands[inputs + 1 + position].shape) if position < inputs else full
        if opcode in ("broadcast", "pad", "concatenate"):
            return min(full, amount)
        size = _size(user.shape)
        if not size:
            return full
        if opcode in ("fusion", "call") and user.called:
            inner = self._inside(user.called[0]).wanted
            full = inner[position] if position < len(inner) else full
        return min(full, -(-full * amount // size))


def _size(shape: Shape) -> int:
    """The number of elements, of all arrays in a tuple together."""
    return shape.size if not shape.elements else sum(leaf.size for _, leaf in shape.leaves())


def _core(instruction: Instruction) -> Instruction:
    """What a result is before it is looked at in another shape."""
    while instruction.opcode in _VIEWS and instruction.operands:
        instruction = instruction.operands[0]
    return instruction


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
        return _size(instruction.operands[0 if instruction.opcode != "scatter" else -1].shape)
    return amount


def _unknown(instruction: Instruction) -> str:
    target = instruction.custom_call_target
    return target if target and not target.startswith(("__cublas$", "__cudnn$", "__cub$")) else ""
