"""`remat(plan)`: a plan in a policy's place, on functions, NNX classes and Linen classes."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import planned
import pytest
from flax import nnx
from planned import X, jit, planner_of, random_solutions

from remat_kit import remat
from remat_kit._errors import PlanError, PolicyError
from remat_kit._jaxpr import count_work
from remat_kit._saved import saved_values

WIDTH, HIDDEN = 4, 6


def function_model(policy, stack, hidden=HIDDEN):
    """(loss, weights) whose layer is a plain function."""
    make = planned.scanned if stack == "scan" else planned.unrolled
    return make(remat(policy)), planned.weights(layers=3, hidden=hidden)


class NnxBlock(nnx.Module):
    """Two products with a dropout and a checkpoint of its own between them."""

    def __init__(self, hidden, rngs):
        self.up = nnx.Linear(WIDTH, hidden, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.down = nnx.Linear(hidden, WIDTH, rngs=rngs)

    def __call__(self, x, scale=None):
        hidden = self.drop(jax.checkpoint(lambda x: jnp.tanh(jax.nn.softmax(x)))(self.up(x)))
        return x + self.down(hidden) if scale is None else x


def nnx_model(policy, stack, hidden=HIDDEN):
    """(loss, weights) whose layer is an NNX module, with a state of random streams that changes."""
    cls = remat(policy)(NnxBlock)
    first = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
    blocks = [cls(hidden, nnx.Rngs(number)) for number in range(3)]
    parts = [nnx.split(block, nnx.Param, ...) for block in blocks]
    definition, others = parts[0][0], [nnx.to_pure_dict(part[2]) for part in parts]
    weights = {"in": first.kernel[...], "layers": [nnx.to_pure_dict(part[1]) for part in parts]}

    def loss(w, x):
        x = x @ w["in"]
        if stack == "scan":
            stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *zip(w["layers"], others, strict=True))
            x = jax.lax.scan(lambda x, own: (nnx.merge(definition, *own)(x), None), x, stacked)[0]
        else:
            for own in zip(w["layers"], others, strict=True):
                x = nnx.merge(definition, *own)(x)
        return jnp.sum(x**2)

    return loss, weights


class LinenBlock(nn.Module):
    """Two products and a normalization, as the body of `nn.scan`."""

    hidden: int

    @nn.compact
    def __call__(self, x, _=None):
        y = nn.tanh(nn.Dense(self.hidden)(nn.LayerNorm()(x)))
        return x + nn.Dense(WIDTH)(nn.Dropout(0.5, deterministic=False)(y)), None


class LinenModel(nn.Module):
    """A first layer and three blocks."""

    policy: object
    stack: str
    hidden: int

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(WIDTH, name="in")(x)
        block = remat(self.policy)(LinenBlock)  # pyright: ignore[reportArgumentType]
        if self.stack == "scan":
            split = {"params": True, "dropout": True}
            return nn.scan(block, variable_axes={"params": 0}, split_rngs=split, length=3)(self.hidden)(x, None)[0]
        for _ in range(3):
            x, _ = block(self.hidden)(x, None)
        return x


def linen_model(policy, stack, hidden=HIDDEN):
    """(loss, weights) whose layer is a Linen module with a stream for dropout."""
    model = LinenModel(policy, stack, hidden)
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}

    def loss(w, x):
        return jnp.sum(model.apply({"params": w}, x, rngs={"dropout": keys["dropout"]}) ** 2)

    return loss, linen_weights(hidden, stack)


@functools.cache
def linen_weights(hidden, stack):
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    return jit(LinenModel("none", stack, hidden).init)(keys, X)["params"]


MODELS = {"function": function_model, "nnx": nnx_model, "linen": linen_model}


@functools.cache
def planned_full(kind, stack):
    """The loss with policy full, its weights, and a plan for it."""
    loss, weights = MODELS[kind]("full", stack)
    found = planner_of(loss, weights, X)
    assert len(found.found.kinds) == 1
    assert sum(len(each.instances) * each.graph.repeats for each in found.found.kinds.values()) == 3
    solutions = random_solutions(found, 2)
    return loss, weights, planned.plan_of(found, solutions), planned.flops_again(found, solutions)


@pytest.mark.parametrize("stack", ["scan", "unroll"])
@pytest.mark.parametrize("kind", MODELS)
def test_it_does_what_apply_does(kind, stack):
    loss, weights, plan, flops_again = planned_full(kind, stack)
    assert plan.blocks[0].kept
    step = jax.value_and_grad(MODELS[kind](plan, stack)[0])
    applied, ours = (jax.make_jaxpr(each)(weights, X) for each in (plan.apply(jax.value_and_grad(loss)), step))
    assert count_work(ours) == count_work(applied)
    assert count_work(ours).recomputed_flops == flops_again
    assert saved_values(ours).device_bytes == saved_values(applied).device_bytes


@pytest.mark.parametrize("stack", ["scan", "unroll"])
@pytest.mark.parametrize("kind", MODELS)
def test_gradients_are_those_without_it(kind, stack):
    _, weights, plan, _ = planned_full(kind, stack)
    expected = jit(jax.value_and_grad(MODELS[kind]("none", stack)[0]))(weights, X)
    got = jit(jax.value_and_grad(MODELS[kind](plan, stack)[0]))(weights, X)
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-6), got, expected)


def test_with_remat3(remat3):
    _, weights, plan, flops_again = planned_full("nnx", "scan")
    step = jax.make_jaxpr(jax.value_and_grad(nnx_model(plan, "scan")[0]))(weights, X)
    assert count_work(step).recomputed_flops == flops_again


def test_parameters_are_made_as_without_it():
    plan = planned_full("linen", "unroll")[2]
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    made = jit(LinenModel(plan, "unroll", HIDDEN).init)(keys, X)["params"]
    jax.tree.map(np.testing.assert_array_equal, made, linen_weights(HIDDEN, "unroll"))


@pytest.mark.parametrize("kind", MODELS)
def test_a_block_that_is_not_the_plans(kind):
    _, _, plan, _ = planned_full(kind, "unroll")
    original = jax.checkpoint
    loss, weights = MODELS[kind](plan, "unroll", hidden=8)
    with pytest.raises(PlanError, match=r"the plan is for another model: operation \d+ of block .*\[3,6\].*\[3,8\]"):
        jax.make_jaxpr(loss)(weights, X)
    assert jax.checkpoint is jax.remat is original


@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_jax_is_as_before_after_an_error_in_the_block(kind):
    plan = planned_full(kind, "unroll")[2]
    original = jax.checkpoint

    class BrokenNnx(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones(3))

        def __call__(self, x):
            raise RuntimeError("broken")

    class BrokenLinen(nn.Module):
        @nn.compact
        def __call__(self, x):
            raise RuntimeError("broken")

    broken = remat(plan)(BrokenNnx)() if kind == "nnx" else remat(plan)(BrokenLinen)().bind({})
    with pytest.raises(RuntimeError, match="broken"):
        broken(X)
    assert jax.checkpoint is jax.remat is original


def test_a_plan_makes_one_class():
    plan = planned_full("nnx", "unroll")[2]
    assert remat(plan)(NnxBlock) is remat(type(plan).loads(plan.dumps()))(NnxBlock)
    assert remat(plan)(NnxBlock).__name__ == "NnxBlock"


def test_python_arguments_stay_what_they_are():
    def choose(x, w, flag, name="a"):
        assert isinstance(flag, bool)
        assert name == "b"
        return planned.layer(x, w)

    plan = planned_full("function", "unroll")[2]
    own = planned.unstacked(planned.weights(layers=3))["layers"][0]
    np.testing.assert_allclose(remat(plan)(choose)(X, own, True, name="b"), planned.layer(X, own), rtol=1e-5)


def test_what_is_no_plan():
    with pytest.raises(PolicyError, match="policy"):
        remat(3)  # pyright: ignore[reportArgumentType]
