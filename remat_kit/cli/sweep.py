"""`remat-kit sweep`: many policies of a workload, one process each, kept in a store."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from remat_kit import _record, _store, _units
from remat_kit._errors import RematKitError
from remat_kit._report import plot, table
from remat_kit.cli import _input, _output


def command(
    workload: _input.WorkloadArgument,
    options: _input.OptionsArgument = None,
    target: _input.TargetOption = "cpu",
    policies: Annotated[
        str, typer.Option(help="comma-separated, or all; `remat-kit policies` lists them")
    ] = "none,full,dots_saveable,dots_with_no_batch_dims_saveable",
    mesh: _input.MeshOption = None,
    jobs: Annotated[int, typer.Option(help="cells at a time")] = 1,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="time limit of a cell")] = 600.0,
    memory_limit: Annotated[
        str | None, typer.Option(metavar="SIZE", help="memory limit of a cell, e.g. 16GiB; by default 9/10 / jobs")
    ] = None,
    measure: Annotated[bool, typer.Option("--measure", help="also run the steps on the attached device")] = False,
    xla_remat: _input.XlaRematOption = "off",
    gemm: _input.GemmOption = "cublas",
    autotune_results: _input.AutotuneOption = None,
    xla_options: _input.XlaOption = None,
    store: Annotated[
        Path | None, typer.Option(metavar="DIR", help="where rows are kept [default: $REMAT_KIT_STORE or .remat-kit]")
    ] = None,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="run cells again that failed before")] = False,
    json_file: _input.JsonOption = None,
    plot_file: _input.PlotOption = None,
    force: _input.ForceOption = False,
) -> None:
    """Sweep remat policies of a workload for a target, and compare what they cost.

    Rows are kept as they come: stopped at any moment, the same command goes on where it was. Exits with 0
    when every cell has its row, 1 when some failed, 2 when the input is wrong.
    """
    if plot_file:
        plot.check_suffix(Path(plot_file))
    for name in (json_file, plot_file):
        _output.check(name, force)
    if jobs < 1 or not 0 < timeout <= _input.LONGEST_S:
        raise RematKitError(
            f"--jobs and --timeout are {jobs} and {timeout:g}. "
            f"Give numbers above 0, and at most {_input.LONGEST_S:.0f} s."
        )
    memory_bytes = _units.parse_bytes(memory_limit) if memory_limit else None
    _input.check_workload(workload)

    from remat_kit import _cell, _policy, _sweep
    from remat_kit._pool import Pool
    from remat_kit.cli._progress import progress

    parsed = _input.parse_options(options)
    chosen = [policy.name for policy in _policy.parse_policies(policies)]
    _input.check_target(target, mesh)
    compile_options = _input.parse_compile_options(xla_remat, gemm, autotune_results, xla_options)
    limits = _sweep.Limits(jobs, timeout, memory_bytes)
    shown = progress()
    kept = _store.Store(store or _store.default_folder(), warn=lambda line: shown.say(f"warning: {line}"))
    try:
        with Pool() as pool, shown:
            inspected = _sweep.inspect(pool, workload, parsed, target, mesh, limits)
            cells = _cell.make_cells(workload, parsed, chosen, compile_options, inspected)
            rows = _sweep.sweep(cells, kept, pool, limits=limits, retry_failed=retry_failed, watcher=shown)
            if measure:
                rows = _sweep.measure(rows, kept, pool, limits=limits, retry_failed=retry_failed, watcher=shown)
    except KeyboardInterrupt:
        print(f"stopped; finished rows are kept in {kept.folder}, run the same command to go on", file=sys.stderr)
        raise typer.Exit(130) from None
    _finish([row.record for row in rows], [row.log for row in rows if row.log], json_file, plot_file)


def _finish(
    records: Sequence[_record.Record], logs: Sequence[Path], json_file: str | None, plot_file: str | None
) -> None:
    """Shows and writes the records, and exits with 1 when one of them failed."""
    if json_file:
        _output.write(json_file, _record.dump(list(records)))
    _output.show(table.render(records, _output.width(table.DEFAULT_WIDTH)), json_file)
    if plot_file:
        _output.write(plot_file, plot.render(records, Path(plot_file).suffix))
    if logs:
        names = "\n".join(f"  {path}" for path in logs)
        _output.show(f"\nwhat failed cells printed:\n{names}\n", json_file)
    if any(record.error for record in records):
        _output.show("failed rows are kept; run the same command with --retry-failed to try them again\n", json_file)
        raise typer.Exit(1)
