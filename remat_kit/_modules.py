"""Programs that users bring: those in an XLA dump or in a profile, found and read without compiling anything.

Each is a serialized HloProto with its buffer assignment:
  `*after_optimizations.hlo.pb`, which XLA writes with xla_dump_to=DIR and xla_dump_hlo_as_proto=True;
  inside of `HOST.xplane.pb`, which jax.profiler writes into `plugins/profile/<run>/`;
  `MODULE.hlo_proto.pb`, which XProf takes out of the latter when it opens the profile.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from remat_kit._errors import RematKitError, did_you_mean
from remat_kit._hlo import xplane
from remat_kit._hlo.proto import parse
from remat_kit._units import format_bytes

_DUMP, _PROGRAM, _PROFILE = ".hlo.pb", ".hlo_proto.pb", ".xplane.pb"
_BEFORE = "before_optimizations"
_GZIP = b"\x1f\x8b"
_NAMED = 20  # modules that an error names
_WANTED = (
    "Give the *after_optimizations.hlo.pb that XLA writes with xla_dump_to=DIR and xla_dump_hlo_as_proto=True, "
    "a *.hlo_proto.pb or *.xplane.pb of a profile, or a folder of such files."
)


@dataclass(frozen=True)
class ModuleFile:
    """A program in a file.

    Attributes:
      path: where the file is.
      inside: the program's name in a profile that holds several, e.g. `jit_step(3)`; "" when the file is the program.
      bytes: size of the program.
      name: XLA's name of the module, e.g. `jit_step`; "" when it cannot be read.
      instructions: how many the module has, in all computations: the size of the program.
      digest: of its content: two files, or two hosts of a profile, may hold the same.
      problem: why it cannot be analyzed, "" when it can.
    """

    path: Path
    bytes: int
    name: str = ""
    instructions: int = 0
    digest: str = ""
    inside: str = ""
    problem: str = ""


def find_modules(path: Path | str) -> tuple[ModuleFile, ...]:
    """The programs in a file, or in all files below a folder: most instructions first, then most bytes.

    In a folder, programs before optimization are passed over, and so is what a profile holds when XProf has taken it
    out. Others that cannot be used are in the answer with their problem, at the end. Raises RematKitError when nothing
    can be used.
    """
    path = Path(path)
    if not path.exists():
        raise RematKitError(f"there is no file or folder {path}. {_WANTED}")
    if path.is_dir():
        files = sorted(each for each in path.rglob("*.pb") if _is_wanted(each))
        found = [module for each in files for module in _read(each) if not _is_beside(module, files)]
        if not found:
            raise RematKitError(f"the folder {path} holds no program.{_instead(path)} {_WANTED}")
    else:
        if not path.is_file():
            raise RematKitError(
                f"{path} is a pipe or a device, which cannot be read twice. Write it to a file. {_WANTED}"
            )
        found = _read(path)
        if not found:
            raise RematKitError(f"{path} is a profile in which no program ran. Take it around a step. {_WANTED}")
    modules = sorted(found, key=_largest_first)
    if modules[0].problem:
        first, more = modules[0], f" (and {len(modules) - 1} more like it)" if len(modules) > 1 else ""
        lead = f"nothing in the folder {path} can be used. " if path.is_dir() else ""
        raise RematKitError(f"{lead}{_place(first)}{more}: {first.problem}")
    return tuple(modules)


def choose(modules: Sequence[ModuleFile], name: str | None = None) -> ModuleFile:
    """The largest of the modules that can be analyzed, or the one that `name` names.

    `name` is a module's or a file's name, or a part of either that only one of them has. Raises RematKitError,
    with a list, when it names none or several.
    """
    usable = [each for each in modules if not each.problem]
    assert usable, "find_modules has refused it"
    if name is None:
        return usable[0]
    exact = [each for each in usable if name in (each.name, each.inside, each.path.name, _stem(each))]
    found = exact or [each for each in usable if any(name in each_name for each_name in _names(each))]
    if len({each.digest for each in found}) == 1:
        return found[0]
    if found:
        raise RematKitError(
            f"--module {name!r} fits {len(found)} modules. Give more of the name, or one of these files in the place "
            f"of the folder:\n{listing(found, None, _NAMED)}"
        )
    hint = did_you_mean(name, [each.name for each in usable])
    raise RematKitError(f"there is no module {name!r}.{hint} There are:\n{listing(usable, None, _NAMED)}")


def read(module: ModuleFile) -> bytes:
    """The HloProto's bytes. Raises RematKitError when the file cannot be read any more, or has changed."""
    try:
        data = module.path.read_bytes()
    except OSError as error:
        raise RematKitError(f"cannot read {module.path}: {error.strerror}. {_WANTED}") from error
    held = xplane.programs(data) if module.inside else [("", memoryview(data))]
    for _, program in held:
        if _digest(program) == module.digest:
            return bytes(program)
    raise RematKitError(f"{module.path} has changed since it was looked at. Run the command again.")


def listing(modules: Sequence[ModuleFile], chosen: ModuleFile | None, limit: int | None = None) -> str:
    """One line a module, the chosen one marked with `*`; without a newline at the end.

    With a `limit`, so many of them, the chosen one among them, those that cannot be used counted, and a line with how
    many more there are.
    """
    shown = list(modules)
    if limit is not None and len(modules) > limit + 1:
        usable = [each for each in modules if not each.problem] or shown
        shown = usable[:limit]
        if chosen in usable[limit:]:
            shown[-1:] = [chosen]
    width = max(len(each.name) for each in shown)
    lines = [
        f"{'*' if each is chosen else ' '} {each.name:<{width}}  {each.instructions:>7,} instructions  "
        f"{format_bytes(each.bytes):>11}  {_place(each)}" + (f"  not usable: {each.problem}" if each.problem else "")
        for each in shown
    ]
    if rest := len(modules) - len(shown):
        bad = sum(1 for each in modules if each.problem)
        unusable = f", {bad:,} of them not usable" if bad else ""
        lines.append(f"  {rest:,} more{unusable}{'; --module NAME chooses another' if chosen else ''}")
    return "\n".join(lines)


def _place(module: ModuleFile) -> str:
    return f"{module.path}: {module.inside}" if module.inside else str(module.path)


def _names(module: ModuleFile) -> tuple[str, ...]:
    return module.name, module.inside, module.path.name


def _largest_first(module: ModuleFile) -> tuple[bool, int, int, str]:
    return bool(module.problem), -module.instructions, -module.bytes, _place(module)


def _stem(module: ModuleFile) -> str:
    """The file's name without what all such files end in: `jit_step(1)` of `jit_step(1).hlo_proto.pb`."""
    return module.path.name.removesuffix(_DUMP).removesuffix(_PROGRAM)


def _is_wanted(path: Path) -> bool:
    """Whether a file below a folder is looked at."""
    if _BEFORE in path.name or not path.is_file():
        return False
    # XProf writes an empty NO_MODULE to say that a profile holds none.
    return path.name.endswith((_DUMP, _PROGRAM, _PROFILE)) and path.name != f"NO_MODULE{_PROGRAM}"


def _is_beside(module: ModuleFile, files: Sequence[Path]) -> bool:
    """Whether a program in a profile lies beside it as a file of its own."""
    return bool(module.inside) and module.path.with_name(module.inside + _PROGRAM) in files


def _read(path: Path) -> list[ModuleFile]:
    """The programs of one file, each with its problem when there is one."""
    try:
        data = path.read_bytes()
    except OSError as error:
        return [ModuleFile(path, 0, problem=f"it cannot be read: {error.strerror}. {_WANTED}")]
    if path.name.endswith(_PROFILE):
        try:
            return [_module(path, program, name) for name, program in xplane.programs(data)]
        except RematKitError as error:
            return [ModuleFile(path, len(data), problem=str(error))]
    if problem := _not_a_proto(path, data):
        return [ModuleFile(path, len(data), problem=problem)]
    return [_module(path, memoryview(data), "")]


def _module(path: Path, data: memoryview, inside: str) -> ModuleFile:
    try:
        proto = parse(bytes(data))
    except RematKitError as error:
        return ModuleFile(path, len(data), inside=inside, problem=str(error))
    count = sum(len(computation.instructions) for computation in proto.hlo_module.computations)
    problem = ""
    if not proto.buffer_assignment.buffer_allocations:
        when = "from before optimization" if _BEFORE in path.name else "of a module without buffer assignment"
        problem = f"it is {when}, so it does not say what memory the program takes. {_WANTED}"
    return ModuleFile(path, len(data), proto.hlo_module.name, count, _digest(data), inside, problem)


def _digest(data: memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


def _not_a_proto(path: Path, data: bytes) -> str:
    """What is wrong with the file as a whole, "" when nothing is."""
    if not data:
        return f"it is empty. {_WANTED}"
    if data.startswith(_GZIP):
        return "it is compressed. Unpack it with gunzip, or dump again without xla_dump_compress_protos."
    if path.suffix == ".txt":
        return f"it is a text dump, which leaves out the buffer assignment. {_WANTED}"
    return ""


def _instead(path: Path) -> str:
    """What a folder without programs holds in their place."""
    kinds = (
        (f"*{_BEFORE}*.pb", "programs from before optimization"),
        ("*.hlo.pb.gz", "compressed programs, which gunzip unpacks"),
        ("*optimizations*.txt", "text dumps"),
        (f"*{_PROFILE}", "profiles in which no program ran"),
    )
    counts = ((sum(1 for _ in path.rglob(pattern)), what) for pattern, what in kinds)
    found = [f"{what} ({count})" for count, what in counts if count]
    return f" It has {'; '.join(found)}." if found else ""
