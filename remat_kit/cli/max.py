"""`remat-kit max`: the largest batch, sequence, depth or other option of a workload that fits, for each policy."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from remat_kit import _store, _units
from remat_kit._errors import RematKitError
from remat_kit.cli import _input, _output

NOTHING_FITS = 3
"""The exit status when no policy has a value that fits."""


def command(
    option: Annotated[
        str,
        typer.Argument(
            metavar="batch|seq|layers|NAME", help="the option of the workload to make large", show_default=False
        ),
    ],
    workload: _input.WorkloadArgument,
    options: _input.OptionsArgument = None,
    target: _input.TargetOption = "cpu",
    policies: Annotated[
        str, typer.Option(help="comma-separated, or all; `remat-kit policies` lists them")
    ] = "none,full,dots_saveable,dots_with_no_batch_dims_saveable",
    mesh: _input.MeshOption = None,
    at_least: Annotated[int, typer.Option(metavar="N", help="the smallest value to look at")] = 1,
    at_most: Annotated[int | None, typer.Option(metavar="N", help="the largest value to look at")] = None,
    multiple_of: Annotated[
        int | None,
        typer.Option(metavar="N", help="look at multiples of N [default: 128 for seq, else 1, or what is accepted]"),
    ] = None,
    fits: Annotated[
        str | None,
        typer.Option(metavar="yes|tight", help="within JAX's default pool, or in a larger one [default: yes]"),
    ] = None,
    budget: Annotated[
        str | None, typer.Option(metavar="SIZE|PERCENT", help="instead of --fits: what a step may need, e.g. 40GiB")
    ] = None,
    compiles: Annotated[int, typer.Option(metavar="N", help="values to compile for each policy, at most")] = 6,
    jobs: Annotated[int, typer.Option(help="cells at a time")] = 1,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="time limit of a cell")] = 600.0,
    memory_limit: Annotated[
        str | None, typer.Option(metavar="SIZE", help="memory limit of a cell, e.g. 16GiB; by default 9/10 / jobs")
    ] = None,
    xla_remat: _input.XlaRematOption = "off",
    gemm: _input.GemmOption = "cublas",
    autotune_results: _input.AutotuneOption = None,
    xla_options: _input.XlaOption = None,
    store: Annotated[
        Path | None, typer.Option(metavar="DIR", help="where rows are kept [default: $REMAT_KIT_STORE or .remat-kit]")
    ] = None,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="run cells again that failed before")] = False,
    json_file: _input.JsonOption = None,
    force: _input.ForceOption = False,
) -> None:
    """Find the largest batch, sequence, number of layers or other whole number that fits, for each policy.

    Values are traced first, which tells how the bytes grow, and then compiled, at most 6 for each policy: an answer is
    proved by a compile of it, which fits, and of the next value, which does not. Exits with 0 when there are answers, 1
    when a policy failed, 2 when the input is wrong, 3 when nothing was found to fit.
    """
    _output.check(json_file, force)
    if jobs < 1 or not 0 < timeout <= _input.LONGEST_S:
        raise RematKitError(
            f"--jobs and --timeout are {jobs} and {timeout:g}. "
            f"Give numbers above 0, and at most {_input.LONGEST_S:.0f} s."
        )
    memory_bytes = _units.parse_bytes(memory_limit) if memory_limit else None
    _input.check_workload(workload)
    if fits is not None and budget is not None:
        raise RematKitError("--fits and --budget are both given, and each says what a step may need. Give one of them.")

    from remat_kit import _cell, _max, _policy, _sweep
    from remat_kit._pool import Pool
    from remat_kit._report import max as report
    from remat_kit.cli._progress import Tries

    question = _max.Question(option, at_least, at_most, multiple_of, fits or "yes", budget, compiles)
    parsed = _input.parse_options(options)
    if option in dict(parsed):
        raise RematKitError(
            f"option {option!r} is what to make large, and it is given as {dict(parsed)[option]!r}. Leave it out, or "
            "bound it with --at-least and --at-most."
        )
    chosen = [policy.name for policy in _policy.parse_policies(policies)]
    _input.check_target(target, mesh)
    compile_options = _input.parse_compile_options(xla_remat, gemm, autotune_results, xla_options)
    limits = _sweep.Limits(jobs, timeout, memory_bytes)
    shown = Tries(option)
    kept = _store.Store(store or _store.default_folder(), warn=lambda line: shown.say(f"warning: {line}"))
    try:
        with Pool() as pool, shown:
            first = (*parsed, (option, at_least))
            inspected = _sweep.inspect(pool, workload, first, target, mesh, limits)
            room = _max.check_question(pool, question, workload, target, mesh, limits)
            shown.say(
                f"tracing {option} under {len(chosen)} policies, then compiling at most {compiles} values of each"
            )
            cells = _cell.make_cells(workload, first, chosen, compile_options, inspected)
            found = _max.find_largest(
                cells, question, room.limit_bytes, kept, pool, limits=limits, retry_failed=retry_failed, watcher=shown
            )
    except KeyboardInterrupt:
        print(f"stopped; finished rows are kept in {kept.folder}, run the same command to go on", file=sys.stderr)
        raise typer.Exit(130) from None
    answer = _max.Answer(
        workload,
        dict(parsed),
        inspected.target,
        dict(inspected.mesh),
        question,
        room.limit_bytes,
        room.words,
        tuple(found),
    )
    if json_file:
        _output.write(json_file, json.dumps(answer.to_json(), indent=1, default=str) + "\n")
    _output.show(report.render(answer), json_file)
    if any(each.kind == "failed" for each in found):
        _output.show("failed rows are kept; run the same command with --retry-failed to try them again\n", json_file)
        raise typer.Exit(1)
    if all(each.value is None for each in found):
        raise typer.Exit(NOTHING_FITS)
