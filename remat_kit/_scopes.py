"""Module paths of NNX models in JAX's name stack, as Linen writes them: `Transformer/blocks_3/attention/query`.

Linen enters a scope for each module that it calls; NNX calls modules as plain Python objects. While `nnx_scopes` is
open, `__call__` of every NNX class that defines one runs in `jax.named_scope`. Nothing is written on a module.
"""

import collections
import contextlib
import functools
import re
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import jax
from flax import nnx
from jax.extend import core

_THREAD = threading.local()
"""`calls`: the modules being called in this thread, behind a call of nothing; None or absent without scopes."""

_CACHED_WITH_SCOPES = jax.make_user_context(False)
"""Part of the key of JAX's caches, so that nothing traced without names is taken for a step with names."""


@contextlib.contextmanager
def nnx_scopes() -> Iterator[None]:
    """While it is open, this thread's calls of NNX modules run in a name scope; other threads notice nothing.

    A scope's name is the path of attributes by which the innermost module being called holds this one. The outermost
    module's is its class. A method other than `__call__` has no scope.
    """
    outer = _open_calls()
    _PATCHES.open()
    try:
        _THREAD.calls = [_Call(None)]
        with _CACHED_WITH_SCOPES(True):
            yield
    finally:
        _THREAD.calls = outer
        _PATCHES.close()


def _open_calls() -> "list[_Call] | None":
    return getattr(_THREAD, "calls", None)


class _Patches:
    """The `__call__` of all NNX classes with a scope around it, from the first `open` to the last `close`."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.users = 0
        self.done: list[tuple[type, str, Any, Any]] = []
        """Class, attribute, what it was (None: inherited), what stands there now."""

    def open(self) -> None:
        with self.lock:
            self.users += 1
            if self.users > 1:
                return
            try:
                self._add_hooks()
                for cls in _subclasses(nnx.Module):
                    self.add(cls)
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        with self.lock:
            self.users -= 1
            while self.users == 0 and self.done:
                cls, name, before, ours = self.done.pop()
                if vars(cls).get(name) is not ours:
                    continue  # replaced since then: what stands there calls ours, which does nothing any more
                if before is None:
                    delattr(cls, name)
                else:
                    setattr(cls, name, before)

    def add(self, cls: type) -> None:
        """Patches `cls` if it defines `__call__` itself."""
        call = vars(cls).get("__call__")
        if callable(call) and not isinstance(call, staticmethod | type):
            self._set(cls, "__call__", call, _with_scope(cls, call))

    def _add_hooks(self) -> None:
        """Classes that the step makes while it is traced are patched too, and reads of attributes are noted."""
        made, read = (vars(nnx.Module).get(name) for name in ("__init_subclass__", "__getattribute__"))

        def init_subclass(cls: Any, **kwargs: Any) -> None:
            base = made.__get__(None, cls) if made else super(nnx.Module, cls).__init_subclass__
            base(**kwargs)
            with self.lock:
                if self.users:
                    self.add(cls)

        def getattribute(module: Any, name: str) -> Any:
            value = read(module, name) if read else super(nnx.Module, module).__getattribute__(name)
            calls = _open_calls()
            if calls and not name.startswith(_PRIVATE) and isinstance(value, _CONTAINERS):
                calls[-1].note(module, name)
            return value

        self._set(nnx.Module, "__init_subclass__", made, classmethod(init_subclass))
        self._set(nnx.Module, "__getattribute__", read, getattribute)

    def _set(self, cls: type, name: str, before: Any, ours: Any) -> None:
        self.done.append((cls, name, before, ours))
        setattr(cls, name, ours)


_PATCHES = _Patches()
_CONTAINERS = (nnx.Pytree, dict, list, tuple)
_PRIVATE = ("_pytree__", "__")


def _subclasses(cls: type) -> list[type]:
    found = dict.fromkeys(cls.__subclasses__())
    for inner in cls.__subclasses__():
        found.update(dict.fromkeys(_subclasses(inner)))
    return list(found)


def _with_scope(owner: type, original: Any) -> Any:
    """`original`, the `__call__` that `owner` defines, in a scope wherever scopes are open."""

    @functools.wraps(original)
    def scoped(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        method = original.__get__(self, type(self)) if hasattr(original, "__get__") else original
        calls = _open_calls()
        if not calls or _defines_call(type(self)) is not owner or calls[-1].module is self:
            return method(*args, **kwargs)  # the latter two: super().__call__, also on the copy within nnx.remat
        name = _name_of(self, calls)
        call = _Call(self)
        calls.append(call)
        try:
            with jax.named_scope(name):
                return method(*args, **kwargs)
        finally:
            calls.pop()

    return scoped


def _defines_call(cls: type) -> type | None:
    return next((base for base in cls.__mro__ if "__call__" in vars(base)), None)


class _Call:
    """A module that is being called, where it holds others, and what was read of it since."""

    def __init__(self, module: Any):
        self.module = module
        self.trace = core.get_opaque_trace_state(convention="nnx")
        self.uses: collections.Counter[str] = collections.Counter()
        # Weak, since copies hold values of traces that end before this call does.
        self.copies: dict[int, tuple[weakref.ref[Any], str]] = {}
        self.read_from: dict[int, weakref.ref[Any]] = {}
        self.reads: list[str] = []
        self.unused: list[str] = []
        """What was read before a copy was last called, without what that copy and others stood for."""

    @functools.cached_property
    def held(self) -> dict[int, tuple[Any, str]]:
        """`_held_by` of the module."""
        return {} if self.module is None else _held_by(self.module)

    def note(self, holder: Any, attribute: str) -> None:
        """Notes that `attribute` of `holder` was read within this call."""
        if type(holder) is type(self.module):
            self.reads.append(_clean(attribute))
        if holder is not self.module:
            self.read_from[id(holder)] = weakref.ref(holder)

    def holder_of(self, module: Any) -> tuple[Any, str]:
        """The module that holds `module` among those of which attributes were read, with the path; else (None, "")."""
        found = [
            (holder, held[id(module)][1])
            for reference in self.read_from.values()
            if (holder := reference()) is not None and holder is not module
            if id(module) in (held := _held_by(holder))
        ]
        # Of two, the outer one, whose place is known with the most certainty when it is the module being called.
        rank = [(type(holder) is type(self.module), path.count("/"), len(path)) for holder, path in found]
        return found[rank.index(max(rank))] if found else (None, "")

    def path_of(self, module: Any) -> str:
        """The path of a module that this one holds, or of one known to be a copy of such a module; "" for others."""
        copy, copied = self.copies.get(id(module), (None, ""))
        if copy is not None and copy() is module:
            return copied
        if id(module) not in self.held:
            return ""
        _, path = self.held[id(module)]
        self.uses[path] += 1
        self.reads = [name for name in self.reads if not _under(name, [path])]  # it was read for this call
        return path

    def path_of_copy(self, copy: Any) -> str:
        """The path of the module that `copy` was most likely made of; "" where no module is of its class.

        It is one of those that were read since the last copy was called: `nnx.remat(run)(self.block, x)` reads
        `block`. Under one attribute it is the module used least in this call, and then the first, so that layers that
        are called in order get their names in order.
        """
        alike = [path for module, path in self.held.values() if type(module) is type(copy)]
        candidates = self._just_read(alike) or alike
        if not candidates:
            return ""
        path = min(candidates, key=lambda path: self.uses[path])
        self.uses[path] += 1
        if self.trace != core.get_opaque_trace_state(convention="nnx"):
            # Traced on its own, perhaps once for a whole list of layers: JAX keeps traces. Then no number is right.
            siblings = [other for other in alike if _NUMBER.sub("", other) == _NUMBER.sub("", path)]
            path = path if len(siblings) == 1 else _NUMBER.sub("", path)
        self.copies[id(copy)] = weakref.ref(copy), path
        return path

    def _just_read(self, paths: list[str]) -> list[str]:
        """Those of `paths` under the first attribute read since the last time, else under the one read last."""
        new = [name for name in dict.fromkeys(self.reads) if _under(name, paths)]
        self.reads.clear()
        self.unused = new or [name for name in self.unused if _under(name, paths)]
        if not self.unused:
            return []
        return _under(self.unused.pop(0) if len(self.unused) > 1 else self.unused[0], paths)


def _under(attribute: str, paths: list[str]) -> list[str]:
    return [path for path in paths if re.match(rf"{re.escape(attribute)}(_\d|/|$)", path)]


_NUMBER = re.compile(r"(?<=.)_\d+(?=/|$)")


def _name_of(module: Any, calls: list[_Call]) -> str:
    """The name of the scope for a call of `module`.

    NNX modules do not know who holds them. Where it is a copy that no call knows, the attributes that were just read
    tell: `self.attention(x)` reads `attention` of `self`, which is a copy of the module being called.
    """
    for call in reversed(calls):
        if path := call.path_of(module):
            return path
    top = calls[-1]
    holder, path = top.holder_of(module)
    if holder is None:
        return top.path_of_copy(module) or _clean(type(module).__name__)
    if type(holder) is type(top.module):
        return path
    outer = top.path_of(holder) or top.path_of_copy(holder) or _clean(type(holder).__name__)
    return f"{outer}_{path}" if path[0].isdigit() else f"{outer}/{path}"


def _held_by(holder: Any) -> dict[int, tuple[Any, str]]:
    """id -> (module, path) of all modules below `holder`, the nearest first, then in the order of definition.

    A module that is held twice has its shortest path, of several the first.
    """
    found: dict[int, tuple[Any, str]] = {}
    seen = {id(holder)}
    queue = collections.deque([(holder, "")])
    while queue:
        node, path = queue.popleft()
        for key, value in _items(node):
            if isinstance(value, _CONTAINERS) and id(value) not in seen:
                seen.add(id(value))
                inner = _join(path, key)
                if isinstance(value, nnx.Module):
                    found[id(value)] = value, inner
                queue.append((value, inner))
    return found


def _items(node: Any) -> list[tuple[Any, Any]]:
    if isinstance(node, list | tuple):
        return list(enumerate(node))
    if isinstance(node, dict):
        return list(node.items())
    return [(key, value) for key, value in vars(node).items() if not str(key).startswith(_PRIVATE)]


def _join(path: str, key: Any) -> str:
    """`blocks` and 3 are `blocks_3`, `mlp` and "up" are `mlp/up`."""
    if str(key).isdigit():
        return f"{path}_{key}" if path else str(key)
    return f"{path}/{_clean(str(key))}" if path else _clean(str(key))


def _clean(name: str) -> str:
    """Without the parentheses and slashes in which JAX writes its own transformations."""
    return re.sub(r"[^\w.\-]", "_", name, flags=re.ASCII) or "_"
