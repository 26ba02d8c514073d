"""What a plan decides about one block: values, what it costs to keep each, and what it costs to compute each again.

From the block's derivative (`block.Derivative`), what XLA fuses of it (`fusion.Fusion`) and the rates of a chip.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass

import jax.numpy as jnp

from remat_kit._plan.block import Derivative
from remat_kit._plan.flat import Op, Place
from remat_kit._plan.fusion import RANDOM, SPREADS, VIEWS, Fusion, is_fused
from remat_kit._plan.sizes import bytes_of, flops_of_op
from remat_kit._target import Chip

_RANDOM_FLOPS = 120
"""Vector operations of an element of Threefry-2x32: 20 rounds of 5 operations, and 5 additions of keys. With JAX's
partitionable generator each element has a pair of words of its own."""
_COLLECTIVES = frozenset(
    {"psum", "psum_invariant", "all_gather", "all_to_all", "reduce_scatter", "ppermute", "pmax", "pmin"}
)
_NOT_AGAIN = frozenset({"rng_bit_generator", "rng_uniform"})
"""XLA may give other bits when it compiles them in another place."""
_PEAKS = {"bfloat16": "bf16", "float16": "f16", "float64": "f64", "int8": "s8", "uint8": "s8"}


@dataclass(slots=True)
class Value:
    """One value that a block may keep for its backward.

    Attributes:
      number: in the derivative's flat program; place: of the operation that makes it, (-1, position) for an input.
      bytes: of it, once.
      save_s: seconds that keeping it costs, writing and reading it, beyond what computing it again would.
      resident: bytes that its being computed again, or being taken out of a stack, has in memory during backward; 0 for
        what is fused into its readers.
      until, since: the earliest and the latest linear operation that reads it: backward, which goes from the latest to
        the earliest, needs it in between. -1 when none does.
      may_keep: whether it is worth a decision.
      free: it is there anyway: an input of the block that lives on, or a constant.
    """

    number: int
    place: Place
    bytes: int
    save_s: float = 0.0
    resident: int = 0
    until: int = -1
    since: int = -1
    may_keep: bool = True
    free: bool = False

    @property
    def is_input(self) -> bool:
        """Whether it is an input of the block, which cannot be computed again."""
        return self.place[0] < 0


@dataclass(slots=True)
class Step:
    """One operation that may run again in backward.

    Attributes:
      position: in the derivative's flat program.
      inputs, outputs: numbers of values.
      again_s: seconds of running it again.
      flops: of its matrix products.
      may_run_again: not so for effects, nor for random bits that would come out otherwise.
    """

    position: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    again_s: float
    flops: int
    may_run_again: bool = True


@dataclass(slots=True)
class Graph:
    """A block as a plan sees it.

    Attributes:
      derivative: what the block's numbers refer to.
      values: by number; steps: by the number of a value, the operation that makes it.
      needed: values that backward takes, in the order of its operations.
      gradients: (position, bytes) of the tangents that cross each heavy linear operation.
      repeats: how often the block runs in one stack of saved values: the length of a scan, else 1.
      ops: all operations that may run again.
      forward_s: seconds of the block's forward, beside which copies to the host run; its backward takes about twice.
      host_bytes_per_s: of those copies, in one direction.
      bare_bytes: what one run of the block keeps when it is not checkpointed and XLA fuses as it likes.
    """

    derivative: Derivative
    values: dict[int, Value]
    steps: dict[int, Step]
    needed: tuple[int, ...]
    gradients: tuple[tuple[int, int], ...]
    repeats: int
    ops: tuple[Step, ...]
    forward_s: float
    host_bytes_per_s: float
    bare_bytes: int


def build_graph(derivative: Derivative, free: Collection[int], chip: Chip, repeats: int = 1) -> Graph:
    """The graph of a block. `free` are the positions of its inputs that live on whatever is decided."""
    return _Builder(derivative, free, chip, repeats).build()


class _Builder:
    def __init__(self, derivative: Derivative, free: Collection[int], chip: Chip, repeats: int) -> None:
        self.derivative = derivative
        self.flat = derivative.flat
        self.chip = chip
        self.repeats = repeats
        self.bandwidth = chip.memory_bytes_per_s * chip.efficiency["memory"]
        self.block_inputs = self.flat.inputs[: len(derivative.active)]
        self.free = {self.block_inputs[position] for position in free}
        self.residuals = derivative.residuals
        self.fusion = Fusion(derivative)
        self.exposed = self._exposed()
        # What is fused into backward's kernels is read there as the arrays that it is made of.
        self.reads = {number: list(readers) for number, readers in self.residuals.items()}
        for number, readers in self.residuals.items():
            for array in self.fusion.frontier(number):
                if array != number and array not in self.free:
                    self.reads.setdefault(array, []).extend(readers)

    def build(self) -> Graph:
        ancestors = self._ancestors()
        values: dict[int, Value] = {}
        for number in sorted(ancestors | set(self.residuals)):
            values[number] = self._value(number)
        steps: dict[int, Step] = {}
        ops: list[Step] = []
        for position, op in enumerate(self.flat.ops):
            if position in self.derivative.linear or not any(number in values for number in op.outputs):
                continue
            step = self._step(position, op)
            ops.append(step)
            steps.update((number, step) for number in op.outputs if number in values)
        needed = tuple(number for number in self.residuals if not values[number].free)
        linear = self.derivative.linear
        forward_s = sum(
            self._seconds(position, op) for position, op in enumerate(self.flat.ops) if position not in linear
        )
        host = self.chip.host_bytes_per_s * self.chip.efficiency["host"]
        arrays = [number for number in self.fusion.read_by_backward() if number in values and not values[number].free]
        return Graph(
            derivative=self.derivative,
            values=values,
            steps=steps,
            needed=needed,
            gradients=self._gradients(),
            repeats=self.repeats,
            ops=tuple(ops),
            forward_s=forward_s,
            host_bytes_per_s=host,
            bare_bytes=sum(values[number].bytes for number in arrays),
        )

    def _ancestors(self) -> set[int]:
        """What the values that backward takes are computed from."""
        found, waiting = set(self.residuals), list(self.residuals)
        while waiting:
            place = self.fusion.maker.get(waiting.pop())
            if place is None:
                continue
            for number in self.flat.ops[place[0]].inputs:
                if isinstance(number, int) and number not in found:
                    found.add(number)
                    waiting.append(number)
        return found

    def _value(self, number: int) -> Value:
        place = self.fusion.maker.get(number)
        size = bytes_of(self.flat.avals[number])
        value = Value(number, place or self._input_place(number), size)
        value.until, value.since = self._until(number), max(self.residuals.get(number, []), default=-1)
        if place is None:
            value.free = number in self.free or number not in self.block_inputs
            return value
        op = self.flat.ops[place[0]]
        value.may_keep = size > 0 and op.primitive not in VIEWS and op.primitive not in SPREADS
        materialized = self.fusion.is_materialized(number)
        value.resident = size if materialized and number not in self.fusion.base else 0
        moved = 0 if materialized else 2 * size
        if self.repeats > 1:
            # The stack is cleared, written and read; what a library kernel reads is copied out of it before.
            moved += (4 if value.resident and value.until >= 0 else 3) * size + (size if materialized else 0)
            value.save_s += 2 * self.chip.launch_s
        value.save_s += moved / self.bandwidth
        return value

    def _until(self, number: int) -> int:
        """The earliest linear operation that reads a value or a view of it; -1 when none does."""
        views = [each for each, base in self.fusion.base.items() if base == number]
        return min((at for each in (number, *views) for at in self.reads.get(each, ())), default=-1)

    def _input_place(self, number: int) -> Place:
        return (-1, self.block_inputs.index(number) if number in self.block_inputs else -1)

    def _step(self, position: int, op: Op) -> Step:
        inputs = tuple(each for each in op.inputs if isinstance(each, int))
        return Step(
            position,
            inputs,
            tuple(op.outputs),
            self._seconds(position, op),
            flops_of_op(op),
            not op.eqn.effects and op.primitive not in _NOT_AGAIN and not _is_unstable(op),
        )

    def _seconds(self, position: int, op: Op) -> float:
        """Seconds of running an operation again."""
        if op.primitive in VIEWS or op.primitive in SPREADS:
            return 0.0
        work = self._work(op)
        if self._is_epilogue(op):
            return 0.0
        if is_fused(op):
            if not any(self.fusion.is_materialized(number) for number in op.outputs):
                read = self._read_by_backward(op)
                return work * self.exposed.get(position, 1.0) + read / self.bandwidth
            moved = self.fusion.moved_bytes(op)
            return max(work, moved / self.bandwidth) + self.chip.launch_s
        moved = self.fusion.moved_bytes(op)
        if op.primitive in _COLLECTIVES:
            rate = self.chip.link_bytes_per_s * self.chip.efficiency["link"] or self.chip.host_bytes_per_s
            return moved / rate + self.chip.launch_s
        flops = flops_of_op(op)
        matrix = flops / self._rate(op) if flops else 0.0
        return max(matrix, work, moved / self.bandwidth) + self.chip.launch_s

    def _work(self, op: Op) -> float:
        """Seconds that an operation takes outside the matrix units."""
        elements = max((math.prod(getattr(self.flat.avals[number], "shape", ())) for number in op.outputs), default=0)
        return elements * (_RANDOM_FLOPS if op.primitive in RANDOM else 1) / self.chip.vector_flops_per_s

    def _exposed(self) -> dict[int, float]:
        """Of each fused operation, by position, the share of its work that its kernel's memory traffic does not hide.

        A kernel takes the longer of the two, so random bits, for one, cost nothing where they are fused into a kernel
        that reads and writes an array of their size.
        """
        ops, linear = self.flat.ops, self.derivative.linear
        kernels = self.fusion.kernels()
        work: dict[int, float] = {}
        for position, kernel in kernels.items():
            if position not in linear:
                work[kernel] = work.get(kernel, 0.0) + self._work(ops[position])
        found: dict[int, float] = {}
        for position, kernel in kernels.items():
            if kernel != position and work.get(kernel):
                hidden = self.fusion.moved_bytes(ops[kernel]) / self.bandwidth
                found[position] = max(0.0, work[kernel] - hidden) / work[kernel]
        return found

    def _is_epilogue(self, op: Op) -> bool:
        """Whether it adds a bias to a matrix product, which the product's own kernel does."""
        if op.primitive != "add":
            return False
        operands = [self.fusion.base.get(each, each) for each in op.inputs if isinstance(each, int)]
        makers = [self.flat.ops[self.fusion.maker[each][0]].primitive for each in operands if each in self.fusion.maker]
        products = [
            each
            for each in operands
            if each in self.fusion.maker and self.flat.ops[self.fusion.maker[each][0]].primitive == "dot_general"
        ]
        return (
            len(products) == 1 and "broadcast_in_dim" in makers and len(self.fusion.readers.get(products[0], ())) == 1
        )

    def _read_by_backward(self, op: Op) -> int:
        """Bytes that the kernels of backward read in the place of a fused value that they take."""
        if not any(number in self.residuals for number in op.outputs):
            return 0
        return sum(size for number, size in self.fusion.read(op).items() if number not in self.free)

    def _rate(self, op: Op) -> float:
        dtypes = [str(self.flat.avals[each].dtype) for each in op.inputs if isinstance(each, int)]
        widest = max(
            (jnp.dtype(dtype) for dtype in dtypes if _is_float(dtype)),
            key=lambda each: each.itemsize,
            default=jnp.dtype("float32"),
        )
        peak = _PEAKS.get(widest.name, "tf32" if "tf32" in self.chip.flops_per_s else "f32")
        if "float8" in widest.name:
            peak = "f8"
        return self.chip.flops_per_s.get(peak, self.chip.vector_flops_per_s) * self.chip.efficiency["matmul"]

    def _gradients(self) -> tuple[tuple[int, int], ...]:
        """Bytes of tangents, as arrays, that are alive at each linear operation that is a kernel of its own."""
        ops, linear = self.flat.ops, self.derivative.linear
        made: dict[int, int] = {}
        last: dict[int, int] = {}
        for position in sorted(linear):
            for number in ops[position].inputs:
                if isinstance(number, int) and number in made:
                    last[number] = position
            made.update((number, position) for number in ops[position].outputs)
        arrays = [
            (born, last.get(number, len(ops)), bytes_of(self.flat.avals[number]))
            for number, born in made.items()
            if number not in self.fusion.base
            and (
                not is_fused(ops[born]) or any(not is_fused(ops[each]) for each in self.fusion.readers.get(number, ()))
            )
        ]
        heavy = [position for position in sorted(linear) if not is_fused(ops[position])]
        return tuple((at, sum(size for born, dies, size in arrays if born <= at <= dies)) for at in heavy)


def _is_unstable(op: Op) -> bool:
    """Whether it makes random bits by another generator than Threefry: they may differ from place to place.

    The key may be a constant. `unsafe_rbg` makes new keys of a key by such bits, too.
    """
    if op.primitive not in ("random_bits", "random_split", "random_fold_in"):
        return False
    generator = str(op.eqn.invars[0].aval.dtype)
    return "fry" not in generator if op.primitive == "random_bits" else "urbg" in generator


def _is_float(dtype: str) -> bool:
    return dtype.startswith(("float", "bfloat"))
