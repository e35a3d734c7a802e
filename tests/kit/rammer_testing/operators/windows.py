"""Convolutions, pooling and other sliding windows: every attribute, including windows that fit nowhere."""

from __future__ import annotations

from typing import Any

import numpy as np

from rammer_testing.operators.case import OperandDraw, OperatorCase, family

_PADS = ("NOTSET", "NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID")


def _geometry(draw: OperandDraw, rank: int, kernel: list[int], dilated: bool = True) -> dict[str, Any]:
    """Return strides, dilations, and pads or auto_pad; each is often omitted."""
    result: dict[str, Any] = {}
    if draw.chance(0.7):
        result["strides"] = draw.ints(rank, 1, 3)
    if dilated and draw.chance(0.4):
        result["dilations"] = draw.ints(rank, 1, 3)
    mode = draw.pick(*_PADS)
    if mode == "NOTSET":
        if draw.chance(0.7):
            # A pad as wide as the window would leave windows without a single element.
            result["pads"] = [draw.random.randint(0, max(k - 1, 0)) for k in kernel * 2]
    else:
        result["auto_pad"] = mode
    return result


def _image(draw: OperandDraw, rank: int, channels: int, low: int = 1, high: int = 7) -> tuple[int, ...]:
    return (draw.size(1, 2), channels, *[draw.random.randint(low, high) for _ in range(rank)])


@family("MaxPool", "AveragePool", "LpPool")
def pool(draw: OperandDraw, op: str) -> OperatorCase:
    """Draw a case of windows in one to three dimensions, with ceil_mode, dilations and indices if the opset has them."""
    opset = draw.opset(op)
    rank = draw.pick(1, 2, 2, 3)
    kernel = draw.ints(rank, 1, 4)
    dilated = opset >= {"MaxPool": 10, "AveragePool": 19, "LpPool": 18}[op]
    attributes = {"kernel_shape": kernel, **_geometry(draw, rank, kernel, dilated)}
    if opset >= {"MaxPool": 10, "AveragePool": 10, "LpPool": 18}[op] and draw.chance(0.4):
        attributes["ceil_mode"] = 1
    if op == "MaxPool" and "dilations" in attributes:
        attributes.pop("pads", None)  # the maximum of a window on padding alone is undefined
    outputs = 1
    if op == "AveragePool" and draw.chance(0.4):
        attributes["count_include_pad"] = 1
    if op == "LpPool":
        attributes["p"] = draw.pick(1, 2, 3)
    if op == "MaxPool" and opset >= 8 and draw.chance(0.3):
        outputs = 2
        attributes["storage_order"] = draw.pick(0, 0, 1)
    dtype = draw.dtype(op, opset)
    x = draw.array(_image(draw, rank, draw.size(1, 3)), dtype)
    return OperatorCase(op, opset, (x,), attributes, outputs)


@family("GlobalMaxPool", "GlobalAveragePool", "GlobalLpPool")
def global_pool(draw: OperandDraw, op: str) -> OperatorCase:
    """Draw a case of global pooling."""
    opset = draw.opset(op)
    attributes = {"p": draw.pick(1, 2, 3)} if op == "GlobalLpPool" else {}
    return OperatorCase(
        op, opset, (draw.array(_image(draw, draw.pick(1, 2, 3), draw.size()), draw.dtype(op, opset)),), attributes
    )


@family("Conv")
def conv(draw: OperandDraw, op: str) -> OperatorCase:
    """Draw a case with groups, strides, dilations and any padding, including kernels larger than the image."""
    opset, rank = draw.opset(op), draw.pick(1, 2, 2, 3)
    group, per_group, features = draw.pick(1, 1, 2, 3), draw.size(1, 3), draw.size(1, 3)
    kernel = draw.ints(rank, 1, 4)
    dtype = draw.dtype(op, opset)
    x = draw.array(_image(draw, rank, group * per_group), dtype)
    w = draw.array((group * features, per_group, *kernel), dtype)
    bias = draw.array((group * features,), dtype) if draw.chance() else None
    attributes = {"group": group, "kernel_shape": draw.pick(None, kernel), **_geometry(draw, rank, kernel)}
    return OperatorCase(op, opset, (x, w, bias), attributes, static=frozenset(draw.pick((), (1, 2))))


@family("ConvTranspose")
def conv_transpose(draw: OperandDraw, op: str) -> OperatorCase:
    """Draw a transposed convolution, optionally with output_padding or output_shape."""
    opset, rank = draw.opset(op), draw.pick(1, 2, 2, 3)
    group, per_group, features = draw.pick(1, 1, 2), draw.size(1, 2), draw.size(1, 3)
    kernel = draw.ints(rank, 1, 4)
    dtype = draw.dtype(op, opset)
    source = [draw.random.randint(1, 5) for _ in range(rank)]
    x = draw.array((draw.size(1, 2), group * per_group, *source), dtype)
    w = draw.array((group * per_group, features, *kernel), dtype)
    bias = draw.array((group * features,), dtype) if draw.chance() else None
    attributes = {"group": group, "kernel_shape": draw.pick(None, kernel), **_geometry(draw, rank, kernel)}
    strides, dilations = attributes.get("strides", [1] * rank), attributes.get("dilations", [1] * rank)
    if draw.chance(0.3):
        attributes["output_padding"] = [draw.random.randint(0, max(s, d) - 1) for s, d in zip(strides, dilations, strict=True)]
    if draw.chance(0.25):
        attributes.pop("pads", None)
        attributes["output_shape"] = [n * s + draw.random.randint(0, 2) for n, s in zip(source, strides, strict=True)]
    return OperatorCase(op, opset, (x, w, bias), attributes, static=frozenset(draw.pick((), (1, 2))))


@family("LRN")
def lrn(draw: OperandDraw, op: str) -> OperatorCase:
    """Draw a case with sizes from 1 to more than the number of channels."""
    opset = draw.opset(op)
    attributes = {
        "size": draw.pick(1, 1, 2, 3, 4, 5, 9),
        "alpha": draw.pick(None, 0.5, 1e-4),
        "beta": draw.pick(None, 0.5, 0.75, 1.0),
        "bias": draw.pick(None, 1.0, 2.0),
    }
    x = draw.array(_image(draw, draw.pick(1, 2, 2, 3), draw.size(1, 7)), draw.dtype(op, opset))
    return OperatorCase(op, opset, (x,), attributes)


@family("Resize")
def resize(draw: OperandDraw, op: str) -> OperatorCase:
    """Draw a case of modes, coordinate transformations, scales or sizes, axes, cropping, or policies."""
    opset = draw.opset(op, 10)
    rank = draw.pick(2, 3, 4, 4)
    shape = (*([1, 2][: rank - 2]), *[draw.random.randint(1, 6) for _ in range(min(rank, 2))])
    dtype = draw.dtype(op, opset)
    x = draw.array(shape, dtype)
    if opset < 11:
        scales = np.array([1.0] * (rank - 2) + [draw.pick(0.5, 1.0, 1.5, 2.0, 3.0)] * 2, np.float32)
        return OperatorCase(
            op, opset, (x, scales), {"mode": draw.pick("nearest", "linear") if dtype[0] == "f" else None}, static=frozenset((1,))
        )
    # The rounding of interpolated integers is undefined.
    mode = draw.pick("nearest", "linear", "cubic") if dtype.startswith("float") else "nearest"
    modes = ["half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric", "tf_crop_and_resize"]
    transformation = draw.pick(None, *modes, *(["half_pixel_symmetric"] if opset >= 19 else []))
    attributes: dict[str, Any] = {"mode": mode, "coordinate_transformation_mode": transformation}
    if mode == "nearest":
        attributes["nearest_mode"] = draw.pick(None, "round_prefer_floor", "round_prefer_ceil", "floor", "ceil")
    if mode == "cubic":
        attributes["cubic_coeff_a"] = draw.pick(None, -0.5, -0.75)
    if mode != "nearest" and draw.chance(0.3):
        attributes["exclude_outside"] = 1
    if mode != "nearest" and opset >= 18 and draw.chance(0.3):
        attributes["antialias"] = 1
    axes = list(range(rank))
    if opset >= 18 and draw.chance(0.4):
        axes = draw.random.sample(range(max(rank - 2, 0), rank), draw.random.randint(1, 2))
        attributes["axes"] = [a - rank if draw.chance(0.3) else a for a in axes]
    return _resized(draw, OperatorCase(op, opset, (x,), attributes), axes, shape)


def _resized(draw: OperandDraw, case: OperatorCase, axes: list[int], shape: tuple[int, ...]) -> OperatorCase:
    rank, attributes = len(shape), dict(case.attributes)
    roi = scales = sizes = None
    if attributes["coordinate_transformation_mode"] == "tf_crop_and_resize":
        attributes["extrapolation_value"] = draw.pick(None, 7.0)
        lows = [draw.pick(0.0, 0.25, -0.5) if a >= rank - 2 else 0.0 for a in axes]
        highs = [draw.pick(1.0, 0.75, 1.5) if a >= rank - 2 else 1.0 for a in axes]
        roi = np.array([*lows, *highs], np.float32)
    if draw.chance():
        choice = (0.3, 0.5, 0.6, 0.7, 0.8, 1.0, 1.3, 1.5, 1.7, 2.0, 2.7, 3.0)
        # ONNX Runtime copies if the extent is unchanged, for any factor.
        factors = [
            f if a >= rank - 2 and int(shape[a] * f) != shape[a] else 1.0 for a, f in ((a, draw.pick(*choice)) for a in axes)
        ]
        scales = np.array(factors, np.float32)
    else:
        sizes = np.array([draw.random.randint(1, 9) if a >= rank - 2 else shape[a] for a in axes], np.int64)
        if case.opset >= 18 and len(axes) < rank and draw.chance(0.4):
            attributes["keep_aspect_ratio_policy"] = draw.pick("stretch", "not_larger", "not_smaller")
    if case.opset < 13:
        # These operands became optional later: absent ones were empty.
        roi = np.array([], np.float32) if roi is None else roi
        scales = np.array([], np.float32) if scales is None else scales
    return OperatorCase(case.op, case.opset, (*case.operands, roi, scales, sizes), attributes, static=frozenset((1, 2, 3)))


@family("Upsample")
def upsample(draw: OperandDraw, op: str) -> OperatorCase:
    """Draw a case of the operator that Resize replaced."""
    opset = draw.pick(7, 8, 9)
    rank = draw.pick(2, 3, 4, 4)
    dtype = draw.dtype(op, opset)
    x = draw.array((*([1, 2][: rank - 2]), draw.size(), draw.size()), dtype)
    # ONNX Runtime copies if the extent is unchanged, for any scale.
    scales = [1.0] * (rank - 2) + [draw.pick(1.0, 2.0, 3.0), draw.pick(1.0, 1.5 if x.shape[-1] > 1 else 1.0, 2.0)]
    mode = draw.pick("nearest", "linear") if dtype.startswith("float") else "nearest"
    if opset < 9:
        return OperatorCase(op, opset, (x,), {"mode": mode, "scales": scales})
    return OperatorCase(op, opset, (x, np.array(scales, np.float32)), {"mode": mode}, static=frozenset((1,)))
