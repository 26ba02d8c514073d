"""Linen models: modules are made anew in every call, so calls of the blocks are intercepted while the model runs.

The parameter tree, initial values and random streams stay: nothing is renamed, and `init` runs the model as it is.
"""

import contextlib
import dataclasses
import functools
import threading
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
from flax import linen as nn

from remat_kit._enable.block import CheckedPolicy, already_checkpointed, checkpoint_around
from remat_kit._enable.where import Part, Pick, no_match, picker, repeated
from remat_kit._errors import PolicyError, RematKitError
from remat_kit._policy import Checkpoint, Policy
from remat_kit._wrap import remat

_BEFORE = "_remat_kit_class"
"""The attribute of an enabled class that is the class it was made of."""
_LIFTED = nn.remat(nn.Dense).__module__
"""Where the classes that nn.remat, nn.scan and their kin make say that they are from."""

_in_use = jax.make_user_context(None)
"""A part of the keys of JAX's caches: what `nn.jit` traced with and without blocks rematerialized is not mixed up."""


def enable(model: nn.Module, policy: Policy | Checkpoint, where: tuple[str | type, ...] | None) -> nn.Module:
    """A copy of `model` that rematerializes the modules that are meant whenever it runs."""
    if hasattr(type(model), _BEFORE):
        raise PolicyError(
            f"enable_remat is on in this {type(model).__name__} already. Give it the result of disable_remat(model)."
        )
    if model.scope is not None or model.parent is not None:
        raise PolicyError(
            f"this {type(model).__name__} is bound to variables, or is part of another module. Give enable_remat the "
            "model as it is before init, bind and apply."
        )
    return _copy(model, _enabled(type(model), policy, where))


def disable(model: nn.Module) -> nn.Module | None:
    """The model that `model` was made of by `enable`; None when it was not."""
    before = getattr(type(model), _BEFORE, None)
    return None if before is None else _copy(model, before)


def _copy(model: nn.Module, cls: type) -> nn.Module:
    fields = {each.name for each in dataclasses.fields(model) if each.init} - {"parent"}
    return cls(**{name: getattr(model, name) for name in fields}, parent=None)


# Cached, so that equal models are equal when they are enabled: Flax and JAX compare them, with their classes.
@functools.lru_cache(maxsize=256)
def _enabled(cls: type, policy: Policy | Checkpoint, where: tuple[str | type, ...] | None) -> type:
    rule = _Rule(policy, where)

    @nn.nowrap
    @functools.wraps(cls.apply)
    def apply(self: Any, variables: Any, *args: Any, **kwargs: Any) -> Any:
        call = functools.partial(cls.apply, self, variables, *args, **kwargs)
        method = kwargs.get("method")
        found = rule.found(self, method) or rule.find(self, method, call, variables)
        with rule.used((), found) as run:
            result = call()
        found.check(run, method)
        if run.lifted and found.around is None:
            with rule.used((), found):
                found.around = checkpoint_around(jax.make_jaxpr(lambda: _arrays(call()))())
            found.lifted = ", ".join(sorted(run.lifted))
        if found.around:
            raise already_checkpointed(found.lifted)
        return result

    @functools.wraps(cls.__call__)
    def of_bound(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        if rule.is_running or self.is_initializing():
            return cls.__call__(self, *args, **kwargs)
        found = rule.found(_copy(self, type(self)))
        if found is None:
            raise RematKitError(
                f"{cls.__name__} was called bound to variables or inside of another module, where enable_remat cannot "
                "find what repeats. Say which modules with where, or call apply once before."
            )
        with rule.used(self.path, found) as run:
            result = cls.__call__(self, *args, **kwargs)
        found.check(run, None)
        return result

    namespace = {
        "apply": apply,
        "__call__": of_bound,
        "__doc__": cls.__doc__,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        _BEFORE: cls,
    }
    return types.new_class(cls.__name__, (cls,), {}, lambda body: body.update(namespace))


@dataclass
class _Found:
    """What is meant in one model.

    Attributes:
      model: what errors call it; where: as the user gave it; pick: the same as a function.
      matched: whether a module was ever rematerialized; a later call may take it from JAX's caches.
      around: whether the model has a checkpoint around one of the modules; None where it has not been looked for.
      lifted: the classes of those that nn.scan, nn.remat or their kin call.
    """

    model: str
    where: tuple[str | type, ...] | None
    pick: Pick
    matched: bool = False
    around: bool | None = None
    lifted: str = ""

    def check(self, run: "_Run", method: Any) -> None:
        """Raises RematKitError when a run of the whole model met no module that is meant."""
        if method is None and not self.matched:
            raise no_match(self.where, run.parts(), self.model)


class _Rule:
    """What is rematerialized, and how, in the models of one enabled class."""

    def __init__(self, policy: Policy | Checkpoint, where: tuple[str | type, ...] | None) -> None:
        self.policy = policy
        self.where = where
        self.local = threading.local()
        self._pick = None if where is None else picker(where)
        self._found: dict[tuple[nn.Module, Any], _Found] = {}
        self._wrapped: dict[type, Callable[..., Any]] = {}

    def found(self, model: nn.Module, method: Any = None) -> _Found | None:
        """What is meant in a model that runs a method, by where or as it was found before; else None.

        Models of one class differ in depth, and methods in what they call: what one runs says nothing of another.
        """
        with contextlib.suppress(TypeError):  # a field that cannot be hashed: it is found again in every call
            if (model, method) in self._found:
                return self._found[model, method]
        return None if self._pick is None else self._keep(model, method, self._pick)

    def _keep(self, model: nn.Module, method: Any, pick: Pick) -> _Found:
        found = _Found(getattr(type(model), _BEFORE).__name__, self.where, pick)
        with contextlib.suppress(TypeError):
            self._found[model, method] = found
        return found

    @contextlib.contextmanager
    def used(self, root: tuple[str, ...], found: _Found) -> "Iterator[_Run]":
        """While it is open, calls of modules that are meant, below `root`, are rematerialized in this thread."""
        run = _Run(self, root, found)
        with self._running(run), _in_use((self.policy, found.pick)):
            yield run

    @contextlib.contextmanager
    def _running(self, interceptor: "_Recorder") -> Iterator[None]:
        before = self.is_running
        self.local.running = True
        try:
            with nn.intercept_methods(interceptor):
                yield
        finally:
            self.local.running = before

    @property
    def is_running(self) -> bool:
        """Whether calls are intercepted in this thread."""
        return getattr(self.local, "running", False)

    def find(self, model: nn.Module, method: Any, call: Callable[[], Any], variables: Any) -> _Found:
        """Finds the modules that repeat, by an abstract run.

        Raises RematKitError when there are none in the whole model; a method may run none of them.
        """
        recorder = _Recorder(())

        def quiet() -> None:
            with self._running(recorder):
                call()

        jax.eval_shape(quiet)
        parts = recorder.parts(variables)
        meant = {part.path for part in repeated(parts)}
        if not meant and method is None:
            raise no_match(None, parts, type(model).__name__)
        return self._keep(model, method, lambda cls, path: path in meant)

    def wrapped(self, cls: type) -> Callable[..., Any]:
        """What calls a module of a class, rematerialized."""
        if cls not in self._wrapped:
            policy = self.policy
            around = CheckedPolicy(policy, cls.__name__) if isinstance(policy, Policy) else policy
            self._wrapped[cls] = remat(around)(_call)
        return self._wrapped[cls]


def _call(module: Any, /, *args: Any, **kwargs: Any) -> Any:
    return module(*args, **kwargs)


class _Recorder:
    """Notes which modules are called below `root`, and changes nothing."""

    def __init__(self, root: tuple[str, ...]) -> None:
        self.root = root
        self.classes: dict[tuple[str, ...], type] = {}

    def __call__(
        self, function: Callable[..., Any], args: Any, kwargs: Any, context: nn.module.InterceptorContext
    ) -> Any:
        self.note(context.module)
        return function(*args, **kwargs)

    def note(self, module: nn.Module) -> tuple[str, ...] | None:
        """The path of a module; None for one outside, and for what nn.scan and its kin put around it."""
        if module.scope is None or module.path[: len(self.root)] != self.root:
            return None
        path = module.path[len(self.root) :]
        if type(module).__module__ == _LIFTED:
            return None
        self.classes[path] = type(module)
        return path

    def parts(self, variables: Any = None) -> list[Part]:
        """The modules that were called, with the shapes of their parameters where variables are given."""
        params = (variables or {}).get("params", {})
        shapes = [
            (tuple(str(key.key) for key in path), leaf.shape)
            for path, leaf in jax.tree.leaves_with_path(nn.unbox(params))
        ]
        return [
            Part(path, cls, tuple(shape for place, shape in shapes if place[: len(path)] == path))
            for path, cls in self.classes.items()
        ]


class _Run(_Recorder):
    """Rematerializes the outermost modules that a rule means while a model runs."""

    def __init__(self, rule: _Rule, root: tuple[str, ...], found: _Found) -> None:
        super().__init__(root)
        self.rule = rule
        self.found = found
        self.inside = False
        self.lifted: set[str] = set()

    def __call__(
        self, function: Callable[..., Any], args: Any, kwargs: Any, context: nn.module.InterceptorContext
    ) -> Any:
        module, found = context.module, self.found
        if self.inside or context.method_name != "__call__":
            return function(*args, **kwargs)
        path = self.note(module)
        if path is None or module.is_initializing() or not found.pick(_own(type(module)), path):
            return function(*args, **kwargs)
        # nn.remat(Block) calls a Block at its own path, and no interceptor sees it: in the jaxpr it is seen afterwards.
        if path and module.scope is not None and module.scope.parent is None:
            self.lifted.add(type(module).__name__)
        found.matched = True
        self.inside = True
        try:
            return self.rule.wrapped(type(module))(module, *args, **kwargs)
        finally:
            self.inside = False


def _arrays(results: Any) -> list[jax.Array]:
    return [leaf for leaf in jax.tree.leaves(results) if isinstance(leaf, jax.Array)]


def _own(cls: type) -> type:
    return getattr(cls, _BEFORE, cls)
