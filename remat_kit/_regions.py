"""The checkpointed regions of a step: what each computes again, where it stands, and what its policy keeps.

Read on the jaxpr. A region is the equation in which JAX runs the backward of a checkpointed function: its `remat2`
primitive, or under `jax_remat3` a `RematTraced` with the backward equations behind it. All bodies are laid out into one
list of operations in which a value has one number, through calls, scans and remats, so that "backward needs this value"
is a plain look-up.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jax.extend import core
from jax.interpreters import ad

from remat_kit._explanation import Checkpoint
from remat_kit._jaxpr import Eqn, Jaxpr, bodies, flops_of, nbytes, num_matmuls, primitive_of, tag_of
from remat_kit._lower import is_kept
from remat_kit._phase import BACKWARD, FORWARD, RECOMPUTE, UPDATE, phase_of

_REMAT2 = frozenset({"remat2", "checkpoint", "remat"})  # its name differs between JAX versions
_REMAT3 = "RematTraced"

# Their outputs are their inputs: JAX puts them between a value that it saves and the backward that uses it.
_SAME = frozenset({"name", "CheckpointName", "reduce_precision", "optimization_barrier", "sharding_constraint",
                   "device_put", "copy"})  # fmt: skip

# What `jax.checkpoint` asks a policy about a tag with, under `jax_remat3` as well. It has no public name everywhere.
_NAME = next(primitive for primitive in ad.primitive_jvps if primitive.name == "name")


def checkpoint_regions(jaxpr: Jaxpr) -> tuple[Checkpoint, ...]:
    """The checkpointed regions of a step, equal ones counted together, those that recompute most first.

    A step that is not differentiated has none. Nor has, under `jax_remat3`, a policy that keeps all: nothing is left
    of its region in the program.
    """
    program = _Program()
    while not isinstance(jaxpr, core.Jaxpr):
        jaxpr = jaxpr.jaxpr
    program.lay_out(jaxpr, {}, _Place())
    return _grouped(program)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where an operation stands.

    Attributes:
      stack: name stacks, joined.
      executions: how often it runs in a step.
      around: how often what is differentiated runs, e.g. the number of microbatches.
      layers: product of the lengths of the differentiated scans that it is in.
      recomputed: it is part of a recomputation.
      region: number of the innermost region that it is in; -1 outside.
    """

    stack: str = ""
    executions: int = 1
    around: int = 1
    layers: int = 1
    recomputed: bool = False
    region: int = -1

    @property
    def phase(self) -> str:
        return RECOMPUTE if self.recomputed else phase_of(self.stack)


@dataclass(slots=True, eq=False)
class _Op:
    """An equation at its place; values are numbers."""

    eqn: Eqn
    primitive: str
    place: _Place
    phase: str
    inputs: list[int]
    outputs: list[int]


@dataclass(slots=True, eq=False)
class _Region:
    """A region while it is read. `scan` is the length of the longest scan in it, `inner` counts regions in it."""

    policy: Callable[..., Any] | None
    place: _Place
    scan: int = 0
    inner: int = 0
    ops: list[_Op] = field(default_factory=list)


class _Program:
    """All operations of a step in the order in which they run, with the regions that they are in."""

    def __init__(self) -> None:
        self.ops: list[_Op] = []
        self.regions: list[_Region] = []
        self.makers: dict[int, list[_Op]] = {}
        """The operation that makes a value, and those that hand it on under another name."""
        self.bytes: list[int] = []

    def lay_out(self, jaxpr: core.Jaxpr, known: dict[Any, int], place: _Place) -> None:
        """Adds the equations of `jaxpr`, whose inputs have the numbers in `known`, which takes those of its outputs."""
        behind = -1  # under remat3, the region whose backward comes next in this body
        for eqn in jaxpr.eqns:
            own, primitive = str(eqn.source_info.name_stack), primitive_of(eqn)
            stack = f"{place.stack}/{own}" if own and place.stack else own or place.stack
            in_remat3 = primitive == _REMAT3 and "transpose(" in stack
            here = replace(
                place, stack=stack, recomputed=place.recomputed or in_remat3 or "rematted_computation" in own
            )
            # A second transposition marks the backward of a region among those of other equations.
            if behind >= 0 and not here.recomputed and stack.count("transpose(") > 1:
                here = replace(here, region=behind)
            if in_remat3 or (primitive in _REMAT2 and eqn.params.get("differentiated") and "transpose(" in stack):
                here = self._enter(eqn, here)
                behind = here.region if in_remat3 else behind
            self._add(eqn, primitive, here, known)

    def _enter(self, eqn: Eqn, place: _Place) -> _Place:
        """The place inside a region that begins with `eqn`."""
        params = eqn.params["_prim"].params if "_prim" in eqn.params else eqn.params
        for outer in self._around(place.region):
            outer.inner += 1
        self.regions.append(_Region(params["policy"], place))
        return replace(place, region=len(self.regions) - 1)

    def _around(self, region: int) -> Iterator[_Region]:
        """The region of that number and those that it is in."""
        while region >= 0:
            yield self.regions[region]
            region = self.regions[region].place.region

    def _add(self, eqn: Eqn, primitive: str, place: _Place, known: dict[Any, int]) -> None:
        inputs = [self._number(var, known) for var in eqn.invars]
        inner = bodies(eqn)
        if primitive == "scan":
            for region in self._around(place.region):
                region.scan = max(region.scan, int(eqn.params["length"]))
        scopes = [self._scope(primitive, body, inputs) if len(inner) == 1 else None for body, _ in inner]
        inlined = bool(scopes) and scopes[0] is not None and len(inner[0][0].outvars) == len(eqn.outvars)
        if not inlined:
            op = _Op(eqn, primitive, place, place.phase, inputs, [])
            is_same = primitive in _SAME and len(inputs) == len(eqn.outvars)
            for position, var in enumerate(eqn.outvars):
                number = inputs[position] if is_same else self._number(var, {})
                known[var] = number
                op.outputs.append(number)
                self.makers.setdefault(number, []).append(op)
            self.ops.append(op)
            for region in self._around(place.region):
                region.ops.append(op)
        for (body, times), scope in zip(inner, scopes, strict=True):
            inside = replace(place, executions=place.executions * times)
            if primitive == "scan" and place.phase == UPDATE:
                inside = replace(inside, around=place.around * times)
            elif primitive == "scan":
                inside = replace(inside, layers=place.layers * times)
            scope = scope or {}
            self.lay_out(body, scope, inside)
            if inlined:
                known.update(
                    (var, self._number(out, scope)) for var, out in zip(eqn.outvars, body.outvars, strict=True)
                )

    def _scope(self, primitive: str, body: core.Jaxpr, inputs: list[int]) -> dict[Any, int] | None:
        """The numbers of a body's inputs where they are those of the equation, one by one."""
        given = inputs[1:] if primitive == "cond" else inputs
        return dict(zip(body.invars, given, strict=True)) if len(body.invars) == len(given) else None

    def _number(self, var: Any, known: dict[Any, int]) -> int:
        if isinstance(var, core.Literal) or var not in known:
            self.bytes.append(nbytes(var))
            if isinstance(var, core.Literal):
                return len(self.bytes) - 1
            known[var] = len(self.bytes) - 1
        return known[var]

    def maker(self, value: int) -> _Op | None:
        """The operation of the forward phase that makes a value; None for arguments and values of other phases."""
        first = next(iter(self.makers.get(value, ())), None)
        return first if first is not None and first.phase == FORWARD else None

    def flops_of_one_pass(self, phase: str) -> int:
        """FLOPs of a phase; of microbatches, those of one."""
        return sum(_flops(op) // op.place.around for op in self.ops if op.phase == phase)


def _flops(op: _Op) -> int:
    return op.place.executions * flops_of(op.eqn) if num_matmuls(op.eqn) else 0


def _grouped(program: _Program) -> tuple[Checkpoint, ...]:
    """One Checkpoint for all regions that differ in place only."""
    if not program.regions:
        return ()
    tags: dict[str, list[_Op]] = {}
    needed: set[int] = set()
    for op in program.ops:
        if op.phase == FORWARD and (tag := tag_of(op.eqn)):
            tags.setdefault(tag, []).append(op)
        elif op.phase in (BACKWARD, RECOMPUTE):
            needed.update(op.inputs)
    unneeded = {tag for tag, ops in tags.items() if not any(needed.intersection(op.outputs) for op in ops)}
    forward, backward = program.flops_of_one_pass(FORWARD), program.flops_of_one_pass(BACKWARD)
    groups: dict[Checkpoint, list[tuple[Checkpoint, frozenset[int]]]] = {}
    for number, region in enumerate(program.regions):
        own = [op for op in region.ops if op.place.region == number]
        kept = frozenset(_kept(program, region))
        wanted = tuple(sorted(tag for tag, ops in tags.items() if region.policy and _keeps(region.policy, ops[0])))
        again = sum(_flops(op) for op in own if op.phase == RECOMPUTE)
        backward_flops = sum(_flops(op) for op in region.ops if op.phase == BACKWARD)
        runs = region.place.executions
        one = Checkpoint(
            policy=_name_of(region.policy),
            regions=1,
            executions=runs,
            recompute_flops=again,
            forward_share=again / runs / forward if forward else 0.0,
            backward_share=backward_flops / runs / backward if backward else 0.0,
            outer_scan_length=region.place.layers if region.place.layers > 1 else 0,
            inner_scan_length=region.scan,
            inner_regions=region.inner,
            recomputed_operations=sum(op.phase == RECOMPUTE for op in own),
            kept_values=len(kept),
            kept_bytes=0,
            tags=wanted,
            unneeded_tags=tuple(tag for tag in wanted if tag in unneeded),
            recomputed_tags=tuple(
                tag for tag in wanted if _run_again(program, region, [op for op in tags[tag] if op.outputs[0] in kept])
            ),
        )
        # The first block of a stack runs less backward and other blocks may trade an input: that makes no kind of its
        # own.
        key = replace(one, backward_share=0.0, recomputed_operations=0, kept_values=0)
        groups.setdefault(key, []).append((one, kept))
    found = [_together(program, members) for members in groups.values()]
    return tuple(sorted(found, key=lambda each: (-each.recompute_flops, -each.executions, each.tags)))


def _together(program: _Program, members: Sequence[tuple[Checkpoint, frozenset[int]]]) -> Checkpoint:
    first = members[0][0]
    kept = frozenset().union(*(values for _, values in members))
    total = 0
    for value in kept:
        maker = program.maker(value)
        total += program.bytes[value] * (maker.place.layers if maker else 1)
    return replace(
        first,
        regions=len(members),
        executions=sum(one.executions for one, _ in members),
        recompute_flops=sum(one.recompute_flops for one, _ in members),
        backward_share=max(one.backward_share for one, _ in members),
        recomputed_operations=max(one.recomputed_operations for one, _ in members),
        kept_values=max(one.kept_values for one, _ in members),
        kept_bytes=total,
    )


def _kept(program: _Program, region: _Region) -> Iterator[int]:
    """The values of forward that enter a region and that its policy, asked about them, keeps."""
    if region.policy is None:
        return
    for value in _entering(region):
        if program.maker(value) and any(
            _keeps(region.policy, op) for op in program.makers[value] if op.phase == FORWARD
        ):
            yield value


def _entering(region: _Region) -> dict[int, None]:
    """The values that a region uses and does not make, each once, in order."""
    made = {value for op in region.ops if op.primitive not in _SAME for value in op.outputs}
    return {value: None for op in region.ops for value in op.inputs if value not in made}


def _keeps(policy: Callable[..., Any], op: _Op) -> bool:
    avals = [var.aval for var in op.eqn.invars]
    tag = tag_of(op.eqn)
    if tag is not None:
        return is_kept(policy(_NAME, *avals, name=tag))
    return is_kept(policy(op.eqn.primitive, *avals, **op.eqn.params))


def _run_again(program: _Program, region: _Region, tags: Sequence[_Op]) -> bool:
    """Whether a matmul that one of `tags` is computed from, elementwise, is among what the region computes again."""
    again = {_signature(op) for op in region.ops if op.phase == RECOMPUTE and num_matmuls(op.eqn)} if tags else set()
    if not again:
        return False
    seen = set(_entering(region))  # what is there needs no producer; the block's input is among it
    todo = [value for op in tags for value in op.outputs]
    while todo:
        op = program.maker(todo.pop())
        if op is None or bodies(op.eqn) or len(op.outputs) != 1:
            continue
        if num_matmuls(op.eqn):
            if _signature(op) in again:
                return True
            continue
        for value in op.inputs:
            # Not to a bias or a norm's scale, nor through a reduction: their operands are small.
            if value not in seen and program.bytes[value] * 2 >= program.bytes[op.outputs[0]]:
                seen.add(value)
                todo.append(value)
    return False


def _signature(op: _Op) -> Any:
    """What a matmul and its recomputation have in common: the line that made it, and its operands' shapes."""
    shapes = tuple(getattr(var.aval, "shape", ()) for var in op.eqn.invars)
    return op.primitive, op.eqn.source_info.traceback, shapes


def _name_of(policy: Callable[..., Any] | None) -> str:
    """A policy's name as `jax.checkpoint_policies` has it, else that of its function; "" for none."""
    if policy is None:
        return ""
    built_in = vars(jax.checkpoint_policies)
    # Some have an older name besides, which does not end so.
    known = [name for name in built_in if name.endswith("saveable") and built_in[name] == policy]
    if known:
        return known[0]
    function: Any = policy
    while hasattr(function, "func"):  # a partial
        function = function.func
    qualified = getattr(function, "__qualname__", "") or type(function).__qualname__
    # What is a function in one version of JAX is a class in another.
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", qualified.partition(".<locals>")[0]).lower()
