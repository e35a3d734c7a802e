"""Reductions, ArgMax and running sums compared with onnx's node tests and ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from harness import check_node_case, check_random, compare, node_cases, node_model, run_node_model

REDUCTIONS = (
    "ReduceSum",
    "ReduceMean",
    "ReduceMax",
    "ReduceMin",
    "ReduceProd",
    "ReduceL1",
    "ReduceL2",
    "ReduceLogSum",
    "ReduceLogSumExp",
    "ReduceSumSquare",
)


@pytest.mark.parametrize("case", node_cases(*REDUCTIONS, "ArgMax", "ArgMin", "CumSum", "CumProd"))
def test_node_case(case: Any, rng: np.random.Generator) -> None:
    check_node_case(rng, case)


@pytest.mark.parametrize("op", REDUCTIONS)
@pytest.mark.parametrize("axes", [None, [0], [-1], [0, 2], [1, 2, 3]])
@pytest.mark.parametrize("keepdims", [0, 1])
def test_reduce(op: str, axes: list[int] | None, keepdims: int, rng: np.random.Generator) -> None:
    x = rng.uniform(0.5, 2, (2, 3, 4, 2)).astype(np.float32)
    inputs = {"x": x} | ({} if axes is None else {"axes": np.array(axes)})
    graph = check_random(op, inputs, keepdims=keepdims)
    assert {c.kind for c in graph.computes} <= {"reduction", "map"}


@pytest.mark.parametrize("op", ["ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceSumSquare"])
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_reduce_integers(op: str, dtype: str, rng: np.random.Generator) -> None:
    x = rng.integers(-9, 9, (3, 4)).astype(dtype)
    check_random(op, {"x": x, "axes": np.array([1])}, keepdims=0)


def test_no_axes_may_mean_no_reduction(rng: np.random.Generator) -> None:
    x = rng.standard_normal((3, 4)).astype(np.float32)
    check_random("ReduceSum", {"x": x}, noop_with_empty_axes=1)


def test_log_sum_exp_survives_large_and_infinite_values() -> None:
    x = np.array([[1000.0, 1000.0], [-1000.0, -1001.0], [-np.inf, -np.inf], [np.inf, 0.0]], np.float32)
    model = node_model("ReduceLogSumExp", {"x": x, "axes": np.array([1])}, keepdims=0)
    with np.errstate(divide="ignore"):
        expected = np.logaddexp(x[:, 0].astype(np.float64), x[:, 1])
        compare(run_node_model(model, {"x": x, "axes": np.array([1])}, precise=True), [expected], 1e-6, 1e-6)


@pytest.mark.parametrize("op", ["ArgMax", "ArgMin"])
@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("last", [0, 1])
@pytest.mark.parametrize("keepdims", [0, 1])
def test_arg_extreme_with_ties(op: str, axis: int, last: int, keepdims: int, rng: np.random.Generator) -> None:
    x = rng.integers(0, 3, (3, 5, 4)).astype(np.float32)
    check_random(op, {"x": x}, axis=axis, select_last_index=last, keepdims=keepdims)


@pytest.mark.parametrize("dtype", ["float32", "int32", "int64"])
@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("reverse", [0, 1])
@pytest.mark.parametrize("exclusive", [0, 1])
def test_cumulative_sum(dtype: str, axis: int, reverse: int, exclusive: int, rng: np.random.Generator) -> None:
    x = rng.integers(-5, 5, (3, 5, 4)).astype(dtype)
    check_random("CumSum", {"x": x, "axis": np.array(axis)}, reverse=reverse, exclusive=exclusive)
