"""Does `remat-kit max` give the value that compiling every one gives, and in how many compiles?

    python experiments/max_exhaustive.py [--only NAME] [--store DIR] [--results FILE]

For small models on an L4 that need not be here: the largest batch of a GPT, sequence of a Llama and image of a Vision
Transformer under a budget, for two policies each. After the search every value within NEAR steps of the answer is
compiled, and about COARSE from the smallest to half as much again: all up to the answer must fit, none beyond it.
Compiled values are kept in the store, so a run that was stopped goes on; the search counts what it asks for, wherever
it comes from. About 90 compiles of 4 s on a quiet machine.

Prints a table, writes experiments/results/max_exhaustive.json, and exits with 1 when an answer is not proved, takes
more than MOST_COMPILES compiles, or differs.
"""

import argparse
import itertools
import json
import os
import pathlib
import sys
from dataclasses import dataclass
from typing import Any

from remat_kit import _cell, _max, _sweep
from remat_kit._compile import CompileOptions
from remat_kit._pool import Pool
from remat_kit._step import parse_option
from remat_kit._store import Store

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "experiments/results/max_exhaustive.json"
NEAR = 3
COARSE = 9
MOST_COMPILES, ALLOWED = 6, 12
"""What an answer may take, and what the search is allowed, so that it could take more."""


@dataclass(frozen=True)
class Case:
    """A workload with the option to make large; `multiple_of` None lets the search find it out."""

    workload: str
    options: str
    option: str
    budget: str
    multiple_of: int | None = None
    policies: tuple[str, ...] = ("none", "full")
    target: str = "l4"


CASES = {
    "gpt batch": Case(
        "models.transformer:gpt", "size=tiny layers=3 width=256 heads=4 vocabulary=2048 seq=256", "batch", "256MiB"
    ),
    "llama seq": Case(
        "models.transformer:llama", "size=tiny width=128 mlp_width=512 batch=4", "seq", "128MiB", multiple_of=32
    ),
    "vit image": Case("models.vision:vit", "size=tiny width=128", "image", "96MiB"),
}


def compare(case: Case, policy: str, folder: pathlib.Path, jobs: int = 1) -> dict[str, Any]:
    """What the search says of one policy, and what compiling says of the values around it."""
    question = _max.Question(case.option, multiple_of=case.multiple_of, budget=case.budget, compiles=ALLOWED)
    options = tuple(parse_option(text) for text in case.options.split())
    limits, store = _sweep.Limits(jobs=jobs), Store(folder)
    with Pool() as pool:
        inspected = _sweep.inspect(pool, case.workload, options, case.target, None, limits)
        limit = _max.check_question(pool, question, case.workload, case.target, None, limits).limit_bytes
        cells = _cell.make_cells(case.workload, (*options, (case.option, 1)), [policy], [CompileOptions()], inspected)
        (found,) = _max.find_largest(cells, question, limit, store, pool, limits=limits)
        values = around(found.value, found.step) if found.value else [found.step]
        every = [cells[0].with_option(case.option, value) for value in values]
        rows = _sweep.sweep(every, store, pool, limits=limits)
    needs = {
        value: None if row.record.need_bytes is None else row.record.need_bytes + (row.record.constant_bytes or 0)
        for value, row in zip(values, rows, strict=True)
    }
    fitting = [value for value, need in needs.items() if need is not None and need <= limit]
    before = list(itertools.takewhile(lambda value: value in fitting, values))
    return {
        "workload": case.workload,
        "options": case.options,
        "target": case.target,
        "option": case.option,
        "policy": policy,
        "limit_bytes": limit,
        "kind": found.kind,
        "value": found.value,
        "step": found.step,
        "compiles": len(found.tried),
        "tried": [
            {"value": each.value, "need_bytes": each.need_bytes, "predicted_need_bytes": each.predicted_need_bytes}
            for each in found.tried
        ],
        "exhaustive": needs,
        "largest_compiled": max(before, default=None),
        "monotone": fitting == before,
        "agrees": found.kind == "proved" and found.value == max(before, default=None) and fitting == before,
    }


def _key(row: dict[str, Any]) -> tuple[str, str, str]:
    return row["workload"], row["option"], row["policy"]


def around(value: int, step: int) -> list[int]:
    """Every multiple of `step` within NEAR steps of `value`, and about COARSE up to half as much again."""
    number = value // step
    near = range(max(1, number - NEAR), number + NEAR + 1)
    coarse = range(1, number + number // 2 + 2, max(1, 3 * number // (2 * COARSE)))
    return [step * each for each in sorted({*near, *coarse})]


def main() -> int:
    """Writes and prints the comparison; 0 when all agree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(CASES))
    parser.add_argument("--store", type=pathlib.Path, default=ROOT / ".remat-kit" / "max_exhaustive")
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS)
    arguments = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.chdir(ROOT)  # for `models`
    rows = json.loads(arguments.results.read_text()) if arguments.results.exists() else []
    found = []
    for name in [arguments.only] if arguments.only else CASES:
        for policy in CASES[name].policies:
            row = compare(CASES[name], policy, arguments.store)
            found.append(row)
            tried = " ".join(str(each["value"]) for each in row["tried"])
            print(
                f"{name:12}{policy:8}{row['kind']:10}{row['value']} in {row['compiles']} compiles ({tried}); compiled: "
                f"{row['largest_compiled']} of {len(row['exhaustive'])}; {'agrees' if row['agrees'] else 'DIFFERS'}",
                flush=True,
            )
            rows = [each for each in rows if _key(each) != _key(row)] + [row]
            arguments.results.write_text(json.dumps(rows, indent=1) + "\n")
    return 0 if all(row["agrees"] and row["compiles"] <= MOST_COMPILES for row in found) else 1


if __name__ == "__main__":
    sys.exit(main())
