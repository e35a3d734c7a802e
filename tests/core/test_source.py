"""Identification of a model's file."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import rammer
import rammer.frontend.read.reader
from rammer.cache import file_digests
from rammer.cache.cache_location import cache_folder
from rammer.cache.file_digests import SHARE
from rammer.errors import BadInput
from rammer.ir.constants.mapped_files import Mapped
from rammer.jit.onnx_source import open_source
from rammer.runtime.executable import Executable
from rammer_testing import cache_files

SIZE = 2 * SHARE + 12_345


def content(rng: np.random.Generator) -> bytes:
    return rng.integers(0, 256, SIZE, dtype=np.uint8).tobytes()


def test_a_file_and_its_bytes_are_one_model(tmp_path: Path, rng: np.random.Generator) -> None:
    data, path = content(rng), tmp_path / "model.onnx"
    path.write_bytes(data)
    assert open_source(path).digest == open_source(str(path)).digest == open_source(data).digest != ""


@pytest.mark.slow
@pytest.mark.parametrize("place", [0, SHARE - 1, SHARE, 2 * SHARE, SIZE - 1])
def test_every_byte_counts(tmp_path: Path, place: int, rng: np.random.Generator) -> None:
    data = bytearray(content(rng))
    paths = tmp_path / "a.onnx", tmp_path / "b.onnx"
    paths[0].write_bytes(data)
    data[place] ^= 1
    paths[1].write_bytes(data)
    assert open_source(paths[0]).digest != open_source(paths[1]).digest


def test_order_and_length_count(rng: np.random.Generator) -> None:
    data = content(rng)
    turned = data[SHARE : 2 * SHARE] + data[:SHARE] + data[2 * SHARE :]
    assert len({open_source(d).digest for d in (data, turned, data[:-1], data + b"\0", data[:SHARE])}) == 5


def test_what_cannot_be_read_is_no_model_that_is_known(tmp_path: Path) -> None:
    empty = tmp_path / "empty.onnx"
    empty.touch()
    assert {open_source(s).digest for s in (empty, b"", tmp_path, tmp_path / "missing.onnx")} == {""}


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> Path:
    """Return a file whose digest is cached at once, with a separate cache folder."""
    monkeypatch.setenv("RAMMER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(file_digests, "SETTLED", 0.0)
    path = tmp_path / "large.onnx"
    path.write_bytes(content(rng))
    time.sleep(TICK)
    return path


#: Seconds after which a change of a file gives a new modification time, on any file system that tests use.
TICK = 0.05


def hashed(path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, int]:
    """Return the digest of a file and the number of slices that were hashed."""
    shares, share = list[int](), file_digests.share_hash
    with monkeypatch.context() as patch:
        patch.setattr(file_digests, "share_hash", lambda file, at: (shares.append(at), share(file, at))[1])
        return open_source(path).digest, len(shares)


@pytest.mark.skipif(os.name != "posix", reason="nothing is kept where a file does not tell when it changed")
def test_a_large_file_is_hashed_once(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, count = hashed(large, monkeypatch)
    assert count == 3 and first == open_source(large.read_bytes()).digest
    assert hashed(large, monkeypatch) == (first, 0)
    link = large.with_name("link.onnx")
    link.symlink_to(large)
    assert hashed(link, monkeypatch) == (first, 0)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["in place", "another file", "another file with its number", "at the end", "through a mapping"])
def test_whatever_changes_a_file_it_is_hashed_again(
    large: Path, how: str, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    """Check this also if modification time and size are unchanged."""
    before, first = large.stat(), hashed(large, monkeypatch)[0]
    place, new = int(rng.integers(SIZE)), bytearray(large.read_bytes())
    new[place] ^= 1
    if how in ("in place", "at the end"):
        with large.open("r+b") as file:
            file.seek(place if how == "in place" else SIZE)
            file.write(new[place : place + 1])
    elif how == "through a mapping":
        mapped = np.memmap(large, np.uint8, "r+")
        mapped[place] ^= 1
        mapped.flush()
    else:
        if how == "another file with its number":  # file systems reuse a freed inode number
            large.unlink()
        large.with_name("new").write_bytes(new)
        large.with_name("new").replace(large)
    os.utime(large, ns=(before.st_atime_ns, before.st_mtime_ns))
    found, count = hashed(large, monkeypatch)
    assert found == open_source(large.read_bytes()).digest != first and count >= 3


def test_a_file_that_was_just_written_is_hashed_every_time(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check this because its next change might have the same modification time."""
    monkeypatch.setattr(file_digests, "SETTLED", 45.0)
    assert hashed(large, monkeypatch)[1] == hashed(large, monkeypatch)[1] == 3
    os.utime(large, (1e9, 1e9))  # pretends that the file is old
    assert hashed(large, monkeypatch)[1] == 3


@pytest.mark.skipif(os.name != "posix", reason="nothing is kept where a file does not tell when it changed")
def test_a_file_that_changes_while_it_is_hashed_is_hashed_again(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    share = file_digests.share_hash

    def slowly(file: Mapped, at: int) -> bytes:
        found = share(file, at)
        if at == 0:
            with file.path.open("r+b") as written:
                written.write(b"changed")
        return found

    with monkeypatch.context() as patch:
        patch.setattr(file_digests, "share_hash", slowly)
        open_source(large)
    assert hashed(large, monkeypatch) == (open_source(large.read_bytes()).digest, 3)


@pytest.mark.skipif(os.name != "posix", reason="nothing is kept where a file does not tell when it changed")
def test_a_kept_digest_that_is_none_is_not_trusted(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = hashed(large, monkeypatch)
    (kept,) = cache_files.entries(cache_folder(), "digests")
    text = cache_files.content(kept)
    assert hashed(large, monkeypatch)[1] == 0
    spoiled = [text.replace(first, first[::-1]), "", "[", "[1]", "{}", "null", text.replace(f'"{first}"', "1")]
    for other in spoiled[:1]:  # without its checksum
        kept.write_text(other)
        assert hashed(large, monkeypatch) == (first, 3)
    for other in spoiled[1:]:
        cache_files.store(kept, other)
        assert hashed(large, monkeypatch) == (first, 3)


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a model that adds 1, 2, 3 from an external file, with a separate cache folder."""
    monkeypatch.setenv("RAMMER_CACHE", str(tmp_path / "cache"))
    ports = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [3]) for n in "xy"]
    weights = numpy_helper.from_array(np.array([1, 2, 3], np.float32), "w")
    made = helper.make_graph([helper.make_node("Add", ["x", "w"], ["y"])], "beside", ports[:1], ports[1:], [weights])
    path = tmp_path / "own" / "m.onnx"
    path.parent.mkdir()
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, path, save_as_external_data=True, location="w.bin", size_threshold=0)
    write(path.parent / "w.bin", 1, 2, 3)
    return path


def write(path: Path, *values: float) -> None:
    """Write these numbers to the file of the weights, with an old modification time."""
    path.write_bytes(np.array(values, np.float32).tobytes())
    os.utime(path, (1e9, 1e9))


def programs() -> int:
    return len(cache_files.entries(cache_folder(), "programs"))


def added(path: Path) -> list[float]:
    """Return the sum of the weights and 0, from a new Executable."""
    exe = rammer.compile(path, "toy")
    try:
        return [float(v) for v in exe.run({"x": np.zeros(3, np.float32)})["y"]]
    finally:
        exe.close()


def test_a_program_of_a_model_with_its_weights_in_another_file_is_kept(beside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert added(beside) == [1, 2, 3] and programs() == 1
    with monkeypatch.context() as patch:
        patch.setattr(Executable, "compile_only", None)
        assert added(beside) == [1, 2, 3], "compiled again"
    write(beside.parent / "w.bin", 1, 2, 4)
    assert added(beside) == [1, 2, 4] and programs() == 2
    write(beside.parent / "w.bin", 1, 2, 3)
    with monkeypatch.context() as patch:
        patch.setattr(Executable, "compile_only", None)
        assert added(beside) == [1, 2, 3], "the first is still there"


def test_weights_that_change_after_they_were_read_are_those_that_were_read(beside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that small weights are in memory by then. The cache key of the program is that of the weights that were read."""
    read = rammer.frontend.read.reader.read_model

    def slowly(*given: object) -> object:
        model = read(*given)
        (beside.parent / "w.bin").write_bytes(np.array([7, 8, 9], np.float32).tobytes())
        return model

    with monkeypatch.context() as patch:
        patch.setattr("rammer.frontend.read.reader.read_model", slowly)
        assert added(beside) == [1, 2, 3] and programs() == 1
    assert added(beside) == [7, 8, 9] and programs() == 2


@pytest.mark.parametrize(("change", "said"), [("gone", "missing"), ("short", "truncated"), ("outside", "is outside")])
def test_a_kept_program_opens_no_door(beside: Path, change: str, said: str) -> None:
    assert added(beside) == [1, 2, 3]
    weights = beside.parent / "w.bin"
    if change == "short":
        write(weights, 1, 2)
    else:
        weights.rename(beside.parent.parent / "w.bin")
        if change == "outside":
            weights.symlink_to(beside.parent.parent / "w.bin")
    with pytest.raises(BadInput, match=said):
        added(beside)


def test_inputs_without_a_shape_take_that_of_every_array(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAMMER_CACHE", str(tmp_path / "cache"))
    ports = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in "xy"]
    z = helper.make_tensor_value_info("z", TensorProto.FLOAT, ["n", 4])
    nodes = [helper.make_node("Mul", ["x", "z"], ["m"]), helper.make_node("Softmax", ["m"], ["y"])]
    graph = helper.make_graph(nodes, "g", [ports[0], z], [ports[1]])
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), path)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    for _ in range(2):  # the second time its ports come from the cache
        exe = rammer.compile(path, device="toy")
        for shape in ((3, 4), (), (2, 3, 1), (3, 4)):
            given = {"x": rng.standard_normal(shape).astype(np.float32), "z": rng.standard_normal((3, 4)).astype(np.float32)}
            np.testing.assert_allclose(exe.run(given)["y"], session.run(None, given)[0], rtol=1e-5, atol=1e-6)
        bound = exe.bind(given)
        bound.run()
        np.testing.assert_allclose(bound.outputs["y"], session.run(None, given)[0], rtol=1e-5, atol=1e-6)
        with pytest.raises(BadInput, match=r"the model declares float32\[\.\.\.\]"):
            exe.run({**given, "x": given["x"].astype(np.float64)})
        with pytest.raises(BadInput, match="the shape of input 'x' is unknown"):
            exe.bind({"z": given["z"]}, {"y": "x"})
        exe.close()
    with pytest.raises(BadInput, match="input 'x' declares no shape"):
        rammer.compile(path, device="toy").specialise({"z": (3, 4)})
    (head,) = cache_files.entries(cache_folder(), "heads")
    text = cache_files.content(head)
    assert '"ranked": false' in text
    for wrong in ('"ranked": 1', '"ranked": null', '"rank": false'):
        cache_files.store(head, text.replace('"ranked": false', wrong))
        assert not open_source(path).head.inputs[0].ranked


def test_a_refused_model_is_refused_for_the_same_reason_again(tmp_path: Path) -> None:
    """Check this because the model's files are released after the first reading; a second reading would see them empty."""
    node = helper.make_node("Strange", ["x"], ["y"], name="odd", domain="elsewhere")
    ports = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [2]) for n in "xy"]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("elsewhere", 1)]
    onnx.save(helper.make_model(helper.make_graph([node], "g", ports[:1], ports[1:]), opset_imports=opsets), tmp_path / "m.onnx")
    source = open_source(tmp_path / "m.onnx")
    for _ in range(2):
        with pytest.raises(BadInput, match="unknown operator Strange"):
            source.head  # noqa: B018
