"""What the tests of the reference workloads ask of each of them."""

import dataclasses
import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import hlo_samples  # sets what the plugin needs, before JAX starts
import jax
import jax.numpy as jnp
import numpy as np
from contract import worst_error

from models import transformer
from remat_kit import Record, Step, Workload, analyze, compile_step, get_policy, get_target, trace
from remat_kit._jaxpr import Work
from remat_kit._measure import tolerance_of

Build = Callable[..., Step]

# XLA's CPU backend spends most of these files' time on optimizing code that runs once.
jit = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def tiny(build: Build, policy: str, **options: Any) -> Step:
    """The smallest step of a workload, all in float32."""
    return build(policy, size="tiny", compute_dtype="float32", **options)


def count_params(step: Step) -> int:
    """Elements of all parameters of a step."""
    return sum(leaf.size for leaf in jax.tree.leaves(step.args[0].params))


@functools.cache
def work_of(build: Build, policy: str = "none", **options: Any) -> Work:
    """Matmuls and FLOPs of a step, counted on its jaxpr. The optimizer has none: the one with least to trace."""
    return trace(build(policy, optimizer="sgd", **options), get_target("cpu"), get_policy(policy)).work


@functools.cache
def initial_values(build: Build) -> Any:
    """Real arguments of a tiny step; they depend on shapes alone."""
    init = tiny(build, "none").init
    assert init is not None
    return jit(init)(0)


@functools.cache
def gradients(build: Build, policy: str, **options: Any) -> Any:
    """(loss, gradients) of a tiny step; those of unrolled blocks come stacked, as those of scanned ones are."""
    loss_and_grads = tiny(build, policy, **options).loss_and_grads
    assert loss_and_grads is not None
    state, *args = initial_values(build)
    if options.get("stack") != "unroll":
        return jax.device_get(jit(loss_and_grads)(state, *args))
    state = dataclasses.replace(state, params=transformer.unstack_blocks(state.params))
    loss, grads = jit(loss_and_grads)(state, *args)
    return jax.device_get((loss, transformer.stack_blocks(grads)))


def assert_close(got: Any, expected: Any, rtol: float = 1e-4, atol: float = 1e-6) -> None:
    """Two pytrees are equal as far as float32 goes."""
    jax.tree.map(partial(np.testing.assert_allclose, rtol=rtol, atol=atol), got, expected)


def assert_same_gradients(build: Build, policy: str, reference: dict[str, Any], **options: Any) -> None:
    """Under a policy, loss and gradients are those of policy none as far as float32 goes, and not trivial.

    `reference` are options of the step with policy none alone, which must not matter either.
    """
    got, expected = gradients(build, policy, **options), gradients(build, "none", **options, **reference)
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    leaves = jax.tree.leaves(got)
    assert all(np.isfinite(leaf).all() and np.any(leaf) for leaf in leaves)
    assert worst_error(leaves, jax.tree.leaves(expected)) <= tolerance_of("float32")


def losses(build: Build, policy: str, steps: int = 20) -> list[float]:
    """The loss of a tiny model before each of some updates on one batch, in its own compute dtype."""
    step = build(policy, size="tiny")
    jitted: Any = jit(step.fn, donate_argnums=step.donate)
    state, batch, key = jax.tree.map(jnp.array, initial_values(build))  # copies, since they are donated
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), (state, batch, key)) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), step.args
    )
    found = []
    for _ in range(steps):
        state, loss = jitted(state, batch, key)
        found.append(float(loss))
    assert jitted._cache_size() == 1
    return found


def record_for_gpu(build: Build, spec: str, policy: str, **options: Any) -> Record:
    """The record of a tiny step compiled for an H100, in its own compute dtype."""
    hlo_samples.skip_without_plugin()
    step = build(policy, size="tiny", **options)
    traced = trace(step, get_target("h100-sxm-80gb"), get_policy(policy))
    return analyze(compile_step(traced), Workload(spec), policy)
