"""A policy as it is put around a block that somebody else wrote: once, and not around a checkpoint of its own."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend import core

from remat_kit._errors import PolicyError
from remat_kit._jaxpr import count_flops, walk
from remat_kit._lower import lower
from remat_kit._plan.flat import REMATS, remat_body
from remat_kit._policy import Policy

_MOST = 0.8
"""What share of a block's FLOPs is in its own checkpoints for it to be rematerialized already."""


@dataclass(frozen=True)
class CheckedPolicy:
    """A policy for the blocks of one class, which looks whether they checkpoint themselves.

    Attributes:
      policy: what is kept.
      block: what errors call the block.
    """

    policy: Policy
    block: str

    @property
    def name(self) -> str:
        """What tables call it."""
        return self.policy.name

    def checkpoint(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The block checkpointed. Raises PolicyError when it is called and does so itself."""

        @functools.wraps(function)
        def run(*arguments: Any) -> Any:
            # The block's Python code runs once: Linen counts in it how often a random stream was asked.
            jaxpr, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
            refuse_checkpointed(jaxpr, self.block)

            def block(*leaves: Any) -> Any:
                return core.jaxpr_as_fun(jaxpr)(*leaves)

            results = jax.checkpoint(block, policy=lower(self.policy), prevent_cse=True)(*jax.tree.leaves(arguments))
            return jax.tree.unflatten(jax.tree.structure(shapes), results)

        return run


def refuse_checkpointed(jaxpr: Any, block: str) -> None:
    """Raises PolicyError when most of a block's matrix products are in checkpoints of its own.

    A checkpoint around one of them would run the forward pass a third time. Small ones, like that of a chunk of
    attention, stay as they are.
    """
    if _checkpoints_of_most(jaxpr):
        raise already_checkpointed(block)


def checkpoint_around(jaxpr: Any) -> bool:
    """Whether a program has a checkpoint around most of which there is one other checkpoint.

    Around several it is one of a group of blocks, which has a use: less is kept than at each of them.
    """
    return any(_checkpoints_of_most(remat_body(each.eqn)) == 1 for each in walk(jaxpr) if each.primitive in REMATS)


def _checkpoints_of_most(jaxpr: Any) -> int:
    """How many checkpoints run in a program, if most of its matrix products are in them, else 0."""
    total = count_flops(jaxpr)
    inside = [(each.executions, count_flops(remat_body(each.eqn))) for each in walk(jaxpr) if each.primitive in REMATS]
    is_most = total > 0 and sum(times * flops for times, flops in inside) >= _MOST * total
    return sum(times for times, _ in inside) if is_most else 0


def already_checkpointed(block: str) -> PolicyError:
    """The error for a block that checkpoints itself."""
    return PolicyError(
        f"{block} is rematerialized already by the model's own code (jax.checkpoint, nn.remat or nnx.remat): another "
        "checkpoint around it would run it three times. Switch the model's own off, or match what is around or inside "
        "of it with where."
    )
