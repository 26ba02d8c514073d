"""What does each policy cost on a mesh: GPT 22B under tensor and sequence parallelism, Llama 7B under FSDP?

    python experiments/sharded_sweep.py [--only NAME,...] [--layers N] [--results FOLDER] [--render]

Runs the sweeps below for GPUs that need not be there and keeps their records as data in experiments/results/, one JSON
file each, with all tables in sharded_sweep.md. `--layers` tries smaller models, `--render` makes the tables again from
the kept records, without compiling. What the store already has is not compiled again.
"""

import argparse
import os
import pathlib
import sys
from dataclasses import dataclass

from remat_kit import Record, _record
from remat_kit._communication import counts
from remat_kit._report import markdown
from remat_kit._units import format_seconds
from remat_kit.cli import main as remat_kit

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "experiments/results"


@dataclass(frozen=True)
class Sweep:
    """A workload with its options, on a mesh of a described GPU, under some policies."""

    workload: tuple[str, ...]
    target: str
    mesh: str
    policies: str


TENSOR = "none,full,selective_attention,save_reduced,dots_with_no_batch_dims_saveable,minimal_with_context"
FSDP = (
    "none,full,save_gathered_weights,attention_kernel_saveable,save_reduced,dots_with_no_batch_dims_saveable,"
    "save_gathered_weights|attention_kernel_saveable"
)
# Table 3 of Korthikanti et al. 2022: 48 layers of width 6144 on eight GPUs, micro batch 4, dropout 0.1.
GPT = ("models.transformer:gpt", "size=22b")
# A sequence of 4096 tokens on each GPU.
LLAMA = ("models.transformer:llama", "size=llama-7b", "attention=fused")
SWEEPS = {
    "gpt-22b-tensor": Sweep(GPT, "a100-sxm-80gb", "tensor=8", TENSOR),
    "gpt-22b-sequence": Sweep((*GPT, "sequence_parallel=true"), "a100-sxm-80gb", "tensor=8", TENSOR),
    "llama-7b-fsdp-8": Sweep((*LLAMA, "batch=8"), "h100-sxm-80gb", "fsdp=8", FSDP),
    "llama-7b-fsdp-64": Sweep((*LLAMA, "batch=64"), "h100-sxm-80gb", "fsdp=64", FSDP),
}


TIMEOUT_S = 3600
"""Of one policy: with 48 layers and dropout XLA takes a minute, and many on a busy machine."""
OVERLAP = "xla_gpu_enable_latency_hiding_scheduler=true"
"""What training jobs switch on: without it XLA waits for almost every collective where it starts it."""


def sweep(name: str, layers: int | None = None) -> int:
    """The exit status of one sweep; its records are in RESULTS."""
    chosen = SWEEPS[name]
    fewer = [f"layers={layers}"] if layers else []
    outputs = ["--json", f"{RESULTS / name}.json", "--force"]
    where = ["--target", chosen.target, "--mesh", chosen.mesh, "--policies", chosen.policies]
    limits = ["--xla-option", OVERLAP, "--timeout", str(TIMEOUT_S)]
    return remat_kit(["sweep", *chosen.workload, *fewer, *where, *limits, *outputs])


def render() -> None:
    """Tables from the records in RESULTS."""
    parts = [
        "# Policies on a mesh\n",
        "Rendered from the records beside this file. Bytes and times are one device's.\n",
    ]
    for name, chosen in SWEEPS.items():
        path = RESULTS / f"{name}.json"
        if not path.exists():
            continue
        records = _record.load(path.read_text())
        options = " ".join(f"{key}={value}" for key, value in records[0].options.items())
        where = f"on {chosen.target}, mesh {chosen.mesh}, {OVERLAP}"
        parts += [f"## {name}\n", f"`{chosen.workload[0]} {options}` {where}, as data in [{path.name}]({path.name})\n"]
        parts += [markdown.render(records), collectives_table(records)]
    (RESULTS / "sharded_sweep.md").write_text("\n".join(parts))


def collectives_table(records: list[Record]) -> str:
    """Markdown: for each policy how often each collective runs, how long, and what it hides."""
    compiled = [record for record in records if not record.error]
    kinds = sorted({key for record in compiled for key in counts(record.collectives)}, key=lambda key: key[::-1])
    heads = ["policy", *(f"{kind}, {phase}" for kind, phase in kinds), "collectives", "exposed", "recompute hidden",
             "recompute exposed"]  # fmt: skip
    lines = ["Collectives a step (compiled), their seconds and those of recomputing kernels (predicted)\n"]
    lines += [f"| {' | '.join(heads)} |", f"| --- |{' ---: |' * (len(heads) - 1)}"]
    for record in compiled:
        found = counts(record.collectives)
        seconds = (
            sum(each.seconds or 0.0 for each in record.collectives),
            sum(each.exposed_s or 0.0 for each in record.collectives),
            record.recompute_hidden_s or 0.0,
            record.recompute_exposed_s or 0.0,
        )
        name = record.policy.replace("|", "\\|")
        cells = [name, *(str(found.get(key, 0)) for key in kinds), *map(format_seconds, seconds)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """0 when every cell of every sweep that was asked for has its row."""
    global RESULTS
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(SWEEPS), help="names of sweeps, separated by commas")
    parser.add_argument("--layers", type=int, help="fewer layers than the models have, to try it")
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS, help="where to keep records and tables")
    parser.add_argument("--render", action="store_true", help="only render the kept records again")
    asked = parser.parse_args(arguments)
    unknown = sorted(set(asked.only.split(",")) - SWEEPS.keys())
    if unknown:
        parser.error(f"there is no sweep {unknown[0]!r}. Sweeps: {', '.join(SWEEPS)}")
    if asked.layers and asked.results == RESULTS:
        parser.error("--layers is for trying it. Name another folder with --results, so that the kept records stay.")
    RESULTS = asked.results.resolve()
    RESULTS.mkdir(exist_ok=True, parents=True)
    status = 0
    if not asked.render:
        os.chdir(ROOT)  # a sweep imports `models` from the current directory
        for name in asked.only.split(","):
            status = max(status, sweep(name, asked.layers))
    render()
    return status


if __name__ == "__main__":
    sys.exit(main())
