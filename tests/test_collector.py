"""Python's garbage collector rests while a step is traced, and is as it was before when that is over."""

import gc

import jax.numpy as jnp
import pytest

from remat_kit import Step, get_target, trace
from remat_kit._collector import without_collection


@without_collection()
def fail() -> None:
    assert not gc.isenabled()
    raise KeyError


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_as_it_was_also_after_an_error(enabled):
    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(KeyError):
            fail()
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()


def test_it_rests_while_a_model_is_traced():
    seen = []

    def loss(x):
        seen.append(gc.isenabled())
        return jnp.sum(x)

    assert gc.isenabled()
    trace(Step(loss, (jnp.ones(2),)), get_target("cpu"))
    assert seen == [False]
    assert gc.isenabled()
