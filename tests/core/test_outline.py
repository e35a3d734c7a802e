"""Upgrading a model without its weights: the converter sees only small tensors, and all weights are restored."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper, version_converter

from rammer.frontend.read import model_checks
from rammer.frontend.read.reader import TARGET_OPSET, read_model
from rammer.frontend.read.strip_weights import LARGEST, attach_tensors, detach_tensors
from rammer_testing import models as zoo

FLOAT, BOOL = TensorProto.FLOAT, TensorProto.BOOL
SIDE = 40


def weight(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((SIDE, SIDE), np.float32)


def branch(seed: int) -> onnx.GraphProto:
    """Make a sub-graph with a large initialiser and a large Constant; both branches use the same names."""
    nodes = [
        helper.make_node("Constant", [], ["c"], value=numpy_helper.from_array(weight(seed), "c")),
        helper.make_node("MatMul", ["h", "c"], ["p"]),
        helper.make_node("MatMul", ["p", "inner"], ["q"]),
    ]
    inner = numpy_helper.from_array(weight(seed + 1), "inner")
    return helper.make_graph(nodes, "b", [], [helper.make_tensor_value_info("q", FLOAT, None)], [inner])


def old_model(then: int = 5) -> onnx.ModelProto:
    """Make a model of opset 12 with large tensors: initialisers, Constants, and both in sub-graphs."""
    nodes = [
        helper.make_node("Unsqueeze", ["x"], ["u"], axes=[0]),
        helper.make_node("Squeeze", ["u"], ["s"], axes=[0]),
        helper.make_node("MatMul", ["s", "w"], ["m"]),
        helper.make_node("Constant", [], ["k"], value=numpy_helper.from_array(weight(1), "k")),
        helper.make_node("MatMul", ["m", "k"], ["h"]),
        helper.make_node("If", ["flag"], ["i"], then_branch=branch(then), else_branch=branch(7)),
        helper.make_node("Softmax", ["i"], ["y"], axis=1),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", FLOAT, [3, SIDE]), helper.make_tensor_value_info("flag", BOOL, [])],
        [helper.make_tensor_value_info("y", FLOAT, [3, SIDE])],
        [numpy_helper.from_array(weight(0), "w")],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 12)], ir_version=8)
    proto.metadata_props.add(key="k", value="v")
    return proto


def data_bytes(proto: onnx.ModelProto) -> Iterator[int]:
    """Yield the byte size of every tensor's values in the model."""
    for graph in model_checks.all_graphs(proto):
        tensors = [*graph.initializer, *(a.t for n in graph.node for a in n.attribute)]
        yield from (len(t.raw_data) + 4 * len(t.float_data) for t in tensors)


def test_the_converter_receives_no_large_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    received = list[int]()
    convert = version_converter.convert_version

    def recording(proto: onnx.ModelProto, target: int) -> onnx.ModelProto:
        received.append(max(data_bytes(proto)))
        return convert(proto, target)

    monkeypatch.setattr(version_converter, "convert_version", recording)
    proto = old_model()
    for place in model_checks.all_graphs(proto):  # unique names: every tensor can be detached
        for tensor in place.initializer:
            if tensor.name == "inner":
                tensor.name = f"inner_{id(tensor)}"
                place.node[2].input[1] = tensor.name
    assert max(data_bytes(proto)) > 4 * LARGEST
    assert read_model(proto).opset == TARGET_OPSET
    assert received and max(received) <= 4 * LARGEST


@pytest.mark.parametrize("flag", [True, False])
def test_values_come_back(flag: bool, rng: np.random.Generator) -> None:
    proto = old_model()
    untouched = proto.SerializeToString()
    loaded = read_model(proto)
    assert proto.SerializeToString() == untouched
    feeds: dict[str, Any] = {
        "x": rng.standard_normal((3, SIDE)).astype(np.float32) / SIDE,
        "flag": np.array(flag),
    }
    wanted = zoo.forward(proto, feeds)["y"]
    np.testing.assert_allclose(zoo.forward(loaded.proto, feeds)["y"], wanted, rtol=1e-4, atol=1e-6)


def test_outline_and_back_is_the_model() -> None:
    proto = old_model()
    outline, detached = detach_tensors(proto)
    # ``inner`` occurs in both branches, so it stays; two Constants, ``k`` and ``w`` are detached.
    assert sorted(math.prod(t.dims) for t in detached.values()) == [SIDE * SIDE] * 4
    assert len(outline.SerializeToString()) < len(proto.SerializeToString()) / 2
    attach_tensors(outline, detached)
    assert outline == proto
