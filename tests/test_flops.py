"""FLOPs of whole training steps against a count by hand."""

from typing import Any

import pytest
from contract import SIZE

from models import linen, transformer
from models.config import TransformerConfig, configure
from remat_kit import POLICIES, get_policy, get_target, trace
from remat_kit._jaxpr import Work

BUILD = {"gpt": transformer.gpt, "llama": transformer.llama}


def flops_by_hand(c: TransformerConfig) -> int:
    """FLOPs of one step with policy none.

    Each token meets each weight of a matrix once in forward (one multiply-add, 2 FLOP) and twice in backward (for the
    gradient of the weight and for that of the token): 6 FLOP a weight and token. The embedding is a table to look up
    and costs none; the logits' matrix, tied or not, is a matrix. The two products of attention, each head's [T, C] by
    [C, T] and [T, T] by [T, C], have a gradient for both operands, so again twice the forward: 12·T·T·D a sequence.
    """
    kv_width = c.kv_heads * c.head_width
    attention = c.width * (2 * c.width + 2 * kv_width)  # query and out; key and value
    mlp = c.width * c.mlp_width * {"gpt": 2, "llama": 3}[c.style]
    weights = c.layers * (attention + mlp) + c.width * c.vocabulary
    return 6 * weights * c.batch * c.seq + 12 * c.layers * c.batch * c.seq**2 * c.width


def matmuls_by_hand(c: TransformerConfig) -> int:
    """Every product runs once forward and twice backward: 8 a layer (9 in style "llama"), and the logits."""
    return 3 * (c.layers * {"gpt": 8, "llama": 9}[c.style] + 1)


def work_of(style: str, policy: str = "none", **options: Any) -> Work:
    return trace(BUILD[style](policy, **options), get_target("cpu"), get_policy(policy)).work


@pytest.mark.parametrize(
    ("style", "size"),
    [("gpt", "tiny"), ("gpt", "gpt2-small"), ("gpt", "22b"), ("llama", "tiny"), ("llama", "llama3-8b")],
)
@pytest.mark.parametrize("attention", ["naive", "fused"])
def test_step_flops(style, size, attention):
    config = configure(style, size, attention=attention)
    work = work_of(style, size=size, attention=attention)
    assert work.flops == flops_by_hand(config)
    assert work.matmuls == matmuls_by_hand(config)
    assert work.recomputed_flops == work.recomputed_matmuls == 0


def test_a_gpt2_small_step_written_out():
    # 8 sequences of 1,024; 12 layers of width 768; 50,257 tokens.
    weights = 12 * (4 * 768 * 768 + 2 * 768 * 3072) + 768 * 50257
    assert weights == 84_934_656 + 38_597_376
    by_hand = 6 * weights * 8 * 1024 + 12 * 12 * 8 * 1024 * 1024 * 768
    assert by_hand == 6_071_846_436_864 + 927_712_935_936
    assert work_of("gpt", size="gpt2-small").flops == by_hand


def test_22b_has_the_flops_of_the_paper():
    # Korthikanti et al., appendix A: 72 B L s h² (1 + s/6h + v/12hL), which has the whole square of attention.
    B, L, s, h, v = 4, 48, 2048, 6144, 51200
    formula = 72 * B * L * s * h**2 + 12 * B * L * s**2 * h + 6 * B * s * h * v
    assert work_of("gpt", size="22b").flops == formula


@pytest.mark.parametrize("policy", ["none", "full", "selective_attention"])
@pytest.mark.parametrize("style", ["gpt", "llama"])
def test_scanned_equals_unrolled(style, policy):
    scanned, unrolled = (work_of(style, policy, size="tiny", layers=5, stack=stack) for stack in ("scan", "unroll"))
    assert scanned == unrolled


@pytest.mark.parametrize("policy", ["none", "full", "selective_attention"])
@pytest.mark.parametrize("stack", ["scan", "unroll"])
def test_linen_equals_nnx(policy, stack):
    step = linen.gpt_linen(policy, size="tiny", stack=stack)
    assert trace(step, get_target("cpu")).work == work_of("gpt", policy, size="tiny", stack=stack)


@pytest.mark.parametrize("policy", [policy for policy in POLICIES if policy not in ("none", "xla_auto")])
@pytest.mark.parametrize("style", ["gpt", "llama"])
def test_model_flops_of_every_policy_are_those_of_the_step_under_none(style, policy):
    work = work_of(style, policy, **SIZE)
    assert work.flops - work.recomputed_flops == flops_by_hand(configure(style, **SIZE))


def test_recomputed_flops_of_two_policies():
    config = configure("gpt", "gpt2-small")
    rows, D, L = config.batch * config.seq, config.width, config.layers
    core = 4 * rows * config.seq * D  # two products of 2·s·s·h a sequence
    assert work_of("gpt", "selective_attention", size="gpt2-small").recomputed_flops == L * core
    # full has q, k, v and out (4hh) and up (4hh) as well.
    assert work_of("gpt", "full", size="gpt2-small").recomputed_flops == L * (core + 2 * rows * 8 * D**2)


def test_xla_counts_the_same_matmuls_and_a_scan_body_once():
    # An independent count: XLA's, of the program before optimization. It has elementwise work, too, at most 2% here.
    options = {"size": "gpt2-small", "layers": 4, "dropout": 0.0, "optimizer": "sgd"}
    by_hand = flops_by_hand(configure("gpt", **options))

    def by_xla(stack: str) -> float:
        traced = trace(transformer.gpt("none", stack=stack, **options), get_target("cpu"))
        assert traced.work.flops == by_hand
        return traced.traced.lower().cost_analysis()["flops"]

    assert by_hand <= by_xla("unroll") <= 1.02 * by_hand
    # The scan's body counts once and not four times; what is outside of it, the logits, counts once in both.
    outside = 6 * 8 * 1024 * 768 * 50257
    once = outside + (by_hand - outside) // 4
    assert once <= by_xla("scan") <= 1.02 * once
