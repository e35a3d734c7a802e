"""Small ONNX models for the tests of the frontend, and their errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from rammer.errors import BadInput
from rammer.frontend.bind.binder import bind
from rammer.frontend.read.reader import read_model
from rammer.ir.graph import Graph

FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL


def tensor(name: str, shape: Any, dtype: int = FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, shape)


def model(
    nodes: list[onnx.NodeProto],
    inputs: list[onnx.ValueInfoProto],
    outputs: list[str],
    opset: int = 21,
    constants: dict[str, np.ndarray] | None = None,
    **more: Any,
) -> onnx.ModelProto:
    weights = [numpy_helper.from_array(a, n) for n, a in (constants or {}).items()]
    graph = helper.make_graph(nodes, "g", inputs, [onnx.ValueInfoProto(name=o) for o in outputs], weights)
    imports = [helper.make_opsetid("", opset), *more.pop("imports", [])]
    return helper.make_model(graph, opset_imports=imports, ir_version=10, **more)


def relu(shape: Any = (2, 3)) -> onnx.ModelProto:
    return model([helper.make_node("Relu", ["x"], ["y"], name="r")], [tensor("x", shape)], ["y"])


def message(source: Any, shapes: dict[str, tuple[int, ...]] | None = None) -> str:
    with pytest.raises(BadInput) as caught:
        bind(read_model(source), shapes or {})
    assert caught.value.exit_code == 2
    return str(caught.value)


def bound(proto: onnx.ModelProto, **shapes: tuple[int, ...]) -> Graph:
    return bind(read_model(proto), shapes)


def ops(graph: Graph) -> list[str]:
    return [n.op for n in graph.nodes]
