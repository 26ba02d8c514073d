"""Plans on the reference models: NNX and Linen, scanned and unrolled, fused attention, experts, convolutions."""

import dataclasses
import functools

import jax
import planned
import pytest
from contract import worst_error
from planned import jit, plan_of, random_solutions

from remat_kit import PlanError, Workload, get_policy, get_target
from remat_kit._jaxpr import count_work
from remat_kit._measure import tolerance_of
from remat_kit._plan.plan import Plan
from remat_kit._plan.search import Planner

CPU = get_target("cpu")

# (workload, options, blocks, kinds)
MODELS = {
    "gpt": ("models.transformer:gpt", {}, 1, 1),
    "gpt unrolled": ("models.transformer:gpt", {"stack": "unroll", "layers": 3}, 3, 1),
    "llama, fused": ("models.transformer:llama", {"attention": "fused"}, 1, 1),
    "linen": ("models.linen:gpt_linen", {}, 1, 1),
    "linen unrolled": ("models.linen:gpt_linen", {"stack": "unroll", "layers": 3}, 3, 1),
    "vit": ("models.vision:vit", {}, 1, 1),
    "moe": ("models.moe:moe", {}, 1, 1),
    "moe unrolled": ("models.moe:moe", {"stack": "unroll"}, None, None),
    "unet": ("models.unet:unet", {}, None, None),
}


@functools.cache
def workload(name):
    spec, options, *_ = MODELS[name]
    return Workload(spec, tuple({"size": "tiny", "compute_dtype": "float32", "optimizer": "sgd", **options}.items()))


@functools.cache
def step(name, policy="none"):
    return workload(name).build(get_policy(policy), "cpu")


@functools.cache
def planner(name, policy="none"):
    own = step(name, policy)
    return Planner.of(dataclasses.replace(own, fn=own.loss_and_grads), CPU)


@pytest.mark.parametrize("name", ["gpt", "linen unrolled", "moe", pytest.param("unet", marks=pytest.mark.slow)])
def test_what_runs_again_is_what_the_model_says(name):
    found = planner(name)
    blocks, kinds = MODELS[name][2:]
    assert blocks is None or (len(found.found.sites), len(found.found.kinds)) == (blocks, kinds)
    solutions = random_solutions(found, 4)
    plan = Plan.loads(plan_of(found, solutions).dumps())
    own = step(name)
    traced, shapes = jax.make_jaxpr(plan.apply(own.loss_and_grads), return_shape=True)(*own.args)
    assert count_work(traced).recomputed_flops == planned.flops_again(found, solutions)
    assert shapes == jax.eval_shape(own.loss_and_grads, *own.args)  # the parameters' tree is unchanged


@pytest.mark.parametrize("name", ["gpt", "linen", "linen unrolled"])
def test_a_plan_in_the_place_of_a_policy(name):
    found = planner(name, "full")
    solutions = random_solutions(found, 4)
    plan = plan_of(found, solutions)
    own = workload(name).build(plan, "cpu")  # pyright: ignore[reportArgumentType]
    traced, shapes = jax.make_jaxpr(own.loss_and_grads, return_shape=True)(*own.args)
    assert count_work(traced).recomputed_flops == planned.flops_again(found, solutions)
    assert shapes == jax.eval_shape(step(name).loss_and_grads, *own.args)


def test_a_block_alone_cannot_follow_a_plan_that_decides_layer_by_layer():
    found = planner("linen unrolled", "full")
    plan = plan_of(found, random_solutions(found, 4))
    (block,) = plan.blocks
    first, *others = block.sites
    cut = (dataclasses.replace(block, sites=(first,)), dataclasses.replace(block, sites=tuple(others), kept=()))
    plan = dataclasses.replace(plan, blocks=cut)
    with pytest.raises(PlanError, match=r"which layer it is.*keeps other values.*plan\.apply"):
        jax.eval_shape(workload("linen unrolled").build(plan, "cpu").loss_and_grads, *step("linen unrolled").args)
    unrolled = dataclasses.replace(plan, blocks=(block,), unrolled=(0,))
    with pytest.raises(PlanError, match=r"which layer it is.*writes their loop out.*plan\.apply"):
        jax.eval_shape(workload("linen unrolled").build(unrolled, "cpu").loss_and_grads, *step("linen unrolled").args)


@functools.cache
def expected(name):
    own = step(name)
    args = jit(own.init)(0)
    return args, jit(own.loss_and_grads)(*args)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["none", "full"])
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_those_of_none(name, policy):
    args, reference = expected(name)
    found = planner(name, policy)
    plan = plan_of(found, random_solutions(found, 5))
    got = jit(plan.apply(step(name, policy).loss_and_grads))(*args)
    assert jax.tree.structure(got) == jax.tree.structure(reference)
    assert worst_error(jax.tree.leaves(got), jax.tree.leaves(reference)) <= tolerance_of("float32")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "llama, fused", "linen", "vit", "moe"])
def test_with_loops_written_out_they_are_too(name):
    args, reference = expected(name)
    own = step(name, "full")
    found = Planner.of(dataclasses.replace(own, fn=own.loss_and_grads), CPU, unroll=True).unrolled
    assert found is not None
    plan = plan_of(found, random_solutions(found, 5))
    got = jit(plan.apply(own.loss_and_grads))(*args)
    assert jax.tree.structure(got) == jax.tree.structure(reference)
    assert worst_error(jax.tree.leaves(got), jax.tree.leaves(reference)) <= tolerance_of("float32")
