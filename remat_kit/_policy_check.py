"""Whether a policy can do on this step, for this target, what it says: errors and warnings, from the step's jaxpr."""

from typing import Any

import jax
from jax.sharding import Mesh

from remat_kit import names
from remat_kit._errors import PolicyError, TargetError
from remat_kit._jaxpr import num_matmuls, primitive_of, walk
from remat_kit._lower import is_kept, lower
from remat_kit._policy import POLICIES, Policy, Region
from remat_kit._regions import checkpoint_regions
from remat_kit._target import Target


def check_policy(policy: Policy, jaxpr: Any, tags: frozenset[str]) -> tuple[str, ...]:
    """Warnings about `policy` on this model. Raises PolicyError when none of its names is in the model."""
    in_stack = policy.region is Region.STACK
    if in_stack and not checkpoint_regions(jaxpr):
        return (
            f"policy {policy.name!r} had no effect: the step differentiates no stack of blocks that was run under it. "
            "Run the blocks with scan_stack, unroll_stack or remat_scan, or use a policy for a block, e.g. full",
        )
    nested = in_stack and policy.is_nested
    policy = policy.of_block
    if policy.region is Region.NOTHING:
        return ()
    warnings = []
    if nested and jax.config.jax_remat3 and lower(policy):
        warnings.append(
            f"jax_remat3 is on, under which JAX does not ask a policy inside a checkpointed part of a stack: what "
            f"{policy.name!r} keeps inside a part is computed again, as with full inside"
        )
    known = f"The model tags: {', '.join(sorted(tags))}." if tags else "The model tags no tensor."
    wanted = set(policy.tensor_names)
    if wanted == {names.WEIGHTS} and not wanted & tags:
        warnings.append(
            f"policy {policy.name!r} keeps weights gathered from a mesh, and the model tags none here: it does what "
            "'full' does. Name a mesh that cuts parameters (--mesh fsdp=8)."
        )
    elif wanted and not wanted & tags:
        raise PolicyError(
            f"policy {policy.name!r} names {', '.join(sorted(wanted))}, and none of them is in the model: it would "
            f"do what 'full' does. {known} Tag tensors with jax.ad_checkpoint.checkpoint_name, or use a policy "
            "that needs no names, e.g. dots_saveable."
        )
    absent = sorted(_named_by_hand(policy) - tags)
    if absent:
        warnings.append(f"policy {policy.name!r} names {', '.join(absent)}, which the model does not tag. {known}")
    if policy.kernels and not any(primitive_of(equation.eqn) in policy.kernels for equation in walk(jaxpr)):
        warnings.append(
            f"none of the kernels that policy {policy.name!r} keeps ({', '.join(policy.kernels)}) is in the program"
        )
    # A part of a stack runs again as a whole, also what the policy inside keeps while it does.
    ignored = 0 if in_stack else _kept_but_recomputed(policy, jaxpr)
    if ignored:
        remat3 = " jax_remat3 is on, under which JAX asks a policy about fewer primitives." * jax.config.jax_remat3
        warnings.append(
            f"{ignored} matmuls that policy {policy.name!r} keeps are computed again: "
            f"JAX did not ask the policy about them.{remat3}"
        )
    return tuple(warnings)


def _named_by_hand(policy: Policy) -> set[str]:
    """The tensor names of `policy` that no preset in it brings: a preset names alternatives on purpose."""
    presets = [POLICIES[part] for part in policy.name.split("|") if part in POLICIES]
    return set(policy.tensor_names).difference(*(preset.tensor_names for preset in presets))


def _kept_but_recomputed(policy: Policy, jaxpr: Any) -> int:
    """How many matmuls run again in backward although the policy, asked about them, would keep them."""
    keeps = lower(policy)
    count = 0
    for equation in walk(jaxpr):
        if equation.recomputed and keeps is not None and (matmuls := num_matmuls(equation.eqn)):
            eqn = equation.eqn
            answer = keeps(eqn.primitive, *(var.aval for var in eqn.invars), **eqn.params)
            count += equation.executions * matmuls * is_kept(answer)
    return count


def check_host_memory(target: Target, mesh: Mesh) -> tuple[str, ...]:
    """A warning where offloaded values stay where they are. Raises TargetError where a device has no pinned memory.

    JAX would fail late and by the name of a memory; of a described GPU there is nothing to ask, it has some.
    """
    if target.chip.platform == "cpu":
        return (
            "values are offloaded to the host, and on the CPU that is the same memory: they count as temporaries, and "
            "offloading lowers nothing. Name a GPU as --target to see what it does there; it need not be attached",
        )
    if not target.attached:
        return ()
    device = mesh.devices.flat[0]
    kinds = sorted(memory.kind for memory in device.addressable_memories())
    if "pinned_host" not in kinds:
        raise TargetError(
            f"this step offloads values to pinned host memory, and {device.device_kind} ({device.platform}) has none "
            f"for JAX: its memories are {', '.join(kinds)}. Use a policy that keeps or recomputes these values, e.g. "
            "save(...) in the place of offload(...)."
        )
    return ()
