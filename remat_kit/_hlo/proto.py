"""The serialized HloProto that XLA dumps, as protobuf messages, without XLA's generated Python code.

Only the fields that this toolkit reads are declared; everything else in a file is skipped by the parser. The
numbers are those of XLA's `hlo.proto` and `xla_data.proto`, where a number is never given to another field.
The messages live in a descriptor pool of their own, so they cannot collide with another package's copy of the
same schema. Enumerations are read as integers.
"""

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from remat_kit._errors import RematKitError

_PACKAGE = "remat_kit.hlo"

# One message a line: `name=number`, with `*` after the name where it repeats and `:type` where it is not an int64.
_SCHEMA = """
HloProto: hlo_module=1:HloModuleProto buffer_assignment=3:BufferAssignmentProto
HloModuleProto: name=1:string entry_computation_name=2:string computations*=3:HloComputationProto id=5 \
  entry_computation_id=6 schedule=7:HloScheduleProto input_output_alias=8:HloInputOutputAliasProto \
  device_assignment=15:DeviceAssignmentProto stack_frame_index=17:StackFrameIndexProto
DeviceAssignmentProto: replica_count=1:int32 computation_count=2:int32
HloScheduleProto: sequences*=1:SequenceEntry
SequenceEntry: key=1 value=2:InstructionSequence
InstructionSequence: instruction_ids*=1
HloInputOutputAliasProto: entries*=1:AliasEntryProto
AliasEntryProto: output_shape_index*=1 parameter_number=2 parameter_shape_index*=3 kind=4:int32
StackFrameIndexProto: file_names*=1:string function_names*=2:string file_locations*=3:FileLocation \
  stack_frames*=4:StackFrame
FileLocation: file_name_id=1:int32 function_name_id=2:int32 line=3:int32 column=4:int32
StackFrame: file_location_id=1:int32 parent_frame_id=2:int32
HloComputationProto: name=1:string instructions*=2:HloInstructionProto id=5 root_id=6 is_fusion_computation=7:bool \
  execution_thread=8:string
HloInstructionProto: name=1:string opcode=2:string shape=3:ShapeProto metadata=7:OpMetadata literal=8:LiteralProto \
  parameter_number=9 fusion_kind=11:string tuple_index=13 dimensions*=14 window=15:Window \
  convolution_dimension_numbers=16:ConvolutionDimensionNumbers slice_dimensions*=17:SliceDimensions \
  dynamic_slice_sizes*=20 custom_call_target=28:string dot_dimension_numbers=30:DotDimensionNumbers \
  gather_slice_sizes*=34 id=35 operand_ids*=36 control_predecessor_ids*=37 called_computation_ids*=38 \
  backend_config=43:bytes replica_groups*=49:ReplicaGroup feature_group_count=50 \
  precision_config=51:PrecisionConfig source_target_pairs*=52:SourceTarget batch_group_count=58 \
  output_operand_aliasing*=74:OutputOperandAliasing async_execution_thread=79:string \
  collective_device_list=87:CollectiveDeviceListProto iota_collective_device_list=92:IotaReplicaGroupListProto \
  mesh_axes_replica_group_list=93:MeshAxesReplicaGroupListProto
OpMetadata: op_type=1:string op_name=2:string source_file=3:string source_line=4:int32 stack_frame_id=15:int32
LiteralProto: s32s*=4:int32 s64s*=5
OutputOperandAliasing: output_shape_index*=1 operand_index=2 operand_shape_index*=3
ShapeProto: element_type=2:int32 dimensions*=3 tuple_shapes*=4:ShapeProto layout=5:LayoutProto
LayoutProto: minor_to_major*=1 element_size_in_bits=7 memory_space=8
SliceDimensions: start=1 limit=2 stride=3
Window: dimensions*=1:WindowDimension
WindowDimension: size=1 stride=2 padding_low=3 padding_high=4 window_dilation=5 base_dilation=6
ConvolutionDimensionNumbers: kernel_input_feature_dimension=3 kernel_output_feature_dimension=4 \
  kernel_spatial_dimensions*=6 input_batch_dimension=7 input_feature_dimension=8 output_batch_dimension=9 \
  output_feature_dimension=10 input_spatial_dimensions*=11 output_spatial_dimensions*=12
DotDimensionNumbers: lhs_contracting_dimensions*=1 rhs_contracting_dimensions*=2 lhs_batch_dimensions*=3 \
  rhs_batch_dimensions*=4
PrecisionConfig: operand_precision*=1:int32 algorithm=2:int32
ReplicaGroup: replica_ids*=1
SourceTarget: source=1 target=2
IotaReplicaGroupListProto: num_replica_groups=1 num_devices_per_group=2
CollectiveDeviceListProto: replica_groups*=1:ReplicaGroup iota_replica_group_list=2:IotaReplicaGroupListProto
MeshAxesReplicaGroupListProto: mesh=1:MeshProto axes*=2:AxisRefProto
MeshProto: axes*=1:MeshAxis device_ids*=2
MeshAxis: name=1:string size=2
AxisRefProto: mesh_axis_index=1 sub_axis_info=2:SubAxis
SubAxis: pre_size=1 size=2
BufferAssignmentProto: logical_buffers*=1:LogicalBufferProto buffer_aliases*=2:BufferAlias \
  buffer_allocations*=3:BufferAllocationProto heap_simulator_traces*=4:HeapSimulatorTrace
BufferAlias: source_buffer_id=1 location=2:Location
LogicalBufferProto: id=1 size=2 defined_at=3:Location color=4
Location: instruction_name=2:string shape_index*=3 instruction_id=4
BufferAllocationProto: index=1 size=2 is_thread_local=3:bool is_entry_computation_parameter=5:bool \
  parameter_number=6 maybe_live_out=7:bool color=8 assigned*=9:Assigned parameter_shape_index*=10 is_tuple=11:bool \
  is_constant=12:bool
Assigned: logical_buffer_id=1 offset=2 size=3
HeapSimulatorTrace: events*=1:HeapEvent whole_module_simulation=2:bool buffer_allocation_index=3
HeapEvent: kind=1:int32 buffer_id=2 computation_name=3:string instruction_name=4:string share_with_canonical_id=5
"""

_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "": _Field.TYPE_INT64,
    "int32": _Field.TYPE_INT32,
    "bool": _Field.TYPE_BOOL,
    "string": _Field.TYPE_STRING,
    "bytes": _Field.TYPE_BYTES,
}


def _message_classes() -> dict[str, Any]:
    """The message class of every line of the schema, by name."""
    file = descriptor_pb2.FileDescriptorProto(name="remat_kit/hlo.proto", package=_PACKAGE, syntax="proto3")
    for line in _SCHEMA.strip().splitlines():
        title, _, fields = line.partition(":")
        message = file.message_type.add(name=title)
        for text in fields.split():
            declared, _, rest = text.partition("=")
            number, _, kind = rest.partition(":")
            label = _Field.LABEL_REPEATED if declared.endswith("*") else _Field.LABEL_OPTIONAL
            field = message.field.add(name=declared.rstrip("*"), number=int(number), label=label)
            if kind in _SCALARS:
                field.type = _SCALARS[kind]
            else:
                field.type, field.type_name = _Field.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    names = [message.name for message in file.message_type]
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")) for name in names}


MESSAGES = _message_classes()
"""Message classes by name, e.g. `MESSAGES["HloProto"]`; `parse` makes one of the latter."""


def parse(data: bytes) -> Any:
    """The HloProto message of `data`, the bytes of a file `*after_optimizations.hlo.pb` that XLA dumped.

    Every attribute of the message is one of the fields above. Linear in the size of the data; a module of
    42,000 instructions takes some 50 ms.

    Raises RematKitError when `data` is not a serialized HloProto, or is one without a module in it.
    """
    if not isinstance(data, bytes | bytearray | memoryview):
        raise RematKitError(f"got {type(data).__name__} where the bytes of an HloProto are wanted. {_NEXT}")
    message = MESSAGES["HloProto"]()
    try:
        message.ParseFromString(bytes(data))
    except DecodeError as error:
        raise RematKitError(f"{len(data)} bytes that are not a serialized HloProto ({error}). {_NEXT}") from error
    if not message.hlo_module.computations:
        raise RematKitError(f"{len(data)} bytes hold no HLO module with computations. {_NEXT}")
    return message


_NEXT = (
    "Give the contents of *after_optimizations.hlo.pb, which XLA writes with the compiler options xla_dump_to=DIR and "
    "xla_dump_hlo_as_proto=True; a text dump or a module alone will not do."
)
