"""The table of the contract: model variants, policies, what each must recompute, and how one writes it by hand.

A block's matmuls in the words of the table: q k v (projections), scores and context (the two products of attention),
out, and up, down (MLP of style "gpt") or gate, up, down ("llama"). Backward needs both operands of each of them, and
the inputs of softmax, GELU and SiLU; it does not need what is only added to the residual stream, which is why down is
never computed again.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend import core

from models import linen, transformer
from remat_kit import POLICIES, Step, get_policy, get_target, trace
from remat_kit._trace import TracedStep

LAYERS = 2
SIZE = {"size": "tiny", "compute_dtype": "float32", "param_dtype": "float32", "layers": LAYERS}


class Variant(NamedTuple):
    """A model and its options. Style "gpt" has dropout by default, on the scores too where attention is naive."""

    build: Callable[..., Step]
    style: str
    options: dict[str, Any]


VARIANTS = {
    f"{style}-{attention}-{stack}": Variant(build, style, {"attention": attention, "stack": stack})
    for style, build in {"gpt": transformer.gpt, "llama": transformer.llama}.items()
    for attention in ("naive", "fused")
    for stack in ("scan", "unroll")
} | {f"linen-{stack}": Variant(linen.gpt_linen, "gpt", {"stack": stack}) for stack in ("scan", "unroll")}
VARIANTS["llama-naive-unroll"].options["dropout"] = 0.1
QUICK_VARIANTS = ("gpt-naive-scan", "llama-fused-unroll", "linen-scan")
"""Every value of every option at least once; the other variants are marked slow."""


class Row(NamedTuple):
    """How many matmuls of one layer run again in style "gpt" and in style "llama", which ones, and what is kept."""

    gpt: int
    llama: int
    again: str
    reason: str


CORE = "scores context"
MLP = "up/gate up"

RECOMPUTED = {
    "none": Row(0, 0, "", "nothing is wrapped"),
    "xla_auto": Row(0, 0, "", "nothing is wrapped; what XLA does comes later"),
    "full": Row(7, 8, f"q k v {CORE} out {MLP}", "only the input is there; out's sum is the input of the second norm"),
    "everything_saveable": Row(0, 0, "", "every value may stay"),
    "dots_saveable": Row(0, 0, "", "every product may stay"),
    "dots_with_no_batch_dims_saveable": Row(2, 2, CORE, "these two have batch dimensions, batch and heads"),
    "selective_attention": Row(2, 2, CORE, "between q, k, v and out nothing stays"),
    "attention_kernel_saveable": Row(7, 8, f"q k v {CORE} out {MLP}", "the CPU has no such kernel: as full"),
    "minimal": Row(2, 2, CORE, "as selective_attention: nobody needs the last product, kept or not"),
    "minimal_with_context": Row(1, 1, "scores", "context is there, its product needs the probabilities"),
    "save_dot_with_context_except_mlp": Row(2, 3, f"scores {MLP}", "as above, and the MLP's inputs"),
    "save_dot_except_mlpwi": Row(3, 4, f"{CORE} {MLP}", "the last product stays for nothing"),
    "save_dot_except_mlp": Row(3, 4, f"{CORE} {MLP}", "attention's four projections stay"),
    "save_qkv_proj": Row(4, 5, f"{CORE} out {MLP}", "only q, k, v stay"),
    "save_out_proj": Row(6, 7, f"q k v {CORE} {MLP}", "out stays, but its product needs context"),
    "qkv_proj_offloaded": Row(4, 5, f"{CORE} out {MLP}", "as save_qkv_proj: the host's copy is as good"),
    "minimal_offloaded": Row(2, 2, CORE, "as minimal"),
    "offload_dots_with_no_batch_dims": Row(2, 2, CORE, "as dots_with_no_batch_dims_saveable"),
    "offload_block_input": Row(7, 8, f"q k v {CORE} out {MLP}", "as full"),
    "save_gathered_weights": Row(7, 8, f"q k v {CORE} out {MLP}", "on one device no weight is gathered: as full"),
    "save_reduced": Row(6, 7, f"q k v {CORE} {MLP}", "as save_out_proj: nobody needs the last product"),
    # "llama" has no tensor mlpwi: its two projections are mlpwi_0 and mlpwi_1.
    "save(query_proj,mlpwi)|offload(context)": Row(4, 6, "k v scores out /k v scores out gate up", "q, context, up"),
    "dots_saveable|offload(context)": Row(0, 0, "", "context is on the host, the other products are here"),
    "dots_with_no_batch_dims_saveable|save(context)": Row(1, 1, "scores", "as minimal_with_context"),
    "save(attention_scores,mlp_hidden)": Row(6, 7, f"q k v context out {MLP}", "GELU's derivative needs its input"),
    "attention_kernel_saveable|save_qkv_proj": Row(4, 5, f"{CORE} out {MLP}", "no kernel here: as save_qkv_proj"),
}
"""On the CPU. Fused attention is the same two products there, without a tag on the scores: see `recomputed`."""

IGNORED_NEXT_TO_NAMES = {
    # Only context is kept: scores for the probabilities, the rest for their own products; only context's is spared.
    "dots_saveable|offload(context)": Row(6, 7, f"q k v scores out {MLP}", "the dots are not asked about"),
    "dots_with_no_batch_dims_saveable|save(context)": Row(6, 7, f"q k v scores out {MLP}", "the same"),
}
"""Where jax 0.11 with `jax_remat3` differs: it does not ask a policy of names and dots about the dots."""


def words(row: Row, style: str) -> list[str]:
    """The matmuls of `row.again` that style has."""
    gpt, _, llama = row.again.partition("/")
    if not llama:
        return gpt.split()
    if row.again.endswith(MLP):
        return [*gpt.split()[:-1], *(llama.split() if style == "llama" else ["up"])]
    return (llama if style == "llama" else gpt).split()


def recomputed(policy: str, variant: str, remat3: bool) -> int:
    """Matmuls of one layer that must run again."""
    style = VARIANTS[variant].style
    row = RECOMPUTED[policy]
    if ignores_dots(policy, remat3):
        row = IGNORED_NEXT_TO_NAMES[policy]
    # Without its tag, the first product of fused attention runs again too.
    untagged = policy == "save(attention_scores,mlp_hidden)" and "fused" in variant
    return (row.gpt if style == "gpt" else row.llama) + untagged


def ignores_dots(policy: str, remat3: bool) -> bool:
    """Whether this JAX does less than the policy says."""
    return remat3 and jax.__version_info__ < (0, 12) and policy in IGNORED_NEXT_TO_NAMES


def cells() -> list[Any]:
    """(policy, variant) of the whole table, e.g. `full-gpt-naive-scan`."""
    return [
        pytest.param(policy, variant, id=f"{policy}-{variant}", marks=[] if quick else [pytest.mark.slow])
        for policy in RECOMPUTED
        for variant in VARIANTS
        for quick in [variant in QUICK_VARIANTS]
    ]


def diagonal() -> list[Any]:
    """(policy, variant) with every policy once and every variant at least twice: for what has to be compiled.

    The first ten have every variant; the later ones are marked slow, but for one that offloads and one union.
    """
    names, quick = list(VARIANTS), ("minimal_offloaded", "dots_saveable|offload(context)")
    pairs = [(policy, names[(3 * i + 1) % len(names)]) for i, policy in enumerate(RECOMPUTED)]
    return [
        pytest.param(*pair, id="-".join(pair), marks=[] if i < len(names) or pair[0] in quick else [pytest.mark.slow])
        for i, pair in enumerate(pairs)
    ]


def build(policy: Any, variant: str) -> Step:
    """The variant's step under a policy."""
    return VARIANTS[variant].build(policy, **SIZE, **VARIANTS[variant].options)


@functools.cache
def traced(policy: str, variant: str, remat3: bool = False) -> TracedStep:
    """Loss and gradients traced for the CPU. The caller has set `jax_remat3`; it is here to tell the two apart."""
    assert jax.config.jax_remat3 == remat3
    return gradients_of(build(policy, variant), policy)


def gradients_of(step: Step, policy: str) -> TracedStep:
    """A step traced for the CPU without its optimizer, in which no policy has a say."""
    assert step.loss_and_grads is not None
    without = dataclasses.replace(step, fn=step.loss_and_grads, donate=())
    return trace(without, get_target("cpu"), get_policy(policy))


# By hand

JAX = jax.checkpoint_policies
QKV = ("query_proj", "key_proj", "value_proj")
PROJECTIONS = (*QKV, "out_proj", "mlpwi", "mlpwi_0", "mlpwi_1")


def only(*names: str) -> Any:
    return JAX.save_only_these_names(*names)


def to_host(*names: str, saved: tuple[str, ...] = ()) -> Any:
    return JAX.save_and_offload_only_these_names(
        names_which_can_be_saved=list(saved),
        names_which_can_be_offloaded=list(names),
        offload_src="device",
        offload_dst="pinned_host",
    )


def either(name: str, named: Any, rule: Any) -> Any:
    """What `named` says of tensors called `name`, and `rule` of everything else."""

    def ask(primitive: Any, *args: Any, **params: Any) -> Any:
        tag = params.get("name") or getattr(params.get("_prim"), "name", None)
        return (named if tag == name else rule)(primitive, *args, **params)

    return functools.partial(ask)


def kernels_or(*names: str) -> Any:
    """Fused attention's kernels and these names."""

    def ask(primitive: Any, *args: Any, **params: Any) -> Any:
        return primitive.name.startswith("dot_product_attention_fwd") or only(*names)(primitive, *args, **params)

    return functools.partial(ask)


UNWRAPPED = ("none", "xla_auto")
"""The policies under which a block stays what it is."""

BY_HAND: dict[str, Callable[[], Any]] = {
    "full": lambda: None,
    "everything_saveable": lambda: JAX.everything_saveable,
    "dots_saveable": lambda: JAX.dots_saveable,
    "dots_with_no_batch_dims_saveable": lambda: JAX.dots_with_no_batch_dims_saveable,
    "selective_attention": lambda: only(*PROJECTIONS),
    "attention_kernel_saveable": lambda: kernels_or(),
    "minimal": lambda: only(*PROJECTIONS, "mlpwo"),
    "minimal_with_context": lambda: only(*PROJECTIONS, "mlpwo", "context"),
    "save_dot_with_context_except_mlp": lambda: only(*QKV, "context", "out_proj"),
    "save_dot_except_mlpwi": lambda: only(*QKV, "out_proj", "mlpwo"),
    "save_dot_except_mlp": lambda: only(*QKV, "out_proj"),
    "save_qkv_proj": lambda: only(*QKV),
    "save_out_proj": lambda: only("out_proj"),
    "qkv_proj_offloaded": lambda: to_host(*QKV),
    "minimal_offloaded": lambda: to_host(*PROJECTIONS, "mlpwo"),
    "offload_dots_with_no_batch_dims": lambda: JAX.offload_dot_with_no_batch_dims("device", "pinned_host"),
    "offload_block_input": lambda: to_host("decoder_layer_input"),
    "save_gathered_weights": lambda: only("gathered_weights"),
    "save_reduced": lambda: only("out_proj", "mlpwo"),
    "save(query_proj,mlpwi)|offload(context)": lambda: to_host("context", saved=("query_proj", "mlpwi")),
    "dots_saveable|offload(context)": lambda: either("context", to_host("context"), JAX.dots_saveable),
    "dots_with_no_batch_dims_saveable|save(context)": lambda: either(
        "context", only("context"), JAX.dots_with_no_batch_dims_saveable
    ),
    "save(attention_scores,mlp_hidden)": lambda: only("attention_scores", "mlp_hidden"),
    "attention_kernel_saveable|save_qkv_proj": lambda: kernels_or(*QKV),
}
"""JAX's own policy for each of ours, in the words of JAX's documentation and with the strings of MaxText."""


@contextmanager
def wrapped_by_hand(policy: str) -> Iterator[None]:
    """While it is open, the models' blocks are wrapped by flax's own transformations."""

    def wrap(cls: Any) -> Any:
        if policy in UNWRAPPED:
            return cls
        if issubclass(cls, nn.Module):
            lifted = nn.remat(cls, policy=BY_HAND[policy]())
            lifted.__name__ = cls.__name__  # else "CheckpointBlock": other parameter paths, other dropout
            return lifted
        call = nnx.remat(cls.__call__, policy=BY_HAND[policy]())
        return type(cls)(cls.__name__, (cls,), {"__call__": call})

    with pytest.MonkeyPatch.context() as patch:
        for module in (transformer, linen):
            patch.setattr(module, "remat", lambda _: wrap)
        yield


# Numbers


def run_equations(jaxpr: Any, *args: Any) -> list[Any]:
    """The outputs of a closed jaxpr, one equation after another.

    What XLA makes of one equation does not depend on its neighbours, so a value computed twice is the same twice: two
    programs of the same arithmetic give the same bits. Equations of the same kind and shapes are compiled once for all
    programs.
    """
    return _run(jaxpr.jaxpr, jaxpr.consts, jax.tree.leaves(args))


def _run(jaxpr: Any, consts: Any, args: Any) -> list[Any]:
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

    def read(var: Any) -> Any:
        return var.val if isinstance(var, core.Literal) else known[var]

    for eqn in jaxpr.eqns:
        inputs = [read(var) for var in eqn.invars]
        inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
        if eqn.primitive.name == "scan":
            outputs = _scan(eqn, inputs)
        elif inner is not None and eqn.primitive.name not in ("scatter-add", "while", "cond"):
            is_closed = not isinstance(inner, core.Jaxpr) or hasattr(inner, "jaxpr")
            outputs = _run(inner.jaxpr if is_closed else inner, inner.consts if is_closed else (), inputs)
        else:
            outputs = eqn.primitive.bind(*inputs, **eqn.params)
            outputs = outputs if eqn.primitive.multiple_results else [outputs]
        known.update(zip(eqn.outvars, outputs, strict=True))
    return [read(var) for var in jaxpr.outvars]


def _scan(eqn: Any, inputs: list[Any]) -> list[Any]:
    body, turns = eqn.params["jaxpr"], range(eqn.params["length"])
    # Inputs: constants, carry, stacked; outputs: carry, stacked. What is stacked has one axis more outside.
    is_stacked = [outer.aval.ndim > inner.aval.ndim for outer, inner in zip(eqn.invars, body.jaxpr.invars, strict=True)]
    num_carry = sum(
        outer.aval.ndim == inner.aval.ndim for outer, inner in zip(eqn.outvars, body.jaxpr.outvars, strict=True)
    )
    num_consts = len(inputs) - sum(is_stacked) - num_carry
    consts, carry = inputs[:num_consts], inputs[num_consts : num_consts + num_carry]
    stacked = inputs[num_consts + num_carry :]
    results = {}
    for i in reversed(turns) if eqn.params["reverse"] else turns:
        outputs = _run(body.jaxpr, body.consts, [*consts, *carry, *(x[i] for x in stacked)])
        carry, results[i] = outputs[:num_carry], outputs[num_carry:]
    return [*carry, *(jnp.stack(values) for values in zip(*(results[i] for i in turns), strict=True))]


@functools.cache
def initial_values(policy: str, variant: str) -> Any:
    """The step's real arguments."""
    init = build(policy, variant).init
    assert init is not None
    program, shape = jax.make_jaxpr(init, return_shape=True)(0)
    return jax.tree.unflatten(jax.tree.structure(shape), run_equations(program, 0))


@functools.cache
def reference(variant: str) -> list[np.ndarray]:
    """Loss and gradients under policy none."""
    return jax.device_get(run_equations(traced("none", variant).traced.jaxpr, initial_values("none", variant)))


def worst_error(got: list[Any], expected: list[Any]) -> float:
    """The largest difference of a leaf, as a share of its norm plus a hundredth of the norm of all."""
    total = math.sqrt(sum(float(np.linalg.norm(leaf)) ** 2 for leaf in expected[1:]))
    return max(
        float(np.linalg.norm(np.asarray(leaf) - other)) / (float(np.linalg.norm(other)) + 0.01 * total)
        for leaf, other in zip(got, expected, strict=True)
    )


assert set(POLICIES) <= set(RECOMPUTED), set(POLICIES) - set(RECOMPUTED)
