"""The solver against brute force: every choice of what to keep, every choice of a solution for each block."""

import itertools
import random

import jax
import jax.numpy as jnp
import pytest
from planned import planner_of

from remat_kit import get_target
from remat_kit._plan.block import Block
from remat_kit._plan.choose import Choice, choose
from remat_kit._plan.flat import Flat
from remat_kit._plan.fusion import Fusion
from remat_kit._plan.graph import build_graph
from remat_kit._plan.solve import Limits, Solution, bare, evaluate, frontier, optimum

CHIP = get_target("h100-sxm-80gb").chip


def mlp(x, w1, w2):
    return x + jnp.tanh(jax.nn.softmax(x @ w1) @ w2)


def attention(x, w1, w2):
    scores = jnp.exp(x @ w1 @ x.T)
    return jnp.sin(scores / scores.sum(axis=-1, keepdims=True) @ x) @ w2


def branches(x, w1, w2):
    a, b = jnp.sin(x @ w1), jnp.cos(x @ w1)
    return (a * b) @ w2 + x


def graph_of(function, repeats=1, seed=None):
    """The graph of a small block; with a seed, costs and sizes are drawn anew, so that every decision matters."""
    x, w1, w2 = jnp.ones((8, 16)), jnp.ones((16, 16)), jnp.ones((16, 16))
    block = Block(Flat(jax.make_jaxpr(function)(x, w1, w2)), {}, "")
    jax.make_jaxpr(jax.grad(lambda *args: jnp.sum(block(*args)[0]), (0, 1, 2)))(x, w1, w2)
    graph = build_graph(list(block.seen.values())[-1], {1, 2}, CHIP, repeats)
    if seed is not None:
        dice = random.Random(seed)
        for value in graph.values.values():
            value.save_s = dice.choice([0.0, 1e-6, 5e-6])
            value.bytes = dice.choice([64, 256, 1024]) if value.bytes else 0
            value.resident = value.bytes if value.resident else 0
        for step in graph.ops:
            step.again_s = dice.choice([1e-7, 2e-6, 1e-5])
    return graph


def keepable(graph):
    return [
        number for number, value in graph.values.items() if not value.is_input and value.may_keep and not value.free
    ]


def every_solution(graph):
    candidates = keepable(graph)
    assert len(candidates) <= 15, "brute force would take too long"
    for count in range(len(candidates) + 1):
        for kept in itertools.combinations(candidates, count):
            found = evaluate(graph, kept)
            if found is not None:
                yield found


@pytest.mark.parametrize("repeats", [1, 4])
@pytest.mark.parametrize("seed", [None, 1, 2, 3])
@pytest.mark.parametrize("function", [mlp, attention, branches])
def test_the_optimum_is_that_of_brute_force(function, seed, repeats):
    graph = graph_of(function, repeats, seed)
    everything = list(every_solution(graph))
    sizes = sorted({each.bytes for each in everything})
    for limit in (sizes[0], sizes[len(sizes) // 4], sizes[len(sizes) // 2], sizes[-1]):
        best = min((each.seconds for each in everything if each.bytes <= limit), default=None)
        found = optimum(graph, Limits(total_bytes=limit))
        assert found is not None
        assert best is not None
        assert found.bytes <= limit
        assert found.seconds == pytest.approx(best, rel=1e-6, abs=1e-10)


def test_what_is_kept_can_be_limited_by_itself():
    graph = graph_of(attention, seed=5)
    everything = list(every_solution(graph))
    limit = sorted({each.stack_bytes for each in everything})[3]
    found = optimum(graph, Limits(kept_bytes=limit))
    best = min(each.seconds for each in everything if each.stack_bytes <= limit)
    assert found is not None
    assert found.stack_bytes <= limit
    assert found.seconds == pytest.approx(best, rel=1e-6, abs=1e-10)


def test_nothing_is_within_a_limit_that_is_too_low():
    graph = graph_of(mlp)
    least = min(each.bytes for each in every_solution(graph))
    assert optimum(graph, Limits(total_bytes=least - 1)) is None
    assert optimum(graph, Limits(total_bytes=least)) is not None


def test_what_must_not_run_again_is_kept_or_what_is_made_of_it():
    graph = graph_of(attention)
    product = next(step for step in graph.ops if graph.derivative.flat.ops[step.position].primitive == "exp")
    product.may_run_again = False
    assert evaluate(graph, ()) is None
    found = optimum(graph)
    assert found is not None
    assert product.position not in found.again
    everything = list(every_solution(graph))
    assert everything
    assert found.seconds == pytest.approx(min(each.seconds for each in everything), rel=1e-6, abs=1e-10)


def test_the_frontier_goes_from_the_fewest_bytes_to_the_least_time():
    graph = graph_of(attention, seed=7)
    found = frontier(graph)
    everything = list(every_solution(graph))
    assert min(each.bytes for each in found) == min(each.bytes for each in everything)
    assert min(each.seconds for each in found if not each.is_bare) == pytest.approx(
        min(each.seconds for each in everything), abs=1e-10
    )
    for one, other in itertools.permutations(found, 2):
        better = other.seconds <= one.seconds and other.stack_bytes <= one.stack_bytes
        assert not (better and other.working_bytes <= one.working_bytes)


def solution(seconds, stack, working):
    return Solution(frozenset({stack}), frozenset(), frozenset(), seconds, stack, 0, working)


FRONTIERS = {
    "a": (solution(9.0, 1, 6), solution(5.0, 4, 5), solution(1.0, 9, 2)),
    "b": (solution(7.0, 2, 9), solution(2.0, 6, 3)),
}


@pytest.mark.parametrize("kinds", [("a",), ("a", "b"), ("b", "a"), ("a", "b", "a"), ("b", "a", "b", "a")])
@pytest.mark.parametrize("kept", [6, 12, 20, None])
@pytest.mark.parametrize("backward", [14, 22, None])
def test_the_choice_is_that_of_brute_force(kinds, kept, backward):
    repeats = {"a": 1, "b": 3}
    best = None
    for solutions in itertools.product(*(FRONTIERS[kind] for kind in kinds)):
        choice = Choice(kinds, solutions, tuple(repeats[kind] for kind in kinds))
        within = (kept is None or choice.kept_bytes <= kept) and (backward is None or choice.backward_bytes <= backward)
        if within and (best is None or choice.seconds < best.seconds):
            best = choice
    found = choose(kinds, repeats, FRONTIERS, kept, backward)
    assert (found is None) == (best is None)
    if found is not None and best is not None:
        assert found.seconds == pytest.approx(best.seconds)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("kinds", [("a", "a", "a"), ("a", "a", "b"), ("b", "a", "a"), ("a", "a", "b", "b")])
def test_the_choice_in_runs_of_equal_blocks_is_that_of_brute_force(kinds, seed):
    dice = random.Random(seed)
    drawn = [[solution(*(dice.randint(1, most) for most in (20, 12, 12))) for _ in range(3)] for _ in "ab"]
    frontiers = dict(zip("ab", drawn, strict=True))
    choices = [Choice(kinds, each, (1,) * len(kinds)) for each in itertools.product(*map(frontiers.get, kinds))]
    for limit in (12, 20, 28):
        within = [choice.seconds for choice in choices if choice.backward_bytes <= limit]
        found = choose(kinds, {"a": 1, "b": 1}, frontiers, None, limit)
        assert (found is None) == (not within)
        if found is not None:
            assert found.backward_bytes <= limit
            assert found.seconds == pytest.approx(min(within))


def test_equal_blocks_may_get_different_decisions():
    # Two copies of the fast solution are too much, two of the slow one waste room.
    found = choose(("a",) * 3, {"a": 1}, {"a": FRONTIERS["a"]}, 18, None)
    assert found is not None
    assert len(set(found.solutions)) > 1
    # What works with most comes first: backward reaches it last.
    working = [each.working_bytes for each in found.solutions]
    assert working == sorted(working, reverse=True)


def test_moving_to_the_host_is_that_of_brute_force(monkeypatch):
    monkeypatch.setattr("remat_kit._plan.solve._LEAST_OFFLOADED", 1)
    graph = graph_of(branches, repeats=3, seed=4)
    graph.forward_s, graph.host_bytes_per_s = 2e-6, 5e8  # two of the larger values fit beside what is computed
    candidates = [*keepable(graph), *(n for n, value in graph.values.items() if value.is_input and not value.free)]
    everything = []
    for where in itertools.product(("again", "device", "host"), repeat=len(candidates)):
        kept = [number for number, place in zip(candidates, where, strict=True) if place == "device"]
        moved = [number for number, place in zip(candidates, where, strict=True) if place == "host"]
        found = evaluate(graph, kept, moved)
        if found is not None:
            everything.append(found)
    for limit in sorted({each.bytes for each in everything})[:: max(1, len(everything) // 2000)][:6]:
        best = min(each.seconds for each in everything if each.bytes <= limit)
        found = optimum(graph, Limits(total_bytes=limit, offload=True))
        assert found is not None
        assert found.bytes <= limit
        assert found.seconds == pytest.approx(best, rel=1e-6, abs=1e-10)
    without = optimum(graph, Limits(total_bytes=limit))
    assert without is None or without.seconds >= best - 1e-12


def test_without_a_checkpoint_all_that_backward_takes_is_kept():
    graph = graph_of(attention)
    found = bare(graph)
    assert found is not None
    assert found.is_bare
    assert not found.again
    assert found.seconds == 0  # what other decisions are compared with
    assert found.stack_bytes == graph.bare_bytes <= sum(graph.values[number].bytes for number in graph.needed)
    assert found in frontier(graph)


def test_in_a_scan_a_block_without_a_checkpoint_stacks_all_that_backward_takes():
    graph = graph_of(attention, repeats=3)
    found = bare(graph)
    assert found is not None
    assert found.stack_bytes == 3 * sum(graph.values[number].bytes for number in graph.needed)
    assert found.seconds == pytest.approx(sum(graph.values[number].save_s for number in graph.needed))


@pytest.mark.parametrize("closed_over", [False, True], ids=["given", "closed over"])
@pytest.mark.parametrize(
    ("generator", "not_again"),
    [("threefry2x32", []), ("rbg", ["random_bits"] * 2), ("unsafe_rbg", ["random_bits"] * 2 + ["random_split"])],
)
def test_random_bits_that_may_come_out_otherwise_are_not_made_again(generator, not_again, closed_over):
    key = jax.random.key(0, impl=generator)

    def dropped(x, w, key):
        first, second = (jax.random.bernoulli(each, 0.5, x.shape) for each in (key, jax.random.split(key)[0]))
        return x + jnp.where(first & second, jnp.sin(x @ w), 0.0)

    def loss(ws, x, given):
        for w in ws:
            x = dropped(x, w, key if closed_over else given)
        return jnp.sum(x**2)

    w = jnp.ones((8, 8))
    for kind in planner_of(loss, [w, w, w], w, key).found.kinds.values():
        ops = kind.graph.derivative.flat.ops
        assert sorted(ops[each.position].primitive for each in kind.graph.ops if not each.may_run_again) == not_again
        assert (evaluate(kind.graph, ()) is None) == bool(not_again)


def halves(x, w):
    gate, up = jnp.split(x @ w, 2, axis=-1)
    return jnp.sin(gate) * up


def turned(x, w):
    whole = x @ w
    return jnp.abs(jnp.conj(jax.lax.complex(jnp.arctan(whole), jnp.arcsinh(whole))))


@pytest.mark.parametrize("function", [halves, turned])
def test_what_xla_fuses_is_no_kernel_and_no_array(function):
    x, w = jnp.ones((8, 16)), jnp.ones((16, 16))
    block = Block(Flat(jax.make_jaxpr(function)(x, w)), {}, "")
    jax.make_jaxpr(jax.grad(lambda *args: jnp.sum(block(*args)[0]), (0, 1)))(x, w)
    graph = build_graph(list(block.seen.values())[-1], {1}, CHIP)
    ops = graph.derivative.flat.ops
    fusion = Fusion(graph.derivative)
    kernels = {ops[at].primitive for at, own in fusion.kernels().items() if at == own} - {ops[-1].primitive}
    linear = {ops[at].primitive for at in graph.derivative.linear}
    assert kernels - linear <= {"dot_general"}
    assert all(fusion.is_materialized(n) == (ops[fusion.maker[n][0]].primitive == "dot_general")
               for n in fusion.maker if n not in fusion.flat.outputs)  # fmt: skip
