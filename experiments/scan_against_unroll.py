"""Why do the predictions of the same model scanned and unrolled differ, and which instructions make the difference?

    python experiments/scan_against_unroll.py [--policy full] [key=value ...]

Compiles both stacks of the reference GPT for an H100 that need not be here, groups the kernels of both by phase and
by the operation that they come from, and lists the groups whose predicted times differ most, each with the
instruction that costs most in it. The table is kept in experiments/results/scan_against_unroll.md.
"""

import argparse
import collections
import os
import pathlib
import sys

import remat_kit
from remat_kit._hlo.module import Module, phase
from remat_kit._hlo.proto import parse
from remat_kit._hlo.roofline import Prediction, Row, predict
from remat_kit._step import parse_option

ROOT = pathlib.Path(__file__).resolve().parent.parent
TARGET = "h100-sxm-80gb"
OUT = ROOT / "experiments/results/scan_against_unroll.md"
NUM_GROUPS = 12


def prediction(stack: str, policy: str, options: list[str]) -> Prediction:
    """The predicted step of the reference GPT with its blocks in a scan or unrolled."""
    target = remat_kit.get_target(TARGET)
    workload = remat_kit.Workload("models.transformer:gpt", (*map(parse_option, options), ("stack", stack)))
    step = workload.build(remat_kit.get_policy(policy), target.chip.platform)
    compiled = remat_kit.compile_step(remat_kit.trace(step, target))
    return predict(Module.from_proto(parse(compiled.hlo_proto)), target.chip)


def groups(predicted: Prediction) -> dict[tuple[str, str, str], list[Row]]:
    """Rows by (phase, kind, last part of JAX's name): what two programs of one model have in common."""
    found: dict[tuple[str, str, str], list[Row]] = collections.defaultdict(list)
    for row in predicted.rows:
        found[phase(row.op_name), row.kind, row.op_name.rsplit("/", 1)[-1]].append(row)
    return found


def total(rows: list[Row]) -> float:
    """Seconds that the step waits for `rows`."""
    return sum(row.exposed_s * row.executions for row in rows)


def dearest(rows: list[Row]) -> str:
    """The instruction among `rows` that costs most, with how often it runs and its bytes."""
    if not rows:
        return "-"
    row = max(rows, key=lambda row: row.exposed_s * row.executions)
    return f"`{row.name}` x {row.executions}, {row.bytes / 2**20:,.1f} MiB"


def compare(scanned: Prediction, unrolled: Prediction) -> str:
    """The Markdown table of the groups that differ most, and how much of the difference they explain."""
    by_scan, by_unroll = groups(scanned), groups(unrolled)
    keys = {*by_scan, *by_unroll}
    differences = {key: total(by_scan.get(key, [])) - total(by_unroll.get(key, [])) for key in keys}
    largest = sorted(keys, key=lambda key: -abs(differences[key]))[:NUM_GROUPS]
    lines = [
        "| phase | kind | operation | scanned ms | unrolled ms | difference | dearest, scanned | dearest, unrolled |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for key in largest:
        scan_rows, unroll_rows = by_scan.get(key, []), by_unroll.get(key, [])
        times = f"{total(scan_rows) * 1e3:.2f} | {total(unroll_rows) * 1e3:.2f} | {differences[key] * 1e3:+.2f}"
        lines.append(f"| {' | '.join(key)} | {times} | {dearest(scan_rows)} | {dearest(unroll_rows)} |")
    whole = scanned.seconds - unrolled.seconds
    shown = sum(differences[key] for key in largest)
    return (
        f"Predicted: scanned {scanned.seconds * 1e3:.2f} ms, unrolled {unrolled.seconds * 1e3:.2f} ms, "
        f"difference {whole * 1e3:+.2f} ms; the groups below make {shown * 1e3:+.2f} ms of it.\n\n"
    ) + "\n".join(lines)


def main() -> int:
    """Writes and prints the table; 0 when both stacks compiled."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("options", nargs="*", metavar="key=value")
    parser.add_argument("--policy", default="full")
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT))  # for `models`
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    options = arguments.options or ["size=gpt2-small", "layers=6"]
    text = compare(*(prediction(stack, arguments.policy, options) for stack in ("scan", "unroll")))
    title = f"# Scanned against unrolled: GPT {' '.join(options)}, policy {arguments.policy}, {TARGET}"
    OUT.write_text(f"{title}\n\n{text}\n")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
