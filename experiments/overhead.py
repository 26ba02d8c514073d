"""What does the toolkit cost beside XLA's own compile?

    python experiments/overhead.py [--policies a,b,...] [key=value ...] > experiments/results/overhead.json

In one run, on one machine: the CPU time (user and system, children included) of a sweep of 8 policies into an empty
store, and of a script that does no more than build, trace, lower and compile the same 8 steps for the same target one
after the other. Both in fresh interpreters, so both import JAX once; the sweep's figure holds its processes, analysis,
records, table and JSON. Prints the ratio, and exits with 1 when it is above 1.15.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
TARGET = "h100-sxm-80gb"
POLICIES = (
    "none,full,selective_attention,dots_saveable,dots_with_no_batch_dims_saveable,minimal_with_context,"
    "save_dot_except_mlp,save_qkv_proj"
)
LIMIT = 1.15
BARE = """
import sys
import jax
import remat_kit
from remat_kit._step import parse_option
from remat_kit._trace import device_mesh
target = remat_kit.get_target(sys.argv[1])
mesh = device_mesh(target)
on_device = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
options = remat_kit.CompileOptions().for_xla(target.chip.platform)
workload = remat_kit.Workload(sys.argv[3], tuple(map(parse_option, sys.argv[4:])))
for policy in remat_kit.parse_policies(sys.argv[2]):
    step = workload.build(policy, target.chip.platform)
    args = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=on_device), step.args)
    jax.jit(step.fn, donate_argnums=step.donate).trace(*args).lower().compile(compiler_options=options)
"""


def cpu_seconds(command: list[str]) -> float:
    """CPU seconds of a command and of all that it started. Raises CalledProcessError when it fails."""
    before = os.times()
    environment = dict(os.environ, PYTHONPATH=str(ROOT), JAX_PLATFORMS="cpu")
    subprocess.run(command, check=True, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def main() -> int:
    """0 when the sweep costs at most LIMIT times the bare compiles."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("options", nargs="*", default=["size=gpt2-small"], metavar="key=value")
    parser.add_argument("--policies", default=POLICIES)
    parser.add_argument("--target", default=TARGET)
    arguments = parser.parse_args()
    workload = ["models.transformer:gpt", *arguments.options]
    with tempfile.TemporaryDirectory() as store:
        start = time.perf_counter()
        command = [sys.executable, "-m", "remat_kit", "sweep", *workload, "--target", arguments.target]
        command += ["--policies", arguments.policies, "--store", store, "--json", f"{store}/records.json"]
        sweep = cpu_seconds(command)
        sweep_wall = time.perf_counter() - start
    start = time.perf_counter()
    bare = cpu_seconds([sys.executable, "-c", BARE, arguments.target, arguments.policies, *workload])
    bare_wall = time.perf_counter() - start
    result = {
        "workload": " ".join(workload),
        "cells": len(arguments.policies.split(",")),
        "sweep_cpu_s": round(sweep, 2),
        "bare_cpu_s": round(bare, 2),
        "ratio": round(sweep / bare, 3),
        "sweep_wall_s": round(sweep_wall, 2),
        "bare_wall_s": round(bare_wall, 2),
    }
    print(json.dumps(result, indent=1))
    return int(sweep > LIMIT * bare)


if __name__ == "__main__":
    sys.exit(main())
