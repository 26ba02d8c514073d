"""The next steps that would lower the need most, each with its bytes.

Each step is tried on the program's time line: the bytes that it takes away at every event are taken away, what it
adds is added, and the difference of the two highest points is what it promises. So a step on something large promises
nothing where another moment is as high. The packing of the heap is left as it is. Applied to one step of a model, a
promise should be kept to 80% or better; the tests do that for a dozen models.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from remat_kit._explanation import Advice
from remat_kit._hlo.anatomy import Anatomy
from remat_kit._hlo.attribution import Attribution, element_of
from remat_kit._hlo.flow import Value
from remat_kit._hlo.heap import LiveBuffer
from remat_kit._hlo.line import Line
from remat_kit._hlo.module import Instruction
from remat_kit._hlo.scope import starred
from remat_kit._hlo.structure import PARAMETER, STATE, bits_at
from remat_kit._phase import BACKWARD, FORWARD, RECOMPUTE, UPDATE
from remat_kit._units import format_bytes

CHUNKS = 8
"""Parts that the loss head is cut into."""
DEVICES = 8
"""Devices that the state is sharded over: one host of the usual kind."""
_LEAST = 0.01
"""A step that lowers the live peak by a smaller share is not worth a line."""
_COUNT = 3
_VIEWS = 16
"""Tuples and views that are looked through for what makes a result."""
_STATE = frozenset({"parameters", "optimizer state", "gradients"})


def advise(found: Anatomy, line: Line) -> tuple[Advice, ...]:
    """At most three steps, the one with the most bytes first; () where the program has no heap trace."""
    if found.heap.peak_event is None:
        return ()
    steps: list[Advice] = []
    for trial in (_donate, _recompute, _offload, _chunk, _shard):
        steps += trial(found, line)
    least = _LEAST * (found.heap.peak_bytes or 0)
    worth = [step for step in steps if step.bytes >= least]
    return tuple(sorted(worth, key=lambda step: -step.bytes)[:_COUNT])


def _promise(line: Line, lowered: np.ndarray) -> int:
    """By how much the highest point falls when the time line becomes `lowered`."""
    return int(line.bytes.sum(axis=0).max() - lowered.max())


def _donate(found: Anatomy, line: Line) -> Iterator[Advice]:
    """Results that could take the place of the argument that they are a new version of, which nothing asks them to.

    Not those of a batch, nor gradients in the place of their parameters: the caller still needs these.
    """
    module = found.module
    placed = {index for index, _, _ in module.input_output_alias}
    given = {number for _, number, _ in module.input_output_alias}
    free: dict[tuple[str, str], list[str]] = defaultdict(list)
    for parameter in module.entry.parameters:
        known = found.attributor.arguments.get(parameter.parameter_number)
        if parameter.parameter_number not in given and known is not None and known.role != "batch":
            free[str(parameter.shape), known.role].append(known.category)
    bits = found.structure.bits.get(module.entry.root.id, 0)
    total = 0
    owners: Counter[str] = Counter()
    replaced = []
    for index, leaf in module.entry.root.shape.leaves():
        made_of = bits_at(bits, index)
        roles = ("parameters",) * bool(made_of & PARAMETER) + ("optimizer state",) * bool(made_of & STATE)
        for role in (*roles, "arguments"):
            if index not in placed and free.get((str(leaf), role)):
                owners[free[str(leaf), role].pop()] += leaf.bytes
                total += leaf.bytes
                replaced.append(index)
                break
    promise = _promise_of_donation(found, line, total, replaced) if total else 0
    if promise > 0:
        names = " and ".join(name for name, _ in owners.most_common())
        yield Advice(
            "donate",
            names,
            promise,
            f"donate the {names} (donate_argnums of jax.jit, Step.donate): results of {format_bytes(total)} take their "
            f"place, {format_bytes(promise)} less at the live peak",
        )


def _promise_of_donation(found: Anatomy, line: Line, total: int, results: Sequence[tuple[int, ...]]) -> int:
    """By how much the highest point falls without the memory of some results, of `total` bytes.

    What is in it before they are has to be somewhere else then, gradients that something else than the results reads
    above all: their norm, say. One that only its results read can be used up at once.
    """
    entry = found.module.entry
    place = {each.id: number for number, each in enumerate(entry.schedule)}
    before = np.zeros(len(place) + 1, np.int64)  # the most that is alive while each instruction runs
    current, last = 0, found.heap.throughout_bytes
    for event, alive in enumerate(found.heap.timeline):
        at = line.instruction(event)
        now = max(place.get(at.id, current) if at else current, current)
        before[current + 1 : now + 1] = last
        before[now] = max(before[now], alive)
        current, last = now, alive
    before[current + 1 :] = last
    made = {index: _element(entry.root, index) for index in results}
    finals = {value[0].id for value in made.values()}
    regions = {}
    for buffer in found.buffers:
        if buffer.kind == "live_out":
            regions.update({_key(found.makers[member]): buffer for member in buffer.group if member in found.makers})
    changes = np.zeros(len(place) + 2, np.int64)
    for result in made.values():
        region = regions.get(_key(result))
        guests = [found.makers[member] for member in region.group if member in found.makers] if region else []
        for maker, where in guests:
            if maker.id not in place or maker.id in finals or maker.opcode in ("parameter", "tuple"):
                continue
            uses = found.attributor.flow.uses(maker, where)
            readers = {*uses.readers, *uses.writes, *uses.loops} & place.keys()
            if found.structure.phases.get(maker.id) == UPDATE or readers - finals:
                size = element_of(maker.shape, where).bytes
                changes[place[maker.id]] += size
                changes[max([place[maker.id], *(place[each] for each in readers)]) + 1] -= size
    after = before - total + changes.cumsum()[: len(before)]
    return int(before.max() - after.max())


def _key(value: Value) -> tuple[int, tuple[int, ...]]:
    return value[0].id, value[1]


def _element(root: Instruction, index: tuple[int, ...]) -> Value:
    """What makes one of the results."""
    at, index = root, tuple(index)
    for _ in range(_VIEWS):
        if at.opcode == "tuple" and index and index[0] < len(at.operands):
            at, index = at.operands[index[0]], index[1:]
        elif at.opcode == "get-tuple-element":
            at, index = at.operands[0], (at.tuple_index, *index)
        elif at.opcode == "bitcast" and at.operands:
            at = at.operands[0]
        else:
            break
    return at, index


def _is_block_activation(known: Attribution) -> bool:
    return known.category == "saved activations" and bool(known.block)


def _recompute(found: Anatomy, line: Line) -> Iterator[Advice]:
    """Keep the input of each block and recompute the rest of it."""
    saved = line.series(lambda _, known: _is_block_activation(known))
    layers = _layers(found)
    if not saved.any() or layers < 2:
        yield from _recompute_parts(found, line)
        return
    at = found.heap.peak_event or 0
    inputs = min(_carried_bytes(found) / _saved_bytes_per_layer(found, layers, saved), 1.0)
    dropped = saved * (1.0 - inputs)
    # While a block runs backward, its own activations are there again.
    again = line.in_phase(frozenset({BACKWARD, RECOMPUTE}), blocks_only=True) * (dropped.max() / layers)
    promise = _promise(line, line.bytes.sum(axis=0) - dropped + np.minimum(again, dropped.max()))
    largest = _largest(found, at, _is_block_activation)
    if promise > 0 and largest:
        block, what = largest
        yield Advice(
            "recompute",
            starred(block, block),
            promise,
            f"recompute the blocks in backward (policy full, or one that keeps less): {layers} blocks keep "
            f"{format_bytes(int(saved.max()))} for it, most of it {what}",
        )


def _recompute_parts(found: Anatomy, line: Line) -> Iterator[Advice]:
    """Where no block repeats: two parts of the model, each recomputed, hold half of it at a time."""
    saved = line.series(lambda _, known: known.category == "saved activations")
    if RECOMPUTE in found.structure.phases.values():
        return
    promise = _promise(line, line.bytes.sum(axis=0) - saved / 2)
    largest = _largest(found, found.heap.peak_event or 0, lambda known: known.category == "saved activations")
    if promise > 0 and largest:
        yield Advice(
            "recompute",
            "the layers",
            promise,
            "recompute the layers in backward, each wrapped by itself with remat(policy): "
            f"{format_bytes(int(saved.max()))} are kept for it, most of it {largest[1]}; no block repeats in the "
            "program's names, so this counts half",
        )


def _offload(found: Anatomy, line: Line) -> Iterator[Advice]:
    """Move the largest kind of saved activation to the host; about two layers of it stay on the device in transit."""
    if found.module.platform != "cuda":  # on the CPU, offloaded bytes stay the device's
        return
    at, layers = found.heap.peak_event or 0, _layers(found)
    if layers < 2:
        return
    sizes: Counter[tuple[str, str]] = Counter()
    for buffer, known in _alive(found, at):
        if _is_block_activation(known):
            sizes[known.module, str(known.shape)] += buffer.bytes
    if not sizes:
        return
    (module, shape), size = sizes.most_common(1)[0]
    moved = line.series(lambda _, k: _is_block_activation(k) and (k.module, str(k.shape)) == (module, shape))
    promise = _promise(line, line.bytes.sum(axis=0) - moved + np.minimum(moved, 2 * size / layers))
    if promise > 0:
        yield Advice(
            "offload",
            f"{module} {shape}",
            promise,
            f"offload {module} {shape} to the host: tag it with checkpoint_name and use remat(offload(name)), "
            f"{format_bytes(size)} over the host link in each direction a step",
        )


def _chunk(found: Anatomy, line: Line) -> Iterator[Advice]:
    """Compute logits and loss in parts of the batch or sequence, each recomputed in backward."""
    loops = _chunk_loops(found)
    inside = {each.id for loop in loops.values() for each in loop.called[0].instructions}

    def is_whole(buffer: LiveBuffer, known: Attribution) -> bool:
        if known.category != "loss head" or buffer.instruction_id in inside:
            return False
        maker = found.module.instructions.get(buffer.instruction_id)
        uses = found.attributor.flow.uses(maker, buffer.shape_index).loops.keys() if loops and maker else ()
        return not loops.keys() & {buffer.instruction_id, *uses}

    head = line.series(is_whole)
    if not head.any():
        return
    # The gradient of the head's matrix is summed up over the chunks, so it is there from the first one on.
    copies = line.series(lambda _, known: known.category == "parameter copies" and not known.block)
    at = found.heap.peak_event or 0
    kept = head / CHUNKS + np.where(head > 0, copies[at], 0)
    promise = _promise(line, line.bytes.sum(axis=0) - head + np.minimum(head, kept))
    largest = _largest(found, at, lambda known: known.category == "loss head")
    if promise > 0 and largest:
        yield Advice(
            "chunk the loss head",
            largest[1],
            promise,
            f"compute logits and loss in {CHUNKS} chunks of the positions (jax.lax.scan over a jax.checkpoint of "
            f"head and loss): {format_bytes(int(head[at]))} are alive for it at the live peak, most of it {largest[1]}",
        )


def _chunk_loops(found: Anatomy) -> dict[int, Instruction]:
    """Loops that are all forward or all backward, and not over layers: what is in them is cut into parts already."""
    structure = found.structure
    loops = {}
    for each in found.module.instructions.values():
        if each.opcode == "while" and each.called and (each.trip_count or 0) > 1 and each.id not in structure.blocks:
            seen = {structure.phases.get(inner.id) for inner in each.called[0].instructions}
            if (FORWARD in seen) != bool(seen & {BACKWARD, RECOMPUTE}):
                loops[each.id] = each
    return loops


def _shard(found: Anatomy, line: Line) -> Iterator[Advice]:
    """Divide parameters, optimizer state and gradients among devices, where there is only one."""
    if found.module.num_devices > 1:
        return
    state = line.series(lambda _, known: known.category in _STATE)
    promise = _promise(line, line.bytes.sum(axis=0) - state * (1 - 1 / DEVICES))
    if promise > 0 and state.any():
        at = found.heap.peak_event or 0
        yield Advice(
            "shard",
            "parameters, gradients and optimizer state",
            promise,
            f"shard parameters and optimizer state over {DEVICES} devices (FSDP): "
            f"{format_bytes(int(state[at]))} are alive for them at the live peak, gathered layers not counted",
        )


def _alive(found: Anatomy, at: int) -> Iterator[tuple[LiveBuffer, Attribution]]:
    for buffer, known in zip(found.buffers, found.attributions, strict=True):
        if buffer.born <= at < buffer.dies:
            yield buffer, known


def _largest(found: Anatomy, at: int, choose) -> tuple[str, str] | None:
    """(block, "module shape") of the kind of buffer with the most bytes at an event."""
    sizes: Counter[tuple[str, str]] = Counter()
    for buffer, known in _alive(found, at):
        if choose(known):
            sizes[known.block, f"{known.module} {known.shape}"] += buffer.bytes
    return sizes.most_common(1)[0][0] if sizes else None


def _layers(found: Anatomy) -> int:
    """How many times the blocks repeat: the trips of the layers' loop, or the number of unrolled blocks."""
    structure = found.structure
    trips = [found.module.instructions[loop].trip_count or 1 for loop in structure.layer_loops]
    in_segments = max(structure.inner_loops.values(), default=1)
    return max([*(each * in_segments for each in trips), len(set(structure.blocks.values()))])


def _saved_bytes_per_layer(found: Anatomy, layers: int, saved: np.ndarray) -> float:
    return max(float(saved.max()) / layers, 1.0)


def _carried_bytes(found: Anatomy) -> int:
    """Bytes that one block hands to the next in forward: what full recomputation has to keep of it."""
    loops = [found.module.instructions[loop] for loop in found.structure.layer_loops]
    forward = [loop for loop in loops if found.structure.phases.get(loop.id) == FORWARD]
    if forward:
        return max(_changed_state_bytes(loop) for loop in forward)
    crossing: Counter[str] = Counter()
    blocks, phases = found.structure.blocks, found.structure.phases
    for buffer, known in zip(found.buffers, found.attributions, strict=True):
        maker = found.module.instructions.get(buffer.instruction_id)
        if maker is None or known.phase != FORWARD or not known.block:
            continue
        readers = found.attributor.flow.uses(maker, buffer.shape_index).readers
        if any(phases.get(reader) == FORWARD and blocks.get(reader, known.block) != known.block for reader in readers):
            crossing[known.block] += buffer.bytes
    return max(crossing.values(), default=0)


def _changed_state_bytes(loop: Instruction) -> int:
    """Bytes of a loop's state that each turn makes anew, stacks of layers and what stays as it is left out."""
    root = loop.called[0].root
    if root.opcode != "tuple":
        return 0
    total = 0
    for position, element in enumerate(root.operands):
        stays = element.opcode == "get-tuple-element" and element.tuple_index == position
        stacked = element.shape.dims[:1] == (loop.trip_count,)
        total += element.shape.bytes * (not stays and not stacked)
    return total
