"""Whose a buffer is, in steps of which every tensor's shape says what it is."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from attributed import (
    BATCH,
    CLASSES,
    IN,
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
    scanned_loss,
    spec,
    stacked,
    training,
    unrolled_loss,
    weights,
)  # fmt: skip
from captured import compiled

from remat_kit import Step

NUMBERS = (0, 1, 2)


def test_unrolled_blocks():
    found = look(plain())
    saved = {("saved activations", f"block_{n}", f"block_{n}", "forward", 1) for n in NUMBERS}
    # The tanh of each block is kept, what it is taken of is not.
    assert saved <= kinds(found, "f32[70,32]")
    assert categories(found, "f32[70,32]") == {"saved activations", "forward workspace", "backward workspace"}
    # The residual stream: the embedding of rows is before the blocks, its gradient at their end is of the head.
    stream = kinds(found, "f32[70,24]")
    assert ("saved activations", "unrolled()", "", "forward", 1) in stream
    assert ("loss head", "head", "", "backward", 1) in stream
    assert functions(found, "f32[70,32]") == {"block"}
    assert categories(found, "f32[70,50]") == {"loss head"}
    # Gradients belong to what they update, and that has its name from the argument.
    names = {(f"blocks_{n}", f"blocks_{n}", "backward") for n in NUMBERS}
    gradients = {(m, b, p) for c, m, b, p, _ in kinds(found, "f32[24,32]") if c == "gradients"}
    assert gradients
    assert gradients <= names
    assert kinds(found, "f32[20,24]") == {("gradients", "embed", "", "backward", 1)}


def test_scanned_blocks():
    found = on_cpu(training(scanned_loss, stacked(4)))
    assert kinds(found, "f32[4,70,32]") == {("saved activations", "block", "block", "forward", 4)}
    assert kinds(found, "f32[4,70,24]") == {("saved activations", "block", "block", "forward", 4)}
    assert kinds(found, "f32[4,24,32]") == {("gradients", "blocks", "", "backward", 4)}
    assert kinds(found, "f32[4,24,32]", "parameter") == {
        ("parameters", "blocks", "", "argument", 4), ("optimizer state", "blocks", "", "argument", 1),
    }  # fmt: skip
    # What each turn takes of a stack: of a parameter's its module, of an activation's what made it.
    assert {known.module for known in of(found, "f32[24,32]") if known.category == "parameter copies"} == {"blocks"}
    assert {known.module for known in of(found, "f32[70,32]")} == {"block"}
    assert categories(found, "f32[70,50]") == {"loss head"}
    assert ("loss head", "head", "", "backward", 1) in kinds(found, "f32[70,24]")


@pytest.mark.parametrize("layers", ["unrolled", "scanned"])
def test_gradient_accumulation(layers: str):
    loss, params = (unrolled_loss, weights()) if layers == "unrolled" else (scanned_loss, stacked(4))
    optimizer = optax.adam(1e-3)

    def step(p, s, x, y):
        def micro(total, part):
            return jax.tree.map(jnp.add, total, jax.grad(loss)(p, *part)), None

        total, _ = jax.lax.scan(micro, jax.tree.map(jnp.zeros_like, p), (x, y))
        updates, s = optimizer.update(total, s, p)
        return optax.apply_updates(p, updates), s

    batch = (spec(3, B, IN), spec(3, B, dtype=jnp.int32))
    args = (params, jax.eval_shape(optimizer.init, params), *batch)
    program = compiled(Step(step, args, donate=(0, 1), labels={"params": 0, "opt_state": 1, "batch": 2}), "cpu")
    found = look(program)
    # Zeros, sums and what is added: all gradients, of the parameter that they update in the end.
    for shape, module in (("f32[24,50]", "head"), ("f32[20,24]", "embed")):
        assert {(c, m) for c, m, _, _, _ in kinds(found, shape) if c != "parameter copies"} == {("gradients", module)}
    assert {phase for _, _, _, phase, _ in kinds(found, "f32[24,50]")} >= {"backward", "update"}
    # The blocks are those of the model, not the turns over the microbatches.
    if layers == "scanned":
        assert kinds(found, "f32[4,70,32]") == {("saved activations", "block", "block", "forward", 4)}
        assert categories(found, "f32[4,24,32]") == {"gradients"}
    else:
        assert ("saved activations", "block_2", "block_2", "forward", 1) in kinds(found, "f32[70,32]")
        assert {c for c, m, _, _, _ in kinds(found, "f32[24,32]") if c != "parameter copies"} == {"gradients"}
    # A slice of the batch is outside of the differentiated part; the file alone knows that forward reads it.
    assert categories(found, "f32[70,20]") == {"other temporaries"}
    alone = argument_categories(look(program, labelled=False))
    assert alone["x"] == alone["y"] == "batch"
    assert set(alone.values()) == {"parameters", "optimizer state", "batch"}


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "recomputed"])
@pytest.mark.parametrize("layers", ["unrolled", "scanned"])
def test_a_loss_in_chunks_is_no_stack_of_layers(layers: str, kept: bool):
    def loss(p, x, y):
        h = x @ p["embed"]
        if layers == "scanned":
            h, _ = jax.lax.scan(lambda h, layer: (block(h, layer["up"], layer["down"]), None), h, p["blocks"])
        else:
            for number, (w, v) in enumerate(p["blocks"]):
                with jax.named_scope(f"block_{number}"):
                    h = block(h, w, v)

        def part(h, y):
            return cross_entropy(h @ p["head"], y)

        wrapped = part if kept else jax.checkpoint(part)
        parts = (h.reshape(7, 10, WIDTH), y.reshape(7, 10))
        return jax.lax.scan(lambda total, each: (total + wrapped(*each), None), 0.0, parts)[0]

    found = on_cpu(training(loss, stacked(3) if layers == "scanned" else weights()))
    assert {found.module.instructions[loop].trip_count for loop in found.structure.layer_loops} == (
        {3} if layers == "scanned" else set()
    )
    # The gradient of the chunks' input, stacked by chunk.
    assert {(c, p, n) for c, _, _, p, n in kinds(found, "f32[7,10,24]") if p == "backward"} == {
        ("loss head", "backward", 1)
    }
    if kept:
        assert {(c, b) for c, _, b, _, _ in kinds(found, "f32[7,10,50]")} == {("loss head", "")}
    assert {(c, m) for c, m, _, _, _ in kinds(found, "f32[24,50]") if c == "gradients"} == {("gradients", "head")}


@pytest.mark.parametrize("layers", ["unrolled", "scanned"])
def test_encoder_and_decoder(layers: str):
    # The encoder's rows are 80 x 40, the decoder's 60 x 28; the decoder reads the encoder's normed result.
    def encode(h, w, v):
        return h + jnp.tanh(h @ w) @ v

    def decode(h, w, v, to, memory):
        return h + jnp.sin(h @ w) @ v + memory.mean(0) @ to

    def loss(p, x, y, labels):
        e, d = x @ p["in"], y @ p["shifted"]
        if layers == "scanned":
            e, _ = jax.lax.scan(lambda h, layer: (encode(h, *layer), None), e, p["encoder"])
            e = jax.nn.softmax(e)
            d, _ = jax.lax.scan(lambda h, layer: (decode(h, *layer, memory=e), None), d, p["decoder"])
        else:
            for number, layer in enumerate(p["encoder"]):
                with jax.named_scope(f"encoder_{number}"):
                    e = encode(e, *layer)
            e = jax.nn.softmax(e)
            for number, layer in enumerate(p["decoder"]):
                with jax.named_scope(f"decoder_{number}"):
                    d = decode(d, *layer, memory=e)
        with jax.named_scope("head"):
            return cross_entropy(d @ p["out"], labels)

    def of_layers(number: int, *shapes: tuple[int, ...]) -> Any:
        return [spec(number, *s) for s in shapes] if layers == "scanned" else [[spec(*s) for s in shapes]] * number

    params = {"in": spec(20, 40), "shifted": spec(21, 28), "out": spec(28, CLASSES)} | {
        "encoder": of_layers(3, (40, 33), (33, 40)), "decoder": of_layers(5, (28, 37), (37, 28), (40, 28)),
    }  # fmt: skip
    found = on_cpu(training(loss, params, (spec(80, 20), spec(60, 21), spec(60, dtype=jnp.int32))))
    if layers == "scanned":
        assert {(c, n) for c, _, _, _, n in kinds(found, "f32[3,80,33]")} == {("saved activations", 3)}
        assert {(c, n) for c, _, _, _, n in kinds(found, "f32[5,60,37]")} == {("saved activations", 5)}
    else:
        assert ("saved activations", "encoder_2", "encoder_2", "forward", 1) in kinds(found, "f32[80,33]")
        assert ("saved activations", "decoder_4", "decoder_4", "forward", 1) in kinds(found, "f32[60,37]")
    # What is between the encoder and the decoder is before the decoder's blocks: no loss head.
    assert "loss head" not in categories(found, "f32[80,40]")
    assert categories(found, "f32[60,50]") == {"loss head"}


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "recomputed"])
def test_segments_of_layers(kept: bool):
    def loss(p, x, y):
        def body(h, layer):
            with jax.named_scope("block"):
                return block(h, layer["up"], layer["down"]), None

        def segment(h, layers):
            return jax.lax.scan(body, h, layers)

        h, _ = jax.lax.scan(segment if kept else jax.checkpoint(segment), x @ p["embed"], p["blocks"])
        with jax.named_scope("head"):
            return cross_entropy(h @ p["head"], y)

    found = on_cpu(training(loss, stacked(3, 4)))
    assert set(found.structure.layer_loops.values()) == {"block"}
    if kept:
        assert kinds(found, "f32[3,4,70,32]") == {("saved activations", "block", "block", "forward", 12)}
    else:
        # One input a segment is kept; a segment's own layers are computed again, four at a time.
        assert {(c, p, n) for c, _, _, p, n in kinds(found, "f32[3,70,24]")} == {("saved activations", "forward", 3)}
        assert kinds(found, "f32[4,70,32]") == {("recompute workspace", "block", "block", "recompute", 4)}
    assert {(c, m, n) for c, m, _, _, n in kinds(found, "f32[3,4,24,32]")} == {("gradients", "blocks", 12)}


def test_captured_weights_are_constants():
    embed = np.random.default_rng(0).random((IN, WIDTH), np.float32)
    params = {name: value for name, value in weights().items() if name != "embed"}
    found = on_cpu(training(lambda p, x, y: unrolled_loss(p | {"embed": embed}, x, y), params))
    assert categories(found, "f32[20,24]", "constant") == {"constants"}


def test_heads_beside_each_other_are_no_blocks():
    def loss(p, x, *ys):
        h = x @ p["embed"]
        for number, (w, v) in enumerate(p["blocks"]):
            with jax.named_scope(f"block_{number}"):
                h = block(h, w, v)
        total = jnp.zeros(())
        for number, y in enumerate(ys):
            with jax.named_scope(f"out_{number}"):
                total += cross_entropy(h @ p["heads"][number], y)
        return total

    params = weights() | {"heads": [spec(WIDTH, CLASSES + n) for n in NUMBERS]}
    found = on_cpu(training(loss, params, (BATCH[0], *[BATCH[1]] * 3)))
    for n in NUMBERS:
        assert {(c, b) for c, _, b, _, _ in kinds(found, f"f32[70,{CLASSES + n}]")} == {("loss head", "")}
