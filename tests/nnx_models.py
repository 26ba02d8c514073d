"""Small NNX models, and the names that a trace gives their equations; for the tests of name scopes."""

import jax
import jax.numpy as jnp
from flax import nnx

from remat_kit._jaxpr import walk
from remat_kit._scopes import nnx_scopes

X = jax.ShapeDtypeStruct((2, 4), jnp.float32)


class Attention(nnx.Module):
    """The order of calls is not that of the attributes, nor of their names."""

    def __init__(self, rngs):
        self.out = nnx.Linear(4, 4, rngs=rngs)
        self.key = nnx.Linear(4, 4, rngs=rngs)
        self.query = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        return self.out(self.query(x) * self.key(x))


class Block(nnx.Module):
    def __init__(self, rngs):
        self.mlp_norm = nnx.LayerNorm(4, rngs=rngs)
        self.attention_norm = nnx.LayerNorm(4, rngs=rngs)
        self.attention = Attention(rngs)
        self.up = nnx.Linear(4, 8, rngs=rngs)
        self.down = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.down(jnp.tanh(self.up(self.mlp_norm(x))))


MATMULS = ["attention/query", "attention/key", "attention/out", "up", "down"]
"""The matmuls of a block in the order in which they run."""


class Stack(nnx.Module):
    """Blocks one after another, each called by `run`."""

    def __init__(self, block=Block, layers=2, run=lambda block, x: block(x)):
        self.blocks = nnx.List(block(nnx.Rngs(i)) for i in range(layers))
        self.run = nnx.static(run)

    def __call__(self, x):
        for block in self.blocks:
            x = self.run(block, x)
        return x


class Scanned(nnx.Module):
    """One `Block` with stacked parameters."""

    def __init__(self, block=Block, how="nnx.scan", layers=3):
        self.norm = nnx.LayerNorm(4, rngs=nnx.Rngs(0))
        self.blocks = nnx.vmap(lambda key: block(nnx.Rngs(key)))(jax.random.split(jax.random.key(0), layers))
        self.how = how

    def __call__(self, x):
        x = self.norm(x)
        if self.how == "nnx.scan":
            return nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.blocks)
        definition, state = nnx.split(self.blocks)
        return jax.lax.scan(lambda x, layer: (nnx.merge(definition, layer)(x), None), x, state)[0]


def named(f, *args, of="dot_general"):
    """The name stacks of all equations of a primitive, in order."""
    with nnx_scopes():
        jaxpr = jax.make_jaxpr(f)(*args)
    return [equation.stack for equation in walk(jaxpr) if equation.primitive == of]


def paths(model, *args, of="dot_general", f=lambda model, *args: model(*args)):
    """`named` for a model that the step merges from its state, as a training step does."""
    definition, state = nnx.split(model)
    return named(lambda state, *args: f(nnx.merge(definition, state), *args), state, *(args or (X,)), of=of)


def under(*prefixes):
    return [f"{prefix}/{matmul}" for prefix in prefixes for matmul in MATMULS]
