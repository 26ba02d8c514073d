"""A compiled program, from its bytes alone: replayed, explained, as a record. Needs no JAX, which takes a second."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from remat_kit._collector import without_collection
from remat_kit._explain import categories_at_peak, explain
from remat_kit._explanation import UNKNOWN, Explanation
from remat_kit._hlo.anatomy import Anatomy, anatomy
from remat_kit._hlo.collectives import collectives, recompute_beside
from remat_kit._hlo.heap import Heap, replay
from remat_kit._hlo.module import Module
from remat_kit._hlo.proto import parse
from remat_kit._hlo.roofline import Prediction, predict
from remat_kit._modules import choose, find_modules, read
from remat_kit._overlap import overlap
from remat_kit._record import Record
from remat_kit._target import Target, judge_fit
from remat_kit._units import MiB, format_bytes


@dataclass(frozen=True)
class Program:
    """A compiled module with its heap replayed and its live peak explained."""

    anatomy: Anatomy
    heap: Heap
    explanation: Explanation
    categories: Mapping[str, int]

    @property
    def module(self) -> Module:
        """The program as a graph."""
        return self.anatomy.module

    @property
    def constant_bytes(self) -> int:
        """Constants of the program, which are in none of XLA's totals."""
        return self.heap.throughout.get("constant", 0)

    def xla_remat(self, asked: str) -> str:
        """ "fired" when XLA's own rematerialization left clones, else what was asked for."""
        return "fired" if self.explanation.program.xla_remat_clones else asked

    def fields(self) -> dict[str, Any]:
        """What a record says of it, wherever it came from."""
        peak = self.heap.peak_bytes
        known: dict[str, Any] = {"constant_bytes": self.constant_bytes, "live_peak_bytes": peak}
        if peak is not None:
            known["live_peak_phase"] = None if self.heap.peak_event is None else self.explanation.peak.phase
            known["categories"] = self.categories
            known["attributed_share"] = 1.0 - self.categories.get(UNKNOWN, 0) / peak if peak else None
            known["explanation"] = self.explanation
        return known

    def communication(self, prediction: Prediction | None) -> dict[str, Any]:
        """What a record says of its collectives; with times where there is a prediction."""
        known: dict[str, Any] = {"collectives": collectives(self.anatomy, prediction)}
        if prediction is not None:
            hidden, exposed = recompute_beside(self.anatomy, prediction)
            known |= {"recompute_hidden_s": hidden, "recompute_exposed_s": exposed}
        return known

    def warnings(self) -> tuple[str, ...]:
        """What is not in its bytes, and what is in them unexpectedly."""
        found = []
        if any("fmha" in each.custom_call_target for each in self.module.instructions.values()):
            found.append("the workspace of cuDNN's fused attention is chosen on the device and is not in these bytes")
        if self.constant_bytes >= MiB:
            found.append(
                f"the program holds {format_bytes(self.constant_bytes)} of constants, which come on top of what the "
                "step needs; arrays that a step captures from outside become constants: pass them as arguments"
            )
        return tuple(found)


@without_collection()
def read_program(data: bytes, argument_categories: Mapping[str, str] | None = None) -> Program:
    """The program of a serialized HloProto. `argument_categories`: of each argument by the name of its leaf.

    Raises RematKitError when `data` is not a compiled module with its buffer assignment.
    """
    proto = parse(data)
    module = Module.from_proto(proto)
    heap = replay(proto)
    found = anatomy(module, proto, heap, argument_categories)
    explanation = explain(found)
    return Program(found, heap, explanation, categories_at_peak(explanation))


def analyze_file(path: Path | str, module: str | None = None, target: Target | None = None) -> Record:
    """The record of a program that was compiled elsewhere: an XLA dump, a profile, or a folder of either.

    Of several modules the largest is taken, or the one whose name is `module`. Compiles nothing; see `analyze_module`.
    Raises RematKitError when there is none, or when the name fits none or several.
    """
    chosen = choose(find_modules(path), module)
    return analyze_module(read(chosen), chosen.name, target)


def analyze_module(data: bytes, name: str, target: Target | None = None) -> Record:
    """All that the bytes of an HloProto tell, of whatever step it was compiled from. Compiles nothing.

    `name` is written down as the workload. With `target` there is a predicted step time, and whether it fits; without,
    both are None and the record's target is "". Policy and options are not known, and of the mesh only how many
    devices it has. Raises RematKitError when `data` is not a compiled module with its buffer assignment.
    """
    start = time.perf_counter()
    program = read_program(data)
    heap = program.heap
    prediction = predict(program.module, target.chip) if target else None
    fit = judge_fit(heap.need_bytes + program.constant_bytes, target) if target else None
    warnings = program.warnings()
    if prediction and fit:
        warnings += overlap(program.module, prediction).advice(max(0, fit.margin_bytes))
    if program.module.platform == "cpu" and (target is None or target.chip.platform != "cpu"):
        warnings += (
            "this program was compiled for the CPU: its bytes and kernels are the CPU's. Dump it where the job runs "
            "on its GPU, or give the workload and a --target, to have a GPU's",
        )
    return Record(
        workload=name,
        options={},
        policy="",
        target=target.name if target else "",
        mesh={"device": program.module.num_devices},
        versions={},
        xla_remat=program.xla_remat("unknown"),
        gemm_backend="unknown",
        argument_bytes=heap.argument_bytes,
        output_bytes=heap.output_bytes,
        alias_bytes=heap.alias_bytes,
        temp_bytes=heap.temp_bytes,
        host_temp_bytes=heap.host_temp_bytes,
        need_bytes=heap.need_bytes,
        xla_peak_bytes=None,
        predicted_step_s=prediction.seconds if prediction else None,
        predicted_breakdown_s=dict(prediction.breakdown) if prediction else {},
        analyze_s=time.perf_counter() - start,
        capacity_bytes=fit.capacity_bytes if fit else None,
        fits=fit.fits if fit else None,
        margin_bytes=fit.margin_bytes if fit else None,
        assumptions=fit.assumptions if fit else (),
        warnings=(*warnings, *(prediction.warnings if prediction else ())),
        **program.fields(),
        **program.communication(prediction),
    )
