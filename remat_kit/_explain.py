"""`explain`: what is alive at a program's live peak, whose it is, and how far it could be lowered."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from remat_kit._advice import advise
from remat_kit._explanation import Buffer, Explanation, Holder, Program
from remat_kit._hlo.anatomy import Anatomy
from remat_kit._hlo.attribution import Attribution, element_of
from remat_kit._hlo.heap import LiveBuffer
from remat_kit._hlo.line import Line, source_text
from remat_kit._hlo.scope import starred
from remat_kit._hlo.work import matmul_flops

_OTHER_BUFFERS = 1500
"""Buffers that are not alive at the peak and are kept for the time line's hover, the largest ones."""


def explain(found: Anatomy) -> Explanation:
    """The explanation of a program: at its live peak, and along its schedule."""
    heap, module = found.heap, found.module
    at = heap.peak_event
    live = [
        (buffer, known)
        for buffer, known in zip(found.buffers, found.attributions, strict=True)
        if at is None or buffer.born <= at < buffer.dies
    ]
    live.sort(key=lambda pair: (-pair[0].bytes, pair[0].born, pair[0].buffer_id))
    total = sum(buffer.bytes for buffer, _ in live) or 1
    line = Line(found)
    flops, again = matmul_flops(module, found.structure.phases)
    kept = {id(buffer) for buffer, _ in live}
    others = sorted(
        (pair for pair in zip(found.buffers, found.attributions, strict=True) if id(pair[0]) not in kept),
        key=lambda pair: (-pair[0].bytes, pair[0].born),
    )[:_OTHER_BUFFERS]
    return Explanation(
        peak=line.moment(at),
        holders=_holders(live),
        host_holders=_host_holders(found),
        module_share=sum(buffer.bytes for buffer, known in live if known.module) / total,
        source_share=sum(buffer.bytes for buffer, known in live if known.source) / total,
        floor=line.floor() if at is not None else None,
        advice=advise(found, line),
        program=Program(
            module=module.name,
            instructions=len(module.instructions),
            devices=module.num_devices,
            matmul_flops=flops,
            recompute_matmul_flops=again,
            donated_bytes=heap.alias_bytes,
            temp_allocations=heap.num_temp_allocations,
            xla_remat_clones=sum(is_remat_clone(each.name) for each in module.instructions.values()),
        ),
        buffers=tuple(_buffer(buffer, known) for buffer, known in (*live, *others)),
        timeline=line.timeline() if at is not None else None,
    )


def categories_at_peak(explanation: Explanation) -> dict[str, int]:
    """Bytes by category, largest first."""
    sizes: dict[str, int] = defaultdict(int)
    for holder in explanation.holders:
        sizes[holder.category] += holder.bytes
    return dict(sorted(sizes.items(), key=lambda item: (-item[1], item[0])))


def is_remat_clone(name: str) -> bool:
    """Whether XLA's own rematerialization made the instruction: it names clones `fusion.12.remat` or `.remat2`."""
    if ".remat" not in name:
        return False
    return any(part.startswith("remat") and part[5:].isdecimal() | (part == "remat") for part in name.split(".")[1:])


def _buffer(buffer: LiveBuffer, known: Attribution) -> Buffer:
    return Buffer(
        name=buffer.instruction,
        bytes=buffer.bytes,
        category=known.category,
        module=known.module,
        block=known.block,
        source=source_text(known.source),
        phase=known.phase,
        shape=str(known.shape) if known.shape else "",
        dtype=known.shape.dtype if known.shape else "",
        layers=known.layers,
        born=buffer.born,
        dies=buffer.dies,
    )


@dataclass
class _Sum:
    bytes: int = 0
    buffers: int = 0
    layers: int = 1
    blocks: set[str] = field(default_factory=set)


def _holders(live: Sequence[tuple[LiveBuffer, Attribution]]) -> tuple[Holder, ...]:
    """Equal buffers together, largest first."""
    sums: dict[tuple[str, str, str, str, str], _Sum] = {}
    for buffer, known in live:
        module = starred(known.module, known.block)
        shape = str(known.shape) if known.shape else ""
        row = sums.setdefault((known.category, module, source_text(known.source), known.phase, shape), _Sum())
        row.bytes += buffer.bytes
        row.buffers += 1
        row.blocks |= {known.block}
        row.layers = max(row.layers, known.layers)
    holders = [
        Holder(*key, bytes=row.bytes, buffers=row.buffers, layers=max(row.layers, len(row.blocks)))
        for key, row in sums.items()
    ]
    return tuple(sorted(holders, key=lambda holder: (-holder.bytes, holder.category, holder.module, holder.shape)))


def _host_holders(found: Anatomy) -> tuple[Holder, ...]:
    live = []
    for buffer in found.heap.host_live:
        maker = found.module.instructions.get(buffer.instruction_id)
        group = [(maker, buffer.shape_index)] if maker is not None else []
        known = found.attributor.of(buffer, group)
        shape = element_of(maker.shape, buffer.shape_index) if maker is not None else None
        live.append((buffer, Attribution("host-offloaded", known.module, known.block, known.source, known.phase, shape,
                                         known.layers)))  # fmt: skip
    return _holders(live)
