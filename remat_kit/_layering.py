"""How a stack of blocks is divided: the part of a policy that is about many blocks, as a value and as arithmetic.

Sizes are numbers of blocks, bytes are integers. `segments(k)` has exactly k segments that differ by at most one block,
the longer ones first; `every(k)` has groups of k blocks, the last of which may be shorter.
"""

import enum
import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from remat_kit._errors import PolicyError, did_you_mean

AUTO, SQRT, RECURSIVE = "auto", "sqrt", "recursive"
WORDS = (AUTO, SQRT, RECURSIVE)
"""What may stand in the place of a number of segments; see `Layering.sizes`."""


class Method(enum.Enum):
    """What is done with a stack of blocks; the value is the function that makes such a policy."""

    SEGMENTS = "segments"
    """The stack in k segments, each checkpointed as a whole: √N checkpointing (Chen et al. 2016)."""
    FIRST = "first"
    """The first k blocks under a policy, the others without a checkpoint: Megatron's "block" method."""
    EVERY = "every"
    """Groups of k blocks, each checkpointed as a whole: Megatron's "uniform" method."""


_COUNTED = {
    Method.SEGMENTS: f"a number of segments of at least 1, or one of {', '.join(WORDS)}",
    Method.FIRST: "a number of blocks of at least 1",
    Method.EVERY: "a number of blocks of at least 1",
}


@dataclass(frozen=True)
class Layering:
    """How a policy acts on a stack of blocks.

    Attributes:
      method: what is done.
      count: of segments (SEGMENTS; or one of WORDS), of blocks under the policy (FIRST), of blocks in a group (EVERY).
    """

    method: Method
    count: int | str

    def __post_init__(self) -> None:
        is_word = self.method is Method.SEGMENTS and self.count in WORDS
        is_count = isinstance(self.count, int) and not isinstance(self.count, bool) and self.count >= 1
        if not (is_word or is_count):
            name = self.method.value
            hint = ""
            if self.method is Method.SEGMENTS and isinstance(self.count, str):
                hint = did_you_mean(self.count, WORDS)
            raise PolicyError(
                f"{name}(...) takes first {_COUNTED[self.method]}, got {self.count!r}.{hint} "
                f"Write e.g. {name}(4), or {name}(4,selective_attention) with a policy inside."
            )

    def __str__(self) -> str:
        return f"{self.method.value}({self.count})"

    @property
    def summary(self) -> str:
        """What becomes of a stack, in words."""
        if self.method is Method.FIRST:
            return f"the first {self.count} blocks of a stack, the others without a checkpoint"
        if self.method is Method.EVERY:
            return f"groups of {self.count} blocks, each checkpointed as a whole"
        how = f"{self.count} segments" if isinstance(self.count, int) else f"segments ({self.count})"
        return f"a stack in {how}, each checkpointed as a whole"

    def check(self, blocks: int, where: str) -> None:
        """Raises PolicyError when the count is more than the `blocks` of the stack that `where` speaks of."""
        if isinstance(self.count, int) and self.count > blocks:
            asked = {
                Method.SEGMENTS: f"divides a stack into {self.count} segments",
                Method.FIRST: f"puts the first {self.count} blocks of a stack under a policy",
                Method.EVERY: f"makes groups of {self.count} blocks",
            }[self.method]
            other = ", or segments(auto)" if self.method is Method.SEGMENTS else ""
            raise PolicyError(
                f"{self} {asked}, and {where} has {blocks} block{'s' * (blocks != 1)}. "
                f"Give a number of at most {blocks}{other}."
            )

    def sizes(self, blocks: int, cost: Callable[[tuple[int, ...]], int] | None = None) -> tuple[int, ...]:
        """The numbers of blocks of the segments (or groups, or of the blocks under FIRST and the rest), in order.

        `auto` takes the division with the least `cost`, of several the one with fewest segments; without a cost it is
        `sqrt`. `sqrt` has about √blocks segments: the smallest k ≥ √blocks that divides the stack evenly, where one is
        at most √2·√blocks, else ⌈√blocks⌉. `recursive` has 2 or 3 segments, each of them divided in the same way until
        a segment is one block. A count of more than there are blocks counts as so many.
        """
        if isinstance(self.count, int):
            count = min(self.count, blocks)
            if self.method is Method.SEGMENTS:
                return balanced(blocks, count)
            if self.method is Method.FIRST:
                return (count, blocks - count)[: 1 + (blocks > count)]
            return (count,) * (blocks // count) + ((blocks % count,) if blocks % count else ())
        if self.count == RECURSIVE:
            return balanced(blocks, 3 if blocks % 2 and not blocks % 3 else min(2, blocks))
        if self.count == SQRT or cost is None:
            return balanced(blocks, square_root(blocks))
        return min((balanced(blocks, count) for count in range(1, blocks + 1)), key=cost)


def balanced(blocks: int, count: int) -> tuple[int, ...]:
    """`count` sizes with the sum `blocks` that differ by at most one, the larger ones first."""
    size, longer = divmod(blocks, count)
    return (size + 1,) * longer + (size,) * (count - longer)


@functools.cache
def square_root(blocks: int) -> int:
    """A number of segments near √blocks that divides `blocks` evenly where one is near enough; see `Layering.sizes`."""
    ceiling = next(count for count in range(1, blocks + 1) if count * count >= blocks)
    even = (count for count in range(ceiling, blocks + 1) if blocks % count == 0 and count * count <= 2 * blocks)
    return next(even, ceiling)


def runs(sizes: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """(how many, size) of neighbours of one size, in order."""
    start = 0
    for end in range(1, len(sizes) + 1):
        if end == len(sizes) or sizes[end] != sizes[start]:
            yield end - start, sizes[start]
            start = end


# Text


def split_outside(text: str, separator: str) -> list[str]:
    """The parts of `text` between separators that are in no parentheses, stripped."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == separator and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def call_of(text: str) -> tuple[str, list[str]] | None:
    """The function and the arguments of `save(a,b)`, empty ones left out; None when `text` is not one call."""
    name, opening, rest = text.partition("(")
    if not (opening and rest.endswith(")") and name.isidentifier()):
        return None
    inside, depth = rest[:-1], 0
    for letter in inside:
        depth += (letter == "(") - (letter == ")")
        if depth < 0:
            return None
    return None if depth else (name, [part for part in split_outside(inside, ",") if part])


def count_and_inside(function: str, arguments: list[str]) -> tuple[int | str, ...]:
    """The arguments of `segments(4,full)` and its kin as they were typed: the count, and the policy inside if given."""
    if not 1 <= len(arguments) <= 2:
        got = f"got {len(arguments)}: {', '.join(arguments)}" if arguments else "got none"
        raise PolicyError(
            f"{function}(...) takes a count and at most one policy inside, {got}. "
            f"Write e.g. {function}(4) or {function}(4,full)."
        )
    count = arguments[0]
    return int(count) if re.fullmatch(r"[+-]?[0-9]+", count) else count, *arguments[1:]
