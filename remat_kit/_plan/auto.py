"""`auto_remat`: a function that plans itself when it is first called."""

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import jax
from jax.core import Tracer, eval_context
from jax.extend import core
from jax.sharding import AxisType

from remat_kit._compile import CompileOptions
from remat_kit._errors import PlanError, TargetError
from remat_kit._plan.make import plan
from remat_kit._plan.plan import Plan
from remat_kit._step import Step
from remat_kit._target import Target, get_target
from remat_kit._trace import device_mesh, losses_rewritten
from remat_kit._units import format_bytes

_SETTINGS = (
    "jax_default_matmul_precision",
    "jax_enable_x64",
    "jax_numpy_dtype_promotion",
    "jax_threefry_partitionable",
    "jax_default_prng_impl",
)
"""Of JAX, which make another program of the same function."""


def auto_remat[F: Callable[..., Any]](
    function: F,
    target: str | Target,
    budget: str | int | None = None,
    *,
    argnums: int | Sequence[int] = 0,
    where: str | None = None,
    unroll: bool = False,
    options: CompileOptions | None = None,
) -> F:
    """`function` under the fastest plan whose training step needs no more than `budget` on `target`.

    It is a training step, or a loss; of a loss, the step that is planned is that of its gradient with respect to
    `argnums`, without an optimizer, whose memory the budget then has to leave out. A plan that does not fit is applied
    all the same, being the one of the smallest need, and a warning says so (`Plan.fits`). `where`, `unroll` and
    `options` are those of `plan`.

    The plan is made when the function is first called, under `jax.jit` when it is first traced, which takes a few
    compiles; all plans are in `.plans` of what is returned. Another one is made for arrays of other shapes or types,
    for arguments that are put together otherwise, for another mesh (`jax.set_mesh`) and for other settings of JAX that
    change programs: precision of products, 64 bits, promotion of types, random numbers. What is not an array reaches
    the function as the Python object that it is, so another flag, text or whole number makes another plan as well; a
    float does only where it is part of a block. Give an array in the place of a number that changes from step to step.

    Raises PlanError and RematKitError like `plan`; PlanError when the function closes over values that are being
    traced, TargetError when the mesh that is set is not that of the target.
    """
    chosen = get_target(target) if isinstance(target, str) else target
    plans: dict[Any, Plan] = {}
    applied: dict[Any, Callable[..., Any]] = {}  # one function a plan, by which JAX's own caches find it again
    alike: dict[Any, list[Callable[..., Any]]] = {}  # those for calls that differ in floats alone

    @functools.wraps(function)
    def planned(*args: Any, **kwargs: Any) -> Any:
        call = _Call.of(args, kwargs)
        if call.key not in applied:
            known = alike.setdefault(call.key_without_floats, [])
            with _outside(chosen) as there:
                found = next((each for each in known if _fits_blocks(each, call)), None)
                if found is None:
                    plans[call.key] = _plan_for(function, call, there, budget, argnums, where, unroll, options)
                    _warn_of(plans[call.key])
                    known.append(found := plans[call.key].apply(function))
            applied[call.key] = found
        return applied[call.key](*args, **kwargs)

    planned.plans = plans  # pyright: ignore[reportAttributeAccessIssue]
    return planned  # pyright: ignore[reportReturnType]


@dataclasses.dataclass(frozen=True)
class _Call:
    """The arguments of a call without the data of arrays.

    Attributes:
      structure: of the positional and the keyword arguments, as one pytree.
      leaves: of arrays their shapes and types, else the Python objects that they are.
      key: equal for calls for which one plan is certainly right; key_without_floats: for which one may be.
    """

    structure: Any
    leaves: tuple[Any, ...]
    key: Any
    key_without_floats: Any

    @staticmethod
    def of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> "_Call":
        """The call with some arguments, where JAX is set as it is now."""
        leaves, structure = jax.tree.flatten((args, kwargs))
        around = jax.sharding.get_abstract_mesh(), *(getattr(jax.config, name, None) for name in _SETTINGS)
        kinds = tuple(map(_kind, leaves))
        floatless = tuple(float if type(leaf) is float else kind for leaf, kind in zip(leaves, kinds, strict=True))
        abstract = tuple(map(_abstract, leaves))
        return _Call(structure, abstract, (structure, kinds, around), (structure, floatless, around))

    @property
    def arrays(self) -> tuple[Any, ...]:
        """The arguments, keyword arguments behind the others, with nothing in the place of what is no array."""
        args, kwargs = self._filled(leaf if _is_array(leaf) else None for leaf in self.leaves)
        return (*args, kwargs) if kwargs else args

    def run(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` of `arrays`."""

        def given(*arrays: Any) -> Any:
            values = iter(jax.tree.leaves(arrays))
            args, kwargs = self._filled(next(values) if _is_array(leaf) else leaf for leaf in self.leaves)
            return function(*args, **kwargs)

        return given

    def _filled(self, leaves: Iterator[Any]) -> Any:
        return jax.tree.unflatten(self.structure, list(leaves))


def _plan_for(
    function: Callable[..., Any],
    call: _Call,
    target: Target,
    budget: str | int | None,
    argnums: int | Sequence[int],
    where: str | None,
    unroll: bool,
    options: CompileOptions | None,
) -> Plan:
    step = function if _differentiates(call.run(function), call.arrays) else jax.value_and_grad(function, argnums)
    return plan(Step(call.run(step), call.arrays), target, budget, where=where, unroll=unroll, options=options)


def _differentiates(function: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Whether a function differentiates something itself. Raises PlanError when it closes over traced values."""
    count = [0]

    def counted(jaxpr: Any, arguments: Sequence[Any]) -> Sequence[Any]:
        count[0] += 1
        return core.jaxpr_as_fun(jaxpr)(*arguments)

    with losses_rewritten(counted, counted):
        jaxpr = jax.make_jaxpr(function)(*args)
    if traced := [const for const in jaxpr.consts if isinstance(const, Tracer)]:
        raise PlanError(
            f"the function closes over {len(traced)} values that are being traced, the first of them "
            f"{jax.typeof(traced[0])}, and auto_remat plans outside of the trace that it is called in. Give them as "
            "arguments, or make a plan of the whole step with remat_kit.plan and apply that."
        )
    return bool(count[0])


def _warn_of(made: Plan) -> None:
    """Warns of a plan that does not fit."""
    if not made.fits:
        warnings.warn(
            f"no plan fits: the budget on {made.target} is {format_bytes(made.budget_bytes or 0)}, and the smallest "
            f"need that was reached is {format_bytes(made.need_bytes)}. The function runs under the plan of that need.",
            stacklevel=3,
        )


def _fits_blocks(function: Callable[..., Any], call: _Call) -> bool:
    """Whether a function under a plan has the plan's blocks for a call."""
    try:
        jax.eval_shape(call.run(function), *call.arrays)
    except PlanError:
        return False
    return True


@contextlib.contextmanager
def _outside(target: Target) -> Iterator[Target]:
    """Outside of the trace that is going on, in the same thread, whose settings of JAX stay.

    A mesh that is set becomes that of the target, whose devices are others. Gives the target, whose one device is named
    as in the mesh. Raises TargetError when the two are not of the same shape, PlanError inside `jax.shard_map`.
    """
    mesh = jax.sharding.get_abstract_mesh()
    with eval_context():
        if mesh.empty:
            yield target
            return
        if AxisType.Manual in mesh.axis_types:
            raise PlanError(
                "auto_remat was called inside of jax.shard_map, and a plan is for a whole step. Give auto_remat the "
                "function that calls jax.shard_map."
            )
        axes = tuple(mesh.shape.items())
        if mesh.size == target.num_devices == 1:
            target = dataclasses.replace(target, mesh=axes)
        if axes != target.mesh:
            wanted = ",".join(f"{name}={size}" for name, size in axes)
            raise TargetError(
                f"the mesh that is set is {dict(axes)}, that of target {target.name!r} is {dict(target.mesh)}. "
                f"Give auto_remat the target get_target({target.name!r}, {wanted!r})."
            )
        with jax.set_mesh(device_mesh(target)):
            yield target


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _abstract(leaf: Any) -> Any:
    """An array without its data; anything else as it is."""
    if not _is_array(leaf):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=getattr(leaf, "weak_type", False))


def _kind(leaf: Any) -> Any:
    """What makes a plan for one leaf of the arguments no plan for another."""
    if _is_array(leaf):
        return tuple(leaf.shape), str(leaf.dtype), bool(getattr(leaf, "weak_type", False))
    return type(leaf), leaf if isinstance(leaf, Hashable) else repr(leaf)
