"""The reference models are the models that they are named after, and say the same in every form."""

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models import linen, parts, transformer
from models.config import SIZES, ConfigError, TransformerConfig, configure
from models.train import cross_entropy
from remat_kit import RematKitError, Step, Workload, names

BUILDERS: dict[str, Callable[..., Any]] = {"gpt": transformer.gpt, "llama": transformer.llama, "linen": linen.gpt_linen}
FLOAT32: dict[str, Any] = {"compute_dtype": "float32", "size": "tiny"}


def equations(jaxpr: Any) -> Iterator[Any]:
    """Every equation of `jaxpr` and of the jaxprs inside it."""
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(equation.params, is_leaf=lambda node: hasattr(node, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


# XLA's CPU backend spends most of this file's time on optimizing code that runs once.
jit = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def count_params(step: Step) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(step.args[0].params))


def assert_close(got: Any, want: Any, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    jax.tree.map(partial(np.testing.assert_allclose, rtol=rtol, atol=atol), got, want)


def tiny_model(style: str, **options: Any) -> transformer.Transformer:
    config = configure(style, "tiny", **{"compute_dtype": "float32", "dropout": 0.0, **options})
    return transformer.Transformer(config, rngs=nnx.Rngs(0))


# Sizes


@pytest.mark.parametrize(
    ("build", "size", "published"),
    [
        # `sum(p.numel() for p in model.parameters())` of the checkpoints that Hugging Face serves.
        (transformer.gpt, "gpt2-small", 124_439_808),
        (transformer.gpt, "gpt2-medium", 354_823_168),
        (transformer.gpt, "gpt2-large", 774_030_080),
        (transformer.gpt, "gpt2-xl", 1_557_611_200),
        (transformer.llama, "llama-1b", 1_235_814_400),
        (transformer.llama, "llama-7b", 6_738_415_616),
        (transformer.llama, "llama3-8b", 8_030_261_248),
        (transformer.llama, "llama-70b", 68_976_648_192),
        (linen.gpt_linen, "gpt2-small", 124_439_808),
    ],
)
def test_parameter_count_is_the_published_one(build, size, published):
    assert count_params(build("none", size=size)) == published


@pytest.mark.parametrize(("size", "billions"), [("22b", 22), ("175b", 175), ("530b", 530), ("1t", 1000)])
def test_paper_sizes_have_the_parameters_of_their_names(size, billions):
    # 12Lh²(1 + 13/12h + (V + s)/12Lh), Narayanan et al. 2021 (arXiv 2104.04473), plus the last LayerNorm.
    L, h, V, s = (SIZES["gpt"][size][name] for name in ("layers", "width", "vocabulary", "seq"))
    count = count_params(transformer.gpt("none", size=size))
    assert count == L * (12 * h**2 + 13 * h) + (V + s) * h + 2 * h
    assert count == pytest.approx(billions * 1e9, rel=0.01)


@pytest.mark.parametrize("style", SIZES)
def test_every_size_is_valid(style):
    for size, values in SIZES[style].items():
        config = configure(style, size)
        assert {name: getattr(config, name) for name in values} == values


def test_overrides_change_what_follows_from_them():
    config = configure("gpt", "gpt2-small", width=1024, heads=16, layers=3)
    assert (config.mlp_width, config.kv_heads, config.head_width, config.layers) == (4096, 16, 64, 3)
    assert config.dropout == config.attention_dropout == 0.1
    assert configure("gpt", "tiny", attention="fused").attention_dropout == 0
    assert configure("gpt", "tiny", attention="fused").dropout == 0.1
    assert configure("llama", "tiny").dropout == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": "gpt2-smal"}, r"size 'gpt2-smal' is not a size of style gpt\. Did you mean 'gpt2-small'\?.*22b"),
        ({"attention": "flash"}, "attention 'flash' is not known.*naive, fused"),
        ({"stack": "scaned"}, "stack 'scaned' is not known. Did you mean 'scan'.*unroll"),
        ({"optimizer": "adam"}, "optimizer 'adam' is not known. Did you mean 'adamw'"),
        ({"compute_dtype": "bf16"}, "compute_dtype 'bf16' is not known.*bfloat16"),
        ({"platform": "gpu"}, "platform 'gpu' is not known.*cuda"),
        ({"layers": 0}, "layers is 0. It must be a whole number of at least 1"),
        ({"batch": 2.5}, "batch is 2.5. It must be a whole number"),
        ({"dropout": 1}, "dropout is 1. It must be at least 0 and below 1"),
        ({"heads": 7}, "width 768 is not a multiple of heads 7.*width=770"),
        ({"attention": "fused", "attention_dropout": 0.1}, "attention_dropout is 0.1 with fused attention"),
        (
            {"attention": "fused", "platform": "cuda", "compute_dtype": "float32"},
            "compute_dtype is float32 with fused attention on cuda.*attention=naive",
        ),
        ({"attention": "fused", "platform": "cuda", "heads": 64}, "a head is 12 wide.*multiples of 8"),
    ],
)
def test_unusable_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        transformer.gpt("none", **options)


def test_more_unusable_options_are_refused():
    with pytest.raises(RematKitError, match=r"heads 32 is not a multiple of kv_heads 5.*kv_heads=32"):
        transformer.llama("none", kv_heads=5)
    with pytest.raises(ConfigError, match=r"a head is 3 wide.*even head width"):
        transformer.llama("none", size="tiny", width=12)
    with pytest.raises(ConfigError, match=r"option 'depth' is not an option of TransformerConfig.*layers"):
        configure("gpt", "tiny", depth=3)
    with pytest.raises(ConfigError, match=r"style 'bert' is not known.*gpt, llama"):
        configure("bert", "tiny")
    with pytest.raises(ConfigError, match=r"the Linen model got style llama.*models.transformer"):
        linen.build(configure("llama", "tiny"), "none")
    with pytest.raises(RematKitError, match=r"has no option 'layer'. Did you mean 'layers'"):
        Workload("models.transformer:gpt", (("layer", 2),)).build("none", "cpu")  # pyright: ignore[reportArgumentType]


# Parts


def test_norms_are_their_definitions():
    config = configure("gpt", "tiny")
    x_BTD = np.random.default_rng(0).normal(3, 2, (2, 5, config.width)).astype(np.float32)
    layer_norm, rms_norm = parts.LayerNorm(config), parts.RMSNorm(config)
    layer_norm.scale[...] = rms_norm.scale[...] = jnp.linspace(0.5, 2, config.width)
    layer_norm.bias[...] = jnp.linspace(-1, 1, config.width)
    scale, bias = np.linspace(0.5, 2, config.width), np.linspace(-1, 1, config.width)
    normal_BTD = (x_BTD - x_BTD.mean(-1, keepdims=True)) / x_BTD.std(-1, keepdims=True)
    assert_close(layer_norm(jnp.asarray(x_BTD)), normal_BTD * scale + bias, atol=1e-4)
    root_BT1 = np.sqrt((x_BTD**2).mean(-1, keepdims=True))
    assert_close(rms_norm(jnp.asarray(x_BTD)), x_BTD / root_BT1 * scale, atol=1e-4)
    assert layer_norm(jnp.asarray(x_BTD, jnp.bfloat16)).dtype == rms_norm(jnp.asarray(x_BTD, jnp.bfloat16)).dtype


def test_rotary_turns_pairs_by_position():
    x_BTHC = np.random.default_rng(0).normal(size=(2, 7, 3, 8)).astype(np.float32)
    want_BTHC = np.empty_like(x_BTHC)
    for t in range(7):
        for c in range(4):
            turn = np.exp(1j * t * 100.0 ** (-2 * c / 8))
            turned = (x_BTHC[:, t, :, c] + 1j * x_BTHC[:, t, :, c + 4]) * turn
            want_BTHC[:, t, :, c], want_BTHC[:, t, :, c + 4] = turned.real, turned.imag
    assert_close(parts.rotary(jnp.asarray(x_BTHC), 100.0), want_BTHC)


def test_grouped_queries_equal_repeated_heads():
    q_BTHC, k_BSKC, v_BSKC = (jax.random.normal(jax.random.key(i), (2, 6, h, 8)) for i, h in enumerate((4, 2, 2)))
    k_BSHC, v_BSHC = jnp.repeat(k_BSKC, 2, axis=2), jnp.repeat(v_BSKC, 2, axis=2)
    naive = jit(partial(parts.naive_attention, drop=lambda x: x))
    grouped_BTHC = naive(q_BTHC, k_BSKC, v_BSKC)
    assert_close(grouped_BTHC, naive(q_BTHC, k_BSHC, v_BSHC))
    assert_close(grouped_BTHC, parts.fused_attention(q_BTHC, k_BSKC, v_BSKC, "cpu"))


def test_naive_attention_is_its_definition():
    q_BTHC, k_BSHC, v_BSHC = (np.random.default_rng(i).normal(size=(1, 3, 1, 4)) for i in range(3))
    want_TC = np.zeros((3, 4))
    for t in range(3):
        weights_S = np.exp(k_BSHC[0, : t + 1, 0] @ q_BTHC[0, t, 0] / 2)
        want_TC[t] = weights_S / weights_S.sum() @ v_BSHC[0, : t + 1, 0]
    args = [jnp.asarray(x, jnp.float32) for x in (q_BTHC, k_BSHC, v_BSHC)]
    assert_close(parts.naive_attention(args[0], args[1], args[2], lambda x: x)[0, :, 0], want_TC)


def test_dropout_drops_the_rate_and_keeps_the_mean():
    x = jnp.ones((100, 100))
    key = jax.random.key(0)
    assert parts.dropout(x, 0.0, key) is x
    dropped = parts.dropout(x, 0.25, key)
    assert_close(dropped, parts.dropout(x, 0.25, key))
    assert not np.array_equal(dropped, parts.dropout(x, 0.25, jax.random.key(1)))
    assert set(np.unique(dropped)) == {np.float32(0), np.float32(1 / 0.75)}
    assert np.mean(dropped == 0) == pytest.approx(0.25, abs=0.02)


def test_layers_have_different_masks_and_the_same_layer_the_same():
    block = parts.Block(configure("gpt", "tiny", compute_dtype="float32", dropout=0.5), rngs=nnx.Rngs(0))
    x_BTD = jax.random.normal(jax.random.key(0), (2, 32, 64))
    run = jit(block)
    first, again, second = (run(x_BTD, np.uint32(layer), jax.random.key(1)) for layer in (0, 0, 1))
    assert_close(first, again)
    assert np.mean(np.isclose(first, second)) < 0.5


def test_cross_entropy_is_its_definition():
    logits_BTV = np.random.default_rng(0).normal(size=(2, 3, 5))
    targets_BT = np.array([[0, 1, 2], [4, 3, 0]])
    probabilities_BTV = np.exp(logits_BTV) / np.exp(logits_BTV).sum(-1, keepdims=True)
    want = -np.mean([np.log(probabilities_BTV[b, t, targets_BT[b, t]]) for b in range(2) for t in range(3)])
    got = cross_entropy(jnp.asarray(logits_BTV, jnp.bfloat16), jnp.asarray(targets_BT))
    assert got.dtype == jnp.float32
    assert got == pytest.approx(want, rel=1e-2)


# Whole models


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["naive", "fused"])
@pytest.mark.parametrize("style", ["gpt", "llama"])
def test_no_position_sees_a_later_token(style, attention):
    model = tiny_model(style, attention=attention)
    tokens_BT = jax.random.randint(jax.random.key(0), (1, 32), 0, 256)
    changed_BT = tokens_BT.at[0, 20].add(1) % 256
    logits_BTV, other_BTV = (jit(model)(x, jax.random.key(1)) for x in (tokens_BT, changed_BT))
    assert_close(logits_BTV[:, :20], other_BTV[:, :20])
    assert np.abs(logits_BTV[:, 20:] - other_BTV[:, 20:]).max(axis=(0, 2)).min() > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("style", ["gpt", "llama"])
def test_scan_equals_unroll(style):
    # Dropout on: keys depend on the layer's number and not on how it is reached.
    scan, unroll = (BUILDERS[style]("none", stack=stack, dropout=0.1, **FLOAT32) for stack in ("scan", "unroll"))
    state, batch, key = scan.init(3)
    unrolled = transformer.unstack_blocks(state.params)
    assert_close(unroll.init(3)[0].params, unrolled)
    assert_close(transformer.stack_blocks(unrolled), state.params, rtol=0, atol=0)
    loss, grads = jit(scan.loss_and_grads)(state, batch, key)
    unrolled_state = type(state)(unrolled, None)
    unrolled_loss, unrolled_grads = jit(unroll.loss_and_grads)(unrolled_state, batch, key)
    assert_close(unrolled_loss, loss)
    assert_close(transformer.stack_blocks(unrolled_grads), grads)


@pytest.mark.parametrize("style", ["gpt", "llama"])
def test_fused_equals_naive_and_starts_near_chance(style):
    naive, fused = (BUILDERS[style]("none", attention=kind, dropout=0.0, **FLOAT32) for kind in ("naive", "fused"))
    args = naive.init(0)
    loss, grads = jit(naive.loss_and_grads)(*args)
    fused_loss, fused_grads = jit(fused.loss_and_grads)(*args)
    assert_close(fused_loss, loss)
    assert_close(fused_grads, grads)
    assert loss == pytest.approx(np.log(256), rel=0.01)


def to_linen(params: dict[str, Any]) -> dict[str, Any]:
    """The Linen model's parameters from those of the NNX model, both with stack "scan"."""
    blocks = params["blocks"]
    attention = [blocks["attention"][name] for name in ("query", "key", "value", "out")]
    return {
        "Embed_0": {"embedding": params["embedding"]},
        "positions": params["positions"],
        "LayerNorm_0": params["final_norm"],
        "ScanBlock_0": {
            "LayerNorm_0": blocks["attention_norm"],
            "Attention_0": {f"Dense_{i}": dense for i, dense in enumerate(attention)},
            "LayerNorm_1": blocks["mlp_norm"],
            "MLP_0": {"Dense_0": blocks["mlp"]["up"], "Dense_1": blocks["mlp"]["down"]},
        },
    }


@pytest.mark.slow
def test_linen_equals_nnx():
    step, linen_step = (BUILDERS[name]("none", dropout=0.0, **FLOAT32) for name in ("gpt", "linen"))
    state, batch, key = step.init(0)
    # Every bias and scale away from its initial 0 or 1, so that none of them can be mixed up or left out.
    leaves, tree = jax.tree.flatten(state.params)
    noisy = [x + 0.1 * jax.random.normal(jax.random.key(i), x.shape) for i, x in enumerate(leaves)]
    state = type(state)(tree.unflatten(noisy), None)
    linen_state = type(state)(to_linen(state.params), None)
    loss, grads = jit(step.loss_and_grads)(state, batch, key)
    linen_loss, linen_grads = jit(linen_step.loss_and_grads)(linen_state, batch, key)
    assert_close(linen_loss, loss)
    assert_close(linen_grads, to_linen(grads), rtol=1e-3, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("builder", "stack"),
    [("gpt", "scan"), ("gpt", "unroll"), ("llama", "scan"), ("linen", "scan"), ("linen", "unroll")],
)
def test_training_lowers_the_loss_and_compiles_once(builder, stack):
    step = BUILDERS[builder]("full", size="tiny", stack=stack)
    jitted: Any = jit(step.fn, donate_argnums=step.donate)
    state, batch, key = step.init(0)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), (state, batch, key)) == jax.tree.map(
        lambda x: (x.shape, x.dtype), step.args
    )
    losses = []
    for _ in range(5):
        state, loss = jitted(state, batch, key)
        losses.append(float(loss))
    assert losses[-1] < losses[0] - 0.1
    assert jitted._cache_size() == 1


def test_sgd_has_no_state_for_each_parameter():
    assert not jax.tree.leaves(transformer.gpt("none", size="tiny", optimizer="sgd").args[0].opt_state)


# What the compiler and the accounting see

GPT_NAMES = {names.QUERY, names.KEY, names.VALUE, names.OUT, names.CONTEXT, names.BLOCK_INPUT, names.ATTENTION_NORM}
GPT_NAMES |= {names.MLP_NORM, names.MLP_UP, names.MLP_HIDDEN, names.MLP_DOWN, names.SCORES, names.PROBABILITIES}
LLAMA_NAMES = GPT_NAMES - {names.MLP_UP} | {names.MLP_GATE, names.MLP_GATED_UP}
NAMES = {"gpt": GPT_NAMES, "llama": LLAMA_NAMES, "linen": GPT_NAMES}


@pytest.mark.parametrize("attention", ["naive", "fused"])
@pytest.mark.parametrize("builder", BUILDERS)
def test_every_tensor_of_a_block_is_tagged_once(builder, attention):
    options = {"heads": 4, "kv_heads": 2, "mlp_width": 96} if builder == "llama" else {"mlp_width": 96}
    step = BUILDERS[builder]("none", size="tiny", attention=attention, **options)
    letters = {"B": 2, "T": 32, "D": 64, "H": 4, "K": options.get("kv_heads", 4), "C": 16, "F": 96}
    traced = jax.make_jaxpr(lambda *args: step.loss_and_grads(*args)[0])(*step.args)
    tags = [equation for equation in equations(traced.jaxpr) if equation.primitive.name == "name"]
    sizes = {entry.name: entry.size for entry in names.VOCABULARY}
    naive_only = set() if attention == "naive" else {names.SCORES, names.PROBABILITIES}
    assert Counter(tag.params["name"] for tag in tags) == Counter(NAMES[builder] - naive_only)
    for tag in tags:
        aval = tag.outvars[0].aval
        assert aval.shape == tuple(letters[letter] for letter in sizes[tag.params["name"]]), tag
        assert aval.dtype == jnp.bfloat16, tag


@pytest.mark.parametrize("builder", BUILDERS)
def test_full_keeps_exactly_the_inputs_of_the_blocks(builder):
    step = BUILDERS[builder]("full", size="tiny", layers=5, dropout=0.1)
    traced = jax.make_jaxpr(step.loss_and_grads)(*step.args)
    forward, backward = [equation for equation in equations(traced.jaxpr) if equation.primitive.name == "scan"]
    body = getattr(forward.params["jaxpr"], "jaxpr", forward.params["jaxpr"])
    pairs = zip(forward.outvars, body.outvars, strict=True)
    stacked = [outer.aval for outer, inner in pairs if outer.aval.shape != inner.aval.shape]
    # 2sbh bytes a layer, and no copy of a parameter.
    assert [(aval.shape, aval.dtype) for aval in stacked] == [((5, 2, 32, 64), jnp.bfloat16)]
    # Gradients of float32 parameters are float32, and parameters reach the loop as they are stored.
    params = {leaf.shape for leaf in jax.tree.leaves(step.args[0].params) if leaf.shape[0] == 5}
    for equation in (forward, backward):
        weights = [var.aval for var in equation.invars if var.aval.shape in params]
        assert {aval.dtype for aval in weights} == {jnp.dtype("float32")}


@pytest.mark.parametrize("stack", ["scan", "unroll"])
@pytest.mark.parametrize("builder", BUILDERS)
def test_a_step_allocates_nothing(builder, stack):
    gc.collect()  # of other tests; it would come in between otherwise
    before = len(jax.live_arrays())
    size = "175b" if stack == "scan" and builder != "llama" else "tiny"
    step = BUILDERS[builder]("full", size=size, stack=stack)
    jax.jit(step.fn, donate_argnums=step.donate).trace(*step.args)
    assert len(jax.live_arrays()) == before
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(step.args))


def test_labels_say_where_everything_is():
    step = transformer.gpt("none", size="tiny")
    assert step.labels == {"params": "0.params", "optimizer": "0.opt_state", "batch": 1, "key": 2}
    paths = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in jax.tree.leaves_with_path(step.args)]
    prefixes = tuple(str(label) for label in step.labels.values())
    assert all(path.startswith(prefixes) for path in paths)
    assert {path.split(".")[1] for path in paths if path.startswith("0.")} == {"params", "opt_state"}


def test_a_config_is_a_value():
    assert configure("gpt", "tiny") == configure("gpt", "tiny")
    assert len({configure("gpt", "tiny"), configure("gpt", "tiny"), configure("gpt", "tiny", layers=3)}) == 2
    assert isinstance(configure("llama", "tiny"), TransformerConfig)
