"""What holds for every model that enable_remat is switched on in."""

from collections.abc import Callable
from typing import Any

import jax

from remat_kit._jaxpr import count_work, walk
from remat_kit._saved import saved_values


def checkpoints(function: Callable[..., Any], *args: Any) -> int:
    """How many checkpoints run in a function that is not differentiated."""
    jaxpr = jax.make_jaxpr(function)(*args)
    return sum(
        each.executions for each in walk(jaxpr) if each.primitive in ("checkpoint", "remat", "remat2", "RematTraced")
    )


def recomputed(loss: Callable[..., Any], *args: Any) -> int:
    """Matrix products that run again in the backward of a loss."""
    return count_work(jax.make_jaxpr(jax.grad(loss))(*args)).recomputed_matmuls


def assert_same_and_less(before: Callable[..., Any], after: Callable[..., Any], *args: Any, atol: float = 1e-5) -> None:
    """Two losses of the same arguments: equal loss and gradients of the first argument; the second one keeps less.

    By the jaxpr less is kept and more matrix products run; XLA needs less memory for temporaries on this backend.
    """
    from conftest import _assert_same_tree

    steps = [jax.jit(jax.value_and_grad(loss)) for loss in (before, after)]
    traced = [step.trace(*args) for step in steps]
    # LLVM optimizes nothing, which takes most of the time; XLA's passes and buffers stay what they are.
    compiled = [each.lower().compile(compiler_options={"xla_backend_optimization_level": 0}) for each in traced]
    results = [each(*args) for each in compiled]
    _assert_same_tree(results[1], results[0], atol=atol)
    saved = [saved_values(each.jaxpr).device_bytes for each in traced]
    assert saved[1] < saved[0], saved
    temp = [each.memory_analysis().temp_size_in_bytes for each in compiled]
    assert temp[1] < temp[0], temp
    work = [count_work(each.jaxpr) for each in traced]
    assert work[1].recomputed_matmuls > 0 == work[0].recomputed_matmuls
    assert work[1].flops - work[0].flops <= work[1].recomputed_flops
