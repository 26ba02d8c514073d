"""enable_remat on NNX and Linen models and functions: what is matched, what stays, what is refused, what undoes it."""

import functools

import jax
import jax.numpy as jnp
import pytest
from enabled import checkpoints, recomputed
from flax import linen as nn
from flax import nnx

from remat_kit import disable_remat, enable_remat, remat, save
from remat_kit._errors import PolicyError, RematKitError
from remat_kit._jaxpr import count_work

KEY = jax.random.key(0)
X = jax.random.normal(KEY, (4, 8))


class Mlp(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)
        self.norm, self.dropout = nnx.BatchNorm(8, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x, mask=None, *, scale=1.0):
        assert mask is None or mask.ndim == 1
        return self.norm(x + scale * self.dropout(self.down(jnp.tanh(self.up(x)))))


class Stack(nnx.Module):
    def __init__(self, rngs, block=Mlp):
        self.layers = nnx.List([block(rngs) for _ in range(3)])
        self.head = nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x, mask=None, scale=0.5)
        return self.head(x)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, train=False, *, mask=None):
        assert mask is None
        y = nn.Dropout(0.5, deterministic=not train)(jnp.tanh(nn.Dense(16)(x)))
        return nn.BatchNorm(use_running_average=not train)(x + nn.Dense(8)(y))


class Net(nn.Module):
    block: type = Block
    depth: int = 3

    @nn.compact
    def __call__(self, x, train=False):
        for _ in range(self.depth):
            x = self.block()(x, train=train, mask=None)
        return nn.Dense(2)(x)

    def twice(self, x):
        return 2 * x


# ---- NNX


def test_nnx_in_place_and_back(assert_same_tree):
    model = Stack(nnx.Rngs(0))
    expected_graph, expected = nnx.split(model)

    @nnx.jit
    def step(model):
        loss, grads = nnx.value_and_grad(lambda model: (model(X) ** 2).sum())(model)
        return loss, nnx.state(grads)

    results = step(nnx.clone(model)), step(enable_remat(nnx.clone(model), "full", "Mlp"))
    assert_same_tree(results[1], results[0], atol=1e-5)

    enable_remat(model, "full", "layers.*")
    assert [type(layer).__name__ for layer in model.layers] == ["Mlp"] * 3
    assert all(isinstance(layer, Mlp) and type(layer) is not Mlp for layer in model.layers)
    assert type(model.head) is nnx.Linear
    assert_same_tree(nnx.state(model), expected)
    assert disable_remat(model) is model
    assert nnx.graphdef(model) == expected_graph
    assert disable_remat(model) is model  # nothing to undo


def test_nnx_state_and_random_streams_advance_alike(assert_same_tree):
    states = []
    for switch in (lambda model: model, enable_remat):
        model = switch(Stack(nnx.Rngs(0)))
        first = nnx.jit(lambda model: model(X))(model)
        states.append((first, nnx.jit(lambda model: model(X))(model), nnx.state(model)))
    assert_same_tree(states[1], states[0], atol=1e-6)


def test_nnx_stacked_modules_under_scan():
    class Scanned(nnx.Module):
        def __init__(self):
            make = nnx.split_rngs(splits=3)(nnx.vmap(Plain))
            self.layers = make(nnx.Rngs(0))

        def __call__(self, x):
            return nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)

    class Plain(nnx.Module):
        def __init__(self, rngs):
            self.up, self.down = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)

        def __call__(self, x):
            return x + self.down(jnp.tanh(self.up(x)))

    model = enable_remat(Scanned())  # found by itself
    graphdef, state = nnx.split(model)
    assert checkpoints(lambda state: nnx.merge(graphdef, state)(X), state) == 3  # in a loop of three turns


def test_nnx_refusals_leave_the_model_alone():
    model = Stack(nnx.Rngs(0))
    with pytest.raises(
        RematKitError, match=r"no module of Stack fits where='Mlpp'. Did you mean 'Mlp'\?.*Mlp ×3 \(layers/0, ...\)"
    ):
        enable_remat(model, "full", "Mlpp")
    with pytest.raises(RematKitError, match="Linear has no modules inside"):
        enable_remat(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
    enable_remat(model, "full", "layers.0")
    with pytest.raises(PolicyError, match=r"enable_remat is on in this Stack already, for 1 modules \(layers/0, ...\)"):
        enable_remat(model, "full", "layers.1")
    assert type(model.layers[1]) is Mlp


def test_blocks_that_rematerialize_themselves_are_refused():
    class Own(Mlp):
        @nnx.remat
        def __call__(self, x, mask, scale):
            return jnp.tanh(self.up(x)) @ self.down.kernel

    class Outer(Stack):
        def __call__(self, x):
            for layer in self.layers:
                x = layer(x, None, 1.0)
            return x

    model = enable_remat(Outer(nnx.Rngs(0), Own), "full", "Own")
    with pytest.raises(PolicyError, match="Own is rematerialized already by the model"):
        nnx.jit(lambda model: model(X))(model)


def test_linen_blocks_under_remat_are_refused():
    class Flagless(nn.Module):
        @nn.compact
        def __call__(self, x, train, mask):
            return x + nn.Dense(8)(jnp.tanh(nn.Dense(16)(x)))

    class Derived(nn.remat(Flagless)):
        pass

    class Whole(nn.Module):
        made: type

        @nn.compact
        def __call__(self, x):
            return self.made(name="block")(x, None, None)

    for made in (nn.remat(Flagless), nn.remat(nn.jit(Flagless)), nn.jit(nn.remat(Flagless)), Derived):
        variables = Whole(made).init(KEY, X)
        for where in ("Flagless", "block"):
            for _ in range(2):  # also where nn.jit has it in its cache
                with pytest.raises(PolicyError, match="Flagless is rematerialized already"):
                    enable_remat(Whole(made), "full", where).apply(variables, X)
    enabled = enable_remat(Whole(nn.jit(Flagless)), "full", "Flagless")
    assert checkpoints(functools.partial(enabled.apply, variables), X) == 1


# ---- Linen


@pytest.mark.parametrize("where", ["Block", Block, "Block_*", None])
def test_linen_keeps_parameters_state_and_dropout(where, assert_same_tree):
    model = Net()
    variables = model.init(KEY, X)
    enabled = enable_remat(model, "full", where)
    assert_same_tree(enabled.init(KEY, X), variables)

    def loss(params, model):
        rngs, rest = {"dropout": jax.random.key(1)}, {"batch_stats": variables["batch_stats"]}
        y, changed = model.apply({"params": params, **rest}, X, train=True, rngs=rngs, mutable=["batch_stats"])
        return (y**2).sum(), changed

    results = [jax.value_and_grad(loss, has_aux=True)(variables["params"], each) for each in (model, enabled)]
    assert_same_tree(results[1], results[0], atol=1e-5)
    # Both products of each block: BatchNorm, at the end, is differentiated by what it takes.
    assert recomputed(lambda params: loss(params, enabled)[0], variables["params"]) == 6
    assert disable_remat(enabled) == model != enabled
    assert enabled == enable_remat(model, "full", where)
    assert hash(enabled) == hash(enable_remat(model, "full", where))


def test_linen_models_of_one_class_are_told_apart():
    enabled = enable_remat(Net(depth=4))
    variables = Net(depth=4).init(KEY, X)
    assert enabled.apply(variables, X, method="twice").shape == X.shape  # no block runs in it
    assert checkpoints(functools.partial(enabled.apply, variables), X) == 4
    for depth in (2, 3, 2):
        variables = Net(depth=depth).init(KEY, X)
        enabled = enable_remat(Net(depth=depth))
        assert checkpoints(functools.partial(enabled.apply, variables), X) == depth
        assert checkpoints(enabled.bind(variables), X) == depth
        enabled = enable_remat(Net(depth=depth), "full", "Block_2")
        if depth == 3:
            assert checkpoints(functools.partial(enabled.apply, variables), X) == 1
        else:
            with pytest.raises(RematKitError, match="no module of Net fits where='Block_2'"):
                enabled.apply(variables, X)
    with pytest.raises(RematKitError, match="Net was called bound to variables or inside of another module"):
        enable_remat(Net(depth=5)).bind(variables)(X)


def test_linen_bound_and_as_a_part_of_another():
    variables = Net().init(KEY, X)
    enabled = enable_remat(Net(), "full", "Block")
    assert checkpoints(lambda x: enabled.bind(variables)(x), X) == 3

    class Outer(nn.Module):
        inner: nn.Module

        def __call__(self, x):
            return self.inner(x)

    outer = Outer(enabled)
    assert (
        checkpoints(
            lambda x: outer.apply(
                {"params": {"inner": variables["params"]}, "batch_stats": {"inner": variables["batch_stats"]}}, x
            ),
            X,
        )
        == 3
    )


class Body(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + nn.Dense(8)(jnp.tanh(nn.Dense(16)(x))), None


class Scanned(nn.Module):
    body: type = Body

    @nn.compact
    def __call__(self, x):
        layers = nn.scan(self.body, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        return layers(name="layers")(x, None)[0]


def test_linen_scan_of_remat_is_refused_and_a_checkpoint_of_several_blocks_is_not():
    model = Scanned(nn.remat(Body))
    variables = model.init(KEY, X)
    with pytest.raises(PolicyError, match="Body is rematerialized already"):
        jax.jit(enable_remat(model).apply)(variables, X)

    class Group(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.remat(Scanned)()(x)

    variables = Group().init(KEY, X)
    assert checkpoints(functools.partial(enable_remat(Group(), where="Body").apply, variables), X) == 1 + 3


def test_linen_scan_is_matched_inside_the_loop():
    model = Scanned()
    variables = model.init(KEY, X)
    for where in ("Body", Body, "layers", None):
        enabled = enable_remat(model, "full", where)
        assert checkpoints(functools.partial(enabled.apply, variables), X) == 3, where


def test_linen_refusals():
    model = Net()
    variables = model.init(KEY, X)
    with pytest.raises(
        RematKitError, match=r"no module of Net fits where='Blok'. Did you mean 'Block'\?.*Block ×3 \(Block_0, ...\)"
    ):
        enable_remat(model, "full", "Blok").apply(variables, X)
    with pytest.raises(PolicyError, match="is on in this Net already"):
        enable_remat(enable_remat(model, "full", "Block"), "full", "Block")
    with pytest.raises(PolicyError, match="bound to variables"):
        enable_remat(model.bind(variables), "full", "Block")


# ---- functions


@jax.jit
def layer(x, w):
    return x + jnp.tanh(x @ w) @ w.T


def forward(weights, x):
    for w in weights:
        x = layer(x, w)
    return (x**2).sum()


WEIGHTS = list(jax.random.normal(KEY, (3, 8, 16)) / 4)


@pytest.mark.parametrize("where", ["layer", "lay*", None])
def test_functions_by_name_and_by_what_repeats(where, assert_same_tree):
    enabled = enable_remat(forward, "full", where)
    results = [jax.value_and_grad(each)(WEIGHTS, X) for each in (forward, enabled)]
    assert_same_tree(results[1], results[0], atol=1e-5)
    assert recomputed(enabled, WEIGHTS, X) >= 3 > recomputed(forward, WEIGHTS, X)
    assert disable_remat(enabled) is forward
    assert disable_remat(forward) is forward


def test_a_step_that_differentiates(assert_same_tree):
    def step(weights, x):
        return jax.grad(forward)(weights, x)

    enabled = enable_remat(step, "full", "layer")
    assert count_work(jax.make_jaxpr(enabled)(WEIGHTS, X)).recomputed_matmuls == 3
    assert_same_tree(jax.jit(enabled)(WEIGHTS, X), step(WEIGHTS, X), atol=1e-5)


def test_names_of_the_model_are_kept_by_a_policy_of_names():
    def named(weights, x):
        for number, w in enumerate(weights):
            with jax.named_scope(f"block_{number}"):
                x = x + jnp.tanh(jax.ad_checkpoint.checkpoint_name(x @ w, "up")) @ w.T
        return (x**2).sum()

    assert recomputed(enable_remat(named, "full", "block"), WEIGHTS, X) == 3
    assert recomputed(enable_remat(named, save("up"), "block_*"), WEIGHTS, X) == 0
    assert recomputed(enable_remat(named, "full", "block_1"), WEIGHTS, X) == 1


def test_function_refusals():
    with pytest.raises(
        RematKitError, match=r"nothing in forward is in a scope.*where='lair' fits. .*Jitted functions: layer"
    ):
        enable_remat(forward, "full", "lair")(WEIGHTS, X)
    with pytest.raises(RematKitError, match="found no block in <lambda>"):
        enable_remat(lambda x: jnp.tanh(x))(X)
    with pytest.raises(PolicyError, match="is on in forward already"):
        enable_remat(enable_remat(forward))


def test_both_implementations_of_remat(remat3, assert_same_tree):
    graphdef, state = nnx.split(Stack(nnx.Rngs(0)))
    graphdef_on, _ = nnx.split(enable_remat(Stack(nnx.Rngs(0))))
    net, variables = Net(), Net().init(KEY, X)

    def merged(graphdef):
        params, rest = nnx.split_state(state, nnx.Param, ...)
        return lambda params, rest: (nnx.merge(graphdef, params, rest, copy=True)(X) ** 2).sum(), params, rest

    def linen(model):
        return lambda params: (model.apply({**variables, "params": params}, X) ** 2).sum(), variables["params"]

    pairs = [
        (merged(graphdef), merged(graphdef_on)),
        (linen(net), linen(enable_remat(net))),
        ((forward, WEIGHTS, X), (enable_remat(forward), WEIGHTS, X)),
    ]
    for (before, *args), (after, *_) in pairs:
        assert recomputed(before, *args) == 0
        assert recomputed(after, *args) >= 3
        assert_same_tree(jax.jit(jax.grad(after))(*args), jax.jit(jax.grad(before))(*args), atol=1e-5)


# ---- arguments


@pytest.mark.parametrize("where", ["", "  ", 3, int, [], ["Block", None], "h[*", "."])
def test_where_has_to_say_something(where):
    with pytest.raises(RematKitError, match="where is"):
        enable_remat(Net(), "full", where)


def test_what_is_no_model():
    with pytest.raises(PolicyError, match="got the class Net"):
        enable_remat(Net)
    with pytest.raises(PolicyError, match="enable_remat got 3"):
        enable_remat(3)
    with pytest.raises(PolicyError, match="None is not a policy"):
        enable_remat(Net(), None)
    with pytest.raises(PolicyError, match="there is no policy 'ful'"):
        enable_remat(Net(), "ful")


def test_policy_none_changes_nothing():
    model = Net()
    assert enable_remat(model, "none", "Block") is model
    assert remat("none")(forward) is enable_remat(forward, "none")
