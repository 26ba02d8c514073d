"""`remat-kit analyze`: one policy of a workload, in this process, with every figure."""

import contextlib
import os
import sys
from typing import Annotated

import typer

from remat_kit import _record
from remat_kit._errors import RematKitError
from remat_kit._report import text
from remat_kit.cli import _input, _output


def command(
    workload: _input.WorkloadArgument,
    options: _input.OptionsArgument = None,
    target: _input.TargetOption = "cpu",
    policy: Annotated[str, typer.Option(help="`remat-kit policies` lists them")] = "full",
    mesh: _input.MeshOption = None,
    xla_remat: _input.XlaRematOption = "off",
    gemm: Annotated[str, typer.Option(metavar="cublas|triton", help="who multiplies on a GPU target")] = "cublas",
    autotune_results: _input.AutotuneOption = None,
    xla_options: _input.XlaOption = None,
    json_file: _input.JsonOption = None,
    force: _input.ForceOption = False,
) -> None:
    """Compile one policy of a workload for a target, and report what it costs and why.

    It runs in this process and keeps nothing, so an error of the workload shows where it comes from.
    """
    _output.check(json_file, force)
    _input.check_workload(workload)

    from remat_kit import _cell, _policy

    parsed = _input.parse_options(options)
    chosen = _policy.get_policy(policy)
    _input.check_target(target, mesh)
    if gemm == "both":
        raise RematKitError("analyze compiles once, so --gemm is cublas or triton. For both, use remat-kit sweep.")
    compile_options = _input.parse_compile_options(xla_remat, gemm, autotune_results, xla_options)
    if os.getcwd() not in sys.path and "" not in sys.path:
        # A console script has its own folder there; a workload comes from where the user is.
        sys.path.insert(0, os.getcwd())
    # Standard output is for the report, or for JSON: what the workload prints goes elsewhere.
    with contextlib.redirect_stdout(sys.stderr):
        inspected = _cell.inspect_workload((workload, parsed, target, mesh))
        cells = _cell.make_cells(workload, parsed, [chosen.name], compile_options, inspected)
        record = _cell.run_cell(cells[0])
    if json_file:
        _output.write(json_file, _record.dump(record))
    _output.show(text.render(record), json_file)
