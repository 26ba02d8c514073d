"""Module paths of NNX models in the names of a step's equations."""

import functools
import re
import types
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from nnx_models import MATMULS, Attention, Block, Scanned, Stack, X, named, paths, under

from remat_kit import remat


def test_attributes():
    assert paths(Block(nnx.Rngs(0))) == under("Block")


def test_without_a_call_around_it_a_module_has_its_class_name():
    model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    assert named(lambda x: model(x), X) == ["Linear"]


def test_without_merge():
    model = Stack()
    assert named(lambda x: model(x), X) == under("Stack/blocks_0", "Stack/blocks_1")


def test_modules_of_one_class():
    assert list(dict.fromkeys(paths(Block(nnx.Rngs(0)), of="rsqrt"))) == ["Block/attention_norm", "Block/mlp_norm"]


def test_a_module_taken_from_deep_inside():
    class Deep(nnx.Module):
        def __init__(self):
            self.block = Block(nnx.Rngs(0))

        def __call__(self, x):
            return self.block.attention.query(x)

    assert paths(Deep()) == ["Deep/block/attention/query"]


class Containers(nnx.Module):
    def __init__(self):
        linear = functools.partial(nnx.Linear, 4, 4, rngs=nnx.Rngs(0))
        self.items = nnx.List([linear(), linear()])
        self.plain: Any = nnx.data([linear(), (linear(),)])
        self.table = nnx.data({"one (two)": linear(), "7": linear()})
        self.entries = nnx.Dict(first=linear())
        self.sequence = nnx.Sequential(linear(), jnp.tanh, linear())

    def __call__(self, x):
        first, (second,) = self.plain
        for layer in (self.items[1], self.items[0], second, first, self.table["one (two)"]):
            x = layer(x)
        return self.sequence(self.entries["first"](self.table["7"](x)))


def test_containers():
    assert paths(Containers()) == [
        f"Containers/{path}"
        for path in ("items_1", "items_0", "plain_1_0", "plain_0", "table/one__two_", "table_7", "entries/first")
    ] + ["Containers/sequence/layers_0", "Containers/sequence/layers_2"]


def test_a_shared_module_keeps_its_name():
    class Shared(nnx.Module):
        def __init__(self):
            self.first = Attention(nnx.Rngs(0))
            self.again = self.first

        def __call__(self, x):
            return self.first(self.again(self.first(x)))

    inner = ["query", "key", "out"]
    # Merged, a module has its attributes in the order of their names; each of both is right.
    assert paths(Shared()) == [f"Shared/again/{each}" for _ in range(3) for each in inner]
    model = Shared()
    assert named(lambda x: model(x), X) == [f"Shared/first/{each}" for _ in range(3) for each in inner]


def test_a_module_that_another_one_is_given():
    class Uses(nnx.Module):
        def __call__(self, x, other):
            return other(x)

    class Gives(nnx.Module):
        def __init__(self):
            self.uses = Uses()
            self.given = nnx.Linear(4, 4, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.uses(x, self.given)

    assert paths(Gives()) == ["Gives/uses/given"]


def test_a_module_that_nobody_holds():
    class Makes(nnx.Module):
        def __call__(self, x):
            return nnx.Linear(4, 4, rngs=nnx.Rngs(0))(x)

    assert paths(Makes()) == ["Makes/Linear"]


def test_other_methods_have_no_scope():
    class Methods(nnx.Module):
        def __init__(self):
            self.block = Block(nnx.Rngs(0))

        def __call__(self, x):
            return self.inner(x)

        def inner(self, x):
            return self.block.attention(x)

    assert paths(Methods()) == [f"Methods/block/attention/{name}" for name in ("query", "key", "out")]
    # Outside of any call the one whose method it is stands in front.
    assert paths(Methods(), f=lambda model, x: model.inner(x)) == paths(Methods())
    assert paths(Stack(), f=lambda model, x: model.blocks[1].up(x)) == ["Stack/blocks_1/up"]


def test_super_adds_nothing():
    class Child(Block):
        def __call__(self, x):
            return super().__call__(self.up(x)[:, :4])

    class Inherits(Child):
        pass

    assert paths(Child(nnx.Rngs(0))) == ["Child/up", *under("Child")]
    assert paths(Inherits(nnx.Rngs(0))) == ["Inherits/up", *under("Inherits")]
    assert paths(remat("full")(Child)(nnx.Rngs(0))) == ["Child/up", *under("Child")]


def test_attention_of_flax():
    class Model(nnx.Module):
        def __init__(self):
            self.mha = nnx.MultiHeadAttention(2, 4, rngs=nnx.Rngs(0), decode=False)

        def __call__(self, x):
            return self.mha(x)

    stacks = paths(Model(), jnp.ones((1, 3, 4)))
    assert set(stacks) > {f"Model/mha/{name}" for name in ("query", "key", "value", "out")}
    assert all(stack.startswith("Model/mha/") for stack in stacks)


# ---- transformations, inside which modules are copies

WRAPPED = {
    "class": lambda: Stack(remat("full")(Block)),
    "dots": lambda: Stack(remat("dots_saveable")(Block)),
    "instance": lambda: Stack(run=lambda block, x: remat("full")(block)(x)),
    "bound method": lambda: Stack(run=lambda block, x: remat("full")(block.__call__)(x)),
    "function": lambda: Stack(run=remat("full")(lambda block, x: block(x))),
    "nnx.remat": lambda: Stack(run=lambda block, x: nnx.remat(lambda block, x: block(x))(block, x)),
    "nnx.remat of the method": lambda: Stack(_with_call(nnx.remat)),
    "nnx.jit": lambda: Stack(run=lambda block, x: nnx.jit(lambda block, x: block(x))(block, x)),
    "nnx.jit of the method": lambda: Stack(_with_call(nnx.jit)),
    "class made while tracing": lambda: Stack(run=_remade),
    "merge": lambda: Stack(run=lambda block, x: nnx.merge(*nnx.split(block))(x)),
}


def _with_call(transform):
    return types.new_class(
        "Block", (Block,), exec_body=lambda body: body.update({"__call__": transform(Block.__call__)})
    )


def _remade(block, x):
    """Calls a copy of `block` whose class did not exist when the scopes were opened."""
    remade = types.new_class(
        "Remade", (Block,), exec_body=lambda body: body.update({"__call__": block.__call__.__func__})
    )
    copy = remat("full")(remade)(nnx.Rngs(0))
    nnx.update(copy, nnx.state(block))
    return copy(x)


# What runs in a trace of its own may be traced once for all blocks, so that no number would be right.
OWN_TRACE = ("instance", "bound method", "function", "nnx.remat", "nnx.jit")


@pytest.mark.parametrize("how", WRAPPED)
def test_copies(how, remat3):
    prefixes = ("Stack/blocks",) * 2 if how in OWN_TRACE else ("Stack/blocks_0", "Stack/blocks_1")
    if how == "class made while tracing":
        prefixes = ("Stack/Remade",) * 2
    assert paths(WRAPPED[how]()) == under(*prefixes)
    # Whatever runs again or backward is named alike, among what JAX writes itself.
    for stack in paths(WRAPPED[how](), f=nnx.grad(lambda model, x: model(x).sum())):
        inner = re.sub(r"(transpose|jvp|checkpoint|rematted_computation|\(|\)|/)+", "/", stack).strip("/")
        assert re.search(rf"({'|'.join(prefixes)})/({'|'.join(MATMULS)})$", inner), stack


@pytest.mark.parametrize("block", [Block, remat("full")(Block)], ids=["plain", "remat"])
@pytest.mark.parametrize("how", ["nnx.scan", "merge in lax.scan"])
def test_a_scanned_stack_has_no_numbers(how, block):
    assert paths(Scanned(block, how)) == under("Scanned/blocks")


def test_copies_in_any_order():
    class Backwards(nnx.Module):
        def __init__(self):
            self.one, self.two = Block(nnx.Rngs(0)), Block(nnx.Rngs(0))

        def __call__(self, x):
            def run(block, x):
                return nnx.remat(lambda block, x: block(x))(block, x)

            x = run(self.two, self.one(x))
            x = run(self.two, x)
            x = run(self.one, x)
            x = nnx.remat(lambda block, x: block.up(x))(self.two, x)[:, :4]
            return nnx.remat(lambda a, b, x: a.up(x) + b.up(x))(self.two, self.one, x)

    blocks = under("Backwards/one", "Backwards/two", "Backwards/two", "Backwards/one")
    assert paths(Backwards()) == [*blocks, "Backwards/two/up", "Backwards/two/up", "Backwards/one/up"]


def test_more_merged_modules_than_there_are_begin_again():
    definition, state = nnx.split(nnx.Linear(4, 4, rngs=nnx.Rngs(0)))

    class Twice(nnx.Module):
        def __init__(self):
            self.a, self.b = (nnx.Linear(4, 4, rngs=nnx.Rngs(0)) for _ in range(2))

        def __call__(self, x):
            for _ in range(3):
                x = nnx.merge(definition, state)(x)
            return x

    assert paths(Twice()) == ["Twice/a", "Twice/b", "Twice/a"]


def test_vmap():
    class Mapped(nnx.Module):
        def __init__(self):
            self.heads = nnx.vmap(lambda key: Block(nnx.Rngs(key)))(jax.random.split(jax.random.key(0), 3))

        def __call__(self, x):
            return nnx.vmap(lambda head, x: head(x), in_axes=(0, None))(self.heads, x)

    got = paths(Mapped())
    assert [re.sub(r"vmap\(\)/|vmap\((.*?)\)", r"\1", stack) for stack in got] == under("Mapped/heads"), got


def test_a_linen_module_in_an_nnx_model():
    class Bridged(nnx.Module):
        def __init__(self):
            self.dense = nnx.bridge.ToNNX(nn.Dense(4), rngs=nnx.Rngs(0)).lazy_init(jnp.ones((2, 4)))

        def __call__(self, x):
            return self.dense(x)

    assert paths(Bridged()) == ["Bridged/dense/Dense"] or paths(Bridged()) == ["Bridged/dense/Dense.__call__"]
