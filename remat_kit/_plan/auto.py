"""`auto_remat`: a function that plans itself when it is first called."""

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core

from remat_kit._compile import CompileOptions
from remat_kit._plan.make import plan
from remat_kit._plan.plan import Plan
from remat_kit._step import Step
from remat_kit._target import Target, get_target
from remat_kit._trace import losses_rewritten


def auto_remat[F: Callable[..., Any]](
    function: F,
    target: str | Target,
    budget: str | int | None = None,
    *,
    argnums: int | Sequence[int] = 0,
    where: str | None = None,
    options: CompileOptions | None = None,
) -> F:
    """`function` under the fastest plan whose training step needs no more than `budget` on `target`.

    It is a training step, or a loss; of a loss, the step that is planned is that of its gradient with respect to
    `argnums`, without an optimizer, whose memory the budget then has to leave out. The plan is made when the function
    is first called with arguments of some shapes, which takes a few compiles; it is in `.plans` of what is returned. A
    plan that does not fit is applied all the same, being the one of the smallest need, and says so (`Plan.fits`).

    Raises PlanError and RematKitError like `plan`.
    """
    chosen = get_target(target) if isinstance(target, str) else target
    plans: dict[Any, Plan] = {}
    applied: dict[Any, Callable[..., Any]] = {}  # one function a plan, by which JAX's own caches find it again

    @functools.wraps(function)
    def planned(*args: Any, **kwargs: Any) -> Any:
        leaves, structure = jax.tree.flatten((args, kwargs))
        key = structure, tuple(map(_kind, leaves))
        if key not in applied:
            abstract = jax.tree.unflatten(structure, list(map(_abstract, leaves)))
            plans[key] = _in_a_thread(lambda: _plan_for(function, abstract, chosen, budget, argnums, where, options))
            applied[key] = plans[key].apply(function)
        return applied[key](*args, **kwargs)

    planned.plans = plans  # pyright: ignore[reportAttributeAccessIssue]
    return planned  # pyright: ignore[reportReturnType]


def _plan_for(
    function: Callable[..., Any],
    arguments: tuple[tuple[Any, ...], dict[str, Any]],
    target: Target,
    budget: str | int | None,
    argnums: int | Sequence[int],
    where: str | None,
    options: CompileOptions | None,
) -> Plan:
    args, kwargs = arguments

    def given(*values: Any) -> Any:
        return function(*values, **kwargs)

    step: Any = given if _differentiates(given, args) else jax.value_and_grad(given, argnums=argnums)
    return plan(Step(step, args), target, budget, where=where, options=options)


def _differentiates(function: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Whether a function differentiates something itself."""
    count = [0]

    def counted(jaxpr: Any, arguments: Sequence[Any]) -> Sequence[Any]:
        count[0] += 1
        return core.jaxpr_as_fun(jaxpr)(*arguments)

    with losses_rewritten(counted, counted):
        jax.eval_shape(function, *args)
    return bool(count[0])


def _in_a_thread(function: Callable[[], Plan]) -> Plan:
    """The result of a function that must not see the trace that it is called in."""
    results: list[Plan] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="auto_remat")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def _abstract(leaf: Any) -> Any:
    """An array without its data; anything else as it is."""
    return (
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if isinstance(leaf, jax.Array) or hasattr(leaf, "dtype") else leaf
    )


def _kind(leaf: Any) -> Any:
    return (tuple(leaf.shape), str(leaf.dtype)) if hasattr(leaf, "dtype") else repr(leaf)
