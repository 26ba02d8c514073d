"""`auto_remat`: planned where it is called, with what is set there, once for calls that one plan is right for."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import planned
import pytest
from jax.sharding import AxisType, PartitionSpec
from planned import LOSSES, X, jit, plan_of

from remat_kit import Step, auto_remat, get_target, plan
from remat_kit._errors import PlanError, TargetError
from remat_kit._jaxpr import count_work
from remat_kit._plan import auto
from remat_kit._plan.search import Planner
from remat_kit._plan.solve import evaluate

W = planned.weights(layers=2)
LOSS = LOSSES["scan"]
CPU = get_target("cpu")


@pytest.fixture
def no_compiles(monkeypatch):
    """Plans that keep nothing, made without XLA."""

    def quick(step, target, budget, **_):
        planner = Planner.of(step, target)
        again = {name: evaluate(kind.graph, ()) for name, kind in planner.found.kinds.items()}
        return dataclasses.replace(plan_of(planner, again), mesh=dict(target.mesh))

    monkeypatch.setattr(auto, "plan", quick)


def is_planned(function, *args):
    """Whether a function that differentiates computes something again, as the plan says that keeps nothing."""
    return count_work(jax.make_jaxpr(function)(*args)).recomputed_flops > 0


def assert_close(got, expected):
    jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-6), got, expected)


def scanned_gradients(loss):
    def run(w, xs):
        return jax.lax.scan(lambda sums, x: (jax.tree.map(jnp.add, sums, jax.grad(loss)(w, x)), None), w, xs)[0]

    return run


CALLERS = {
    "grad": (jax.grad, X),
    "jit": (lambda loss: jax.jit(jax.grad(loss)), X),
    "vmap": (lambda loss: jax.vmap(jax.grad(loss), (None, 0)), jnp.stack([X, 2 * X])),
    "named vmap": (lambda loss: jax.vmap(jax.grad(loss), (None, 0), axis_name="i"), jnp.stack([X, 2 * X])),
    "scan": (scanned_gradients, jnp.stack([X, 2 * X])),
}


@pytest.mark.parametrize("name", CALLERS)
def test_a_loss_is_planned_in_the_trace_of_a_caller(name, no_compiles):
    caller, x = CALLERS[name]
    loss = auto_remat(LOSS, CPU)
    assert is_planned(caller(loss), W, x)
    assert_close(jit(caller(loss))(W, x), jit(caller(LOSS))(W, x))
    assert len(loss.plans) == 1


def test_a_plan_that_does_not_fit_is_said_and_applied():
    loss = auto_remat(LOSS, CPU, "1KiB")
    with pytest.warns(UserWarning, match=r"no plan fits: the budget on cpu is 1\.00 KiB, and the smallest need .* is "):
        got = jax.jit(jax.grad(loss))(W, X)
    (plan,) = loss.plans.values()
    assert not plan.fits
    assert_close(got, jax.grad(LOSS)(W, X))


def test_what_is_compiled_in_the_trace_of_a_caller():
    loss = auto_remat(LOSS, CPU)
    with jax.default_matmul_precision("highest"):
        got = jax.jit(jax.vmap(jax.grad(loss), (None, 0), axis_name="i"))(W, jnp.stack([X, 2 * X]))
    (plan,) = loss.plans.values()
    assert plan.need_bytes > 0
    assert len(plan.tried) > 1
    assert_close(got, jax.vmap(jax.grad(LOSS), (None, 0))(W, jnp.stack([X, 2 * X])))


@pytest.mark.parametrize("wrap", [lambda step: step, jax.jit], ids=["plain", "jitted"])
def test_a_step_is_planned(wrap, no_compiles):
    step = auto_remat(wrap(jax.value_and_grad(LOSS)), CPU)
    expected = jit(jax.value_and_grad(LOSS))(W, X)
    assert_close(step(W, X), expected)
    assert_close(jit(step)(W, X), expected)
    assert len(step.plans) == 1


@pytest.mark.parametrize("inside", [False, True], ids=["in it", "in a jit in it"])
def test_the_precision_that_is_set_is_that_of_the_plan(inside, no_compiles):
    loss = auto_remat(LOSS, CPU)
    for precision in ("highest", "float32", None, "highest"):
        gradient = jax.jit(jax.grad(loss)) if inside else jax.grad(loss)
        with jax.default_matmul_precision(precision):
            assert is_planned(gradient, W, X)
    assert len(loss.plans) == 3


def test_64_bits(no_compiles):
    loss = auto_remat(LOSS, CPU)
    with jax.enable_x64(True):
        double = jax.tree.map(lambda leaf: leaf.astype("float64"), (W, X))
        assert is_planned(jax.grad(loss), *double)
    assert is_planned(jax.grad(loss), W, X)
    assert len(loss.plans) == 2


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_the_mesh_that_is_set_is_that_of_the_plan(kind, no_compiles):
    def constrained(w, x):
        return LOSS(w, jax.lax.with_sharding_constraint(x, PartitionSpec("data")) if kind is AxisType.Auto else x)

    loss = auto_remat(constrained, CPU)
    with jax.set_mesh(jax.make_mesh((1,), ("data",), axis_types=(kind,))):
        assert is_planned(jax.jit(jax.grad(loss)), W, X)
    (plan,) = loss.plans.values()
    assert plan.mesh == {"data": 1}


def test_another_mesh_than_that_of_the_target_is_refused():
    loss = auto_remat(LOSS, get_target("h100-sxm-80gb", "data=4"))
    with (
        jax.set_mesh(jax.make_mesh((1,), ("model",), axis_types=(AxisType.Auto,))),
        pytest.raises(TargetError, match=r"mesh that is set is {'model': 1}.*\('h100-sxm-80gb', 'model=1'\)"),
    ):
        jax.grad(loss)(W, X)


def test_inside_of_shard_map_it_is_refused():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    everywhere = PartitionSpec()
    gradient = jax.shard_map(
        jax.grad(auto_remat(LOSS, CPU)), mesh=mesh, in_specs=(everywhere, everywhere), out_specs=everywhere
    )
    with pytest.raises(PlanError, match=r"inside of jax\.shard_map.*function that calls jax\.shard_map"):
        gradient(W, X)


def test_what_is_traced_and_closed_over_is_refused():
    def gradient(w, x):
        return jax.grad(auto_remat(lambda w: LOSS(w, x), CPU))(w)

    with pytest.raises(PlanError, match=r"closes over 1 values that are being traced.*float32\[3,4\].*as arguments"):
        jax.jit(gradient)(W, X)


def test_flags_and_texts_come_as_they_are(no_compiles):
    def flagged(w, x, train, mode="sum", *, scale=None):
        assert isinstance(train, bool)
        assert mode in ("sum", "twice")
        return LOSS(w, x) * (2 if train or mode == "twice" else 1) * (1 if scale is None else scale)

    loss = auto_remat(flagged, CPU)
    assert_close(loss(W, X, True), 2 * LOSS(W, X))
    assert_close(loss(W, X, False), LOSS(W, X))
    assert_close(loss(W, X, False, "twice"), 2 * LOSS(W, X))
    assert len(loss.plans) == 3
    assert is_planned(jax.grad(lambda w, x: loss(w, x, True)), W, X)  # in the cache, as all of these
    assert_close(loss(W, X, False, mode="twice"), 2 * LOSS(W, X))
    assert_close(loss(W, x=X, train=False, scale=jnp.float32(3)), 3 * LOSS(W, X))
    assert len(loss.plans) == 5  # arguments that are put together otherwise


def test_one_and_true_are_not_the_same(no_compiles):
    seen = []

    def flagged(w, x, flag):
        seen.append(flag)
        return LOSS(w, x)

    loss = auto_remat(flagged, CPU)
    for flag in (1, True):
        loss(W, X, flag)
    assert len(loss.plans) == 2
    assert {type(flag) for flag in seen} == {int, bool}


@pytest.mark.parametrize("of_step", [False, True], ids=["loss", "step"])
def test_a_float_makes_another_plan_only_where_it_is_part_of_a_block(of_step, no_compiles):
    def outside(w, x, scale):
        assert isinstance(scale, float)
        return scale * LOSS(w, x)

    def inside(w, x, scale):
        return jnp.sum(jax.lax.scan(lambda x, w: (scale * planned.layer(x, w), None), x, w["layers"])[0])

    for loss, plans in ((outside, 1), (inside, 2)):
        planned_one = auto_remat(jax.value_and_grad(loss) if of_step else loss, CPU)
        for scale in (1.5, 2.5, 1.5):
            step = partial(planned_one if of_step else jax.value_and_grad(planned_one), scale=scale)
            assert is_planned(step, W, X)
            assert_close(jit(step)(W, X)[0], jit(partial(loss, scale=scale))(W, X))
        assert len(planned_one.plans) == plans


def test_a_number_that_jit_traces_makes_one_plan(no_compiles):
    def scaled(w, x, scale):
        x = x.astype("bfloat16")
        w = jax.tree.map(lambda leaf: leaf.astype("bfloat16"), w)
        # A weak type, which bfloat16 stays beside.
        return jnp.sum(jax.lax.scan(lambda x, w: (scale * planned.layer(x, w), None), x, w["layers"])[0])

    loss = auto_remat(scaled, CPU)
    gradient = jax.jit(jax.grad(loss))
    for scale in (1.0, 2.0):
        assert is_planned(gradient, W, X, scale)
    assert len(loss.plans) == 1


def test_other_shapes_make_another_plan(no_compiles):
    loss = auto_remat(LOSS, CPU)
    for x in (X, X[:2], X, X[:2]):
        assert is_planned(jax.grad(loss), W, x)
    assert len(loss.plans) == 2


def test_an_array_by_keyword(no_compiles):
    loss = auto_remat(LOSS, CPU)
    assert is_planned(lambda w, x: jax.grad(loss)(w, x=x), W, X)


def test_plan_takes_a_target_by_name_and_no_function():
    step = Step(jax.grad(LOSS), (W, X))
    assert plan(step, "cpu").target == plan(step, CPU).target == "cpu"
    with pytest.raises(PlanError, match=r"plan was given a function\. Give a remat_kit\.Step"):
        plan(LOSS, "cpu")  # pyright: ignore[reportArgumentType]
    with pytest.raises(TargetError, match="h100"):
        plan(step, "h100")
