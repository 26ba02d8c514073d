"""From parameters and a loss to a whole training step, the same for every reference model.

Shape suffixes: B batch, T sequence, V vocabulary.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from models.config import TransformerConfig
from models.parts import at_least_float32
from remat_kit import Step

Params = Any
"""A pytree of arrays: nested dicts, as NNX and Linen make them."""

Batch = dict[str, jax.Array]
"""Arrays by name. Of a language model `{"inputs": [B, T], "targets": [B, T]}`, int32 tokens."""

KEY_IMPLEMENTATION = "threefry2x32"
"""Fixed, so that the shape of the key argument and the masks do not depend on JAX's settings."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """What a step updates."""

    params: Params
    opt_state: Any


def cross_entropy(logits_BTV: jax.Array, targets_BT: jax.Array) -> jax.Array:
    """Mean over all positions of the softmax cross entropy, a float32 scalar.

    As trainers do by default: the logits come out of the matmul in the compute dtype and are cast to float32
    for the logarithm of the sum. In bfloat16 this is 2 + 4 bytes an element of [B, T, V] in forward (4 of them
    kept for backward) and 4 + 2 for the gradient; with a large vocabulary it can be the largest part of a step
    that rematerializes its blocks.
    """
    wide_BTV = logits_BTV.astype(at_least_float32(logits_BTV.dtype))
    return optax.softmax_cross_entropy_with_integer_labels(wide_BTV, targets_BT).mean()


def make_optimizer(name: str) -> optax.GradientTransformation:
    """`adamw` with two moments a parameter, or `sgd` with no state; constant learning rate, no clipping."""
    if name == "sgd":
        return optax.sgd(1e-2)
    return optax.adamw(3e-4, b1=0.9, b2=0.95, weight_decay=0.1)


def step_of(
    optimizer_name: str,
    init_params: Callable[[jax.Array], Params],
    make_batch: Callable[[jax.Array], Batch],
    loss: Callable[[Params, Batch, jax.Array], jax.Array],
    items: Mapping[str, int],
) -> Step:
    """The step `fn(state, batch, key) -> (state, loss)` over abstract arguments; nothing is allocated.

    Args:
      optimizer_name: see `make_optimizer`.
      init_params: parameters from a key.
      make_batch: a batch of made-up data from a key.
      loss: scalar loss from parameters, batch and a key for dropout.
      items: what one step processes, the main thing first.

    The step's `key` argument is the raw data of a key, uint32 [2], so that every argument is a plain array.
    """
    optimizer = make_optimizer(optimizer_name)

    def loss_and_grads(state: TrainState, batch: Batch, key: jax.Array) -> tuple[jax.Array, Params]:
        dropout_key = jax.random.wrap_key_data(key, impl=KEY_IMPLEMENTATION)
        return jax.value_and_grad(loss)(state.params, batch, dropout_key)

    def train_step(state: TrainState, batch: Batch, key: jax.Array) -> tuple[TrainState, jax.Array]:
        value, grads = loss_and_grads(state, batch, key)
        with jax.named_scope("optimizer"):
            updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
        return TrainState(params, opt_state), value

    # Not jitted: XLA would compile one random generator for each parameter, and there are few different shapes.
    def make_args(seed: int | jax.Array) -> tuple[TrainState, Batch, jax.Array]:
        params_key, batch_key, dropout_key = jax.random.split(jax.random.key(seed, impl=KEY_IMPLEMENTATION), 3)
        params, batch = init_params(params_key), make_batch(batch_key)
        return TrainState(params, optimizer.init(params)), batch, jax.random.key_data(dropout_key)

    return Step(
        fn=train_step,
        args=jax.eval_shape(make_args, jax.ShapeDtypeStruct((), jnp.uint32)),
        donate=(0,),
        labels={"params": "0.params", "optimizer": "0.opt_state", "batch": 1, "key": 2},
        init=make_args,
        loss_and_grads=loss_and_grads,
        items=items,
    )


def build_step(
    config: TransformerConfig,
    init_params: Callable[[jax.Array], Params],
    loss: Callable[[Params, Batch, jax.Array], jax.Array],
) -> Step:
    """The step of a language model on sequences of random tokens, see `step_of`."""

    def make_batch(key: jax.Array) -> Batch:
        tokens_BT = jax.random.randint(key, (config.batch, config.seq + 1), 0, config.vocabulary, jnp.int32)
        return {"inputs": tokens_BT[:, :-1], "targets": tokens_BT[:, 1:]}

    items = {"tokens": config.batch * config.seq, "sequences": config.batch}
    return step_of(config.optimizer, init_params, make_batch, loss, items)


def split_model(create: Callable[[jax.Array], nnx.Module]) -> tuple[Any, Callable[[jax.Array], Params]]:
    """The definition of the NNX model `create(key)`, to be merged with parameters, and how to make them from a key.

    The definition is made without values, so nothing is allocated.
    """
    definition = nnx.graphdef(nnx.eval_shape(lambda: create(jax.random.key(0))))

    def init_params(key: jax.Array) -> Params:
        return nnx.to_pure_dict(nnx.state(create(key), nnx.Param))

    return definition, init_params
