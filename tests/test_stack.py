"""Stacks of plain functions under policies: gradients, what is kept, what runs again, each against a count by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract import run_equations
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from remat_kit import Step, get_policy, get_target, remat, remat_scan, scan_stack, trace, unroll_stack
from remat_kit._errors import PolicyError
from remat_kit._jaxpr import count_work, walk
from remat_kit._saved import saved_values

# Activations are [4, 8] float32, a layer's weight is [8, 8].
VALUE, WEIGHT = 4 * 8 * 4, 8 * 8 * 4
LAYERS = 12


def array(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def block(x, w):
    """Two matmuls. Backward needs both, and of values x, cos(up), sin(up), cos(down): four, with the weight five."""
    return jnp.sin(checkpoint_name(jnp.sin(checkpoint_name(x @ w, "up")) @ w, "down")), jnp.sum(x)


def scanned(policy, ones=True):
    def loss(x, ws):
        # The first block's input is a value of forward, too.
        x, sums = scan_stack(policy, block, 2 * x, ws) if ones else lax.scan(block, 2 * x, ws)
        return (x * x).sum() + (sums * jnp.arange(len(sums))).sum()

    return loss


def unrolled(policy):
    def loss(x, ws):
        x, sums = unroll_stack(policy, block, 2 * x, list(ws))
        return (x * x).sum() + (jnp.stack(sums) * jnp.arange(len(sums))).sum()

    return loss


def derivative(loss, layers=LAYERS, listed=False):
    weights = [array(8, 8)] * layers if listed else array(layers, 8, 8)
    return jax.make_jaxpr(jax.value_and_grad(loss, (0, 1)))(array(4, 8), weights)


POLICIES = [
    "none", "full", "segments(1)", "segments(auto)", "segments(sqrt)", "segments(recursive)", "segments(auto,full)",
    "segments(sqrt,save(up))", "segments(recursive,save(up))", "segments(auto,segments(auto))", "segments(1,every(1))",
    "every(1)", "first(1)", "first(1,segments(1))", "first(1,dots_saveable)",
]  # fmt: skip
MORE = [
    "segments(4)", "segments(5)", "every(5)", "every(5,full)", "first(5)", "segments(3,first(2))", "first(5,every(2))",
]  # fmt: skip


def values(layers):
    keys = jax.random.split(jax.random.key(layers))
    return jax.random.normal(keys[0], (4, 8)), jax.random.normal(keys[1], (layers, 8, 8)) / 3


@pytest.mark.parametrize(
    ("policy", "layers"),
    [(policy, layers) for policy in POLICIES for layers in (1, 2, 5, 7, 12)] + [(policy, 12) for policy in MORE],
)
def test_loss_and_gradients_are_those_without_a_checkpoint(policy, layers):
    x, ws = values(layers)
    expected = run_equations(derivative(scanned("none", ones=False), layers), x, ws)
    found = run_equations(derivative(scanned(policy), layers), x, ws)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize(
    ("policy", "layers"),
    [(policy, layers) for policy in POLICIES for layers in (2, 7)] + [(policy, 12) for policy in MORE],
)
def test_loss_and_gradients_of_a_list(policy, layers):
    x, ws = values(layers)
    loss, dx, dws = run_equations(derivative(scanned("none", ones=False), layers), x, ws)
    found = run_equations(derivative(unrolled(policy), layers, listed=True), x, list(ws))
    jax.tree.map(np.testing.assert_array_equal, found, [loss, dx, *dws])


# The borders kept, matmuls that run again when scanned and when unrolled, and of how many layers the weights are copied
# when scanned. A block has two matmuls; an unrolled part with `full` inside does not run its last block again for the
# inputs of the others.
COUNTS = [
    ("segments(4)", 4, 24, 24, 0),
    ("segments(12)", 12, 24, 24, 0),
    ("segments(1)", 1, 24, 24, 0),
    ("segments(sqrt)", 4, 24, 24, 0),
    ("segments(4,full)", 4, 48, 24 + 16, 0),
    ("segments(4,save(up,down))", 4, 24, 24, 0),  # what is kept inside is there while a segment runs again
    # Of an unrolled segment's last block, "down" is not run again for the others: once less.
    ("segments(4,save(up))", 4, 24 + 12, 24 + 12 - 4, 0),
    ("segments(5)", 5, 24, 24, 12),  # 3, 3 and 2, 2, 2
    ("every(5)", 3, 24, 24, 10),  # 5, 5 and 2, which is sliced inside
    ("every(6)", 2, 24, 24, 0),
    # 12 = 2·6, 6 = 2·3, 3 = 3·1; unrolled, of a part only what its own parts but the last take in.
    ("segments(recursive)", 2, 24 * 3, 2 * 6 + 4 * 4 + 24, 0),
    ("segments(2,segments(3,full))", 2, 24 * 3, None, 0),
]


@pytest.mark.parametrize(("policy", "borders", "again", "again_unrolled", "copied"), COUNTS)
def test_a_stack_keeps_what_enters_its_parts(policy, borders, again, again_unrolled, copied, remat3):
    if remat3 and "save" in policy:  # JAX does not ask a policy inside a checkpointed part: as with full inside
        again, again_unrolled = 48, 24 + 16
    jaxpr = derivative(lambda x, ws: scan_stack(policy, lambda x, w: (block(x, w)[0], None), 2 * x, ws)[0].sum())
    assert saved_values(jaxpr).device_bytes == borders * VALUE + copied * WEIGHT
    assert count_work(jaxpr).recomputed_matmuls == again
    assert count_work(jaxpr).matmuls == 3 * 24 + again

    def loss(x, ws):
        return unroll_stack(policy, lambda x, w: (block(x, w)[0], None), 2 * x, ws)[0].sum()

    jaxpr = derivative(loss, listed=True)
    assert saved_values(jaxpr).device_bytes == borders * VALUE
    if again_unrolled is not None:
        assert count_work(jaxpr).recomputed_matmuls == again_unrolled


@pytest.mark.parametrize("inside", ["full", "save(up)"])
def test_the_first_blocks_are_under_the_policy_and_the_others_are_not(inside, remat3):
    per_block = {"full": 1, "save(up)": 2}[inside]
    jaxpr = derivative(lambda x, ws: unroll_stack(f"first(5,{inside})", block, 2 * x, ws)[0].sum(), listed=True)
    assert saved_values(jaxpr).device_bytes == (5 * per_block + 7 * 4) * VALUE
    assert count_work(jaxpr).recomputed_matmuls == 5 * {"full": 2, "save(up)": 1}[inside]


def test_as_many_segments_as_blocks_are_the_program_of_full():
    one = str(derivative(scanned("segments(12)")))
    assert one == str(derivative(scanned("full"))) != str(derivative(scanned("none")))


def test_a_policy_for_blocks_is_the_scan_by_hand():
    by_hand = jax.make_jaxpr(lambda x, ws: lax.scan(remat("save(up)")(block), x, ws))(array(4, 8), array(3, 8, 8))
    ours = jax.make_jaxpr(lambda x, ws: scan_stack("save(up)", block, x, ws))(array(4, 8), array(3, 8, 8))
    assert str(ours) == str(by_hand)


def test_parts_of_one_size_are_traced_once():
    calls = []

    def counted(x, w):
        calls.append(None)
        return block(x, w)

    jax.make_jaxpr(lambda x, ws: unroll_stack("segments(4)", counted, x, ws))(array(4, 8), [array(8, 8)] * LAYERS)
    assert len(calls) == 3  # the blocks of one segment


# ---- auto


def wide(x, w):
    """A block that keeps much inside: its input, and two values of 16 times that, tanh(x @ w) and its slope."""
    return x + jnp.tanh(x @ w) @ w.T, None


def borders_of(policy, layers, width=128):
    def loss(x, ws):
        return unroll_stack(policy, wide, 2 * x, ws)[0].sum()

    jaxpr = jax.make_jaxpr(jax.grad(loss, (0, 1)))(array(4, 8), [array(8, width)] * layers)
    return saved_values(jaxpr).device_bytes // VALUE


def test_auto_weighs_what_is_kept_inside():
    # A block keeps its input, tanh, and what the slope takes besides: about 1 + 2·16 = 33 carries. k + 33·ceil(64/k) is
    # least at 64 segments of 1 (97), before 32 of 2 (98); with a narrow inside, of 1 + 2/8, near sqrt.
    assert borders_of("segments(auto)", 64) == 64
    assert borders_of("segments(auto)", 64, width=1) in range(8, 11)
    assert borders_of("segments(sqrt)", 64) == 8
    # With full inside a block keeps its input alone: k + ceil(64/k) is least at 8.
    assert borders_of("segments(auto,full)", 64) == 8


def test_auto_counts_the_copy_of_weights_that_an_uneven_scan_makes():
    def borders(width):
        def loss(x, ws):
            return scan_stack("segments(auto,full)", lambda x, w: (x + jnp.tanh(x @ w).sum(), None), x, ws)[0].sum()

        jaxpr = jax.make_jaxpr(jax.grad(loss))(array(4, 8), array(7, 8, width))
        return [eqn.eqn.params["length"] for eqn in walk(jaxpr) if eqn.primitive == "scan"]

    # Seven blocks are divided evenly into one part or seven only; 3 + 3 carries would be less than 7 + 1.
    assert set(borders(width=64)) in ({7}, {7, 1})


# ---- transformations


@pytest.mark.parametrize("policy", ["segments(2)", "segments(2,full)", "first(1)"])
def test_under_jit_vmap_and_forward_mode(policy):
    x, ws = values(4)
    loss, plain = scanned(policy), scanned("none")
    tangents = (jnp.ones_like(x), jnp.ones_like(ws))
    np.testing.assert_allclose(jax.jvp(loss, (x, ws), tangents), jax.jvp(plain, (x, ws), tangents), rtol=1e-5)
    xs = jnp.stack([x, 2 * x])
    mapped = [jax.jit(jax.vmap(jax.grad(f), (0, None)))(xs, ws) for f in (loss, plain)]
    np.testing.assert_allclose(*mapped, rtol=1e-4, atol=1e-5)
    twice = [jax.grad(lambda x, f=f: jax.grad(f)(x, ws).sum())(x) for f in (loss, plain)]
    np.testing.assert_allclose(*twice, rtol=1e-3, atol=1e-4)


def test_with_donated_arguments_and_in_bfloat16(remat3):
    x, ws = (value.astype(jnp.bfloat16) for value in values(4))

    def step(ws, x):
        return ws - jax.grad(scanned("segments(2)"), 1)(x, ws)

    donated = jnp.array(ws)
    found = jax.jit(step, donate_argnums=0)(donated, x)
    assert donated.is_deleted()
    expected = ws - jax.grad(scanned("none"), 1)(x, ws)
    np.testing.assert_allclose(found.astype(jnp.float32), expected.astype(jnp.float32), rtol=0.05, atol=0.05)


def test_any_pytree_is_carried():
    def body(carry, layer):
        (number, w), flag = layer
        x, count = carry["x"] @ w, carry["count"] + number
        return {"x": jnp.tanh(x), "count": count}, {"twice": 2 * number, "flag": flag}

    xs = ((jnp.arange(6), jnp.ones((6, 3, 3))), None)
    init = {"x": jnp.ones((2, 3)), "count": 0}
    carry, results = scan_stack("segments(4)", body, init, xs)  # 2, 2 and 1, 1
    expected, expected_results = lax.scan(body, init, xs)
    jax.tree.map(np.testing.assert_array_equal, carry, expected)
    jax.tree.map(np.testing.assert_array_equal, results, expected_results)
    none = scan_stack("segments(2)", lambda x, _: (x + 1, None), 0, None, length=6)
    assert none == (6, None)


def test_python_values_of_a_layer_stay_as_they_are():
    def body(x, layer):
        w, is_last, kind = layer
        assert isinstance(is_last, bool)
        assert kind == "dense"
        return (x @ w if is_last else jnp.tanh(x @ w)), None

    layers = [(jnp.ones((3, 3)), number == 3, "dense") for number in range(4)]
    x = jnp.ones((2, 3))
    found, results = unroll_stack("segments(auto)", body, x, layers)
    np.testing.assert_allclose(found, unroll_stack("none", body, x, layers)[0])
    assert results == [None] * 4


def test_an_empty_list_and_a_stack_of_none():
    assert unroll_stack("segments(auto)", block, 3.0, []) == (3.0, [])


# ---- a scan of somebody else


def test_the_scan_that_a_function_runs():
    def stack(x, ws):
        return lax.scan(block, 2 * x, ws)[0].sum()

    jaxpr = derivative(remat_scan("segments(4)")(stack))
    assert saved_values(jaxpr).device_bytes == 4 * VALUE
    before = lax.scan
    with pytest.raises(PolicyError, match=r"remat_scan\('full'\) got a call that runs no jax\.lax\.scan.*unroll_stack"):
        remat_scan("full")(jnp.sin)(1.0)
    with pytest.raises(PolicyError, match=r"got a scan with unroll=2, and a divided stack runs in other loops"):
        remat_scan("segments(2)")(lambda x, ws: lax.scan(block, x, ws, unroll=2))(*values(4))
    with pytest.raises(PolicyError, match=r"got a reversed scan, which it does not divide\. Scan forward"):
        remat_scan("segments(2)")(lambda x, ws: lax.scan(block, x, ws, reverse=True))(*values(4))
    with pytest.raises(ZeroDivisionError):
        remat_scan("segments(2)")(lambda: 1 / 0)()
    assert lax.scan is before
    with pytest.raises(PolicyError, match="remat_scan got 3, which is not a module's instance or a function"):
        remat_scan("full")(3)


def test_scans_inside_the_blocks_are_theirs():
    def outer(x, w):
        return lax.scan(lambda x, _: (jnp.sin(x @ w), None), x, None, length=5)[0], None

    jaxpr = derivative(remat_scan("segments(4)")(lambda x, ws: lax.scan(outer, x, ws)[0].sum()))
    lengths = [eqn.eqn.params["length"] for eqn in walk(jaxpr) if eqn.primitive == "scan"]
    assert set(lengths) == {4, 3, 5}


# ---- what does not fit


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("segments(7)", r"segments\(7\) divides a stack into 7 segments, and this stack has 6 blocks\. "
                        r"Give a number of at most 6, or segments\(auto\)"),
        ("first(7)", r"first\(7\) puts the first 7 blocks of a stack under a policy, and this stack has 6 blocks\."),
        ("every(7)", r"every\(7\) makes groups of 7 blocks, and this stack has 6 blocks\. Give a number of at most 6"),
        ("segments(2,segments(4))", r"segments\(4\) .*, and a part of the stack under segments\(2\) has 3 blocks"),
        ("first(2,every(3))", r"every\(3\) .*, and a part of the stack under first\(2\) has 2 blocks"),
    ],
)  # fmt: skip
def test_a_count_that_does_not_fit(policy, message):
    with pytest.raises(PolicyError, match=message):
        scan_stack(policy, block, *values(6))
    with pytest.raises(PolicyError, match=message):
        unroll_stack(policy, block, values(6)[0], list(values(6)[1]))


@pytest.mark.parametrize(
    ("xs", "length"), [((jnp.ones(3), jnp.ones(4)), None), (jnp.ones(3), 4), (None, None), (jnp.ones(()), None)]
)
def test_a_stack_without_one_length(xs, length):
    with pytest.raises(PolicyError, match=r"scan_stack got a stack without one length: .*give length=L"):
        scan_stack("full", lambda x, _: (x, None), 1.0, xs, length)


# ---- remat and trace


def test_remat_leaves_a_block_alone():
    for policy in ("segments(4,full)", "first(2)", "every(2)"):
        assert remat(policy)(block) is block


def gradient_step(loss):
    return Step(jax.grad(loss, (0, 1)), (array(4, 8), array(LAYERS, 8, 8)))


def test_trace_warns_of_a_policy_without_a_stack():
    policy = get_policy("segments(4,save(up))")
    wrapped = remat(policy)(block)
    traced = trace(gradient_step(lambda x, ws: lax.scan(wrapped, x, ws)[0].sum()), get_target("cpu"), policy)
    (warning,) = traced.warnings
    assert "'segments(4,save(up))' had no effect: the step differentiates no stack" in warning
    assert "scan_stack, unroll_stack or remat_scan" in warning
    traced = trace(gradient_step(scanned(policy)), get_target("cpu"), policy)
    assert traced.warnings == ()
    # A part runs again as a whole: matmuls that the policy inside keeps are no surprise.
    policy = get_policy("segments(4,dots_saveable)")
    assert trace(gradient_step(scanned(policy)), get_target("cpu"), policy).warnings == ()


def test_trace_warns_where_jax_does_not_ask_the_policy_inside(remat3):
    for name, expected in {"segments(4,save(up))": remat3, "every(2,full)": False, "first(2,save(up))": False}.items():
        policy = get_policy(name)
        warnings = trace(gradient_step(scanned(policy)), get_target("cpu"), policy).warnings
        assert ["what 'save(up)' keeps inside a part" in warning for warning in warnings] == [True] * expected


def test_trace_checks_the_names_inside():
    policy = get_policy("segments(4,save(upp))")
    with pytest.raises(PolicyError, match=r"policy 'save\(upp\)' names upp, and none of them is in the model.*up"):
        trace(gradient_step(scanned(policy)), get_target("cpu"), policy)
