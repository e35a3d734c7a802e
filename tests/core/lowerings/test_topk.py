"""TopK compared with onnx's node tests and NumPy's stable sort: ties, NaN, every type, short and long axes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from harness import check_node_case, lower_model, node_cases, node_model, run_node_model

from rammer.frontend.lower.lowering_registry import CannotLower
from rammer.frontend.lower.operators import topk
from rammer_testing.nonempty import some


@pytest.mark.parametrize("case", node_cases("TopK"))
def test_node_case(case: Any, rng: np.random.Generator) -> None:
    try:
        check_node_case(rng, case)
    except pytest.skip.Exception as reason:
        pytest.fail(f"every one has tensor expressions: {reason}")


def _check(x: np.ndarray, count: int, axis: int, largest: int) -> None:
    inputs = {"x": x, "k": np.array([count], np.int64)}
    values, places = run_node_model(node_model("TopK", inputs, 2, opset=24, axis=axis, largest=largest), inputs)
    # NaN sorts last in NumPy and counts as largest here. Equal elements stay in order.
    key = np.where(np.isnan(x), np.inf, x) if x.dtype.kind == "f" else x
    order = np.argsort(key, axis=axis, kind="stable")
    if largest:
        flipped = np.flip(np.argsort(np.flip(key, axis), axis=axis, kind="stable"), axis)
        order = x.shape[axis] - 1 - flipped
    order = np.take(order, range(count), axis=axis)
    np.testing.assert_array_equal(places, order)
    np.testing.assert_array_equal(values, np.take_along_axis(x, order, axis))


@pytest.mark.parametrize("largest", [0, 1])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int8", "uint8", "int32", "uint32", "int64", "uint64"])
def test_types_and_ties(dtype: str, largest: int, rng: np.random.Generator) -> None:
    shape = [int(n) for n in rng.integers(1, 9, 3)]
    axis = int(rng.integers(0, 3))
    x = rng.integers(-3, 4, shape).astype(dtype) * np.asarray(rng.choice([1, 7]), dtype)
    if x.dtype.kind != "f":
        info = np.iinfo(dtype)
        x.flat[:2] = [info.max, info.min][: x.size]
    _check(x, int(rng.integers(0, shape[axis] + 1)), axis, largest)


def test_infinities_zeros_and_nan() -> None:
    x = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan, 1e-45, -1e-45, 3.4e38, -3.4e38], np.float32)
    (_, places) = run_node_model(node_model("TopK", {"x": x, "k": np.array([10])}, 2), {"x": x, "k": np.array([10])})
    np.testing.assert_array_equal(places, [4, 5, 2, 8, 6, 0, 1, 7, 9, 3])


@pytest.mark.parametrize("largest", [0, 1])
@pytest.mark.parametrize(("extent", "count"), [(600, 600), (700, 5), (4097, 3), (2500, 150), (9000, 40)])
def test_long_axes(extent: int, count: int, largest: int, rng: np.random.Generator) -> None:
    """Check every algorithm: the whole axis, and one and two levels of blocks; also with many equal elements."""
    for x in some([rng.standard_normal((2, extent)), rng.integers(0, 20, (1, extent)), np.zeros((1, extent))]):
        _check(np.asarray(x, np.float32), count, 1, largest)


def test_a_sort_of_very_much_is_for_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = {"x": np.zeros((3, 9), np.float32), "k": np.array([2])}
    monkeypatch.setattr(topk, "MOST_STEPS", 10)
    with pytest.raises(CannotLower, match="more than 10"):
        lower_model(node_model("TopK", inputs, 2), inputs)
