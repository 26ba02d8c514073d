"""The blocks of a function, found without a hint: bodies of scans, numbered modules, checkpoints, and what repeats."""

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from remat_kit._errors import RematKitError
from remat_kit._hlo.scope import module_path, split_number
from remat_kit._jaxpr import count_flops
from remat_kit._plan.flat import REMATS, Flat, Op, params_without_numbers, text_of_params
from remat_kit._plan.layout import Site, flat_of
from remat_kit._plan.sizes import bytes_of, flops_of_op

_LEAST_FLOPS = 0.02
"""What share of the function's FLOPs a kind of block has to hold."""
_MOST = 0.8
"""What share of a scan's FLOPs an inner scan has for its body to be the block."""
_NONLINEAR = frozenset({
    "exp", "exp2", "log", "tanh", "logistic", "erf", "rsqrt", "sqrt", "div", "max", "min", "select_n", "integer_pow",
    "pow", "sin", "cos", "reduce_max", "custom_jvp_call", "custom_vjp_call",
    "custom_vjp_call_jaxpr", "mul", "square", "sort",
    "top_k", "argmax",
})  # fmt: skip
_PARTS = frozenset({"slice", "dynamic_slice", "squeeze", "reshape"})


def find_sites(jaxpr: Any, where: str | None = None) -> tuple[Site, ...]:
    """The blocks of a function that is not differentiated yet, in the order in which they run.

    Raises RematKitError when there is none, or when `where`, a regular expression on module paths, fits nothing.
    """
    flat = flat_of(jaxpr)
    pattern = _compiled(where)
    total = max(1, count_flops(jaxpr))
    found = _sites_in(flat, (), pattern, _LEAST_FLOPS * total)
    if found:
        return tuple(found)
    scopes = sorted({"/".join(path[:2]) for op in flat.ops if (path := _path(op))})
    listed = f"Its module paths begin with: {', '.join(scopes[:12])}." if scopes else "Its operations have no scopes."
    if pattern is not None:
        raise RematKitError(f"no operation is in a module that --where {where!r} fits. {listed}")
    raise RematKitError(
        "found no block to plan: no scan over layers, no numbered modules, no jax.checkpoint and nothing that repeats. "
        f"{listed} Name what is a block with --where REGEX, or wrap a layer in jax.checkpoint."
    )


def _compiled(where: str | None) -> "re.Pattern[str] | None":
    try:
        return re.compile(where) if where is not None else None
    except re.error as error:
        raise RematKitError(
            f"--where {where!r} is not a regular expression: {error}. Try e.g. 'blocks_\\d+'."
        ) from error


def _sites_in(flat: Flat, scans: tuple[int, ...], pattern: "re.Pattern[str] | None", least: float) -> list[Site]:
    """The blocks of a program, and of the scans in it. `least`: FLOPs that a kind of block has in one run of it."""
    if pattern is not None:
        stretches = _by_scope(flat, lambda path: _matching(path, pattern))
    else:
        stretches = _checkpoints(flat, least) or _by_scope(flat, _numbered(flat, least)) or _repeated(flat, least)
    found = [Site(scans, stretch) for stretch in stretches]
    covered = {position for first, behind in stretches for position in range(first, behind)}
    for position, op in enumerate(flat.ops):
        if op.primitive == "scan" and position not in covered and op.eqn.params["length"] > 1:
            found += _in_scan(op, (*scans, position), pattern, least)
    return sorted(found, key=lambda site: (site.scans, site.stretch or (0, 0)))


def _in_scan(op: Op, scans: tuple[int, ...], pattern: "re.Pattern[str] | None", least: float) -> list[Site]:
    """The blocks inside a scan, or its whole body, or nothing where it computes little."""
    length = op.eqn.params["length"]
    body = flat_of(op.eqn.params["jaxpr"])
    work = [flops_of_op(each) for each in body.ops]
    within = least / length
    if pattern is not None:
        inside = _sites_in(body, scans, pattern, within)
        fits = any(pattern.search("/".join(_path(each))) for each in (op, *body.ops))
        return inside or ([Site(scans, None)] if fits else [])
    # Blocks in the body: where it is one checkpoint, or a loop over the layers of a segment.
    inside = [Site(scans, stretch) for stretch in _checkpoints(body, within)]
    for position, each in enumerate(body.ops):
        if each.primitive == "scan" and each.eqn.params["length"] > 1 and work[position] >= _MOST * sum(work):
            inside += _in_scan(each, (*scans, position), None, within)
    return inside or ([Site(scans, None)] if sum(work) >= within and _is_block(body.ops) else [])


def _path(op: Op) -> tuple[str, ...]:
    return module_path(f"{op.eqn.source_info.name_stack}/{op.primitive}")


def _is_block(ops: Sequence[Op]) -> bool:
    """Whether there is a product and something nonlinear, which is more than one dense layer."""
    primitives = {op.primitive for op in ops}
    nested = any(op.primitive in (*REMATS, "scan", "cond", "while") for op in ops)
    return any(flops_of_op(op) for op in ops) and (nested or bool(primitives & _NONLINEAR))


def _matching(path: tuple[str, ...], pattern: "re.Pattern[str]") -> str:
    """The shortest beginning of a module path that a pattern fits up to its end."""
    for length in range(1, len(path) + 1):
        text = "/".join(path[:length])
        if any(match.end() == len(text) for match in pattern.finditer(text)):
            return text
    return ""


def _numbered(flat: Flat, least: float) -> Callable[[tuple[str, ...]], str]:
    """Path -> the scope of the innermost numbered module around it that is more than one layer; "" without one."""
    members: dict[tuple[tuple[str, ...], str], dict[int, list[Op]]] = defaultdict(lambda: defaultdict(list))
    for op in flat.ops:
        path = _path(op)
        for position, part in enumerate(path):
            if split := split_number(part):
                members[path[:position], split[0]][split[1]].append(op)
    blocks = {
        stack
        for stack, numbers in members.items()
        if sum(map(_is_block, numbers.values())) > 1
        and sum(flops_of_op(op) for ops in numbers.values() for op in ops) >= least
    }

    def scope(path: tuple[str, ...]) -> str:
        for position in range(len(path) - 1, -1, -1):
            split = split_number(path[position])
            if (
                split
                and (path[:position], split[0]) in blocks
                and _is_block(members[path[:position], split[0]][split[1]])
            ):
                return "/".join(path[: position + 1])
        return ""

    return scope


def _by_scope(flat: Flat, scope_of: Callable[[tuple[str, ...]], str]) -> list[tuple[int, int]]:
    """Stretches of the same scope. What uses a block's results before the next one goes to it, unless there is a matrix
    product among it; so do the parts of stacked parameters that it alone takes.
    """
    scopes = [scope_of(_path(op)) for op in flat.ops]
    spans: dict[str, list[int]] = {}
    for position, scope in enumerate(scopes):
        if scope:
            spans.setdefault(scope, [position, position])[1] = position + 1
    found: list[tuple[int, int]] = []
    for first, behind in sorted(map(tuple, spans.values())):
        first = max(first, found[-1][1]) if found else first
        if first < behind:
            found.append((first, behind))
    ends: list[tuple[int, int]] = []
    for number, (first, behind) in enumerate(found):
        start = found[number + 1][0] if number + 1 < len(found) else behind
        end = _last_user(flat, first, behind, start)
        first = _first_part(flat, first, behind, ends[-1][1] if ends else 0)
        ends.append((first, behind if any(map(flops_of_op, flat.ops[behind:end])) else end))
    return ends


def _last_user(flat: Flat, first: int, behind: int, most: int) -> int:
    """The end of a stretch with all before `most` that depends on its results."""
    made = {number for op in flat.ops[first:behind] for number in op.outputs}
    end = behind
    for position in range(behind, most):
        op = flat.ops[position]
        if any(number in made for number in op.inputs if isinstance(number, int)):
            made.update(op.outputs)
            end = position + 1
    return end


def _first_part(flat: Flat, first: int, behind: int, least: int) -> int:
    """The beginning of a stretch with the slices before it, down to `least`, that nothing else takes."""
    others = {number for number in flat.outputs if isinstance(number, int)}
    for op in (*flat.ops[:first], *flat.ops[behind:]):
        if op.primitive not in _PARTS:
            others.update(number for number in op.inputs if isinstance(number, int))
    while first > least and flat.ops[first - 1].primitive in _PARTS and not others & {*flat.ops[first - 1].outputs}:
        first -= 1
    return first


def _checkpoints(flat: Flat, least: float) -> list[tuple[int, int]]:
    """Checkpoints with most of the program's matrix products, each a block."""
    found = [position for position, op in enumerate(flat.ops) if op.primitive in REMATS]
    inside = sum(flops_of_op(flat.ops[position]) for position in found)
    others = sum(flops_of_op(op) for op in flat.ops if op.primitive not in (*REMATS, "scan"))
    return [(position, position + 1) for position in found] if inside >= max(least, others) and inside else []


def _repeated(flat: Flat, least: float) -> list[tuple[int, int]]:
    """The stretch of operations that repeats the most FLOPs, cut where the fewest bytes go from one to the next."""
    signs = _signatures(flat)
    weights = [flops_of_op(op) for op in flat.ops]
    places: dict[int, list[int]] = defaultdict(list)
    for position, sign in enumerate(signs):
        if weights[position]:
            places[sign].append(position)
    periods = Counter(later - earlier for found in places.values() for earlier, later in itertools.pairwise(found))
    best: tuple[float, int, int, int] | None = None
    for period, _ in periods.most_common(16):
        for start, length in _runs(signs, period):
            repeats = length // period + 1
            covered = sum(weights[start : start + repeats * period])
            if repeats > 1 and covered >= least and _is_block(flat.ops[start : start + period]):
                best = max(best or (0.0, 0, 0, 0), (covered, -period, start, length))
    if best is None:
        return []
    period, start, length = -best[1], best[2], best[3]
    slack = (length + period) % period
    most = (length + period) // period
    crossing = _crossing_bytes(flat, period)
    offsets = [(start + offset, most - (offset > slack)) for offset in range(period)]
    usable = [each for each in offsets if each[1] > 1] or offsets[:1]
    first, repeats = min(usable, key=lambda each: (crossing[each[0] + period], -each[1], each[0]))
    return [(first + number * period, first + (number + 1) * period) for number in range(repeats)]


def _signatures(flat: Flat) -> list[int]:
    known: dict[str, int] = {}
    texts = (
        f"{op.primitive} {text_of_params(params_without_numbers(op))} {[str(flat.avals[each]) for each in op.outputs]}"
        for op in flat.ops
    )
    return [known.setdefault(text, len(known)) for text in texts]


def _runs(signs: Sequence[int], period: int) -> list[tuple[int, int]]:
    """Maximal stretches (start, length) in which each operation equals the one a period later."""
    found, start = [], None
    for position in range(len(signs) - period):
        if signs[position] == signs[position + period]:
            start = position if start is None else start
        elif start is not None:
            found.append((start, position - start))
            start = None
    if start is not None:
        found.append((start, len(signs) - period - start))
    return [run for run in found if run[1] >= period]


def _crossing_bytes(flat: Flat, period: int) -> list[int]:
    """Bytes made in the last `period` operations before each operation, and used from it on."""
    changes = [0] * (len(flat.ops) + 2)
    last: dict[int, int] = {}
    for position, op in enumerate(flat.ops):
        last.update((each, position) for each in op.inputs if isinstance(each, int))
    for position, op in enumerate(flat.ops):
        for number in op.outputs:
            if number in last:
                size = bytes_of(flat.avals[number])
                changes[position + 1] += size
                changes[min(last[number], position + period) + 1] -= size
    total, found = 0, []
    for change in changes:
        total += change
        found.append(total)
    return found
