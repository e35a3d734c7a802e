"""Operators that ONNX withdrew before its first release and ONNX Runtime keeps in ONNX's own domain."""

from __future__ import annotations

from rammer.frontend.lower.contrib.function import Declined, FunctionBody, contrib_function


@contrib_function("Affine", "X: T -> Y: T", alpha=1.0, beta=0.0)
def expand_affine(b: FunctionBody) -> str:
    """Expand Affine: ``alpha * X + beta``."""
    return b.Add(b.Mul(b.number(b.attr("alpha")), b.input(0)), b.number(b.attr("beta")))


@contrib_function("Scale", "input: T -> output: T", scale=1.0)
def expand_scale(b: FunctionBody) -> str:
    """Expand Scale: ``scale * input``."""
    return b.Mul(b.number(b.attr("scale")), b.input(0))


def _required_number(b: FunctionBody, name: str) -> str:
    value = b.use.attr(name, None)
    if value is None:
        raise Declined(f"it has no {name}")
    return b.number(value)


@contrib_function("ParametricSoftplus", "X: T -> Y: T", alpha=float | None, beta=float | None)
def parametric_softplus(b: FunctionBody) -> str:
    """Expand ParametricSoftplus: ``alpha * Softplus(beta * X)``."""
    return b.Mul(_required_number(b, "alpha"), b.Softplus(b.Mul(_required_number(b, "beta"), b.input(0))))


@contrib_function("ScaledTanh", "input: T -> output: T", alpha=float | None, beta=float | None)
def scaled_tanh(b: FunctionBody) -> str:
    """Expand ScaledTanh: ``alpha * Tanh(beta * input)``."""
    return b.Mul(_required_number(b, "alpha"), b.Tanh(b.Mul(_required_number(b, "beta"), b.input(0))))


@contrib_function("ImageScaler", "input: T -> output: T", scale=1.0, bias=list[float])
def image_scaler(b: FunctionBody) -> str:
    """Expand ImageScaler: ``scale * input`` and a bias per channel."""
    (_, channels, _, _), bias = b.shape(0, 4), list(b.attr("bias"))
    if len(bias) != channels:
        raise Declined(f"{len(bias)} biases for {channels} channels")
    added = b.cast(b.reshape(b.constant(bias, "float32"), 1, channels, 1, 1), b.dtype())
    return b.Add(b.Mul(b.number(b.attr("scale")), b.input(0)), added)


@contrib_function("Crop", "input: T -> output: T", border=list[int], scale=list[int])
def expand_crop(b: FunctionBody) -> str:
    """Expand Crop: the image without its left, top, right and bottom border, or ``scale`` pixels from the left top corner."""
    (_, _, height, width), border, size = b.shape(0, 4), list(b.attr("border")), list(b.attr("scale"))
    if len(border) != 4 or len(size) not in (0, 2):
        raise Declined(f"border is {border} and scale {size}")
    left, top, right, bottom = border
    ends = (top + size[0], left + size[1]) if size else (height - bottom, width - right)
    if not (0 <= top <= ends[0] <= height and 0 <= left <= ends[1] <= width):
        raise Declined(f"border is {border} and scale {size}, for an image of {height} by {width}")
    return b.slice(b.slice(b.input(0), 2, top, ends[0]), 3, left, ends[1])


@contrib_function("DynamicSlice", "data: Z, starts: I, ends: I, axes?: I -> output: Z", deciding=(1, 2, 3))
def dynamic_slice(b: FunctionBody) -> str:
    """Expand DynamicSlice to ONNX's Slice."""
    return b.op("Slice", *(b.input(i) for i in range(4)))[0]
