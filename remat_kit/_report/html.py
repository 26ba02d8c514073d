"""The report of one record, or of two, as one HTML file that opens offline: text and tables here, charts in assets/."""

import base64
import hashlib
import re
from functools import cache
from html import escape
from pathlib import Path

from remat_kit._diff import Diff
from remat_kit._record import Record
from remat_kit._report import html_communication, html_data, html_diff, html_parts

_ASSETS = Path(__file__).parent / "assets"
"""echarts.min.js is a custom build of Apache ECharts; echarts.toml says of which version and how."""
_SCRIPTS = ("page.js", "timeline.js", "modules.js", "buffers.js")


def render(record: Record, diff: Diff | None = None, before: Record | None = None) -> str:
    """The file's text. `diff` is shown as what changed, `before` as a dashed line over the time line.

    Everything is inside: no request leaves the page, and its content security policy forbids any. Text is readable
    without JavaScript; the time line, the map of modules and the table of buffers need it.
    """
    library, script = _asset("echarts.min.js"), _script()
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src {_hashes(library, script)}"
    changes, why, charts = html_diff.section(diff), html_parts.why(record), _charts(record)
    sent = html_communication.section(record)
    parts = {
        "title": html_parts.title(record),
        "policy": policy,
        "style": _asset("report.css"),
        "links": _links(changes + why + charts + sent),
        "head": html_parts.head(record),
        "changes": changes,
        "why": why,
        "charts": charts,
        "notes": sent + html_parts.notes(record),
        "licenses": escape(_asset("echarts.LICENSE.txt"), quote=False),
        "data": html_data.embed(html_data.payload(record, before)),
        "library": library,
        "script": script,
    }
    # In one pass: what is filled in is never searched again.
    page = re.sub(r"<!--\{(\w+)\}-->", lambda match: parts[match[1]], _asset("report.html"))
    # JSON can hold half a surrogate pair, a file cannot.
    return page.encode("utf-8", "replace").decode("utf-8")


@cache
def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


@cache
def _script() -> str:
    """The scripts as one, in a function: their names do not become those of the window."""
    return f'"use strict";\n(() => {{\n{"\n".join(map(_asset, _SCRIPTS))}}})();\n'


def _hashes(*scripts: str) -> str:
    digests = (hashlib.sha256(script.encode()).digest() for script in scripts)
    return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)


def _links(body: str) -> str:
    sections = (("changes", "What changed"), ("why", "Why"), ("timeline", "Over the step"), ("modules", "By module"),
                ("buffers", "Buffers"), ("collectives", "Collectives"), ("notes", "Notes"))  # fmt: skip
    shown = [(name, words) for name, words in sections if name == "notes" or f'<section id="{name}"' in body]
    return "".join(f'<a href="#{name}">{words}</a>' for name, words in shown)


def _charts(record: Record) -> str:
    """The places that the scripts fill; what a record lacks is said instead."""
    explanation = record.explanation
    if explanation is None:
        return ""
    again = "Rows of a sweep keep none; <code>remat-kit analyze</code> with <code>--json</code> does."
    timeline = _asset("timeline.html")
    if explanation.peak.event < 0:
        timeline = '<p class="empty">No time line: the program has no heap trace.</p>'
    elif explanation.timeline is None or not explanation.timeline.events:
        timeline = f'<p class="empty">No time line in this record. {again}</p>'
    places = {
        "timeline": ("Over the step", timeline),
        "modules": ("By module", _asset("modules.html")),
        "buffers": ("Buffers", _asset("buffers.html")),
    }
    if not explanation.holders and not explanation.buffers:
        nothing = '<p class="empty">No buffer is known to be alive at the peak.</p>'
        places |= {name: (places[name][0], nothing) for name in ("modules", "buffers")}
    mark = html_parts.source("compiled")
    return "".join(
        f'<section id="{name}" class="section"><h2>{words} {mark}</h2>{body}</section>'
        for name, (words, body) in places.items()
    )
