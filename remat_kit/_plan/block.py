"""One block under a plan: checkpointed, with chosen values of its derivative kept or moved to the host.

A block becomes

    jax.checkpoint(jax.custom_jvp(block), policy=save_only_these_names(...))

whose derivative rule is the block's own forward-mode derivative, `jax.jvp`, as a flat program. In that program every
value that backward will need is a plain value, be it the output that `exp` uses for its derivative, or the log-sum-exp
inside a `custom_vjp` rule, which no name in the model's code can reach. Chosen values get a name there.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax import checkpoint  # as it is now: remat puts a plan in its place while Flax looks for it
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from remat_kit._plan.flat import Flat, Place, restamped

SAVE, OFFLOAD = "save", "offload"
INPUT = -1
"""In the place of an operation's number: the value is an input of the block."""


@dataclasses.dataclass(frozen=True, slots=True)
class Derivative:
    """A block's forward-mode derivative as a flat program.

    Attributes:
      flat: the program; its inputs are the block's, then a tangent for each that is differentiated.
      linear: its operations, by position, that depend on a tangent. What they take from the others is what backward
        needs.
      active: which of the block's inputs are differentiated.
      structure: of its results, as a pytree.
      fingerprint: of the program, whatever whole numbers are in it.
    """

    flat: Flat
    linear: frozenset[int]
    active: tuple[bool, ...]
    structure: Any
    fingerprint: str

    @property
    def residuals(self) -> dict[int, list[int]]:
        """Values that backward needs -> the linear operations that take them."""
        made = {number for position, op in enumerate(self.flat.ops) if position in self.linear for number in op.outputs}
        made.update(self.flat.inputs[len(self.active) :])
        found: dict[int, list[int]] = {}
        for position in sorted(self.linear):
            for number in self.flat.ops[position].inputs:
                if isinstance(number, int) and number not in made:
                    found.setdefault(number, []).append(position)
        return found


class Block:
    """A block under a plan's decisions: call it with the block's inputs.

    Attributes:
      flat: what the block computes.
      kept: which values of its derivative are kept, and how (`SAVE`, `OFFLOAD`); the others are computed again.
      derivative: the fingerprint of the derivative that `kept` refers to; "" when nothing is kept.
      seen: the derivatives that were asked for, by which inputs they are in.
    """

    def __init__(self, flat: Flat, kept: Mapping[Place, str], derivative: str) -> None:
        self.flat = flat
        self.kept = dict(kept)
        self.derivative = derivative
        self.seen: dict[tuple[bool, ...], Derivative] = {}
        self.matched = False

        function = jax.custom_jvp(self._primal)
        function.defjvp(self._rule, symbolic_zeros=True)
        names = {how: [_name(place) for place, each in self.kept.items() if each == how] for how in (SAVE, OFFLOAD)}
        policies = jax.checkpoint_policies
        policy = policies.save_only_these_names(*names[SAVE])
        if names[OFFLOAD]:
            policy = policies.save_and_offload_only_these_names(
                names_which_can_be_saved=names[SAVE],
                names_which_can_be_offloaded=names[OFFLOAD],
                offload_src="device",
                offload_dst="pinned_host",
            )
        with _names_are_asked():
            self._checkpointed = checkpoint(function, policy=policy, prevent_cse=True)

    def __call__(self, *arguments: Any) -> list[Any]:
        """The block's outputs."""
        with _names_are_asked():
            return list(self._checkpointed(*arguments))

    def _primal(self, *arguments: Any) -> tuple[Any, ...]:
        return tuple(self.flat.run(arguments))

    def tagged(self, arguments: Sequence[Any]) -> tuple[Any, ...]:
        """As `_primal`, with the model's own tags, by which a reader knows the values of the derivative."""
        return tagged(self.flat, arguments)

    def _rule(self, primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
        derivative = self._derivative(primals, tangents)
        # A scan asks several times, with more and more differentiated inputs, and takes the last answer.
        is_ours = derivative.fingerprint == self.derivative
        self.matched |= is_ours or not self.kept
        kept = self.kept if is_ours else {}

        def name(place: Place, value: Any) -> Any:
            return checkpoint_name(value, _name(place)) if place in kept else value

        given = [tangent for tangent, active in zip(tangents, derivative.active, strict=True) if active]
        with _names_are_asked():  # a loop asks for the derivative when the block's call is long over
            inputs = [name((INPUT, position), primal) for position, primal in enumerate(primals)]
            return jax.tree.unflatten(derivative.structure, derivative.flat.run([*inputs, *given], name))

    def _derivative(self, primals: Sequence[Any], tangents: Sequence[Any]) -> Derivative:
        active = tuple(not isinstance(tangent, SymbolicZero) for tangent in tangents)
        if active not in self.seen:
            given = [tangent for tangent, is_active in zip(tangents, active, strict=True) if is_active]

            def push_forward(primals: Sequence[Any], given: Sequence[Any]) -> Any:
                def of_active(*values: Any) -> Any:
                    left = iter(values)
                    return self.tagged([next(left) if a else p for a, p in zip(active, primals, strict=True)])

                moving = tuple(primal for primal, is_active in zip(primals, active, strict=True) if is_active)
                return jax.jvp(of_active, moving, tuple(given))

            jaxpr, shapes = jax.make_jaxpr(push_forward, return_shape=True)(list(primals), given)
            flat = Flat(jaxpr).without_dead_code()
            for op in flat.ops:
                op.eqn = restamped(op.eqn, 0)
            linear = frozenset(flat.depends_on(flat.inputs[len(primals) :]))
            shape = jax.tree.structure(shapes)
            self.seen[active] = Derivative(flat, linear, active, shape, flat.fingerprint(with_numbers=False))
        return self.seen[active]


class BareBlock:
    """A block that is not checkpointed: autodiff keeps what it keeps."""

    def __init__(self, flat: Flat) -> None:
        self.flat = flat

    def __call__(self, *arguments: Any) -> list[Any]:
        """The block's outputs."""
        return self.flat.run(arguments)


def tagged(flat: Flat, arguments: Sequence[Any]) -> tuple[Any, ...]:
    """The outputs of a program for `arguments`, with the model's own tags on the values in it."""
    tags, ops = flat.tags, flat.ops

    def tag(number: int, value: Any) -> Any:
        return checkpoint_name(value, tags[number]) if number in tags else value

    arguments = [tag(number, value) for number, value in zip(flat.inputs, arguments, strict=True)]
    return tuple(flat.run(arguments, lambda place, value: tag(ops[place[0]].outputs[place[1]], value)))


def _name(place: Place) -> str:
    return f"plan_{'input' if place[0] == INPUT else place[0]}_{place[1]}"


@contextlib.contextmanager
def _names_are_asked() -> Iterator[None]:
    """Without `jax_remat3`, under which JAX asks a policy about nothing inside a derivative rule.

    JAX takes it as it is when a function is checkpointed, when that is called, and when a value is named.
    """
    before = jax.config.jax_remat3
    if before:
        jax.config.update("jax_remat3", False)
    try:
        yield
    finally:
        if before:
            jax.config.update("jax_remat3", True)
