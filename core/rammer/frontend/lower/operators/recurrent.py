"""LSTM, GRU and RNN, unrolled over their static time steps.

The gate is a separate axis, ``[b, g, h]``: a tile of hidden units reads the same rows of all gates. With packed gates, its hull
would span all of them. The input projection of all steps is one contraction. Every step has the same Computes over other tensors,
so one analysis serves all.
"""

from __future__ import annotations

from rammer.frontend.lower.lowering_registry import Lowering, lowering
from rammer.frontend.lower.recurrence import Recurrence
from rammer.ir import expr as ex
from rammer.ir.expr import Expr, Op


def _add_terms(*terms: Expr | None) -> Expr:
    present = [t for t in terms if t is not None]
    result = present[0]
    for term in present[1:]:
        result = Op("add", (result, term))
    return result


def _multiply_terms(a: Expr, b: Expr) -> Expr:
    return Op("mul", (a, b))


@lowering("LSTM")
def lower_lstm(ctx: Lowering) -> None:
    """Lower LSTM: gates i, o, f, c; peepholes i, o, f; activations f, g, h; ``input_forget`` couples f = 1 - i."""
    net = Recurrence(ctx, 4)
    shown, last_h, last_c = [], [], []
    for direction, backwards in enumerate(net.directions):
        outputs, h, c = _lstm_direction(net, direction, backwards)
        shown.append(outputs)
        last_h.append(h)
        last_c.append(c)
    net.emit_sequence(shown)
    net.emit_last(1, last_h)
    net.emit_last(2, last_c)


def _lstm_direction(net: Recurrence, direction: int, backwards: bool) -> tuple[list[str], str, str]:
    """Return the outputs by time, and the last hidden and cell states."""
    inputs = net.projections(direction, hoisted=4)
    h, c = net.initial(5, direction, f"h{direction}"), net.initial(6, direction, f"c{direction}")
    outputs = [""] * net.steps
    for t in net.order(backwards):
        recurrent = net.recur(h, direction, 0, 4, f"hr{direction}_{t}")
        gates = net.emit_gates(inputs[t], recurrent, f"gates{direction}_{t}")
        h, c = _lstm_cell(net, direction, gates, (h, c), t)
        outputs[t] = net.shown(net.mask(t), h, f"y{direction}_{t}")
    return outputs, h, c


def _lstm_cell(net: Recurrence, direction: int, gates: str, state: tuple[str, str], step: int) -> tuple[str, str]:
    """Return the next hidden and cell states."""
    f, g, h = net.activations(direction, ("Sigmoid", "Tanh", "Tanh"))
    mask = net.mask(step)
    old_h, old_c = net.state(state[0]), net.state(state[1])
    gate_in = f(_add_terms(net.at_gate(gates, 0), _peephole_term(net, direction, 0, old_c)))
    if net.ctx.attr("input_forget", 0):
        forget: Expr = Op("sub", (net.literal(1.0), gate_in))
    else:
        forget = f(_add_terms(net.at_gate(gates, 2), _peephole_term(net, direction, 2, old_c)))
    cell = _add_terms(_multiply_terms(forget, old_c), _multiply_terms(gate_in, g(net.at_gate(gates, 3))))
    c = net.emit_state(net.kept(mask, cell, old_c), f"c{direction}_{step}")
    new_c = net.state(c)
    gate_out = f(_add_terms(net.at_gate(gates, 1), _peephole_term(net, direction, 1, new_c)))
    hidden = net.kept(mask, _multiply_terms(gate_out, h(new_c)), old_h)
    return net.emit_state(hidden, f"h{direction}_{step}"), c


def _peephole_term(net: Recurrence, direction: int, gate: int, cell: Expr) -> Expr | None:
    """Return the cell's direct contribution to a gate (input P), or None without peepholes."""
    if not net.ctx.has(7):
        return None
    return _multiply_terms(net.ctx.load(net.by_gate(7), direction, gate, "h"), cell)


@lowering("GRU")
def lower_gru(ctx: Lowering) -> None:
    """Lower GRU: gates z, r, h; activations f, g; ``linear_before_reset`` resets after the recurrent product."""
    net = Recurrence(ctx, 3)
    runs = [_gru_direction(net, d, backwards) for d, backwards in enumerate(net.directions)]
    net.emit_sequence([outputs for outputs, _ in runs])
    net.emit_last(1, [last for _, last in runs])


def _gru_direction(net: Recurrence, direction: int, backwards: bool) -> tuple[list[str], str]:
    """Return the outputs by time and the last hidden state."""
    linear = bool(net.ctx.attr("linear_before_reset", 0))
    inputs = net.projections(direction, hoisted=2 if linear else 3)
    h = net.initial(5, direction, f"h{direction}")
    outputs = [""] * net.steps
    cell = _gru_linear if linear else _gru_plain
    for t in net.order(backwards):
        h = cell(net, direction, inputs[t], h, t)
        outputs[t] = net.shown(net.mask(t), h, f"y{direction}_{t}")
    return outputs, h


def _gru_linear(net: Recurrence, direction: int, inputs: str, state: str, step: int) -> str:
    """Return the next state with ``h~ = g(x W + r * (h R + Rb) + Wb)``: one recurrent product for all gates."""
    f, g = net.activations(direction, ("Sigmoid", "Tanh"))
    recurrent = net.recur(state, direction, 0, 3, f"hr{direction}_{step}")
    update, reset = (f(_add_terms(net.at_gate(inputs, i), net.at_gate(recurrent, i))) for i in (0, 1))
    product = _add_terms(net.at_gate(recurrent, 2), net.recurrent_bias(direction, ex.integer(2)))
    return _gru_next(net, direction, g(_add_terms(net.at_gate(inputs, 2), _multiply_terms(reset, product))), update, state, step)


def _gru_plain(net: Recurrence, direction: int, inputs: str, state: str, step: int) -> str:
    """Return the next state with ``h~ = g(x W + (r * h) R + Rb + Wb)``: the candidate's product follows the reset."""
    f, g = net.activations(direction, ("Sigmoid", "Tanh"))
    recurrent = net.recur(state, direction, 0, 2, f"hr{direction}_{step}")
    update, reset = (f(_add_terms(net.at_gate(inputs, i), net.at_gate(recurrent, i))) for i in (0, 1))
    forgotten = net.emit_state(_multiply_terms(reset, net.state(state)), f"rh{direction}_{step}")
    candidate = net.recur(forgotten, direction, 2, 1, f"rhr{direction}_{step}")
    return _gru_next(net, direction, g(_add_terms(net.at_gate(inputs, 2), net.at_gate(candidate, 0))), update, state, step)


def _gru_next(net: Recurrence, direction: int, candidate: Expr, update: Expr, state: str, step: int) -> str:
    """Return the state ``(1 - z) * h~ + z * h``."""
    old = net.state(state)
    new = _add_terms(_multiply_terms(Op("sub", (net.literal(1.0), update)), candidate), _multiply_terms(update, old))
    return net.emit_state(net.kept(net.mask(step), new, old), f"h{direction}_{step}")


@lowering("RNN")
def lower_rnn(ctx: Lowering) -> None:
    """Lower RNN: ``h = f(x W + h R + Wb + Rb)``."""
    net = Recurrence(ctx, 1)
    runs = [_rnn_direction(net, d, backwards) for d, backwards in enumerate(net.directions)]
    net.emit_sequence([outputs for outputs, _ in runs])
    net.emit_last(1, [last for _, last in runs])


def _rnn_direction(net: Recurrence, direction: int, backwards: bool) -> tuple[list[str], str]:
    """Return the outputs by time and the last hidden state."""
    (f,) = net.activations(direction, ("Tanh",))
    inputs = net.projections(direction, hoisted=1)
    h = net.initial(5, direction, f"h{direction}")
    outputs = [""] * net.steps
    for t in net.order(backwards):
        recurrent = net.recur(h, direction, 0, 1, f"hr{direction}_{t}")
        new = f(_add_terms(net.at_gate(inputs[t], 0), net.at_gate(recurrent, 0)))
        h = net.emit_state(net.kept(net.mask(t), new, net.state(h)), f"h{direction}_{t}")
        outputs[t] = net.shown(net.mask(t), h, f"y{direction}_{t}")
    return outputs, h
