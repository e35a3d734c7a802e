"""Layers as torch calls: convolutions and pooling, recurrences (cuDNN), attention (SDPA), norms, products."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rammer.errors import BadInput
from rammer_bench.emitter import Emitter, operands
from rammer_bench.graph import PeerNode, plain_lstm


def _pads(e: Emitter, node: PeerNode, kernel: Sequence[int]) -> list[int]:
    """Return the padding before each spatial axis, then after each; SAME_UPPER and SAME_LOWER follow from the extents."""
    rank, form = len(kernel), node.attr("auto_pad", b"NOTSET")
    if form in (b"NOTSET", b"VALID"):
        return list(node.attr("pads", [0] * 2 * rank))
    steps = zip(
        e.shape(e.value(node.inputs[0]))[2:],
        kernel,
        node.attr("strides", [1] * rank),
        node.attr("dilations", [1] * rank),
        strict=True,
    )
    whole = [max((-(-n // s) - 1) * s + (k - 1) * d + 1 - n, 0) for n, k, s, d in steps]
    less = [p // 2 for p in whole]
    more = [p - q for p, q in zip(whole, less, strict=True)]
    return [*less, *more] if form == b"SAME_UPPER" else [*more, *less]


def conv(e: Emitter, node: PeerNode) -> Any:
    x, weight, *bias = operands(e, node)
    rank = len(e.shape(weight)) - 2
    ones = [1] * rank
    pads, groups = _pads(e, node, e.shape(weight)[2:]), node.attr("group", 1)
    if pads[:rank] != pads[rank:]:
        x, pads = e.call(e.F.pad, x, [p for d in reversed(range(rank)) for p in (pads[d], pads[d + rank])]), [0] * rank
    function = (e.F.conv1d, e.F.conv2d, e.F.conv3d)[rank - 1]
    strides, dilations = list(node.attr("strides", ones)), list(node.attr("dilations", ones))
    return e.call(function, x, weight, bias[0] if bias else None, strides, list(pads[:rank]), dilations, groups)


def conv_transpose(e: Emitter, node: PeerNode) -> Any:
    x, weight, *bias = operands(e, node)
    rank = len(e.shape(weight)) - 2
    ones = [1] * rank
    pads = list(node.attr("pads", [0] * 2 * rank))
    if pads[:rank] != pads[rank:] or node.attr("auto_pad", b"NOTSET") != b"NOTSET" or "output_shape" in node.attributes:
        raise BadInput("the torch peer covers ConvTranspose with equal pads on both sides only", where=node.outputs[0])
    function = (e.F.conv_transpose1d, e.F.conv_transpose2d, e.F.conv_transpose3d)[rank - 1]
    return e.call(
        function,
        x,
        weight,
        bias[0] if bias else None,
        list(node.attr("strides", ones)),
        pads[:rank],
        list(node.attr("output_padding", [0] * rank)),
        node.attr("group", 1),
        list(node.attr("dilations", ones)),
    )


def resize(e: Emitter, node: PeerNode) -> Any:
    """Resize to the nearest pixel by integer factors, as torch's ``interpolate`` does."""
    x = e.value(node.inputs[0])
    extents = e.shape(x)
    known = e.source.constants
    scales = known.get(node.inputs[2]) if len(node.inputs) > 2 else None
    sizes = e.static(node, 3)
    if not sizes and scales is not None and scales.size:
        sizes = [int(np.floor(n * s)) for n, s in zip(extents, scales, strict=True)]
    form = (
        node.attr("mode", b"nearest"),
        node.attr("coordinate_transformation_mode", b"half_pixel"),
        node.attr("nearest_mode", b"round_prefer_floor"),
    )
    whole = sizes is not None and all(have % n == 0 for have, n in zip(sizes, extents, strict=False))
    plain = form == (b"nearest", b"asymmetric", b"floor") and "axes" not in node.attributes
    if not sizes or not whole or not plain or sizes[:2] != list(extents[:2]):
        raise BadInput("the torch peer covers Resize to the nearest pixel by whole factors only", where=node.outputs[0])
    return e.call(e.F.interpolate, x, sizes[2:], mode="nearest")


def _cut_by_ceiling(extents: Sequence[int], kernel: list[int], strides: list[int], pads: list[int]) -> bool:
    """Return True if rounding the number of windows up is equivalent to ``pads``, at the end only."""
    windows = zip(extents, kernel, strides, pads[2:], strict=True)
    return pads[:2] == [0, 0] and all((n + p - k) // s == -(-(n - k) // s) for n, k, s, p in windows)


def pool(e: Emitter, node: PeerNode) -> Any:
    """Emit a pool. Padding only at the end is a window cut off by the border, which torch calls ceil_mode; otherwise maxima are
    padded separately."""
    (x,) = operands(e, node)
    kernel, strides = list(node.attr("kernel_shape")), list(node.attr("strides", [1, 1]))
    pads, ceil = _pads(e, node, kernel), bool(node.attr("ceil_mode", 0))
    cut = pads[:2] != pads[2:]
    if len(kernel) == 2 and cut and node.op == "MaxPool" and (ceil or not _cut_by_ceiling(e.shape(x)[2:], kernel, strides, pads)):
        border = [p for d in (1, 0) for p in (pads[d], pads[d + 2])]
        x, pads, cut = e.call(e.F.pad, x, border, "constant", -math.inf), [0] * 4, False
    if len(kernel) != 2 or (cut and (pads[:2] != [0, 0] or node.attr("count_include_pad", 0))):
        raise BadInput(f"the torch peer does not cover {node.op} with pads {pads}", where=node.outputs[0])
    rounding = [s - 1 if ceil else 0 for s in strides]
    want = tuple((n + pads[d] + pads[d + 2] - kernel[d] + rounding[d]) // strides[d] + 1 for d, n in enumerate(e.shape(x)[2:]))
    if node.op == "MaxPool":
        y = e.call(e.F.max_pool2d, x, kernel, strides, pads[:2], 1, ceil or cut)
    else:
        y = e.call(e.F.avg_pool2d, x, kernel, strides, pads[:2], ceil or cut, bool(node.attr("count_include_pad", 0)))
    if e.shape(y)[2:] != want:
        raise BadInput(f"the torch peer does not cover {node.op} with pads {pads}", where=node.outputs[0])
    return y


def lstm(e: Emitter, node: PeerNode) -> tuple[Any, ...]:
    """Emit cuDNN's multi-layer LSTM. ONNX orders gates i, o, f, c; torch i, f, g, o."""
    single = len(node.inputs) == 7 and not node.inputs[4] and plain_lstm(replace(node, inputs=node.inputs[:4]))
    names, start = (node.inputs[1:4], node.inputs[5:]) if single else (node.inputs[1:], ())
    if not all(n in e.source.constants for n in names) or len(names) % 3:
        raise BadInput(
            "the torch peer covers forward LSTMs with constant weights and no lengths or peepholes only",
            where=next(o for o in node.outputs if o),
        )
    weights = [e.source.constants[n] for n in names]
    hidden, layers, torch = int(node.attr("hidden_size")), len(weights) // 3, e.torch
    lstm = torch.nn.LSTM(weights[0].shape[-1], hidden, layers)
    order = np.concatenate([np.arange(hidden) + g * hidden for g in (0, 2, 3, 1)])
    state: dict[str, Any] = {}
    for layer in range(layers):
        w, r, b = (a[0] for a in weights[3 * layer : 3 * layer + 3])
        parts = {"weight_ih": w, "weight_hh": r, "bias_ih": b[: 4 * hidden], "bias_hh": b[4 * hidden :]}
        state |= {f"{n}_l{layer}": torch.from_numpy(np.ascontiguousarray(a[order])) for n, a in parts.items()}
    lstm.load_state_dict(state)
    name = f"lstm{len(e.kept)}_{len(e.values)}"
    e.root.add_module(name, lstm)
    x = e.value(node.inputs[0])
    steps, batch, _ = e.shape(x)
    made = e.graph.call_module(name, (x, tuple(map(e.tensor, start))) if start else (x,))
    sequence, states = (e.graph.call_function(operator.getitem, (made, i)) for i in (0, 1))
    e.metas[sequence] = torch.empty((steps, batch, hidden), device="meta")
    results = []
    for index, output in enumerate(node.outputs):
        if output and index == 0:
            results.append(e.call(torch.unsqueeze, sequence, 1))
        elif output:
            state_of = e.graph.call_function(operator.getitem, (states, index - 1))
            e.metas[state_of] = torch.empty((layers, batch, hidden), device="meta")
            results.append(e.call(operator.getitem, state_of, slice(layers - 1, layers)))
    return tuple(results)


def linear(e: Emitter, node: PeerNode) -> Any:
    x, _, bias = operands(e, node)
    return e.call(e.F.linear, x, e.weight(e.source.constants[node.inputs[1]], node.inputs[1], transposed=True), bias)


def gemm(e: Emitter, node: PeerNode) -> Any:
    x, weight, *bias = operands(e, node)
    if node.attr("alpha", 1.0) != 1.0 or node.attr("beta", 1.0) != 1.0 or node.attr("transA", 0):
        raise BadInput("the torch peer covers Gemm without alpha, beta and transA only", where=node.outputs[0])
    if not node.attr("transB", 0):
        weight = e.call(e.torch.transpose, weight, 0, 1)
    return e.call(e.F.linear, x, weight, *bias)


def attention(e: Emitter, node: PeerNode) -> Any:
    q, k, v = operands(e, node)
    k = e.call(e.torch.transpose, k, -1, -2)
    return e.call(e.F.scaled_dot_product_attention, q, k, v, scale=node.attr("scale"))


def norm(e: Emitter, node: PeerNode) -> Any:
    """Emit a batch norm that no convolution precedes."""
    x, scale, shift, mean, variance = operands(e, node)
    epsilon = float(node.attr("epsilon", 1e-5))
    return e.call(e.F.batch_norm, x, mean, variance, scale, shift, False, 0.0, epsilon)


def layer_norm(e: Emitter, node: PeerNode) -> Any:
    x, scale, *shift = operands(e, node)
    start = node.attr("axis", -1) % len(e.shape(x))
    extents = list(e.shape(x)[start:])
    return e.call(e.F.layer_norm, x, extents, scale, shift[0] if shift else None, float(node.attr("epsilon", 1e-5)))


def gather(e: Emitter, node: PeerNode) -> Any:
    """Emit a gather of matrix rows, or of constant positions along any axis."""
    table, axis = e.tensor(node.inputs[0]), node.attr("axis", 0)
    if node.inputs[1] in e.source.constants:
        places = e.source.constants[node.inputs[1]]
        extent = e.shape(table)[axis]
        if places.ndim == 0:
            return e.call(e.torch.select, table, axis, int(places) % extent)
        if places.ndim == 1:
            return e.call(e.torch.index_select, table, axis, e.weight(places % extent, f"{node.inputs[1]} of {extent}"))
    if axis or len(e.shape(table)) != 2:
        raise BadInput("the torch peer covers Gather of rows or of constant positions only", where=node.outputs[0])
    return e.call(e.F.embedding, e.tensor(node.inputs[1]), table)


def global_pool(e: Emitter, node: PeerNode) -> Any:
    return e.call(e.F.adaptive_avg_pool2d, operands(e, node)[0], 1)
