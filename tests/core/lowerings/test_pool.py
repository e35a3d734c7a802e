"""Pooling compared with onnx's node tests and ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from harness import check_node_case, check_random, node_cases


def _data(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


@pytest.mark.slow
@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    "case",
    node_cases("MaxPool", "AveragePool", "LpPool", "GlobalMaxPool", "GlobalAveragePool", "GlobalLpPool"),
)
def test_node_case(case: Any, rng: np.random.Generator) -> None:
    check_node_case(rng, case)


WINDOWS: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    ((2, 3, 9, 8), {"kernel_shape": [3, 2], "strides": [2, 2]}),
    ((2, 3, 9, 8), {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 0, 1, 2]}),
    ((2, 3, 9, 8), {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1], "ceil_mode": 1}),
    ((1, 3, 10, 10), {"kernel_shape": [2, 3], "strides": [3, 3], "ceil_mode": 1}),
    ((1, 3, 9, 8), {"kernel_shape": [3, 3], "dilations": [2, 2]}),
    ((1, 3, 9, 8), {"kernel_shape": [2, 3], "auto_pad": "SAME_UPPER", "strides": [2, 3]}),
    ((1, 3, 9, 8), {"kernel_shape": [2, 3], "auto_pad": "SAME_LOWER"}),
    ((1, 3, 9, 8), {"kernel_shape": [2, 3], "auto_pad": "VALID", "strides": [2, 2]}),
    ((2, 3, 13), {"kernel_shape": [4], "strides": [3], "pads": [1, 2]}),
    ((1, 2, 5, 6, 7), {"kernel_shape": [2, 3, 3], "pads": [1, 1, 1, 0, 1, 1]}),
    ((1, 2, 4, 4), {"kernel_shape": [1, 1], "strides": [2, 2]}),
]


@pytest.mark.parametrize(("shape", "config"), WINDOWS)
def test_max_pool(shape: tuple[int, ...], config: dict[str, Any], rng: np.random.Generator) -> None:
    check_random("MaxPool", {"x": _data(rng, *shape) - 5}, **config)


@pytest.mark.parametrize("include", [0, 1])
@pytest.mark.parametrize(("shape", "config"), WINDOWS)
def test_average_pool(shape: tuple[int, ...], config: dict[str, Any], include: int, rng: np.random.Generator) -> None:
    check_random("AveragePool", {"x": _data(rng, *shape)}, count_include_pad=include, **config)


@pytest.mark.parametrize("p", [1, 2, 3])
@pytest.mark.parametrize(("shape", "config"), [w for w in WINDOWS if "ceil_mode" not in w[1]])
def test_lp_pool(shape: tuple[int, ...], config: dict[str, Any], p: int, rng: np.random.Generator) -> None:
    check_random("LpPool", {"x": _data(rng, *shape)}, p=p, **config)


@pytest.mark.parametrize("op", ["GlobalMaxPool", "GlobalAveragePool", "GlobalLpPool"])
@pytest.mark.parametrize("shape", [(2, 3, 9), (2, 3, 9, 8), (1, 3, 4, 5, 6)])
def test_global_pool(op: str, shape: tuple[int, ...], rng: np.random.Generator) -> None:
    graph = check_random(op, {"x": _data(rng, *shape)})
    assert graph.computes[0].kind == "reduction"


def test_max_pool_of_bytes_ignores_padding(rng: np.random.Generator) -> None:
    x = rng.integers(-128, -100, (1, 1, 5, 5)).astype(np.int8)
    graph = check_random("MaxPool", {"x": x}, kernel_shape=[3, 3], pads=[1, 1, 1, 1])
    assert graph.computes[0].kind == "window"


@pytest.mark.parametrize("order", [0, 1])
def test_max_pool_indices(order: int, rng: np.random.Generator) -> None:
    check_random("MaxPool", {"x": _data(rng, 2, 3, 5, 6)}, 2, kernel_shape=[2, 3], pads=[0, 1, 1, 0], storage_order=order)
