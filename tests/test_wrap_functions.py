"""`remat` on functions and on methods of plain classes: arguments arrive as they were, nothing else changes."""

import dataclasses
import enum
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import stable_id

from remat_kit import POLICIES, remat
from remat_kit._errors import PolicyError
from remat_kit._jaxpr import walk

full = remat("full")
KEY = jax.random.key(0)
X = jax.random.normal(KEY, (4, 8))
W = jax.random.normal(jax.random.key(1), (8, 8)) / 3


class Kind(enum.Enum):
    SIN = "sin"
    TANH = "tanh"


def block(x, w, flag=True, kind=Kind.SIN):
    x = jnp.tanh(x @ w) if flag else x
    return (jnp.sin if kind is Kind.SIN else jnp.tanh)(x @ w)


def checkpointed(jaxpr):
    """How many remat equations there are in a program before it is differentiated."""
    return sum(equation.primitive in ("checkpoint", "remat", "remat2", "RematTraced") for equation in walk(jaxpr))


def seen_by(*calls):
    """The arguments as they arrive in a wrapped function, for each of `calls`."""
    seen = []

    @full
    def record(*args, **kwargs):
        seen.append((args, kwargs))
        return X

    for args, kwargs in calls:
        record(*args, **kwargs)
    return seen


def call(*args, **kwargs):
    return args, kwargs


# ---- arguments


@pytest.mark.parametrize("flag", [True, False])
@pytest.mark.parametrize("kind", list(Kind))
def test_flags_positional_and_by_keyword(flag, kind, assert_same_tree):
    wrapped = full(block)
    expected = jax.value_and_grad(lambda x, w: block(x, w, flag, kind).sum(), (0, 1))(X, W)
    for loss in (
        lambda x, w: wrapped(x, w, flag, kind).sum(),
        lambda x, w: wrapped(x, w, flag=flag, kind=kind).sum(),
        lambda x, w: wrapped(kind=kind, w=w, flag=flag, x=x).sum(),
    ):
        assert_same_tree(jax.value_and_grad(loss, (0, 1))(X, W), expected, atol=1e-6)


def test_defaults_hold():
    np.testing.assert_array_equal(full(block)(X, W), block(X, W))


@pytest.mark.parametrize(
    "value",
    [None, True, False, 0, 1, -1, 1.0, 1e-5, 2 + 1j, "tanh", b"x", Kind.SIN, jnp.tanh, float, jnp.float32,
     np.dtype("int8"), slice(1, 2), ..., range(3), frozenset({1}), {1, 2}, bytearray(b"x"), object()],
    ids=stable_id,
)  # fmt: skip
def test_a_python_object_arrives_as_itself(value):
    seen = seen_by(call(X, value), call(X, key=value), call(X, [value], {"k": (value,)}))
    assert seen[0][0][1] is value
    assert seen[1][1]["key"] is value
    assert seen[2][0][1][0] is value
    assert seen[2][0][2]["k"][0] is value


def test_arrays_arrive_traced_and_containers_keep_their_kind():
    Pair = dataclasses.make_dataclass("Pair", ["left", "right"])
    jax.tree_util.register_dataclass(Pair, ["left"], ["right"])
    arrays = [X, np.ones(3), np.float32(2), np.int32(3), KEY, jnp.int8(1)]
    ((args, kwargs),) = seen_by(call(*arrays, {"a": X, "none": None}, (X, [None]), pair=Pair(X, "static")))
    assert all(isinstance(argument, jax.core.Tracer) for argument in args[: len(arrays)])
    assert [argument.dtype for argument in args[: len(arrays)]] == [
        jnp.float32, jax.dtypes.canonicalize_dtype(np.float64), jnp.float32, jnp.int32, KEY.dtype, jnp.int8
    ]  # fmt: skip
    assert args[-2].keys() == {"a", "none"}
    assert args[-2]["none"] is None
    assert isinstance(args[-1], tuple)
    assert isinstance(args[-1][1], list)
    assert args[-1][1] == [None]
    assert isinstance(kwargs["pair"], Pair)
    assert kwargs["pair"].right == "static"


def test_equal_python_values_of_different_kinds_are_not_mixed_up():
    values = [1, True, 1.0, 0, False, 0.0, -0.0, "1", (1,), (True,), (1.0,), [1], [True]]
    seen = seen_by(*(call(X, value) for value in values))
    assert [repr(args[1]) for args, _ in seen] == [repr(value) for value in values]


def test_equal_complex_numbers_are_not_mixed_up():
    values = [complex(0.0, 0.0), complex(-0.0, 0.0), complex(0.0, -0.0)]
    assert [repr(args[1]) for args, _ in seen_by(*(call(X, value) for value in values))] == list(map(repr, values))


def test_equal_configurations_with_different_content_are_not_mixed_up():
    @dataclasses.dataclass(frozen=True)
    class Config:
        scale: float
        activation: object = dataclasses.field(default=jnp.sin, compare=False)

    configs = [Config(1), Config(True), Config(1.0), Config(1.0, jnp.tanh)]
    assert len(set(configs)) == 1
    seen = seen_by(*(call(X, config) for config in configs))
    assert [id(args[1]) for args, _ in seen] == [id(config) for config in configs]


def test_equal_sets_with_different_content_are_not_mixed_up():
    values = [frozenset({1}), frozenset({True}), frozenset({1.0})]
    assert [repr(args[1]) for args, _ in seen_by(*(call(X, value) for value in values))] == list(map(repr, values))


def test_positional_and_keyword_arguments_are_not_mixed_up():
    seen = seen_by(call(X, 1), call(X, a=1), call(X, b=1), call(1, X))
    assert [(len(args), sorted(kwargs)) for args, kwargs in seen] == [(2, []), (1, ["a"]), (1, ["b"]), (2, [])]


def test_star_arguments_and_keyword_only(assert_same_tree):
    def f(*xs, scale, power=2, **more):
        return sum(x**power for x in xs) * scale + more.get("shift", 0)

    expected = jax.grad(lambda x: f(x, 2 * x, scale=3.0, shift=x).sum())(X)
    got = jax.grad(lambda x: full(f)(x, 2 * x, scale=3.0, shift=x).sum())(X)
    assert_same_tree(got, expected, atol=1e-6)
    with pytest.raises(TypeError, match="scale"):
        full(f)(X)


def test_integer_and_boolean_arrays_and_keys(assert_same_tree):
    def f(x, index, mask, key):
        return jnp.where(mask, x[index], 0) * jax.random.normal(key, ())

    index, mask = jnp.array([1, 0]), np.array([[True] * 8, [False] * 8])
    expected = jax.grad(lambda x: f(x, index, mask, KEY).sum())(X)
    assert_same_tree(jax.grad(lambda x: full(f)(x, index, mask, KEY).sum())(X), expected)


def test_pytrees_with_none_and_numpy_inputs(assert_same_tree):
    def f(params, batch):
        hidden = jnp.tanh(batch["x"] @ params["w"])
        return hidden if params["b"] is None else hidden + params["b"]

    batch = {"x": np.asarray(X), "mask": None}
    for bias in (None, jnp.ones(8)):
        params = {"w": W, "b": bias}
        expected = jax.grad(lambda p: f(p, batch).sum())(params)
        assert_same_tree(jax.grad(lambda p: full(f)(p, batch).sum())(params), expected, atol=1e-6)


def test_a_string_of_numpy_is_a_string():
    assert seen_by(call(X, np.str_("tanh")))[0][0][1] == "tanh"


def test_no_arrays_at_all():
    np.testing.assert_array_equal(full(lambda n, flag=True: jnp.arange(n) if flag else None)(3), [0, 1, 2])


def test_what_comes_out_keeps_its_structure():
    out = full(lambda x, n: {"x": x, "none": None, "pair": (x, [x] * n)})(X, 2)
    assert jax.tree.structure(out) == jax.tree.structure({"x": 0, "none": None, "pair": (0, [0, 0])})


# ---- what can be wrapped


def test_none_gives_the_object_itself():
    class Anything:
        pass

    for target in (block, Anything, Anything(), staticmethod(block), 3):
        assert remat("none")(target) is target
    assert remat(POLICIES["none"])(block) is block


def test_the_wrapped_function_looks_like_the_function():
    def documented(x: jax.Array, *, flag: bool = False) -> jax.Array:
        """What it does."""
        return x

    wrapped = full(documented)
    assert wrapped is not documented
    assert wrapped.__name__ == "documented"
    assert wrapped.__doc__ == "What it does."
    assert wrapped.__qualname__ == documented.__qualname__
    assert inspect.signature(wrapped) == inspect.signature(documented)


def test_a_policy_is_checked_when_remat_is_called():
    with pytest.raises(PolicyError, match="None is not a policy"):
        remat(None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(PolicyError, match="Did you mean 'full'"):
        remat("fulll")
    with pytest.raises(PolicyError, match="is not a policy"):
        remat(block)  # `@remat` without a policy  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("kind", [staticmethod, classmethod, property])
def test_descriptors_are_refused(kind):
    with pytest.raises(PolicyError, match=f"remat got a {kind.__name__}. Put remat below it.*@{kind.__name__} first"):
        full(kind(block))


@pytest.mark.parametrize("target", [3, "block", None, [block], X])
def test_what_cannot_be_called_is_refused(target):
    with pytest.raises(PolicyError, match=r"which cannot be called. Apply it to a flax module class, to a method, or"):
        full(target)


def test_a_plain_class_is_refused():
    class Plain:
        def __call__(self, x):
            return x

    with pytest.raises(PolicyError, match="class Plain, which is neither a Linen nor an NNX module"):
        full(Plain)


class Layer:
    """A plain class with settings that may change between calls."""

    def __init__(self, scale=1.0):
        self.scale = scale

    @full
    def scaled(self, x, flag=False):
        return jnp.sin(x * self.scale) if flag else x

    @staticmethod
    @full
    def static(x, flag=False):
        return jnp.sin(x) if flag else x

    @classmethod
    @full
    def of_class(cls, x, flag=False):
        assert cls is Layer
        return jnp.sin(x) if flag else x

    @property
    @full
    def as_property(self):
        return jnp.sin(self.scale * X)

    def plain(self, x, flag=False):
        return jnp.sin(x * self.scale) if flag else x

    def __call__(self, x):
        return jnp.sin(x * self.scale)


def test_methods_of_plain_classes():
    layer = Layer()
    for function in (layer.scaled, layer.static, Layer.static, layer.of_class, Layer.of_class, full(layer.plain)):
        np.testing.assert_array_equal(function(X, flag=True), jnp.sin(X))
        assert checkpointed(jax.make_jaxpr(functools.partial(function, flag=True))(X)) == 1
    np.testing.assert_array_equal(layer.as_property, jnp.sin(X))
    np.testing.assert_array_equal(full(layer)(X), jnp.sin(X))
    np.testing.assert_array_equal(full(Layer.of_class)(X, True), jnp.sin(X))


def test_two_objects_of_a_plain_class_are_not_mixed_up():
    one, two = Layer(1.0), Layer(2.0)
    np.testing.assert_allclose(one.scaled(X, True), jnp.sin(X), rtol=1e-6)
    np.testing.assert_allclose(two.scaled(X, True), jnp.sin(2 * X), rtol=1e-6)


def test_a_changed_setting_of_a_plain_object_is_seen():
    layer = Layer(1.0)
    np.testing.assert_allclose(layer.scaled(X, True), jnp.sin(X), rtol=1e-6)
    layer.scale = 2.0
    np.testing.assert_allclose(layer.scaled(X, True), jnp.sin(2 * X), rtol=1e-6)


def test_a_plain_object_may_hold_weights_of_another_trace():
    layer = Layer()

    def loss(scale):
        layer.scale = scale
        return layer.scaled(X, True).sum()

    for scale in (1.0, 2.0):
        expected = jax.grad(lambda scale: jnp.sin(X * scale).sum())(scale)
        np.testing.assert_allclose(jax.grad(loss)(scale), expected, rtol=1e-5)


def test_functions_of_jax_and_partials():
    doubled = full(functools.partial(jnp.multiply, 2.0))
    np.testing.assert_array_equal(doubled(X), 2 * X)
    np.testing.assert_array_equal(full(jax.jit(block))(X, W), jax.jit(block)(X, W))

    @jax.custom_vjp
    def clipped(x):
        return x

    clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -1, 1),))
    np.testing.assert_array_equal(jax.grad(lambda x: 3 * full(clipped)(x).sum())(X), jnp.ones_like(X))


def test_errors_of_the_function_pass_through():
    def broken(x):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        full(broken)(X)

    def type_error(x, flag):
        raise TypeError("of the function")

    with pytest.raises(TypeError, match="of the function"):
        full(type_error)(X, [])


def test_wrapping_twice_is_one_remat_in_another():
    twice = full(full(block))
    assert checkpointed(jax.make_jaxpr(twice)(X, W)) == 2
    np.testing.assert_array_equal(twice(X, W), block(X, W))
