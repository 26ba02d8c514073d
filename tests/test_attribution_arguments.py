"""Steps with arguments of many kinds: what each holds, and what that makes of the rest."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from attributed import (
    BATCH,
    CLASSES,
    IN,
    INNER,
    LABELS,
    WIDTH,
    B,
    argument_categories,
    block,
    categories,
    cross_entropy,
    functions,
    kinds,
    look,
    of,
    on_cpu,
    plain,
    spec,
    training,
    unrolled,
    unrolled_loss,
    weights,
)  # fmt: skip
from captured import compiled, sharded
from flax import linen as nn
from flax import nnx
from jax.sharding import PartitionSpec

from remat_kit import Step

ROLES = {"p": "parameters", "s": "optimizer state", "b": "batch"}


def by_first_letter(found: dict[str, str]) -> dict[str, set[str]]:
    """Categories by the first letter of the argument's name."""
    return {
        letter: {category for name, category in found.items() if name[0] == letter} for letter in {n[0] for n in found}
    }


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        ("adam", optax.adam(1e-3)),
        ("plain sgd", optax.sgd(1e-3)),  # no state
        ("adafactor", optax.adafactor(1e-3, min_dim_size_to_factor=8)),  # state of other shapes
        ("multisteps", optax.MultiSteps(optax.adam(1e-3), 4)),  # a conditional around the update
    ],
)
def test_the_file_alone_tells_the_arguments(name: str, optimizer: Any):
    step = compiled(training(unrolled_loss, weights(), optimizer=optimizer), "cpu")
    alone = look(step, labelled=False)
    said = argument_categories(look(step))
    assert argument_categories(alone) == said
    assert by_first_letter(said) == {letter: {ROLES[letter]} for letter in {key[0] for key in said}}
    # And with them the rest.
    assert [known.category for known in alone.attributions] == [known.category for known in look(step).attributions]


def test_state_that_is_not_donated():
    step = compiled(training(unrolled_loss, weights(), donate=()), "cpu")
    found = look(step)
    assert argument_categories(look(step, labelled=False)) == argument_categories(found)
    # Gradients are made in the memory of the results.
    assert categories(found, "f32[24,50]", "live_out") == {"outputs"}
    assert not [b for b in found.buffers if b.kind == "temp" and b.bytes == WIDTH * CLASSES * 4]


def test_frozen_weights():
    def loss(p: Any, frozen: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        h = x @ frozen["embed"]
        for number, ((w, v), (a, b)) in enumerate(zip(frozen["blocks"], p, strict=True)):
            with jax.named_scope(f"block_{number}"):
                h = h + jnp.tanh(h @ w + (h @ a) @ b) @ v
        return cross_entropy(h @ frozen["head"], y)

    low_rank = [(spec(WIDTH, 17), spec(17, INNER))] * 3
    step = training(loss, low_rank, (weights(), *BATCH), labels={"params": 0, "opt_state": 1, "weights": 2, "batch": 3})
    program = compiled(step, "cpu")
    found = look(program)
    assert kinds(found, "f32[24,50]", "parameter") == {("parameters", "head", "", "argument", 1)}
    assert ("parameters", "blocks_1", "blocks_1", "argument", 1) in kinds(found, "f32[24,32]", "parameter")
    # Parameters are two trees here, and Adam's state has the shape of one.
    assert {(c, m) for c, m, _, _, _ in kinds(found, "f32[24,17]", "parameter")} == {
        (category, f"p_{n}") for category in ("parameters", "optimizer state") for n in (0, 1, 2)
    }
    # Nothing updates the frozen ones, which is all that the file tells of them.
    alone = argument_categories(look(program, labelled=False))
    assert {category for name, category in alone.items() if name.startswith("batch[0]")} <= {"batch"}
    assert {category for name, category in alone.items() if name[0] == "p"} == {"parameters"}


def test_master_copies():
    optimizer = optax.adam(1e-3)

    def step(p: Any, m: Any, s: Any, x: jax.Array, y: jax.Array) -> Any:
        def loss(p: Any) -> jax.Array:
            return cross_entropy(unrolled(p, x.astype(jnp.bfloat16)).astype(jnp.float32), y)

        gradients = jax.tree.map(lambda g: g.astype(jnp.float32), jax.grad(loss)(p))
        updates, s = optimizer.update(gradients, s, m)
        m = optax.apply_updates(m, updates)
        return jax.tree.map(lambda m: m.astype(jnp.bfloat16), m), m, s

    p, m = weights(dtype=jnp.bfloat16), weights()
    args = (p, m, jax.eval_shape(optimizer.init, m), *BATCH)
    program = compiled(
        Step(step, args, donate=(0, 1, 2), labels={"params": 0, "optimizer": 1, "opt_state": 2, "batch": 3}), "cpu"
    )
    found = look(program)
    assert argument_categories(look(program, labelled=False)) == argument_categories(found)
    assert categories(found, "bf16[24,50]", "parameter") == {"parameters"}
    assert kinds(found, "f32[24,50]", "parameter") == {("optimizer state", "head", "", "argument", 1)}
    # The CPU multiplies in float32: casts without a name, around what has one. None of them is behind the blocks.
    assert "loss head" not in categories(found, "bf16[70,32]") | categories(found, "f32[70,32]")
    # A product is a gradient before it is cast as well.
    assert categories(found, "f32[50,24]") == {"gradients"}


def test_labels_that_say_it_otherwise_or_not_at_all():
    usual = look(plain())
    for labels in ({"weights": 0, "moments": 1}, {"weights": 0}, {}):
        found = on_cpu(training(unrolled_loss, weights(), labels=labels))
        state = "moments" if "moments" in labels else "optimizer state"
        expected = [state if each.category == "optimizer state" else each.category for each in usual.attributions]
        assert [each.category for each in found.attributions] == expected
        assert [each.module for each in found.attributions] == [each.module for each in usual.attributions]


def test_statistics_of_a_norm():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            for number in range(3):
                x = nn.relu(nn.BatchNorm(use_running_average=False)(nn.Dense(33 + number)(x)))
            return nn.Dense(CLASSES)(x)

    shapes = jax.eval_shape(lambda: Net().init(jax.random.key(0), jnp.zeros((B, IN))))

    def step(p: Any, statistics: Any, x: jax.Array, y: jax.Array) -> Any:
        def loss(p: Any) -> Any:
            logits, new = Net().apply({"params": p, "batch_stats": statistics}, x, mutable=["batch_stats"])
            return cross_entropy(logits, y), new["batch_stats"]

        gradients, new = jax.grad(loss, has_aux=True)(p)
        return jax.tree.map(lambda p, g: p - 0.1 * g, p, gradients), new

    args = (shapes["params"], shapes["batch_stats"], *BATCH)
    found = on_cpu(Step(step, args, donate=(0, 1), labels={"params": 0, "batch_stats": 1, "batch": 2}))
    assert {(c, m) for c, m, _, _, _ in kinds(found, "f32[34]", "parameter")} == {
        ("batch_stats", "BatchNorm_1"), ("parameters", "BatchNorm_1"), ("parameters", "Dense_1"),
    }  # fmt: skip
    # Dense_0 to Dense_3 are single products: no stack of blocks, so that nothing is behind it either.
    assert not found.structure.blocks
    assert "loss head" not in {known.category for known in found.attributions}
    assert "saved activations" in categories(found, "f32[70,34]")


def test_dense_layers_beside_the_blocks():
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return x + nn.Dense(WIDTH)(jnp.tanh(nn.Dense(INNER)(x)))

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            x = nn.Dense(WIDTH)(x)
            for _ in range(3):
                x = Block()(x)
            return nn.Dense(CLASSES)(jnp.tanh(nn.Dense(41)(x)))

    params = jax.eval_shape(lambda: Net().init(jax.random.key(0), jnp.zeros((B, IN))))
    found = on_cpu(training(lambda p, x, y: cross_entropy(jnp.asarray(Net().apply(p, x)), y), params))
    assert set(found.structure.blocks.values()) == {f"Block_{n}" for n in range(3)}
    assert ("saved activations", "Block_1", "Block_1", "forward", 1) in kinds(found, "f32[70,32]")
    assert ("parameters", "Block_1/Dense_1", "Block_1", "argument", 1) in kinds(found, "f32[24,32]", "parameter")
    assert ("parameters", "Dense_2", "", "argument", 1) in kinds(found, "f32[24,41]", "parameter")
    # Two of the three products beside the blocks are behind the last one.
    assert {(c, b) for c, _, b, _, _ in kinds(found, "f32[70,41]")} == {("loss head", "")}


def test_nnx_blocks_with_numbered_children():
    class Block(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.Dense_0 = nnx.Linear(WIDTH, INNER, rngs=rngs)
            self.Dense_1 = nnx.Linear(INNER, WIDTH, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return x + self.Dense_1(jnp.tanh(self.Dense_0(x)))

    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.first = nnx.Linear(IN, WIDTH, rngs=rngs)
            self.blocks = nnx.List([Block(rngs) for _ in range(3)])
            self.last = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            x = self.first(x)
            for each in self.blocks:
                x = each(x)
            return self.last(x)

    graph, state = nnx.split(nnx.eval_shape(lambda: Net(nnx.Rngs(0))), nnx.Param)

    def step(p: Any, x: jax.Array, y: jax.Array) -> Any:
        gradients = jax.grad(lambda p: cross_entropy(nnx.merge(graph, nnx.State(p))(x), y))(p)
        return jax.tree.map(lambda p, g: p - 0.1 * g, p, gradients)

    found = on_cpu(Step(step, (nnx.to_pure_dict(state), *BATCH), donate=(0,), labels={"params": 0, "batch": 1}))
    assert set(found.structure.blocks.values()) == {f"blocks_{n}" for n in range(3)}
    assert ("parameters", "blocks_2/Dense_1", "blocks_2", "argument", 1) in kinds(found, "f32[32,24]", "parameter")
    assert categories(found, "f32[70,50]") == {"loss head"}


def test_only_gradients():
    def step(p: Any, x: jax.Array, y: jax.Array) -> Any:
        return jax.grad(unrolled_loss)(p, x, y)

    program = compiled(Step(step, (weights(), *BATCH), labels={"params": 0, "batch": 1}), "cpu")
    found = look(program)
    assert ("outputs", "head", "", "backward", 1) in kinds(found, "f32[24,50]", "live_out")
    assert argument_categories(look(program, labelled=False)) == argument_categories(found)


def test_a_model_that_is_only_evaluated():
    found = on_cpu(Step(unrolled, (weights(), BATCH[0]), labels={"params": 0, "batch": 1}))
    # Without a derivative there is no update either.
    assert set(found.structure.phases.values()) <= {"forward", "argument", "unknown"}
    assert {c for c, _, _, _, _ in kinds(found, "f32[70,24]")} == {"forward workspace"}
    assert kinds(found, "f32[70,50]", "live_out") == {("outputs", "head", "", "forward", 1)}


def test_tied_embeddings():
    def loss(p: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return unrolled_loss(p | {"head": p["embed"].T}, x, y)

    params = {"embed": spec(CLASSES, WIDTH), "blocks": weights()["blocks"]}
    found = on_cpu(training(loss, params, (spec(B, CLASSES), BATCH[1])))
    # Two parts of one gradient.
    parts = kinds(found, "f32[50,24]")
    assert parts == {("gradients", "embed", "", "backward", 1)}
    assert len(of(found, "f32[50,24]")) == 2


def test_a_derivative_of_the_users_own_and_vmap():
    @jax.custom_vjp
    def wave(x: jax.Array) -> jax.Array:
        return jnp.sin(x) * x

    wave.defvjp(lambda x: (jnp.sin(x) * x, (jnp.cos(x), x)), lambda kept, g: (g * kept[0] * kept[1],))

    def one(p: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        h = x @ p["embed"]
        for number, (w, v) in enumerate(p["blocks"]):
            with jax.named_scope(f"block_{number}"):
                h = h + wave(h @ w) @ v
        return optax.softmax_cross_entropy_with_integer_labels(h @ p["head"], y)

    found = on_cpu(training(lambda p, x, y: jax.vmap(one, (None, 0, 0))(p, x, y).mean(), weights()))
    assert {("saved activations", f"block_{n}", f"block_{n}", "forward", 1) for n in range(3)} <= kinds(
        found, "f32[70,32]"
    )
    assert categories(found, "f32[70,50]") == {"loss head"}


def test_checkpoints_around_plain_functions():
    def first(h: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.tanh(h @ w)

    def second(h: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sin(h @ w)

    def loss(p: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return cross_entropy(jax.remat(second)(jax.remat(first)(x, p[0]), p[1]) @ p[2], y)

    found = on_cpu(training(loss, (spec(IN, 31), spec(31, 37), spec(37, CLASSES)), optimizer=optax.sgd(0.1)))
    # No scope at all: the function that the line is in, and the argument's own name for parameters.
    assert {
        ("recompute workspace", "first()", "", "recompute", 1),
        ("saved activations", "first()", "", "forward", 1),
    } <= (kinds(found, "f32[70,31]"))
    assert functions(found, "f32[70,31]") == {"first", "second"}  # the gradient of second's input among them
    assert kinds(found, "f32[31,37]", "parameter") == {("parameters", "p_1", "", "argument", 1)}


def test_layers_of_a_recurrent_net_are_its_turns():
    def loss(p: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        def cell(h: jax.Array, x: jax.Array) -> Any:
            h = jnp.tanh(h @ p["w"] + x @ p["u"])
            return h, h

        _, h = jax.lax.scan(cell, jnp.zeros((7, WIDTH)), x)
        return cross_entropy((h @ p["o"]).reshape(-1, CLASSES), y)

    params = {"w": spec(WIDTH, WIDTH), "u": spec(IN, WIDTH), "o": spec(WIDTH, CLASSES)}
    found = on_cpu(training(loss, params, (spec(10, 7, IN), BATCH[1])))
    assert {(c, n) for c, _, _, _, n in kinds(found, "f32[10,7,24]")} == {("saved activations", 10)}
    assert {(c, m) for c, m, _, _, _ in kinds(found, "f32[20,24]") if c == "gradients"} == {("gradients", "u")}
    assert categories(found, "f32[70,50]") == {"loss head"}


@pytest.mark.slow
def test_fully_sharded_parameters():
    def place(path: str, shape: tuple[int, ...]) -> PartitionSpec:
        return PartitionSpec("d") if path.startswith(("[0]", "[1]", "[2]", "[3]")) and shape else PartitionSpec()

    width, inner = 256, 1024

    def loss(p: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        h = x
        for number, (w, v) in enumerate(p):
            with jax.named_scope(f"block_{number}"):
                h = block(h, w, v)
        return jnp.square(h - y).mean()

    params = [(spec(width, inner), spec(inner, width))] * 3
    batch = (spec(4096, width), spec(4096, width))
    found = look(sharded(training(loss, params, batch, labels=LABELS | {"y": 3}), "d=2", place))
    # Each device has half of each matrix, and gathers it for the block that multiplies with it.
    assert categories(found, "f32[128,1024]", "parameter") == {"parameters", "optimizer state"}
    assert categories(found, "f32[256,1024]") <= {"collective buffers", "parameter copies", "backward workspace"}
    assert {known.block for known in of(found, "f32[2048,1024]") if known.category == "saved activations"} == {
        f"block_{n}" for n in range(3)
    }
