"""Workloads: one that is fine, and one for each way in which a user's own can go wrong."""

import os
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

import remat_kit as rk


def fine(policy: rk.Policy, width: int = 16, layers: int = 2) -> rk.Step:
    """A few small layers with a name in each, and a gradient step."""

    @rk.remat(policy)
    def block(w: Any, x_BD: Any) -> Any:
        return x_BD + jnp.tanh(checkpoint_name(x_BD @ w, "mlp_up"))

    def loss(weights: Any, x_BD: Any) -> Any:
        for w in weights:
            x_BD = block(w, x_BD)
        return jnp.sum(x_BD**2)

    def step(weights: Any, x_BD: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(weights, x_BD)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value

    def init(seed: int) -> tuple[Any, ...]:
        keys = jax.random.split(jax.random.key(seed), layers + 1)
        weights = [jax.random.normal(key, (width, width)) / width for key in keys[1:]]
        return weights, jax.random.normal(keys[0], (4, width))

    args = jax.eval_shape(lambda: init(0))
    return rk.Step(step, args, donate=(0,), labels={"params": 0, "batch": 1}, init=init)


def raises(policy: rk.Policy) -> rk.Step:
    """Raises, in more than one line."""
    raise ArithmeticError("the first line of the error\nand a second line")


def aborts(policy: rk.Policy) -> rk.Step:
    """Dies of SIGABRT, as after a failed check in C++."""
    print("F0000 check failed: this cannot be", file=sys.stderr, flush=True)
    os.abort()


def loops(policy: rk.Policy) -> rk.Step:
    """Never ends."""
    while True:
        time.sleep(0.01)


def allocates(policy: rk.Policy) -> rk.Step:
    """Takes 16 MiB more of memory, and touches it, for ever."""
    kept = []
    while True:
        kept.append(bytearray(b"x" * 2**24))
        time.sleep(0.002)


def exits(policy: rk.Policy) -> rk.Step:
    """Calls sys.exit."""
    sys.exit(0)


def prints_garbage(policy: rk.Policy) -> rk.Step:
    """Writes bytes that are no text, and half a result, to both streams; then does its work."""
    for stream in (1, 2):
        os.write(stream, b'\xff\xfe\x00 {"value": 1}\n{"done"')
    return fine(policy)


def only_none(policy: rk.Policy) -> rk.Step:
    """Fine with policy none, and raises with any other."""
    if policy.name != "none":
        raise ValueError(f"not with {policy}")
    return fine(policy)


def loops_unless_none(policy: rk.Policy) -> rk.Step:
    """Fine with policy none, and never ends with any other."""
    return fine(policy) if policy.name == "none" else loops(policy)


not_a_function = 3
