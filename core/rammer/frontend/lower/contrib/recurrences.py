"""Layers that carry a state between calls: causal convolutions and linear attention, with their gates and norms."""

from __future__ import annotations

import numpy as np

from rammer.frontend.lower.contrib.function import Declined, FunctionBody, contrib_function
from rammer.frontend.read.limits import MAX_POSITIONS

#: The first version of ONNX that has linear attention.
_LINEAR_ATTENTION_OPSET = 27
#: Largest number of states in a window.
_MAX_WINDOW = 8


def apply_silu(b: FunctionBody, x: str) -> str:
    """Return ``x * Sigmoid(x)``."""
    return b.Mul(x, b.Sigmoid(x))


def check_window(b: FunctionBody) -> int:
    """Return the number of states in a window, 0 for one state without a window axis."""
    window = int(b.attr("state_window"))
    if not 0 <= window <= _MAX_WINDOW:
        raise Declined(f"state_window is {window}, which may be 0 to {_MAX_WINDOW}")
    return window


def last_state(b: FunctionBody, place: int, window: int) -> str:
    """Return the newest state of an input, which may hold a window of states."""
    if not window:
        return b.input(place)
    if b.shape(place)[0] != window:
        raise Declined(f"a state of {list(b.shape(place))} for a window of {window}")
    return b.Squeeze(b.slice(b.input(place), 0, window - 1, window), b.constant([0]))


def stack_window(b: FunctionBody, states: list[str], window: int, zeros: str) -> str:
    """Return the last ``window`` of ``states``, preceded by ``zeros`` for missing ones."""
    if not window:
        return states[-1]
    kept = [zeros] * (window - len(states)) + states
    return b.Concat(*(b.Unsqueeze(x, b.constant([0])) for x in kept), axis=0)


@contrib_function(
    "CausalConvWithState", "input: T, weight: T, bias?: T, past_state?: T -> output: T, present_state: T",
    ndim=1, activation="none", dilation=1, channels_last=0, state_window=0,
)  # fmt: skip
def causal_conv_with_state(b: FunctionBody) -> list[str]:
    """Expand CausalConvWithState: each channel is convolved with earlier inputs; the last inputs are the next call's state."""
    activation, dilation, window, last = b.attr("activation"), b.attr("dilation"), check_window(b), b.attr("channels_last")
    if b.attr("ndim") != 1 or dilation < 1 or activation not in ("none", "silu", "swish"):
        raise Declined(f"ndim is {b.attr('ndim')}, dilation {dilation} and activation {activation!r}")
    shape, (channels, each, size) = b.shape(0) if last else b.shape(0, 3), b.shape(1, 3)
    if len(shape) < 3:
        raise Declined(f"an input of {list(shape)}, where 3 axes or more are needed")
    batch, length = shape[0], shape[1] if last else shape[-1]
    width = int(np.prod(shape[2:])) if last else shape[1]
    if each != 1 or width != channels or size < 1:
        raise Declined(f"weights of {list(b.shape(1))} for an input of {list(shape)}")
    before = (size - 1) * dilation
    if before > MAX_POSITIONS:
        raise Declined(f"a state of {before} positions")
    state = (batch, before, *shape[2:]) if last else (batch, channels, before)
    if b.has(3):
        if b.shape(3) != ((window, *state) if window else state):
            raise Declined(f"a state of {list(b.shape(3))}, where {list(state)} is needed")
        past = _channels_first(b, last_state(b, 3, window), (batch, before, channels), last)
    else:
        past = b.cast(b.constant(np.zeros((batch, channels, before), np.float32)), b.dtype())
    whole = b.Concat(past, _channels_first(b, b.input(0), (batch, length, channels), last), axis=2)
    y = b.op("Conv", whole, b.input(1), b.input(2), group=channels, dilations=[dilation])[0]
    y = y if activation == "none" else apply_silu(b, y)
    ends = range(max(length - window, 0) + 1 if window else length, length + 1)
    states = [_restore_layout(b, b.slice(whole, 2, end, end + before), state, last) for end in ends]
    zeros = b.cast(b.constant(np.zeros(state, np.float32)), b.dtype()) if window > len(states) else ""
    return [_restore_layout(b, y, shape, last), stack_window(b, states, window, zeros)]


def _channels_first(b: FunctionBody, x: str, shape: tuple[int, int, int], last: int) -> str:
    """Return ``x``, reshaped to ``shape``, with channels first."""
    return b.Transpose(b.reshape(x, *shape), perm=[0, 2, 1]) if last else x


def _restore_layout(b: FunctionBody, x: str, shape: tuple[int, ...], last: int) -> str:
    return b.reshape(b.Transpose(x, perm=[0, 2, 1]), *shape) if last else x


@contrib_function(
    "LinearAttention",
    "query: T, key: T, value: T, past_state?: S, decay?: T, beta?: T -> output: T, present_state: S",
    q_num_heads=int, kv_num_heads=int, update_rule="gated_delta", scale=0.0, chunk_size=64, state_window=0,
)  # fmt: skip
def linear_attention(b: FunctionBody) -> list[str]:
    """Expand LinearAttention to ONNX's operator. Queries or keys may have fewer heads than values. The states of the last tokens
    may be returned."""
    b.opset = _LINEAR_ATTENTION_OPSET
    heads, shared, rule, window = b.attr("q_num_heads"), b.attr("kv_num_heads"), b.attr("update_rule"), check_window(b)
    (batch, length, hidden), (_, _, keys), (_, _, wide) = (b.shape(i, 3) for i in range(3))
    if heads < 1 or shared < 1 or hidden % heads or not hidden or wide % shared or max(heads, shared) % min(heads, shared):
        raise Declined(f"{heads} heads of queries and {shared} of values for {hidden} and {wide} columns")
    if rule not in ("linear", "gated", "delta", "gated_delta"):
        raise Declined(f"the update rule {rule!r} is unknown")
    depth = hidden // heads
    if keys % depth or not keys or shared % (keys // depth):
        raise Declined(f"keys of {keys} columns for queries of {depth} and {shared} heads of values")
    state_kind = b.dtype(3) if b.has(3) else b.dtype()
    kind = b.dtype() if state_kind == b.dtype() else "float32"
    at = batch, length, depth
    query = _repeat_heads(b, b.input(0), at, heads, shared) if heads < shared else b.input(0)
    operands = [query, _repeat_heads(b, b.input(1), at, keys // depth, shared), b.input(2)]
    gates = [b.input(4) if rule.startswith("gated") else "", b.input(5) if rule.endswith("delta") else ""]
    operands, gates = ([b.cast(x, kind) if x else "" for x in part] for part in (operands, gates))
    state = b.cast(last_state(b, 3, window), kind) if b.has(3) else ""
    attributes = {"q_num_heads": max(heads, shared), "kv_num_heads": shared, "update_rule": rule}
    attributes["scale"] = b.attr("scale") or 1.0 / float(np.sqrt(depth))
    shown, states, done = list[str](), list[str](), 0
    for end in range(max(length - window, 0) + 1 if window else length, length + 1):
        part = [b.slice(x, 1, done, end) if x and (done, end) != (0, length) else x for x in (*operands, *gates)]
        y, state = b.op("LinearAttention", *part[:3], state, *part[3:], outputs=2, **attributes)
        shown, states, done = [*shown, y], [*states, state], end
    zeros = b.cast(b.constant(np.zeros((batch, shared, depth, wide // shared), np.float32)), kind)
    y = b.Concat(*shown, axis=1) if len(shown) > 1 else shown[0]
    return [b.cast(y, b.dtype()), b.cast(stack_window(b, states, window, zeros), state_kind)]


def _repeat_heads(b: FunctionBody, x: str, at: tuple[int, int, int], heads: int, count: int) -> str:
    """Repeat each head of ``x`` so that the result has ``count`` heads."""
    if heads == count:
        return x
    batch, length, depth = at
    wide = b.Expand(b.reshape(x, batch, length, heads, 1, depth), b.constant([1, 1, 1, count // heads, 1]))
    return b.reshape(wide, batch, length, count * depth)


@contrib_function("LinearAttentionGate", "a: T, dt_bias: F, decay_scale: F, b?: T -> decay: T, beta?: T")
def linear_attention_gate(b: FunctionBody) -> list[str]:
    """Expand LinearAttentionGate: ``decay_scale * Softplus(a + dt_bias)`` in float32, and ``Sigmoid(b)``."""
    opening = b.Softplus(b.Add(b.cast(b.input(0), "float32"), b.input(1)))
    beta = b.cast(b.Sigmoid(b.cast(b.input(3), "float32")), b.dtype()) if b.has(3) else ""
    return [b.cast(b.Mul(opening, b.input(2)), b.dtype()), beta]


@contrib_function("GatedRMSNorm", "X: T, scale: T, gate: T -> Y: T", epsilon=1e-5, activation="silu")
def gated_rms_norm(b: FunctionBody) -> str:
    """Expand GatedRMSNorm: root-mean-square norm of column groups of the scale's size, times an activated gate, in float32."""
    shape, columns, activation = b.shape(0), b.shape(1, 1)[0], b.attr("activation")
    if activation not in ("silu", "swish", "sigmoid"):
        raise Declined(f"the activation {activation!r} is unknown; silu, swish and sigmoid are supported")
    if not shape or columns < 1 or shape[-1] % columns or b.shape(2) != shape:
        raise Declined(f"a scale of {columns} and a gate of {list(b.shape(2))} for an input of {list(shape)}")
    x, scale, gate = (b.cast(b.input(i), "float32") for i in range(3))
    x = b.reshape(x, *shape[:-1], shape[-1] // columns, columns)
    y = b.reshape(b.RMSNormalization(x, scale, axis=-1, epsilon=b.attr("epsilon")), *shape)
    return b.cast(b.Mul(y, b.Sigmoid(gate) if activation == "sigmoid" else apply_silu(b, gate)), b.dtype())
