"""What a plan's tables and reasons say: the FLOPs are those that JAX counts, and no sentence is untrue."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import planned
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from planned import X, plan_of, planner_of

from remat_kit._jaxpr import count_work
from remat_kit._plan.choose import Choice
from remat_kit._plan.describe import reasons_for
from remat_kit._plan.make import REUSED, plan_with
from remat_kit._plan.plan import NOT_KEPT, Tried
from remat_kit._plan.search import Candidate
from remat_kit._plan.solve import bare, evaluate
from remat_kit._report import plan as report


def many_products(x, w):
    """More operations than have a row of their own."""
    for _ in range(16):
        x = jnp.tanh(x @ w["square"])
    return x


def loop(x, w):
    hidden = jnp.tanh(x @ w["up"])
    hidden = jax.lax.scan(lambda h, _: (jnp.tanh(h @ w["mix"]), None), hidden, None, length=2)[0]
    return x + jnp.sin(hidden @ w["mix"]) @ w["down"]


def counted_loop(x, w):
    hidden = jax.lax.fori_loop(0, 3, lambda _, h: jnp.tanh(h @ w["mix"]), jnp.tanh(x @ w["up"]))
    return x + hidden @ w["down"]


def branch(x, w):
    hidden = jax.lax.cond(x[0, 0] > 0, lambda v: jnp.tanh(v @ w["up"]), lambda v: jnp.sin(v @ w["up"]), x)
    return x + jnp.sin(hidden @ w["mix"]) @ w["down"]


def two_loops(x, w):
    with jax.named_scope("inner"):
        hidden = jax.lax.scan(lambda h, _: (jnp.tanh(h @ w["mix"]), None), x @ w["up"], None, length=2)[0]
    return x + branch(hidden @ w["down"], w)


def without_tangents(x, w):
    """A loop over whole numbers, and one whose result is a constant to backward."""
    steps = jax.lax.fori_loop(0, 3, lambda _, n: n + 1, 0)
    scale = jax.lax.scan(lambda h, _: (jnp.tanh(h), None), jax.lax.stop_gradient(x), None, length=2)[0]
    return x + jnp.tanh(x @ w["up"]) @ w["down"] * scale * steps


def linear_loop(x, w):
    """A loop of whose results backward needs nothing."""
    return x + jax.lax.scan(lambda h, _: (h * 2.0, None), jnp.tanh(x @ w["up"]) @ w["down"], None, length=2)[0]


# What of each can never be kept.
BLOCKS = {
    planned.layer: "",
    many_products: "",
    without_tangents: "",
    loop: "scan",
    counted_loop: "scan",
    branch: "cond",
    two_loops: "scan, cond",
}


def weights() -> dict[str, Any]:
    made = planned.weights(layers=3)
    made["layers"]["square"] = jnp.ones((3, 4, 4))
    return made


def loss_of(block):
    return lambda w, x: jnp.sum(jax.lax.scan(lambda x, w: (block(x, w), None), x @ w["in"], w["layers"])[0] ** 2)


def with_nothing_kept(planner):
    solutions: dict[str, Any] = {name: evaluate(kind.graph, ()) for name, kind in planner.found.kinds.items()}
    return plan_of(planner, solutions)


def rows_of(plan):
    return [row for block in plan.blocks for row in block.again]


@pytest.mark.parametrize("keeps", ["nothing", "everything"])
@pytest.mark.parametrize("block", BLOCKS)
def test_the_rows_add_up_to_what_jax_runs_again(block, keeps):
    loss, w = loss_of(block), weights()
    planner = planner_of(loss, w, X)
    solutions = {}
    for name, kind in planner.found.kinds.items():
        values = [number for number, value in kind.graph.values.items() if value.may_keep and not value.is_input]
        solutions[name] = evaluate(kind.graph, values if keeps == "everything" else ())
    plan = plan_of(planner, solutions)
    counted = count_work(jax.make_jaxpr(plan.apply(jax.value_and_grad(loss)))(w, X)).recomputed_flops
    assert sum(row.flops for row in rows_of(plan)) == counted
    assert [row.name for row in rows_of(plan) if row.name.startswith(NOT_KEPT)] == [
        f"{NOT_KEPT}{each}" for each in [BLOCKS[block]] if each
    ]
    assert bool(counted) == (keeps == "nothing" or bool(BLOCKS[block]))


def test_the_rows_add_up_to_the_figure_of_the_compiled_step():
    planner = planner_of(loss_of(many_products), weights(), X)
    plan = plan_with(planner, 1)  # nothing fits, so little is kept
    assert plan.recompute_flops > 0
    assert sum(row.flops for row in rows_of(plan)) == plan.recompute_flops


def test_a_block_that_is_not_checkpointed_runs_no_loop_again():
    planner = planner_of(loss_of(loop), weights(), X)
    solutions: dict[str, Any] = {name: bare(kind.graph) for name, kind in planner.found.kinds.items()}
    assert not any(row.flops for row in rows_of(plan_of(planner, solutions)))


def test_a_loop_of_which_backward_needs_nothing_is_not_said_to_run_again():
    planner = planner_of(loss_of(linear_loop), weights(), X)
    plan = with_nothing_kept(planner)
    assert not any(row.name.startswith(NOT_KEPT) for row in rows_of(plan))


def test_a_block_may_carry_whole_numbers_beside_what_is_differentiated():
    def loss(w, x):
        start = (x @ w["in"], jnp.int32(1))
        return jnp.sum(jax.lax.scan(lambda c, w: ((loop(c[0], w) * c[1], c[1] + 1), None), start, w["layers"])[0][0])

    planner = planner_of(loss, weights(), X)
    plan = with_nothing_kept(planner)
    assert sum(row.flops for row in rows_of(plan)) == planner.found.traced.work.recomputed_flops > 0


def test_a_loop_is_counted_where_shardings_are_explicit():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Explicit,))
    whole, split = (NamedSharding(mesh, spec) for spec in (PartitionSpec(), PartitionSpec("data")))
    w = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole), weights())
    with jax.set_mesh(mesh):
        planner = planner_of(loss_of(loop), w, jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=split))
    plan = with_nothing_kept(planner)
    assert sum(row.flops for row in rows_of(plan)) == planner.found.traced.work.recomputed_flops > 0
    assert "data" in str(planner.found.traced.traced.jaxpr)


def test_a_report_shows_what_cannot_be_kept_and_of_what_its_figures_are():
    planner = planner_of(loss_of(loop), weights(), X)
    plan = with_nothing_kept(planner)
    lines = report.render(plan).splitlines()
    (line,) = (line for line in lines if "cannot be kept" in line)
    assert line.split() == ["cannot", "be", "kept:", "scan", "1944", "FLOP", "not", "modelled"]
    assert any("each time the loss is differentiated" in line for line in lines)


@pytest.mark.parametrize(("name", "heading"), [("plan 1", ""), (f"plan 1{REUSED}", ", for this budget and for others")])
def test_a_report_says_when_rows_were_compiled_for_another_budget(name, heading):
    planner = planner_of(planned.scanned(), planned.weights(), X)
    plan = with_nothing_kept(planner)
    plan = dataclasses.replace(plan, tried=(Tried(name, 1, 1.0, 1, 0, True),))
    assert f"Compiled on the way{heading}" in report.render(plan).splitlines()


def candidate(name: str, seconds: float, flops: int = 0, need: int = 1 << 20) -> Candidate:
    peak = SimpleNamespace(phase="backward", module="")
    compiled: Any = SimpleNamespace(
        need_bytes=need, seconds=seconds, recompute_flops=flops, explanation=SimpleNamespace(peak=peak)
    )
    return Candidate(name, Choice((), (), ()), compiled, None)


@pytest.mark.parametrize(
    ("seconds", "flops", "said"),
    [
        (0.97, 2_000_000, "970.00 ms, 3.0% less than full's 1.00 s, the fastest of the named policies that were "
         "compiled; 1.00 MFLOP less of matrix products runs again."),
        (1.25, 4_000_000, "1.25 s, 25.0% more than full's 1.00 s, the fastest of the named policies that were "
         "compiled; 1.00 MFLOP more of matrix products runs again."),
        (1.0001, 3_000_000, "1.00 s, as long as full's 1.00 s, the fastest of the named policies that were "
         "compiled; matrix products of as many FLOP run again."),
    ],
)  # fmt: skip
def test_a_plan_is_compared_with_a_policy_in_words(seconds, flops, said):
    best = candidate("plan 1", seconds, flops)
    reasons = reasons_for(best, candidate("full", 1.0, 3_000_000), [best], None)
    assert f"It is predicted to take {said}" in reasons


@pytest.mark.parametrize(
    ("need", "said"), [(1 << 19, "512.00 KiB less"), (3 << 19, "512.00 KiB more"), (1 << 20, "as much")]
)
def test_a_plan_is_compared_with_the_one_that_keeps_least(need, said):
    least, best = candidate("all again", 2.0, need=need), candidate("plan 1", 1.0)
    reasons = reasons_for(best, None, [least, best], None)
    assert reasons[-1] == f"Keeping as little as each block can needs {said} and takes 2.00 s."
