"""Binding: shape arithmetic, constant branches and functions fold away; names and outputs stay."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from onnx_models import bound, model, ops, tensor

from rammer.frontend.bind.binder import bind
from rammer.frontend.read.reader import read_model
from rammer_testing import models as zoo
from rammer_testing.graph_reference import evaluate_graph

# Folding -------------------------------------------------------------------------------------------------------


def test_shape_arithmetic_folds() -> None:
    nodes = [
        helper.make_node("Shape", ["x"], ["s"]),
        helper.make_node("Gather", ["s", "i"], ["n"]),
        helper.make_node("Unsqueeze", ["n", "zero"], ["n1"]),
        helper.make_node("Concat", ["n1", "rest"], ["t"], axis=0),
        helper.make_node("Reshape", ["x", "t"], ["y"]),
        helper.make_node("ConstantOfShape", ["t"], ["unused"]),
    ]
    constants = {"i": np.array(0), "zero": np.array([0]), "rest": np.array([-1])}
    graph = bound(model(nodes, [tensor("x", ["n", 3, 4])], ["y"], constants=constants), x=(5, 3, 4))
    assert ops(graph) == ["Reshape"] and str(graph.outputs[0]) == "y: f32[5,12]"
    np.testing.assert_array_equal(graph.constants[graph.nodes[0].inputs[1]], [5, -1])


def test_random_and_large_values_do_not_fold() -> None:
    nodes = [
        helper.make_node("RandomNormal", [], ["r"], shape=[3]),
        helper.make_node("ConstantOfShape", ["big"], ["z"]),
        helper.make_node("ReduceSum", ["z"], ["s"]),
        helper.make_node("Add", ["r", "s"], ["a"]),
        helper.make_node("Add", ["a", "x"], ["y"]),
    ]
    graph = bound(model(nodes, [tensor("x", [3])], ["y"], constants={"big": np.array([1 << 25])}))
    assert ops(graph) == ["RandomNormal", "ConstantOfShape", "ReduceSum", "Add", "Add"]


def branches() -> tuple[onnx.GraphProto, onnx.GraphProto]:
    """Make two branches that read the outer ``x`` and both use the inner name ``t``."""
    yes = helper.make_graph(
        [helper.make_node("Mul", ["x", "two"], ["t"])],
        "yes",
        [],
        [tensor("t", None)],
        [numpy_helper.from_array(np.float32(2), "two")],
    )
    no = helper.make_graph([helper.make_node("Neg", ["x"], ["t"])], "no", [], [tensor("t", None)])
    return yes, no


@pytest.mark.parametrize("size, expected", [(4, "Mul"), (2, "Neg")])
def test_if_with_a_known_condition_is_inlined(size: int, expected: str, rng: np.random.Generator) -> None:
    yes, no = branches()
    nodes = [
        helper.make_node("Size", ["x"], ["n"]),
        helper.make_node("Greater", ["n", "three"], ["c"]),
        helper.make_node("If", ["c"], ["y"], then_branch=yes, else_branch=no),
    ]
    graph = bound(model(nodes, [tensor("x", ["n"])], ["y"], constants={"three": np.array(3)}), x=(size,))
    assert ops(graph) == [expected, "Identity"]
    x = rng.standard_normal(size).astype(np.float32)
    np.testing.assert_array_equal(evaluate_graph(graph, {"x": x})["y"], 2 * x if size == 4 else -x)


def test_local_functions_are_inlined(rng: np.random.Generator) -> None:
    body = [helper.make_node("Mul", ["a", "a"], ["m"]), helper.make_node("Add", ["m", "a"], ["o"])]
    function = helper.make_function("local", "F", ["a"], ["o"], body, [helper.make_opsetid("", 21)])
    nodes = [helper.make_node("F", ["x"], ["t"], domain="local"), helper.make_node("F", ["t"], ["y"], domain="local")]
    proto = model(nodes, [tensor("x", [3])], ["y"], functions=[function], imports=[helper.make_opsetid("local", 1)])
    graph = bound(proto)
    assert ops(graph) == ["Mul", "Add", "Mul", "Add"]
    x = rng.standard_normal(3).astype(np.float32)
    t = x * x + x
    np.testing.assert_allclose(evaluate_graph(graph, {"x": x})["y"], t * t + t, rtol=1e-6)


@pytest.mark.parametrize(
    "op, attributes",
    [
        ("Gelu", {"approximate": "tanh"}),
        ("Gelu", {}),
        ("HardSwish", {}),
        ("Mish", {}),
        ("Softmax", {"axis": 1}),
        ("Celu", {"alpha": 0.7}),
        ("MeanVarianceNormalization", {"axes": [0, 2]}),
        ("LogSoftmax", {}),
    ],
)
def test_schema_functions_expand_to_the_same_values(op: str, attributes: dict[str, Any], rng: np.random.Generator) -> None:
    proto = model([helper.make_node(op, ["x"], ["y"], name="f", **attributes)], [tensor("x", [2, 3, 4])], ["y"])
    kept, expanded = bind(read_model(proto), {}, {("", op)}), bind(read_model(proto), {}, ())
    assert ops(kept) == [op] and op not in ops(expanded) and str(kept.outputs[0]) == "y: f32[2,3,4]"
    x = rng.standard_normal((2, 3, 4)).astype(np.float32)
    want, have = (evaluate_graph(g, {"x": x})["y"] for g in (kept, expanded))
    np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-6)


def test_names_are_identifiers_and_externals_stay() -> None:
    nodes = [helper.make_node("Neg", ["in/0"], ["a.b"], name="n/1"), helper.make_node("Neg", ["a.b"], ["a_b"])]
    graph = bound(model(nodes, [tensor("in/0", [2])], ["a_b"]))
    assert str(graph) == (
        "graph g(in_0: f32[2]) -> (a_b: f32[2])\n"
        "  f32[2]               a_b_2 = Neg(in_0)  # n/1\n"
        "  f32[2]               a_b = Neg(a_b_2)  # Neg_1"
    )
    assert graph.inputs[0].external == "in/0"


def test_outputs_that_no_node_computes() -> None:
    """Check an input, a constant and a value used twice: each output gets a separate node."""
    proto = model([], [tensor("x", [2])], ["x", "c"], constants={"c": np.arange(3.0)})
    graph = bound(proto)
    assert ops(graph) == ["Identity", "Identity"]
    result = evaluate_graph(graph, {"x": np.array([1, 2], np.float32)})
    assert list(result) == ["x", "c"] and list(result["c"]) == [0, 1, 2]


# Real models ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name, nodes", [("densenet121", 668), ("shufflenet", 203), ("squeezenet", 68)])
def test_light_models_bind(name: str, nodes: int) -> None:
    everything = {("", op) for op in ("Relu", "Softmax", "Dropout", "BatchNormalization")}
    graph = bind(read_model(zoo.light_model(name)), {}, everything)
    assert len(graph.nodes) == nodes
    assert not {"Shape", "Constant", "Unsqueeze", "ConstantOfShape"} & set(ops(graph))
