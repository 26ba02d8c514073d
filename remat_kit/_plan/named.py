"""Named policies on the blocks that a plan is for: as JAX runs them, and as decisions in the model."""

from collections.abc import Sequence
from typing import Any

import jax

from remat_kit._lower import is_kept, lower
from remat_kit._plan.block import Block
from remat_kit._plan.flat import Flat
from remat_kit._plan.graph import Graph
from remat_kit._plan.solve import Solution, bare, evaluate
from remat_kit._policy import POLICIES, Policy, Region, Rule


class NamedBlock:
    """A block under a named policy: what `jax.checkpoint` makes of it, with the model's own tags in place."""

    def __init__(self, flat: Flat, policy: Policy) -> None:
        block = Block(flat, {}, "")

        def run(*arguments: Any) -> Any:
            return block.tagged(arguments)

        if policy.region is not Region.NOTHING:
            run = jax.checkpoint(run, policy=lower(policy), prevent_cse=True)
        self._run = run

    def __call__(self, *arguments: Any) -> list[Any]:
        """The block's outputs."""
        return list(self._run(*arguments))


def applicable(graphs: Sequence[Graph]) -> tuple[Policy, ...]:
    """`full`, and the policies of the table that keep something of some block, without those that offload.

    Of policies that keep the same of all blocks, the first.
    """
    full = POLICIES["full"]
    found: dict[Any, Policy] = {}
    for policy in POLICIES.values():
        if policy.offloads or policy.rule is Rule.OFFLOAD_DOTS_WITH_NO_BATCH_DIMS:
            continue
        key = None if policy.region is Region.NOTHING else tuple(kept_by(policy, graph) for graph in graphs)
        if policy is full or key is None or any(key):
            found.setdefault(key, policy)
    return tuple(found.values())


def kept_by(policy: Policy, graph: Graph) -> frozenset[int]:
    """The values of a block's derivative that a policy, asked about them, keeps."""
    flat = graph.derivative.flat
    if policy.region is Region.NOTHING or policy.rule is Rule.EVERYTHING:
        return frozenset(graph.needed)
    keeps = lower(policy)
    found = {number for number, tag in flat.tags.items() if tag in policy.saves}
    for step in graph.ops:
        eqn = flat.ops[step.position].eqn
        avals = [var.aval for var in eqn.invars]
        if keeps is not None and is_kept(keeps(eqn.primitive, *avals, **eqn.params)):
            found.update(step.outputs)
    return frozenset(number for number in found if number in graph.values)


def solution_of(policy: Policy, graph: Graph) -> Solution | None:
    """What a policy's decisions come to in the model; None when backward would need what must not run again."""
    if policy.region is Region.NOTHING:
        return bare(graph)
    return evaluate(graph, kept_by(policy, graph))
