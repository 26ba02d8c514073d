"""A program with its loops over blocks written out, turn by turn: each turn is then a block of its own.

A loop stacks what its blocks keep, which copies every value once more in forward and once in backward, and it keeps the
same of each block. Written out, nothing is stacked and every block may keep something else, at the price of a program
that is as many times as long for the compiler. Imports JAX and what `Plan.to_python` hands out alone, like `layout.py`.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core

from remat_kit._plan.flat import Flat, Literal, Op, bind
from remat_kit._plan.layout import NoSuchSite, Site, counts_of, flat_of

MOST_OPERATIONS = 50_000
"""Of a program with its loops written out: XLA takes minutes for as many."""


def loops_over_blocks(jaxpr: Any, sites: Sequence[Site]) -> tuple[int, ...]:
    """The loops that can be written out, each by the number of its operation in `flat_of(jaxpr)`.

    They are in no other loop, and blocks are in their bodies, in no loop of these. None when the program got too long.
    """
    if not any(site.scans for site in sites):
        return ()
    flat = flat_of(jaxpr)
    found = {site.scans[0] for site in sites if site.scans} - {site.scans[0] for site in sites if len(site.scans) > 1}
    more = sum(flat.ops[number].eqn.params["length"] * len(_body(flat.ops[number]).ops) for number in found)
    return tuple(sorted(found)) if len(flat.ops) + more <= MOST_OPERATIONS else ()


def unrolled(jaxpr: Any, loops: Sequence[int]) -> Any:
    """The jaxpr with `loops` written out. Raises NoSuchSite where one of them is no loop."""
    flat = flat_of(jaxpr)
    for number in loops:
        if not number < len(flat.ops) or flat.ops[number].primitive != "scan":
            raise NoSuchSite(f"operation {number} of {len(flat.ops)} should be a scan and is not")

    def program(*arguments: Any) -> list[Any]:
        values: dict[int, Any] = {}

        def read(each: int | Literal) -> Any:
            return values[each] if isinstance(each, int) else each.value

        def write(numbers: Sequence[int], results: Sequence[Any]) -> None:
            for number, result in zip(numbers, results, strict=True):
                values[number] = checkpoint_name(result, flat.tags[number]) if number in flat.tags else result

        write(flat.inputs, arguments)
        for number, op in enumerate(flat.ops):
            operands = [read(each) for each in op.inputs]
            write(op.outputs, _turns(op, operands) if number in loops else bind(op.eqn, operands))
        return [read(each) for each in flat.outputs]

    return jax.make_jaxpr(program)(*(_argument(flat.avals[number]) for number in flat.inputs))


def sites_of_turns(jaxpr: Any, sites: Sequence[Site], loops: Sequence[int]) -> tuple[Site, ...]:
    """Where the blocks of a jaxpr at `sites` are in the one with `loops` written out: one for each turn of theirs."""
    flat = flat_of(jaxpr)
    starts = _starts(flat, loops)
    found: list[Site] = []
    for site in sites:
        if not site.scans:
            assert site.stretch is not None
            shift = starts[site.stretch[0]] - site.stretch[0]
            found.append(Site((), (site.stretch[0] + shift, site.stretch[1] + shift)))
        elif site.scans[0] not in loops:
            found.append(Site((starts[site.scans[0]], *site.scans[1:]), site.stretch))
        else:
            loop = flat.ops[site.scans[0]]
            length = len(_body(loop).ops)
            first, behind = site.stretch or (0, length)
            turns = range(starts[site.scans[0]], starts[site.scans[0]] + loop.eqn.params["length"] * length, length)
            found += [Site((), (turn + first, turn + behind)) for turn in turns]
    return tuple(sorted(found))


def _starts(flat: Flat, loops: Sequence[int]) -> list[int]:
    """Where each operation is when `loops` are written out; of a loop, where its first turn begins."""
    found, position = [], 0
    for number, op in enumerate(flat.ops):
        if number not in loops:
            found.append(position)
            position += 1
            continue
        consts, carried = counts_of(op)
        taken = [flat.avals[each] if isinstance(each, int) else jax.typeof(each.value) for each in op.inputs]
        body = _body(op)
        made = [body.avals[each] if isinstance(each, int) else jax.typeof(each.value) for each in body.outputs]
        length = op.eqn.params["length"]
        position += sum(_count(functools.partial(_parts, length=length), each) for each in taken[consts + carried :])
        found.append(position)
        position += length * len(body.ops)
        position += sum(_count(_stacked, *[each] * length) for each in made[carried:])
    return found


def _turns(loop: Op, operands: Sequence[Any]) -> list[Any]:
    """What a loop results in, computed without one."""
    consts, carried = counts_of(loop)
    length = loop.eqn.params["length"]
    stack = str(loop.eqn.source_info.name_stack)
    with jax.named_scope(stack) if stack else contextlib.nullcontext():
        given = [_parts(each, length) for each in operands[consts + carried :]]
        carry = list(operands[consts : consts + carried])
        made: list[Sequence[Any]] = [()] * length
        for turn in reversed(range(length)) if loop.eqn.params["reverse"] else range(length):
            with jax.named_scope(f"turn_{turn}"):
                values = [*operands[:consts], *carry, *(parts[turn] for parts in given)]
                results = core.jaxpr_as_fun(loop.eqn.params["jaxpr"])(*values)
            carry, made[turn] = list(results[:carried]), results[carried:]
        return [*carry, *(_stacked(*parts) for parts in zip(*made, strict=True))]


def _parts(whole: Any, length: int) -> list[Any]:
    """The rows of an array. Their gradients are put together at once, which those of single rows are not."""
    return [jax.lax.squeeze(part, (0,)) for part in jax.lax.split(whole, (1,) * length)]


def _stacked(*parts: Any) -> Any:
    return jax.lax.concatenate([jax.lax.expand_dims(part, (0,)) for part in parts], 0)


def _body(loop: Op) -> Flat:
    return flat_of(loop.eqn.params["jaxpr"])


def _count(function: Callable[..., Any], *avals: Any) -> int:
    """How many operations a function of arrays is."""
    return len(Flat(jax.make_jaxpr(function)(*map(_argument, avals))).ops)


def _argument(aval: Any) -> Any:
    """What stands for an array where a program is traced."""
    sharding: Any = getattr(aval, "sharding", None)
    known = sharding is not None and not sharding.mesh.empty
    weak = getattr(aval, "weak_type", False)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=weak, sharding=sharding if known else None)
