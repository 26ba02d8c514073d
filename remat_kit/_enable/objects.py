"""NNX models: modules are objects, so the class of the blocks is changed in place, and changed back."""

import functools
import types
from typing import Any

import jax
from flax import nnx

from remat_kit._enable.block import CheckedPolicy
from remat_kit._enable.where import Part, no_match, outermost, picker, repeated
from remat_kit._errors import PolicyError
from remat_kit._policy import Checkpoint, Policy
from remat_kit._wrap import remat

_BEFORE = "_remat_kit_class"
"""The attribute of an enabled class that is the class it was made of."""


def enable(model: nnx.Module, policy: Policy | Checkpoint, where: tuple[str | type, ...] | None) -> None:
    """Rematerializes the modules of `model` that are meant, in place."""
    modules = _modules(model)
    on = [path for path, module in modules if hasattr(type(module), _BEFORE)]
    if on:
        raise PolicyError(
            f"enable_remat is on in this {type(model).__name__} already, for {len(on)} modules "
            f"({'/'.join(on[0]) or 'the model itself'}, ...). Call disable_remat(model) first."
        )
    parts = [Part(path, type(module), _shapes(module)) for path, module in modules]
    if where is None:
        meant = repeated(parts)
    else:
        pick = picker(where)
        meant = outermost(part for part in parts if pick(part.cls, part.path))
    if not meant:
        raise no_match(where, parts, type(model).__name__)
    paths = {part.path for part in meant}
    changed = [(module, _enabled(type(module), policy)) for path, module in modules if path in paths]
    for module, cls in changed:  # all classes are made by now: an error leaves the model as it was
        object.__setattr__(module, "__class__", cls)


def disable(model: nnx.Module) -> int:
    """Gives every module below `model` its own class back; how many there were."""
    count = 0
    for _, module in _modules(model):
        before = vars(type(module)).get(_BEFORE)
        if before is not None:
            object.__setattr__(module, "__class__", before)
            count += 1
    return count


def _modules(model: nnx.Module) -> list[tuple[tuple[str, ...], nnx.Module]]:
    """Every module once, outer ones first; the list that holds blocks is none."""
    found = [
        (tuple(map(str, path)), module)
        for path, module in nnx.iter_modules(model)
        if not isinstance(module, nnx.List | nnx.Dict)
    ]
    return sorted(found, key=lambda each: len(each[0]))


def _shapes(module: nnx.Module) -> tuple[tuple[int, ...], ...]:
    return tuple(leaf.shape for leaf in jax.tree.leaves(nnx.state(module, nnx.Param)) if hasattr(leaf, "shape"))


# Cached, so that enabling again gives the same class: NNX's graph definitions, and with them JAX's caches, hold it.
@functools.lru_cache(maxsize=256)
def _enabled(cls: type, policy: Policy | Checkpoint) -> type:
    if not any("__call__" in vars(base) for base in cls.__mro__):
        raise PolicyError(
            f"{cls.__name__} has no __call__ to rematerialize. Match the modules that the model calls with where."
        )
    around = CheckedPolicy(policy, cls.__name__) if isinstance(policy, Policy) else policy
    namespace = {
        "__call__": remat(around)(_plain_call(cls)),
        "__doc__": cls.__doc__,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        _BEFORE: cls,
    }
    # NNX makes a subclass a pytree unless told otherwise.
    options = {"pytree": cls._pytree__is_pytree} if issubclass(cls, nnx.Pytree) else {}
    return types.new_class(cls.__name__, (cls,), options, lambda body: body.update(namespace))


def _plain_call(cls: type) -> Any:
    """The `__call__` of a class, looked up when it runs: scopes may be put around it meanwhile."""

    @functools.wraps(cls.__call__)
    def call(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        return cls.__call__(self, *args, **kwargs)

    return call
