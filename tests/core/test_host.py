"""Operators on the host: the same values as the whole model, including sub-graphs and captured values."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from rammer.errors import BadInput
from rammer.frontend.bind import if_conversion
from rammer.frontend.bind.binder import bind
from rammer.frontend.host.host_node import HostNode
from rammer.frontend.read.node_protos import attribute_proto, attribute_value, captured_names, node_proto
from rammer.frontend.read.reader import read_model
from rammer.ir.graph import Graph, Node
from rammer.ir.types import TensorType
from rammer.passes.pass_pipeline import Pipeline, default_passes
from rammer_testing import models as zoo
from rammer_testing.graph_reference import evaluate_graph

FLOAT = TensorProto.FLOAT


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def tensor(name: str, shape: Any, dtype: int = FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, shape)


def model(
    nodes: list[onnx.NodeProto],
    inputs: list[onnx.ValueInfoProto],
    outputs: list[str],
    constants: dict[str, np.ndarray] | None = None,
) -> onnx.ModelProto:
    weights = [numpy_helper.from_array(a, n) for n, a in (constants or {}).items()]
    graph = helper.make_graph(nodes, "g", inputs, [onnx.ValueInfoProto(name=o) for o in outputs], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def run(graph: Graph, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Run every node as a HostNode; inputs and outputs have ONNX names."""
    values = dict(graph.constants) | {v.name: feeds[v.external] for v in graph.inputs}
    for node in graph.nodes:
        host = HostNode.of(graph, node)
        values |= host.run({n: values[n] for n in host.inputs})
    return {v.external: values[v.name] for v in graph.outputs}


def check(proto: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> Graph:
    graph = bind(read_model(proto), {}, {("", n.op_type) for n in proto.graph.node})
    want = zoo.forward(proto, feeds)
    for candidate in (graph, Pipeline(default_passes())(graph)):
        for have in (run(candidate, feeds), evaluate_graph(candidate, feeds)):
            for name, value in want.items():
                np.testing.assert_allclose(have[name], value, rtol=1e-5, atol=1e-6)
    return graph


def test_one_operator(rng: np.random.Generator) -> None:
    node = helper.make_node("CumSum", ["x", "a"], ["y"], name="c", reverse=1)
    graph = check(model([node], [tensor("x", [3, 4])], ["y"], {"a": np.array(1)}), {"x": normal(rng, 3, 4)})
    host = HostNode.of(graph, graph.nodes[0])
    assert str(host) == "host f32[3,4] y = CumSum(x, a) {reverse=1}  # c"
    assert host.inputs == ("x", "a") and host.outputs == ("y",)


def test_several_and_absent_results(rng: np.random.Generator) -> None:
    node = helper.make_node("TopK", ["x", "k"], ["y", "i"], axis=0)
    check(model([node], [tensor("x", [5, 3])], ["y", "i"], {"k": np.array([2])}), {"x": normal(rng, 5, 3)})
    constants = {"w": normal(rng, 1, 12, 4), "r": normal(rng, 1, 12, 3), "b": normal(rng, 1, 24)}
    node = helper.make_node("LSTM", ["x", "w", "r", "b"], ["", "h"], hidden_size=3)
    check(model([node], [tensor("x", [2, 1, 4])], ["h"], constants), {"x": normal(rng, 2, 1, 4)})


def test_a_scalar_stays_a_scalar(rng: np.random.Generator) -> None:
    graph = check(
        model([helper.make_node("ReduceSum", ["x"], ["y"], keepdims=0)], [tensor("x", [4])], ["y"]), {"x": normal(rng, 4)}
    )
    assert run(graph, {"x": normal(rng, 4)})["y"].shape == ()


@pytest.mark.parametrize("condition", [True, False])
def test_if_with_captured_values(condition: bool, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check branches that read outer values, one computed by a node that a pass merges with another."""
    monkeypatch.setattr(if_conversion, "MOST_OPERATORS", 0)  # the branches stay
    yes = helper.make_graph(
        [helper.make_node("Add", ["a.1", "k"], ["t"])],
        "yes",
        [],
        [tensor("t", [4])],
        [numpy_helper.from_array(np.float32(2), "k")],
    )
    no = helper.make_graph([helper.make_node("Sub", ["x", "b.1"], ["t"])], "no", [], [tensor("t", [4])])
    nodes = [
        helper.make_node("Exp", ["x"], ["b.1"]),
        helper.make_node("Exp", ["x"], ["a.1"]),
        helper.make_node("If", ["c"], ["u"], then_branch=yes, else_branch=no),
        helper.make_node("Sub", ["u", "b.1"], ["y"]),
    ]
    proto = model(nodes, [tensor("x", [4]), tensor("c", [], TensorProto.BOOL)], ["y"])
    graph = check(proto, {"x": normal(rng, 4), "c": np.array(condition)})
    node = next(n for n in graph.nodes if n.op == "If")
    assert node.inputs == ("c", "x", "b_1", "a_1") and captured_names(node) == ("x", "b.1", "a.1")
    text = str(HostNode.of(graph, node))
    assert text.startswith("host f32[4] u = If(c, x, b_1, a_1) {else_branch=graph<no, 1 nodes>")
    assert len(Pipeline(default_passes())(graph).nodes) == len(graph.nodes) - 1


def test_scan(rng: np.random.Generator) -> None:
    body = helper.make_graph(
        [
            helper.make_node("Mul", ["s", "outer"], ["d"]),
            helper.make_node("Add", ["d", "i"], ["n"]),
            helper.make_node("Identity", ["n"], ["o"]),
        ],
        "body",
        [tensor("s", [2]), tensor("i", [2])],
        [tensor("n", [2]), tensor("o", [2])],
    )
    node = helper.make_node("Scan", ["s0", "xs"], ["last", "all"], body=body, num_scan_inputs=1)
    inputs = [tensor("s0", [2]), tensor("xs", [5, 2]), tensor("outer", [2])]
    check(model([node], inputs, ["last", "all"]), {"s0": normal(rng, 2), "xs": normal(rng, 5, 2), "outer": normal(rng, 2)})


def test_failures_name_the_node() -> None:
    types = {"y": TensorType("float32", (2,))}
    node = Node("NonZero", ("x",), ("y",), {}, "nz", "", 13)
    with pytest.raises(BadInput) as caught:
        HostNode(node, types).run({"x": np.ones(3, np.float32)})
    assert str(caught.value) == (
        "NonZero gives 'y' the shape [1, 3] instead of [2]\n  at: node nz (NonZero)\n"
        "  hint: its shape was inferred wrongly: export the model with another opset"
    )
    node = Node("MatMul", ("x", "x"), ("y",), {}, "mm", "", 13)
    with pytest.raises(BadInput, match=r"MatMul fails on the host: .*\n  at: node mm \(MatMul\)"):
        HostNode(node, types).run({"x": np.ones((2, 3), np.float32)})


@pytest.mark.parametrize(
    "value",
    [
        3,
        -1.5,
        "text",
        (1, 2, 3),
        (0.5, 1.5),
        ("a", "b"),
        np.arange(6.0).reshape(2, 3),
        np.array(7),
        (),
    ],
)
def test_attributes_read_back(value: Any) -> None:
    again = attribute_value(attribute_proto("a", value))
    assert type(again) is type(value)
    np.testing.assert_array_equal(again, value)


def test_node_proto_keeps_absent_operands() -> None:
    node = Node("Clip", ("x", "", "hi"), ("y",), {}, "c", "", 13)
    assert list(node_proto(node).input) == ["x", "", "hi"]
