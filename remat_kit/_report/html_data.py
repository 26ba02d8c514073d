"""What the charts of the HTML report are drawn from: columns of numbers, with each text said once."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from remat_kit._explanation import CATEGORIES, Buffer, Explanation, Holder, Timeline
from remat_kit._record import Record

COLOURS: Mapping[str, str] = {
    "parameters": "#6b8ff6",
    "optimizer state": "#335a97",
    "batch": "#42bee5",
    "parameter copies": "#aa6919",
    "gradients": "#fda080",
    "saved activations": "#288871",
    "loss head": "#9458ca",
    "recompute workspace": "#e3cc32",
    "backward workspace": "#af2022",
    "forward workspace": "#9cb01e",
    "collective buffers": "#da5085",
    "host-offloaded": "#58e0f6",
    "outputs": "#7b83b8",
    "constants": "#b58c5d",
    "other temporaries": "#585a63",
    "not attributed": "#c0c2bb",
}
"""One colour for each of CATEGORIES, on a light and on a dark page. They were searched for with full colour vision and
with protanopia, deuteranopia and tritanopia simulated (Machado 2009): in OKLab every two are 0.07 apart or more, and
neighbours in the order of CATEGORIES, which touch in the time line, 0.12. tests/test_html.py computes it again."""

_OTHERS = ("#7f5a9e", "#c98a1b", "#3f8fa8", "#a2486b", "#6d7f2e")

_Row = Buffer | Holder


def categories_of(record: Record) -> list[str]:
    """The categories that occur in the record: those of CATEGORIES in their order, then the step's own labels."""
    found = dict.fromkeys(record.categories)
    explanation = record.explanation
    if explanation is not None:
        rows: Iterable[_Row] = (*explanation.holders, *explanation.buffers)
        found |= dict.fromkeys(row.category for row in rows)
        found |= dict.fromkeys(explanation.timeline.bytes if explanation.timeline else ())
    return [name for name in CATEGORIES if name in found] + [name for name in found if name not in CATEGORIES]


def colours_of(names: Sequence[str]) -> dict[str, str]:
    """The colour of each category; labels of the step's own take turns through a few more."""
    own = [name for name in names if name not in COLOURS]
    return {name: COLOURS.get(name) or _OTHERS[own.index(name) % len(_OTHERS)] for name in names}


def payload(record: Record, before: Record | None = None) -> dict[str, Any]:
    """A JSON object: tables as columns, texts as places in `strings`. Bytes are exact integers.

    Of `before` there is the total over its step, to be drawn behind the record's own."""
    strings: dict[str, int] = {}
    categories = categories_of(record)
    places = {name: place for place, name in enumerate(categories)}
    explanation = record.explanation
    data: dict[str, Any] = {
        "categories": [[name, colour] for name, colour in colours_of(categories).items()],
        "peak": record.live_peak_bytes,
        "peakEvent": -1,
        "events": 0,
        "holders": None,
        "buffers": None,
        "timeline": None,
    }
    if explanation is not None:
        data["peakEvent"], data["events"] = explanation.peak.event, explanation.peak.events
        data["holders"] = _columns(explanation.holders, ("bytes", "buffers", "layers"), places, strings)
        if explanation.buffers:
            data["buffers"] = _buffers(explanation, places, strings)
        if explanation.timeline is not None and explanation.timeline.events:
            data["timeline"] = _timeline(explanation.timeline, categories, strings)
    data["before"] = _totals(before.explanation) if before is not None and before.explanation else None
    data["strings"] = list(strings)
    return data


def embed(data: Mapping[str, Any]) -> str:
    """JSON that may stand in a script element: nothing in it can close the element or open a comment."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    # A lone surrogate cannot be written as UTF-8.
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    for mark in "<>&\u2028\u2029":
        text = text.replace(mark, f"\\u{ord(mark):04x}")
    return text


def _intern(strings: dict[str, int], text: str) -> int:
    return strings.setdefault(text, len(strings))


def _columns(
    rows: Sequence[_Row], numbers: Sequence[str], places: Mapping[str, int], strings: dict[str, int]
) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = {name: [getattr(row, name) for row in rows] for name in numbers}
    columns["category"] = [places[row.category] for row in rows]
    for name in ("module", "source", "phase", "shape"):
        columns[name] = [_intern(strings, getattr(row, name)) for row in rows]
    return columns


def _buffers(explanation: Explanation, places: Mapping[str, int], strings: dict[str, int]) -> dict[str, list[Any]]:
    rows = explanation.buffers
    columns = _columns(rows, ("bytes", "layers", "born", "dies"), places, strings)
    columns["name"] = [row.name for row in rows]
    columns["block"] = [_intern(strings, row.block) for row in rows]
    return columns


def _timeline(timeline: Timeline, categories: Sequence[str], strings: dict[str, int]) -> dict[str, Any]:
    nothing = [0] * len(timeline.events)
    return {
        "events": list(timeline.events),
        "bytes": [list(timeline.bytes.get(name, nothing)) for name in categories],
        "phase": [_intern(strings, text) for text in timeline.phases],
        "module": [_intern(strings, text) for text in timeline.modules],
        "instruction": [_intern(strings, text) for text in timeline.instructions],
    }


def _totals(explanation: Explanation) -> dict[str, Any] | None:
    timeline = explanation.timeline
    if timeline is None or not timeline.events:
        return None
    totals = [sum(series[place] for series in timeline.bytes.values()) for place in range(len(timeline.events))]
    return {"events": list(timeline.events), "all": explanation.peak.events, "bytes": totals}
