"""Steps, workloads and options: what is accepted and what is refused."""

import dataclasses
import sys
import types

import jax
import jax.numpy as jnp
import pytest

from remat_kit import POLICIES, RematKitError, Step, Workload
from remat_kit._step import parse_option

FULL = POLICIES["full"]
X = jax.ShapeDtypeStruct((2, 3), jnp.float32)


@pytest.fixture
def workloads(monkeypatch):
    """An importable module `some_workloads` with the functions that the tests below name."""
    seen = []

    def build(policy, size="tiny", batch=8):
        seen.append((policy, size, batch))
        return Step(jnp.sin, (X,))

    def build_for(policy, platform):
        seen.append((policy, platform))
        return Step(jnp.sin, (X,))

    def takes_any(policy, **options):
        seen.append((policy, options))
        return Step(jnp.sin, (X,))

    def positional(policy, /, size="tiny", *rest):
        return Step(jnp.sin, (X,))

    module = types.ModuleType("some_workloads")
    vars(module).update(
        build=build,
        build_for=build_for,
        takes_any=takes_any,
        positional=positional,
        returns_none=lambda policy: None,
        a_number=3,
        seen=seen,
    )
    monkeypatch.setitem(sys.modules, "some_workloads", module)
    return module


def test_a_step_keeps_what_it_is_given():
    step = Step(jnp.sin, (X, {"w": X}), donate=(1,), labels={"params": 1})
    assert step.args[1]["w"] is X
    assert step.donate == (1,)
    assert step.init is None
    assert step.loss_and_grads is None
    with pytest.raises(dataclasses.FrozenInstanceError):
        step.donate = ()  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(("args", "kind"), [([X], "list"), (X, "ShapeDtypeStruct"), ({"x": X}, "dict")])
def test_args_must_be_a_tuple(args, kind):
    with pytest.raises(RematKitError, match=f"Step.args is a {kind}. Give a tuple with one pytree for each"):
        Step(jnp.sin, args)


@pytest.mark.parametrize("position", [2, -1, 10])
def test_donate_must_name_arguments(position):
    with pytest.raises(RematKitError, match=rf"donate names argument {position}, but there are 2 \(0 to 1\)"):
        Step(jnp.sin, (X, X), donate=(0, position))


def test_build_passes_policy_and_options(workloads):
    Workload("some_workloads:build").build(FULL, "cpu")
    Workload("some_workloads:build", (("batch", 4), ("size", "large"))).build(FULL, "cuda")
    assert workloads.seen == [(FULL, "tiny", 8), (FULL, "large", 4)]


def test_platform_reaches_those_who_ask(workloads):
    Workload("some_workloads:build_for").build(FULL, "cuda")
    Workload("some_workloads:build_for", (("platform", "cpu"),)).build(FULL, "cuda")
    assert workloads.seen == [(FULL, "cuda"), (FULL, "cpu")]


def test_a_function_with_keywords_takes_any_option(workloads):
    Workload("some_workloads:takes_any", (("new", 1),)).build(FULL, "cpu")
    assert workloads.seen == [(FULL, {"new": 1})]


@pytest.mark.parametrize("spec", ["gpt", "models.transformer", ":gpt", "models.transformer:", "", ":"])
def test_a_workload_is_module_and_function(spec):
    with pytest.raises(RematKitError, match=r"is not a workload\. Write module:function, e\.g\. models"):
        Workload(spec).build(FULL, "cpu")


@pytest.mark.parametrize("module", ["no_such_module_here", "json.no_such_part", "some/path.py", ".relative"])
def test_a_module_that_cannot_be_imported(module):
    with pytest.raises(RematKitError, match=f"cannot import '{module}' of workload '{module}:gpt': .*install its"):
        Workload(f"{module}:gpt").build(FULL, "cpu")


def test_a_function_that_does_not_exist(workloads):
    with pytest.raises(RematKitError, match=r"has no function 'bild'\. Did you mean 'build'\?"):
        Workload("some_workloads:bild").build(FULL, "cpu")
    with pytest.raises(RematKitError, match=r"no function 'a_number'.*build\(policy, \*\*options\)"):
        Workload("some_workloads:a_number").build(FULL, "cpu")


def test_an_option_that_does_not_exist(workloads):
    with pytest.raises(RematKitError, match=r"no option 'batsh'. Did you mean 'batch'\? Options: size, batch\."):
        Workload("some_workloads:build", (("batsh", 4),)).build(FULL, "cpu")
    with pytest.raises(RematKitError, match=r"no option 'size'\. Options: none\."):
        Workload("some_workloads:returns_none", (("size", 4),)).build(FULL, "cpu")
    assert workloads.seen == []


@pytest.mark.parametrize("function", ["build", "takes_any", "positional"])
def test_the_policy_is_not_an_option(workloads, function):
    with pytest.raises(RematKitError, match="no option 'policy'"):
        Workload(f"some_workloads:{function}", (("policy", "none"),)).build(FULL, "cpu")


def test_the_rest_of_the_positional_arguments_is_not_an_option(workloads):
    with pytest.raises(RematKitError, match=r"no option 'rest'\. .*Options: size\."):
        Workload("some_workloads:positional", (("rest", 1),)).build(FULL, "cpu")


def test_a_workload_returns_a_step(workloads):
    with pytest.raises(RematKitError, match=r"returned a NoneType\. A workload returns a remat_kit\.Step"):
        Workload("some_workloads:returns_none").build(FULL, "cpu")


def test_workloads_are_values():
    one, same = (Workload("m:f", (("batch", 8),)) for _ in range(2))
    assert one == same
    assert hash(one) == hash(same)
    assert one != Workload("m:f", (("batch", 9),))


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("batch=8", "batch", 8),
        ("batch=-8", "batch", -8),
        ("dropout=0.1", "dropout", 0.1),
        ("rate=1e-3", "rate", 1e-3),
        ("rate=1.0", "rate", 1.0),
        ("fused=true", "fused", True),
        ("fused=False", "fused", False),
        ("limit=none", "limit", None),
        ("size=22B", "size", "22B"),
        ("size=gpt2-small", "size", "gpt2-small"),
        ("text=", "text", ""),
        ("text=a=b", "text", "a=b"),
    ],
)
def test_parse_option(text, name, value):
    got = parse_option(text)
    assert got == (name, value)
    assert type(got[1]) is type(value)


@pytest.mark.parametrize("text", ["batch", "=8", "", "8=batch", "ba tch=8", "ba-tch=8"])
def test_parse_option_refuses(text):
    with pytest.raises(RematKitError, match=r"is not an option\. Write key=value, e\.g\. batch=8"):
        parse_option(text)
