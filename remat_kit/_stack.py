"""Stacks of blocks under a policy: √N checkpointing, the first k blocks, groups of k blocks.

`remat(policy)` wraps one block and does not know of others, so it leaves a block alone under a policy for stacks. Here
the stack is run, and all of the policy is applied, also what it says of the blocks inside a part. Whoever has wrapped
the blocks with `remat(policy)` gives the same policy here when it is for stacks, else `none`.

From forward to backward a checkpointed part keeps the carry that enters it, and nothing else. A part of a scanned stack
is a scan in a scan: parameters [L, ...] are seen as [k, L/k, ...], which copies nothing. Where parts are not all of one
size, or follow another part, the parameters of a loop are a slice, which XLA copies and keeps.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.extend import core

from remat_kit._errors import PolicyError
from remat_kit._layering import AUTO, RECURSIVE, Method, runs
from remat_kit._policy import POLICIES, Policy, get_policy
from remat_kit._wrap import remat

T = TypeVar("T")
Body = Callable[[Any, Any], tuple[Any, Any]]
"""One block: from what the stack carries and what the block alone has, to the carry and a result of its own."""


def scan_stack(policy: str | Policy, body: Body, init: Any, xs: Any, length: int | None = None) -> tuple[Any, Any]:
    """`jax.lax.scan(body, init, xs, length)` under `policy`: the last carry, and the results stacked [L, ...].

    Args:
      policy: for stacks of blocks, e.g. `segments(auto)`; one for a block is applied to `body`, as `remat` does it.
      body: `body(carry, x) -> (carry, result)`, one block, not rematerialized itself.
      init: the carry that enters the first block, a pytree of arrays.
      xs: what each block has of its own, a pytree of arrays [L, ...]: parameters, number.
      length: L, needed when `xs` has no arrays.

    Raises PolicyError when the stack is too short for the policy.
    """
    chosen, blocks = get_policy(policy), _length(xs, length)
    _check(chosen, blocks, "this stack")
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x)[1:], jnp.result_type(x)), xs)
    stacked = sum(_bytes(x) for x in jax.tree.leaves(xs))
    return _scan(chosen, body, init, xs, blocks, _Sizes(body, init, one, stacked // max(blocks, 1)))


def unroll_stack(policy: str | Policy, body: Body, init: Any, layers: Sequence[Any]) -> tuple[Any, list[Any]]:
    """`init` through `body(carry, layer) -> (carry, result)` for each of `layers`: the last carry, the results [L].

    As `scan_stack`, but each block is a part of the program of its own. A layer is a pytree of arrays, NNX modules or
    bound Linen modules, with Python values that stay as they are; arrays in it should not be Python numbers, or no two
    layers share a trace. Raises PolicyError when the stack is too short for the policy.
    """
    chosen, own = get_policy(policy), list(layers)
    _check(chosen, len(own), "this stack")
    return _unroll(chosen, body, init, own, _Sizes(body, init, own[0] if own else None, 0), scoped=True)


def remat_scan(policy: str | Policy) -> Callable[[T], T]:
    """A decorator for what runs a stack by `jax.lax.scan`: a scanned Linen or NNX module, or a function.

    The scan that a call runs first, as `nn.scan` and `nnx.scan` do, is run as `scan_stack` runs it; what it scans must
    not be rematerialized itself. Names and values of parameters, and random streams, stay as they are:
    `remat_scan("segments(4)")(nn.scan(Block, ...)(config))(x, None)`.

    Raises PolicyError when the call runs no scan or a reversed one, or when the stack is too short for the policy.
    """
    chosen = get_policy(policy)

    def decorate(target: T) -> T:
        if not callable(target) or isinstance(target, type):
            raise PolicyError(
                f"remat_scan got {target!r}, which is not a module's instance or a function. "
                "Apply it to what is called, e.g. remat_scan(policy)(nn.scan(Block, ...)(config))(x, None)."
            )

        def run(*args: Any, **kwargs: Any) -> Any:
            with _first_scan_under(chosen) as found:
                result = target(*args, **kwargs)
            if not found:
                raise PolicyError(
                    f"remat_scan({str(chosen)!r}) got a call that runs no jax.lax.scan. Give it the scanned stack "
                    "itself, or run a list of blocks with unroll_stack."
                )
            return result

        return run  # pyright: ignore[reportReturnType]

    return decorate


def _check(policy: Policy, blocks: int, where: str) -> None:
    """Raises PolicyError when a stack is too short for the policy, or the parts that it makes for the one inside."""
    if policy.layering is None or policy.inside is None:
        return
    policy.layering.check(blocks, where)
    if policy.inside.layering is not None:
        parts = policy.layering.sizes(blocks)
        largest = parts[0] if policy.layering.method is Method.FIRST else max(parts)
        if policy.layering.count == AUTO:
            largest = blocks  # not known yet
        _check(policy.inside, largest, f"a part of the stack under {policy.layering}")


# What a policy makes of a stack


@dataclass(frozen=True)
class _Part:
    """Neighbouring parts of a stack that are treated alike: `count` of them with `size` blocks each, from `start` on.

    `checkpointed`: each is run again as a whole. `policy`: what it is under by itself, inside the checkpoint.
    """

    start: int
    count: int
    size: int
    policy: Policy
    checkpointed: bool

    @property
    def end(self) -> int:
        return self.start + self.count * self.size


def _parts(policy: Policy, blocks: int, sizes: "_Sizes") -> list[_Part]:
    assert policy.layering is not None
    assert policy.inside is not None
    cost = functools.partial(_cost, policy, sizes) if policy.layering.count == AUTO and sizes.are_known else None
    division = policy.layering.sizes(blocks, cost)
    if policy.layering.method is Method.FIRST:
        under = _Part(0, 1, division[0], policy.inside, False)
        return [under, *(_Part(under.end, 1, rest, POLICIES["none"], False) for rest in division[1:])]
    parts, start = [], 0
    for count, size in runs(division):
        inside = policy if policy.layering.count == RECURSIVE and size > 1 else policy.inside
        parts.append(_Part(start, count, size, inside, True))
        start = parts[-1].end
    return parts


def _scan(policy: Policy, body: Body, carry: Any, xs: Any, blocks: int, sizes: "_Sizes") -> tuple[Any, Any]:
    if policy.layering is None or blocks == 0:
        return jax.lax.scan(remat(policy.of_block)(body), carry, xs, blocks)
    results = []
    for part in _parts(policy, blocks, sizes):
        carry, result = _scan_part(part, body, carry, xs, blocks, sizes)
        results.append(result)
    joined = results[0] if len(results) == 1 else jax.tree.map(lambda *each: jnp.concatenate(each), *results)
    return carry, joined


def _scan_part(part: _Part, body: Body, carry: Any, xs: Any, blocks: int, sizes: "_Sizes") -> tuple[Any, Any]:
    def of_part(xs: Any) -> Any:
        return xs if part.end - part.start == blocks else jax.tree.map(lambda x: x[part.start : part.end], xs)

    def run(carry: Any, xs: Any) -> tuple[Any, Any]:
        return _scan(part.policy, body, carry, xs, part.size, sizes)

    if not part.checkpointed:
        return run(carry, of_part(xs))
    again = remat("full")
    if part.count == 1:  # its parameters are sliced inside, so no copy of them is kept
        return again(lambda carry, xs: run(carry, of_part(xs)))(carry, xs)
    if part.size == 1:
        return jax.lax.scan(again(remat(part.policy.of_block)(body)), carry, of_part(xs), part.count)
    folded = jax.tree.map(lambda x: x.reshape(part.count, part.size, *x.shape[1:]), of_part(xs))
    carry, results = jax.lax.scan(again(run), carry, folded, part.count)
    return carry, jax.tree.map(lambda y: y.reshape(part.count * part.size, *y.shape[2:]), results)


def _unroll(
    policy: Policy, body: Body, carry: Any, layers: list[Any], sizes: "_Sizes", scoped: bool = False
) -> tuple[Any, list[Any]]:
    """With `scoped`, each checkpointed part is in a name scope, `segment_3`, by which its values are told from others'.

    Not for parts inside of parts: JAX traces those once for all that are alike, so no number would be right there.
    """
    results: list[Any] = []
    if policy.layering is None or not layers:
        block = remat(policy.of_block)(body)
        for layer in layers:
            carry, result = block(carry, layer)
            results.append(result)
        return carry, results
    number = 0
    for part in _parts(policy, len(layers), sizes):

        def run(carry: Any, layers: Sequence[Any], part: _Part = part) -> tuple[Any, list[Any]]:
            return _unroll(part.policy, body, carry, list(layers), sizes)

        again = remat("full")(run) if part.checkpointed else run  # one function, so that JAX traces alike parts once
        for start in range(part.start, part.end, part.size):
            is_scoped = scoped and part.checkpointed
            with jax.named_scope(f"segment_{number}") if is_scoped else contextlib.nullcontext():
                carry, found = again(carry, tuple(layers[start : start + part.size]))
            number += is_scoped
            results.extend(found)
    return carry, results


# What is alive at once


class _Sizes:
    """Bytes of one block, found on its jaxpr when they are asked for.

    `layer` is what the block has of its own, in arrays or without data; `own_bytes` of it are copied where a stack is
    not divided evenly, 0 where nothing is.
    """

    def __init__(self, body: Body, carry: Any, layer: Any, own_bytes: int) -> None:
        self._body, self._carry, self._layer, self.own_bytes = body, carry, layer, own_bytes
        self._kept: dict[Policy, int] = {}

    @property
    def are_known(self) -> bool:
        """Whether a block can be looked at by itself: not when it is a Linen module, which lives in its parent."""
        return self._layer is not None and not any(
            hasattr(leaf, "scope") for leaf in jax.tree.leaves((self._carry, self._layer))
        )

    @property
    def border(self) -> int:
        """Bytes of the carry."""
        return sum(_bytes(leaf) for leaf in jax.tree.leaves(self._carry))

    def kept(self, policy: Policy) -> int:
        """Bytes that one block under `policy` keeps for its backward, without its parameters and what it shares."""
        if policy not in self._kept:
            self._kept[policy] = self._count(policy)
        return self._kept[policy]

    def _count(self, policy: Policy) -> int:
        leaves, structure = jax.tree.flatten(self._layer, is_leaf=lambda node: isinstance(node, _NNX_NODES))
        modules = {place: nnx.split(leaf) for place, leaf in enumerate(leaves) if isinstance(leaf, _NNX_NODES)}
        own = {place: modules[place][1] if place in modules else leaf for place, leaf in enumerate(leaves)}
        moving = {place: each for place, each in own.items() if place in modules or hasattr(each, "dtype")}

        def residuals(carry: Any, moving: Any) -> Any:
            def block(carry: Any, moving: Any) -> Any:
                now = own | moving
                whole = [nnx.merge(modules[place][0], now[place]) if place in modules else now[place] for place in now]
                return remat(policy)(self._body)(carry, jax.tree.unflatten(structure, whole))

            return jax.tree.leaves(jax.vjp(block, carry, moving)[1])

        jaxpr = jax.make_jaxpr(residuals)(self._carry, moving)
        while not isinstance(jaxpr, core.Jaxpr):
            jaxpr = jaxpr.jaxpr
        parameters = jaxpr.invars[len(jax.tree.leaves(self._carry)) :]
        there = {id(var) for var in (*parameters, *jaxpr.constvars)}
        kept = {id(var): var for var in jaxpr.outvars if not isinstance(var, core.Literal) and id(var) not in there}
        return sum(_bytes(var.aval) for var in kept.values())


_NNX_NODES = (nnx.Pytree, nnx.Variable)


def _cost(policy: Policy, sizes: _Sizes, division: tuple[int, ...]) -> int:
    """Bytes alive at once under a division: the carries that enter parts, and what is kept inside the largest."""
    assert policy.inside is not None
    uneven = sum(division) * sizes.own_bytes if len(set(division)) > 1 else 0
    return uneven + len(division) * sizes.border + _alive(policy.inside, max(division), sizes)


def _alive(policy: Policy, blocks: int, sizes: _Sizes) -> int:
    """Bytes kept at once when a stack of so many blocks under `policy` runs backward."""
    if policy.layering is None or policy.inside is None:
        return blocks * sizes.kept(policy)
    if policy.layering.method is Method.FIRST:
        under, *rest = policy.layering.sizes(blocks)
        return _alive(policy.inside, under, sizes) + sum(rest) * sizes.kept(POLICIES["none"])
    if policy.layering.count == RECURSIVE:
        borders = 0
        while blocks > 1:
            division = policy.layering.sizes(blocks)
            borders, blocks = borders + len(division), max(division)
        return borders * sizes.border + _alive(policy.inside, 1, sizes)
    if policy.layering.count == AUTO:
        division = policy.layering.sizes(blocks, functools.partial(_cost, policy, sizes))
        return _cost(policy, sizes, division)
    return _cost(policy, sizes, policy.layering.sizes(blocks))


def _bytes(leaf: Any) -> int:
    dtype = getattr(leaf, "dtype", None)
    return int(np.prod(jnp.shape(leaf), dtype=np.int64)) * getattr(dtype, "itemsize", 0)


def _length(xs: Any, length: int | None) -> int:
    """The number of blocks. Raises PolicyError when the arrays do not agree about it."""
    leaves = jax.tree.leaves(xs)
    found = {jnp.shape(leaf)[0] if jnp.shape(leaf) else None for leaf in leaves}
    found |= {length} if length is not None else set()
    (only, *others) = found or {None}
    if others or only is None:
        lengths = ", ".join(sorted(map(str, found))) or "none"
        raise PolicyError(
            f"scan_stack got a stack without one length: {lengths}. Every array of xs has the blocks as its first axis "
            "[L, ...]; without arrays, give length=L."
        )
    return int(only)


# The scan of somebody else

_LOCK = threading.RLock()


@contextlib.contextmanager
def _first_scan_under(policy: Policy) -> Iterator[list[bool]]:
    """While it is open, the first `jax.lax.scan` of this thread is run under `policy`; then the list is not empty.

    Flax calls `jax.lax.scan` by that name, and there is no other way into its scans.
    """
    found: list[bool] = []
    thread = threading.get_ident()
    with _LOCK:
        original = jax.lax.scan

        @functools.wraps(original)
        def scan(
            f: Any, init: Any, xs: Any = None, length: int | None = None, reverse: bool = False, **options: Any
        ) -> Any:
            if found or threading.get_ident() != thread:
                return original(f, init, xs, length, reverse, **options)
            if reverse:
                raise PolicyError(
                    f"remat_scan({str(policy)!r}) got a reversed scan, which it does not divide. Scan forward over "
                    "flipped arrays, or use scan_stack."
                )
            if set(options.values()) - {1, False}:
                given = ", ".join(f"{name}={value!r}" for name, value in options.items())
                raise PolicyError(
                    f"remat_scan({str(policy)!r}) got a scan with {given}, and a divided stack runs in other loops. "
                    "Leave that out, or use scan_stack."
                )
            found.append(True)  # scans inside the blocks are theirs
            return _run_traced_once(policy, f, init, xs, length)

        jax.lax.scan = scan
        try:
            yield found
        finally:
            jax.lax.scan = original


def _run_traced_once(policy: Policy, body: Body, init: Any, xs: Any, length: int | None) -> tuple[Any, Any]:
    """`scan_stack` with a body that is traced once and run as that jaxpr, on plain lists of arrays.

    Linen counts the random keys that a scanned module takes from one trace of it to the next: blocks that are traced
    in several parts would have other dropout masks than in one scan. NNX's pytrees would be taken for modules.
    """
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), xs)
    jaxpr, shapes = jax.make_jaxpr(body, return_shape=True)(init, one)
    carried, resulting = (jax.tree.structure(each) for each in shapes)

    def run(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
        found = core.jaxpr_as_fun(jaxpr)(*carry, *x)
        return found[: carried.num_leaves], found[carried.num_leaves :]

    carry, results = scan_stack(policy, run, jax.tree.leaves(init), jax.tree.leaves(xs), length)
    return jax.tree.unflatten(carried, carry), jax.tree.unflatten(resulting, results)
