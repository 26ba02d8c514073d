"""Policies: what a rematerialized block keeps for backward, moves to the host, or computes again.

A `Policy` is a value of our own and not one of JAX's policy functions: those cannot be printed, two equal
ones compare unequal, and their classes come and go between JAX versions. It is lowered to a
`jax.checkpoint` policy at the last moment, by `_lower.lower`.
"""

import enum
import functools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from remat_kit import names
from remat_kit._errors import PolicyError, did_you_mean
from remat_kit._layering import Layering, Method, call_of, count_and_inside, split_outside


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
    STACK = "stack"
    """Many blocks, one after another: what `scan_stack` and its kin run."""


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
      layering: how a stack of blocks is divided, when that is what is wrapped; see `segments`, `first` and `every`.
      inside: the policy in each part of it; of FIRST, that of the first blocks. It may be one for stacks again.
    """

    name: str
    summary: str
    saves: tuple[str, ...] = ()
    offloads: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()
    rule: Rule = Rule.RECOMPUTE
    region: Region = Region.BLOCK
    xla_remat: bool = False
    layering: Layering | None = None
    inside: "Policy | None" = None

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
        is_stack = self.region is Region.STACK
        if is_stack != (self.layering is not None) or is_stack != (self.inside is not None):
            raise PolicyError(
                f"policy {self.name!r} has region {self.region.value}, layering {self.layering} and inside "
                f"{self.inside}, which do not go together. Make one for stacks with segments, first or every."
            )

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """All tensor names that the policy mentions, sorted."""
        return tuple(sorted({*self.saves, *self.offloads, *(self.inside.tensor_names if self.inside else ())}))

    @property
    def of_block(self) -> "Policy":
        """What a block by itself is under: this policy, or of one for stacks the innermost policy inside."""
        return self.inside.of_block if self.inside else self

    @property
    def is_nested(self) -> bool:
        """Whether blocks are inside a checkpointed part of a stack, and `of_block` applies in there."""
        checkpoints = self.layering is not None and self.layering.method is not Method.FIRST
        return checkpoints or (self.inside is not None and self.inside.is_nested)

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
        """The block checkpointed; its arguments are arrays and pytrees of arrays. See also `argument_names`."""
        ...


STATE = ""
"""In the place of an argument's name: it is the state of modules, parameters above all."""


def with_argument_names(function: Callable[..., Any], names: Iterable[str]) -> Callable[..., Any]:
    """`function`, told which parameter of the wrapped code each of its positional arguments belongs to, or `STATE`."""

    @functools.wraps(function)
    def named(*args: Any) -> Any:
        return function(*args)

    named.remat_kit_argument_names = tuple(names)  # pyright: ignore[reportAttributeAccessIssue]
    return named


def argument_names(function: Callable[..., Any]) -> tuple[str, ...] | None:
    """What `with_argument_names` told of a function, None where nothing did."""
    return getattr(function, "remat_kit_argument_names", None)


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


def segments(count: int | str = "auto", inside: str | Policy = "none") -> Policy:
    """The policy that checkpoints a stack of blocks in `count` segments and keeps what goes into each segment alone.

    In backward a segment runs again as a whole, with `inside` as the policy of its blocks. With `none` all that
    autodiff keeps of one segment is alive meanwhile, and the step runs one more forward. With `full` only the inputs of
    its blocks are, and the step runs two more. `inside` may be a policy for stacks again.

    `count` is a number from 1 to that of the blocks, or "auto": the number with the fewest bytes alive at once, those
    that go into segments and those kept inside one; or "sqrt": about √N, whatever the blocks keep; or "recursive":
    segments in segments down to single blocks, about 2·log2(N) inputs kept at once and log2(N) more forwards.
    All three are of Chen et al. 2016 (arXiv 1604.06174); `Layering.sizes` has the rules.
    """
    return _for_stacks(Layering(Method.SEGMENTS, count), inside, "none")


def first(count: int, inside: str | Policy = "full") -> Policy:
    """The policy that has the first `count` blocks of a stack under policy `inside`, the others without a checkpoint.

    Megatron-LM calls it the method "block".
    """
    return _for_stacks(Layering(Method.FIRST, count), inside, "full")


def every(count: int, inside: str | Policy = "none") -> Policy:
    """As `segments`, with groups of `count` blocks, the last perhaps shorter; Megatron-LM's method "uniform"."""
    return _for_stacks(Layering(Method.EVERY, count), inside, "none")


def _for_stacks(layering: Layering, inside: str | Policy, default: str) -> Policy:
    policy = get_policy(inside)
    if layering.method is Method.FIRST and policy.region is Region.NOTHING:
        raise PolicyError(f"first({layering.count},none) checkpoints nothing. Write 'none', or another policy inside.")
    shown = "" if policy.name == default else f",{policy.name}"
    return Policy(
        name=f"{layering.method.value}({layering.count}{shown})",
        summary=f"{layering.summary}; inside: {policy.name}",
        region=Region.STACK,
        layering=layering,
        inside=policy,
    )


def union(*policies: Policy) -> Policy:
    """The policy that saves or offloads a value when any of `policies` does.

    Raises PolicyError when one of them saves what another offloads, when two have different rules for
    values without a name, or when `none` or a policy for stacks is among them (they wrap nothing, or another thing).
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
        if policy.layering is not None:
            raise PolicyError(
                f"policy {policy.name!r} is for a stack of blocks, so it has no union with another one. "
                f"Put the union inside, e.g. {policy.layering.method.value}({policy.layering.count},"
                "dots_saveable|save(context))."
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

_FUNCTIONS: dict[str, Callable[..., Policy]] = {"save": save, "offload": offload, "save_kernels": save_kernels}
_OF_STACKS: dict[str, Callable[..., Policy]] = {"segments": segments, "first": first, "every": every}


def get_policy(policy: "str | Policy") -> Policy:
    """The policy that `policy` names: a name of POLICIES, `save(a,b)`, `offload(a)`, a union `x|y`, or one for
    stacks of blocks, `segments(auto)`, `first(6,full)`, `every(2,x|y)`.

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
    parts = split_outside(policy, "|")
    if len(parts) > 1:
        return union(*map(get_policy, parts))
    call = call_of(parts[0])
    if call and call[0] in _FUNCTIONS:
        return _FUNCTIONS[call[0]](*call[1])
    if call and call[0] in _OF_STACKS:
        return _OF_STACKS[call[0]](*count_and_inside(*call))
    if parts[0] in POLICIES:
        return POLICIES[parts[0]]
    hint = did_you_mean(call[0], [*_FUNCTIONS, *_OF_STACKS]) if call else ""
    raise PolicyError(
        f"there is no policy {policy!r}.{hint or did_you_mean(policy, POLICIES)} Policies: {', '.join(POLICIES)}; "
        "or save(NAME,...), offload(NAME,...), and unions with |; "
        "or for stacks of blocks segments(auto), first(COUNT), every(COUNT), each also as segments(auto,POLICY)."
    )


def parse_policies(text: str) -> tuple[Policy, ...]:
    """The policies of a comma-separated list, in order and each once; `all` is the whole table.

    Commas inside parentheses belong to the policy: `none,save(query_proj,context),segments(4,save(context)),full`.
    """
    if text.strip() == "all":
        return tuple(POLICIES.values())
    parts = [part for part in split_outside(text, ",") if part]
    if not parts:
        raise PolicyError(
            f"no policy in {text!r}. Give a comma-separated list or 'all'. Policies: {', '.join(POLICIES)}."
        )
    return tuple(dict.fromkeys(get_policy(part) for part in parts))
