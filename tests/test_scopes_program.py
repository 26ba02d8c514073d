"""Name scopes for NNX models change names and nothing else, and what is counted by name stays right."""

import collections
import contextlib
import functools
import gc
import inspect
import re
import threading
import types

import jax
import pytest
from flax import nnx
from nnx_models import MATMULS, Block, Scanned, Stack, X, named, paths, under

from models import linen, transformer
from remat_kit import Step, get_policy, get_target, remat, trace
from remat_kit._jaxpr import walk
from remat_kit._scopes import nnx_scopes


def calls_of_all_classes():
    def below(cls):
        return {cls, *(each for sub in cls.__subclasses__() for each in below(sub))}

    return {cls: dict(vars(cls)) for cls in below(nnx.Module)}


def assert_nothing_is_left(before):
    after = calls_of_all_classes()
    for cls, attributes in before.items():
        now = after[cls]
        assert now.keys() == attributes.keys(), cls
        for name in ("__call__", "__init_subclass__", "__getattribute__"):
            assert now.get(name) is attributes.get(name), cls


def test_everything_is_restored():
    gc.collect()
    before, model = calls_of_all_classes(), Block(nnx.Rngs(0))
    attributes = dict(vars(model))
    with nnx_scopes():
        assert Block.__call__ is not before[Block]["__call__"]
        assert inspect.signature(Block.__call__) == inspect.signature(before[Block]["__call__"])
        with nnx_scopes():
            pass
        assert Block.__call__ is not before[Block]["__call__"]
        jax.make_jaxpr(lambda x: model(x))(X)
    assert_nothing_is_left(before)
    assert vars(model) == attributes


def test_everything_is_restored_after_an_error():
    class Fails(nnx.Module):
        def __init__(self):
            self.up = nnx.Linear(4, 4, rngs=nnx.Rngs(0))

        def __call__(self, x, fail=True):
            x = self.up(x)
            if fail:
                raise ZeroDivisionError
            return x

    class Tries(nnx.Module):
        def __init__(self):
            self.inner = Fails()

        def __call__(self, x):
            try:
                self.inner(x)
            except ZeroDivisionError:
                return self.inner(x, fail=False)

    before = calls_of_all_classes()
    with pytest.raises(ZeroDivisionError):
        paths(Fails())
    assert_nothing_is_left(before)
    assert paths(Tries())[-1] == "Tries/inner/up"  # the failed call is not in the way


def test_what_was_captured_is_plain_afterwards():
    model = Block(nnx.Rngs(0))
    with nnx_scopes():
        bound, function = model.__call__, Block.__call__
        late = remat("full")(types.new_class("Late", (Block,)))(nnx.Rngs(0))
    definition, state = nnx.split(late)
    for f, args in (
        (bound, (X,)),
        (functools.partial(function, model), (X,)),
        (lambda state, x: nnx.merge(definition, state)(x), (state, X)),
    ):
        stacks = {equation.stack for equation in walk(jax.make_jaxpr(f)(*args)) if equation.primitive == "dot_general"}
        assert stacks == {""}
    # And names once, when scopes are open again.
    assert named(lambda x: bound(x), X) == under("Block")
    assert paths(late) == under("Late")


def test_what_the_step_puts_in_a_class_stays():
    class Changed(nnx.Module):
        def __call__(self, x):
            return x

    with nnx_scopes():
        traced = Changed.__call__
        Changed.__call__ = lambda self, x: 2 * traced(self, x)
    assert Changed()(3) == 6


def test_other_threads_see_nothing():
    model, seen = Block(nnx.Rngs(0)), []

    def other():
        jaxpr = jax.make_jaxpr(lambda x: model(x))(X)
        seen.extend(equation.stack for equation in walk(jaxpr) if equation.primitive == "dot_general")

    with nnx_scopes():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert seen == [""] * len(MATMULS)


def test_threads_that_overlap():
    before, model, first_is_open, second_is_done = calls_of_all_classes(), Block(nnx.Rngs(0)), *_events(2)
    found = {}

    def first():
        with nnx_scopes():
            first_is_open.set()
            second_is_done.wait(60)
            found["first"] = paths(model)

    thread = threading.Thread(target=first)
    thread.start()
    first_is_open.wait(60)
    found["second"] = paths(model)
    second_is_done.set()
    thread.join()
    assert found == {"first": under("Block"), "second": under("Block")}
    assert_nothing_is_left(before)


def _events(count):
    return [threading.Event() for _ in range(count)]


def test_what_was_traced_before_without_names_is_traced_again():
    model = remat("full")(Block)(nnx.Rngs(0))
    definition, state = nnx.split(model)

    def call(state, x):
        return nnx.merge(definition, state)(x)

    def stacks():
        return [
            equation.stack for equation in walk(jax.make_jaxpr(call)(state, X)) if equation.primitive == "dot_general"
        ]

    assert stacks() == [""] * len(MATMULS)
    with nnx_scopes():
        assert stacks() == under("Block")
    assert stacks() == [""] * len(MATMULS)


def step_of(make):
    """A step, and how often its block was traced."""
    traces = []

    class Counted(Block):
        def __call__(self, x):
            traces.append(1)
            return super().__call__(x)

    definition, state = nnx.split(make(remat("full")(Counted)))
    return jax.value_and_grad(lambda state, x: nnx.merge(definition, state)(x).sum()), state, traces


@pytest.mark.parametrize("make", [Stack, Scanned, lambda block: Scanned(block, "merge")], ids=["list", "scan", "merge"])
def test_the_program_is_the_same(make, assert_same_program):
    plain, state, plain_traces = step_of(make)
    expected = jax.make_jaxpr(plain)(state, X)
    scoped, state, scoped_traces = step_of(make)
    with nnx_scopes():
        got = jax.make_jaxpr(scoped)(state, X)
    assert_same_program(got, expected)
    assert str(got) == str(expected)  # printed without names
    assert len(scoped_traces) == len(plain_traces)


@pytest.mark.parametrize("make", [Stack, Scanned], ids=["list", "scan"])
def test_no_value_outlives_its_trace(make):
    step, state, _ = step_of(make)
    with jax.checking_leaks(), nnx_scopes():
        jax.make_jaxpr(step)(state, X)


def test_the_compiled_program_is_the_same():
    def opcodes(scopes):
        step, state, _ = step_of(Scanned)
        with scopes():
            lowered = jax.jit(step).lower(state, X)
        text = str(lowered.compile().as_text())
        assert bool(re.search(r'op_name="[^"]*Scanned\)*/', text)) == (scopes is nnx_scopes)
        return collections.Counter(re.findall(r"= \S+ ([a-z][\w\-]*)\(", text))

    expected = opcodes(contextlib.nullcontext)
    assert expected["dot"] > 0
    assert opcodes(nnx_scopes) == expected


# ---- what remat-kit reads from names


def test_linen_models_are_unaffected():
    step = linen.gpt_linen("full", size="tiny")
    with nnx_scopes():
        got = jax.make_jaxpr(step.fn)(*step.args)
    step = linen.gpt_linen("full", size="tiny")
    expected = jax.make_jaxpr(step.fn)(*step.args)
    assert [equation.stack for equation in walk(got)] == [equation.stack for equation in walk(expected)]


def test_saved_bytes_of_blocks_without_names_in_the_model():
    step, state, _ = step_of(functools.partial(Stack, layers=3))
    traced = trace(Step(step, (state, X)), get_target("cpu"), get_policy("full"))
    # Each keeps its input, 2·4 numbers of 4 bytes; that of the first is the step's.
    assert traced.saved.device_bytes_per_block == 32
    assert {value.block for value in traced.saved.values} == {"blocks_1", "blocks_2"}


def test_phases_of_the_reference_model():
    traced = trace(transformer.gpt("full", size="tiny", stack="unroll"), get_target("cpu"), get_policy("full"))
    found = collections.defaultdict(set)
    for equation in walk(traced.traced.jaxpr):
        if equation.primitive == "dot_general":
            found[equation.phase].add(equation.stack)
    assert "jvp(Transformer)/blocks_0/attention/query" in found["forward"]
    assert any(re.search(r"transpose\(.*blocks_1/mlp/down$", stack) for stack in found["backward"])
    assert any(re.search(r"blocks_1/rematted_computation/mlp/up$", stack) for stack in found["recompute"])
    assert found.keys() == {"forward", "backward", "recompute"}
