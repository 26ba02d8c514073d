"""Programs in dumps and profiles: found, told apart and read, or refused with a message that helps."""

import gzip
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hlo_samples import add, hand_made
from test_hlo_heap import ALLOC, FREE, assignment

from remat_kit._errors import RematKitError
from remat_kit._hlo import xplane
from remat_kit._hlo.proto import parse
from remat_kit._modules import choose, find_modules, listing, read


def program(name: str = "jit_step", instructions: int = 2, assigned: bool = True) -> bytes:
    """A serialized HloProto of so many instructions."""
    if assigned:
        proto = assignment([8] * instructions, (0, [(ALLOC, 1), (FREE, 1)]))
    else:
        proto = hand_made(main=lambda computation: add(computation, 1, "parameter").id)
    proto.hlo_module.name = name
    return proto.SerializeToString()


PROFILE = xplane.profile_of("jit_step(3)", program(instructions=5), "host")


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    """A folder as XLA leaves it: two programs, each before and after optimization, and texts."""
    for number, (name, instructions) in enumerate((("jit_init", 3), ("jit_step", 9))):
        start = f"module_{number:04}.{name}"
        (tmp_path / f"{start}.before_optimizations.hlo.pb").write_bytes(program(name, assigned=False))
        (tmp_path / f"{start}.sm_9.0_gpu_after_optimizations.hlo.pb").write_bytes(program(name, instructions))
        (tmp_path / f"{start}.sm_9.0_gpu_after_optimizations-buffer-assignment.txt").write_text("BufferAssignment:")
    return tmp_path


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    """A profile folder that XProf has opened."""
    run = tmp_path / "log" / "plugins" / "profile" / "2026_11_29"
    run.mkdir(parents=True)
    for name, instructions in (("jit_step(3)", 5), ("jit_eval(4)", 4)):
        (run / f"{name}.hlo_proto.pb").write_bytes(program(name.partition("(")[0], instructions))
    (run / "NO_MODULE.hlo_proto.pb").write_bytes(b"")
    (run / "host.xplane.pb").write_bytes(b"")
    return tmp_path / "log"


def test_one_file(dump):
    path = dump / "module_0001.jit_step.sm_9.0_gpu_after_optimizations.hlo.pb"
    (found,) = find_modules(path)
    assert (found.path, found.bytes, found.name, found.instructions) == (path, path.stat().st_size, "jit_step", 9)
    assert read(choose((found,))) == path.read_bytes()


def test_a_dump_has_its_optimized_programs_largest_first(dump):
    assert [(each.name, each.instructions) for each in find_modules(str(dump))] == [("jit_step", 9), ("jit_init", 3)]


def test_a_profile_is_searched_below(profile):
    assert [each.path.name for each in find_modules(profile)] == [
        "jit_step(3).hlo_proto.pb",
        "jit_eval(4).hlo_proto.pb",
    ]


def test_a_fresh_profile_has_its_programs_inside(tmp_path):
    for host in ("a", "b"):
        (tmp_path / f"{host}.xplane.pb").write_bytes(PROFILE)
    first, second = find_modules(tmp_path)
    assert (first.path, second.path) == (tmp_path / "a.xplane.pb", tmp_path / "b.xplane.pb")
    assert (first.name, first.inside, first.instructions) == ("jit_step", "jit_step(3)", 5)
    # Both hosts ran the same program, so a name is not ambiguous.
    for name in (None, "jit_step", "jit_step(3)", "step"):
        assert read(choose((first, second), name)) == program(instructions=5)
    assert listing((first, second), first).splitlines()[0].endswith("a.xplane.pb: jit_step(3)")
    # What XProf took out is there once.
    (tmp_path / "jit_step(3).hlo_proto.pb").write_bytes(program(instructions=5))
    assert [each.inside for each in find_modules(tmp_path)] == [""]


def test_a_profile_of_jax(tmp_path):
    import jax

    # A name of its own: a profile holds every program of the process.
    def square_for_the_profile(x):
        return (x @ x).sum()

    square = jax.jit(square_for_the_profile)
    x = jax.numpy.ones((8, 8))
    square(x)
    with jax.profiler.trace(str(tmp_path)):
        square(x).block_until_ready()
    module = choose(find_modules(tmp_path), "jit_square_for_the_profile")
    assert module.path.name.endswith(".xplane.pb")
    assert parse(read(module)).hlo_module.name == "jit_square_for_the_profile"


def test_a_file_that_changed_meanwhile(tmp_path):
    path = tmp_path / "a.hlo.pb"
    path.write_bytes(program())
    (module,) = find_modules(path)
    path.write_bytes(program("jit_other"))
    with pytest.raises(RematKitError, match=r"a\.hlo\.pb has changed since it was looked at\. Run the command again"):
        read(module)


def test_of_as_many_instructions_the_larger_file_comes_first(tmp_path):
    for name in ("jit_a", "jit_a_longer_name"):
        (tmp_path / f"{name}.hlo_proto.pb").write_bytes(program(name))
    assert [each.name for each in find_modules(tmp_path)] == ["jit_a_longer_name", "jit_a"]


@pytest.mark.parametrize("name", ["jit_eval", "jit_eval(4)", "jit_eval(4).hlo_proto.pb", "eval"])
def test_a_module_is_chosen_by_its_name_or_its_files(name, profile):
    modules = find_modules(profile)
    assert choose(modules).name == "jit_step"
    assert choose(modules, name).name == "jit_eval"


def test_a_whole_name_is_not_ambiguous(tmp_path):
    for name in ("jit_step", "jit_step_2"):
        (tmp_path / f"{name}.hlo_proto.pb").write_bytes(program(name))
    assert choose(find_modules(tmp_path), "jit_step").name == "jit_step"


def test_an_unknown_or_ambiguous_name_lists_what_there_is(profile):
    modules = find_modules(profile)
    with pytest.raises(RematKitError, match=r"no module 'jit_stp'\. Did you mean 'jit_step'\? There are:\n") as caught:
        choose(modules, "jit_stp")
    assert all(each.path.name in str(caught.value) for each in modules)
    with pytest.raises(RematKitError, match=r"--module 'jit' fits 2 modules\. Give more of the name, or one of these"):
        choose(modules, "jit")


def test_the_list_marks_what_was_chosen(profile):
    modules = find_modules(profile)
    lines = listing(modules, choose(modules, "eval")).splitlines()
    assert [line[:10] for line in lines] == ["  jit_step", "* jit_eval"]
    assert "5 instructions" in lines[0]


def test_a_long_list_has_the_largest_and_the_chosen(tmp_path):
    for count in range(1, 10):
        (tmp_path / f"{count}.hlo.pb").write_bytes(program(f"jit_{count}", count))
    (tmp_path / "broken.hlo.pb").write_bytes(b"\xff\xff\xff")
    modules = find_modules(tmp_path)
    more = "  7 more, 1 of them not usable; --module NAME chooses another"
    lines = listing(modules, choose(modules), 3).splitlines()
    assert ([line[:7] for line in lines[:-1]], lines[-1]) == (["* jit_9", "  jit_8", "  jit_7"], more)
    lines = listing(modules, choose(modules, "jit_2"), 3).splitlines()
    assert ([line[:7] for line in lines[:-1]], lines[-1]) == (["  jit_9", "  jit_8", "* jit_2"], more)
    # A line that says "1 more" takes as much room as the one.
    assert listing(modules, None, 9) == listing(modules, None)


def test_files_that_cannot_be_used_are_listed_and_not_chosen(dump):
    (dump / "broken.hlo.pb").write_bytes(b"\xff\xff\xff")
    (dump / "a.0001.pass.after_fusion.hlo.pb").write_bytes(program("jit_pass", assigned=False))
    modules = find_modules(dump)
    assert [bool(each.problem) for each in modules] == [False, False, True, True]
    assert choose(modules).name == "jit_step"
    lines = listing(modules, None).splitlines()
    assert "not usable: it is of a module without buffer assignment" in lines[2]
    assert "not usable: 3 bytes that are not a serialized HloProto" in lines[3]
    with pytest.raises(RematKitError, match="no module 'jit_pass'"):
        choose(modules, "jit_pass")


WANTED = r"Give the \*after_optimizations\.hlo\.pb that XLA writes with xla_dump_to=DIR"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.hlo.pb", b"", rf"a\.hlo\.pb: it is empty\. {WANTED}"),
        ("a.hlo.pb.gz", gzip.compress(b"x", mtime=0), r"it is compressed\. Unpack it with gunzip"),
        ("a.hlo.pb", gzip.compress(b"x", mtime=0), r"it is compressed\. Unpack it with gunzip"),
        ("a.after_optimizations.txt", b"HloModule jit_step", rf"it is a text dump.*{WANTED}"),
        ("a.hlo.pb", b"HloModule jit_step", "not a serialized HloProto|hold no HLO module"),
        ("a.before_optimizations.hlo.pb", program(assigned=False), rf"it is from before optimization, so.*{WANTED}"),
        ("a.hlo.pb", program(assigned=False), rf"it is of a module without buffer assignment, so.*{WANTED}"),
        ("host.xplane.pb", b"", r"host\.xplane\.pb is a profile in which no program ran\. Take it around a step\."),
        ("host.xplane.pb", PROFILE[:-9], r"it is not a whole \*\.xplane\.pb\. Take the profile again"),
        ("host.xplane.pb", b"\xff" * 20, r"it is not a whole \*\.xplane\.pb\. Take the profile again"),
        ("host.xplane.pb", b"\x0b", r"it is not a whole \*\.xplane\.pb\. Take the profile again"),
    ],
)
def test_files_that_are_refused(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(RematKitError, match=message):
        find_modules(tmp_path / name)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, rf"holds no program\. {WANTED}"),
        (
            {"x.before_optimizations.hlo.pb": b"x"},
            r"no program\. It has programs from before optimization \(1\)\. Give",
        ),
        (
            {"x.after_optimizations.txt": b"x", "y.hlo.pb.gz": b"x"},
            r"It has compressed programs, .* \(1\); text dumps \(1\)\.",
        ),
        ({"a/host.xplane.pb": b""}, r"It has profiles in which no program ran \(1\)\."),
        (
            {"a.hlo.pb": b"", "b.hlo.pb": b""},
            r"nothing in the folder .* can be used\. .*a\.hlo\.pb \(and 1 more like it",
        ),
    ],
)
def test_folders_that_are_refused(files, message, tmp_path):
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    with pytest.raises(RematKitError, match=message):
        find_modules(tmp_path)


def test_what_is_not_there_or_cannot_be_read(tmp_path, monkeypatch):
    with pytest.raises(RematKitError, match=rf"there is no file or folder .*nothing\.hlo\.pb\. {WANTED}"):
        find_modules(tmp_path / "nothing.hlo.pb")
    path = tmp_path / "a.hlo.pb"
    path.write_bytes(program())
    (module,) = find_modules(path)

    def denied(_):
        raise PermissionError(13, "Permission denied")

    # Permissions do not hold for root, who runs the tests in many containers.
    monkeypatch.setattr(Path, "read_bytes", denied)
    with pytest.raises(RematKitError, match=r"a\.hlo\.pb: it cannot be read: Permission denied\."):
        find_modules(path)
    with pytest.raises(RematKitError, match=r"cannot read .*a\.hlo\.pb: Permission denied\."):
        read(module)


@pytest.mark.parametrize("path", ["/dev/zero", "pipe.hlo.pb"])
def test_a_device_or_a_pipe_is_not_read(path, tmp_path):
    os.mkfifo(tmp_path / "pipe.hlo.pb")
    with pytest.raises(RematKitError, match="is a pipe or a device, which cannot be read twice"):
        find_modules(tmp_path / path)


def test_reading_needs_no_jax(dump):
    code = (
        "import sys; from remat_kit import _modules; "
        f"assert _modules.find_modules({str(dump)!r})[0].instructions == 9; assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
