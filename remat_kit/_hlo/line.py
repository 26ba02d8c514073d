"""The time line of a program: bytes alive by category at each event of its heap trace, and what runs then."""

import itertools
from collections.abc import Callable

import numpy as np

from remat_kit._explanation import CATEGORIES, Floor, Moment, Timeline
from remat_kit._hlo.anatomy import Anatomy
from remat_kit._hlo.attribution import Attribution
from remat_kit._hlo.frames import Frame
from remat_kit._hlo.heap import LiveBuffer
from remat_kit._hlo.module import Instruction
from remat_kit._hlo.structure import ORIGINS, bits_at

POINTS = 600
"""Points of the time line: more than the pixels that a report gives it in width."""
MOVABLE = frozenset({"saved activations", "recompute workspace"})
"""Categories that are up to a policy."""
_WORKSPACE = frozenset({"forward workspace", "backward workspace"})


def source_text(source: Frame | None) -> str:
    """`models/parts.py:120 (attend)`: the file below the working directory or its last two parts."""
    if source is None:
        return ""
    parts = source.file.replace("\\", "/").split("/")
    return f"{'/'.join(parts[-2:])}:{source.line} ({source.function})"


class Line:
    """The heap trace as bytes by category at each event."""

    def __init__(self, found: Anatomy) -> None:
        self.found = found
        self.events = len(found.heap.timeline)
        names = {known.category for known in found.attributions}
        order = [*CATEGORIES, *sorted(names - CATEGORIES.keys())]
        self.categories = [name for name in order if name in names]
        row = {name: number for number, name in enumerate(self.categories)}
        changes = np.zeros((len(self.categories), self.events + 1), np.int64)
        births = np.full(self.events, -1, np.int64)
        for number, (buffer, known) in enumerate(zip(found.buffers, found.attributions, strict=True)):
            changes[row[known.category], buffer.born] += buffer.bytes
            changes[row[known.category], buffer.dies] -= buffer.bytes
            if buffer.kind == "temp" and buffer.born < self.events:
                births[buffer.born] = number
        self.bytes = changes[:, : self.events].cumsum(axis=1)
        # The instruction that runs at an event is the one of the last birth: the end of a buffer names its maker.
        self.running = (
            np.maximum.accumulate(np.where(births >= 0, np.arange(self.events), -1)) if self.events else births
        )
        self._births = births
        self._by_name = {each.name: each for each in found.module.instructions.values()}

    def instruction(self, event: int) -> Instruction | None:
        """What runs at `event`."""
        at = int(self.running[event])
        name = self.found.heap.timeline_instructions[at if at >= 0 else event]
        return self._by_name.get(name)

    def moment(self, event: int | None) -> Moment:
        """The moment of an event in words."""
        heap = self.found.heap
        if event is None:
            return Moment(-1, self.events, "unknown", "", "", "", "", "")
        at = self._by_name.get(heap.timeline_instructions[event])
        phase, module, block, source = self._place(at)
        name, computation = heap.timeline_instructions[event], heap.timeline_computations[event]
        return Moment(event, self.events, phase, block, module, name, computation, source)

    def _place(self, at: Instruction | None) -> tuple[str, str, str, str]:
        """Phase, module path, block and source of an instruction."""
        if at is None:
            return "unknown", "", "", ""
        at = self.found.attributor.origins.loop_of(at)
        structure, origin = (
            self.found.structure,
            self.found.attributor.origins.of(at, (0,) if at.opcode == "fusion" else ()),
        )
        phase = structure.phases.get(at.id, "unknown")
        return phase, "/".join(origin.path), structure.blocks.get(at.id, ""), source_text(origin.source)

    def floor(self) -> Floor:
        """What stays however much is recomputed or offloaded."""
        heap = self.found.heap
        movable = [number for number, name in enumerate(self.categories) if name in MOVABLE]
        fixed = self.bytes.sum(axis=0) - self.bytes[movable].sum(axis=0)
        fixed = fixed - self.series(self._is_up_to_the_compiler)
        at = int(fixed.argmax())
        phase, module, _, _ = self._place(self.instruction(at))
        lasting = heap.throughout
        transient = int(fixed[at]) - heap.throughout_bytes
        return Floor(
            argument_bytes=lasting.get("parameter", 0),
            output_bytes=lasting.get("live_out", 0),
            constant_bytes=lasting.get("constant", 0),
            transient_bytes=transient + lasting.get("fixed", 0),  # a lone temporary outside the heap
            transient_phase=phase,
            transient_module=module,
            bytes=int(fixed[at]),
        )

    def _is_up_to_the_compiler(self, buffer: LiveBuffer, known: Attribution) -> bool:
        """Workspace that another policy's program does not have: masks that XLA keeps or makes anew as it likes, and
        what backward takes out of a stack of saved activations, which would otherwise be computed again.
        """
        maker = self.found.module.instructions.get(buffer.instruction_id)
        if maker is None or known.category not in _WORKSPACE:
            return False
        made_of = bits_at(self.found.structure.bits.get(maker.id, 0), buffer.shape_index)
        return not made_of & ORIGINS or self.found.attributor.is_layer_of_stack(maker)

    def timeline(self) -> Timeline:
        """At most `POINTS` events: the highest one of each of as many stretches, so that no summit is lost."""
        total = self.bytes.sum(axis=0)
        edges = np.unique(np.linspace(0, self.events, min(POINTS, self.events) + 1).astype(int))
        chosen = [int(start + total[start:end].argmax()) for start, end in itertools.pairwise(edges)]
        peak = self.found.heap.peak_event
        if peak is not None and peak not in chosen:
            chosen = sorted({*chosen, peak})
        places = [self._place(self.instruction(event)) for event in chosen]
        names = [at.name if (at := self.instruction(event)) else "" for event in chosen]
        return Timeline(
            events=tuple(chosen),
            bytes={name: tuple(self.bytes[number, chosen].tolist()) for number, name in enumerate(self.categories)},
            phases=tuple(place[0] for place in places),
            modules=tuple(place[1] for place in places),
            instructions=tuple(names),
        )

    def series(self, choose: Callable[[LiveBuffer, Attribution], bool]) -> np.ndarray:
        """Bytes [events] of the buffers that `choose` picks."""
        changes = np.zeros(self.events + 1, np.int64)
        for buffer, known in zip(self.found.buffers, self.found.attributions, strict=True):
            if choose(buffer, known):
                changes[buffer.born] += buffer.bytes
                changes[buffer.dies] -= buffer.bytes
        return changes[: self.events].cumsum()

    def in_phase(self, phases: frozenset[str], blocks_only: bool = False) -> np.ndarray:
        """Whether [events] what runs at an event is of one of the phases, and, if asked, in a block."""
        structure = self.found.structure
        known: dict[int, bool] = {}
        for birth in np.unique(self.running):
            at = self.instruction(int(max(birth, 0)))
            at = self.found.attributor.origins.loop_of(at) if at else None
            inside = at is not None and (not blocks_only or at.id in structure.blocks)
            known[int(birth)] = at is not None and inside and structure.phases.get(at.id) in phases
        return np.array([known[int(birth)] for birth in self.running], bool)
