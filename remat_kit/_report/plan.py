"""The report of a plan: what is kept and computed again, what it needs and takes, and why; and of several plans."""

import textwrap
from collections.abc import Iterable, Sequence

from remat_kit._plan.make import REUSED
from remat_kit._plan.plan import NOT_KEPT, BlockPlan, Plan, Tried
from remat_kit._report.layout import WIDTH, row
from remat_kit._units import format_bytes, format_flops, format_seconds

_MOST = 24
"""Rows of what a block keeps."""


def render(plan: Plan) -> str:
    """The report of one plan as text. Each figure says compiled, predicted or modelled."""
    lines = [f"{_title(plan)}: {'fits' if plan.fits else 'DOES NOT FIT'}", ""]
    lines += [row("need (compiled)", format_bytes(plan.need_bytes), f"{plan.need_bytes:,} bytes")]
    if plan.budget_bytes is not None and plan.margin_bytes is not None:
        lines += [row("budget", format_bytes(plan.budget_bytes))]
        lines += [row("left" if plan.margin_bytes >= 0 else "missing", format_bytes(abs(plan.margin_bytes)))]
    if plan.compiler_options:
        told = " ".join(f"{name}={value}" for name, value in plan.compiler_options.items())
        lines += [row("compiler options", told)]
    if plan.host_bytes:
        lines += [row("on the host (compiled)", format_bytes(plan.host_bytes))]
    lines += [row("step time (predicted)", format_seconds(plan.step_s))]
    lines += [row("recomputed FLOPs (counted)", format_flops(plan.recompute_flops))]
    lines += ["", "Blocks, with bytes, FLOPs and time of all alike, each time the loss is differentiated"]
    for block in plan.blocks:
        lines += ["", *_block(block)]
    others = ", for this budget and for others" if any(each.name.endswith(REUSED) for each in plan.tried) else ""
    lines += ["", f"Compiled on the way{others}", *_tried(plan.tried)]
    lines += ["", "Why", *(line for reason in plan.reasons for line in _wrapped(reason))]
    return "\n".join(lines) + "\n"


def render_front(plans: Sequence[Plan], best: Plan) -> str:
    """A line for each plan, from the fewest bytes to the least time, and the report of the one at the knee."""
    lines = [f"{_title(plans[0])}: need against step time", ""]
    lines += [f"  {'need (compiled)':>16}  {'step (predicted)':>16}  {'recomputed':>14}"]
    for each in plans:
        mark = "  <- knee" if each is best else ""
        lines.append(
            f"  {format_bytes(each.need_bytes):>16}  {format_seconds(each.step_s):>16}  "
            f"{format_flops(each.recompute_flops):>14}{mark}"
        )
    return "\n".join(lines) + "\n\n" + render(best)


def _title(plan: Plan) -> str:
    options = " ".join(f"{name}={value}" for name, value in plan.options.items())
    return " ".join(each for each in ("plan of", plan.workload or "a step", options, "on", plan.target) if each)


def _block(block: BlockPlan) -> Iterable[str]:
    count = len(block.sites) * block.repeats
    yield f"{block.module} ({count} alike)" if count > 1 else block.module
    if not block.checkpointed:
        yield "  is not checkpointed: autodiff keeps what it keeps"
        return
    if not block.kept:
        yield "  keeps nothing, computes all again"
    else:
        yield f"  keeps{'':53}{'bytes':>12}  {'saves (model)':>14}"
    for each in block.kept[:_MOST]:
        host = " to the host" if each.how == "offload" else ""
        what = f"{each.name}{host} {each.shape}{f' of {each.module}' if each.module else ''}"
        yield f"    {what[:55]:56}{format_bytes(each.bytes):>12}  {format_seconds(each.again_s):>14}"
    if len(block.kept) > _MOST:
        rest = block.kept[_MOST:]
        total, seconds = format_bytes(sum(each.bytes for each in rest)), sum(each.again_s for each in rest)
        yield f"    {f'{len(rest)} smaller ones':56}{total:>12}  {format_seconds(seconds):>14}"
    yield f"  computes again{'':44}{'FLOPs':>12}  {'takes (model)':>14}"
    for each in block.again:
        what = f"{each.name}{f' {each.shape}' if each.shape else ''}{f' of {each.module}' if each.module else ''}"
        flops = format_flops(each.flops) if each.flops else ""
        takes = "not modelled" if each.name.startswith(NOT_KEPT) else format_seconds(each.seconds)
        yield f"    {what[:55]:56}{flops:>12}  {takes:>14}"


def _tried(tried: Sequence[Tried]) -> Iterable[str]:
    yield f"    {'':34}{'need':>12}  {'model said':>12}  {'step':>10}  {'recomputed':>14}"
    for each in tried:
        if each.need_bytes is None or each.step_s is None:
            yield f"    {each.name:34}FAILED: {each.error}"
            continue
        said = format_bytes(each.predicted_need_bytes) if each.predicted_need_bytes is not None else "-"
        need, step = format_bytes(each.need_bytes), format_seconds(each.step_s)
        yield (
            f"    {each.name[:34]:34}{need:>12}  {said:>12}  {step:>10}  "
            f"{format_flops(each.recompute_flops or 0):>14}{'' if each.fits else '  over the budget'}"
        )


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="  ")
