"""Local functions with default attributes, and sparse tensors: declared in the file and honoured."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, SparseTensorProto, TensorProto, helper, numpy_helper, parser

from rammer.errors import BadInput
from rammer.frontend.bind.binder import bind
from rammer.frontend.lower.graph_lowering import lower
from rammer.frontend.read.reader import TARGET_OPSET, read_model
from rammer.ir.evaluate import run_graph

X = np.arange(-4, 4, dtype=np.float32).reshape(2, 4)


def _run(model: ModelProto, **inputs: Any) -> Any:
    graph = lower(bind(read_model(model), {n: a.shape for n, a in inputs.items()}))
    values = run_graph(graph, {n: inputs[graph.aliases[n]] for n in graph.inputs}, precise=False)
    return values[graph.outputs[0]]


FUNCTIONS = """
<ir_version: 9, opset_import: ["":17, "own":1]>
main (float[2,4] x) => (float[2,4] y) { %s }
<domain: "own", opset_import: ["":17]>
leaky<alpha: float = 0.5>(a) => (b) { b = LeakyRelu<alpha: float = @alpha>(a) }
<domain: "own", opset_import: ["":17, "own":1]>
outer<beta: float = 0.25>(a) => (b) { c = own.leaky(a)  b = own.leaky<alpha: float = @beta>(c) }
"""


@pytest.mark.parametrize(
    ("call", "slope"),
    [
        ("y = own.leaky(x)", 0.5),
        ("y = own.leaky<alpha=2.0>(x)", 2.0),
        ("y = own.outer(x)", 0.125),
        ("y = own.outer<beta=1.0>(x)", 0.5),
    ],
)
def test_a_function_attribute_left_out_has_its_default(call: str, slope: float) -> None:
    np.testing.assert_array_equal(_run(parser.parse_model(FUNCTIONS % call), x=X), np.where(X < 0, slope * X, X))


def _sparse(flat: bool) -> SparseTensorProto:
    values = helper.make_tensor("w", TensorProto.FLOAT, [2], [3.0, -1.0])
    places = np.array([1, 6], np.int64) if flat else np.array([[0, 1], [1, 2]], np.int64)
    return helper.make_sparse_tensor(values, numpy_helper.from_array(places, "places"), [2, 4])


def _sum(opset: int) -> ModelProto:
    head = f'<ir_version: 7, opset_import: ["":{opset}]>'
    return parser.parse_model(f"{head} g (float[2,4] x) => (float[2,4] y) {{ y = Add(x, w) }}")


DENSE = np.array([[0, 3, 0, 0], [0, 0, -1, 0]], np.float32)


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("opset", [11, 17, 21])
def test_a_sparse_initializer_is_dense_inside(flat: bool, opset: int) -> None:
    model = _sum(opset)
    model.graph.sparse_initializer.append(_sparse(flat))
    read = read_model(model)
    assert read.opset == TARGET_OPSET and not read.notes, "ONNX's converter does not see sparse initialisers"
    assert model.graph.sparse_initializer and not read.proto.graph.sparse_initializer
    np.testing.assert_array_equal(_run(model, x=X), X + DENSE)


@pytest.mark.parametrize("opset", [11, 17, 21])
def test_a_sparse_constant_is_dense_inside(opset: int) -> None:
    model = _sum(opset)
    model.graph.node.insert(0, helper.make_node("Constant", [], ["w"], sparse_value=_sparse(True)))
    np.testing.assert_array_equal(_run(model, x=X), X + DENSE)


def test_sparse_indices_outside_the_tensor_are_bad_input() -> None:
    model = _sum(17)
    wrong = _sparse(True)
    wrong.indices.CopyFrom(numpy_helper.from_array(np.array([1, 8], np.int64), "places"))
    model.graph.sparse_initializer.append(wrong)
    with pytest.raises(BadInput, match="indices outside its shape"):
        _run(model, x=X)


@pytest.mark.parametrize("opset", [11, 17, 21])
def test_a_constant_of_two_values_is_bad_input(opset: int) -> None:
    model = _sum(opset)
    node = helper.make_node("Constant", [], ["w"], sparse_value=_sparse(True), value=numpy_helper.from_array(DENSE, "w"))
    model.graph.node.insert(0, node)
    with pytest.raises(BadInput, match="Constant"):
        _run(model, x=X)


@pytest.mark.parametrize(("domain", "version"), [("", 13), ("", 22), ("ai.onnx.ml", 2)])
def test_a_function_of_another_opset_is_refused_and_told_apart_from_one_that_calls_itself(domain: str, version: int) -> None:
    imports = {"": 21, "ai.onnx.ml": 5, "my": 1}
    opsets = ", ".join(f'"{d}": {v}' for d, v in (imports | {domain: version}).items())
    text = f"""<ir_version: 9, opset_import: ["": 21, "ai.onnx.ml": 5, "my": 1]>
        one (float[2] x) => (float[2] y) {{ y = my.Of(x) }}
        <domain: "my", opset_import: [{opsets}]> Of (x) => (y) {{ y = Relu(x) }}"""
    with pytest.raises(BadInput) as error:
        read_model(parser.parse_model(text))
    assert error.value.what.startswith(f"function Of is of opset {version}") and f"opset {imports[domain]}" in error.value.what
    calling = text.replace(f"[{opsets}]", '["": 21, "my": 1]').replace("Relu", "my.Of")
    with pytest.raises(BadInput, match=r"recursive|calls itself"):
        read_model(parser.parse_model(calling))
