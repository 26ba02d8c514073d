"""What a step keeps from forward to backward, counted on its jaxpr.

JAX's own listing of residuals is private, gives no bytes and cannot look inside a scan. Here a value is
*saved* when an equation of the forward phase makes it and an equation of the backward phase uses it.
Arguments of the step (parameters, batch) are there anyway and are not counted.
"""

import collections
import itertools
import re
import statistics
from dataclasses import dataclass
from typing import Any

from jax.extend import core

from remat_kit._jaxpr import Eqn, Jaxpr, bodies, nbytes, primitive_of
from remat_kit._phase import BACKWARD, FORWARD, RECOMPUTE, phase_of


@dataclass(frozen=True)
class SavedValue:
    """One value kept from forward to backward.

    Attributes:
      bytes: its size; of a scan's stacked output, all iterations together.
      shape: e.g. `bf16[12,8,1024,768]`.
      dtype: e.g. `bfloat16`.
      block: the repeated block that uses it in backward, "" outside of blocks.
      count: how many blocks share it: the length of a scan, else 1.
      on_host: it waits in host memory.
    """

    bytes: int
    shape: str
    dtype: str
    block: str
    count: int
    on_host: bool


@dataclass(frozen=True)
class Saved:
    """All that is kept from forward to backward, largest first."""

    values: tuple[SavedValue, ...]

    @property
    def device_bytes(self) -> int:
        """Bytes kept on the device."""
        return sum(value.bytes for value in self.values if not value.on_host)

    @property
    def host_bytes(self) -> int:
        """Bytes kept in host memory."""
        return sum(value.bytes for value in self.values if value.on_host)

    @property
    def device_bytes_per_block(self) -> int | None:
        """Bytes one repeated block keeps on the device; None when no block repeats.

        Of a scan, the bytes of one iteration. Of an unrolled stack, the median over its blocks. Where there
        are several stacks, that of the one with the most bytes.
        """
        stacks: dict[str, list[int]] = collections.defaultdict(list)
        for (stack, _), total in self._per_block().items():
            stacks[stack].append(total)
        repeated = {stack: sizes for stack, sizes in stacks.items() if len(sizes) > 1 or stack.startswith("scan")}
        if not repeated:
            return None
        return int(statistics.median(max(repeated.values(), key=sum)))

    def _per_block(self) -> dict[tuple[str, str], int]:
        """(stack, block) -> bytes of one block. A stack is a scan, or the blocks whose names differ in a number."""
        sizes: dict[tuple[str, str], int] = collections.defaultdict(int)
        for value in self.values:
            if value.block:
                on_device = 0 if value.on_host else value.bytes // value.count
                sizes[re.sub(r"\d+$", "", value.block), value.block] += on_device
        return sizes


def saved_values(jaxpr: Jaxpr) -> Saved:
    """The values that the step of `jaxpr` keeps from forward to backward."""
    made_forward: dict[Any, Eqn] = {}
    same_as: dict[Any, Any] = {}
    uses: dict[Any, str] = {}
    scan_names: dict[Any, str] = {}
    for eqn, stack, inputs, outputs in _flat(jaxpr):
        inputs = [same_as.get(var, var) for var in inputs]
        phase = phase_of(stack)
        if phase == FORWARD:
            for var in outputs:
                made_forward[var] = eqn
        elif phase in (BACKWARD, RECOMPUTE):
            if primitive_of(eqn) == "scan":
                block = scan_names.setdefault((outputs[0][0], id(eqn)), f"scan{len(scan_names)}:")
            else:
                block = _block_of(stack) or _block_inside(eqn)
            for var in inputs:
                if var in made_forward:  # the first user that is in a block, since barriers in front of it are in none
                    uses[var] = uses.get(var) or block
        if _is_renaming(eqn) and len(inputs) == len(outputs):
            same_as.update(zip(outputs, inputs, strict=True))
    values = []
    for value, block in uses.items():
        eqn, var = made_forward[value], value[1]
        is_stacked = primitive_of(eqn) == "scan" and _is_stacked(eqn, var)
        length = int(eqn.params["length"]) if is_stacked else 1
        if block.startswith("scan") and not is_stacked:
            block = ""  # one value for the whole scan, e.g. what it carries at its end
        on_host = "host" in str(getattr(var.aval, "memory_space", "")).lower()
        shape, dtype = var.aval.str_short(short_dtypes=True), str(getattr(var.aval, "dtype", ""))
        values.append(SavedValue(nbytes(var), shape, dtype, block, length, on_host))
    return Saved(tuple(sorted(values, key=lambda value: -value.bytes)))


# Outputs of these are their inputs under another name or shape: not a second buffer.
_RENAMING = frozenset({"name", "CheckpointName", "reshape", "squeeze", "expand_dims", "optimization_barrier",
                       "sharding_constraint"})  # fmt: skip


def _is_renaming(eqn: Eqn) -> bool:
    if primitive_of(eqn) == "broadcast_in_dim":  # of `x[None]`
        return nbytes(eqn.invars[0]) == nbytes(eqn.outvars[0])
    return primitive_of(eqn) in _RENAMING


# What is inlined: calls, and loops around the derivative (over microbatches, say), of which one iteration counts.
_CALLS = frozenset({"jit", "pjit", "closed_call", "core_call"})
_AROUND = frozenset({"scan", "while", "cond", "shard_map"})


def _flat(jaxpr: Jaxpr):
    """The equations at the top of `jaxpr` with calls inlined: (eqn, name stack, inputs, outputs).

    A value is (number of the call it belongs to, variable): all calls of one function share its variables.
    """
    places = itertools.count()

    def visit(body: core.Jaxpr, outer: str, known: dict[Any, Any]):
        place = next(places)

        def look_up(var: Any) -> Any:
            return None if isinstance(var, core.Literal) else known.setdefault(var, (place, var))

        for eqn in body.eqns:
            own = str(eqn.source_info.name_stack)
            stack = f"{outer}/{own}" if own and outer else own or outer
            inputs = [look_up(var) for var in eqn.invars]
            inner = bodies(eqn)
            if primitive_of(eqn) in _AROUND and phase_of(stack) not in (FORWARD, BACKWARD, RECOMPUTE):
                for callee, _ in inner:
                    yield from visit(callee, stack, {})
            elif primitive_of(eqn) in _CALLS and len(inner) == 1:
                callee = inner[0][0]
                scope = dict(zip(callee.invars, inputs, strict=True))
                yield from visit(callee, stack, scope)
                known.update(
                    (outer_var, scope[var])
                    for outer_var, var in zip(eqn.outvars, callee.outvars, strict=True)
                    if not isinstance(var, core.Literal)
                )
            else:
                yield eqn, stack, inputs, [look_up(var) for var in eqn.outvars]

    while not isinstance(jaxpr, core.Jaxpr):
        jaxpr = jaxpr.jaxpr
    yield from visit(jaxpr, "", {})


def _is_stacked(eqn: Eqn, var: Any) -> bool:
    """Whether `var` is a stacked output of the scan `eqn`: it has one axis more than the body's output."""
    ((body, _),) = bodies(eqn)
    return any(
        var is outer and len(_dims(outer)) == len(_dims(inner)) + 1
        for outer, inner in zip(eqn.outvars, body.outvars, strict=True)
    )


def _dims(var: Any) -> tuple[int, ...]:
    return getattr(var.aval, "shape", ())


def _block_of(stack: str) -> str:
    """The outermost numbered scope of a name stack, `block_3` of `transpose(jvp(block_3))/mlp`; "" without one."""
    match = re.search(r"(?<![A-Za-z0-9_.])[A-Za-z][A-Za-z0-9_.]*?_\d+(?![A-Za-z0-9_])", stack)
    return match[0] if match else ""


def _block_inside(eqn: Eqn) -> str:
    """The block that the equations inside `eqn` name: Linen's backward remat has no name itself."""
    stacks = (str(inner.source_info.name_stack) for body, _ in bodies(eqn) for inner in body.eqns)
    return next((block for stack in stacks if (block := _block_of(stack))), "")
