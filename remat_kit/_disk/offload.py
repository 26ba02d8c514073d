"""`disk_offload`: what stands in a policy's place and keeps the inputs of blocks on disk.

A block becomes a `jax.custom_vjp`. Its forward hands the block's activations to a callback, which gives them a number;
the number is all that is kept. Its backward hands the number to another callback, which gives the activations back,
runs the block again and differentiates it. The read depends on the number, which the write makes, and on the
cotangents, which backward makes, so it can neither come before the write nor long before it is needed. The callbacks
are JAX's `io_callback`: a `pure_callback` may be run twice, merged with an equal one, or left out.
"""

import functools
import inspect
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.extend import core

from remat_kit._disk.transfer import Traffic, Transfer
from remat_kit._errors import DiskError, PolicyError, did_you_mean
from remat_kit._policy import STATE, argument_names
from remat_kit._units import GiB, format_bytes, parse_bytes


def disk_offload(
    directory: str | Path,
    limit: str | int,
    *,
    write: Sequence[str] | None = None,
    memory: str | int = GiB,
) -> "DiskOffload":
    """What `remat` takes in a policy's place to keep each block's input on disk and compute the block again.

    Arguments:
      directory: where the file goes, on a fast disk of this machine. It has to be there.
      limit: the most that the file may take, in bytes or as text, `"200GiB"`.
      write: which parameters of the block hold activations, by name. Of a module's call, and of a function that has a
        module among its arguments, all arrays that are not a module's state are written unless this says otherwise; of
        another function it must be said where more than one parameter holds arrays. What is not written, and what the
        block closes over, is kept where it is, as parameters have to be anyway. Random keys are never written.
      memory: host memory for values that wait to be written or were read ahead, at most; one value may always.

    The computation waits for the disk only where it runs out of `memory` in forward, or in backward is faster than
    reading ahead. The file has no name, so nothing of it stays when the process ends in whatever way; see
    `DiskOffload.close` for what is given back before.

    Raises PolicyError for arguments that are none of these, DiskError when no file can be made in the directory. While
    a step runs, DiskError's message comes inside JAX's own error: where a limit or the disk is full, where writing or
    reading fails, where the disk gives back something else than it was given, where a value is asked for twice.
    """
    return DiskOffload(Path(directory), _bytes(limit, "limit"), _write_names(write), _bytes(memory, "memory"))


class DiskOffload:
    """Keeps inputs of blocks on disk; made by `disk_offload`. One file, shared by all blocks that it is given to.

    Attributes:
      directory, limit, memory: as given; bytes.
      write: the parameters that are written, None where the kind of function decides.
    """

    def __init__(self, directory: Path, limit: int, write: tuple[str, ...] | None, memory: int) -> None:
        self.directory, self.limit, self.write, self.memory = directory, limit, write, memory
        self._opening = threading.Lock()
        self._open: Transfer | None = None
        self._dropped: tuple[int, str] = (0, "")
        Transfer(directory, limit, memory).close()  # what is wrong with the directory is said here

    @property
    def name(self) -> str:
        """What tables call it."""
        return f"disk({self.directory},{format_bytes(self.limit).replace(' ', '')})"

    def __repr__(self) -> str:
        return f"<{self.name}>"

    def checkpoint(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, a block, with the activations among its inputs on disk from forward to backward."""

        @functools.wraps(function)
        def offloaded(*args: Any) -> Any:
            return self._run(function, args)

        return offloaded

    def traffic(self) -> Traffic:
        """What is on disk now, and what was written and read since the policy was made or closed."""
        transfer = self._open
        return transfer.traffic() if transfer else Traffic(0, 0, 0, 0, 0, 0, 0, 0, 0.0)

    def wait(self) -> None:
        """Returns when nothing is being written or read ahead."""
        if transfer := self._open:
            transfer.wait()

    def clear(self) -> None:
        """Gives up what was written and not read, as after a forward pass whose gradient is not wanted any more.

        A backward pass that still asks for it ends in an error. A step that fails for want of the disk has done so
        itself.
        """
        if transfer := self._open:
            transfer.clear()

    def close(self) -> None:
        """As `clear`, and the file is gone, whose blocks go back to the disk. The next step makes another one.

        Between steps the file keeps its blocks, so that the next one need not ask the disk for them. They go back when
        this is called, when the policy is used no more, and when the process ends.
        """
        with self._opening:
            transfer, self._open = self._open, None
            if transfer is not None:
                transfer.close()
                self._dropped = transfer.dropped

    def __enter__(self) -> "DiskOffload":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _transfer(self) -> Transfer:
        with self._opening:
            if self._open is None:
                self._open = Transfer(self.directory, self.limit, self.memory, self._dropped)
            return self._open

    def _run(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        _check_callbacks()
        leaves, structure = jax.tree.flatten(args)
        chosen = self._written(function, args)
        result: list[Any] = []

        def flat(*leaves: Any) -> list[Any]:
            found, result[:] = (pair := jax.tree.flatten(function(*jax.tree.unflatten(structure, leaves))))[0], pair[1:]
            return found

        traced = jax.make_jaxpr(flat)(*leaves)
        return jax.tree.unflatten(result[0], self._offloaded(traced, chosen)(*leaves))

    def _offloaded(self, traced: Any, chosen: Sequence[bool]) -> Callable[..., list[Any]]:
        """The flat block with inputs on disk where `chosen` says so. What it closes over is kept like the others."""
        kinds = [
            jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype)
            for var, is_written in zip(traced.jaxpr.invars, chosen, strict=True)
            if is_written
        ]

        def run(kept: Sequence[Any], written: Sequence[Any]) -> list[Any]:
            others, activations = iter(kept[len(traced.consts) :]), iter(written)
            leaves = [next(activations) if is_written else next(others) for is_written in chosen]
            closed = traced.replace(consts=list(kept[: len(traced.consts)]))
            return core.jaxpr_as_fun(closed)(*leaves)

        block = jax.custom_vjp(run)

        def forward(kept: Sequence[Any], written: Sequence[Any]) -> Any:
            number = io_callback(self._put, _NUMBER, *written)
            return run(kept, written), (kept, number)

        def backward(residuals: Any, cotangents: Sequence[Any]) -> Any:
            kept, number = residuals
            written = self._read(number, kinds, cotangents)
            # Without the barrier XLA may compute what depends on parameters alone in forward, and keep it.
            kept, written = jax.lax.optimization_barrier((kept, written))
            leaves, structure = jax.tree.flatten((kept, written))
            moving = [_has_gradient(leaf) for leaf in leaves]

            def of_moving(*values: Any) -> list[Any]:
                left = iter(values)
                merged = [next(left) if moves else leaf for leaf, moves in zip(leaves, moving, strict=True)]
                return run(*jax.tree.unflatten(structure, merged))

            with jax.named_scope("rematted_computation"):  # by which everything tells what runs again
                given = [leaf for leaf, moves in zip(leaves, moving, strict=True) if moves]
                _, pull = jax.vjp(of_moving, *given)
            found = iter(pull(list(cotangents)))
            # A None in a gradient stands for a zero, whatever its type.
            return jax.tree.unflatten(structure, [next(found) if moves else None for moves in moving])

        block.defvjp(forward, backward)

        def call(*leaves: Any) -> list[Any]:
            others = [leaf for leaf, is_written in zip(leaves, chosen, strict=True) if not is_written]
            return block(
                [*traced.consts, *others], [x for x, is_written in zip(leaves, chosen, strict=True) if is_written]
            )

        return call

    def _read(self, number: Any, kinds: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        """The activations of a number, once the cotangents are there."""
        arrived = [each[(0,) * each.ndim] for each in cotangents if _has_gradient(each) and each.size]
        return io_callback(self._take(kinds), kinds, number, *arrived)

    def _put(self, *written: Any) -> np.ndarray:
        number = self._transfer().put([np.asarray(each) for each in written])
        return np.array([number >> 32, number & 0xFFFFFFFF], np.uint32)

    def _take(self, kinds: Sequence[Any]) -> Callable[..., Any]:
        wanted = [(kind.shape, np.dtype(kind.dtype)) for kind in kinds]

        def take(number: Any, *_: Any) -> list[np.ndarray]:
            high, low = (int(half) for half in np.asarray(number))
            return self._transfer().take(high << 32 | low, wanted)

        return take

    def _written(self, function: Callable[..., Any], args: tuple[Any, ...]) -> list[bool]:
        """Of each array in the block's arguments whether it is written. Raises PolicyError where that is not clear."""
        names = argument_names(function) or _parameters(function, len(args))
        arrays = [name for name, arg in zip(names, args, strict=True) for _ in jax.tree.leaves(arg)]
        known = [name for name in dict.fromkeys(arrays) if name != STATE]
        write = self.write
        what = getattr(function, "__name__", repr(function))
        if write is None:
            if STATE not in names and len(known) > 1:
                raise PolicyError(
                    f"disk_offload cannot tell which arguments of {what} are activations and which are parameters of "
                    f"the model, that stay where they are: {', '.join(known)} hold arrays. Name those to be written, "
                    f"e.g. disk_offload(directory, limit, write=({known[0]!r},))."
                )
            write = known
        if absent := [name for name in write if name not in known]:
            raise PolicyError(
                f"disk_offload is to write {', '.join(absent)}, and {what} was given arrays for "
                f"{', '.join(known) or 'no parameter'}.{did_you_mean(absent[0], known)} Name these in write=(...)."
            )
        leaves = jax.tree.leaves(args)
        chosen = [
            name in write and not jnp.issubdtype(jax.typeof(leaf).dtype, jax.dtypes.extended)
            for name, leaf in zip(arrays, leaves, strict=True)
        ]
        if not any(chosen):
            raise PolicyError(
                f"disk_offload has nothing to write of {what}: none of its arguments is an array that may be written. "
                "Give the block's input as an argument, or use another policy."
            )
        return chosen


_NUMBER = jax.ShapeDtypeStruct((2,), np.uint32)
"""A value's number in two halves: 64 bits need another setting of JAX."""


def _has_gradient(leaf: Any) -> bool:
    return jnp.issubdtype(jax.typeof(leaf).dtype, jnp.inexact)


def _parameters(function: Callable[..., Any], count: int) -> tuple[str, ...]:
    """The names of a function's first parameters."""
    names: list[str] = []
    for name, parameter in inspect.signature(function).parameters.items():
        names += [name] * (count - len(names) if parameter.kind is parameter.VAR_POSITIONAL else 1)
    return tuple(names[:count])


def _check_callbacks() -> None:
    """Raises DiskError where JAX has no CPU to hand a callback's arrays to."""
    try:
        jax.local_devices(backend="cpu")
    except RuntimeError as error:
        raise DiskError(
            "disk offloading runs on this machine's CPU beside the device, and JAX has none: JAX_PLATFORMS is "
            f"{jax.config.jax_platforms!r}. Add cpu to it, e.g. JAX_PLATFORMS=cuda,cpu."
        ) from error


def _bytes(given: str | int, what: str) -> int:
    if isinstance(given, str):
        given = parse_bytes(given)
    if isinstance(given, bool) or not isinstance(given, int) or given <= 0:
        raise PolicyError(
            f"disk_offload(..., {what}={given!r}) is not a size in bytes. Give a whole number above 0, or a text like "
            "'200GiB'."
        )
    return given


def _write_names(write: Sequence[str] | None) -> tuple[str, ...] | None:
    if write is None:
        return None
    if isinstance(write, str) or not write or not all(isinstance(name, str) for name in write):
        raise PolicyError(
            f"disk_offload(..., write={write!r}) names no parameters. Give a tuple of names, e.g. write=('x',)."
        )
    return tuple(dict.fromkeys(write))
