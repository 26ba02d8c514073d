"""Plan files: the same plan is the same text, and what is damaged or for another model is refused with the reason."""

import dataclasses
import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import planned
import pytest
from planned import LOSSES, X, plan_of, planner_of, random_solutions

from remat_kit._errors import PlanError
from remat_kit._plan.plan import Plan, Tried

ROOT = Path(__file__).parents[1]
W = planned.weights()


def plan_for(loss, w=W, x=X):
    found = planner_of(loss, w, x)
    return plan_of(found, random_solutions(found, 3))


@pytest.fixture(scope="module")
def plans():
    return {name: plan_for(LOSSES[name]) for name in ("scan", "unrolled", "unrolled, in scopes")}


@pytest.fixture(scope="module")
def plan(plans):
    return plans["scan"]


def test_it_comes_back_as_it_was(plans):
    for each in plans.values():
        tried = Tried("plan 1", 1, 2.0, None, 3, True)
        whole = dataclasses.replace(each, tried=(tried,), best_policy=tried, reasons=("a", "b"), options={"a": 1})
        text = whole.dumps()
        back = Plan.loads(text)
        assert back == whole
        assert back.dumps() == text
        assert json.loads(text)["version"] == 1


def test_it_is_a_key(plan):
    back = Plan.loads(plan.dumps())
    assert {plan: 1}[back] == 1
    assert len({plan, back, dataclasses.replace(plan, need_bytes=1)}) == 2


_WRITE = """
import planned
found = planned.planner_of(planned.LOSSES["unrolled"], planned.weights(), planned.X)
print(planned.plan_of(found, planned.random_solutions(found, 3)).dumps(), end="")
"""


def test_another_process_writes_the_same(plans):
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONHASHSEED": "7", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", _WRITE], env=environment, capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout == plans["unrolled"].dumps()


def changed(plan, **fields):
    return json.dumps({**json.loads(plan.dumps()), **fields})


def without(plan, name):
    data = json.loads(plan.dumps())
    del data[name]
    return json.dumps(data)


class TestDamaged:
    """Text that is no plan of this version."""

    @pytest.mark.parametrize("text", ["", "{", "plan", '{"format": '])
    def test_no_json(self, text):
        with pytest.raises(PlanError, match=r"p\.json is not JSON: .*Give a file that `remat-kit plan --json` wrote"):
            Plan.loads(text, "p.json")

    @pytest.mark.parametrize("text", ["3", "[]", "null", "{}", '{"format": "remat-kit sweep"}'])
    def test_no_plan(self, text):
        with pytest.raises(PlanError, match=r"p\.json is not a plan\. Give a file that"):
            Plan.loads(text, "p.json")

    @pytest.mark.parametrize("version", [2, 0, None, "1", 1.5])
    def test_another_version(self, plan, version):
        with pytest.raises(PlanError, match=r"is of plan version .*, this remat-kit reads version 1\. Read it with"):
            Plan.loads(changed(plan, version=version))

    @pytest.mark.parametrize("name", [each.name for each in dataclasses.fields(Plan) if each.name != "version"])
    def test_a_missing_entry(self, plan, name):
        with pytest.raises(PlanError, match=rf"the plan is damaged: .*{name}.*Make a new plan"):
            Plan.loads(without(plan, name))

    def test_an_unknown_entry(self, plan):
        with pytest.raises(PlanError, match=r"is damaged: .*unknown entries colour\. Make a new plan"):
            Plan.loads(changed(plan, colour="red"))

    @pytest.mark.parametrize(
        ("name", "value"),
        [("blocks", 3), ("blocks", [3]), ("blocks", [{}]), ("tried", [{"name": "a"}]), ("reasons", 1)],
    )
    def test_another_type(self, plan, name, value):
        with pytest.raises(PlanError, match=r"the plan is damaged: .*Make a new plan"):
            Plan.loads(changed(plan, **{name: value}))

    def test_a_decision_that_is_none(self, plan):
        data = json.loads(plan.dumps())
        data["blocks"][0]["kept"][0]["how"] = "keep"
        with pytest.raises(PlanError, match="a value is neither saved nor offloaded"):
            Plan.loads(json.dumps(data))


def refusal(plan, loss, w=W, x=X):
    """What is said of a plan on another model, the same for the step as for the loss."""
    with pytest.raises(PlanError) as of_step:
        jax.make_jaxpr(plan.apply(jax.value_and_grad(loss)))(w, x)
    with pytest.raises(PlanError) as of_loss:
        jax.make_jaxpr(jax.value_and_grad(plan.apply(loss)))(w, x)
    first, second = (str(each.value).split("\n---")[0] for each in (of_step, of_loss))
    assert first == second
    assert first.startswith("the plan is for another model: ")
    assert first.endswith("Make a new plan.")
    return first


class TestAnotherModel:
    """A plan that does not fit says what has changed."""

    def test_another_width(self, plans):
        wide = planned.weights(hidden=8)
        assert "'dot_general float32[3,6]' and is 'dot_general float32[3,8]'" in refusal(
            plans["scan"], LOSSES["scan"], wide
        )
        assert "[3,8]'" in refusal(plans["unrolled"], LOSSES["unrolled"], wide)

    def test_another_batch(self, plan):
        assert "was 'mul float32[3,4]' and is 'mul float32[6,4]'" in refusal(
            plan, LOSSES["scan"], x=jnp.concatenate([X, X])
        )

    @pytest.mark.parametrize("layers", [3, 5])
    def test_another_number_of_scanned_layers(self, plan, layers):
        message = refusal(plan, LOSSES["scan"], planned.weights(layers))
        assert f"its loop ran block 'block' 4 times and runs it {layers} times" in message

    @pytest.mark.parametrize("name", ["unrolled", "unrolled, in scopes"])
    @pytest.mark.parametrize("layers", [3, 5])
    def test_another_number_of_unrolled_layers(self, plans, name, layers):
        refusal(plans[name], LOSSES[name], planned.weights(layers))

    def test_more_layers_of_a_list(self):
        plan = plan_for(LOSSES["unrolled"], planned.unstacked(W))
        more = planned.unstacked(planned.weights(6))
        assert "outside of its blocks" in refusal(plan, LOSSES["unrolled"], more)

    def test_another_activation(self, plan):
        def other(x, w):
            scale = jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
            return x + jax.nn.softmax(jnp.sin((x * scale) @ w["up"]) @ w["mix"]) @ w["down"]

        def loss(w, x):
            return jnp.sum(jax.lax.scan(lambda x, w: (other(x, w), None), x @ w["in"], w["layers"])[0] ** 2)

        assert "was 'tanh float32[3,6]' and is 'sin float32[3,6]'" in refusal(plan, loss)

    def test_another_constant_and_another_wiring(self, plan):
        def other(x, w, epsilon, turned):
            scale = jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + epsilon)
            y = jax.nn.softmax(jnp.tanh((x * scale) @ w["up"]) @ w["mix"]) @ w["down"]
            return y + x if turned else x + y

        def loss(w, x, epsilon=1e-6, turned=False):
            def turn(x, w):
                return other(x, w, epsilon, turned), None

            return jnp.sum(jax.lax.scan(turn, x @ w["in"], w["layers"])[0] ** 2)

        jax.make_jaxpr(plan.apply(jax.value_and_grad(loss)))(W, X)
        message = refusal(plan, functools.partial(loss, epsilon=1e-3))
        assert "was 'add float32[3,1] of _ 1e-06' and is 'add float32[3,1] of _ 0.001'" in message
        assert "are wired differently" in refusal(plan, functools.partial(loss, turned=True))

    def test_another_type(self, plan):
        half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), W)
        assert "bfloat16[3,4]'" in refusal(plan, LOSSES["scan"], half, X.astype(jnp.bfloat16))

    def test_no_loop(self, plan):
        assert "should be a scan and is not" in refusal(plan, LOSSES["unrolled"])

    def test_another_argument_is_differentiated(self, plan):
        with pytest.raises(PlanError, match=r"but not its derivative: other inputs are differentiated"):
            jax.make_jaxpr(plan.apply(jax.grad(LOSSES["scan"], argnums=1)))(W, X)

    def test_another_jax(self, plan):
        older = dataclasses.replace(plan, versions={"jax": "0.1.2"})
        message = refusal(older, LOSSES["scan"], planned.weights(hidden=8))
        assert f"It was made with jax 0.1.2, and this is {jax.__version__}." in message
        # A plan that fits is used all the same.
        jax.make_jaxpr(older.apply(jax.value_and_grad(LOSSES["scan"])))(W, X)

    def test_another_head_without_a_product_is_the_same_model(self, plan):
        jax.make_jaxpr(plan.apply(jax.value_and_grad(lambda w, x: jnp.tanh(LOSSES["scan"](w, x)))))(W, X)


def test_a_loss_that_changes_an_argument_is_refused(plan):
    def loss(state, w):
        value = LOSSES["scan"](w, X)
        state["calls"] = state["calls"] + 1
        return value

    with pytest.raises(PlanError, match="cannot apply a plan to loss: the loss changes one of its arguments in place"):
        plan.apply(loss)({"calls": jnp.zeros(())}, W)
