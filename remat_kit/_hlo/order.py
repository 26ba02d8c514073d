"""Where each instruction stands when a scheduled module is laid out flat, called computations before their callers."""

from typing import Any


def flat_positions(module: Any) -> dict[str, int]:
    """The position of each scheduled instruction by name, for an HloModuleProto; {} when it has no schedule.

    A computation stands before the instruction that calls it and is laid out once, at its first caller, as XLA's
    live-range analysis does it. Fused computations have no schedule and are left out. Linear; loops in a malformed
    call graph are cut.
    """
    sequences = {entry.key: entry.value.instruction_ids for entry in module.schedule.sequences}
    instructions = {
        instruction.id: instruction for computation in module.computations for instruction in computation.instructions
    }
    positions: dict[str, int] = {}
    seen = {module.entry_computation_id}
    stack = [iter(sequences.get(module.entry_computation_id, ()))]
    waiting: list[Any] = []
    while stack:
        identifier = next(stack[-1], None)
        if identifier is None:
            stack.pop()
            if waiting:
                positions.setdefault(waiting.pop().name, len(positions))
            continue
        instruction = instructions.get(identifier)
        if instruction is None:
            continue
        called = [one for one in instruction.called_computation_ids if one in sequences and one not in seen]
        if called:
            seen.update(called)
            waiting.append(instruction)
            stack.append(identifier for one in called for identifier in sequences[one])
        else:
            positions.setdefault(instruction.name, len(positions))
    return positions
