"""The heap replay: its rules on hand-made traces, its figures beside XLA's and XProf's on compiled programs."""

import json
import pathlib

import jax
import jax.numpy as jnp
import pytest
from hlo_samples import BATCH, HIDDEN, LAYERS, WIDTH, block, compiled, gemm, spec, step

from remat_kit._errors import RematKitError
from remat_kit._hlo.heap import replay
from remat_kit._hlo.order import flat_positions
from remat_kit._hlo.proto import MESSAGES

ALLOC, FREE, SHARE = 0, 1, 2
SAMPLES = [
    (policy, stack, triton)
    for policy in ("none", "full", "dots", "offload")
    for stack in ("scan", "unroll")
    for triton in (False, True)
]
QUICK = [("none", "scan", False), ("full", "scan", False), ("full", "unroll", False), ("offload", "scan", False)]


def assignment(sizes, *traces, fixed=()):
    """An HloProto with logical buffers 1, 2, ... of `sizes` bytes and a heap of one allocation for each trace.

    A trace is (color, [(kind, buffer) or (SHARE, buffer, canonical), ...]); the event of buffer n is at instruction
    "i<n>", and the schedule is i1, i2, .... `fixed` are further allocations, by their fields.
    """
    proto = MESSAGES["HloProto"]()
    proto.hlo_module.entry_computation_id = 1
    computation = proto.hlo_module.computations.add(name="main", id=1)
    buffers = proto.buffer_assignment
    sequence = proto.hlo_module.schedule.sequences.add(key=1).value
    for number, size in enumerate(sizes, start=1):
        computation.instructions.add(name=f"i{number}", id=100 + number, opcode="add")
        sequence.instruction_ids.append(100 + number)
        buffers.logical_buffers.add(id=number, size=size).defined_at.instruction_id = 100 + number
    for index, (color, events) in enumerate(traces):
        total = buffers.buffer_allocations.add(index=index, size=sum(sizes), color=color)
        for number in sorted({buffer for _, buffer, *_ in events if buffer <= len(sizes)}):
            total.assigned.add(logical_buffer_id=number)
        trace = buffers.heap_simulator_traces.add(buffer_allocation_index=index, whole_module_simulation=True)
        for kind, buffer, *canonical in events:
            event = trace.events.add(kind=kind, buffer_id=buffer, instruction_name=f"i{buffer}")
            event.share_with_canonical_id = canonical[0] if canonical else 0
    for index, fields in enumerate(fixed, start=len(traces)):
        buffers.buffer_allocations.add(index=index, **fields)
    return proto


def test_alloc_adds_and_free_takes_away():
    heap = replay(assignment([10, 30, 5], (0, [(ALLOC, 1), (ALLOC, 2), (FREE, 1), (ALLOC, 3), (FREE, 2), (FREE, 3)])))
    assert heap.timeline == (10, 40, 30, 35, 5, 0)
    assert (heap.peak_bytes, heap.peak_event, heap.timeline_instructions[1]) == (40, 1, "i2")
    assert [(each.buffer_id, each.bytes, each.born, each.dies) for each in heap.live] == [(2, 30, 1, 4), (1, 10, 0, 2)]
    assert heap.timeline_instructions == ("i1", "i2", "i1", "i3", "i2", "i3")


def test_the_first_of_equal_peaks_counts():
    heap = replay(assignment([8, 8], (0, [(ALLOC, 1), (FREE, 1), (ALLOC, 2), (FREE, 2)])))
    assert (heap.peak_bytes, heap.peak_event) == (8, 0)


def test_sharing_keeps_a_region_until_its_last_buffer_ends():
    events = [(ALLOC, 1), (SHARE, 2, 1), (FREE, 1), (ALLOC, 3), (FREE, 2), (FREE, 3)]
    heap = replay(assignment([10, 10, 4], (0, events)))
    assert heap.timeline == (10, 10, 10, 14, 4, 0)
    # At the peak the region of 1 is owned by 2, which is all that is left in it.
    assert [(each.buffer_id, each.group, each.dies) for each in heap.live] == [(2, (1, 2), 4), (3, (3,), 5)]


def test_sharing_revives_a_region_that_has_ended():
    events = [(ALLOC, 1), (FREE, 1), (SHARE, 2, 1), (SHARE, 3, 2), (FREE, 2), (FREE, 3)]
    # The region has the size of the buffer that began it.
    assert replay(assignment([10, 4, 4], (0, events))).timeline == (10, 0, 10, 10, 10, 0)


def test_a_buffer_may_begin_again():
    assert replay(assignment([10], (0, [(ALLOC, 1), (FREE, 1), (ALLOC, 1), (FREE, 1)]))).timeline == (10, 0, 10, 0)


def test_what_lives_throughout():
    fixed = [
        {"size": 100, "is_entry_computation_parameter": True, "parameter_number": 3, "maybe_live_out": True},
        {"size": 20, "maybe_live_out": True},
        {"size": 3, "is_constant": True},
        {"size": 4, "is_thread_local": True},
        {"size": 1000, "is_entry_computation_parameter": True, "color": 5},
        {"size": 7},
    ]
    heap = replay(assignment([10], (0, [(ALLOC, 1), (FREE, 1)]), fixed=fixed))
    assert heap.throughout == {"parameter": 100, "live_out": 20, "constant": 3, "fixed": 7}
    assert heap.throughout_bytes == 130
    assert heap.thread_local_bytes == 4
    assert heap.timeline == (140, 130)
    assert heap.peak_bytes == sum(each.bytes for each in heap.live) == 140
    assert [each.parameter for each in heap.live if each.kind == "parameter"] == [3]
    assert heap.color_peak_bytes == {0: 140, 5: 1000}
    assert heap.host_peak_bytes == 1000


def test_traces_of_several_memories_are_merged_along_the_schedule():
    # Color 0 holds 10 bytes at i1 and i2, color 1 holds 30 at i3 and 5 at i2: never 10 and 30 together.
    device = (0, [(ALLOC, 1), (FREE, 1), (ALLOC, 4), (FREE, 4)])
    collective = (1, [(ALLOC, 2), (FREE, 2), (ALLOC, 3), (FREE, 3)])
    heap = replay(assignment([10, 5, 30, 1], device, collective))
    # i1: 10. i2: 10 + 5, since the end of buffer 1 is not known before the next event of its trace, at i4.
    assert heap.timeline == (10, 15, 10, 40, 30, 31, 30, 0)
    assert heap.peak_bytes == 40
    assert heap.color_peak_bytes == {0: 10, 1: 30}
    # XLA's own figure knows only the largest trace.
    assert heap.xla_peak_bytes == 30


def test_a_trace_belongs_to_the_allocation_that_holds_its_buffers():
    # XLA of jaxlib 0.11.2 leaves the number that the host's allocation had before the others were combined.
    proto = assignment([10, 500], (0, [(ALLOC, 1), (FREE, 1)]), (5, [(ALLOC, 2), (FREE, 2)]))
    proto.buffer_assignment.heap_simulator_traces[1].buffer_allocation_index = 34
    heap = replay(proto)
    assert (heap.peak_bytes, heap.host_peak_bytes) == (10, 500)


def test_a_heap_in_several_blocks_repeats_its_trace():
    events = [(ALLOC, 1), (ALLOC, 2), (FREE, 1), (FREE, 2)]
    proto = assignment([10, 7], (0, events), (0, events))
    first, second = proto.buffer_assignment.buffer_allocations
    del first.assigned[1], second.assigned[0]
    first.size, second.size = 10, 7
    heap = replay(proto)
    assert heap.timeline == (10, 17, 7, 0)
    assert heap.peak_bytes == heap.xla_peak_bytes == heap.need_bytes == 17
    del proto.buffer_assignment.heap_simulator_traces[1].events[3]
    with pytest.raises(RematKitError, match="two heap traces hold the same logical buffer"):
        replay(proto)


@pytest.mark.slow
def test_a_heap_that_xla_splits_is_counted_once():
    def update(ws, x):
        return jax.grad(lambda ws: jax.lax.scan(block, x, ws)[0].astype(jnp.float32).mean())(ws)

    ws = {"up": spec(LAYERS, WIDTH, HIDDEN), "down": spec(LAYERS, HIDDEN, WIDTH)}
    # As large as the largest buffer, the stack of residuals.
    limit = LAYERS * BATCH * HIDDEN * 2
    sample = compiled(jax.jit(update), ws, spec(BATCH, WIDTH), xla_multiheap_size_constraint_per_heap=limit)
    assert len(sample.proto.buffer_assignment.heap_simulator_traces) > 1
    heap = replay(sample.proto)
    assert heap.temp_bytes == sample.memory.temp_size_in_bytes
    # XLA leaves small temporaries outside the heap then, packed and without a trace.
    assert heap.peak_bytes is None
    assert limit < max(heap.timeline) <= heap.need_bytes


def test_a_larger_host_trace_is_what_xla_reports_and_not_the_live_peak():
    heap = replay(assignment([10, 500], (0, [(ALLOC, 1), (FREE, 1)]), (5, [(ALLOC, 2), (FREE, 2)])))
    assert (heap.peak_bytes, heap.host_peak_bytes, heap.xla_peak_bytes) == (10, 500, 500)
    assert [each.buffer_id for each in heap.live] == [1]


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([(FREE, 1)], "frees logical buffer 1, which is not alive"),
        ([(ALLOC, 1), (FREE, 1), (FREE, 1)], "frees logical buffer 1, which is not alive"),
        ([(ALLOC, 1), (ALLOC, 1)], "begins logical buffer 1 while it is alive"),
        ([(ALLOC, 9)], "names the unknown logical buffer 9"),
        ([(SHARE, 1, 9)], "puts logical buffer 1 into 9, which never began"),
        ([(SHARE, 1, 1)], "puts logical buffer 1 into 1, which never began"),
        ([(SHARE, 1, 2), (SHARE, 2, 1)], "puts logical buffer 1 into 2, which never began"),
        ([(7, 1)], "unknown kind 7"),
    ],
)
def test_traces_that_contradict_themselves_are_refused(events, message):
    with pytest.raises(RematKitError, match=message) as caught:
        replay(assignment([10, 10], (0, events)))
    assert "Dump the module again" in str(caught.value)


def test_long_chains_of_sharing_take_linear_time():
    count = 50_000
    events = [(ALLOC, 1), *[(SHARE, number, number - 1) for number in range(2, count + 1)]]
    heap = replay(assignment([1] * count, (0, events)))
    assert heap.peak_bytes == 1
    assert len(heap.live[0].group) == count
    # One stretch an event, all with the same group.
    assert len(heap.buffers) == count
    assert len({id(each.group) for each in heap.buffers}) == 1


def test_assignments_that_contradict_themselves_are_refused():
    with pytest.raises(RematKitError, match="a size of -1 bytes"):
        replay(assignment([-1], (0, [])))
    with pytest.raises(RematKitError, match="a size of -8 bytes"):
        replay(assignment([1], fixed=[{"size": -8}]))
    with pytest.raises(RematKitError, match="has no buffer assignment"):
        replay(assignment([1]))
    twice = assignment([1], (0, []))
    twice.buffer_assignment.logical_buffers.add(id=1, size=2)
    with pytest.raises(RematKitError, match="two logical buffers share one id"):
        replay(twice)
    nowhere = assignment([1], (0, []))
    nowhere.buffer_assignment.heap_simulator_traces.add(buffer_allocation_index=5)
    with pytest.raises(RematKitError, match="unknown allocation 5"):
        replay(nowhere)
    stranger = assignment([1], fixed=[{"size": 8, "is_constant": True}])
    stranger.buffer_assignment.buffer_allocations[0].assigned.add(logical_buffer_id=77)
    with pytest.raises(RematKitError, match="allocation 0 holds an unknown logical buffer"):
        replay(stranger)


def test_flat_positions_cut_a_call_graph_that_goes_in_circles():
    proto = assignment([1, 1])
    proto.hlo_module.computations[0].instructions[0].called_computation_ids.append(1)
    assert flat_positions(proto.hlo_module) == {"i1": 0, "i2": 1}


@pytest.mark.parametrize(("policy", "stack", "triton"), QUICK)
def test_live_peak_equals_xla(policy, stack, triton):
    check_against_xla(step(policy, stack, triton))


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "stack", "triton"), [each for each in SAMPLES if each not in QUICK])
def test_live_peak_equals_xla_for_the_rest(policy, stack, triton):
    check_against_xla(step(policy, stack, triton))


def check_against_xla(sample):
    heap, memory = replay(sample.proto), sample.memory
    assert heap.peak_bytes == heap.xla_peak_bytes == memory.peak_memory_in_bytes
    assert heap.peak_bytes == sum(each.bytes for each in heap.live)
    assert heap.timeline[heap.peak_event] == max(heap.timeline) == heap.peak_bytes
    need = memory.argument_size_in_bytes + memory.output_size_in_bytes
    need += memory.temp_size_in_bytes - memory.alias_size_in_bytes
    assert heap.peak_bytes <= need == heap.need_bytes
    # Everything that is alive was defined by an instruction with a name.
    assert all(each.instruction for each in heap.live)


def test_a_program_without_a_heap_is_its_arguments_and_results():
    # Triton's product needs no workspace, so there is nothing to trace.
    sample = gemm(triton=True)
    heap = replay(sample.proto)
    assert heap.peak_bytes == sample.memory.peak_memory_in_bytes == 2 * (1024 * 512 + 512 * 2048 + 1024 * 2048)
    assert heap.timeline == ()
    assert heap.peak_event is None
    assert [each.parameter for each in heap.live] == [None, 1, 0]


def test_offloaded_values_are_host_memory_and_leave_the_device_figure_alone():
    sample = step("offload")
    heap = replay(sample.proto)
    # One [2048, 2048] of two bytes for each layer, in one stacked buffer.
    stacked = LAYERS * BATCH * HIDDEN * 2
    assert heap.host_peak_bytes == sample.memory.host_temp_size_in_bytes == stacked
    # `dots` keeps the same value on the device, beside the output of the second product.
    assert heap.peak_bytes < replay(step("dots").proto).peak_bytes
    assert all(each.color == 0 for each in heap.live)


def test_parameters_of_a_donating_step():
    heap = replay(step("full").proto)
    weights = LAYERS * WIDTH * HIDDEN * 2
    # Each weight is one allocation with its updated value; the batch is not donated.
    assert heap.throughout["parameter"] == 2 * weights + BATCH * WIDTH * 2
    donated = [each for each in heap.live if each.kind == "parameter" and len(each.group) > 1]
    assert sorted(each.parameter for each in donated) == [0, 1]
    assert all(each.bytes == weights for each in donated)


def test_temporaries_that_are_packed_without_a_trace_leave_the_live_peak_unknown():
    proto = assignment([10, 10], fixed=[{"size": 100, "is_entry_computation_parameter": True}, {"size": 16}])
    for number in (1, 2):
        proto.buffer_assignment.buffer_allocations[1].assigned.add(logical_buffer_id=number)
    heap = replay(proto)
    assert heap.peak_bytes is heap.peak_event is heap.host_peak_bytes is None
    assert heap.timeline == ()
    assert heap.throughout == {"parameter": 100}


def test_the_cpu_backend_has_a_trace_as_well():
    def loss(w, x):
        for _ in range(3):
            x = jnp.tanh(x @ w)
        return x.sum()

    args = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 2
    sample = compiled(jax.jit(jax.grad(loss)), *args)
    heap = replay(sample.proto)
    array = 64 * 64 * 4
    assert heap.throughout == {"parameter": 2 * array, "live_out": array}
    assert 3 * array < heap.peak_bytes <= 3 * array + sample.memory.temp_size_in_bytes


def xprof(sample, folder, color=0):
    """XProf's memory viewer on one memory space: (bytes at the peak, event of the peak)."""
    convert = pytest.importorskip("xprof.convert.raw_to_tool_data")
    run = folder / "plugins/profile/run"
    run.mkdir(parents=True, exist_ok=True)
    (run / "jit_update(1).hlo_proto.pb").write_bytes(sample.data)
    options = {"module_name": "jit_update(1)", "memory_space": str(color)}
    data, _ = convert.xspace_to_tool_data([str(run / "any.xplane.pb")], "memory_viewer", options)
    answer = json.loads(data)
    return round(answer["peakHeapMib"] * 2**20), answer.get("peakHeapSizePosition", 0)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("policy", "stack", "triton"), QUICK)
def test_live_peak_and_its_place_equal_xprof(policy, stack, triton, tmp_path: pathlib.Path):
    sample = step(policy, stack, triton)
    heap = replay(sample.proto)
    assert (heap.peak_bytes, heap.peak_event) == xprof(sample, tmp_path)
    if policy == "offload":
        assert heap.host_peak_bytes == xprof(sample, tmp_path, color=5)[0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("policy", "stack", "triton"), [each for each in SAMPLES if each not in QUICK])
def test_live_peak_and_its_place_equal_xprof_for_the_rest(policy, stack, triton, tmp_path: pathlib.Path):
    sample = step(policy, stack, triton)
    heap = replay(sample.proto)
    assert (heap.peak_bytes, heap.peak_event) == xprof(sample, tmp_path)
    if policy == "offload":
        assert heap.host_peak_bytes == xprof(sample, tmp_path, color=5)[0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_collective_memory_is_counted_where_xla_takes_the_larger_trace(tmp_path: pathlib.Path):
    def loss(ws, x):
        return jax.lax.scan(jax.checkpoint(block), x, ws)[0].astype(jnp.float32).mean()

    def update(ws, x):
        return jax.tree.map(jnp.subtract, ws, jax.grad(loss)(ws, x))

    shard = {
        "up": spec(4, 512, 2048, devices=8, axes=(None, "d")),
        "down": spec(4, 2048, 512, devices=8, axes=(None, "d")),
    }
    batch = spec(8 * 2048, 512, devices=8, axes=("d",))
    out = {name: each.sharding for name, each in shard.items()}
    sample = compiled(jax.jit(update, out_shardings=out), shard, batch, xla_gpu_enable_nccl_user_buffers=True)
    heap = replay(sample.proto)
    assert heap.xla_peak_bytes == sample.memory.peak_memory_in_bytes
    colors = [color for color in heap.color_peak_bytes if color != 0]
    assert len(colors) == 1
    assert heap.color_peak_bytes[0] == xprof(sample, tmp_path)[0]
    separate = sum(heap.color_peak_bytes.values())
    assert max(heap.color_peak_bytes.values()) <= heap.peak_bytes <= separate
    assert heap.xla_peak_bytes < heap.peak_bytes
