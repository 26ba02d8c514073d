"""The report of one record: every figure, where it comes from, and what it adds up to."""

import textwrap
from collections.abc import Iterable

from remat_kit._record import Record
from remat_kit._report import communication, explanation, rows
from remat_kit._report.layout import WIDTH, row
from remat_kit._units import MiB, format_bytes, format_flops, format_seconds


def render(record: Record) -> str:
    """The report as text. Each figure says compiled, counted, predicted or measured."""
    settings = [
        f"GEMM backend: {record.gemm_backend}" if record.gemm_backend not in ("", rows.NOT_KNOWN) else "",
        f"XLA's own rematerialization: {record.xla_remat}" if record.xla_remat not in ("", rows.NOT_KNOWN) else "",
        *(f"{name}={value}" for name, value in record.compile_options.items()),
    ]
    # Of a program that came as a file, neither policy nor versions nor settings are known.
    details = (
        " ".join(f"{name} {version}" for name, version in record.versions.items()),
        "; ".join(setting for setting in settings if setting),
    )
    lines = [f"{rows.title([record])}{f': policy {record.policy}' if record.policy else ''}"]
    lines += [f"  {detail}" for detail in details if detail]
    if record.error:
        lines += ["", f"FAILED: {record.error}"]
    for section in (_need, _live_peak, _effect, _saved, _flops, _predicted, communication.lines, _measured, _closing):
        body = list(section(record))
        if body:
            lines += ["", *body]
    return "\n".join(lines) + "\n"


def _need(record: Record) -> Iterable[str]:
    if record.need_bytes is None:
        return
    yield "Need (compiled: XLA's buffer assignment)"
    for sign, name, count in rows.need_parts(record):
        yield row(f"{sign} {name}".lstrip(), rows.bytes_text(count))
    yield row("= need", format_bytes(record.need_bytes), f"{record.need_bytes:,} bytes")
    if record.constant_bytes and record.constant_bytes >= MiB:
        yield row("constants, besides", format_bytes(record.constant_bytes))
    if host := rows.host_bytes(record):
        yield row("on the host, besides", format_bytes(host))
    if record.fits is None:
        return
    words = rows.FIT_WORDS.get(record.fits, record.fits)
    yield row("of what a process can allocate", rows.bytes_text(record.capacity_bytes), words)
    if record.margin_bytes is not None:
        side = "missing" if record.margin_bytes < 0 else "left"
        yield row(f"  {side}", format_bytes(abs(record.margin_bytes)))
    for assumption in record.assumptions:
        yield f"  assumed: {assumption}"


def _live_peak(record: Record) -> Iterable[str]:
    if record.live_peak_bytes is None:
        return
    if record.explanation is not None:
        yield from explanation.lines(record, record.explanation)
        return
    yield f"Live peak (compiled: XLA's heap trace, replayed){rows.phase_words(record)}"
    for name, count in rows.categories(record):
        yield row(name, format_bytes(count), f"{rows.share_text(count, record.live_peak_bytes):>6}")
    yield row("= live peak", format_bytes(record.live_peak_bytes), f"{record.live_peak_bytes:,} bytes")
    if record.attributed_share is not None:
        yield row("with a known category", f"{record.attributed_share:.1%}")


def _saved(record: Record) -> Iterable[str]:
    if record.saved_bytes is None and record.saved_bytes_per_block is None:
        return
    yield f"Saved from forward to backward (counted on the jaxpr{rows.together(record)})"
    yield row("a block", rows.bytes_text(record.saved_bytes_per_block))
    yield row("the whole step", rows.bytes_text(record.saved_bytes))
    if record.saved_host_bytes:
        yield row("the whole step, on the host", format_bytes(record.saved_host_bytes))


def _effect(record: Record) -> Iterable[str]:
    if record.effect:
        yield "Effect (of the policy, against the base row of its sweep)"
        yield textwrap.fill(record.effect, WIDTH, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)


def _flops(record: Record) -> Iterable[str]:
    if record.step_flops is None or record.model_flops is None or record.recompute_flops is None:
        return
    yield f"FLOPs (counted on the jaxpr: matmuls, convolutions and fused attention{rows.together(record)})"
    yield row("model", format_flops(record.model_flops))
    note = "" if record.recomputed_matmuls is None else f", {record.recomputed_matmuls} matmuls"
    yield row("+ recomputed", format_flops(record.recompute_flops), f"{rows.recompute_percent(record)} of model{note}")
    yield row("= step", format_flops(record.step_flops))


def _predicted(record: Record) -> Iterable[str]:
    if record.predicted_step_s is None:
        return
    yield "Step time (predicted: a roofline over the scheduled program, not a measurement)"
    for name, seconds in record.predicted_breakdown_s.items():
        yield row(name.replace("_", " "), format_seconds(seconds))
    yield row("= step", format_seconds(record.predicted_step_s))


def _measured(record: Record) -> Iterable[str]:
    if record.measured_step_s is None and record.measured_peak_bytes is None:
        return
    measured = record.measured_step_s
    where = f" on {measured.device}, {measured.rounds} rounds" if measured else ""
    yield f"Measured{where}"
    if measured:
        yield row("step, median", format_seconds(measured.median))
        yield row("10th to 90th percentile", f"{format_seconds(measured.p10)} to {format_seconds(measured.p90)}")
    if record.measured_peak_bytes is not None:
        yield row("allocator's peak", format_bytes(record.measured_peak_bytes))


def _closing(record: Record) -> Iterable[str]:
    for warning in record.warnings:
        yield f"warning: {warning}"
    if spent := rows.spent_text(record):
        yield f"({spent})"
