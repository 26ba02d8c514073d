"""The shape of the code: imports go one way, files stay small, names have one home."""

import ast
import graphlib
import importlib
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import remat_kit
from remat_kit import names

ROOT = Path(remat_kit.__file__).parents[1]
PACKAGE = ROOT / "remat_kit"
FILES = sorted(PACKAGE.rglob("*.py"))

# Along the flow: a file imports only what stands before it. A package is one stage; inside it there are no cycles.
ORDER = (
    "names",
    "_phase",
    "_errors",
    "_units",
    "_collector",
    "_layering",
    "_policy",
    "_lower",
    "_disk",
    "_wrap",
    "_stack",
    "_scopes",
    "_step",
    "_sharding",
    "_explanation",
    "_communication",
    "_record",
    "_jaxpr",
    "_saved",
    "_live",
    "_regions",
    "_target",
    "_policy_check",
    "_trace",
    "_compile",
    "_hlo",
    "_modules",
    "_overlap",
    "_advice",
    "_explain",
    "_program",
    "_fingerprint",
    "_analyze",
    "_reasons",
    "_effect",
    "_diff",
    "_xprof",
    "_measure",
    "_plan",
    "_enable",
    "_cell",
    "_worker",
    "_pool",
    "_store",
    "_sweep",
    "_border",
    "_foresee",
    "_max",
    "_pareto",
    "_report",
    "cli",
    "__main__",
)


def module_of(file):
    """`_hlo.heap` for remat_kit/_hlo/heap.py; "" for the package's own __init__.py."""
    parts = list(file.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(file): file for file in FILES}


def imports_of(file):
    """(what is imported, line) of every import in `file`, those inside functions and type checks included."""
    package = [*file.relative_to(ROOT).parent.parts]
    for node in ast.walk(ast.parse(file.read_text(), str(file))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - node.level + 1]] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((f"{source}.{alias.name}", node.lineno) for alias in node.names)


def own_imports_of(file):
    """The modules of remat_kit that `file` imports, each with a line; "" is the package itself."""
    for name, line in imports_of(file):
        if name == "remat_kit" or name.startswith("remat_kit."):
            inner = name.removeprefix("remat_kit").removeprefix(".")
            if inner not in MODULES:  # the last part is a name in a module
                inner = inner.rpartition(".")[0]
            assert inner in MODULES, f"{file}:{line} imports {name}, which is no module of remat_kit"
            yield inner, line


def stage_of(module):
    return module.partition(".")[0]


def test_every_file_has_its_place_in_the_order():
    missing = {stage_of(module) for module in MODULES if module} - set(ORDER)
    assert not missing, f"add to ORDER where it stands in the flow: {', '.join(sorted(missing))}"


@pytest.mark.parametrize("module", sorted(set(MODULES) - {""}))
def test_a_file_imports_only_what_stands_before_it(module):
    place = ORDER.index(stage_of(module))
    for imported, line in own_imports_of(MODULES[module]):
        where = f"{MODULES[module].name}:{line}"
        assert imported, f"{where} imports from remat_kit itself, whose names come from all files: name the file"
        same_stage = stage_of(imported) == stage_of(module)
        assert same_stage or ORDER.index(stage_of(imported)) < place, f"{where} imports {imported}, which comes later"


def test_no_cycles():
    graph = {
        module: {imported for imported, _ in own_imports_of(file)} - {module}
        for module, file in MODULES.items()
        if module
    }
    order = list(graphlib.TopologicalSorter(graph).static_order())
    assert len(order) >= len(graph)


def test_the_checks_see_imports():
    assert dict(own_imports_of(PACKAGE / "_policy.py")).keys() >= {"names", "_errors"}
    assert {"_wrap", "_policy", "names"} <= {imported for imported, _ in own_imports_of(PACKAGE / "__init__.py")}


def test_the_core_imports_no_models_and_no_experiments():
    for file in FILES:
        for name, line in imports_of(file):
            assert name.partition(".")[0] not in ("models", "experiments", "tests"), f"{file}:{line} imports {name}"


def test_models_use_the_public_names():
    files = sorted((ROOT / "models").rglob("*.py"))
    assert files
    for file in files:
        for name, line in imports_of(file):
            if name.startswith("remat_kit"):
                parts = name.split(".")
                assert not any(part.startswith("_") for part in parts[1:]), f"{file}:{line} imports {name}"


def test_only_trace_touches_the_inside_of_jax():
    assert [file.name for file in FILES if "jax._src" in file.read_text()] == ["_trace.py"]


@pytest.mark.parametrize("folder", ["remat_kit", "models", "experiments", "tests"])
def test_files_are_short(folder):
    lengths = {str(file): len(file.read_text().splitlines()) for file in (ROOT / folder).rglob("*.py")}
    if folder == "remat_kit":
        ours = [file for kind in ("*.js", "*.css") for file in PACKAGE.rglob(kind) if file.name != "echarts.min.js"]
        assert ours
        lengths |= {str(file): len(file.read_text().splitlines()) for file in ours}
    assert lengths
    assert {file: length for file, length in lengths.items() if length >= 400} == {}


def test_the_public_names_are_exported_one_by_one():
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    # They are imported when first used, so the list stands where type checkers alone read it.
    (block,) = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    public = []
    for node in block.body:
        assert isinstance(node, ast.ImportFrom), f"line {node.lineno}: only exports belong here"
        home = importlib.import_module(node.module or "")
        for alias in node.names:
            assert getattr(remat_kit, alias.name) is getattr(home, alias.name)
            assert alias.asname == alias.name, f"line {node.lineno}: write {alias.name} as {alias.name}"
            assert not alias.name.startswith("_")
            public.append(alias.name)
    assert len(set(public)) == len(public)
    assert sorted(public) == dir(remat_kit)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = remat_kit.no_such_name  # pyright: ignore[reportAttributeAccessIssue]
    assert {"remat", "get_policy", "save", "offload", "union", "Policy", "POLICIES", "Step", "names"} <= set(public)


def _docstrings(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                yield first.value


def test_the_vocabulary_has_one_home():
    vocabulary = [entry.name for entry in names.VOCABULARY]
    assert len(set(vocabulary)) == len(vocabulary)
    strings = [
        node.value
        for node in ast.walk(ast.parse((PACKAGE / "names.py").read_text()))
        if isinstance(node, ast.Constant) and node.value in vocabulary
    ]
    assert sorted(strings) == sorted(vocabulary)  # each written once
    constants = {value for name, value in vars(names).items() if name.isupper() and isinstance(value, str)}
    assert constants == set(vocabulary)
    for file in [*FILES, *(ROOT / "models").rglob("*.py")]:
        if file.name == "names.py":
            continue
        tree = ast.parse(file.read_text())
        docstrings = {id(node) for node in _docstrings(tree)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and node.value in vocabulary and id(node) not in docstrings:
                pytest.fail(f"{file}:{node.lineno} spells {node.value!r}: use remat_kit.names")


def test_every_entry_of_the_vocabulary_is_described():
    for entry in names.VOCABULARY:
        assert entry.meaning
        assert set(entry.size) <= set("BTDHKCF()23"), entry


@pytest.mark.slow
def test_the_wheel_holds_the_package_alone(tmp_path):
    # From a copy: building leaves a folder behind.
    source = tmp_path / "source"
    shutil.copytree(PACKAGE, source / "remat_kit", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "models", source / "models")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(source)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    files = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    ours = {
        str(file.relative_to(ROOT)) for file in PACKAGE.rglob("*") if file.is_file() and "__pycache__" not in file.parts
    }
    assert files == ours
    for license_file in ("LICENSE", "remat_kit/_report/assets/echarts.LICENSE.txt"):
        assert any(name.endswith(f".dist-info/licenses/{license_file}") for name in zipfile.ZipFile(wheel).namelist())


def test_nothing_prints_but_the_command_line():
    for module, file in MODULES.items():
        if stage_of(module) in ("cli", "_worker", "__main__"):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            called = node.func if isinstance(node, ast.Call) else None
            assert not (isinstance(called, ast.Name) and called.id == "print"), f"{file}:{node.lineno} prints"
