"""Whole training steps of many kinds, compiled for described GPUs: what the analyzer has to explain."""

import dataclasses
from collections.abc import Callable
from typing import Any

import hlo_samples  # sets what the plugin needs, before JAX starts
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from models import linen, transformer
from remat_kit import CompiledStep, CompileOptions, Step, Target, compile_step, get_policy, get_target, remat, trace
from remat_kit._trace import device_mesh

H100 = "h100-sxm-80gb"


def compiled(step: Step, target: str | Target = H100, policy: str = "none", **options: Any) -> CompiledStep:
    """`step` compiled for the target, in which only a GPU's own options may be given."""
    if target != "cpu":
        hlo_samples.mesh()  # skips the test where there is no plugin
    where = get_target(target) if isinstance(target, str) else target
    return compile_step(trace(step, where, get_policy(policy)), CompileOptions(**options))


# Random bits are half of a tiny model's kernels, and compiling kernels is what takes the time.
NO_DROPOUT: dict[str, Any] = {"dropout": 0.0, "attention_dropout": 0.0}


def gpt(policy: str, *, target: str = H100, **options: Any) -> CompiledStep:
    """The tiny GPT, without dropout unless it is asked for."""
    return compiled(transformer.gpt(policy, size="tiny", platform="cuda", **(NO_DROPOUT | options)), target, policy)


def sharded(step: Step, mesh: str, place: Callable[[str, tuple[int, ...]], PartitionSpec]) -> CompiledStep:
    """`step` over a mesh of H100s, with each argument where `place` (its path, its shape) says."""
    hlo_samples.mesh()
    target = get_target(H100, mesh)
    devices = device_mesh(target)

    def put(path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
        where = NamedSharding(devices, place(jax.tree_util.keystr(path), leaf.shape))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)

    args = jax.tree_util.tree_map_with_path(put, step.args)
    return compile_step(trace(dataclasses.replace(step, args=args), target), CompileOptions())


def _data_parallel(path: str, shape: tuple[int, ...]) -> PartitionSpec:
    return PartitionSpec("data") if path.startswith("[1]") else PartitionSpec()


def _fully_sharded(path: str, shape: tuple[int, ...]) -> PartitionSpec:
    if path.startswith("[1]"):
        return PartitionSpec("data")
    divisible = [axis for axis, size in enumerate(shape) if size % 8 == 0 and size >= 64]
    if not path.startswith("[0]") or not divisible:
        return PartitionSpec()
    return PartitionSpec(*[None] * divisible[-1], "data")


class ConvBlock(nnx.Module):
    """Two 3x3 convolutions with a residual sum, [B, H, W, C]."""

    def __init__(self, channels: int, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(channels, rngs=rngs)
        self.first = nnx.Conv(channels, channels, (3, 3), rngs=rngs)
        self.second = nnx.Conv(channels, channels, (3, 3), rngs=rngs)

    def __call__(self, x_BHWC: jax.Array) -> jax.Array:
        return x_BHWC + self.second(jax.nn.gelu(self.first(self.norm(x_BHWC))))


class ConvNet(nnx.Module):
    """A stem, four blocks at one resolution, and a dense prediction for each pixel."""

    def __init__(self, rngs: nnx.Rngs):
        self.stem = nnx.Conv(3, 64, (3, 3), rngs=rngs)
        block = remat("full")(ConvBlock)
        self.stages = nnx.List([block(64, rngs) for _ in range(4)])
        self.readout = nnx.Conv(64, 16, (1, 1), rngs=rngs)

    def __call__(self, x_BHWC: jax.Array) -> jax.Array:
        x_BHWC = self.stem(x_BHWC)
        for stage in self.stages:
            x_BHWC = stage(x_BHWC)
        return self.readout(x_BHWC)


def vision(batch: int = 4, size: int = 64) -> Step:
    """A training step of `ConvNet` on images [batch, size, size, 3], float32, Adam with clipping."""
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    graph, params = nnx.split(nnx.eval_shape(lambda: ConvNet(nnx.Rngs(0))), nnx.Param)
    params = nnx.to_pure_dict(params)

    def step(params: Any, state: Any, images: jax.Array, labels: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            logits = nnx.merge(graph, nnx.State(params))(images)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    args = (
        params,
        jax.eval_shape(optimizer.init, params),
        jax.ShapeDtypeStruct((batch, size, size, 3), jnp.float32),
        jax.ShapeDtypeStruct((batch, size, size), jnp.int32),
    )
    return Step(step, args, donate=(0, 1), labels={"params": 0, "opt_state": 1, "batch": 2})


def small_memory(memory: int) -> Target:
    """An H100 with less memory, so that XLA's own rematerialization has something to do."""
    target = get_target(H100)
    return dataclasses.replace(target, chip=dataclasses.replace(target.chip, memory_bytes=memory))


TINY_ON_GPU: dict[str, Any] = {"size": "tiny", "platform": "cuda", **NO_DROPOUT}
CAPTURED: dict[str, Callable[[], CompiledStep]] = {
    "scanned": lambda: gpt("none", stack="scan", dropout=0.1),
    "unrolled": lambda: gpt("full", stack="unroll"),
    "fused-attention": lambda: gpt("attention_kernel_saveable", attention="fused"),
    "offload": lambda: gpt("minimal_offloaded"),
    "xla-remat": lambda: compiled(
        transformer.gpt("none", stack="unroll", batch=64, **TINY_ON_GPU), small_memory(16 * 2**20), xla_remat="on"
    ),
    "two-devices": lambda: sharded(transformer.gpt("full", batch=8, **TINY_ON_GPU), "data=2", _data_parallel),
    "eight-devices-fsdp": lambda: sharded(transformer.gpt("full", batch=8, **TINY_ON_GPU), "data=8", _fully_sharded),
    "cpu": lambda: compiled(transformer.gpt("full", size="tiny"), "cpu", "full"),
    "linen": lambda: compiled(linen.gpt_linen("full", stack="unroll", **TINY_ON_GPU), H100, "full"),
    "llama": lambda: compiled(
        transformer.llama("selective_attention", **(TINY_ON_GPU | {"dropout": 0.0})), H100, "selective_attention"
    ),
    "vision": lambda: compiled(vision()),
}
"""One of each kind; called when a test asks."""
