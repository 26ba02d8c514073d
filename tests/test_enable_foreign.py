"""enable_remat on models that no one here wrote: equal gradients, the same parameters, less memory, undone by one call.

`make foreign` brings them. Without it these tests are skipped, unless REMAT_KIT_REQUIRE_FOREIGN is 1.
"""

import functools

import jax
import jax.numpy as jnp
from enabled import assert_same_and_less, checkpoints
from flax import nnx
from foreign import flax_example, package

from remat_kit import disable_remat, enable_remat

KEY = jax.random.key(0)
TOKENS = jax.random.randint(KEY, (2, 32), 1, 50)


def check_linen(model, where, variables, loss, blocks, assert_same_tree, init):
    """`loss(model, params)`; `init(model)` are its variables."""
    enabled = enable_remat(model, "full", where)
    assert_same_tree(init(enabled), variables)
    plain, rematerialized = functools.partial(loss, model), functools.partial(loss, enabled)
    assert checkpoints(rematerialized, variables["params"]) == blocks
    assert_same_and_less(plain, rematerialized, variables["params"])
    undone = disable_remat(enabled)
    assert undone == model
    before, after = (
        str(jax.make_jaxpr(functools.partial(loss, each))(variables["params"])) for each in (model, undone)
    )
    assert before == after


def check_nnx(model, where, loss, blocks, assert_same_tree):
    """`loss(model)`."""

    def of_params():
        graphdef, params, rest = nnx.split(model, nnx.Param, ...)
        return lambda params: loss(nnx.merge(graphdef, params, rest)), params, graphdef

    plain, params, graphdef = of_params()
    text = str(jax.make_jaxpr(plain)(params))
    assert enable_remat(model, "full", where) is model
    rematerialized, same, _ = of_params()
    assert_same_tree(same, params)
    assert checkpoints(rematerialized, params) == blocks
    assert_same_and_less(plain, rematerialized, params)
    assert disable_remat(model) is model
    undone, _, graphdef_undone = of_params()
    assert graphdef_undone == graphdef
    assert str(jax.make_jaxpr(undone)(params)) == text


def wmt():
    models = flax_example("wmt")
    sizes = {"emb_dim": 32, "num_heads": 2, "num_layers": 2, "qkv_dim": 32, "mlp_dim": 64, "max_len": 64}
    config = models.TransformerConfig(vocab_size=50, output_vocab_size=50, **sizes)
    model = models.Transformer(config)

    def init(model):
        return model.init({"params": KEY, "dropout": KEY}, TOKENS, TOKENS)

    def loss(model, params):
        # Dropout is on, in encoder and decoder.
        logits = model.apply({"params": params}, TOKENS, TOKENS, rngs={"dropout": jax.random.key(1)})
        return jax.nn.log_softmax(logits)[..., 0].mean()

    return model, init, loss


def test_flax_wmt_by_class_names(assert_same_tree):
    model, init, loss = wmt()
    where = ["Encoder1DBlock", "EncoderDecoder1DBlock"]
    check_linen(model, where, init(model), loss, 4, assert_same_tree, init)


def test_flax_wmt_finds_encoder_and_decoder_by_itself():
    model, init, loss = wmt()
    params = init(model)["params"]
    assert checkpoints(functools.partial(loss, enable_remat(model)), params) == 4
    assert checkpoints(functools.partial(loss, enable_remat(model, where="decoder/*block_*")), params) == 2


def test_flax_wmt_loss_as_a_function():
    model, init, loss = wmt()
    plain = functools.partial(loss, model)
    rematerialized = enable_remat(plain, "full", "encoderblock")
    params = init(model)["params"]
    assert checkpoints(rematerialized, params) == 2
    assert_same_and_less(plain, rematerialized, params)
    assert disable_remat(rematerialized) is plain


def test_flax_resnet_with_batch_norm(assert_same_tree):
    models = flax_example("imagenet")
    model = models.ResNet(stage_sizes=[1, 1], block_cls=models.ResNetBlock, num_classes=5, num_filters=8)
    x = jax.random.normal(KEY, (4, 16, 16, 3))

    def init(model):
        return model.init(KEY, x, train=False)

    variables = init(model)

    def loss(model, params):
        # With axis_name "batch": under vmap, as the example trains under pmap.
        logits, changed = jax.vmap(
            lambda x: model.apply({**variables, "params": params}, x[None], mutable=["batch_stats"]), axis_name="batch"
        )(x)
        return (logits**2).mean() + sum(leaf.mean() for leaf in jax.tree.leaves(changed))

    check_linen(model, "ResNetBlock", variables, loss, 2, assert_same_tree, init)


def test_flax_gemma(assert_same_tree):
    package("jaxtyping")
    example = flax_example("gemma", "transformer")
    config = example.TransformerConfig(
        num_layers=2, num_embed=50, embed_dim=32, hidden_dim=64, num_heads=2, head_dim=16, num_kv_heads=1,
        final_logit_softcap=None, use_post_attn_norm=True, use_post_ffw_norm=True, sliding_window_size=8,
        attention_types=[example.modules.AttentionType.GLOBAL] * 2,
    )  # fmt: skip
    model = example.Transformer(config, rngs=nnx.Rngs(params=0))
    mask = jnp.ones_like(TOKENS, bool)
    positions, attention = example.build_positions_from_mask(mask), example.make_causal_attn_mask(mask)

    def loss(model):
        logits, cache = model(TOKENS, positions, None, attention)
        assert cache is None
        return jax.nn.log_softmax(logits)[..., 0].mean()

    check_nnx(model, "layers.*", loss, 2, assert_same_tree)


def mamba():
    mamba2 = package("mamba2_jax")
    config = mamba2.Mamba2Config(
        vocab_size=50, hidden_size=32, state_size=8, head_dim=8, chunk_size=8, num_hidden_layers=2
    )
    return mamba2.Mamba2ForCausalLM(config, rngs=nnx.Rngs(0))


def test_mamba2_from_pypi(assert_same_tree):
    model = mamba()
    check_nnx(model, "Mamba2Block", lambda model: model(TOKENS, labels=TOKENS)["loss"], 2, assert_same_tree)


def test_mamba2_with_a_cache_and_its_own_jit(assert_same_tree):
    mamba2 = package("mamba2_jax")
    model = mamba()

    def two_calls():
        first = mamba2.forward(model, TOKENS[:, :16])
        return mamba2.forward(model, TOKENS[:, 16:], None, first["cache"])

    expected = two_calls()
    enable_remat(model)  # finds the blocks by itself
    for layer in model.backbone.layers:
        assert type(layer).__call__ is not mamba2.modeling.Mamba2Block.__call__
    assert_same_tree(two_calls(), expected, atol=1e-5)


def test_nano_moe_from_pypi(assert_same_tree):
    nano_moe = package("nano_moe")
    config = nano_moe.NanoMoEConfig(vocab_size=50, n_layers=2, n_heads=2, d_model=32, d_ff=64, block_size=64)
    model = nano_moe.NanoMoE(config)

    def init(model):
        return model.init(KEY, TOKENS)

    def loss(model, params):
        rngs = {"dropout": jax.random.key(1)}
        logits, balance = model.apply({"params": params}, TOKENS, deterministic=False, rngs=rngs)
        return jax.nn.log_softmax(logits)[..., 0].mean() + balance

    check_linen(model, None, init(model), loss, 2, assert_same_tree, init)
