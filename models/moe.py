"""A GPT-style transformer whose MLPs are mixtures of experts, in Flax NNX: the workload `models.moe:moe`.

Shape suffixes:
  B batch, T sequence, D model width, V vocabulary, L layers, F MLP width, E experts, K experts that a token chooses
  (its choices), S slots of an expert.

Each token goes to K of E experts. An expert has S slots for the tokens of one sequence, so that every shape is known
before the step runs; a token that finds no slot is left out by that expert. Tokens reach the slots and come back by
products with one-hot tensors, the dispatch of GShard (Lepikhin et al. 2020, arXiv 2006.16668): plain matmuls, on any
backend. They do cost FLOPs and memory in proportion to T·E·S, which is about K·T² a sequence.

Attention is tagged as in `models.parts`, and so are the inputs of a block and of both its branches. What the experts
make is not tagged, and their matmuls have a batch dimension: neither a policy of names nor
`dots_with_no_batch_dims_saveable` keeps any of it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from models.config import ConfigError, TransformerConfig, check_whole, check_word, given
from models.config import configure as configure_gpt
from models.parts import (
    INIT_STD,
    Attention,
    LayerNorm,
    at_least_float32,
    dropout,
    fold_in_if,
    make_blocks,
    normal_param,
    residual_std,
    run_blocks,
)
from models.train import Batch, Params, build_step, cross_entropy, split_model
from remat_kit import Policy, Step, names, remat


@dataclass(frozen=True)
class MoEConfig:
    """A transformer with a mixture of experts in each block.

    Attributes:
      blocks: everything but the experts, and the width of each expert's MLP.
      experts: number of experts in a block.
      top_k: how many of them a token goes to, at least 2: weights that sum to one say nothing with one expert, and
        the router would learn from the balance loss alone.
      capacity_factor: slots of all experts together, in choices of all tokens; 1 is enough if all are equally busy.
      balance_weight: of the balance loss in the loss.
    """

    blocks: TransformerConfig
    experts: int
    top_k: int = 2
    capacity_factor: float = 1.25
    balance_weight: float = 0.01

    def __post_init__(self) -> None:
        check_whole("experts", self.experts)
        check_whole("top_k", self.top_k)
        if not 2 <= self.top_k <= self.experts:
            raise ConfigError(
                f"top_k is {self.top_k} with experts {self.experts}. A token goes to at least 2 experts and at most "
                "to all: give e.g. top_k=2 and experts=8."
            )
        if not _is_number(self.capacity_factor) or not 0 < self.capacity_factor < math.inf:
            raise ConfigError(
                f"capacity_factor is {self.capacity_factor!r}. It must be a number above 0: give e.g. 1.25, or "
                f"{self.experts / self.top_k:g} for slots enough for any choice."
            )
        if not _is_number(self.balance_weight) or not 0 <= self.balance_weight < math.inf:
            raise ConfigError(
                f"balance_weight is {self.balance_weight!r}. It must be a number of at least 0: give e.g. 0.01, or 0 "
                "to switch it off."
            )

    @property
    def slots(self) -> int:
        """Slots of an expert for the tokens of one sequence; more than the sequence is long are of no use."""
        busy = self.blocks.seq * self.top_k / self.experts
        return min(self.blocks.seq, math.ceil(self.capacity_factor * busy))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


SIZES: Mapping[str, tuple[str, int]] = {
    "tiny": ("tiny", 4),
    "gpt2-small-8e": ("gpt2-small", 8),
    "gpt2-medium-16e": ("gpt2-medium", 16),
    "gpt2-xl-64e": ("gpt2-xl", 64),
}
"""Named sizes: a size of `config.SIZES["gpt"]` and the number of experts in the place of its MLP."""


def configure(
    size: str,
    *,
    experts: int | None = None,
    top_k: int | None = None,
    capacity_factor: float | None = None,
    balance_weight: float | None = None,
    **overrides: Any,
) -> MoEConfig:
    """The configuration of a named size with some values changed; an override of None changes nothing.

    `overrides` are fields of `TransformerConfig`. Raises ConfigError for an unknown size or field, and for values
    that do not go together.
    """
    check_word("size", size, SIZES, what="a size of moe")
    base, usual = SIZES[size]
    chosen = {"experts": experts, "top_k": top_k, "capacity_factor": capacity_factor, "balance_weight": balance_weight}
    return MoEConfig(configure_gpt("gpt", base, **overrides), **({"experts": usual} | given(chosen)))


class Routing(NamedTuple):
    """Who goes where.

    Attributes:
      weight_BTES: float32, the weight of expert e for token t where it sits in its slot s, else 0. The weights of a
        token sum to one, or are all 0 when no expert had a slot for it.
      balance: the balance loss, a float32 scalar.
    """

    weight_BTES: jax.Array
    balance: jax.Array


def route(logits_BTE: jax.Array, top_k: int, slots: int) -> Routing:
    """The `top_k` experts with the largest logits for each token, as far as they have slots.

    Slots are given token by token, to a token's choices from its first to its last, so that none depends on a token
    that comes later.

    The balance loss is that of Fedus et al. 2021 (arXiv 2101.03961), E·Σ f_e·p_e with the share f_e of all choices
    that name expert e, slot or not, and its mean probability p_e: 1 where all experts are equally busy.
    """
    B, T, E = logits_BTE.shape
    probability_BTE = jax.nn.softmax(logits_BTE, axis=-1)
    weight_BTK, expert_BTK = jax.lax.top_k(probability_BTE, top_k)
    chosen_BTKE = jax.nn.one_hot(expert_BTK, E, dtype=jnp.int32)
    before_BTKE = jnp.cumsum(chosen_BTKE.reshape(B, T * top_k, E), axis=1).reshape(B, T, top_k, E) - chosen_BTKE
    slot_BTK = (before_BTKE * chosen_BTKE).sum(axis=-1)

    kept_BTK = jnp.where(slot_BTK < slots, weight_BTK, 0)
    total_BT1 = kept_BTK.sum(axis=-1, keepdims=True)
    share_BTK = kept_BTK / jnp.where(total_BT1 > 0, total_BT1, 1)
    # A choice without a slot has nothing but zeros here.
    slot_BTKS = jax.nn.one_hot(slot_BTK, slots, dtype=share_BTK.dtype)
    weight_BTES = jnp.einsum("BTKE,BTKS->BTES", share_BTK[..., None] * chosen_BTKE, slot_BTKS)

    busy_E = chosen_BTKE.mean(axis=(0, 1, 2), dtype=probability_BTE.dtype)
    return Routing(weight_BTES, E * jnp.sum(busy_E * probability_BTE.mean(axis=(0, 1))))


class Experts(nnx.Module):
    """A router and E MLPs like those of `parts.MLP`, each for the tokens in its slots."""

    def __init__(self, config: MoEConfig, *, rngs: nnx.Rngs):
        self.config = config
        blocks = config.blocks
        E, D, F = config.experts, blocks.width, blocks.mlp_width
        self.router = normal_param((D, E), INIT_STD, blocks, rngs)
        self.up = normal_param((E, D, F), INIT_STD, blocks, rngs)
        self.up_bias = nnx.Param(jnp.zeros((E, 1, 1, F), blocks.param_dtype))
        self.down = normal_param((E, F, D), residual_std(blocks), blocks, rngs)
        self.down_bias = nnx.Param(jnp.zeros((E, 1, 1, D), blocks.param_dtype))

    def __call__(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """[B, T, D], before dropout and the residual sum, and the balance loss, a float32 scalar."""
        config, dtype = self.config, x_BTD.dtype
        wide = at_least_float32(dtype)
        # Small differences decide between experts: the router is not rounded to the compute dtype.
        logits_BTE = x_BTD.astype(wide) @ self.router[...].astype(wide)
        weight_BTES, balance = route(logits_BTE, config.top_k, config.slots)
        sits_BTES = (weight_BTES > 0).astype(dtype)
        x_EBSD = jnp.einsum("BTES,BTD->EBSD", sits_BTES, x_BTD)
        up_EBSF = jnp.einsum("EBSD,EDF->EBSF", x_EBSD, self.up[...].astype(dtype)) + self.up_bias[...].astype(dtype)
        hidden_EBSF = jax.nn.gelu(up_EBSF, approximate=True)
        down_EBSD = jnp.einsum("EBSF,EFD->EBSD", hidden_EBSF, self.down[...].astype(dtype))
        down_EBSD = down_EBSD + self.down_bias[...].astype(dtype)
        return jnp.einsum("BTES,EBSD->BTD", weight_BTES.astype(dtype), down_EBSD), balance


class MoEBlock(nnx.Module):
    """`parts.Block` with experts in the place of the MLP."""

    def __init__(self, config: MoEConfig, *, rngs: nnx.Rngs):
        self.config = config.blocks
        self.attention_norm = LayerNorm(config.blocks)
        self.attention = Attention(config.blocks, rngs=rngs)
        self.mlp_norm = LayerNorm(config.blocks)
        self.experts = Experts(config, rngs=rngs)

    def __call__(self, x_BTD: jax.Array, layer: jax.typing.ArrayLike, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        """[B, T, D] after layer number `layer`, and its balance loss; `key` is the step's, the same for all layers."""
        rate = self.config.dropout
        if rate or self.config.attention_dropout:
            key = jax.random.fold_in(key, layer)
        x_BTD = checkpoint_name(x_BTD, names.BLOCK_INPUT)
        normal_BTD = checkpoint_name(self.attention_norm(x_BTD), names.ATTENTION_NORM)
        out_BTD = self.attention(normal_BTD, fold_in_if(self.config.attention_dropout, key, 0))
        x_BTD = x_BTD + dropout(out_BTD, rate, fold_in_if(rate, key, 1))
        normal_BTD = checkpoint_name(self.mlp_norm(x_BTD), names.MLP_NORM)
        mixed_BTD, balance = self.experts(normal_BTD)
        return x_BTD + dropout(mixed_BTD, rate, fold_in_if(rate, key, 2)), balance


class MoETransformer(nnx.Module):
    """Tokens to logits, with the embedding as the logits' matrix; blocks are rematerialized under `policy`.

    As in `models.transformer.Transformer`, stack "scan" has one block with parameters of [L, ...] and "unroll" a
    list of them.
    """

    def __init__(self, config: MoEConfig, policy: str | Policy = "none", *, rngs: nnx.Rngs):
        self.config = blocks = config.blocks
        self.embedding = normal_param((blocks.vocabulary, blocks.width), INIT_STD, blocks, rngs)
        self.positions = normal_param((blocks.seq, blocks.width), INIT_STD, blocks, rngs)
        self.final_norm = LayerNorm(blocks)
        self.policy = policy
        block_class = remat(policy)(MoEBlock)
        self.blocks = make_blocks(lambda key: block_class(config, rngs=nnx.Rngs(params=key)), blocks, rngs)

    def __call__(self, tokens_BT: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Logits [B, T, V] in the compute dtype, and the mean balance loss; `key` is for all dropout of the step."""
        config = self.config
        with jax.named_scope("embedding"):
            x_BTD = (self.embedding[...][tokens_BT] + self.positions[...]).astype(config.compute_dtype)
            # The blocks fold in 0 to layers - 1.
            x_BTD = dropout(x_BTD, config.dropout, fold_in_if(config.dropout, key, config.layers))
        x_BTD, balance_L = run_blocks(
            self.blocks, config, x_BTD, lambda block, x, number: block(x, number, key), self.policy
        )
        x_BTD = self.final_norm(x_BTD)
        with jax.named_scope("head"):
            return x_BTD @ self.embedding[...].T.astype(x_BTD.dtype), balance_L.mean()


def build(config: MoEConfig, policy: str | Policy) -> Step:
    """The training step of the transformer that `config` describes, with blocks under `policy`."""
    definition, init_params = split_model(lambda key: MoETransformer(config, policy, rngs=nnx.Rngs(params=key)))

    def loss(params: Params, batch: Batch, key: jax.Array) -> jax.Array:
        logits_BTV, balance = nnx.merge(definition, params)(batch["inputs"], key)
        return cross_entropy(logits_BTV, batch["targets"]) + config.balance_weight * balance

    return build_step(config.blocks, init_params, loss)


def moe(
    policy: str | Policy,
    *,
    size: str = "gpt2-small-8e",
    experts: int | None = None,
    top_k: int | None = None,
    capacity_factor: float | None = None,
    balance_weight: float | None = None,
    layers: int | None = None,
    width: int | None = None,
    heads: int | None = None,
    mlp_width: int | None = None,
    vocabulary: int | None = None,
    seq: int | None = None,
    batch: int | None = None,
    dropout: float | None = None,
    attention_dropout: float | None = None,
    attention: str = "naive",
    stack: str = "scan",
    compute_dtype: str = "bfloat16",
    param_dtype: str = "float32",
    optimizer: str = "adamw",
    platform: str = "cpu",
) -> Step:
    """The training step of a GPT-2-like mixture of experts, `fn(state, batch, key) -> (state, loss)`.

    Args:
      policy: what its blocks keep for backward.
      size: a name of `SIZES`. It also gives the batch: 8 for GPT-2's sizes.
      experts, top_k, capacity_factor, balance_weight: fields of `MoEConfig`.

    The other options are fields of `TransformerConfig`; None takes the value of the size. Raises ConfigError.
    """
    config = configure(
        size,
        experts=experts,
        top_k=top_k,
        capacity_factor=capacity_factor,
        balance_weight=balance_weight,
        layers=layers,
        width=width,
        heads=heads,
        mlp_width=mlp_width,
        vocabulary=vocabulary,
        seq=seq,
        batch=batch,
        dropout=dropout,
        attention_dropout=attention_dropout,
        attention=attention,
        stack=stack,
        compute_dtype=compute_dtype,
        param_dtype=param_dtype,
        optimizer=optimizer,
        platform=platform,
    )
    return build(config, policy)
