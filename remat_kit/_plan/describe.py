"""A plan's decisions in a reader's words: what is kept and computed again, by tensor, and why."""

from collections.abc import Sequence

from remat_kit._hlo.scope import module_path
from remat_kit._plan.block import Block
from remat_kit._plan.choose import Choice
from remat_kit._plan.flat import Op
from remat_kit._plan.fusion import ELEMENTWISE, SPREADS, VIEWS
from remat_kit._plan.graph import Graph
from remat_kit._plan.plan import Again, BlockPlan, Kept, outline_of
from remat_kit._plan.search import Candidate, Planner, block_under
from remat_kit._plan.solve import Solution, evaluate
from remat_kit._units import format_bytes, format_flops, format_seconds

_COSTLY = 12
"""Operations that are listed by themselves; the others are added up."""


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
                kind=name,
                derivative=block.derivative if isinstance(block, Block) else "",
                sites=tuple(planner.found.sites[number] for number in numbers),
                module=first.scope or _module_of(kind.graph),
                repeats=kind.graph.repeats,
                kept=() if solution.is_bare else _kept(kind.graph, solution, times),
                again=_again(kind.graph, solution, times),
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
    rows, rest = [], 0.0
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
    rest += sum(row.seconds for row in rows[_COSTLY:])
    return (*rows[:_COSTLY], Again("elementwise and the rest", "", "", 0, rest))


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
        change = compiled.seconds / policy.compiled.seconds - 1
        more = compiled.recompute_flops - policy.compiled.recompute_flops
        does = f"{format_flops(abs(more))} {'more' if more > 0 else 'less'} of matrix products runs again"
        found.append(
            f"It is predicted to take {format_seconds(compiled.seconds)}, {change:+.1%} of {policy.name}'s "
            f"{format_seconds(policy.compiled.seconds)}, the fastest of the named policies that were compiled; {does}."
        )
    else:
        found.append(f"Nothing beats the named policy {policy.name} here.")
    again = next((each for each in tried if each.compiled), None)
    if again is not None and again is not best and again.compiled is not None:
        change = compiled.need_bytes - again.compiled.need_bytes
        found.append(
            f"Computing every block again needs {format_bytes(abs(change))} {'less' if change > 0 else 'more'} and "
            f"takes {format_seconds(again.compiled.seconds)}."
        )
    return tuple(found)
