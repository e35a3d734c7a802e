"""DynamicQuantizeLSTM as a Scan: inputs are quantised once for all steps, the hidden state before each recurrent product."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from onnx import GraphProto, TensorProto, helper, numpy_helper

from rammer.frontend.lower.contrib.function import Declined, FunctionBody, contrib_function
from rammer.frontend.lower.contrib.quantised import scale_total

#: Activation in lower case -> the operator of ONNX and the defaults of its parameters, alpha and beta, in ONNX Runtime.
_ACTIVATIONS: Final[dict[str, tuple[str, tuple[float, ...]]]] = {
    "relu": ("Relu", ()), "tanh": ("Tanh", ()), "sigmoid": ("Sigmoid", ()), "softsign": ("Softsign", ()),
    "softplus": ("Softplus", ()), "leakyrelu": ("LeakyRelu", (0.01,)), "thresholdedrelu": ("ThresholdedRelu", (0.0,)),
    "hardsigmoid": ("HardSigmoid", (0.2, 0.5)), "elu": ("Elu", (1.0,)), "affine": ("", (0.0, 0.0)),
    "scaledtanh": ("Tanh", (0.0, 0.0)),
}  # fmt: skip
_DEFAULTS: Final = ("Sigmoid", "Tanh", "Tanh")


@dataclass(frozen=True)
class Codes:
    """The integer weights of one direction, ``[rows, columns]``, with their zero point and scale."""

    values: str
    zero: str
    scale: str

    def product(self, b: FunctionBody, x: str) -> str:
        """Return the product of ``x``, quantised over all its elements, with the weights."""
        codes, scale, zero = b.op("DynamicQuantizeLinear", x, outputs=3)
        return scale_total(b, b.op("MatMulInteger", codes, self.values, zero, self.zero)[0], scale, self.scale)


@dataclass(frozen=True)
class Activation:
    """An activation function with its parameters, alpha and beta."""

    name: str
    parameters: tuple[float, ...]

    def applied(self, b: FunctionBody, x: str) -> str:
        """Return the function applied to ``x``."""
        op, _ = _ACTIVATIONS[self.name]
        if self.name not in ("affine", "scaledtanh"):
            named: dict[str, Any] = dict(zip(("alpha", "beta"), self.parameters, strict=False))
            return b.op(op, x, **named)[0]
        alpha, beta = (b.constant(v, "float32") for v in self.parameters)
        return b.Mul(alpha, b.Tanh(b.Mul(beta, x))) if op else b.Add(b.Mul(alpha, x), beta)


@contrib_function(
    "DynamicQuantizeLSTM",
    "X: F, W: Q, R: Q, B?: F, sequence_lens?: M, initial_h?: F, initial_c?: F, P?: F, W_scale: F, W_zero_point: Q, R_scale: F,"
    " R_zero_point: Q -> Y?: F, Y_h?: F, Y_c?: F",
    activation_alpha=list[float], activation_beta=list[float], activations=list[str], clip=float | None, direction="forward",
    hidden_size=int | None, input_forget=0, departs="quantises the state over the rows of each of its threads, not the batch",
)  # fmt: skip
def dynamic_quantize_lstm(b: FunctionBody) -> list[str]:
    """Expand DynamicQuantizeLSTM as ONNX Runtime computes it on one thread: 8-bit integer products,
    everything else in float32."""
    steps = b.shape(0, 3)[0]
    directions, hidden, columns = b.shape(2, 3)
    backwards = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}.get(b.attr("direction"))
    if backwards is None or len(backwards) != directions or columns != 4 * hidden or not steps:
        raise Declined(f"weights of {list(b.shape(2))} for direction {b.attr('direction')} and {steps} steps")
    x = b.input(0)
    if b.has(4):  # steps past the longest sequence are not quantised
        longest = b.ReduceMax(b.cast(b.input(4), "int64"), keepdims=0)
        places = b.reshape(b.constant(np.arange(steps)), steps, 1, 1)
        x = b.Where(b.Less(places, longest), x, b.constant(0.0, "float32"))
    made = [_write_direction(b, x, number, reverse) for number, reverse in enumerate(backwards)]
    shown, last_h, last_c = zip(*made, strict=True)
    one = b.constant([0])
    return [
        b.Concat(*(b.Unsqueeze(y, b.constant([1])) for y in shown), axis=1),
        *(b.Concat(*(b.Unsqueeze(y, one) for y in states), axis=0) for states in (last_h, last_c)),
    ]


def _write_direction(b: FunctionBody, x: str, number: int, reverse: bool) -> tuple[str, str, str]:
    """Return one direction's outputs ``[steps, batch, hidden]`` and its last hidden and cell states."""
    (steps, batch, _), hidden = b.shape(0), b.shape(2)[1]
    weights, recurrent = (_direction_weights(b, i, 8 + 2 * n, number) for n, i in enumerate((1, 2)))
    lengths = b.cast(b.input(4), "int64") if b.has(4) else ""
    if lengths and reverse:
        x = b.ReverseSequence(x, lengths, time_axis=0, batch_axis=1)
    zeros = b.constant(np.zeros((batch, hidden), np.float32))
    state = {"h": zeros, "c": zeros}
    state |= {
        n: b.reshape(b.slice(b.input(i), 0, number, number + 1), batch, hidden) for n, i in (("h", 5), ("c", 6)) if b.has(i)
    }
    scanned = {"projected": weights.product(b, x)}
    if lengths:
        state["last"] = zeros
        places = b.reshape(b.constant(np.arange(steps)), steps, 1, 1)
        scanned["going"] = b.Less(places, b.reshape(lengths, 1, batch, 1))
    ways = [int(reverse and not lengths)]
    h, c, *last, y = b.op(
        "Scan", *state.values(), *scanned.values(), outputs=len(state) + 1, num_scan_inputs=len(scanned),
        body=_make_step_body(b, number, recurrent, (*state, *scanned)), scan_input_directions=ways * len(scanned),
        scan_output_directions=ways,
    )  # fmt: skip
    if not lengths:
        return y, h, c
    y = b.ReverseSequence(y, lengths, time_axis=0, batch_axis=1) if reverse else y
    some = b.Less(b.constant(0), b.reshape(lengths, batch, 1))
    return y, last[0], b.Where(some, c, b.constant(0.0, "float32"))


def _direction_weights(b: FunctionBody, index: int, scale: int, number: int) -> Codes:
    """Return the weights of direction ``number``. ONNX Runtime has one zero point for all columns."""
    directions, rows, columns = b.shape(index, 3)
    wide, zeros = b.shape(scale), b.shape(scale + 1)
    if directions != b.shape(2)[0] or not {wide, zeros} <= {(directions,), (directions, columns)}:
        raise Declined(
            f"scales of {list(wide)} and zero points of {list(zeros)} for {directions} directions of {columns} columns"
        )
    values = b.reshape(b.slice(b.input(index), 0, number, number + 1), rows, columns)
    zero = b.reshape(b.slice(b.reshape(b.input(scale + 1), directions, -1), 1, 0, 1), directions)
    factor = b.slice(b.input(scale), 0, number, number + 1)
    return Codes(values, b.reshape(b.slice(zero, 0, number, number + 1)), b.reshape(factor, -1 if len(wide) == 2 else 1))


def _direction_activations(b: FunctionBody, number: int) -> list[Activation]:
    """Return the activations of gates, cell and output of direction ``number``."""
    directions = b.shape(2)[0]
    names = [n.lower() for n in b.attr("activations") or _DEFAULTS * directions]
    if len(names) != 3 * directions or not {*names} <= {*_ACTIVATIONS}:
        raise Declined(f"the activations {', '.join(names)} for {directions} directions")
    given = [iter(b.attr(f"activation_{n}") or ()) for n in ("alpha", "beta")]
    found = []
    for name in names:
        defaults = _ACTIVATIONS[name][1]
        found.append(Activation(name, tuple(float(next(v, d)) for v, d in zip(given, defaults, strict=False))))
    return found[3 * number : 3 * number + 3]


def _make_step_body(b: FunctionBody, number: int, recurrent: Codes, given: tuple[str, ...]) -> GraphProto:
    """Return the body of the Scan: one step over the values named ``given``, ending in the next states and the output. Biases and
    peepholes are computed once, outside."""
    s, (_, batch, _), hidden = FunctionBody(b.use, prefix=f"step{number}_"), b.shape(0), b.shape(2)[1]
    f, g, h = _direction_activations(b, number)
    clip = float(b.use.attr("clip") or 0.0)

    def row(index: int, place: int) -> str:
        part = b.slice(b.slice(b.input(index), 0, number, number + 1), 1, place * hidden, (place + 1) * hidden)
        return b.reshape(part, hidden)

    def gate(place: int, kind: Activation, peephole: int | None = None, cell: str = "") -> str:
        x = parts[place]
        if peephole is not None and s.has(7):
            x = s.Add(x, s.Mul(cell, row(7, peephole)))
        x = s.Add(x, b.Add(row(3, place), row(3, 4 + place))) if s.has(3) else x
        x = s.Clip(x, s.constant(-clip, "float32"), s.constant(clip, "float32")) if clip else x
        return kind.applied(s, x)

    parts = s.split(s.Add("projected", recurrent.product(s, "h")), 1, [hidden] * 4)
    enter = gate(0, f, 0, "c")
    forget = s.Sub(s.constant(1.0, "float32"), enter) if b.attr("input_forget") else gate(2, f, 2, "c")
    cell = s.Add(s.Mul(forget, "c"), s.Mul(enter, gate(3, g)))
    new = s.Mul(gate(1, f, 1, cell), h.applied(s, cell))
    results = [new, cell]
    if "going" in given:
        stopped = s.constant(0.0, "float32") if b.wants(0) else "h"
        results = [s.Where("going", new, stopped), s.Where("going", cell, "c"), s.Where("going", new, "last")]
    shown = s.Identity(results[0])
    kinds = {"going": (TensorProto.BOOL, [batch, 1]), "projected": (TensorProto.FLOAT, [batch, 4 * hidden])}
    state = (TensorProto.FLOAT, [batch, hidden])
    ports = [helper.make_tensor_value_info(n, *kinds.get(n, state)) for n in given]
    ends = [helper.make_tensor_value_info(n, *state) for n in (*results, shown)]
    constants = [numpy_helper.from_array(a, n) for n, a in s.constants.items()]
    return helper.make_graph(s.nodes, "step", ports, ends, constants)
