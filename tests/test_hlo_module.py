"""The module view: what is in it, in which phase, from which line; and that a malformed module is refused."""

import collections
import inspect
import time

import hlo_samples
import pytest
from hlo_samples import LAYERS, STACKED_TWICE, add, hand_made, step

from remat_kit._errors import RematKitError
from remat_kit._hlo.frames import Frame, Frames
from remat_kit._hlo.module import Module, Shape, phase, shape_of
from remat_kit._hlo.proto import MESSAGES


@pytest.mark.parametrize(
    ("op_name", "expected"),
    [
        ("jit(step)/jvp()/while/body/eval_jaxpr/dot_general", "forward"),
        ("jit(step)/jvp(Model)/Block_0/jit(gelu)/tanh", "forward"),
        ("jit(step)/jvp()/transpose", "forward"),
        ("jit(step)/transpose(jvp(jvp()))/checkpoint/dot_general", "backward"),
        ("jit(step)/transpose(jvp())/while/body/eval_jaxpr/checkpoint/transpose", "backward"),
        ("jit(step)/transpose(jvp(jvp()))/checkpoint/rematted_computation/mul", "recompute"),
        ("jit(step)/transpose(jvp(M))/while/body/eval_jaxpr/checkpoint/rematted_computation/Block_0/add", "recompute"),
        ("jit(step)/sub", "update"),
        ("ws['up']", "update"),
        ("", "unknown"),
    ],
)
def test_phase_of_a_name(op_name, expected):
    assert phase(op_name) == expected


def matmuls_by_phase(module: Module) -> dict[str, int]:
    calls = [each for each in module.instructions.values() if each.custom_call_target.startswith("__cublas$")]
    return dict(collections.Counter(each.phase for each in calls))


def test_scanned_step_has_its_matmuls_in_their_phases():
    # One block, compiled once: up and down forward; dx and dw of both backward, and `up` again. XLA drops the second
    # run of `down`, whose result backward does not need.
    assert matmuls_by_phase(step("full").module) == {"forward": 2, "backward": 4, "recompute": 1}
    # Nothing is run again when the products are saved.
    assert matmuls_by_phase(step("dots").module) == {"forward": 2 + STACKED_TWICE, "backward": 4}


def test_unrolled_step_has_them_once_a_layer():
    # As scanned, but nobody asks for the first layer's dx with respect to the batch: 4 * 4 - 1.
    found = matmuls_by_phase(step("full", "unroll").module)
    assert found == {"forward": 2 * LAYERS, "backward": 4 * LAYERS - 1, "recompute": LAYERS}


def test_while_loops_know_their_trips_and_what_they_call():
    module = step("full").module
    loops = [each for each in module.instructions.values() if each.opcode == "while"]
    assert [loop.trip_count for loop in loops] == [LAYERS, LAYERS]
    for loop in loops:
        body, condition = loop.called
        assert body.root.shape == loop.shape == body.parameters[0].shape
        assert str(condition.root.shape) == "pred[]"


def test_operands_users_schedule_and_names_agree():
    module = step("full").module
    assert module.name == "jit_update"
    assert module.by_name[module.entry.name] is module.entry
    assert module.num_devices == 1
    for computation in module.computations.values():
        assert sorted(each.id for each in computation.schedule) == sorted(each.id for each in computation.instructions)
        for instruction in computation.instructions:
            assert module.instructions[instruction.id] is instruction
            for operand in instruction.operands:
                assert instruction in operand.users
            for user in instruction.users:
                assert instruction in user.operands
    # Both weights are donated and come back as results 0 and 1.
    assert sorted((output, number) for output, number, _ in module.input_output_alias) == [((0,), 0), ((1,), 1)]
    names = {each.op_name for each in module.entry.parameters}
    assert names == {"ws['up']", "ws['down']", "x"}


def test_source_is_the_line_in_this_directory():
    module = step("full").module
    lines, first = inspect.getsourcelines(hlo_samples.block)
    sources = [
        module.source(each)
        for each in module.instructions.values()
        if each.op_name.endswith("rematted_computation/tanh")
    ]
    assert sources
    for source in sources:
        assert source is not None
        assert source.file == hlo_samples.__file__
        # gelu is called on the last line of the block; jax.nn's own frames are passed over.
        assert source.line == first + len(lines) - 1
        assert source.function == "block"
    assert module.source(module.entry.parameters[0]) is None


def test_offloaded_values_are_in_host_memory():
    module = step("offload").module
    hosts = [each for each in module.entry.instructions if each.shape.is_host]
    assert [str(each.shape) for each in hosts if each.opcode == "custom-call"] == ["bf16[4,2048,2048]{S(5)}"]


def shape_proto(number: int, *dims: int, bits: int = 0):
    proto = MESSAGES["ShapeProto"](element_type=number, dimensions=dims)
    proto.layout.element_size_in_bits = bits
    return proto


@pytest.mark.parametrize(
    ("proto", "text", "size_bytes"),
    [
        (shape_proto(16, 3, 5), "bf16[3,5]", 30),
        (shape_proto(11), "f32[]", 4),
        (shape_proto(1, 7), "pred[7]", 7),
        (shape_proto(20, 7), "f8e4m3fn[7]", 7),
        (shape_proto(18, 2), "c128[2]", 32),
        (shape_proto(21, 7), "s4[7]", 7),
        (shape_proto(21, 7, bits=4), "s4[7]", 4),
        (shape_proto(17), "token[]", 0),
        (shape_proto(11, 0, 8), "f32[0,8]", 0),
    ],
)
def test_shape_bytes(proto, text, size_bytes):
    shape = shape_of(proto)
    assert str(shape) == text
    assert shape.bytes == size_bytes


def test_tuple_shape():
    proto = MESSAGES["ShapeProto"](element_type=13)
    proto.tuple_shapes.add(element_type=16, dimensions=[4])
    proto.tuple_shapes.add(element_type=13).tuple_shapes.add(element_type=11, dimensions=[2, 2])
    shape = shape_of(proto)
    assert str(shape) == "(bf16[4], (f32[2,2]))"
    assert shape.bytes == 8 + 16
    assert [(index, str(leaf)) for index, leaf in shape.leaves()] == [((0,), "bf16[4]"), ((1, 0), "f32[2,2]")]
    assert shape.size == 0
    assert Shape("f32", (3,)).size == 3


def frames(*stack: tuple[str, int]) -> Frames:
    """Frames 1, 2, ...; each is (file, parent)."""
    index = MESSAGES["StackFrameIndexProto"]()
    for number, (file, parent) in enumerate(stack, start=1):
        index.file_names.append(file)
        index.file_locations.add(file_name_id=number, line=10 * number)
        index.stack_frames.add(file_location_id=number, parent_frame_id=parent)
    return Frames.from_proto(index)


def test_user_frame_is_the_innermost_of_the_users():
    found = frames(
        ("/home/me/train.py", 0),
        ("/venv/lib/site-packages/flax/linen/module.py", 1),
        ("/home/me/model.py", 2),
        ("/src/jax/_src/nn/functions.py", 3),
        ("/usr/lib/python3.12/functools.py", 4),
    )
    assert found.user(5) == Frame("/home/me/model.py", 30, "")
    assert found.user(2) == Frame("/home/me/train.py", 10, "")
    assert [each.line for each in found.stack(5)] == [50, 40, 30, 20, 10]
    assert found.user(0) is found.user(99) is found.user(-1) is None


def test_frames_that_lead_nowhere_or_in_circles_end():
    library = "/x/site-packages/a.py"
    assert frames((library, 2), (library, 1)).user(1) is None
    assert len(frames((library, 2), (library, 1)).stack(1)) == 2
    assert frames((library, 77)).user(1) is None


def small():
    """f32[4] negated."""

    def main(computation):
        add(computation, 1, "parameter", (4,))
        return add(computation, 2, "negate", (4,), [1]).id

    return hand_made(main=main)


def broken(change):
    proto = small()
    change(proto.hlo_module)
    return proto


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.computations[0].instructions[1].operand_ids.append(9), "uses 9, which does not stand before it"),
        (lambda m: m.computations[0].instructions[1].operand_ids.append(2), "uses 2, which does not stand before it"),
        (lambda m: m.computations[0].instructions[1].called_computation_ids.append(1), "uses 1, which does not stand"),
        (lambda m: setattr(m.computations[0].instructions[1], "id", 1), "two instructions of the module have the id 1"),
        (lambda m: m.computations.add(id=1, root_id=2), "two computations of the module have the id 1"),
        (lambda m: setattr(m, "entry_computation_id", 5), "has no computation 5, its entry"),
        (lambda m: setattr(m.computations[0], "root_id", 5), "has no instruction 5, its root"),
        (lambda m: m.schedule.sequences.add(key=1).value.instruction_ids.append(7), "the unknown instruction 7"),
        (lambda m: setattr(m.computations[0].instructions[0].shape, "element_type", 99), "type number 99"),
        (lambda m: m.computations[0].instructions[0].shape.dimensions.append(-1), "sizes are at least 0"),
    ],
)
def test_malformed_modules_are_refused(change, message):
    with pytest.raises(RematKitError, match=message) as caught:
        Module.from_proto(broken(change))
    assert "Dump it again" in str(caught.value)


@pytest.mark.parametrize("config", [b"", b"text", b"{", b"[1]", b"\xff\xfe", b'{"known_trip_count": {"n": "many"}}'])
def test_backend_configs_that_are_not_objects_say_nothing(config):
    proto = small()
    proto.hlo_module.computations[0].instructions[1].backend_config = config
    root = Module.from_proto(proto).entry.root
    assert root.trip_count is None
    assert root.config().get("anything") is None


def test_groups_of_a_collective_in_each_way_of_writing_them():
    ways = [
        lambda i: i.collective_device_list.replica_groups.add(replica_ids=[0, 1, 2]),
        lambda i: i.replica_groups.add(replica_ids=[0, 1, 2]),
        lambda i: setattr(i.iota_collective_device_list, "num_devices_per_group", 3),
        lambda i: setattr(i.collective_device_list.iota_replica_group_list, "num_devices_per_group", 3),
        lambda i: (
            i.mesh_axes_replica_group_list.mesh.axes.add(name="a", size=3),
            i.mesh_axes_replica_group_list.axes.add(mesh_axis_index=0),
        ),
    ]
    for way in ways:
        proto = small()
        way(proto.hlo_module.computations[0].instructions[1])
        assert Module.from_proto(proto).entry.root.group_size == 3
    assert Module.from_proto(small()).entry.root.group_size is None


def test_forty_thousand_instructions_take_well_under_a_second():
    def main(computation):
        add(computation, 1, "parameter", (4, 4))
        for number in range(2, 40_001):
            made = add(computation, number, "add", (4, 4), [number - 1, max(1, number - 2)])
            made.metadata.op_name = f"jit(step)/jvp(M)/Block_{number % 48}/add"
        return 40_000

    proto = hand_made(main=main)
    best = float("inf")
    for _ in range(3):
        begin = time.perf_counter()
        module = Module.from_proto(proto)
        best = min(best, time.perf_counter() - begin)
    assert len(module.instructions) == 40_000
    assert best < 1.0
