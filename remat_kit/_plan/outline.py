"""A block's operations as text, by which a plan says what has changed, and which numbers do not matter."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from remat_kit._plan.flat import Flat, Literal, Op, is_static_slice, is_whole

_ANY = "_"
"""An operand that is no constant."""


def outline_of(flat: Flat) -> tuple[str, ...]:
    """A block's operations as text: the primitive, what it results in, and its constants."""
    return tuple(_line_of(flat, op) for op in flat.ops)


def _line_of(flat: Flat, op: Op) -> str:
    results = " ".join(flat.avals[number].str_short() for number in op.outputs)
    if all(isinstance(each, int) for each in op.inputs):
        return f"{op.primitive} {results}"
    operands = [_ANY if isinstance(each, int) else _text_of(each.value) for each in op.inputs]
    return f"{op.primitive} {results} of {' '.join(operands)}"


def _text_of(value: Any) -> str:
    return str(value) if np.ndim(value) == 0 else f"{value.dtype}{list(value.shape)}".replace(" ", "")


def lift_numbers(flat: Flat, outline: Sequence[str]) -> list[Any]:
    """Makes inputs of the numbers that are inputs in a block's outline, where blocks of its kind differ in them.

    Returns the numbers.
    """
    numbers = []
    for position, (op, line) in enumerate(zip(flat.ops, outline, strict=False)):
        if is_static_slice(op) and line.startswith("dynamic_slice "):
            flat.open_slice(position)
    for position, index, text in _numbers(flat, outline):
        if text == _ANY:
            operand = flat.ops[position].inputs[index]
            assert isinstance(operand, Literal)
            numbers.append(operand.value)
            flat.lift(position, index)
    return numbers


def fingerprint_as(flat: Flat, outline: Sequence[str]) -> str:
    """The fingerprint of a block with the whole numbers of an outline in the place of its own.

    They change from trace to trace, like the number that Linen folds into a key, and no plan depends on them.
    """
    own = [list(op.inputs) for op in flat.ops]
    try:
        for position, index, text in _numbers(flat, outline):
            operand = flat.ops[position].inputs[index]
            assert isinstance(operand, Literal)
            if text.lstrip("-").isdecimal():
                flat.ops[position].inputs[index] = Literal(np.asarray(int(text), np.asarray(operand.value).dtype))
        return flat.fingerprint()
    finally:
        for op, inputs in zip(flat.ops, own, strict=True):
            op.inputs = inputs


def _numbers(flat: Flat, outline: Sequence[str]) -> Iterator[tuple[int, int, str]]:
    """The whole numbers among a block's constants: (operation, operand, what stands in the outline in its place)."""
    for position, (op, line) in enumerate(zip(flat.ops, outline, strict=False)):
        _, found, constants = line.partition(" of ")
        given = constants.split(" ") if found else [_ANY] * len(op.inputs)
        for index, (each, text) in enumerate(zip(tuple(op.inputs), given, strict=False)):
            if isinstance(each, Literal) and np.ndim(each.value) == 0 and is_whole(each.value):
                yield position, index, text
