"""`remat`: apply a policy to a Linen class, an NNX class, a method or a function, and change nothing else.

What stays as it was without the wrap: names and paths of modules and parameters, initial values, dropout
streams, mutable collections, sown values, and how arguments arrive. An argument that is not an array (a
flag, a string, a function, None, a Python number) reaches the wrapped code as the same Python object,
positionally or by keyword, so there is nothing to declare static.

`prevent_cse` is always on. Without its barrier, XLA merges the recomputation with the forward pass wherever
both are in one computation: on unrolled layers and in a fully unrolled scan, which the body of a scan cannot
see. Inside a loop that stays a loop the barrier is not needed and costs next to nothing.
"""

import contextlib
import enum
import functools
import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import flax.linen as nn
import jax
import numpy as np
from flax import nnx

from remat_kit._errors import PolicyError
from remat_kit._lower import lower
from remat_kit._policy import STATE, Checkpoint, Policy, Region, get_policy, with_argument_names

T = TypeVar("T")


def remat(policy: str | Policy | Checkpoint) -> Callable[[T], T]:
    """A decorator that rematerializes what it is applied to under `policy`.

    It takes a Linen module class (also one that `nn.scan` then lifts), an NNX module class, a method, a bound
    method or a plain function, whose arguments may hold modules. A class comes back as a subclass of the same
    name whose `__call__` is rematerialized; it is not changed in place. Under policy `none` the object itself
    comes back, and so it does under a policy for stacks of blocks: what runs the stack applies all of that, see
    `scan_stack`, and a block that was wrapped besides would be computed again once more.

    The traced program is that of a hand-written `jax.checkpoint` (or `nn.remat`, `nnx.remat`) with the same
    policy. Raises PolicyError when `policy` is not a policy, or when what it is applied to cannot be wrapped.
    """
    chosen = get_policy(policy) if isinstance(policy, str | Policy) or not isinstance(policy, Checkpoint) else policy

    def decorate(target: T) -> T:
        if isinstance(chosen, Policy) and chosen.region is not Region.BLOCK:
            return target
        return _wrap(target, chosen)

    return decorate


def _wrap(target: Any, policy: Policy | Checkpoint) -> Any:
    if isinstance(target, type):
        if issubclass(target, nn.Module | nnx.Module):
            return _wrap_class(target, policy)
        raise PolicyError(
            f"remat got the class {target.__name__}, which is neither a Linen nor an NNX module. "
            "Apply it to a flax module class, to a method, or to a function."
        )
    if isinstance(target, staticmethod | classmethod | property):
        raise PolicyError(
            f"remat got a {type(target).__name__}. Put remat below it, next to the function: "
            f"@{type(target).__name__} first, then @remat(...)."
        )
    if not callable(target):
        raise PolicyError(
            f"remat got {target!r}, which cannot be called. "
            "Apply it to a flax module class, to a method, or to a function."
        )
    if inspect.iscoroutinefunction(target) or inspect.isgeneratorfunction(target):
        raise PolicyError(
            f"remat got {target.__name__}, which is a coroutine or a generator. "
            "Apply it to a function that returns arrays."
        )
    if inspect.ismethod(target):
        return functools.wraps(target)(functools.partial(_wrap_function(target.__func__, policy), target.__self__))
    if isinstance(target, nn.Module | nnx.Module):
        call = _wrap_function(type(target).__call__, policy)
        return functools.partial(call, target)
    return _wrap_function(target, policy)


# Cached, so that wrapping a class twice gives one class: Flax compares modules by their class.
@functools.lru_cache(maxsize=256)
def _wrap_class(cls: type, policy: Policy | Checkpoint) -> type:
    if not any("__call__" in vars(base) for base in cls.__mro__):
        raise PolicyError(
            f"{cls.__name__} has no __call__ to rematerialize. Apply remat to the method that runs the block."
        )
    # Flax derives automatic names from the class name: a subclass of the same name keeps them, where
    # nn.remat's Checkpoint... changes parameter paths, initial values and dropout.
    namespace = {
        "__call__": _wrap_function(cls.__call__, policy),
        "__doc__": cls.__doc__,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
    }
    # NNX makes a subclass a pytree unless told otherwise.
    options = {"pytree": cls._pytree__is_pytree} if issubclass(cls, nnx.Pytree) else {}
    return types.new_class(cls.__name__, (cls,), options, lambda body: body.update(namespace))


def _wrap_function(function: Callable[..., Any], policy: Policy | Checkpoint) -> Callable[..., Any]:
    # One wrapped function for each combination of Python arguments, so that JAX's own caches hit when the
    # same block runs again, as they do for a jax.checkpoint written by hand. JAX 0.11 decides when a function is
    # wrapped which of its two implementations of remat runs it, so that setting is part of the key.
    @functools.lru_cache(maxsize=64)
    def checkpointed(arguments: _Arguments, transform: Callable[..., Any], remat3: bool) -> Callable[..., Any]:
        return _checkpointed(function, policy, arguments, transform)

    @functools.wraps(function)
    def rematerialized(*args: Any, **kwargs: Any) -> Any:
        arrays, arguments, transform = _split(args, kwargs)
        # Only what cannot change and is equal to nothing else may share a trace: a frozen configuration can equal
        # another one, a plain object can be given other settings.
        call = None
        if all(leaf is _HOLE or isinstance(leaf, _CONSTANT) for leaf in arguments.leaves):
            with contextlib.suppress(TypeError):  # a container whose own settings cannot be hashed
                call = checkpointed(arguments, transform, jax.config.jax_remat3)
        return (call or _checkpointed(function, policy, arguments, transform))(*arrays)

    return rematerialized


def _checkpointed(
    function: Callable[..., Any], policy: Policy | Checkpoint, arguments: "_Arguments", transform: Callable[..., Any]
) -> Callable[..., Any]:
    def dynamic(*arrays: Any) -> Any:
        args, kwargs = arguments.fill(arrays)
        return function(*args, **kwargs)

    dynamic.__name__ = getattr(function, "__name__", "dynamic")  # JAX's errors name it
    names = () if isinstance(policy, Policy) else arguments.names(function)
    if transform is not nn.remat:
        return _transformed(transform, dynamic, policy, names)

    # nn.remat lifts the scope of its first argument, a module, and of all modules among the others.
    def module_first(*arrays: Any) -> Any:
        first = next(i for i, array in enumerate(arrays) if isinstance(array, nn.Module))

        def lifted(module: nn.Module, *others: Any) -> Any:
            return dynamic(*others[:first], module, *others[first:])

        # Flax puts variables and random keys before the arguments, and lifts the module out of them.
        others = (STATE, STATE, *(name for i, name in enumerate(names) if i != first))
        lifted_call = _transformed(nn.remat, lifted, policy, others)
        return lifted_call(arrays[first], *arrays[:first], *arrays[first + 1 :])

    return module_first


def _transformed(
    transform: Callable[..., Any], function: Callable[..., Any], policy: Policy | Checkpoint, names: tuple[str, ...]
) -> Callable[..., Any]:
    """`function` under jax.checkpoint, nnx.remat or nn.remat with a policy; `names` as of `argument_names`.

    The latter two make a function of arrays out of one of modules and give it to `jax.checkpoint`, also called
    `jax.remat`. What checkpoints in its own way takes that one's place while they do.
    """
    if isinstance(policy, Policy):
        return transform(function, policy=lower(policy), prevent_cse=True)
    if transform is jax.checkpoint:
        return policy.checkpoint(with_argument_names(function, names))

    @functools.wraps(function)
    def run(*arrays: Any) -> Any:
        if any(isinstance(each, nn.Module) and each.is_initializing() for each in arrays):
            return transform(function, prevent_cse=True)(*arrays)  # parameters are made, which are no part of a block
        original = jax.checkpoint
        asked = []

        def once(inner: Callable[..., Any], **_: Any) -> Callable[..., Any]:
            jax.checkpoint = jax.remat = original  # what the block itself checkpoints is its own
            asked.append(True)
            return policy.checkpoint(with_argument_names(inner, names))

        jax.checkpoint = jax.remat = once
        try:
            result = transform(function, prevent_cse=True)(*arrays)
        finally:
            jax.checkpoint = jax.remat = original
        if not asked:
            raise PolicyError(
                f"{policy.name} cannot be put into this version of Flax, whose remat does not call jax.checkpoint. "
                "Use a version that remat-kit is tested with."
            )
        return result

    return run


@dataclass(frozen=True)
class _Arguments:
    """The arguments of one call with a hole for each array and module.

    Everything else is kept as the Python object that it is: `jax.checkpoint` would trace a flag, and the code
    under it could no longer branch on it.
    """

    structure: Any
    leaves: tuple[Any, ...]
    kinds: tuple[Any, ...]
    """What `==` on the leaves does not tell apart: True and 1 and 1.0, 0.0 and -0.0."""
    modules: tuple[bool, ...]
    """Of each hole whether a module goes there."""

    def names(self, function: Callable[..., Any]) -> tuple[str, ...]:
        """Of each array the parameter of `function` that it was given for, of a module `STATE`."""
        args, kwargs = self.structure.children()
        keys = kwargs.node_data()[1]
        bound = inspect.signature(function).bind(*range(len(args.children())), **{key: key for key in keys})
        # In the place of each argument stands its number or its key; *args and **kwargs hold several.
        owner: dict[Any, str] = {}
        for name, given in bound.arguments.items():
            held = given.values() if isinstance(given, dict) else given if isinstance(given, tuple) else (given,)
            owner.update(dict.fromkeys(held, name))
        parts = [*enumerate(args.children()), *zip(keys, kwargs.children(), strict=True)]
        names = [owner[place] for place, part in parts for _ in range(part.num_leaves)]
        holes = [name for name, leaf in zip(names, self.leaves, strict=True) if leaf is _HOLE]
        return tuple(STATE if is_module else name for name, is_module in zip(holes, self.modules, strict=True))

    def fill(self, arrays: tuple[Any, ...]) -> Any:
        values = iter(arrays)
        return jax.tree.unflatten(self.structure, [next(values) if leaf is _HOLE else leaf for leaf in self.leaves])


_HOLE = object()


def _split(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], _Arguments, Callable[..., Any]]:
    """The arrays and modules among the arguments, the other arguments, and the transformation for them."""
    leaves, structure = jax.tree.flatten((args, kwargs), is_leaf=lambda node: isinstance(node, _NNX_NODES))
    linen = any(isinstance(leaf, nn.Module) and leaf.scope is not None for leaf in leaves)
    moves = [isinstance(leaf, _DYNAMIC) or (linen and _is_bound(leaf)) for leaf in leaves]
    moving = [leaf for leaf, is_moving in zip(leaves, moves, strict=True) if is_moving]
    fixed = tuple(_HOLE if is_moving else leaf for leaf, is_moving in zip(leaves, moves, strict=True))
    kinds = tuple((type(leaf), repr(leaf) if isinstance(leaf, float | complex) else None) for leaf in fixed)
    if linen:
        transform = nn.remat
    elif any(isinstance(leaf, _NNX_NODES) for leaf in moving):
        transform = nnx.remat
    else:
        transform = jax.checkpoint
    modules = tuple(isinstance(leaf, (*_NNX_NODES, nn.Module, nn.Variable)) for leaf in moving)
    return moving, _Arguments(structure, fixed, kinds, modules), transform


_NNX_NODES = (nnx.Pytree, nnx.Variable)
_DYNAMIC = (jax.Array, np.ndarray, np.number, np.bool_, *_NNX_NODES)
_CONSTANT = (bool, int, float, complex, str, bytes, type(None), type(...), enum.Enum, type, np.dtype,
             types.FunctionType, types.BuiltinFunctionType, jax.custom_jvp, jax.custom_vjp,
             type(jax.jit(abs)))  # fmt: skip


def _is_bound(leaf: Any) -> bool:
    return isinstance(leaf, nn.Module | nn.Variable) and leaf.scope is not None
