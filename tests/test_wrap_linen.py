"""`remat` on Linen modules: names, parameters, initial values, random streams and collections stay what they were."""

import enum

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import stable_id

from remat_kit import remat
from remat_kit._jaxpr import walk

pytestmark = pytest.mark.usefixtures("quick_compile")

full = remat("full")
X = jax.random.normal(jax.random.key(9), (3, 4))
RNGS = {"params": jax.random.key(0), "dropout": jax.random.key(1)}


def unchanged(target):
    return target


class Kind(enum.Enum):
    TANH = "tanh"
    SIN = "sin"


class Block(nn.Module):
    """A block with dropout, a counter and a sown value."""

    width: int = 4
    activation: object = jnp.tanh

    @nn.compact
    def __call__(self, x, train=False, kind=Kind.TANH):
        calls = self.variable("counters", "calls", lambda: jnp.zeros((), jnp.int32))
        if not self.is_initializing():
            calls.value += 1
        x = nn.Dense(self.width)(x)
        self.sow("intermediates", "hidden", x)
        x = nn.Dropout(0.5, deterministic=not train)(x)
        x = jnp.sin(x) if kind is Kind.SIN else self.activation(x)
        return nn.Dense(self.width)(x)


class SetupBlock(nn.Module):
    width: int = 4

    def setup(self):
        self.up = nn.Dense(self.width)
        self.down = nn.Dense(self.width)
        self.drop = nn.Dropout(0.5)

    def __call__(self, x, train=False):
        return self.down(jnp.tanh(self.drop(self.up(x), deterministic=not train)))


def stack_of(block, **keywords):
    """Two auto-named blocks and a named one."""

    class Stack(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            for name in (None, None, "last"):
                x = block(name=name)(x, train=train, **keywords)
            return x

    return Stack()


def one(block, *args, **kwargs):
    """A module that calls `block` once with these arguments after its input."""

    class One(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            return block()(x, *args, **kwargs)

    return One()


def everything(module, train=True):
    """All that a module gives: initial variables, loss, changed collections and gradients, twice."""
    variables = module.init(RNGS, X, train)
    params = variables["params"]
    others = {name: values for name, values in variables.items() if name not in ("params", "intermediates")}

    def loss(params, x, others):
        out, changed = module.apply(
            {"params": params, **others}, x, train, rngs={"dropout": jax.random.key(5)},
            mutable=["counters", "intermediates", "batch_stats"],
        )  # fmt: skip
        return (out**2).sum(), changed

    run = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
    (value, changed), grads = run(params, X, others)
    again = run(params, X, {**others, **{k: v for k, v in changed.items() if k != "intermediates"}})
    return {"init": variables, "value": value, "changed": changed, "grads": grads, "again": again}


def assert_unchanged(assert_same_tree, build, policy="full", atol=1e-6, **options):
    """`build(decorator)` gives a module; it must do the same under `policy` as undecorated."""
    expected, got = everything(build(unchanged), **options), everything(build(remat(policy)), **options)
    assert_same_tree(got["init"], expected["init"])  # bitwise: the same keys and the same draws
    assert_same_tree(got, expected, atol=atol)
    return got


def count_checkpoints(module, *args):
    variables = jax.eval_shape(lambda: module.init(RNGS, X, *args))
    jaxpr = jax.make_jaxpr(lambda v: module.apply(v, X, *args, rngs=RNGS, mutable=["counters", "intermediates"]))
    return sum(
        equation.primitive in ("checkpoint", "remat", "remat2", "RematTraced") for equation in walk(jaxpr(variables))
    )


@pytest.mark.parametrize(
    ("policy", "train"), [("full", True), ("full", False), ("dots_saveable", True), ("everything_saveable", True)]
)
def test_compact_modules(policy, train, assert_same_tree):
    got = assert_unchanged(assert_same_tree, lambda wrap: stack_of(wrap(Block)), policy, train=train)
    assert set(got["init"]["params"]) == {"Block_0", "Block_1", "last"}
    assert set(got["init"]["params"]["last"]) == {"Dense_0", "Dense_1"}
    # Forward alone counts: the recomputation in backward must not count once more.
    assert [int(count) for count in jax.tree.leaves(got["changed"]["counters"])] == [1, 1, 1]
    assert [int(count) for count in jax.tree.leaves(got["again"][0][1]["counters"])] == [2, 2, 2]
    assert len(jax.tree.leaves(got["changed"]["intermediates"])) == 3


def test_the_block_is_rematerialized():
    assert count_checkpoints(stack_of(Block), True) == 0
    assert count_checkpoints(stack_of(full(Block)), True) == 3
    assert count_checkpoints(stack_of(full(SetupBlock)), True) == 3


@pytest.mark.parametrize("train", [True, False])
def test_setup_modules(train, assert_same_tree):
    got = assert_unchanged(assert_same_tree, lambda wrap: stack_of(wrap(SetupBlock)), train=train)
    assert set(got["init"]["params"]) == {"SetupBlock_0", "SetupBlock_1", "last"}
    assert set(got["init"]["params"]["last"]) == {"up", "down"}


def test_dropout_is_not_the_same_in_two_blocks():
    class Two(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            drop = full(nn.Dropout)
            return drop(0.5, deterministic=False)(x) - drop(0.5, deterministic=False)(x)

    out = Two().apply({}, jnp.ones((8, 8)), True, rngs=RNGS)
    assert float(jnp.abs(out).sum()) > 0


@pytest.mark.parametrize("style", ["positional", "keyword"])
@pytest.mark.parametrize(
    "flag",
    [True, False, "tanh", None, Kind.SIN, jnp.sin, [1, 2], {"a": 1}, 2.0, 3, object, (1, (None, "x"))],
    ids=stable_id,
)
def test_flags_arrive_as_they_are(style, flag, assert_same_tree):
    seen = []

    class Flagged(nn.Module):
        @nn.compact
        def __call__(self, x, flag=0, *, other=None):
            seen.append(flag)
            scale = flag if isinstance(flag, float) else 1.0
            return nn.Dense(4)(jnp.sin(x) if flag else x) * scale

    arguments = ((flag,), {}) if style == "positional" else ((), {"flag": flag, "other": "x"})
    modules = [one(wrap(Flagged), *arguments[0], **arguments[1]) for wrap in (unchanged, full)]
    expected, got = (module.init_with_output(RNGS, X, True) for module in modules)
    assert_same_tree(got, expected, atol=1e-6)
    assert len(seen) == 2
    assert all(type(value) is type(flag) and value == flag for value in seen)


def test_a_numpy_number_keeps_its_value(assert_same_tree):
    # To JAX it is an array: it may be traced.
    modules = [one(wrap(_scaled_class()), np.float64(2)) for wrap in (unchanged, full)]
    expected, got = (module.init_with_output(RNGS, X, True) for module in modules)
    assert_same_tree(got, expected, atol=1e-6)


def _scaled_class():
    class Scaled(nn.Module):
        @nn.compact
        def __call__(self, x, scale):
            return nn.Dense(4)(x) * scale

    return Scaled


def test_equal_flags_of_different_kinds_are_not_mixed_up():
    seen = []

    class Flagged(nn.Module):
        @nn.compact
        def __call__(self, x, flag):
            seen.append(flag)
            return x

    wrapped = full(Flagged)
    for flag in (1, True, 1.0):
        wrapped().apply({}, X, flag)
    assert [type(flag) for flag in seen] == [int, bool, float]


@pytest.mark.parametrize("above", [True, False], ids=["above compact", "below compact"])
@pytest.mark.parametrize("train", [True, False])
def test_decorated_methods(above, train, assert_same_tree):
    def build(wrap):
        def call(self, x, train=False):
            calls = self.variable("counters", "calls", lambda: jnp.zeros((), jnp.int32))
            calls.value += 1
            x = nn.Dropout(0.5, deterministic=not train)(nn.Dense(4)(x))
            self.sow("intermediates", "hidden", x)
            return nn.Dense(4)(jnp.tanh(x))

        call.__name__ = "__call__"

        class Decorated(nn.Module):
            __call__ = wrap(nn.compact(call)) if above else nn.compact(wrap(call))

        return stack_of(Decorated)

    got = assert_unchanged(assert_same_tree, build, train=train)
    assert set(got["init"]["params"]) == {"Decorated_0", "Decorated_1", "last"}
    assert count_checkpoints(build(full), train) == 3


def test_a_decorated_method_that_is_not_call(assert_same_tree):
    def build(wrap):
        class Parts(nn.Module):
            def setup(self):
                self.up, self.down = nn.Dense(8), nn.Dense(4)

            @wrap
            def mlp(self, x, flag=False):
                return self.down(jnp.tanh(self.up(x))) if flag else x

            def __call__(self, x, train):
                return self.mlp(x, flag=True) + self.mlp(x)

        return Parts()

    assert_unchanged(assert_same_tree, build)
    assert count_checkpoints(build(full), True) == 2


def test_functions_and_instances_inside_compact(assert_same_tree):
    def build(wrap):
        class Inside(nn.Module):
            @nn.compact
            def __call__(self, x, train):
                dense = nn.Dense(4)
                x = wrap(lambda module, x, scale: jnp.tanh(module(x)) * scale)(dense, x, scale=2.0)
                x = wrap(dense.__call__)(x)
                return wrap(nn.Dense(4))(x)

        return Inside()

    assert_unchanged(assert_same_tree, build)
    assert count_checkpoints(build(full), True) == 3


# ---- scan, jit and nested remat


@pytest.mark.parametrize("place", ["scan of remat", "remat inside the body", "method"])
def test_scan(place, assert_same_tree):
    def build(wrap):
        class Layer(nn.Module):
            @nn.compact
            def __call__(self, x, train=False):
                inner = wrap(Block) if place == "remat inside the body" else Block
                return inner()(x, train=train), None

        if place == "scan of remat":
            Layer = wrap(Layer)
        elif place == "method":
            Layer.__call__ = wrap(Layer.__call__)

        class Stack(nn.Module):
            @nn.compact
            def __call__(self, x, train):
                scanned = nn.scan(
                    Layer,
                    variable_axes={"params": 0, "counters": 0, "intermediates": 0},
                    split_rngs={"params": True, "dropout": True},
                    in_axes=nn.broadcast,
                    length=3,
                )
                return scanned()(x, train)[0]

        return Stack()

    got = assert_unchanged(assert_same_tree, build)
    # flax names a scanned class Scan and its name, which is that of the class before remat.
    assert set(got["init"]["params"]) == {"ScanLayer_0"}
    kernel = got["init"]["params"]["ScanLayer_0"]["Block_0"]["Dense_0"]["kernel"]
    assert kernel.shape == (3, 4, 4)
    assert not np.array_equal(kernel[0], kernel[1])
    assert count_checkpoints(build(full), True) == 1


@pytest.mark.parametrize("order", ["jit of remat", "remat of jit", "jit on the method"])
def test_jit(order, assert_same_tree):
    def build(wrap):
        if order == "jit on the method":

            class Jitted(nn.Module):
                @nn.jit
                @nn.compact
                def __call__(self, x, train=False):
                    return nn.Dense(4)(jnp.tanh(nn.Dense(4)(x)))

            return stack_of(wrap(Jitted))

        class Plain(nn.Module):
            @nn.compact
            def __call__(self, x, train=False):
                return nn.Dense(4)(jnp.tanh(nn.Dense(4)(x)))

        return stack_of(wrap(nn.jit(Plain)) if order == "remat of jit" else nn.jit(wrap(Plain)))

    assert_unchanged(assert_same_tree, build)


def test_a_jitted_step_compiles_once():
    module = stack_of(full(Block))
    variables = module.init(RNGS, X, True)
    traces = []

    @jax.jit
    def step(params, counters):
        traces.append(1)

        def loss(params):
            out, _ = module.apply(
                {"params": params, "counters": counters}, X, train=True, rngs=RNGS, mutable=["counters"]
            )
            return out.sum()

        return jax.grad(loss)(params)

    for _ in range(3):
        step(variables["params"], variables["counters"])
    assert len(traces) == 1
    assert step._cache_size() == 1


def test_remat_in_remat(assert_same_tree):
    def build(wrap):
        @wrap
        class Outer(nn.Module):
            @nn.compact
            def __call__(self, x, train=False):
                return nn.Dense(4)(wrap(Block)()(x, train=train))

        return stack_of(Outer)

    got = assert_unchanged(assert_same_tree, build)
    assert set(got["init"]["params"]["Outer_0"]) == {"Block_0", "Dense_0"}
    assert count_checkpoints(build(full), True) == 6


def test_share_scope(assert_same_tree):
    def build(wrap):
        class Outer(nn.Module):
            def setup(self):
                self.inner = wrap(SetupBlock)()
                nn.share_scope(self, self.inner)

            def __call__(self, x, train):
                return self.inner(x, train=train)

        return Outer()

    got = assert_unchanged(assert_same_tree, build)
    assert set(got["init"]["params"]) == {"up", "down"}
