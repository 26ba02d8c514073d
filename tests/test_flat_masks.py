"""Masks of dropout that are drawn with their last two axes as one: the same masks."""

from collections import Counter

import jax
import numpy as np
import pytest

from models import parts, transformer
from remat_kit._jaxpr import walk


def test_they_are_the_same_masks():
    x = jax.random.normal(jax.random.key(1), (3, 4, 5))
    for key in map(jax.random.key, range(3)):
        np.testing.assert_array_equal(parts.dropout(x, 0.5, key, flat=True), parts.dropout(x, 0.5, key))


@pytest.mark.parametrize("stack", ["scan", "unroll"])
def test_they_are_drawn_everywhere_and_change_no_loss(stack):
    drawn, losses = [], []
    for flat in (False, True):
        step = transformer.gpt("none", size="tiny", stack=stack, dropout=0.3, flat_masks=flat)
        arguments = step.init(0)
        found = [each.eqn for each in walk(jax.make_jaxpr(step.fn)(*arguments))]
        drawn.append(Counter(each.params["shape"] for each in found if each.primitive.name == "random_bits"))
        compiled = jax.jit(step.fn, compiler_options={"xla_backend_optimization_level": 0})
        losses.append(float(compiled(*arguments)[1]))
    flattened = Counter({(*shape[:-2], shape[-2] * shape[-1]): count for shape, count in drawn[0].items()})
    assert {len(shape) for shape in drawn[0]} == {3, 4}
    assert drawn[1] == flattened
    assert losses[0] == losses[1]
