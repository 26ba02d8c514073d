"""Every policy on every model variant keeps the same contract; the table is in `contract`."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from contract import (
    LAYERS,
    RECOMPUTED,
    UNWRAPPED,
    VARIANTS,
    build,
    cells,
    diagonal,
    gradients_of,
    ignores_dots,
    initial_values,
    recomputed,
    reference,
    run_equations,
    traced,
    words,
    worst_error,
    wrapped_by_hand,
)
from hlo_samples import skip_without_plugin

from models import transformer
from remat_kit import POLICIES, get_policy, get_target, trace
from remat_kit._lower import lower
from remat_kit._measure import tolerance_of

each_cell = pytest.mark.parametrize(("policy", "variant"), cells())
on_the_diagonal = pytest.mark.parametrize(("policy", "variant"), diagonal())


@pytest.mark.parametrize("policy", RECOMPUTED)
def test_counts_of_the_table_are_those_of_its_words(policy):
    row = RECOMPUTED[policy]
    assert len(words(row, "gpt")) == row.gpt
    assert len(words(row, "llama")) == row.llama
    assert "down" not in row.again


# Slow, so with the newest JAX alone; the oldest runs the compiled ones of the diagonal below.
@pytest.mark.slow
@each_cell
def test_gradients(policy, variant):
    # The arithmetic of the two programs is the same, so are the bits; dropout's masks are drawn twice.
    got = run_equations(traced(policy, variant).traced.jaxpr, initial_values("none", variant))
    for leaf, expected in zip(jax.device_get(got), reference(variant), strict=True):
        assert np.isfinite(leaf).all()
        np.testing.assert_array_equal(leaf, expected)


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_of_the_reference_are_not_trivial(variant):
    loss, *gradients = reference(variant)
    assert loss == pytest.approx(np.log(256), rel=0.01)  # of 256 equally likely tokens
    assert all(np.any(leaf) for leaf in gradients)


@pytest.mark.usefixtures("quick_compile")
@on_the_diagonal
def test_compiled_gradients_and_no_second_compile(policy, variant):
    check_compiled(policy, variant)


@pytest.mark.usefixtures("quick_compile")
@pytest.mark.parametrize(
    ("policy", "variant"),
    [("full", "gpt-naive-scan"), ("minimal_offloaded", "llama-fused-unroll"), ("dots_saveable", "linen-unroll")],
)
def test_compiled_gradients_under_both_remats(policy, variant, remat3):
    if remat3:  # the other one is on the diagonal, or like its neighbours
        check_compiled(policy, variant)


def check_compiled(policy: str, variant: str) -> None:
    traces = []
    step = build(policy, variant)
    assert step.loss_and_grads is not None

    def counted(*args: Any) -> Any:
        traces.append(1)
        return step.loss_and_grads(*args)  # pyright: ignore[reportOptionalCall]

    jitted = jax.jit(counted)
    args = initial_values("none", variant)
    got = jax.device_get(jax.tree.leaves(jitted(*args)))
    assert worst_error(got, reference(variant)) <= tolerance_of("float32")
    # Other values of the same shapes, as in the next step of a training.
    jitted(jax.tree.map(lambda leaf: leaf + 1, args[0]), *args[1:])
    assert len(traces) == jitted._cache_size() == 1


@each_cell
def test_recomputed_matmuls(policy, variant, remat3):
    step = traced(policy, variant, remat3)
    assert step.work.recomputed_matmuls == LAYERS * recomputed(policy, variant, remat3)
    told = [warning for warning in step.warnings if "computed again: JAX did not ask" in warning]
    if ignores_dots(policy, remat3):
        assert len(told) == 1
        assert f"matmuls that policy {policy!r} keeps" in told[0]
        assert "jax_remat3 is on" in told[0]
    else:
        assert not told


@each_cell
def test_matmuls_of_forward_and_backward_do_not_depend_on_the_policy(policy, variant, remat3):
    work, reference_work = traced(policy, variant, remat3).work, traced("none", variant, remat3).work
    assert work.matmuls - work.recomputed_matmuls == reference_work.matmuls
    assert work.flops - work.recomputed_flops == reference_work.flops


@each_cell
def test_parameter_tree(policy, variant):
    got, expected = traced(policy, variant).step.args, traced("none", variant).step.args
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for leaf, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert (leaf.shape, leaf.dtype) == (other.shape, other.dtype)


@on_the_diagonal
def test_initial_values(policy, variant, assert_same_tree):
    assert_same_tree(initial_values(policy, variant), initial_values("none", variant))


@each_cell
def test_program_equals_one_wrapped_by_hand(policy, variant, assert_same_program):
    with wrapped_by_hand(policy):
        expected = gradients_of(build("none", variant), "none")
    assert_same_program(traced(policy, variant).traced.jaxpr, expected.traced.jaxpr)


@on_the_diagonal
def test_program_of_an_equal_policy_is_equal(policy, variant, assert_same_program):
    again = dataclasses.replace(get_policy(policy))
    assert again is not get_policy(policy) or policy not in POLICIES
    rebuilt = gradients_of(build(again, variant), policy)
    assert_same_program(rebuilt.traced.jaxpr, traced(policy, variant).traced.jaxpr)


@pytest.mark.parametrize("policy", RECOMPUTED)
def test_policy_is_a_value(policy):
    one = get_policy(policy)
    other = dataclasses.replace(one, saves=tuple(reversed(one.saves)), offloads=tuple(reversed(one.offloads)))
    assert one == other
    assert hash(one) == hash(other)
    assert repr(one) == repr(other)
    assert " at 0x" not in repr(one)
    # Everything that tells it apart is in its repr.
    assert all(repr(getattr(one, field.name)) in repr(one) for field in dataclasses.fields(one))
    assert str(one) == one.name
    assert get_policy(one.name) == one
    if policy not in UNWRAPPED:
        assert lower(one) is lower(other)


# Fused attention on a GPU: a kernel is one operation, of two matmuls forward (scores, context).

KERNEL = 2
GPU = {
    "none": (0, 0, "nothing is wrapped"),
    "xla_auto": (0, 0, "nothing is wrapped; what XLA does comes later"),
    "full": (5 + KERNEL, 6 + KERNEL, "q k v, kernel, out, up or gate up"),
    "everything_saveable": (0, 0, "every value may stay, the kernel's residuals too"),
    "dots_saveable": (KERNEL, KERNEL, "the kernel is not a dot"),
    "dots_with_no_batch_dims_saveable": (KERNEL, KERNEL, "the same"),
    "selective_attention": (KERNEL, KERNEL, "the kernel is the attention core"),
    "attention_kernel_saveable": (5, 6, "q k v, out, up or gate up; the kernel does not run again"),
    "minimal": (KERNEL, KERNEL, "as selective_attention"),
    "minimal_with_context": (KERNEL, KERNEL, "its log-sum-exp is not there: the kernel runs for it alone"),
    "save_dot_with_context_except_mlp": (1 + KERNEL, 2 + KERNEL, "the same, and up or gate up"),
    "save_dot_except_mlpwi": (1 + KERNEL, 2 + KERNEL, "kernel, up or gate up"),
    "save_dot_except_mlp": (1 + KERNEL, 2 + KERNEL, "kernel, up or gate up"),
    "save_qkv_proj": (2 + KERNEL, 3 + KERNEL, "kernel, out, up or gate up"),
    "save_out_proj": (4 + KERNEL, 5 + KERNEL, "q k v, kernel, up or gate up"),
    "save_reduced": (4 + KERNEL, 5 + KERNEL, "as save_out_proj"),
    "save_gathered_weights": (5 + KERNEL, 6 + KERNEL, "on one device no weight is gathered: as full"),
    "qkv_proj_offloaded": (2 + KERNEL, 3 + KERNEL, "as save_qkv_proj"),
    "minimal_offloaded": (KERNEL, KERNEL, "as minimal"),
    "offload_dots_with_no_batch_dims": (KERNEL, KERNEL, "as dots_with_no_batch_dims_saveable"),
    "offload_block_input": (5 + KERNEL, 6 + KERNEL, "as full"),
    "save(context)": (5 + KERNEL, 6 + KERNEL, "as full: the kernel runs again for its log-sum-exp"),
    "attention_kernel_saveable|save_qkv_proj": (2, 3, "out, up or gate up"),
    "attention_kernel_saveable|selective_attention": (0, 0, "every product is there"),
}
"""Recomputed matmuls of one layer in style "gpt" and in style "llama"."""


@functools.cache
def traced_for_gpu(policy: str, build_step: Callable[..., Any]) -> Any:
    step = build_step(policy, size="tiny", layers=LAYERS, attention="fused", platform="cuda")
    skip_without_plugin()
    return trace(step, get_target("h100-sxm-80gb"), get_policy(policy))


@pytest.mark.parametrize("policy", GPU)
def test_recomputed_matmuls_with_a_fused_kernel(policy):
    gpt, llama, _ = GPU[policy]
    assert traced_for_gpu(policy, transformer.gpt).work.recomputed_matmuls == LAYERS * gpt
    assert traced_for_gpu(policy, transformer.llama).work.recomputed_matmuls == LAYERS * llama
    # A policy that keeps gathered weights says that there are none on one device.
    assert bool(traced_for_gpu(policy, transformer.gpt).warnings) == (policy == "save_gathered_weights")


def test_every_policy_has_a_row():
    assert set(POLICIES) <= set(RECOMPUTED)
    assert set(POLICIES) <= set(GPU)
