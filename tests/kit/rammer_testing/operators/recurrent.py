"""Recurrent layers with all their optional features."""

from __future__ import annotations

from typing import Any, Final

from rammer_testing.operators.draw import FLOATS, Draw, DrawnValue
from rammer_testing.operators.elementwise import small
from rammer_testing.operators.registry import describe

#: Gates, activations and biases of each layer.
GATES: Final = {"RNN": 1, "GRU": 3, "LSTM": 4}
DEFAULTS: Final = {"RNN": ["Tanh"], "GRU": ["Sigmoid", "Tanh"], "LSTM": ["Sigmoid", "Tanh", "Tanh"]}
ACTIVATIONS: Final = (
    "Relu",
    "Tanh",
    "Sigmoid",
    "Affine",
    "LeakyRelu",
    "ThresholdedRelu",
    "ScaledTanh",
    "HardSigmoid",
    "Elu",
    "Softsign",
    "Softplus",
)
#: Parameters of each activation; they are passed even if the activation has defaults.
ALPHA: Final = {"Affine": 1.0, "LeakyRelu": 0.1, "ThresholdedRelu": 0.5, "ScaledTanh": 1.5, "HardSigmoid": 0.2, "Elu": 1.0}
BETA: Final = {"Affine": 0.1, "ScaledTanh": 0.75, "HardSigmoid": 0.5}


@describe("RNN", "GRU", "LSTM", weight=0.8)
def recurrent(d: Draw, op: str) -> DrawnValue:
    x = d.pick(FLOATS[: d.one([1, 1, 1, 2, 3])], (3, 3), where=lambda v: small(v) and v.size > 0 and max(v.shape) <= 8)
    direction = d.one(["forward", "forward", "reverse", "bidirectional"])
    ways, hidden, layout = 2 if direction == "bidirectional" else 1, d.integer(1, 5), 0
    if d.takes(op, "layout") and d.chance(0.2):
        layout = 1
    steps, batch = (x.shape[1], x.shape[0]) if layout else x.shape[:2]
    gates = GATES[op] * hidden
    state = (batch, ways, hidden) if layout else (ways, batch, hidden)
    given: dict[str, Any] = {"hidden_size": hidden, "layout": layout or None}
    given["direction"] = None if direction == "forward" and d.chance(0.7) else direction
    names = [x.name, _weight(d, x, (ways, gates, x.shape[2])), _weight(d, x, (ways, gates, hidden))]
    names.append(_weight(d, x, (ways, 2 * gates)) if d.chance(0.6) else "")
    lengths = d.chance(0.2)
    names.append(d.fresh("int32", (batch,), 1, steps, constant=d.chance(0.7)).name if lengths else "")
    names += [d.fresh(x.dtype, state, -1, 1).name if d.chance(0.4) else "" for _ in range(2 if op == "LSTM" else 1)]
    if op == "LSTM" and d.chance(0.3):
        names.append(_weight(d, x, (ways, 3 * hidden)))
    if op == "GRU":
        given["linear_before_reset"] = d.one([None, 0, 1])
    if op == "LSTM":
        given["input_forget"] = d.one([None, None, None, 1])
    if d.chance(0.15):
        given["clip"] = d.one([0.5, 2.0])
    if d.chance(0.3):
        given |= activations(d, op, ways)
    wanted = [d.chance(0.8), d.chance(0.6), *([d.chance(0.5)] if op == "LSTM" else [])]
    if not any(wanted):
        wanted[0] = True
    return d.add(op, names, wanted, **given)


def _weight(d: Draw, x: DrawnValue, shape: tuple[int, ...]) -> str:
    return d.fresh(x.dtype, shape, -0.8, 0.8, constant=d.chance(0.85)).name


def activations(d: Draw, op: str, ways: int) -> dict[str, Any]:
    """Return activation names, and the parameters of those that need some, in the order of the names."""
    names = [d.one(ACTIVATIONS) if d.chance(0.5) else name for name in DEFAULTS[op] * ways]
    given: dict[str, Any] = {"activations": names}
    for key, table in (("activation_alpha", ALPHA), ("activation_beta", BETA)):
        numbers = [round(table[n] * d.one([1.0, 0.5, 2.5]), 3) if d.alone else table[n] for n in names if n in table]
        # ScaledTanh and Affine have no ONNX operator with defaults to use.
        if numbers and not (d.alone and not {"ScaledTanh", "Affine"} & {*names} and d.chance(0.4)):
            given[key] = numbers
    return given
