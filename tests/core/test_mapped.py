"""Weights that stay in their file: mapped values equal ONNX's, and errors equal those of unmapped reading."""

from __future__ import annotations

import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, external_data_helper, helper, numpy_helper

from rammer.cache.cached_constants import ConstantCache
from rammer.errors import BadInput
from rammer.frontend.bind.binder import bind
from rammer.frontend.read import wire_format
from rammer.frontend.read.reader import Model, read_model
from rammer.ir.constants.digest import digest_array
from rammer.ir.constants.mapped_files import Mapped, is_mapped, release_pages
from rammer.ir.constants.recipes import Contents

KINDS = [k for k in TensorProto.DataType.values() if k not in (TensorProto.UNDEFINED, TensorProto.STRING)]
NAMES = {k: TensorProto.DataType.Name(k) for k in KINDS}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower the threshold so that tensors of a few bytes are mapped."""
    monkeypatch.setattr(wire_format, "LEAST", 16)


def tensor(rng: np.random.Generator, kind: int, name: str) -> TensorProto:
    """Draw random bits in a random shape, as bytes or, if possible, in the fields of the type."""
    shape = tuple(int(n) for n in rng.integers(1, 7, rng.integers(1, 4)))
    made = numpy_helper.from_array(np.zeros(shape, helper.tensor_dtype_to_np_dtype(kind)), name)
    bits = rng.integers(0, 2, len(made.raw_data)) if kind == TensorProto.BOOL else rng.integers(0, 256, len(made.raw_data))
    made.raw_data = bits.astype(np.uint8).tobytes()
    if rng.random() < 0.3 and kind in (TensorProto.FLOAT, TensorProto.INT64, TensorProto.INT32, TensorProto.DOUBLE):
        typed = helper.make_tensor(name, kind, shape, numpy_helper.to_array(made).reshape(-1).tolist())
        return typed if np.isfinite(numpy_helper.to_array(typed).astype(float)).all() else made
    return made


def model(rng: np.random.Generator, count: int = 6) -> onnx.ModelProto:
    """Make initialisers of all types, which no operator reads."""
    tensors = [tensor(rng, int(rng.choice(KINDS)), f"w{i}") for i in range(count)]
    ports = [[helper.make_tensor_value_info(n, TensorProto.FLOAT, [2])] for n in "xy"]
    graph = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["y"])], "g", *ports, tensors, doc_string="d" * int(rng.integers(0, 300))
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def values(read: Model) -> dict[str, bytes]:
    """Return the bytes of every initialiser, mapped or in memory."""
    own = {t.name: numpy_helper.to_array(t) for t in read.whole.graph.initializer}
    kinds = {n: (a.dtype, a.shape, a.tobytes()) for n, a in read.weights.items()}
    assert kinds == {n: (own[n].dtype, own[n].shape, own[n].tobytes()) for n in kinds}
    return {n: a.tobytes() for n, a in own.items()}


@pytest.mark.parametrize("kind", KINDS, ids=NAMES.get)
def test_every_type_is_read_as_onnx_reads_it(kind: int, rng: np.random.Generator, tmp_path: Path) -> None:
    given = model(rng, 1)
    del given.graph.initializer[:]
    given.graph.initializer.append(tensor(rng, kind, "w0"))
    path = tmp_path / "m.onnx"
    onnx.save(given, path)
    want = numpy_helper.to_array(given.graph.initializer[0])
    for source in (path, path.read_bytes(), given):
        assert values(read_model(source)) == {"w0": want.tobytes()}


def test_random_models_are_read_as_onnx_reads_them(rng: np.random.Generator, tmp_path: Path) -> None:
    mapped = number = 0
    while mapped < 50:  # each model has some mapped tensors
        assert number < 100
        given, path = model(rng), tmp_path / f"{number}.onnx"
        want = {t.name: numpy_helper.to_array(t).tobytes() for t in given.graph.initializer}
        if number % 2:
            external_data_helper.convert_model_to_external_data(given, location=f"{number}.data", size_threshold=0)
        onnx.save(given, path)
        loaded = onnx.load(path)
        assert {t.name: numpy_helper.to_array(t).tobytes() for t in loaded.graph.initializer} == want
        read = read_model(path)
        assert values(read) == want
        mapped, number = mapped + len(read.weights), number + 1


def outcome(data: bytes) -> dict[str, bytes] | str:
    """Return the values that reading gives, or its error message."""
    try:
        return values(read_model(data))
    except BadInput as problem:
        return str(problem)


def test_hostile_files_are_read_as_without_mapping(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check cut, flipped, repeated and moved bytes: the message or the values are the same with and without mapping."""
    spoils: list[Callable[[bytearray], object]] = [
        lambda d: d.__delitem__(slice(int(rng.integers(len(d))), None)),
        lambda d: d.__setitem__(int(rng.integers(len(d))), int(rng.integers(256))),
        lambda d: d.__delitem__(int(rng.integers(len(d)))),
        lambda d: d.insert(int(rng.integers(len(d))), int(rng.integers(256))),
        lambda d: d.extend(d[: int(rng.integers(len(d)))]),
        lambda d: d.extend(d),
    ]
    found = {dict: 0, str: 0}  # one in ten is readable
    while min(found.values()) <= 20:
        assert sum(found.values()) < 3000
        whole = model(rng, 3).SerializeToString()
        for spoil in spoils:
            data = bytearray(whole)
            spoil(data)
            mapped = outcome(bytes(data))
            with monkeypatch.context() as patch:
                patch.setattr(wire_format, "LEAST", 1 << 40)
                assert outcome(bytes(data)) == mapped
            found[type(mapped)] += 1


def test_data_that_are_there_twice(rng: np.random.Generator) -> None:
    given = model(rng, 1)
    given.graph.initializer[0].CopyFrom(helper.make_tensor("w0", TensorProto.FLOAT, [8], np.zeros(8, np.float32), raw=False))
    given.graph.initializer[0].raw_data = bytes(32)
    with pytest.raises(BadInput, match="twice, in raw_data and float_data"):
        read_model(given.SerializeToString())


def test_a_file_that_is_written_to_is_no_model_any_more(tmp_path: Path, rng: np.random.Generator) -> None:
    import rammer

    weight = rng.standard_normal((16, 4)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 16])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 4])],
        [numpy_helper.from_array(weight, "w")],
    )
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)
    exe, x = rammer.compile(path, "toy"), rng.standard_normal((3, 16)).astype(np.float32)
    wanted = exe.run({"x": x})["y"]
    other = tmp_path / "other.onnx"
    other.write_bytes(path.read_bytes())
    other.replace(path)  # an atomic replacement: the opened file still exists
    np.testing.assert_allclose(exe.run({"x": x[:2]})["y"], wanted[:2], rtol=1e-6)
    again = rammer.compile(path, "toy")
    assert again.source.model.weights  # reads the model
    with path.open("r+b") as file:
        file.truncate(40)
    with pytest.raises(BadInput, match="was written to after it was opened"):
        again.run({"x": x[:1]})


def test_memory_is_given_back_and_read_again(tmp_path: Path) -> None:
    path, size = tmp_path / "f", 8 << 20
    path.write_bytes(np.arange(size, dtype=np.uint32).tobytes()[:size])
    array = np.frombuffer(Mapped.of(path).data, np.uint8)

    def resident() -> int:
        """Return the resident bytes of this file only: process totals include other threads' memory and are rounded."""
        parts = Path("/proc/self/smaps").read_text().split(str(path))[1:]
        return sum(int(re.findall(r"^Rss: +(\d+) kB", part, re.MULTILINE)[0]) << 10 for part in parts)

    total = int(array.sum())
    assert resident() > size / 2
    release_pages(array)
    assert resident() < size / 2
    assert int(array.sum()) == total


def test_what_was_folded_on_the_way_is_let_go_of() -> None:
    """Check twelve values of 4 MB in sequence; the first is read again and the last remains."""
    nodes = [helper.make_node("Neg", [f"v{i}"], [f"v{i + 1}"]) for i in range(12)]
    nodes += [helper.make_node("Add", ["v12", "v1"], ["w"]), helper.make_node("MatMul", ["x", "w"], ["y"])]
    weight = np.arange(1 << 20, dtype=np.float32).reshape(1024, 1024)
    ports = [[helper.make_tensor_value_info(n, TensorProto.FLOAT, [1, 1024])] for n in "xy"]
    graph = helper.make_graph(nodes, "g", *ports, [numpy_helper.from_array(weight, "v0")])
    data = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10).SerializeToString()
    read = read_model(data)
    tracemalloc.start()
    try:
        bound = bind(read, {})
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    (made,) = bound.constants.values()
    np.testing.assert_array_equal(made, weight - weight)
    assert most < 7 * weight.nbytes


def test_equal_arrays_are_one(rng: np.random.Generator) -> None:
    contents = Contents()
    first, other = np.arange(40.0), rng.standard_normal(40)
    one = contents.of({"a": first, "b": other})
    two = contents.of({"c": np.arange(40.0), "d": np.arange(40.0).reshape(5, 8), "e": np.arange(40)})
    assert two["c"] is one["a"] and two["d"] is not one["a"] and two["e"] is not one["a"]
    first[0] = 7  # a caller may modify its array
    assert one["a"][0] == 0 and digest_array(one["a"]) == digest_array(np.arange(40.0))
    assert first.flags.writeable


@pytest.mark.parametrize("value", [np.int8(-7), np.float32(2.5), np.array(3, np.int64)])
def test_what_has_no_axes_is_shared_too(value: np.ndarray[Any, Any]) -> None:
    contents = Contents()
    (first,), (second,) = contents.of({"a": value}).values(), contents.of({"b": value.copy()}).values()
    assert first is second and first == value and digest_array(value) == digest_array(np.array(value))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("number", range(60))
def test_what_names_places_anew_stays_in_the_file(number: int, rng: np.random.Generator, tmp_path: Path) -> None:
    """Check reshapes, then transpositions and added axes: no copy in memory or on disk, and equal values."""
    want = rng.standard_normal(rng.integers(1, 6, rng.integers(2, 5))).astype(np.float32)
    weights, nodes = {"v0": want}, list[onnx.NodeProto]()
    for i in range(int(rng.integers(1, 5))):
        kind = str(rng.choice(["Reshape", "Transpose", "Transpose", "Identity"] if i < 2 else ["Transpose"]))
        if kind == "Reshape" and not any(n.op_type == "Transpose" for n in nodes):
            want = want.reshape(-1, want.shape[-1])
            weights[f"s{i}"] = np.array(want.shape)
        elif kind == "Transpose":
            order = [int(d) for d in rng.permutation(want.ndim)]
            want = want.transpose(order)
        else:
            kind = "Identity"
        given = {"perm": order} if kind == "Transpose" else {}
        nodes.append(helper.make_node(kind, [f"v{i}", *([f"s{i}"] if kind == "Reshape" else [])], [f"v{i + 1}"], **given))
    nodes.append(helper.make_node("Add", ["x", f"v{len(nodes)}"], ["y"]))
    ports = [[helper.make_tensor_value_info(n, TensorProto.FLOAT, list(want.shape))] for n in "xy"]
    graph = helper.make_graph(nodes, "g", *ports, [numpy_helper.from_array(a, n) for n, a in weights.items()])
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)
    read = read_model(path)
    (found,) = bind(read, {}).constants.values()
    np.testing.assert_array_equal(found, want)
    assert is_mapped(found) == ("v0" in read.weights)
    (file,) = read.files or (Mapped.of(path),)
    kept = ConstantCache(tmp_path / "kept", tmp_path, {path.name: file})
    again = kept.get(kept.put(found, read.files), str(found.dtype), found.shape)
    np.testing.assert_array_equal(again, want)
    assert is_mapped(found) != (tmp_path / "kept").exists()
    with pytest.raises(ValueError, match="is malformed"):
        kept.get([*kept.put(found, read.files)[:-1], [0] * (want.ndim + 1)], str(found.dtype), found.shape)
