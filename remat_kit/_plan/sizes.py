"""Bytes of values and FLOPs of operations."""

import math
from typing import Any

from remat_kit._jaxpr import count_flops, flops_of
from remat_kit._plan.flat import Op
from remat_kit._plan.layout import Layout


def bytes_of(aval: Any) -> int:
    """Bytes of a value; 0 for what has no memory."""
    dtype, shape = getattr(aval, "dtype", None), getattr(aval, "shape", None)
    if dtype is None or shape is None:
        return 0
    return math.prod(shape) * getattr(dtype, "itemsize", 0)


def flops_of_op(op: Op) -> int:
    """FLOPs of an operation's matrix products, those inside of it included, loops times their length."""
    if own := flops_of(op.eqn):
        return own
    inner = [value for value in op.eqn.params.values() if hasattr(value, "eqns") or hasattr(value, "jaxpr")]
    times = op.eqn.params["length"] if op.primitive == "scan" else 1
    return times * sum(count_flops(value) for value in inner)


def outside_flops(layout: Layout) -> int:
    """FLOPs of the matrix products of a program that are in none of its blocks, loops times their length."""
    total, position = 0, 0
    while position < len(layout.flat.ops):
        op, block = layout.flat.ops[position], layout.blocks.get(position)
        if block is not None:
            assert block.site.stretch is not None
            position = block.site.stretch[1]
            continue
        if position in layout.inner:
            total += op.eqn.params["length"] * outside_flops(layout.inner[position])
        elif position not in layout.bodies:
            total += flops_of_op(op)
        position += 1
    return total
