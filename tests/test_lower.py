"""Policies as `jax.checkpoint` takes them: equal to JAX's own where it has one, and what they answer."""

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

from remat_kit import (
    POLICIES,
    Policy,
    Region,
    offload,
    save,
    save_kernels,
)
from remat_kit._jaxpr import walk
from remat_kit._lower import lower

BUILT_IN = jax.checkpoint_policies
WRAPPING = [policy for policy in POLICIES.values() if policy.region is not Region.NOTHING]


def test_equal_policies_are_lowered_to_one_function():
    for make in (lambda: save("a", "b"), lambda: offload("a"), lambda: save("a") | offload("b") | save_kernels("k")):
        assert lower(make()) is lower(make())
        assert lower(make()) is not None


def test_jax_has_a_word_for_some():
    assert lower(POLICIES["full"]) is None
    assert lower(POLICIES["dots_saveable"]) is BUILT_IN.dots_saveable
    assert lower(POLICIES["dots_with_no_batch_dims_saveable"]) is BUILT_IN.dots_with_no_batch_dims_saveable
    assert lower(POLICIES["everything_saveable"]) is BUILT_IN.everything_saveable
    # Saving names or kernels adds nothing where everything is saved.
    assert lower(POLICIES["everything_saveable"] | save("a") | save_kernels("k")) is BUILT_IN.everything_saveable


def test_none_is_not_lowered():
    with pytest.raises(AssertionError):
        lower(POLICIES["none"])


@jax.jit
def _program(x, w, batched, image, kernel):
    a = checkpoint_name(jnp.tanh(x @ w), "a")
    b = checkpoint_name(jnp.einsum("bij,bjk->bik", batched, batched), "b")
    c = checkpoint_name(jax.lax.conv_general_dilated(image, kernel, (1,), "SAME"), "c")
    return a.sum() + b.sum() + c.sum()


def _answers(policy_function):
    """What a policy says to each equation of a program with every kind of matmul and three names."""
    f32 = jnp.float32
    shapes = [(4, 4), (4, 4), (2, 4, 4), (1, 2, 8), (2, 2, 3)]
    jaxpr = jax.make_jaxpr(_program)(*(jax.ShapeDtypeStruct(shape, f32) for shape in shapes))
    said = {}
    for number, equation in enumerate(walk(jaxpr)):
        eqn = equation.eqn
        answer = policy_function(eqn.primitive, *(var.aval for var in eqn.invars), **eqn.params)
        key = eqn.params["name"] if eqn.primitive.name == "name" else f"{eqn.primitive.name} {number}"
        said[key] = _word(answer)
    assert {"a", "b", "c"} <= set(said)
    assert sum(key.startswith("dot_general") for key in said) == 2
    assert sum(key.startswith("conv_general_dilated") for key in said) == 1
    return said


def _word(answer):
    if answer is True or type(answer).__name__.startswith("Save"):
        return "save"
    if answer is False or type(answer).__name__.startswith("Recompute"):
        return "recompute"
    return f"offload {answer.src} {answer.dst}"


def _kept(policy):
    return {key.split()[0]: word for key, word in _answers(lower(policy)).items() if word != "recompute"}


OFFLOADED = "offload device pinned_host"


@pytest.mark.parametrize(
    ("policy", "of_jax"),
    [
        (POLICIES["dots_saveable"], BUILT_IN.dots_saveable),
        (POLICIES["dots_with_no_batch_dims_saveable"], BUILT_IN.dots_with_no_batch_dims_saveable),
        (POLICIES["everything_saveable"], BUILT_IN.everything_saveable),
        (POLICIES["offload_dots_with_no_batch_dims"],
         BUILT_IN.offload_dot_with_no_batch_dims("device", "pinned_host")),
        (save("a", "c"), BUILT_IN.save_only_these_names("a", "c")),
        (save("a") | offload("b"),
         BUILT_IN.save_and_offload_only_these_names(
             names_which_can_be_saved=["a"], names_which_can_be_offloaded=["b"], offload_src="device",
             offload_dst="pinned_host")),
        (save("a") | POLICIES["dots_saveable"],
         BUILT_IN.save_from_both_policies(BUILT_IN.dots_saveable, BUILT_IN.save_only_these_names("a"))),
    ],
    ids=lambda value: str(value) if isinstance(value, Policy) else "",
)  # fmt: skip
def test_the_answers_are_those_of_jax(policy, of_jax):
    assert _answers(lower(policy)) == _answers(of_jax)


def test_what_each_policy_keeps_of_real_equations():
    assert _kept(POLICIES["dots_saveable"]) == {"dot_general": "save", "conv_general_dilated": "save"}
    # Of the two dot_generals one has a batch dimension; a dictionary by primitive shows the one that is kept.
    assert _kept(POLICIES["dots_with_no_batch_dims_saveable"]) == {"dot_general": "save"}
    assert _kept(POLICIES["offload_dots_with_no_batch_dims"]) == {"dot_general": OFFLOADED}
    assert _kept(save("a", "zzz")) == {"a": "save"}
    assert _kept(offload("b")) == {"b": OFFLOADED}
    assert _kept(save("a") | offload("b")) == {"a": "save", "b": OFFLOADED}
    assert _kept(save_kernels("tanh")) == {"tanh": "save"}
    assert _kept(save_kernels("tanh") | save("c")) == {"tanh": "save", "c": "save"}
    assert _kept(save_kernels("tanh") | offload("c")) == {"tanh": "save", "c": OFFLOADED}


def test_exactly_one_of_the_two_matmuls_has_no_batch_dimensions():
    said = _answers(lower(POLICIES["dots_with_no_batch_dims_saveable"]))
    assert sorted(word for key, word in said.items() if key.startswith("dot_general")) == ["recompute", "save"]


def test_a_name_is_more_precise_than_a_rule():
    everything_but_a = POLICIES["everything_saveable"] | offload("a")
    said = _answers(lower(everything_but_a))
    assert said.pop("a") == OFFLOADED
    assert set(said.values()) == {"save"}
    dots_and_a = POLICIES["offload_dots_with_no_batch_dims"] | save("a")
    assert _kept(dots_and_a) == {"a": "save", "dot_general": OFFLOADED}


@pytest.mark.parametrize("policy", [policy for policy in WRAPPING if policy.name != "full"], ids=str)
def test_every_policy_of_the_table_answers_every_equation(policy):
    assert set(_answers(lower(policy)).values()) <= {"save", "recompute", OFFLOADED}
