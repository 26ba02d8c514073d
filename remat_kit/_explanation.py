"""What the analyzer says of one compiled step: what is alive at the live peak, whose it is, and what would lower it.

Plain values, part of the record and of its JSON. `_explain` makes them; reports, comparisons and diffs read them.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

UNKNOWN = "not attributed"

CATEGORIES: Mapping[str, str] = {
    "parameters": "arguments that forward reads and the step updates",
    "optimizer state": "arguments that only the update reads",
    "batch": "arguments that the step reads and does not update",
    "parameter copies": "casts, gathers and transposes of parameters alone",
    "gradients": "made in backward, used by the update",
    "saved activations": "made in forward inside the blocks or before them, used in backward",
    "loss head": "made after the last block and before its backward: final norm, logits, loss",
    "recompute workspace": "made again in backward by rematerialization, and its scratch memory",
    "backward workspace": "made and used in backward",
    "forward workspace": "made and used in forward",
    "collective buffers": "results of all-gathers and other collectives, and collective memory",
    "host-offloaded": "device side of copies from and to the host",
    "outputs": "results that do not take an argument's place",
    "constants": "constants of the program, arrays that the step captured among them",
    "other temporaries": "made and used by the update, or outside of the differentiated part",
    UNKNOWN: "nothing in the program says what it is for",
}
"""Every category of a byte at the live peak with its meaning, in the order of a legend. An argument that Step.labels
names otherwise has its label as a category of its own."""

MOVABLE = frozenset({"saved activations", "recompute workspace"})
"""Categories that are up to a policy."""


@dataclass(frozen=True)
class Moment:
    """A moment of the step: the live peak.

    Attributes:
      event: number of the event in XLA's heap trace, of `events` in all; -1 where the program has no trace.
      phase: forward, backward, recompute, update or unknown.
      block: the repeated block that runs, e.g. `blocks` (a scanned stack) or `block_3`; "" outside of blocks.
      module: module path of the instruction.
      instruction, computation: XLA's names.
      source: the user's line, `file.py:12 (function)`; "" when the program does not say.
    """

    event: int
    events: int
    phase: str
    block: str
    module: str
    instruction: str
    computation: str
    source: str


@dataclass(frozen=True)
class Buffer:
    """One value in device memory, for the time in which its region of memory holds it.

    Attributes:
      name: XLA's instruction that defines it.
      bytes: of the region that it is in.
      category: a key of CATEGORIES, or a label of the step's own.
      module: path of the module that it belongs to, e.g. `Block_3/Attention_0`; of an argument, the path of the module
        that owns it; "" when unknown.
      block: the repeated block it belongs to; "" outside of blocks.
      source: the user's line, `file.py:12 (function)`; of an argument, the first line that uses it.
      phase: in which it is made; "argument" for what is there before.
      shape: `bf16[8,512,768]`; dtype: `bf16`.
      layers: how many layers are stacked in it, 1 if it is no stack.
      born, dies: first event at which it is alive, first one at which it is not.
    """

    name: str
    bytes: int
    category: str
    module: str
    block: str
    source: str
    phase: str
    shape: str
    dtype: str
    layers: int
    born: int
    dies: int


@dataclass(frozen=True)
class Holder:
    """Buffers at the live peak that are equal in all that stays from one version of a program to the next.

    `module` has `*` in the place of a repeated block's number. `layers` is the number of layers in all of them.
    """

    category: str
    module: str
    source: str
    phase: str
    shape: str
    bytes: int
    buffers: int
    layers: int


@dataclass(frozen=True)
class Floor:
    """How far any policy could lower the live peak: what is not up to a policy. A lower bound, not a promise.

    Attributes:
      argument_bytes, output_bytes, constant_bytes: what lives throughout the step.
      transient_bytes: the most that is alive at one moment of what no policy moves (gradients, loss head, workspace of
        one block's backward, the optimizer's), saved activations and recomputed values left out.
      transient_phase, transient_module: of that moment.
      bytes: the sum.
    """

    argument_bytes: int
    output_bytes: int
    constant_bytes: int
    transient_bytes: int
    transient_phase: str
    transient_module: str
    bytes: int


@dataclass(frozen=True)
class Advice:
    """One step that would lower the need.

    Attributes:
      kind: donate, recompute, offload, chunk the loss head, or shard.
      what: what it is done to.
      bytes: by how much the need falls, an estimate.
      how: what to change, in one sentence.
    """

    kind: str
    what: str
    bytes: int
    how: str


@dataclass(frozen=True)
class Program:
    """What of the program as a whole tells two versions apart.

    Attributes:
      module: XLA's name; instructions: how many there are; devices: how many run it together.
      matmul_flops: FLOPs of matmuls and convolutions as compiled, loops times their trips.
      recompute_matmul_flops: those of them that are marked as recomputation.
      donated_bytes: arguments whose memory an output takes over.
      temp_allocations: how many blocks of memory the temporaries are packed in.
      xla_remat_clones: instructions that XLA's own rematerialization cloned.
    """

    module: str
    instructions: int
    devices: int
    matmul_flops: int
    recompute_matmul_flops: int
    donated_bytes: int
    temp_allocations: int
    xla_remat_clones: int


@dataclass(frozen=True)
class Timeline:
    """Bytes alive by category at some events of the heap trace, the live peak among them.

    Attributes:
      events: their numbers, ascending.
      bytes: category to one figure an event; they add up to what is alive then.
      phases, modules, instructions: what runs at each.
    """

    events: tuple[int, ...]
    bytes: Mapping[str, tuple[int, ...]]
    phases: tuple[str, ...]
    modules: tuple[str, ...]
    instructions: tuple[str, ...]


@dataclass(frozen=True)
class Explanation:
    """The conclusion of the analyzer on one program.

    Attributes:
      peak: the moment of the live peak.
      holders: what is alive then, largest first; their bytes add up to the live peak.
      host_holders: what is in host memory at its own live peak.
      module_share, source_share: shares of the live peak's bytes with a known module path, and with a source line.
      floor: None where the program has no heap trace.
      advice: at most three, the one that lowers the need most first.
      program: the program as a whole.
      buffers: single buffers: all at the live peak, and the largest of the others; () in a sweep's rows.
      timeline: None in a sweep's rows.
    """

    peak: Moment
    holders: tuple[Holder, ...]
    host_holders: tuple[Holder, ...]
    module_share: float
    source_share: float
    floor: Floor | None
    advice: tuple[Advice, ...]
    program: Program
    buffers: tuple[Buffer, ...] = ()
    timeline: Timeline | None = None

    def brief(self) -> "Explanation":
        """The same without single buffers and time line."""
        return dataclasses.replace(self, buffers=(), timeline=None)


_NESTED: Mapping[str, type] = {"peak": Moment, "floor": Floor, "program": Program, "timeline": Timeline}
_LISTS: Mapping[str, type] = {"holders": Holder, "host_holders": Holder, "advice": Advice, "buffers": Buffer}


def explanation_from_json(data: Mapping[str, Any]) -> Explanation:
    """The explanation of a JSON object. Raises TypeError when it lacks fields; unknown ones are passed over."""
    values: dict[str, Any] = {}
    for name, value in _known(Explanation, data).items():
        if value is not None and name in _NESTED:
            value = _make(_NESTED[name], value)
        elif name in _LISTS:
            value = tuple(_make(_LISTS[name], each) for each in value or ())
        values[name] = value
    return Explanation(**values)


def _make(kind: type, data: Any) -> Any:
    values = _known(kind, data)
    if kind is Timeline:
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
        values["bytes"] = {name: tuple(series) for name, series in dict(values["bytes"]).items()}
    return kind(**values)


def _known(kind: type, data: Any) -> dict[str, Any]:
    if not isinstance(data, Mapping):
        raise TypeError(f"{kind.__name__} is {type(data).__name__}, not an object")
    names = {field.name for field in dataclasses.fields(kind)}
    return {name: value for name, value in data.items() if name in names}


@dataclass(frozen=True)
class Checkpoint:
    """Checkpointed regions of a step that are equal in all but their place, counted on the jaxpr.

    Attributes:
      policy: name of the policy function that JAX was given; "" when it was given none and keeps nothing.
      regions: how many there are in the program; executions: how often they run in one step, loops included.
      recompute_flops: what all of them compute again, matmuls as they are counted everywhere. A region in another one
        has its own.
      forward_share: of the model's forward FLOPs, the share that one execution of one region computes again.
      backward_share: of its backward FLOPs, the share that is inside: how much of the model one region holds.
      outer_scan_length: length of the differentiated scans that they are in; 0 outside of scans.
      inner_scan_length: length of the longest scan inside; 0 without one.
      inner_regions: how many regions are inside one.
      recomputed_operations: how many operations of any kind one of them runs again.
      kept_values: how many values one of them takes from forward because its policy keeps them; kept_bytes: all.
      tags: names in forward that the policy keeps.
      unneeded_tags: those of them that backward does not need: nothing is saved for them.
      recomputed_tags: those of them that are saved, and the matmul before them runs again all the same.
    """

    policy: str
    regions: int
    executions: int
    recompute_flops: int
    forward_share: float
    backward_share: float
    outer_scan_length: int
    inner_scan_length: int
    inner_regions: int
    recomputed_operations: int
    kept_values: int
    kept_bytes: int
    tags: tuple[str, ...] = ()
    unneeded_tags: tuple[str, ...] = ()
    recomputed_tags: tuple[str, ...] = ()


def checkpoints_from_json(data: Any) -> tuple[Checkpoint, ...]:
    """The checkpoints of a JSON list. Raises TypeError when one lacks fields; unknown ones are passed over."""
    found = (_make(Checkpoint, each) for each in data or ())
    names = ("tags", "unneeded_tags", "recomputed_tags")
    return tuple(dataclasses.replace(each, **{name: tuple(getattr(each, name)) for name in names}) for each in found)
