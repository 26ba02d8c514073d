"""How fast is the analysis of a compiled step, and does it grow with the program and no faster?

    python experiments/analyzer_speed.py [FOLDER] [--layers 12,24,48,96] [--results FILE]

The programs: training steps of the 22B GPT model of Korthikanti et al., unrolled, without dropout (whose random bits
would be nine tenths of the instructions), with 8-way tensor parallelism on described H100s, at several depths. They
are compiled once into FOLDER (default `out/analyzer_speed`) and taken from there afterwards. In one run, on one
machine:
  ratio: the time of parse and replay over that of XProf's memory viewer (C++) from the same file, best of several,
    both warm. XProf answers one question, the live peak of one memory; ours knows every buffer along the time line.
  growth: time and memory of each stage over the depths, each in a fresh process; the exponent of a fitted power of the
    number of instructions. Linear is 1.
  analysis: seconds from the same file's bytes to its record, all that `remat-kit analyze FILE` does but the printing.
Prints a table, writes experiments/results/analyzer_speed.json, and exits with 1 when the ratio is above RATIO_LIMIT,
the analysis takes longer than ANALYSIS_LIMIT_S, or an exponent of time is above EXPONENT_LIMIT.
"""

import argparse
import dataclasses
import gc
import json
import math
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
DEPTHS = (12, 24, 48, 96)
COMPARED = 48
"""The depth that is compared with XProf, where it is one of DEPTHS."""
RATIO_LIMIT = 1.0
ANALYSIS_LIMIT_S = 1.5
EXPONENT_LIMIT = 1.2
ROUNDS = 7
AXIS = "model"
WAYS = 8


def stages() -> dict[str, Callable[[dict[str, Any]], Any]]:
    """What is timed, in order. Each takes the results of those before it by name, and the file's bytes as "data"."""
    from remat_kit._explain import explain
    from remat_kit._hlo.anatomy import anatomy
    from remat_kit._hlo.heap import replay
    from remat_kit._hlo.module import Module
    from remat_kit._hlo.proto import parse

    return {
        "parse": lambda done: parse(done["data"]),
        "replay": lambda done: replay(done["parse"]),
        "module": lambda done: Module.from_proto(done["parse"]),
        "anatomy": lambda done: anatomy(done["module"], done["parse"], done["replay"]),
        "explain": lambda done: explain(done["anatomy"]),
    }


def partitioned(path: Sequence[Any], shape: tuple[int, ...]) -> tuple[str | None, ...]:
    """Megatron's tensor parallelism: which axis of a parameter, or of its moments, is split.

    By columns: query, key, value and the MLP's first matrix, with their biases; by rows: the two that follow them;
    the embedding by words.
    """
    words = [str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path]
    if words[-1] == "embedding":
        return (AXIS, None)
    if any(word in words for word in ("query", "key", "value", "up")) and words[-1] in ("kernel", "bias"):
        return (None, AXIS) if words[-1] == "kernel" else (AXIS,)
    if any(word in words for word in ("out", "down")) and words[-1] == "kernel":
        return (AXIS, None)
    return (None,) * len(shape)


def compile_to(file: pathlib.Path, layers: int, policy: str) -> None:
    """Compiles the step with `layers` blocks and writes the HloProto that XLA dumps."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    from remat_kit import Workload, get_target, parse_policies
    from remat_kit._compile import compile_step
    from remat_kit._trace import device_mesh, trace

    target = get_target("h100-sxm-80gb", f"{AXIS}={WAYS}")
    mesh = device_mesh(target)
    (chosen,) = parse_policies(policy)
    options = (("size", "22b"), ("stack", "unroll"), ("layers", layers), ("dropout", 0.0))
    workload = Workload("models.transformer:gpt", options)
    step = workload.build(chosen, target.chip.platform)

    def placed(path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, PartitionSpec(*partitioned(path, leaf.shape)))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    args = jax.tree_util.tree_map_with_path(placed, step.args)
    compiled = compile_step(trace(dataclasses.replace(step, args=args), target, chosen))
    partial = file.with_suffix(".partial")
    partial.write_bytes(compiled.hlo_proto)
    partial.rename(file)


def resident_bytes(field: str) -> int:
    """Bytes of this process: resident now (`VmRSS`), or at most so far (`VmHWM`)."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def measure(file: pathlib.Path) -> dict[str, Any]:
    """Seconds (best of several) and memory of each stage on one file, in this process.

    Memory is the highest resident size so far, above that before the first stage: it holds the results of all stages
    before it.
    """
    from remat_kit._collector import without_collection

    timed = stages()
    done: dict[str, Any] = {"data": file.read_bytes()}
    gc.collect()
    before = resident_bytes("VmRSS")
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    memory = {}
    for name, stage in timed.items():
        done[name] = stage(done)
        memory[name] = resident_bytes("VmHWM") - before
    seconds = dict.fromkeys(timed, math.inf)
    for _ in range(ROUNDS):
        # What a later stage holds on to would keep the memory of an earlier one from being used again.
        done |= dict.fromkeys(timed)
        for name, stage in timed.items():
            gc.collect()
            start = time.perf_counter()
            with without_collection():  # as the analysis does
                done[name] = stage(done)
            seconds[name] = min(seconds[name], time.perf_counter() - start)
    return {
        "instructions": sum(len(each.instructions) for each in done["parse"].hlo_module.computations),
        "events": len(done["replay"].timeline),
        "file_bytes": len(done["data"]),
        "seconds": seconds,
        "memory_bytes": memory,
    }


def compare(file: pathlib.Path) -> dict[str, Any]:
    """Best seconds on one file, in turns: parse and replay, XProf's memory viewer, and all of the analysis.

    Raises AssertionError when the two disagree on the live peak: their times would not be those of one question.
    """
    from xprof.convert import raw_to_tool_data

    from remat_kit._hlo.heap import replay
    from remat_kit._hlo.proto import parse
    from remat_kit._program import analyze_module

    name = "jit_train_step(1)"
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(file, f"{folder}/{name}.hlo_proto.pb")
        options = {"module_name": name, "memory_space": "0"}
        ours, theirs, analysis, heap, data = math.inf, math.inf, math.inf, None, None
        for _ in range(ROUNDS + 1):  # the first warms both up
            gc.collect()
            start = time.perf_counter()
            heap = replay(parse(file.read_bytes()))
            middle = time.perf_counter()
            data, _ = raw_to_tool_data.xspace_to_tool_data([f"{folder}/any.xplane.pb"], "memory_viewer", options)
            end = time.perf_counter()
            gc.collect()
            begin = time.perf_counter()
            analyze_module(file.read_bytes(), name)
            analysis = min(analysis, time.perf_counter() - begin)
            ours, theirs = min(ours, middle - start), min(theirs, end - middle)
    xprof_peak = round(json.loads(data or "{}")["peakHeapMib"] * 2**20)
    assert heap is not None
    assert heap.peak_bytes == xprof_peak, f"live peak {heap.peak_bytes}, XProf's is {xprof_peak}"
    return {
        "ours_s": ours,
        "xprof_s": theirs,
        "ratio": ours / theirs,
        "analysis_s": analysis,
        "live_peak_bytes": xprof_peak,
    }


def exponent(points: Sequence[tuple[float, float]]) -> float:
    """The slope of the line through (log x, log y), least squares."""
    logs = [(math.log(x), math.log(y)) for x, y in points]
    mean_x, mean_y = (sum(values) / len(logs) for values in zip(*logs, strict=True))
    return sum((x - mean_x) * (y - mean_y) for x, y in logs) / sum((x - mean_x) ** 2 for x, _ in logs)


def in_child(*arguments: str) -> str:
    """What this script prints with `arguments` in a fresh process. Raises CalledProcessError when it fails."""
    environment = dict(os.environ, PYTHONPATH=str(ROOT), JAX_PLATFORMS="cpu")
    command = [sys.executable, __file__, *arguments]
    return subprocess.run(command, check=True, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True).stdout


def table(rows: dict[int, dict[str, Any]], growth: dict[str, dict[str, float]]) -> str:
    """The text of seconds and MiB by depth (rows) and stage (columns), with the exponents below."""
    names = list(next(iter(rows.values()))["seconds"])
    lines = ["layers  instructions  events" + "".join(f"  {name + ' s':>9}  {'MiB':>5}" for name in names)]
    for layers, row in rows.items():
        cells = [f"  {row['seconds'][name]:9.4f}  {row['memory_bytes'][name] / 2**20:5.0f}" for name in names]
        lines.append(f"{layers:6}  {row['instructions']:12}  {row['events']:6}" + "".join(cells))
    cells = [f"  {growth['seconds'][name]:9.2f}  {growth['memory_bytes'][name]:5.2f}" for name in names]
    return "\n".join([*lines, f"{'exponent':28}" + "".join(cells)])


def main() -> int:
    """0 when no limit is exceeded: parse and replay beside XProf, the whole analysis, the growth of every stage."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=pathlib.Path, default=ROOT / "out/analyzer_speed")
    parser.add_argument("--layers", default=",".join(map(str, DEPTHS)))
    parser.add_argument("--policy", default="selective_attention")
    parser.add_argument("--results", type=pathlib.Path, default=ROOT / "experiments/results/analyzer_speed.json")
    parser.add_argument("--compile", type=int, help="only compile this depth")
    parser.add_argument("--measure", type=int, help="only measure this depth")
    parser.add_argument("--compare", type=int, help="only compare this depth with XProf")
    arguments = parser.parse_args()
    folder = arguments.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)

    def file_of(layers: int) -> pathlib.Path:
        return folder / f"gpt-22b-{arguments.policy}-{layers}.hlo.pb"

    if arguments.compile:
        compile_to(file_of(arguments.compile), arguments.compile, arguments.policy)
        return 0
    if arguments.measure or arguments.compare:
        do, layers = (measure, arguments.measure) if arguments.measure else (compare, arguments.compare)
        print(json.dumps(do(file_of(layers))))
        return 0
    depths = [int(text) for text in arguments.layers.split(",")]
    common = (str(folder), "--policy", arguments.policy)
    for layers in depths:
        if not file_of(layers).exists():
            print(f"compiling {layers} layers", file=sys.stderr)
            in_child(*common, "--compile", str(layers))
    rows = {layers: json.loads(in_child(*common, "--measure", str(layers))) for layers in depths}
    compared = COMPARED if COMPARED in depths else depths[-1]
    against = json.loads(in_child(*common, "--compare", str(compared)))
    growth = {
        kind: {
            name: exponent([(row["instructions"], row[kind][name]) for row in rows.values()])
            for name in rows[compared]["seconds"]
        }
        for kind in ("seconds", "memory_bytes")
    }
    print(table(rows, growth))
    ours, theirs, ratio = (against[name] for name in ("ours_s", "xprof_s", "ratio"))
    print(f"{compared} layers: parse and replay {ours:.4f} s, XProf {theirs:.4f} s, ratio {ratio:.2f}")
    print(f"{compared} layers: whole analysis {against['analysis_s']:.3f} s")
    result = {"policy": arguments.policy, "compared_layers": compared, "against_xprof": against}
    arguments.results.write_text(json.dumps(result | {"growth": growth, "rows": rows}, indent=1) + "\n")
    slow = against["ratio"] > RATIO_LIMIT or against["analysis_s"] > ANALYSIS_LIMIT_S
    return int(slow or max(growth["seconds"].values()) > EXPONENT_LIMIT)


if __name__ == "__main__":
    sys.exit(main())
