"""Bytes and FLOPs of single kernels, counted by hand on hand-made fusions."""

from hlo_samples import BF16, HOST, LAUNCH, S32, add, close, hand_made, predicted


def fused_kernel(fill, operands, result, **rest):
    """A row for one fusion: `operands` are (dims, memory space), `fill` the fused computation."""

    def main(computation):
        for number, (dims, space) in enumerate(operands):
            add(computation, 100 + number, "parameter", dims, space=space, parameter_number=number)
        numbers = [100 + number for number in range(len(operands))]
        return add(computation, 200, "fusion", result, numbers, called_computation_ids=[1], **rest).id

    (row,) = predicted(hand_made(fused=fill, main=main)).rows
    return row


def test_an_update_in_place_moves_the_update_only():
    def fill(computation):
        add(computation, 1, "parameter", (64, 1000))
        add(computation, 2, "parameter", (1, 1000), parameter_number=1)
        add(computation, 3, "parameter", dtype=S32, parameter_number=2)
        add(computation, 4, "exponential", (1, 1000), [2])
        return add(computation, 5, "dynamic-update-slice", (64, 1000), [1, 4, 3, 3]).id

    row = fused_kernel(fill, [((64, 1000), 0), ((1, 1000), 0), ((), 0)], (64, 1000))
    # 1,000 f32 in, 1,000 out, and the index.
    assert row.bytes == 4000 + 4000 + 4


def test_an_update_that_adds_to_a_slice_reads_that_slice():
    def fill(computation):
        add(computation, 1, "parameter", (64, 1000))
        add(computation, 2, "parameter", (1, 1000), parameter_number=1)
        add(computation, 3, "parameter", dtype=S32, parameter_number=2)
        add(computation, 4, "dynamic-slice", (1, 1000), [1, 3, 3])
        add(computation, 5, "add", (1, 1000), [4, 2])
        add(computation, 6, "dynamic-update-slice", (64, 1000), [1, 5, 3, 3])
        return add(computation, 7, "bitcast", (64000,), [6]).id

    row = fused_kernel(fill, [((64, 1000), 0), ((1, 1000), 0), ((), 0)], (64000,))
    assert row.bytes == 3 * 4000 + 4


def test_an_update_of_a_fresh_array_writes_all_of_it():
    def fill(computation):
        add(computation, 1, "parameter", (1, 1000))
        add(computation, 2, "constant")
        add(computation, 3, "broadcast", (64, 1000), [2])
        return add(computation, 4, "dynamic-update-slice", (64, 1000), [3, 1, 2, 2]).id

    assert fused_kernel(fill, [((1, 1000), 0)], (64, 1000)).bytes == 4000 + 64 * 4000


def test_results_of_a_fusion_count_each_by_itself():
    def fill(computation):
        add(computation, 1, "parameter", (64, 1000))
        add(computation, 2, "parameter", (1, 1000), parameter_number=1)
        add(computation, 3, "constant", dtype=S32)
        add(computation, 4, "negate", (1, 1000), [2])
        add(computation, 5, "dynamic-update-slice", (64, 1000), [1, 4, 3, 3])
        return add(computation, 6, "tuple", operands=[4, 5], tuple_of=[(11, (1, 1000), 0), (11, (64, 1000), 0)]).id

    shapes = [(11, (1, 1000), 0), (11, (64, 1000), 0)]
    row = fused_kernel(fill, [((64, 1000), 0), ((1, 1000), 0)], (), tuple_of=shapes)
    # The negated row goes to both results.
    assert row.bytes == 3 * 4000


def test_what_a_nested_call_slices_counts_as_the_slice():
    def fused_inner(computation):
        add(computation, 1, "parameter", (64, 1000))
        add(computation, 2, "convert", (64, 1000), [1], dtype=BF16)
        return add(computation, 3, "slice", (2, 1000), [2], dtype=BF16).id

    def fused(computation):
        add(computation, 11, "parameter", (64, 1000))
        return add(computation, 12, "call", (2, 1000), [11], dtype=BF16, called_computation_ids=[1]).id

    def main(computation):
        add(computation, 21, "parameter", (64, 1000))
        return add(computation, 22, "fusion", (2, 1000), [21], dtype=BF16, called_computation_ids=[2]).id

    (row,) = predicted(hand_made(fused_inner=fused_inner, fused=fused, main=main)).rows
    # Two rows of f32 in, two of bf16 out.
    assert row.bytes == 2 * 4000 + 2 * 2000


def test_an_update_of_host_memory_goes_over_the_host_link():
    def fill(computation):
        add(computation, 1, "parameter", (64, 1000), space=5)
        add(computation, 2, "parameter", (1, 1000), parameter_number=1)
        add(computation, 3, "constant", dtype=S32)
        return add(computation, 4, "dynamic-update-slice", (64, 1000), [1, 2, 3, 3], space=5).id

    row = fused_kernel(fill, [((64, 1000), 5), ((1, 1000), 0)], (64, 1000), space=5)
    assert (row.kind, row.bytes) == ("host_copy", 4000)
    # Nothing to hide behind: it is not started apart.
    assert close(row.exposed_s, 4000 / HOST + LAUNCH)
