"""The options that commands share, and how what the user typed becomes values. Nothing here starts a process."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from remat_kit._errors import RematKitError, WorkloadError

if TYPE_CHECKING:
    from remat_kit._compile import CompileOptions

LONGEST_S = 7 * 24 * 3600.0
"""The longest time limit of a cell."""

# Imports of the stages are inside the functions: they bring JAX, and --help should not wait for it.

WorkloadArgument = Annotated[
    str, typer.Argument(metavar="WORKLOAD", help="module:function, e.g. models.transformer:gpt", show_default=False)
]
OptionsArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="options of the workload, e.g. batch=8 layers=24"),
]
TargetOption = Annotated[str, typer.Option(help="what to compile for; `remat-kit targets` lists them")]
MeshOption = Annotated[str | None, typer.Option(metavar="AXIS=N,...", help="devices by axis, e.g. data=4,model=2")]
XlaRematOption = Annotated[str, typer.Option(metavar="off|on", help="XLA's own rematerialization pass")]
GemmOption = Annotated[str, typer.Option(metavar="cublas|triton|both", help="who multiplies on a GPU target")]
AutotuneOption = Annotated[
    str | None, typer.Option(metavar="FILE", help="autotuning results of your own device, for XLA to load")
]
XlaOption = Annotated[
    list[str] | None, typer.Option("--xla-option", metavar="KEY=VALUE", help="any other compiler option of XLA")
]
JsonOption = Annotated[
    str | None, typer.Option("--json", metavar="FILE", help="also write JSON to FILE; - is standard output")
]
HtmlOption = Annotated[
    str | None,
    typer.Option("--html", metavar="FILE", help="also write one HTML file, which opens offline; - is standard output"),
]
ModuleOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="which program of a dump or profile, by module or file name; by default the largest"
    ),
]
PlotOption = Annotated[
    str | None, typer.Option("--plot", metavar="FILE", help="also plot need against step time, as .png or .svg")
]
ForceOption = Annotated[bool, typer.Option("--force", help="overwrite files that exist")]


def parse_options(texts: list[str] | None) -> tuple[tuple[str, Any], ...]:
    """The workload's options, each once."""
    from remat_kit._step import parse_option

    options: dict[str, Any] = {}
    for text in texts or ():
        name, value = parse_option(text)
        if name in options:
            raise WorkloadError(f"option {name!r} is given twice: {options[name]!r} and {value!r}. Give it once.")
        options[name] = value
    return tuple(sorted(options.items()))


def check_workload(spec: str) -> str:
    """`spec`, if it has the form module:function."""
    module, separator, function = spec.partition(":")
    if not (separator and module and function):
        raise WorkloadError(f"{spec!r} is not a workload. Write module:function, e.g. models.transformer:gpt.")
    return spec


def check_target(name: str, mesh: str | None) -> None:
    """Raises TargetError when there is no such target or mesh. Starts no backend.

    What is attached is found out in a process of its own: a backend that runs here would hold the device's
    memory while the cells want it.
    """
    from remat_kit._target import CHIPS, get_target, parse_mesh

    if name == "attached" or name.removeprefix("attached-") in {*CHIPS} - {name}:
        if mesh is not None:
            parse_mesh(mesh)
        return
    get_target(name, mesh)


def parse_compile_options(
    xla_remat: str, gemm: str, autotune_results: str | None, xla_options: list[str] | None
) -> tuple["CompileOptions", ...]:
    """One set of compile options, or with `both` one for each GEMM backend."""
    from remat_kit._compile import CompileOptions

    if gemm not in ("cublas", "triton", "both"):
        raise RematKitError(f"--gemm is {gemm!r}. Give cublas, triton or both.")
    pairs = []
    for text in xla_options or ():
        name, separator, value = text.partition("=")
        if not separator or not name:
            raise RematKitError(f"--xla-option {text!r} is not an option of XLA. Write key=value.")
        if name in dict(pairs):
            raise RematKitError(f"--xla-option {name} is given twice. Give each option once.")
        pairs.append((name, value))
    backends = ("cublas", "triton") if gemm == "both" else (gemm,)
    if autotune_results:
        # The results decide for each matmul, so both would be the same row twice.
        backends = backends[:1]
    return tuple(CompileOptions(xla_remat, backend, autotune_results, tuple(sorted(pairs))) for backend in backends)
