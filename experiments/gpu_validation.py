"""How true are the figures? On a machine with a GPU: prediction against allocator and clock.

For each workload and policy, one process compiles the step twice, for the attached GPU and for the same GPU as
a described target that need not be there, then runs it: once for the allocator's peak, then for the time.

    PYTHONPATH=. python experiments/gpu_validation.py [--minutes 7.5] [--out experiments/results/gpu_validation.json]

It needs nothing but JAX with CUDA and this checkout. The result is one JSON file and a table; whatever the time
does not suffice for is listed as not run.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import time
from typing import Any

WORKLOADS: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT naive scanned": ("models.transformer:gpt", {"size": "gpt2-small", "batch": 8, "seq": 1024}),
    "GPT naive unrolled": (
        "models.transformer:gpt",
        {"size": "gpt2-small", "layers": 6, "batch": 8, "seq": 1024, "stack": "unroll"},
    ),
    "Llama fused scanned": (
        "models.transformer:llama",
        {"size": "llama-1b", "layers": 8, "batch": 4, "seq": 4096, "attention": "fused"},
    ),
}
POLICIES = ("none", "full", "selective_attention", "dots_saveable", "minimal_with_context", "minimal_offloaded")
ROOT = pathlib.Path(__file__).resolve().parent.parent
MARK = "GPU_VALIDATION_RESULT "


def run_cell(workload: str, policy: str, rounds: int) -> dict[str, Any]:
    """Predicted and measured figures of one workload under one policy, in this process."""
    import remat_kit

    spec, options = WORKLOADS[workload]
    attached = remat_kit.get_target("attached")
    step = remat_kit.Workload(spec, tuple(options.items())).build(remat_kit.get_policy(policy), attached.chip.platform)
    here = remat_kit.compile_step(remat_kit.trace(step, attached))
    source = remat_kit.Workload(spec, tuple(options.items()))
    result: dict[str, Any] = {"workload": workload, "policy": policy, "device": attached.chip.title}
    result["attached"] = remat_kit.analyze(here, source, policy).to_json()
    args = remat_kit.real_args(step)
    result["allocator_peak_bytes"] = remat_kit.allocator_peak(here, args)
    del args
    ((_, measured),) = remat_kit.measure_interleaved({policy: here}, remat_kit.real_args(step), rounds=rounds)
    result["measured_step_s"] = {"median": measured.median, "p10": measured.p10, "p90": measured.p90}
    if attached.chip.name in remat_kit.CHIPS:
        described = remat_kit.get_target(attached.chip.name)
        compiled = remat_kit.compile_step(remat_kit.trace(step, described))
        result["described"] = remat_kit.analyze(compiled, source, policy).to_json()
    return result


def spawn(workload: str, policy: str, rounds: int, seconds: float) -> dict[str, Any]:
    """`run_cell` in a process of its own, for the allocator's peak and against crashes."""
    command = [sys.executable, __file__, "--cell", workload, policy, "--rounds", str(rounds)]
    environment = dict(os.environ, PYTHONPATH=f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds, env=environment, cwd=ROOT, check=False
        )
    except subprocess.TimeoutExpired:
        return {"workload": workload, "policy": policy, "error": f"not done within {seconds:.0f} s"}
    for line in done.stdout.splitlines():
        if line.startswith(MARK):
            return json.loads(line.removeprefix(MARK))
    last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    return {"workload": workload, "policy": policy, "error": last}


def table(results: list[dict[str, Any]]) -> str:
    """The results as Markdown, one row a workload and policy."""
    lines = [
        "| workload | policy | need, described GPU (compiled) | need, attached (compiled) | allocator peak (measured) "
        "| step, predicted | step, measured | predicted / measured |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in results:
        if "error" in row:
            lines.append(f"| {row['workload']} | {row['policy']} | {row['error']} | | | | | |")
            continue
        attached, described = row["attached"], row.get("described") or {}
        predicted, measured = attached["predicted_step_s"], row["measured_step_s"]["median"]
        needs = f"{mib(described.get('need_bytes'))} | {mib(attached['need_bytes'])}"
        times = f"{predicted * 1e3:.2f} ms | {measured * 1e3:.2f} ms | {predicted / measured:.2f}"
        peak = mib(row["allocator_peak_bytes"])
        lines.append(f"| {row['workload']} | {row['policy']} | {needs} | {peak} | {times} |")
    return "\n".join(lines)


def mib(count: int | None) -> str:
    """`count` bytes in MiB, or a dash."""
    return "-" if count is None else f"{count / 2**20:,.0f} MiB"


def main() -> int:
    """Runs all cells that the time suffices for; 0 when every one of them gave figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=7.5)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "experiments/results/gpu_validation.json")
    parser.add_argument("--cell", nargs=2, metavar=("WORKLOAD", "POLICY"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.cell:
        workload, policy = arguments.cell
        print(MARK + json.dumps(run_cell(workload, policy, arguments.rounds), default=str))
        return 0
    deadline = time.monotonic() + 60 * arguments.minutes
    results: list[dict[str, Any]] = []
    for policy in POLICIES:  # policy by policy, so that a cut leaves every workload with some
        for workload in WORKLOADS:
            left = deadline - time.monotonic()
            if left < 15:
                results.append({"workload": workload, "policy": policy, "error": "not run, out of time"})
                continue
            print(f"{workload} / {policy} ({left:.0f} s left)", file=sys.stderr, flush=True)
            results.append(spawn(workload, policy, arguments.rounds, left))
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            arguments.out.write_text(json.dumps(results, indent=1) + "\n")
    results.sort(key=lambda row: list(WORKLOADS).index(row["workload"]))
    arguments.out.write_text(json.dumps(results, indent=1) + "\n")
    print(table(results))
    return int(any("error" in row for row in results))


if __name__ == "__main__":
    sys.exit(main())
