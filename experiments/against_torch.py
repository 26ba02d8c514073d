"""Does our plan recompute more FLOPs than PyTorch's `activation_memory_budget`, at the same saved bytes?

    python -m experiments.against_torch [--torch experiments/results/torch_budget.json] [--out FILE]

Reads what `experiments/torch_budget.py` kept, builds the same GPT block from `models/parts.py`, and asks for each
budget of PyTorch for the plan that recomputes the fewest FLOPs of matrix products while it saves no more bytes. The
plan is then applied: both of our figures are counted on the jaxpr of the block's forward and backward, as PyTorch's are
on its two graphs. On both sides the block's parameters and input are there anyway and are not counted as saved, and
FLOPs are those of matrix products.

That both blocks are one program is checked twice: their matrix products have the same FLOPs when nothing is recomputed,
and the output and all gradients of a small block are the same. Exits with 1 when we are worse in a budget.
"""

import argparse
import json
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.config import TransformerConfig
from models.parts import Block
from remat_kit import get_target
from remat_kit._jaxpr import count_work
from remat_kit._plan.block import SAVE, Derivative
from remat_kit._plan.block import Block as PlannedBlock
from remat_kit._plan.flat import Flat
from remat_kit._plan.graph import Graph, build_graph
from remat_kit._plan.solve import Limits, optimum
from remat_kit._saved import saved_values

ROOT = pathlib.Path(__file__).resolve().parent.parent
TORCH = ROOT / "experiments/results/torch_budget.json"
OUT = ROOT / "experiments/results/against_torch.json"
FLOPS_OF_A_BYTE = 1e-3
"""What making a byte again counts beside FLOPs: so little that it decides between plans with equal FLOPs alone."""
NEAR = 1e-5
"""How far the sums over tensors of the small block, of about 1 and in float32, may be apart."""


@dataclass(frozen=True)
class Row:
    """One budget of PyTorch beside our plan; bytes are saved, FLOPs recomputed.

    Attributes:
      kept: what our plan saves, shape and type of each value, largest first.
    """

    budget: float
    torch_bytes: int
    torch_flops: int
    our_bytes: int
    our_flops: int
    kept: tuple[str, ...]

    @property
    def is_not_worse(self) -> bool:
        """Whether our plan saves no more bytes and recomputes no more FLOPs."""
        return self.our_bytes <= self.torch_bytes and self.our_flops <= self.torch_flops


Function = Callable[..., Any]


def gpt_block(sizes: Mapping[str, Any], compute_dtype: str) -> tuple[Function, tuple[Any, Any]]:
    """The block of `models/parts.py` as a function of parameters and input, and their shapes."""
    config = TransformerConfig(
        style="gpt", layers=1, vocabulary=1, kv_heads=sizes["heads"], compute_dtype=compute_dtype, **sizes
    )
    definition, state = nnx.split(nnx.eval_shape(lambda: Block(config, rngs=nnx.Rngs(0))))
    key = jax.random.key(0)  # for dropout, which is 0

    def block(params: Any, x_BTD: jax.Array) -> jax.Array:
        return nnx.merge(definition, params)(x_BTD, 0, key)

    x = jax.ShapeDtypeStruct((sizes["batch"], sizes["seq"], sizes["width"]), compute_dtype)
    return block, (state, x)


def derivative_of(flat: Flat, inputs: Sequence[Any]) -> Derivative:
    """The derivative of a block in all of its inputs, as the planner sees it."""
    planned = PlannedBlock(flat, {}, "")
    jax.eval_shape(lambda *values: jax.vjp(planned, *values)[0], *inputs)
    (derivative,) = planned.seen.values()
    return derivative


def flops_graph(derivative: Derivative) -> Graph:
    """The graph of a block in which an operation costs its FLOPs and keeping a value costs nothing."""
    graph = build_graph(derivative, range(len(derivative.active)), get_target("h100-sxm-80gb").chip)
    for value in graph.values.values():
        value.save_s = 0.0
    for step in graph.ops:
        made = sum(graph.values[number].bytes for number in step.outputs if number in graph.values)
        step.again_s = step.flops + FLOPS_OF_A_BYTE * made
    return graph


def compare(kept: Mapping[str, Any]) -> list[Row]:
    """A row for each of PyTorch's budgets. `kept` is what `torch_budget.py` wrote."""
    function, arguments = gpt_block(kept["sizes"], kept["dtypes"]["compute"])
    jaxpr = jax.make_jaxpr(lambda *leaves: function(*jax.tree.unflatten(jax.tree.structure(arguments), leaves)))
    inputs = jax.tree.leaves(arguments)
    flat = Flat(jaxpr(*inputs))
    graph = flops_graph(derivative_of(flat, inputs))
    plain = count_work(both_ways(lambda *values: flat.run(values), inputs)).flops
    least = min(row["forward_flops"] + row["backward_flops"] for row in kept["rows"])
    assert plain == least, f"the blocks differ: {plain} FLOPs here, {least} in PyTorch, with nothing recomputed"
    found = {limit: apply(graph, flat, inputs, limit) for limit in {row["saved_bytes"] for row in kept["rows"]}}
    rows = []
    for row in kept["rows"]:
        applied = found[row["saved_bytes"]]
        values = saved_values(applied).values
        rows.append(
            Row(
                budget=row["budget"],
                torch_bytes=row["saved_bytes"],
                torch_flops=row["recomputed_flops"],
                our_bytes=sum(value.bytes for value in values),
                our_flops=count_work(applied).flops - plain,
                kept=tuple(value.shape for value in values),
            )
        )
    return rows


def apply(graph: Graph, flat: Flat, inputs: Sequence[Any], limit_bytes: int) -> Any:
    """The jaxpr of forward and backward under the plan that recomputes least while it saves at most `limit_bytes`."""
    solution = optimum(graph, Limits(kept_bytes=limit_bytes))
    assert solution is not None, "keeping nothing is always possible"
    places = [graph.values[number].place for number in solution.kept]
    kept = dict.fromkeys(places, SAVE)
    return both_ways(PlannedBlock(flat, kept, graph.derivative.fingerprint), inputs)


def both_ways(function: Function, inputs: Sequence[Any]) -> Any:
    """The jaxpr of forward and backward through a function of `inputs`, for given gradients of its outputs."""

    def step(values: Sequence[Any], cotangents: Any) -> Any:
        outputs, backward = jax.vjp(function, *values)
        return outputs, backward(cotangents)

    outputs = jax.eval_shape(function, *inputs)
    return jax.make_jaxpr(step)(list(inputs), outputs)


def numbers(shape: Sequence[int], which: int) -> np.ndarray:
    """The values that `torch_budget.py` gives to parameters and inputs: 0.2·sin(0.7·index + which), float32."""
    index = np.arange(np.prod(shape), dtype=np.float64)
    return (0.2 * np.sin(0.7 * index + which)).astype(np.float32).reshape(shape)


def sums_of_gradients(sizes: Mapping[str, int]) -> dict[str, float]:
    """For the output and each gradient of a block in float32: the mean of its elements times 1, 2, ...."""
    function, (state, x) = gpt_block(sizes, "float32")
    shapes = {"/".join(map(str, path)): variable for path, variable in nnx.to_flat_state(state)}
    order = sorted(shapes)
    filled = {path: jnp.asarray(numbers(each.shape, order.index(path))) for path, each in shapes.items()}
    params = jax.tree.unflatten(jax.tree.structure(state), list(filled.values()))
    cotangents_BTD = jnp.asarray(numbers(x.shape, len(order) + 1))

    @jax.jit
    def step(params: Any, x_BTD: jax.Array) -> tuple[jax.Array, Any, jax.Array]:
        y_BTD, backward = jax.vjp(function, params, x_BTD)
        return y_BTD, *backward(cotangents_BTD)

    y_BTD, of_params, of_x = step(params, jnp.asarray(numbers(x.shape, len(order))))
    values = {"output": y_BTD, "input": of_x, **dict(zip(filled, jax.tree.leaves(of_params), strict=True))}
    return {
        name: float(np.mean(np.asarray(value, np.float64).ravel() * np.arange(1, value.size + 1)))
        for name, value in values.items()
    }


def differences(kept: Mapping[str, Any]) -> dict[str, float]:
    """By tensor, how far our sums over the small block are from PyTorch's at any budget that was checked."""
    ours = sums_of_gradients(kept["check"]["sizes"])
    theirs = kept["check"]["sums_by_budget"].values()
    assert all(each.keys() == ours.keys() for each in theirs)
    return {name: max(abs(value - each[name]) for each in theirs) for name, value in ours.items()}


def table(rows: Sequence[Row]) -> str:
    """The rows as text, one line each."""
    lines = ["budget   torch saved  torch recomputed    ours saved   ours recomputed   not worse"]
    for row in rows:
        saved, flops = (row.torch_bytes / 2**20, row.our_bytes / 2**20), (row.torch_flops / 1e9, row.our_flops / 1e9)
        lines.append(
            f"{row.budget:6.2f}  {saved[0]:8.2f} MiB  {flops[0]:10.3f} GFLOP  {saved[1]:8.2f} MiB"
            f"  {flops[1]:10.3f} GFLOP   {'yes' if row.is_not_worse else 'NO'}"
        )
    return "\n".join(lines)


def as_json(row: Row) -> dict[str, Any]:
    """A row as it is kept."""
    return {
        "budget": row.budget,
        "torch_saved_bytes": row.torch_bytes,
        "torch_recomputed_flops": row.torch_flops,
        "our_saved_bytes": row.our_bytes,
        "our_recomputed_flops": row.our_flops,
        "not_worse": row.is_not_worse,
        "our_saved": row.kept,
    }


def main() -> int:
    """0 when our plan is not worse in any budget."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", type=pathlib.Path, default=TORCH, help="what torch_budget.py wrote")
    parser.add_argument("--out", type=pathlib.Path, default=OUT)
    arguments = parser.parse_args()
    kept = json.loads(arguments.torch.read_text())
    apart = differences(kept)
    assert max(apart.values()) < NEAR, f"the blocks compute something else: {apart}"
    rows = compare(kept)
    print(table(rows))
    result = {
        "format": 1,
        "versions": {"jax": jax.__version__, **kept["versions"]},
        "sizes": kept["sizes"],
        "largest_difference_of_gradients": max(apart.values()),
        "rows": [as_json(row) for row in rows],
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    return int(not all(row.is_not_worse for row in rows))


if __name__ == "__main__":
    sys.exit(main())
