"""Why a policy did nothing, found in small programs that are each wrong in one way, and a control beside each."""

import dataclasses
import functools
from typing import Any

import hlo_samples  # sets what the plugin needs, before JAX starts
import jax
import jax.numpy as jnp
import pytest
from stacks import Wrap, plain, scanned, unrolled

from remat_kit import CompileOptions, Record, Step, Workload, analyze, compile_step, get_target, trace
from remat_kit._effect import Effect, effect, is_without_use, with_effects
from remat_kit._errors import RematKitError
from remat_kit._explanation import Advice, Explanation, Floor, Holder, Moment, Program
from remat_kit._reasons import CHECKS, REASONS, WASTED
from remat_kit._report import rows, text
from remat_kit._units import MiB

LAYERS, BATCH, WIDTH, HIDDEN = 4, 1024, 64, 256
X = jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)
STACK = (
    jax.ShapeDtypeStruct((LAYERS, WIDTH, HIDDEN), jnp.float32),
    jax.ShapeDtypeStruct((LAYERS, HIDDEN, WIDTH), jnp.float32),
)
MATMUL = 2 * BATCH * WIDTH * HIDDEN
JAX = jax.checkpoint_policies


full: Wrap = jax.checkpoint
merged: Wrap = functools.partial(jax.checkpoint, prevent_cse=False)


@functools.cache
def kept(policy: str) -> Wrap:
    """`jax.checkpoint` with one of JAX's policies."""
    return functools.partial(jax.checkpoint, policy=getattr(JAX, policy))


@functools.cache
def named(*names: str) -> Wrap:
    return functools.partial(jax.checkpoint, policy=JAX.save_only_these_names(*names))


@functools.cache
def all_but(*names: str) -> Wrap:
    policy = JAX.save_anything_except_these_names(*names)
    return functools.partial(jax.checkpoint, policy=policy, prevent_cse=False)


def tanh_net(wrap: Wrap) -> Any:
    """Square layers: what a layer takes in is as large as anything in it."""

    def loss(ws: Any, x: Any) -> Any:
        for w in ws[0][:, :, :WIDTH]:
            x = wrap(lambda x, w: jnp.tanh(x @ w))(x, w)
        return x.sum()

    return loss


def mapped(wrap: Wrap) -> Any:
    """Two models side by side, as an ensemble."""

    def loss(ws: Any, x: Any) -> Any:
        w, x = ws[0][:, :, :WIDTH].reshape(2, LAYERS // 2, WIDTH, WIDTH), jnp.stack([x, x + 1])
        for i in range(LAYERS // 2):
            x = wrap(jax.vmap(lambda x, w: jnp.sin(jnp.sin(x @ w) @ w)))(x, w[:, i])
        return x.sum()

    return loss


def gradients(loss: Any) -> Any:
    return jax.value_and_grad(loss)


def large_update(loss: Any) -> Any:
    """An optimizer that needs more than forward and backward together: it sorts [4096, 2048] products."""

    def fn(ws: Any, x: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(ws, x)
        v = grads[0].reshape(-1)[:4096]
        scale = jnp.sort(v[:, None] * v[None, :2048], axis=0)[0].sum()  # sorting leaves nothing to fuse
        return jax.tree.map(lambda w, g: w - scale * g, ws, grads), value

    return fn


@functools.cache
def record(
    program: Any, wrap: Wrap, outer: Wrap = plain, policy: str = "full", step: Any = gradients, target: str = "cpu",
    memory: int = 0, xla_remat: str = "off",
) -> Record:  # fmt: skip
    """The row of a program whose layers are wrapped by `wrap`, and which as a whole is wrapped by `outer`."""
    described = get_target(target)
    if memory:
        described = dataclasses.replace(described, chip=dataclasses.replace(described.chip, memory_bytes=memory))
    loss = program(wrap) if outer is plain else program(wrap, outer)
    compiled = compile_step(trace(Step(step(loss), (STACK, X)), described), CompileOptions(xla_remat=xla_remat))
    return analyze(compiled, Workload("tests:effect"), policy)


def none(program: Any, **options: Any) -> Record:
    return record(program, plain, policy="none", **options)


def known(count: int | None) -> int:
    assert count is not None
    return count


def says(found: Effect, *words: str) -> None:
    for word in words:
        assert word in found.text, found.text


# Policies that work: the control of every case below


@pytest.mark.parametrize("program", [scanned, unrolled])
def test_a_checkpointed_layer_helps(program):
    ours, base = record(program, full), none(program)
    found = effect(ours, base)
    assert (found.code, found.reasons) == ("helped", ())
    assert found.need_bytes == known(ours.need_bytes) - known(base.need_bytes) < 0
    assert found.live_peak_bytes == known(ours.live_peak_bytes) - known(base.live_peak_bytes) < 0
    says(found, "less than none", "saved activations f32[", "Costs 134.22 MFLOP of recomputation", "The live peak now")
    assert LAYERS * MATMUL == 134_217_728
    says(found, f"instead of {known(base.saved_bytes) / MiB:.2f} MiB")


def test_a_name_that_spares_a_matmul_trades_memory_for_it():
    found = effect(record(scanned, named("up"), policy="save(up)"), record(scanned, full))
    assert (found.code, found.reasons) == ("traded", ())
    # "up" of each layer, f32[1024, 256].
    says(found, "more than full and computes 134.22 MFLOP less again", "The policy keeps 4.00 MiB")
    assert effect(record(scanned, named("up"), policy="save(up)"), none(scanned)).code == "helped"


# One reason each


def test_a_checkpoint_around_the_whole_loss():
    found = effect(record(unrolled, plain, full), none(unrolled))
    assert (found.code, found.reasons) == ("whole_loss", ("whole_loss",))
    says(found, "no effect: one checkpoint holds 100% of the model", "Wrap each layer by itself")


def test_dots_of_a_plain_net_hurt_and_full_finds_nothing_to_drop():
    found = effect(record(tanh_net, kept("dots_saveable"), policy="dots_saveable"), none(tanh_net))
    assert found.code == "hurt"
    assert found.need_bytes > 0
    # The matmul of each layer, f32[1024, 64].
    says(found, "hurt: needs ", " more than none", "The policy keeps 1.00 MiB", "saved activations f32[1024,64]")
    found = effect(record(tanh_net, full), none(tanh_net))
    assert (found.code, found.reasons) == ("nothing_to_drop", ("nothing_to_drop",))
    says(found, "is alive at the live peak", "Let a region hold more than one layer, or use none")


def test_what_xla_merges_again():
    found = effect(record(unrolled, merged), none(unrolled))
    assert (found.code, found.reasons) == ("cse", ("cse",))
    says(found, "the step asks for 134.22 MFLOP again, none for 0 FLOP, and as compiled they differ by 0 FLOP")
    says(found, "Leave prevent_cse on")
    # In a scan there is nothing to merge with.
    assert effect(record(scanned, merged), none(scanned)).code == "helped"


def test_a_checkpoint_outside_of_the_scan():
    found = effect(record(scanned, plain, full), none(scanned))
    assert (found.code, found.reasons) == ("outside_scan", ("outside_scan",))
    says(found, "outside of the scan over 4 layers: its region holds 100% of the model", "scan(remat(layer))")
    found = effect(record(scanned, plain, kept("dots_saveable"), policy="dots_saveable"), none(scanned))
    assert (found.code, found.reasons) == ("hurt", ("outside_scan",))
    # Two levels are not that: what the outer one drops is made again layer by layer.
    assert effect(record(scanned, full, full), none(scanned)).code == "helped"


def test_a_name_that_is_not_there():
    typo = record(scanned, named("upp"), policy="save(upp)")
    found = effect(typo, record(scanned, full))
    assert (found.code, found.reasons, found.need_bytes) == ("no_match", ("no_match",), 0)
    says(found, "save_only_these_names matches nothing in the program: 0 values are kept in 4 regions")
    says(found, "it is what full does", "checkpoint_name")
    found = effect(typo, none(scanned))  # full helps, and so does this
    assert (found.code, found.reasons) == ("helped", ("no_match",))
    says(found, "Found: save_only_these_names matches nothing")


def test_matmuls_under_vmap_have_batch_dimensions():
    base = record(mapped, full)
    found = effect(
        record(mapped, kept("dots_with_no_batch_dims_saveable"), policy="dots_with_no_batch_dims_saveable"), base
    )
    assert (found.code, found.need_bytes) == ("no_match", 0)
    says(found, "dots_with_no_batch_dims_saveable matches nothing", "dots_saveable keeps them")
    assert effect(record(mapped, kept("dots_saveable"), policy="dots_saveable"), base).code == "traded"


def test_a_policy_that_keeps_everything():
    found = effect(record(unrolled, all_but("hidden")), none(unrolled))
    assert (found.code, found.reasons) == ("keeps_everything", ("keeps_everything",))
    says(found, "its 4 regions take", "and run nothing again", "save_anything_except_these_names ignores")


def test_a_policy_that_is_not_used():
    found = effect(dataclasses.replace(none(scanned), policy="full"), none(scanned))
    assert (found.code, found.need_bytes) == ("no_region", 0)
    says(found, "no checkpointed region is in the program", "Wrap the model's blocks with remat(policy)")


def test_a_name_behind_a_nonlinearity():
    late = record(scanned, named("hidden"), policy="save(hidden)")
    found = effect(late, record(scanned, full))
    # It costs 4 MiB more and spares no FLOP.
    assert (found.code, found.reasons) == ("hurt", ("still_recomputed",))
    says(found, "hidden is kept", "the matmul before runs again all the same", "Put the name on the matmul's output")
    found = effect(late, none(scanned))
    assert (found.code, found.reasons) == ("helped", ("still_recomputed",))


def test_a_name_that_backward_does_not_need():
    vain = record(scanned, named("down"), policy="save(down)")
    found = effect(vain, record(scanned, full))
    assert (found.code, found.reasons, found.need_bytes) == ("never_needed", ("never_needed",), 0)
    says(found, "backward never needs down: 0 values are saved in 4 regions", "it is what full does")
    assert effect(vain, none(scanned)).reasons == ("never_needed",)


def test_the_peak_is_in_the_update():
    ours, base = record(unrolled, full, step=large_update), none(unrolled, step=large_update)
    found = effect(ours, base)
    assert (found.code, found.reasons) == ("peak_elsewhere", ("peak_elsewhere",))
    less = (known(base.saved_bytes) - known(ours.saved_bytes)) / MiB
    says(found, f"{less:.2f} MiB less is kept for backward, but that is not alive at the live peak, which is in update")
    says(found, "No policy brings it below", "Donate the state, or shard the optimizer")


@pytest.mark.slow
def test_xlas_own_pass_has_done_it_already():
    hlo_samples.mesh()  # skips the test where there is no plugin
    gpu = {"target": "h100-sxm-80gb", "xla_remat": "on"}
    plenty = none(unrolled, **gpu)
    assert plenty.need_bytes is not None
    scarce = gpu | {"memory": plenty.need_bytes * 9 // 10}
    base = none(unrolled, **scarce)
    assert base.xla_remat == "fired"
    found = effect(record(unrolled, merged, **scarce), base)
    assert found.code == "xla_remat", found
    says(found, "XLA's own rematerialization has done it to none already: it made", "Compare with --xla-remat off")
    assert effect(record(unrolled, full, **gpu), plenty).code == "helped"


# The list itself, on made-up rows


MOMENT = Moment(0, 1, "update", "", "", "", "", "")
PROGRAM = Program("jit_step", 1, 1, 300, 0, 0, 1, 0)


def row(policy: str, need: int, saved: int | None = 100, recompute: int = 0, **changes: Any) -> Record:
    made = Record(
        "tests:rows", {}, policy, "cpu", {"device": 1}, {}, need_bytes=need, live_peak_bytes=need, saved_bytes=saved,
        model_flops=300, step_flops=300 + recompute, recompute_flops=recompute,
    )  # fmt: skip
    return dataclasses.replace(made, **changes)


@pytest.mark.parametrize(
    ("need", "saved", "recompute", "code"),
    [
        (9900, 1000, 0, "unexplained"),  # 1% of the need, 10% of what is kept
        (9899, 1000, 0, "helped"),
        (9900, 999, 0, "helped"),  # a larger part of all that a policy can move
        (10100, 1000, 0, "unexplained"),
        (10101, 1000, 0, "hurt"),
        (10101, 1000, -100, "traded"),
        (10000, 1000, -100, "helped"),  # the same need for fewer FLOPs
        (10000, 1000, -3, "unexplained"),  # 1% of the model's FLOPs
        (9900, None, 0, "unexplained"),
    ],
)
def test_what_counts_as_an_effect(need, saved, recompute, code):
    base = row("full", 10000, saved, 200)
    found = effect(row("save(a)", need, saved, 200 + recompute), base)
    assert (found.code, found.need_bytes) == (code, need - 10000)
    assert found.text.startswith(f"{code}: " if code in ("helped", "hurt", "traded") else "no effect: ")


def test_every_reason_but_the_last_has_a_check_and_the_wasted_ones_are_asked_in_place():
    assert [*CHECKS, "unexplained"] == list(REASONS)
    assert set(WASTED) < set(REASONS)


def test_the_advice_of_the_analyzer_is_the_next_step():
    holder = Holder("loss head", "head", "", "forward", "f32[1]", 900, 1, 1)
    floor = Floor(100, 0, 0, 850, "forward", "head", 950)
    explained = Explanation(MOMENT, (holder,), (), 1.0, 1.0, floor, (), PROGRAM)
    found = effect(row("full", 1000, 0, 100, explanation=explained), row("none", 1000))
    assert found.code == "peak_elsewhere"
    says(found, "below 950 B", "Donate the state")
    advice = (
        Advice("recompute", "blocks", 800, "wrap it"),
        Advice("donate", "batch", 99, "donate the batch"),
        Advice("chunk the loss head", "head", 100, "compute the loss in chunks of the vocabulary."),
    )
    explained = dataclasses.replace(explained, advice=advice)
    found = effect(row("full", 1000, 0, 100, explanation=explained), row("none", 1000))
    # Not a policy's business, and worth a tenth of the need.
    assert found.text.endswith(" Compute the loss in chunks of the vocabulary.")


def test_a_row_that_was_not_compiled_has_no_effect():
    with pytest.raises(RematKitError, match=r"policy 'full' has no need.*Give two rows that were compiled"):
        effect(dataclasses.replace(row("full", 1), need_bytes=None), row("none", 1))


def test_rows_are_compared_with_their_own_base():
    records = [
        row("full", 500),
        row("none", 1000),
        row("save(a)", 2000),
        row("full", 400, target="h100-sxm-80gb"),  # no row of none there
        row("save(a)", 400, target="h100-sxm-80gb"),
        row("save(a)", 400, gemm_backend="triton"),  # no base at all
        dataclasses.replace(row("dots_saveable", 0), need_bytes=None, error="out of memory"),
    ]
    effects = [each.effect for each in with_effects(records)]
    assert [(each or "").partition(":")[0] for each in effects] == ["helped", "", "hurt", "", "no effect", "", ""]
    assert "none" in (effects[0] or "")
    assert "full" in (effects[4] or "")
    assert [dataclasses.replace(each, effect=None) for each in with_effects(records)] == records
    assert with_effects(with_effects(records)) == with_effects(records)
    # Whether XLA's pass fired is a result; that it was allowed is what rows have in common.
    fired = [row("none", 1000, xla_remat="fired"), row("full", 500, xla_remat="on"), row("full", 500)]
    assert [bool(each.effect) for each in with_effects(fired)] == [False, True, False]
    # Where the policy is to allow it, it is compared with the same base as all others.
    own = [row("none", 1000), row("xla_auto", 700, xla_remat="fired"), row("xla_auto", 1000, xla_remat="on")]
    effects = [each.effect or "" for each in with_effects(own)]
    assert effects[1].startswith("helped: needs 300 B")
    assert "XLA's own rematerialization had nothing to do" in effects[2]


def test_reports_tell_of_it():
    records = with_effects([row("none", 1000), row("full", 500), row("save(a)", 2000), row("save(b)", 1000)])
    assert [is_without_use(each.effect) for each in records] == [False, False, True, True]
    notes = rows.notes(records)
    assert [note.partition(": ")[0] for note in notes[-2:]] == ["save(a)", "save(b)"]
    assert notes[-1].startswith("save(b): no effect: ")
    assert "\nEffect (of the policy, against the base row of its sweep)\n  helped: " in text.render(records[1])
    assert "Effect" not in text.render(records[0])
