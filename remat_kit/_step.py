"""A training step over abstract arguments, and the workload that builds it for a policy."""

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from remat_kit._errors import WorkloadError, did_you_mean
from remat_kit._policy import Policy


@dataclass(frozen=True)
class Step:
    """One training step: what the compiler sees, and what the report calls its arguments.

    Attributes:
      fn: the step as it is jitted: `fn(*args) -> outputs`. Not yet jitted itself.
      args: one pytree an argument, of `jax.ShapeDtypeStruct` or arrays. Nothing is allocated to analyze it.
      donate: positions in `args` whose buffers the step may overwrite.
      labels: what holds what, e.g. `{"params": "0.params", "optimizer": "0.optimizer", "batch": 1}`: a
        position in `args`, or a position and the path below it, joined with dots.
      init: `init(seed) -> args` with real arrays of the shapes of `args`; needed to measure a step whose
        `args` are abstract.
      loss_and_grads: `loss_and_grads(*args) -> (loss, gradients)`; what a measurement compares with policy
        `none`. Without it nothing is compared, and the measurement says so.
      shardings: where the arguments lie on a mesh of several devices: `shardings(mesh)` gives a tuple with a pytree
        prefix of `PartitionSpec` (None: on every device in full) for each argument; or that tuple itself. A function
        may raise a WorkloadError for a mesh that does not suit the model. `fn` is traced with the mesh set, so it can
        use `jax.lax.with_sharding_constraint(x, PartitionSpec(...))`. A single device needs and asks for none.
      items: what one step processes, all devices together, the main thing first: `{"tokens": 8192, "sequences": 8}`.
        Throughput is counted in the first.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    donate: tuple[int, ...] = ()
    labels: Mapping[str, int | str] = field(default_factory=dict)
    init: Callable[[int], tuple[Any, ...]] | None = None
    loss_and_grads: Callable[..., Any] | None = None
    shardings: Callable[[Any], tuple[Any, ...]] | tuple[Any, ...] | None = None
    items: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.args, tuple):
            raise WorkloadError(
                f"Step.args is a {type(self.args).__name__}. Give a tuple with one pytree for each argument of fn."
            )
        outside = [position for position in self.donate if not 0 <= position < len(self.args)]
        if outside:
            raise WorkloadError(
                f"Step.donate names argument {outside[0]}, but there are {len(self.args)} (0 to {len(self.args) - 1})."
            )

        for name, count in self.items.items():
            if not isinstance(count, int) or isinstance(count, bool) or count < 1:
                raise WorkloadError(
                    f"Step.items says that a step processes {count!r} {name}. Give whole numbers of at least 1, "
                    "e.g. {'tokens': 8192}, or leave it out."
                )

        paths = [_parts(path) for path, _ in jax.tree_util.tree_leaves_with_path(self.args)]
        for label, place in self.labels.items():
            prefix = str(place).split(".")
            if not any(parts[: len(prefix)] == prefix for parts in paths) and not _is_place(self.args, prefix):
                depth = len(prefix)
                there = sorted({".".join(parts[:depth]) for parts in paths})
                raise WorkloadError(
                    f"Step.labels says that {label!r} is at {place!r}, where the arguments hold nothing."
                    f"{did_you_mean(str(place), there)} At that depth there are: {', '.join(there[:20])}."
                )


def replacements(step: Step, results: Any) -> dict[int, int]:
    """Which results take the place of donated arguments: from the argument's position to the number of the first leaf
    in `results`.

    It is the outermost part of `results` with the structure, shapes and types of the argument; each part serves once.
    A donated argument that nothing replaces is not in the answer.
    """
    candidates = list(_subtrees(results, 0, depth=3))
    found = {}
    for position in step.donate:
        wanted = _signature(step.args[position])
        match = next((index for index, (_, part) in enumerate(candidates) if _signature(part) == wanted), None)
        if match is not None:
            found[position] = candidates.pop(match)[0]
    return found


def _subtrees(tree: Any, start: int, depth: int) -> Iterator[tuple[int, Any]]:
    """`tree` and what is in it, outermost first, each with the number of its first leaf."""
    yield start, tree
    if depth and not jax.tree_util.all_leaves([tree]):
        for child in jax.tree_util.tree_leaves(tree, is_leaf=lambda node: node is not tree):
            yield from _subtrees(child, start, depth - 1)
            start += len(jax.tree.leaves(child))


def _signature(tree: Any) -> Any:
    return jax.tree.structure(tree), [(jnp.shape(leaf), jax.dtypes.result_type(leaf)) for leaf in jax.tree.leaves(tree)]


def label_of(path: tuple[Any, ...], labels: Mapping[str, int | str]) -> str:
    """The label of an argument's leaf: the one whose place is the longest prefix of its `path` in Step.args.

    "arguments" when nothing there has a label.
    """
    parts = _parts(path)
    best, length = "arguments", 0
    for label, place in labels.items():
        prefix = str(place).split(".")
        if parts[: len(prefix)] == prefix and len(prefix) > length:
            best, length = label, len(prefix)
    return best


def _parts(path: tuple[Any, ...]) -> list[str]:
    """A key path of JAX as the words that Step.labels is written in."""
    return [str(getattr(key, "idx", getattr(key, "key", getattr(key, "name", key)))) for key in path]


def _is_place(node: Any, words: list[str]) -> bool:
    """Whether there is something at `words` below `node`, be it without leaves, like the state of plain SGD."""
    for word in words:
        if isinstance(node, Mapping) and word in node:
            node = node[word]
        elif isinstance(node, tuple | list) and word.isdigit() and int(word) < len(node):
            node = node[int(word)]
        elif hasattr(node, word):
            node = getattr(node, word)
        else:
            return False
    return True


@dataclass(frozen=True)
class Workload:
    """`module:function` and the options to call it with.

    The function is `build(policy, **options) -> Step`. If it has a parameter `platform`, it is given the
    platform that the step is compiled for, `"cpu"` or `"cuda"`, for kernels that exist on one of them only.
    """

    spec: str
    options: tuple[tuple[str, Any], ...] = ()

    def build(self, policy: Policy, platform: str) -> Step:
        """The step under `policy`. Raises WorkloadError when the function or an option does not exist."""
        function = self.function()
        options = dict(self.options)
        self.check_options(function)
        if "platform" in inspect.signature(function).parameters and "platform" not in options:
            options["platform"] = platform
        try:
            step = function(policy, **options)
        except SystemExit as error:
            raise WorkloadError(
                f"{self.spec} called sys.exit({error.code!r}). Let it return a remat_kit.Step."
            ) from error
        if not isinstance(step, Step):
            raise WorkloadError(f"{self.spec} returned a {type(step).__name__}. A workload returns a remat_kit.Step.")
        return step

    def function(self) -> Callable[..., Any]:
        """The imported function. Raises WorkloadError when the module or the function does not exist."""
        module_name, separator, function_name = self.spec.partition(":")
        if not (separator and module_name and function_name):
            raise WorkloadError(f"{self.spec!r} is not a workload. Write module:function, e.g. models.transformer:gpt.")
        try:
            module = importlib.import_module(module_name)
        except (ImportError, TypeError) as error:
            raise WorkloadError(
                f"cannot import {module_name!r} of workload {self.spec!r}: {error}. "
                "Run from the folder that holds it, or install its package."
            ) from error
        function = getattr(module, function_name, None)
        if not callable(function):
            offered = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
            raise WorkloadError(
                f"module {module_name!r} has no function {function_name!r}.{did_you_mean(function_name, offered)} "
                "A workload is a function build(policy, **options) that returns a remat_kit.Step."
            )
        return function

    def check_options(self, function: Callable[..., Any]) -> None:
        """Raises WorkloadError for an option that the function does not have."""
        parameters = inspect.signature(function).parameters
        by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        if not parameters:
            raise WorkloadError(
                f"{self.spec} takes no arguments. A workload is called with a policy: build(policy, ...)."
            )
        first, *rest = parameters.values()
        allowed = [parameter.name for parameter in rest if parameter.kind in by_name]
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        for name, _ in self.options:
            if name == first.name or (name not in allowed and not takes_any):
                raise WorkloadError(
                    f"workload {self.spec} has no option {name!r}.{did_you_mean(name, allowed)} "
                    f"Options: {', '.join(allowed) or 'none'}."
                )


def parse_option(text: str) -> tuple[str, Any]:
    """`("batch", 8)` from `"batch=8"`: int, float, true/false, none or a string, in that order of trial."""
    name, separator, value = text.partition("=")
    if not separator or not name.isidentifier():
        raise WorkloadError(f"{text!r} is not an option. Write key=value, e.g. batch=8.")
    words: dict[str, Any] = {"true": True, "false": False, "none": None}
    if value.lower() in words:
        return name, words[value.lower()]
    for kind in (int, float):
        try:
            return name, kind(value)
        except ValueError:
            continue
    return name, value
