"""`remat-kit plan`: the fastest plan of a workload under a budget in bytes, confirmed by the compiler."""

import contextlib
import os
import sys
from typing import Annotated

import typer

from remat_kit._errors import RematKitError
from remat_kit.cli import _input, _output

DOES_NOT_FIT = 3
"""The exit status when no plan fits the budget."""


def command(
    workload: _input.WorkloadArgument,
    options: _input.OptionsArgument = None,
    target: _input.TargetOption = "cpu",
    budget: Annotated[
        str | None, typer.Option(metavar="SIZE|PERCENT", help="e.g. 40GiB or 90%; without it the whole front is shown")
    ] = None,
    where: Annotated[
        str | None, typer.Option(metavar="REGEX", help="module paths that are a block, e.g. 'blocks_[0-9]+'")
    ] = None,
    offload: Annotated[bool, typer.Option("--offload", help="values may be moved to the host's memory")] = False,
    unroll: Annotated[
        bool, typer.Option("--unroll", help="loops over blocks may be written out: faster, and slower to compile")
    ] = False,
    mesh: _input.MeshOption = None,
    gemm: Annotated[str, typer.Option(metavar="cublas|triton", help="who multiplies on a GPU target")] = "cublas",
    autotune_results: _input.AutotuneOption = None,
    xla_options: _input.XlaOption = None,
    json_file: _input.JsonOption = None,
    python_file: Annotated[
        str | None, typer.Option("--python", metavar="FILE", help="also write plain JAX code that does the same")
    ] = None,
    force: _input.ForceOption = False,
) -> None:
    """Find the plan that takes the least time and needs no more than a budget.

    Candidates are compiled for the target, at most 5 of them; without --budget, at most 5 for each of several budgets
    from the smallest need to the least time. Exits with 0 when the plan fits, 2 when the input is wrong, 3 when nothing
    fits: the plan of the smallest need is then shown and written.
    """
    taken = _output.check_all((json_file, python_file), force)
    _input.check_workload(workload)
    _input.check_target(target, mesh)
    if gemm == "both":
        raise RematKitError("plan compiles for one backend, so --gemm is cublas or triton.")
    typed = _input.parse_options(options)
    (compile_options,) = _input.parse_compile_options("off", gemm, autotune_results, xla_options)

    from remat_kit._plan.budget import parse_budget
    from remat_kit._plan.front import front, knee
    from remat_kit._plan.make import plan_with
    from remat_kit._plan.python import to_maxtext, to_python
    from remat_kit._plan.search import Planner
    from remat_kit._policy import get_policy
    from remat_kit._report import plan as report
    from remat_kit._step import Workload
    from remat_kit._target import get_target
    from remat_kit.cli._progress import Lines

    chosen = get_target(target, mesh)
    limit = parse_budget(budget, chosen)
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    given = Workload(workload, typed)
    with contextlib.redirect_stdout(sys.stderr):
        # With every block wrapped, blocks are those that the model itself marks; others are found.
        step = given.build(get_policy("full"), chosen.chip.platform)
        planner = Planner.of(step, chosen, compile_options, where, offload, unroll, Lines().say)
        if limit is None:
            plans = front(planner, workload=given)
            found = knee(plans)
            text = report.render_front(plans, found)
        else:
            found = plan_with(planner, limit, given)
            text = report.render(found)
    if maxtext := to_maxtext(found):
        text += "\nFor MaxText:\n" + "".join(f"  {line}\n" for line in maxtext.splitlines())
    _output.show(text, taken)
    if json_file:
        _output.write(json_file, found.dumps())
    if python_file:
        _output.write(python_file, to_python(found))
    if not found.fits:
        raise typer.Exit(DOES_NOT_FIT)
