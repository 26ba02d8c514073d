"""Steps of every common form can be measured: what they donate comes back, however it is packed."""

import itertools

import jax
import jax.numpy as jnp
import pytest

from remat_kit import Step, compile_step, get_target, measure_interleaved, real_args, trace
from remat_kit._measure import check_can_repeat, check_gradients, take_turns, tolerance_of


def step_of(fn, *args, donate=(0,), **rest):
    return Step(fn, args, donate=donate, **rest)


def keyed(state):
    key, sub = jax.random.split(state["key"])
    return {"w": state["w"] + jax.random.normal(sub, (4,)), "key": key}


def moving_average(params, average):
    params = jax.tree.map(lambda p: p * 0.9, params)
    return params, jax.tree.map(lambda a, p: 0.5 * a + 0.5 * p, average, params)


WEIGHTS = {"w": jnp.ones(4)}
FORMS = {
    "state alone": step_of(lambda state: jax.tree.map(jnp.sin, state), WEIGHTS),
    "state and loss": step_of(lambda state: (jax.tree.map(jnp.sin, state), state["w"].sum()), WEIGHTS),
    "in a dictionary": step_of(lambda state: {"new": {"state": jax.tree.map(jnp.sin, state)}, "loss": 0.0}, WEIGHTS),
    "typed keys": step_of(keyed, {"w": jnp.ones(4), "key": jax.random.key(0)}),
    "two alike": step_of(moving_average, WEIGHTS, {"w": jnp.zeros(4)}, donate=(0, 1)),
    "a Python number": step_of(lambda state: {"w": state["w"] * 2, "n": state["n"] + 1}, {"w": jnp.ones(4), "n": 3}),
}


@pytest.mark.parametrize("form", FORMS)
def test_steps_run_again_on_what_they_return(form):
    step = FORMS[form]
    traced = trace(step, get_target("cpu"))
    check_can_repeat(traced)
    compiled = compile_step(traced)
    ((name, time),) = measure_interleaved({"one": compiled}, real_args(step), rounds=5)
    assert (name, time.rounds) == ("one", 5)


def test_each_call_is_announced_and_the_order_changes():
    step = FORMS["state alone"]
    compiled = compile_step(trace(step, get_target("cpu")))
    turns = list(take_turns(dict.fromkeys("abc", compiled), real_args(step), rounds=6, seconds=60))
    calls = [name for name, elapsed in turns if elapsed is None]
    assert len(calls) == 3 * (2 + 6)  # two warm-up rounds do not count
    assert len(turns) - len(calls) == 3 * 6
    rounds = [tuple(calls[start : start + 3]) for start in range(0, len(calls), 3)]
    assert all(sorted(each) == ["a", "b", "c"] for each in rounds)
    before = {(first, second) for each in rounds for first, second in itertools.pairwise(each)}
    assert len(before) > 3  # a rotation would leave each with one and the same before it


def test_gradients_of_typed_keys_and_arrays_are_compared_leaf_by_leaf():
    def grads(factor):
        return lambda x: (x.sum(), {"g": factor * x, "key": jax.random.key(1)})

    args = (jnp.arange(4.0),)
    steps = [trace(Step(jnp.sum, args, loss_and_grads=grads(f)), get_target("cpu")) for f in (1.0, 1.0, 1.001)]
    assert check_gradients(steps[1], steps[0]).worst_error == 0
    with pytest.raises(ValueError, match=r"\['g'\] differs from policy none by 0.00099"):
        check_gradients(steps[2], steps[0])


def test_the_tolerance_is_two_thirds_of_the_digits():
    # bfloat16 has 8 bits of mantissa, float32 24.
    assert tolerance_of("bfloat16") == pytest.approx(2 ** (-7 * 2 / 3))
    assert tolerance_of("float32") == pytest.approx(2 ** (-23 * 2 / 3))
