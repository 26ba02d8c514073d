"""How many collectives of each kind a step of two layers has under a policy, as compiled for H100s, in integers.

L is the number of layers. XLA's combiners are switched off, which would make one of several as sizes allow.
"""

import functools
from collections.abc import Callable
from typing import Any

import hlo_samples  # sets what the plugin needs, before JAX starts
import jax
import pytest

from models import transformer
from remat_kit import CompileOptions, Record, Step, Workload, analyze, compile_step, get_policy, get_target, trace
from remat_kit._communication import counts

L = 2
OPTIONS: dict[str, Any] = {
    "size": "tiny", "layers": L, "heads": 8, "batch": 8, "dropout": 0.0, "attention_dropout": 0.0, "platform": "cuda",
}  # fmt: skip
SEPARATE = tuple(
    (f"xla_gpu_{kind}_combine_threshold_bytes", "0") for kind in ("all_gather", "all_reduce", "reduce_scatter")
)
LOSS = 3
"""All-reduces of a softmax over a vocabulary in parts: its largest value, its sum, and the target's logit."""

Counts = dict[tuple[str, str], int]


@functools.cache
def step_and_record(build: Callable[..., Step], mesh: str, policy: str, options: tuple[Any, ...]) -> tuple[Any, Record]:
    hlo_samples.skip_without_plugin()
    given = {**OPTIONS, "optimizer": "sgd", **dict(options)}
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        traced = trace(build(policy, **given), get_target("h100-sxm-80gb", mesh), get_policy(policy))
        compiled = compile_step(traced, CompileOptions(xla_options=SEPARATE))
    finally:
        jax.config.update("jax_disable_most_optimizations", before)
    return traced, analyze(compiled, Workload("tests:sharded"), policy)


def found(build: Callable[..., Step], mesh: str, policy: str, **options: Any) -> Counts:
    _, record = step_and_record(build, mesh, policy, tuple(sorted(options.items())))
    assert all(each.again == (each.phase == "recompute") for each in record.collectives)
    assert {each.devices for each in record.collectives} == {int(mesh.partition("=")[2])}
    return counts(record.collectives)


def without_zeros(expected: Counts) -> Counts:
    return {key: count for key, count in expected.items() if count}


# Megatron's two all-reduces a layer and direction; what of them runs again.
AGAIN_TENSOR = {
    "none": 0,
    "full": 1,  # the sum of attention's output, which the second norm needs; the MLP's sum nobody needs again
    "selective_attention": 0,  # that sum is kept
    "save_reduced": 0,  # and so it is here, alone
    "dots_with_no_batch_dims_saveable": 0,  # the product is kept as it is after its sum
    "save_qkv_proj": 1,  # attention's output is made again from q, k and v
}


def tensor_counts(again: int) -> Counts:
    return {
        # a layer: attention's output, the MLP's; then the embedding, of which each device has a part of the vocabulary
        ("all-reduce", "forward"): 2 * L + 1 + LOSS,
        ("all-reduce", "recompute"): again * L,
        # a layer: the inputs of q, k, v (three products, one sum) and of the MLP; then the input of the logits
        ("all-reduce", "backward"): 2 * L + 1,
    }


@pytest.mark.slow
@pytest.mark.parametrize("policy", AGAIN_TENSOR)
def test_tensor_parallel_gpt(policy: str) -> None:
    assert found(transformer.gpt, "tensor=8", policy) == without_zeros(tensor_counts(AGAIN_TENSOR[policy]))


@pytest.mark.slow
def test_two_devices_do_what_eight_do() -> None:
    assert found(transformer.gpt, "tensor=2", "full") == tensor_counts(1)


# With sequence parallelism each all-reduce is a reduce-scatter, and an all-gather before the next product.
AGAIN_SEQUENCE = {
    "none": (0, 0),
    "full": (2, 1),  # both inputs of products are gathered again, attention's output is summed again
    "selective_attention": (2, 0),  # the products' inputs are needed for the gradient of their matrices
    "save_reduced": (2, 0),
    "dots_with_no_batch_dims_saveable": (2, 0),
    "save_qkv_proj": (2, 1),
    # The inputs of products are kept as a part on each device, not as they are gathered.
    "save(attention_norm,mlp_norm)": (2, 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("policy", AGAIN_SEQUENCE)
def test_tensor_and_sequence_parallel_gpt(policy: str) -> None:
    gathers, scatters = AGAIN_SEQUENCE[policy]
    expected = {
        ("all-gather", "forward"): 2 * L + 1,  # the inputs of the products, then of the logits
        ("reduce-scatter", "forward"): 2 * L + 1,  # the outputs, and the embedding
        ("all-reduce", "forward"): LOSS,
        ("all-gather", "recompute"): gathers * L,
        ("reduce-scatter", "recompute"): scatters * L,
        # Each is the other's derivative.
        ("all-gather", "backward"): 2 * L + 1,
        ("reduce-scatter", "backward"): 2 * L + 1,
        # Gradients of what works on parts of the sequence: scale and bias of three norms, two biases after a sum. XLA
        # sums those of all layers at once, after the loop.
        ("all-reduce", "backward"): 3 * 2 + 2,
    }
    assert found(transformer.gpt, "tensor=8", policy, sequence_parallel=True) == without_zeros(expected)


WEIGHTS = 9
"""Of a layer of Llama: q, k, v, out, gate, up, down and two norms."""
AGAIN_FSDP = {
    "none": 0,  # autodiff keeps what a product's derivative needs: the gathered matrix
    "full": WEIGHTS,
    "selective_attention": WEIGHTS,  # no product but attention's runs again, and each derivative needs its matrix
    "save_reduced": WEIGHTS,
    "save_gathered_weights": 0,
    "minimal_with_context": WEIGHTS,
    "save_gathered_weights|save_reduced": 0,
}


@pytest.mark.slow
@pytest.mark.parametrize("policy", AGAIN_FSDP)
def test_fully_sharded_llama(policy: str) -> None:
    expected = {
        # each weight before its use; then the embedding, the last norm and the head
        ("all-gather", "forward"): WEIGHTS * L + 3,
        ("all-gather", "recompute"): AGAIN_FSDP[policy] * L,
        # each gradient, of which a device keeps its part
        ("reduce-scatter", "backward"): WEIGHTS * L + 3,
        ("all-reduce", "forward"): 1,  # the mean of the loss
    }
    assert found(transformer.llama, "fsdp=8", policy, kv_heads=8) == without_zeros(expected)


# Bytes of each device


def bytes_on_a_device(tree: Any) -> int:
    return sum(
        leaf.dtype.itemsize * functools.reduce(lambda size, side: size * side, leaf.sharding.shard_shape(leaf.shape), 1)
        for leaf in jax.tree.leaves(tree)
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "mesh", "options"),
    [
        (transformer.gpt, "tensor=8", {}),
        (transformer.gpt, "tensor=8", {"sequence_parallel": True}),
        (transformer.llama, "fsdp=8", {"kv_heads": 8}),
        (transformer.gpt, "data=2,fsdp=2,tensor=2", {"stack": "unroll"}),
    ],
)
def test_bytes_of_parameters_and_optimizer_are_those_of_the_parts(build: Any, mesh: str, options: Any) -> None:
    given = tuple(sorted({**options, "optimizer": "adamw"}.items()))
    traced, record = step_and_record(build, mesh, "full", given)
    state, batch, _ = traced.args
    expected = {"parameters": bytes_on_a_device(state.params), "optimizer state": bytes_on_a_device(state.opt_state)}
    assert {name: record.categories[name] for name in expected} == expected
    # Two moments a parameter, and the number of the step.
    assert expected["optimizer state"] == 2 * expected["parameters"] + 4
    # The key is used for dropout alone, of which there is none.
    assert record.argument_bytes == sum(expected.values()) + bytes_on_a_device(batch)
    # All of the state is replaced in its own memory.
    assert record.alias_bytes == sum(expected.values())
    assert record.warnings == ()


def test_parts_of_the_tiny_gpt_by_hand() -> None:
    hlo_samples.skip_without_plugin()
    step = transformer.gpt("full", **OPTIONS)
    traced = trace(step, get_target("h100-sxm-80gb", "tensor=8"))
    D, F, V, T = 64, 256, 256, 32
    matrices = 4 * D * D + 2 * D * F  # q, k, v, out; up, down: all in eight parts
    cut_biases, whole_biases, norms = 3 * D + F, 2 * D, 4 * D
    layer = (matrices + cut_biases) // 8 + whole_biases + norms
    expected = 4 * (L * layer + V * D // 8 + T * D + 2 * D)  # then the embedding in parts, positions, the last norm
    assert bytes_on_a_device(traced.args[0].params) == expected
