"""Where the arrays of a reference transformer lie on a mesh: logical axes, and one table from them to mesh axes.

Mesh axes:
  data    parts of the batch; parameters are the same on all of them
  fsdp    parts of the batch too, and of every parameter, its gradient and its optimizer state (ZeRO-3): a weight is
          gathered where it is used
  tensor  parts of heads, MLP width and vocabulary (Megatron-LM, Shoeybi et al. 2019); with `sequence_parallel` also of
          the sequence between the blocks' two halves, where otherwise every device would hold and compute the same
          (Korthikanti et al. 2022)

An axis that the mesh does not have is left out of all specs, and without a mesh nothing is constrained at all.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from models.config import ConfigError, TransformerConfig
from remat_kit import names

DATA, FSDP, TENSOR = "data", "fsdp", "tensor"
MESH_AXES = (DATA, FSDP, TENSOR)

RULES: Mapping[str, tuple[str, ...]] = {
    "batch": (DATA, FSDP),
    "heads": (TENSOR,),
    "mlp": (TENSOR,),
    "vocabulary": (TENSOR,),
    "sequence": (),
    "residual_sequence": (),
    "embed": (),
}
"""Mesh axes of each logical axis of an activation. `sequence_parallel` makes "residual_sequence" (TENSOR,)."""

PARAMETERS: Mapping[tuple[str, ...], tuple[str, ...]] = {
    ("embedding",): ("vocabulary", "embed"),
    ("positions",): ("sequence", "embed"),
    ("head",): ("embed", "vocabulary"),
    ("scale",): ("embed",),
    ("bias",): ("embed",),
    ("query", "kernel"): ("embed", "heads"),
    ("query", "bias"): ("heads",),
    ("key", "kernel"): ("embed", "heads"),
    ("key", "bias"): ("heads",),
    ("value", "kernel"): ("embed", "heads"),
    ("value", "bias"): ("heads",),
    ("out", "kernel"): ("heads", "embed"),
    ("gate", "kernel"): ("embed", "mlp"),
    ("up", "kernel"): ("embed", "mlp"),
    ("up", "bias"): ("mlp",),
    ("down", "kernel"): ("mlp", "embed"),
}
"""Logical axes of each parameter, by the end of its path. Biases and scales are "embed" where nothing else is said."""


def constrain(x: jax.Array, *axes: str | None, sequence_parallel: bool = False) -> jax.Array:
    """`x` itself, cut over the mesh that is set as the table says of its logical `axes`, one for each dimension.

    Without a mesh, or with one that has none of the table's axes, `x` as it is, with nothing traced.
    """
    mesh = _mesh()
    return jax.lax.with_sharding_constraint(x, _activation_spec(axes, mesh, sequence_parallel)) if mesh else x


def apart(x: jax.Array) -> jax.Array:
    """`x` itself, on a mesh with the axis tensor behind an operation that changes nothing and that XLA removes.

    To stand before a constraint that gathers it. Where one constraint takes another's result, XLA's partitioner
    (Shardy) puts the last one's in the place of all other uses of the first one's operand: what a policy keeps for
    backward would be the gathered array, eight times as large on eight devices.
    """
    if TENSOR not in _mesh():
        return x
    kind = jnp.finfo(x.dtype)
    return jax.lax.reduce_precision(x, kind.nexp, kind.nmant)


def use(parameter: jax.Array, dtype: jax.typing.DTypeLike, *axes: str | None) -> jax.Array:
    """A parameter with the logical `axes`, cast to `dtype` for its use.

    On a mesh that cuts it, it is cast where it lies, and its gradient lies there too. With the axis fsdp it is then
    gathered, and the gathered one is tagged `names.WEIGHTS`, so that a policy can keep it; its gradient is summed over
    the devices.
    """
    cast, mesh = parameter.astype(dtype), _mesh()
    if not {FSDP, TENSOR} & mesh.keys():
        return cast
    cast = jax.lax.with_sharding_constraint(cast, parameter_spec(axes, parameter.shape, mesh))
    if FSDP not in mesh:
        return cast
    gathered = jax.lax.with_sharding_constraint(cast, _activation_spec(axes, mesh, sequence_parallel=False))
    return checkpoint_name(gathered, names.WEIGHTS)


def parameter_spec(axes: tuple[str | None, ...], shape: tuple[int, ...], mesh: Mapping[str, int]) -> PartitionSpec:
    """Where a parameter with the logical `axes` lies.

    It is cut over tensor as its activations are, and over fsdp along "embed". One without that axis, the bias of a
    projection, is cut over both along its only one where the size allows it, else over tensor alone.
    """
    entries = [_entry(axis, mesh) for axis in axes]
    if FSDP in mesh:
        at = axes.index("embed") if "embed" in axes else 0
        entries[at] = (*entries[at], FSDP)
        parts = 1
        for axis in entries[at]:
            parts *= mesh[axis]
        if "embed" not in axes and shape[at] % parts:
            entries[at] = entries[at][:-1]
    return PartitionSpec(*(entry if len(entry) > 1 else entry[0] if entry else None for entry in entries))


def shardings(config: TransformerConfig, args: tuple[Any, ...], mesh: Any) -> tuple[Any, ...]:
    """The specs of the arguments (state, batch, key) of a transformer's step on `mesh`: `Step.shardings`.

    Parameters and the optimizer's moments of them alike, found by the end of their paths; with stacked blocks the axis
    of layers stays whole. Raises ConfigError for a mesh that does not suit the model.
    """
    sizes = dict(mesh.shape)
    check_mesh(config, sizes)

    def of_leaf(path: tuple[Any, ...], leaf: Any) -> PartitionSpec:
        keys = tuple(str(each.key) for each in path if isinstance(each, jax.tree_util.DictKey))
        if not leaf.ndim or not keys:
            return PartitionSpec()
        axes = PARAMETERS.get(keys[-2:]) or PARAMETERS[keys[-1:]]
        stacked = leaf.ndim - len(axes)
        return PartitionSpec(*[None] * stacked, *parameter_spec(axes, leaf.shape[stacked:], sizes))

    state, _, _ = args
    specs = jax.tree_util.tree_map_with_path(of_leaf, state)
    return specs, _activation_spec(("batch",), sizes, sequence_parallel=False), PartitionSpec()


def check_mesh(config: TransformerConfig, mesh: Mapping[str, int]) -> None:
    """Raises ConfigError for a mesh with an axis that no rule knows, or one that does not divide the model."""
    unknown = [axis for axis, size in mesh.items() if axis not in MESH_AXES and size > 1]
    if unknown:
        raise ConfigError(
            f"mesh axis {unknown[0]!r} has no rule in this model. Its axes are {', '.join(MESH_AXES)}: "
            f"name the mesh by them, e.g. --mesh fsdp={mesh[unknown[0]]}."
        )
    if config.sequence_parallel and TENSOR not in mesh:
        raise ConfigError(
            f"sequence_parallel=true cuts the sequence over mesh axis {TENSOR!r}, and the mesh has none: "
            f"{_words(mesh, tuple(mesh))}. Add it, e.g. --mesh tensor=8, or leave sequence_parallel out."
        )
    cut = {
        "batch": (DATA, FSDP),
        "width": (FSDP,),
        "heads": (TENSOR,),
        "kv_heads": (TENSOR,),
        "mlp_width": (TENSOR,),
        "vocabulary": (TENSOR,),
        **({"seq": (TENSOR,)} if config.sequence_parallel else {}),
    }
    for name, axes in cut.items():
        parts = 1
        for axis in axes:
            parts *= mesh.get(axis, 1)
        size = getattr(config, name)
        if size % parts:
            raise ConfigError(
                f"{name} {size} does not divide into the {parts} parts of mesh {_words(mesh, axes)}. "
                f"Give a multiple, e.g. {name}={-(-size // parts) * parts}, or a smaller axis."
            )


def _words(mesh: Mapping[str, int], axes: tuple[str, ...]) -> str:
    return ",".join(f"{axis}={mesh[axis]}" for axis in axes if axis in mesh)


def _mesh() -> dict[str, int]:
    """The axes of the table that the mesh that is set has, with their sizes; empty without a mesh."""
    shape = jax.sharding.get_abstract_mesh().shape
    return {axis: shape[axis] for axis in MESH_AXES if axis in shape}


def _entry(axis: str | None, mesh: Mapping[str, int], sequence_parallel: bool = False) -> tuple[str, ...]:
    if axis is None:
        return ()
    wanted = (TENSOR,) if axis == "residual_sequence" and sequence_parallel else RULES[axis]
    return tuple(each for each in wanted if each in mesh)


def _activation_spec(axes: tuple[str | None, ...], mesh: Mapping[str, int], sequence_parallel: bool) -> PartitionSpec:
    entries = [_entry(axis, mesh, sequence_parallel) for axis in axes]
    return PartitionSpec(*(entry if len(entry) > 1 else entry[0] if entry else None for entry in entries))
