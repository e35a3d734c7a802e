"""Activations compared with onnx's node tests and ONNX Runtime, also in their tails."""

from __future__ import annotations

from typing import Any

import harness
import numpy as np
import pytest
from harness import check_node_case, check_random, node_cases, node_model, run_node_model

OPS = (
    "Relu",
    "LeakyRelu",
    "PRelu",
    "Elu",
    "Selu",
    "Celu",
    "ThresholdedRelu",
    "Sigmoid",
    "Swish",
    "HardSigmoid",
    "HardSwish",
    "Softplus",
    "Mish",
    "Softsign",
    "Gelu",
    "Shrink",
    "Clip",
)


def _normal(rng: np.random.Generator, *shape: int, scale: float = 2.0) -> np.ndarray:
    return (rng.standard_normal(shape) * scale).astype(np.float32)


@pytest.mark.parametrize("case", node_cases(*OPS))
def test_node_case(case: Any, rng: np.random.Generator) -> None:
    check_node_case(rng, case)


@pytest.mark.parametrize(
    ("op", "attributes"),
    [(op, {}) for op in OPS if op not in ("PRelu", "Swish")]
    + [
        ("LeakyRelu", {"alpha": 0.3}),
        ("Elu", {"alpha": 0.7}),
        ("Celu", {"alpha": 1.7}),
        ("Selu", {"alpha": 1.2, "gamma": 0.8}),
        ("ThresholdedRelu", {"alpha": 0.4}),
        ("HardSigmoid", {"alpha": 0.3, "beta": 0.1}),
        ("Shrink", {"bias": 0.3, "lambd": 0.9}),
        ("Gelu", {"approximate": "tanh"}),
    ],
)
def test_random(op: str, attributes: dict[str, Any], rng: np.random.Generator) -> None:
    check_random(op, {"x": _normal(rng, 3, 4, 5)}, **attributes)


@pytest.mark.parametrize("slope", [(1,), (4, 1, 1), (2, 4, 5, 6)])
def test_prelu(slope: tuple[int, ...], rng: np.random.Generator) -> None:
    check_random("PRelu", {"x": _normal(rng, 2, 4, 5, 6), "slope": _normal(rng, *slope)})


@pytest.mark.parametrize("op", ["Sigmoid", "Softplus", "Tanh", "Mish", "Softsign", "Gelu", "HardSwish", "Elu", "Selu"])
def test_tails_are_finite_and_right(op: str) -> None:
    x = np.array([-1e4, -200, -90, -20, -1, 0, 1, 20, 90, 200, 1e4], np.float32)
    check_random(op, {"x": x})


def test_tails_in_half_precision() -> None:
    x = np.array([-6e4, -30, -9, 0, 9, 30, 6e4], np.float16)
    for op, limits in {"Sigmoid": (0, 1), "Softplus": (0, 6e4)}.items():
        (y,) = run_node_model(node_model(op, {"x": x}), {"x": x})
        assert y.dtype == np.float16
        np.testing.assert_allclose([y[0], y[-1]], limits, rtol=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64", "uint8"])
@pytest.mark.parametrize("bounds", [(), (0,), (1,), (0, 1)])
@pytest.mark.parametrize("static", [False, True])
def test_clip(
    dtype: str, bounds: tuple[int, ...], static: bool, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    monkeypatch.setitem(harness.STATIC_INPUTS, "Clip", (1, 2) if static else ())
    x = rng.integers(0, 100, 40).astype(dtype)
    limits = {"low": np.array(20, dtype), "high": np.array(70, dtype)}
    wanted = {n: v for i, (n, v) in enumerate(limits.items()) if i in bounds}
    if bounds == (1,):
        wanted = {"": np.array(0, dtype), **wanted}
    check_random("Clip", {"x": x, **wanted}, rtol=0, atol=0)


def test_clip_of_crossed_bounds_is_the_upper_one(rng: np.random.Generator) -> None:
    bounds = {"low": np.array(2, np.float32), "high": np.array(-1, np.float32)}
    check_random("Clip", {"x": _normal(rng, 9), **bounds})
