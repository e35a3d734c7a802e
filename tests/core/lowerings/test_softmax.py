"""The softmax family compared with onnx's node tests, ONNX Runtime and SciPy-style formulas."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from harness import check_node_case, check_random, compare, node_cases

from rammer.frontend.lower.graph_lowering import lower
from rammer.ir.evaluate import run_graph
from rammer.ir.graph import Graph, Node, Value
from rammer.ir.types import TensorType

OPS = ("Softmax", "LogSoftmax", "Hardmax")


@pytest.mark.parametrize("case", node_cases(*OPS))
def test_node_case(case: Any, rng: np.random.Generator) -> None:
    check_node_case(rng, case)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("axis", [0, 1, 2, -1])
def test_any_axis(op: str, axis: int, rng: np.random.Generator) -> None:
    x = rng.standard_normal((3, 4, 5)).astype(np.float32) * 30
    check_random(op, {"x": x}, axis=axis)


def test_softmax_is_four_computes(rng: np.random.Generator) -> None:
    graph = check_random("Softmax", {"x": rng.standard_normal((3, 9)).astype(np.float32)})
    assert [c.combiner for c in graph.computes] == ["max", None, "sum", None]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("axis", [None, 0, 2, 3, -1])
def test_old_opsets_coerce_to_two_dimensions(op: str, axis: int | None, rng: np.random.Generator) -> None:
    """Check that before opset 13 all axes from ``axis`` (1 by default) on are normalised together."""
    x = rng.standard_normal((2, 3, 4)).astype(np.float32)
    kind = TensorType("float32", x.shape)
    attributes = {} if axis is None else {"axis": axis}
    node = Node(op, ("x",), ("y",), attributes, op, "", 11)
    graph = Graph("g", (Value("x", kind),), (Value("y", kind),), (node,), {"x": kind, "y": kind}, {}, 11)
    first = 1 if axis is None else axis % 3 if axis < 0 else axis
    flat = x.reshape(int(np.prod(x.shape[:first])), -1).astype(np.float64)
    soft = np.exp(flat - flat.max(1, keepdims=True))
    soft /= soft.sum(1, keepdims=True)
    hard = (np.arange(flat.shape[1]) == flat.argmax(1)[:, None]).astype(np.float64)
    expected = {"Softmax": soft, "LogSoftmax": np.log(soft), "Hardmax": hard}[op].reshape(x.shape)
    compare([run_graph(lower(graph), {"x": x})["y"]], [expected], 1e-6, 1e-6)
