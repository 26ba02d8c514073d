"""Predicted time of a compiled program on a chip: a roofline over its schedule. A model, never a measurement.

One kernel takes

    max(matrix FLOPs / (peak · efficiency), other FLOPs / vector peak, bytes / (bandwidth · efficiency)) + launch

(Williams, Waterman, Patterson, "Roofline", CACM 2009, with a launch term). Kernels run one after another on the
compute stream. Copies to and from pinned host memory, and collectives, have a stream each beside it: `-start` issues
one when the compute stream gets there, `-done` waits for it, and only what is waited for counts. A loop body counts as
often as XLA knows that it runs.

Left out: caches (every array comes from and goes to memory), tile quantization and tuning of single kernels, power
limits, the sharing of bandwidth between the streams, overlap across the end of a loop body, both directions of the
host link at once (one stream takes both), topology and start-up of collectives, time on the host.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from remat_kit._errors import RematKitError
from remat_kit._hlo.cost import FREE, FREE_CALLS, Cost, Costs
from remat_kit._hlo.module import Computation, Instruction, Module
from remat_kit._target import Chip

BREAKDOWN = ("matmul", "memory", "collective", "host_copy", "launch")
_MOST_EXECUTIONS = 2**63

# Factor on the bytes of the operands that each device sends in a ring of n devices.
_RING = {
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "reduce-scatter": lambda n: (n - 1) / n,
    "all-gather": lambda n: n - 1.0,
    "all-to-all": lambda n: (n - 1) / n,
    "ragged-all-to-all": lambda n: (n - 1) / n,
    "collective-permute": lambda n: 1.0,
    "collective-broadcast": lambda n: 1.0,
}
COLLECTIVES = frozenset(_RING)
"""Opcodes of what devices do together. A pair of start and done has them with `-start` and `-done`."""
_DEVICES_OF_A_MACHINE = 8
"""GPUs that one NVLink switch joins in the machines that the described chips are sold in."""


@dataclass(frozen=True, slots=True)
class Row:
    """One instruction of the program and what it is predicted to cost.

    Attributes:
      name, op_name: XLA's and JAX's name.
      kind: "matmul", "memory", "collective" or "host_copy".
      flops: of the matrix units, one execution.
      vector_flops: all other arithmetic, one execution.
      bytes: moved in device memory; over the host link for a host copy; handed in for a collective. One execution.
      seconds: one execution by itself, launch included.
      exposed_s: what of it the compute stream waits for; `seconds` unless it runs beside it.
      executions: how often it runs in one step.
      instruction: XLA's id of it; of what is started and waited for elsewhere, of what is started.
      beside_s: of a kernel, how long a collective is under way while it runs. One execution.
    """

    name: str
    op_name: str
    kind: str
    flops: int
    vector_flops: int
    bytes: int
    seconds: float
    exposed_s: float
    executions: int
    instruction: int = -1
    beside_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Prediction:
    """What one step is predicted to take.

    Attributes:
      seconds: of the whole step; the sum of `breakdown`, and of `exposed_s * executions` over `rows`.
      breakdown: seconds that the step waits for "matmul" (kernels that the matrix units bound), "memory" (all other
        kernels, and products bound by bandwidth), "collective", "host_copy" (both: exposed only), "launch".
      rows: every instruction that costs time, in the order of the computations that they are in.
      flops: matrix FLOPs of the step as compiled.
      warnings: what had to be guessed, one sentence each.
    """

    seconds: float
    breakdown: Mapping[str, float]
    rows: tuple[Row, ...]
    flops: int
    warnings: tuple[str, ...]


@dataclass(slots=True)
class _Pending:
    """Something that runs beside the compute stream: its place in the rows, and when it ends."""

    row: int
    end: float
    kind: str


class _Time:
    """One computation run once, from its schedule: time by category, rows, and what it calls."""

    def __init__(self) -> None:
        self.breakdown: dict[str, float] = dict.fromkeys(BREAKDOWN, 0.0)
        self.rows: list[Row] = []
        self.calls: list[tuple[int, int]] = []
        self.warnings: list[str] = []
        self.pending: dict[int, _Pending] = {}
        self.streams = {"host_copy": 0.0, "collective": 0.0}

    @property
    def seconds(self) -> float:
        return sum(self.breakdown.values())

    def add(self, other: "_Time", times: int, computation: Computation) -> None:
        """Another computation, run `times` times in a row."""
        for kind, seconds in other.breakdown.items():
            self.breakdown[kind] += times * seconds
        self.calls.append((computation.id, times))

    def wait(self, start: int) -> None:
        """The compute stream waits for what `start` issued."""
        pending = self.pending.pop(start, None)
        if pending is None:
            return
        exposed = max(0.0, pending.end - self.seconds)
        self.breakdown[pending.kind] += exposed
        self.rows[pending.row] = replace(self.rows[pending.row], exposed_s=exposed)


def predict(module: Module, chip: Chip) -> Prediction:
    """The predicted time of one step of `module` on `chip`. Seconds; linear in the module.

    Rates and efficiencies are the chip's own (`Chip.flops_per_s`, `Chip.efficiency`). A matrix product of a type that
    the chip has no rate for runs at its vector peak, with a warning. A loop whose trip count XLA does not know counts
    once, with a warning. Of a conditional's branches the longest counts. Collectives run in a ring over the link, or
    over the host link where the chip has none, among as many devices as their groups name.

    Raises RematKitError when a loop or a kernel is larger than any can be.
    """
    model = _Model(module, chip)
    times: dict[int, _Time] = {}
    for computation in module.computations.values():
        if not computation.is_fusion:
            times[computation.id] = model.computation(computation, times)
    executions = dict.fromkeys(times, 0)
    executions[module.entry.id] = 1
    rows: list[Row] = []
    warnings: dict[str, None] = {}
    breakdown = times[module.entry.id].breakdown
    # Callers stand after what they call, so each count is final when it is reached from the back.
    for identifier in reversed(times):
        count = executions[identifier]
        if not count:
            continue
        for called, repeats in times[identifier].calls:
            executions[called] += count * repeats
            if executions[called] > _MOST_EXECUTIONS:
                raise RematKitError(
                    f"a step would run {module.computations[called].name!r} more than 2^63 times by its trip counts. "
                    "Dump the module again (xla_dump_hlo_as_proto=True) and give the unchanged file."
                )
        warnings |= dict.fromkeys(times[identifier].warnings)
    for identifier, time in times.items():
        count = executions[identifier]
        if count:
            rows += [replace(row, executions=count) for row in time.rows]
    flops = sum(row.flops * row.executions for row in rows)
    return Prediction(sum(breakdown.values()), breakdown, tuple(rows), flops, tuple(warnings))


class _Model:
    """The rules of one chip."""

    def __init__(self, module: Module, chip: Chip) -> None:
        self.chip = chip
        self.num_devices = module.num_devices
        self.costs = Costs()
        self.memory = chip.memory_bytes_per_s * chip.efficiency["memory"]
        self.host = chip.host_bytes_per_s * chip.efficiency["host"]
        self.link = chip.link_bytes_per_s * chip.efficiency["link"] or self.host

    def computation(self, computation: Computation, times: dict[int, _Time]) -> _Time:
        """One computation run once. `times` holds those that it calls."""
        time = _Time()
        for instruction in computation.schedule:
            self._instruction(instruction, time, times)
        for start in list(time.pending):
            time.wait(start)
        return time

    def _instruction(self, instruction: Instruction, time: _Time, times: dict[int, _Time]) -> None:
        opcode = instruction.opcode
        if opcode in FREE or instruction.custom_call_target in FREE_CALLS:
            return
        if opcode == "while":
            self._while(instruction, time, times)
        elif opcode == "conditional":
            branches = [(times[each.id], each) for each in instruction.called if each.id in times]
            if branches:
                longest, chosen = max(branches, key=lambda branch: branch[0].seconds)
                time.add(longest, 1, chosen)
        elif opcode == "call":
            for called in instruction.called:
                if called.id in times:
                    time.add(times[called.id], 1, called)
        elif opcode.endswith("-done"):
            if instruction.operands:
                time.wait(instruction.operands[0].id)
        elif opcode == "async-start":
            self._async(instruction, time, times)
        elif opcode.removesuffix("-start") in _RING:
            self._collective(instruction, time, beside=opcode.endswith("-start"))
        else:
            self._kernel(instruction, time, beside=opcode == "copy-start")

    def _while(self, instruction: Instruction, time: _Time, times: dict[int, _Time]) -> None:
        trips = instruction.trip_count
        if trips is None:
            time.warnings.append(f"the trip count of loop {instruction.name} is unknown; its body counts once")
        # XLA lists the body before the condition. With a known count it enqueues the body so many times and does not
        # run the condition.
        for each, repeats in zip(instruction.called, (1, 1) if trips is None else (trips, 0), strict=False):
            if each.id in times and repeats:
                time.add(times[each.id], repeats, each)

    def _async(self, instruction: Instruction, time: _Time, times: dict[int, _Time]) -> None:
        """A computation that is started here and waited for later. Only copies and collectives overlap."""
        for called in instruction.called:
            inner = times.get(called.id)
            if inner is None:
                continue
            alone = len(inner.rows) == 1 and not inner.calls
            if alone and inner.rows[0].kind in ("host_copy", "collective") and not _is_synchronous(instruction):
                self._beside(instruction, inner.rows[0], time)
            else:
                time.add(inner, 1, called)

    def _beside(self, start: Instruction, row: Row, time: _Time) -> None:
        """Issues a row on its own stream; what it exposes is known when something waits for `start`."""
        begin = max(time.streams[row.kind], time.seconds)
        time.streams[row.kind] = begin + row.seconds
        time.pending[start.id] = _Pending(len(time.rows), begin + row.seconds, row.kind)
        time.rows.append(replace(row, exposed_s=0.0))

    def _collective(self, instruction: Instruction, time: _Time, beside: bool) -> None:
        members = instruction.group_size or self.num_devices
        if members > _DEVICES_OF_A_MACHINE:
            time.warnings.append(
                f"collectives among {members} devices are predicted as if one machine held them all; between machines "
                "they take longer"
            )
        size = sum(operand.shape.bytes for operand in instruction.operands)
        moved = size * _RING[instruction.opcode.removesuffix("-start")](members)
        seconds = moved / self.link + self.chip.launch_s
        row = Row(instruction.name, instruction.op_name, "collective", 0, 0, size, seconds, seconds, 1, instruction.id)
        if beside and not _is_synchronous(instruction):
            self._beside(instruction, row, time)
            return
        self._inline(row, time)

    def _kernel(self, instruction: Instruction, time: _Time, beside: bool) -> None:
        cost = _copy_cost(instruction) if beside else self.costs.of(instruction)
        if cost.unknown:
            time.warnings.append(f"the FLOPs of custom call {cost.unknown!r} are unknown; only its bytes count")
        flops = sum(matmul.flops for matmul in cost.matmuls)
        matrix_s = sum(matmul.flops * matmul.passes / self._rate(matmul.peak, time) for matmul in cost.matmuls)
        vector_s = cost.vector_flops / self.chip.vector_flops_per_s
        memory_s, host_s = cost.device_bytes / self.memory, cost.host_bytes / self.host
        seconds = max(matrix_s, vector_s, memory_s, host_s)
        kind, moved = "memory", cost.device_bytes
        if host_s and host_s == seconds:
            kind, moved = "host_copy", cost.host_bytes
        elif flops:
            kind = "matmul"
        total = seconds + self.chip.launch_s
        row = Row(
            instruction.name, instruction.op_name, kind, flops, cost.vector_flops, moved, total, total, 1,
            instruction.id,
        )  # fmt: skip
        if beside and kind == "host_copy":
            self._beside(instruction, row, time)
            return
        self._inline(row, time, bound="matmul" if matrix_s == seconds and flops else None)

    def _inline(self, row: Row, time: _Time, bound: str | None = None) -> None:
        """A row that the compute stream runs itself."""
        kind = bound or ("memory" if row.kind == "matmul" else row.kind)
        if row.kind != "collective":
            # The stream of collectives runs without a gap until its last one ends.
            under_way = time.streams["collective"] - time.seconds
            row = replace(row, beside_s=min(max(0.0, under_way), row.seconds))
        time.breakdown[kind] += row.seconds - self.chip.launch_s
        time.breakdown["launch"] += self.chip.launch_s
        time.rows.append(row)

    def _rate(self, peak: str, time: _Time) -> float:
        """Usable matrix FLOP/s for operands of a type."""
        rate = self.chip.flops_per_s.get(peak)
        if rate is None and peak == "tf32":
            rate = self.chip.flops_per_s.get("f32")
        if rate is None:
            if peak not in ("f32", "tf32"):
                time.warnings.append(
                    f"{self.chip.name} has no matrix rate for {peak}; its vector peak stands in for it"
                )
            rate = self.chip.vector_flops_per_s
        return rate * self.chip.efficiency["matmul"]


def _is_synchronous(collective: Instruction) -> bool:
    """Whether XLA runs a collective on the compute stream although it is written as a pair."""
    config = collective.config().get("collective_backend_config")
    return isinstance(config, dict) and config.get("is_sync") is True


def _copy_cost(start: Instruction) -> Cost:
    """A copy-start: its first operand to the first element of its result."""
    source = start.operands[0].shape
    target = start.shape.elements[0] if start.shape.elements else source
    if source.is_host or target.is_host:
        return Cost((), 0, 0, source.bytes)
    return Cost((), 0, 2 * source.bytes, 0)
