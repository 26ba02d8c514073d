"""A jaxpr as a flat list of operations on numbered values.

This file, `block.py` and `layout.py` import JAX and NumPy alone, so that `Plan.to_python` can hand them out.
"""

import dataclasses
import functools
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.extend import core

CALLS = frozenset({"jit", "pjit", "closed_call", "core_call"})
REMATS = frozenset({"checkpoint", "remat", "remat2", "RematTraced"})
_TAGS = frozenset({"name", "CheckpointName"})
_PLAIN = frozenset({int, bool, type(None)})
_DEBUG_INFO = core.DebugInfo("a block of a plan", "remat-kit", None, None)
"""What JAX writes down of a jaxpr that is put together here: nothing, names and lines are in its equations."""

Place = tuple[int, int]
"""Number of an operation in a flat program, and which of its outputs."""


@dataclasses.dataclass(frozen=True, slots=True)
class Literal:
    """A constant operand."""

    value: Any


@dataclasses.dataclass(slots=True)
class Op:
    """One operation: JAX's equation, and the numbers of its operands and results."""

    eqn: Any
    inputs: list[int | Literal]
    outputs: list[int]

    @property
    def primitive(self) -> str:
        """The name of its primitive."""
        return primitive_of(self.eqn)


def primitive_of(eqn: Any) -> str:
    """The name of an equation's primitive, looked up inside JAX's wrapper for high-level ones."""
    if eqn.primitive.name == "call_hi_primitive":
        return type(eqn.params["_prim"]).__name__
    return eqn.primitive.name


class Flat:
    """A jaxpr as a list of operations on numbered values, with its calls opened.

    Attributes:
      ops: in the order in which they run.
      inputs, outputs: numbers of values; an output may be a constant.
      avals: shape and dtype of each value, by its number.
      tags: `checkpoint_name` of values that have one. The tags themselves are not operations here.
    """

    def __init__(self, jaxpr: Any, open_remats: bool | Callable[[Any], bool] = True) -> None:
        opened, consts = open_jaxpr(jaxpr)
        self.ops: list[Op] = []
        self.avals: list[Any] = []
        self.tags: dict[int, str] = {}
        self._open_remats = open_remats if callable(open_remats) else lambda _: bool(open_remats)
        known: dict[Any, int | Literal] = {
            var: Literal(value) for var, value in zip(opened.constvars, consts, strict=True)
        }
        self.inputs = [self._number(var, known) for var in opened.invars]
        self._lay_out(opened, known)
        self.outputs = [self._look_up(var, known) for var in opened.outvars]
        self._known = known

    def number_of(self, var: Any) -> int | None:
        """The number of a variable of the jaxpr that the program was made from; None for a constant."""
        number = self._known.get(var)
        return number if isinstance(number, int) else None

    def _number(self, var: Any, known: dict[Any, int | Literal]) -> int:
        self.avals.append(var.aval)
        known[var] = number = len(self.avals) - 1
        return number

    @staticmethod
    def _look_up(var: Any, known: dict[Any, int | Literal]) -> int | Literal:
        return Literal(var.val) if isinstance(var, core.Literal) else known[var]

    def _lay_out(self, jaxpr: Any, known: dict[Any, int | Literal]) -> None:
        for eqn in jaxpr.eqns:
            inputs = [self._look_up(var, known) for var in eqn.invars]
            primitive = primitive_of(eqn)
            if primitive == "reshard" and _is_automatic(eqn.params["dst_sharding"]):
                (known[eqn.outvars[0]],) = inputs  # the compiler shards as it likes
            elif primitive in _TAGS:
                (known[eqn.outvars[0]],) = inputs
                if isinstance(inputs[0], int):
                    self.tags[inputs[0]] = eqn.params["name"] if primitive == "name" else eqn.params["_prim"].name
            elif (body := self._opened(eqn, primitive)) is not None:
                inner, consts = body
                inside: dict[Any, int | Literal] = dict(zip(inner.invars, inputs, strict=True))
                inside |= {var: Literal(value) for var, value in zip(inner.constvars, consts, strict=True)}
                self._lay_out(inner, inside)
                known.update(
                    (var, self._look_up(out, inside)) for var, out in zip(eqn.outvars, inner.outvars, strict=True)
                )
            else:
                self.ops.append(Op(eqn, inputs, [self._number(var, known) for var in eqn.outvars]))

    def _opened(self, eqn: Any, primitive: str) -> tuple[Any, Sequence[Any]] | None:
        """The body of a call that says nothing but "call this"; None for all else."""
        if primitive in CALLS and is_plain_call(eqn):
            return open_jaxpr(eqn.params.get("jaxpr", eqn.params.get("call_jaxpr")))
        if primitive in REMATS and self._open_remats(eqn):
            return open_jaxpr(remat_body(eqn))
        return None

    def without_dead_code(self) -> "Flat":
        """The program without operations whose results nobody uses. Numbers of values stay."""
        needed = {number for number in self.outputs if isinstance(number, int)}
        kept = []
        for op in reversed(self.ops):
            if needed.intersection(op.outputs) or op.eqn.effects:
                kept.append(op)
                needed.update(number for number in op.inputs if isinstance(number, int))
        self.ops = kept[::-1]
        return self

    def run(self, arguments: Sequence[Any], name: Callable[[Place, Any], Any] = lambda _, value: value) -> list[Any]:
        """The outputs for `arguments`. `name` may put another value, e.g. a named one, in the place of each result."""
        values: dict[int, Any] = dict(zip(self.inputs, arguments, strict=True))
        last = {
            number: position for position, op in enumerate(self.ops) for number in op.inputs if isinstance(number, int)
        }
        kept = {number for number in self.outputs if isinstance(number, int)}
        for position, op in enumerate(self.ops):
            operands = [values[each] if isinstance(each, int) else each.value for each in op.inputs]
            for index, (number, result) in enumerate(zip(op.outputs, bind(op.eqn, operands), strict=True)):
                values[number] = name((position, index), result)
            for number in op.inputs:  # JAX's tracers hold what they are made of
                if isinstance(number, int) and last[number] == position and number not in kept:
                    values.pop(number, None)
        return [values[each] if isinstance(each, int) else each.value for each in self.outputs]

    def depends_on(self, inputs: Sequence[int]) -> set[int]:
        """The operations, by position, that depend on some of the inputs."""
        values, found = set(inputs), set()
        for position, op in enumerate(self.ops):
            if any(number in values for number in op.inputs if isinstance(number, int)):
                found.add(position)
                values.update(op.outputs)
        return found

    def lift(self, position: int, index: int) -> None:
        """Makes an input of a constant operand."""
        op = self.ops[position]
        var = core.Var(op.eqn.invars[index].aval)
        invars = list(op.eqn.invars)
        invars[index] = var
        op.eqn = op.eqn.replace(invars=invars)
        self.avals.append(var.aval)
        op.inputs[index] = len(self.avals) - 1
        self.inputs.append(len(self.avals) - 1)

    def open_slice(self, position: int) -> None:
        """Makes operands of the numbers that say where a slice begins."""
        op = self.ops[position]
        starts, sizes = op.eqn.params["start_indices"], tuple(op.eqn.outvars[0].aval.shape)

        def sliced(whole: Any) -> Any:
            return jax.lax.dynamic_slice_p.bind(whole, *map(np.int32, starts), slice_sizes=sizes)

        (eqn,) = open_jaxpr(jax.make_jaxpr(sliced)(op.eqn.invars[0].aval))[0].eqns
        numbers = eqn.invars[1:]
        op.eqn = op.eqn.replace(
            primitive=eqn.primitive, params=eqn.params, invars=[op.eqn.invars[0], *numbers], effects=eqn.effects
        )
        op.inputs = [op.inputs[0], *(Literal(number.val) for number in numbers)]

    def fingerprint(self, with_numbers: bool = True) -> str:
        """A digest of what the program computes: primitives, parameters, shapes and wiring, not names of variables.

        Without numbers, whole numbers among the operands, and where slices begin, make no difference.
        """
        digest = hashlib.sha256()
        order: dict[int, int] = {}  # in the order of use, so that the order of inputs makes no difference

        def operand(each: int | Literal) -> str:
            if isinstance(each, Literal):
                return _text_of_operand(each.value, with_numbers)
            if each not in order:
                order[each] = len(order)
                return f"%{order[each]}: {_text_of_aval(self.avals[each])}"
            return f"%{order[each]}"

        for op in self.ops:
            operands = [operand(each) for each in op.inputs]
            results = [_text_of_aval(self.avals[number]) for number in op.outputs]
            params = op.eqn.params if with_numbers else params_without_numbers(op)
            digest.update(f"{op.primitive} {text_of_params(params)} {operands} {results}\n".encode())
            for number in op.outputs:
                order[number] = len(order)
        digest.update(str([operand(each) for each in self.outputs]).encode())
        return digest.hexdigest()[:16]


def with_constants_as_inputs(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """A jaxpr that takes its constants as its first inputs, and the constants: they may hold what is differentiated."""
    opened, consts = open_jaxpr(jaxpr)
    invars = [*opened.constvars, *opened.invars]
    return jaxpr_of(invars, opened.outvars, opened.eqns, opened.effects), consts


def jaxpr_of(invars: Sequence[Any], outvars: Sequence[Any], eqns: Sequence[Any], effects: Any = frozenset()) -> Any:
    """A jaxpr without constants."""
    return core.Jaxpr((), list(invars), list(outvars), list(eqns), effects, _DEBUG_INFO)


def open_jaxpr(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """An open jaxpr and its constants, from whatever holds one. JAX has merged the two classes in some versions."""
    consts: Sequence[Any] = ()
    while True:
        consts = consts or tuple(getattr(jaxpr, "consts", ()))
        if isinstance(jaxpr, core.Jaxpr):
            return jaxpr, consts if len(consts) == len(jaxpr.constvars) else ()
        jaxpr = jaxpr.jaxpr


def remat_body(eqn: Any) -> Any:
    """The jaxpr that a checkpoint runs."""
    params = eqn.params["_prim"].params if "_prim" in eqn.params else eqn.params
    return params.get("jaxpr", params.get("traced"))


def is_plain_call(eqn: Any) -> bool:
    """Whether a call only calls: shardings or donations of its own would be lost if it were opened."""
    params = eqn.params
    given = (*params.get("in_shardings", ()), *params.get("out_shardings", ()))
    return all("Unspecified" in type(each).__name__ for each in given) and not any(params.get("donated_invars", ()))


def bind(eqn: Any, operands: Sequence[Any]) -> list[Any]:
    """The results of an equation on other operands, with its name stack and source line."""
    seen = {var: value for var, value in zip(eqn.invars, operands, strict=True) if not isinstance(var, core.Literal)}
    return core.jaxpr_as_fun(jaxpr_of(list(seen), eqn.outvars, [eqn], eqn.effects))(*seen.values())


def restamped(eqn: Any, drop: int) -> Any:
    """The equation without the first `drop` parts of its name stack, nor marks of a derivative in it."""
    stack = eqn.source_info.name_stack
    kept = tuple(part for part in stack.stack[drop:] if type(part).__name__ == "Scope")
    return eqn.replace(source_info=eqn.source_info.replace(name_stack=type(stack)(kept)))


def params_without_numbers(op: Op) -> Mapping[str, Any]:
    """The parameters of an operation, without where a slice begins and ends."""
    if not is_static_slice(op):
        return op.eqn.params
    return {name: value for name, value in op.eqn.params.items() if not name.endswith("_indices")}


def is_static_slice(op: Op) -> bool:
    """Whether an operation takes a part of an array without gaps, at a place that is written in the program."""
    return op.primitive == "slice" and set(op.eqn.params["strides"] or ()) <= {1} and isinstance(op.inputs[0], int)


def text_of_params(params: Mapping[str, Any]) -> str:
    """Parameters of an equation as text that is the same in every process."""
    return ", ".join(f"{name}={_text_of_value(value)}" for name, value in sorted(params.items()))


def _text_of_value(value: Any) -> str:
    if type(value) in _PLAIN:
        return str(value)
    if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
        return Flat(value, open_remats=False).fingerprint()
    if hasattr(value, "mesh") and hasattr(value, "spec"):
        return "None" if _is_automatic(value) else f"{value.spec} on {dict(value.mesh.shape)}"
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_text_of_value, value))})"
    if isinstance(value, Mapping):
        return text_of_params({str(key): each for key, each in value.items()})
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        small = getattr(value, "size", 2) == 1 and not isinstance(value, Tracer)
        if small and hasattr(value, "tobytes"):
            weak = getattr(value, "weak_type", False)
            return _text_of_number(_Number(type(value), value.dtype, value.shape, weak, value.tobytes(), value))
        return f"{value!r}" if small else f"{value.dtype}{list(value.shape)}"
    if callable(value) and not isinstance(value, type):
        return getattr(value, "__name__", type(value).__name__)
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))


def _is_automatic(sharding: Any) -> bool:
    """Whether a sharding says nothing: its mesh leaves all to the compiler."""
    mesh = getattr(sharding, "mesh", None)
    return mesh is not None and all("Auto" in str(kind) for kind in getattr(mesh, "axis_types", ()))


def _text_of_operand(value: Any, with_numbers: bool) -> str:
    if is_whole(value):
        return "number" if not with_numbers else str(value) if np.ndim(value) == 0 else _text_of_value(value)
    return _text_of_value(value)


def is_whole(value: Any) -> bool:
    """Whether a constant is of whole numbers, e.g. that of a layer."""
    return jax.numpy.issubdtype(getattr(value, "dtype", type(value)), jax.numpy.integer)


def _text_of_aval(aval: Any) -> str:
    return _text_of_type(getattr(aval, "dtype", type(aval).__name__), getattr(aval, "shape", ()))


@dataclasses.dataclass(frozen=True)
class _Number:
    """A constant of one element; equal ones are written alike."""

    kind: type
    dtype: Any
    shape: tuple[int, ...]
    weak: bool
    data: bytes
    value: Any = dataclasses.field(compare=False)


@functools.lru_cache(maxsize=4096)
def _text_of_number(number: _Number) -> str:
    return repr(number.value)


@functools.lru_cache(maxsize=4096)
def _text_of_type(dtype: Any, shape: tuple[Any, ...]) -> str:
    return f"{dtype}{list(shape)}"
