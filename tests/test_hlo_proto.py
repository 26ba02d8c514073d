"""The schema reads what XLA writes and refuses everything else."""

import pytest
from hlo_samples import compiled, gemm

from remat_kit._errors import RematKitError
from remat_kit._hlo.proto import MESSAGES, parse


def test_parse_reads_a_dumped_module():
    proto = parse(gemm(triton=False).data)
    assert proto.hlo_module.name.startswith("jit_")
    entry = proto.hlo_module.computations[-1]
    assert entry.id == proto.hlo_module.entry_computation_id
    assert {instruction.opcode for instruction in entry.instructions} >= {"parameter", "custom-call"}
    # Two parameters, one result, one workspace.
    assert len(proto.buffer_assignment.buffer_allocations) == 4
    sizes = {allocation.size for allocation in proto.buffer_assignment.buffer_allocations}
    # [1024, 512], [512, 2048] and [1024, 2048] of two bytes; XLA gives cuBLASLt 4 MiB, and the call's result, a table
    # of two pointers, takes one aligned unit of 256 bytes behind it.
    assert sizes == {1024 * 512 * 2, 512 * 2048 * 2, 1024 * 2048 * 2, 4 * 2**20 + 256}


def test_parse_takes_any_bytes_like_object():
    data = gemm(triton=False).data
    assert parse(bytearray(data)) == parse(memoryview(data)) == parse(data)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "0 bytes hold no HLO module"),
        (b"HloModule jit_step, is_scheduled=true", "not a serialized HloProto"),
        (b"\xff" * 64, "not a serialized HloProto"),
        (MESSAGES["HloProto"]().SerializeToString(), "hold no HLO module"),
        ("text", "got str where the bytes of an HloProto are wanted"),
        (None, "got NoneType"),
    ],
)
def test_garbage_is_refused_with_the_next_step(data, message):
    with pytest.raises(RematKitError, match=message) as caught:
        parse(data)
    assert "xla_dump_hlo_as_proto=True" in str(caught.value)


def test_truncated_files_never_raise_anything_else():
    data = gemm(triton=False).data
    for end in range(0, len(data), 7):
        try:
            parse(data[:end])
        except RematKitError:
            continue


def test_messages_are_not_those_of_other_packages():
    from google.protobuf import descriptor_pool

    with pytest.raises(KeyError):
        descriptor_pool.Default().FindMessageTypeByName("remat_kit.hlo.HloProto")


def test_a_module_for_the_cpu_is_read_too():
    import jax

    program = jax.jit(lambda x: x @ x)
    sample = compiled(program, jax.ShapeDtypeStruct((8, 8), "float32"))
    assert sample.proto.hlo_module.computations
