"""A plan's decisions in a reader's words: what is kept and computed again, by tensor, and why."""

import contextlib
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from remat_kit._hlo.scope import module_path
from remat_kit._jaxpr import bodies, count_work, walk
from remat_kit._plan.block import SAVE, Block
from remat_kit._plan.choose import Choice
from remat_kit._plan.flat import Op
from remat_kit._plan.fusion import ELEMENTWISE, SPREADS, VIEWS
from remat_kit._plan.graph import Graph
from remat_kit._plan.plan import NOT_KEPT, Again, BlockPlan, Kept, outline_of
from remat_kit._plan.search import Candidate, Planner, block_under
from remat_kit._plan.solve import Solution, evaluate
from remat_kit._plan.survey import Kind
from remat_kit._units import format_bytes, format_flops, format_seconds

_COSTLY = 12
"""Operations that are listed by themselves; the others are added up."""
_NO_CHANGE = 0.0005
"""A relative difference that a reader sees as 0.0%."""


def block_plans(planner: Planner, choice: Choice) -> tuple[BlockPlan, ...]:
    """One entry for all blocks of a kind with the same decisions, in the order in which they run."""
    sites: dict[tuple[str, Solution], list[int]] = {}
    for number, key in enumerate(zip(choice.kinds, choice.solutions, strict=True)):
        sites.setdefault(key, []).append(number)
    found = []
    for (name, solution), numbers in sites.items():
        kind = planner.found.kinds[name]
        block = block_under(kind.graph, kind.block, solution)
        first = next(each for each in kind.instances if each.site == planner.found.sites[numbers[0]])
        times = len(numbers) * kind.graph.repeats
        found.append(
            BlockPlan(
                kind=first.kind,
                derivative=block.derivative if isinstance(block, Block) else "",
                sites=tuple(planner.found.sites[number] for number in numbers),
                module=first.scope or _module_of(kind.graph),
                repeats=kind.graph.repeats,
                kept=() if solution.is_bare else _kept(kind.graph, solution, times),
                again=(*_again(kind.graph, solution, times), *([] if solution.is_bare else _always(kind, times))),
                outline=outline_of(kind.block.flat),
                checkpointed=not solution.is_bare,
            )
        )
    return tuple(found)


def _kept(graph: Graph, solution: Solution, times: int) -> tuple[Kept, ...]:
    flat = graph.derivative.flat
    found = []
    for number in solution.kept | solution.offloaded:
        value = graph.values[number]
        if value.is_input and number in solution.kept:
            continue
        without = evaluate(graph, solution.kept - {number}, solution.offloaded - {number})
        op = None if value.is_input else flat.ops[value.place[0]]
        found.append(
            Kept(
                op=value.place[0],
                output=value.place[1],
                how="offload" if number in solution.offloaded else "save",
                name=flat.tags.get(number, op.primitive if op else "input"),
                module=_path(op) if op else "",
                shape=flat.avals[number].str_short(short_dtypes=True),
                bytes=value.bytes * times,
                again_s=0.0 if without is None or not op else max(0.0, without.seconds - solution.seconds) * times,
            )
        )
    return tuple(sorted(found, key=lambda each: (-each.bytes, each.op, each.output)))


def _again(graph: Graph, solution: Solution, times: int) -> tuple[Again, ...]:
    flat = graph.derivative.flat
    rows: list[Again] = []
    rest = 0.0
    for step in graph.ops:
        if step.position not in solution.again:
            continue
        op = flat.ops[step.position]
        if op.primitive in ELEMENTWISE or op.primitive in VIEWS or op.primitive in SPREADS:
            rest += step.again_s * times
            continue
        shape = flat.avals[step.outputs[0]].str_short(short_dtypes=True)
        rows.append(Again(op.primitive, _path(op), shape, step.flops * times, step.again_s * times))
    rows.sort(key=lambda row: -row.seconds)
    cheaper = rows[_COSTLY:]
    rest += sum(row.seconds for row in cheaper)
    flops = sum(row.flops for row in cheaper)
    return (*rows[:_COSTLY], Again("elementwise and the rest", "", "", flops, rest))


def _always(kind: Kind, times: int) -> list[Again]:
    """What runs again whatever is kept: a row for all of it, if there are loops or branches in the block.

    The derivative of a loop is one operation that makes its results and their tangents. It depends on a tangent, so it
    is among the linear operations, which nothing can be kept of, and so is all that is computed from its results.
    What JAX runs again of them is counted on a trace of the block in which every value that can be kept is.
    """
    derivative = kind.graph.derivative
    flat, linear = derivative.flat, derivative.linear
    compound = [op for position, op in enumerate(flat.ops) if position in linear and bodies(op.eqn)]
    if not compound:
        return []
    everything = {
        (position, output): SAVE
        for position, op in enumerate(flat.ops)
        if position not in linear
        for output in range(len(op.outputs))
    }
    block = Block(kind.block.flat, everything, derivative.fingerprint)

    def backward(*inputs: Any) -> Any:
        def of_active(*values: Any) -> list[Any]:
            left = iter(values)
            given = [next(left) if active else each for each, active in zip(inputs, derivative.active, strict=True)]
            return [each for each in block(*given) if jnp.issubdtype(each.dtype, jnp.inexact)]

        results, pull = jax.vjp(of_active, *itertools.compress(inputs, derivative.active))
        return pull(results)

    avals = [flat.avals[number] for number in flat.inputs[: len(derivative.active)]]
    given = [jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=_sharding_of(each)) for each in avals]
    with contextlib.ExitStack() as stack:
        for mesh in {sharding.mesh for each in avals if (sharding := _sharding_of(each))}:
            stack.enter_context(jax.sharding.use_abstract_mesh(mesh))
        jaxpr = jax.make_jaxpr(backward)(*given)
    ran = {each.primitive for each in walk(jaxpr) if each.recomputed}
    found = [op for op in compound if op.primitive in ran]
    if not found or not block.matched:
        return []
    flops = count_work(jaxpr).recomputed_flops * times
    names = ", ".join(dict.fromkeys(op.primitive for op in found))
    return [Again(f"{NOT_KEPT}{names}", _path(found[0]) if len(found) == 1 else "", "", flops, 0.0)]


def _sharding_of(aval: Any) -> Any:
    """The sharding that is a part of a type: with a mesh that is explicit, where a program computes with shardings."""
    sharding: Any = getattr(aval, "sharding", None)
    mesh = getattr(sharding, "mesh", None)
    return None if mesh is None or mesh.empty else sharding


def _path(op: Op) -> str:
    return "/".join(module_path(f"{op.eqn.source_info.name_stack}/{op.primitive}"))


def _module_of(graph: Graph) -> str:
    """What the modules of a block's operations begin with."""
    paths = [path for op in graph.derivative.flat.ops if (path := _path(op))]
    heads = [path.split("/")[0] for path in paths]
    return max(set(heads), key=heads.count) if heads else "block"


def reasons_for(
    best: Candidate, policy: Candidate | None, tried: Sequence[Candidate], limit: int | None
) -> tuple[str, ...]:
    """Why this is the answer: what bounds the need, and what it gains over the best named policy."""
    compiled = best.compiled
    assert compiled is not None
    peak = compiled.explanation.peak
    place = f"{peak.phase}{f' in {peak.module}' if peak.module else ''}"
    found = [f"The need of {format_bytes(compiled.need_bytes)} is that of {place}."]
    if limit is not None and not best.fits(limit):
        holders = ", ".join(
            f"{format_bytes(each.bytes)} {each.category}{f' of {each.module}' if each.module else ''}"
            for each in compiled.explanation.holders[:4]
        )
        found.append(
            f"Nothing smaller was found: {format_bytes(compiled.need_bytes - limit)} above the budget of "
            f"{format_bytes(limit)}. It is held by {holders}."
        )
        floor = compiled.explanation.floor
        if floor is not None:
            found.append(f"No policy takes this program below {format_bytes(floor.bytes)}, the floor of its schedule.")
        return tuple(found)
    if policy is None or policy.compiled is None:
        found.append("No named policy fits, of those that were compiled.")
    elif policy.compiled is not compiled:
        more = compiled.recompute_flops - policy.compiled.recompute_flops
        does = f"{format_flops(abs(more))} {'more' if more > 0 else 'less'} of matrix products runs again"
        found.append(
            f"It is predicted to take {format_seconds(compiled.seconds)}, "
            f"{_against(compiled.seconds, policy.compiled.seconds)} {policy.name}'s "
            f"{format_seconds(policy.compiled.seconds)}, the fastest of the named policies that were compiled; "
            f"{does if more else 'matrix products of as many FLOP run again'}."
        )
    else:
        found.append(f"Nothing beats the named policy {policy.name} here.")
    if best.is_unrolled:
        found.append("Its loops over blocks are written out, so nothing that blocks keep is stacked.")
    if best.options:
        told = ", ".join(f"{name}={value}" for name, value in best.options)
        found.append(f"It is XLA's own pass that does it: give jax.jit the compiler_options of the plan ({told}).")
    again = next((each for each in tried if each.compiled), None)
    if again is not None and again is not best and again.compiled is not None:
        change = compiled.need_bytes - again.compiled.need_bytes
        needs = f"{format_bytes(abs(change))} {'less' if change > 0 else 'more'}" if change else "as much"
        # Not "computing all again": what must not run again, random bits perhaps, is kept.
        found.append(
            f"Keeping as little as each block can needs {needs} and takes {format_seconds(again.compiled.seconds)}."
        )
    return tuple(found)


def _against(ours: float, theirs: float) -> str:
    change = ours / theirs - 1
    return f"{abs(change):.1%} {'more' if change > 0 else 'less'} than" if abs(change) >= _NO_CHANGE else "as long as"
