"""Shared parts of token models: linear layers, layer norms, multi-head attention. Rows are the last axis but one."""

from __future__ import annotations

import math

import numpy as np

from zoo.net import Net


def linear(net: Net, x: str, columns: int, gain: float = 1.0, bias: bool = True) -> str:
    """Emit ``x @ W + b`` along the last axis; deviation sqrt(gain / rows)."""
    shape = net.shape(x)
    weight = net.normal((shape[-1], columns), math.sqrt(gain / shape[-1]), "w")
    product = net.node("MatMul", [x, weight], (*shape[:-1], columns))
    return net.map("Add", product, net.normal((columns,), 0.1, "b")) if bias else product


def layer_norm(net: Net, x: str, epsilon: float = 1e-12) -> str:
    """Emit a layer norm over the last axis."""
    width = net.shape(x)[-1]
    operands = [x, net.normal((width,), 0.1, "scale", 1.0), net.normal((width,), 0.1, "shift")]
    return net.node("LayerNormalization", operands, net.shape(x), axis=-1, epsilon=epsilon)


def heads_of(net: Net, x: str, heads: int, order: tuple[int, ...]) -> str:
    """Reshape (n, tokens, width) to (n, tokens, heads, width per head) and transpose it."""
    n, tokens, width = net.shape(x)
    return net.transpose(net.reshape(x, (n, tokens, heads, width // heads)), order)


def scaled(net: Net, x: str, width: int) -> str:
    """Emit ``x`` / sqrt(width)."""
    return net.map("Mul", x, net.constant(np.array(1 / math.sqrt(width), np.float32), "scale"))


def attention(net: Net, x: str, heads: int, memory: str = "", unseen: str = "") -> str:
    """Emit multi-head attention with output projection: to ``memory``, or to itself. ``unseen`` (booleans) masks scores."""
    n, tokens, width = net.shape(x)
    memory = memory or x
    places = net.shape(memory)[1]
    q = heads_of(net, linear(net, x, width), heads, (0, 2, 1, 3))
    k = heads_of(net, linear(net, memory, width), heads, (0, 2, 3, 1))
    v = heads_of(net, linear(net, memory, width), heads, (0, 2, 1, 3))
    scores = scaled(net, net.node("MatMul", [q, k], (n, heads, tokens, places)), width // heads)
    if unseen:
        scores = net.map("Where", unseen, net.constant(np.array(-1e9, np.float32), "hidden"), scores)
    return merged(net, net.map("Softmax", scores, axis=-1), v)


def merged(net: Net, shares: str, v: str) -> str:
    """Emit ``shares @ v`` of all heads, concatenated, and the output projection."""
    n, heads, _, width = net.shape(v)
    tokens = net.shape(shares)[2]
    context = net.node("MatMul", [shares, v], (n, heads, tokens, width))
    return linear(net, net.reshape(net.transpose(context, (0, 2, 1, 3)), (n, tokens, heads * width)), heads * width)


def feed_forward(net: Net, x: str, inner: int, activation: str) -> str:
    """Emit two linear layers with an activation."""
    return linear(net, net.map(activation, linear(net, x, inner, 2.0)), net.shape(x)[-1])
