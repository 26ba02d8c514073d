"""Plans without compiles, and small losses to plan."""

import contextlib
import random
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from remat_kit import Step, get_target
from remat_kit._jaxpr import walk
from remat_kit._plan.describe import block_plans
from remat_kit._plan.plan import Plan
from remat_kit._plan.search import Planner
from remat_kit._plan.solve import Solution, evaluate

# XLA's CPU backend spends most of these files' time on optimizing code that runs once.
jit = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def planner_of(loss: Callable[..., Any], *args: Any, where: str | None = None, unroll: bool = False) -> Planner:
    """A planner for the step that differentiates a loss by its first argument; with `unroll`, its loops written out."""
    planner = Planner.of(Step(jax.value_and_grad(loss), args), get_target("cpu"), where=where, unroll=unroll)
    if not unroll:
        return planner
    assert planner.unrolled is not None
    return planner.unrolled


def plan_of(planner: Planner, solutions: Mapping[str, Solution]) -> Plan:
    """The plan with one solution for each kind of block; nothing in it is compiled."""
    return Plan(
        workload="",
        options={},
        target="cpu",
        mesh={},
        versions={"jax": jax.__version__},
        budget_bytes=None,
        fits=True,
        need_bytes=0,
        host_bytes=0,
        step_s=0.0,
        breakdown_s={},
        recompute_flops=0,
        blocks=block_plans(planner, planner._choice(solutions)),
        outside_flops=planner.found.outside_flops,
        unrolled=planner.found.loops,
    )


def random_solutions(planner: Planner, seed: int) -> dict[str, Solution]:
    """Solutions that keep values by chance, from few to most of them."""
    draw = random.Random(seed)
    found = {}
    for name, kind in sorted(planner.found.kinds.items()):
        share = draw.random()
        values = [number for number, value in kind.graph.values.items() if value.may_keep and value.place]
        solution = evaluate(kind.graph, [number for number in values if draw.random() < share])
        assert solution is not None
        found[name] = solution
    return found


def some_plan(loss: Callable[..., Any], *args: Any, seed: int = 0) -> Plan:
    """A plan for a loss that keeps something in each kind of block."""
    planner = planner_of(loss, *args)
    for number in range(seed, seed + 100):
        solutions = random_solutions(planner, number)
        if all(each.kept for each in solutions.values()):
            return plan_of(planner, solutions)
    raise AssertionError("nothing is kept")


def flops_again(planner: Planner, solutions: Mapping[str, Solution]) -> int:
    """FLOPs of matrix products that run again in a step, by the model."""
    total = 0
    for name, kind in planner.found.kinds.items():
        flops = {step.position: step.flops for step in kind.graph.ops}
        times = kind.graph.repeats * len(kind.instances)
        total += times * sum(flops[position] for position in solutions[name].again)
    return total


def bytes_kept(planner: Planner, solutions: Mapping[str, Solution]) -> int:
    """Bytes that all blocks keep from forward to backward, by the model."""
    return sum(solutions[name].stack_bytes * len(kind.instances) for name, kind in planner.found.kinds.items())


def runs_of(primitive: str, jaxpr: Any) -> int:
    """How often an operation runs in a program."""
    return sum(each.executions for each in walk(jaxpr) if each.primitive == primitive)


Wrap = Callable[[Any], Any]


def plain(function: Any) -> Any:
    return function


def layer(x: Any, w: Mapping[str, Any]) -> Any:
    """x [B, W] through w["up"] [W, H], w["mix"] [H, H], w["down"] [H, W]: a norm, a tanh, a softmax, three products."""
    scale = jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
    hidden = jnp.tanh((x * scale) @ w["up"])
    return x + jax.nn.softmax(hidden @ w["mix"]) @ w["down"]


def weights(layers: int = 4, width: int = 4, hidden: int = 6) -> dict[str, Any]:
    """Of a first product and of `layers` layers, stacked."""
    shapes = {"up": (width, hidden), "mix": (hidden, hidden), "down": (hidden, width)}
    keys = iter(jax.random.split(jax.random.key(0), 4))
    stack = {name: jax.random.normal(next(keys), (layers, *shape)) for name, shape in shapes.items()}
    return {"in": jax.random.normal(next(keys), (4, width)), "layers": stack}


def unstacked(w: Mapping[str, Any]) -> dict[str, Any]:
    """Weights with a list of layers."""
    layers = [jax.tree.map(lambda leaf, n=n: leaf[n], w["layers"]) for n in range(len(w["layers"]["up"]))]
    return {"in": w["in"], "layers": layers}


X = jax.random.normal(jax.random.key(1), (3, 4))


def scanned(wrap: Wrap = plain, outer: Wrap = plain) -> Callable[..., Any]:
    """loss(w, x) whose layers are scanned."""

    def run(x: Any, layers: Any) -> Any:
        inner = wrap(layer)
        return jax.lax.scan(lambda x, w: (inner(x, w), None), x, layers)[0]

    return lambda w, x: jnp.sum(outer(run)(x @ w["in"], w["layers"]) ** 2)


def segmented(w: Any, x: Any) -> Any:
    """A loss whose layers are scanned in two segments, each a checkpoint and one loop: the √N schedule."""
    segments = jax.tree.map(lambda leaf: leaf.reshape(2, -1, *leaf.shape[1:]), w["layers"])

    @jax.checkpoint
    def segment(x: Any, layers: Any) -> Any:
        return jax.lax.scan(lambda x, w: (layer(x, w), None), x, layers)[0]

    return jnp.sum(jax.lax.scan(lambda x, w: (segment(x, w), None), x @ w["in"], segments)[0] ** 2)


def unrolled(wrap: Wrap = plain, scope: str | None = None) -> Callable[..., Any]:
    """loss(w, x) like that of `scanned`, layer by layer; each in a numbered scope if one is given."""

    def loss(w: Any, x: Any) -> Any:
        x = x @ w["in"]
        run = wrap(layer)
        layers = w["layers"] if isinstance(w["layers"], list) else unstacked(w)["layers"]
        for number, own in enumerate(layers):
            with jax.named_scope(f"{scope}_{number}") if scope else contextlib.nullcontext():
                x = run(x, own)
        return jnp.sum(x**2)

    return loss


LOSSES: dict[str, Callable[..., Any]] = {
    "scan": scanned(),
    "scan of checkpoints": scanned(jax.checkpoint),
    "checkpoint of a scan": scanned(outer=jax.checkpoint),
    "segments": segmented,
    "unrolled": unrolled(),
    "unrolled, in scopes": unrolled(scope="layer"),
    "unrolled checkpoints": unrolled(jax.checkpoint),
}
"""Each computes the same of the same arguments."""
