"""Calls of Python functions inside blocks, which backward would make again."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import planned
import pytest
from jax.experimental import io_callback

from remat_kit import RematKitError

X = jnp.ones((2, 4))


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("form", ["scan", "unrolled", "in a loop of a block"])
def test_an_io_callback_in_a_block_is_refused_with_what_to_do(form, ordered):
    def called(x, w):
        call = partial(io_callback, lambda: np.float32(1.0), jax.ShapeDtypeStruct((), jnp.float32), ordered=ordered)
        if form != "in a loop of a block":
            return planned.layer(x, w) * call()
        return planned.layer(x, w) + jax.lax.scan(lambda sums, _: (sums + call(), None), 0.0, length=2)[0]

    def loss(w, x):
        x = x @ w["in"]
        if form == "scan":
            return jnp.sum(jax.lax.scan(lambda x, w: (called(x, w), None), x, w["layers"])[0])
        for own in planned.unstacked(w)["layers"]:
            x = called(x, own)
        return jnp.sum(x)

    where = " in its scan" if form == "in a loop of a block" else ""
    with pytest.raises(RematKitError, match=rf"calls io_callback{where}, which backward.*jax\.debug\.callback"):
        planned.planner_of(loss, planned.weights(layers=2), X)


def test_an_io_callback_in_blocks_that_are_not_differentiated_is_left_alone():
    def watched(x, w):
        return planned.layer(x, w) * io_callback(lambda: np.float32(1.0), jax.ShapeDtypeStruct((), jnp.float32))

    def loss(w, x, frozen):
        return planned.scanned()(w, jax.lax.scan(lambda x, w: (watched(x, w), None), x, frozen)[0])

    w = planned.weights(layers=2)
    assert len(planned.planner_of(loss, w, X, w["layers"]).found.sites) == 1
