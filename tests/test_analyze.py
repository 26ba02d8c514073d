"""Records of compiled training steps: XLA's totals to the byte, categories that add up, and what a device says."""

import dataclasses
import functools
import math
import pathlib
import re
import subprocess
import sys
from typing import Any

import hlo_samples  # sets what the plugin needs, before JAX starts
import jax
import jax.numpy as jnp
import pytest
from test_hlo_heap import xprof

from models import transformer
from remat_kit import (
    CompiledStep,
    CompileOptions,
    MeasurementError,
    Record,
    Step,
    TargetError,
    Workload,
    analyze,
    check_gradients,
    compile_step,
    get_policy,
    get_target,
    measure_interleaved,
    real_args,
    trace,
)
from remat_kit import _trace as trace_file
from remat_kit._hlo.heap import Heap, replay
from remat_kit._hlo.module import Module
from remat_kit._hlo.proto import parse
from remat_kit._hlo.roofline import predict
from remat_kit._measure import tolerance_of

H100 = "h100-sxm-80gb"


@functools.cache
def compiled(
    policy: str, gemm: str = "cublas", xla_remat: str = "off", memory: int = 0, **options: Any
) -> CompiledStep:
    """A tiny GPT's step for an H100, or for one with `memory` bytes."""
    hlo_samples.mesh()  # skips the test where there is no plugin
    target = get_target(H100)
    if memory:
        target = dataclasses.replace(target, chip=dataclasses.replace(target.chip, memory_bytes=memory))
    # Random bits are half of the kernels, and compiling kernels is what takes the time.
    quick = {"dropout": 0.0, "attention_dropout": 0.0} | options
    step = transformer.gpt(policy, size="tiny", platform="cuda", **quick)
    return compile_step(trace(step, target, get_policy(policy)), CompileOptions(xla_remat=xla_remat, gemm=gemm))


def record_of(step: CompiledStep, policy: str) -> Record:
    return analyze(step, Workload("models.transformer:gpt"), policy)


def heap_of(step: CompiledStep) -> Heap:
    return replay(parse(step.hlo_proto))


def bytes_of(tree: Any) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


# More kinds of programs are in test_explain.py.
SAMPLES = [
    pytest.param("full", {"stack": "scan"}, id="full-scan"),
    pytest.param("selective_attention", {"gemm": "triton"}, id="triton", marks=pytest.mark.slow),
    pytest.param("minimal_offloaded", {"stack": "unroll"}, id="offloaded-unroll", marks=pytest.mark.slow),
]
each_sample = pytest.mark.parametrize(("policy", "options"), SAMPLES)


@each_sample
def test_totals_are_those_of_xla(policy, options):
    step = compiled(policy, **options)
    record, memory, stats = record_of(step, policy), step.memory, step.executable.memory_analysis()
    assert record.need_bytes == memory.argument + memory.output - memory.alias + memory.temp
    assert record.argument_bytes == stats.argument_size_in_bytes
    assert record.output_bytes == stats.output_size_in_bytes
    assert record.alias_bytes == stats.alias_size_in_bytes
    assert record.temp_bytes == stats.temp_size_in_bytes
    assert record.host_temp_bytes == stats.host_temp_size_in_bytes
    assert record.live_peak_bytes == record.xla_peak_bytes == stats.peak_memory_in_bytes
    assert 0 < record.live_peak_bytes <= record.need_bytes
    # Of policy full the peak is where a block runs again.
    assert record.live_peak_phase == ("recompute" if policy == "full" else "backward")


@each_sample
def test_categories_add_up_and_the_state_is_exact(policy, options):
    step = compiled(policy, **options)
    record, state = record_of(step, policy), step.traced.step.args[0]
    assert sum(record.categories.values()) == record.live_peak_bytes
    assert record.categories["parameters"] == bytes_of(state.params)
    assert record.categories["optimizer state"] == bytes_of(state.opt_state)
    assert record.categories["batch"] == bytes_of(step.traced.step.args[1])
    assert list(record.categories.values()) == sorted(record.categories.values(), reverse=True)
    unknown = record.categories.get("not attributed", 0)
    assert record.attributed_share == pytest.approx(1 - unknown / record.live_peak_bytes)
    assert record.attributed_share > 0.95


@each_sample
@pytest.mark.filterwarnings("ignore")
def test_live_peak_is_that_of_xprof(policy, options, tmp_path: pathlib.Path):
    step = compiled(policy, **options)
    heap = heap_of(step)
    sample = hlo_samples.Sample(step.hlo_proto, step.executable.memory_analysis())
    assert (record_of(step, policy).live_peak_bytes, heap.peak_event) == xprof(sample, tmp_path)


def test_offloaded_bytes_are_on_the_host():
    record = record_of(compiled("minimal_offloaded", stack="scan"), "minimal_offloaded")
    # q, k, v, out of [2, 32, 64] and up of four times that, in 16 bits, of two layers.
    assert record.saved_host_bytes == 2 * 2 * (4 + 4) * 2 * 32 * 64
    assert record.host_temp_bytes == record.saved_host_bytes
    assert record.predicted_breakdown_s["host_copy"] > 0


@pytest.mark.slow
def test_where_host_memory_is_larger_xla_reports_it_in_place_of_the_heap_on_the_device():
    step = compiled("minimal_offloaded", batch=16, seq=64, layers=64, stack="scan")
    record, heap = record_of(step, "minimal_offloaded"), heap_of(step)
    assert record.live_peak_bytes == heap.peak_bytes
    assert record.xla_peak_bytes == step.memory.peak == heap.xla_peak_bytes
    # XLA adds the largest trace to what lives throughout, and here that is the one of host memory.
    on_device = heap.peak_bytes - heap.throughout_bytes
    assert heap.host_peak_bytes > on_device
    assert step.memory.peak - record.live_peak_bytes == heap.host_peak_bytes - on_device


@pytest.mark.slow
def test_a_fused_kernel_has_a_warning():
    record = record_of(compiled("attention_kernel_saveable", attention="fused"), "attention_kernel_saveable")
    assert any("workspace of cuDNN's fused attention" in warning for warning in record.warnings)


@pytest.mark.slow
def test_both_gemm_backends_are_recorded():
    cublas, triton = (compiled("selective_attention", gemm=gemm) for gemm in ("cublas", "triton"))
    records = [record_of(step, "selective_attention") for step in (cublas, triton)]
    assert [record.gemm_backend for record in records] == ["cublas", "triton"]
    assert records[0].temp_bytes != records[1].temp_bytes  # cuBLAS has a workspace
    assert [record.step_flops for record in records] == [records[0].step_flops] * 2


@pytest.mark.slow
def test_xlas_own_remat():
    # Saved values of an unrolled stack are buffers of their own, so the pass can drop them.
    shape = {"stack": "unroll", "seq": 256, "batch": 8, "layers": 2, "dropout": 0.0, "attention_dropout": 0.0}
    off = record_of(compiled("none", **shape), "none")
    need = off.need_bytes
    assert need is not None
    plenty = record_of(compiled("none", xla_remat="on", **shape), "none")
    scarce = record_of(compiled("none", xla_remat="on", memory=need * 9 // 10, **shape), "none")
    assert (off.xla_remat, plenty.xla_remat, scarce.xla_remat) == ("off", "on", "fired")
    assert plenty.need_bytes == need
    assert scarce.need_bytes is not None
    assert scarce.need_bytes < need
    # It is XLA's doing: the jaxpr recomputes nothing.
    assert scarce.recompute_flops == 0


REFUSED = """
from models import transformer
from remat_kit import TargetError, compile_step, get_target, trace

step = transformer.gpt("full", size="tiny", platform="cuda", layers=1)
try:
    compile_step(trace(step, get_target("v100-sxm-16gb")))
except TargetError as error:
    print(error)
"""


def test_a_gpu_that_cannot_multiply_bfloat16_is_refused():
    hlo_samples.mesh()
    # In a process of its own: XLA's compiler has been seen to crash on this program for this GPU.
    done = subprocess.run(
        [sys.executable, "-c", REFUSED], cwd=pathlib.Path(__file__).parent.parent, capture_output=True, text=True
    )
    assert done.returncode == 0, f"exit status {done.returncode}: {done.stderr[-1000:]}"
    assert re.search(r"V100.*has no bfloat16 matmuls.*float16 or float32", done.stdout)


def test_without_the_plugin_the_error_says_what_to_install(monkeypatch):
    def no_plugin(**_: Any) -> Any:
        raise RuntimeError("Unknown backend cuda\nmore lines")

    monkeypatch.setattr(trace_file, "_check_toolchain", lambda _: None)
    monkeypatch.setattr(trace_file.topologies, "get_topology_desc", no_plugin)
    step = Step(jnp.sum, (jax.ShapeDtypeStruct((3,), jnp.float32),))
    with pytest.raises(
        TargetError, match=r"cannot compile for 'h100-sxm-80gb' here: Unknown backend cuda\..*pip install 'remat-kit"
    ) as caught:
        trace(step, get_target(H100, "data=3"))
    assert "more lines" not in str(caught.value)
    assert "--target cpu" in str(caught.value)


def test_scanned_and_unrolled_predictions_differ_by_the_rows_that_move_slices():
    scanned, unrolled = (
        predict(Module.from_proto(parse(compiled("full", stack=stack).hlo_proto)), get_target(H100).chip)
        for stack in ("scan", "unroll")
    )
    assert scanned.flops == unrolled.flops

    def seconds(prediction: Any, matches: Any) -> float:
        return sum(row.exposed_s * row.executions for row in prediction.rows if matches(row))

    for prediction in (scanned, unrolled):
        assert prediction.seconds == pytest.approx(seconds(prediction, lambda row: True))
    # The same matmuls at the same price ...
    assert seconds(scanned, lambda row: row.flops) == pytest.approx(seconds(unrolled, lambda row: row.flops), rel=0.02)
    # ... and a scan cuts each layer's weights and saved values out of stacks, and puts gradients back.
    slices = seconds(scanned, lambda row: "dynamic" in row.name)
    assert seconds(unrolled, lambda row: "dynamic" in row.name) == 0
    assert slices == pytest.approx(scanned.seconds - unrolled.seconds, rel=0.1)


@pytest.mark.usefixtures("quick_compile")
def test_on_the_cpu_need_counts_temporaries_and_xlas_peak_is_left_out():
    step = transformer.gpt("full", size="tiny")
    cpu = compile_step(trace(step, get_target("cpu")))
    record, memory = record_of(cpu, "full"), cpu.memory
    assert record.need_bytes == memory.argument + memory.output - memory.alias + memory.temp
    assert memory.temp > 0
    assert record.gemm_backend == "cpu"
    # XLA's figure forgets temporaries on this backend. It must not be shown beside a live peak.
    assert memory.peak < record.need_bytes
    assert record.xla_peak_bytes is None
    assert record.live_peak_phase == "recompute"
    assert memory.argument < record.live_peak_bytes <= record.need_bytes


# Measurements, on the CPU


def square(rule: Any) -> Any:
    """x², with `rule` times the gradient that it has."""

    @jax.custom_vjp
    def f(x: jax.Array) -> jax.Array:
        return x * x

    f.defvjp(lambda x: (x * x, x), lambda x, g: (rule * 2 * x * g,))
    return f


def small_step(rule: Any = 1.0, **fields: Any) -> Step:
    """`fn(weights, batch) -> (new weights, loss)`."""

    def loss_and_grads(w: jax.Array, x: jax.Array) -> Any:
        return jax.value_and_grad(lambda w: square(rule)(x @ w).mean())(w)

    def fn(w: jax.Array, x: jax.Array) -> Any:
        loss, grad = loss_and_grads(w, x)
        return w - 0.1 * grad, loss

    def init(seed: int) -> tuple[jax.Array, jax.Array]:
        keys = jax.random.split(jax.random.key(seed))
        return jax.random.normal(keys[0], (8, 4)), jax.random.normal(keys[1], (16, 8))

    args = (jax.ShapeDtypeStruct((8, 4), jnp.float32), jax.ShapeDtypeStruct((16, 8), jnp.float32))
    return Step(fn, args, **{"donate": (0,), "init": init, "loss_and_grads": loss_and_grads, **fields})


def on_cpu(step: Step) -> Any:
    return trace(step, get_target("cpu"))


@pytest.mark.usefixtures("quick_compile")
def test_gradients_of_a_model_agree_with_none():
    full, none = (on_cpu(transformer.gpt(policy, size="tiny")) for policy in ("full", "none"))
    check = check_gradients(full, none)
    assert check.worst_error <= check.tolerance == tolerance_of("bfloat16")
    assert check.loss_error <= check.tolerance


def test_wrong_gradients_are_refused():
    check = check_gradients(on_cpu(small_step()), on_cpu(small_step()))
    assert check.worst_error == 0
    with pytest.raises(
        MeasurementError, match=r"differs from policy none by 0\.0[0-9]+ of its norm, and float32.*wrong"
    ):
        check_gradients(on_cpu(small_step(1.01)), on_cpu(small_step()))
    # What the step returns is no substitute for gradients: Adam's update hardly depends on their size.
    with pytest.raises(MeasurementError, match=r"no loss_and_grads, so its gradients cannot be compared"):
        check_gradients(on_cpu(small_step(loss_and_grads=None)), on_cpu(small_step(loss_and_grads=None)))


@pytest.mark.parametrize("value", [jnp.nan, jnp.inf])
def test_gradients_that_are_not_finite_are_refused(value):
    with pytest.raises(MeasurementError, match=r"differs from policy none by (nan|inf)"):
        check_gradients(on_cpu(small_step(value)), on_cpu(small_step()))
    # Not even when the reference has them too: then nothing is known.
    with pytest.raises(MeasurementError, match=r"differs from policy none by (nan|inf)"):
        check_gradients(on_cpu(small_step(value)), on_cpu(small_step(value)))


def test_measurements_take_turns_and_cover_every_name():
    steps = {name: compile_step(on_cpu(small_step(rule))) for name, rule in {"a": 1.0, "b": 1.5, "c": 2.0}.items()}
    args = real_args(small_step())
    times = dict(measure_interleaved(steps, args, rounds=6))
    assert list(times) == ["a", "b", "c"]
    for time in times.values():
        assert 0 < time.p10 <= time.median <= time.p90
        assert time.rounds == 6
        assert time.device
    assert args[0].is_deleted()  # donated


def test_a_step_that_gives_nothing_back_for_what_it_takes_cannot_be_measured():
    with pytest.warns(UserWarning, match="donated buffers were not usable"):
        step = compile_step(on_cpu(small_step(donate=(1,))))
    with pytest.raises(MeasurementError, match="donates argument 1 and returns nothing of its shape"):
        list(measure_interleaved({"a": step}, real_args(small_step())))


def test_abstract_arguments_without_an_init_cannot_be_measured():
    with pytest.raises(MeasurementError, match="abstract arguments and no init"):
        real_args(small_step(init=None))


def test_captured_arrays_are_constants_that_count_for_whether_it_fits():
    frozen = jax.random.normal(jax.random.key(0), (1024, 1024))  # XLA would make a broadcast of equal numbers
    step = Step(lambda x: jnp.tanh(x @ frozen).sum(), (jax.ShapeDtypeStruct((8, 1024), jnp.float32),))
    target = get_target("h100-sxm-80gb")
    record = analyze(compile_step(trace(step, target)), Workload("tests:captured"), "none")
    # XLA's totals leave them out, the live peak does not.
    assert record.constant_bytes >= 1024 * 1024 * 4
    assert record.need_bytes < record.live_peak_bytes <= record.need_bytes + record.constant_bytes
    assert record.margin_bytes == record.capacity_bytes - record.need_bytes - record.constant_bytes
    assert any("4.00 MiB of constants" in warning for warning in record.warnings)


def test_a_program_without_temporaries_is_analyzed():
    step = Step(lambda x: x + 1, (jax.ShapeDtypeStruct((8,), jnp.float32),))
    record = analyze(compile_step(trace(step, get_target("h100-sxm-80gb"))), Workload("tests:plain"), "none")
    assert record.need_bytes == record.live_peak_bytes == 64
    assert record.live_peak_phase is None
