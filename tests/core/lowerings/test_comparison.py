"""Comparison, logic and selection compared with onnx's node tests and ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from harness import check_node_case, check_random, node_cases

COMPARISONS = ("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual")


@pytest.mark.parametrize("case", node_cases(*COMPARISONS, "And", "Or", "Xor", "Not", "IsNaN", "IsInf", "Where"))
def test_node_case(case: Any, rng: np.random.Generator) -> None:
    check_node_case(rng, case)


@pytest.mark.parametrize("op", COMPARISONS)
@pytest.mark.parametrize("dtype", ["float32", "int32", "int64"])
def test_compare(op: str, dtype: str, rng: np.random.Generator) -> None:
    a, b = rng.integers(-2, 3, (4, 1, 6)).astype(dtype), rng.integers(-2, 3, (5, 6)).astype(dtype)
    if dtype == "float32":
        a[0, 0, :2] = np.nan, np.inf
    check_random(op, {"a": a, "b": b})


@pytest.mark.parametrize("op", ["And", "Or", "Xor"])
def test_logic(op: str, rng: np.random.Generator) -> None:
    check_random(op, {"a": rng.random((4, 1, 6)) < 0.5, "b": rng.random((5, 1)) < 0.5})


@pytest.mark.parametrize("positive", [0, 1])
@pytest.mark.parametrize("negative", [0, 1])
def test_infinities(positive: int, negative: int) -> None:
    x = np.array([np.inf, -np.inf, np.nan, 0, 3], np.float32)
    check_random("IsInf", {"x": x}, detect_positive=positive, detect_negative=negative)


@pytest.mark.parametrize("dtype", ["float32", "int64", "uint8"])
def test_where(dtype: str, rng: np.random.Generator) -> None:
    condition = rng.random((4, 1, 3)) < 0.5
    x, y = rng.integers(0, 9, (5, 1)).astype(dtype), rng.integers(0, 9, (3,)).astype(dtype)
    check_random("Where", {"c": condition, "x": x, "y": y}, rtol=0, atol=0)
