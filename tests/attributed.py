"""Small training steps in which every interesting tensor has a size of its own, and what the analyzer says of each."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from captured import compiled

from remat_kit import CompiledStep, Step
from remat_kit._analyze import categories_of_arguments
from remat_kit._hlo.anatomy import Anatomy, anatomy
from remat_kit._hlo.attribution import Attribution
from remat_kit._hlo.heap import replay
from remat_kit._hlo.line import source_text
from remat_kit._hlo.module import Module
from remat_kit._hlo.proto import parse

# Rows of the batch, its columns, the model's width, the width inside of a block, and classes: all different, so that a
# shape tells which tensor it is.
B, IN, WIDTH, INNER, CLASSES = 70, 20, 24, 32, 50
LABELS = {"params": 0, "opt_state": 1, "batch": 2}
Said = tuple[str, str, str, str, int]
"""(category, module, block, phase, layers)."""


def spec(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    """An abstract array."""
    return jax.ShapeDtypeStruct(shape, dtype)


BATCH = (spec(B, IN), spec(B, dtype=jnp.int32))


def look(step: CompiledStep, labelled: bool = True) -> Anatomy:
    """All buffers of a step, with or without what the step says of its arguments."""
    proto = parse(step.hlo_proto)
    said = categories_of_arguments(step.traced) if labelled else None
    return anatomy(Module.from_proto(proto), proto, replay(proto), said)


def on_cpu(step: Step) -> Anatomy:
    """The anatomy of a step for the CPU."""
    return look(compiled(step, "cpu"))


def kinds(found: Anatomy, shape: str, kind: str = "temp") -> set[Said]:
    """What is said of the buffers of one shape, at whatever time they are alive."""
    return {(known.category, known.module, known.block, known.phase, known.layers) for known in of(found, shape, kind)}


def of(found: Anatomy, shape: str, kind: str = "temp") -> list[Attribution]:
    """What is said of each buffer of one shape."""
    pairs = zip(found.buffers, found.attributions, strict=True)
    known = [known for buffer, known in pairs if buffer.kind == kind and str(known.shape) == shape]
    assert known, f"no {kind} {shape}"
    return known


def categories(found: Anatomy, shape: str, kind: str = "temp") -> set[str]:
    """The categories of the buffers of one shape."""
    return {known.category for known in of(found, shape, kind)}


def functions(found: Anatomy, shape: str) -> set[str]:
    """The last function of the source lines of the temporaries of one shape."""
    return {source_text(known.source).rpartition("(")[2].rpartition(".")[2].rstrip(")") for known in of(found, shape)}


def argument_categories(found: Anatomy) -> dict[str, str]:
    """Category of each argument by its name in the step."""
    pairs = zip(found.buffers, found.attributions, strict=True)
    return {
        found.module.entry.parameters[buffer.parameter].op_name.replace("\\'", "'"): known.category
        for buffer, known in pairs
        if buffer.kind == "parameter" and buffer.parameter is not None
    }


def block(h: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    """A residual block, [B, WIDTH]; the tanh [B, INNER] and the result are what backward needs."""
    return h + jnp.tanh(h @ w) @ v


def cross_entropy(logits: jax.Array, y: jax.Array) -> jax.Array:
    """The mean loss of logits [B, CLASSES]."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def weights(layers: int = 3, dtype: Any = jnp.float32) -> dict[str, Any]:
    """Embedding, blocks, head."""
    inside = (spec(WIDTH, INNER, dtype=dtype), spec(INNER, WIDTH, dtype=dtype))
    return {
        "embed": spec(IN, WIDTH, dtype=dtype),
        "blocks": [inside] * layers,
        "head": spec(WIDTH, CLASSES, dtype=dtype),
    }


def stacked(*layers: int) -> dict[str, Any]:
    """The same with the blocks' matrices stacked [layers, ...]."""
    return weights() | {"blocks": {"up": spec(*layers, WIDTH, INNER), "down": spec(*layers, INNER, WIDTH)}}


def unrolled(p: Any, x: jax.Array, wrap: Callable[..., Any] = lambda f: f) -> jax.Array:
    """Logits [B, CLASSES], the blocks one after the other."""
    h = x @ p["embed"]
    for number, (w, v) in enumerate(p["blocks"]):
        with jax.named_scope(f"block_{number}"):
            h = wrap(block)(h, w, v)
    with jax.named_scope("head"):
        return h @ p["head"]


def scanned(p: Any, x: jax.Array, wrap: Callable[..., Any] = lambda f: f) -> jax.Array:
    """Logits [B, CLASSES], the blocks in a scan."""

    def body(h: jax.Array, layer: Any) -> Any:
        with jax.named_scope("block"):
            return block(h, layer["up"], layer["down"]), None

    h, _ = jax.lax.scan(wrap(body), x @ p["embed"], p["blocks"])
    with jax.named_scope("head"):
        return h @ p["head"]


def loss_of(model: Callable[..., jax.Array], p: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """The loss of a model of this file."""
    return cross_entropy(model(p, x), y)


def training(
    loss: Callable[..., jax.Array], params: Any, batch: tuple[Any, ...] = BATCH, optimizer: Any = None, **options: Any
) -> Step:
    """A step `(params, state, *batch) -> (params, state)` with Adam, or another optimizer of optax; donates both."""
    optimizer = optimizer or optax.adam(1e-3)

    def step(p: Any, s: Any, *batch: Any) -> Any:
        updates, s = optimizer.update(jax.grad(loss)(p, *batch), s, p)
        return optax.apply_updates(p, updates), s

    args = (params, jax.eval_shape(optimizer.init, params), *batch)
    return Step(step, args, **({"donate": (0, 1), "labels": LABELS} | options))


def unrolled_loss(p: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """Of the unrolled model."""
    return loss_of(unrolled, p, x, y)


def scanned_loss(p: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """Of the scanned model."""
    return loss_of(scanned, p, x, y)


@functools.cache
def plain() -> CompiledStep:
    """The unrolled model with Adam, for what several tests ask."""
    return compiled(training(unrolled_loss, weights()), "cpu")
