"""Scatters compared with onnx's node tests and ONNX Runtime. They cover every reduction, positions written several times, and
static and run-time indices."""

from __future__ import annotations

from typing import Any

import harness
import numpy as np
import pytest
from harness import check_node_case, check_random, lower_model, node_cases, node_model, run_node_model

from rammer.frontend.host.operators import OPERATORS
from rammer.frontend.lower.lowering_registry import CannotLower
from rammer.frontend.lower.operators import scatter
from rammer_testing.nonempty import some

WORDS = ["none", "add", "mul", "max", "min"]


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("case", node_cases("Scatter", "ScatterElements", "ScatterND", "TensorScatter"))
def test_node_case(case: Any, static: bool, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    op = case.model.graph.node[0].op_type
    if static and op == "TensorScatter":
        static = False
    monkeypatch.setitem(harness.STATIC_INPUTS, op, (1,) if static else ())
    try:
        check_node_case(rng, case)
    except pytest.skip.Exception as reason:
        pytest.fail(f"every one has tensor expressions: {reason}")


def _drawn(op: str, word: str, dtype: str, rng: np.random.Generator) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Draw operands in which positions are written several times. With "none" the updates are equal, since their order is
    undefined."""
    shape = tuple(int(n) for n in rng.integers(1, 6, rng.integers(1, 4)))
    attributes: dict[str, Any] = {"reduction": word}
    if op == "ScatterElements":
        axis = int(rng.integers(0, len(shape)))
        attributes["axis"] = axis - len(shape) * int(rng.integers(0, 2))
        written = tuple(int(rng.integers(1, 8 if d == axis else n + 1)) for d, n in enumerate(shape))
        indices, updated = rng.integers(-shape[axis], shape[axis], written), written
    else:
        depth, lead = int(rng.integers(1, len(shape) + 1)), tuple(int(n) for n in rng.integers(1, 4, rng.integers(1, 3)))
        indices = np.stack([rng.integers(-n, n, lead) for n in shape[:depth]], axis=-1)
        updated = (*lead, *shape[depth:])
    updates = np.full(updated, 3) if word == "none" else rng.uniform(-4, 4, updated)
    return {"x": rng.uniform(-4, 4, shape).astype(dtype), "i": indices.astype(np.int64), "u": updates.astype(dtype)}, attributes


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("op", ["ScatterElements", "ScatterND"])
def test_places_written_twice(
    op: str, word: str, static: bool, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    monkeypatch.setitem(harness.STATIC_INPUTS, op, (1,) if static else ())
    for dtype in some(["float32", "int32", "float64", "int64"]):
        inputs, attributes = _drawn(op, word, dtype, rng)
        check_random(op, inputs, **attributes)
        model = node_model(op, inputs, **attributes)
        (hosted,) = OPERATORS[op](attributes, list(inputs.values()))
        np.testing.assert_allclose(hosted, run_node_model(model, inputs)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("op", ["ScatterElements", "ScatterND"])
def test_of_several_writes_the_last_one_stays(
    op: str, static: bool, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    monkeypatch.setitem(harness.STATIC_INPUTS, op, (1,) if static else ())
    indices = np.array([2, 0, 2, 2, -4], np.int64).reshape((5,) if op == "ScatterElements" else (5, 1))
    inputs = {"x": np.zeros(4, np.float32), "i": indices, "u": np.arange(1, 6, dtype=np.float32)}
    (y,) = run_node_model(node_model(op, inputs), inputs)
    np.testing.assert_array_equal(y, [5, 0, 4, 0])
    np.testing.assert_array_equal(OPERATORS[op]({}, list(inputs.values()))[0], y)


@pytest.mark.parametrize("op", ["ScatterElements", "ScatterND"])
def test_a_forbidden_run_time_index_names_no_place(op: str, rng: np.random.Generator) -> None:
    indices = np.array([5, -5, 1], np.int64).reshape((3,) if op == "ScatterElements" else (3, 1))
    for word in some(WORDS):
        inputs = {"x": np.ones(4, np.float32), "i": indices, "u": np.array([7, 8, 9], np.float32)}
        (y,) = run_node_model(node_model(op, inputs, reduction=word), inputs)
        np.testing.assert_array_equal(y[[0, 2, 3]], 1)


def test_half_precision_sums_are_rounded_once(rng: np.random.Generator) -> None:
    inputs = {"x": np.full(1, 2048, np.float16), "i": np.zeros(64, np.int64), "u": np.ones(64, np.float16)}
    (y,) = run_node_model(node_model("ScatterElements", inputs, reduction="add"), inputs)
    assert y[0] == 2048 + 64  # added one after another, each would be lost


def test_truths_are_joined(rng: np.random.Generator) -> None:
    inputs = {"x": np.array([False, True]), "i": np.array([0, 1, 1], np.int64), "u": np.array([True, True, False])}
    for word, wanted in (("add", [True, True]), ("mul", [False, False]), ("max", [True, True]), ("min", [False, False])):
        np.testing.assert_array_equal(
            run_node_model(node_model("ScatterElements", inputs, reduction=word), inputs)[0], wanted, word
        )


def test_too_many_steps_are_for_the_host(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    inputs, attributes = _drawn("ScatterND", "add", "float32", rng)
    monkeypatch.setattr(scatter, "MOST_STEPS", 0)
    with pytest.raises(CannotLower, match="steps, more than"):
        lower_model(node_model("ScatterND", inputs, **attributes), inputs)


@pytest.mark.parametrize("mode", ["linear", "circular"])
def test_caches_at_every_place(mode: str, rng: np.random.Generator) -> None:
    """Check against ONNX's loop, since no other runtime runs this operator here."""
    for _ in some(range(6)):
        batch, heads, most, width = (int(n) for n in rng.integers(1, 6, 4))
        length = int(rng.integers(1, most + 1))
        inputs = {
            "past": rng.standard_normal((batch, heads, most, width)).astype(np.float32),
            "update": rng.standard_normal((batch, heads, length, width)).astype(np.float32),
            "at": rng.integers(0, most if mode == "circular" else most - length + 1, batch),
        }
        wanted = inputs["past"].copy()
        for b, s in np.ndindex(batch, length):
            wanted[b, :, (inputs["at"][b] + s) % most] = inputs["update"][b, :, s]
        (y,) = run_node_model(node_model("TensorScatter", inputs, opset=24, mode=mode), inputs)
        np.testing.assert_array_equal(y, wanted)
