"""Blocks whose inputs are on disk: gradients, what is written, and errors that come out of a running step."""

import functools
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import flax.linen as nn
import hlo_samples
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from stacks import layer, scanned, unrolled

from remat_kit import DiskOffload, PolicyError, Step, TargetError, compile_step, disk_offload, get_target, remat, trace

pytestmark = pytest.mark.usefixtures("quick_compile")

LAYERS, BATCH, WIDTH, HIDDEN = 3, 4, 16, 32
ACTIVATION = BATCH * WIDTH * 4
"""Bytes of what one layer hands to the next, in float32."""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[DiskOffload]:
    """On disk is what arrives as `x`. At the end nothing is left there."""
    with disk_offload(tmp_path, "1MiB", write=("x",)) as made:
        yield made
        made.wait()
        assert (made.traffic().values, made.traffic().memory_bytes) == (0, 0)
    assert os.listdir(tmp_path) == []


def arguments(dtype: Any = jnp.float32) -> Any:
    """ws and x of `stacks`."""
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (LAYERS, WIDTH, HIDDEN), (LAYERS, HIDDEN, WIDTH), (BATCH, WIDTH)
    first, second, x = (jax.random.normal(key, shape, dtype) / 4 for key, shape in zip(keys, shapes, strict=True))
    return (first, second), x


def pulled(loss: Any, ws: Any, x: Any) -> Any:
    """(value, pull) of `jax.vjp`, the two halves of a step as programs of their own."""
    value, pull = jax.jit(functools.partial(jax.vjp, loss))(ws, x)
    return value, functools.partial(jax.jit(lambda pull, cotangent: pull(cotangent)), pull)


def gradients(loss: Any) -> Any:
    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("stack", [scanned, unrolled])
def test_gradients_are_bit_equal_to_keeping_the_inputs(disk, assert_same_tree, stack, dtype):
    jax.config.update("jax_disable_most_optimizations", False)  # the fixture sets it back
    step = gradients(stack(remat(disk)))
    expected = gradients(stack(jax.checkpoint))(*arguments(dtype))
    for _ in range(2):
        assert_same_tree(step(*arguments(dtype)), expected)
    assert disk.traffic().put == disk.traffic().taken == 2 * LAYERS


def test_gradients_are_bit_equal_under_both_of_jaxs_remats(disk, assert_same_tree, remat3):
    assert_same_tree(gradients(scanned(remat(disk)))(*arguments()), gradients(scanned(jax.checkpoint))(*arguments()))


def test_gradients_are_bit_equal_to_keeping_every_value(disk, assert_same_tree):
    jax.config.update("jax_disable_most_optimizations", False)
    args = arguments()
    _, found = gradients(scanned(remat(disk)))(*args)
    _, expected = gradients(scanned(lambda f: f))(*args)
    assert_same_tree(found, expected)


def test_only_activations_are_written_and_only_when_differentiated(disk):
    ws, x = arguments()
    jax.block_until_ready(jax.jit(scanned(remat(disk)))(ws, x))
    assert disk.traffic().put == 0
    value, pull = pulled(scanned(remat(disk)), ws, x)
    jax.block_until_ready(value)
    traffic = disk.traffic()
    assert (traffic.values, traffic.value_bytes) == (LAYERS, LAYERS * ACTIVATION)
    pull(jnp.ones(()))
    # Of frozen parameters and an input that is data, nothing has a gradient.
    jax.jit(jax.grad(lambda scale: scanned(remat(disk))(ws, x) * scale))(1.0)
    assert disk.traffic().put == LAYERS


def test_pytrees_integers_keys_and_closed_over_parameters(disk, assert_same_tree):
    w = jax.random.normal(jax.random.key(0), (WIDTH, WIDTH))

    def model(wrap, w, state, key):
        def block(x, key):
            kept = jax.random.bernoulli(key, 0.5, x["wide"].shape)
            wide = jnp.where(kept & x["flags"], jnp.tanh(x["wide"] @ w), 0) * x["count"]
            return {**x, "wide": wide, "narrow": x["narrow"] * 2, "count": x["count"] + 1}

        for each in jax.random.split(key, 2):
            state = wrap(block)(state, each)
        return state["wide"].sum() + state["narrow"].sum().astype(jnp.float32)

    state = {
        "wide": jnp.ones((BATCH, WIDTH)),
        "narrow": jnp.ones(3, jnp.bfloat16),
        "count": jnp.int32(2),
        "flags": jnp.arange(WIDTH) % 3 > 0,
    }

    def grads(wrap):
        loss = functools.partial(model, wrap)
        return jax.jit(jax.grad(loss, (0, 1), allow_int=True))(w, state, jax.random.key(1))

    found, expected = grads(remat(disk)), grads(jax.checkpoint)
    assert found[1]["count"].dtype == jax.dtypes.float0
    pick = [found[0], found[1]["wide"], found[1]["narrow"]], [expected[0], expected[1]["wide"], expected[1]["narrow"]]
    assert_same_tree(*pick)


def test_microbatches_with_donated_parameters(disk, assert_same_tree):
    def train(wrap):
        def step(ws, xs):
            def microbatch(total, x):
                return jax.tree.map(jnp.add, total, jax.grad(scanned(wrap))(ws, x)), None

            grads, _ = jax.lax.scan(microbatch, jax.tree.map(jnp.zeros_like, ws), xs)
            return jax.tree.map(lambda w, g: w - 0.1 * g, ws, grads)

        return jax.jit(step, donate_argnums=0)

    ws, x = arguments()
    results = []
    for wrap in (remat(disk), jax.checkpoint):
        state, step = jax.tree.map(jnp.copy, ws), train(wrap)
        for _ in range(2):
            state = step(state, jnp.stack([x, 2 * x]))
        results.append(state)
    assert_same_tree(*results)
    assert disk.traffic().put == 2 * 2 * LAYERS


def test_batched_steps(disk, assert_same_tree):
    ws, x = arguments()
    xs = jnp.stack([x, 2 * x])
    found, expected = (
        jax.jit(jax.vmap(jax.grad(unrolled(wrap), 1), (None, 0)))(ws, xs) for wrap in (remat(disk), jax.checkpoint)
    )
    assert_same_tree(found, expected)
    assert disk.traffic().put == 2 * LAYERS


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up, self.down = nnx.Linear(WIDTH, HIDDEN, rngs=rngs), nnx.Linear(HIDDEN, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array, scale: float = 1.0) -> jax.Array:
        return x + self.down(jnp.tanh(self.up(x))) * scale


@pytest.mark.parametrize("stack", ["scan", "unroll"])
def test_nnx_modules_write_their_input_alone(tmp_path: Path, assert_same_tree, stack: str):
    def run(wrap):
        cls = wrap(Block)
        if stack == "scan":
            model = nnx.split_rngs(splits=LAYERS)(nnx.vmap(lambda rngs: cls(rngs)))(nnx.Rngs(0))
        else:
            model = nnx.List([cls(nnx.Rngs(number)) for number in range(LAYERS)])

        def loss(model, x):
            if stack == "scan":
                return nnx.scan(lambda block, x: block(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(model, x).sum()
            for block in model:
                x = block(x, scale=0.5)
            return x.sum()

        return nnx.jit(nnx.value_and_grad(loss, argnums=(0, 1)))(model, arguments()[1])

    with disk_offload(tmp_path, LAYERS * 4096) as disk:  # three blocks of a file: parameters would not fit
        assert_same_tree(jax.tree.map(jnp.asarray, run(remat(disk))), jax.tree.map(jnp.asarray, run(remat("full"))))
        assert disk.traffic().put == LAYERS


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, _: Any = None) -> Any:
        hidden = nn.Dropout(0.5, deterministic=False)(jnp.tanh(nn.Dense(HIDDEN)(x)))
        self.sow("intermediates", "hidden", hidden.sum())
        return x + nn.Dense(WIDTH)(hidden), None


@pytest.mark.parametrize("stack", ["scan", "unroll"])
def test_linen_modules_write_their_input_alone(tmp_path: Path, assert_same_tree, stack: str):
    def run(wrap):
        class Model(nn.Module):
            @nn.compact
            def __call__(self, x):
                if stack == "scan":
                    axes, splits = {"params": 0, "intermediates": 0}, {"params": True, "dropout": True}
                    lifted = nn.scan(wrap(LinenBlock), variable_axes=axes, split_rngs=splits, length=LAYERS)
                    return lifted()(x, None)[0].sum()
                for _ in range(LAYERS):
                    x, _ = wrap(LinenBlock)()(x)
                return x.sum()

        x, keys = arguments()[1], {"params": jax.random.key(0), "dropout": jax.random.key(1)}
        params = Model().init(keys, x)["params"]

        def loss(params, x):
            rngs = {"dropout": jax.random.key(2)}
            return Model().apply({"params": params}, x, rngs=rngs, mutable="intermediates")

        return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(params, x)

    with disk_offload(tmp_path, LAYERS * 4096) as disk:
        assert_same_tree(run(remat(disk)), run(remat("full")))
        assert disk.traffic().put == LAYERS


def test_forward_does_not_wait_for_the_disk(disk, monkeypatch: pytest.MonkeyPatch):
    gate, write = threading.Event(), os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda *args: gate.wait(600) and write(*args))
    value, pull = pulled(scanned(remat(disk)), *arguments())
    jax.block_until_ready(value)
    assert disk.traffic().memory_bytes == LAYERS * ACTIVATION
    assert disk.traffic().written_bytes == 0
    gate.set()
    pull(jnp.ones(()))


def harmed(disk: DiskOffload, harm: Any) -> None:
    """A step whose values are harmed between forward and backward."""
    value, pull = pulled(scanned(remat(disk)), *arguments())
    jax.block_until_ready(value)
    disk.wait()
    harm(disk._transfer()._storage.descriptor)
    jax.block_until_ready(pull(jnp.ones(())))


def flip(number: int) -> None:
    for at in range(0, os.fstat(number).st_size, 4096):
        os.pwrite(number, bytes([os.pread(number, 1, at + 7)[0] ^ 64]), at + 7)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (flip, r"256 B read from .* are not what was written: their checksums differ"),
        (lambda number: os.ftruncate(number, 100), r"a short read from .*: 0 of 256 bytes came back, the file ends at"),
    ],
    ids=["flipped", "cut"],
)
def test_harmed_values_end_in_an_error_and_never_in_a_gradient(disk, harm, message, assert_same_tree):
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        harmed(disk, harm)
    disk.wait()
    assert disk.traffic().file_bytes == 0
    # The next step is none the worse for it.
    args = arguments()
    assert_same_tree(gradients(scanned(remat(disk)))(*args), gradients(scanned(jax.checkpoint))(*args))


@pytest.mark.parametrize("stack", [scanned, unrolled])
def test_a_limit_that_is_too_small_ends_the_step(tmp_path: Path, stack):
    with disk_offload(tmp_path, 2 * 4096, write=("x",)) as disk:
        step = gradients(stack(remat(disk)))
        for _ in range(2):
            with pytest.raises(
                jax.errors.JaxRuntimeError, match=r"256 B more do not fit in the limit of 8\.00 KiB for"
            ):
                jax.block_until_ready(step(*arguments()))
        disk.wait()
        assert disk.traffic().values <= 1  # what another thread of XLA had begun to put
        disk.clear()
        assert disk.traffic().file_bytes == 0


def test_backward_that_runs_twice_ends_in_an_error(disk):
    _, pull = pulled(scanned(remat(disk)), *arguments())
    pull(jnp.ones(()))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"was read before, and a value is removed when backward has"):
        jax.block_until_ready(pull(jnp.ones(())))


def test_a_forward_pass_that_is_given_up(disk):
    value, pull = pulled(scanned(remat(disk)), *arguments())
    jax.block_until_ready(value)
    disk.clear()
    assert disk.traffic().value_bytes == disk.traffic().file_bytes == 0
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"not there any more: the policy's clear\(\) was called"):
        jax.block_until_ready(pull(jnp.ones(())))


def test_two_policies_share_a_directory(tmp_path: Path, assert_same_tree):
    args = arguments()
    with disk_offload(tmp_path, "1MiB", write=("x",)) as one, disk_offload(tmp_path, "1MiB", write=("x",)) as other:
        _, pull = pulled(scanned(remat(one)), *args)
        found = gradients(scanned(remat(other)))(*args)
        assert_same_tree(pull(jnp.ones(())), found[1])


def test_arguments_that_are_no_use(tmp_path: Path):
    ws, x = arguments()
    w = ws[0][0], ws[1][0]
    unclear = (
        r"cannot tell which arguments of layer are activations .*: x, w hold arrays\. Name those to be written, "
        r"e\.g\. disk_offload\(.*write=\('x',\)\)"
    )
    with pytest.raises(PolicyError, match=unclear):
        remat(disk_offload(tmp_path, "1MiB"))(layer)(x, w)
    with pytest.raises(PolicyError, match=r"is to write y, and layer was given arrays for x, w\."):
        remat(disk_offload(tmp_path, "1MiB", write=("y",)))(layer)(x, w)
    with pytest.raises(PolicyError, match=r"has nothing to write of .*: none of its arguments is an array that may be"):
        remat(disk_offload(tmp_path, "1MiB"))(lambda key: jax.random.normal(key))(jax.random.key(0))
    with pytest.raises(PolicyError, match=r"write='x'\) names no parameters\. Give a tuple"):
        disk_offload(tmp_path, "1MiB", write="x")
    with pytest.raises(PolicyError, match=r"limit=0\) is not a size in bytes\. Give a whole number above 0"):
        disk_offload(tmp_path, 0)
    with pytest.raises(PolicyError, match=r"memory=True\) is not a size"):
        disk_offload(tmp_path, "1MiB", memory=True)


def test_names_of_parameters_follow_arguments_however_they_are_given(tmp_path: Path):
    seen = []

    class Spy:
        name = "spy"

        def checkpoint(self, function):
            seen.append(function.remat_kit_argument_names)
            return function

    def block(x, *more, flag=True, w, **others):
        return x

    one = jnp.ones(())
    remat(Spy())(block)({"b": one, "a": (one, 3)}, one, one, flag=False, w=[one], z=one)
    assert seen == [("x", "x", "more", "more", "w", "others")]


def test_a_step_on_disk_is_analyzed_where_it_runs_and_refused_where_it_cannot(disk):
    ws, x = jax.eval_shape(arguments)
    steps = [Step(jax.value_and_grad(scanned(wrap)), (ws, x)) for wrap in (remat(disk), jax.checkpoint)]
    ours, full = (trace(step, get_target("cpu")) for step in steps)
    # The carry of each layer is a number of eight bytes instead.
    assert full.saved.device_bytes - ours.saved.device_bytes == LAYERS * (ACTIVATION - 8)
    assert ours.work.recomputed_flops > 0
    hlo_samples.mesh()
    described = trace(steps[0], get_target("h100-sxm-80gb"))
    with pytest.raises(TargetError, match=r"calls back into Python \(io_callback\), as disk offloading does.*h100-sxm"):
        compile_step(described)


def test_the_policy_prints_itself(tmp_path: Path):
    with disk_offload(str(tmp_path), "1.5GiB") as made:
        assert made.name == f"disk({tmp_path},1.50GiB)"
        assert np.unique([made.memory, disk_offload(tmp_path, 1).memory]) == 2**30
