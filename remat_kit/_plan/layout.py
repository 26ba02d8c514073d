"""A function with the blocks in it replaced: where blocks are, and how the rest is run around them."""

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.extend import core

from remat_kit._plan.flat import (
    REMATS,
    Flat,
    Literal,
    Op,
    bind,
    is_static_slice,
    jaxpr_of,
    open_jaxpr,
    primitive_of,
    remat_body,
    restamped,
)

_PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot", "dot_product_attention")
_MOST = 0.8
"""What share of its products a checkpoint has in loops and other checkpoints to be around blocks, not one itself."""
_ROWS = frozenset({"split", "squeeze"})
"""What takes a loop's arrays apart when it is written out: a row of a parameter lives as long as the parameter."""
_SHARED = 0.5
"""What share of a block's operations has to be in a scope for the block to be called by it."""


class NoSuchSite(ValueError):
    """There is no block where one should be."""


class ChangesArgument(ValueError):
    """A function changes one of its arguments in place, which a program cannot."""


@dataclasses.dataclass(frozen=True, slots=True)
class Site:
    """Where one block is in a flat program.

    Attributes:
      scans: the scans around it, outermost first, each by its number among the operations around it.
      stretch: first operation and the one behind the last; None for the whole body of the innermost scan.
    """

    scans: tuple[int, ...]
    stretch: tuple[int, int] | None

    def __lt__(self, other: "Site") -> bool:
        return (self.scans, self.stretch or (0, 0)) < (other.scans, other.stretch or (0, 0))


@dataclasses.dataclass(slots=True)
class Instance:
    """One block at its site.

    Attributes:
      site: where it is.
      flat: what it computes, with the checkpoints in it opened; equal for equal blocks.
      inputs: where its inputs come from in the program around it; outputs: the values there that it makes.
      scope: the name scope that is its own, left out of `flat`; "" without one.
      repeats: how often the scans around it run it.
      lasting: positions of inputs that live on whatever a plan decides: parameters, or what a scan takes in each turn.
      kind: the fingerprint of `flat`.
    """

    site: Site
    flat: Flat
    inputs: tuple[int | Literal, ...]
    outputs: tuple[int, ...]
    scope: str
    repeats: int
    lasting: frozenset[int] = frozenset()
    kind: str = ""


Call = Callable[[Instance, Sequence[Any]], Sequence[Any]]
"""Runs a block on arguments."""


def flat_of(jaxpr: Any) -> Flat:
    """The flat program that sites refer to: checkpoints around blocks are opened, others are operations."""
    return Flat(jaxpr, open_remats=_is_around_blocks)


def _is_around_blocks(remat: Any) -> bool:
    """Whether a checkpoint is around other checkpoints or loops over blocks, and not a block itself."""
    total, nested = _products(remat_body(remat), 1, False)
    return total > 0 and nested >= _MOST * total


def _products(jaxpr: Any, times: int, is_nested: bool) -> tuple[int, int]:
    """Matrix products as they run: (all, in loops or checkpoints)."""
    total = nested = 0
    for eqn in open_jaxpr(jaxpr)[0].eqns:
        primitive = primitive_of(eqn)
        if primitive.startswith(_PRODUCTS):
            total += times
            nested += times * is_nested
        length = eqn.params["length"] if primitive == "scan" else 1
        nests = is_nested or length > 1 or primitive in REMATS
        bodies = [remat_body(eqn)] if primitive in REMATS else _jaxprs_in(eqn.params)
        for inner in bodies:
            more = _products(inner, times * length, nests)
            total, nested = total + more[0], nested + more[1]
    return total, nested


def _jaxprs_in(params: Mapping[str, Any]) -> Iterator[Any]:
    for value in params.values():
        for each in value if isinstance(value, tuple | list) else (value,):
            if hasattr(each, "eqns") or hasattr(each, "jaxpr"):
                yield each


class Layout:
    """A flat program with blocks at some sites.

    Attributes:
      flat: the program.
      blocks: those in it itself, by their first operation.
      bodies: scans whose whole body is a block, by their number; inner: scans with blocks somewhere in them.
    """

    def __init__(
        self,
        flat: Flat,
        sites: Sequence[Site],
        scans: tuple[int, ...] = (),
        repeats: int = 1,
        carried: frozenset[int] = frozenset(),
    ) -> None:
        depth = len(scans)
        lasting = {number for position, number in enumerate(flat.inputs) if position not in carried}
        for op in flat.ops:
            if op.primitive in _ROWS and op.inputs[0] in lasting:
                lasting.update(op.outputs)
        self.flat = flat
        self.blocks: dict[int, Instance] = {}
        self.bodies: dict[int, Instance] = {}
        self.inner: dict[int, Layout] = {}
        for site in sites:
            _check(flat, site, depth)
            if len(site.scans) == depth and site.stretch is not None:
                self.blocks[site.stretch[0]] = _instance(flat, site, repeats, lasting)
        for position in sorted({site.scans[depth] for site in sites if len(site.scans) > depth}):
            scan = flat.ops[position]
            own = [site for site in sites if len(site.scans) > depth and site.scans[depth] == position]
            times = repeats * scan.eqn.params["length"]
            body = scan.eqn.params["jaxpr"]
            consts, count = counts_of(scan)
            moving = frozenset(range(consts, consts + count))
            if own[0].stretch is None and len(own[0].scans) == depth + 1:
                block = Flat(body)
                kept = frozenset(range(len(block.inputs))) - moving
                self.bodies[position] = Instance(own[0], block, (), (), "", times, kept)
            else:
                self.inner[position] = Layout(flat_of(body), own, (*scans, position), times, moving)

    def instances(self) -> Iterator[Instance]:
        """All blocks, in the order in which they run."""
        for position in sorted({*self.blocks, *self.bodies, *self.inner}):
            if position in self.blocks:
                yield self.blocks[position]
            elif position in self.bodies:
                yield self.bodies[position]
            else:
                yield from self.inner[position].instances()

    def run(self, arguments: Sequence[Any], call: Call) -> list[Any]:
        """The program's outputs for `arguments`, with its blocks run by `call`."""
        flat = self.flat
        values: dict[int, Any] = dict(zip(flat.inputs, arguments, strict=True))

        def read(each: int | Literal) -> Any:
            return values[each] if isinstance(each, int) else each.value

        position = 0
        while position < len(flat.ops):
            op, block = flat.ops[position], self.blocks.get(position)
            if block is not None:
                assert block.site.stretch is not None
                with jax.named_scope(block.scope) if block.scope else contextlib.nullcontext():
                    results = call(block, [read(each) for each in block.inputs])
                values.update(zip(block.outputs, results, strict=True))
                position = block.site.stretch[1]
                continue
            operands = [read(each) for each in op.inputs]
            has_blocks = position in self.bodies or position in self.inner
            results = self._scan(position, operands, call) if has_blocks else bind(op.eqn, operands)
            values.update(zip(op.outputs, results, strict=True))
            position += 1
        return [read(each) for each in flat.outputs]

    def _scan(self, position: int, operands: Sequence[Any], call: Call) -> list[Any]:
        """A scan with blocks in its body."""
        op, whole = self.flat.ops[position], self.bodies.get(position)
        consts, carried = counts_of(op)

        def turn(carry: Sequence[Any], given: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            values = [*operands[:consts], *carry, *given]
            results = call(whole, values) if whole else self.inner[position].run(values, call)
            return list(results[:carried]), list(results[carried:])

        stack = str(op.eqn.source_info.name_stack)
        with jax.named_scope(stack) if stack else contextlib.nullcontext():
            carry, stacked = jax.lax.scan(
                turn,
                list(operands[consts : consts + carried]),
                list(operands[consts + carried :]),
                length=op.eqn.params["length"],
                reverse=op.eqn.params["reverse"],
                unroll=op.eqn.params["unroll"],
                _split_transpose=op.eqn.params.get("_split_transpose", False),
            )
        return [*carry, *stacked]


def lay_out(jaxpr: Any, sites: Sequence[Site]) -> Layout:
    """The program of a jaxpr with blocks at `sites`, equal blocks made equal: each has its `kind`.

    A number that differs between blocks that are equal otherwise, like that of the layer or of its slice of stacked
    parameters, becomes an input of theirs.
    """
    layout = Layout(flat_of(jaxpr), sites)
    groups: dict[str, list[Instance]] = {}
    for instance in layout.instances():
        groups.setdefault(instance.flat.fingerprint(with_numbers=False), []).append(instance)
    for group in groups.values():
        lifted = len(group) > 1 and all(instance.site.stretch for instance in group)
        if lifted:
            _lift_numbers(group)
        for instance in group:  # with their numbers lifted they are equal
            instance.kind = group[0].kind if lifted and group[0].kind else instance.flat.fingerprint()
    return layout


def as_program(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Any, list[Any], Callable[[Sequence[Any]], Any]]:
    """A call as a program of arrays: its jaxpr, its arguments, and what makes the function's results of the jaxpr's.

    Raises ChangesArgument.
    """
    leaves, structure = jax.tree.flatten((tuple(args), dict(kwargs)))
    is_array = [hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in leaves]
    results: list[Any] = []

    def of_arrays(*arrays: Any) -> list[Any]:
        given = iter(arrays)
        filled = [next(given) if array else leaf for leaf, array in zip(leaves, is_array, strict=True)]
        inner_args, inner_kwargs = jax.tree.unflatten(structure, filled)
        results[:] = jax.tree.flatten(function(*inner_args, **inner_kwargs))
        left = jax.tree.leaves((inner_args, inner_kwargs))
        if len(left) != len(filled) or any(each is not other for each, other in zip(left, filled, strict=True)):
            raise ChangesArgument(
                "the loss changes one of its arguments in place, a module's statistics or random stream perhaps. Give "
                "the step that differentiates it, or return what changes."
            )
        return [each for each in results[0] if isinstance(each, jax.Array)]

    def rebuild(arrays: Sequence[Any]) -> Any:
        made = iter(arrays)
        found, shape = results
        return jax.tree.unflatten(shape, [next(made) if isinstance(each, jax.Array) else each for each in found])

    arrays = [leaf for leaf, array in zip(leaves, is_array, strict=True) if array]
    return jax.make_jaxpr(of_arrays)(*arrays), arrays, rebuild


def _lift_numbers(group: Sequence[Instance]) -> None:
    """Makes inputs of the whole numbers in which blocks of one kind differ."""
    for position, ops in enumerate(zip(*(instance.flat.ops for instance in group), strict=True)):
        if is_static_slice(ops[0]) and len({op.eqn.params["start_indices"] for op in ops}) > 1:
            for instance in group:
                instance.flat.open_slice(position)
        for index, operands in enumerate(zip(*(op.inputs for op in ops), strict=True)):
            values = [each.value for each in operands if isinstance(each, Literal)]
            if len(values) < len(group) or len({repr(value) for value in values}) == 1:
                continue
            for instance, value in zip(group, values, strict=True):
                instance.flat.lift(position, index)
                instance.lasting |= {len(instance.inputs)}
                instance.inputs = (*instance.inputs, Literal(value))


def counts_of(scan: Op) -> tuple[int, int]:
    """How many of a scan's operands are the same in each turn, and how many are carried from turn to turn."""
    params = scan.eqn.params
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carried, _ = params["ft_in"].unpack()
    return len(consts), len(carried)


def _check(flat: Flat, site: Site, depth: int) -> None:
    """Raises NoSuchSite when a site is not in a program."""
    count = len(flat.ops)
    if len(site.scans) > depth:
        position = site.scans[depth]
        if not position < count or flat.ops[position].primitive != "scan":
            raise NoSuchSite(f"operation {position} of {count} should be a scan and is not")
    elif site.stretch is not None and not 0 <= site.stretch[0] < site.stretch[1] <= count:
        raise NoSuchSite(f"there should be a block from operation {site.stretch[0]} to {site.stretch[1]}, of {count}")


def _instance(flat: Flat, site: Site, repeats: int, lasting: Collection[int]) -> Instance:
    """The block at a site in `flat` itself."""
    assert site.stretch is not None
    first, behind = site.stretch
    ops = flat.ops[first:behind]
    made = {number for op in ops for number in op.outputs}
    inputs: dict[Any, int | Literal] = {}
    for op in ops:
        for each in op.inputs:
            if isinstance(each, int) and each not in made:
                inputs[each] = each
            elif isinstance(each, Literal) and (op.primitive in REMATS or not _is_plain(each.value)):
                inputs[id(each.value), "constant"] = each
    used = {number for number in flat.outputs if isinstance(number, int)}
    used.update(number for op in flat.ops[behind:] for number in op.inputs if isinstance(number, int))
    if len(ops) == 1 and ops[0].primitive in REMATS:  # all that the wrapped function results in, used or not
        used.update(ops[0].outputs)
    outputs = tuple(number for op in ops for number in op.outputs if number in used)
    block = _as_flat(flat, ops, inputs, outputs)
    scope = _common_scope(block)
    for op in block.ops:
        in_it = _scopes(op)[: len(scope)] == scope
        op.eqn = restamped(op.eqn, len(scope) if in_it else 0)
    sources = tuple(inputs.values())
    kept = frozenset(at for at, each in enumerate(sources) if isinstance(each, Literal) or each in lasting)
    return Instance(site, block, sources, outputs, "/".join(scope), repeats, kept)


def _as_flat(flat: Flat, ops: Sequence[Op], inputs: Mapping[Any, int | Literal], outputs: tuple[int, ...]) -> Flat:
    """Operations of `flat` as a program in which every checkpoint is opened."""
    variables: dict[Any, Any] = {}

    def variable(key: Any, aval: Any) -> Any:
        if key not in variables:
            variables[key] = core.Var(aval)
        return variables[key]

    avals = [flat.avals[each] if isinstance(each, int) else jax.typeof(each.value) for each in inputs.values()]
    invars = [variable(key, aval) for key, aval in zip(inputs, avals, strict=True)]
    eqns = []
    for op in ops:
        operands = []
        for each, var in zip(op.inputs, op.eqn.invars, strict=True):
            if isinstance(each, int):
                operands.append(variable(each, flat.avals[each]))
            elif (id(each.value), "constant") in inputs:
                operands.append(variables[id(each.value), "constant"])
            else:
                operands.append(var if isinstance(var, core.Literal) else core.Literal(each.value, var.aval))
        results = [variable(number, flat.avals[number]) for number in op.outputs]
        eqns.append(op.eqn.replace(invars=operands, outvars=results))
    block = Flat(jaxpr_of(invars, [variables[number] for number in outputs], eqns))
    for key, var in variables.items():
        if key in flat.tags and (number := block.number_of(var)) is not None:
            block.tags.setdefault(number, flat.tags[key])
    return block


def _is_plain(value: Any) -> bool:
    """A scalar that is a part of the program: not a tracer, nor an array that would make two equal blocks differ."""
    return not isinstance(value, Tracer) and getattr(value, "ndim", 0) == 0


def _scopes(op: Op) -> tuple[str, ...]:
    """The scopes of an operation's name stack; one that was given as a path counts as several."""
    stack = op.eqn.source_info.name_stack.stack
    return tuple(str(part.name) for part in stack if type(part).__name__ == "Scope")


def _common_scope(block: Flat) -> tuple[str, ...]:
    """The longest beginning of name stacks that ends with a numbered scope and that most operations share."""
    counts: Counter[tuple[str, ...]] = Counter()
    for op in block.ops:
        scopes = _scopes(op)
        counts.update(scopes[:length] for length in range(1, len(scopes) + 1) if scopes[length - 1][-1:].isdecimal())
    shared = [scope for scope, count in counts.items() if count > _SHARED * len(block.ops)]
    return max(shared, key=len, default=())
