"""GPT- and Llama-style transformers in Flax NNX, as workloads: `models.transformer:gpt` and `:llama`.

Shape suffixes: B batch, T sequence, D model width, V vocabulary, L layers.

The embedding is also the logits' matrix (tied) in GPT-2's and Megatron's models and in llama-1b; the other Llama
sizes have a matrix of their own. In style "gpt" there is a table of learned positions and a dropout after the
embedding.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx

from models.config import TransformerConfig, configure
from models.parts import (
    INIT_STD,
    Block,
    LayerNorm,
    RMSNorm,
    dropout,
    fold_in_if,
    make_blocks,
    normal_param,
    residual,
    run_blocks,
    whole,
)
from models.sharding import constrain, shardings, use
from models.train import Batch, Params, build_step, cross_entropy, split_model
from remat_kit import Policy, Step, remat


class Transformer(nnx.Module):
    """Tokens to logits; the blocks are rematerialized under `policy`.

    With `config.stack` "scan" there is one `Block` whose parameters are stacked [L, ...] and one traced body;
    with "unroll" there is a list of blocks. Both have the same initial values, see `stack_blocks`.
    """

    def __init__(self, config: TransformerConfig, policy: str | Policy = "none", *, rngs: nnx.Rngs):
        self.config = config
        self.embedding = normal_param((config.vocabulary, config.width), INIT_STD, config, rngs)
        gpt_style = config.style == "gpt"
        self.positions = normal_param((config.seq, config.width), INIT_STD, config, rngs) if gpt_style else None
        self.final_norm = (LayerNorm if gpt_style else RMSNorm)(config)
        self.head = None if config.tied else normal_param((config.width, config.vocabulary), INIT_STD, config, rngs)
        self.policy = policy
        block_class = remat(policy)(Block)
        self.blocks = make_blocks(lambda key: block_class(config, rngs=nnx.Rngs(params=key)), config, rngs)

    def __call__(self, tokens_BT: jax.Array, key: jax.Array) -> jax.Array:
        """Logits [B, T, V] in the compute dtype; `key` is a typed key for all dropout of the step."""
        x_BTD = self.embed(tokens_BT, key)
        x_BTD, _ = run_blocks(
            self.blocks, self.config, x_BTD, lambda block, x, number: (block(x, number, key), None), self.policy
        )
        x_BTD = whole(residual(self.final_norm(residual(x_BTD, self.config)), self.config))
        with jax.named_scope("head"):
            head_DV = self.embedding[...].T if self.head is None else self.head[...]
            head_DV = use(head_DV, x_BTD.dtype, "embed", "vocabulary")
            return constrain(x_BTD @ head_DV, "batch", "sequence", "vocabulary")

    def embed(self, tokens_BT: jax.Array, key: jax.Array) -> jax.Array:
        """The input of the first block, [B, T, D] in the compute dtype."""
        with jax.named_scope("embedding"):
            x_VD = use(self.embedding[...], self.embedding.dtype, "vocabulary", "embed")
            x_BTD = whole(x_VD[tokens_BT])  # a device looks up what is in its part, and the parts are summed
            if self.positions is not None:
                x_BTD = x_BTD + use(self.positions[...], self.positions.dtype, "sequence", "embed")
            x_BTD = residual(x_BTD.astype(self.config.compute_dtype), self.config)
            # The blocks fold in 0 to layers - 1.
            key = fold_in_if(self.config.dropout, key, self.config.layers)
            return dropout(x_BTD, self.config.dropout, key, self.config.flat_masks)


def stack_blocks(params: Params) -> Params:
    """Parameters for stack "scan" from those for "unroll": `params["blocks"]` becomes one tree of [L, ...]."""
    blocks = [params["blocks"][number] for number in sorted(params["blocks"])]
    return {**params, "blocks": jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks)}


def unstack_blocks(params: Params) -> Params:
    """Parameters for stack "unroll" from those for "scan": `params["blocks"]` becomes `{0: ..., 1: ..., ...}`."""
    layers = jax.tree.leaves(params["blocks"])[0].shape[0]
    blocks = {number: jax.tree.map(lambda leaf, i=number: leaf[i], params["blocks"]) for number in range(layers)}
    return {**params, "blocks": blocks}


def build(config: TransformerConfig, policy: str | Policy) -> Step:
    """The training step of the transformer that `config` describes, with blocks under `policy`."""
    definition, init_params = split_model(lambda key: Transformer(config, policy, rngs=nnx.Rngs(params=key)))

    def loss(params: Params, batch: Batch, key: jax.Array) -> jax.Array:
        model = nnx.merge(definition, params)
        return cross_entropy(model(batch["inputs"], key), batch["targets"])

    step = build_step(config, init_params, loss)
    return dataclasses.replace(step, shardings=functools.partial(shardings, config, step.args))


def gpt(
    policy: str | Policy,
    *,
    size: str = "gpt2-small",
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
    tied: bool | None = None,
    compute_dtype: str = "bfloat16",
    param_dtype: str = "float32",
    optimizer: str = "adamw",
    sequence_parallel: bool = False,
    flat_masks: bool = False,
    platform: str = "cpu",
) -> Step:
    """The training step of a GPT-2-like model, `fn(state, batch, key) -> (state, loss)`.

    Args:
      policy: what its blocks keep for backward.
      size: a name of `config.SIZES["gpt"]`. It also gives the batch: 8 for GPT-2's sizes.

    The other options are fields of `TransformerConfig`; None takes the value of the size. Raises ConfigError.
    """
    config = configure(
        "gpt",
        size,
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
        tied=tied,
        compute_dtype=compute_dtype,
        param_dtype=param_dtype,
        optimizer=optimizer,
        sequence_parallel=sequence_parallel,
        flat_masks=flat_masks,
        platform=platform,
    )
    return build(config, policy)


def llama(
    policy: str | Policy,
    *,
    size: str = "llama-1b",
    layers: int | None = None,
    width: int | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    mlp_width: int | None = None,
    vocabulary: int | None = None,
    seq: int | None = None,
    batch: int | None = None,
    dropout: float | None = None,
    attention_dropout: float | None = None,
    attention: str = "naive",
    stack: str = "scan",
    tied: bool | None = None,
    compute_dtype: str = "bfloat16",
    param_dtype: str = "float32",
    optimizer: str = "adamw",
    sequence_parallel: bool = False,
    flat_masks: bool = False,
    platform: str = "cpu",
) -> Step:
    """The training step of a Llama-like model, `fn(state, batch, key) -> (state, loss)`.

    Args:
      policy: what its blocks keep for backward.
      size: a name of `config.SIZES["llama"]`. It also gives the batch.

    The other options are fields of `TransformerConfig`; None takes the value of the size. Raises ConfigError.
    """
    config = configure(
        "llama",
        size,
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        mlp_width=mlp_width,
        vocabulary=vocabulary,
        seq=seq,
        batch=batch,
        dropout=dropout,
        attention_dropout=attention_dropout,
        attention=attention,
        stack=stack,
        tied=tied,
        compute_dtype=compute_dtype,
        param_dtype=param_dtype,
        optimizer=optimizer,
        sequence_parallel=sequence_parallel,
        flat_masks=flat_masks,
        platform=platform,
    )
    return build(config, policy)
