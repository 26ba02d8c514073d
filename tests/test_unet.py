"""The U-Net has the convolutions that it should have, no tag, and is a workload like the others."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from model_checks import assert_same_gradients, count_params, jit, losses, record_for_gpu, work_of

from models.config import ConfigError
from models.unet import SIZES, Conv, GroupNorm, UNetConfig, configure, enlarge, squared_error, unet
from remat_kit import POLICIES, PolicyError, Workload, get_policy, get_target, trace
from remat_kit._jaxpr import Work

DEEPER: dict[str, Any] = {"size": "tiny", "levels": 3, "blocks": 2}


class Convolution(NamedTuple):
    """A convolution: pixels of a side of its output, of its window, channels, and whether it is a block's first."""

    side: int
    window: int
    inputs: int
    outputs: int
    first: bool = False

    @property
    def flops(self) -> int:
        """Forward, of one image: a multiply-add for each weight and pixel of the output."""
        return 2 * self.side**2 * self.window**2 * self.inputs * self.outputs


def residual(side: int, inputs: int, outputs: int) -> Iterator[Convolution]:
    yield Convolution(side, 3, inputs, outputs, first=True)
    yield Convolution(side, 3, outputs, outputs)
    if inputs != outputs:
        yield Convolution(side, 1, inputs, outputs)


def convolutions(c: UNetConfig) -> list[Convolution]:
    """All of a U-Net, the one that sees the image first."""
    sides = [c.image // 2**level for level in range(c.levels)]
    widths = [c.width * 2**level for level in range(c.levels)]
    found = [Convolution(c.image, 3, c.channels, c.width)]
    for level, (side, width) in enumerate(zip(sides, widths, strict=True)):
        # Down: the first block of a level widens. Up: it takes what comes from below and the last one's output.
        above, below = widths[max(level - 1, 0)], widths[min(level + 1, c.levels - 1)]
        for block in range(c.blocks):
            found += residual(side, width if block else above, width)
            found += residual(side, 2 * width if block else width + below, width)
        if level < c.levels - 1:
            found.append(Convolution(side // 2, 3, width, width))  # every second pixel
            found.append(Convolution(side, 3, below, below))  # of the level below, made larger before
    found += residual(sides[-1], widths[-1], widths[-1])
    found.append(Convolution(c.image, 3, c.width, c.channels))
    return found


def flops_by_hand(c: UNetConfig) -> int:
    """FLOPs of one step with policy none: forward once and backward twice, but for the image, which has no gradient."""
    stem, *others = convolutions(c)
    return c.batch * (2 * stem.flops + 3 * sum(each.flops for each in others))


@pytest.mark.parametrize("options", [DEEPER, {"size": "base"}], ids=["deeper", "base"])
def test_step_flops_and_parameters(options):
    config = configure(**options)
    found = convolutions(config)
    work = Work(3 * len(found) - 1, flops_by_hand(config), 0, 0)
    assert work_of(unet, **options) == work
    # A kernel and its bias; scale and bias of the norms: before both convolutions of a block, and before the last one.
    kernels = sum(each.window**2 * each.inputs * each.outputs + each.outputs for each in found)
    norms = sum(2 * (each.inputs + each.outputs) for each in found if each.first) + 2 * config.width
    assert count_params(unet("none", **options)) == kernels + norms


def test_every_size_is_valid():
    for size, values in SIZES.items():
        config = configure(size)
        assert {name: getattr(config, name) for name in values} == values
        assert config.channels == 3


def test_a_tiny_step_written_out():
    # Two levels of 16 x 16 pixels with 8 channels and 8 x 8 with 16, and one block each on the way down and up.
    stem, head = 9 * 3 * 8 * 16**2, 9 * 8 * 3 * 16**2
    down = (9 * 8 * 8 + 9 * 8 * 8) * 16**2 + 9 * 8 * 8 * 8**2 + (9 * 8 * 16 + 9 * 16 * 16 + 8 * 16) * 8**2
    middle = 2 * 9 * 16 * 16 * 8**2
    up = (9 * 32 * 16 + 9 * 16 * 16 + 32 * 16) * 8**2 + 9 * 16 * 16 * 16**2
    up += (9 * 24 * 8 + 9 * 8 * 8 + 24 * 8) * 16**2
    assert (stem, head, down, middle, up) == (55_296, 55_296, 561_152, 294_912, 1_703_936)
    # 2 FLOP, 2 images; three times, without the gradient of the image.
    assert work_of(unet, size="tiny").flops == 4 * (3 * (down + middle + up + head) + 2 * stem) == 31_825_920


def test_recomputation_under_full_is_the_first_convolution_of_each_block():
    # What the second one and the shortcut make is only added.
    options: dict[str, Any] = {"size": "tiny", "blocks": 2}
    config = configure(**options)
    first = [each for each in convolutions(config) if each.first]
    assert len(first) == 2 * config.levels * config.blocks + 1
    again = config.batch * sum(each.flops for each in first)
    work, base = work_of(unet, "full", **options), work_of(unet, **options)
    assert work == Work(base.matmuls + len(first), base.flops + again, len(first), again)
    # A convolution is no dot without batch dimensions, but one of all dots to JAX.
    assert work_of(unet, "dots_with_no_batch_dims_saveable", **options) == work
    assert work_of(unet, "dots_saveable", **options) == base


def test_nothing_is_tagged():
    for policy in ("none", "full"):
        assert trace(unet(policy, size="tiny"), get_target("cpu"), get_policy(policy)).tags == frozenset()


@pytest.mark.parametrize("policy", ["selective_attention", "offload_block_input"])
def test_a_policy_of_names_alone_is_refused(policy):
    assert POLICIES[policy].tensor_names
    with pytest.raises(PolicyError, match=r"none of them is in the model.*The model tags no tensor.*dots_saveable"):
        trace(unet(policy, size="tiny"), get_target("cpu"), get_policy(policy))


@pytest.mark.parametrize("policy", ["full", "dots_saveable"])
def test_gradients_do_not_depend_on_the_policy(policy):
    assert_same_gradients(unet, policy, reference={})


def test_the_loss_falls():
    found = losses(unet, "full")
    assert found[-1] < found[0] - 0.3


# Parts


def test_group_norm_is_its_definition():
    config = configure("tiny")
    norm = GroupNorm(8, config)
    scale, bias = np.linspace(0.5, 2, 8), np.linspace(-1, 1, 8)
    norm.scale[...], norm.bias[...] = jnp.asarray(scale, jnp.float32), jnp.asarray(bias, jnp.float32)
    x_BYXC = np.random.default_rng(0).normal(3, 2, (2, 5, 4, 8)).astype(np.float32)
    want_BYXC = np.empty_like(x_BYXC)
    for b in range(2):
        for group in range(4):
            channels = slice(2 * group, 2 * group + 2)
            part = x_BYXC[b, :, :, channels]
            want_BYXC[b, :, :, channels] = (part - part.mean()) / part.std()
    np.testing.assert_allclose(norm(jnp.asarray(x_BYXC)), want_BYXC * scale + bias, atol=1e-4)
    assert norm(jnp.asarray(x_BYXC, jnp.bfloat16)).dtype == jnp.bfloat16


@pytest.mark.parametrize("stride", [1, 2])
def test_convolution_is_its_definition(stride):
    conv = Conv(2, 3, configure("tiny"), rngs=nnx.Rngs(0), stride=stride)
    conv.bias[...] = jnp.arange(3.0)
    x_BYXI = np.random.default_rng(0).normal(size=(1, 4, 4, 2)).astype(np.float32)
    # "SAME": one pixel around the image; of two strides the one before is not needed.
    padded = np.pad(x_BYXI[0], ((2 - stride, 1), (2 - stride, 1), (0, 0)))
    side = 4 // stride
    want_YXO = np.zeros((side, side, 3)) + np.arange(3.0)
    for y in range(side):
        for x in range(side):
            window = padded[y * stride : y * stride + 3, x * stride : x * stride + 3]
            want_YXO[y, x] += np.einsum("yxi,yxio->o", window, np.asarray(conv.kernel[...]))
    got = conv(jnp.asarray(x_BYXI))
    assert got.shape == (1, side, side, 3)
    np.testing.assert_allclose(got[0], want_YXO, rtol=1e-4, atol=1e-5)


def test_enlarging_repeats_pixels():
    x_BYXC = np.arange(2 * 3 * 2 * 2).reshape(2, 3, 2, 2)
    want = x_BYXC.repeat(2, axis=1).repeat(2, axis=2)
    np.testing.assert_array_equal(enlarge(jnp.asarray(x_BYXC)), want)


def test_squared_error_is_its_definition():
    error = squared_error(jnp.asarray([1.0, 3.0], jnp.bfloat16), jnp.asarray([2.0, 1.0]))
    assert error == pytest.approx((1 + 4) / 2)
    assert error.dtype == jnp.float32


def test_noise_and_image_make_an_input_of_unit_variance():
    init = unet("none", size="tiny", image=64).init
    assert init is not None
    batch = jit(lambda seed: init(seed)[1])(0)
    noisy, noise = batch["inputs"], batch["targets"]
    assert np.var(noisy) == pytest.approx(1, abs=0.03)
    assert np.mean(noisy * noise) == pytest.approx(0.5**0.5, abs=0.03)


# Options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": "bas"}, r"size 'bas' is not a size of unet\. Did you mean 'base'\?.*large"),
        ({"width": 100}, r"width 100 is not a multiple of groups 32\. .* e\.g\. width=128\."),
        ({"image": 100, "levels": 5}, r"image 100 is not a multiple of 16\. With levels 5 .*halved 4 times.*image=112"),
        ({"levels": 0}, "levels is 0. It must be a whole number of at least 1"),
        ({"blocks": True}, "blocks is True. It must be a whole number"),
        ({"compute_dtype": "bf16"}, "compute_dtype 'bf16' is not known.*bfloat16"),
        ({"optimizer": "adam"}, "optimizer 'adam' is not known. Did you mean 'adamw'"),
    ],
)
def test_unusable_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        unet("none", **options)
    with pytest.raises(ConfigError, match=r"option 'depth' is not an option of UNetConfig.*levels"):
        configure("tiny", depth=3)


def test_it_is_a_workload():
    step = Workload("models.unet:unet", (("size", "tiny"), ("batch", 3))).build(get_policy("full"), "cuda")
    image = jax.ShapeDtypeStruct((3, 16, 16, 3), jnp.float32)
    assert step.args[1] == {"inputs": image, "targets": image}
    assert step.labels == {"params": "0.params", "optimizer": "0.opt_state", "batch": 1, "key": 2}
    assert step.donate == (0,)


@pytest.mark.slow
def test_a_step_for_a_gpu():
    record = record_for_gpu(unet, "models.unet:unet", "full")
    assert record.recomputed_matmuls == 5
    assert record.explanation is not None
    assert record.attributed_share == 1
    assert record.explanation.module_share > 0.99
