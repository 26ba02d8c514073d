"""What one block of the reference models keeps for backward, in bytes, tensor by tensor.

Letters of Korthikanti et al. 2022 (arXiv 2205.05198): s sequence, b batch, h width, a heads. An MLP is 4h wide in
style "gpt". sbh alone is a number of elements; a tensor [b, s, h] of 16 bits is 2sbh bytes.
"""

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from contract import LAYERS, RECOMPUTED, SIZE, VARIANTS, cells, ignores_dots, traced

from models import transformer
from models.config import TransformerConfig, configure
from remat_kit import Step, get_policy, get_target, trace
from remat_kit._saved import Saved

SIZES = ("tiny", "gpt2-small", "22b", "175b")
QKV, MLP = "query key value", "up gate"

KEPT = {
    "full": ("input", ""),
    "dots_saveable": (f"input {QKV} scores context out {MLP}", ""),
    "dots_with_no_batch_dims_saveable": (f"input {QKV} out {MLP}", ""),
    "selective_attention": (f"input {QKV} out {MLP}", ""),
    "attention_kernel_saveable": ("input", ""),
    # What the last product of the MLP makes is only added: backward asks for it under no policy.
    "minimal": (f"input {QKV} out {MLP}", ""),
    "minimal_with_context": (f"input {QKV} context out {MLP}", ""),
    "save_dot_with_context_except_mlp": (f"input {QKV} context out", ""),
    "save_dot_except_mlpwi": (f"input {QKV} out", ""),
    "save_dot_except_mlp": (f"input {QKV} out", ""),
    "save_qkv_proj": (f"input {QKV}", ""),
    "save_out_proj": ("input out", ""),
    "save_gathered_weights": ("input", ""),  # there is no mesh here
    "save_reduced": ("input out", ""),
    "qkv_proj_offloaded": ("input", QKV),
    "minimal_offloaded": ("input", f"{QKV} out {MLP}"),
    "offload_dots_with_no_batch_dims": ("input", f"{QKV} out {MLP}"),
    "offload_block_input": ("", "input"),
    # mlpwi is the name of style "gpt" alone, attention_scores that of naive attention.
    "save(query_proj,mlpwi)|offload(context)": ("input query gpt:up", "context"),
    "dots_saveable|offload(context)": (f"input {QKV} scores out {MLP}", "context"),
    "dots_with_no_batch_dims_saveable|save(context)": (f"input {QKV} context out {MLP}", ""),
    "save(attention_scores,mlp_hidden)": ("input naive:scores hidden", ""),
    "attention_kernel_saveable|save_qkv_proj": (f"input {QKV}", ""),
}
"""Tensors of a block that are kept on the device, and in host memory."""

IGNORED = {
    "dots_saveable|offload(context)": ("input", "context"),
    "dots_with_no_batch_dims_saveable|save(context)": ("input context", ""),
}
"""Where jax 0.11 with `jax_remat3` keeps less: see `contract.IGNORED_NEXT_TO_NAMES`."""


def elements(tensors: str, config: TransformerConfig) -> int:
    """The number of elements of some tensors of one block."""
    rows = config.batch * config.seq
    sizes = {
        **dict.fromkeys(("input", "query", "context", "out"), rows * config.width),
        **dict.fromkeys(("key", "value"), rows * config.kv_heads * config.head_width),
        **dict.fromkeys(("up", "hidden"), rows * config.mlp_width),
        "gate": rows * config.mlp_width * (config.style == "llama"),
        "scores": rows * config.heads * config.seq,
    }
    total = 0
    for tensor in tensors.split():
        condition, _, name = tensor.rpartition(":")
        total += sizes[name] * (not condition or condition in (config.style, config.attention))
    return total


@pytest.mark.parametrize(("policy", "variant"), [each for each in cells() if each.values[0] in KEPT])
def test_saved_bytes_of_every_policy(policy, variant, remat3):
    on_device, on_host = IGNORED[policy] if ignores_dots(policy, remat3) else KEPT[policy]
    style, options = VARIANTS[variant].style, {**SIZE, **VARIANTS[variant].options}
    config = configure(style, **options)
    saved = traced(policy, variant, remat3).saved
    assert saved.device_bytes_per_block == 4 * elements(on_device, config)
    assert saved.host_bytes == LAYERS * 4 * elements(on_host, config)


def test_every_policy_that_keeps_less_than_none_has_its_tensors():
    assert set(KEPT) == set(RECOMPUTED) - {"none", "xla_auto", "everything_saveable"}


def saved_of(policy: str, size: str, **options: Any) -> tuple[Saved, TransformerConfig]:
    step = transformer.gpt(policy, size=size, **options)
    return trace(step, get_target("cpu"), get_policy(policy)).saved, configure("gpt", size, **options)


def tensors_of_a_block(saved: Saved) -> Counter[str]:
    """`bf16[batch,seq,width]` -> how many of them a block keeps. Only of a scan, where all blocks share one entry."""
    found: Counter[str] = Counter()
    for value in saved.values:
        if value.block:
            dtype, dims = value.shape.split("[")
            stacked, _, rest = dims.partition(",")
            assert int(stacked) == value.count
            found[f"{dtype}[{rest}"] += 1
    return found


@pytest.mark.parametrize("size", SIZES)
def test_full_keeps_the_input_alone(size):
    saved, c = saved_of("full", size)
    assert tensors_of_a_block(saved) == {f"bf16[{c.batch},{c.seq},{c.width}]": 1}
    assert saved.device_bytes_per_block == 2 * c.seq * c.batch * c.width


@pytest.mark.parametrize("size", SIZES)
def test_selective_attention_keeps_at_most_what_the_paper_says(size):
    saved, c = saved_of("selective_attention", size)
    B, T, D, H, C = c.batch, c.seq, c.width, c.heads, c.head_width
    sbh = T * B * D
    assert tensors_of_a_block(saved) == {
        f"bf16[{B},{T},{D}]": 2,  # the input; the output projection
        f"bf16[{B},{T},{H},{C}]": 3,  # queries, keys, values
        f"bf16[{B},{T},{4 * D}]": 1,  # the first product of the MLP
    }
    # 2·2 + 3·2 + 8. The paper's 34 has also both normalizations (4), the inputs of the projections of attention (2 +
    # 2), of the MLP (2) and of its second product (8) and both masks (2): they come from what is kept without a
    # matmul, so they are computed again. It does not have the output projection (2), since it keeps the sum.
    assert saved.device_bytes_per_block == 18 * sbh == (34 - 4 - 4 - 2 - 8 + 2) * sbh + 2 * sbh - 2 * sbh
    assert saved.device_bytes_per_block <= 34 * sbh


@pytest.mark.parametrize("size", SIZES)
def test_none_keeps_more_than_the_formula_of_the_paper(size):
    saved, c = saved_of("none", size)
    B, T, D, H, C = c.batch, c.seq, c.width, c.heads, c.head_width
    kept = Counter[str]()
    for shape, count in (
        # Like the paper. Attention: input, queries, keys, values, context (2·5sbh). MLP: input (2sbh). Masks (2·1sbh).
        (f"bf16[{B},{T},{D}]", 2),  # attention's and the MLP's input
        (f"bf16[{B},{T},{D}]", 1),  # context
        (f"bf16[{B},{T},{H},{C}]", 2),  # queries or keys, and values ...
        (f"bf16[{B},{T},{H},1,{C}]", 1),  # ... and the other one, by key/value head
        (f"bool[{B},{T},{D}]", 2),
        # The paper keeps GELU's input and output (16sbh). JAX differentiates the tanh form step by step: 5 tensors.
        (f"bf16[{B},{T},{4 * D}]", 5),
        # The paper keeps the input of each normalization in 16 bits (4sbh). JAX: 3 float32 tensors each.
        (f"f32[{B},{T},{D}]", 6),
        # The paper keeps 5as²b of the scores: softmax's result 2, dropout's result 2, mask 1. Here softmax is float32.
        (f"f32[{B},{H},{T},{T}]", 1),
        (f"bf16[{B},{H},1,{T},{T}]", 1),
        (f"bool[{B},{H},{T},{T}]", 1),
        # What the paper calls negligible: two statistics of the softmax, two of each normalization, their scales ...
        (f"f32[{B},{H},{T},1]", 2),
        (f"f32[{B},{T},1]", 4),
        (f"f32[1,1,{D}]", 2),
        # ... and what it counts as parameters: the matrices, cast from float32.
        (f"bf16[{D},{D}]", 4),
        (f"bf16[{D},{4 * D}]", 1),
        (f"bf16[{4 * D},{D}]", 1),
    ):
        kept[shape] += count
    assert tensors_of_a_block(saved) == kept
    sbh, scores, formula = T * B * D, H * T * T * B, T * B * D * 34 + 5 * H * T * T * B
    small, matrices = 8 * H * B * T + 16 * B * T + 8 * D, 24 * D**2
    # 5·8 for 16 at GELU, 6·4 for 4 at the normalizations: 44sbh more. Scores: 4 + 2 + 1 for 5.
    assert saved.device_bytes_per_block == formula + 44 * sbh + 2 * scores + small + matrices
    assert saved.device_bytes_per_block == 78 * sbh + 7 * scores + small + matrices


@pytest.mark.parametrize(
    ("policy", "device", "host"),
    [
        # In units of sbh bytes: an [h] tensor is 2, the MLP's is 8.
        ("minimal", 18, 0),  # input, q, k, v, out: 2 each; up 8
        ("minimal_with_context", 20, 0),
        ("save_dot_with_context_except_mlp", 12, 0),  # input, q, k, v, context, out
        ("save_dot_except_mlpwi", 10, 0),  # input, q, k, v, out; the last product is not needed
        ("save_dot_except_mlp", 10, 0),
        ("save_qkv_proj", 8, 0),
        ("save_out_proj", 4, 0),
        ("qkv_proj_offloaded", 2, 6),
        ("minimal_offloaded", 2, 16),
        ("offload_dots_with_no_batch_dims", 2, 16),
        ("offload_block_input", 0, 2),
    ],
)
@pytest.mark.parametrize("size", ["gpt2-small", "22b"])
def test_presets_in_units_of_sbh(policy, device, host, size):
    saved, c = saved_of(policy, size)
    sbh = c.seq * c.batch * c.width
    assert saved.device_bytes_per_block == device * sbh
    assert saved.host_bytes == c.layers * host * sbh


def test_grouped_queries_keep_smaller_keys_and_values():
    step = transformer.llama("selective_attention", size="llama3-8b")
    c = configure("llama", "llama3-8b")
    # input, query, out: 1 each; key, value: a quarter each; gate, up: 3.5 each; two bytes an element.
    assert c.kv_heads * 4 == c.heads
    assert c.mlp_width * 2 == c.width * 7
    assert trace(step, get_target("cpu")).saved.device_bytes_per_block == 21 * c.seq * c.batch * c.width


@pytest.mark.parametrize("policy", ["none", "dots_saveable"])
@pytest.mark.parametrize("style", ["gpt", "llama"])
def test_unrolled_blocks_keep_what_scanned_ones_do(style, policy):
    build = {"gpt": transformer.gpt, "llama": transformer.llama}[style]
    # Large enough for what differs (constants of shape [T, C], which a scan does not stack) to stay below 1%.
    scanned, unrolled = (
        trace(build(policy, size="tiny", seq=128, width=256, mlp_width=1024, layers=3, stack=stack), get_target("cpu"))
        for stack in ("scan", "unroll")
    )
    per_block = scanned.saved.device_bytes_per_block
    assert per_block is not None
    assert unrolled.saved.device_bytes_per_block == pytest.approx(per_block, rel=0.01)


def test_what_a_scan_carries_is_not_stacked():
    def loss(w: jax.Array) -> jax.Array:
        def body(carry: Any, w_i: jax.Array) -> Any:
            x, total = carry
            return (x * w_i, total + 1.0), None

        (x, total), _ = jax.lax.scan(body, (jnp.ones(1000), jnp.zeros((4, 10))), w)
        return jnp.sin(x).sum() + jnp.sin(total * w[0, 0]).sum()

    step = Step(jax.grad(loss), (jax.ShapeDtypeStruct((4, 1000), jnp.float32),))
    saved = trace(step, get_target("cpu")).saved
    # `total` has the scan's length in front by chance. Its last value is used after the scan, and so is a cosine.
    assert [value.count for value in saved.values if value.shape == "f32[4,10]"] == [1, 1]
