"""The reasons for which a policy has no effect, each found in two records: what was found, and what to do next."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from remat_kit._explanation import MOVABLE, Checkpoint, Explanation, Holder
from remat_kit._record import Record
from remat_kit._units import format_bytes, format_flops

REASONS: Mapping[str, str] = {
    "xla_idle": "XLA's own rematerialization had nothing to do: the step fits the device",
    "xla_remat": "XLA's own rematerialization has done it to the base already",
    "no_region": "no checkpointed region is in the program",
    "keeps_everything": "the policy keeps all that backward needs",
    "no_match": "nothing that the policy keeps is in the program",
    "never_needed": "backward needs none of the names that the policy keeps",
    "still_recomputed": "a name is kept, and the matmul before it runs again",
    "outside_scan": "the checkpoint is around the scan over layers and not in it",
    "whole_loss": "one checkpoint is around most of the model",
    "cse": "XLA merged the recomputation with forward",
    "peak_elsewhere": "less is kept for backward, and the peak is where that is not alive",
    "nothing_to_drop": "as much is alive at the peak for backward as with the base",
    "unexplained": "none of the above",
}
"""The codes of an Effect without effect, in the order in which they are asked for."""

XLA_AUTO = "xla_auto"
"""The policy that leaves all to XLA's own pass."""

WASTED = ("no_match", "never_needed", "still_recomputed")
"""What a policy keeps in vain: it spares no more recomputation than `full`."""

SMALL_NEED, SMALL_SAVED = 0.01, 0.1
"""A change of need is none below both shares: of what the base needs, since the packing of buffers and library
workspaces move by as much; and of what the two rows keep for backward, since that is all that a policy can move: in a
step of large parameters and few activations, 1% of the need may be most of it."""
_WORTH = 0.1
"""Of the need: advice that lowers it by less is not the next step where a policy does nothing."""
_SMALL_FLOPS = 0.01
"""Of the model's FLOPs."""
_MOST = 2 / 3
"""A single region with more of the model than this has most of what it drops alive at once when it runs again. One of
two layers has up to 4/7 of backward, since the first one needs no gradient of its input."""


@dataclass(frozen=True)
class Pair:
    """A row, and the base that it is compared with. Changes are the row's figure less the base's."""

    record: Record
    base: Record

    @property
    def need_change(self) -> int:
        """Bytes; both rows have a need."""
        return (self.record.need_bytes or 0) - (self.base.need_bytes or 0)

    @property
    def devices(self) -> int:
        """What is counted on a jaxpr is that of all of them together; needs and peaks are those of one."""
        return math.prod(self.record.mesh.values())

    @property
    def saved_change(self) -> int | None:
        """Bytes kept on all devices from forward to backward; None where one of the rows does not tell."""
        return change(self.record.saved_bytes, self.base.saved_bytes)

    @property
    def recompute_change(self) -> int:
        """FLOPs that run again, 0 for a row that does not tell."""
        return (self.record.recompute_flops or 0) - (self.base.recompute_flops or 0)

    @property
    def base_recomputes(self) -> bool:
        """Whether the base has checkpointed regions, as `full` has and `none` has not."""
        return bool(self.base.recompute_flops or self.base.checkpoints)

    @property
    def is_small(self) -> bool:
        """Whether the need is the same for all that matters."""
        saved = max(self.record.saved_bytes or 0, self.base.saved_bytes or 0) // self.devices
        is_small = abs(self.need_change) <= SMALL_NEED * (self.base.need_bytes or 0)
        return is_small and (not saved or abs(self.need_change) <= SMALL_SAVED * saved)

    @property
    def recomputes_less(self) -> bool:
        """Whether so many FLOPs less run again that it is an effect of its own."""
        return -self.recompute_change > _SMALL_FLOPS * (self.record.model_flops or 0)

    @property
    def saves_less(self) -> bool:
        """Whether what is kept for backward fell by enough to be seen in the need."""
        fell = -(self.saved_change or 0)
        in_need = fell // self.devices > SMALL_NEED * (self.base.need_bytes or 0)
        return fell > SMALL_SAVED * (self.base.saved_bytes or 0) or in_need


def in_order(pair: Pair) -> list[str]:
    """The keys of CHECKS as they are asked for: the wasted ones last where the base recomputes nothing."""
    codes = [code for code in REASONS if code in CHECKS]
    if pair.base_recomputes:
        return codes
    return [code for code in codes if code not in WASTED] + list(WASTED)


# The reasons. Each is a function of the two rows that says what was found and what to do next, or "".


def _xla_idle(pair: Pair) -> str:
    if pair.record.policy != XLA_AUTO or pair.record.xla_remat != "on":
        return ""
    return (
        "XLA's own rematerialization had nothing to do: it acts only when a step takes most of the device, and then "
        "as far as it must. Use a policy that wraps the blocks to save memory before that"
    )


def _xla_remat(pair: Pair) -> str:
    if pair.base.xla_remat != "fired":
        return ""
    clones = pair.base.explanation.program.xla_remat_clones if pair.base.explanation else 0
    made = f"it made {clones} clones" if clones else "it fired"
    return (
        f"XLA's own rematerialization has done it to {pair.base.policy} already: {made} to fit the device, and does "
        "not count their FLOPs. Compare with --xla-remat off"
    )


def _no_region(pair: Pair) -> str:
    record = pair.record
    # A row of an older version has no list of regions either, but no explanation too.
    if record.checkpoints or record.recompute_flops or record.explanation is None:
        return ""
    return (
        "no checkpointed region is in the program and nothing runs again: the model does not use the policy, or it "
        "keeps all. Wrap the model's blocks with remat(policy)"
    )


def _keeps_everything(pair: Pair) -> str:
    regions = pair.record.checkpoints
    if not regions or any(each.recomputed_operations for each in regions):
        return ""
    size = format_bytes(sum(each.kept_bytes for each in regions))
    ignores = any(each.policy == "save_anything_except_these_names" for each in regions)
    return (
        f"the policy keeps all that backward needs: its {_regions(regions)} take {size} from forward and run nothing "
        f"again. {'save_anything_except_these_names ignores names of values that JAX saves anyway. ' * ignores}"
        "Use a policy that drops something, e.g. full or save(NAME)"
    )


def _no_match(pair: Pair) -> str:
    asked = [each for each in pair.record.checkpoints if each.policy]
    if not asked or any(each.kept_values or each.tags for each in asked):
        return ""
    policies = ", ".join(_all((each.policy,) for each in asked))
    hints = ["Check its names against the model's checkpoint_name calls"] * ("dots" not in policies)
    hints += ["Matmuls under vmap have batch dimensions: dots_saveable keeps them"] * ("name" not in policies)
    return (
        f"{policies} matches nothing in the program: 0 values are kept in {_regions(asked)}, so it is what full does. "
        f"{'. '.join(hints)}"
    )


def _never_needed(pair: Pair) -> str:
    asked = [each for each in pair.record.checkpoints if each.policy]
    tags = _all(each.tags for each in asked)
    if not tags or any(each.kept_values or set(each.tags) != set(each.unneeded_tags) for each in asked):
        return ""
    return (
        f"backward never needs {', '.join(tags)}: 0 values are saved in {_regions(asked)}, so it is what full does. "
        "Name what a nonlinearity or a matmul takes in"
    )


def _still_recomputed(pair: Pair) -> str:
    regions = [each for each in pair.record.checkpoints if each.recomputed_tags]
    if not regions:
        return ""
    tags = _all(each.recomputed_tags for each in regions)
    size, flops = sum(each.kept_bytes for each in regions), sum(each.recompute_flops for each in regions)
    verb = "are" if len(tags) > 1 else "is"
    return (
        f"{', '.join(tags)} {verb} kept (of {format_bytes(size)} that the policy keeps), and the matmul before runs "
        f"again all the same (of {format_flops(flops)} recomputed): backward needs what the name's nonlinearity takes "
        "in. Put the name on the matmul's output"
    )


def _outside_scan(pair: Pair) -> str:
    large = [each for each in _large(pair) if each.inner_scan_length > 1]
    if not large:
        return ""
    return (
        f"the checkpoint is outside of the scan over {large[0].inner_scan_length} layers: its region holds "
        f"{_share(large[0]):.0%} of the model, and all layers' values are alive when it runs again. "
        "Wrap the function that is scanned: scan(remat(layer))"
    )


def _whole_loss(pair: Pair) -> str:
    large = [each for each in _large(pair) if each.inner_scan_length <= 1]
    if not large:
        return ""
    return (
        f"one checkpoint holds {_share(large[0]):.0%} of the model: what it drops, {large[0].recomputed_operations} "
        "operations, is made again at once and alive at once. Wrap each layer by itself"
    )


def _cse(pair: Pair) -> str:
    record, base = pair.record, pair.base
    if record.explanation is None or base.explanation is None or not record.recompute_flops:
        return ""
    # Compared as changes: what XLA itself makes of the model's matmuls is in both programs.
    ran, before = record.explanation.program.matmul_flops, base.explanation.program.matmul_flops
    if not (ran and before) or abs(pair.recompute_change) <= _SMALL_FLOPS * (record.model_flops or 0):
        return ""
    if abs(ran - before) >= abs(pair.recompute_change) / 2:
        return ""
    return (
        f"XLA merged the recomputation with forward: the step asks for {format_flops(record.recompute_flops)} again, "
        f"{base.policy} for {format_flops(base.recompute_flops or 0)}, and as compiled they differ by "
        f"{format_flops(abs(ran - before))}. Leave prevent_cse on, jax.checkpoint's default, for layers that are not "
        "in a scan"
    )


def _peak_elsewhere(pair: Pair) -> str:
    explanation = pair.record.explanation
    if explanation is None or not pair.saves_less:
        return ""
    # What lives throughout is there at any moment, and says nothing about this one.
    lasting = ("outputs", "constants")
    made = sum(each.bytes for each in explanation.holders if each.phase != "argument" and each.category not in lasting)
    if _movable(explanation) * 2 >= made:
        return ""
    floor = explanation.floor
    least = f" No policy brings it below {format_bytes(floor.bytes)}." if floor and floor.bytes else ""
    return (
        f"{format_bytes(-(pair.saved_change or 0))} less is kept for backward, but that is not alive at the live peak, "
        f"which is {at_peak(explanation)}.{least} {_instead(pair.record, explanation)}"
    )


def _nothing_to_drop(pair: Pair) -> str:
    record, base = pair.record, pair.base
    if pair.base_recomputes or not record.checkpoints:
        return ""
    if record.explanation and base.explanation:
        ours, theirs = _movable(record.explanation), _movable(base.explanation)
        if ours < theirs * (1 - SMALL_SAVED):
            return ""
        found = (
            f"{format_bytes(ours)} for backward is alive at the live peak (values kept and computed again), with "
            f"{base.policy} {format_bytes(theirs)}: what the regions drop is not what the peak holds"
        )
    elif pair.saved_change is not None and not pair.saves_less:
        kept = format_bytes(record.saved_bytes or 0)
        found = f"{kept} is kept for backward, with {base.policy} {format_bytes(base.saved_bytes or 0)}"
    else:
        return ""
    return f"{found}. Let a region hold more than one layer, or use {base.policy}"


def _movable(explanation: Explanation) -> int:
    """Bytes at the live peak that are up to a policy: the smaller the regions, the fewer are computed again at once."""
    return sum(each.bytes for each in explanation.holders if each.category in MOVABLE)


CHECKS: Mapping[str, Callable[[Pair], str]] = {
    "xla_idle": _xla_idle,
    "xla_remat": _xla_remat,
    "no_region": _no_region,
    "keeps_everything": _keeps_everything,
    "no_match": _no_match,
    "never_needed": _never_needed,
    "still_recomputed": _still_recomputed,
    "outside_scan": _outside_scan,
    "whole_loss": _whole_loss,
    "cse": _cse,
    "peak_elsewhere": _peak_elsewhere,
    "nothing_to_drop": _nothing_to_drop,
}


def unexplained(pair: Pair) -> str:
    """What is said where no reason holds: the figures."""
    return (
        f"need changes by {signed(pair.need_change)} against {pair.base.policy}, bytes kept for backward by "
        f"{signed(pair.saved_change or 0)}, recomputed FLOPs by "
        f"{'-' if pair.recompute_change < 0 else '+'}{format_flops(abs(pair.recompute_change))}"
    )


def at_peak(explanation: Explanation) -> str:
    """Where the live peak is, and what is alive there beside the arguments."""
    peak = explanation.peak
    place = peak.module or peak.block or peak.source
    sizes: dict[str, int] = {}
    for each in explanation.holders:
        if each.phase != "argument":
            sizes[each.category] = sizes.get(each.category, 0) + each.bytes
    largest = sorted(sizes, key=lambda name: (-sizes[name], name))[:2]
    held = " and ".join(f"{format_bytes(sizes[name])} of {name}" for name in largest)
    return f"in {peak.phase}{f' ({place})' if place else ''}{f', with {held}' if held else ''}"


def _instead(record: Record, explanation: Explanation) -> str:
    """What lowers a peak that no policy lowers."""
    for each in explanation.advice:
        if each.kind not in ("recompute", "offload") and each.bytes >= _WORTH * (record.need_bytes or 0):
            return each.how[:1].upper() + each.how[1:].rstrip(".")
    largest: Holder | None = next((each for each in explanation.holders if each.phase != "argument"), None)
    if explanation.peak.phase == "update":
        return "Donate the state, or shard the optimizer"
    if largest and largest.category == "loss head":
        return "Compute the loss in chunks"
    if largest and largest.category == "gradients":
        return "Shard the parameters, or accumulate gradients in lower precision"
    return "Use a smaller batch"


def _large(pair: Pair) -> list[Checkpoint]:
    """Single regions that hold most of the model, are in no scan and have no regions inside."""
    alone = [
        each
        for each in pair.record.checkpoints
        if each.regions == 1 and not each.outer_scan_length and not each.inner_regions
    ]
    return sorted((each for each in alone if _share(each) > _MOST), key=lambda each: -_share(each))


def _share(region: Checkpoint) -> float:
    return min(max(region.forward_share, region.backward_share), 1.0)


def _regions(regions: Iterable[Checkpoint]) -> str:
    number = sum(each.executions for each in regions)
    return f"{number} region{'s' * (number != 1)}"


def _all(names: Iterable[tuple[str, ...]]) -> list[str]:
    return sorted({name for each in names for name in each})


def signed(count: int) -> str:
    """A change of bytes with its sign."""
    return f"{'-' if count < 0 else '+'}{format_bytes(abs(count))}"


def change(after: int | None, before: int | None) -> int | None:
    """`after` less `before`; None where one of them is not known."""
    return None if after is None or before is None else after - before
