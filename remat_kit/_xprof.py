"""A program as a profile folder that XProf's memory viewer opens: `xprof --logdir DIR`.

A run of XProf is the folder `plugins/profile/<run>/`. Its server shows a run's memory viewer only when a
`*.xplane.pb` in it says that it holds a program; the viewer itself reads `MODULE(ID).hlo_proto.pb`, which XProf makes
of the former when it is missing. Both are written here, without XProf being installed.
"""

import os
import re
import shutil
import tempfile
from pathlib import Path

from remat_kit._errors import OutputError
from remat_kit._hlo.proto import parse
from remat_kit._hlo.xplane import profile_of

RUN = "remat_kit"
_HOST = "host"


def check(folder: Path | str, force: bool = False) -> None:
    """Raises OutputError when `folder` is not one that `write` may make or fill."""
    if str(folder) in ("", "-"):
        raise OutputError(f"--xprof {str(folder)!r} is no folder: a profile is several files. Name a folder.")
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise OutputError(f"--xprof {folder} is a file. Name a folder that does not exist yet.")
    if folder.is_dir() and any(folder.iterdir()) and not force:
        raise OutputError(
            f"the folder {folder} is not empty, and what is in it would be mixed with the profile. Name another "
            "folder, or allow it with --force."
        )
    above = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    if not os.access(above, os.W_OK | os.X_OK):
        raise OutputError(f"cannot write {folder}: the folder {above} is not writable. Name a folder elsewhere.")


def write(folder: Path | str, data: bytes, force: bool = False) -> Path:
    """Writes the HloProto `data` as the one run of a profile folder; returns the run's folder.

    The run appears whole or not at all; with `force` it takes the place of an older run of ours and leaves other
    runs alone. Raises RematKitError when `data` is no HloProto, and OutputError when it cannot be written.
    """
    check(folder, force)
    name = module_name(data)
    runs = Path(folder) / "plugins" / "profile"
    try:
        runs.mkdir(parents=True, exist_ok=True)
        new = Path(tempfile.mkdtemp(prefix=f".{RUN}-", dir=runs))
        try:
            new.chmod(0o755)
            (new / f"{name}.hlo_proto.pb").write_bytes(data)
            (new / f"{_HOST}.xplane.pb").write_bytes(profile_of(name, data, _HOST))
            run = runs / RUN
            if run.exists():
                shutil.rmtree(run)
            new.rename(run)
        except BaseException:
            shutil.rmtree(new, ignore_errors=True)
            raise
    except OSError as error:
        raise OutputError(f"cannot write {folder}: {error.strerror}. Name a folder elsewhere.") from error
    return run


def module_name(data: bytes) -> str:
    """`jit_step(1)`: what XProf calls the program of `data`. No character in it is special in a file's name."""
    module = parse(data).hlo_module
    return f"{re.sub(r'[^\w.-]', '_', module.name) or 'module'}({module.id})"
