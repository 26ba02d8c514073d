"""What reports in Markdown are put together from: text that is no markup, tables, details that are folded away."""

from collections.abc import Iterable, Sequence


def escape(content: str) -> str:
    """`content` as Markdown shows it: nothing in it is markup, and it does not end a cell of a table."""
    for character in "\\|*_`<>[]":
        content = content.replace(character, f"\\{character}")
    return " ".join(content.split())


def code(content: str) -> str:
    """`content` in the letters of code, as it is; also in a cell of a table."""
    content = " ".join(content.split()).replace("|", "\\|")
    return f"`{content}`" if content and "`" not in content else escape(content)


def table(heads: Sequence[str], cells: Iterable[Sequence[str]], left: int) -> list[str]:
    """A table whose first `left` columns are aligned to the left. Cells are Markdown already."""
    line = ["---"] * left + ["---:"] * (len(heads) - left)
    return [f"| {' | '.join(row)} |" for row in (heads, line, *cells)]


def details(summary: str, body: Sequence[str]) -> list[str]:
    """`body`, folded away behind `summary`."""
    return ["", f"<details><summary>{summary}</summary>", "", *body, "", "</details>"]


def fenced(content: str) -> list[str]:
    """`content` as it is."""
    return ["```", *content.strip("\n").splitlines(), "```"]
