"""The parts that the reports share: how a figure of a record is written, and what to say beside it."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from remat_kit._effect import is_without_use
from remat_kit._pareto import NEED_TOLERANCE, Standing, standings, step_seconds, time_tolerance
from remat_kit._record import Record
from remat_kit._units import GiB, KiB, MiB, format_bytes, format_flops, format_seconds

UNKNOWN = "-"
NOT_KNOWN = "unknown"
"""What a record of a program from a file has in the place of settings, and of a phase that no name tells."""

FIT_WORDS: Mapping[str, str] = {
    "yes": "fits",
    "tight": "tight: fits, but not in the pool that JAX takes by default",
    "no": "does not fit",
}
"""What `fits` of a record means."""


def unit_for(counts: Iterable[int | None]) -> tuple[str, int]:
    """The one unit in which a column of bytes can be compared: that of the largest."""
    largest = max((count for count in counts if count is not None), default=GiB)
    return next((unit for unit in (("GiB", GiB), ("MiB", MiB)) if largest >= unit[1] / 10), ("KiB", KiB))


def in_unit(count: int | None, size: int) -> str:
    """Bytes in a unit, with two digits after the point."""
    return UNKNOWN if count is None else f"{count / size:,.2f}"


def bytes_text(count: int | None) -> str:
    """Bytes in the unit that suits them."""
    return UNKNOWN if count is None else format_bytes(count)


def seconds_text(seconds: float | None) -> str:
    """Seconds in the unit that suits them."""
    return UNKNOWN if seconds is None else format_seconds(seconds)


def figure_text(value: float | str, unit: str) -> str:
    """A figure in its unit: bytes, FLOP, s or count; text is itself."""
    match unit:
        case "bytes":
            return format_bytes(int(value))
        case "FLOP":
            return format_flops(int(value))
        case "s":
            return format_seconds(float(value))
        case "count":
            return f"{value:,}"
    return str(value)


def share_text(part: float, whole: float) -> str:
    """`part` as a percentage of `whole`, of which there may be none."""
    return f"{part / whole:.1%}" if whole else UNKNOWN


def milliseconds(seconds: float | None) -> str:
    """Seconds as milliseconds, three digits that count or more."""
    if seconds is None:
        return UNKNOWN
    value = seconds * 1e3
    if value >= 1:
        return f"{value:,.1f}" if value >= 10 else f"{value:.2f}"
    return f"{value:.3g}"


def recompute_percent(record: Record) -> str:
    """Recomputed FLOPs as a share of the model's."""
    if record.recompute_flops is None or not record.model_flops:
        return UNKNOWN
    return f"{record.recompute_flops / record.model_flops:.1%}"


def together(record: Record) -> str:
    """What counts of a jaxpr are of: `, all 8 devices together`; "" on one device."""
    devices = math.prod(record.mesh.values())
    return f", all {devices} devices together" if devices > 1 else ""


def phase_words(record: Record) -> str:
    """`, in backward`: the phase of the live peak behind its figure; "" when it is not known."""
    return f", in {record.live_peak_phase}" if record.live_peak_phase not in (None, "", NOT_KNOWN) else ""


def categories(record: Record) -> list[tuple[str, int]]:
    """The categories at the live peak with their bytes, largest first."""
    return sorted(record.categories.items(), key=lambda item: (-item[1], item[0]))


def need_parts(record: Record) -> tuple[tuple[str, str, int | None], ...]:
    """What the need adds up to: sign, name, bytes."""
    return (
        ("", "arguments", record.argument_bytes),
        ("+", "outputs", record.output_bytes),
        ("-", "outputs in the place of arguments", record.alias_bytes),
        ("+", "temporaries", record.temp_bytes),
    )


def host_bytes(record: Record) -> int:
    """Bytes in host memory, which come besides the need."""
    return sum(count or 0 for count in (record.host_argument_bytes, record.host_output_bytes, record.host_temp_bytes))


def spent_text(record: Record) -> str:
    """`traced in 1.20 s, compiled in 9.00 s`: how long the kit took, as far as it is known."""
    times = (("traced", record.trace_s), ("compiled", record.compile_s), ("analyzed", record.analyze_s))
    return ", ".join(f"{name} in {format_seconds(seconds)}" for name, seconds in times if seconds is not None)


def fits_text(record: Record) -> str:
    """`yes, 60.10 GiB left`; or by how much it does not."""
    if record.fits is None:
        return UNKNOWN
    if record.margin_bytes is None:
        return record.fits
    rest = "over" if record.margin_bytes < 0 else "left"
    return f"{record.fits}, {format_bytes(abs(record.margin_bytes))} {rest}"


def standing_text(standing: Standing | None) -> str:
    """`front`, or the policy that dominates; and ties."""
    if standing is None:
        return ""
    text = "* on the front" if standing.on_front else f"dominated by {standing.dominated_by}"
    return f"{text}, ties {', '.join(standing.ties)}" if standing.ties else text


def title(records: Sequence[Record]) -> str:
    """What all records have in common: workload, options, target, mesh."""
    first = records[0]
    parts = [first.workload, options_text(first.options), f"for {target_text(first)}" if first.target else ""]
    same = all((r.workload, r.options, target_text(r)) == (first.workload, first.options, target_text(first))
               for r in records)  # fmt: skip
    return " ".join(part for part in parts if part) if same else f"{len(records)} records"


def options_text(options: Mapping[str, object]) -> str:
    """Options as they are typed."""
    return " ".join(f"{name}={value}" for name, value in options.items())


def target_text(record: Record) -> str:
    """The target, and its mesh when it is more than one device."""
    mesh = {name: size for name, size in record.mesh.items() if size > 1}
    return f"{record.target} x ({', '.join(f'{n}={s}' for n, s in mesh.items())})" if mesh else record.target


@dataclass(frozen=True)
class Column:
    """A column of a table: its name, where its figures come from, and its cells."""

    name: str
    source: str
    cells: tuple[str, ...]
    left: bool = False


def columns(records: Sequence[Record]) -> list[Column]:
    """The columns of a table of records. One that says nothing, or the same in every row, is left out."""

    def column(name: str, source: str, cells: Sequence[str], left: bool = False) -> Column:
        return Column(name, source, tuple(cells), left)

    # A program that came as a file has a name, and no policy.
    named = "policy" if any(record.policy for record in records) else "program"
    found = [column(named, "", [record.policy or record.workload for record in records], left=True)]
    found += [
        column(name, "", cells, left=True)
        for name, cells in (
            ("workload", [f"{record.workload} {options_text(record.options)}".strip() for record in records]),
            ("target", [target_text(record) for record in records]),
            ("GEMM", [record.gemm_backend for record in records]),
            ("XLA's remat", [record.xla_remat for record in records]),
        )
        if len(set(cells)) > 1
    ]
    _, time_source = step_seconds(records)
    unit, size = unit_for(record.need_bytes for record in records)
    host = []
    if any(record.host_temp_bytes for record in records):
        host.append(column(f"host {unit}", "compiled", [in_unit(record.host_temp_bytes, size) for record in records]))
    found += [
        column(f"need {unit}", "compiled", [in_unit(record.need_bytes, size) for record in records]),
        column(f"live peak {unit}", "compiled", [in_unit(record.live_peak_bytes, size) for record in records]),
        *host,
        column("saved/block", "counted", [bytes_text(record.saved_bytes_per_block) for record in records]),
        column("recomputed", "counted", [recompute_percent(record) for record in records]),
        column("step ms", "predicted", [milliseconds(record.predicted_step_s) for record in records]),
    ]
    if any(record.measured_step_s for record in records):
        found.append(column("step ms", "measured", [measured_text(record) for record in records]))
    if any(record.measured_peak_bytes is not None for record in records):
        cells = [in_unit(record.measured_peak_bytes, size) for record in records]
        found.append(column(f"allocator {unit}", "measured", cells))
    found += [
        column("fits", "compiled", [fits_text(record) for record in records], left=True),
        column(
            "standing",
            f"compiled, {time_source}",
            [standing_text(standing) for standing in standings(records)],
            left=True,
        ),
    ]
    return found


def measured_text(record: Record) -> str:
    """Median milliseconds, and half of the range from the 10th to the 90th percentile."""
    measured = record.measured_step_s
    if measured is None:
        return UNKNOWN
    return f"{milliseconds(measured.median)} ± {milliseconds((measured.p90 - measured.p10) / 2)}"


def failures(records: Sequence[Record]) -> list[str]:
    """One line for each failed record."""
    return [f"{name}: {record.error}" for name, record in _named(records) if record.error]


def _named(records: Sequence[Record]) -> Iterable[tuple[str, Record]]:
    several = len({record.gemm_backend for record in records}) > 1
    backends = [f" ({record.gemm_backend})" if several else "" for record in records]
    names = [(record.policy or record.workload) + backend for record, backend in zip(records, backends, strict=True)]
    return zip(names, records, strict=True)


def notes(records: Sequence[Record]) -> list[str]:
    """What a reader of the table has to know of its words, and the rows whose policy did nothing or hurt."""
    return [
        "compiled: XLA's buffer assignment. counted: on the jaxpr; recomputed is a share of the model's FLOPs. "
        "predicted: a roofline model.",
        "standing: on the front when no other policy is better in need or step time without being worse in the other. "
        f"Needs within {NEED_TOLERANCE:.1%} and step times within {time_tolerance(records):.1%} are called equal.",
        *(
            ["saved/block is counted for all devices of the mesh together; needs, peaks and times are one device's."]
            if any(map(together, records))
            else []
        ),
        *(f"{name}: {record.effect}" for name, record in _named(records) if is_without_use(record.effect)),
    ]


def warnings(records: Sequence[Record]) -> list[str]:
    """Each warning once, with the policies that it is about."""
    about: dict[str, list[str]] = {}
    for record in records:
        for warning in record.warnings:
            about.setdefault(warning, []).append(record.policy)
    compiled = [record.policy for record in records if not record.error]
    return [
        f"{'all policies' if policies == compiled else ', '.join(dict.fromkeys(policies))}: {warning}"
        for warning, policies in about.items()
    ]
