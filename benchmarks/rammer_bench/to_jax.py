"""A PeerGraph as a JAX function: lax convolutions and windows, a scan over time for recurrences."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

import numpy as np
import onnx

from rammer.errors import BadInput, DeviceUnavailable
from rammer_bench.graph import Array, PeerGraph, PeerNode, peer_graph

_Emit: TypeAlias = "Callable[[Any, PeerNode, list[Any]], Any]"


def load_jax() -> Any:
    """Return the jax package. Raises DeviceUnavailable if it is not installed."""
    try:
        return importlib.import_module("jax")
    except ImportError as problem:
        raise DeviceUnavailable("jax is not installed", hint="pip install jax") from problem


def to_jax(model: onnx.ModelProto) -> tuple[Callable[[Any, Mapping[str, Any]], dict[str, Any]], dict[str, Array]]:
    """Return ``(function, weights)``: ``function(weights, {input: array}) -> {output: array}``, ready for ``jax.jit``. Integer
    constants and those of rank 0 are part of the function. Raises BadInput for an uncovered operator."""
    load_jax()
    graph = peer_graph(model)
    for node in graph.nodes:
        if node.op not in _EMIT:
            raise BadInput(f"the JAX peer has no translation of {node.op}", where=f"value {node.outputs[0]}")
    weights = {n: a for n, a in graph.constants.items() if a.ndim and a.dtype.kind == "f"}
    static = {n: a for n, a in graph.constants.items() if n not in weights}
    return (lambda w, feeds: _run(graph, static, w, feeds)), weights


def _run(graph: PeerGraph, static: Mapping[str, Array], weights: Mapping[str, Any], feeds: Mapping[str, Any]) -> Any:
    jax = load_jax()
    values: dict[str, Any] = {**static, **weights, **feeds}
    for node in graph.nodes:
        made = _EMIT[node.op](jax, node, [values[n] if n else None for n in node.inputs])
        names = [o for o in node.outputs if o]
        values.update(zip(names, made if isinstance(made, tuple) else (made,), strict=True))
    return {n: values[n] for n in graph.outputs}


def _conv(jax: Any, node: PeerNode, x: list[Any]) -> Any:
    rank = x[0].ndim - 2
    pads = node.attr("pads", [0] * 2 * rank)
    y = jax.lax.conv_general_dilated(
        x[0],
        x[1],
        node.attr("strides", [1] * rank),
        list(zip(pads[:rank], pads[rank:], strict=True)),
        rhs_dilation=node.attr("dilations", [1] * rank),
        feature_group_count=node.attr("group", 1),
    )
    return y + x[2].reshape(-1, *[1] * rank) if len(x) > 2 else y


def _window(jax: Any, node: PeerNode, x: Any, start: float, combine: Any) -> Any:
    """Return a sliding reduction over rows and columns; ceil_mode pads the end."""
    kernel, strides = node.attr("kernel_shape"), node.attr("strides", [1, 1])
    pads = node.attr("pads", [0] * 4)
    spans = []
    for d in range(2):
        whole = x.shape[2 + d] + pads[d] + pads[d + 2] - kernel[d]
        extra = -whole % strides[d] if node.attr("ceil_mode", 0) else 0
        spans.append((pads[d], pads[d + 2] + extra))
    return jax.lax.reduce_window(x, start, combine, (1, 1, *kernel), (1, 1, *strides), ((0, 0), (0, 0), *spans))


def _max_pool(jax: Any, node: PeerNode, x: list[Any]) -> Any:
    return _window(jax, node, x[0], -float("inf"), jax.lax.max)


def _average_pool(jax: Any, node: PeerNode, x: list[Any]) -> Any:
    total = _window(jax, node, x[0], 0.0, jax.lax.add)
    if node.attr("count_include_pad", 0):
        return total / float(np.prod(node.attr("kernel_shape")))
    return total / _window(jax, node, jax.numpy.ones_like(x[0][:1, :1]), 0.0, jax.lax.add)


def _lstm(jax: Any, node: PeerNode, x: list[Any]) -> tuple[Any, ...]:
    """Return layers in sequence, each a scan over time. ONNX orders gates i, o, f, c."""
    jnp, sequence, hidden, cell = jax.numpy, x[0], None, None
    for w, r, b in zip(x[1::3], x[2::3], x[3::3], strict=True):
        size = r.shape[-1]
        recurrent, bias = r[0].T, b[0, : 4 * size] + b[0, 4 * size :]

        def step(state: Any, projected: Any, recurrent: Any = recurrent) -> Any:
            h, c = state
            i, o, f, g = jnp.split(projected + h @ recurrent, 4, axis=-1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        zeros = jnp.zeros((sequence.shape[1], size), sequence.dtype)
        (hidden, cell), sequence = jax.lax.scan(step, (zeros, zeros), sequence @ w[0].T + bias)
    made = (sequence[:, None], hidden[None] if hidden is not None else None, cell[None] if cell is not None else None)
    return tuple(v for v, name in zip(made, node.outputs, strict=False) if name)


def _gemm(jax: Any, node: PeerNode, x: list[Any]) -> Any:
    if node.attr("alpha", 1.0) != 1.0 or node.attr("beta", 1.0) != 1.0 or node.attr("transA", 0):
        raise BadInput("the JAX peer covers Gemm without alpha, beta and transA only", where=node.outputs[0])
    y = x[0] @ (x[1].T if node.attr("transB", 0) else x[1])
    return y + x[2] if len(x) > 2 else y


def _attention(jax: Any, node: PeerNode, x: list[Any]) -> Any:
    return jax.nn.softmax(x[0] @ x[1] * node.attr("scale"), axis=-1) @ x[2]


def _norm(jax: Any, node: PeerNode, x: list[Any]) -> Any:
    shape = (-1, *[1] * (x[0].ndim - 2))
    scale = x[1] * jax.lax.rsqrt(x[4] + node.attr("epsilon", 1e-5))
    return x[0] * scale.reshape(shape) + (x[2] - x[3] * scale).reshape(shape)


def _layer_norm(jax: Any, node: PeerNode, x: list[Any]) -> Any:
    axes = tuple(range(node.attr("axis", -1) % x[0].ndim, x[0].ndim))
    centred = x[0] - x[0].mean(axes, keepdims=True)
    y = centred * jax.lax.rsqrt((centred * centred).mean(axes, keepdims=True) + node.attr("epsilon", 1e-5)) * x[1]
    return y + x[2] if len(x) > 2 else y


def _slice(jax: Any, node: PeerNode, x: list[Any]) -> Any:
    axes = range(len(x[1])) if len(x) < 4 else x[3]
    steps = [1] * len(x[1]) if len(x) < 5 else x[4]
    index = [slice(None)] * x[0].ndim
    for start, end, axis, step in zip(x[1], x[2], axes, steps, strict=True):
        index[int(axis)] = slice(int(start), int(end), int(step))
    return x[0][tuple(index)]


def _pad(jax: Any, node: PeerNode, x: list[Any]) -> Any:
    if node.attr("mode", b"constant") != b"constant" or len(x) > 3:
        raise BadInput("the JAX peer covers constant Pad of all axes only", where=node.outputs[0])
    spans = [(int(a), int(b)) for a, b in np.reshape(x[1], (2, -1)).T]
    return jax.numpy.pad(x[0], spans, constant_values=x[2] if len(x) > 2 else 0)


def _split(jax: Any, node: PeerNode, x: list[Any]) -> tuple[Any, ...]:
    """Split into the requested sizes, or into equal parts of which the last may be smaller."""
    axis, count = node.attr("axis", 0), len(node.outputs)
    each = -(-x[0].shape[axis] // count)
    places = np.cumsum(x[1])[:-1] if len(x) > 1 else np.arange(1, count) * each
    parts = jax.numpy.split(x[0], [int(p) for p in places], axis)
    return tuple(part for part, name in zip(parts, node.outputs, strict=True) if name)


def _mean(jax: Any, node: PeerNode, x: list[Any]) -> Any:
    axes = tuple(int(d) for d in x[1]) if len(x) > 1 else tuple(range(x[0].ndim))
    return x[0].mean(axes, keepdims=bool(node.attr("keepdims", 1)))


def _lrn(jax: Any, node: PeerNode, x: list[Any]) -> Any:
    size = node.attr("size")
    around = ((0, 0), ((size - 1) // 2, size // 2), *[(0, 0)] * (x[0].ndim - 2))
    window = (1, size, *[1] * (x[0].ndim - 2))
    total = jax.lax.reduce_window(x[0] * x[0], 0.0, jax.lax.add, window, (1,) * x[0].ndim, around)
    return x[0] / (node.attr("bias", 1.0) + node.attr("alpha", 1e-4) / size * total) ** node.attr("beta", 0.75)


_EMIT: Final[Mapping[str, _Emit]] = {
    "Conv": _conv,
    "MaxPool": _max_pool,
    "AveragePool": _average_pool,
    "LSTM": _lstm,
    "Gemm": _gemm,
    "Attention": _attention,
    "BatchNormalization": _norm,
    "LayerNormalization": _layer_norm,
    "Slice": _slice,
    "Split": _split,
    "ReduceMean": _mean,
    "LRN": _lrn,
    "Where": lambda jax, n, x: jax.numpy.where(x[0], x[1], x[2]),
    "Pad": _pad,
    "Linear": lambda jax, n, x: x[0] @ x[1] + x[2],
    "MatMul": lambda jax, n, x: x[0] @ x[1],
    "GlobalAveragePool": lambda jax, n, x: x[0].mean(tuple(range(2, x[0].ndim)), keepdims=True),
    "Flatten": lambda jax, n, x: x[0].reshape(int(np.prod(x[0].shape[: n.attr("axis", 1)])), -1),
    "Concat": lambda jax, n, x: jax.numpy.concatenate(x, n.attr("axis")),
    "Gather": lambda jax, n, x: jax.numpy.take(x[0], x[1], axis=n.attr("axis", 0)),
    "Reshape": lambda jax, n, x: x[0].reshape([int(d) for d in x[1]]),
    "Squeeze": lambda jax, n, x: jax.numpy.squeeze(x[0], tuple(int(d) for d in x[1])),
    "Transpose": lambda jax, n, x: jax.numpy.transpose(x[0], n.attr("perm")),
    "Clip": lambda jax, n, x: jax.numpy.clip(x[0], x[1], x[2]),
    "Softmax": lambda jax, n, x: jax.nn.softmax(x[0], axis=n.attr("axis", -1)),
    "Gelu": lambda jax, n, x: jax.nn.gelu(x[0], approximate=n.attr("approximate", b"none") != b"none"),
    "Relu": lambda jax, n, x: jax.nn.relu(x[0]),
    "Sigmoid": lambda jax, n, x: jax.nn.sigmoid(x[0]),
    "Tanh": lambda jax, n, x: jax.numpy.tanh(x[0]),
    "Identity": lambda jax, n, x: x[0],
    "Add": lambda jax, n, x: x[0] + x[1],
    "Sub": lambda jax, n, x: x[0] - x[1],
    "Mul": lambda jax, n, x: x[0] * x[1],
    "Div": lambda jax, n, x: x[0] / x[1],
}
