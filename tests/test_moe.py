"""The mixture of experts sends tokens where the router says, and is a workload like the others."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from model_checks import (
    assert_close,
    assert_same_gradients,
    count_params,
    initial_values,
    jit,
    losses,
    record_for_gpu,
    work_of,
)

from models import transformer
from models.config import ConfigError
from models.moe import SIZES, Experts, MoEConfig, MoETransformer, configure, moe, route
from models.train import split_model
from remat_kit import Workload, get_policy, get_target, names, trace
from remat_kit._jaxpr import Work


@pytest.mark.parametrize("size", SIZES)
def test_parameter_count_by_hand(size):
    config = configure(size)
    c = config.blocks
    attention, expert = 4 * (c.width**2 + c.width), 2 * c.width * c.mlp_width + c.mlp_width + c.width
    block = attention + config.experts * (expert + c.width) + 2 * 2 * c.width  # an expert has a row of the router
    count = count_params(moe("none", size=size))
    assert count == c.layers * block + (c.vocabulary + c.seq) * c.width + 2 * c.width
    # The same by the transformer that it comes from, in which each block has one MLP and no router.
    base = count_params(transformer.gpt("none", size=SIZES[size][0]))
    assert count == base + c.layers * ((config.experts - 1) * expert + config.experts * c.width)


def flops_by_hand(config: MoEConfig) -> int:
    """FLOPs of one step with policy none.

    Attention, router and logits cost 6 FLOP a weight and token, the experts a weight and slot, be it empty. The
    products that bring tokens to slots and back meet each token with each slot: 2·D FLOP forward, twice that backward
    for the weights and the experts' output on the way back, once for the tokens on the way there. The table of
    weights is a product over a token's choices; of its two factors the slot has no gradient.
    """
    c, slots = config.blocks, config.experts * config.slots
    tokens = c.batch * c.seq
    dense = c.layers * (4 * c.width**2 + c.width * config.experts) + c.width * c.vocabulary
    core = 12 * c.layers * tokens * c.seq * c.width
    experts = 6 * c.layers * c.batch * slots * 2 * c.width * c.mlp_width
    moving = c.layers * tokens * slots * (10 * c.width + 4 * config.top_k)
    return 6 * dense * tokens + core + experts + moving


@pytest.mark.parametrize("options", [{}, {"size": "gpt2-small-8e"}, {"experts": 8, "top_k": 3, "capacity_factor": 2}])
def test_step_flops(options):
    options = {"size": "tiny"} | options
    config = configure(**options)
    # Three times each of q, k, v, scores, context, out, router, up, down, the way back, and the logits; twice the
    # weights' table and the way there.
    matmuls = config.blocks.layers * (3 * 10 + 2 * 2) + 3
    assert work_of(moe, **options) == Work(matmuls, flops_by_hand(config), 0, 0)


@pytest.mark.parametrize(
    ("policy", "matmuls", "again"),
    [
        ("full", 11, "q k v scores context out, router, table, there, up, down"),
        ("selective_attention", 7, "scores context, and all of the experts, which are not tagged"),
        ("dots_with_no_batch_dims_saveable", 6, "as above, but the router has no batch dimension"),
        ("dots_saveable", 0, "every product may stay"),
    ],
)
def test_recomputed_matmuls(policy, matmuls, again):
    # Unlike a plain MLP's, the last product runs again: the weights that its results are summed with have a gradient.
    scanned, unrolled = (work_of(moe, policy, size="tiny", layers=3, stack=stack) for stack in ("scan", "unroll"))
    assert scanned == unrolled
    assert scanned.recomputed_matmuls == 3 * matmuls, again


def test_tags_are_those_of_attention_and_of_the_inputs():
    found = trace(moe("none", size="tiny"), get_target("cpu")).tags
    inputs = {names.BLOCK_INPUT, names.ATTENTION_NORM, names.MLP_NORM}
    attention = {names.QUERY, names.KEY, names.VALUE, names.SCORES, names.PROBABILITIES, names.CONTEXT, names.OUT}
    assert found == inputs | attention


@pytest.mark.parametrize("policy", ["full", "dots_saveable"])
def test_gradients_depend_neither_on_the_policy_nor_on_the_stack(policy):
    assert_same_gradients(moe, policy, reference={"stack": "unroll"})


def test_the_loss_starts_near_chance_and_falls():
    found = losses(moe, "full")
    # Of 256 equally likely tokens, and a hundredth of a balance near 1.
    assert found[0] == pytest.approx(np.log(256) + 0.01, rel=0.01)
    assert found[-1] < found[0] - 1


# The router


def route_by_hand(logits_BTE: Any, top_k: int, slots: int) -> tuple[Any, Any]:
    """Weights [B, T, E, S] and balance, one token after another."""
    B, T, E = logits_BTE.shape
    probability_BTE = np.exp(logits_BTE) / np.exp(logits_BTE).sum(-1, keepdims=True)
    weight_BTES, busy_E = np.zeros((B, T, E, slots)), np.zeros(E)
    for b in range(B):
        taken = [0] * E
        for t in range(T):
            choices = np.argsort(-probability_BTE[b, t], kind="stable")[:top_k]
            busy_E[choices] += 1 / (B * T * top_k)
            kept = [e for e in choices if taken[e] < slots]
            for e in kept:
                weight_BTES[b, t, e, taken[e]] = probability_BTE[b, t, e] / probability_BTE[b, t, kept].sum()
            for e in choices:
                taken[e] += 1
    return weight_BTES, E * (busy_E * probability_BTE.mean((0, 1))).sum()


@pytest.mark.parametrize(("top_k", "slots"), [(2, 3), (2, 12), (3, 5)])
def test_the_router_is_its_definition_and_keeps_its_promises(top_k, slots):
    B, T, E = 3, 12, 5
    logits_BTE = np.random.default_rng(0).normal(0, 2, (B, T, E)).astype(np.float32)
    weight_BTES, balance = jit(route, static_argnums=(1, 2))(logits_BTE, top_k, slots)
    want_BTES, want_balance = route_by_hand(logits_BTE, top_k, slots)
    assert_close(weight_BTES, want_BTES)
    assert balance == pytest.approx(want_balance, rel=1e-5)

    sits_BTES = np.asarray(weight_BTES) > 0
    total_BT, choices_BT = np.sum(weight_BTES, axis=(2, 3)), sits_BTES.sum((2, 3))
    assert_close(total_BT, (choices_BT > 0).astype(np.float32))  # of the experts that had a slot
    assert choices_BT.max() == top_k
    assert sits_BTES.sum(1).max() == 1  # one token in a slot
    assert sits_BTES.sum((1, 3)).max() <= slots  # capacity
    assert (sits_BTES.sum(3) <= 1).all()  # one slot of an expert for a token
    everyone = slots >= T
    assert everyone == (choices_BT == top_k).all()
    assert everyone or choices_BT.min() < top_k


def test_balance_is_one_for_equally_busy_experts_and_more_otherwise():
    even = 5 * np.eye(4)[None, np.arange(8) % 4] + 4 * np.eye(4)[None, (np.arange(8) + 1) % 4]
    assert route(jnp.asarray(even, jnp.float32), 2, 8).balance == pytest.approx(1)
    odd = np.tile([5.0, 4.0, 0.0, 0.0], (1, 8, 1))
    assert route(jnp.asarray(odd, jnp.float32), 2, 8).balance > 1.9


def test_experts_are_mlps_weighted_by_the_router():
    # A slot for any choice.
    config = configure("tiny", compute_dtype="float32", capacity_factor=2)
    assert config.slots == config.blocks.seq
    definition, _ = split_model(lambda key: Experts(config, rngs=nnx.Rngs(params=key)))
    random = np.random.default_rng(0)
    shapes = jax.tree.map(lambda leaf: leaf.shape[1:], initial_values(moe)[0].params["blocks"]["experts"])
    params = {name: 0.3 * random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    x_BTD = random.normal(size=(2, 32, 64)).astype(np.float32)
    got_BTD, _ = jit(lambda params: nnx.merge(definition, params)(x_BTD))(params)

    want_BTD = np.zeros_like(x_BTD)
    for b, t in np.ndindex(2, 32):
        logit_E = np.exp(x_BTD[b, t] @ params["router"])
        chosen = np.argsort(-logit_E)[:2]
        for e in chosen:
            up_F = x_BTD[b, t] @ params["up"][e] + params["up_bias"][e, 0, 0]
            hidden_F = up_F / 2 * (1 + np.tanh((2 / np.pi) ** 0.5 * (up_F + 0.044715 * up_F**3)))
            down_D = hidden_F @ params["down"][e] + params["down_bias"][e, 0, 0]
            want_BTD[b, t] += logit_E[e] / logit_E[chosen].sum() * down_D
    assert_close(got_BTD, want_BTD, rtol=1e-3, atol=1e-3)


def test_no_position_sees_a_later_token():
    # Slots are few, and who has one does not depend on who comes later.
    config = configure("tiny", compute_dtype="float32", dropout=0.0, capacity_factor=0.5)
    definition, _ = split_model(lambda key: MoETransformer(config, rngs=nnx.Rngs(params=key)))
    state, batch, key = initial_values(moe)
    run = jit(lambda tokens_BT: nnx.merge(definition, state.params)(tokens_BT, key)[0])
    tokens_BT, changed_BT = np.array(batch["inputs"]), np.array(batch["inputs"])
    changed_BT[:, 20] = (changed_BT[:, 20] + 1) % 256
    logits_BTV, other_BTV = run(tokens_BT), run(changed_BT)
    assert_close(logits_BTV[:, :20], other_BTV[:, :20])
    assert np.abs(logits_BTV[:, 20:] - other_BTV[:, 20:]).max(axis=(0, 2)).min() > 1e-4


# Options


def test_slots():
    # 1,024 tokens go to 2 of 8 experts each: 256 for each expert, and a quarter more.
    assert configure("gpt2-small-8e").slots == 320
    assert configure("tiny", capacity_factor=0.01).slots == 1
    assert configure("tiny", capacity_factor=100).slots == 32  # a token takes one slot of an expert at most


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": "gpt2-small"}, r"size 'gpt2-small' is not a size of moe\. Did you mean 'gpt2-small-8e'\?.*tiny"),
        ({"top_k": 1}, r"top_k is 1 with experts 8\. A token goes to at least 2 experts.*give e\.g\. top_k=2"),
        ({"top_k": 9}, "top_k is 9 with experts 8"),
        ({"experts": 0}, "experts is 0. It must be a whole number of at least 1"),
        ({"capacity_factor": 0}, r"capacity_factor is 0\. It must be a number above 0: give e\.g\. 1\.25, or 4 for"),
        ({"capacity_factor": "auto"}, "capacity_factor is 'auto'. It must be a number"),
        ({"balance_weight": -1}, "balance_weight is -1. It must be a number of at least 0: .* 0 to switch it off"),
        ({"heads": 7}, "width 768 is not a multiple of heads 7.*width=770"),
        ({"stack": "scaned"}, "stack 'scaned' is not known. Did you mean 'scan'"),
    ],
)
def test_unusable_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        moe("none", **options)


def test_it_is_a_workload():
    options = (("size", "tiny"), ("experts", 8), ("capacity_factor", 1.5))
    step = Workload("models.moe:moe", options).build(get_policy("full"), "cuda")
    assert step.args[0].params["blocks"]["experts"]["up"].shape == (2, 8, 64, 256)
    assert step.labels == {"params": "0.params", "optimizer": "0.opt_state", "batch": 1, "key": 2}
    assert step.donate == (0,)


@pytest.mark.slow
def test_a_step_for_a_gpu():
    record = record_for_gpu(moe, "models.moe:moe", "selective_attention", dropout=0.0)
    assert record.recomputed_matmuls == 2 * 7
    assert record.explanation is not None
    assert record.attributed_share == 1
    assert record.explanation.module_share > 0.99
