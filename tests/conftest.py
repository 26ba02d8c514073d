"""Settings of all tests, and the comparisons that several files share."""

import os
import re

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from collections.abc import Callable, Iterator
from typing import Any

import pytest


@pytest.fixture(params=[False, True], ids=["remat2", "remat3"])
def remat3(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Runs the test with both of JAX's implementations of remat."""
    import jax

    before = jax.config.jax_remat3
    jax.config.update("jax_remat3", request.param)
    yield request.param
    jax.config.update("jax_remat3", before)


@pytest.fixture
def quick_compile() -> Iterator[None]:
    """XLA compiles with less optimization: what is compared is small, and compiling it takes most of the time."""
    import jax

    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture
def assert_same_program() -> Callable[[Any, Any], None]:
    """Asserts that two jaxprs are one program: equations, wiring, shapes and parameters, inner jaxprs included.

    Not compared are functions, and what names a function: the name of an inlined `jit` and debug information.
    """
    return _assert_same_program


@pytest.fixture
def assert_same_tree() -> Callable[..., None]:
    """Asserts that two pytrees have the same structure and leaves, bitwise or within `atol` of the largest element."""
    return _assert_same_tree


def _assert_same_tree(got: Any, expected: Any, atol: float = 0.0) -> None:
    import jax
    import numpy as np

    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for (path, leaf), other in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(expected), strict=True):
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf, other = jax.random.key_data(leaf), jax.random.key_data(other)
        assert leaf.dtype == other.dtype, path
        largest = float(np.max(np.abs(np.asarray(other, np.float64)), initial=1.0))
        np.testing.assert_allclose(leaf, other, rtol=0, atol=atol * largest, err_msg=jax.tree_util.keystr(path))


def _assert_same_program(got: Any, expected: Any) -> None:
    got, expected = _open(got), _open(expected)
    numbers: tuple[dict[Any, int], dict[Any, int]] = ({}, {})

    def wiring(side: int, variables: Any) -> list[Any]:
        known = numbers[side]
        return [
            (str(var.aval), var.val if hasattr(var, "val") else known.setdefault(var, len(known))) for var in variables
        ]

    assert wiring(0, [*got.constvars, *got.invars]) == wiring(1, [*expected.constvars, *expected.invars])
    assert [eqn.primitive.name for eqn in got.eqns] == [eqn.primitive.name for eqn in expected.eqns]
    for ours, theirs in zip(got.eqns, expected.eqns, strict=True):
        assert str(wiring(0, ours.invars)) == str(wiring(1, theirs.invars)), ours.primitive
        assert wiring(0, ours.outvars) == wiring(1, theirs.outvars), ours.primitive
        assert ours.params.keys() == theirs.params.keys()
        for key in ours.params:
            if key not in ("name", "debug_info") or ours.primitive.name == "name":
                _assert_same_parameter(ours.params[key], theirs.params[key])
    assert str(wiring(0, got.outvars)) == str(wiring(1, expected.outvars))


def _assert_same_parameter(got: Any, expected: Any) -> None:
    assert type(got) is type(expected)
    if hasattr(got, "eqns") or hasattr(got, "jaxpr"):
        _assert_same_program(got, expected)
    elif isinstance(got, tuple | list):
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            _assert_same_parameter(one, other)
    elif not callable(got):
        assert str(got) == str(expected)


def _open(jaxpr: Any) -> Any:
    while not hasattr(jaxpr, "eqns") or hasattr(jaxpr, "jaxpr"):
        inner = jaxpr.jaxpr
        if inner is jaxpr:
            break
        jaxpr = inner
    return jaxpr


def stable_id(value: object) -> str:
    """A test's id without memory addresses, so that two processes give the same tests the same names."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(value) if type(value).__name__ == "Policy" else repr(value))
