"""Model files that change during compilation: the result is that of the opened file, or an error reports the change. The cache
never returns the program of another model."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import rammer
import rammer.compiled.artifact
import rammer.compiler.compiler
import rammer.frontend.read.reader
import rammer.runtime.loaded_model
from rammer.errors import BadInput
from rammer.runtime.executable import Executable
from rammer_testing.nonempty import some

#: Rows of square matrices: read into memory, small and left in its file, stored separately.
SIZES = (8, 64, 160)
SAID = "the model file was written to after it was opened"


def saved(path: Path, size: int, factor: float, inside: bool) -> Path:
    """Write a model that multiplies by ``factor`` times the identity; return the file with the weights."""
    ports = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [2, size]) for n in "xy"]
    weights = numpy_helper.from_array(np.eye(size, dtype=np.float32) * np.float32(factor), "w")
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", ports[:1], ports[1:], [weights])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    path.parent.mkdir(exist_ok=True)
    path.with_name("w.bin").unlink(missing_ok=True)  # onnx refuses to write to a file with two names
    if inside:
        onnx.save(model, path)
        return path
    onnx.save(model, path, save_as_external_data=True, location="w.bin", size_threshold=0)
    return path.with_name("w.bin")


def rename(file: Path, new: bytes) -> None:
    file.with_name("new").write_bytes(new)
    file.with_name("new").replace(file)


def remove(file: Path, new: bytes) -> None:
    file.unlink()
    file.write_bytes(new)


def write_in_place(file: Path, new: bytes) -> None:
    with file.open("r+b") as opened:
        opened.write(new)


def write_through_mapping(file: Path, new: bytes) -> None:
    mapped = np.memmap(file, np.uint8, "r+")
    mapped[:] = np.frombuffer(new, np.uint8)
    mapped.flush()


def truncate(file: Path, new: bytes) -> None:
    os.truncate(file, len(new) // 3)


def truncate_and_write(file: Path, new: bytes) -> None:
    file.write_bytes(new)


def write_through_link(file: Path, new: bytes) -> None:
    os.link(file, file.with_name("link"))
    write_in_place(file.with_name("link"), new)
    file.with_name("link").unlink()


def link(file: Path, new: bytes) -> None:
    """Add a second name to the file, without any other change."""
    os.link(file, file.with_name("link"))


def touch(file: Path, new: bytes) -> None:
    os.utime(file)


#: Ways to change a file; True if the opened content stays unchanged.
CHANGES: dict[Callable[[Path, bytes], None], bool] = {
    rename: True,
    remove: True,
    link: True,
    touch: True,
    write_in_place: False,
    write_through_mapping: False,
    write_through_link: False,
    truncate: False,
    truncate_and_write: False,
}


def changed(change: Callable[[Path, bytes], None], file: Path, new: bytes) -> None:
    """Change a file and restore its modification time."""
    before = file.stat()
    change(file, new)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.fixture(params=[pytest.param(True, id="in the model"), pytest.param(False, id="beside the model")])
def inside(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def factor_of(exe: Executable, size: int, rng: np.random.Generator) -> float:
    """Return the factor by which the model multiplies."""
    given = rng.integers(1, 9, (2, size)).astype(np.float32)
    factors = exe.run({"x": given})["y"] / given
    assert np.ptp(factors) == 0, "two models in one"
    return float(factors[0, 0])


def opened(path: Path, size: int, rng: np.random.Generator, device: str = "toy") -> float:
    exe = rammer.compile(path, device=device)
    try:
        return factor_of(exe, size, rng)
    finally:
        exe.close()


#: Moments of a change: after ``rammer.compile`` returned, before or after reading the model, after compilation, before caching
#: its constants, and before loading them.
MOMENTS = ("opened", "reading", "read", "compiled", "kept", "loaded")


def prepared(moment: str, patch: pytest.MonkeyPatch, act: Callable[[], None]) -> Iterator[Callable[[], None]]:
    """Run ``act`` once at a moment; the test calls the yielded function after ``rammer.compile``."""
    done = list[bool]()

    def once() -> None:
        if not done:
            done.append(True)
            act()

    def around(before: bool, function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*given: Any, **named: Any) -> Any:
            if before:
                once()
            found = function(*given, **named)
            once()
            return found

        return called

    if moment in ("reading", "read"):
        patch.setattr(
            rammer.frontend.read.reader, "read_model", around(moment == "reading", rammer.frontend.read.reader.read_model)
        )
    if moment == "compiled":
        patch.setattr(
            rammer.compiler.compiler.Compiler, "compile_model", around(False, rammer.compiler.compiler.Compiler.compile_model)
        )
    if moment == "kept":
        patch.setattr(rammer.compiled.artifact, "_pack_arrays", around(True, vars(rammer.compiled.artifact)["_pack_arrays"]))
    if moment == "loaded":
        patch.setattr(rammer.runtime.loaded_model, "load_tables", around(True, rammer.runtime.loaded_model.load_tables))
    yield once if moment == "opened" else lambda: None
    assert done, moment


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("warm", [False, True], ids=["cold", "ports known"])
def test_program_is_of_what_was_opened(
    moment: str,
    warm: bool,
    inside: bool,
    tmp_path: Path,
    own_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    rng: np.random.Generator,
) -> None:
    """Check that both models give their own results afterwards, whatever is cached. An external file of a model whose ports are
    unknown is opened while the model is read."""
    late = moment == "reading" and not warm and not inside
    for number in some(sorted(rng.choice(len(CHANGES), 5, replace=False).tolist())):
        change, stays = list(CHANGES.items())[number]
        if moment == "loaded" and change is truncate:
            continue  # between the last check of a file and reading it, a truncated mapping ends the process
        place = int(rng.integers(len(SIZES)))
        size = SIZES[place]
        old, new = 2.0 + 4 * number + place, 2.5 + 4 * number + place
        path, other = tmp_path / f"{number}.{size}" / "m.onnx", tmp_path / f"{number}.{size}.other" / "m.onnx"
        file, replaced = saved(path, size, old, inside), saved(other, size, new, inside)
        if warm:
            rammer.compile(path, device="toy").close()
        where = f"{change.__name__}, {size} rows"
        with monkeypatch.context() as patch:
            for act in prepared(moment, patch, lambda: changed(change, file, replaced.read_bytes())):  # noqa: B023
                try:
                    exe = rammer.compile(path, device="toy")
                    act()
                    assert factor_of(exe, size, rng) in ((old, new) if late else (old,)), where
                    exe.close()
                except BadInput as problem:
                    assert not stays and (SAID in str(problem) or "is truncated" in str(problem)), f"{where}: {problem}"
        assert opened(other, size, rng) == new, f"{where}: the other model"
        saved(path, size, old, inside)
        assert opened(path, size, rng) == old, f"{where}: the model again"


@pytest.mark.slow
@pytest.mark.parametrize("device", ["toy", "ipu_sim", "rocm"])
def test_warm_start_is_of_what_was_opened(
    device: str, inside: bool, tmp_path: Path, own_cache: Path, rng: np.random.Generator
) -> None:
    """Check a file that changes after the program was cached, with its constants in that file."""
    for number, (change, stays) in enumerate(CHANGES.items()):
        old, new, size = 2.0 + number, 2.5 + number, SIZES[-1]
        path, other = tmp_path / f"{number}" / "m.onnx", tmp_path / f"{number}.other" / "m.onnx"
        file, replaced = saved(path, size, old, inside), saved(other, size, new, inside)
        assert opened(path, size, rng, device) == old
        exe = rammer.compile(path, device=device)
        changed(change, file, replaced.read_bytes())
        try:
            assert factor_of(exe, size, rng) == old
            changed(truncate, file, b"")  # loaded constants need no file
            assert factor_of(exe, size, rng) == old
        except BadInput as problem:
            assert not stays and SAID in str(problem), f"{change.__name__}: {problem}"
        exe.close()
