"""The profile folder for XProf: what XProf itself reads out of it, and what is refused."""

import json
import os
from pathlib import Path

import pytest
from hlo_samples import hand_made, step
from test_hlo_heap import ALLOC, FREE, assignment

from remat_kit import _xprof
from remat_kit._errors import OutputError, RematKitError
from remat_kit._hlo.heap import replay

SMALL = assignment([10, 30], (0, [(ALLOC, 1), (ALLOC, 2), (FREE, 1), (FREE, 2)])).SerializeToString()


def named(name, number=7):
    proto = hand_made(main=lambda computation: 0)
    proto.hlo_module.name, proto.hlo_module.id = name, number
    return proto.SerializeToString()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("policy", ["full", "offload"])
def test_memory_viewer_shows_the_same_peak(policy, tmp_path):
    convert = pytest.importorskip("xprof.convert.raw_to_tool_data")
    sample = step(policy)
    run = _xprof.write(tmp_path / "log", sample.data)
    plane = str(run / "host.xplane.pb")
    # What the server asks for when a run is opened: it offers a memory viewer only when this says so.
    assert {"memory_viewer", "graph_viewer"} <= set(convert.xspace_to_tool_names([plane]))
    heap = replay(sample.proto)
    for color, peak in ((0, heap.peak_bytes), (5, heap.host_peak_bytes)):
        if not peak:
            continue
        options = {"module_name": _xprof.module_name(sample.data), "memory_space": str(color)}
        data, _ = convert.xspace_to_tool_data([plane], "memory_viewer", options)
        answer = json.loads(data)
        assert round(answer["peakHeapMib"] * 2**20) == peak
        if color == 0:
            assert answer.get("peakHeapSizePosition", 0) == heap.peak_event


@pytest.mark.filterwarnings("ignore")
def test_xprof_finds_the_program_in_the_profile_alone(tmp_path):
    convert = pytest.importorskip("xprof.convert.raw_to_tool_data")
    sample = step("full")
    run = _xprof.write(tmp_path, sample.data)
    program = run / f"{_xprof.module_name(sample.data)}.hlo_proto.pb"
    program.unlink()
    convert.xspace_to_tool_names([str(run / "host.xplane.pb")])
    assert replay(_read(program)).peak_bytes == replay(sample.proto).peak_bytes


def _read(path):
    from remat_kit._hlo.proto import parse

    return parse(path.read_bytes())


@pytest.mark.filterwarnings("ignore")
def test_the_server_finds_the_run(tmp_path):
    plugin = pytest.importorskip("xprof.profile_plugin")
    server = pytest.importorskip("xprof.server")
    _xprof.write(tmp_path, step("full").data)
    context = server.TBContext(str(tmp_path), server.DataProvider(str(tmp_path)), server.TBContext.Flags(False))
    served = plugin.ProfilePlugin(context)
    assert list(served.generate_runs()) == [_xprof.RUN]
    assert "memory_viewer" in served.run_tools_imp(_xprof.RUN)


def test_files_are_named_as_in_a_profile(tmp_path):
    run = _xprof.write(tmp_path / "new" / "log", named("jit_step", 3))
    assert run == tmp_path / "new" / "log" / "plugins" / "profile" / "remat_kit"
    assert sorted(os.listdir(run)) == ["host.xplane.pb", "jit_step(3).hlo_proto.pb"]
    assert os.listdir(run.parent) == ["remat_kit"]


@pytest.mark.parametrize(("name", "file"), [("a/../b", "a_.._b(7)"), ("", "module(7)"), ("jit(f)", "jit_f_(7)")])
def test_a_module_cannot_name_a_file_elsewhere(name, file):
    assert _xprof.module_name(named(name)) == file


def test_an_empty_folder_may_be_filled_and_another_only_with_force(tmp_path):
    (tmp_path / "log").mkdir()
    run = _xprof.write(tmp_path / "log", SMALL)
    (run / "left_behind").write_text("")
    other = run.parent / "other"
    other.mkdir()
    with pytest.raises(OutputError, match=r"log is not empty.*Name another folder, or allow it with --force"):
        _xprof.write(tmp_path / "log", SMALL)
    assert (run / "left_behind").exists()
    _xprof.write(tmp_path / "log", SMALL, force=True)
    assert sorted(os.listdir(run.parent)) == ["other", "remat_kit"]
    assert not (run / "left_behind").exists()


def test_what_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"file is a file. Name a folder that does not exist yet"):
        _xprof.write(tmp_path / "file", SMALL)
    with pytest.raises(RematKitError, match="not a serialized HloProto"):
        _xprof.write(tmp_path / "log", b"\xff\xff")
    assert not (tmp_path / "log").exists()
    # Permissions do not hold for root, who runs the tests in many containers.
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(OutputError, match=f"the folder {tmp_path} is not writable. Name a folder elsewhere"):
        _xprof.check(tmp_path / "log")


def test_nothing_is_left_of_a_run_that_cannot_be_written(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OutputError, match=r"cannot write .*log: No space left on device. Name a folder elsewhere"):
        _xprof.write(tmp_path / "log", SMALL)
    assert os.listdir(tmp_path / "log" / "plugins" / "profile") == []


@pytest.mark.parametrize("name", ["", "-"])
def test_a_profile_needs_the_name_of_a_folder(name):
    with pytest.raises(OutputError, match=f"--xprof '{name}' is no folder"):
        _xprof.check(name)
