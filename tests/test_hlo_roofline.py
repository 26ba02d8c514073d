"""The roofline by hand: every number beside its arithmetic, on a chip with round rates."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from hlo_samples import (
    BATCH,
    BF16,
    CHIP,
    HIDDEN,
    HOST,
    LAUNCH,
    LAYERS,
    LINK,
    MATMUL,
    MEMORY,
    STACKED_TWICE,
    WIDTH,
    add,
    check_sums,
    close,
    compiled,
    gemm,
    hand_made,
    predicted,
    spec,
    step,
)  # fmt: skip

from remat_kit._hlo.module import Module
from remat_kit._hlo.roofline import Prediction, predict
from remat_kit._target import CHIPS, Chip, get_target
from remat_kit._trace import cudnn_of


@pytest.mark.parametrize("triton", [False, True])
def test_one_bf16_product(triton):
    prediction = predicted(gemm(triton).proto)
    (row,) = prediction.rows
    assert row.kind == "matmul"
    assert row.flops == prediction.flops == 2 * 1024 * 512 * 2048
    # Both operands and the result, two bytes an element; cuBLASLt's workspace is not traffic.
    assert row.bytes == 2 * (1024 * 512 + 512 * 2048 + 1024 * 2048)
    # 2.147 GFLOP take 2.68 us, 7.3 MB take 2.04 us: bound by the matrix units.
    assert close(row.seconds, 2 * 1024 * 512 * 2048 / MATMUL + LAUNCH)
    assert close(prediction.breakdown["matmul"], 2 * 1024 * 512 * 2048 / MATMUL)
    assert close(prediction.breakdown["launch"], LAUNCH)
    assert prediction.warnings == ()


@pytest.mark.parametrize(
    ("triton", "precision", "rate"),
    [
        # jax.numpy's default precision lets XLA use TF32; "highest" does not, and there is no f32 matrix rate.
        (False, None, 5e14),
        (True, None, 5e14),
        (False, "highest", 5e13),
        (True, "highest", 5e13),
        # In between the two backends differ: cuBLAS stays with TF32, Triton does not.
        (False, "high", 5e14),
        (True, "high", 5e13),
    ],
)
def test_f32_products_run_where_the_precision_says(triton, precision, rate):
    prediction = predicted(gemm(triton, "float32", precision).proto)
    flops = 2 * 1024 * 512 * 2048
    assert prediction.flops == flops
    assert close(prediction.breakdown["matmul"], flops / (rate * 0.8))


def test_a_known_chip_has_the_rates_that_the_formula_takes():
    prediction = predict(gemm(triton=False).module, CHIPS["h100-sxm-80gb"])
    chip = CHIPS["h100-sxm-80gb"]
    expected = 2 * 1024 * 512 * 2048 / (chip.flops_per_s["bf16"] * chip.efficiency["matmul"]) + chip.launch_s
    assert close(prediction.seconds, expected)


def test_one_elementwise_pass():
    # One kernel that reads two arrays and writes one: tanh(a) * b.
    sample = compiled(jax.jit(lambda a, b: jnp.tanh(a) * b), spec(1024, 1024), spec(1024, 1024))
    prediction = predicted(sample.proto)
    (row,) = prediction.rows
    assert row.kind == "memory"
    assert (row.flops, row.bytes) == (0, 3 * 1024 * 1024 * 2)
    # A tanh and a product for each element.
    assert row.vector_flops == 2 * 1024 * 1024
    assert close(prediction.seconds, 3 * 1024 * 1024 * 2 / MEMORY + LAUNCH)
    assert close(prediction.breakdown["memory"], 3 * 1024 * 1024 * 2 / MEMORY)


def test_much_arithmetic_is_bound_by_the_vector_units():
    def fused(computation):
        add(computation, 1, "parameter", (1000,))
        for number in range(2, 1002):
            add(computation, number, "sine", (1000,), [number - 1])
        return 1001

    def main(computation):
        add(computation, 2001, "parameter", (1000,))
        return add(computation, 2002, "fusion", (1000,), [2001], called_computation_ids=[1]).id

    (row,) = predicted(hand_made(fused=fused, main=main)).rows
    assert row.vector_flops == 1000 * 1000
    assert close(row.seconds, 1e6 / 5e13 + LAUNCH)


def test_scanned_step_by_hand():
    prediction = predicted(step("full").proto)
    product = 2 * BATCH * WIDTH * HIDDEN
    # A block: two products forward, four backward, one again.
    assert prediction.flops == LAYERS * 7 * product
    matmuls = [row for row in prediction.rows if row.kind == "matmul"]
    assert [row.executions for row in matmuls] == [LAYERS] * 7
    assert {row.flops for row in matmuls} == {product}
    rows = {row.op_name: row for row in prediction.rows if row.kind == "memory"}
    # The carry of every layer is written into a stacked [4, 2048, 512]: one layer is read and written, and the index.
    saved = rows["jit(update)/jvp()/while/body/jit(dynamic_update_index_in_dim)/dynamic_update_slice"]
    assert (saved.bytes, saved.executions) == (2 * BATCH * WIDTH * 2 + 4, LAYERS)
    # A layer's weights are sliced out of the stacked ones: read and write one layer, and the index.
    sliced = rows["jit(update)/jvp()/while/body/jit(dynamic_index_in_dim)/dynamic_slice"]
    assert (sliced.bytes, sliced.executions) == (2 * WIDTH * HIDDEN * 2 + 4, LAYERS)
    # The update of a stacked weight reads it and its gradient and writes it, once a step.
    update = rows["jit(update)/sub"]
    assert (update.bytes, update.executions) == (3 * LAYERS * WIDTH * HIDDEN * 2, 1)
    assert prediction.warnings == ()


def test_products_inside_slicing_fusions_move_one_slice():
    # Forward, XLA fuses the slice of the stacked `down` into the product that uses it, which also adds the residual.
    rows = predicted(step("full").proto).rows
    forward = [row for row in rows if row.name == "dynamic_slice_fusion"]
    # [2048, 2048] times one [2048, 512] of the stack, plus [2048, 512] in and out, and the index.
    assert [row.bytes for row in forward] == [2 * (BATCH * HIDDEN + HIDDEN * WIDTH + 2 * BATCH * WIDTH) + 4]


def test_saving_costs_less_arithmetic_than_recomputing():
    full, dots = predicted(step("full").proto), predicted(step("dots").proto)
    assert full.flops - dots.flops == (1 - STACKED_TWICE) * LAYERS * 2 * BATCH * WIDTH * HIDDEN


def test_offloaded_step():
    kept, offloaded = predicted(step("dots").proto), predicted(step("offload").proto)
    copies = [row for row in offloaded.rows if row.kind == "host_copy"]
    # One [2048, 2048] out in forward and in again in backward, each layer.
    assert [(row.bytes, row.executions) for row in copies] == [(BATCH * HIDDEN * 2, LAYERS)] * 2
    for row in copies:
        assert close(row.seconds, BATCH * HIDDEN * 2 / HOST + LAUNCH)
        assert 0 < row.exposed_s <= row.seconds
    # Some of the way out is hidden behind the product that runs meanwhile.
    assert min(row.exposed_s for row in copies) < BATCH * HIDDEN * 2 / HOST
    assert close(offloaded.breakdown["host_copy"], sum(row.exposed_s * row.executions for row in copies))
    assert kept.breakdown["host_copy"] == 0


def offload_pair(waits_at_once: bool):
    """64 MB to the host, beside a product of 2 * 4096**3 FLOPs."""

    def main(computation):
        add(computation, 1, "parameter", (4096, 8192), dtype=BF16)
        add(computation, 2, "parameter", (4096, 4096), dtype=BF16, parameter_number=1)
        pair = [(BF16, (4096, 8192), 5), (BF16, (4096, 8192), 0), (8, (), 0)]
        add(computation, 3, "copy-start", operands=[1], tuple_of=pair)
        last = [(4, "dot", (4096, 4096), [2, 2]), (5, "copy-done", (4096, 8192), [3])]
        for identifier, opcode, dims, operands in reversed(last) if waits_at_once else last:
            made = add(computation, identifier, opcode, dims, operands, dtype=BF16)
            if opcode == "dot":
                made.dot_dimension_numbers.lhs_contracting_dimensions.append(1)
                made.dot_dimension_numbers.rhs_contracting_dimensions.append(0)
        return add(
            computation, 6, "tuple", operands=[4, 5], tuple_of=[(BF16, (4096, 4096), 0), (BF16, (4096, 8192), 5)]
        ).id

    return hand_made(main=main)


def test_a_copy_hides_behind_what_runs_before_its_end_is_waited_for():
    copy_s = 4096 * 8192 * 2 / HOST + LAUNCH
    product_s = 2 * 4096**3 / MATMUL + LAUNCH
    at_once, later = predicted(offload_pair(True)), predicted(offload_pair(False))
    assert close(at_once.breakdown["host_copy"], copy_s)
    assert close(at_once.seconds, copy_s + product_s)
    assert close(later.breakdown["host_copy"], copy_s - product_s)
    assert close(later.seconds, copy_s)


def fmha(backward: bool, mask: str = "NO_MASK", window: int = 0):
    """cuDNN attention as XLA leaves it: [2, 512, 8, 64] queries, [2, 512, 2, 64] keys and values."""
    queries, keys = (BF16, (2, 512, 8, 64), 0), (BF16, (2, 512, 2, 64), 0)
    stats, workspace = (11, (2, 8, 512), 0), (6, (1 << 20,), 0)
    config = {
        "cudnn_fmha_backend_config": {
            "intermediate_tensor_shape": {"dimensions": ["2", "8", "512", "512"], "element_type": "BF16"},
            "mask_type": mask,
            "sliding_window_length": window,
        }
    }

    def main(computation):
        operands = [queries, keys, keys, *([stats, queries, queries] if backward else [])]
        for number, (dtype, dims, _) in enumerate(operands):
            add(computation, number + 1, "parameter", dims, dtype=dtype, parameter_number=number)
        results = [queries, keys, keys, workspace] if backward else [queries, stats, workspace]
        target = "__cudnn$fmhaSoftmaxBackward" if backward else "__cudnn$fmhaSoftmax"
        numbers = list(range(1, len(operands) + 1))
        return add(
            computation, 9, "custom-call", operands=numbers, tuple_of=results, custom_call_target=target, config=config
        ).id

    (row,) = predicted(hand_made(main=main)).rows
    return row


def test_attention_forward_is_two_products_and_backward_five():
    product = 2 * (2 * 8 * 512 * 512) * 64
    forward, backward = fmha(False), fmha(True)
    assert (forward.flops, backward.flops) == (2 * product, 5 * product)
    queries, keys, stats = 2 * 512 * 8 * 64 * 2, 2 * 512 * 2 * 64 * 2, 2 * 8 * 512 * 4
    assert forward.bytes == 2 * queries + 2 * keys + stats
    # Reads q, k, v, the statistics, the result and its gradient; writes three gradients.
    assert backward.bytes == 4 * queries + 4 * keys + stats
    assert close(forward.seconds, 2 * product / MATMUL + LAUNCH)


def test_attention_counts_the_pairs_that_the_mask_leaves():
    # Query i sees i + 1 keys.
    assert fmha(False, "CAUSAL").flops == 2 * 2 * (2 * 8 * 512 * 513 // 2) * 64
    # The last 128 only: 128 * 129 / 2 for the first 128 queries, 128 for each of the other 384.
    assert fmha(False, "CAUSAL", 128).flops == 2 * 2 * (2 * 8 * (128 * 129 // 2 + 384 * 128)) * 64


def test_compiled_attention():
    def loss(q, k, v):
        out = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
        return out.astype(jnp.float32).sum()

    args = [spec(2, 512, 8, 64)] * 3
    with cudnn_of(get_target("h100-sxm-80gb")):
        sample = compiled(jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2))), *args)
    rows = {row.op_name.rsplit("_", 1)[-1]: row for row in predicted(sample.proto).rows if row.kind == "matmul"}
    product = 2 * (2 * 8 * 512 * 513 // 2) * 64
    assert {name: row.flops for name, row in rows.items()} == {"fwd": 2 * product, "bwd": 5 * product}


@pytest.mark.parametrize("gradients", [False, True])
def test_convolution(gradients):
    def conv(x, w):
        return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    fun = jax.grad(lambda x, w: conv(x, w).astype(jnp.float32).sum(), argnums=(0, 1)) if gradients else conv
    prediction = predicted(compiled(jax.jit(fun), spec(8, 32, 32, 64), spec(3, 3, 64, 128)).proto)
    # Every output element takes 3 * 3 * 64 products; either gradient costs the same.
    one = 2 * (8 * 32 * 32 * 128) * (3 * 3 * 64)
    assert sorted(row.flops for row in prediction.rows if row.kind == "matmul") == [one] * (1 + gradients)


def test_unknown_trip_counts_count_once_and_say_so():
    fun = jax.jit(lambda n, a, b: jax.lax.fori_loop(0, n, lambda i, x: x @ b, a))
    prediction = predicted(compiled(fun, spec(dtype=jnp.int32), spec(512, 512), spec(512, 512)).proto)
    assert prediction.flops == 2 * 512**3
    (warning,) = prediction.warnings
    assert "trip count of loop while" in warning


def test_the_longest_branch_counts():
    fun = jax.jit(lambda p, a, b: jax.lax.cond(p, lambda: a @ b, lambda: a + b))
    sample = compiled(fun, spec(dtype=jnp.bool_), spec(2048, 2048), spec(2048, 2048), xla_gpu_enable_triton_gemm=False)
    prediction = predicted(sample.proto)
    # The product takes 21 us, the sum 7.
    assert prediction.flops == 2 * 2048**3
    assert [row.kind for row in prediction.rows if row.bytes > 1000] == ["matmul"]


def collective(opcode: str, devices: int, chip: Chip = CHIP) -> Prediction:
    def main(computation):
        add(computation, 1, "parameter", (1 << 20,))
        made = add(computation, 2, opcode, (1 << 20,), [1])
        made.collective_device_list.replica_groups.add(replica_ids=range(devices))
        return 2

    prediction = predict(Module.from_proto(hand_made(main=main)), chip)
    check_sums(prediction)
    return prediction


@pytest.mark.parametrize(
    ("opcode", "factor"),
    [
        # Of B bytes on each of 8 devices a ring sends 7/8 to reduce and 7/8 to gather; a gather sends every other's.
        ("all-reduce", 2 * 7 / 8),
        ("reduce-scatter", 7 / 8),
        ("all-gather", 7),
        ("all-to-all", 7 / 8),
        ("collective-permute", 1),
    ],
)
def test_collectives_take_the_time_of_a_ring(opcode, factor):
    prediction = collective(opcode, 8)
    assert close(prediction.breakdown["collective"], factor * 4 * (1 << 20) / LINK)
    assert close(prediction.breakdown["launch"], LAUNCH)


def test_a_chip_without_a_link_sends_over_the_host():
    slow = dataclasses.replace(CHIP, link_bytes_per_s=0.0)
    assert close(collective("all-reduce", 2, slow).breakdown["collective"], 4 * (1 << 20) / HOST)
    assert collective("all-reduce", 1).breakdown["collective"] == 0


def test_unknown_custom_calls_count_their_bytes_and_say_so():
    def main(computation):
        add(computation, 1, "parameter", (1000,))
        add(computation, 2, "custom-call", (1000,), [1], custom_call_target="Sharding")
        return add(computation, 3, "custom-call", (1000,), [2], custom_call_target="my_kernel").id

    prediction = predicted(hand_made(main=main))
    assert [row.bytes for row in prediction.rows] == [8000]
    assert prediction.warnings == ("the FLOPs of custom call 'my_kernel' are unknown; only its bytes count",)


def test_a_type_without_a_matrix_rate_runs_on_the_vector_units_and_says_so():
    def main(computation):
        add(computation, 1, "parameter", (512, 512), dtype=10)
        made = add(computation, 2, "dot", (512, 512), [1, 1], dtype=10)
        made.dot_dimension_numbers.lhs_contracting_dimensions.append(1)
        return 2

    prediction = predicted(hand_made(main=main))
    assert close(prediction.breakdown["matmul"], 2 * 512**3 / (5e13 * 0.8))
    assert prediction.warnings == ("round has no matrix rate for f16; its vector peak stands in for it",)


def test_calls_that_double_at_every_level_take_linear_time():
    def leaf(computation):
        add(computation, 1, "parameter", (8,))
        return add(computation, 2, "negate", (8,), [1]).id

    def doubling(level):
        def fill(computation):
            add(computation, 10 * level, "parameter", (8,))
            for turn in (1, 2):
                before = 10 * level + turn - 1
                add(computation, before + 1, "call", (8,), [before], called_computation_ids=[level])
            return 10 * level + 2

        return fill

    levels = {f"level_{number}": doubling(number) for number in range(1, 41)}
    prediction = predicted(hand_made(leaf=leaf, **levels))
    assert [row.executions for row in prediction.rows] == [2**40]


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["none", "full", "dots", "offload"])
@pytest.mark.parametrize("stack", ["scan", "unroll"])
@pytest.mark.parametrize("triton", [False, True])
def test_breakdowns_add_up_on_whole_steps(policy, stack, triton):
    prediction = predicted(step(policy, stack, triton).proto)
    product = 2 * BATCH * WIDTH * HIDDEN
    # Six products a layer without recomputation; unrolled, the first layer has no dx to make.
    least = 6 * LAYERS - (stack == "unroll")
    assert prediction.flops == (least + (LAYERS if policy == "full" else 0)) * product
    assert prediction.warnings == ()
