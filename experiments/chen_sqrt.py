"""How do saved bytes grow with depth: none, per layer, √N (Chen et al. 2016, arXiv 1604.06174)?

    python experiments/chen_sqrt.py [--compile] > experiments/results/chen_sqrt.json

A GPT-style stack (`models.transformer:gpt`, size tiny, scanned, no dropout) of 4 to 256 blocks is traced under each
policy. Counted on the jaxpr: the bytes that the blocks keep from forward to backward, without those of the loss head,
which are the same at every depth; what is alive at once when a part of the stack has run again, those bytes and the
ones inside the part; and the FLOPs that run again, as a share of the forward pass. The exponent is the slope of
log(bytes) over log(depth). `--compile` adds what XLA needs for the step on the CPU at some of the depths, parameters
and optimizer included. Prints the result, and exits with 1 when √N's exponent is not 0.5 ± 0.05, or when it runs more
than one forward again.
"""

import argparse
import json
import math
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from models.transformer import gpt
from remat_kit import Workload, analyze, compile_step, get_policy, get_target, trace
from remat_kit._jaxpr import flops_of, num_matmuls, walk
from remat_kit._layering import RECURSIVE, balanced
from remat_kit._phase import FORWARD
from remat_kit._trace import TracedStep

RESULTS = pathlib.Path(__file__).parent / "results"
DEPTHS = (4, 8, 16, 32, 64, 128, 256)
PUBLISHED_DEPTH = 1000
POLICIES = ("none", "full", "segments(sqrt)", "segments(auto)", "segments(sqrt,full)", "segments(recursive)")
COMPILED_DEPTHS, COMPILED = (16, 64), ("none", "full", "segments(sqrt)", "segments(sqrt,full)")
SQRT, ALLOWED = "segments(sqrt)", 0.05
OPTIONS = {"size": "tiny", "stack": "scan", "dropout": 0.0, "batch": 8}
PUBLISHED = {
    "claim": "a ResNet of 1,000 layers on ImageNet: 48 GB to 7 GB, 30% more time",
    "source": "Chen et al. 2016, abstract",
    "depth": PUBLISHED_DEPTH,
    "memory_ratio": round(48 / 7, 2),
    "time_overhead": 0.30,
    "growth": "O(sqrt(n)) bytes at one more forward, O(log n) at O(n log n)",
}


def exponent(depths: Sequence[int], sizes: Sequence[int]) -> float:
    """The slope of log(size) over log(depth), by least squares."""
    return float(np.polyfit(np.log(depths), np.log(sizes), 1)[0])


def traced(policy: str, layers: int) -> TracedStep:
    """The step of so many blocks under a policy, traced for the CPU."""
    return trace(gpt(policy, layers=layers, **OPTIONS), get_target("cpu"), get_policy(policy))


def forward_flops(step: TracedStep) -> int:
    """FLOPs of the forward pass, matmuls as they are counted everywhere."""
    return sum(
        each.executions * flops_of(each.eqn)
        for each in walk(step.traced.jaxpr)
        if num_matmuls(each.eqn) and each.phase == FORWARD
    )


def kept_by_blocks(step: TracedStep) -> int:
    """Bytes that the blocks keep from forward to backward on the device."""
    return sum(value.bytes for value in step.saved.values if value.block and not value.on_host)


def row(policy: str, layers: int, per_block: int, border: int) -> dict[str, Any]:
    """What is counted of one policy at one depth.

    `per_block` are the bytes that a block without a checkpoint keeps, `border` those that go from block to block.
    """
    step = traced(policy, layers)
    kept = kept_by_blocks(step)
    return {
        "policy": policy,
        "layers": layers,
        "saved_bytes": kept,
        "alive_bytes": kept + inside(policy, layers, kept, per_block, border),
        "recomputed_forwards": round(step.work.recomputed_flops / forward_flops(step), 4),
        "flops_overhead": round(step.work.recomputed_flops / (step.work.flops - step.work.recomputed_flops), 4),
    }


def inside(name: str, layers: int, kept: int, per_block: int, border: int) -> int:
    """Bytes alive beside the saved ones when the largest part of a stack has run again, just before its backward."""
    policy = get_policy(name)
    if name == "none":
        return 0
    if policy.layering is None:
        return per_block
    if policy.layering.count == RECURSIVE:
        borders, size = 0, max(policy.layering.sizes(layers))
        while size > 1:
            division = policy.layering.sizes(size)
            borders, size = borders + len(division), max(division)
        return borders * border + per_block
    # The bytes kept at the borders of the parts tell how many there are.
    size = max(balanced(layers, kept // border))
    return size * per_block if policy.of_block.name == "none" else size * border + per_block


def compiled_row(policy: str, layers: int) -> dict[str, Any]:
    """What XLA needs for the step on the CPU."""
    compiled = compile_step(traced(policy, layers))
    record = analyze(compiled, Workload("models.transformer:gpt"), get_policy(policy))
    return {"policy": policy, "layers": layers, "need_bytes": record.need_bytes, "temp_bytes": record.temp_bytes}


def run(depths: Sequence[int], policies: Sequence[str] = POLICIES) -> dict[str, Any]:
    """All that is traced, the fits, and the published claim beside ours."""
    one = traced("none", depths[0]).saved.device_bytes_per_block or 0
    border = traced("full", depths[0]).saved.device_bytes_per_block or 0
    rows = [row(policy, layers, one, border) for policy in policies for layers in depths]
    of = {policy: [each for each in rows if each["policy"] == policy] for policy in policies}
    exponents = {
        policy: {
            "saved": round(exponent(depths, [each["saved_bytes"] for each in of[policy]]), 3),
            "alive": round(exponent(depths, [each["alive_bytes"] for each in of[policy]]), 3),
        }
        for policy in policies
    }
    return {
        "workload": "models.transformer:gpt " + " ".join(f"{name}={value}" for name, value in OPTIONS.items()),
        "block_bytes_without_checkpoint": one,
        "block_input_bytes": border,
        "exponents": exponents,
        "rows": rows,
    }


def beside_the_claim() -> dict[str, Any]:
    """The same figures for as many blocks as the published claim has layers."""
    one = traced("none", 4).saved.device_bytes_per_block or 0
    border = traced("full", 4).saved.device_bytes_per_block or 0
    none, ours = (row(policy, PUBLISHED_DEPTH, one, border) for policy in ("none", SQRT))
    return {
        "published": PUBLISHED,
        "ours": {
            "depth": PUBLISHED_DEPTH,
            "memory_ratio": round(none["alive_bytes"] / ours["alive_bytes"], 2),
            "saved_ratio": round(none["saved_bytes"] / ours["saved_bytes"], 2),
            "flops_overhead": ours["flops_overhead"],
        },
        "difference": (
            "ours counts activations of the blocks alone, theirs is all that the process took, with parameters, "
            "convolution workspaces and the input; ours is FLOPs, theirs measured time"
        ),
    }


def table(result: dict[str, Any]) -> str:
    """The saved bytes in KiB by depth, with the exponents and the forwards that run again, as Markdown."""
    policies = list(result["exponents"])
    depths = sorted({each["layers"] for each in result["rows"]})
    cells = {(each["policy"], each["layers"]): each for each in result["rows"]}
    header = ["policy", *map(str, depths), "exponent", "alive at once", "forwards again"]
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    for policy in policies:
        sizes = [f"{cells[policy, depth]['saved_bytes'] / 1024:,.0f}" for depth in depths]
        fits = result["exponents"][policy]
        most = max(cells[policy, depth]["recomputed_forwards"] for depth in depths)
        lines.append(f"| {' | '.join([policy, *sizes, str(fits['saved']), str(fits['alive']), f'{most:.2f}'])} |")
    return "\n".join(lines)


def is_sqrt(result: dict[str, Any]) -> bool:
    """Whether √N's bytes grow with the square root of the depth, and at most one forward runs again."""
    again = max(each["recomputed_forwards"] for each in result["rows"] if each["policy"] == SQRT)
    return math.isclose(result["exponents"][SQRT]["saved"], 0.5, abs_tol=ALLOWED) and again <= 1


def main() -> int:
    """0 when √N is what it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile", action="store_true", help="also what XLA needs on the CPU, at some depths")
    arguments = parser.parse_args()
    result = run(DEPTHS) | {"claim": beside_the_claim()}
    if arguments.compile:
        result["compiled"] = [compiled_row(policy, layers) for policy in COMPILED for layers in COMPILED_DEPTHS]
    print(json.dumps(result, indent=1))
    print(table(result), file=sys.stderr)
    return 0 if is_sqrt(result) else 1


if __name__ == "__main__":
    sys.exit(main())
