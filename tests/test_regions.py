"""The checkpointed regions of a step, with both of JAX's implementations of remat."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name
from stacks import Wrap, plain, scanned, unrolled

from models import linen, transformer
from remat_kit import Step, get_policy, get_target, remat, trace
from remat_kit._explanation import Checkpoint
from remat_kit._jaxpr import count_work
from remat_kit._record import Record
from remat_kit._regions import checkpoint_regions

LAYERS, BATCH, WIDTH, HIDDEN = 8, 32, 16, 64
X = jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)
STACK = (
    jax.ShapeDtypeStruct((LAYERS, WIDTH, HIDDEN), jnp.float32),
    jax.ShapeDtypeStruct((LAYERS, HIDDEN, WIDTH), jnp.float32),
)
MATMUL = 2 * BATCH * WIDTH * HIDDEN
UP = BATCH * HIDDEN * 4
"""Bytes of one layer's "up"."""
JAX = jax.checkpoint_policies


def kept(policy: Any) -> Wrap:
    return lambda f: jax.checkpoint(f, policy=policy)


def named(*names: str) -> Wrap:
    return kept(JAX.save_only_these_names(*names))


def regions(loss: Any, *args: Any) -> tuple[Checkpoint, ...]:
    """The regions of the gradient of `loss`; their FLOPs must be those that are counted on the whole."""
    jaxpr = jax.make_jaxpr(jax.jit(jax.value_and_grad(loss)))(*(args or (STACK, X)))
    found = checkpoint_regions(jaxpr)
    assert sum(each.recompute_flops for each in found) == count_work(jaxpr).recomputed_flops
    return found


def test_without_a_checkpoint_there_is_no_region(remat3):
    assert regions(scanned(plain)) == regions(unrolled(plain)) == ()
    jaxpr = jax.make_jaxpr(scanned(jax.checkpoint))(STACK, X)  # not differentiated
    assert checkpoint_regions(jaxpr) == ()


def test_a_scanned_layer_is_one_region_that_runs_for_each_layer(remat3):
    (region,) = regions(scanned(jax.checkpoint))
    assert (region.policy, region.regions, region.executions) == ("", 1, LAYERS)
    # Of the two matmuls, the second is not needed again.
    assert region.recompute_flops == LAYERS * MATMUL
    assert region.forward_share == 1 / (2 * LAYERS)
    assert region.backward_share == 1 / LAYERS
    assert (region.outer_scan_length, region.inner_scan_length, region.inner_regions) == (LAYERS, 0, 0)
    assert (region.kept_values, region.kept_bytes, region.tags) == (0, 0, ())
    assert region.recomputed_operations > 1


def test_unrolled_layers_are_equal_regions(remat3):
    (region,) = regions(unrolled(jax.checkpoint))
    assert (region.regions, region.executions, region.outer_scan_length) == (LAYERS, LAYERS, 0)
    assert region.recompute_flops == LAYERS * MATMUL
    # The first layer's backward has no gradient of the input: of 4 LAYERS - 1 matmuls.
    assert region.backward_share == 4 / (4 * LAYERS - 1)


@pytest.mark.parametrize("policy", [None, JAX.dots_saveable], ids=["full", "dots"])
def test_a_checkpoint_outside_of_the_scan(policy, remat3):
    (region,) = regions(scanned(plain, kept(policy)))
    assert (region.executions, region.outer_scan_length, region.inner_scan_length) == (1, 0, LAYERS)
    assert region.recompute_flops == (0 if policy else 2 * LAYERS * MATMUL)
    assert region.forward_share == (0 if policy else 1)
    assert region.backward_share == 1


def test_a_checkpoint_around_the_loss(remat3):
    (region,) = regions(jax.checkpoint(unrolled(plain)))
    assert (region.executions, region.outer_scan_length, region.inner_scan_length, region.backward_share) == (
        1,
        0,
        0,
        1,
    )
    assert region.forward_share == (2 * LAYERS - 1) / (2 * LAYERS)  # all but the last matmul


def test_remat_in_remat_counts_each_flop_once(remat3):
    outer, inner = regions(scanned(jax.checkpoint, jax.checkpoint))
    assert (outer.inner_regions, inner.inner_regions) == (1, 0)
    assert (outer.recompute_flops, inner.recompute_flops) == (2 * LAYERS * MATMUL, LAYERS * MATMUL)
    assert (outer.inner_scan_length, inner.outer_scan_length, inner.inner_scan_length) == (LAYERS, LAYERS, 0)


def test_a_microbatch_is_a_model_of_its_own(remat3):
    def accumulated(ws: Any, xs: Any) -> Any:
        gradient = jax.grad(scanned(named("up")))
        return jax.lax.scan(lambda total, x: (jax.tree.map(jnp.add, total, gradient(ws, x)), None), ws, xs)[0]

    (region,) = checkpoint_regions(jax.make_jaxpr(accumulated)(STACK, jax.ShapeDtypeStruct((5, *X.shape), X.dtype)))
    assert (region.executions, region.outer_scan_length, region.backward_share) == (5 * LAYERS, LAYERS, 1 / LAYERS)
    assert region.kept_bytes == LAYERS * UP  # of one microbatch: the next one takes their place


@pytest.mark.parametrize("stack", [scanned, unrolled])
def test_what_names_keep(stack, remat3):
    (up,) = regions(stack(named("up")))
    assert (up.policy, up.tags, up.unneeded_tags, up.recomputed_tags) == ("save_only_these_names", ("up",), (), ())
    assert (up.kept_values, up.kept_bytes, up.recompute_flops) == (1, LAYERS * UP, 0)
    (both,) = regions(stack(named("up", "hidden")))
    assert (both.tags, both.recomputed_tags, both.kept_bytes) == (("hidden", "up"), (), 2 * LAYERS * UP)


def test_a_name_that_is_not_there(remat3):
    (region,) = regions(scanned(named("upp")))
    assert (region.policy, region.tags, region.kept_values) == ("save_only_these_names", (), 0)


def test_dots_with_batch_dimensions(remat3):
    def mapped(policy: Any) -> Any:
        body = kept(policy)(lambda w, x: jax.vmap(lambda w, x: jnp.sin(jnp.sin(x @ w) @ w))(w, x))
        return regions(lambda w, x: body(w, x).sum(), w, x)

    w, x = jax.ShapeDtypeStruct((2, 16, 16), jnp.float32), jax.ShapeDtypeStruct((2, 32, 16), jnp.float32)
    (none,), (both,) = mapped(JAX.dots_with_no_batch_dims_saveable), mapped(JAX.dots_saveable)
    assert (none.policy, both.policy) == ("dots_with_no_batch_dims_saveable", "dots_saveable")
    assert (none.kept_values, none.recompute_flops) == (0, 2 * 2 * (2 * 32 * 16 * 16))
    assert (both.kept_values, both.kept_bytes, both.recompute_flops) == (2, 2 * 2 * 32 * 16 * 4, 0)


def test_a_policy_that_keeps_everything():
    for policy in (JAX.save_anything_except_these_names("hidden"), JAX.everything_saveable):
        (region,) = regions(unrolled(kept(policy)))
        assert (region.recomputed_operations, region.recompute_flops, region.executions) == (0, 0, LAYERS)
        assert region.kept_bytes > 2 * LAYERS * UP


@pytest.mark.parametrize("stack", [scanned, unrolled])
def test_a_name_behind_a_nonlinearity_does_not_spare_its_matmul(stack, remat3):
    (region,) = regions(stack(named("hidden")))
    assert (region.tags, region.recomputed_tags, region.unneeded_tags) == (("hidden",), ("hidden",), ())
    assert (region.kept_bytes, region.recompute_flops) == (LAYERS * UP, LAYERS * MATMUL)


def test_a_raw_value_that_is_used_beside_its_name(remat3):
    def loss(w: Any, x: Any) -> Any:
        y = x @ w[0][0]
        return (jnp.sin(checkpoint_name(y, "y")) + jnp.tanh(y)).sum()

    (region,) = regions(named("y")(loss))
    assert (region.tags, region.recomputed_tags, region.recompute_flops) == (("y",), ("y",), MATMUL)


def test_a_producer_of_another_tag_is_not_blamed(remat3):
    # "second" is kept and its matmul does not run again; that of "first", which feeds it, does.
    def loss(w: Any, x: Any) -> Any:
        first = checkpoint_name(x @ w[0][0], "first")
        return jnp.sin(checkpoint_name(jnp.sin(first) @ w[1][0], "second")).sum()

    (region,) = regions(named("second")(loss))
    assert (region.kept_values, region.recompute_flops, region.recomputed_tags) == (1, MATMUL, ())


@pytest.mark.parametrize("stack", [scanned, unrolled])
def test_a_name_that_backward_does_not_need(stack, remat3):
    (region,) = regions(stack(named("down")))
    assert (region.tags, region.unneeded_tags, region.kept_values) == (("down",), ("down",), 0)


def test_what_is_offloaded_is_kept(remat3):
    offload = JAX.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["up"],
        offload_src="device",
        offload_dst="pinned_host",
    )
    (region,) = regions(scanned(kept(offload)))
    assert (region.tags, region.kept_values, region.kept_bytes, region.recompute_flops) == (("up",), 1, LAYERS * UP, 0)


def test_two_kinds_of_regions_are_told_apart(remat3):
    full, up = scanned(jax.checkpoint), scanned(named("up"))
    first, second = regions(lambda ws, x: full(ws, x) + up(ws, x))
    assert (first.policy, second.policy) == ("", "save_only_these_names")
    assert first.forward_share == 1 / (4 * LAYERS)


def test_regions_in_branches_and_under_jit(remat3):
    def loss(ws: Any, x: Any) -> Any:
        run = scanned(named("up"))
        return jax.lax.cond(x[0, 0] > 0, jax.jit(run), lambda ws, x: x.sum(), ws, x)

    (region,) = regions(loss)
    assert (region.executions, region.outer_scan_length, region.tags) == (LAYERS, LAYERS, ("up",))


@pytest.mark.parametrize("build", [transformer.gpt, linen.gpt_linen], ids=["nnx", "linen"])
@pytest.mark.parametrize("stack", ["scan", "unroll"])
def test_a_models_blocks(build, stack):
    policy = get_policy("minimal")
    traced = trace(build(policy, size="tiny", stack=stack), get_target("cpu"), policy)
    assert sum(each.recompute_flops for each in traced.checkpoints) == traced.work.recomputed_flops
    (region,) = traced.checkpoints
    assert region.executions == 2
    assert (region.regions, region.outer_scan_length) == ((1, 2) if stack == "scan" else (2, 0))
    assert region.tags == ("key_proj", "mlpwi", "mlpwo", "out_proj", "query_proj", "value_proj")
    assert region.unneeded_tags == ("mlpwo",)
    assert region.recomputed_tags == ()
    # q, k, v, out of [2, 32, 64] and up of four times that, in 16 bits, of two blocks.
    assert region.kept_bytes == 2 * 2 * (4 + 4) * 2 * 32 * 64


def test_the_wrapped_functions_of_the_kit(remat3):
    (region,) = regions(unrolled(remat("save(up)|dots_saveable")))
    assert (region.tags, region.executions) == (("up",), LAYERS)


def test_regions_are_in_the_trace_and_survive_json():
    traced = trace(Step(jax.grad(scanned(named("hidden"))), (STACK, X)), get_target("cpu"))
    assert [each.recomputed_tags for each in traced.checkpoints] == [("hidden",)]
    record = Record("tests:scanned", {}, "save(hidden)", "cpu", {}, {}, checkpoints=traced.checkpoints)
    data = json.loads(json.dumps(record.to_json()))
    assert Record.from_json(data) == record
    data["checkpoints"][0]["a_field_of_tomorrow"] = 1
    assert Record.from_json(data) == record
    del data["checkpoints"]
    assert Record.from_json(data).checkpoints == ()
