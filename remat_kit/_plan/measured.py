"""What the compiler says of a step under some decisions, and what that says of the need under others."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from remat_kit._analyze import categories_of_arguments, need_bytes
from remat_kit._compile import CompiledStep
from remat_kit._explanation import Explanation
from remat_kit._hlo.line import Line
from remat_kit._hlo.roofline import Prediction, predict
from remat_kit._phase import BACKWARD, RECOMPUTE, UPDATE
from remat_kit._plan.choose import Choice
from remat_kit._program import read_program


@dataclass(frozen=True)
class Compiled:
    """A step as XLA compiled it.

    Attributes:
      need_bytes: what it allocates on the device, its constants with it.
      fixed_bytes: of that, its arguments and results, donated ones once.
      host_bytes: what it allocates in host memory.
      prediction: of its time, from the scheduled program.
      explanation: what is alive at its live peak.
      blocks_bytes: the live peak while its blocks run backward; update_bytes: while the optimizer runs; other_bytes: at
        any other time, the loss head's for one.
      recompute_flops: of the matrix products that run again.
    """

    need_bytes: int
    fixed_bytes: int
    host_bytes: int
    prediction: Prediction
    explanation: Explanation
    blocks_bytes: int
    update_bytes: int
    other_bytes: int
    recompute_flops: int

    @property
    def seconds(self) -> float:
        """The predicted time of a step."""
        return self.prediction.seconds

    @property
    def gap_bytes(self) -> int:
        """What packing costs beyond the live peak."""
        return self.need_bytes - max(self.blocks_bytes, self.update_bytes, self.other_bytes)


def read_compiled(step: CompiledStep) -> Compiled:
    """What is known of a compiled step."""
    program = read_program(step.hlo_proto, categories_of_arguments(step.traced))
    need = need_bytes(step.memory) + program.constant_bytes
    line = Line(program.anatomy)
    blocks, update, other = _peaks(line) if line.events else (need, need, need)
    return Compiled(
        need_bytes=need,
        fixed_bytes=step.memory.argument + step.memory.output - step.memory.alias,
        host_bytes=step.memory.host_temp,
        prediction=predict(program.module, step.traced.target.chip),
        explanation=program.explanation,
        blocks_bytes=blocks,
        update_bytes=update,
        other_bytes=other,
        recompute_flops=step.traced.work.recomputed_flops,
    )


def _peaks(line: Line) -> tuple[int, int, int]:
    total = line.bytes.sum(axis=0)
    backward = frozenset({BACKWARD, RECOMPUTE})
    in_blocks = line.in_phase(backward, blocks_only=True)
    if not in_blocks.any():
        in_blocks = line.in_phase(backward)
    in_update = line.in_phase(frozenset({UPDATE}))

    def most(where: Any) -> int:
        return int(np.max(total, initial=0, where=where))

    return most(in_blocks), most(in_update), most(~(in_blocks | in_update))


@dataclass(frozen=True)
class NeedModel:
    """The need of a step under any decisions, from its need under some that the compiler has seen.

    Attributes:
      seen: the decisions that were compiled; compiled: what came of them.
    """

    seen: Choice
    compiled: Compiled

    def need_bytes(self, choice: Choice) -> int:
        """The predicted need: what is kept and worked with beyond, or below, the compiled program, moment by moment."""
        found = self.compiled
        more = choice.kept_bytes - self.seen.kept_bytes
        more_in_blocks = choice.backward_bytes - self.seen.backward_bytes
        live = max(found.other_bytes + more, found.blocks_bytes + more_in_blocks, found.update_bytes)
        return live + found.gap_bytes

    def limits(self, need: float) -> tuple[float, float]:
        """The most that blocks may keep, and may keep and work with in backward, for a step to need so much at most."""
        found = self.compiled
        room = need - found.gap_bytes
        return (
            room - found.other_bytes + self.seen.kept_bytes,
            room - found.blocks_bytes + self.seen.backward_bytes,
        )

    def distance(self, choice: Choice) -> float:
        """Bytes in which decisions differ from those that the compiler has seen."""
        kept = abs(choice.kept_bytes - self.seen.kept_bytes)
        return kept + abs(choice.backward_bytes - self.seen.backward_bytes)


@dataclass(frozen=True)
class Needs:
    """The need of a step under any decisions, from several programs that the compiler has seen.

    Each predicts from itself (`NeedModel`), and the nearer it is, the more its word counts: by the inverse square of
    its distance (Shepard's interpolation). So a compiled program is predicted exactly, and one between two in between.

    Attributes:
      models: of the compiled programs, at least one.
    """

    models: tuple[NeedModel, ...]

    def need_bytes(self, choice: Choice) -> int:
        """The predicted need."""
        total = weights = 0.0
        for model in self.models:
            distance = model.distance(choice)
            if not distance:
                return model.need_bytes(choice)
            total += model.need_bytes(choice) / distance**2
            weights += 1 / distance**2
        return round(total / weights)

    def at(self, need: float) -> NeedModel:
        """The model from the program whose compiled need is the nearest."""
        return min(self.models, key=lambda model: abs(model.compiled.need_bytes - need))
