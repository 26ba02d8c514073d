"""`analyze`: the record of a compiled step, and of a compiled module that came as a file."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from remat_kit import _fingerprint
from remat_kit._compile import CompiledStep, MemoryStats
from remat_kit._explain import categories_at_peak, explain, is_remat_clone
from remat_kit._explanation import UNKNOWN, Explanation
from remat_kit._hlo.anatomy import anatomy
from remat_kit._hlo.arguments import category_of_label
from remat_kit._hlo.heap import Heap, replay
from remat_kit._hlo.module import Module
from remat_kit._hlo.proto import parse
from remat_kit._hlo.roofline import predict
from remat_kit._policy import Policy, get_policy
from remat_kit._record import Record
from remat_kit._step import Workload, label_of
from remat_kit._target import Target, judge_fit
from remat_kit._trace import TracedStep
from remat_kit._units import MiB, format_bytes


@dataclass(frozen=True)
class _Program:
    """A compiled module, replayed and explained."""

    module: Module
    heap: Heap
    explanation: Explanation
    categories: Mapping[str, int]

    @property
    def constants(self) -> int:
        return self.heap.throughout.get("constant", 0)

    def fields(self) -> dict[str, Any]:
        """What a record says of it, wherever it came from."""
        peak = self.heap.peak_bytes
        return {
            "constant_bytes": self.constants,
            "live_peak_bytes": peak,
            "live_peak_phase": None if self.heap.peak_event is None else self.explanation.peak.phase,
            "categories": {} if peak is None else self.categories,
            "attributed_share": None if not peak else 1.0 - self.categories.get(UNKNOWN, 0) / peak,
            "explanation": None if peak is None else self.explanation,
        }


def _read(data: bytes, said: Mapping[str, str] | None = None) -> _Program:
    proto = parse(data)
    module = Module.from_proto(proto)
    heap = replay(proto)
    explanation = explain(anatomy(module, proto, heap, said))
    return _Program(module, heap, explanation, categories_at_peak(explanation))


def analyze(compiled: CompiledStep, workload: Workload, policy: str | Policy) -> Record:
    """All that is known of `compiled` without running it; see Record for where each figure comes from.

    `workload` and `policy` are only written down. The live peak, and what belongs to it, is None where the
    compiler left no heap trace of what it packed.
    """
    start = time.perf_counter()
    traced, memory = compiled.traced, compiled.memory
    target = traced.target
    program = _read(compiled.hlo_proto, _categories_of_arguments(traced))
    prediction = predict(program.module, target.chip)
    need = need_bytes(memory)
    fit = judge_fit(need + program.constants, target)
    work, saved = traced.work, traced.saved
    return Record(
        workload=workload.spec,
        options=dict(workload.options),
        policy=get_policy(policy).name,
        target=target.name,
        mesh=dict(target.mesh),
        versions=_fingerprint.versions(),
        xla_remat=_xla_remat(program.module, compiled.options.xla_remat),
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
        # XLA's own figure leaves temporaries out on the CPU.
        xla_peak_bytes=memory.peak if target.chip.platform != "cpu" else None,
        saved_bytes=saved.device_bytes,
        saved_host_bytes=saved.host_bytes,
        saved_bytes_per_block=saved.device_bytes_per_block,
        model_flops=work.flops - work.recomputed_flops,
        step_flops=work.flops,
        recompute_flops=work.recomputed_flops,
        recomputed_matmuls=work.recomputed_matmuls,
        checkpoints=traced.checkpoints,
        predicted_step_s=prediction.seconds,
        predicted_breakdown_s=dict(prediction.breakdown),
        trace_s=traced.trace_s,
        compile_s=compiled.compile_s,
        analyze_s=time.perf_counter() - start,
        capacity_bytes=fit.capacity_bytes,
        fits=fit.fits,
        margin_bytes=fit.margin_bytes,
        assumptions=fit.assumptions,
        warnings=(*traced.warnings, *_warnings(program), *prediction.warnings),
        **program.fields(),
    )


def analyze_module(data: bytes, name: str, target: Target | None = None) -> Record:
    """All that the bytes of an HloProto tell, of whatever step it was compiled from. Compiles nothing.

    `name` is written down as the workload. With `target` there is a predicted step time, and whether it fits; without,
    both are None and the record's target is "". Policy and options are not known. Raises RematKitError when `data` is
    not a compiled module with its buffer assignment.
    """
    start = time.perf_counter()
    program = _read(data)
    heap = program.heap
    prediction = predict(program.module, target.chip) if target else None
    fit = judge_fit(heap.need_bytes + program.constants, target) if target else None
    return Record(
        workload=name,
        options={},
        policy="",
        target=target.name if target else "",
        mesh=dict(target.mesh) if target else {"devices": program.module.num_devices},
        versions={},
        xla_remat=_xla_remat(program.module, "unknown"),
        gemm_backend="unknown",
        argument_bytes=heap.argument_bytes,
        output_bytes=heap.output_bytes,
        alias_bytes=heap.alias_bytes,
        temp_bytes=heap.temp_bytes,
        host_temp_bytes=heap.host_temp_bytes,
        need_bytes=heap.need_bytes,
        xla_peak_bytes=None,
        predicted_step_s=prediction.seconds if prediction else None,
        predicted_breakdown_s=dict(prediction.breakdown) if prediction else {},
        analyze_s=time.perf_counter() - start,
        capacity_bytes=fit.capacity_bytes if fit else None,
        fits=fit.fits if fit else None,
        margin_bytes=fit.margin_bytes if fit else None,
        assumptions=fit.assumptions if fit else (),
        warnings=(*_warnings(program), *(prediction.warnings if prediction else ())),
        **program.fields(),
    )


def need_bytes(memory: MemoryStats) -> int:
    """What the executable allocates on the device before its first kernel: argument + output - alias + temp."""
    return memory.argument + memory.output - memory.alias + memory.temp


def _xla_remat(module: Module, asked: str) -> str:
    """ "fired" when XLA's pass left clones, else what was asked for."""
    return "fired" if any(is_remat_clone(each.name) for each in module.instructions.values()) else asked


def _warnings(program: _Program) -> tuple[str, ...]:
    found = []
    if any("fmha" in each.custom_call_target for each in program.module.instructions.values()):
        found.append("the workspace of cuDNN's fused attention is chosen on the device and is not in these bytes")
    if program.constants >= MiB:
        found.append(
            f"the program holds {format_bytes(program.constants)} of constants, which come on top of what the step "
            "needs; arrays that a step captures from outside become constants: pass them as arguments"
        )
    return tuple(found)


def _categories_of_arguments(traced: TracedStep) -> dict[str, str]:
    """Category of each argument by the name of its leaf in JAX. Unused ones are dropped, so numbers do not serve."""
    leaves = jax.tree_util.tree_leaves_with_path(traced.step.args)
    names = traced.traced.jaxpr.jaxpr.debug_info.arg_names
    return {
        name: category_of_label(label)
        for name, (path, _) in zip(names, leaves, strict=True)
        if name and (label := label_of(path, traced.step.labels)) != "arguments"
    }
