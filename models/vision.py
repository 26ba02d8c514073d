"""A Vision Transformer in Flax NNX for images of high resolution, as the workload `models.vision:vit`.

Shape suffixes:
  B batch, Y image rows, X image columns, C image channels, N patches (the sequence of the blocks), P values of a
  patch (patch·patch·C), D model width, K classes, L layers.

The encoder of Dosovitskiy et al. 2021 (arXiv 2010.11929) as Beyer et al. 2022 (arXiv 2205.01580) simplify it: the
mean of all patches is classified, so there is no class token, and a square image is (image / patch)² positions: 4,096
of 1024 x 1024 pixels in patches of 16. Its blocks are those of `models.parts` in style "gpt", without a causal mask.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from models.config import ConfigError, TransformerConfig, check_whole, check_word, complete, given
from models.parts import (
    INIT_STD,
    Block,
    Dense,
    LayerNorm,
    dropout,
    fold_in_if,
    make_blocks,
    normal_param,
    run_blocks,
)
from models.train import Batch, Params, cross_entropy, split_model, step_of
from remat_kit import Policy, Step, remat


@dataclass(frozen=True)
class VisionConfig:
    """A Vision Transformer and the shape of its batch.

    Attributes:
      image: pixels of a square image's side.
      patch: pixels of a square patch's side; the image is a whole number of them.
      channels: of a pixel.
      classes: number of labels.
      blocks: the encoder, with as many positions as an image has patches and a vocabulary of classes; the fields of
        a step's shape and of how it is written down for XLA are there, too.
    """

    image: int
    patch: int
    channels: int
    classes: int
    blocks: TransformerConfig

    def __post_init__(self) -> None:
        assert self.blocks.seq == (self.image // self.patch) ** 2
        assert not self.blocks.causal


def _vit(layers: int, width: int, heads: int, patch: int, image: int, batch: int) -> Mapping[str, Any]:
    return {"layers": layers, "width": width, "heads": heads, "patch": patch, "image": image, "batch": batch}


SIZES: Mapping[str, Mapping[str, Any]] = {
    "tiny": {**_vit(2, 64, 4, 8, 32, 2), "classes": 10},
    # Dosovitskiy et al. 2021, table 1, on images of about a thousand pixels a side.
    "vit-b16": _vit(12, 768, 12, 16, 1024, 8),
    "vit-l16": _vit(24, 1024, 16, 16, 1024, 4),
    "vit-l14": _vit(24, 1024, 16, 14, 1008, 4),
    "vit-h14": _vit(32, 1280, 16, 14, 1008, 2),
}
"""Named sizes; the patch is in the name. What a size does not give follows from the others, see `configure`."""


def configure(size: str, **overrides: Any) -> VisionConfig:
    """The configuration of a named size with some values changed; an override of None changes nothing.

    What neither the size nor an override gives: `channels = 3`, `classes = 1000`, `dropout = 0`, and the rest as
    `models.config.configure` has it for style "gpt".

    Raises ConfigError for an unknown size, and for values that do not go together.
    """
    check_word("size", size, SIZES, what="a size of vit")
    chosen = {"channels": 3, "classes": 1000, "dropout": 0.0} | {**SIZES[size]} | given(overrides)
    image, patch, channels, classes = (chosen.pop(name) for name in ("image", "patch", "channels", "classes"))
    for name, value in {"image": image, "patch": patch, "channels": channels, "classes": classes}.items():
        check_whole(name, value)
    if image % patch:
        raise ConfigError(
            f"image {image} is not a multiple of patch {patch}. An image is a whole number of patches: change one of "
            f"them, e.g. image={patch * -(-image // patch)}."
        )
    shape = {"seq": (image // patch) ** 2, "vocabulary": classes, "causal": False}
    return VisionConfig(image, patch, channels, classes, complete("gpt", chosen | shape))


def to_patches(image_BYXC: jax.Array, patch: int) -> jax.Array:
    """[B, N, P]: squares of `patch` x `patch` pixels, row after row, each with its pixels row after row."""
    B, Y, X, C = image_BYXC.shape
    rows, columns = Y // patch, X // patch
    squares = image_BYXC.reshape(B, rows, patch, columns, patch, C).transpose(0, 1, 3, 2, 4, 5)
    return squares.reshape(B, rows * columns, patch * patch * C)


class VisionTransformer(nnx.Module):
    """Images to logits; the blocks are rematerialized under `policy`.

    As in `models.transformer.Transformer`, stack "scan" has one `Block` with parameters of [L, ...] and "unroll" a
    list of them.
    """

    def __init__(self, config: VisionConfig, policy: str | Policy = "none", *, rngs: nnx.Rngs):
        self.config = config
        blocks = config.blocks
        self.embedding = Dense(
            config.patch**2 * config.channels, blocks.width, blocks, INIT_STD, (None, "embed"), rngs=rngs
        )
        self.positions = normal_param((blocks.seq, blocks.width), INIT_STD, blocks, rngs)
        self.final_norm = LayerNorm(blocks)
        self.head = Dense(blocks.width, config.classes, blocks, INIT_STD, ("embed", None), rngs=rngs)
        self.policy = policy
        block_class = remat(policy)(Block)
        self.blocks = make_blocks(lambda key: block_class(blocks, rngs=nnx.Rngs(params=key)), blocks, rngs)

    def __call__(self, image_BYXC: jax.Array, key: jax.Array) -> jax.Array:
        """Logits [B, K] in the compute dtype; `key` is a typed key for all dropout of the step."""
        config = self.config.blocks
        patch_BNP = to_patches(image_BYXC.astype(config.compute_dtype), self.config.patch)
        x_BND = self.embedding(patch_BNP) + self.positions[...].astype(config.compute_dtype)
        # The blocks fold in 0 to layers - 1.
        x_BND = dropout(x_BND, config.dropout, fold_in_if(config.dropout, key, config.layers))
        x_BND, _ = run_blocks(
            self.blocks, config, x_BND, lambda block, x, number: (block(x, number, key), None), self.policy
        )
        return self.head(self.final_norm(x_BND).mean(axis=1))


def build(config: VisionConfig, policy: str | Policy) -> Step:
    """The training step of the model that `config` describes, with blocks under `policy`."""
    definition, init_params = split_model(lambda key: VisionTransformer(config, policy, rngs=nnx.Rngs(params=key)))

    def make_batch(key: jax.Array) -> Batch:
        image_key, class_key = jax.random.split(key)
        batch, side = config.blocks.batch, config.image
        image_BYXC = jax.random.normal(image_key, (batch, side, side, config.channels), jnp.float32)
        class_B = jax.random.randint(class_key, (batch,), 0, config.classes, jnp.int32)
        return {"images": image_BYXC, "classes": class_B}

    def loss(params: Params, batch: Batch, key: jax.Array) -> jax.Array:
        model = nnx.merge(definition, params)
        return cross_entropy(model(batch["images"], key), batch["classes"])

    return step_of(config.blocks.optimizer, init_params, make_batch, loss, {"images": config.blocks.batch})


def vit(
    policy: str | Policy,
    *,
    size: str = "vit-b16",
    image: int | None = None,
    patch: int | None = None,
    channels: int | None = None,
    classes: int | None = None,
    layers: int | None = None,
    width: int | None = None,
    heads: int | None = None,
    mlp_width: int | None = None,
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
    """The training step of a Vision Transformer, `fn(state, batch, key) -> (state, loss)`.

    The batch is `{"images": [B, Y, X, C] float32, "classes": [B] int32}`.

    Args:
      policy: what its blocks keep for backward.
      size: a name of `SIZES`. It also gives image and batch: 8 images of 1024 x 1024 for vit-b16.
      image, patch, channels, classes: fields of `VisionConfig`.

    The other options are fields of `TransformerConfig`; None takes the value of the size. Raises ConfigError.
    """
    config = configure(
        size,
        image=image,
        patch=patch,
        channels=channels,
        classes=classes,
        layers=layers,
        width=width,
        heads=heads,
        mlp_width=mlp_width,
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
