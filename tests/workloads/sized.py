"""A workload with a size to make large, and stand-ins for tracing and compiling it, which need no JAX."""

import dataclasses
import os
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

import remat_kit as rk
from remat_kit._cell import Cell
from remat_kit._errors import PolicyError
from remat_kit._foresee import Asked
from remat_kit._record import Record


def mlp(
    policy: rk.Policy,
    batch: int = 4,
    width: int = 32,
    layers: int = 2,
    seq: int = 8,
    even: bool = False,
    highest: int | None = None,
    kind: str = "tanh",
    rate: float = 0.0,
) -> rk.Step:
    """A few small layers. With `even` it takes even batches only, and none above `highest`."""
    if even and batch % 2:
        raise ValueError(f"batch {batch} is odd")
    if highest is not None and batch > highest:
        raise ValueError(f"batch {batch} is above {highest}")

    @rk.remat(policy)
    def block(w: Any, x_BTD: Any) -> Any:
        return x_BTD + jnp.tanh(x_BTD @ w)

    def loss(weights: Any, x_BTD: Any) -> Any:
        for w in weights:
            x_BTD = block(w, x_BTD)
        return jnp.sum(x_BTD**2)

    def step(weights: Any, x_BTD: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(weights, x_BTD)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value

    weights = [jax.ShapeDtypeStruct((width, width), jnp.float32)] * layers
    x_BTD = jax.ShapeDtypeStruct((batch, seq, width), jnp.float32)
    return rk.Step(step, (weights, x_BTD), donate=(0,), items={"tokens": batch * seq, "sequences": batch})


def without_annotations(policy, size=8, flag=True, name="x", **more) -> rk.Step:
    """Tells its options by their defaults alone."""
    return mlp(policy, batch=size)


# Stand-ins: 1000 bytes, and by policy so many for each of the batch.

SLOPES = {"none": 100, "full": 30, "dots_saveable": 60}


def needs(cell: Cell) -> Record:
    """A record whose need grows with the batch. Notes in a file, if an option names one, that it ran."""
    options = dict(cell.options)
    if notes := options.get("notes"):
        with open(notes, "a") as file:
            file.write(f"{cell.policy} {options['batch']}\n")
    need = 900 + SLOPES[cell.policy] * options["batch"]
    return dataclasses.replace(
        cell.failed(""), error=None, need_bytes=need, constant_bytes=100, predicted_step_s=0.5 + options["batch"] / 100
    )


def dies_above_20(cell: Cell) -> Record:
    """The same, but the process of a larger batch dies, and with policy dots_saveable of every one."""
    if dict(cell.options)["batch"] > 20 or cell.policy == "dots_saveable":
        os.abort()
    return needs(cell)


def sees(asked: Asked) -> Iterator[dict[str, Any]]:
    """What tracing would tell, 20% off."""
    yield {"step": asked.step or 1}
    for value in (1, 2, 8, 32, 64):
        live = round(1.2 * SLOPES[asked.cell.policy] * value)
        yield {"value": value * (asked.step or 1), "argument_bytes": 1000, "live_bytes": live}


def sees_less(asked: Asked) -> Iterator[dict[str, Any]]:
    """The same, then dies; and refuses policy dots_saveable."""
    if asked.cell.policy == "dots_saveable":
        raise PolicyError("there is nothing to save")
    yield from sees(asked)
    os.abort()


def sees_a_bound(asked: Asked) -> Iterator[dict[str, Any]]:
    """The same, and that more than 24 is refused."""
    yield {"step": 1}
    for value in (1, 2, 8, 24):
        yield {"value": value, "argument_bytes": 1000, "live_bytes": SLOPES[asked.cell.policy] * value}
    yield {"accepted": 24, "refused": 25, "error": "ValueError: there are 24 positions"}
