"""LSTM, GRU and RNN compared with onnx's node tests and ONNX Runtime."""

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
    run_node_model,
)

from rammer.ir.piecewise import piecewise_regions

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
STEPS, BATCH, INPUTS, HIDDEN = 5, 3, 4, 6


def _data(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32) * 0.7


def _inputs(rng: np.random.Generator, op: str, directions: int = 1, **extra: np.ndarray) -> dict[str, np.ndarray]:
    rows = GATES[op] * HIDDEN
    return {
        "x": _data(rng, STEPS, BATCH, INPUTS),
        "w": _data(rng, directions, rows, INPUTS),
        "r": _data(rng, directions, rows, HIDDEN),
        "b": _data(rng, directions, 2 * rows),
        **extra,
    }


@pytest.mark.parametrize("case", node_cases("LSTM", "GRU", "RNN"))
def test_node_case(case: Any, rng: np.random.Generator) -> None:
    check_node_case(rng, case)


@pytest.mark.parametrize("op", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("initial", [False, True])
def test_directions(op: str, direction: str, initial: bool, rng: np.random.Generator) -> None:
    many = 2 if direction == "bidirectional" else 1
    extra = {"": np.zeros(0, np.float32), "h": _data(rng, many, BATCH, HIDDEN)} if initial else {}
    if initial and op == "LSTM":
        extra["c"] = _data(rng, many, BATCH, HIDDEN)
    outputs = 3 if op == "LSTM" else 2
    check_random(op, _inputs(rng, op, many, **extra), outputs, direction=direction, hidden_size=HIDDEN)


@pytest.mark.parametrize("op", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
def test_sequence_lengths(op: str, direction: str, rng: np.random.Generator) -> None:
    many = 2 if direction == "bidirectional" else 1
    lengths = np.array([STEPS, 2, 3], np.int32)
    outputs = 3 if op == "LSTM" else 2
    check_random(op, _inputs(rng, op, many, lens=lengths), outputs, direction=direction, hidden_size=HIDDEN)


@pytest.mark.parametrize("linear", [0, 1])
def test_gru_reset(linear: int, rng: np.random.Generator) -> None:
    check_random("GRU", _inputs(rng, "GRU"), 2, hidden_size=HIDDEN, linear_before_reset=linear)


@pytest.mark.parametrize(
    "config",
    [
        {"clip": 0.4},
        {"input_forget": 1},
        {"activations": ["HardSigmoid", "Relu", "Tanh"], "activation_alpha": [0.3], "activation_beta": [0.4]},
        {"activations": ["Sigmoid", "Softsign", "Affine"], "activation_alpha": [0.7], "activation_beta": [0.1]},
    ],
)
def test_lstm_attributes(config: dict[str, Any], rng: np.random.Generator) -> None:
    check_random("LSTM", _inputs(rng, "LSTM"), 3, hidden_size=HIDDEN, **config)


@pytest.mark.parametrize("name", ["Relu", "LeakyRelu", "ThresholdedRelu", "ScaledTanh", "Elu", "Softplus", "Softsign"])
def test_rnn_activations(name: str, rng: np.random.Generator) -> None:
    parameters: dict[str, Any] = {"activation_alpha": [0.6]} if name in ("LeakyRelu", "ThresholdedRelu", "Elu") else {}
    if name == "ScaledTanh":
        parameters = {"activation_alpha": [0.6], "activation_beta": [0.8]}
    inputs = _inputs(rng, "RNN")
    inputs["r"] *= 0.3  # ONNX Runtime's Softplus is infinite above 88, and states of unbounded activations grow
    check_random("RNN", inputs, 2, hidden_size=HIDDEN, activations=[name], **parameters)


def test_peepholes(rng: np.random.Generator) -> None:
    extra = {"": np.zeros(0, np.int32), "h": _data(rng, 1, BATCH, HIDDEN), "c": _data(rng, 1, BATCH, HIDDEN)}
    check_random("LSTM", _inputs(rng, "LSTM", **extra, p=_data(rng, 1, 3 * HIDDEN)), 3, hidden_size=HIDDEN)


@pytest.mark.parametrize("op", ["LSTM", "GRU", "RNN"])
def test_batch_first_is_the_same_transposed(op: str, rng: np.random.Generator) -> None:
    inputs = _inputs(rng, op, 2)
    first = run_node_model(node_model(op, inputs, 2, hidden_size=HIDDEN, direction="bidirectional"), inputs)
    swapped = {**inputs, "x": inputs["x"].swapaxes(0, 1)}
    model = node_model(op, swapped, 2, hidden_size=HIDDEN, direction="bidirectional", layout=1)
    y, last = run_node_model(model, swapped)
    compare([y.transpose(1, 2, 0, 3), last.swapaxes(0, 1)], first, 1e-6, 1e-6)


def test_every_step_has_the_same_computes(rng: np.random.Generator) -> None:
    """Check that steps differ only in names of tensors and in the input slice: one analysis serves all steps."""
    inputs = _inputs(rng, "LSTM")
    graph = lower_model(node_model("LSTM", inputs, hidden_size=HIDDEN), inputs)
    contractions = [c for c in graph.computes if c.kind == "contraction"]
    assert len(contractions) == 1 + STEPS
    shapes = {(c.axes, c.reduce, tuple(load.indices for load in c.loads)) for c in contractions[1:]}
    assert len(shapes) == 1
    assert contractions[1].shape == (BATCH, 4, HIDDEN)


def test_the_sequence_output_is_piecewise(rng: np.random.Generator) -> None:
    inputs = _inputs(rng, "GRU", 2)
    model = node_model("GRU", inputs, hidden_size=HIDDEN, direction="bidirectional")
    graph = lower_model(model, inputs)
    found = piecewise_regions(graph.computes[-1])
    assert found is not None and len(found) == 2 * STEPS
    assert {box[:2] for box, _ in found} == {((t, t + 1), (d, d + 1)) for t in range(STEPS) for d in range(2)}
