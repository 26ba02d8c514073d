"""Policies: what a rematerialized block keeps for backward, moves to the host, or computes again.

A `Policy` is a value of our own and not one of JAX's policy functions: those cannot be printed, two equal
ones compare unequal, and their classes come and go between JAX versions. It is lowered to a
`jax.checkpoint` policy at the last moment, by `lower`.
"""

import enum
import functools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax

from remat_kit import names
from remat_kit._errors import PolicyError, did_you_mean


class Rule(enum.Enum):
    """What a policy does with outputs that carry no name, by the primitive that made them.

    Dots means what it means in JAX: `dot_general`, convolutions (DOTS only) and scaled matmuls.
    """

    RECOMPUTE = "recompute"
    DOTS = "save dots"
    DOTS_WITH_NO_BATCH_DIMS = "save dots with no batch dimensions"
    OFFLOAD_DOTS_WITH_NO_BATCH_DIMS = "offload dots with no batch dimensions"
    EVERYTHING = "save everything"


class Region(enum.Enum):
    """What a policy wraps."""

    NOTHING = "nothing"
    """No `jax.checkpoint` at all: autodiff saves what it saves."""
    BLOCK = "block"
    """The function or module that `remat` is applied to."""


@dataclass(frozen=True)
class Policy:
    """A rematerialization policy: frozen, hashable, printable, equal to another with the same content.

    Attributes:
      name: what tables, records and the command line call it.
      summary: one line for a reader.
      saves: names of tensors kept on the device from forward to backward, sorted.
      offloads: names of tensors moved to pinned host memory in forward and back in backward, sorted.
      kernels: names of primitives whose outputs are kept, sorted. This reaches residuals that a name
        cannot: a fused attention kernel's output and log-sum-exp live inside a `custom_vjp` rule.
      rule: what happens to values that carry no name.
      region: what is wrapped.
      xla_remat: XLA's own rematerialization pass may act on the step, as it does in a job that asks for nothing. For
        all other policies it is off unless the compile options say otherwise, so that they can be compared.
    """

    name: str
    summary: str
    saves: tuple[str, ...] = ()
    offloads: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()
    rule: Rule = Rule.RECOMPUTE
    region: Region = Region.BLOCK
    xla_remat: bool = False

    def __post_init__(self) -> None:
        for field in ("saves", "offloads", "kernels"):
            given = getattr(self, field)
            if isinstance(given, str) or not all(isinstance(name, str) for name in given):
                raise PolicyError(f"Policy.{field} is {given!r}. Give a tuple of names, e.g. ('context',).")
            object.__setattr__(self, field, tuple(sorted(set(getattr(self, field)))))
        both = sorted(set(self.saves) & set(self.offloads))
        if both:
            raise PolicyError(
                f"policy {self.name!r} both saves and offloads {', '.join(both)}. "
                "A tensor can be kept on the device or on the host, not both: drop it from one of the two."
            )

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """All tensor names that the policy mentions, sorted."""
        return tuple(sorted({*self.saves, *self.offloads}))

    def __or__(self, other: "Policy") -> "Policy":
        """The union: a value is kept or offloaded when either policy does so; see `union`."""
        return union(self, other)

    def __str__(self) -> str:
        return self.name


@runtime_checkable
class Checkpoint(Protocol):
    """What may stand in a policy's place: something that checkpoints a block in its own way, a plan for one."""

    @property
    def name(self) -> str:
        """What tables call it."""
        ...

    def checkpoint(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The block checkpointed; its arguments are arrays and pytrees of arrays."""
        ...


def save(*tensor_names: str) -> Policy:
    """The policy that keeps exactly the tensors with these names and computes the rest again."""
    wanted = _names(tensor_names, "save")
    return Policy(f"save({','.join(wanted)})", "keep only the named tensors", saves=wanted)


def offload(*tensor_names: str) -> Policy:
    """The policy that moves exactly the tensors with these names to pinned host memory.

    To offload what a scan carries, name the block's *input*.
    """
    wanted = _names(tensor_names, "offload")
    return Policy(f"offload({','.join(wanted)})", "move only the named tensors to the host", offloads=wanted)


def save_kernels(*primitive_names: str) -> Policy:
    """The policy that keeps all outputs of these primitives, e.g. `dot_product_attention_fwd_wrapper`."""
    wanted = _names(primitive_names, "save_kernels")
    return Policy(f"save_kernels({','.join(wanted)})", "keep the outputs of these primitives", kernels=wanted)


def union(*policies: Policy) -> Policy:
    """The policy that saves or offloads a value when any of `policies` does.

    Raises PolicyError when one of them saves what another offloads, when two have different rules for
    values without a name, or when `none` is among them (it wraps nothing, so there is nothing to unite).
    """
    if not policies:
        raise PolicyError("the union of no policies: give at least one, e.g. union(save('context')).")
    for policy in policies:
        if not isinstance(policy, Policy):
            raise PolicyError(f"{policy!r} is not a policy, so it has no union: use remat_kit.get_policy.")
        if policy.region is Region.NOTHING:
            raise PolicyError(
                f"policy {policy.name!r} wraps nothing, so it has no union with another one. "
                "Unite policies that wrap a block, e.g. dots_saveable | save('context')."
            )
    rules = {policy.rule for policy in policies} - {Rule.RECOMPUTE}
    if len(rules) > 1:
        listed = " and ".join(sorted(repr(rule.value) for rule in rules))
        raise PolicyError(
            f"the union of {' and '.join(map(str, policies))} has two rules for values without a name: {listed}. "
            "Keep one of these policies and add names with save(...) or offload(...)."
        )
    return Policy(
        name="|".join(sorted({part for policy in policies for part in policy.name.split("|")})),
        summary="; ".join(sorted({part for policy in policies for part in policy.summary.split("; ")})),
        saves=tuple(name for policy in policies for name in policy.saves),
        offloads=tuple(name for policy in policies for name in policy.offloads),
        kernels=tuple(name for policy in policies for name in policy.kernels),
        rule=rules.pop() if rules else Rule.RECOMPUTE,
    )


def _names(given: tuple[str, ...], function: str) -> tuple[str, ...]:
    bad = [name for name in given if not isinstance(name, str) or not re.fullmatch(r"[^\s(),|]+", name)]
    if bad or not given:
        what = f"got {bad[0]!r}" if bad else "got none"
        raise PolicyError(
            f"{function}(...) takes one or more tensor names (without spaces and ( ) , |), {what}. "
            f"Write e.g. {function}('query_proj', 'context')."
        )
    return tuple(sorted(set(given)))


_QKV = (names.QUERY, names.KEY, names.VALUE, names.KEY_VALUE, names.QUERY_KEY_VALUE)
_MLP_IN = (names.MLP_UP, names.MLP_GATE, names.MLP_GATED_UP)
_MINIMAL = (*_QKV, names.OUT, *_MLP_IN, names.MLP_DOWN)
_MAXTEXT = "MaxText's preset: "
FUSED_ATTENTION_FORWARD = ("dot_product_attention_fwd", "dot_product_attention_fwd_wrapper")
"""The primitives of `jax.nn.dot_product_attention(implementation="cudnn")` in forward."""

POLICIES: dict[str, Policy] = {
    policy.name: policy
    for policy in (
        Policy("none", "no checkpoint: autodiff keeps whatever it keeps", region=Region.NOTHING),
        Policy("full", "keep only the block's input, compute the whole block again"),
        Policy("everything_saveable", "wrapped, but every value may be kept: the cost of the wrap alone",
               rule=Rule.EVERYTHING),
        Policy("dots_saveable", "keep the output of every matmul and convolution", rule=Rule.DOTS),
        Policy("dots_with_no_batch_dims_saveable", "keep matmuls with weights, not the batched ones of attention",
               rule=Rule.DOTS_WITH_NO_BATCH_DIMS),
        Policy("selective_attention", "recompute the attention core alone of all matmuls (Korthikanti et al.)",
               saves=(*_QKV, names.OUT, *_MLP_IN)),
        Policy("attention_kernel_saveable", "keep fused attention's output and log-sum-exp, compute the rest again",
               kernels=FUSED_ATTENTION_FORWARD),
        Policy("minimal", _MAXTEXT + "keep every projection, not attention's context", saves=_MINIMAL),
        Policy("minimal_with_context", _MAXTEXT + "keep every projection and attention's context",
               saves=(*_MINIMAL, names.CONTEXT)),
        Policy("save_dot_with_context_except_mlp", _MAXTEXT + "keep attention's projections and context",
               saves=(*_QKV, names.CONTEXT, names.OUT)),
        Policy("save_dot_except_mlpwi", _MAXTEXT + "keep every projection but the first of the MLP",
               saves=(*_QKV, names.OUT, names.MLP_DOWN)),
        Policy("save_dot_except_mlp", _MAXTEXT + "keep attention's projections", saves=(*_QKV, names.OUT)),
        Policy("save_qkv_proj", _MAXTEXT + "keep queries, keys and values", saves=_QKV),
        Policy("save_out_proj", _MAXTEXT + "keep attention's output projection", saves=(names.OUT,)),
        Policy("save_gathered_weights", "keep weights gathered from a mesh, compute the whole block again from them",
               saves=(names.WEIGHTS,)),
        Policy("save_reduced", "keep what tensor parallelism sums over devices, so that no such sum runs again",
               saves=(names.OUT, names.MLP_DOWN)),
        Policy("qkv_proj_offloaded", _MAXTEXT + "move queries, keys and values to the host",
               offloads=(names.QUERY, names.KEY, names.VALUE, names.KEY_VALUE)),
        Policy("minimal_offloaded", _MAXTEXT + "move every projection to the host", offloads=_MINIMAL),
        Policy("offload_dots_with_no_batch_dims", "move matmuls with weights to the host",
               rule=Rule.OFFLOAD_DOTS_WITH_NO_BATCH_DIMS),
        Policy("offload_block_input", "move the block's input to the host, compute the whole block again",
               offloads=(names.BLOCK_INPUT,)),
        Policy("xla_auto", "do nothing: XLA's own pass acts where a step takes most of the device",
               region=Region.NOTHING, xla_remat=True),
    )
}  # fmt: skip
"""Every named policy. The command line, the documentation and the contract tests are generated from it."""

_CALL = re.compile(r"(save|offload|save_kernels)\(([^()]*)\)")
_FUNCTIONS: dict[str, Callable[..., Policy]] = {"save": save, "offload": offload, "save_kernels": save_kernels}


def get_policy(policy: "str | Policy") -> Policy:
    """The policy that `policy` names: a name of POLICIES, `save(a,b)`, `offload(a)`, or a union `x|y`.

    A Policy is returned as it is. Raises PolicyError for anything else; `None` is refused because some
    libraries read it as "no remat" and `jax.checkpoint` reads it as "recompute everything".
    """
    if isinstance(policy, Policy):
        return policy
    if policy is None:
        raise PolicyError(
            "None is not a policy: jax.checkpoint takes it as 'recompute everything', others as 'no remat'. "
            "Say which you mean: 'full' or 'none'."
        )
    if not isinstance(policy, str):
        raise PolicyError(
            f"{policy!r} is not a policy. Give a name ({', '.join(POLICIES)}), or a remat_kit.Policy, "
            "e.g. remat_kit.save('context')."
        )
    parts = [part.strip() for part in policy.split("|")]
    if len(parts) > 1:
        return union(*map(get_policy, parts))
    if call := _CALL.fullmatch(parts[0]):
        tensor_names = [name.strip() for name in call[2].split(",") if name.strip()]
        return _FUNCTIONS[call[1]](*tensor_names)
    if parts[0] in POLICIES:
        return POLICIES[parts[0]]
    raise PolicyError(
        f"there is no policy {policy!r}.{did_you_mean(policy, POLICIES)} "
        f"Policies: {', '.join(POLICIES)}; or save(NAME,...), offload(NAME,...), and unions with |."
    )


def parse_policies(text: str) -> tuple[Policy, ...]:
    """The policies of a comma-separated list, in order and each once; `all` is the whole table.

    Commas inside parentheses belong to the policy: `none,save(query_proj,context),full`.
    """
    if text.strip() == "all":
        return tuple(POLICIES.values())
    parts = [part for part in re.split(r",(?![^()]*\))", text) if part.strip()]
    if not parts:
        raise PolicyError(
            f"no policy in {text!r}. Give a comma-separated list or 'all'. Policies: {', '.join(POLICIES)}."
        )
    return tuple(dict.fromkeys(get_policy(part.strip()) for part in parts))


@functools.cache
def lower(policy: Policy) -> Callable[..., Any] | None:
    """The `jax.checkpoint` policy function of `policy`; None is JAX's "recompute everything".

    Cached, so that equal policies give the same function and JAX's own caches hit. Where one of JAX's
    policies says the same, it is that one. Not defined for a policy that wraps nothing.
    """
    assert policy.region is not Region.NOTHING, policy
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
