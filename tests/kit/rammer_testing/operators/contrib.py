"""Contrib operators of ONNX Runtime that rammer expands into ONNX: activations, products, convolutions, normalisations."""

from __future__ import annotations

from typing import Any

from rammer_testing.operators.case import Array, OperatorCase
from rammer_testing.operators.draw import Draw
from rammer_testing.operators.registry import describe_alone

_DOMAIN = "com.microsoft"


def _float(draw: Draw) -> str:
    return str(draw.either("float32", "float32", "float16"))


def _node(draw: Draw, op: str, operands: tuple[Array | None, ...], attributes: Any = (), **more: Any) -> OperatorCase:
    return OperatorCase(op, draw.either(13, 17, 21), operands, dict(attributes), **more)


@describe_alone(*(f"{_DOMAIN}.{op}" for op in ("Gelu", "BiasGelu", "FastGelu", "QuickGelu")))
def gelus(draw: Draw, op: str) -> OperatorCase:
    """Draw a case of an activation with a bias along the last axis."""
    shape, kind = (*draw.shape(0, 2), draw.size(1, 9)), "float32" if op.endswith("BiasGelu") else _float(draw)
    if op.endswith(".Gelu"):
        kind = "float32"
    bias = (
        draw.array(shape[-1:], kind, 0.0, -1, 1)
        if op.endswith("BiasGelu") or (op.endswith("FastGelu") and draw.chance())
        else None
    )
    attributes = {"alpha": draw.either(None, 1.0, 1.5)} if op.endswith("QuickGelu") else {}
    return _node(draw, op, (draw.array(shape, kind, 0.0, -1.5, 4), bias), attributes)


@describe_alone(f"{_DOMAIN}.FusedMatMul", f"{_DOMAIN}.TransposeMatMul")
def products(draw: Draw, op: str) -> OperatorCase:
    """Draw a case of two operands with separate batches, transposed in each way."""
    batch, m, k, n = draw.shape(0, 3), draw.size(), draw.size(), draw.size()
    flags: dict[str, Any] = {
        "transA": draw.either(None, 0, 1),
        "transB": draw.either(None, 0, 1),
        "alpha": draw.either(None, 0.5, -2.0),
    }
    sides = [[*batch, k, m] if flags["transA"] else [*batch, m, k], [*batch, n, k] if flags["transB"] else [*batch, k, n]]
    if op.endswith("FusedMatMul") and len(batch) >= 1:
        for side, name in zip(sides, "AB", strict=True):
            if draw.chance(0.4):
                flags[f"transBatch{name}"] = 1
                side[:] = _before(batch, m if name == "A" else k, k if name == "A" else n, bool(flags[f"trans{name}"]))
    return _node(draw, op, tuple(draw.array(tuple(s)) for s in sides), flags)


def _before(batch: tuple[int, ...], rows: int, columns: int, transposed: bool) -> list[int]:
    """Return the shape of an operand that becomes ``[*batch, rows, columns]`` after ``transBatch`` and ``trans``."""
    *outer, last = [*batch, *((columns, rows) if transposed else (rows, columns))]
    *middle, first = outer
    return [first, *middle, last]


@describe_alone(f"{_DOMAIN}.FusedGemm")
def gemms(draw: Draw, op: str) -> OperatorCase:
    """Draw a case with or without an activation."""
    m, k, n = draw.size(), draw.size(), draw.size()
    flags: dict[str, Any] = {"transA": draw.either(None, 1), "transB": draw.either(None, 1)}
    flags |= {
        "alpha": draw.either(None, 0.5),
        "beta": draw.either(None, 2.0),
        "activation": draw.either("Relu", "Tanh", "Sigmoid", "LeakyRelu"),
    }
    if flags["activation"] == "LeakyRelu":
        flags["activation_alpha"] = 0.1
    a, b = (k, m) if flags["transA"] else (m, k), (n, k) if flags["transB"] else (k, n)
    c = draw.array(draw.either((m, n), (n,), (1, n), (m, 1), ())) if draw.chance(0.7) else None
    return _node(draw, op, (draw.array(a), draw.array(b), c), flags)


@describe_alone(f"{_DOMAIN}.FusedConv")
def convolutions(draw: Draw, op: str) -> OperatorCase:
    """Draw a case with bias, residual and activation."""
    group, each, features, kernel = draw.either(1, 1, 2), draw.size(1, 3), draw.size(1, 3), draw.either(1, 2, 3)
    source = (draw.size(3, 7), draw.size(3, 7))
    stride, dilation, pad = draw.either(1, 2), draw.either(1, 1, 2), draw.either(0, 1, 2)
    reach = (kernel - 1) * dilation + 1
    out = tuple((n + 2 * pad - reach) // stride + 1 for n in source)
    x = draw.array((draw.size(1, 2), group * each, *source))
    w = draw.array((group * features, each, kernel, kernel))
    attributes: dict[str, Any] = {"group": group, "strides": [stride] * 2, "dilations": [dilation] * 2, "pads": [pad] * 4}
    name, parameters = draw.either(
        ("Relu", None),
        ("LeakyRelu", [0.1]),
        ("Clip", [-0.5, 1.5]),
        ("Sigmoid", None),
        ("Tanh", None),
        ("HardSigmoid", [0.2, 0.4]),
        (None, None),
    )
    attributes |= {"activation": name, "activation_params": parameters}
    bias = draw.array((group * features,)) if draw.chance(0.7) else None
    whole = min(out) > 0 and name in ("Relu", None)
    z = draw.array((x.shape[0], group * features, *out)) if whole and draw.chance(0.4) else None
    return _node(draw, op, (x, w, bias, z), attributes)


@describe_alone(f"{_DOMAIN}.SkipLayerNormalization", f"{_DOMAIN}.SkipSimplifiedLayerNormalization")
def skips(draw: Draw, op: str) -> OperatorCase:
    """Draw a case with a residual of the same shape or of one batch, and the sum as an additional output."""
    batch, length, width = draw.size(1, 3), draw.size(), draw.either(4, 8, 16)
    kind = _float(draw)
    shape = (batch, length, width)
    skip = draw.either(shape, shape, (1, length, width), (length, width))
    operands: list[Array | None] = [draw.array(shape, kind), draw.array(skip, kind), draw.array((width,), kind)]
    if not op.endswith("SkipSimplifiedLayerNormalization"):
        operands.append(draw.array((width,), kind) if draw.chance(0.7) else None)
    operands.append(draw.array((width,), kind) if draw.chance() else None)
    attributes = {"epsilon": draw.either(None, 1e-5, 1e-3)}
    last = draw.either(1, 4)
    return _node(draw, op, tuple(operands), attributes, outputs=last, absent=frozenset((1, 2) if last == 4 else ()))


@describe_alone(f"{_DOMAIN}.EmbedLayerNormalization")
def embeddings(draw: Draw, op: str) -> OperatorCase:
    """Draw a case of words with or without segments, positions and mask."""
    batch, length, width, words = draw.size(1, 3), draw.size(), draw.either(4, 8), 11
    kind = _float(draw)
    segments = draw.chance()
    ids = (batch, length)
    positions = draw.array(draw.either(ids, (1, length)), "int32", low=0, high=7) if draw.chance(0.4) else None
    mask = draw.array(ids, "int32", low=0, high=1) if draw.chance() else None
    operands = (
        draw.array(ids, "int32", low=0, high=words - 1),
        draw.array(ids, "int32", low=0, high=1) if segments else None,
        draw.array((words, width), kind),
        draw.array((8, width), kind),
        draw.array((2, width), kind) if segments else None,
        draw.array((width,), kind),
        draw.array((width,), kind),
        mask,
        positions,
    )
    attributes = {"epsilon": draw.either(None, 1e-5), "mask_index_type": draw.either(None, 0, 1)}
    return _node(draw, op, operands, attributes, outputs=draw.either(2, 3))


@describe_alone(*(f"{_DOMAIN}.{op}" for op in ("Trilu", "GatherND", "ExpandDims", "Range", "Pad")))
def older(draw: Draw, op: str) -> OperatorCase:
    """Draw a case of an operator that ONNX adopted later."""
    shape, kind = draw.shape(2, 3), draw.either("float32", "float64")
    x = draw.array(shape, kind)
    if op.endswith("Trilu"):
        k = draw.array((), "int64", low=-3, high=3) if draw.chance() else None
        return _node(draw, op, (x, k), {"upper": draw.either(None, 0, 1)}, static=frozenset({1}))
    if op.endswith("GatherND"):
        indices = draw.array((draw.size(), 1), "int64", low=-shape[0], high=shape[0] - 1)
        return _node(draw, op, (x, indices))
    if op.endswith("ExpandDims"):
        return _node(draw, op, (x, draw.array((), "int32", low=-3, high=2)), static=frozenset({1}))
    if op.endswith("Range"):
        ends = [draw.array((), "int64", low=0, high=4), draw.array((), "int64", low=5, high=9)]
        delta = draw.array((), "int64", low=1, high=3) if draw.chance() else None
        return _node(draw, op, (*ends, delta), static=frozenset({0, 1, 2}))
    pads = draw.array(draw.either((2 * len(shape),), (1, 2 * len(shape))), "int64", low=0, high=2)
    mode = draw.either("constant", "edge")
    return _node(
        draw,
        op,
        (x, pads, draw.array((1,), kind) if mode == "constant" and draw.chance() else None),
        {"mode": mode},
        static=frozenset({1}),
    )
