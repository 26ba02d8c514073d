"""Walk the equations of a jaxpr with how often each one runs, and count their matmuls and FLOPs.

Counted are matrix multiplications, convolutions and fused attention, as the field counts model FLOPs: one
multiply-add is 2 FLOP; elementwise work, reductions and the optimizer are left out. XLA's `cost_analysis`
differs: it counts a scan body once and adds one FLOP for each elementwise operation.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.extend import core

from remat_kit._phase import RECOMPUTE, phase_of

Jaxpr = Any
"""A jaxpr, open or closed: JAX has merged the two classes in some versions and not in others."""
Eqn = Any
"""One equation of a jaxpr."""

# Under `jax_remat3` the recomputation is the body of this primitive and carries no mark in its name stack.
_REMAT3 = "RematTraced"


@dataclass(frozen=True)
class Equation:
    """One equation and its place in the program.

    Attributes:
      eqn: JAX's equation.
      executions: how often it runs in one call, products of scan lengths included.
      stack: the name stacks of the equations around it and its own, joined with "/".
      recomputed: it runs in backward although forward has run it: it is part of a remat's recomputation.
    """

    eqn: Eqn
    executions: int
    stack: str
    recomputed: bool

    @property
    def primitive(self) -> str:
        """The primitive's name."""
        return primitive_of(self.eqn)

    @property
    def phase(self) -> str:
        """ "forward", "backward", "recompute", or "update" for what is outside the differentiated part."""
        return RECOMPUTE if self.recomputed else phase_of(self.stack)


def primitive_of(eqn: Eqn) -> str:
    """The name of the primitive that `eqn` applies, looked up inside JAX's wrapper for high-level ones."""
    if eqn.primitive.name == "call_hi_primitive":
        return type(eqn.params["_prim"]).__name__
    return eqn.primitive.name


def tag_of(eqn: Eqn) -> str | None:
    """The tensor name that `eqn` gives its operand when it is a `checkpoint_name`, else None."""
    if primitive_of(eqn) == "name":
        return eqn.params["name"]
    return eqn.params["_prim"].name if primitive_of(eqn) == "CheckpointName" else None


def walk(jaxpr: Jaxpr) -> Iterator[Equation]:
    """Every equation that runs, those inside calls, scans, remats and branches included, outermost first.

    Of a conditional, the branch with the most FLOPs counts. A `while` whose trip count the jaxpr does not
    hold counts once. A Pallas kernel counts its body once for each point of its grid.
    """
    yield from _walk(_open(jaxpr), 1, "", False)


def _walk(jaxpr: core.Jaxpr, executions: int, outer: str, recomputed: bool) -> Iterator[Equation]:
    for eqn in jaxpr.eqns:
        own = str(eqn.source_info.name_stack)
        stack = f"{outer}/{own}" if own and outer else own or outer
        again = recomputed or "rematted_computation" in own
        yield Equation(eqn, executions, stack, again)
        for body, times in bodies(eqn):
            yield from _walk(
                body, executions * times, stack, again or (primitive_of(eqn) == _REMAT3 and "transpose(" in stack)
            )


def bodies(eqn: Eqn) -> list[tuple[core.Jaxpr, int]]:
    """The jaxprs that running `eqn` runs, each with how often."""
    name, params = eqn.primitive.name, eqn.params
    if name == "scan":
        return [(_open(params["jaxpr"]), int(params["length"]))]
    if name == "cond":
        branches = [_open(branch) for branch in params["branches"]]
        return [(max(branches, key=lambda branch: count_flops(branch)), 1)]
    if name == "pallas_call":
        grid = getattr(params.get("grid_mapping"), "grid", ())
        points = math.prod(size for size in grid if isinstance(size, int))
        return [(_open(params["jaxpr"]), points)]
    if name == "custom_linear_solve":
        return [(_open(params["jaxprs"].solve), 1)]
    if name == "shard_map":
        axes = params.get("newly_manual_axes", params.get("manual_axes", ()))  # renamed in newer JAX
        shards = math.prod(params["mesh"].shape[axis] for axis in axes)
        return [(_open(params["jaxpr"]), shards)]
    if name in ("reduce", "reduce_window", "select_and_scatter_add", "scatter", "scatter-add", "sort", "custom_root"):
        return []  # their jaxprs are scalar combiners
    return [(found, 1) for found in _jaxprs_in(params.values())]


_PLAIN = frozenset({int, bool, str, float, type(None)})
"""Types of most parameters, which are passed over at once: programs have many equations, and few of them bodies."""


def _jaxprs_in(values: Iterable[Any]) -> Iterator[core.Jaxpr]:
    for value in values:
        if type(value) in _PLAIN:
            continue
        if isinstance(value, tuple | list):
            yield from _jaxprs_in(value)
        elif isinstance(value, core.Jaxpr):
            yield value
        elif hasattr(value, "jaxpr"):
            yield _open(value)  # a closed jaxpr, or a traced function as remat3 holds it


def _open(jaxpr: Jaxpr) -> core.Jaxpr:
    while not isinstance(jaxpr, core.Jaxpr):
        jaxpr = jaxpr.jaxpr
    return jaxpr


@dataclass(frozen=True)
class Work:
    """Matmuls and FLOPs of a program, executions counted."""

    matmuls: int
    flops: int
    recomputed_matmuls: int
    recomputed_flops: int


def count_work(jaxpr: Jaxpr) -> Work:
    """What `jaxpr` runs, and how much of it is recomputation."""
    matmuls = flops = again_matmuls = again_flops = 0
    for equation in walk(jaxpr):
        ran = equation.executions * num_matmuls(equation.eqn)
        if ran:
            cost = equation.executions * flops_of(equation.eqn)
            matmuls, flops = matmuls + ran, flops + cost
            if equation.recomputed:
                again_matmuls, again_flops = again_matmuls + ran, again_flops + cost
    return Work(matmuls, flops, again_matmuls, again_flops)


def count_flops(jaxpr: Jaxpr) -> int:
    """FLOPs of one call of `jaxpr`."""
    return count_work(jaxpr).flops


def num_matmuls(eqn: Eqn) -> int:
    """How many matrix multiplications or convolutions `eqn` itself runs.

    Fused attention runs two forward (scores, context) and five backward (scores again, and the gradients of
    values, weights, queries and keys), as FlashAttention counts them.
    """
    name = eqn.primitive.name
    if name in ("dot_general", "conv_general_dilated", "scaled_matmul_wrapper") or name.startswith("ragged_dot"):
        return 1
    if name.startswith("dot_product_attention"):
        return 5 if "_bwd" in name else 2
    return 0


def flops_of(eqn: Eqn) -> int:
    """FLOPs of one execution of `eqn`, 0 unless `num_matmuls` counts it."""
    name = eqn.primitive.name
    if name == "dot_general":
        (lhs_contract, _), (_, _) = eqn.params["dimension_numbers"]
        lhs = _shape(eqn.invars[0])
        return 2 * _size(eqn.outvars[0]) * math.prod(lhs[axis] for axis in lhs_contract)
    if name == "conv_general_dilated":
        # Every output element sums over the kernel window and the input channels of its group.
        kernel, numbers = _shape(eqn.invars[1]), eqn.params["dimension_numbers"]
        per_output = math.prod(kernel) // kernel[numbers.rhs_spec[0]]
        # A dilated input is mostly zeros, which nobody multiplies.
        return 2 * _size(eqn.outvars[0]) * per_output // math.prod(eqn.params["lhs_dilation"])
    if name.startswith("ragged_dot"):
        return _ragged_flops(eqn)
    if name == "scaled_matmul_wrapper":
        return 2 * _size(eqn.outvars[0]) * _shape(eqn.invars[0])[-1]
    if name.startswith("dot_product_attention"):
        # Operands are [B, T, H, C] and [B, S, K, C]; in layout 1 heads come before positions. A causal mask halves
        # what the kernel computes, but the full square is counted, so that fused and naive attention of one model
        # have the same FLOPs forward.
        query, key = _shape(eqn.invars[0]), _shape(eqn.invars[1])
        return num_matmuls(eqn) * 2 * math.prod(query) * key[1 if eqn.params.get("layout", 0) == 0 else 2]
    return 0


def _ragged_flops(eqn: Eqn) -> int:
    """A row of the ragged dimension meets the matrix of its own group only."""
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (lhs_contract, _), _ = numbers.dot_dimension_numbers
    lhs = _shape(eqn.invars[0])
    ragged = set(numbers.lhs_ragged_dimensions)
    total = 2 * _size(eqn.outvars[0]) * math.prod(lhs[axis] for axis in lhs_contract)
    # Where the ragged dimension is summed over, the output has a matrix for each group.
    return total // _shape(eqn.invars[2])[-1] if ragged & set(lhs_contract) else total


def least_precise(*dtypes: str) -> str:
    """The floating-point type with the fewest mantissa bits among `dtypes`; others are passed over."""
    floating = [dtype for dtype in dtypes if jnp.issubdtype(jnp.dtype(dtype), jnp.floating)]
    return max(floating, key=lambda dtype: float(jnp.finfo(dtype).eps)) if floating else "float32"


def lowest_precision(jaxpr: Jaxpr) -> str:
    """The name of the least precise floating-point type among the operands of matmuls.

    A value that is cast for another reason says nothing of how exact the gradients are. In a program without matmuls,
    among all values.
    """
    operands: set[Any] = set()
    values: set[Any] = set()
    for equation in walk(jaxpr):
        found = {getattr(var.aval, "dtype", None) for var in (*equation.eqn.invars, *equation.eqn.outvars)}
        values |= found
        if num_matmuls(equation.eqn):
            operands |= found

    def floating(dtypes: set[Any]) -> list[str]:
        return sorted(
            jnp.dtype(each).name for each in dtypes if each is not None and jnp.issubdtype(each, jnp.floating)
        )

    return least_precise(*(floating(operands) or floating(values)))


def nbytes(var: Any) -> int:
    """Bytes of one value; 0 for values without memory (tokens, references)."""
    dtype = getattr(var.aval, "dtype", None)
    if dtype is None or not hasattr(var.aval, "shape"):
        return 0
    return math.prod(var.aval.shape) * getattr(dtype, "itemsize", 0)


def _shape(var: Any) -> tuple[int, ...]:
    return tuple(var.aval.shape)


def _size(var: Any) -> int:
    return math.prod(var.aval.shape)
