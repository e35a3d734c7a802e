"""Every option that names an output: input files are never replaced, and a failed write changes nothing."""

from __future__ import annotations

import ast
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import onnx
import pytest
from command import MODEL, Command
from onnx.external_data_helper import convert_model_to_external_data

import rammer as package
from rammer.cache.disk_cache import LAYOUT
from rammer.cache.whole_files import PARTIAL
from rammer.cli.files import InputPath, OutputFolder, OutputPath
from rammer.cli.main import cli
from rammer.ir.constants.mapped_files import Array
from rammer.runtime.inputs import save_npz
from rammer_testing.nonempty import some
from rammer_testing.suite import run
from rammer_testing.suite.score import PASSED, Score


def options_of(
    kind: type[click.ParamType], command: click.Command = cli, names: tuple[str, ...] = ()
) -> Iterator[tuple[str, ...]]:
    """Yield the words of a command followed by one option, for every option of this type."""
    if isinstance(command, click.Group):
        ctx = click.Context(command)
        for name in some(command.list_commands(ctx)):
            found = command.get_command(ctx, name)
            assert found is not None
            yield from options_of(kind, found, (*names, name))
        return
    yield from ((*names, p.opts[0]) for p in command.params if isinstance(p.type, kind))


OPEN, DESCRIPTOR = Path.open, os.open
#: Options with an output file, each after the words of its command.
OUTPUTS = sorted(options_of(OutputPath))
#: Options with an output folder.
FOLDERS = sorted(options_of(OutputFolder))
#: The words of a small run of each command, without its options.
RUNS: dict[str, tuple[str, ...]] = {
    "cache export": (),
    "run": ("m.onnx", "--device", "ipu_sim", "--inputs", "in.npz", "--option", "tiles=4"),
    "bench": ("m.onnx", "--device", "ipu_sim", "--iterations", "1", "--duration", "0", "--option", "tiles=4"),
    "compile": ("m.onnx", "--device", "ipu_sim", "--option", "tiles=4"),
    "onnx-tests": ("--device", "ipu_sim", "-k", "^test_abs$", "--processes", "1"),
    "inspect": ("m.onnx", "--device", "ipu_sim", "--option", "tiles=4"),
    "report": ("m.onnx", "--device", "ipu_sim", "--option", "tiles=4"),
}


@dataclass(frozen=True)
class Home:
    """A folder with a model, its weights and its inputs."""

    folder: Path

    def state(self) -> dict[str, tuple[int, bytes]]:
        """Return the kind and content of every file outside the cache."""
        found = {}
        for path in self.folder.rglob("*"):
            if "cache" not in path.parts:
                found[str(path.relative_to(self.folder))] = (path.lstat().st_mode, path.read_bytes() if path.is_file() else b"")
        return found


@pytest.fixture
def home(tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> Home:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "scores", lambda *given: [Score("test_abs", PASSED)])  # the real scores need a process
    proto = MODEL.build(rng)
    convert_model_to_external_data(proto, location="m.data", size_threshold=0, convert_attribute=False)
    onnx.save(proto, "m.onnx")
    assert (tmp_path / "m.data").stat().st_size
    arrays: dict[str, Array] = {"x": rng.standard_normal((1, 3, 8, 8)).astype(np.float32), "i": np.array([0, 1])}
    with Path("in.npz").open("wb") as file:
        save_npz(file, arrays)
    return Home(tmp_path)


def read_files(home: Home, words: tuple[str, ...]) -> Iterator[str]:
    """Yield paths of files that ``words`` read, spelled in several ways."""
    read = [n for n in ("m.onnx", "in.npz") if n in words] + ["m.data"] * ("m.onnx" in words)
    for number, name in enumerate(read):
        hard, soft = f"hard{number}", f"soft{number}"
        os.link(name, hard)
        os.symlink(name, soft)
        os.symlink(soft, soft + "er")
        yield from (name, hard, soft, soft + "er", f"./{name}", f"../{home.folder.name}/{name}", str(home.folder / name))


def special_files(home: Home) -> Iterator[str]:
    """Yield paths that are not regular files, or that a command may not replace."""
    os.mkfifo("pipe")
    os.symlink("/dev/full", "full")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind("socket")
    kept = home.folder / "cache" / LAYOUT / "heads" / "00" / "x"
    kept.parent.mkdir(parents=True)
    kept.write_text("kept")
    yield from ("pipe", "full", "socket", "/dev/null", "/dev/full", ".", str(kept), "no/file")


def test_every_path_has_a_direction() -> None:
    """Check for options of click's path type, which would not be checked."""
    known = {*options_of(InputPath), *OUTPUTS, *FOLDERS}
    assert set(options_of(click.Path)) <= known and not list(options_of(click.File))
    assert {" ".join(name) for *name, _ in OUTPUTS} | {"inspect"} == set(RUNS)
    assert FOLDERS == [("inspect", "--dump"), ("plugins", "new", "--into")] and len(OUTPUTS) >= 8


@pytest.mark.slow
@pytest.mark.parametrize("words", OUTPUTS, ids=" ".join)
def test_an_output_replaces_nothing_that_is_read(words: tuple[str, ...], home: Home, rammer: Command) -> None:
    *name, option = words
    targets = [*read_files(home, RUNS[" ".join(name)]), *special_files(home)]
    before = home.state()
    for target in some(targets):
        done = rammer(*name, *RUNS[" ".join(name)], option, target)
        assert done.code == 2 and f"cannot write {Path(target)}: " in done.err and "Traceback" not in done.err, (target, done)
        assert home.state() == before, target


@pytest.mark.slow
@pytest.mark.parametrize("words", OUTPUTS, ids=" ".join)
def test_a_failed_write_leaves_what_was_there(
    words: tuple[str, ...], home: Home, rammer: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    *name, option = words
    Path("old").write_text("kept")
    before = home.state()
    with monkeypatch.context() as patch:
        fill_the_disk(patch)
        for target in ("old", "new"):
            done = rammer(*name, *RUNS[" ".join(name)], option, target)
            assert done.code == 2 and f"cannot write {target}: No space left on device" in done.err, done
            assert home.state() == before
    assert rammer(*name, *RUNS[" ".join(name)], option, "old").code == 0
    assert home.state()["old"][1] != b"kept" and set(home.state()) == set(before)


@pytest.mark.parametrize("there", [True, False])
def test_a_failed_dump_leaves_what_was_there(there: bool, home: Home, rammer: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    done = rammer("inspect", *RUNS["inspect"], "--dump", "a/b") if there else None
    assert done is None or (done.code == 0 and len(list(Path("a/b").iterdir())) == done.err.count("wrote a/b/"))
    before = home.state()
    fill_the_disk(monkeypatch)
    done = rammer("inspect", *RUNS["inspect"], "--option", "tiles=8", "--dump", "a/b")
    assert done.code == 2 and "cannot write a/b: No space left on device" in done.err, done
    assert home.state() == before


def test_a_dump_does_not_replace_the_model(home: Home, rammer: Command) -> None:
    Path("00-graph.txt").write_bytes(Path("m.onnx").read_bytes())
    before = home.state()
    done = rammer("inspect", "00-graph.txt", *RUNS["inspect"][1:], "--dump", ".")
    assert done.code == 2 and "cannot write 00-graph.txt: it is the model that is read" in done.err
    assert home.state() == before


def test_outputs_of_one_command_are_apart(home: Home, rammer: Command) -> None:
    os.symlink("a.npz", "b.npz")
    done = rammer("run", *RUNS["run"], "--save-inputs", "a.npz", "--save-outputs", "b.npz")
    assert done.code == 2 and "cannot write b.npz: it is also the output of --save-inputs" in done.err
    assert not Path("a.npz").exists()


def test_of_several_devices_weights_are_not_replaced_either(home: Home, rammer: Command) -> None:
    before = home.state()
    for name, more in (("run", ("--inputs", "in.npz")), ("bench", ())):
        option = next(o for *n, o in OUTPUTS if n == [name])
        done = rammer(name, "m.onnx", "--device", "ipu_sim:0,ipu_sim:0", *more, option, "m.data")
        assert done.code == 2 and "cannot write m.data: it is read with the model" in done.err, done
    assert home.state() == before


@pytest.mark.slow
def test_standard_output_by_its_path(home: Home) -> None:
    before = home.state()
    words = [sys.executable, "-m", "rammer.cli.main", "run", *RUNS["run"], "--json"]
    for target in ("/dev/stdout", "out.txt"):
        with tempfile.TemporaryDirectory() as folder, Path(folder, "out.txt").open("wb") as out:
            target = out.name if target == "out.txt" else target
            done = subprocess.run([*words, target], stdout=out, stderr=subprocess.PIPE, text=True)
            assert done.returncode == 2 and f"cannot write {target}: it is a standard stream of this command" in done.stderr
    piped = subprocess.run([*words, "/dev/stdout"], capture_output=True, text=True)
    assert piped.returncode == 2 and "cannot write /dev/stdout: it is a pipe, not an ordinary file" in piped.stderr
    assert home.state() == before


def test_standard_output_where_it_is_offered(home: Home, rammer: Command) -> None:
    for *name, option in some(OUTPUTS):
        done = rammer(*name, *RUNS[" ".join(name)], option, "-")
        if option == "--json":
            assert done.code == 0 and done.out.lstrip().startswith("{") and done.out.endswith("}\n")
        else:
            assert done.code == 2 and f"{option} cannot write to standard output" in done.err
    assert not Path("-").exists()
    assert rammer("compile", *RUNS["compile"], "-o", "./-").code == 0 and Path("-").exists()


def test_commands_write_files_in_one_place() -> None:
    """Check that modules of the commands, of reports and of their callees open no file for writing."""
    root, found = Path(package.__file__).parent, list[str]()
    for path in some(sorted(root.rglob("*.py"))):
        name, text = path.relative_to(root), path.read_text()
        if name.parts[0] != "plugin-template" and any(word in text for word in ("open(", *WRITERS)):
            calls = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Call)]
            found += [f"{name}:{call.lineno}" for call in calls if writes(call)]
    assert [f.partition(":")[0] for f in found] == ["cache/whole_files.py"] * 2, found


def fill_the_disk(patch: pytest.MonkeyPatch) -> None:
    """Simulate a full disk for new files, for every way of opening them."""

    def opened(path: Path, mode: str = "r", *given: Any, **more: Any) -> Any:
        if mode[0] in "wx":
            OPEN(path, mode).close()
            return OPEN(Path("/dev/full"), "wb")
        return OPEN(path, mode, *given, **more)

    def descriptor(path: Any, flags: int, *given: Any, **more: Any) -> int:
        if flags & os.O_CREAT and str(path).endswith(PARTIAL):
            os.close(DESCRIPTOR(path, flags, *given, **more))
            return DESCRIPTOR("/dev/full", os.O_WRONLY)
        return DESCRIPTOR(path, flags, *given, **more)

    patch.setattr(Path, "open", opened)
    patch.setattr(os, "open", descriptor)


#: Methods that create a file.
WRITERS = ("write_text", "write_bytes", "savez", "savez_compressed", "mkstemp", "NamedTemporaryFile")


def writes(call: ast.Call) -> bool:
    """Return True if a call creates a file by a name."""
    method = isinstance(call.func, ast.Attribute)
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    place = int(not method)  # index of the mode: 0 in a path's method (a zip's has a member name there), 1 in open()
    modes = [*call.args[place : place + 1], *(k.value for k in call.keywords if k.arg == "mode")]
    opened = name == "open" and any(isinstance(m, ast.Constant) and str(m.value)[:1] in tuple("wxa") for m in modes)
    return opened or (method and name in WRITERS)
