"""Lowering of a Graph to a ComputeGraph: names, order, errors."""

from __future__ import annotations

import numpy as np
import pytest

from rammer.frontend.lower.graph_lowering import can_lower, lower, lower_node
from rammer.frontend.lower.lowering_registry import REGISTRY, CannotLower, Lowering
from rammer.ir.evaluate import run_graph
from rammer.ir.graph import Graph, Node, Value
from rammer.ir.types import TensorType


def _graph(*nodes: Node, shape: tuple[int, ...] = (3, 4)) -> Graph:
    kind = TensorType("float32", shape)
    names = {"x"} | {o for n in nodes for o in n.outputs}
    last = nodes[-1].outputs[0]
    return Graph(
        "g",
        (Value("x", kind, "x:0"),),
        (Value(last, kind, "out"),),
        nodes,
        dict.fromkeys(names, kind),
        {},
        21,
    )


def test_chain(rng: np.random.Generator) -> None:
    graph = _graph(Node("Softmax", ("x",), ("s",), {}, "a", "", 21), Node("Softmax", ("s",), ("y",), {}, "b", "", 21))
    lowered = lower(graph)
    names = [c.name for c in lowered.computes]
    assert len(set(names)) == len(names) == 8
    assert [c.origin for c in lowered.computes] == ["a"] * 4 + ["b"] * 4
    assert lowered.aliases == {"x": "x:0", "y": "out"}
    x = rng.standard_normal((3, 4)).astype(np.float32)
    result = run_graph(lowered, {"x": x})["y"]
    np.testing.assert_allclose(result.sum(1), 1, rtol=1e-6)


def test_intermediates_avoid_names_of_the_graph() -> None:
    """Check a model value with the name of a lowering's intermediate."""
    graph = _graph(Node("Identity", ("x",), ("y_max",), {}), Node("Softmax", ("y_max",), ("y",), {}, "", "", 21))
    names = [c.name for c in lower(graph).computes]
    assert len(set(names)) == len(names)


def test_unknown_operator_is_declined_with_its_name() -> None:
    graph = _graph(Node("Frobnicate", ("x",), ("y",), {}, domain="com.example"))
    assert can_lower(graph, graph.nodes[0]) == "com.example.Frobnicate has no lowering"
    with pytest.raises(CannotLower, match="Frobnicate"):
        lower(graph)


def test_a_lowering_that_breaks_its_contract_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(ctx: Lowering) -> None:
        axes = ctx.axes(ctx.input(0))[:1]
        ctx.emit(axes, ctx.load(ctx.input(0), axes[0].name, 0), into=0)

    monkeypatch.setitem(REGISTRY, ("", "Softmax"), wrong)
    graph = _graph(Node("Softmax", ("x",), ("y",), {}))
    with pytest.raises(ValueError, match=r"gives f32\[3\] for output y, which is declared f32\[3,4\]"):
        lower_node(graph, graph.nodes[0], set())


def test_unused_constants_are_dropped() -> None:
    kind = TensorType("float32", (3, 4))
    axes = np.array([1], np.int64)
    nodes = (Node("ReduceSum", ("x", "axes"), ("y",), {"keepdims": 0}, "", "", 21),)
    types = {"x": kind, "y": TensorType("float32", (3,)), "axes": TensorType("int64", (1,))}
    graph = Graph("g", (Value("x", kind),), (Value("y", types["y"]),), nodes, types, {"axes": axes}, 21)
    assert dict(lower(graph).constants) == {}
