"""Operators without a dedicated lowering: host operators, and operators that ONNX defines as functions."""

from __future__ import annotations

from typing import Any

import numpy as np

from rammer_testing.operators.case import OperandDraw, OperatorCase, family


@family("NonZero", "Det", "Compress", "Unique")
def selection(draw: OperandDraw, op: str) -> OperatorCase:
    """Draw a case with a value-dependent result shape, from constants only."""
    opset = draw.opset(op)
    if op == "Det":
        n = draw.size(1, 4)
        return OperatorCase(op, opset, (draw.array((*draw.shape(0, 2), n, n), draw.pick("float32", "float64")),))
    shape = draw.shape(1, 3)
    x = np.round(draw.array(shape, draw.dtype(op, opset), low=-2, high=2)).astype(str(draw.dtype(op, opset)))
    everything = frozenset((0, 1))
    if op == "NonZero":
        return OperatorCase(op, opset, (x,), static=everything)
    axis = draw.pick(None, draw.random.randint(-x.ndim if opset >= 11 else 0, x.ndim - 1))
    if op == "Unique":
        return OperatorCase(op, opset, (x,), {"axis": axis, "sorted": draw.pick(None, 0, 1)}, 4, everything)
    extent = x.size if axis is None else x.shape[axis]
    return OperatorCase(op, opset, (x, draw.array((draw.random.randint(1, extent),), "bool")), {"axis": axis}, static=everything)


@family("QuantizeLinear", "DequantizeLinear")
def quantization(draw: OperandDraw, op: str) -> OperatorCase:
    """Draw a case per tensor, per axis or by blocks."""
    opset = draw.opset(op, 10)
    shape = draw.shape(1, 4)
    axis = draw.random.randrange(len(shape))
    kind = draw.pick("uint8", "int8", *(["int16", "uint16"] if opset >= 21 else []))
    whole = opset < 13 or draw.chance()
    scales: tuple[int, ...] = () if whole else (shape[axis],)
    attributes: dict[str, Any] = {"axis": axis} if opset >= 13 and not whole else {}
    if opset >= 21 and not whole and draw.chance(0.3):
        block = draw.random.randint(1, shape[axis])
        scales = tuple(-(-n // block) if d == axis else n for d, n in enumerate(shape))
        attributes["block_size"] = block
    scale = np.asarray(np.abs(draw.array(scales, "float32")) + 0.0517, np.float32)
    zero = draw.array(scales, kind, low=-9, high=9) if draw.chance(0.7) else None
    if op == "QuantizeLinear":
        x = draw.array(shape, "float32", low=-40, high=40)
        return OperatorCase(op, opset, (x, scale, zero), attributes)
    return OperatorCase(op, opset, (draw.array(shape, kind if zero is not None else "uint8", 0.2), scale, zero), attributes)


@family("DynamicQuantizeLinear")
def dynamic_quantization(draw: OperandDraw, op: str) -> OperatorCase:
    """Draw a case of three results."""
    return OperatorCase(op, draw.opset(op), (draw.array(draw.shape(1, 3), low=draw.pick(-3, 0, 1)),), {}, 3)


@family("MatMulInteger", "QLinearMatMul")
def integer_product(draw: OperandDraw, op: str) -> OperatorCase:
    """Draw a case with zero points of tensors."""
    opset = draw.opset(op)
    m, k, n = (draw.size() for _ in range(3))
    one, two = draw.pick("uint8", "int8"), draw.pick("uint8", "int8")
    a, b = draw.array((m, k), one, 0.2, -9, 9), draw.array((k, n), two, 0.2, -9, 9)
    za, zb = (draw.array((), t, low=-9, high=9) for t in (one, two))
    if op == "MatMulInteger":
        return OperatorCase(op, opset, (a, b, *draw.pick((za, zb), (None, None), (za, None))))
    scales = [np.float32(draw.pick(0.0213, 0.1139, 0.4871)) for _ in range(3)]
    b, zb = b.astype(one), zb.astype(one)
    return OperatorCase(
        op,
        opset,
        (a, np.asarray(scales[0]), za, b, np.asarray(scales[1]), zb, np.asarray(scales[2]), draw.array((), one, low=0, high=9)),
    )


@family("ConvInteger", "QLinearConv")
def integer_convolution(draw: OperandDraw, op: str) -> OperatorCase:
    """Draw a case with the geometry of Conv."""
    opset, group = draw.opset(op), draw.pick(1, 1, 2)
    kernel = draw.ints(2, 1, 3)
    x = draw.array((1, group * 2, draw.size(3, 6), draw.size(3, 6)), "uint8", low=0, high=20)
    w = draw.array((group * 2, 2, *kernel), draw.pick("uint8", "int8") if op == "QLinearConv" else "uint8", low=-5, high=9)
    attributes = {"group": group, "strides": draw.pick(None, [1, 2]), "pads": draw.pick(None, [0, 1, 1, 0])}
    zx, zw = np.asarray(draw.pick(0, 3), x.dtype), np.asarray(draw.pick(0, 2), w.dtype)
    if op == "ConvInteger":
        return OperatorCase(op, opset, (x, w, *draw.pick((None, None), (zx, None), (zx, zw))), attributes)
    bias = draw.array((group * 2,), "int32", low=-50, high=50) if draw.chance() else None
    scale = [np.asarray(draw.pick(0.1139, 0.4871), np.float32) for _ in range(3)]
    return OperatorCase(op, opset, (x, scale[0], zx, w, scale[1], zw, scale[2], np.asarray(7, np.uint8), bias), attributes)


@family("Col2Im")
def col2im(draw: OperandDraw, op: str) -> OperatorCase:
    """Draw a case of blocks added into an image."""
    image, block = draw.ints(2, 3, 5), draw.ints(2, 1, 3)
    pads = draw.pick([0, 0, 0, 0], [1, 0, 0, 1])
    strides, dilations = draw.pick([1, 1], [2, 1]), [1, 1]
    counts = [(n + pads[d] + pads[2 + d] - b) // s + 1 for d, (n, b, s) in enumerate(zip(image, block, strides, strict=True))]
    x = draw.array((1, 2 * block[0] * block[1], counts[0] * counts[1]))
    return OperatorCase(
        op,
        draw.opset(op),
        (x, np.array(image), np.array(block)),
        {"pads": pads, "strides": strides, "dilations": dilations},
        static=frozenset((1, 2)),
    )


@family("GridSample")
def grid_sample(draw: OperandDraw, op: str) -> OperatorCase:
    """Draw a case of any mode and padding, with sample positions inside and outside the image."""
    opset = draw.opset(op)
    new = opset >= 20
    mode = draw.pick("linear" if new else "bilinear", "nearest", "cubic" if new else "bicubic")
    x = draw.array((draw.size(1, 2), draw.size(1, 2), draw.size(2, 5), draw.size(2, 5)))
    grid = draw.array((x.shape[0], draw.size(1, 4), draw.size(1, 4), 2), low=-1.4, high=1.4)
    return OperatorCase(
        op,
        opset,
        (x, grid),
        {"mode": mode, "padding_mode": draw.pick(None, "zeros", "border", "reflection"), "align_corners": draw.pick(None, 0, 1)},
    )


@family("DeformConv")
def deform_conv(draw: OperandDraw, op: str) -> OperatorCase:
    """Draw a case of taps moved inside and outside the image."""
    group, offsets = draw.pick(1, 1, 2), draw.pick(1, 2)
    x, kernel = draw.array((draw.size(1, 2), 4, draw.size(4, 6), draw.size(4, 6))), draw.ints(2, 1, 3)
    pads, strides = draw.ints(4, 0, 2), draw.ints(2, 1, 2)
    outs = [(x.shape[2 + d] + pads[d] + pads[2 + d] - k) // strides[d] + 1 for d, k in enumerate(kernel)]
    taps = offsets * kernel[0] * kernel[1]
    offset = draw.array((x.shape[0], 2 * taps, *outs), low=-2, high=2)
    bias, mask = draw.pick(None, draw.array((4,))), draw.pick(None, draw.array((x.shape[0], taps, *outs), low=0, high=1))
    given = {"group": group, "offset_group": offsets, "pads": pads, "strides": strides}
    return OperatorCase(op, draw.opset(op), (x, draw.array((4, 4 // group, *kernel)), offset, bias, mask), given)


@family("RoiAlign", "MaxRoiPool")
def regions(draw: OperandDraw, op: str) -> OperatorCase:
    """Draw a case of boxes inside and outside the image."""
    opset = draw.opset(op)
    x = draw.array((2, draw.size(1, 2), draw.size(4, 6), draw.size(4, 6)))
    count = draw.size(1, 3)
    corner, size = draw.array((count, 2), low=0, high=2), draw.array((count, 2), low=1, high=4)
    if op == "MaxRoiPool":
        batch = draw.array((count, 1), "int64", low=0, high=1).astype(np.float32)
        rois = np.concatenate([batch, np.round(corner), np.round(corner + size)], axis=1)
        return OperatorCase(op, opset, (x, rois), {"pooled_shape": draw.ints(2, 1, 3), "spatial_scale": draw.pick(None, 0.5)})
    attributes = {
        "mode": draw.pick(None, "avg", "max"),
        "output_height": draw.size(1, 3),
        "output_width": draw.size(1, 3),
        "sampling_ratio": draw.pick(None, 0, 2),
        "spatial_scale": draw.pick(None, 0.5),
    }
    if opset >= 16:
        attributes["coordinate_transformation_mode"] = draw.pick(None, "half_pixel", "output_half_pixel")
    rois = np.concatenate([corner, corner + size], axis=1)
    return OperatorCase(op, opset, (x, rois, draw.array((count,), "int64", low=0, high=1)), attributes)


@family("DFT", "STFT")
def transforms(draw: OperandDraw, op: str) -> OperatorCase:
    """Draw a case of real or complex signals, inverse or one-sided."""
    opset = draw.opset(op)
    if op == "STFT":
        x, frame = draw.array((draw.size(1, 2), 16, 1)), draw.pick(4, 8)
        window = draw.array((frame,)) if draw.chance() else None
        length = np.asarray(frame) if window is None or draw.chance() else None
        return OperatorCase(
            op,
            opset,
            (x, np.asarray(draw.pick(2, 4)), window, length),
            {"onesided": draw.pick(None, 0, 1)},
            static=frozenset((1, 2, 3)),
        )
    inverse, parts = draw.pick(None, 1), draw.pick(1, 2)
    parts = 2 if inverse else parts
    one = draw.pick(None, 1) if parts == 1 and not inverse else None
    x = draw.array((draw.size(1, 2), draw.size(2, 6), draw.size(2, 5), parts))
    length = draw.pick(None, np.asarray(draw.size(2, 7)))
    attributes: dict[str, Any] = {"inverse": inverse, "onesided": one}
    if opset < 20:
        return OperatorCase(op, opset, (x, length), {**attributes, "axis": draw.pick(1, 2)}, static=frozenset((1,)))
    return OperatorCase(
        op, opset, (x, length, draw.pick(None, np.asarray(draw.pick(1, 2, -2)))), attributes, static=frozenset((1, 2))
    )


@family("MelWeightMatrix", "HannWindow", "HammingWindow", "BlackmanWindow")
def generated(draw: OperandDraw, op: str) -> OperatorCase:
    """Draw a case of results generated from scalars."""
    opset = draw.opset(op)
    if op == "MelWeightMatrix":
        values = (
            np.asarray(draw.size(2, 6)),
            np.asarray(draw.pick(8, 16)),
            np.asarray(8192),
            np.asarray(draw.pick(0.0, 100.0), np.float32),
            np.asarray(4096.0, np.float32),
        )
        return OperatorCase(op, opset, values, static=frozenset(range(5)))
    return OperatorCase(op, opset, (np.asarray(draw.size(3, 9)),), {"periodic": draw.pick(None, 0, 1)}, static=frozenset((0,)))


@family("MaxUnpool")
def max_unpool(draw: OperandDraw, op: str) -> OperatorCase:
    """Draw a case that inverts a pooling without overlaps."""
    opset = draw.opset(op)
    h, w = draw.size(1, 3), draw.size(1, 3)
    x = draw.array((1, 1, h, w))
    places = [(2 * i + draw.pick(0, 1)) * 2 * w + 2 * j + draw.pick(0, 1) for i in range(h) for j in range(w)]
    return OperatorCase(
        op, opset, (x, np.array(places, np.int64).reshape(1, 1, h, w)), {"kernel_shape": [2, 2], "strides": [2, 2]}
    )


@family("NonMaxSuppression")
def non_max_suppression(draw: OperandDraw, op: str) -> OperatorCase:
    """Draw a case of both kinds of boxes."""
    opset = draw.opset(op)
    count, classes = draw.size(1, 6), draw.size(1, 2)
    corner = draw.array((1, count, 2), low=0, high=2)
    boxes = np.concatenate([corner, corner + np.abs(draw.array((1, count, 2)))], axis=2)
    operands = (
        boxes,
        draw.array((1, classes, count), low=0, high=1),
        np.asarray(draw.pick(0, 1, 3), np.int64),
        np.asarray(draw.pick(0.0, 0.3, 0.7), np.float32),
        np.asarray(draw.pick(0.0, 0.4), np.float32),
    )
    return OperatorCase(op, opset, operands, {"center_point_box": draw.pick(None, 0, 1)}, static=frozenset(range(5)))


@family("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss")
def losses(draw: OperandDraw, op: str) -> OperatorCase:
    """Draw a case with reductions, weights or an ignored class."""
    opset = draw.opset(op)
    n, c = draw.size(1, 4), draw.size(2, 4)
    extra = draw.shape(0, 2)
    target = draw.array((n, *extra), "int64", low=0, high=c - 1)
    weight = np.abs(draw.array((c,))) + np.float32(0.1) if draw.chance() else None
    attributes = {"reduction": draw.pick(None, "mean", "sum", "none"), "ignore_index": draw.pick(None, None, 0)}
    return OperatorCase(op, opset, (draw.array((n, c, *extra)), target, weight), attributes)


@family("CenterCropPad", "AffineGrid")
def grids(draw: OperandDraw, op: str) -> OperatorCase:
    """Draw a case of an operator that ONNX defines as a function."""
    opset = draw.opset(op)
    if op == "AffineGrid":
        count, batch = draw.pick(2, 2, 3), draw.size(1, 3)
        size = np.array([batch, 1, *(draw.size(1, 4) for _ in range(count))])
        theta = draw.array((batch, count, count + 1), draw.pick("float32", "float32", "float64"))
        return OperatorCase(op, opset, (theta, size), {"align_corners": draw.pick(None, 0, 1)}, static=frozenset((1,)))
    shape = draw.shape(1, 3)
    axes = draw.pick(None, list(range(len(shape))))
    return OperatorCase(
        op, opset, (draw.array(shape), np.array(draw.ints(len(shape), 1, 6))), {"axes": axes}, static=frozenset((1,))
    )
