"""Contrib operators of ONNX Runtime on integers."""

from __future__ import annotations

from typing import Any

import numpy as np

from rammer_testing.operators.case import Array, OperatorCase
from rammer_testing.operators.draw import Draw
from rammer_testing.operators.recurrent import activations
from rammer_testing.operators.registry import describe_alone

_DOMAIN = "com.microsoft"


def _scale(draw: Draw) -> Array:
    """Return a scale that is not a power of two: for ties ONNX Runtime rounds after adding the zero point, ONNX before it."""
    return np.asarray(draw.uniform(0.02, 0.3), np.float32)


def _point(draw: Draw, kind: str) -> Array:
    return draw.array((), kind, 0.0, 0 if kind == "uint8" else -20, 20)


def _codes(draw: Draw, shape: tuple[int, ...], kind: str) -> Array:
    return draw.array(shape, kind, 0.1, 0 if kind == "uint8" else -128, 255 if kind == "uint8" else 127)


def _weights(draw: Draw, shape: tuple[int, ...], kind: str) -> Array:
    """Return codes of weights. Signed ones have 7 bits: ONNX Runtime's 16-bit sums overflow on CPUs without VNNI."""
    return draw.array(shape, kind, low=0 if kind == "uint8" else -63, high=255 if kind == "uint8" else 63)


def _named(*names: str) -> tuple[str, ...]:
    return tuple(f"{_DOMAIN}.{n}" for n in names)


@describe_alone(*_named("QLinearAdd", "QLinearMul"))
def pairs(draw: Draw, op: str) -> OperatorCase:
    """Draw a case of two operands; the second may be a row or a scalar."""
    kind, shape = draw.either("uint8", "int8"), (*draw.shape(1, 2), draw.size(1, 9))
    other = draw.either(shape, shape[-1:], (1,))
    operands = (_codes(draw, shape, kind), _scale(draw), _point(draw, kind), _codes(draw, other, kind), _scale(draw))
    return OperatorCase(op, 17, (*operands, _point(draw, kind), _scale(draw), _point(draw, kind)))


@describe_alone(*_named("QLinearSigmoid", "QLinearLeakyRelu", "QLinearSoftmax", "QLinearGlobalAveragePool", "QLinearAveragePool"))
def single(draw: Draw, op: str) -> OperatorCase:
    """Draw a case of one operand."""
    kind, attributes = draw.either("uint8", "int8"), dict[str, Any]()
    shape: tuple[int, ...] = (*draw.shape(1, 2), draw.size(1, 9))
    result = _scale(draw)
    if op.endswith("LeakyRelu"):
        attributes["alpha"] = draw.either(None, 0.25)
    elif op.endswith("Softmax"):
        attributes |= {"axis": draw.either(-1, len(shape) - 1, 0), "opset": draw.either(12, 13)}
        result = np.asarray(1 / 256, np.float32)  # with the least zero point: the parameters that ONNX Runtime computes for
        shape = tuple(n + 1 for n in shape)
    elif op.endswith("Pool"):
        shape = (draw.size(1, 2), draw.size(1, 4), draw.size(3, 6), draw.size(3, 6))
        attributes["channels_last"] = draw.either(None, 0, 1)
        if op.endswith("AveragePool") and not op.endswith("GlobalAveragePool"):
            attributes |= {
                "kernel_shape": [2, 2],
                "strides": draw.either(None, [1, 1], [2, 2]),
                "pads": draw.either(None, [1, 0, 0, 1]),
            }
            shape = (shape[0], max(shape[1], 3), max(shape[2], 3), max(shape[3], 3))
            attributes["count_include_pad"] = draw.either(None, 0, 1)
    zero = np.asarray(np.iinfo(kind).min, kind) if op.endswith("Softmax") else _point(draw, kind)
    operands = (_codes(draw, shape, kind), _scale(draw), _point(draw, kind), result, zero)
    return OperatorCase(op, 17, operands, attributes, 1, frozenset((1, 2, 3, 4)))


@describe_alone(*_named("QLinearConcat", "QLinearWhere"))
def several(draw: Draw, op: str) -> OperatorCase:
    """Draw a case of several operands with separate scales."""
    kind, shape = draw.either("uint8", "int8"), (draw.size(), draw.size(), draw.size())
    if op.endswith("Where"):
        operands: list[Array | None] = [draw.array(shape, "bool")]
        for _ in range(2):
            operands += [_codes(draw, shape, kind), _scale(draw), _point(draw, kind)]
        return OperatorCase(op, 17, (*operands, _scale(draw), _point(draw, kind)), static=frozenset((2, 3, 5, 6, 7, 8)))
    axis = draw.integer(0, 2)
    operands = [_scale(draw), _point(draw, kind)]
    static = {0, 1}
    for number in range(draw.integer(1, 3)):
        part = tuple(draw.size() if d == axis else n for d, n in enumerate(shape))
        operands += [_codes(draw, part, kind), _scale(draw), _point(draw, kind)]
        static |= {3 + 3 * number, 4 + 3 * number}
    return OperatorCase(op, 17, tuple(operands), {"axis": draw.either(axis, axis - 3)}, 1, frozenset(static))


@describe_alone(*_named("QuantizeLinear", "DequantizeLinear"))
def linear(draw: Draw, op: str) -> OperatorCase:
    """Draw a case with a scale for the tensor or along an axis."""
    kind, shape = draw.either("uint8", "int8", "uint16", "int16"), (draw.size(), draw.size(), draw.size())
    axis = draw.either(None, 0, 2)
    whole = draw.chance()
    scales: tuple[int, ...] = () if whole else (shape[1 if axis is None else axis],)
    scale = draw.array(scales, low=0.1, high=0.9)
    zero = draw.array(scales, kind, low=0, high=9)
    x = draw.array(shape, low=-40, high=40) if op.endswith(".QuantizeLinear") else draw.array(shape, kind, 0.2)
    return OperatorCase(op, 17, (x, scale, zero), {"axis": axis})


@describe_alone(*_named("NhwcMaxPool", "QLinearConv"))
def images(draw: Draw, op: str) -> OperatorCase:
    """Draw a case of images with channels last or first."""
    kind, batch, channels, source = (
        draw.either("uint8", "int8"),
        draw.size(1, 2),
        draw.size(1, 4),
        (draw.size(4, 7), draw.size(4, 7)),
    )
    attributes: dict[str, Any] = {
        "kernel_shape": [2, 3],
        "strides": draw.either(None, [2, 1]),
        "pads": draw.either(None, [1, 0, 0, 1]),
    }
    if op.endswith("NhwcMaxPool"):
        attributes["dilations"] = draw.either(None, [2, 1])
        return OperatorCase(op, 17, (_codes(draw, (batch, *source, channels), kind),), attributes)
    last, features = draw.chance(), draw.size(1, 4)
    weight = draw.either("int8", kind)
    shape = (batch, *source, channels) if last else (batch, channels, *source)
    each = draw.chance()
    scales = np.asarray(2.0 ** draw.array((features,) if each else (), "int32", low=-6, high=-4), np.float32)
    points = draw.array((features,) if each else (), weight, low=0, high=0)
    operands = (_codes(draw, shape, kind), _scale(draw), _point(draw, kind), _weights(draw, (features, channels, 2, 3), weight))
    bias = draw.array((features,), "int32", low=-90, high=90) if draw.chance() else None
    attributes |= {"channels_last": int(last)}
    static = frozenset((1, 2, 3, 4, 5, 6, 7, 8))
    return OperatorCase(
        op, 17, (*operands, scales, points, np.asarray(1.0, np.float32), _point(draw, kind), bias), attributes, 1, static
    )


@describe_alone(*_named("DynamicQuantizeMatMul", "MatMulIntegerToFloat", "QGemm"))
def products(draw: Draw, op: str) -> OperatorCase:
    """Draw a case of integer products."""
    m, k, n, kind, weight = (
        draw.size(1, 5),
        draw.size(1, 9),
        draw.size(1, 6),
        draw.either("uint8", "int8"),
        draw.either("uint8", "int8"),
    )
    each = draw.chance()
    scales, points = (
        draw.array((n,) if each else (1,), low=0.01, high=0.1),
        draw.array((n,) if each else (1,), weight, low=0, high=9),
    )
    bias = draw.array((n,)) if draw.chance() else None
    if op.endswith("DynamicQuantizeMatMul"):
        x = draw.array((*draw.shape(0, 1), m, k))
        return OperatorCase(
            op,
            17,
            (x, _weights(draw, (k, n), weight), scales, points if draw.chance() else None, bias),
            static=frozenset((1, 2, 3)),
        )
    if op.endswith("MatMulIntegerToFloat"):
        if kind == "int8":
            weight = "int8"
            points = points.astype(np.int8)
        operands = (_codes(draw, (m, k), kind), _weights(draw, (k, n), weight), np.asarray(0.05, np.float32), scales)
        return OperatorCase(op, 17, (*operands, _point(draw, kind), points, bias), static=frozenset((1, 3, 5)))
    flags: dict[str, Any] = {"transA": draw.either(None, 1), "transB": draw.either(None, 1), "alpha": draw.either(None, 0.5)}
    a, w = (k, m) if flags["transA"] else (m, k), (n, k) if flags["transB"] else (k, n)
    if kind == "int8":
        weight, points = "int8", points.astype(np.int8)
    scales = scales if each else scales.reshape(())
    points = points if each else points.reshape(())
    c = draw.array(draw.either((n,), (1, n), (m, n)), "int32", low=-90, high=90) if draw.chance() else None
    sides = (_codes(draw, a, kind), _scale(draw), _point(draw, kind), _weights(draw, w, weight), scales, points, c)
    return OperatorCase(op, 17, sides, flags, 1, frozenset((3, 4, 5)))


@describe_alone(*_named("QAttention"))
def attention(draw: Draw, op: str) -> OperatorCase:
    """Draw a case with projections of integers."""
    batch, length, heads, width, rows = draw.size(1, 2), draw.size(1, 5), draw.size(1, 3), draw.either(2, 4), draw.either(4, 6)
    hidden, past = heads * width, draw.either(0, 0, 2)
    kind = "uint8"  # ONNX Runtime has CPU kernels for this type only
    weight = draw.either("uint8", "int8")
    mask = draw.array((batch, past + length), "int32", low=1, high=1) if draw.chance() else None
    if mask is not None and length > 1:
        mask[:, -1] = 0
    operands = (
        _codes(draw, (batch, length, rows), kind),
        _weights(draw, (rows, 3 * hidden), weight),
        draw.array((3 * hidden,)),
        np.asarray(0.02, np.float32),
        np.asarray(0.01, np.float32),
        mask,
        _point(draw, kind),
        _point(draw, weight),
        draw.array((2, batch, heads, past, width)) if past else None,
    )
    attributes = {"num_heads": heads, "unidirectional": draw.either(None, 0, 1)}
    return OperatorCase(op, 17, operands, attributes, 2 if past else 1, frozenset((1,)))


@describe_alone(*_named("QEmbedLayerNormalization"))
def embeddings(draw: Draw, op: str) -> OperatorCase:
    """Draw a case of embeddings with integer tables."""
    batch, length, width, words, kind = draw.size(1, 3), draw.size(), draw.either(4, 8), 11, draw.either("uint8", "int8")
    ids, segments = (batch, length), draw.chance()
    tables = [_codes(draw, (n, width), kind) for n in (words, 8, 2)] + [_codes(draw, (width,), kind) for _ in range(2)]
    scales = [np.asarray(s, np.float32) for s in (0.02, 0.03, 0.04, 0.01, 0.01)]
    points = [_point(draw, kind) for _ in range(5)]
    lists: list[list[Array | None]] = [[*tables], [*scales], [*points]]
    for items in lists:
        items[2] = items[2] if segments else None
    mask = draw.array(ids, "int32", low=0, high=1) if draw.chance() else None
    first = (draw.array(ids, "int32", low=0, high=words - 1), draw.array(ids, "int32", low=0, high=1) if segments else None)
    return OperatorCase(op, 17, (*first, *lists[0], mask, *lists[1], *lists[2]), {"epsilon": draw.either(None, 1e-5)}, 2)


@describe_alone("com.microsoft.DynamicQuantizeLSTM")
def quantised_lstm(draw: Draw, op: str) -> OperatorCase:
    """Draw a layer of 8-bit products."""
    direction = draw.either("forward", "reverse", "bidirectional")
    many = 2 if direction == "bidirectional" else 1
    steps, batch, inputs, hidden = draw.size(1, 4), draw.size(1, 3), draw.size(1, 5), draw.size(1, 6)
    kind, wide = draw.either("uint8", "int8"), (many, 4 * hidden) if draw.chance() else (many,)
    zero = draw.integer(100, 150) if kind == "uint8" else 0
    point = np.full(wide, zero, kind)
    operands: list[Any] = [
        draw.array((steps, batch, inputs), low=-2, high=2),
        *(_weights(draw, (many, n, 4 * hidden), kind) for n in (inputs, hidden)),
        draw.array((many, 8 * hidden), low=-1, high=1) if draw.chance() else None,
        np.array(draw.ints(batch, 0 if draw.chance(0.2) else 1, steps), np.int32) if draw.chance(0.4) else None,
        *(draw.array((many, batch, hidden), low=-1, high=1) if draw.chance(0.4) else None for _ in range(2)),
        draw.array((many, 3 * hidden), low=-1, high=1) if draw.chance(0.3) else None,
        *(a for _ in range(2) for a in (draw.array(wide, low=0.002, high=0.01), point)),
    ]
    attributes: dict[str, Any] = {"hidden_size": hidden, "direction": direction}
    attributes |= {"input_forget": draw.either(None, None, 1), "clip": draw.either(None, None, 0.5, 2.0)}
    if draw.chance(0.4):
        attributes |= activations(draw, "LSTM", many)
    return OperatorCase(op, 17, tuple(operands), attributes, 3, frozenset((1, 2, 3, 7, 8, 9, 10, 11)))
