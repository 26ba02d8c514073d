"""Workloads for the planner, small enough that XLA compiles them in a moment."""

from typing import Any

import jax
import jax.numpy as jnp

from remat_kit import Policy, Step, remat


def loss_of(policy: str | Policy, wrap: bool = True) -> Any:
    """A stack of layers in a scan: `loss(weights, x)`."""

    def layer(x: jax.Array, weights: tuple[jax.Array, jax.Array]) -> jax.Array:
        up, down = weights
        return x + jnp.tanh(jnp.sin(x @ up)) @ down

    block = remat(policy)(layer) if wrap else layer

    def loss(weights: tuple[jax.Array, jax.Array], x: jax.Array) -> jax.Array:
        return jnp.mean(jax.lax.scan(lambda x, own: (block(x, own), None), x, weights)[0] ** 2)

    return loss


def stack(policy: str | Policy, *, layers: int = 4, width: int = 64, rows: int = 512) -> Step:
    """A step of gradient descent on `loss_of`."""
    loss = loss_of(policy)

    def step(weights: Any, x: jax.Array) -> Any:
        value, gradients = jax.value_and_grad(loss)(weights, x)
        return jax.tree.map(lambda weight, gradient: weight - 0.1 * gradient, weights, gradients), value

    weights = tuple(
        jax.ShapeDtypeStruct((layers, *shape), jnp.float32) for shape in ((width, 4 * width), (4 * width, width))
    )
    return Step(step, (weights, jax.ShapeDtypeStruct((rows, width), jnp.float32)), donate=(0,), labels={"params": 0})


def masked(policy: str | Policy) -> Step:
    """A stack with dropout from XLA's own random generator, whose bits must not be made twice."""
    del policy

    def layer(x: jax.Array, own: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        weight, number = own
        key = jax.random.fold_in(jax.random.key(0, impl="rbg"), number)
        return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), jnp.sin(x @ weight), 0.0), None

    def step(weights: jax.Array, x: jax.Array) -> jax.Array:
        numbers = jnp.arange(weights.shape[0], dtype=jnp.uint32)

        def loss(weights: jax.Array) -> jax.Array:
            return jnp.mean(jax.lax.scan(layer, x, (weights, numbers))[0] ** 2)

        return weights - jax.grad(loss)(weights)

    weights = jax.ShapeDtypeStruct((4, 64, 64), jnp.float32)
    return Step(step, (weights, jax.ShapeDtypeStruct((128, 64), jnp.float32)))


def no_block(policy: str | Policy) -> Step:
    """A step with one dense layer."""
    del policy

    def step(weight: jax.Array, x: jax.Array) -> jax.Array:
        return weight - jax.grad(lambda w: jnp.sum((x @ w) ** 2))(weight)

    return Step(step, (jax.ShapeDtypeStruct((8, 8), jnp.float32), jax.ShapeDtypeStruct((4, 8), jnp.float32)))


def no_derivative(policy: str | Policy) -> Step:
    """A step that only evaluates."""
    loss = loss_of(policy)
    weights = tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((4, 8, 32), (4, 32, 8)))
    return Step(lambda weights, x: loss(weights, x), (weights, jax.ShapeDtypeStruct((16, 8), jnp.float32)))
