"""Plain functions: traced, and blocks checkpointed that are found by name scope, jitted function or repetition."""

import contextlib
import functools
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax

from remat_kit._enable.where import HOW, path_regex
from remat_kit._errors import PolicyError, RematKitError
from remat_kit._hlo.scope import module_path
from remat_kit._jaxpr import walk
from remat_kit._lower import lower
from remat_kit._plan.block import tagged
from remat_kit._plan.find import find_sites
from remat_kit._plan.flat import CALLS, is_plain_call, primitive_of
from remat_kit._plan.layout import ChangesArgument, Instance, as_program, lay_out
from remat_kit._policy import Checkpoint, Policy
from remat_kit._scopes import nnx_scopes
from remat_kit._trace import Differentiated, losses_rewritten, losses_stopped

_BEFORE = "_remat_kit_function"
"""The attribute of an enabled function that is the one it was made of."""
_NAMED = 12
"""How many scopes an error names."""


def enable(
    function: Callable[..., Any], policy: Policy | Checkpoint, where: tuple[str | type, ...] | None
) -> Callable[..., Any]:
    """`function` with the blocks in it checkpointed: a loss or a forward pass, or a step that differentiates one."""
    name = getattr(function, "__name__", type(function).__name__)
    if hasattr(function, _BEFORE):
        raise PolicyError(f"enable_remat is on in {name} already. Give it the result of disable_remat({name}).")
    pattern = None if where is None else _Pattern(where)
    rewrite = functools.partial(_rewritten, policy, pattern, name)
    is_step = [False]

    def run_loss(args: Any, kwargs: Any) -> Any:
        with losses_stopped(), nnx_scopes():
            try:
                jaxpr, arrays, rebuild = as_program(function, args, kwargs)
            except ChangesArgument as error:
                raise PolicyError(
                    f"cannot rematerialize in {name}: {error} Or give enable_remat the NNX model itself."
                ) from error
        return rebuild(rewrite(jaxpr, arrays))

    @functools.wraps(function)
    def rematerialized(*args: Any, **kwargs: Any) -> Any:
        if not is_step[0]:
            with contextlib.suppress(Differentiated):
                return run_loss(args, kwargs)
        is_step[0] = True  # it differentiates something itself, which is what blocks are looked for in
        with losses_rewritten(rewrite, rematerialized), nnx_scopes():
            return function(*args, **kwargs)

    setattr(rematerialized, _BEFORE, function)
    return rematerialized


def disable(function: Any) -> Any:
    """The function that `function` was made of by `enable`; None when it was not."""
    return getattr(function, _BEFORE, None)


class _Pattern:
    """`where` for name scopes: `text`, a regular expression on paths, and the names that jitted functions may have."""

    def __init__(self, where: tuple[str | type, ...]) -> None:
        self.given = ", ".join(repr(each) if isinstance(each, str) else each.__name__ for each in where)
        self.names = [each if isinstance(each, str) else each.__name__ for each in where]
        found = []
        for each in self.names:
            # Scopes of numbered modules are written `layers_3`, and a function's scopes begin with the model's class.
            regex = re.sub(r"/(?=\d)", "[/_]", path_regex(each).replace("/[^/]*", "[/_][^/]*"))
            found.append(rf"{regex}(?:_\d+)?" if regex == re.escape(each) else regex)
        self.text = rf"^(?:.*/)?(?:{'|'.join(found)})$"

    def means(self, name: str) -> bool:
        """Whether a jitted function of that name is meant."""
        return re.search(self.text, name) is not None


def _rewritten(
    policy: Policy | Checkpoint, pattern: _Pattern | None, name: str, jaxpr: Any, arguments: Sequence[Any]
) -> list[Any]:
    """The results of a program whose blocks are checkpointed."""
    if pattern is not None:
        jaxpr = _with_names(jaxpr, pattern, Counter())
    try:
        sites = find_sites(jaxpr, None if pattern is None else pattern.text)
    except RematKitError as error:
        raise _no_match(jaxpr, pattern, name) from error

    def call(instance: Instance, values: Sequence[Any]) -> Sequence[Any]:
        def block(*inputs: Any) -> tuple[Any, ...]:
            return tagged(instance.flat, inputs)

        if isinstance(policy, Policy):
            return jax.checkpoint(block, policy=lower(policy), prevent_cse=True)(*values)
        return policy.checkpoint(block)(*values)

    return lay_out(jaxpr, sites).run(arguments, call)


def _with_names(jaxpr: Any, pattern: _Pattern, counts: Counter[str]) -> Any:
    """The program with the operations of each call of a jitted function that is meant in a scope of its name."""
    eqns = []
    for eqn in jaxpr.eqns:
        name = eqn.params.get("name", "") if primitive_of(eqn) in CALLS and is_plain_call(eqn) else ""
        if name and pattern.means(name):
            eqn = _in_scope(eqn, f"{name}_{counts[name]}")
            counts[name] += 1
        elif name or primitive_of(eqn) == "scan":
            eqn = eqn.replace(params={**eqn.params, "jaxpr": _with_names(eqn.params["jaxpr"], pattern, counts)})
        eqns.append(eqn)
    return jaxpr.replace(eqns=eqns)


def _in_scope(eqn: Any, scope: str) -> Any:
    """An equation, and those of the calls in it, in a name scope."""
    stack = eqn.source_info.name_stack
    outer = type(stack)().extend(scope) if hasattr(stack, "extend") else stack
    eqn = eqn.replace(source_info=eqn.source_info.replace(name_stack=outer + stack))
    if primitive_of(eqn) in CALLS and is_plain_call(eqn) and "jaxpr" in eqn.params:
        inner = eqn.params["jaxpr"]
        inner = inner.replace(eqns=[_in_scope(each, scope) for each in inner.eqns])
        eqn = eqn.replace(params={**eqn.params, "jaxpr": inner})
    return eqn


def _no_match(jaxpr: Any, pattern: _Pattern | None, name: str) -> RematKitError:
    paths, calls = set(), set()
    for each in walk(jaxpr):
        paths.add("/".join(module_path(f"{each.eqn.source_info.name_stack}/{each.primitive}")[:2]))
        if each.primitive in CALLS:
            calls.add(str(each.eqn.params.get("name", "")))
    scopes = _listed("Name scopes", paths)
    there = f"{scopes}{_listed('Jitted functions', calls)}" or "Its operations are in no scope and no jitted function."
    if pattern is None:
        return RematKitError(
            f"found no block in {name}: no scan over layers, no numbered modules, no jax.checkpoint and nothing that "
            f"repeats. {there} {HOW}"
        )
    return RematKitError(
        f"nothing in {name} is in a scope or a jitted function that where={pattern.given} fits. {there} {HOW}"
    )


def _listed(what: str, names: set[str]) -> str:
    found = sorted(names - {""})
    more = ", ..." if len(found) > _NAMED else ""
    return f"{what}: {', '.join(found[:_NAMED])}{more}. " if found else ""
