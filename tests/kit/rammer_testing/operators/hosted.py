"""Operators without a dedicated lowering: host operators, and operators that ONNX defines as functions."""

from __future__ import annotations

import numpy as np

from rammer_testing.operators.case import OperatorCase
from rammer_testing.operators.draw import Draw
from rammer_testing.operators.registry import describe_alone


@describe_alone("NonZero", "Compress", "Unique")
def selection(draw: Draw, op: str) -> OperatorCase:
    """Draw a case with a value-dependent result shape, from constants only."""
    opset, shape, kind = draw.opset, draw.shape(1, 3), draw.dtype(draw.types(op))
    x = np.round(draw.array(shape, kind, 0.0 if kind[0] == "f" else 0.2, -2, 2)).astype(kind)
    everything = frozenset((0, 1))
    if op == "NonZero":
        return OperatorCase(op, opset, (x,), static=everything)
    axis = draw.either(None, draw.integer(-x.ndim if opset >= 11 else 0, x.ndim - 1))
    if op == "Unique":
        return OperatorCase(op, opset, (x,), {"axis": axis, "sorted": draw.either(None, 0, 1)}, 4, everything)
    extent = x.size if axis is None else x.shape[axis]
    return OperatorCase(op, opset, (x, draw.array((draw.integer(1, extent),), "bool")), {"axis": axis}, static=everything)


@describe_alone("RoiAlign", "MaxRoiPool")
def regions(draw: Draw, op: str) -> OperatorCase:
    """Draw a case of boxes inside and outside the image."""
    opset = draw.opset
    x = draw.array((2, draw.size(1, 2), draw.size(4, 6), draw.size(4, 6)))
    count = draw.size(1, 3)
    corner, size = draw.array((count, 2), low=0, high=2), draw.array((count, 2), low=1, high=4)
    if op == "MaxRoiPool":
        batch = draw.array((count, 1), "int64", low=0, high=1).astype(np.float32)
        rois = np.concatenate([batch, np.round(corner), np.round(corner + size)], axis=1)
        return OperatorCase(op, opset, (x, rois), {"pooled_shape": draw.ints(2, 1, 3), "spatial_scale": draw.either(None, 0.5)})
    attributes = {
        "mode": draw.either(None, "avg", "max"),
        "output_height": draw.size(1, 3),
        "output_width": draw.size(1, 3),
        "sampling_ratio": draw.either(None, 0, 2),
        "spatial_scale": draw.either(None, 0.5),
    }
    if opset >= 16:
        attributes["coordinate_transformation_mode"] = draw.either(None, "half_pixel", "output_half_pixel")
    rois = np.concatenate([corner, corner + size], axis=1)
    return OperatorCase(op, opset, (x, rois, draw.array((count,), "int64", low=0, high=1)), attributes)


@describe_alone("STFT")
def transforms(draw: Draw, op: str) -> OperatorCase:
    """Draw a case of real signals, whole or one-sided."""
    x, frame = draw.array((draw.size(1, 2), 16, 1)), draw.either(4, 8)
    window = draw.array((frame,)) if draw.chance() else None
    length = np.asarray(frame) if window is None or draw.chance() else None
    operands = (x, np.asarray(draw.either(2, 4)), window, length)
    return OperatorCase(op, draw.opset, operands, {"onesided": draw.either(None, 0, 1)}, static=frozenset((1, 2, 3)))


@describe_alone("MelWeightMatrix", "HannWindow", "HammingWindow", "BlackmanWindow")
def generated(draw: Draw, op: str) -> OperatorCase:
    """Draw a case of results generated from scalars."""
    opset = draw.opset
    if op == "MelWeightMatrix":
        values = (
            np.asarray(draw.size(2, 6)),
            np.asarray(draw.either(8, 16)),
            np.asarray(8192),
            np.asarray(draw.either(0.0, 100.0), np.float32),
            np.asarray(4096.0, np.float32),
        )
        return OperatorCase(op, opset, values, static=frozenset(range(5)))
    return OperatorCase(op, opset, (np.asarray(draw.size(3, 9)),), {"periodic": draw.either(None, 0, 1)}, static=frozenset((0,)))


@describe_alone("MaxUnpool")
def max_unpool(draw: Draw, op: str) -> OperatorCase:
    """Draw a case that inverts a pooling without overlaps."""
    opset = draw.opset
    h, w = draw.size(1, 3), draw.size(1, 3)
    x = draw.array((1, 1, h, w))
    places = [(2 * i + draw.either(0, 1)) * 2 * w + 2 * j + draw.either(0, 1) for i in range(h) for j in range(w)]
    return OperatorCase(
        op, opset, (x, np.array(places, np.int64).reshape(1, 1, h, w)), {"kernel_shape": [2, 2], "strides": [2, 2]}
    )


@describe_alone("NonMaxSuppression")
def non_max_suppression(draw: Draw, op: str) -> OperatorCase:
    """Draw a case of both kinds of boxes."""
    opset = draw.opset
    count, classes = draw.size(1, 6), draw.size(1, 2)
    corner = draw.array((1, count, 2), low=0, high=2)
    boxes = np.concatenate([corner, corner + np.abs(draw.array((1, count, 2)))], axis=2)
    operands = (
        boxes,
        draw.array((1, classes, count), low=0, high=1),
        np.asarray(draw.either(0, 1, 3), np.int64),
        np.asarray(draw.either(0.0, 0.3, 0.7), np.float32),
        np.asarray(draw.either(0.0, 0.4), np.float32),
    )
    return OperatorCase(op, opset, operands, {"center_point_box": draw.either(None, 0, 1)}, static=frozenset(range(5)))


@describe_alone("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss")
def losses(draw: Draw, op: str) -> OperatorCase:
    """Draw a case with reductions, weights or an ignored class."""
    opset = draw.opset
    n, c = draw.size(1, 4), draw.size(2, 4)
    extra = draw.shape(0, 2)
    target = draw.array((n, *extra), "int64", low=0, high=c - 1)
    weight = np.abs(draw.array((c,))) + np.float32(0.1) if draw.chance() else None
    attributes = {"reduction": draw.either(None, "mean", "sum", "none"), "ignore_index": draw.either(None, None, 0)}
    return OperatorCase(op, opset, (draw.array((n, c, *extra)), target, weight), attributes)


@describe_alone("CenterCropPad", "AffineGrid")
def grids(draw: Draw, op: str) -> OperatorCase:
    """Draw a case of an operator that ONNX defines as a function."""
    opset = draw.opset
    if op == "AffineGrid":
        count, batch = draw.either(2, 2, 3), draw.size(1, 3)
        size = np.array([batch, 1, *(draw.size(1, 4) for _ in range(count))])
        theta = draw.array((batch, count, count + 1), draw.either("float32", "float32", "float64"))
        return OperatorCase(op, opset, (theta, size), {"align_corners": draw.either(None, 0, 1)}, static=frozenset((1,)))
    shape = draw.shape(1, 3)
    axes = draw.either(None, list(range(len(shape))))
    return OperatorCase(
        op, opset, (draw.array(shape), np.array(draw.ints(len(shape), 1, 6))), {"axes": axes}, static=frozenset((1,))
    )
