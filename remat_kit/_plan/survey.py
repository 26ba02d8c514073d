"""What there is to plan in a step: its blocks, each kind with its graph."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from remat_kit._errors import RematKitError
from remat_kit._plan.active import active_inputs, differentiated
from remat_kit._plan.block import Block
from remat_kit._plan.find import find_sites
from remat_kit._plan.graph import Graph, build_graph
from remat_kit._plan.layout import Instance, Layout, Site, flat_of, lay_out
from remat_kit._plan.sizes import flops_of_op, outside_flops
from remat_kit._plan.unroll import loops_over_blocks, sites_of_turns, unrolled
from remat_kit._step import Step
from remat_kit._target import Target
from remat_kit._trace import TracedStep, losses_rewritten, trace


@dataclass(frozen=True)
class Kind:
    """Blocks for which the same is decided: they compute the same, with the same inputs differentiated, as often.

    Attributes:
      name: the fingerprint of what they compute, with a number behind it from the second kind that has the same one.
      block: the one through which the step was traced, with its derivative.
      graph: what can be decided.
      instances: all of them, in the order in which they run.
    """

    name: str
    block: Block
    graph: Graph
    instances: tuple[Instance, ...]


@dataclass(frozen=True)
class Survey:
    """A step with its blocks, traced with all of them computed again.

    Attributes:
      traced: the step with every block checkpointed and nothing kept in it.
      kinds: by name; sites: of all blocks in the order in which they run.
      outside_flops: of the matrix products that are in no block, once, in the function that is differentiated.
      loops: those of the function that are written out (`unrolled`), to which `sites` refers then.
      more_loops: those that could be.
    """

    traced: TracedStep
    kinds: Mapping[str, Kind]
    sites: tuple[Site, ...]
    outside_flops: int = 0
    loops: tuple[int, ...] = ()
    more_loops: tuple[int, ...] = ()

    def place(self, jaxpr: Any) -> tuple[Any, Sequence[Site]]:
        """The program of the function that is differentiated, and the sites in it."""
        return unrolled(jaxpr, self.loops) if self.loops else jaxpr, self.sites


Place = Callable[[Any], tuple[Any, Sequence[Site]]]
"""From the jaxpr of what is differentiated to the one to run in its place, and where the blocks are in that."""
Chooser = Callable[[Instance], Block]
"""The block that runs at a site."""
Note = Callable[[Layout, Sequence[Any]], None]
"""Sees a layout and what it is run on before it runs."""


def survey(step: Step, target: Target, where: str | None = None, unroll: bool = False) -> Survey:
    """The blocks of a step, those of loops each on its own with `unroll`.

    Raises RematKitError when there is none, when the step has no derivative, or when a block has an `io_callback`.
    """
    layouts: list[Layout] = []
    blocks: dict[Any, Block] = {}
    active: dict[Site, tuple[bool, ...]] = {}

    def note(layout: Layout, arguments: Sequence[Any]) -> None:
        active.update(active_inputs(layout, differentiated(arguments)))

    def key_of(instance: Instance) -> Any:
        return instance.kind, instance.repeats, active[instance.site]

    def choose(instance: Instance) -> Block:
        if any(active[instance.site]):
            _check_effects(instance)
        return blocks.setdefault(key_of(instance), Block(instance.flat, {}, ""))

    loops: list[tuple[int, ...]] = []

    def place(jaxpr: Any) -> tuple[Any, Sequence[Site]]:
        sites = find_sites(jaxpr, where)
        loops[:] = [loops_over_blocks(jaxpr, sites)]
        if not unroll or not loops[0]:
            return jaxpr, sites
        return unrolled(jaxpr, loops[0]), sites_of_turns(jaxpr, sites, loops[0])

    traced = trace_with(step, target, place, choose, layouts, note)
    (layout,) = layouts
    instances = [each for each in layout.instances() if blocks[key_of(each)].seen and any(active[each.site])]
    if not instances:
        raise RematKitError("backward goes through none of the step's blocks. Plan the step that computes gradients.")
    kinds: dict[str, Kind] = {}
    for key in dict.fromkeys(map(key_of, instances)):
        own = tuple(each for each in instances if key_of(each) == key)
        # Inside a loop JAX asks again when it finds that more inputs are differentiated; the last time counts.
        derivative = list(blocks[key].seen.values())[-1]
        lasting = frozenset.intersection(*(each.lasting for each in own))
        graph = build_graph(derivative, lasting, target.chip, own[0].repeats)
        namesakes = sum(each.instances[0].kind == own[0].kind for each in kinds.values())
        name = f"{own[0].kind}-{namesakes + 1}" if namesakes else own[0].kind
        kinds[name] = Kind(name, blocks[key], graph, own)
    outside = outside_flops(layout) + sum(
        each.repeats * flops_of_op(op) for each in layout.instances() if each not in instances for op in each.flat.ops
    )
    written_out, left = (loops[0], ()) if unroll else ((), loops[0])
    return Survey(traced, kinds, tuple(each.site for each in instances), outside, written_out, left)


def _check_effects(instance: Instance) -> None:
    """Raises RematKitError for what JAX refuses in a checkpoint that is differentiated, be it inside of a loop."""
    for op in instance.flat.ops:
        if any("IOEffect" in type(effect).__name__ for effect in op.eqn.effects):
            inside = "" if op.primitive == "io_callback" else f" in its {op.primitive}"
            block = f"block {instance.scope}" if instance.scope else "a block"
            raise RematKitError(
                f"{block} calls io_callback{inside}, which backward would call again, and JAX differentiates no "
                "jax.checkpoint with one. Move it out of the blocks, use jax.debug.callback or jax.pure_callback, that "
                "may be called again, or say with `where` (--where REGEX) that smaller modules are the blocks."
            )


def trace_with(
    step: Step,
    target: Target,
    place: Place,
    choose: Chooser,
    layouts: list[Layout] | None = None,
    note: Note | None = None,
) -> TracedStep:
    """The step traced with the blocks of what it differentiates replaced.

    Raises RematKitError when it differentiates nothing, or more than one function.
    """
    return trace(dataclasses.replace(step, fn=rewritten(step.fn, place, choose, layouts, note)), target)


def rewritten(
    function: Callable[..., Any],
    place: Place,
    choose: Chooser,
    layouts: list[Layout] | None = None,
    note: Note | None = None,
) -> Callable[..., Any]:
    """`function` with the blocks replaced of what it differentiates. See `trace_with`."""

    def run(*args: Any, **kwargs: Any) -> Any:
        found: list[Layout] = []
        seen: list[Any] = []

        def rewrite(jaxpr: Any, arguments: Sequence[Any]) -> Sequence[Any]:
            # JAX traces the body of a loop again when it finds another type of what is carried.
            if seen and flat_of(seen[0]).fingerprint() != flat_of(jaxpr).fingerprint():
                raise _not_one("several functions")
            seen.append(jaxpr)
            program, sites = place(jaxpr)
            layout = lay_out(program, sites)
            found[:] = [layout]
            if note is not None:
                note(layout, arguments)
            return layout.run(arguments, lambda instance, values: choose(instance)(*values))

        with losses_rewritten(rewrite, run):
            result = function(*args, **kwargs)
        if not found:
            raise _not_one("nothing")
        if layouts is not None:
            layouts[:] = found
        return result

    run.__name__ = getattr(function, "__name__", "run")
    return run


def _not_one(what: str) -> RematKitError:
    return RematKitError(
        f"the step differentiates {what}, and a plan is for the one function that holds the blocks. Give a training "
        "step that calls jax.grad, jax.value_and_grad or jax.vjp on that alone."
    )
