"""The collectives of a compiled program, and what of its recomputation runs beside them."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from remat_kit._communication import Collective
from remat_kit._hlo.anatomy import Anatomy
from remat_kit._hlo.module import Computation, Instruction
from remat_kit._hlo.roofline import COLLECTIVES, Prediction
from remat_kit._hlo.scope import starred
from remat_kit._hlo.work import executions
from remat_kit._phase import BACKWARD, RECOMPUTE

_MOST_SHAPES = 4
"""Shapes of a combined collective that are written out."""
_CHECKPOINTS = frozenset({"remat2", "remat", "checkpoint"})
"""The names of JAX's own operation, in which a checkpointed function runs again."""


@dataclass(slots=True)
class _Sum:
    count: int = 0
    seconds: float = 0.0
    exposed_s: float = 0.0


def collectives(found: Anatomy, prediction: Prediction | None) -> tuple[Collective, ...]:
    """The collectives of a program, equal ones together, the longest or, without a prediction, the largest first.

    A pair of start and done is one; so is one that is wrapped into an asynchronous computation. Collectives among
    groups of one device, which move nothing, are left out.
    """
    module = found.module
    timed = {row.instruction: row for row in prediction.rows} if prediction else {}
    sums: dict[tuple[str, str, str, str, int, int, bool], _Sum] = defaultdict(_Sum)
    for computation, runs in ((module.computations[number], runs) for number, runs in executions(module).items()):
        for each in _collectives_in(computation) if runs else ():
            devices = each.group_size or module.num_devices
            if devices == 1:
                continue
            phase, path = _place(found, each)
            size = sum(operand.shape.bytes for operand in each.operands)
            again = phase == RECOMPUTE
            kind = each.opcode.removesuffix("-start")
            row = sums[kind, phase, path, _shape(each), size, devices, again]
            row.count += runs
            if (known := timed.get(each.id)) is not None:
                row.seconds += known.seconds * runs
                row.exposed_s += known.exposed_s * runs
    rows = [
        Collective(
            kind, phase, path, shape, size, devices, row.count, again,
            row.seconds if prediction else None, row.exposed_s if prediction else None,
        )
        for (kind, phase, path, shape, size, devices, again), row in sums.items()
    ]  # fmt: skip
    return tuple(sorted(rows, key=lambda row: (-(row.seconds or 0.0), -row.bytes * row.count, row.kind, row.module)))


def recompute_beside(found: Anatomy, prediction: Prediction) -> tuple[float, float]:
    """Seconds of a step in which kernels recompute while a collective is under way, and while none is."""
    hidden = exposed = 0.0
    for row in prediction.rows:
        if row.kind != "collective" and found.structure.phases.get(row.instruction) == RECOMPUTE:
            beside = min(row.beside_s, row.exposed_s)
            hidden += beside * row.executions
            exposed += (row.exposed_s - beside) * row.executions
    return hidden, exposed


def _collectives_in(computation: Computation) -> Iterator[Instruction]:
    """The collectives that a computation runs itself, those inside of its fusions included."""
    for each in computation.schedule:
        if each.opcode.removesuffix("-start") in COLLECTIVES:
            yield each
        elif each.opcode == "fusion":
            for called in each.called:
                yield from (inner for inner in called.instructions if inner.opcode in COLLECTIVES)


def _place(found: Anatomy, at: Instruction) -> tuple[str, str]:
    """Phase and module path of a collective."""
    structure = found.structure
    path = "/".join(found.attributor.origins.of(at).path)
    phase = structure.phases.get(at.id) or at.phase
    if phase == BACKWARD and at.op_name.rpartition("/")[2] in _CHECKPOINTS:
        phase = RECOMPUTE  # of what a checkpoint keeps: a part of a value that is gathered again
    return phase, starred(path, structure.blocks.get(at.id, ""))


def _shape(collective: Instruction) -> str:
    shapes = [str(operand.shape) for operand in collective.operands]
    rest = len(shapes) - _MOST_SHAPES
    return " + ".join(shapes[:_MOST_SHAPES]) + (f" + {rest} more" if rest > 0 else "")
