"""Where a step's arguments and results lie on a mesh, from the PartitionSpecs that the step gives."""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from remat_kit._errors import WorkloadError, did_you_mean
from remat_kit._step import Step, label_of, replacements
from remat_kit._units import MiB, format_bytes

_NOTEWORTHY_BYTES = MiB
_NOTEWORTHY_SHARE = 0.05
"""Arrays of the state that are on every device in full are worth a word when each has as many bytes as the former, and
all of them this share of the state on a device: scales and biases are not."""


@contextlib.contextmanager
def mesh_of(devices: Mesh) -> Iterator[None]:
    """While it is open, a PartitionSpec alone is enough in a traced program, since `devices` are JAX's mesh.

    A single device is no mesh: what is traced for it stays as it is without one.
    """
    if devices.size == 1:
        yield
        return
    with jax.set_mesh(devices):
        yield


def abstract_arguments(step: Step, devices: Mesh) -> tuple[Any, ...]:
    """`step.args` without their data, each leaf with its sharding on `devices`.

    A leaf that is a `jax.ShapeDtypeStruct` with a sharding of its own keeps that; others lie where `Step.shardings`
    says, and on every device in full where it says nothing. On one device all of it is the same.

    Raises WorkloadError when the specs do not fit the arguments or the mesh.
    """
    args = jax.tree.map(_without_data, step.args)
    everywhere = NamedSharding(devices, PartitionSpec())
    if step.shardings is None or devices.size == 1 or all(leaf.sharding for leaf in jax.tree.leaves(args)):
        return jax.tree.map(lambda leaf: _placed(leaf, everywhere), args)
    return tuple(
        _placed_argument(position, argument, spec, devices)
        for position, (argument, spec) in enumerate(zip(args, _specs(step, devices), strict=True))
    )


def result_shardings(step: Step, args: tuple[Any, ...], results: Any) -> Any:
    """What `jax.jit` takes as `out_shardings`: a result that replaces a donated argument lies where that lay.

    Only so can XLA hand the memory on, and a step be called with what it returned. Where other results lie is the
    compiler's choice (None). `args` are those of `abstract_arguments`, `results` what `fn` gives for them.
    """
    leaves, structure = jax.tree.flatten(results)
    chosen: list[Any] = [None] * len(leaves)
    for position, start in replacements(step, results).items():
        for offset, leaf in enumerate(jax.tree.leaves(args[position])):
            chosen[start + offset] = leaf.sharding
    return jax.tree.unflatten(structure, chosen)


def place(args: tuple[Any, ...], like: tuple[Any, ...]) -> tuple[Any, ...]:
    """Real arguments moved to where those of `abstract_arguments` lie; as they are on a single device."""
    if all(len(leaf.sharding.device_set) == 1 for leaf in jax.tree.leaves(like)):
        return args
    return jax.tree.map(lambda leaf, wanted: jax.device_put(leaf, wanted.sharding), args, like)


def sharding_warnings(step: Step, args: tuple[Any, ...], devices: Mesh) -> tuple[str, ...]:
    """What is on more devices than it need be. `args` are those of `abstract_arguments`."""
    leaves = jax.tree_util.tree_leaves_with_path(args)
    if devices.size == 1 or not leaves:
        return ()
    if all(leaf.sharding.is_fully_replicated for _, leaf in leaves):
        return (
            f"every argument is replicated on all {devices.size} devices of the mesh, so each of them does the "
            "whole step; give the step's arguments shardings (Step.shardings)",
        )
    used = [(path, leaf, _axes_of(leaf)) for path, leaf in leaves]
    found = []
    idle = [axis for axis, size in devices.shape.items() if size > 1 and not any(axis in axes for *_, axes in used)]
    for axis in idle:
        found.append(
            f"no argument is sharded along mesh axis {axis!r}, so its {devices.shape[axis]} devices may all do the same"
        )
    kept = [each for each in used if each[0][0].idx in step.donate]
    whole = [(path, leaf) for path, leaf, axes in kept if not axes and _bytes(leaf) >= _NOTEWORTHY_BYTES]
    total, state = (sum(map(_bytes, leaves)) for leaves in ([leaf for _, leaf in whole], [leaf for _, leaf, _ in kept]))
    if total > _NOTEWORTHY_SHARE * state and any(axes for *_, axes in kept):
        labels = sorted({label_of(path, step.labels) for path, _ in whole})
        first = jax.tree_util.keystr(whole[0][0][1:])
        found.append(
            f"{len(whole)} arrays of {', '.join(labels)} ({format_bytes(total)}) are on every device in full while "
            f"others are sharded, e.g. {first}; shard them along an axis of the mesh"
        )
    return tuple(found)


def _specs(step: Step, devices: Mesh) -> Sequence[Any]:
    given = step.shardings(devices) if callable(step.shardings) else step.shardings
    if not isinstance(given, tuple) or isinstance(given, PartitionSpec) or len(given) != len(step.args):
        what = f"a tuple of {len(given)}" if isinstance(given, tuple) else f"a {type(given).__name__}"
        raise WorkloadError(
            f"Step.shardings gave {what} for {len(step.args)} arguments. Give a tuple with one PartitionSpec, "
            "or pytree of them, for each argument of fn."
        )
    return given


def _is_spec(node: Any) -> bool:
    return node is None or isinstance(node, PartitionSpec)


def _placed_argument(position: int, argument: Any, specs: Any, devices: Mesh) -> Any:
    """An argument with its prefix of specs spread over its leaves."""
    try:
        spread = jax.tree.broadcast(specs, argument, is_leaf=_is_spec)
    except ValueError as error:
        first = str(error).strip().splitlines()[0]
        raise WorkloadError(
            f"Step.shardings of argument {position} is no prefix of the argument: {first} "
            "Give one PartitionSpec for all of it, or a pytree of the argument's structure."
        ) from error

    def put(path: tuple[Any, ...], leaf: Any, spec: Any) -> Any:
        where = f"argument {position}{jax.tree_util.keystr(path)}"
        if not _is_spec(spec):
            raise WorkloadError(
                f"Step.shardings has a {type(spec).__name__} for {where}. Give a jax.sharding.PartitionSpec, or None "
                "for what is on every device in full."
            )
        spec = spec or PartitionSpec()
        _check(where, leaf.shape, spec, devices.shape)
        return _placed(leaf, NamedSharding(devices, spec))

    return jax.tree_util.tree_map_with_path(put, argument, spread)


def _check(where: str, shape: tuple[int, ...], spec: PartitionSpec, sizes: Mapping[str, int]) -> None:
    """Raises WorkloadError when an array of `shape` cannot be cut as `spec` says."""
    if len(spec) > len(shape):
        raise WorkloadError(
            f"Step.shardings has {spec} for {where}, which has {len(shape)} dimensions {list(shape)}. "
            "Give at most one entry for each dimension."
        )
    for dimension, (entry, size) in enumerate(zip(spec, shape, strict=False)):
        axes = entry if isinstance(entry, tuple) else () if entry is None else (entry,)
        for axis in axes:
            if axis not in sizes:
                raise WorkloadError(
                    f"Step.shardings has {spec} for {where}, and the mesh has no axis {axis!r}."
                    f"{did_you_mean(str(axis), sizes)} Its axes: {', '.join(sizes)}. "
                    "Leave out of the specs what the mesh does not have, or name another mesh (--mesh)."
                )
        parts = math.prod(sizes[axis] for axis in axes)
        if size % parts:
            product = " * ".join(f"{axis}={sizes[axis]}" for axis in axes)
            raise WorkloadError(
                f"dimension {dimension} of {where} has size {size}, which does not divide into the {parts} parts of "
                f"{product}. Change the size to a multiple of {parts}, or the mesh (--mesh)."
            )


def _without_data(leaf: Any) -> jax.ShapeDtypeStruct:
    given = leaf.sharding if isinstance(leaf, jax.ShapeDtypeStruct) else None
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        leaf = jax.eval_shape(lambda: leaf)
    weak = bool(getattr(leaf, "weak_type", False))
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=given, weak_type=weak)


def _placed(leaf: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    weak = bool(getattr(leaf, "weak_type", False))
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding or sharding, weak_type=weak)


def _bytes(leaf: Any) -> int:
    """On one device."""
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def _axes_of(leaf: Any) -> frozenset[str]:
    """The mesh axes of more than one device along which a leaf is cut."""
    sharding = leaf.sharding
    if not isinstance(sharding, NamedSharding):
        return frozenset() if sharding.is_fully_replicated else frozenset({""})
    entries = [entry if isinstance(entry, tuple) else (entry,) for entry in sharding.spec]
    return frozenset(axis for axes in entries for axis in axes if axis and sharding.mesh.shape[axis] > 1)
