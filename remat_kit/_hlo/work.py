"""FLOPs of matrix products as compiled, loops times their trips."""

from collections.abc import Mapping

from remat_kit._hlo.matmul import matmul_of
from remat_kit._hlo.module import Instruction, Module
from remat_kit._phase import RECOMPUTE

_MOST = 2**63 - 1
_MATRIX_OPCODES = frozenset({"dot", "convolution", "custom-call"})


def executions(module: Module) -> dict[int, int]:
    """How often each computation outside of fusions runs in one step, by id; a loop of unknown length counts once."""
    count = {each.id: 0 for each in module.computations.values() if not each.is_fusion}
    count[module.entry.id] = 1
    # Callers stand after what they call, so each count is final when it is reached from the back.
    for identifier in reversed(count):
        runs = count[identifier]
        if not runs:
            continue
        for each in module.computations[identifier].instructions:
            for called in each.called:
                if called.id in count and not called.is_fusion:
                    more = runs * (_trips(each) if each.opcode == "while" else 1)
                    count[called.id] = min(count[called.id] + more, _MOST)
    return count


def _trips(loop: Instruction) -> int:
    trips = loop.trip_count
    return 1 if trips is None else trips


def matmul_flops(module: Module, phases: Mapping[int, str]) -> tuple[int, int]:
    """FLOPs of matrix products, convolutions and fused attention: (all, marked as recomputation).

    What an operation of a fusion is marked as counts, not what the fusion is.
    """
    inside: dict[int, tuple[int, int, int]] = {}
    total = recomputed = 0
    for identifier, runs in executions(module).items():
        if not runs:
            continue
        for each in module.computations[identifier].instructions:
            found = [_of(each)]
            for called in each.called:
                if called.is_fusion:
                    if called.id not in inside:
                        parts = [_of(inner) for inner in called.instructions]
                        inside[called.id] = (
                            sum(part[0] for part in parts),
                            sum(part[1] for part in parts),
                            sum(part[2] for part in parts),
                        )
                    found.append(inside[called.id])
            for marked, unmarked, nameless in found:
                total += runs * (marked + unmarked + nameless)
                recomputed += runs * (marked + nameless * (phases.get(each.id) == RECOMPUTE))
    return total, recomputed


def _of(instruction: Instruction) -> tuple[int, int, int]:
    """FLOPs of an instruction itself: (marked as recomputation, marked otherwise, without a name)."""
    matmul = matmul_of(instruction) if instruction.opcode in _MATRIX_OPCODES else None
    if matmul is None:
        return 0, 0, 0
    if "/" not in instruction.op_name:
        return 0, 0, matmul.flops
    return (matmul.flops, 0, 0) if instruction.phase == RECOMPUTE else (0, matmul.flops, 0)
