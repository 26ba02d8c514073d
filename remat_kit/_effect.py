"""`effect`: why a policy helped against another row, or that it did nothing, and why, from two records alone.

The decision list. Against the base, a policy
  helped   when the step needs less; or needs the same and recomputes less;
  traded   when it needs more and recomputes less;
  hurt     when it needs more and recomputes no less;
  else it had no effect, and the first reason in `REASONS` that holds says why. Others that hold are mentioned.
A policy that keeps nothing of use (`WASTED`) recomputes what `full` does. That explains a row that equals one which
recomputes, so against such a base these reasons are asked in the place that they have in `REASONS`, before those about
the place of the checkpoint, and against any other base last.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from remat_kit._errors import RematKitError
from remat_kit._explanation import MOVABLE
from remat_kit._reasons import (
    CHECKS,
    REASONS,
    WASTED,
    XLA_AUTO,
    Pair,
    at_peak,
    change,
    in_order,
    signed,
    unexplained,
)
from remat_kit._record import Record
from remat_kit._units import format_bytes, format_flops

HELPED, TRADED, HURT, NO_EFFECT = "helped", "traded", "hurt", "no effect"

_FOLLOWS = frozenset({"peak_elsewhere", "nothing_to_drop"})
"""What the figures show where another reason holds, too."""
_OF_HELP = frozenset({*WASTED, "outside_scan", "whole_loss"})
"""Reasons that hold beside an effect: it could be larger."""
_OF_HURT = frozenset(REASONS) - _FOLLOWS - {"xla_remat", "xla_idle"}
"""Reasons that say why a step needs more."""


@dataclass(frozen=True)
class Effect:
    """What a policy did, against another row.

    Attributes:
      code: "helped", "traded", "hurt" or a key of REASONS.
      text: the code in words with the figures found, and the next step.
      need_bytes, live_peak_bytes: their change; None where one of them is not known.
      reasons: the keys of REASONS that the text tells of, in the order of the list.
    """

    code: str
    text: str
    need_bytes: int
    live_peak_bytes: int | None
    reasons: tuple[str, ...] = ()


def effect(record: Record, base: Record) -> Effect:
    """What the policy of `record` did, compared with `base`, another row of the same step.

    Raises RematKitError when one of the rows was not compiled.
    """
    for each in (record, base):
        if each.need_bytes is None:
            raise RematKitError(
                f"the row of policy {each.policy!r} has no need, so nothing can be said of an effect. "
                "Give two rows that were compiled."
            )
    pair = Pair(record, base)
    said = {code: text for code in in_order(pair) if (text := CHECKS[code](pair))}
    if not pair.is_small and pair.need_change < 0:
        code, text = HELPED, _helped(pair)
    elif pair.is_small and pair.recomputes_less:
        code = HELPED
        text = f"needs what {base.policy} needs and computes {format_flops(-pair.recompute_change)} less again"
    elif not pair.is_small:
        code = TRADED if pair.recomputes_less else HURT
        text = _needs_more(pair)
    else:
        said = said or {"unexplained": unexplained(pair)}
        first = next(iter(said))
        said = {each: words for each, words in said.items() if each == first or each not in _FOLLOWS}
        code = next(iter(said))
        others = [REASONS[other] for other in said if other != code]
        text = _sentences(said[code], f"Also: {'; '.join(others)}" if others else "")
        words = f"{NO_EFFECT}: {text}"
        return Effect(code, words, pair.need_change, _peak_change(pair), tuple(said))
    mentioned = {name: words for name, words in said.items() if name in (_OF_HURT if code == HURT else _OF_HELP)}
    found = f"Found: {'. '.join(mentioned.values())}" if mentioned else ""
    words = f"{code}: {_sentences(text, found)}"
    return Effect(code, words, pair.need_change, _peak_change(pair), tuple(mentioned))


def with_effects(records: Sequence[Record]) -> list[Record]:
    """`records` with the effect of each against its row of policy `none`, else of `full`, where there is one.

    Compared are rows of the same workload, options, target, and way of compiling. A base has no effect of its own.
    """
    bases: dict[str, Record] = {}
    for policy in ("full", "none"):  # the later one wins
        bases |= {_step_of(each): each for each in records if each.policy == policy and _is_known(each)}
    return [
        replace(each, effect=effect(each, base).text if base is not None and base is not each else None)
        if _is_known(each)
        else each
        for each in records
        for base in (bases.get(_step_of(each)),)
    ]


def is_without_use(text: str | None) -> bool:
    """Whether a record's `effect` says that the policy did nothing or hurt."""
    return bool(text) and text.startswith((f"{NO_EFFECT}:", f"{HURT}:"))


def _step_of(record: Record) -> str:
    """What rows have in common that may be compared: all but the policy and its results."""
    # That XLA's pass fired is a result, that it was allowed is not, unless the policy is to allow it.
    asked = "off" if record.xla_remat == "off" or record.policy == XLA_AUTO else "on"
    return repr((record.workload, record.options, record.target, record.mesh, record.gemm_backend, asked,
                 record.compile_options))  # fmt: skip


def _is_known(record: Record) -> bool:
    return record.error is None and record.need_bytes is not None


# Texts


def _helped(pair: Pair) -> str:
    record, base = pair.record, pair.base
    parts = [f"needs {_part(pair)} less than {base.policy}"]
    if pair.saved_change:
        parts.append(_kept(pair))
        if pair.saved_change < 0 and (holders := _changes(record, base, -1)):
            parts.append(f"At the peak: {holders}")
    if pair.recompute_change > 0:
        model = f", {pair.recompute_change / record.model_flops:.1%} of the model" if record.model_flops else ""
        parts.append(f"Costs {format_flops(pair.recompute_change)} of recomputation{model}")
    if record.explanation:
        parts.append(f"The live peak now is {at_peak(record.explanation)}")
    return _sentences(*parts)


def _needs_more(pair: Pair) -> str:
    record, base = pair.record, pair.base
    parts = [f"needs {_part(pair)} more than {base.policy}"]
    if pair.recomputes_less:
        parts[0] += f" and computes {format_flops(-pair.recompute_change)} less again"
    if pair.saved_change:
        parts.append(_kept(pair))
    kept = sum(each.kept_bytes for each in record.checkpoints)
    if kept:
        parts.append(f"The policy keeps {format_bytes(kept)}, beside the inputs of its regions")
    if holders := _changes(record, base, 1):
        parts.append(f"At the peak: {holders}")
    if not pair.recomputes_less:
        parts.append(f"Let the policy keep less, or use {base.policy}")
    return _sentences(*parts)


def _kept(pair: Pair) -> str:
    before, after = pair.base.saved_bytes or 0, pair.record.saved_bytes or 0
    host = pair.record.saved_host_bytes
    there = f", {format_bytes(host)} on the host" if host else ""
    return f"Kept for backward: {format_bytes(after)}{there} instead of {format_bytes(before)}"


def _changes(record: Record, base: Record, sign: int) -> str:
    """The two holders whose bytes at the peak changed most in one direction."""
    if not record.explanation or not base.explanation:
        return ""
    sizes: dict[tuple[str, str, str], int] = {}
    for holders, factor in ((record.explanation.holders, 1), (base.explanation.holders, -1)):
        for each in holders:
            key = (each.category, each.module or each.source, each.shape)
            sizes[key] = sizes.get(key, 0) + factor * each.bytes
    changed = [key for key in sizes if sizes[key] * sign > 0]
    # Before workspaces of libraries, which come and go with the moment of the peak.
    changed = [key for key in changed if key[0] in MOVABLE] or changed
    largest = sorted(changed, key=lambda key: (-sizes[key] * sign, key))
    return ", ".join(f"{signed(sizes[key])} {key[0]} {key[2]}{f' ({key[1]})' if key[1] else ''}" for key in largest[:2])


def _part(pair: Pair) -> str:
    share = f" ({abs(pair.need_change) / pair.base.need_bytes:.1%})" if pair.base.need_bytes else ""
    return f"{format_bytes(abs(pair.need_change))}{share}"


def _sentences(*parts: str) -> str:
    return ". ".join(part.rstrip(".") for part in parts if part) + "."


def _peak_change(pair: Pair) -> int | None:
    return change(pair.record.live_peak_bytes, pair.base.live_peak_bytes)
