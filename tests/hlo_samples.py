"""Small programs compiled for an H100 that is not there, and hand-made modules, for the tests of `remat_kit._hlo`."""

import functools
import glob
import importlib.util
import json
import math
import os
import pathlib
import tempfile
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# The plugin asks for CUDA's libraries when it is loaded, unless JAX was told before its import that it runs on the CPU.
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from remat_kit._hlo.module import Module
from remat_kit._hlo.proto import MESSAGES, parse
from remat_kit._hlo.roofline import BREAKDOWN, Prediction, predict
from remat_kit._target import CHIPS, Chip, Target

LAYERS, BATCH, WIDTH, HIDDEN = 4, 2048, 512, 2048
STACKED_TWICE = int(jax.__version_info__ < (0, 12))
"""Until jaxlib 0.11.2, XLA runs a product twice whose result a scan both uses and stacks for backward: once for its
user and once inside the fusion that writes it into the stack."""

POLICIES = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "offload": jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["up"],
        offload_src="device",
        offload_dst="pinned_host",
    ),
}


class Sample(NamedTuple):
    """A compiled program: the file that XLA dumped and what JAX says of its memory."""

    data: bytes
    memory: Any

    @property
    def proto(self) -> Any:
        return parse(self.data)

    @property
    def module(self) -> Module:
        return Module.from_proto(self.proto)


def skip_without_plugin() -> None:
    """Skips the test where JAX's CUDA plugin is not installed. Where it is, a failure to use it is a failure."""
    # Of a module whose parent is not there, find_spec raises.
    if not importlib.util.find_spec("jax_plugins") or not any(
        importlib.util.find_spec(f"jax_plugins.xla_cuda{version}") for version in (12, 13)
    ):
        pytest.skip("JAX's CUDA plugin is not installed")


@functools.cache
def mesh(devices: int = 1) -> Any:
    """A mesh of described H100s, or a skipped test where the compile-only plugin is missing."""
    config = Target(CHIPS["h100-sxm-80gb"]).xla_config()
    skip_without_plugin()
    described = topologies.get_topology_desc(
        platform="cuda", topology_name="", target_config=config, topology=f"1x1x{devices}"
    )
    return topologies.make_mesh(described, (devices,), ("d",))


def spec(*dims: int, dtype: Any = jnp.bfloat16, devices: int = 1, axes: tuple[Any, ...] = ()) -> jax.ShapeDtypeStruct:
    sharding = NamedSharding(mesh(devices), PartitionSpec(*axes))
    return jax.ShapeDtypeStruct(dims, dtype, sharding=sharding)


def compiled(fun: Any, *args: Any, **options: Any) -> Sample:
    """`fun` (a jitted function) compiled for what its arguments are on."""
    with tempfile.TemporaryDirectory() as folder:
        flags = {"xla_dump_to": folder, "xla_dump_hlo_as_proto": True, "xla_disable_hlo_passes": "rematerialization"}
        program = fun.trace(*args).lower().compile(compiler_options=flags | options)
        (file,) = glob.glob(f"{folder}/*after_optimizations.hlo.pb")
        return Sample(pathlib.Path(file).read_bytes(), program.memory_analysis())


def block(x: jax.Array, w: dict[str, jax.Array]) -> tuple[jax.Array, None]:
    h = checkpoint_name(x @ w["up"], "up")
    return x + jax.nn.gelu(h) @ w["down"], None


@functools.cache
def step(policy: str, stack: str = "scan", triton: bool = False) -> Sample:
    """A training step of four residual blocks, [2048, 512] through [512, 2048] and back, donating its parameters."""
    run = block if policy == "none" else jax.checkpoint(block, policy=POLICIES[policy])

    def loss(ws: Any, x: jax.Array) -> jax.Array:
        if stack == "scan":
            x, _ = jax.lax.scan(run, x, ws)
        else:
            for layer in range(LAYERS):
                x, _ = run(x, {name: w[layer] for name, w in ws.items()})
        return x.astype(jnp.float32).mean()

    def update(ws: Any, x: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(ws, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, ws, grads), value

    ws = {"up": spec(LAYERS, WIDTH, HIDDEN), "down": spec(LAYERS, HIDDEN, WIDTH)}
    return compiled(jax.jit(update, donate_argnums=0), ws, spec(BATCH, WIDTH), xla_gpu_enable_triton_gemm=triton)


@functools.cache
def gemm(triton: bool, dtype: str = "bfloat16", precision: str | None = None) -> Sample:
    """[1024, 512] @ [512, 2048]."""
    kind = jnp.dtype(dtype)
    return compiled(
        jax.jit(lambda a, b: jnp.dot(a, b, precision=precision)),
        spec(1024, 512, dtype=kind),
        spec(512, 2048, dtype=kind),
        xla_gpu_enable_triton_gemm=triton,
    )


def add(
    computation: Any, identifier: int, opcode: str, dims: tuple[int, ...] = (), operands: Any = (), **rest: Any
) -> Any:
    """Adds an instruction to a hand-made computation: f32 unless `dtype` (XLA's type number) says otherwise."""
    instruction = computation.instructions.add(id=identifier, name=f"{opcode}.{identifier}", opcode=opcode)
    elements = rest.pop("tuple_of", None)
    config = rest.pop("config", None)
    space, dtype = rest.pop("space", 0), rest.pop("dtype", 11)
    shapes = [instruction.shape]
    if elements is not None:
        instruction.shape.element_type = 13
        shapes = [instruction.shape.tuple_shapes.add() for _ in elements]
    for shape, (kind, sizes, memory) in zip(shapes, elements or [(dtype, dims, space)], strict=True):
        shape.element_type = kind
        shape.dimensions.extend(sizes)
        shape.layout.memory_space = memory
    instruction.operand_ids.extend(operands)
    if config is not None:
        instruction.backend_config = json.dumps(config).encode()
    for name, value in rest.items():
        if isinstance(value, list | tuple):
            getattr(instruction, name).extend(value)
        else:
            setattr(instruction, name, value)
    return instruction


def hand_made(**computations: Any) -> Any:
    """An HloProto of computations by name; each value takes the empty computation, fills it and returns its root's id.

    Ids count from 1, the last one is the entry. A computation whose name begins with "fused" is a fusion's.
    """
    proto = MESSAGES["HloProto"]()
    module = proto.hlo_module
    module.name = "jit_hand_made"
    for number, (name, fill) in enumerate(computations.items(), start=1):
        computation = module.computations.add(name=name, id=number, is_fusion_computation=name.startswith("fused"))
        computation.root_id = fill(computation)
        module.entry_computation_id = number
    return proto


LAUNCH = 1e-6
CHIP = Chip(
    name="round",
    title="a chip with round numbers",
    platform="cuda",
    memory_bytes=2**36,
    flops_per_s={"bf16": 1e15, "tf32": 5e14, "f64": 5e13, "f8": 2e15},
    vector_flops_per_s=5e13,
    memory_bytes_per_s=4e12,
    host_bytes_per_s=5e10,
    link_bytes_per_s=4e11,
    launch_s=LAUNCH,
    efficiency={"matmul": 0.8, "memory": 0.9, "host": 0.8, "link": 0.5},
    xla={},
    sources={},
)
MATMUL, MEMORY, HOST, LINK = 1e15 * 0.8, 4e12 * 0.9, 5e10 * 0.8, 4e11 * 0.5
BF16, S32 = 16, 4


def close(got: float, expected: float) -> bool:
    return math.isclose(got, expected, rel_tol=1e-9)


def check_sums(prediction: Prediction) -> None:
    assert tuple(prediction.breakdown) == BREAKDOWN
    assert math.isclose(prediction.seconds, sum(prediction.breakdown.values()))
    assert math.isclose(prediction.seconds, sum(row.exposed_s * row.executions for row in prediction.rows))
    assert prediction.flops == sum(row.flops * row.executions for row in prediction.rows)
    assert all(value >= 0 for value in prediction.breakdown.values())


def predicted(proto) -> Prediction:
    prediction = predict(Module.from_proto(proto), CHIP)
    check_sums(prediction)
    return prediction
