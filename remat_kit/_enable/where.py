"""Which modules of a model are meant: by class, by a glob of their paths, or as what repeats with most parameters.

A path is written `encoder/layers/3`, `encoder/layers_3` or `encoder.layers[3]`, whichever framework made it: in all of
them `encoder/layers/*`, `encoder/layers_*` and `encoder.layers[*]` mean the same modules.
"""

import fnmatch
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from flax import linen as nn
from flax import nnx

from remat_kit._errors import RematKitError, did_you_mean

Where = str | type | Sequence[str | type] | None
"""What may say which modules are meant; None: those that repeat."""

_MOST = 0.8
"""What share of the parameters of a stack an inner stack has for its modules to be the blocks."""
_LEAST = 0.1
"""What share of the parameters of the largest stack another one has to be a stack of blocks, too."""
_NAMED = 12
"""How many classes, or paths, an error names."""
HOW = (
    "Give a class, the name of one (globs too: '*Block'), a glob of module paths ('layers.*', 'encoder/layer_*', "
    "'h[*]'), or several of these in a list."
)


@dataclass(frozen=True)
class Part:
    """A module in a model.

    Attributes:
      path: attributes, names and numbers that lead to it from the model; () for the model itself.
      cls: its class.
      shapes: of its parameters and of those of the modules in it.
    """

    path: tuple[str, ...]
    cls: type
    shapes: tuple[tuple[int, ...], ...] = ()

    @property
    def size(self) -> int:
        """How many elements its parameters have."""
        return sum(map(math.prod, self.shapes))

    @property
    def matrices(self) -> int:
        """How many of its parameters have more than one axis."""
        return sum(len(shape) > 1 for shape in self.shapes)

    @property
    def text(self) -> str:
        """The path as text, e.g. `encoder/layers/3`; "(the model itself)" for the model."""
        return "/".join(self.path) or "(the model itself)"


Pick = Callable[[type, tuple[str, ...]], bool]
"""Whether the module of a class at a path is meant."""


def checked(where: Where) -> tuple[str | type, ...] | None:
    """`where` as a tuple, None as it is. Raises RematKitError when it is nothing that says which modules are meant."""
    if where is None:
        return None
    several: tuple[Any, ...] = tuple(where) if isinstance(where, list | tuple) else (where,)
    for each in several:
        if isinstance(each, str) and each.strip() and _is_readable(each):
            continue
        if isinstance(each, type) and issubclass(each, nn.Module | nnx.Module):
            continue
        what = f"the class {each.__name__}, which is no Flax module" if isinstance(each, type) else repr(each)
        raise RematKitError(f"where is {what}. {HOW} None finds what repeats.")
    if not several:
        raise RematKitError(f"where is empty. {HOW} None finds what repeats.")
    return several


def picker(where: tuple[str | type, ...]) -> Pick:
    """What tells for a module whether it is meant. A glob never means the model as a whole; its class may."""
    classes = tuple(each for each in where if isinstance(each, type))
    texts = [each for each in where if isinstance(each, str)]
    patterns = [re.compile(path_regex(each)) for each in texts]

    def pick(cls: type, path: tuple[str, ...]) -> bool:
        if issubclass(cls, classes) or cls.__name__ in texts:
            return True
        if not path:
            return False
        if any(fnmatch.fnmatchcase(cls.__name__, each) for each in texts):
            return True
        return any(pattern.fullmatch(text) for text in _spellings(path) for pattern in patterns)

    return pick


def path_regex(glob: str) -> str:
    """A glob of module paths as a regular expression on a path with "/": `*` and `?` stay within a part, `**` does not.

    A dot and brackets are "/", too.
    """
    text = re.sub(r"\[['\"]?([^\]'\"]*)['\"]?\]", r"/\1", glob.strip()).replace(".", "/").strip("/")
    text = re.sub(r"/+", "/", text)
    found = []
    for piece in re.split(r"(\*\*/|\*\*|\*|\?)", text):
        found.append({"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}.get(piece, re.escape(piece)))
    return "".join(found)


def _is_readable(glob: str) -> bool:
    return bool(path_regex(glob)) and glob.count("[") == glob.count("]")


def _spellings(path: tuple[str, ...]) -> set[str]:
    """`layers/3`, `layers_3`."""
    joined = "/".join(path)
    return {joined, re.sub(r"/(\d+)(?=/|$)", r"_\1", joined), re.sub(r"(?<=[^/\d])_?(\d+)(?=/|$)", r"/\1", joined)}


def outermost(parts: Iterable[Part]) -> list[Part]:
    """Those that are not inside another one, in the order of their paths' lengths."""
    found: dict[tuple[str, ...], Part] = {}
    for part in sorted(parts, key=lambda each: len(each.path)):
        if not any(part.path[:length] in found for length in range(len(part.path) + 1)):
            found[part.path] = part
    return list(found.values())


def repeated(parts: Sequence[Part]) -> list[Part]:
    """The blocks of a model: what repeats, or is stacked, and holds most of its parameters.

    A stack is modules of one class whose paths differ in numbers alone, or one module whose parameters all have a
    first axis of the same size, as `nnx.vmap` and `nn.scan` make them; a block has parameters of two axes in at least
    two places. Where several of a stack are in each module of another, with `_MOST` of its parameters, and what is left
    of it is no block (blocks in stages, but not experts beside attention), it is the one that counts. Further stacks
    with `_LEAST` of the first one's parameters are blocks as well (a decoder).
    """
    stacks: dict[tuple[tuple[str, ...], type], list[Part]] = defaultdict(list)
    for part in parts:
        if part.path and part.matrices > 1:
            stacks[_starred(part.path), part.cls].append(part)
    candidates = [stack for stack in stacks.values() if len(stack) > 1 or _is_stacked(stack[0])]
    chosen: list[list[Part]] = []
    left = sorted(candidates, key=lambda stack: (-_size_of(stack), len(stack[0].path)))
    while left and (not chosen or _size_of(left[0]) >= _LEAST * _size_of(chosen[0])):
        best = left[0]
        # One module that stands for many is a block as it is: in it every bias looks like a matrix.
        while len(best) > 1 and (inner := [each for each in left if _are_blocks(each, best)]):
            best = inner[0]
        chosen.append(best)
        left = [each for each in left if each is not best and not _is_in(each, best) and not _is_in(best, each)]
    return [part for stack in chosen for part in stack]


def _size_of(stack: Sequence[Part]) -> int:
    return sum(part.size for part in stack)


def _are_blocks(inner: Sequence[Part], outer: Sequence[Part]) -> bool:
    """Whether the modules of a stack are the blocks of another one's, which are stages."""
    several = len(inner) > len(outer) or all(map(_is_stacked, inner))
    left = sum(part.matrices for part in outer) - sum(part.matrices for part in inner)
    is_most = _size_of(inner) >= _MOST * _size_of(outer)
    return _is_in(inner, outer) and several and is_most and left <= len(outer)


def _is_in(inner: Sequence[Part], outer: Sequence[Part]) -> bool:
    """Whether the modules of a stack are inside those of another."""
    paths = {part.path for part in outer}
    return inner is not outer and any(part.path[: len(path)] == path for part in inner for path in paths)


def _is_stacked(part: Part) -> bool:
    """Whether one module stands for many: unstacked, a bias or a norm's scale has one axis."""
    shapes = part.shapes
    first = {shape[0] for shape in shapes if shape}
    return (
        len(first) == 1
        and min(first) > 1
        and min(map(len, shapes)) > 1
        and sum(len(shape) > 2 for shape in shapes) > 1
        and any(len(shape) == 2 for shape in shapes)
    )


def _starred(path: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(re.sub(r"\d+$", "*", part) for part in path)


def no_match(where: tuple[str | type, ...] | None, parts: Sequence[Part], model: str) -> RematKitError:
    """The error for a model none of whose modules is meant, with what there is."""
    inner = [part for part in parts if part.path]
    if not inner:
        return RematKitError(f"{model} has no modules inside, so there is nothing to rematerialize by where.")
    counts = Counter(part.cls.__name__ for part in inner)
    listed = []
    for name, count in sorted(counts.items(), key=lambda each: _first_of(each[0], inner))[:_NAMED]:
        paths = [part.text for part in inner if part.cls.__name__ == name]
        listed.append(f"{name} ×{count} ({paths[0]}{', ...' if count > 1 else ''})")
    more = f", and {len(counts) - _NAMED} more classes" if len(counts) > _NAMED else ""
    there = f"Its modules: {', '.join(listed)}{more}."
    if where is None:
        return RematKitError(f"found nothing in {model} that repeats and is more than one layer. {there} {HOW}")
    given = ", ".join(repr(each) if isinstance(each, str) else each.__name__ for each in where)
    hint = did_you_mean(str(where[0] if isinstance(where[0], str) else where[0].__name__), counts)
    return RematKitError(f"no module of {model} fits where={given}.{hint} {there} {HOW}")


def _first_of(name: str, parts: Sequence[Part]) -> tuple[int, int]:
    """Outer modules come first."""
    return min((len(part.path), number) for number, part in enumerate(parts) if part.cls.__name__ == name)
