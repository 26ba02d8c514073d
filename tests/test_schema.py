"""docs/schema.md against the classes that it describes, and records of version 1 through every report."""

import collections.abc
import dataclasses
import json
import re
import types
import typing
from pathlib import Path

import pytest
from explanations import RECORD

from remat_kit import _diff, _explanation, _record
from remat_kit._diff import diff
from remat_kit._record import SCHEMA_VERSION, Record, load
from remat_kit._report import diff as diff_report
from remat_kit._report import explanation_markdown, html, markdown, plot, table, text

TESTS = Path(__file__).parent
SCHEMA = TESTS.parent / "docs" / "schema.md"
V1 = TESTS / "golden" / "record-v1.json"
"""As remat-kit wrote it before explanations: minimal_offloaded of GPT-2 small for an H100."""

CLASSES = {
    each.__name__: each
    for module in (_record, _explanation, _diff)
    for each in vars(module).values()
    if dataclasses.is_dataclass(each) and isinstance(each, type)
}
PLAIN = {bool: "boolean", int: "integer", float: "number", str: "string", typing.Any: "any"}
MANY = {"integer": "integers", "number": "numbers", "string": "strings", "any": "anything"}
SOURCES = {"asked", "compiled", "counted", "predicted", "measured", "data", "kit"}


def json_type(annotation: object) -> str:
    """The type of a field as JSON has it."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (types.UnionType, typing.Union):
        return " or ".join("null" if each is type(None) else json_type(each) for each in inner)
    if origin is tuple:
        return f"list of {plural(json_type(inner[0]))}"
    if origin in (dict, collections.abc.Mapping):
        return f"object of {plural(json_type(inner[1]))}"
    if isinstance(annotation, type) and annotation.__name__ in CLASSES:
        return f"[{annotation.__name__}](#{annotation.__name__.lower()})"
    return PLAIN[annotation]  # pyright: ignore[reportArgumentType]


def plural(kind: str) -> str:
    return MANY.get(kind, f"lists of {kind.removeprefix('list of ')}" if kind.startswith("list of ") else kind)


def documented(name: str) -> list[list[str]]:
    """The rows of a class's table."""
    found = re.search(rf"^### {name}\n(.*?)(?=^##|\Z)", SCHEMA.read_text(), re.MULTILINE | re.DOTALL)
    assert found, f"docs/schema.md has no section {name}"
    lines = [line for line in found[1].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_every_field_is_documented_with_its_type(name: str) -> None:
    hints = typing.get_type_hints(CLASSES[name])
    expected = [(f"`{field.name}`", json_type(hints[field.name])) for field in dataclasses.fields(CLASSES[name])]
    if name == "RowChange":
        expected += [("`kind`", "string"), ("`difference_bytes`", "integer")]  # Diff.to_json adds them
    rows = documented(name)
    assert [(row[0], row[1]) for row in rows] == expected
    assert all(row[2] and row[-1] for row in rows), "a unit, and a meaning"


def test_every_section_is_a_class() -> None:
    assert set(re.findall(r"^### (\w+)$", SCHEMA.read_text(), re.MULTILINE)) == set(CLASSES)


def test_every_figure_of_a_record_says_where_it_comes_from() -> None:
    for name, _, unit, source, _, _ in documented("Record"):
        assert source in SOURCES, name
        assert (unit == "bytes") == ("_bytes" in name or name == "`categories`"), name


def test_the_column_of_version_1_is_what_a_file_of_version_1_has() -> None:
    fields = set(json.loads(V1.read_text()))
    rows = documented("Record")
    assert {row[0].strip("`") for row in rows if row[4] != "no"} == fields
    assert {row[4] for row in rows} == {"same", "no", "other"}


def test_the_version_is_the_one_that_is_described() -> None:
    assert f"`schema_version` {SCHEMA_VERSION}," in SCHEMA.read_text()
    assert f"`diff_version` {_diff.DIFF_VERSION}." in SCHEMA.read_text()


def test_every_category_is_listed() -> None:
    listed = re.findall(r"^- \*\*(.+?)\*\*: (.+)$", SCHEMA.read_text(), re.MULTILINE)
    assert listed == list(_explanation.CATEGORIES.items())


# A file of version 1.


@pytest.fixture
def old() -> Record:
    (record,) = load(V1.read_text())
    return record


def test_version_1_is_read(old: Record) -> None:
    assert (old.schema_version, old.explanation, old.policy) == (1, None, "minimal_offloaded")
    assert sum(old.categories.values()) == old.live_peak_bytes


@pytest.mark.parametrize(
    "render",
    [
        text.render,
        explanation_markdown.render,
        html.render,
        lambda record: table.render([record]),
        lambda record: markdown.render([record]),
        lambda record: plot.render([record], ".svg").decode(),
        lambda record: diff_report.text(diff(record, RECORD)),
        lambda record: diff_report.markdown(diff(RECORD, record)),
        lambda record: html.render(RECORD, diff(record, RECORD), record),
    ],
    ids=["text", "markdown of one", "html", "table", "markdown", "plot", "diff", "diff in markdown", "diff in html"],
)
def test_version_1_is_rendered(render: typing.Callable[[Record], str], old: Record) -> None:
    assert "minimal_offloaded" in render(old)


def test_version_1_keeps_its_categories_and_its_version(old: Record) -> None:
    assert "made in forward" in text.render(old)
    (again,) = load(_record.dump(old))
    assert again == old
