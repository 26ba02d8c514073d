"""A policy as `jax.checkpoint` takes it: a function that is asked about every value."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax

from remat_kit._policy import Policy, Region, Rule


@functools.cache
def lower(policy: Policy) -> Callable[..., Any] | None:
    """The `jax.checkpoint` policy function of `policy`; None is JAX's "recompute everything".

    Cached, so that equal policies give the same function and JAX's own caches hit. Where one of JAX's
    policies says the same, it is that one. Not defined for a policy that wraps nothing, or
    a stack.
    """
    assert policy.region is Region.BLOCK, policy
    built_in = jax.checkpoint_policies
    base: Callable[..., Any] | None = {
        Rule.RECOMPUTE: None,
        Rule.DOTS: built_in.dots_saveable,
        Rule.DOTS_WITH_NO_BATCH_DIMS: built_in.dots_with_no_batch_dims_saveable,
        Rule.OFFLOAD_DOTS_WITH_NO_BATCH_DIMS: built_in.offload_dot_with_no_batch_dims("device", "pinned_host"),
        Rule.EVERYTHING: built_in.everything_saveable,
    }[policy.rule]
    if policy.rule is Rule.EVERYTHING and not policy.offloads:
        return base
    choices = [base] if base else []
    if policy.offloads:
        choices.append(
            built_in.save_and_offload_only_these_names(
                names_which_can_be_saved=list(policy.saves),
                names_which_can_be_offloaded=list(policy.offloads),
                offload_src="device",
                offload_dst="pinned_host",
            )
        )
    elif policy.saves:
        choices.append(built_in.save_only_these_names(*policy.saves))
    if policy.kernels:
        choices.append(functools.partial(_is_kernel, frozenset(policy.kernels)))
    if not choices:
        return None
    return choices[0] if len(choices) == 1 else functools.partial(_first_to_keep, tuple(reversed(choices)))


# JAX's word for "recompute" in a policy that can offload. It has no public name; a policy's answer gives it.
_RECOMPUTE = jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host")(None)


def _is_kernel(kernels: frozenset[str], primitive: Any, *_: Any, **__: Any) -> bool:
    return primitive.name in kernels


def _first_to_keep(choices: Iterable[Callable[..., Any]], primitive: Any, *args: Any, **params: Any) -> Any:
    """The first answer that is not "recompute". Names are asked before rules, so a name can be more precise."""
    for choice in choices:
        answer = choice(primitive, *args, **params)
        if is_kept(answer):
            return answer
    return False


def is_kept(answer: Any) -> bool:
    """Whether a `jax.checkpoint` policy's answer means that the value is saved or offloaded."""
    return answer is not False and answer is not _RECOMPUTE
