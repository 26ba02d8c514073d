"""The Vision Transformer is the model that it is named after, and a workload like the others."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from model_checks import (
    assert_close,
    assert_same_gradients,
    count_params,
    gradients,
    initial_values,
    jit,
    losses,
    record_for_gpu,
    work_of,
)
from test_models import GPT_NAMES

from models import parts
from models.config import ConfigError
from models.train import split_model
from models.vision import SIZES, VisionConfig, VisionTransformer, configure, to_patches, vit
from remat_kit import Workload, get_policy, get_target, trace
from remat_kit._jaxpr import Work

DROPOUT: dict[str, Any] = {"dropout": 0.1, "attention_dropout": 0.0}
"""Masks are drawn again in a recomputation, and depend on a layer's number; fused attention has none of its own."""


@pytest.mark.parametrize(
    ("size", "image", "published"),
    [
        # `num_params` of ViT_B_16, ViT_L_16 and ViT_H_14 in the documentation of torchvision.
        ("vit-b16", 224, 86_567_656),
        ("vit-l16", 224, 304_326_632),
        ("vit-h14", 518, 633_470_440),
    ],
)
def test_parameter_count_is_the_published_one_without_its_class_token(size, image, published):
    # The token is a vector, and its place among the positions is another one.
    width = SIZES[size]["width"]
    assert count_params(vit("none", size=size, image=image)) == published - 2 * width


@pytest.mark.parametrize("size", SIZES)
def test_parameter_count_by_hand(size):
    config = configure(size)
    c, values = config.blocks, config.patch**2 * config.channels
    attention, mlp = 4 * (c.width**2 + c.width), 2 * c.width * c.mlp_width + c.mlp_width + c.width
    block = attention + mlp + 2 * 2 * c.width
    outside = (values + 1) * c.width + c.seq * c.width + 2 * c.width + (c.width + 1) * config.classes
    assert count_params(vit("none", size=size)) == c.layers * block + outside


def flops_by_hand(config: VisionConfig) -> int:
    """FLOPs of one step with policy none.

    As in a language model, a patch costs 6 FLOP a weight of the blocks, and the two products of attention 12·N·N·D an
    image and layer. The matrix that embeds patches has no gradient to hand on to the image: 4 FLOP a weight. The
    classes are told of the mean of all patches, once an image.
    """
    c, values = config.blocks, config.patch**2 * config.channels
    weights = c.layers * (4 * c.width**2 + 2 * c.width * c.mlp_width)
    patches = c.batch * c.seq
    core = 12 * c.layers * patches * c.seq * c.width
    return 6 * weights * patches + core + 4 * values * c.width * patches + 6 * c.batch * c.width * config.classes


@pytest.mark.parametrize("attention", ["naive", "fused"])
@pytest.mark.parametrize("size", ["tiny", "vit-b16", "vit-l14"])
def test_step_flops(size, attention):
    config = configure(size)
    # Each product once forward and twice backward: 8 a layer, and the classes; the embedding once backward.
    matmuls = 3 * (8 * config.blocks.layers + 1) + 2
    assert work_of(vit, size=size, attention=attention) == Work(matmuls, flops_by_hand(config), 0, 0)


def test_a_high_resolution_step_written_out():
    # 8 images of 64 x 64 patches of 16 x 16 x 3 values; 12 layers of width 768; 1,000 classes.
    blocks = 6 * 12 * 12 * 768**2 * 8 * 4096
    core = 12 * 12 * 8 * 4096**2 * 768
    assert (blocks, core) == (16_698_832_846_848, 14_843_406_974_976)
    assert work_of(vit, size="vit-b16").flops == blocks + core + 4 * 768 * 768 * 8 * 4096 + 6 * 8 * 768 * 1000


@pytest.mark.parametrize(("policy", "matmuls"), [("full", 7), ("selective_attention", 2), ("dots_saveable", 0)])
@pytest.mark.parametrize("stack", ["scan", "unroll"])
def test_recomputed_matmuls_are_those_of_the_gpt(policy, matmuls, stack):
    work, reference = (work_of(vit, name, size="tiny", layers=3, stack=stack) for name in (policy, "none"))
    assert work.recomputed_matmuls == 3 * matmuls
    assert work.flops - work.recomputed_flops == reference.flops


def test_full_keeps_exactly_the_inputs_of_the_blocks():
    step = vit("full", size="tiny", layers=5, dropout=0.1)
    saved = trace(step, get_target("cpu"), get_policy("full")).saved
    assert [value.shape for value in saved.values if value.count > 1] == ["bf16[5,2,16,64]"]
    assert saved.device_bytes_per_block == 2 * 2 * 16 * 64


def test_tags_are_those_of_the_gpt():
    for attention, absent in (("naive", set()), ("fused", {"attention_scores", "attention_probabilities"})):
        step = vit("none", size="tiny", attention=attention)
        assert trace(step, get_target("cpu")).tags == GPT_NAMES - absent


@pytest.mark.parametrize("policy", ["full", "dots_saveable"])
def test_gradients_depend_neither_on_the_policy_nor_on_the_stack(policy):
    assert_same_gradients(vit, policy, reference={"stack": "unroll"}, **DROPOUT)


def test_fused_equals_naive_and_starts_near_chance():
    loss, grads = gradients(vit, "none", stack="unroll", **DROPOUT)
    fused: Any = gradients(vit, "none", attention="fused", **DROPOUT)
    assert_close(fused, (loss, grads))
    assert loss == pytest.approx(np.log(10), rel=0.1)


def test_the_loss_falls():
    found = losses(vit, "full")
    assert found[-1] < found[0] - 1


def test_patches_are_squares_of_the_image():
    image_BYXC = np.arange(2 * 4 * 6 * 3).reshape(2, 4, 6, 3)
    patch_BNP = to_patches(jnp.asarray(image_BYXC), 2)
    assert patch_BNP.shape == (2, 6, 12)
    for b in range(2):
        for row in range(2):
            for column in range(3):
                square = image_BYXC[b, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2]
                np.testing.assert_array_equal(patch_BNP[b, 3 * row + column], square.ravel())


def test_attention_without_a_mask_is_its_definition():
    q_TC, k_TC, v_TC = (np.random.default_rng(i).normal(size=(3, 4)).astype(np.float32) for i in range(3))
    weights_TS = np.exp(q_TC @ k_TC.T / 2)
    want_TC = weights_TS / weights_TS.sum(-1, keepdims=True) @ v_TC
    args = [jnp.asarray(x)[None, :, None] for x in (q_TC, k_TC, v_TC)]
    naive = parts.naive_attention(args[0], args[1], args[2], lambda x: x, causal=False)
    fused = parts.fused_attention(args[0], args[1], args[2], "cpu", causal=False)
    assert_close([naive[0, :, 0], fused[0, :, 0]], [want_TC, want_TC])


def test_every_patch_sees_every_patch():
    # Without positions, patches in another order are the same image; with a causal mask they were not.
    config = configure("tiny", compute_dtype="float32")
    definition, _ = split_model(lambda key: VisionTransformer(config, rngs=nnx.Rngs(params=key)))
    state, batch, key = initial_values(vit)
    params = {**state.params, "positions": np.zeros_like(state.params["positions"])}
    run = jit(lambda image_BYXC: nnx.merge(definition, params)(image_BYXC, key))
    image_BYXC = np.asarray(batch["images"])
    assert_close(run(np.roll(image_BYXC, (8, 16), axis=(1, 2))), run(image_BYXC), atol=1e-5)


def test_what_a_size_does_not_give_follows():
    config = configure("vit-b16", patch=32, width=512, heads=8)
    assert (config.blocks.seq, config.blocks.mlp_width, config.blocks.head_width) == (32 * 32, 2048, 64)
    assert (config.classes, config.channels, config.blocks.dropout) == (1000, 3, 0)
    assert configure("vit-b16").blocks.seq == 4096
    assert configure("vit-l14").blocks.seq == 72 * 72
    assert not config.blocks.causal


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": "vit-b1"}, r"size 'vit-b1' is not a size of vit\. Did you mean 'vit-b16'\?.*vit-h14"),
        ({"image": 1000}, r"image 1000 is not a multiple of patch 16\. .* e\.g\. image=1008\."),
        ({"patch": 0}, "patch is 0. It must be a whole number of at least 1: give e.g. patch=8"),
        ({"image": 64.0}, "image is 64.0. It must be a whole number"),
        ({"classes": -1}, "classes is -1. It must be a whole number"),
        ({"heads": 7}, "width 768 is not a multiple of heads 7.*width=770"),
        ({"attention": "flash"}, "attention 'flash' is not known.*naive, fused"),
        ({"dropout": 1.5}, "dropout is 1.5. It must be at least 0 and below 1"),
        ({"attention": "fused", "platform": "cuda", "compute_dtype": "float32"}, "compute_dtype is float32 with fused"),
    ],
)
def test_unusable_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        vit("none", **options)


def test_it_is_a_workload():
    step = Workload("models.vision:vit", (("size", "tiny"), ("image", 64))).build(get_policy("full"), "cuda")
    assert step.args[1]["images"].shape == (2, 64, 64, 3)
    assert step.labels == {"params": "0.params", "optimizer": "0.opt_state", "batch": 1, "key": 2}
    assert step.donate == (0,)


@pytest.mark.slow
def test_a_step_for_a_gpu_with_a_fused_kernel():
    record = record_for_gpu(
        vit, "models.vision:vit", "attention_kernel_saveable", attention="fused", platform="cuda", patch=4
    )
    # q, k, v, out and up of two layers; the kernel does not run again.
    assert record.recomputed_matmuls == 2 * 5
    assert record.explanation is not None
    assert record.attributed_share == 1
    assert record.explanation.module_share > 0.99
