"""What does each policy cost on the reference transformers, for two GPUs that need not be there?

    python experiments/policy_sweep.py [--render]

Runs the sweeps below and keeps their records as data in experiments/results/, one JSON file each, with the plot beside
it and all tables in policy_sweep.md. `--render` makes tables and plots
again from the kept records, without compiling. What the store already has is not compiled again.
"""

import argparse
import os
import pathlib
import sys

from remat_kit import _record
from remat_kit._report import markdown, plot
from remat_kit.cli import main as remat_kit

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "experiments/results"
POLICIES = (
    "none,full,selective_attention,dots_saveable,dots_with_no_batch_dims_saveable,minimal_with_context,"
    "save_out_proj,minimal_offloaded"
)
FUSED = ",offload_block_input,attention_kernel_saveable,attention_kernel_saveable|save(query_proj,key_proj,value_proj)"
GPT = ("models.transformer:gpt", "size=gpt2-small", "batch=8", "seq=1024")
LLAMA = ("models.transformer:llama", "size=llama-1b", "layers=8", "batch=4", "seq=4096", "attention=fused")
SWEEPS = {
    "gpt2-small": (GPT, "h100-sxm-80gb", POLICIES),
    "gpt2-small-a100": (GPT, "a100-sxm-80gb", POLICIES),
    "llama-1b-fused": (LLAMA, "h100-sxm-80gb", POLICIES + FUSED),
}


def sweep(name: str) -> int:
    """The exit status of one sweep; its records and plot are in RESULTS."""
    workload, target, policies = SWEEPS[name]
    outputs = ["--json", f"{RESULTS / name}.json", "--plot", f"{RESULTS / name}.png", "--force"]
    return remat_kit(["sweep", *workload, "--target", target, "--policies", policies, *outputs])


def render() -> None:
    """Tables and plots from the records in RESULTS."""
    parts = ["# Policies of the reference transformers\n", "Rendered from the records beside this file.\n"]
    for name, (workload, target, _) in SWEEPS.items():
        path = RESULTS / f"{name}.json"
        records = _record.load(path.read_text())
        parts += [f"## {name}\n", f"`{' '.join(workload)}` on {target}, as data in [{path.name}]({path.name})\n"]
        parts += [markdown.render(records), f"![need against step time]({name}.png)\n"]
        path.with_suffix(".png").write_bytes(plot.render(records, ".png"))
    (RESULTS / "policy_sweep.md").write_text("\n".join(parts))


def main() -> int:
    """0 when every cell of every sweep has its row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--render", action="store_true", help="only render the kept records again")
    status = 0
    if not parser.parse_args().render:
        RESULTS.mkdir(exist_ok=True)
        os.chdir(ROOT)  # a sweep imports `models` from the current directory
        for name in SWEEPS:
            status = max(status, sweep(name))
    render()
    return status


if __name__ == "__main__":
    sys.exit(main())
