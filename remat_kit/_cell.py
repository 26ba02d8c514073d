"""One cell of a sweep: what identifies it, and the functions that run in its process.

The only file of a sweep that knows the stages trace, compile, analyze and measure.
"""

import dataclasses
import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from remat_kit import _fingerprint
from remat_kit._errors import RematKitError, WorkloadError
from remat_kit._record import Record

if TYPE_CHECKING:
    from remat_kit._compile import CompiledStep, CompileOptions
    from remat_kit._trace import TracedStep

# The stages are imported where they are called: the process that shows a sweep needs none of them.


@dataclass(frozen=True)
class Cell:
    """One (workload, policy, target, compile options) of a sweep, and all that its row depends on.

    Attributes:
      workload: `module:function`.
      options: of the workload, sorted by name.
      policy: as `get_policy` reads it.
      target: a name that `get_target` knows; platform: JAX's word for what it compiles for.
      mesh: axis names and sizes.
      compile_options: what differs from how XLA compiles by default.
      versions: of JAX and its companions.
      fingerprint: name and digest of each thing that was not typed but matters: code, settings, files.
    """

    workload: str
    options: tuple[tuple[str, Any], ...]
    policy: str
    target: str
    platform: str
    mesh: tuple[tuple[str, int], ...]
    compile_options: "CompileOptions"
    versions: tuple[tuple[str, str], ...]
    fingerprint: tuple[tuple[str, str], ...]

    @property
    def key(self) -> str:
        """The SHA-256 of the cell's content: equal for equal cells in any process, on any machine."""
        return hashlib.sha256(canonical_json(self.to_json()).encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """The cell as a JSON object. An autotune file is in it by its content and not by its place."""
        data = dataclasses.asdict(self)
        if data["compile_options"].get("autotune_results"):
            data["compile_options"]["autotune_results"] = dict(self.fingerprint)["autotune_results"]
        return data

    def with_option(self, name: str, value: Any) -> "Cell":
        """The same cell with an option of the workload set to `value`."""
        options = {**dict(self.options), name: value}
        return dataclasses.replace(self, options=tuple(sorted(options.items())))

    def failed(self, error: str) -> Record:
        """The row of this cell when it failed: everything that is known without running it."""
        options = self.compile_options
        return Record(
            workload=self.workload,
            options=dict(self.options),
            policy=self.policy,
            target=self.target,
            mesh=dict(self.mesh),
            versions=dict(self.versions),
            xla_remat=options.xla_remat,
            gemm_backend=options.gemm_backend(self.platform),
            compile_options=dict(options.xla_options),
            error=error,
        )


def canonical_json(data: Any) -> str:
    """The one JSON text of `data`: sorted names, no spaces."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), default=str)


@dataclass(frozen=True)
class Inspected:
    """What cells depend on that only a process which imports the workload, or starts JAX, can find out.

    Attributes:
      target: what `get_target` calls the target; platform and mesh as in Cell.
      digests: of the workload's source, and the kind of an attached device.
    """

    target: str
    platform: str
    mesh: tuple[tuple[str, int], ...]
    digests: tuple[tuple[str, str], ...]

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "Inspected":
        """The value of what `inspect_workload` returns after its way through JSON."""
        pairs = {name: tuple((key, value) for key, value in data[name]) for name in ("mesh", "digests")}
        return Inspected(data["target"], data["platform"], pairs["mesh"], pairs["digests"])


def make_cells(
    workload: str,
    options: Sequence[tuple[str, Any]],
    policies: Sequence[str],
    compile_options: Sequence["CompileOptions"],
    inspected: Inspected,
) -> list[Cell]:
    """A cell for each policy with each of the compile options."""
    known = {"remat_kit": _fingerprint.kit_digest(), "settings": _fingerprint.environment()}
    if inspected.platform == "cpu":
        known["host"] = _fingerprint.host()
        # The GEMM backend, the only thing in which they can differ, is a GPU's.
        compile_options = compile_options[:1]
    cells = []
    for choice in compile_options:
        own = {}
        if choice.autotune_results:
            own["autotune_results"] = hashlib.sha256(Path(choice.autotune_results).read_bytes()).hexdigest()
        cells += [
            Cell(
                workload=workload,
                options=tuple(sorted(options)),
                policy=policy,
                target=inspected.target,
                platform=inspected.platform,
                mesh=inspected.mesh,
                compile_options=_options_of(policy, choice),
                versions=tuple(sorted(_fingerprint.versions().items())),
                fingerprint=tuple(sorted({*known.items(), *inspected.digests, *own.items()})),
            )
            for policy in policies
        ]
    return cells


def _options_of(policy: str, asked: "CompileOptions") -> "CompileOptions":
    """How a policy's step is compiled: as asked, and with XLA's own pass where that is what the policy is."""
    from remat_kit._compile import ON
    from remat_kit._policy import get_policy

    return dataclasses.replace(asked, xla_remat=ON) if get_policy(policy).xla_remat else asked


def inspect_workload(asked: tuple[str, tuple[tuple[str, Any], ...], str, str | None]) -> Inspected:
    """What the cells of a sweep depend on. `asked` is the workload, its options, the target and the mesh.

    Runs in a process of its own, once a sweep, since it is the first thing to import the user's module.
    Raises WorkloadError when the workload cannot be imported or does not have one of the options, and
    TargetError when nothing can be compiled for the target here.
    """
    from remat_kit._step import Workload
    from remat_kit._target import get_target
    from remat_kit._trace import device_mesh

    spec, options, target_name, mesh = asked
    workload = Workload(spec, options)
    before = set(sys.modules)
    try:
        function = workload.function()
    except RematKitError:
        raise
    except Exception as error:
        raise WorkloadError(
            f"importing workload {spec!r} failed: {type(error).__name__}: {error}. "
            f"Try: python -c 'import {spec.partition(':')[0]}'"
        ) from error
    workload.check_options(function)
    files = _fingerprint.workload_files(spec.partition(":")[0], before)
    digests = {"workload": _fingerprint.digest_files(files, Path.cwd())}
    target = get_target(target_name, mesh)
    devices = device_mesh(target)
    if target.attached:
        digests["device"] = f"{devices.devices.flat[0].device_kind} {target.chip.memory_bytes}"
    return Inspected(target.name, target.chip.platform, target.mesh, tuple(sorted(digests.items())))


def trace_cell(cell: Cell) -> "TracedStep":
    """The step of the cell, built and traced for the cell's target; nothing is compiled."""
    return _traced(cell, cell.policy, cell.target)


def compile_cell(cell: Cell, target_name: str | None = None) -> "CompiledStep":
    """The step of the cell, traced and compiled for the cell's target, or for another."""
    from remat_kit._compile import compile_step

    return compile_step(_traced(cell, cell.policy, target_name or cell.target), cell.compile_options)


def run_cell(cell: Cell) -> Record:
    """The row of the cell: the step traced, compiled for the target, and analyzed."""
    from remat_kit._analyze import analyze
    from remat_kit._policy import get_policy
    from remat_kit._step import Workload

    workload, policy = Workload(cell.workload, cell.options), get_policy(cell.policy)
    return analyze(compile_cell(cell), workload=workload, policy=policy)


def run_cell_and_tell_sources(cell: Cell) -> Iterator[Record | dict[str, Any]]:
    """The row of the cell, then `{"sources": ...}`: the files that the workload's process had loaded by then.

    A row keeps who holds the live peak, and neither single buffers nor the time line: `analyze` shows those.
    """
    record = run_cell(cell)
    brief = record.explanation.brief() if record.explanation else None
    yield dataclasses.replace(record, explanation=brief)
    yield {"sources": _fingerprint.loaded_sources()}


def measure_cells(cells: Sequence[Cell]) -> Iterator[dict[str, Any]]:
    """Measures the steps of all cells on the attached device, in turns, after a check of their gradients.

    Yields `{"running": key}` whenever it turns to another cell, so that a crash can be laid to its cell, and
    for each cell `{"key": key, "measured_step_s": {...}, "platform": ..., "warnings": [...]}` or
    `{"key": key, "error": ...}`.
    """
    from remat_kit._measure import (
        check_can_repeat,
        check_gradients,
        device_name,
        loss_and_gradients,
        real_args,
        summarize,
        take_turns,
    )

    compiled = {}
    reference = _traced(cells[0], "none", "attached")
    warnings = []
    expected = None
    if reference.step.loss_and_grads is None:
        warnings.append("gradients were not compared with policy none: the workload's Step has no loss_and_grads")
    else:
        expected = loss_and_gradients(reference)
    for cell in cells:
        yield {"running": cell.key}
        try:
            step = compile_cell(cell, "attached")
            check_can_repeat(step.traced)
            if expected is not None:
                check_gradients(step.traced, reference, expected=expected)
        except RematKitError as error:
            yield {"key": cell.key, "error": " ".join(str(error).split())}
        else:
            compiled[cell.key] = step
    if not compiled:
        return
    times: dict[str, list[float]] = {key: [] for key in compiled}
    # The state of the step itself is made last, when nothing else is on the device.
    for key, elapsed in take_turns(compiled, real_args(reference.step), rounds=20, seconds=60.0):
        if elapsed is None:
            yield {"running": key}
        else:
            times[key].append(elapsed)
    for key, step in compiled.items():
        measured = summarize(times[key], device_name(step))
        platform = step.traced.target.chip.platform
        yield {
            "key": key,
            "measured_step_s": dataclasses.asdict(measured),
            "platform": platform,
            "warnings": warnings,
        }


def measure_peak(cell: Cell) -> dict[str, Any]:
    """The most memory that the attached device's allocator had in use in one step of `cell`.

    The allocator counts since the process began, so this runs in a process of its own.
    """
    from remat_kit._measure import allocator_peak, real_args

    step = compile_cell(cell, "attached")
    return {"measured_peak_bytes": allocator_peak(step, real_args(step.traced.step))}


def _traced(cell: Cell, policy_name: str, target_name: str) -> "TracedStep":
    from remat_kit._policy import get_policy
    from remat_kit._step import Workload
    from remat_kit._target import get_target
    from remat_kit._trace import trace

    mesh = ",".join(f"{axis}={size}" for axis, size in cell.mesh)
    policy, target = get_policy(policy_name), get_target(target_name, mesh)
    step = Workload(cell.workload, cell.options).build(policy, target.chip.platform)
    return trace(step, target, policy)
