"""The record: all that is known of one (workload, policy, target) cell. Every report is rendered from it."""

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from remat_kit._communication import Collective, collectives_from_json
from remat_kit._errors import RematKitError
from remat_kit._explanation import Checkpoint, Explanation, checkpoints_from_json, explanation_from_json

SCHEMA_VERSION = 2
"""Raised when a field changes its meaning. Fields are added, never renamed; docs/schema.md describes them.

Version 1 had other categories (the label of an argument, "made in <phase>") and no explanation; it is still read."""


@dataclass(frozen=True)
class MeasuredTime:
    """Seconds a step on an attached device: median, 10th and 90th percentile, and which device."""

    median: float
    p10: float
    p90: float
    device: str
    rounds: int


@dataclass(frozen=True)
class Record:
    """One row of a sweep. Bytes are a device's; None means "not known", never zero.

    Where a figure comes from is part of its name or of this list:
      compiled (XLA's buffer assignment): argument_bytes, output_bytes, alias_bytes, temp_bytes,
        host_*_bytes, need_bytes; and, by replaying its heap trace, live_peak_bytes, live_peak_phase, categories.
      counted on the jaxpr, of all devices of a mesh together (exact for matmuls, convolutions and fused attention,
        which is all that is counted): saved_bytes, saved_bytes_per_block, model_flops, step_flops, recompute_flops.
      predicted (a roofline, a model): predicted_step_s, predicted_breakdown_s, recompute_hidden_s, recompute_exposed_s.
      measured (on an attached device): measured_step_s, measured_peak_bytes.
    """

    workload: str
    options: Mapping[str, Any]
    policy: str
    target: str
    mesh: Mapping[str, int]
    versions: Mapping[str, str]
    xla_remat: str = "off"
    """XLA's own rematerialization pass: "off", "on" (it ran and did nothing) or "fired"."""
    gemm_backend: str = "cublas"
    """"cublas", "triton", "autotuned" (from a results file), or "cpu"."""
    compile_options: Mapping[str, str] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION

    items: Mapping[str, int] = field(default_factory=dict)
    """What one step processes, all devices together, the main thing first; {} when the step does not say."""
    argument_bytes: int | None = None
    output_bytes: int | None = None
    alias_bytes: int | None = None
    temp_bytes: int | None = None
    host_argument_bytes: int | None = None
    host_output_bytes: int | None = None
    host_temp_bytes: int | None = None
    need_bytes: int | None = None
    """argument + output - alias + temp: what the executable allocates. It decides whether a step fits."""
    constant_bytes: int | None = None
    """Constants of the program, arrays that the step captured among them. XLA's totals leave them out, so they are not
    in need_bytes; `fits` and margin_bytes count them."""
    live_peak_bytes: int | None = None
    """The largest sum of live buffers on the device, at most need_bytes + constant_bytes. It explains, it does not
    decide."""
    live_peak_phase: str | None = None
    xla_peak_bytes: int | None = None
    """XLA's `peak_memory_in_bytes`. Equal to live_peak_bytes on a GPU target, unless host or collective memory has a
    larger heap than the device; None on the CPU, where it leaves temporaries out."""
    categories: Mapping[str, int] = field(default_factory=dict)
    """Bytes at the live peak by category; they add up to live_peak_bytes."""
    attributed_share: float | None = None
    """Of the bytes at the live peak, the share with a category that the program tells."""
    explanation: Explanation | None = None
    """What is alive at the live peak, whose it is, and what would lower it."""

    saved_bytes: int | None = None
    """Kept from forward to backward by the whole step, arguments not counted."""
    saved_host_bytes: int | None = None
    """The same, waiting in host memory."""
    saved_bytes_per_block: int | None = None
    """What one repeated block keeps on the device."""
    model_flops: int | None = None
    step_flops: int | None = None
    recompute_flops: int | None = None
    recomputed_matmuls: int | None = None
    checkpoints: tuple[Checkpoint, ...] = ()
    """The checkpointed regions of the program, counted on the jaxpr."""

    predicted_step_s: float | None = None
    predicted_breakdown_s: Mapping[str, float] = field(default_factory=dict)
    """matmul, memory, collective, host_copy, launch; they add up to predicted_step_s."""
    collectives: tuple[Collective, ...] = ()
    """What the devices of a mesh send each other (compiled), and how long it takes (predicted)."""
    recompute_hidden_s: float | None = None
    """Predicted: what of the recomputation runs while a collective is under way; recompute_exposed_s is the rest."""
    recompute_exposed_s: float | None = None
    measured_step_s: MeasuredTime | None = None
    measured_peak_bytes: int | None = None

    trace_s: float | None = None
    compile_s: float | None = None
    analyze_s: float | None = None

    capacity_bytes: int | None = None
    """What one process can allocate on the device at most, by the assumptions of `fits`."""
    fits: str | None = None
    """"yes" (within JAX's default pool), "tight" (only with a larger pool) or "no"."""
    margin_bytes: int | None = None
    """capacity_bytes - need_bytes - constant_bytes; negative when it does not fit."""
    assumptions: tuple[str, ...] = ()
    """What `fits` and `capacity_bytes` take for granted."""
    effect: str | None = None
    warnings: tuple[str, ...] = ()
    error: str | None = None

    def to_json(self) -> dict[str, Any]:
        """A JSON object with every field, in the order of this class."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "Record":
        """The record of a JSON object. Raises RematKitError when it is not one of a version known here."""
        version = data.get("schema_version") if isinstance(data, Mapping) else None
        if not isinstance(version, int) or not 1 <= version <= SCHEMA_VERSION:
            raise RematKitError(
                f"this is not a remat-kit record of a known version: schema_version is {version!r}, "
                f"known are 1 to {SCHEMA_VERSION}. Write it with this version's --json, or upgrade remat-kit."
            )
        known = {f.name for f in dataclasses.fields(Record)}
        values = {name: value for name, value in data.items() if name in known}
        for name in ("warnings", "assumptions"):
            values[name] = tuple(values.get(name) or ())
        try:
            if (measured := values.get("measured_step_s")) is not None:
                fields = {f.name for f in dataclasses.fields(MeasuredTime)}
                values["measured_step_s"] = MeasuredTime(**{k: v for k, v in dict(measured).items() if k in fields})
            if values.get("explanation") is not None:
                values["explanation"] = explanation_from_json(values["explanation"])
            values["collectives"] = collectives_from_json(values.get("collectives"))
            values["checkpoints"] = checkpoints_from_json(values.get("checkpoints"))
            _check_types(values)
            return Record(**values)
        except TypeError as error:
            raise RematKitError(f"this record lacks fields: {error}. Write it again with --json.") from error


def _check_types(values: Mapping[str, Any]) -> None:
    """Raises RematKitError for a value that cannot be a field's: reports compute with them."""
    wanted: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "str": (str,), "Mapping": (Mapping,)}
    for name, annotation in Record.__annotations__.items():
        declared = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
        kinds = wanted.get(re.split(r"[ \[|]", declared.replace("collections.abc.", ""))[0])
        value = values.get(name)
        if kinds and value is not None and (not isinstance(value, kinds) or isinstance(value, bool)):
            raise RematKitError(
                f"this record has {name} = {value!r}, which is no {kinds[-1].__name__}. Write it again with --json."
            )


def _plain(value: Any) -> Any:
    """A NumPy or JAX number as Python's; anything else as text."""
    return value.item() if hasattr(value, "item") else str(value)


def dump(records: "Record | list[Record] | tuple[Record, ...]") -> str:
    """The JSON text of one record, or of a list of them."""
    data = records.to_json() if isinstance(records, Record) else [record.to_json() for record in records]
    return json.dumps(data, indent=1, default=_plain) + "\n"


def load(text: str) -> list[Record]:
    """The records of a JSON text that `dump` wrote: one object or a list. Raises RematKitError otherwise."""
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise RematKitError(f"not JSON: {error}. Give a file that --json wrote.") from error
    return [Record.from_json(row) for row in (data if isinstance(data, list) else [data])]
