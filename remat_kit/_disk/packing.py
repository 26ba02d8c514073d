"""Arrays as the bytes of one value, and back."""

import math
from collections.abc import Sequence

import numpy as np

ALIGNMENT = 64
"""Of each array in its value's bytes."""

Kind = tuple[tuple[int, ...], np.dtype]
"""Shape and type of an array."""


def places(kinds: Sequence[Kind]) -> tuple[list[tuple[int, int]], int]:
    """(first byte, last byte + 1) of each array behind the others, aligned for any type, and the bytes of all."""
    found, at = [], 0
    for shape, dtype in kinds:
        end = at + math.prod(shape) * dtype.itemsize
        found.append((at, end))
        at = -(-end // ALIGNMENT) * ALIGNMENT
    return found, at


def together(arrays: Sequence[np.ndarray], kinds: Sequence[Kind]) -> np.ndarray:
    """A copy of the arrays' bytes, at their `places`."""
    where, size = places(kinds)
    data = np.zeros(size, np.uint8)
    for array, (start, end) in zip(arrays, where, strict=True):
        data[start:end] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return data


def apart(data: np.ndarray, kinds: Sequence[Kind]) -> list[np.ndarray]:
    """The arrays whose bytes are in `data`. They share its memory."""
    where, _ = places(kinds)
    return [
        data[start:end].view(dtype).reshape(shape) for (start, end), (shape, dtype) in zip(where, kinds, strict=True)
    ]


def text(kinds: Sequence[Kind]) -> str:
    """`float32[4, 16], int32[]`."""
    return ", ".join(f"{dtype}{list(shape)}" for shape, dtype in kinds)
