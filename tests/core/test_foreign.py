"""Values that are not numeric tensors: sequences, optionals and strings stay on the host, computations between them do not."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper
from onnx_models import FLOAT, INT64, tensor

import rammer
from rammer.cli.main import cli
from rammer.errors import BadInput
from rammer_testing.nonempty import some

node = helper.make_node
STRINGS = helper.make_tensor_type_proto(TensorProto.STRING, [None])
SEQUENCE = helper.make_sequence_type_proto(helper.make_tensor_type_proto(FLOAT, None))
OPTIONAL = helper.make_optional_type_proto(helper.make_tensor_type_proto(FLOAT, [3]))


def made(nodes: list[onnx.NodeProto], inputs: list[onnx.ValueInfoProto], outputs: list[onnx.ValueInfoProto]) -> onnx.ModelProto:
    graph = helper.make_graph(nodes, "g", inputs, outputs)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def joined() -> onnx.ModelProto:
    """Make a concatenation of a sequence with one more computed item, and the number of items."""
    nodes = [
        node("Exp", ["x"], ["e"]),
        node("SequenceInsert", ["s", "e"], ["longer"]),
        node("ConcatFromSequence", ["longer"], ["c"], axis=0),
        node("Softmax", ["c"], ["y"], axis=0),
        node("SequenceLength", ["longer"], ["n"]),
    ]
    outputs = [tensor("y", [None]), tensor("n", [], INT64), onnx.ValueInfoProto(name="longer", type=SEQUENCE)]
    return made(nodes, [tensor("x", [2]), onnx.ValueInfoProto(name="s", type=SEQUENCE)], outputs)


def test_sequences() -> None:
    exe = rammer.compile(joined(), "toy")
    rng = np.random.default_rng(5)
    for lengths in ((1, 3), (), (2, 2, 2), (1, 3)):
        items = [rng.standard_normal(n).astype(np.float32) for n in lengths]
        x = rng.standard_normal(2).astype(np.float32)
        found = exe.run({"x": x, "s": items})
        whole = np.concatenate([*items, np.exp(x)])
        np.testing.assert_allclose(found["y"], np.exp(whole) / np.exp(whole).sum(), rtol=1e-5)
        assert int(found["n"]) == len(lengths) + 1 and found["n"].dtype == np.int64
        assert [a.shape for a in found["longer"]] == [(n,) for n in (*lengths, 2)]
    hosted = {str(h.node) for s in exe.cache.values() for h in s.host_nodes}
    assert any("SequenceInsert" in h for h in hosted) and not any("Softmax" in h or "Exp" in h for h in some(hosted))


def test_a_sequence_that_is_passed_on_is_the_callers_own() -> None:
    value = onnx.ValueInfoProto(name="s", type=SEQUENCE)
    exe = rammer.compile(made([node("Relu", ["x"], ["y"])], [tensor("x", [1]), value], [value, tensor("y", [1])]), "toy")
    given = [np.ones(2, np.float32)]
    found = exe.run({"x": np.ones(1, np.float32), "s": given})
    found["s"][0][...] = 0
    assert given[0].all()


def test_optionals() -> None:
    nodes = [node("OptionalHasElement", ["o"], ["has"]), node("Neg", ["x"], ["y"])]
    value = onnx.ValueInfoProto(name="o", type=OPTIONAL)
    proto = made(nodes, [value, tensor("x", [2])], [tensor("has", [], TensorProto.BOOL), tensor("y", [2])])
    exe, x = rammer.compile(proto, "toy"), np.arange(2, dtype=np.float32)
    for given in (None, np.zeros(3, np.float32)):
        found = exe.run({"o": given, "x": x})
        assert bool(found["has"]) == (given is not None)
        np.testing.assert_array_equal(found["y"], -x)


def test_strings() -> None:
    nodes = [
        node("LabelEncoder", ["s"], ["k"], domain="ai.onnx.ml", keys_strings=["a", "b"], values_int64s=[3, 4], default_int64=-1),
        node("Gather", ["x", "k"], ["y"], axis=0),
        node("StringConcat", ["s", "s"], ["twice"]),
    ]
    text = [onnx.ValueInfoProto(name=n, type=STRINGS) for n in ("s", "twice")]
    proto = made(nodes, [text[0], tensor("x", [5])], [tensor("y", [None]), text[1]])
    proto.opset_import.append(helper.make_opsetid("ai.onnx.ml", 4))
    exe, x = rammer.compile(proto, "toy"), np.arange(5, dtype=np.float32)
    for given in (np.array(["b", "a", "?"], object), np.array(["a"]), ["b", "b"]):
        found = exe.run({"s": given, "x": x})
        np.testing.assert_array_equal(found["y"], [{"a": 3.0, "b": 4.0}.get(t, 4.0) for t in given])
        assert found["twice"].dtype == object and list(found["twice"]) == [t + t for t in given]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"s": np.zeros((2, 2), np.float32)}, r"input 's' is float32\[2, 2\], the model declares a list of arrays"),
        ({"s": "text"}, "the model declares a list of arrays"),
        ({"s": [[[1], [2, 3]]]}, "input 's' cannot be read"),
        ({}, "input 's' is missing"),
    ],
)
def test_other_values_are_bad_input(given: dict[str, Any], says: str) -> None:
    exe = rammer.compile(joined(), "toy")
    with pytest.raises(BadInput, match=says):
        exe.run({"x": np.zeros(2, np.float32), **given})


def test_the_command_does_not_make_them_up(tmp_path: Any) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(joined().SerializeToString())
    said = CliRunner().invoke(cli, ["run", str(path), "--device", "toy"])
    assert isinstance(said.exception, BadInput) and "input 's' is of type sequence" in str(said.exception)
