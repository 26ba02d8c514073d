"""The only place where bytes and FLOPs become text, or text becomes bytes.

Inside, bytes and FLOPs are integers and seconds are floats. GiB = 1024³ bytes and is always called GiB;
a FLOP count is decimal (1 TFLOP = 10¹² FLOP).
"""

import re
from fractions import Fraction

from remat_kit._errors import RematKitError

KiB, MiB, GiB, TiB = 1024, 1024**2, 1024**3, 1024**4

_BYTES = {
    "": 1, "B": 1, "KiB": KiB, "MiB": MiB, "GiB": GiB, "TiB": TiB,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
}  # fmt: skip


def parse_bytes(text: str) -> int:
    """The number of bytes that `text` names: `"70GiB"`, `"512 MiB"`, `"80GB"` (decimal), `"4096"`.

    Raises RematKitError when the text is not a non-negative number with one of these units.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    units = {unit.lower(): size for unit, size in _BYTES.items()}
    if match is None or match[2].lower() not in units:
        allowed = ", ".join(unit for unit in _BYTES if unit)
        raise RematKitError(f"{text!r} is not a size in bytes. Write a number and one of {allowed}, e.g. 70GiB.")
    return round(Fraction(match[1]) * units[match[2].lower()])


def format_bytes(count: int) -> str:
    """`count` bytes for a reader: the largest binary unit that keeps the number at or above 1."""
    for unit, size in (("TiB", TiB), ("GiB", GiB), ("MiB", MiB), ("KiB", KiB)):
        if abs(count) >= size:
            return f"{count / size:,.2f} {unit}"
    return f"{count} B"


def format_flops(count: int) -> str:
    """`count` floating-point operations for a reader, in decimal units."""
    for unit, size in (("PFLOP", 10**15), ("TFLOP", 10**12), ("GFLOP", 10**9), ("MFLOP", 10**6)):
        if count >= size:
            return f"{count / size:,.2f} {unit}"
    return f"{count} FLOP"


def format_seconds(seconds: float) -> str:
    """`seconds` for a reader: s, ms or µs."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.2f} {unit}"
    return f"{seconds * 1e6:.1f} µs"
