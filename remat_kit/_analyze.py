"""`analyze`: the record of a compiled step."""

import time

import jax

from remat_kit import _fingerprint
from remat_kit._compile import CompiledStep, MemoryStats
from remat_kit._hlo.arguments import category_of_label
from remat_kit._hlo.roofline import predict
from remat_kit._overlap import overlap
from remat_kit._policy import Policy, get_policy
from remat_kit._program import read_program
from remat_kit._record import Record
from remat_kit._step import Workload, label_of
from remat_kit._target import judge_fit
from remat_kit._trace import TracedStep


def analyze(compiled: CompiledStep, workload: Workload, policy: str | Policy) -> Record:
    """All that is known of `compiled` without running it; see Record for where each figure comes from.

    `workload` and `policy` are only written down. The live peak, and what belongs to it, is None where the
    compiler left no heap trace of what it packed.
    """
    start = time.perf_counter()
    traced, memory = compiled.traced, compiled.memory
    target = traced.target
    program = read_program(compiled.hlo_proto, categories_of_arguments(traced))
    prediction = predict(program.module, target.chip)
    need = need_bytes(memory)
    fit = judge_fit(need + program.constant_bytes, target)
    work, saved = traced.work, traced.saved
    copies = overlap(program.module, prediction).advice(max(0, fit.margin_bytes))
    return Record(
        workload=workload.spec,
        options=dict(workload.options),
        policy=get_policy(policy).name,
        target=target.name,
        mesh=dict(target.mesh),
        versions=_fingerprint.versions(),
        xla_remat=program.xla_remat(compiled.options.xla_remat),
        gemm_backend=compiled.options.gemm_backend(target.chip.platform),
        compile_options=dict(compiled.options.xla_options),
        items=dict(traced.step.items),
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
        warnings=(*traced.warnings, *program.warnings(), *prediction.warnings, *copies),
        **program.fields(),
        **program.communication(prediction),
    )


def need_bytes(memory: MemoryStats) -> int:
    """What the executable allocates on the device before its first kernel: argument + output - alias + temp."""
    return memory.argument + memory.output - memory.alias + memory.temp


def categories_of_arguments(traced: TracedStep) -> dict[str, str]:
    """Category of each argument by the name of its leaf in JAX. Unused ones are dropped, so numbers do not serve."""
    leaves = jax.tree_util.tree_leaves_with_path(traced.step.args)
    names = traced.traced.jaxpr.jaxpr.debug_info.arg_names
    return {
        name: category_of_label(label)
        for name, (path, _) in zip(names, leaves, strict=True)
        if name and (label := label_of(path, traced.step.labels)) != "arguments"
    }
