"""What XLA fuses: which values of a block are arrays in memory, and what the kernels that make them read.

A value is *materialized* when it is an array in memory and not only a register of a kernel: results of matrix products,
reductions and library kernels, and what those read. Everything else is fused into what reads it, so a chain of
elementwise operations costs the arrays that go into it and the one that comes out, not each step.
"""

from remat_kit._plan.block import Derivative
from remat_kit._plan.flat import Op
from remat_kit._plan.sizes import bytes_of

VIEWS = frozenset({"reshape", "squeeze", "expand_dims", "sharding_constraint", "copy", "optimization_barrier",
                   "stop_gradient", "reduce_precision", "pvary"})  # fmt: skip
"""Their result is their operand: never worth a decision of its own."""
SPREADS = frozenset({"broadcast_in_dim", "iota", "tile"})
"""Their result is made of less than itself."""
ELEMENTWISE = frozenset({
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh", "bessel_i0e",
    "bessel_i1e", "cbrt", "ceil", "clamp", "complex", "conj", "convert_element_type", "cos", "cosh", "digamma", "div",
    "eq", "eq_to", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "imag", "integer_pow",
    "is_finite", "le", "le_to", "lgamma", "log", "log1p", "log2", "logistic", "lt", "lt_to", "max", "min", "mul",
    "mulhi", "ne", "neg", "nextafter", "not", "one_minus_square", "or", "polynomial", "pow", "real", "rem", "round",
    "rsqrt", "select_n", "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sinh", "sqrt",
    "square", "sub", "tan", "tanh", "xor",
    "bitcast_convert_type", "transpose", "slice", "split", "unstack", "stack", "pad", "concatenate", "rev",
    "dynamic_slice", "population_count", "clz", "to_edtype", "from_edtype", "random_unwrap", "random_wrap",
    "threefry2x32", "random_bits", "random_fold_in", "random_split", "random_seed",
})  # fmt: skip
"""What becomes elementwise operations of XLA, or moves elements: loops like that of `igamma` are not among it."""
RANDOM = frozenset({"threefry2x32", "random_bits"})
_FRONTIER = 16
"""How many arrays of a fused value are counted before the rest is left out, so that sets do not grow with the square of
a block that sums many branches. In the models of this checkout no value is made of more than 9."""


class Fusion:
    """What is fused in a block's derivative.

    Attributes:
      maker: value -> (number of the operation that makes it, which of its results); for what is not linear.
      base: value -> the value that it is another view of.
      readers: value -> the operations, views aside, that read it or a view of it.
    """

    def __init__(self, derivative: Derivative) -> None:
        self.derivative = derivative
        self.flat = derivative.flat
        self.maker = {
            number: (position, index)
            for position, op in enumerate(self.flat.ops)
            if position not in derivative.linear
            for index, number in enumerate(op.outputs)
        }
        self.base = self._bases()
        self.readers = self._readers()
        self._frontiers: dict[int, dict[int, int]] = {}
        for number in self.maker:  # in the order of the program, so that none has far to go
            self.frontier(number)

    def _bases(self) -> dict[int, int]:
        """The value that each one is another view of."""
        base: dict[int, int] = {}
        for op in self.flat.ops:
            if op.primitive in VIEWS and len(op.outputs) == 1 and isinstance(op.inputs[0], int):
                base[op.outputs[0]] = base.get(op.inputs[0], op.inputs[0])
        return base

    def _readers(self) -> dict[int, list[int]]:
        """The operations, views aside, that read each value or a view of it."""
        readers: dict[int, list[int]] = {}
        for position, op in enumerate(self.flat.ops):
            if op.primitive in VIEWS:
                continue
            for number in {self.base.get(each, each) for each in op.inputs if isinstance(each, int)}:
                readers.setdefault(number, []).append(position)
        return readers

    def is_materialized(self, number: int) -> bool:
        """Whether a value is an array in memory while the block runs."""
        number = self.base.get(number, number)
        place = self.maker.get(number)
        if place is None:
            return True
        op = self.flat.ops[place[0]]
        if not is_fused(op):
            return True
        return any(not is_fused(self.flat.ops[reader]) and not _is_reduction(self.flat.ops[reader])
                   for reader in self.readers.get(number, ()))  # fmt: skip

    def frontier(self, number: int) -> dict[int, int]:
        """The arrays, with their bytes, that fused operations make a value of."""
        number = self.base.get(number, number)
        if number not in self._frontiers:
            place = self.maker.get(number)
            if place is None or self.is_materialized(number):
                self._frontiers[number] = {number: bytes_of(self.flat.avals[number])}
            else:
                self._frontiers[number] = self.read(self.flat.ops[place[0]])
        return self._frontiers[number]

    def read(self, op: Op) -> dict[int, int]:
        """The arrays, with their bytes, that the kernel of an operation reads."""
        merged: dict[int, int] = {}
        for each in op.inputs:
            if isinstance(each, int) and len(merged) < _FRONTIER:
                merged |= self.frontier(each)
        return merged

    def moved_bytes(self, op: Op) -> int:
        """What the kernel of an operation reads and writes."""
        out = sum(bytes_of(self.flat.avals[number]) for number in op.outputs)
        return sum(self.read(op).values()) + out

    def kernels(self) -> dict[int, int]:
        """For each operation, by position, the one whose kernel it is fused into: itself when it has its own.

        What only backward reads goes into the first linear operation that does.
        """
        ops, linear = self.flat.ops, self.derivative.linear
        found: dict[int, int] = {}
        for position in reversed(range(len(ops))):
            op = ops[position]
            is_its_own = not is_fused(op) or any(self.is_materialized(number) for number in op.outputs)
            bases = [self.base.get(number, number) for number in op.outputs]
            readers = [found[each] for base in bases for each in self.readers.get(base, ()) if each in found]
            if position in linear or is_its_own or not readers:
                found[position] = position
            else:
                found[position] = min(readers, key=lambda each: (each in linear, each))
        return found

    def read_by_backward(self) -> set[int]:
        """The arrays that backward reads where nothing keeps XLA from fusing into it what is cheap: not random bits."""
        random: set[int] = set()
        for op in self.flat.ops:
            if op.primitive in RANDOM or any(isinstance(each, int) and each in random for each in op.inputs):
                random.update(number for number in op.outputs if not self.is_materialized(number))
        arrays: set[int] = set()
        for number in self.derivative.residuals:
            arrays |= {number} if number in random else set(self.frontier(number))
        return arrays


def is_fused(op: Op) -> bool:
    """Whether XLA fuses an operation into what reads it."""
    return op.primitive in ELEMENTWISE or op.primitive in VIEWS or op.primitive in SPREADS


def _is_reduction(op: Op) -> bool:
    return op.primitive.startswith(("reduce_", "arg", "cum"))
