"""What changed between two records: which holders of the live peak grew, shrank, came or went, and what else differs.

Rows are matched by what stays from one version of a program to the next: category, module, source line, shape. What
then is on one side only is matched once more without the dimensions of its shape, for another batch, and then without
its module, for another name. XLA's names of instructions, which change with every compile, are never looked at.
"""

import dataclasses
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from remat_kit._explanation import Explanation, Holder
from remat_kit._record import Record

DIFF_VERSION = 1
"""Raised when a field of the JSON form changes its meaning. Fields are added, never renamed."""


@dataclass(frozen=True)
class Change:
    """One figure or setting on both sides.

    Attributes:
      name: what it is.
      before, after: its values, None where it is not known.
      unit: bytes, FLOP, s, count, share or text.
    """

    name: str
    before: Any
    after: Any
    unit: str = "bytes"

    @property
    def difference(self) -> Any:
        """after - before, None when one of them is no number."""
        numbers = all(isinstance(value, int | float) for value in (self.before, self.after))
        return self.after - self.before if numbers and self.unit != "text" else None


@dataclass(frozen=True)
class RowChange:
    """Holders at the live peak with one key, on both sides; 0 where a side has none.

    Attributes:
      category, module, shape: of the key; source: the line, of the later side where it has one.
      before_bytes, after_bytes: on each side; before_buffers, after_buffers: how many buffers that is.
      before_module, before_shape: of the earlier side where they were others, "" where they are the same.
    """

    category: str
    module: str
    source: str
    shape: str
    before_bytes: int
    after_bytes: int
    before_buffers: int
    after_buffers: int
    before_module: str = ""
    before_shape: str = ""

    @property
    def difference(self) -> int:
        """Bytes after, less bytes before."""
        return self.after_bytes - self.before_bytes

    @property
    def modules(self) -> str:
        """`mlp`, or `mlp -> ffn`."""
        return f"{self.before_module} -> {self.module}" if self.before_module else self.module

    @property
    def shapes(self) -> str:
        """`f32[8,512]`, or `f32[8->16,512]`."""
        old, new = _SHAPE.fullmatch(self.before_shape), _SHAPE.fullmatch(self.shape)
        if old is None or new is None:
            return f"{self.before_shape} -> {self.shape}" if self.before_shape else self.shape
        pairs = zip(old["sizes"].split(","), new["sizes"].split(","), strict=True)
        return f"{new['type']}[{','.join(b if a == b else f'{a}->{b}' for a, b in pairs)}]"

    @property
    def kind(self) -> str:
        """came, went, grew or shrank; "same" when something else differs: the number of buffers, the module's name."""
        if not self.before_buffers:
            return "came"
        if not self.after_buffers:
            return "went"
        return "grew" if self.difference > 0 else "shrank" if self.difference < 0 else "same"


@dataclass(frozen=True)
class Diff:
    """The difference of two records.

    Attributes:
      before, after: the records' titles in the words of a command line: workload, options, policy, target.
      need: the parts of the need and the need itself, whether they changed or not; () when a side has none.
      live_peak: the live peak on both sides.
      categories: bytes at the live peak by category, whether they changed or not; their differences add up to that of
        the live peak. () when the sides cannot be compared, see `notes`.
      rows: holders that changed, by the size of the change; their differences add up to that of the live peak too.
      figures: other figures that changed.
      settings: what was asked for or used and differs: policy, options, target, versions, compile options, ...
      notes: what could not be compared, and why.
    """

    before: str
    after: str
    need: tuple[Change, ...]
    live_peak: Change
    categories: tuple[Change, ...]
    rows: tuple[RowChange, ...]
    figures: tuple[Change, ...]
    settings: tuple[Change, ...]
    notes: tuple[str, ...]
    diff_version: int = DIFF_VERSION

    def to_json(self) -> dict[str, Any]:
        """A JSON object with every field, and the kind and difference of each row."""
        data = dataclasses.asdict(self)
        for plain, row in zip(data["rows"], self.rows, strict=True):
            plain |= {"kind": row.kind, "difference_bytes": row.difference}
        return data


def diff(before: Record, after: Record) -> Diff:
    """The difference of two records, of any two programs; alike ones give rows that say more."""
    notes = []
    for side, record in (("before", before), ("after", after)):
        if record.error:
            notes.append(f"{side} failed: {record.error}")
        elif record.live_peak_bytes is None:
            notes.append(f"{side} has no live peak: its program has no heap trace of all its temporaries")
        elif record.explanation is None:
            notes.append(f"{side} has no explanation, so rows of the live peak are not compared: analyze it again")
    known = before.live_peak_bytes is not None and after.live_peak_bytes is not None
    # The words of version 1 were others: the label of an argument, or "made in <phase>".
    same_words = (before.schema_version == 1) == (after.schema_version == 1)
    if known and not same_words:
        notes.append("the sides have categories of different versions, which are not compared")
    one, other = before.explanation, after.explanation
    figures = [*_figures(before, after), *_program(one, other)]
    return Diff(
        before=title(before),
        after=title(after),
        need=_need(before, after),
        live_peak=Change("live peak", before.live_peak_bytes, after.live_peak_bytes),
        categories=_categories(before.categories, after.categories) if known and same_words else (),
        rows=_rows(one.holders, other.holders) if known and one and other else (),
        figures=tuple(change for change in figures if change.before != change.after),
        settings=tuple(change for change in _settings(before, after) if change.before != change.after),
        notes=tuple(notes),
    )


def title(record: Record) -> str:
    """`models.transformer:gpt batch=8, policy full, h100-sxm-80gb`; what is not known is left out."""
    options = "".join(f" {name}={value}" for name, value in record.options.items())
    parts = (record.workload + options, record.policy and f"policy {record.policy}", record.target)
    return ", ".join(part for part in parts if part)


def _need(before: Record, after: Record) -> tuple[Change, ...]:
    if before.need_bytes is None or after.need_bytes is None:
        return ()
    return (
        Change("arguments", before.argument_bytes, after.argument_bytes),
        Change("outputs", before.output_bytes, after.output_bytes),
        Change("outputs in the place of arguments", before.alias_bytes, after.alias_bytes),
        Change("temporaries", before.temp_bytes, after.temp_bytes),
        Change("need", before.need_bytes, after.need_bytes),
    )


def _categories(before: Mapping[str, int], after: Mapping[str, int]) -> tuple[Change, ...]:
    names = dict.fromkeys([*before, *after])
    found = [Change(name, before.get(name, 0), after.get(name, 0)) for name in names]
    return tuple(sorted(found, key=lambda change: (-abs(change.difference), -max(change.before, change.after))))


def _figures(before: Record, after: Record) -> Iterable[Change]:
    """The figures of the records that are neither parts of the need nor of the live peak."""
    for name, field, unit in (
        ("constants", "constant_bytes", "bytes"),
        ("host memory, arguments", "host_argument_bytes", "bytes"),
        ("host memory, outputs", "host_output_bytes", "bytes"),
        ("host memory, temporaries", "host_temp_bytes", "bytes"),
        ("capacity of a process", "capacity_bytes", "bytes"),
        ("room left", "margin_bytes", "bytes"),
        ("saved from forward to backward", "saved_bytes", "bytes"),
        ("saved, on the host", "saved_host_bytes", "bytes"),
        ("saved by a block", "saved_bytes_per_block", "bytes"),
        ("model FLOPs", "model_flops", "FLOP"),
        ("recomputed FLOPs", "recompute_flops", "FLOP"),
        ("recomputed matmuls", "recomputed_matmuls", "count"),
        ("step time, predicted", "predicted_step_s", "s"),
        ("allocator's peak, measured", "measured_peak_bytes", "bytes"),
    ):
        yield Change(name, getattr(before, field), getattr(after, field), unit)
    measured = [record.measured_step_s and record.measured_step_s.median for record in (before, after)]
    yield Change("step time, measured", measured[0], measured[1], "s")
    yield Change("fits", before.fits, after.fits, "text")
    yield Change("phase of the live peak", before.live_peak_phase, after.live_peak_phase, "text")


def _program(before: Explanation | None, after: Explanation | None) -> Iterable[Change]:
    """What the explanations say of the programs as a whole."""
    if before is None or after is None:
        return
    yield Change("module of the live peak", before.peak.module, after.peak.module, "text")
    if before.floor and after.floor:
        yield Change("floor of any policy", before.floor.bytes, after.floor.bytes)
    for name, field, unit in (
        ("donated arguments", "donated_bytes", "bytes"),
        ("blocks of temporary memory", "temp_allocations", "count"),
        ("instructions", "instructions", "count"),
        ("instructions cloned by XLA's remat", "xla_remat_clones", "count"),
        ("compiled matmul FLOPs", "matmul_flops", "FLOP"),
        ("compiled matmul FLOPs, recomputed", "recompute_matmul_flops", "FLOP"),
        ("devices", "devices", "count"),
        ("XLA's module", "module", "text"),
    ):
        yield Change(name, getattr(before.program, field), getattr(after.program, field), unit)


def _settings(before: Record, after: Record) -> Iterable[Change]:
    """What the two steps were compiled from and with."""
    for name, field in (
        ("workload", "workload"),
        ("policy", "policy"),
        ("target", "target"),
        ("XLA's remat", "xla_remat"),
        ("GEMM backend", "gemm_backend"),
    ):
        yield Change(name, getattr(before, field), getattr(after, field), "text")
    for prefix, field in (
        ("option", "options"),
        ("mesh axis", "mesh"),
        ("version of", "versions"),
        ("compile option", "compile_options"),
    ):
        left, right = getattr(before, field), getattr(after, field)
        for name in dict.fromkeys([*left, *right]):
            yield Change(f"{prefix} {name}", left.get(name), right.get(name), "text")


_Key = tuple[str, str, str, str]
_Pair = tuple[_Key | None, _Key | None]
_NOWHERE = ("", "", "", "")
_SHAPE = re.compile(r"(?P<type>\w+)\[(?P<sizes>\d+(?:,\d+)*)\]")
_SOURCE = re.compile(r"(?P<file>.*):(?P<line>\d+)(?P<function> \(.*\))?")


def _rows(before: Iterable[Holder], after: Iterable[Holder]) -> tuple[RowChange, ...]:
    """The rows that changed. Holders with one key are one row, whatever their phase."""
    left, right = _by_key(before), _by_key(after)
    found = []
    for old, new in _changed(_pairs(left, right)):
        here, there = left[old] if old else [], right[new] if new else []
        category, module, _, shape = new or old or _NOWHERE
        source = next((each.source for each in (*there, *here) if each.source), "")
        row = RowChange(
            category,
            module,
            source,
            shape,
            before_bytes=sum(each.bytes for each in here),
            after_bytes=sum(each.bytes for each in there),
            before_buffers=sum(each.buffers for each in here),
            after_buffers=sum(each.buffers for each in there),
            before_module=old[1] if old and new and old[1] != module else "",
            before_shape=old[3] if old and new and old[3] != shape else "",
        )
        same = (row.before_bytes, row.before_buffers) == (row.after_bytes, row.after_buffers)
        if not same or row.before_module or row.before_shape:
            found.append(row)
    return tuple(sorted(found, key=_largest_first))


def _largest_first(row: RowChange) -> tuple[Any, ...]:
    largest = -max(row.before_bytes, row.after_bytes)
    return -abs(row.difference), largest, row.category, row.module, row.source, row.shape


def _by_key(holders: Iterable[Holder]) -> dict[_Key, list[Holder]]:
    found: dict[_Key, list[Holder]] = defaultdict(list)
    for each in holders:
        # An argument is its path; the line that uses it first is another with every policy.
        source = "" if each.phase == "argument" else each.source
        found[each.category, each.module, source, each.shape].append(each)
    return found


def _pairs(before: Iterable[_Key], after: Iterable[_Key]) -> Iterable[_Pair]:
    """The keys of both sides in pairs, with None for what only one side has.

    An edit above a line moves it, so lines are told apart only within one function of one file with one category,
    module and shape. As many lines on both sides are the same lines in their order. Of unequal numbers those are the
    same that are equally far apart, by the shift that fits most of them; the rest is paired in order.
    """
    groups: dict[Any, tuple[list[_Key], list[_Key]]] = defaultdict(lambda: ([], []))
    for number, keys in enumerate((before, after)):
        for key in keys:
            groups[_without_line(key)][number].append(key)
    for old, new in groups.values():
        old.sort(key=_line)
        new.sort(key=_line)
        if len(old) != len(new):
            shifts = Counter(_line(there) - _line(here) for here in old for there in new)
            shift = min(shifts, key=lambda each: (-shifts[each], abs(each)), default=0)
            places = {_line(key): key for key in new}
            for here in list(old):
                if there := places.pop(_line(here) + shift, None):
                    yield here, there
                    old.remove(here)
                    new.remove(there)
        shared = min(len(old), len(new))
        yield from zip(old[:shared], new[:shared], strict=True)
        yield from ((key, None) for key in old[shared:])
        yield from ((None, key) for key in new[shared:])


def _changed(pairs: Iterable[_Pair]) -> Iterable[_Pair]:
    """The pairs, with what is on one side only paired with what it became: other dimensions, or another module.

    It must be of the same line, and have no other to be mixed up with: of other dimensions there are as many on both
    sides, and they keep their order; of another module it is the only one on both sides.
    """
    single: list[_Pair] = []
    for pair in pairs:
        if pair[0] and pair[1]:
            yield pair
        else:
            single.append(pair)
    for alike, most in ((_without_sizes, len(single)), (_without_module, 1)):
        groups: dict[Any, tuple[list[_Key], list[_Key]]] = defaultdict(lambda: ([], []))
        for old, new in single:
            for keys, key in zip(groups[alike(old or new or _NOWHERE)], (old, new), strict=True):
                if key:
                    keys.append(key)
        single = []
        for olds, news in groups.values():
            if len(olds) == len(news) <= most:
                yield from zip(sorted(olds, key=_order), sorted(news, key=_order), strict=True)
            else:
                single += [(key, None) for key in olds] + [(None, key) for key in news]
    yield from single


def _without_sizes(key: _Key) -> tuple[Any, ...]:
    """The key with type and rank in the place of the shape."""
    category, module, shape, *place = _without_line(key)
    match = _SHAPE.fullmatch(shape)
    return category, module, *((match["type"], match["sizes"].count(",")) if match else (shape,)), *place, _line(key)


def _without_module(key: _Key) -> tuple[Any, ...]:
    category, _, *rest = _without_line(key)
    return category, *rest, _line(key)


def _order(key: _Key) -> tuple[Any, ...]:
    match = _SHAPE.fullmatch(key[3])
    return [int(size) for size in match["sizes"].split(",")] if match else [], key


def _without_line(key: _Key) -> tuple[str, ...]:
    """The key with file and function in the place of the source line; the same file may lie in another folder."""
    category, module, source, shape = key
    match = _SOURCE.fullmatch(source)
    place = (match["file"].rpartition("/")[2], match["function"] or "") if match else (source, "")
    return category, module, shape, *place


def _line(key: _Key) -> int:
    match = _SOURCE.fullmatch(key[2])
    return int(match["line"]) if match else 0
