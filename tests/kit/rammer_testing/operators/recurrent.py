"""Recurrent layers RNN, GRU and LSTM: directions, activations with parameters, clipping, lengths, layouts, initial states."""

from __future__ import annotations

from typing import Any

import numpy as np

from rammer_testing.operators.case import OperandDraw, OperatorCase, family

_GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
_FUNCTIONS = {"RNN": 1, "GRU": 2, "LSTM": 3}
#: Number of parameters of each activation (alpha, beta).
_ACTIVATIONS = {
    "Relu": 0,
    "Tanh": 0,
    "Sigmoid": 0,
    "Affine": 2,
    "LeakyRelu": 1,
    "ThresholdedRelu": 1,
    "ScaledTanh": 2,
    "HardSigmoid": 2,
    "Elu": 1,
    "Softsign": 0,
    "Softplus": 0,
}


@family("RNN", "GRU", "LSTM")
def recurrent(draw: OperandDraw, op: str) -> OperatorCase:
    """Draw a case of a recurrent layer."""
    opset = draw.opset(op)
    direction = draw.pick(None, "forward", "reverse", "bidirectional")
    many = 2 if direction == "bidirectional" else 1
    steps, batch, inputs, hidden = draw.size(1, 4), draw.size(1, 3), draw.size(1, 3), draw.size(1, 3)
    gates, dtype = _GATES[op], draw.pick("float32", "float32", "float32", "float64")
    layout = draw.pick(None, None, None, 1) if opset >= 14 else None
    state = (batch, many, hidden) if layout else (many, batch, hidden)
    x = draw.array((batch, steps, inputs) if layout else (steps, batch, inputs), dtype, low=-2, high=2)
    operands: list[Any] = [
        x,
        draw.array((many, gates * hidden, inputs), dtype, low=-1, high=1),
        draw.array((many, gates * hidden, hidden), dtype, low=-1, high=1),
        draw.array((many, 2 * gates * hidden), dtype, low=-1, high=1) if draw.chance() else None,
        np.array(draw.ints(batch, 1, steps), np.int32) if draw.chance(0.4) else None,
        draw.array(state, dtype, low=-1, high=1) if draw.chance(0.4) else None,
    ]
    attributes: dict[str, Any] = {"hidden_size": hidden, "direction": direction, "layout": layout}
    if op == "LSTM":
        operands.append(draw.array(state, dtype, low=-1, high=1) if draw.chance(0.4) else None)
        operands.append(draw.array((many, 3 * hidden), dtype, low=-1, high=1) if draw.chance(0.3) else None)
        attributes["input_forget"] = draw.pick(None, None, None, 1)
    if op == "GRU":
        attributes["linear_before_reset"] = draw.pick(None, 0, 1)
    attributes["clip"] = draw.pick(None, None, 0.5, 2.0)
    if draw.chance(0.4):
        _activations(draw, attributes, _FUNCTIONS[op] * many)
    static = frozenset(draw.pick((), (1, 2, 3), (1, 2, 3, 4, 7)))
    return OperatorCase(op, opset, tuple(operands), attributes, 3 if op == "LSTM" else 2, static)


def _activations(draw: OperandDraw, attributes: dict[str, Any], count: int) -> None:
    names = [draw.pick(*_ACTIVATIONS) for _ in range(count)]
    attributes["activations"] = names
    if draw.chance(0.6) or {"ScaledTanh", "Affine"} & set(names):
        # These two have no ONNX operator with defaults to use. Values are consumed in the order of the activations that have
        # parameters.
        alphas = [draw.pick(0.3, 0.7, 1.2) for n in names if _ACTIVATIONS[n] >= 1]
        betas = [draw.pick(0.2, 0.6, 1.1) for n in names if _ACTIVATIONS[n] == 2]
        attributes["activation_alpha"] = alphas or None
        attributes["activation_beta"] = betas or None


@family("com.microsoft.DynamicQuantizeLSTM")
def quantised_lstm(draw: OperandDraw, op: str) -> OperatorCase:
    """Draw a layer of 8-bit products. Signed weights have 7 bits: ONNX Runtime's 16-bit sums overflow on CPUs without VNNI."""
    direction = draw.pick("forward", "reverse", "bidirectional")
    many = 2 if direction == "bidirectional" else 1
    steps, batch, inputs, hidden = draw.size(1, 4), draw.size(1, 3), draw.size(1, 5), draw.size(1, 6)
    kind, wide = draw.pick("uint8", "int8"), (many, 4 * hidden) if draw.chance() else (many,)
    low, high, zero = (0, 255, draw.random.randint(100, 150)) if kind == "uint8" else (-63, 63, 0)
    point = np.full(wide, zero, kind)
    operands: list[Any] = [
        draw.array((steps, batch, inputs), low=-2, high=2),
        *(draw.array((many, n, 4 * hidden), kind, low=low, high=high) for n in (inputs, hidden)),
        draw.array((many, 8 * hidden), low=-1, high=1) if draw.chance() else None,
        np.array(draw.ints(batch, 0 if draw.chance(0.2) else 1, steps), np.int32) if draw.chance(0.4) else None,
        *(draw.array((many, batch, hidden), low=-1, high=1) if draw.chance(0.4) else None for _ in range(2)),
        draw.array((many, 3 * hidden), low=-1, high=1) if draw.chance(0.3) else None,
        *(a for _ in range(2) for a in (draw.array(wide, low=0.002, high=0.01), point)),
    ]
    attributes: dict[str, Any] = {"hidden_size": hidden, "direction": direction}
    attributes |= {"input_forget": draw.pick(None, None, 1), "clip": draw.pick(None, None, 0.5, 2.0)}
    if draw.chance(0.4):
        _activations(draw, attributes, 3 * many)
    return OperatorCase(op, 17, tuple(operands), attributes, 3, frozenset((1, 2, 3, 7, 8, 9, 10, 11)))
