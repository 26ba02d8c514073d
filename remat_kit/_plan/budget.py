"""A budget as a user writes it: bytes, or a share of the device."""

import operator
import re
from fractions import Fraction
from typing import SupportsIndex

from remat_kit._errors import PlanError, RematKitError
from remat_kit._target import Target, capacity
from remat_kit._units import format_bytes, parse_bytes


def parse_budget(budget: str | SupportsIndex | None, target: Target) -> int | None:
    """Bytes on one device: of `40GiB`, of `90%` of the device's memory, of a number of bytes; None for no budget.

    Raises PlanError for anything else, and for a budget that is not above 0 or beyond what one process can allocate on
    the device (`capacity`), with which a step's need is compared everywhere else.
    """
    if budget is None:
        return None
    memory = target.chip.memory_bytes
    if isinstance(budget, str) and (share := re.fullmatch(r"\s*(-?\d+(?:\.\d+)?)\s*%\s*", budget)):
        found = round(memory * Fraction(share[1]) / 100)
    elif isinstance(budget, str):
        text = budget.strip()
        if text.startswith("-"):
            raise PlanError(f"the budget is {budget!r}, below 0. Give e.g. 40GiB, or 90% of the device.")
        try:
            found = parse_bytes(text)
        except RematKitError as error:
            raise PlanError(f"the budget is {budget!r}: {error} Or give a share of the device, e.g. 90%.") from error
    else:
        found = _whole(budget)
    if found <= 0:
        raise PlanError(f"the budget is {budget!r}, which is no memory. Give e.g. 40GiB, or 90% of the device.")
    room = capacity(target).capacity_bytes
    if found > room:
        raise PlanError(
            f"the budget is {budget!r}, and {target.name} has {format_bytes(memory)}, of which one process "
            f"can use {format_bytes(room)}. Give at most that, {room} bytes."
        )
    return found


def _whole(budget: SupportsIndex) -> int:
    """A whole number of any type, NumPy's for one."""
    try:
        if isinstance(budget, bool):
            raise TypeError
        return operator.index(budget)
    except TypeError:
        raise PlanError(
            f"the budget is {budget!r}. Give bytes as a whole number, or text such as '40GiB' or '90%'."
        ) from None
