"""All that is ever alive: stretches and their owners on hand-made traces, their sums beside the time line and XLA's."""

import pytest
from hlo_samples import BATCH, HIDDEN, LAYERS, gemm, step
from test_hlo_heap import ALLOC, FREE, QUICK, SAMPLES, SHARE, assignment

from remat_kit._hlo.heap import replay


def spans(heap):
    return [(each.region, each.buffer_id, each.born, each.dies) for each in heap.buffers]


def check(heap):
    """Stretches add up to the time line, those of a region do not overlap, and `live` is what is alive at the peak."""
    check_stretches(heap.buffers, heap.timeline, heap.throughout_bytes)
    if heap.peak_event is not None:
        alive = [each for each in heap.buffers if each.born <= heap.peak_event < each.dies]
        assert sorted(alive, key=lambda each: (-each.bytes, each.buffer_id)) == list(heap.live)
        assert sum(each.bytes for each in heap.live) == max(heap.timeline)
    assert len(heap.timeline) == len(heap.timeline_instructions) == len(heap.timeline_computations)
    count = max((each.dies for each in heap.host_buffers), default=0)
    sums = [sum(each.bytes for each in heap.host_buffers if each.born <= at < each.dies) for at in range(count)]
    check_stretches(heap.host_buffers, sums, sum(each.bytes for each in heap.host_buffers if each.kind != "temp"))
    if heap.host_peak_bytes is not None:
        assert (
            sum(each.bytes for each in heap.host_live)
            == heap.host_peak_bytes
            == max(sums, default=heap.host_peak_bytes)
        )
    assert heap.need_bytes == heap.argument_bytes + heap.output_bytes - heap.alias_bytes + heap.temp_bytes


def check_stretches(buffers, timeline, throughout):
    assert [each.born for each in buffers] == sorted(each.born for each in buffers)
    end = len(timeline)
    for at, expected in enumerate(timeline):
        assert sum(each.bytes for each in buffers if each.born <= at < each.dies) == expected
    assert sum(each.bytes for each in buffers if each.kind != "temp") == throughout or not timeline
    last = {}
    for each in buffers:
        before = last.get(each.region)
        if before is not None:
            assert before.dies <= each.born
            assert (before.bytes, before.group, before.color) == (each.bytes, each.group, each.color)
        assert each.buffer_id in each.group or each.buffer_id == -1
        if each.kind == "temp":
            assert 0 <= each.born < each.dies <= end
        else:
            assert (each.born, each.dies) == (0, end)
        last[each.region] = each


def test_each_change_of_owner_ends_a_stretch_and_begins_another():
    events = [(ALLOC, 1), (ALLOC, 2), (SHARE, 3, 1), (FREE, 1), (SHARE, 4, 3), (FREE, 2), (FREE, 4), (FREE, 3)]
    heap = replay(assignment([10, 5, 9, 8], (0, events)))
    # 4 works in place on 3, and the region is 3's again when 4 ends. The end of 1, which owns nothing, changes nothing.
    assert spans(heap) == [(0, 1, 0, 2), (1, 2, 1, 5), (0, 3, 2, 4), (0, 4, 4, 6), (0, 3, 6, 7)]
    assert [each.bytes for each in heap.buffers] == [10, 5, 10, 10, 10]
    assert [each.group for each in heap.buffers] == [(1, 3, 4), (2,), (1, 3, 4), (1, 3, 4), (1, 3, 4)]
    assert [each.instruction for each in heap.buffers] == ["i1", "i2", "i3", "i4", "i3"]
    assert heap.timeline_computations == ("",) * 8
    check(heap)


def test_ownership_goes_back_to_the_newest_that_is_left():
    events = [(ALLOC, 1), (SHARE, 2, 1), (SHARE, 3, 1), (FREE, 2), (FREE, 3), (FREE, 1)]
    heap = replay(assignment([4, 4, 4], (0, events)))
    assert spans(heap) == [(0, 1, 0, 1), (0, 2, 1, 2), (0, 3, 2, 4), (0, 1, 4, 5)]
    check(heap)


def test_a_revived_region_keeps_its_number_and_size():
    events = [(ALLOC, 1), (FREE, 1), (ALLOC, 2), (SHARE, 3, 1), (FREE, 2), (FREE, 3)]
    heap = replay(assignment([10, 3, 4], (0, events)))
    assert spans(heap) == [(0, 1, 0, 1), (1, 2, 2, 4), (0, 3, 3, 5)]
    assert heap.timeline == (10, 0, 3, 13, 10, 0)
    assert [(each.buffer_id, each.bytes) for each in heap.live] == [(3, 10), (2, 3)]
    check(heap)


def test_a_buffer_that_begins_again_owns_only_where_it_is():
    # 2 leaves the region of 1 and begins one of its own; when 3 ends, the region of 1 is 1's and not 2's.
    events = [(ALLOC, 1), (SHARE, 2, 1), (SHARE, 3, 1), (FREE, 2), (ALLOC, 2), (FREE, 3), (FREE, 1), (FREE, 2)]
    heap = replay(assignment([4, 6, 4], (0, events)))
    assert spans(heap) == [(0, 1, 0, 1), (0, 2, 1, 2), (0, 3, 2, 5), (1, 2, 4, 7), (0, 1, 5, 6)]
    check(heap)
    # The same, but it comes back into the region of 1, where it is now the newest.
    events = [(ALLOC, 1), (SHARE, 2, 1), (SHARE, 3, 1), (FREE, 2), (SHARE, 2, 1), (FREE, 3), (FREE, 2), (FREE, 1)]
    heap = replay(assignment([4, 6, 4], (0, events)))
    assert spans(heap) == [(0, 1, 0, 1), (0, 2, 1, 2), (0, 3, 2, 4), (0, 2, 4, 6), (0, 1, 6, 7)]
    check(heap)


def test_what_is_never_freed_lives_to_the_end():
    heap = replay(assignment([4, 6], (0, [(ALLOC, 1), (SHARE, 2, 1)]), fixed=[{"size": 7, "is_constant": True}]))
    assert spans(heap) == [(0, -1, 0, 2), (1, 1, 0, 1), (1, 2, 1, 2)]
    check(heap)


def test_stretches_of_several_traces_are_on_one_time_line():
    device = (0, [(ALLOC, 1), (FREE, 1), (ALLOC, 4), (FREE, 4)])
    collective = (1, [(ALLOC, 2), (FREE, 2), (ALLOC, 3), (FREE, 3)])
    host = (5, [(ALLOC, 5), (SHARE, 6, 5), (FREE, 5), (FREE, 6)])
    heap = replay(assignment([10, 5, 30, 1, 70, 70], device, collective, host))
    assert heap.timeline_instructions == ("i1", "i2", "i2", "i3", "i1", "i4", "i4", "i3")
    assert [(each.buffer_id, each.color, each.born, each.dies) for each in heap.buffers] == [
        (1, 0, 0, 4),
        (2, 1, 1, 2),
        (3, 1, 3, 7),
        (4, 0, 5, 6),
    ]
    assert [(each.region, each.buffer_id, each.born, each.dies) for each in heap.host_buffers] == [
        (4, 5, 0, 1),
        (4, 6, 1, 3),
    ]
    assert [each.buffer_id for each in heap.host_live] == [5]
    check(heap)


def test_what_xla_allocates():
    fixed = [
        {"size": 100, "is_entry_computation_parameter": True, "maybe_live_out": True},
        {"size": 11, "is_entry_computation_parameter": True},
        {"size": 20, "maybe_live_out": True},
        {"size": 3, "is_constant": True},
        {"size": 4, "is_thread_local": True},
        {"size": 1000, "is_entry_computation_parameter": True, "color": 5},
        {"size": 500, "color": 5},
        {"size": 7},
    ]
    heap = replay(assignment([10, 20], (0, [(ALLOC, 1), (FREE, 1), (ALLOC, 2)]), fixed=fixed))
    assert (heap.argument_bytes, heap.output_bytes, heap.alias_bytes) == (111, 120, 100)
    # The heap is packed without reuse here, so it counts with both of its buffers.
    assert (heap.temp_bytes, heap.num_temp_allocations, heap.host_temp_bytes) == (37, 2, 500)
    assert heap.need_bytes == 168
    check(heap)


def check_sample(sample):
    heap, memory = replay(sample.proto), sample.memory
    check(heap)
    assert heap.argument_bytes == memory.argument_size_in_bytes
    assert heap.output_bytes == memory.output_size_in_bytes
    assert heap.alias_bytes == memory.alias_size_in_bytes
    assert heap.temp_bytes == memory.temp_size_in_bytes
    assert heap.host_temp_bytes == memory.host_temp_size_in_bytes
    assert all(each.instruction for each in (*heap.buffers, *heap.host_buffers))
    return heap


@pytest.mark.parametrize(("policy", "stack", "triton"), QUICK)
def test_compiled_programs_add_up(policy, stack, triton):
    heap = check_sample(step(policy, stack, triton))
    if policy == "offload":
        assert max(each.bytes for each in heap.host_buffers) == LAYERS * BATCH * HIDDEN * 2


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "stack", "triton"), [each for each in SAMPLES if each not in QUICK])
def test_the_rest_of_compiled_programs_add_up(policy, stack, triton):
    check_sample(step(policy, stack, triton))


@pytest.mark.parametrize("triton", [False, True])
def test_a_program_of_one_product_adds_up(triton):
    check_sample(gemm(triton))


def test_a_loop_that_stacks_for_backward_owns_its_memory_in_turns():
    # The stack of residuals is one region through the whole forward loop; its owners follow each other in it.
    heap = replay(step("none", "scan").proto)
    regions = {each.region for each in heap.buffers if each.bytes == LAYERS * BATCH * HIDDEN * 2}
    assert any(len({each.buffer_id for each in heap.buffers if each.region == region}) > 1 for region in regions)
