"""Models that no one here wrote: Flax's own examples, and packages from PyPI.

Flax keeps its examples in its source distribution alone. `make foreign` unpacks those of the installed version into
`.foreign/`, and installs the packages of the extra `foreign`. Without them a test is skipped; with
REMAT_KIT_REQUIRE_FOREIGN=1 it fails.
"""

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parents[1] / ".foreign" / "examples"


def _missing(what: str) -> None:
    message = f"{what} is not here: run `make foreign`"
    if os.environ.get("REMAT_KIT_REQUIRE_FOREIGN") == "1":
        pytest.fail(message)
    pytest.skip(message)


def flax_example(example: str, module: str = "models") -> ModuleType:
    """A module of one of Flax's examples; what it imports from its own folder does not stay importable."""
    folder = EXAMPLES / example
    if not folder.is_dir():
        _missing(f"Flax's example {example}")
    name = f"flax_{example}_{module}"
    if name in sys.modules:
        return sys.modules[name]
    local = [file.stem for file in folder.glob("*.py")]
    before = {each: sys.modules.pop(each) for each in local if each in sys.modules}
    sys.path.insert(0, str(folder))
    try:
        spec = importlib.util.spec_from_file_location(name, folder / f"{module}.py")
        assert spec is not None
        assert spec.loader is not None
        made = importlib.util.module_from_spec(spec)
        sys.modules[name] = made  # dataclasses look their module up
        spec.loader.exec_module(made)
        made.beside = {each: sys.modules[each] for each in local if each in sys.modules}
    except BaseException:
        sys.modules.pop(name, None)
        raise
    finally:
        sys.path.remove(str(folder))
        for each in local:
            sys.modules.pop(each, None)
        sys.modules.update(before)
    return made


def package(name: str) -> ModuleType:
    """A package of the extra `foreign`."""
    if importlib.util.find_spec(name) is None:
        _missing(f"the package {name}")
    return importlib.import_module(name)
