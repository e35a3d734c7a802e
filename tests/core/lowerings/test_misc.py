"""Casts, copies, generators and triangular selection compared with onnx's node tests and ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from harness import check_node_case, check_random, lower_model, node_cases, node_model
from onnx import TensorProto, helper

from rammer.frontend.lower.graph_lowering import lower
from rammer.frontend.lower.lowering_registry import CannotLower
from rammer.ir.evaluate import run_graph
from rammer.ir.graph import Graph, Node, Value
from rammer.ir.types import TensorType

OPS = ("Identity", "Dropout", "Cast", "CastLike", "Trilu", "EyeLike", "Range", "ConstantOfShape", "Constant", "Shape", "Size")


@pytest.mark.parametrize("case", node_cases(*OPS))
def test_node_case(case: Any, rng: np.random.Generator) -> None:
    check_node_case(rng, case)


KINDS = ["float32", "float64", "float16", "int8", "int32", "int64", "uint8", "bool"]


@pytest.mark.parametrize("source", KINDS)
@pytest.mark.parametrize("target", KINDS)
def test_cast(source: str, target: str) -> None:
    # Within the range of every type: outside it, C leaves the result undefined.
    x = np.array([0, 1, 0.25, 2.75, 99.5, 127], np.float64)
    x = (np.concatenate([x, -x]) if source != "uint8" and target != "uint8" else x).astype(source)
    code = helper.np_dtype_to_tensor_dtype(np.dtype(target))
    check_random("Cast", {"x": x}, to=code, rtol=0, atol=0)


def test_nan_is_true() -> None:
    check_random("Cast", {"x": np.array([np.nan, 0.0, -0.0, np.inf], np.float32)}, to=TensorProto.BOOL)


def test_dropout_passes_through_and_declines_training(rng: np.random.Generator) -> None:
    x = rng.standard_normal((3, 4)).astype(np.float32)
    check_random("Dropout", {"x": x}, outputs=2)
    training = {"x": x, "r": np.array(0.5, np.float32), "t": np.array(True)}
    with pytest.raises(CannotLower, match="training"):
        lower_model(node_model("Dropout", training), training)


@pytest.mark.parametrize("upper", [0, 1])
@pytest.mark.parametrize("k", [-6, -1, 0, 2, 9])
@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_trilu(upper: int, k: int, dtype: str, rng: np.random.Generator) -> None:
    x = rng.integers(1, 9, (2, 4, 5)).astype(dtype)
    check_random("Trilu", {"x": x, "k": np.array(k, np.int64)}, upper=upper, rtol=0, atol=0)


@pytest.mark.parametrize("k", [-2, 0, 3])
def test_eye_like(k: int) -> None:
    check_random("EyeLike", {"x": np.zeros((4, 5), np.int64)}, k=k, dtype=TensorProto.FLOAT)


def _generated(node: Node, result: TensorType, constants: dict[str, np.ndarray]) -> np.ndarray:
    """Return the value of a node that folding would remove, by direct lowering."""
    types = {n: TensorType(str(v.dtype), v.shape) for n, v in constants.items()} | {"y": result}
    graph = lower(Graph("g", (), (Value("y", result),), (node,), types, constants))
    return np.asarray(run_graph(graph, {}, precise=False)["y"])


def test_generators_that_survive_folding(rng: np.random.Generator) -> None:
    limits = {n: np.array(v, np.int32) for n, v in (("s", 9), ("e", -5), ("d", -3))}
    y = _generated(Node("Range", ("s", "e", "d"), ("y",)), TensorType("int32", (5,)), limits)
    np.testing.assert_array_equal(y, np.arange(9, -5, -3, np.int32))
    shape = {"s": np.array([2, 3], np.int64)}
    filled = Node("ConstantOfShape", ("s",), ("y",), {"value": np.array([7], np.int64)})
    np.testing.assert_array_equal(_generated(filled, TensorType("int64", (2, 3)), shape), np.full((2, 3), 7))
    tensor = rng.standard_normal((2, 3)).astype(np.float32)
    literal = Node("Constant", (), ("y",), {"value": tensor})
    np.testing.assert_array_equal(_generated(literal, TensorType("float32", (2, 3)), {}), tensor)
    extents = Node("Shape", ("x",), ("y",), {"start": -2})
    np.testing.assert_array_equal(_generated(extents, TensorType("int64", (2,)), {"x": np.zeros((4, 5, 6))}), [5, 6])
    count = Node("Size", ("x",), ("y",))
    assert _generated(count, TensorType("int64", ()), {"x": np.zeros((4, 5, 6))}) == 120
