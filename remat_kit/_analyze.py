"""`analyze`: the record of a compiled step."""

import re
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from remat_kit import _fingerprint
from remat_kit._compile import CompiledStep, MemoryStats
from remat_kit._hlo.heap import Heap, LiveBuffer, replay
from remat_kit._hlo.module import Instruction, Module
from remat_kit._hlo.proto import parse
from remat_kit._hlo.roofline import predict
from remat_kit._policy import Policy, get_policy
from remat_kit._record import Record
from remat_kit._step import Workload, label_of
from remat_kit._target import judge_fit
from remat_kit._trace import TracedStep
from remat_kit._units import MiB, format_bytes

UNKNOWN = "not attributed"


def analyze(compiled: CompiledStep, workload: Workload, policy: str | Policy) -> Record:
    """All that is known of `compiled` without running it; see Record for where each figure comes from.

    `workload` and `policy` are only written down. The live peak, and what belongs to it, is None where the
    compiler left no heap trace of what it packed.
    """
    start = time.perf_counter()
    traced, memory = compiled.traced, compiled.memory
    target = traced.target
    proto = parse(compiled.hlo_proto)
    module = Module.from_proto(proto)
    heap = replay(proto)
    prediction = predict(module, target.chip)
    need = need_bytes(memory)
    constants = heap.throughout.get("constant", 0)
    fit = judge_fit(need + constants, target)
    categories, phase_of_peak = _at_the_peak(heap, module, proto, traced)
    work, saved = traced.work, traced.saved
    return Record(
        workload=workload.spec,
        options=dict(workload.options),
        policy=get_policy(policy).name,
        target=target.name,
        mesh=dict(target.mesh),
        versions=_fingerprint.versions(),
        xla_remat=_xla_remat(module, compiled.options.xla_remat),
        gemm_backend=compiled.options.gemm_backend(target.chip.platform),
        compile_options=dict(compiled.options.xla_options),
        argument_bytes=memory.argument,
        output_bytes=memory.output,
        alias_bytes=memory.alias,
        temp_bytes=memory.temp,
        host_argument_bytes=memory.host_argument,
        host_output_bytes=memory.host_output,
        host_temp_bytes=memory.host_temp,
        need_bytes=need,
        constant_bytes=constants,
        live_peak_bytes=heap.peak_bytes,
        live_peak_phase=phase_of_peak,
        # XLA's own figure leaves temporaries out on the CPU.
        xla_peak_bytes=memory.peak if target.chip.platform != "cpu" else None,
        categories=categories,
        attributed_share=_share(categories, heap.peak_bytes),
        saved_bytes=saved.device_bytes,
        saved_host_bytes=saved.host_bytes,
        saved_bytes_per_block=saved.device_bytes_per_block,
        model_flops=work.flops - work.recomputed_flops,
        step_flops=work.flops,
        recompute_flops=work.recomputed_flops,
        recomputed_matmuls=work.recomputed_matmuls,
        predicted_step_s=prediction.seconds,
        predicted_breakdown_s=dict(prediction.breakdown),
        trace_s=traced.trace_s,
        compile_s=compiled.compile_s,
        analyze_s=time.perf_counter() - start,
        capacity_bytes=fit.capacity_bytes,
        fits=fit.fits,
        margin_bytes=fit.margin_bytes,
        assumptions=fit.assumptions,
        warnings=(*traced.warnings, *_warnings(module, constants), *prediction.warnings),
    )


def need_bytes(memory: MemoryStats) -> int:
    """What the executable allocates on the device before its first kernel: argument + output - alias + temp."""
    return memory.argument + memory.output - memory.alias + memory.temp


def _xla_remat(module: Module, asked: str) -> str:
    """ "fired" when XLA's pass left clones, which it names `fusion.12.remat` or `.remat2`, else what was asked for."""
    clone = re.compile(r"\.remat\d*(\.|$)")
    return "fired" if any(clone.search(each.name) for each in module.instructions.values()) else asked


def _warnings(module: Module, constants: int) -> tuple[str, ...]:
    found = []
    if any("fmha" in each.custom_call_target for each in module.instructions.values()):
        found.append("the workspace of cuDNN's fused attention is chosen on the device and is not in these bytes")
    if constants >= MiB:
        found.append(
            f"the program holds {format_bytes(constants)} of constants, which come on top of what the step needs; "
            "arrays that a step captures from outside become constants: pass them as arguments"
        )
    return tuple(found)


def _at_the_peak(heap: Heap, module: Module, proto: Any, traced: TracedStep) -> tuple[dict[str, int], str | None]:
    """Bytes by category at the live peak, largest first, and the phase in which it is."""
    if heap.peak_bytes is None:
        return {}, None
    labels = _labels_of_parameters(module, traced)
    made_by = {buffer.id: buffer.defined_at.instruction_id for buffer in proto.buffer_assignment.logical_buffers}
    sizes: dict[str, int] = defaultdict(int)
    for buffer in heap.live:
        makers = [module.instructions.get(made_by.get(member, -1)) for member in (buffer.buffer_id, *buffer.group)]
        sizes[_category(buffer, makers, labels)] += buffer.bytes
    at = module.by_name.get(heap.peak_computation)
    peak = next((each for each in at.instructions if each.name == heap.peak_instruction), None) if at else None
    return dict(sorted(sizes.items(), key=lambda item: -item[1])), phase_of(peak) if peak else None


def _category(buffer: LiveBuffer, makers: Sequence[Instruction | None], labels: Mapping[int, str]) -> str:
    """A parameter's label, or the phase of the first instruction in the buffer's memory that tells one."""
    if buffer.kind == "parameter":
        return labels.get(buffer.parameter, UNKNOWN) if buffer.parameter is not None else UNKNOWN
    if buffer.kind != "temp":
        return {"live_out": "outputs", "constant": "constants"}.get(buffer.kind, UNKNOWN)
    phases = (phase_of(maker) for maker in makers if maker is not None)
    known = next((phase for phase in phases if phase != "unknown"), None)
    return f"made in {known}" if known else UNKNOWN


def phase_of(instruction: Instruction) -> str:
    """The phase of `instruction`, or of what is fused into it when XLA gave the fusion itself no name."""
    fused = (each for called in instruction.called for each in reversed(called.instructions))
    phases = (each.phase for each in (instruction, *fused))
    return next((phase for phase in phases if phase != "unknown"), "unknown")


def _labels_of_parameters(module: Module, traced: TracedStep) -> dict[int, str]:
    """Entry parameter number -> label. JAX drops unused arguments, so parameters are matched by their names."""
    leaves = jax.tree_util.tree_leaves_with_path(traced.step.args)
    names = traced.traced.jaxpr.jaxpr.debug_info.arg_names
    label_of_name = {
        name: label_of(path, traced.step.labels) for name, (path, _) in zip(names, leaves, strict=True) if name
    }
    found = {}
    for parameter in module.entry.parameters:
        label = label_of_name.get(parameter.op_name.replace("\\'", "'"))  # XLA escapes the quotes of a path
        if label:
            found[parameter.parameter_number] = label
    return found


def _share(categories: Mapping[str, int], peak: int | None) -> float | None:
    return None if not peak else 1.0 - categories.get(UNKNOWN, 0) / peak
