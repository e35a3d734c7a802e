"""Pad compared with onnx's node tests and NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from harness import check_node_case, compare, node_cases, node_model, run_node_model

from rammer.frontend.bind.binder import bind
from rammer.frontend.lower.graph_lowering import lower
from rammer.frontend.read.reader import read_model
from rammer.ir.evaluate import run_graph


@pytest.mark.parametrize("case", node_cases("Pad"))
def test_node_case(case: Any, rng: np.random.Generator) -> None:
    check_node_case(rng, case)


@pytest.mark.parametrize("mode", ["constant", "edge", "reflect", "wrap"])
@pytest.mark.parametrize("dtype", ["float32", "int32", "float64", "bool"])
@pytest.mark.parametrize("widths", [((0, 0), (2, 1)), ((3, 2), (0, 4)), ((7, 9), (5, 0)), ((0, 0), (0, 0))])
def test_modes(mode: str, dtype: str, widths: tuple[tuple[int, int], ...], rng: np.random.Generator) -> None:
    x = rng.integers(0, 9, (4, 3)).astype(dtype)
    pads = np.array([w[0] for w in widths] + [w[1] for w in widths])
    model = node_model("Pad", {"x": x, "pads": pads}, mode=mode)
    compare(run_node_model(model, {"x": x, "pads": pads}), [np.pad(x, widths, mode=mode)], 0, 0)  # type: ignore[call-overload]


def test_negative_pads_crop(rng: np.random.Generator) -> None:
    x = rng.standard_normal((4, 6)).astype(np.float32)
    for pads, expected in (
        ([-1, 0, -2, -3], x[1:2, :3]),
        ([1, -2, -1, 0], np.pad(x[:3, 2:], ((1, 0), (0, 0)))),
    ):
        inputs = {"x": x, "pads": np.array(pads)}
        compare(run_node_model(node_model("Pad", inputs), inputs), [expected], 0, 0)


def test_value_and_axes(rng: np.random.Generator) -> None:
    x = rng.standard_normal((2, 3, 4)).astype(np.float32)
    inputs = {"x": x, "pads": np.array([1, 2]), "value": np.array(2.5, np.float32), "axes": np.array([-1])}
    expected = np.pad(x, ((0, 0), (0, 0), (1, 2)), constant_values=2.5)
    compare(run_node_model(node_model("Pad", inputs), inputs), [expected], 0, 0)


def test_value_known_at_run_time_only(rng: np.random.Generator) -> None:
    x = rng.standard_normal((2, 3)).astype(np.float32)
    model = node_model("Pad", {"x": x, "pads": np.array([1, 0, 0, 2]), "value": np.array(0, np.float32)})
    from onnx import numpy_helper

    model.graph.initializer.append(numpy_helper.from_array(np.array([1, 0, 0, 2]), "pads"))
    del model.graph.input[1]
    graph = lower(bind(read_model(model), {}))
    result = run_graph(graph, {"x": x, "value": np.array(7.0, np.float32)})[graph.outputs[0]]
    compare([result], [np.pad(x, ((1, 0), (0, 2)), constant_values=7)], 0, 0)
