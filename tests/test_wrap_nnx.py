"""`remat` on NNX modules: state, random streams, statistics and captured values stay what they were."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import stable_id
from flax import nnx

from remat_kit import POLICIES, remat
from remat_kit._errors import PolicyError
from remat_kit._jaxpr import walk
from remat_kit._lower import lower

pytestmark = pytest.mark.usefixtures("quick_compile")

full = remat("full")
X = jax.random.normal(jax.random.key(9), (6, 4))


def unchanged(target):
    return target


def make(wrap_class=unchanged, wrap_method=unchanged, base=nnx.Module):
    """A block with dropout, batch statistics and a flag, the class or its method decorated."""

    class Block(base):
        """What it does."""

        def __init__(self, rngs):
            self.up = nnx.Linear(4, 4, rngs=rngs)
            self.norm = nnx.BatchNorm(4, rngs=rngs)
            self.drop = nnx.Dropout(0.5, rngs=rngs)
            self.down = nnx.Linear(4, 4, rngs=rngs)

        @wrap_method
        def __call__(self, x, flag=False, *, scale=1.0):
            return self.forward(x) * scale if flag else x

        def forward(self, x):
            return self.down(jnp.tanh(self.drop(self.norm(self.up(x)))))

        @wrap_method
        def decorated(self, x, flag=False):
            return self.forward(x) if flag else x

    return wrap_class(Block)


CALLS = {
    "class": (make(full), lambda block, x: block(x, True)),
    "class, keyword": (make(full), lambda block, x: block(x, flag=True)),
    "class, keyword-only": (make(full), lambda block, x: block(x=x, scale=1.0, flag=True)),
    "method decorator": (make(wrap_method=full), lambda block, x: block.decorated(x, flag=True)),
    "__call__ decorator": (make(wrap_method=full), lambda block, x: block(x, flag=True)),
    "bound method": (make(), lambda block, x: full(block.forward)(x)),
    "bound __call__": (make(), lambda block, x: full(block.__call__)(x, flag=True)),
    "instance": (make(), lambda block, x: full(block)(x, flag=True)),
    "function, first": (make(), lambda block, x: full(lambda m, x: m.forward(x))(block, x)),
    "function, second": (make(), lambda block, x: full(lambda x, m: m.forward(x))(x, block)),
    "function, keyword": (make(), lambda block, x: full(lambda x, m: m.forward(x))(x, m=block)),
    "function, in a list": (make(), lambda block, x: full(lambda x, ms: ms[0]["a"].forward(x))(x, [{"a": block}])),
    "function, twice": (make(), lambda block, x: full(lambda x, a, b: b.forward(x))(x, block, block)),
    "function, part": (make(), lambda block, x: _by_parts(block, x)),
    "nested": (make(full), lambda block, x: full(lambda m, x: m(x, True))(block, x)),
}


def _by_parts(block, x):
    hidden = full(lambda x, up, norm, drop: jnp.tanh(drop(norm(up(x)))))(x, block.up, norm=block.norm, drop=block.drop)
    return full(block.down)(hidden)


def train(cls, call, steps=2):
    """Losses, gradients and the whole state (counts of random streams too) of some calls."""
    block = cls(nnx.Rngs(0))
    step = nnx.jit(nnx.value_and_grad(lambda block: (call(block, X) ** 2).sum()))
    seen = [step(block) for _ in range(steps)]
    return [jax.tree.leaves(seen), jax.tree.leaves(nnx.state(block))]


@functools.cache
def expected_training():
    return train(make(), lambda block, x: block(x, True))


@pytest.mark.parametrize("how", CALLS)
def test_losses_gradients_and_state(how, assert_same_tree):
    cls, call = CALLS[how]
    # Not rematerialized, the same operations; a normalization's gradient is a difference of large terms.
    assert_same_tree(train(cls, call), expected_training(), atol=1e-5)


@pytest.mark.parametrize("how", CALLS)
def test_each_way_rematerializes(how):
    cls, call = CALLS[how]
    graph, state = nnx.split(cls(nnx.Rngs(0)))

    def run(state, x):
        return call(nnx.merge(graph, state), x)

    remats = [
        equation
        for equation in walk(jax.make_jaxpr(run)(state, X))
        if equation.primitive in ("checkpoint", "remat", "remat2", "RematTraced")
    ]
    assert len(remats) == (2 if how in ("function, part", "nested") else 1)


def test_a_flag_that_is_off():
    block = make(full)(nnx.Rngs(0))
    np.testing.assert_array_equal(block(X), X)
    np.testing.assert_array_equal(block(X, flag=False), X)


@pytest.mark.parametrize("flag", [True, "tanh", None, jnp.sin, [1], 2.0, 3, nnx.relu], ids=stable_id)
def test_flags_arrive_as_they_are(flag):
    seen = []

    class Flagged(nnx.Module):
        def __call__(self, x, flag, *, other):
            seen.append((flag, other))
            return x

    full(Flagged)()(X, flag, other=flag)
    assert seen == [(flag, flag)]
    assert [type(value) for value in seen[0]] == [type(flag)] * 2


def test_a_changed_attribute_of_a_module_is_seen():
    class Scaled(nnx.Module):
        def __init__(self):
            self.scale = 1.0

        @full
        def __call__(self, x):
            return x * self.scale

    module = Scaled()
    np.testing.assert_array_equal(module(X), X)
    module.scale = 2.0
    np.testing.assert_array_equal(module(X), 2 * X)


# ---- random streams


@pytest.mark.parametrize("how", ["positional", "keyword", "in a dict"])
def test_rngs_as_an_argument(how, assert_same_tree):
    calls = {
        "positional": lambda f, rngs, x: f(rngs, x),
        "keyword": lambda f, rngs, x: f(x=x, rngs=rngs),
        "in a dict": lambda f, rngs, x: f({"rngs": rngs}, x),
    }

    def noisy(rngs, x):
        rngs = rngs["rngs"] if isinstance(rngs, dict) else rngs
        return jnp.sin(nnx.Dropout(0.5)(x, rngs=rngs)) * jax.random.uniform(rngs.params())

    results = []
    for wrap in (unchanged, full):
        rngs = nnx.Rngs(params=1, dropout=2)
        gradient = nnx.grad(lambda x, rngs, wrap=wrap: calls[how](wrap(noisy), rngs, x).sum())
        grads = [gradient(X, rngs) for _ in range(2)]
        results.append((grads, jax.tree.leaves(nnx.state(rngs))))
        # Each call draws once; the recomputation draws the same numbers and does not count.
        assert (int(rngs.params.count[...]), int(rngs.dropout.count[...])) == (2, 2)
        assert not np.array_equal(grads[0], grads[1])
    assert_same_tree(results[1], results[0], atol=1e-6)


def test_the_recomputed_mask_is_the_one_of_forward():
    class Masked(nnx.Module):
        def __init__(self, rngs):
            self.drop = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return jnp.sin(self.drop(x))

    module = full(Masked)(nnx.Rngs(3))
    out, gradient = nnx.value_and_grad(lambda x, m: m(x).sum(), argnums=0)(jnp.ones((64, 64)), module)
    # d sin(2x) = 2 cos(2) where the mask kept x, 0 elsewhere, so both tell how many were kept.
    kept = round(float(out) / np.sin(2.0))
    assert 0 < kept < 64 * 64
    assert int((gradient != 0).sum()) == kept


# ---- transformations


def layers_of(cls):
    @nnx.vmap(in_axes=0, out_axes=0)
    def create(key):
        return cls(nnx.Rngs(key))

    return create(jax.random.split(jax.random.key(0), 3))


@pytest.mark.parametrize("place", ["class", "method", "around the body's call"])
def test_scan_over_layers(place, assert_same_tree):
    def run(wrap):
        cls = make(wrap_class=wrap) if place == "class" else make(wrap_method=wrap) if place == "method" else make()
        layers = layers_of(cls)

        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def forward(layer, x):
            return wrap(layer.forward)(x) if place.startswith("around") else layer(x, flag=True)

        step = nnx.jit(nnx.value_and_grad(lambda layers: (forward(layers, X) ** 2).sum()))
        seen = [step(layers) for _ in range(2)]
        return jax.tree.leaves(seen), jax.tree.leaves(nnx.state(layers))

    assert_same_tree(run(full), run(unchanged), atol=1e-4)


def test_vmap_over_modules(assert_same_tree):
    def run(wrap):
        layers = layers_of(make(wrap))
        forward = nnx.vmap(lambda layer, x: layer(x, flag=True), in_axes=(0, None))
        seen = nnx.jit(nnx.value_and_grad(lambda layers: (forward(layers, X) ** 2).sum()))(layers)
        return jax.tree.leaves(seen), jax.tree.leaves(nnx.state(layers))

    assert_same_tree(run(full), run(unchanged), atol=1e-5)


@pytest.mark.parametrize("policy", ["full", "dots_saveable"])
def test_a_jitted_step_with_an_optimizer(policy, assert_same_tree):
    def run(wrap):
        model = make(wrap)(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
        traces = []

        @nnx.jit
        def step(model, optimizer, x):
            traces.append(1)
            loss, grads = nnx.value_and_grad(lambda model: (model(x, flag=True) ** 2).sum())(model)
            optimizer.update(model, grads)
            return loss

        before = jax.tree.leaves(nnx.state(model, nnx.Param))
        losses = [step(model, optimizer, X) for _ in range(3)]
        assert len(traces) == 1
        assert not np.array_equal(before[0], jax.tree.leaves(nnx.state(model, nnx.Param))[0])
        return losses, jax.tree.leaves(nnx.state(model)), jax.tree.leaves(nnx.state(optimizer))

    assert_same_tree(run(remat(policy)), run(unchanged), atol=1e-4)


def test_the_functional_way_of_split_and_merge(assert_same_tree):
    graph, state = nnx.split(nnx.Linear(4, 4, rngs=nnx.Rngs(0)))

    def loss(graph, state, x):
        return jnp.tanh(nnx.merge(graph, state)(x)).sum()

    got = jax.grad(lambda state: full(loss)(graph, state, X))(state)
    assert_same_tree(got, jax.grad(lambda state: loss(graph, state, X))(state), atol=1e-6)


# ---- classes


def test_the_class_keeps_its_names_and_is_not_changed():
    plain = make()
    before = plain.__call__
    wrapped = full(plain)
    assert plain.__call__ is before
    assert wrapped is not plain
    assert (wrapped.__name__, wrapped.__qualname__, wrapped.__module__, wrapped.__doc__) == (
        "Block", plain.__qualname__, __name__, "What it does."
    )  # fmt: skip
    assert isinstance(wrapped(nnx.Rngs(0)), plain)
    assert isinstance(wrapped(nnx.Rngs(0)), nnx.Module)
    assert nnx.state(wrapped(nnx.Rngs(0))).keys() == nnx.state(plain(nnx.Rngs(0))).keys()
    assert remat("none")(plain) is plain


def test_subclasses_call_super(assert_same_tree):
    def derive(base):
        class Derived(base):
            def __call__(self, x, flag=False):
                return super().__call__(x, flag=True)

        return Derived

    call = lambda block, x: block(x)  # noqa: E731
    for cls in (derive(make(full)), full(derive(make())), full(derive(make(full)))):
        assert_same_tree(train(cls, call), expected_training(), atol=1e-5)


def test_a_class_that_is_no_pytree_stays_none():
    def define(wrap):
        class Holder(nnx.Module, pytree=False):
            def __init__(self, rngs):
                self.layers = [nnx.Linear(4, 4, rngs=rngs)]  # only such a class may hold a plain list

            def __call__(self, x):
                return jnp.tanh(self.layers[0](x))

        return wrap(Holder)

    np.testing.assert_allclose(define(full)(nnx.Rngs(0))(X), define(unchanged)(nnx.Rngs(0))(X), atol=1e-6)


def test_a_class_whose_call_is_already_transformed():
    def define(wrap):
        class Jitted(nnx.Module):
            def __init__(self, rngs):
                self.linear = nnx.Linear(4, 4, rngs=rngs)

            @nnx.jit
            def __call__(self, x):
                return jnp.tanh(self.linear(x))

        return wrap(Jitted)

    np.testing.assert_allclose(define(full)(nnx.Rngs(0))(X), define(unchanged)(nnx.Rngs(0))(X), atol=1e-6)


def test_a_class_with_no_call():
    class Encoder(nnx.Module):
        def encode(self, x):
            return x

    with pytest.raises(PolicyError, match=r"Encoder has no __call__ to rematerialize. Apply remat to the method that"):
        full(Encoder)


# ---- the program


@pytest.mark.parametrize("policy", ["full", "dots_saveable", "selective_attention", "minimal_offloaded"])
def test_the_program_is_that_of_nnx_remat(policy, remat3, assert_same_program):
    def gradient(wrap):
        class Plain(nnx.Module):
            def __init__(self, rngs):
                self.up, self.down = nnx.Linear(4, 4, rngs=rngs), nnx.Linear(4, 4, rngs=rngs)
                self.drop = nnx.Dropout(0.5, rngs=rngs)

            @wrap
            def __call__(self, x):
                return self.down(jnp.tanh(self.drop(self.up(x))))

        graph, state = nnx.split(Plain(nnx.Rngs(0)))

        def run(state, x):
            return nnx.grad(lambda module, x: module(module(x)).sum(), argnums=(0, 1))(nnx.merge(graph, state), x)

        return jax.make_jaxpr(run)(state, X)

    by_hand = functools.partial(nnx.remat, policy=lower(POLICIES[policy]), prevent_cse=True)
    assert_same_program(gradient(remat(policy)), gradient(by_hand))


def test_the_program_of_a_jitted_step_recomputes(remat3):
    graph, state = nnx.split(make(full)(nnx.Rngs(0)))

    @jax.jit
    def run(state, x):
        return nnx.grad(lambda model: (model(x, flag=True) ** 2).sum())(nnx.merge(graph, state))

    dots = [equation for equation in walk(jax.make_jaxpr(run)(state, X)) if equation.primitive == "dot_general"]
    # Forward 2; recomputed 1: the last matmul's output is not needed inside the block; backward 3: both weights and
    # the hidden value, not the input.
    assert [sum(e.phase == phase for e in dots) for phase in ("forward", "recompute", "backward")] == [2, 1, 3]
