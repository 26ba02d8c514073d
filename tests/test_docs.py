"""The README shows real output: each block is rendered again from kept records and tables, and compared.

REMAT_KIT_GOLDEN=write writes the blocks anew.
"""

import os
import pathlib
import re

import pytest

from remat_kit import CHIPS, POLICIES, Plan
from remat_kit._record import load
from remat_kit._report import plan as plan_report
from remat_kit._report import table, text

ROOT = pathlib.Path(__file__).parent.parent
README = ROOT / "README.md"
RECORDS = ROOT / "experiments/results/gpt2-small.json"
PLAN = ROOT / "experiments/results/gpt2-small-plan.json"


def _policies() -> str:
    rows = [f"| `{policy.name}` | {policy.summary} |" for policy in POLICIES.values()]
    return "\n".join(["| policy | what it does |", "|---|---|", *rows])


def _targets() -> str:
    return ", ".join(f"`{name}`" for name in CHIPS) + ", `cpu`, `attached`"


def _fenced(content: str) -> str:
    lines = [line.rstrip() for line in content.strip("\n").splitlines()]
    return "\n".join(["```", *lines, "```"])


def _sweep() -> str:
    return _fenced(table.render(load(RECORDS.read_text()), 150))


def _analyze() -> str:
    (record,) = (record for record in load(RECORDS.read_text()) if record.policy == "selective_attention")
    return _fenced(text.render(record))


def _plan() -> str:
    return _fenced(plan_report.render(Plan.loads(PLAN.read_text())))


BLOCKS = {"policies": _policies, "targets": _targets, "sweep": _sweep, "analyze": _analyze, "plan": _plan}


@pytest.mark.parametrize("name", BLOCKS)
def test_readme_shows_what_the_code_prints(name):
    readme = README.read_text()
    pattern = re.compile(rf"(<!-- {name} -->\n)(.*?)(\n<!-- end -->)", re.DOTALL)
    found = pattern.search(readme)
    assert found, f"README.md has no block {name}"
    expected = BLOCKS[name]()
    if os.environ.get("REMAT_KIT_GOLDEN") == "write":
        README.write_text(pattern.sub(lambda match: match[1] + expected + match[3], readme))
        return
    assert found[2] == expected


def test_the_readme_sweeps_what_the_makefile_sweeps():
    makefile = (ROOT / "Makefile").read_text()
    listed = re.search(r"^POLICIES := (.*)$", makefile, re.MULTILINE)
    assert listed
    assert listed[1].split(",") == [record.policy for record in load(RECORDS.read_text())]


def test_links_in_the_documents_lead_somewhere():
    for document in ROOT.glob("*.md"):
        for link in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
            assert (ROOT / link).exists(), f"{document.name} links to {link}"
