"""Linen classes, modules among the arguments, and the traced program of a wrapped module."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from test_wrap_linen import RNGS, Block, X, assert_unchanged, count_checkpoints, full, stack_of, unchanged

from remat_kit import POLICIES, remat
from remat_kit._errors import PolicyError
from remat_kit._lower import lower

# ---- classes


def test_the_class_keeps_its_names_and_is_not_changed():
    before = Block.__call__
    wrapped = full(Block)
    assert Block.__call__ is before
    assert wrapped is not Block
    assert issubclass(wrapped, Block)
    assert (wrapped.__name__, wrapped.__qualname__, wrapped.__module__, wrapped.__doc__) == (
        Block.__name__, Block.__qualname__, Block.__module__, Block.__doc__
    )  # fmt: skip
    assert repr(wrapped(width=5)) == repr(Block(width=5))
    assert isinstance(wrapped(), Block)


def test_dataclass_fields(assert_same_tree):
    def build(wrap):
        @wrap
        class Fields(nn.Module, kw_only=True):
            width: int
            activation: object = jnp.sin
            inner: nn.Module | None = None
            sizes: tuple[int, ...] = (4, 4)
            names: dict = None  # pyright: ignore[reportAssignmentType]

            @nn.compact
            def __call__(self, x, train=False):
                for size in self.sizes:
                    x = self.activation(nn.Dense(size)(x))
                return nn.Dense(self.width)(x if self.inner is None else self.inner(x))

        class Outer(nn.Module):
            @nn.compact
            def __call__(self, x, train):
                shared = nn.Dense(4, name="shared")
                x = Fields(width=4, inner=shared, names={"a": 1}, name="first")(x)
                return Fields(width=4, activation=jnp.tanh)(x) + shared(x)

        return Outer()

    got = assert_unchanged(assert_same_tree, build)
    assert set(got["init"]["params"]) == {"first", "shared", "Fields_0"}


@pytest.mark.parametrize("wrapped", ["base", "subclass", "both"])
def test_subclasses_call_super(wrapped, assert_same_tree):
    def build(wrap):
        @(wrap if wrapped != "subclass" else unchanged)
        class Base(nn.Module):
            width: int = 4

            @nn.compact
            def __call__(self, x, train=False):
                return jnp.tanh(nn.Dense(self.width)(x))

        @(wrap if wrapped != "base" else unchanged)
        class Derived(Base):
            scale: float = 2.0

            def __call__(self, x, train=False):
                return super().__call__(x, train=train) * self.scale

        return stack_of(Derived)

    got = assert_unchanged(assert_same_tree, build)
    assert set(got["init"]["params"]) == {"Derived_0", "Derived_1", "last"}
    assert count_checkpoints(build(full), True) == (6 if wrapped == "both" else 3)


def test_what_is_applied_to_a_class_with_no_call():
    class Encoder(nn.Module):
        def encode(self, x):
            return x

    with pytest.raises(PolicyError, match=r"Encoder has no __call__ to rematerialize. Apply remat to the method that"):
        full(Encoder)


def test_none_is_the_class_itself():
    assert remat("none")(Block) is Block


# ---- modules among the arguments


def _head(wrap):
    class Head(nn.Module):
        @nn.compact
        def __call__(self, x, other=None, flag=True):
            return nn.Dense(4)(jnp.tanh(other(x)) if flag else x)

    return wrap(Head)


@pytest.mark.parametrize("how", ["positional", "keyword", "in a list", "from setup", "the same twice"])
def test_a_module_as_another_argument(how, assert_same_tree):
    def build(wrap):
        if how == "from setup":

            class Outer(nn.Module):
                def setup(self):
                    self.dense, self.head = nn.Dense(4), _head(wrap)()

                def __call__(self, x, train):
                    return self.head(x, other=self.dense, flag=True) + self.dense(x)

            return Outer()

        class Head(nn.Module):
            @nn.compact
            def __call__(self, x, others):
                return nn.Dense(4)(jnp.tanh(others[1](others[0](x))))

        class Inside(nn.Module):
            @nn.compact
            def __call__(self, x, train):
                dense = nn.Dense(4)
                if how == "positional":
                    return _head(wrap)()(x, dense, True)
                if how == "keyword":
                    return _head(wrap)()(x, flag=True, other=dense)
                return wrap(Head)()(x, [dense, dense if how == "the same twice" else nn.Dense(4)])

        return Inside()

    assert_unchanged(assert_same_tree, build)


@pytest.mark.parametrize("how", ["second", "keyword", "in a list", "first by keyword"])
def test_a_function_with_a_module_that_is_not_first(how, assert_same_tree):
    calls = {
        "second": lambda wrap, module, x: wrap(lambda x, m: jnp.tanh(m(x)))(x, module),
        "keyword": lambda wrap, module, x: wrap(lambda x, m: jnp.tanh(m(x)))(x, m=module),
        "in a list": lambda wrap, module, x: wrap(lambda x, ms: jnp.tanh(ms[0](x)))(x, [module]),
        "first by keyword": lambda wrap, module, x: wrap(lambda m, x: jnp.tanh(m(x)))(m=module, x=x),
    }

    def build(wrap):
        class Inside(nn.Module):
            @nn.compact
            def __call__(self, x, train):
                return calls[how](wrap, nn.Dense(4), x)

        return Inside()

    assert_unchanged(assert_same_tree, build)


# ---- the program


@pytest.mark.parametrize("policy", ["full", "dots_saveable", "selective_attention", "minimal_offloaded"])
def test_the_program_is_that_of_nn_remat(policy, remat3, assert_same_program):
    class Plain(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            return nn.Dense(4)(jnp.tanh(nn.Dropout(0.5, deterministic=not train)(nn.Dense(4)(x))))

    def gradient(block):
        class Stack(nn.Module):
            @nn.compact
            def __call__(self, x):
                return block(name="b")(block(name="a")(x, True), False).sum()

        params = Stack().init(RNGS, X)
        return jax.make_jaxpr(jax.grad(lambda p, x: Stack().apply(p, x, rngs=RNGS), (0, 1)))(params, X)

    by_hand = functools.partial(nn.remat, policy=lower(POLICIES[policy]), static_argnums=(2,))
    assert_same_program(gradient(remat(policy)(Plain)), gradient(by_hand(Plain)))


def test_the_program_of_a_method_is_that_of_nn_remat(remat3, assert_same_program):
    def gradient(wrap):
        class Plain(nn.Module):
            @wrap
            @nn.compact
            def __call__(self, x):
                return nn.Dense(4)(jnp.tanh(nn.Dense(4)(x)))

        params = Plain().init(RNGS, X)
        return jax.make_jaxpr(jax.grad(lambda p, x: Plain().apply(p, x).sum(), (0, 1)))(params, X)

    assert_same_program(gradient(full), gradient(nn.remat))


def test_batch_statistics_are_updated_once(assert_same_tree):
    def build(wrap):
        class Normed(nn.Module):
            @nn.compact
            def __call__(self, x, train=False):
                x = nn.BatchNorm(use_running_average=not train, momentum=0.5)(nn.Dense(4)(x))
                return nn.Dense(4)(jnp.tanh(x))

        return stack_of(wrap(Normed))

    # The gradient of a normalized value is a difference of large terms.
    got = assert_unchanged(assert_same_tree, build, atol=1e-5)
    assert set(got["changed"]["batch_stats"]) == {"Normed_0", "Normed_1", "last"}


def test_all_intermediates_can_be_captured(assert_same_tree):
    variables = stack_of(Block).init(RNGS, X, False)
    expected, got = (
        stack_of(wrap(Block)).apply(
            variables, X, False, capture_intermediates=True, mutable=["intermediates", "counters"]
        )
        for wrap in (unchanged, full)
    )
    assert_same_tree(got, expected, atol=1e-6)
    # 3 blocks of 2 dense layers, a dropout and the block itself, 3 sown values, and the whole.
    assert len(jax.tree.leaves(got[1]["intermediates"])) == 3 * 4 + 3 + 1
