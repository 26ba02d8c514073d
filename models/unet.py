"""A convolutional U-Net in Flax NNX, as used for diffusion and segmentation: the workload `models.unet:unet`.

Shape suffixes:
  B batch, Y rows, X columns, C channels (I of an input, O of an output), G groups of channels.

The residual blocks of Ho et al. 2020 (arXiv 2006.11239) without attention and without an embedding of time: on each
level some blocks, then half the resolution and twice the channels; on the way up the same in reverse, each block with
the output of its counterpart beside its input. No two neighbouring blocks have the same shapes, so they are a list.

No tensor is tagged: a policy has only primitives to go by, and one that goes by names alone is refused. Whatever the
policy, backward has the input of every block, so what crosses from the way down to the way up is there twice: as it was
made, and beside the other input of the block that it crosses to.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from models.config import DTYPES, OPTIMIZERS, ConfigError, check_whole, check_word, given
from models.parts import EPSILON, at_least_float32
from models.train import Batch, Params, split_model, step_of
from remat_kit import Policy, Step, remat


@dataclass(frozen=True)
class UNetConfig:
    """A U-Net, the shape of its batch, and its types.

    Attributes:
      image: pixels of a square image's side, a multiple of 2^(levels - 1).
      channels: of the image and of what is predicted.
      width: channels of the first level; level l has `width * 2^l`.
      levels: number of resolutions, each half of the one before.
      blocks: residual blocks on each level, on the way down as on the way up.
      groups: of channels that are normalized together; `width` is a multiple of it.
      batch: images in a step.
      compute_dtype: of activations, and of parameters where they are used.
      param_dtype: of the parameters that the optimizer updates, and of its moments.
      optimizer: "adamw" or "sgd" (no state per parameter).
    """

    image: int
    channels: int
    width: int
    levels: int
    blocks: int
    groups: int
    batch: int
    compute_dtype: str = "bfloat16"
    param_dtype: str = "float32"
    optimizer: str = "adamw"

    def __post_init__(self) -> None:
        check_word("compute_dtype", self.compute_dtype, DTYPES)
        check_word("param_dtype", self.param_dtype, DTYPES)
        check_word("optimizer", self.optimizer, OPTIMIZERS)
        for name in ("image", "channels", "width", "levels", "blocks", "groups", "batch"):
            check_whole(name, getattr(self, name))
        if self.width % self.groups:
            raise ConfigError(
                f"width {self.width} is not a multiple of groups {self.groups}. Every group has the same number of "
                f"channels: change one of them, e.g. width={self.groups * -(-self.width // self.groups)}."
            )
        smallest = 2 ** (self.levels - 1)
        if self.image % smallest:
            raise ConfigError(
                f"image {self.image} is not a multiple of {smallest}. With levels {self.levels} its side is halved "
                f"{self.levels - 1} times: change one of them, e.g. image={smallest * -(-self.image // smallest)}."
            )

    def width_of(self, level: int) -> int:
        """Channels of level number `level`, 0 being the full resolution."""
        return self.width * 2**level


def _unet(image: int, width: int, levels: int, blocks: int, batch: int, groups: int = 32) -> Mapping[str, Any]:
    return {"image": image, "width": width, "levels": levels, "blocks": blocks, "batch": batch, "groups": groups}


SIZES: Mapping[str, Mapping[str, Any]] = {
    "tiny": _unet(16, 8, 2, 1, 2, groups=4),
    "small": _unet(256, 64, 4, 2, 8),
    "base": _unet(256, 128, 4, 2, 8),
    "large": _unet(512, 192, 4, 3, 4),
}
"""Named sizes, with 3 channels."""


def configure(size: str, **overrides: Any) -> UNetConfig:
    """The configuration of a named size with some values changed; an override of None changes nothing.

    Raises ConfigError for an unknown size or field, and for values that do not go together.
    """
    check_word("size", size, SIZES, what="a size of unet")
    fields = {field.name for field in dataclasses.fields(UNetConfig)}
    for name in overrides:
        check_word("option", name, fields, what="an option of UNetConfig")
    chosen: dict[str, Any] = {"channels": 3} | {**SIZES[size]} | given(overrides)
    return UNetConfig(**chosen)


class Conv(nnx.Module):
    """A square convolution with bias that keeps the size of an image, or divides it by `stride`."""

    def __init__(
        self, inputs: int, outputs: int, config: UNetConfig, *, rngs: nnx.Rngs, window: int = 3, stride: int = 1
    ):
        self.stride = stride
        shape, std = (window, window, inputs, outputs), (window * window * inputs) ** -0.5
        self.kernel = nnx.Param(std * jax.random.normal(rngs.params(), shape, jnp.dtype(config.param_dtype)))
        self.bias = nnx.Param(jnp.zeros(outputs, config.param_dtype))

    def __call__(self, x_BYXI: jax.Array) -> jax.Array:
        """[B, Y / stride, X / stride, O] of the dtype of `x_BYXI`."""
        kernel, bias = self.kernel[...].astype(x_BYXI.dtype), self.bias[...].astype(x_BYXI.dtype)
        strides, layout = (self.stride, self.stride), ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x_BYXI, kernel, strides, "SAME", dimension_numbers=layout) + bias


class GroupNorm(nnx.Module):
    """Zero mean and unit variance over an image's pixels and each group of channels, then scale and bias.

    Statistics are in float32.
    """

    def __init__(self, channels: int, config: UNetConfig):
        self.groups = config.groups
        self.scale = nnx.Param(jnp.ones(channels, config.param_dtype))
        self.bias = nnx.Param(jnp.zeros(channels, config.param_dtype))

    def __call__(self, x_BYXC: jax.Array) -> jax.Array:
        """[B, Y, X, C] of the same dtype."""
        B, Y, X, C = x_BYXC.shape
        grouped = x_BYXC.astype(at_least_float32(x_BYXC.dtype)).reshape(B, Y, X, self.groups, C // self.groups)
        centred = grouped - grouped.mean(axis=(1, 2, 4), keepdims=True)
        variance_B11G1 = jnp.square(centred).mean(axis=(1, 2, 4), keepdims=True)
        normal_BYXC = (centred * jax.lax.rsqrt(variance_B11G1 + EPSILON)).reshape(B, Y, X, C)
        return (normal_BYXC * self.scale[...] + self.bias[...]).astype(x_BYXC.dtype)


class ResidualBlock(nnx.Module):
    """Normalization, SiLU and convolution, twice, added to the input; a 1 x 1 convolution fits the input's channels."""

    def __init__(self, inputs: int, outputs: int, config: UNetConfig, *, rngs: nnx.Rngs):
        self.first_norm = GroupNorm(inputs, config)
        self.first_conv = Conv(inputs, outputs, config, rngs=rngs)
        self.second_norm = GroupNorm(outputs, config)
        self.second_conv = Conv(outputs, outputs, config, rngs=rngs)
        self.shortcut = None if inputs == outputs else Conv(inputs, outputs, config, rngs=rngs, window=1)

    def __call__(self, x_BYXI: jax.Array) -> jax.Array:
        """[B, Y, X, O] of the same dtype."""
        hidden_BYXO = self.first_conv(jax.nn.silu(self.first_norm(x_BYXI)))
        out_BYXO = self.second_conv(jax.nn.silu(self.second_norm(hidden_BYXO)))
        return out_BYXO + (x_BYXI if self.shortcut is None else self.shortcut(x_BYXI))


def enlarge(x_BYXC: jax.Array) -> jax.Array:
    """[B, 2Y, 2X, C]: each pixel four times."""
    B, Y, X, C = x_BYXC.shape
    return jnp.broadcast_to(x_BYXC[:, :, None, :, None, :], (B, Y, 2, X, 2, C)).reshape(B, 2 * Y, 2 * X, C)


class UNet(nnx.Module):
    """Images to images of the same shape; the residual blocks are rematerialized under `policy`.

    `encoder` and `decoder` hold the residual blocks in the order in which they run, `config.blocks` for each level.
    """

    def __init__(self, config: UNetConfig, policy: str | Policy = "none", *, rngs: nnx.Rngs):
        self.config = config
        block_class = remat(policy)(ResidualBlock)
        encoder, reducers, decoder, enlargers = [], [], [], []
        self.stem = Conv(config.channels, config.width, config, rngs=rngs)
        width = config.width
        for level in range(config.levels):
            for _ in range(config.blocks):
                encoder.append(block_class(width, config.width_of(level), config, rngs=rngs))
                width = config.width_of(level)
            if level < config.levels - 1:
                reducers.append(Conv(width, width, config, rngs=rngs, stride=2))
        self.middle = block_class(width, width, config, rngs=rngs)
        for level in reversed(range(config.levels)):
            for _ in range(config.blocks):
                both = width + config.width_of(level)
                width = config.width_of(level)
                decoder.append(block_class(both, width, config, rngs=rngs))
            if level > 0:
                enlargers.append(Conv(width, width, config, rngs=rngs))
        self.encoder, self.reducers = nnx.List(encoder), nnx.List(reducers)
        self.decoder, self.enlargers = nnx.List(decoder), nnx.List(enlargers)
        self.final_norm = GroupNorm(width, config)
        self.head = Conv(width, config.channels, config, rngs=rngs)

    def __call__(self, image_BYXC: jax.Array) -> jax.Array:
        """What is predicted, [B, Y, X, C] in the compute dtype."""
        config, skips = self.config, []
        x_BYXC = self.stem(image_BYXC.astype(config.compute_dtype))
        for number, block in enumerate(self.encoder):
            if number and number % config.blocks == 0:
                x_BYXC = self.reducers[number // config.blocks - 1](x_BYXC)
            x_BYXC = block(x_BYXC)
            skips.append(x_BYXC)
        x_BYXC = self.middle(x_BYXC)
        for number, block in enumerate(self.decoder):
            if number and number % config.blocks == 0:
                x_BYXC = self.enlargers[number // config.blocks - 1](enlarge(x_BYXC))
            x_BYXC = block(jnp.concatenate([x_BYXC, skips.pop()], axis=-1))
        return self.head(jax.nn.silu(self.final_norm(x_BYXC)))


def squared_error(predicted_BYXC: jax.Array, target_BYXC: jax.Array) -> jax.Array:
    """Mean over all elements of the squared difference, a float32 scalar."""
    wide_BYXC = predicted_BYXC.astype(at_least_float32(predicted_BYXC.dtype))
    return jnp.square(wide_BYXC - target_BYXC).mean()


def build(config: UNetConfig, policy: str | Policy) -> Step:
    """The training step of the U-Net that `config` describes, with residual blocks under `policy`."""
    definition, init_params = split_model(lambda key: UNet(config, policy, rngs=nnx.Rngs(params=key)))

    def make_batch(key: jax.Array) -> Batch:
        shape = (config.batch, config.image, config.image, config.channels)
        clean_BYXC, noise_BYXC = jax.random.normal(key, (2, *shape), jnp.float32)
        return {"inputs": (clean_BYXC + noise_BYXC) * 0.5**0.5, "targets": noise_BYXC}

    def loss(params: Params, batch: Batch, key: jax.Array) -> jax.Array:
        del key  # nothing is dropped
        model = nnx.merge(definition, params)
        return squared_error(model(batch["inputs"]), batch["targets"])

    return step_of(config.optimizer, init_params, make_batch, loss, {"images": config.batch})


def unet(
    policy: str | Policy,
    *,
    size: str = "base",
    image: int | None = None,
    channels: int | None = None,
    width: int | None = None,
    levels: int | None = None,
    blocks: int | None = None,
    groups: int | None = None,
    batch: int | None = None,
    compute_dtype: str = "bfloat16",
    param_dtype: str = "float32",
    optimizer: str = "adamw",
) -> Step:
    """The training step of a U-Net that predicts the noise in an image, `fn(state, batch, key) -> (state, loss)`.

    The batch is `{"inputs": [B, Y, X, C], "targets": [B, Y, X, C]}`, float32; the key is not used.

    Args:
      policy: what its residual blocks keep for backward; a policy of tensor names finds none here.
      size: a name of `SIZES`. It also gives image and batch: 8 images of 256 x 256 for base.

    The other options are fields of `UNetConfig`; None takes the value of the size. Raises ConfigError.
    """
    config = configure(
        size,
        image=image,
        channels=channels,
        width=width,
        levels=levels,
        blocks=blocks,
        groups=groups,
        batch=batch,
        compute_dtype=compute_dtype,
        param_dtype=param_dtype,
        optimizer=optimizer,
    )
    return build(config, policy)
