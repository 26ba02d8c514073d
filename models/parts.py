"""The parts of a transformer block, as NNX modules and as functions that the Linen model shares.

Shape suffixes:
  B batch, T sequence (of queries), S sequence (of keys), D model width, H query heads, K key/value heads,
  G query heads for each key/value head (H = K·G), C head width (H·C = D), E what a projection makes,
  F MLP width, L layers.

Parameters are kept in `config.param_dtype` and cast to `config.compute_dtype` where they are used, inside the
block: a rematerialized block casts its own layer again in backward, and no second copy of all layers is kept.
(Policy `none` does keep one, since the cast matrix is what a matmul's derivative needs.) Tags come after the
cast, so a saved value has 2 bytes an element in bfloat16. Normalization, softmax and rotary embedding are
computed in float32 and cast back.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from models.config import TransformerConfig
from models.sharding import apart, constrain, use
from remat_kit import Policy, get_policy, names, scan_stack, unroll_stack

EPSILON = 1e-5
"""Added to the variance in both normalizations."""

INIT_STD = 0.02
"""Standard deviation of initial weights; projections into the residual stream have it over sqrt(2·layers)."""


Axes = tuple[str | None, str | None]
"""Logical axes of a matrix, see `models.sharding`."""

INTO_HEADS, OUT_OF_HEADS = ("embed", "heads"), ("heads", "embed")
INTO_MLP, OUT_OF_MLP = ("embed", "mlp"), ("mlp", "embed")
HEADS, HIDDEN = ("batch", "sequence", "heads", None), ("batch", "sequence", "mlp")


def residual(x_BTD: jax.Array, config: TransformerConfig) -> jax.Array:
    """`x_BTD` itself, on a mesh cut as the residual stream is.

    Of a product with a matrix that is cut along its rows this is where its parts are summed: over tensor, an
    all-reduce, or a reduce-scatter with `sequence_parallel`. Of a norm it says that the cast comes before the gather.
    """
    return constrain(x_BTD, "batch", "residual_sequence", "embed", sequence_parallel=config.sequence_parallel)


def whole(x_BTD: jax.Array, sequence_parallel: bool = False) -> jax.Array:
    """`x_BTD` itself, on a mesh with every position and all of the width on each device of tensor.

    Before a matrix that is cut along its columns: an all-gather with `sequence_parallel`. Its gradient is summed over
    tensor here.
    """
    return constrain(apart(x_BTD) if sequence_parallel else x_BTD, "batch", "sequence", "embed")


def at_least_float32(dtype: jax.typing.DTypeLike) -> jnp.dtype:
    """The dtype for sums and exponentials of values of `dtype`."""
    return jnp.promote_types(dtype, jnp.float32)


def dropout(x: jax.Array, rate: float, key: jax.Array, flat: bool = False) -> jax.Array:
    """`x` with a share `rate` of its elements set to 0 and the others divided by `1 - rate`, of the same shape.

    Backward needs the mask only (`draw_mask`), one byte an element. Nothing is traced when `rate` is 0.
    """
    if rate == 0:
        return x
    keep = draw_mask(key, 1 - rate, x.shape, flat)
    return jnp.where(keep, x / (1 - rate), jnp.zeros((), x.dtype))


def rotary(x_BTHC: jax.Array, base: float) -> jax.Array:
    """`x_BTHC` with each pair (c, c + C/2) of position t turned by the angle t·base^(-2c/C). [B, T, H, C]"""
    T, C = x_BTHC.shape[1], x_BTHC.shape[3]
    dtype = at_least_float32(x_BTHC.dtype)
    frequency_C = base ** (-jnp.arange(0, C, 2, dtype=dtype) / C)
    angle_TC = jnp.arange(T, dtype=dtype)[:, None] * frequency_C
    cos_TC, sin_TC = jnp.cos(angle_TC)[:, None, :], jnp.sin(angle_TC)[:, None, :]
    first_BTHC, second_BTHC = jnp.split(x_BTHC.astype(dtype), 2, axis=-1)
    turned_BTHC = jnp.concatenate(
        [first_BTHC * cos_TC - second_BTHC * sin_TC, second_BTHC * cos_TC + first_BTHC * sin_TC], axis=-1
    )
    return turned_BTHC.astype(x_BTHC.dtype)


Drop = Callable[[jax.Array], jax.Array]
"""Dropout with everything but its input given."""


def naive_attention(
    q_BTHC: jax.Array, k_BSKC: jax.Array, v_BSKC: jax.Array, drop: Drop, causal: bool = True
) -> jax.Array:
    """Attention [B, T, H, C] with scores and probabilities as tensors of the program.

    Without a checkpoint, autodiff keeps 7 bytes for each element of [B, H, T, S] in bfloat16: the softmax in
    float32 (4), the dropped-out probabilities (2) and the mask (1). The 5 of Korthikanti et al. 2022 need a
    softmax that keeps its output in 16 bits.
    """
    B, T, H, C = q_BTHC.shape
    S, K = k_BSKC.shape[1:3]
    q_BTKGC = q_BTHC.reshape(B, T, K, H // K, C)
    scores_BHTS = jnp.einsum("BTKGC,BSKC->BKGTS", q_BTKGC, k_BSKC).reshape(B, H, T, S)
    scores_BHTS = constrain(scores_BHTS, "batch", "heads", "sequence", "sequence")
    scores_BHTS = checkpoint_name(scores_BHTS, names.SCORES)
    dtype = at_least_float32(scores_BHTS.dtype)
    # The mask is added, not selected by: addition keeps nothing for backward.
    mask_TS = jnp.where(jnp.tril(jnp.ones((T, S), bool)), 0, -jnp.inf).astype(dtype) if causal else None
    scaled_BHTS = scores_BHTS.astype(dtype) * C**-0.5
    weights_BHTS = jax.nn.softmax(scaled_BHTS if mask_TS is None else scaled_BHTS + mask_TS, axis=-1)
    weights_BHTS = checkpoint_name(drop(weights_BHTS.astype(v_BSKC.dtype)), names.PROBABILITIES)
    weights_BKGTS = weights_BHTS.reshape(B, K, H // K, T, S)
    return jnp.einsum("BKGTS,BSKC->BTKGC", weights_BKGTS, v_BSKC).reshape(B, T, H, C)


def fused_attention(
    q_BTHC: jax.Array, k_BSKC: jax.Array, v_BSKC: jax.Array, platform: str, causal: bool = True
) -> jax.Array:
    """Attention [B, T, H, C] in one operation: cuDNN's kernel on "cuda", plain XLA elsewhere; no dropout."""
    implementation = "cudnn" if platform == "cuda" else "xla"
    return jax.nn.dot_product_attention(q_BTHC, k_BSKC, v_BSKC, is_causal=causal, implementation=implementation)


def attend(q_BTHC: jax.Array, k_BSKC: jax.Array, v_BSKC: jax.Array, config: TransformerConfig, drop: Drop) -> jax.Array:
    """The context [B, T, H, C] of attention as `config` says; its inputs and itself are tagged."""
    q_BTHC = checkpoint_name(q_BTHC, names.QUERY)
    k_BSKC = checkpoint_name(k_BSKC, names.KEY)
    v_BSKC = checkpoint_name(v_BSKC, names.VALUE)
    if config.attention == "fused":
        context_BTHC = fused_attention(q_BTHC, k_BSKC, v_BSKC, config.platform, config.causal)
    else:
        context_BTHC = naive_attention(q_BTHC, k_BSKC, v_BSKC, drop, config.causal)
    return checkpoint_name(constrain(context_BTHC, *HEADS), names.CONTEXT)


def residual_std(config: TransformerConfig) -> float:
    """Standard deviation of initial weights of projections into the residual stream."""
    return INIT_STD / (2 * config.layers) ** 0.5


def normal_param(shape: tuple[int, ...], std: float, config: TransformerConfig, rngs: nnx.Rngs) -> nnx.Param:
    """A parameter with normally distributed initial values."""
    return nnx.Param(std * jax.random.normal(rngs.params(), shape, jnp.dtype(config.param_dtype)))


class LayerNorm(nnx.Module):
    """Zero mean and unit variance over the last axis, then scale and bias; statistics in float32."""

    def __init__(self, config: TransformerConfig):
        self.scale = nnx.Param(jnp.ones(config.width, config.param_dtype))
        self.bias = nnx.Param(jnp.zeros(config.width, config.param_dtype))

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """[B, T, D] of the same dtype."""
        wide_BTD = x_BTD.astype(at_least_float32(x_BTD.dtype))
        centred_BTD = wide_BTD - wide_BTD.mean(axis=-1, keepdims=True)
        variance_BT1 = jnp.square(centred_BTD).mean(axis=-1, keepdims=True)
        normal_BTD = centred_BTD * jax.lax.rsqrt(variance_BT1 + EPSILON)
        scale_D, bias_D = (use(each[...], each.dtype, "embed") for each in (self.scale, self.bias))
        return (normal_BTD * scale_D + bias_D).astype(x_BTD.dtype)


class RMSNorm(nnx.Module):
    """Unit mean square over the last axis, then scale; statistics in float32."""

    def __init__(self, config: TransformerConfig):
        self.scale = nnx.Param(jnp.ones(config.width, config.param_dtype))

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """[B, T, D] of the same dtype."""
        wide_BTD = x_BTD.astype(at_least_float32(x_BTD.dtype))
        square_BT1 = jnp.square(wide_BTD).mean(axis=-1, keepdims=True)
        scale_D = use(self.scale[...], self.scale.dtype, "embed")
        return (wide_BTD * jax.lax.rsqrt(square_BT1 + EPSILON) * scale_D).astype(x_BTD.dtype)


class Dense(nnx.Module):
    """`x @ kernel`, plus a bias in style "gpt". `axes` are the logical axes of the kernel, see `models.sharding`."""

    def __init__(self, inputs: int, outputs: int, config: TransformerConfig, std: float, axes: Axes, *, rngs: nnx.Rngs):
        self.axes = axes
        self.kernel = normal_param((inputs, outputs), std, config, rngs)
        self.bias = nnx.Param(jnp.zeros(outputs, config.param_dtype)) if config.style == "gpt" else None

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """[B, T, E] of the dtype of `x_BTD`."""
        y_BTE = x_BTD @ use(self.kernel[...], x_BTD.dtype, *self.axes)
        return y_BTE if self.bias is None else y_BTE + use(self.bias[...], x_BTD.dtype, self.axes[1])


class Attention(nnx.Module):
    """Self-attention with three separate projections for queries, keys and values."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.config = config
        kv_width = config.kv_heads * config.head_width
        self.query = Dense(config.width, config.width, config, INIT_STD, INTO_HEADS, rngs=rngs)
        self.key = Dense(config.width, kv_width, config, INIT_STD, INTO_HEADS, rngs=rngs)
        self.value = Dense(config.width, kv_width, config, INIT_STD, INTO_HEADS, rngs=rngs)
        self.out = Dense(config.width, config.width, config, residual_std(config), OUT_OF_HEADS, rngs=rngs)

    def __call__(self, x_BTD: jax.Array, key: jax.Array) -> jax.Array:
        """[B, T, D], before dropout and the residual sum; `key` is for dropout on the probabilities."""
        config = self.config
        B, T, _ = x_BTD.shape
        x_BTD = whole(x_BTD, config.sequence_parallel)
        q_BTHC, k_BTKC, v_BTKC = (
            constrain(project(x_BTD).reshape(B, T, -1, config.head_width), *HEADS)
            for project in (self.query, self.key, self.value)
        )
        if config.style == "llama":
            q_BTHC = rotary(q_BTHC, config.rotary_base)
            k_BTKC = rotary(k_BTKC, config.rotary_base)
        drop = partial(dropout, rate=config.attention_dropout, key=key, flat=config.flat_masks)
        context_BTHC = attend(q_BTHC, k_BTKC, v_BTKC, config, drop)
        out_BTD = residual(self.out(context_BTHC.reshape(B, T, config.width)), config)
        return checkpoint_name(out_BTD, names.OUT)


class MLP(nnx.Module):
    """Two projections with GELU (the tanh form of GPT-2) between them."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.up = Dense(config.width, config.mlp_width, config, INIT_STD, INTO_MLP, rngs=rngs)
        self.down = Dense(config.mlp_width, config.width, config, residual_std(config), OUT_OF_MLP, rngs=rngs)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """[B, T, D], before dropout and the residual sum."""
        up_BTF = checkpoint_name(constrain(self.up(whole(x_BTD, self.config.sequence_parallel)), *HIDDEN), names.MLP_UP)
        hidden_BTF = checkpoint_name(constrain(jax.nn.gelu(up_BTF, approximate=True), *HIDDEN), names.MLP_HIDDEN)
        return checkpoint_name(residual(self.down(hidden_BTF), self.config), names.MLP_DOWN)


class GatedMLP(nnx.Module):
    """SwiGLU: three projections, SiLU of the gate times the up projection between them."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.gate = Dense(config.width, config.mlp_width, config, INIT_STD, INTO_MLP, rngs=rngs)
        self.config = config
        self.up = Dense(config.width, config.mlp_width, config, INIT_STD, INTO_MLP, rngs=rngs)
        self.down = Dense(config.mlp_width, config.width, config, residual_std(config), OUT_OF_MLP, rngs=rngs)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """[B, T, D], before dropout and the residual sum."""
        x_BTD = whole(x_BTD, self.config.sequence_parallel)
        gate_BTF = checkpoint_name(constrain(self.gate(x_BTD), *HIDDEN), names.MLP_GATE)
        up_BTF = checkpoint_name(constrain(self.up(x_BTD), *HIDDEN), names.MLP_GATED_UP)
        hidden_BTF = checkpoint_name(constrain(jax.nn.silu(gate_BTF) * up_BTF, *HIDDEN), names.MLP_HIDDEN)
        return checkpoint_name(residual(self.down(hidden_BTF), self.config), names.MLP_DOWN)


class Block(nnx.Module):
    """One pre-norm layer: attention and MLP, each normalized before and added to the residual stream after.

    The dropout keys are made inside, from the step's key and the layer's number. A key for each layer, made
    outside, would be one more value to keep for backward.
    """

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.config = config
        norm = LayerNorm if config.style == "gpt" else RMSNorm
        mlp = MLP if config.style == "gpt" else GatedMLP
        self.attention_norm = norm(config)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = norm(config)
        self.mlp = mlp(config, rngs=rngs)

    def __call__(self, x_BTD: jax.Array, layer: jax.typing.ArrayLike, key: jax.Array) -> jax.Array:
        """[B, T, D] after layer number `layer` (a scalar integer); `key` is the step's, the same for all layers."""
        rate = self.config.dropout
        if rate or self.config.attention_dropout:
            key = jax.random.fold_in(key, layer)
        x_BTD = checkpoint_name(residual(x_BTD, self.config), names.BLOCK_INPUT)
        normal_BTD = checkpoint_name(residual(self.attention_norm(x_BTD), self.config), names.ATTENTION_NORM)
        out_BTD = self.attention(normal_BTD, fold_in_if(self.config.attention_dropout, key, 0))
        x_BTD = x_BTD + dropout(out_BTD, rate, fold_in_if(rate, key, 1), self.config.flat_masks)
        normal_BTD = checkpoint_name(residual(self.mlp_norm(x_BTD), self.config), names.MLP_NORM)
        return x_BTD + dropout(self.mlp(normal_BTD), rate, fold_in_if(rate, key, 2), self.config.flat_masks)


def fold_in_if(rate: float, key: jax.Array, number: int) -> jax.Array:
    """The key for one of several dropouts, or `key` itself when `rate` is 0 and the key will not be used."""
    return jax.random.fold_in(key, number) if rate else key


def make_blocks(create: Callable[[jax.Array], nnx.Module], config: TransformerConfig, rngs: nnx.Rngs) -> nnx.Module:
    """`config.layers` blocks of `create(key)`, with the same initial values in both stacks.

    In stack "scan" they are one block whose parameters are stacked along a leading axis of layers, else a list.
    """
    keys_L = jax.random.split(rngs.params(), config.layers)
    return nnx.vmap(create)(keys_L) if config.stack == "scan" else nnx.List(map(create, keys_L))


def over_stack(policy: object) -> Policy | None:
    """`policy` where it is one for stacks, else None: others, and plans, are put around the blocks themselves."""
    chosen = get_policy(policy) if isinstance(policy, str | Policy) else None
    return chosen if chosen is not None and chosen.layering else None


def run_blocks(
    blocks: nnx.Module,
    config: TransformerConfig,
    x_BTD: jax.Array,
    call: Callable[[Any, jax.Array, Any], Any],
    policy: object = "none",
) -> tuple[jax.Array, Any]:
    """The output of the last of the blocks of `make_blocks` [B, T, D], and what each gave beside it, stacked.

    `call(block, x_BTD, number)` is a block's output and a pytree (or None) beside it; blocks count from 0. `policy` is
    what the blocks were wrapped with: one for stacks leaves them as they are and acts here.
    """
    over = over_stack(policy) or "none"
    if config.stack == "scan":
        definition, stacked = nnx.split(blocks)

        def body(x_BTD: jax.Array, layer: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
            number, state = layer
            return call(nnx.merge(definition, state), x_BTD, number)

        numbers_L = jnp.arange(config.layers, dtype=jnp.uint32)
        return scan_stack(over, body, x_BTD, (numbers_L, nnx.as_pure(stacked)))

    assert isinstance(blocks, nnx.List)
    layers = [(np.uint32(number), block) for number, block in enumerate(blocks)]
    x_BTD, beside = unroll_stack(over, lambda x_BTD, layer: call(layer[1], x_BTD, layer[0]), x_BTD, layers)
    return x_BTD, jax.tree.map(lambda *leaves: jnp.stack(leaves), *beside)


def draw_mask(key: jax.Array, share: float, shape: tuple[int, ...], flat: bool) -> jax.Array:
    """Booleans of a shape, `share` of them true.

    With `flat` they are drawn with their last two axes as one: the same booleans, but XLA's layout assignment cannot
    transpose half way through their random bits, which then take one kernel where they are made again.
    """
    drawn = (*shape[:-2], shape[-2] * shape[-1]) if flat else shape
    return jax.random.bernoulli(key, share, drawn).reshape(shape)
