"""The HTML report without a browser: its structure, its data, what it makes of odd records, and its size."""

import base64
import dataclasses
import hashlib
import itertools
import json
import re
import tomllib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from html_samples import gpt2, large

from remat_kit._diff import diff
from remat_kit._explanation import CATEGORIES, Explanation
from remat_kit._record import MeasuredTime, Record, dump, load
from remat_kit._report import html, html_data, html_diff, rows
from remat_kit._units import MiB, format_bytes

ASSETS = Path(html.__file__).parent / "assets"
FULL, NONE = gpt2(), gpt2(policy="none")
EVIL = "</script><script>alert(1)</script><!--{data}--><img src=x onerror=alert(1)>\"'&\u2028 ünï\ud800 \\u003c"

_VOID = {"meta", "link", "br", "input", "wbr"}


class Page(HTMLParser):
    """A parsed page: what its elements are, the text of each script, and the text that is shown."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.shown: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data
        elif not self.open or self.open[-1] != "style":
            self.shown.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.shown).split())

    @property
    def data(self) -> dict[str, Any]:
        return json.loads(self.scripts[0])

    def ids(self) -> list[str]:
        return [identifier for _, attributes in self.elements if (identifier := attributes.get("id"))]


def explanation_of(record: Record) -> Explanation:
    assert record.explanation is not None
    return record.explanation


def changed(record: Record, **values: Any) -> Record:
    """The record with other values in its explanation."""
    return dataclasses.replace(record, explanation=dataclasses.replace(explanation_of(record), **values))


ODD = {
    "of version 1": dataclasses.replace(FULL, schema_version=1, explanation=None, attributed_share=None),
    "of a sweep": dataclasses.replace(FULL, explanation=explanation_of(FULL).brief()),
    "without buffers": changed(FULL, buffers=()),
    "without a time line": changed(FULL, timeline=None),
    "without a heap trace": dataclasses.replace(
        FULL, explanation=None, live_peak_bytes=None, live_peak_phase=None, categories={}, attributed_share=None
    ),
    "without temporaries": dataclasses.replace(
        changed(
            FULL, peak=dataclasses.replace(explanation_of(FULL).peak, event=-1, events=0), floor=None, timeline=None
        ),
        live_peak_phase=None,
    ),
    "with nothing alive": dataclasses.replace(
        changed(FULL, holders=(), buffers=(), timeline=None, advice=()), live_peak_bytes=0, need_bytes=0, categories={}
    ),
    "of zero bytes": dataclasses.replace(FULL, live_peak_bytes=0, need_bytes=0),
    "that failed": Record("models.transformer:gpt", {}, "broken", "h100-sxm-80gb", {}, {}, error="the process died"),
    "of a file": Record("", {}, "", "", {}, {}, gemm_backend="", explanation=explanation_of(FULL)),
    "that does not fit": dataclasses.replace(FULL, fits="no", margin_bytes=-5 * MiB),
    "with labels": dataclasses.replace(FULL, categories={"my label": 5 * MiB, "another": 1, "parameters": 0}),
}


@pytest.mark.parametrize("record", [FULL, NONE, *ODD.values()], ids=["full", "none", *ODD])
def test_a_page_is_well_formed_and_refers_to_nothing_outside(record: Record) -> None:
    text = html.render(record)
    page = Page(text)
    assert text.startswith("<!DOCTYPE html>\n<html lang=")
    assert len(set(page.ids())) == len(page.ids())
    for tag, attributes in page.elements:
        assert "src" not in attributes, tag
        described = attributes.get("aria-describedby")
        target = attributes.get("href") or (described and f"#{described}")
        if target and target != "data:,":
            assert target.removeprefix("#") in page.ids()
    assert sum(tag == "h1" for tag, _ in page.elements) == 1
    assert html.render(record) == text
    assert html.render(load(dump(record))[0]) == text


def test_our_own_assets_ask_for_nothing() -> None:
    ours = {file.name: file.read_text(encoding="utf-8") for file in ASSETS.glob("[!e]*")}
    assert {"page.js", "timeline.js", "modules.js", "buffers.js", "report.css", "report.html"} <= set(ours)
    for name, source in ours.items():
        assert not re.search(r"https?:|url\(|@import|fetch\(|XMLHttpRequest|WebSocket|innerHTML|eval\(", source), name


def test_the_policy_of_the_page_allows_its_own_scripts_and_no_request() -> None:
    page = Page(html.render(FULL))
    (policy,) = [each["content"] for tag, each in page.elements if each.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None
    assert policy.startswith("default-src 'none'; ")
    allowed = re.findall(r"'sha256-([^']+)'", policy)
    assert allowed == [base64.b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in page.scripts[1:]]


def test_the_vendored_library_is_what_its_note_says() -> None:
    note = tomllib.loads((ASSETS / "echarts.toml").read_text())
    content = (ASSETS / note["file"]).read_bytes()
    assert hashlib.sha256(content).hexdigest() == note["sha256"]
    assert f"echarts@{note['version']}" in note["build"]
    assert note["version"].encode() in content


def test_the_page_carries_the_licenses_of_the_library() -> None:
    notices = (ASSETS / "echarts.LICENSE.txt").read_text()
    page = Page(html.render(FULL))
    assert notices in page.shown
    assert not any("open" in attributes for tag, attributes in page.elements if tag == "details")
    holders = ("Apache Software Foundation", "Baidu", "Mike Bostock", "Microsoft", "Simon Friis Vindum", "Thomas Fuchs")
    for words in ("Apache License", "BSD 3-Clause", "embeds code of others under the MIT license", *holders):
        assert words in notices, words


# What it says.


def test_the_head_says_what_the_text_report_says() -> None:
    text = Page(html.render(FULL)).text
    assert FULL.need_bytes
    assert FULL.live_peak_bytes
    assert FULL.margin_bytes
    for words in (
        "models.transformer:gpt",
        "size=gpt2-small layers=12 batch=8 seq=512",
        "policy full target h100-sxm-80gb",
        f"Need compiled {format_bytes(FULL.need_bytes)} fits",
        f"{format_bytes(FULL.margin_bytes)} left of 74.00 GiB",
        f"Live peak compiled {format_bytes(FULL.live_peak_bytes)} in backward",
        "Saved for backward counted 78.00 MiB 6.00 MiB a block",
        "Step time predicted 43.10 ms",
        "+28.6% FLOPs recomputed counted",
        "Phase backward",
        "Module Gpt/ Embed_0",
        "Source models/ transformer.py:77 (loss)",
        "to a category 100.0% to a module 98.2% to a source line 96.9%",
        "What would lower the need, each by itself predicted",
        "chunk the loss head Gpt/ lm_head −692.00 MiB",
        "The floor: no policy gets below compiled",
        "Fused attention has no known workspace",
        "Nothing else uses the device.",
    ):
        assert words in text, words


def test_the_head_of_a_program_from_a_file_leaves_out_what_is_not_known() -> None:
    settings = {"policy": "", "gemm_backend": rows.NOT_KNOWN, "xla_remat": rows.NOT_KNOWN}
    text = Page(html.render(dataclasses.replace(FULL, **settings))).text
    assert "GEMM backend" not in text
    assert "own remat" not in text


def test_a_measured_time_comes_first() -> None:
    measured = dataclasses.replace(FULL, measured_step_s=MeasuredTime(0.061, 0.060, 0.064, "NVIDIA H100", 20))
    text = Page(html.render(measured)).text
    assert "Step time measured 61.00 ms" in text
    assert "43.10 ms predicted" in text
    assert "60.00 ms to 64.00 ms, NVIDIA H100" in text


def test_the_effect_is_shown_when_it_is_known() -> None:
    assert "moves 3 buffers" in Page(html.render(dataclasses.replace(FULL, effect="moves 3 buffers"))).text


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("of version 1", "This record says how large the peak is, not what it is made of"),
        ("of a sweep", "No time line in this record. Rows of a sweep keep none"),
        ("without a time line", "No time line in this record."),
        ("without a heap trace", "The live peak is not known: there is no heap trace of all temporaries."),
        ("without temporaries", "No time line: the program has no heap trace."),
        ("without temporaries", "All of the step: the program has no temporaries that come and go."),
        ("with nothing alive", "No buffer is known to be alive at the peak."),
        ("with nothing alive", "The analyzer found no step that would lower the need."),
        ("that failed", "Failed: the process died"),
        ("of a file", "unnamed step"),
        ("that does not fit", "does not fit"),
        ("that does not fit", "5.00 MiB over 74.00 GiB"),
        ("with labels", "my label"),
    ],
)
def test_what_is_missing_is_said(name: str, words: str) -> None:
    assert words in Page(html.render(ODD[name])).text


# The data.


@pytest.mark.parametrize("record", [FULL, NONE], ids=["full", "none"])
def test_the_data_adds_up_to_the_live_peak(record: Record) -> None:
    data = Page(html.render(record)).data
    peak, total = data["peakEvent"], record.live_peak_bytes
    assert data["peak"] == total
    line = data["timeline"]
    assert sum(series[line["events"].index(peak)] for series in line["bytes"]) == total
    assert sum(data["holders"]["bytes"]) == total
    buffers = data["buffers"]
    spans = zip(buffers["bytes"], buffers["born"], buffers["dies"], strict=True)
    assert sum(size for size, born, dies in spans if born <= peak < dies) == total
    by_category = [0] * len(data["categories"])
    for size, place in zip(data["holders"]["bytes"], data["holders"]["category"], strict=True):
        by_category[place] += size
    names = [name for name, _ in data["categories"]]
    assert {name: size for name, size in zip(names, by_category, strict=True) if size} == record.categories
    assert names == [name for name in CATEGORIES if name in names]


def test_columns_are_as_long_as_each_other_and_say_what_the_record_says() -> None:
    data = Page(html.render(FULL)).data
    rows = explanation_of(FULL).buffers
    columns = data["buffers"]
    assert {len(column) for column in columns.values()} == {len(rows)}
    for name in ("module", "block", "source", "phase", "shape"):
        assert [data["strings"][place] for place in columns[name]] == [getattr(row, name) for row in rows]
    assert [data["categories"][place][0] for place in columns["category"]] == [row.category for row in rows]
    assert len(set(data["strings"])) == len(data["strings"])


def test_labels_of_the_step_have_colours_of_their_own() -> None:
    names = html_data.categories_of(ODD["with labels"])
    assert names[-2:] == ["my label", "another"]
    colours = html_data.colours_of(names)
    assert len(set(colours.values())) == len(names)


def test_text_of_a_program_cannot_become_markup() -> None:
    peak = dataclasses.replace(explanation_of(FULL).peak, module=EVIL, source=EVIL, instruction=EVIL, block=EVIL)
    buffers = tuple(dataclasses.replace(row, name=EVIL, module=EVIL) for row in explanation_of(FULL).buffers)
    holders = tuple(dataclasses.replace(row, source=EVIL, category=EVIL) for row in explanation_of(FULL).holders)
    advice = tuple(dataclasses.replace(row, kind=EVIL, what=EVIL, how=EVIL) for row in explanation_of(FULL).advice)
    evil = dataclasses.replace(
        changed(FULL, peak=peak, buffers=buffers, holders=holders, advice=advice),
        workload=EVIL, options={EVIL: EVIL}, policy=EVIL, target=EVIL, versions={EVIL: EVIL}, effect=EVIL, error=EVIL,
        warnings=(EVIL,), assumptions=(EVIL,), compile_options={EVIL: EVIL}, categories={EVIL: 5}, fits=EVIL,
        live_peak_phase=EVIL, xla_remat=EVIL, gemm_backend=EVIL,
    )  # fmt: skip
    text = html.render(evil, diff(FULL, evil), FULL)
    text.encode("utf-8")
    page, plain = Page(text), Page(html.render(FULL, diff(FULL, FULL), FULL))
    kinds = {tag for tag, _ in plain.elements} | {"strong", "details", "summary"}
    assert {tag for tag, _ in page.elements} <= kinds
    assert len(page.scripts) == 3
    assert not [name for _, attributes in page.elements for name in attributes if name.startswith("on")]
    assert page.data["buffers"]["name"][0] == EVIL
    assert page.scripts[1:] == plain.scripts[1:]


# Two records.


def test_two_records_show_what_changed() -> None:
    text = Page(html.render(FULL, diff(NONE, FULL), NONE)).text
    assert "What changed" in text
    assert "−2.04 GiB 4.42 GiB → 2.38 GiB" in text
    assert "saved activations 2.12 GiB 78.00 MiB −2.04 GiB" in text
    assert "went" in text
    assert "policy none full" in text
    assert "What changed" not in Page(html.render(FULL)).text


def test_a_diff_and_the_record_before_are_shown_each_by_itself() -> None:
    compared, overlaid = Page(html.render(FULL, diff(NONE, FULL))), Page(html.render(FULL, before=NONE))
    assert ("What changed" in compared.text, compared.data["before"]) == (True, None)
    assert "What changed" not in overlaid.text
    assert overlaid.data["before"]["bytes"]


@pytest.mark.parametrize("before", ODD.values(), ids=list(ODD))
def test_two_records_of_any_kind(before: Record) -> None:
    Page(html.render(FULL, diff(before, FULL), before))
    Page(html.render(before, diff(FULL, before), FULL))


def test_most_rows_of_a_long_diff_are_folded_away() -> None:
    many = tuple(
        dataclasses.replace(explanation_of(FULL).holders[0], module=f"m{place}", bytes=place) for place in range(100)
    )
    found = diff(changed(FULL, holders=many), FULL)
    text = html_diff.section(found)
    shown, folded = text.split(f"<details><summary>{len(found.rows) - 15} smaller changes</summary>")
    assert (shown.count('<td class="kind '), folded.count('<td class="kind ')) == (15, len(found.rows) - 15)
    few = dataclasses.replace(found, rows=found.rows[:15])
    assert "<details>" not in html_diff.section(few)


# Sizes and colours.


def test_a_page_of_a_large_program_is_small() -> None:
    record = large()
    explanation = explanation_of(record)
    assert explanation.timeline
    assert (len(explanation.buffers), len(explanation.timeline.events)) == (3000, 601)
    assert len(explanation.timeline.bytes) >= 14
    assert len(html.render(record).encode()) < 3 * MiB
    assert len(html.render(record, diff(record, record), record).encode()) < 3 * MiB


def test_a_page_is_mostly_the_library() -> None:
    library = (ASSETS / "echarts.min.js").stat().st_size
    assert library < 650_000
    assert len(html.render(FULL).encode()) < library + 200_000


def _linear(colour: str) -> np.ndarray:
    channels = np.array([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def _oklab(linear: np.ndarray) -> np.ndarray:
    cones = np.array(
        [
            [0.4122214708, 0.5363325363, 0.0514459929],
            [0.2119034982, 0.6806995451, 0.1073969566],
            [0.0883024619, 0.2817188376, 0.6299787005],
        ]
    )
    lab = np.array(
        [
            [0.2104542553, 0.7936177850, -0.0040720468],
            [1.9779984951, -2.4285922050, 0.4505937099],
            [0.0259040371, 0.7827717662, -0.8086757660],
        ]
    )
    return lab @ np.cbrt(cones @ linear)


# Machado, Oliveira, Fernandes 2009, severity 1: what a colour looks like without one kind of cone.
_SIGHT = {
    "full": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritanopia": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}


def test_every_category_has_a_colour() -> None:
    assert list(html_data.COLOURS) == list(CATEGORIES)


@pytest.mark.parametrize("sight", _SIGHT)
def test_colours_are_told_apart(sight: str) -> None:
    seen = {name: _oklab(np.clip(_SIGHT[sight] @ _linear(colour), 0, 1)) for name, colour in html_data.COLOURS.items()}
    for (one, first), (other, second) in itertools.combinations(seen.items(), 2):
        assert np.linalg.norm(first - second) >= 0.068, (one, other)
    for (one, first), (other, second) in itertools.pairwise(seen.items()):
        assert np.linalg.norm(first - second) >= 0.115, (one, other)
