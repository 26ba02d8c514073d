"""Targets: the data files against arithmetic that does not come from them, the names, and what fits."""

import dataclasses
import importlib.util
import os
import pickle
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

import remat_kit
from remat_kit import _target
from remat_kit._errors import TargetError
from remat_kit._target import CHIPS, CONTEXT_BYTES, EFFICIENCY, Chip, Target, capacity, get_target, judge_fit
from remat_kit._units import GiB

FILES = sorted((Path(_target.__file__).parent / "targets").glob("*.toml"))

# SMs, fused multiply-adds a clock and SM of the matrix units, their clock in GHz, for bf16 (f16 where there is no
# bf16). Hopper and Blackwell data center: the matrix-unit rows of XLA's target files, 4 units an SM. The others: the
# vendor's figures for the architecture, with f32 accumulation, and the boost clock.
MATRIX = {
    "a100-pcie-80gb": (108, 1024, 1.41),
    "a100-sxm-40gb": (108, 1024, 1.41),
    "a100-sxm-80gb": (108, 1024, 1.41),
    "a6000": (84, 512, 1.8),
    "b200": (148, 4 * 1024, 1.8353101),
    "gb200": (152, 4 * 1024, 1.9259081),
    "h100-pcie-80gb": (114, 4 * 512, 1.62162),
    "h100-sxm-80gb": (132, 4 * 512, 1.8295201),
    "h200-sxm-141gb": (132, 4 * 512, 1.8295201),
    "l4": (58, 512, 2.04),
    "l40s": (142, 512, 2.52),
    "rtx-4090": (128, 256, 2.52),
    "rtx-5090": (170, 256, 2.407),
    "rtx-pro-6000": (188, 512, 2.617),
    "t4": (40, 512, 1.59),
    "v100-sxm-16gb": (80, 512, 1.53),
}
# Width of the memory bus in bits and memory clock in MHz; two transfers a clock.
BUS = {
    "a100-pcie-80gb": (5120, 1512),
    "a100-sxm-40gb": (5120, 1215),
    "a100-sxm-80gb": (5120, 1593),
    "b200": (7680, 3996),
    "h100-pcie-80gb": (5120, 1593),
    "h100-sxm-80gb": (5120, 2619),
    "l4": (192, 6251),
    "rtx-4090": (384, 10501),
    "rtx-5090": (512, 14001),
    "t4": (256, 5001),
    "v100-sxm-16gb": (4096, 877),
}
# What the model is sold as. Drivers show less: firmware, and ECC on cards without HBM, take their share.
NOMINAL_GIB = {
    "a100-pcie-80gb": 80, "a100-sxm-40gb": 40, "a100-sxm-80gb": 80, "a6000": 48, "b200": 180, "gb200": 186,
    "h100-pcie-80gb": 80, "h100-sxm-80gb": 80, "h200-sxm-141gb": 141, "l4": 24, "l40s": 48, "rtx-4090": 24,
    "rtx-5090": 32, "rtx-pro-6000": 96, "t4": 16, "v100-sxm-16gb": 16,
}  # fmt: skip
WITHOUT_BF16 = {"t4", "v100-sxm-16gb"}
XLA_FIELDS = {
    "core_count", "fpus_per_core", "clock_rate_ghz", "memory_bandwidth", "l2_cache_size", "shared_memory_per_core",
    "shared_memory_per_block_optin", "threads_per_core_limit", "cuda_compute_capability",
}  # fmt: skip

every_chip = pytest.mark.parametrize("chip", CHIPS.values(), ids=CHIPS)


def test_the_described_gpus():
    assert list(CHIPS) == sorted(MATRIX) == sorted(NOMINAL_GIB)
    with pytest.raises(TypeError, match="does not support item assignment"):
        CHIPS["mine"] = CHIPS["l4"]  # pyright: ignore[reportIndexIssue]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_file_has_all_fields_and_a_source_for_each_figure(file: Path):
    data = tomllib.loads(file.read_text("utf-8"))
    figures = {"memory_bytes", "vector_flops_per_s", "memory_bytes_per_s", "host_bytes_per_s", "link_bytes_per_s"}
    assert set(data) == figures | {"title", "flops_per_s", "xla", "sources"}
    assert set(data["xla"]) == XLA_FIELDS
    assert set(data["flops_per_s"]) <= {"bf16", "f16", "tf32", "f32", "f64", "f8", "s8"}
    tables = {f"{table}.{key}" for table in ("flops_per_s", "xla") for key in data[table]}
    for figure in figures | tables:
        assert len(data["sources"].get(figure) or data["sources"][figure.partition(".")[0]]) > 10
    assert set(data["sources"]) <= figures | tables | {"flops_per_s", "xla"}


@every_chip
def test_a_chip_has_plausible_figures(chip: Chip):
    assert chip.platform == "cuda"
    assert 0.9 * NOMINAL_GIB[chip.name] * GiB < chip.memory_bytes < NOMINAL_GIB[chip.name] * GiB
    assert all(rate > 1e12 for rate in (*chip.flops_per_s.values(), chip.vector_flops_per_s))
    assert chip.host_bytes_per_s in (16e9, 32e9, 64e9, 450e9)
    assert chip.link_bytes_per_s in (0.0, 150e9, 300e9, 450e9, 900e9)
    assert chip.efficiency == EFFICIENCY
    assert all(0.5 < fraction < 1 for fraction in EFFICIENCY.values())
    assert {"launch_s", "efficiency"} < set(chip.sources)


@every_chip
def test_matrix_peaks_are_dense_and_equal_the_arithmetic(chip: Chip):
    sms, fma_per_clock, ghz = MATRIX[chip.name]
    assert chip.xla["core_count"] == sms
    kind = "f16" if chip.name in WITHOUT_BF16 else "bf16"
    assert chip.flops_per_s[kind] == pytest.approx(sms * fma_per_clock * 2 * ghz * 1e9, rel=0.02)
    assert ("bf16" in chip.flops_per_s) == (chip.name not in WITHOUT_BF16)
    if kind == "bf16":
        assert chip.flops_per_s["f16"] == chip.flops_per_s["bf16"]
        assert chip.flops_per_s["tf32"] == pytest.approx(chip.flops_per_s["bf16"] / 2, rel=0.02)
        assert chip.flops_per_s.get("f8", 0) in (0, pytest.approx(2 * chip.flops_per_s["bf16"], rel=0.02))


@every_chip
def test_vector_peak_equals_the_arithmetic(chip: Chip):
    xla: dict[str, Any] = dict(chip.xla)
    peak = xla["core_count"] * xla["fpus_per_core"] * 2 * xla["clock_rate_ghz"] * 1e9
    assert chip.vector_flops_per_s == pytest.approx(peak, rel=0.02)


@every_chip
def test_memory_bandwidth_is_what_the_compiler_is_told(chip: Chip):
    assert chip.memory_bytes_per_s == pytest.approx(chip.xla["memory_bandwidth"], rel=0.05)
    if chip.name in BUS:
        bits, mhz = BUS[chip.name]
        assert chip.memory_bytes_per_s == pytest.approx(bits / 8 * 2 * mhz * 1e6, rel=0.01)


def test_xla_config_is_a_text_proto():
    text = get_target("h100-sxm-80gb").xla_config()
    assert all(line in text for line in ("  core_count: 132\n", "  device_memory_size: 84942979072\n"))
    assert "  cuda_compute_capability {\n    major: 9\n    minor: 0\n" in text
    assert "    feature_extension: ACCELERATED_FEATURES\n" in text
    assert 'platform_name: "CUDA"\n' in text
    assert 'device_description_str: "NVIDIA H100 80GB HBM3"\n' in text
    assert text.count("{") == text.count("}") == 4


def test_xla_config_follows_the_memory_of_the_chip():
    small = Target(dataclasses.replace(CHIPS["l4"], memory_bytes=8 * GiB))
    assert f"device_memory_size: {8 * GiB}\n" in small.xla_config()


def test_a_cpu_has_no_xla_config():
    with pytest.raises(TargetError, match=r"target 'cpu' is not a GPU .* choose one of a100-pcie-80gb, "):
        get_target("cpu").xla_config()


def test_a_target_is_a_value():
    target = get_target("l4", "data=2,fsdp=4")
    assert (target.name, target.num_devices, target.attached) == ("l4", 8, False)
    assert target == get_target("l4", "data=2,fsdp=4") != get_target("l4")
    assert hash(target) == hash(get_target("l4", "data=2,fsdp=4"))
    assert pickle.loads(pickle.dumps(target)) == target
    assert get_target(target.name).chip is CHIPS["l4"]


def test_a_mesh_is_parsed():
    assert get_target("l4").mesh == (("device", 1),)
    assert get_target("l4", "data=2, fsdp=4").mesh == (("data", 2), ("fsdp", 4))


@pytest.mark.parametrize("mesh", ["", "data", "data=", "data=0", "data=-1", "data=2.5", "2=data", "data=2,", "=2"])
def test_a_bad_mesh_is_refused(mesh: str):
    with pytest.raises(TargetError, match=r"is not a mesh axis\. Write axis=size .* e\.g\. data=2,fsdp=4\."):
        get_target("l4", mesh)


def test_a_repeated_axis_is_refused():
    with pytest.raises(TargetError, match=r"mesh 'data=2,data=4' has axis 'data' twice"):
        get_target("l4", "data=2,data=4")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("H100-SXM-80GB", r"Did you mean 'h100-sxm-80gb'\?"),
        ("h100", r"Did you mean 'h100-pcie-80gb' or 'h100-sxm-80gb'\?"),
        ("atached", r"Did you mean 'attached'\?"),
        ("attached-cpu", r"Did you mean 'attached'\?"),
        ("tpu-v5p", "Targets: a100-pcie-80gb, .*, v100-sxm-16gb, cpu, attached"),
        ("", "Targets: a100-pcie-80gb"),
    ],
)
def test_an_unknown_target_is_refused(name: str, hint: str):
    with pytest.raises(TargetError, match=rf"^'{name}' is not a target\. ?{hint}"):
        get_target(name)


def test_cpu_is_this_machine_and_says_that_its_rates_are_a_guess():
    target = get_target("cpu")
    assert (target.name, target.attached, target.chip.platform) == ("cpu", True, "cpu")
    assert target.chip.memory_bytes == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    figures = {field.name for field in dataclasses.fields(Chip)} - {"name", "title", "platform", "xla", "sources"}
    assert set(target.chip.sources) == figures
    measured = {"memory_bytes", "link_bytes_per_s"}
    assert all("uncalibrated" in target.chip.sources[name] for name in figures - measured)
    assert "uncalibrated" in target.chip.title


def test_described_targets_start_no_backend():
    code = (
        "import remat_kit, jax; from remat_kit import _target as t;"
        "[t.get_target(name).xla_config() for name in t.CHIPS]; t.judge_fit(1, t.get_target('cpu'));"
        "print(len(t.CHIPS)); t.get_target('attached')"
    )
    # With a platform that does not exist, starting a backend is an error: only the last call may run into it.
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "JAX_PLATFORMS": "no_such_platform"},
        cwd=Path(remat_kit.__file__).parent.parent,
        capture_output=True,
        text=True,
    )
    assert run.stdout == f"{len(CHIPS)}\n", run.stderr
    assert "TargetError: target 'attached': JAX cannot start its default backend" in run.stderr


def attach(monkeypatch: pytest.MonkeyPatch, kind: str, platform: str = "gpu", limit: int = 0, count: int = 1) -> None:
    """Make JAX see `count` devices of this kind, with a pool of at most `limit` bytes each (0: it has no pool)."""
    stats = {"bytes_limit": limit} if limit else None
    device = SimpleNamespace(device_kind=kind, platform=platform, memory_stats=lambda: stats)
    monkeypatch.setattr(jax, "devices", lambda: [device] * count)
    for variable in _target.POOL_VARIABLES:
        monkeypatch.delenv(variable, raising=False)


@pytest.mark.parametrize(
    ("limit", "variable", "memory"),
    [
        (3 * GiB * 141 // 4, {}, 141 * GiB),
        (141 * GiB // 2, {"XLA_CLIENT_MEM_FRACTION": "0.5"}, 141 * GiB),
        (141 * GiB // 2, {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".5"}, 141 * GiB),
        (140 * GiB, {}, 140 * GiB),  # a pool that may grow to the whole device
    ],
)
def test_attached_is_the_described_gpu_with_its_live_memory(
    monkeypatch: pytest.MonkeyPatch, limit: int, variable: dict[str, str], memory: int
):
    attach(monkeypatch, "NVIDIA H200", limit=limit)
    for name, value in variable.items():
        monkeypatch.setenv(name, value)
    target = get_target("attached")
    assert (target.name, target.attached, target.chip.name) == ("attached-h200-sxm-141gb", True, "h200-sxm-141gb")
    assert target.chip.memory_bytes == memory
    assert "JAX's pool" in target.chip.sources["memory_bytes"]
    assert target.chip.flops_per_s == CHIPS["h200-sxm-141gb"].flops_per_s
    assert get_target(target.name) == target


def test_attached_without_a_pool_keeps_the_described_memory(monkeypatch: pytest.MonkeyPatch):
    attach(monkeypatch, "A100-SXM4-40GB")  # as older drivers call it, without the maker
    target = get_target("attached")
    assert target.chip.name == "a100-sxm-40gb"
    assert target.chip.memory_bytes == CHIPS["a100-sxm-40gb"].memory_bytes
    assert "did not tell its own" in target.chip.sources["memory_bytes"]


def test_attached_may_be_the_cpu(monkeypatch: pytest.MonkeyPatch):
    attach(monkeypatch, "cpu", platform="cpu", count=2)
    assert get_target("attached") == get_target("cpu")
    assert get_target("attached", "data=2").num_devices == 2


@pytest.mark.parametrize(
    ("name", "kind", "platform", "message"),
    [
        ("attached", "NVIDIA H100 NVL", "gpu", r"attached device is 'NVIDIA H100 NVL' \(gpu\), which is not described"),
        ("attached", "TPU v5p", "tpu", r"'TPU v5p' \(tpu\), which is not described\. Choose .* nearest to it: a100"),
        ("attached-l4", "NVIDIA L40S", "gpu", r"attached device is 'NVIDIA L40S' \(gpu\), which is not 'l4'"),
        ("attached-l4", "cpu", "cpu", r"attached device is 'cpu' \(cpu\), which is not 'l4'"),
    ],
)
def test_another_attached_device_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, kind: str, platform: str, message: str
):
    attach(monkeypatch, kind, platform)
    with pytest.raises(TargetError, match=message):
        get_target(name)


def test_a_mesh_larger_than_what_is_attached_is_refused(monkeypatch: pytest.MonkeyPatch):
    attach(monkeypatch, "NVIDIA L4", count=4)
    with pytest.raises(TargetError, match=r"the mesh has 8 devices, but 4 are attached\. Make it smaller"):
        get_target("attached", "data=8")


@every_chip
def test_the_boundaries_of_what_fits(chip: Chip):
    target = Target(chip)
    room = capacity(target)
    assert room.pool_bytes == chip.memory_bytes * 3 // 4 * 95 // 100
    assert room.capacity_bytes == (chip.memory_bytes - CONTEXT_BYTES) * 95 // 100
    answers = {
        0: "yes",
        room.pool_bytes: "yes",
        room.pool_bytes + 1: "tight",
        room.capacity_bytes: "tight",
        room.capacity_bytes + 1: "no",
    }
    for need, answer in answers.items():
        fit = judge_fit(need, target)
        assert fit.fits == answer
        assert (fit.margin_bytes, fit.capacity_bytes) == (room.capacity_bytes - need, room.capacity_bytes)
        assert fit.assumptions[: len(room.assumptions)] == room.assumptions
        assert len(fit.assumptions) - len(room.assumptions) == (answer == "tight")


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_tight_says_which_fraction_is_enough(share: float):
    target = get_target("h100-sxm-80gb")
    room = capacity(target)
    need = round(room.pool_bytes + 1 + share * (room.capacity_bytes - room.pool_bytes - 1))
    advice = judge_fit(need, target).assumptions[-1]
    assert advice.startswith("Set XLA_CLIENT_MEM_FRACTION=0.")
    pool = float(advice.partition("=")[2].partition(":")[0]) * room.memory_bytes
    # Three decimals: at the upper end the pool may miss what is needed by a thousandth of the memory.
    assert need / 0.95 - 0.001 * room.memory_bytes <= pool <= room.memory_bytes - CONTEXT_BYTES


def test_what_fits_is_said_with_its_assumptions():
    text = " ".join(judge_fit(1, get_target("l4")).assumptions)
    for words in ("Nothing else uses the 21.96 GiB", "75%", "1.00 GiB is left to the CUDA context", "5% of either"):
        assert words in text


def test_on_a_tiny_gpu_the_pool_is_not_larger_than_the_capacity():
    target = Target(dataclasses.replace(CHIPS["l4"], memory_bytes=2 * GiB))
    room = capacity(target)
    assert room.pool_bytes == room.capacity_bytes == GiB * 95 // 100
    assert judge_fit(GiB, target).fits == "no"


def test_on_a_cpu_the_ram_is_the_pool():
    target = get_target("cpu")
    memory = target.chip.memory_bytes
    assert judge_fit(memory, target).fits == "yes"
    assert judge_fit(memory + 1, target) == dataclasses.replace(judge_fit(memory, target), fits="no", margin_bytes=-1)
    halves = capacity(get_target("cpu", "data=2"))
    assert halves.capacity_bytes == halves.pool_bytes == memory // 2
    assert halves.assumptions[1] == "The 2 devices of the mesh share it evenly."


def plugin_is_installed() -> bool:
    return bool(importlib.util.find_spec("jax_plugins")) and any(
        importlib.util.find_spec(f"jax_plugins.xla_cuda{version}") for version in (12, 13)
    )


needs_plugin = pytest.mark.skipif(not plugin_is_installed(), reason="no CUDA plugin: pip install 'remat-kit[compile]'")


# The plugin looks for NVIDIA's libraries when JAX first loads it. To compile for a described GPU none is needed.
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")


def compile_for(target: Target, dtype: Any) -> tuple[str, int]:
    """The program and its argument bytes on one device: a matmul and a softmax, rows over all axes of the mesh."""
    options = {"target_config": target.xla_config(), "topology": f"1x1x{target.num_devices}"}
    topology = topologies.get_topology_desc(platform="cuda", topology_name="", **options)
    names = tuple(axis for axis, _ in target.mesh)
    mesh = topologies.make_mesh(topology, tuple(size for _, size in target.mesh), names)
    rows = jax.ShapeDtypeStruct((512, 256), dtype, sharding=NamedSharding(mesh, PartitionSpec(names)))
    weight = jax.ShapeDtypeStruct((256, 256), dtype, sharding=NamedSharding(mesh, PartitionSpec()))
    compiled = jax.jit(lambda x, w: jax.nn.softmax(x @ w).sum(0)).trace(rows, weight).lower().compile()
    text, memory = compiled.as_text(), compiled.memory_analysis()
    assert text is not None
    assert memory is not None
    return text, memory.argument_size_in_bytes


@needs_plugin
@pytest.mark.parametrize("name", sorted(set(CHIPS) - WITHOUT_BF16))
def test_xla_compiles_bf16_for_every_described_gpu(name: str):
    _, argument_bytes = compile_for(get_target(name), jnp.bfloat16)
    assert argument_bytes == (512 + 256) * 256 * 2


@needs_plugin
def test_xla_compiles_for_a_mesh():
    text, argument_bytes = compile_for(get_target("h100-sxm-80gb", "data=2,fsdp=4"), jnp.bfloat16)
    assert "all-reduce" in text
    assert argument_bytes == (512 // (2 * 4) + 256) * 256 * 2


@needs_plugin
def test_xla_refuses_bf16_for_a_v100():
    with pytest.raises(jax.errors.JaxRuntimeError, match="UNIMPLEMENTED"):
        compile_for(get_target("v100-sxm-16gb"), jnp.bfloat16)
