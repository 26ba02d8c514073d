"""What a row depends on besides what the user typed: code, versions, settings. A change makes another cell."""

import hashlib
import importlib.metadata
import os
import platform
import site
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

# Files that cannot change a row: they choose cells, start them, keep rows and show them.
_NOT_IN_A_ROW = (
    *("cli", "_report", "_store.py", "_sweep.py", "_pool.py", "_worker.py", "_pareto.py", "__main__.py"),
    *("_live.py", "_border.py", "_foresee.py", "_max.py"),
)
# Settings of JAX that change neither the program nor what is compiled from it. Which device is meant is in the target.
_HARMLESS = ("CACHE", "LOG", "TRACEBACK", "PLATFORM", "CONSTRAINTS_CHECK")


def kit_digest() -> str:
    """The digest of those of remat_kit's own files that a row depends on."""
    root = Path(__file__).parent
    files = [
        path
        for pattern in ("*.py", "*.toml")
        for path in root.rglob(pattern)
        if path.relative_to(root).parts[0] not in _NOT_IN_A_ROW
    ]
    return digest_files(files, root)


def digest_files(files: Iterable[Path], root: Path) -> str:
    """The SHA-256 of the contents and names of `files`, names taken from `root` where they are below it."""
    total = hashlib.sha256()
    for path in sorted(set(files)):
        name = path.relative_to(root) if path.is_relative_to(root) else path
        total.update(f"{name}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return total.hexdigest()


def workload_files(module: str, already_imported: Iterable[str]) -> list[Path]:
    """The source files of an imported workload module: its whole top-level package, and what it brought in.

    That is every module that was not imported before and lies outside the standard library and installed
    packages, whose versions stand for them. What the workload imports only when it is called is found if it
    is in its own package, and not otherwise.
    """
    top = sys.modules[module.partition(".")[0]]
    files = {path for folder in getattr(top, "__path__", ()) for path in Path(folder).rglob("*.py")}
    installed = _installed_folders()
    for name in set(sys.modules) - set(already_imported) | {module}:
        source = getattr(sys.modules[name], "__file__", None)
        if source and source.endswith(".py"):
            path = Path(source)
            if name == module or not any(path.is_relative_to(folder) for folder in installed):
                files.add(path)
    return sorted(files)


def loaded_sources() -> dict[str, str]:
    """Path -> SHA-256 of each module that this process has loaded from outside installed packages and remat_kit.

    What a workload imports only when it is called is among them after the call.
    """
    apart = [*_installed_folders(), Path(__file__).parent]
    found = {}
    for module in list(sys.modules.values()):
        source = getattr(module, "__file__", None)
        if source and source.endswith(".py") and not any(Path(source).is_relative_to(folder) for folder in apart):
            found[source] = digest_file(Path(source))
    return found


def digest_file(path: Path) -> str:
    """The SHA-256 of a file's content; "" when it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


def _installed_folders() -> list[Path]:
    folders = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return [Path(folder) for folder in {*folders, *site.getsitepackages(), site.getusersitepackages()} if folder]


def versions() -> dict[str, str]:
    """The versions of what traces and compiles a step: jax, jaxlib, flax, optax and each GPU plugin."""
    found: dict[str, str] = {}
    for name in ("jax", "jaxlib", "flax", "optax"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    plugins = []
    for name in ("jax-cuda12-pjrt", "jax-cuda13-pjrt"):
        try:
            plugins.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    found["plugin"] = ", ".join(plugins) or "none"
    return found


def environment() -> str:
    """The settings in environment variables that can change what is compiled, as `NAME=value` lines."""
    names = sorted(name for name in os.environ if name.startswith("JAX_") or name == "XLA_FLAGS")
    return "\n".join(f"{name}={os.environ[name]}" for name in names if not any(word in name for word in _HARMLESS))


def host() -> str:
    """This machine's processor, on which a step for the target `cpu` depends."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return f"{platform.machine()} {model} {os.cpu_count()}"
