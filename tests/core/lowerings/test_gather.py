"""The Gather family and others compared with onnx's node tests and ONNX Runtime, with static and run-time indices."""

from __future__ import annotations

from typing import Any

import harness
import numpy as np
import pytest
from harness import check_node_case, check_random, lower_model, node_cases, node_model, run_node_model

from rammer.frontend.lower.lowering_registry import CannotLower
from rammer.ir import expr as ex
from rammer.ir.expr import Table
from rammer_testing.nonempty import some

OPS = (
    "Gather",
    "GatherElements",
    "GatherND",
    "OneHot",
    "ReverseSequence",
    "TopK",
    "NonZero",
    "Unique",
    "Compress",
    "NonMaxSuppression",
)


@pytest.mark.parametrize("case", node_cases(*OPS))
def test_node_case(case: Any, rng: np.random.Generator) -> None:
    check_node_case(rng, case)


@pytest.mark.parametrize("op", ["Gather", "GatherND", "GatherElements"])
def test_node_cases_with_static_indices(op: str, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    monkeypatch.setitem(harness.STATIC_INPUTS, op, (1,))
    ran = 0
    for parameter in some(node_cases(op)):
        check_node_case(rng, parameter.values[0])
        ran += 1
    assert ran >= 1


def _data(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def _indices(rng: np.random.Generator, *shape: int, extent: int, dtype: str = "int64") -> np.ndarray:
    return rng.integers(-extent, extent, shape).astype(dtype)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize(("axis", "shape"), [(0, ()), (1, (4,)), (-1, (2, 3)), (2, (1, 1))])
def test_gather(
    axis: int, shape: tuple[int, ...], dtype: str, static: bool, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    monkeypatch.setitem(harness.STATIC_INPUTS, "Gather", (1,) if static else ())
    x = _data(rng, 5, 6, 7)
    indices = _indices(rng, *shape, extent=x.shape[axis], dtype=dtype)
    check_random("Gather", {"x": x, "i": indices}, axis=axis, rtol=0, atol=0)


def test_regular_static_indices_are_affine(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    monkeypatch.setitem(harness.STATIC_INPUTS, "Gather", (1,))
    regular: list[Any] = [[3], [4, 3, 2], [0, 2, 4], [[0, 1], [2, 3]]]
    for indices, form in [*((r, True) for r in regular), ([0, 1, 3], False)]:
        graph = check_random("Gather", {"x": _data(rng, 6, 2), "i": np.array(indices, np.int64)}, rtol=0, atol=0)
        (load,) = graph.computes[0].loads
        assert (ex.affine_form(load.indices[0]) is not None) == form
        assert form or any(isinstance(n, Table) for n in ex.walk(load))


def test_long_static_indices_become_a_constant(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    monkeypatch.setitem(harness.STATIC_INPUTS, "Gather", (1,))
    graph = check_random("Gather", {"x": _data(rng, 6, 2), "i": _indices(rng, 40, 50, extent=6)}, rtol=0, atol=0)
    assert [v.shape for v in graph.constants.values()] == [(40, 50)]


def test_forbidden_run_time_index_reads_zero(rng: np.random.Generator) -> None:
    inputs = {"x": _data(rng, 3, 2), "i": np.array([5, -4, 1], np.int64)}
    (y,) = run_node_model(node_model("Gather", inputs), inputs)
    np.testing.assert_array_equal(y, [[0, 0], [0, 0], inputs["x"][1]])


def test_forbidden_static_index_is_declined(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    monkeypatch.setitem(harness.STATIC_INPUTS, "Gather", (1,))
    inputs = {"x": _data(rng, 3, 2), "i": np.array([5], np.int64)}
    with pytest.raises(CannotLower, match="outside"):
        lower_model(node_model("Gather", inputs), inputs)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_gather_elements(axis: int, static: bool, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    monkeypatch.setitem(harness.STATIC_INPUTS, "GatherElements", (1,) if static else ())
    x = _data(rng, 4, 5, 6)
    indices = _indices(rng, 3, 4, 2, extent=x.shape[axis])
    check_random("GatherElements", {"x": x, "i": indices}, axis=axis, rtol=0, atol=0)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize(("batch", "shape"), [(0, (3, 2)), (0, (2, 2, 3)), (0, (1,)), (1, (4, 2)), (1, (4, 3, 1))])
def test_gather_nd(
    batch: int, shape: tuple[int, ...], static: bool, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    monkeypatch.setitem(harness.STATIC_INPUTS, "GatherND", (1,) if static else ())
    inputs = {"x": _data(rng, 4, 4, 4), "i": _indices(rng, *shape, extent=4)}
    check_random("GatherND", inputs, batch_dims=batch, rtol=0, atol=0)


@pytest.mark.parametrize("axis", [-1, 0, 1])
@pytest.mark.parametrize("dtype", ["int64", "int32", "float32"])
def test_one_hot(axis: int, dtype: str, rng: np.random.Generator) -> None:
    inputs = {"i": _indices(rng, 3, 4, extent=5, dtype=dtype), "d": np.array(5, dtype), "v": _data(rng, 2)}
    check_random("OneHot", inputs, axis=axis)
