"""The GPT-style transformer of `models.transformer` in Flax Linen: the workload `models.linen:gpt_linen`.

Shape suffixes: B batch, T sequence, D model width, H heads, C head width (H·C = D), F MLP width, V vocabulary.

Modules are named by Linen itself, dropout draws from Linen's "dropout" stream, and the layers are stacked by
`nn.scan` or called one after another: what a policy has to leave as it is.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from models.config import ConfigError, TransformerConfig, configure
from models.parts import EPSILON, INIT_STD, attend, over_stack, residual_std
from models.train import Batch, Params, build_step, cross_entropy
from remat_kit import Policy, Step, names, remat, remat_scan, unroll_stack


def _dense(config: TransformerConfig, features: int, std: float) -> nn.Dense:
    dtype, param_dtype = jnp.dtype(config.compute_dtype), jnp.dtype(config.param_dtype)
    return nn.Dense(features, dtype=dtype, param_dtype=param_dtype, kernel_init=nn.initializers.normal(std))


def _norm(config: TransformerConfig) -> nn.LayerNorm:
    dtype, param_dtype = jnp.dtype(config.compute_dtype), jnp.dtype(config.param_dtype)
    return nn.LayerNorm(EPSILON, dtype=dtype, param_dtype=param_dtype)


class Attention(nn.Module):
    """Causal self-attention with three separate projections for queries, keys and values."""

    config: TransformerConfig

    @nn.compact
    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """[B, T, D], before dropout and the residual sum."""
        config = self.config
        B, T, D = x_BTD.shape
        q_BTHC, k_BTHC, v_BTHC = (
            _dense(config, D, INIT_STD)(x_BTD).reshape(B, T, config.heads, config.head_width) for _ in range(3)
        )
        drop = nn.Dropout(config.attention_dropout, deterministic=False)
        context_BTHC = attend(q_BTHC, k_BTHC, v_BTHC, config, drop)
        return checkpoint_name(_dense(config, D, residual_std(config))(context_BTHC.reshape(B, T, D)), names.OUT)


class MLP(nn.Module):
    """Two projections with GELU (the tanh form of GPT-2) between them."""

    config: TransformerConfig

    @nn.compact
    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """[B, T, D], before dropout and the residual sum."""
        config = self.config
        up_BTF = checkpoint_name(_dense(config, config.mlp_width, INIT_STD)(x_BTD), names.MLP_UP)
        hidden_BTF = checkpoint_name(nn.gelu(up_BTF, approximate=True), names.MLP_HIDDEN)
        return checkpoint_name(_dense(config, config.width, residual_std(config))(hidden_BTF), names.MLP_DOWN)


class Block(nn.Module):
    """One pre-norm layer."""

    config: TransformerConfig

    @nn.compact
    def __call__(self, x_BTD: jax.Array, _: None = None) -> tuple[jax.Array, None]:
        """[B, T, D] and None, the carry and the output of one turn of `nn.scan`."""
        config = self.config
        x_BTD = checkpoint_name(x_BTD, names.BLOCK_INPUT)
        normal_BTD = checkpoint_name(_norm(config)(x_BTD), names.ATTENTION_NORM)
        x_BTD = x_BTD + nn.Dropout(config.dropout, deterministic=False)(Attention(config)(normal_BTD))
        normal_BTD = checkpoint_name(_norm(config)(x_BTD), names.MLP_NORM)
        return x_BTD + nn.Dropout(config.dropout, deterministic=False)(MLP(config)(normal_BTD)), None


class Transformer(nn.Module):
    """Tokens to logits, with the embedding as the logits' matrix; blocks are rematerialized under `policy`."""

    config: TransformerConfig
    policy: str | Policy = "none"

    @nn.compact
    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        """Logits [B, T, V] in the compute dtype."""
        config = self.config
        dtype, param_dtype = jnp.dtype(config.compute_dtype), jnp.dtype(config.param_dtype)
        init = nn.initializers.normal(INIT_STD)
        embed = nn.Embed(config.vocabulary, config.width, dtype=dtype, param_dtype=param_dtype, embedding_init=init)
        positions_TD = self.param("positions", init, (config.seq, config.width), param_dtype)
        x_BTD = embed(tokens_BT) + positions_TD.astype(dtype)
        x_BTD = nn.Dropout(config.dropout, deterministic=False)(x_BTD)
        block = remat(self.policy)(Block)
        over = over_stack(self.policy)
        if config.stack == "scan":
            stacked = nn.scan(
                block,
                variable_axes={"params": 0},
                split_rngs={"params": True, "dropout": True},
                length=config.layers,
            )
            run = remat_scan(over)(stacked(config)) if over else stacked(config)
            x_BTD, _ = run(x_BTD, None)
        elif over:
            blocks = [block(config) for _ in range(config.layers)]
            x_BTD, _ = unroll_stack(over, lambda x_BTD, block: block(x_BTD, None), x_BTD, blocks)
        else:
            for _ in range(config.layers):
                x_BTD, _ = block(config)(x_BTD, None)
        return embed.attend(_norm(config)(x_BTD))


def build(config: TransformerConfig, policy: str | Policy) -> Step:
    """The training step of the transformer that `config` describes, with blocks under `policy`."""
    if config.style != "gpt" or not config.tied:
        raise ConfigError(
            f"the Linen model got style {config.style} with tied={config.tied}. It is written for style gpt with a "
            "tied head: use models.transformer for the others."
        )
    model = Transformer(config, policy)

    def init_params(key: jax.Array) -> Params:
        # One short sequence would do for shapes; the positions need all of it.
        tokens_BT = jnp.zeros((1, config.seq), jnp.int32)
        return model.init({"params": key, "dropout": key}, tokens_BT)["params"]

    def loss(params: Params, batch: Batch, key: jax.Array) -> jax.Array:
        logits_BTV = model.apply({"params": params}, batch["inputs"], rngs={"dropout": key})
        assert isinstance(logits_BTV, jax.Array)
        return cross_entropy(logits_BTV, batch["targets"])

    return build_step(config, init_params, loss)


def gpt_linen(
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
    compute_dtype: str = "bfloat16",
    param_dtype: str = "float32",
    optimizer: str = "adamw",
    platform: str = "cpu",
) -> Step:
    """The training step of a GPT-2-like Linen model, `fn(state, batch, key) -> (state, loss)`.

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
        compute_dtype=compute_dtype,
        param_dtype=param_dtype,
        optimizer=optimizer,
        platform=platform,
    )
    return build(config, policy)
