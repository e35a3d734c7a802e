"""Normalisations compared with onnx's node tests and ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from harness import (
    check_node_case,
    check_random,
    compare,
    lower_model,
    node_cases,
    node_model,
    onnx_outputs,
    run_node_model,
    with_static_inputs,
)
from onnx import numpy_helper

from rammer.frontend.bind.binder import bind
from rammer.frontend.lower.graph_lowering import lower
from rammer.frontend.read.reader import read_model
from rammer.ir.evaluate import run_graph


def _data(rng: np.random.Generator, *shape: int, mean: float = 0.0) -> np.ndarray:
    return (rng.standard_normal(shape) + mean).astype(np.float32)


@pytest.mark.parametrize(
    "case",
    node_cases(
        "BatchNormalization",
        "InstanceNormalization",
        "LayerNormalization",
        "GroupNormalization",
        "RMSNormalization",
        "LRN",
        "MeanVarianceNormalization",
        "LpNormalization",
    ),
)
def test_node_case(case: Any, rng: np.random.Generator) -> None:
    check_node_case(rng, case)


def _statistics(rng: np.random.Generator, channels: int) -> dict[str, np.ndarray]:
    variance = rng.uniform(0.1, 2, channels).astype(np.float32)
    return {"scale": _data(rng, channels), "b": _data(rng, channels), "mean": _data(rng, channels), "var": variance}


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (2, 3), (2, 3, 7)])
def test_batch_normalization(shape: tuple[int, ...], rng: np.random.Generator) -> None:
    inputs = {"x": _data(rng, *shape), **_statistics(rng, 3)}
    check_random("BatchNormalization", inputs, opset=15, epsilon=1e-3)


def test_batch_normalization_with_constant_statistics_is_one_map(rng: np.random.Generator) -> None:
    inputs = {"x": _data(rng, 2, 3, 4, 5), **_statistics(rng, 3)}
    model = node_model("BatchNormalization", inputs, opset=15, epsilon=1e-3)
    expected = onnx_outputs(model, inputs)
    model.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in inputs.items() if n != "x")
    graph = lower(bind(read_model(with_static_inputs(model, inputs)), {"x": inputs["x"].shape}))
    assert [c.kind for c in graph.computes] == ["map"]
    values = run_graph(graph, {graph.inputs[0]: inputs["x"]})
    compare([values[graph.outputs[0]]], expected, 1e-5, 1e-5)


@pytest.mark.parametrize(("spread", "cancels"), [(0.0, True), (0.3, False)])
def test_batch_normalization_in_float16_keeps_what_cancels(spread: float, cancels: bool, rng: np.random.Generator) -> None:
    """Check channels whose elements equal their mean, with a variance near zero: the offset is 250 and rounds by 0.06."""
    mean = np.array([-0.78, 0.53], np.float16)
    inputs = {
        "x": (mean[:, None] + rng.normal(0, max(spread, 1e-3), (3, 2, 40))).astype(np.float16),
        **{"scale": np.ones(2, np.float16), "b": np.zeros(2, np.float16), "mean": mean, "var": np.full(2, spread**2, np.float16)},
    }
    model = node_model("BatchNormalization", inputs, opset=15)
    model.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in inputs.items() if n != "x")
    graph = lower(bind(read_model(with_static_inputs(model, inputs)), {"x": inputs["x"].shape}))
    values = run_graph(graph, {graph.inputs[0]: inputs["x"]})
    x, variance = inputs["x"].astype(np.float64), inputs["var"].astype(np.float64)
    exact = (x - mean.astype(np.float64)[:, None]) / np.sqrt(variance + 1e-5)[:, None]
    assert np.abs(values[graph.outputs[0]] - exact).max() < 2e-3 * max(1, np.abs(exact).max())
    assert ("float32" in {str(c.dtype) for c in graph.constants.values()}) == cancels


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (2, 3, 17)])
def test_instance_normalization(shape: tuple[int, ...], rng: np.random.Generator) -> None:
    check_random("InstanceNormalization", {"x": _data(rng, *shape, mean=3), "s": _data(rng, 3), "b": _data(rng, 3)})


@pytest.mark.parametrize("axis", [-1, 1, 2, 0])
@pytest.mark.parametrize("bias", [False, True])
def test_layer_normalization(axis: int, bias: bool, rng: np.random.Generator) -> None:
    shape = (2, 3, 8)
    tail = shape[axis:] if axis else shape
    inputs = {"x": _data(rng, *shape, mean=2), "s": _data(rng, *tail)} | ({"b": _data(rng, *tail)} if bias else {})
    graph = check_random("LayerNormalization", inputs, axis=axis)
    assert [c.kind for c in graph.computes] == ["reduction", "map", "reduction", "map", "map"]


def test_layer_normalization_of_large_offsets_does_not_cancel(rng: np.random.Generator) -> None:
    """Check large offsets: E[x^2] - E[x]^2 in float32 would lose every digit of the variance."""
    x = _data(rng, 4, 64, mean=3000)
    model = node_model("LayerNormalization", {"x": x, "s": np.ones(64, np.float32)})
    inputs = {"x": x, "s": np.ones(64, np.float32)}
    exact = x.astype(np.float64) - x.astype(np.float64).mean(1, keepdims=True)
    exact /= np.sqrt((exact**2).mean(1, keepdims=True) + 1e-5)
    compare(run_node_model(model, inputs), [exact], 1e-3, 1e-3)


@pytest.mark.parametrize("groups", [1, 2, 3, 6])
def test_group_normalization(groups: int, rng: np.random.Generator) -> None:
    inputs = {"x": _data(rng, 2, 6, 4, 5, mean=1), "s": _data(rng, 6), "b": _data(rng, 6)}
    model = node_model("GroupNormalization", inputs, num_groups=groups)
    x = inputs["x"].reshape(2, groups, -1).astype(np.float64)
    y = (x - x.mean(2, keepdims=True)) / np.sqrt(x.var(2, keepdims=True) + 1e-5)
    expected = y.reshape(2, 6, 4, 5) * inputs["s"][:, None, None] + inputs["b"][:, None, None]
    for precise in (False, True):
        compare(run_node_model(model, inputs, precise), [expected], 1e-4, 1e-5)


@pytest.mark.parametrize("size", [1, 3, 5])
def test_local_response_normalization(size: int, rng: np.random.Generator) -> None:
    check_random("LRN", {"x": _data(rng, 2, 7, 4, 5)}, size=size, alpha=0.3, beta=0.6, bias=1.5)


@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_lp_normalization(p: int, axis: int, rng: np.random.Generator) -> None:
    x = _data(rng, 3, 4, 5)
    norm = (np.abs(x) ** p).sum(axis, keepdims=True) ** (1 / p)
    model = node_model("LpNormalization", {"x": x}, p=p, axis=axis)
    compare(run_node_model(model, {"x": x}), [x / norm], 1e-4, 1e-5)


def test_mean_variance_normalization(rng: np.random.Generator) -> None:
    x = _data(rng, 2, 3, 4, 5, mean=2)
    model = node_model("MeanVarianceNormalization", {"x": x}, axes=[0, 2, 3])
    mean, deviation = x.mean((0, 2, 3), keepdims=True), x.std((0, 2, 3), keepdims=True)
    compare(run_node_model(model, {"x": x}), [(x - mean) / (deviation + 1e-9)], 1e-3, 1e-4)
    assert len(lower_model(model, {"x": x}).computes) == 5
