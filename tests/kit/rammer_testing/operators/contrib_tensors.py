"""Contrib operators on tensors and images, and the gates and hashes around residual streams."""

from __future__ import annotations

from typing import Any

import numpy as np

from rammer_testing.operators.case import Array, OperatorCase
from rammer_testing.operators.draw import Draw
from rammer_testing.operators.registry import describe_alone

_DOMAIN = "com.microsoft"


@describe_alone(*(f"{_DOMAIN}.{op}" for op in ("GatedAdd", "ScaledSiLU", "BranchwiseRMSNorm")))
def gates(draw: Draw, op: str) -> OperatorCase:
    """Draw a case of rows with gates, scales of other types, and branches interleaved or in a separate dimension."""
    kind, shape = draw.either("float32", "float16"), (*draw.shape(1, 2), draw.size(1, 6))
    x = draw.array(shape, kind)
    if op.endswith("GatedAdd"):
        return OperatorCase(op, 21, (x, draw.array(shape, kind), draw.array((*shape[:-1], 1), kind)))
    other = draw.either(kind, "float32", "float16")
    if op.endswith("ScaledSiLU"):
        scale = draw.array((), other) if draw.chance() else None
        return OperatorCase(op, 21, (x, scale), {"alpha": draw.either(None, 1.702)})
    branches, flat = draw.size(1, 4), draw.chance()
    x = draw.array((*shape[:-1], branches * shape[-1]) if flat else (*shape[:-1], branches, shape[-1]), kind)
    scales = draw.either((shape[-1],), (branches, shape[-1]), (branches * shape[-1],))
    attributes = {"num_branches": branches if flat else draw.either(None, 0), "epsilon": draw.either(None, 1e-2)}
    return OperatorCase(op, 21, (x, draw.array(scales, other) if draw.chance(0.7) else None), attributes)


@describe_alone(*(f"{_DOMAIN}.HyperConnection{part}Mix" for part in ("Pre", "Post")))
def mixes(draw: Draw, op: str) -> OperatorCase:
    """Draw a case with gates for branches or for each of their columns."""
    kind, lead, branches, columns = draw.either("float32", "float16"), draw.shape(1, 2), draw.size(1, 4), draw.size(1, 6)
    other, flat = draw.either(kind, "float32", "float16"), draw.chance()
    x = draw.array((*lead, branches * columns) if flat else (*lead, branches, columns), kind)
    count = branches if flat else draw.either(None, 0)
    gates: tuple[tuple[int, ...], ...] = ((branches,), (branches, 1), (branches, columns))
    if op.endswith("PreMix"):
        gate = (*lead, *draw.either(*gates, *([(branches * columns,)] if flat else [])))
        return OperatorCase(
            op, 21, (x, draw.array(gate, other)), {"num_branches": count, "reduction_scale": draw.either(None, 0.5)}
        )
    mix = draw.array((*lead, branches, branches), other) if draw.chance() else None
    operands = (x, draw.array((*lead, columns), kind), draw.array((*lead, *draw.either(*gates)), other), mix)
    return OperatorCase(op, 21, operands, {"num_branches": count})


@describe_alone(f"{_DOMAIN}.EngramGate")
def engram_gates(draw: Draw, op: str) -> OperatorCase:
    """Draw a case with or without the normalised result."""
    kind, batch, length, branches, columns = (
        draw.either("float32", "float16"),
        draw.size(1, 2),
        draw.size(),
        draw.size(),
        draw.size(),
    )
    wide, scale, normed = (batch, length, branches, columns), (branches, columns), draw.chance()
    operands = (
        draw.array(wide, kind),
        draw.array(wide, kind),
        draw.array((batch, length, columns), kind),
        draw.array(scale, kind),
        draw.array(scale, kind),
        draw.array(scale, kind) if normed else None,
    )
    return OperatorCase(op, 21, operands, {"epsilon": draw.either(None, 1e-3)}, 2 if normed else 1)


@describe_alone(*(f"{_DOMAIN}.{op}" for op in ("CDist", "MatMulInteger16", "UnfoldTensor", "SampleOp", "NGramRepeatBlock")))
def plain(draw: Draw, op: str) -> OperatorCase:
    """Draw a case of one or two tensors."""
    rows, columns, others = (draw.size(1, 6) for _ in range(3))
    if op.endswith("CDist"):
        kind = draw.either("float32", "float64")
        operands = (draw.array((rows, columns), kind), draw.array((others, columns), kind))
        return OperatorCase(op, 17, operands, {"metric": draw.either("euclidean", "sqeuclidean")})
    if op.endswith("Integer16"):
        lead = draw.shape(0, 2)
        a, b = (*draw.either(lead, ()), rows, columns), (*lead, columns, others)
        return OperatorCase(op, 17, (draw.array(a, "int16", 0.2, -99, 99), draw.array(b, "int16", 0.0, -99, 99)))
    if op.endswith("UnfoldTensor"):
        shape = draw.shape(1, 3)
        axis = draw.integer(0, len(shape) - 1)
        attributes = {"dim": draw.either(axis, axis - len(shape)), "size": draw.integer(1, shape[axis])}
        x = draw.array(shape, draw.either("float32", "int64", "float64"))
        return OperatorCase(op, 17, (x,), {**attributes, "step": draw.either(None, 1, 2, 3)})
    if op.endswith("SampleOp"):
        return OperatorCase(op, 17, (draw.array(draw.shape(0, 3)),))
    ids = draw.array((rows, draw.size(1, 9)), "int64", low=0, high=2)
    return OperatorCase(op, 17, (ids, draw.array((rows, 4))), {"ngram_size": draw.either(1, 2, 3)})


@describe_alone(f"{_DOMAIN}.WordConvEmbedding")
def word_embeddings(draw: Draw, op: str) -> OperatorCase:
    """Draw a case of words shorter than a window, or with gaps. ONNX Runtime reads uninitialised memory for empty words."""
    count, length, width, filters = draw.size(1, 4), draw.size(1, 7), draw.size(1, 4), draw.size(1, 4)
    window = draw.integer(1, length)
    ids = draw.array((count, length), "int32", low=0, high=5)
    ids = (
        ids if draw.chance(0.3) else np.where(np.arange(length) < draw.array((count, 1), "int32", low=0, high=length), ids + 1, 0)
    )
    ids[:, 0] = np.maximum(ids[:, 0], 1)
    operands = (
        ids.astype(np.int32),
        draw.array((filters, 1, window, width)),
        draw.array((filters,)),
        draw.array((8, width)),
    )
    attributes = {"embedding_size": draw.either(None, filters), "conv_window_size": draw.either(None, window)}
    return OperatorCase(op, 17, operands, {**attributes, "char_embedding_size": draw.either(None, width)})


@describe_alone(f"{_DOMAIN}.NGramHashMapping", f"{_DOMAIN}.VarlenNGramHashMapping")
def neighbour_hashes(draw: Draw, op: str) -> OperatorCase:
    """Draw a case with or without a past, sequence ends, segments and offsets; sums wrap around."""
    size, heads, kind, varlen = draw.either(2, 3, 4), draw.size(1, 3), draw.either("int32", "int64"), "Varlen" in op
    batch, before, total = draw.size(1, 3), size - 1, (size - 1) * heads
    lengths = [draw.size(1, 5) for _ in range(batch)] if varlen else [draw.size(1, 5)] * batch
    shape = (sum(lengths),) if varlen else (batch, lengths[0])
    segmented, past, end = draw.chance(), draw.chance(), draw.chance()
    tail: list[Array | None] = [
        draw.array((batch, before), kind, low=0, high=4) if past else None,
        draw.array((total,), kind, low=0, high=9) if draw.chance() else None,
        np.asarray(draw.either(0, 2), kind) if end else None,
        draw.array(shape, "int32", low=0, high=1) if segmented else None,
    ]
    operands: list[Array | None] = [
        draw.array(shape, kind, low=0, high=4),
        draw.array((size + draw.either(0, 1),), kind, 0.5, -99, 99),
        draw.array((total,), kind, low=1, high=97),
    ]
    attributes = {
        "max_ngram_size": size,
        "n_head_per_ngram": heads,
        "pad_id": draw.either(0, 3),
        "reset_on_eos": draw.either(None, 0, 1),
    }
    if not varlen:
        return OperatorCase(op, 21, (*operands, *tail), attributes, draw.either(1, 2))
    operands.append(np.cumsum([0, *lengths]).astype(np.int32))
    tail.append(draw.array((batch, before), "int32", low=0, high=1) if segmented and past and draw.chance() else None)
    return OperatorCase(op, 21, (*operands, *tail), attributes, 3 if segmented else draw.either(1, 2))


@describe_alone(
    f"{_DOMAIN}.GridSample", f"{_DOMAIN}.ConvTransposeWithDynamicPads", f"{_DOMAIN}.MaxpoolWithMask", f"{_DOMAIN}.CropAndResize"
)
def images(draw: Draw, op: str) -> OperatorCase:
    """Draw a case of images that are sampled, cropped, spread or pooled."""
    batch, channels, height, width = draw.size(1, 2), draw.size(1, 3), draw.size(2, 6), draw.size(2, 6)
    x = draw.array((batch, channels, height, width))
    if op.endswith("GridSample"):
        attributes: dict[str, Any] = {
            "mode": draw.either(None, "bilinear", "bicubic"),
            "padding_mode": draw.either(None, "zeros", "border", "reflection"),
            "align_corners": draw.either(None, 0, 1),
        }
        grid = draw.array((batch, draw.size(), draw.size(), 2), low=-1.4, high=1.4)
        return OperatorCase(op, 17, (x, grid), attributes, made=("float32",))
    if op.endswith("Pads"):
        group, features, window = draw.either(1, channels), draw.size(1, 3), (draw.size(1, 3), draw.size(1, 3))
        weights = draw.array((channels, features, *window))
        pads = draw.array((4,), "int64", low=0, high=1) if draw.chance(0.95) else None
        bias = draw.array((features * group,)) if draw.chance() else None
        attributes = {"group": group, "strides": draw.either(None, [2, 1]), "dilations": draw.either(None, [1, 2])}
        return OperatorCase(op, 17, (x, weights, pads, bias), attributes, static=frozenset({2}))
    if op.endswith("Mask"):
        rank = draw.either(1, 2, 3)
        shape = (batch, channels, *(draw.size(2, 5) for _ in range(rank)))
        mask = np.where(draw.array((*draw.either((1, 1), shape[:2]), *shape[2:]), "int32", low=0, high=5) > 0, 1, 0).astype(
            np.int32
        )
        attributes = {
            "kernel_shape": draw.ints(rank, 1, 2),
            "strides": draw.either(None, draw.ints(rank, 1, 2)),
            "pads": draw.either(None, draw.ints(2 * rank, 0, 1)),
        }
        attributes["pads"] = attributes["pads"] if min(attributes["kernel_shape"]) > 1 else None
        return OperatorCase(op, 17, (draw.array(shape), mask), attributes)
    boxes = draw.size(1, 4)
    corners = draw.array((boxes, 4), low=draw.either(0, -0.2), high=draw.either(1, 1.2))
    size = np.array([draw.size(1, 5), draw.size(1, 5)], np.int32)
    attributes = {"mode": draw.either(None, "bilinear", "nearest"), "extrapolation_value": draw.either(None, 7.0)}
    operands = (x, corners, draw.array((boxes,), "int32", low=0, high=batch - 1), size)
    return OperatorCase(op, 17, operands, attributes, static=frozenset({3}))
