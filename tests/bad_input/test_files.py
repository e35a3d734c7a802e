"""Written files: complete or absent, never a replacement of another file, and temporary files are removed."""

from __future__ import annotations

import json
import os
import stat
import threading
from functools import partial
from pathlib import Path

import pytest
from cases import LITTLE, Capture, Patch, command, message, model, saved

import rammer
from rammer.cache.disk_cache import LAYOUT, list_entries
from rammer.cache.whole_files import write_whole
from rammer.compile_options import Request
from rammer.compiled.artifact import is_artifact
from rammer.errors import BadInput
from rammer.jit.session import open_executable
from rammer_testing.cache_files import content, entries, store
from rammer_testing.nonempty import some

FIXED = LITTLE.replace("[1,N,8]", "[1,3,8]").replace("[1,N,5]", "[1,3,5]")


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> partial[tuple[int, str, str]]:
    """Return ``compiled(FILE)``: ``rammer compile m.onnx -o FILE``."""
    path = saved(tmp_path / "m.onnx", model(FIXED))
    return partial(command, monkeypatch, capsys, "compile", path, "--device", "toy", "-o")


Compiled = partial[tuple[int, str, str]]


def test_a_pipe_and_a_device_stay_what_they_are(tmp_path: Path, compiled: Compiled) -> None:
    pipe, null = tmp_path / "pipe", tmp_path / "null"
    os.mkfifo(pipe)
    try:
        os.mknod(null, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    except OSError:
        null = Path("/dev/null")  # to replace a device, a user must be able to create one
    for path, kind in ((pipe, "pipe"), (null, "device")):
        assert compiled(path)[::2] == (2, f"rammer: error: cannot write {path}: it is a {kind}, not an ordinary file\n")
    assert stat.S_ISFIFO(pipe.lstat().st_mode) and stat.S_ISCHR(null.lstat().st_mode)


def test_places_where_nothing_can_be_written(tmp_path: Path, compiled: Compiled) -> None:
    def refused(path: Path) -> str:
        code, _, err = compiled(path)
        assert code == 2 and "Traceback" not in err
        return err.removeprefix("rammer: error: ")

    assert refused(tmp_path / "no" / "f") == f"cannot write {tmp_path}/no/f: its folder does not exist\n"
    assert refused(tmp_path).startswith(f"cannot write {tmp_path}: it is a folder")
    assert refused(tmp_path / "m.onnx").startswith(f"cannot write {tmp_path}/m.onnx: it is the model that is read\n")
    assert refused(Path("/proc/f")).startswith("cannot write /proc/f: ")
    assert refused(tmp_path / ("f" * 300)).endswith(": File name too long\n")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert refused(tmp_path / "loop").startswith(f"cannot write {tmp_path}/loop: ")
    assert sorted(p.name for p in tmp_path.iterdir() if p.name != "cache") == ["loop", "m.onnx"]


def test_a_file_that_may_not_be_written_is_not_replaced(tmp_path: Path, compiled: Compiled, monkeypatch: Patch) -> None:
    path = saved(tmp_path / "f", b"old")
    path.chmod(0o400)
    # The superuser may write everything; simulate an ordinary user.
    monkeypatch.setattr(os, "access", lambda p, mode: mode != os.W_OK or bool(Path(p).stat().st_mode & 0o200))
    assert compiled(path)[::2] == (2, f"rammer: error: cannot write {path}: Permission denied\n")
    with pytest.raises(PermissionError):
        write_whole(path, lambda file: file.write(b"new"))
    assert path.read_bytes() == b"old"


def test_a_link_stays_a_link_and_permissions_stay(tmp_path: Path, compiled: Compiled) -> None:
    path, link = saved(tmp_path / "f", b"old"), tmp_path / "link"
    path.chmod(0o640)
    link.symlink_to("f")
    assert compiled(link)[0] == 0
    assert link.is_symlink() and is_artifact(path) and stat.S_IMODE(path.stat().st_mode) == 0o640
    dangling = tmp_path / "dangling"
    dangling.symlink_to("new")
    assert compiled(dangling)[0] == 0
    assert dangling.is_symlink() and is_artifact(tmp_path / "new")


def test_threads_that_write_one_file_do_not_meet(tmp_path: Path) -> None:
    path, both, problems = tmp_path / "f", threading.Barrier(2), list[Exception]()

    def write(letter: bytes) -> None:
        try:
            write_whole(path, lambda file: (file.write(letter * 9), both.wait(10), file.write(letter * 9)))
        except Exception as problem:
            problems.append(problem)

    threads = [threading.Thread(target=write, args=(letter,)) for letter in (b"a", b"b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems
    assert path.read_bytes() in (b"a" * 18, b"b" * 18)
    assert [p.name for p in tmp_path.iterdir()] == ["f"]


def test_clear_removes_what_killed_processes_left(tmp_path: Path, own_cache: Path, monkeypatch: Patch, capsys: Capture) -> None:
    path = saved(tmp_path / "m.onnx", model(FIXED))
    rammer.compile(path, device="toy").specialise({})
    for kind in ("programs", "heads", "toy-kernels"):
        (own_cache / LAYOUT / kind / "aa").mkdir(parents=True, exist_ok=True)
        (own_cache / LAYOUT / kind / "aa" / "x77.partial").write_text("half")
    assert sorted(e.kind for e in list_entries(own_cache)) == ["heads", "programs"]
    assert command(monkeypatch, capsys, "cache", "clear")[1] == "removed 1 heads, 1 programs\n"
    assert [p.name for p in own_cache.rglob("*") if p.is_file()] == ["lock"]


def test_a_damaged_head_is_not_trusted(tmp_path: Path, own_cache: Path) -> None:
    path = saved(tmp_path / "m.onnx", model(FIXED))
    want = rammer.compile(path, device="toy").head
    (kept,) = entries(own_cache, "heads")
    text = kept.read_text()
    for old, new in (('"float32"', '"float64"'), ("[1, 3, 8]", "[1, 4, 8]"), ('"name": "y"', '"name": "z"'), ('"x"', '"v"')):
        assert old in text
        kept.write_text(text.replace(old, new))
        assert rammer.compile(path, device="toy").head == want
        assert content(kept)  # rewritten
    other = kept.with_name("0" * 64)
    other.write_text(text)
    with pytest.raises(AssertionError):
        content(other)


@pytest.mark.slow
def test_a_kept_kernel_that_is_no_candidate_is_not_used(own_cache: Path) -> None:
    proto = model(FIXED)
    rammer.compile(proto, device="toy", tune="quick").specialise({})
    for path in some(entries(own_cache, "tuned")):
        found = json.loads(content(path))
        if isinstance(found, list):  # else it is the time of a program
            store(path, json.dumps([{**k, "tile": [999, *k["tile"][1:]]} for k in found]))  # wrong, under a valid checksum
    exe = open_executable(proto, "toy", Request(tune="quick"))
    exe.specialise({})
    assert exe.compiler.tuner.measured


def test_models_that_cannot_be_opened(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, said in (
        (tmp_path / "pipe", "the model is not an ordinary file"),
        (tmp_path / ("f" * 300), "File name too long"),
        ("/dev/zero", "the model is not an ordinary file"),
    ):
        for name in ("run", "compile", "inspect", "bench"):
            code, _, err = command(monkeypatch, capsys, name, path, "--device", "toy")
            assert (code, said in err, "Traceback" in err) == (2, True, False), (name, path, err)
    assert "null byte" in message(BadInput, lambda: rammer.compile("a\0b", device="toy"))
