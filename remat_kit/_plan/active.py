"""Which inputs of each block are differentiated, found in the program around them.

Equal blocks are traced once, but what backward needs of them depends on what is differentiated: the first layer of a
model whose data is no parameter, or a layer with frozen weights, has another derivative than its likes.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from remat_kit._plan.flat import Flat, Literal
from remat_kit._plan.layout import Layout, Site, counts_of

_STOPS = frozenset({"stop_gradient"})


def differentiated(arguments: Sequence[Any]) -> tuple[bool, ...]:
    """Which of these values JAX is differentiating just now: all that are of floating point when it does not say."""
    found: list[tuple[bool, ...]] = []

    def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
        found.append(tuple(not isinstance(each, SymbolicZero) for each in tangents))
        return 0.0, 0.0

    probe = jax.custom_jvp(lambda *values: 0.0)
    probe.defjvp(rule, symbolic_zeros=True)
    probe(*arguments)
    return found[-1] if found else tuple(jnp.issubdtype(jnp.result_type(each), jnp.inexact) for each in arguments)


def active_inputs(layout: Layout, active: Sequence[bool]) -> dict[Site, tuple[bool, ...]]:
    """Which inputs of each block backward goes through, when the program's inputs that are `active` are differentiated.

    Those that depend on an active input; none where a derivative does not come from the program's outputs, as behind
    the network of a teacher whose result is a constant to the loss.
    """
    found: dict[Site, tuple[bool, ...]] = {}
    _of_layout(layout, active, found)
    reached: set[Site] = set()
    _backward(layout, _of(layout.flat.outputs, set(range(len(layout.flat.avals)))), reached)
    return {site: own if site in reached else (False,) * len(own) for site, own in found.items()}


def _of_layout(layout: Layout, active: Sequence[bool], found: dict[Site, tuple[bool, ...]]) -> tuple[bool, ...]:
    """Writes down the blocks of a program, and says which of its outputs are active."""
    flat = layout.flat
    values = {number for number, each in zip(flat.inputs, active, strict=True) if each}
    position = 0
    while position < len(flat.ops):
        op, block = flat.ops[position], layout.blocks.get(position)
        if block is not None:
            assert block.site.stretch is not None
            found[block.site] = _of(block.inputs, values)
            outputs = _of_flat(block.flat, found[block.site])
            values.update(number for number, each in zip(block.outputs, outputs, strict=True) if each)
            position = block.site.stretch[1]
            continue
        if position in layout.bodies or position in layout.inner:
            outputs = _of_scan(layout, position, _of(op.inputs, values), found)
            values.update(number for number, each in zip(op.outputs, outputs, strict=True) if each)
        else:
            values.update(_made_by(flat, op, values))
        position += 1
    return _of(flat.outputs, values)


def _of_scan(
    layout: Layout, position: int, active: tuple[bool, ...], found: dict[Site, tuple[bool, ...]]
) -> tuple[bool, ...]:
    """The same for a scan with blocks in its body: what it carries is active when it becomes so in any turn."""
    consts, carried = counts_of(layout.flat.ops[position])
    body = layout.bodies.get(position)
    while True:
        if body is not None:
            found[body.site] = active
            outputs = _of_flat(body.flat, active)
        else:
            outputs = _of_layout(layout.inner[position], active, found)
        carry = tuple(a or b for a, b in zip(active[consts : consts + carried], outputs[:carried], strict=True))
        if carry == active[consts : consts + carried]:
            return outputs
        active = (*active[:consts], *carry, *active[consts + carried :])


def _of_flat(flat: Flat, active: Sequence[bool]) -> tuple[bool, ...]:
    values = {number for number, each in zip(flat.inputs, active, strict=True) if each}
    for op in flat.ops:
        values.update(_made_by(flat, op, values))
    return _of(flat.outputs, values)


def _made_by(flat: Flat, op: Any, values: set[int]) -> list[int]:
    """The results of an operation through which a derivative goes."""
    if op.primitive in _STOPS or not any(_of(op.inputs, values)):
        return []
    return [number for number in op.outputs if _is_real(flat, number)]


def _of(numbers: Sequence[int | Literal], values: set[int]) -> tuple[bool, ...]:
    return tuple(isinstance(each, int) and each in values for each in numbers)


def _backward(layout: Layout, wanted: Sequence[bool], reached: set[Site]) -> tuple[bool, ...]:
    """Writes down the blocks that derivatives of the `wanted` outputs go through, and says which inputs they reach."""
    flat = layout.flat
    values = {number for number, each in zip(flat.outputs, wanted, strict=True) if each and isinstance(number, int)}
    inside = {
        position: first
        for first, block in layout.blocks.items()
        if block.site.stretch is not None
        for position in range(*block.site.stretch)
    }
    for position in reversed(range(len(flat.ops))):
        op, first = flat.ops[position], inside.get(position)
        if first is not None:
            block = layout.blocks[first]
            if position == first and any(_of(block.outputs, values)):
                reached.add(block.site)
                values.update(each for each in block.inputs if isinstance(each, int))
            continue
        outputs = _of(op.outputs, {number for number in values if _is_real(flat, number)})
        if op.primitive in _STOPS or not any(outputs):
            continue
        inputs: Sequence[bool] = (True,) * len(op.inputs)
        if position in layout.bodies:
            reached.add(layout.bodies[position].site)
        elif position in layout.inner:
            consts, carried = counts_of(op)
            before: Sequence[bool] | None = None
            while outputs != before:
                before = outputs
                inputs = _backward(layout.inner[position], outputs, reached)
                carry = [a or b for a, b in zip(outputs[:carried], inputs[consts : consts + carried], strict=True)]
                outputs = (*carry, *outputs[carried:])
        values.update(
            each for each, is_wanted in zip(op.inputs, inputs, strict=True) if is_wanted and isinstance(each, int)
        )
    return _of(flat.inputs, values)


def _is_real(flat: Flat, number: int) -> bool:
    return jnp.issubdtype(flat.avals[number].dtype, jnp.inexact)
