"""Fused products, convolutions and activations that ONNX Runtime's optimiser creates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rammer.frontend.lower.contrib.function import Declined, FunctionBody, contrib_function

_CONV: dict[str, Any] = {
    "group": 1, "auto_pad": "NOTSET", "kernel_shape": list[int], "strides": list[int], "pads": list[int], "dilations": list[int],
}  # fmt: skip
#: Activations of FusedConv and FusedGemm, with the attributes that their parameters set.
_ACTIVATIONS = {
    "": (), "Relu": (), "Tanh": (), "Sigmoid": (), "LeakyRelu": ("alpha",), "Clip": ("min", "max"),
    "HardSigmoid": ("alpha", "beta"), "HardSwish": (), "Softplus": (), "Softsign": (), "Elu": ("alpha",),
    "ThresholdedRelu": ("alpha",),
}  # fmt: skip


def apply_activation(b: FunctionBody, x: str, name: str, parameters: Sequence[float]) -> str:
    """Apply an activation (ONNX's name) to ``x``. Raise Declined if it is unsupported."""
    if name not in _ACTIVATIONS:
        raise Declined(f"the activation {name!r} is not supported; {', '.join(n for n in _ACTIVATIONS if n)} are")
    if len(parameters) > len(_ACTIVATIONS[name]):
        raise Declined(f"{name or 'no activation'} has {len(parameters)} parameters, where it takes {len(_ACTIVATIONS[name])}")
    if not name:
        return x
    if name == "Clip":
        low, high = (*parameters, *(-np.inf, np.inf)[len(parameters) :])
        return b.Clip(x, b.number(low), b.number(high))
    named: dict[str, Any] = dict(zip(_ACTIVATIONS[name], parameters, strict=False))
    return b.op(name, x, **named)[0]


def given_attributes(b: FunctionBody, names: Sequence[str]) -> dict[str, Any]:
    """Return those of the named attributes that are present."""
    return {n: b.attr(n) for n in names if b.attr(n) != ()}


def _convolve(b: FunctionBody, last: bool) -> str:
    """Return the body of Conv, with channels last if ``last``; the weight layout is the same."""
    rank = len(b.shape(0))
    x = channels_first(b, b.input(0), rank) if last else b.input(0)
    y = b.op("Conv", x, b.input(1), b.input(2), **given_attributes(b, tuple(_CONV)))[0]
    return channels_last(b, y, rank) if last else y


def _fused(b: FunctionBody, y: str) -> str:
    y = b.Add(y, b.input(3)) if b.has(3) else y
    return apply_activation(b, y, b.attr("activation"), b.attr("activation_params"))


@contrib_function("FusedConv", "X: T, W: T, B?: T, Z?: T -> Y: T", activation="", activation_params=list[float], **_CONV)
def fused_conv(b: FunctionBody) -> str:
    """Expand FusedConv: ``activation(Conv(X, W, B) + Z)``."""
    return _fused(b, _convolve(b, last=False))


@contrib_function("NhwcFusedConv", "X: T, W: T, B?: T, Z?: T -> Y: T", activation="", activation_params=list[float], **_CONV)
def nhwc_fused_conv(b: FunctionBody) -> str:
    """Expand NhwcFusedConv: FusedConv with channels last."""
    return _fused(b, _convolve(b, last=True))


@contrib_function("NhwcConv", "X: T, W: T, B?: T -> Y: T", **_CONV)
def nhwc_conv(b: FunctionBody) -> str:
    """Expand NhwcConv: Conv with channels last."""
    return _convolve(b, last=True)


def channels_first(b: FunctionBody, x: str, rank: int) -> str:
    """Transpose ``x [n, .., c]`` to ``[n, c, ..]``."""
    return b.Transpose(x, perm=[0, rank - 1, *range(1, rank - 1)])


def channels_last(b: FunctionBody, x: str, rank: int) -> str:
    """Transpose ``x [n, c, ..]`` to ``[n, .., c]``."""
    return b.Transpose(x, perm=[0, *range(2, rank), 1])


@contrib_function("FusedMatMul", "A: T, B: T -> Y: T", transA=0, transB=0, transBatchA=0, transBatchB=0, alpha=1.0)
def fused_mat_mul(b: FunctionBody) -> str:
    """Expand FusedMatMul: ``alpha * op(A) @ op(B)``. ``transBatch`` moves the first axis after the other batch axes, before
    ``trans`` applies."""
    return transposed_product(b)


def transposed_product(b: FunctionBody) -> str:
    """Return the body of both FusedMatMul and TransposeMatMul."""
    sides = []
    for index, side in enumerate("AB"):
        order = list(range(len(b.shape(index))))
        if b.use.attr(f"transBatch{side}", 0) and len(order) > 2:
            order = [*order[1:-1], 0, order[-1]]
        if b.attr(f"trans{side}") and len(order) > 1:
            order = [*order[:-2], order[-1], order[-2]]
        moved = order != sorted(order)
        sides.append(b.Transpose(b.input(index), perm=order) if moved else b.input(index))
    y = b.MatMul(*sides)
    return y if b.attr("alpha") == 1 else b.Mul(y, b.number(b.attr("alpha")))


@contrib_function("TransposeMatMul", "A: T, B: T -> Y: T", transA=0, transB=0, alpha=1.0)
def transpose_mat_mul(b: FunctionBody) -> str:
    """Expand TransposeMatMul, the older name of FusedMatMul."""
    return transposed_product(b)


@contrib_function(
    "FusedGemm", "A: T, B: T, C?: T -> Y: T", transA=0, transB=0, alpha=1.0, beta=1.0, activation="",
    activation_alpha=0.0, activation_beta=0.0, activation_gamma=0.0,
)  # fmt: skip
def fused_gemm(b: FunctionBody) -> str:
    """Expand FusedGemm: ``activation(Gemm(A, B, C))``."""
    names = ("transA", "transB", "alpha", "beta")
    y = b.op("Gemm", b.input(0), b.input(1), b.input(2), **{n: b.attr(n) for n in names})[0]
    name = b.attr("activation")
    parameters = [b.attr("activation_alpha"), b.attr("activation_beta")][: len(_ACTIVATIONS.get(name, ()))]
    return apply_activation(b, y, name, parameters)


@contrib_function("Gelu", "X: T -> Y: T")
def expand_gelu(b: FunctionBody) -> str:
    """Expand Gelu to ONNX's Gelu."""
    return b.Gelu(b.input(0))


@contrib_function("BiasGelu", "A: T, B: T -> C: T")
def bias_gelu(b: FunctionBody) -> str:
    """Expand BiasGelu: ``Gelu(A + B)``."""
    return b.Gelu(b.Add(b.input(0), b.input(1)))


@contrib_function("FastGelu", "X: T, bias?: T -> Y: T")
def fast_gelu(b: FunctionBody) -> str:
    """Expand FastGelu: Gelu with a hyperbolic tangent."""
    x = b.Add(b.input(0), b.input(1)) if b.has(1) else b.input(0)
    return b.Gelu(x, approximate="tanh")


@contrib_function("QuickGelu", "X: T -> Y: T", alpha=1.702)
def quick_gelu(b: FunctionBody) -> str:
    """Expand QuickGelu: ``x * Sigmoid(alpha * x)``."""
    x = b.input(0)
    return b.Mul(x, b.Sigmoid(b.Mul(x, b.number(b.attr("alpha")))))


@contrib_function("BiasSplitGelu", "X: T, bias: T -> Y: T")
def bias_split_gelu(b: FunctionBody) -> str:
    """Expand BiasSplitGelu: the first half of ``X + bias`` along the last axis, times the Gelu of the second half."""
    width, axis = b.shape(0)[-1], len(b.shape(0)) - 1
    one, two = b.split(b.Add(b.input(0), b.input(1)), axis, [width // 2, width - width // 2])
    return b.Mul(one, b.Gelu(two))


@contrib_function("BiasAdd", "X: T, bias: T, skip: T -> Y: T")
def bias_add(b: FunctionBody) -> str:
    """Expand BiasAdd: ``X + bias + skip``."""
    return b.Add(b.Add(b.input(0), b.input(1)), b.input(2))


@contrib_function("BiasSoftmax", "data: T, bias: T -> output: T", axis=1, is_inner_broadcast=int)
def bias_softmax(b: FunctionBody) -> str:
    """Expand BiasSoftmax: softmax of ``data + bias`` over all axes from ``axis`` on.

    The bias may lack outer or inner batch axes."""
    shape, given_shape = b.shape(0), b.shape(1)
    axis = b.attr("axis") % max(len(shape), 1)
    bias = b.input(1)
    if not b.attr("is_inner_broadcast") and len(given_shape) < len(shape):
        bias = b.reshape(bias, *(1,) * (len(shape) - len(given_shape)), *given_shape)
    x = b.Add(b.input(0), bias)
    if axis == len(shape) - 1:
        return b.Softmax(x, axis=-1)
    flat = b.reshape(x, int(np.prod(shape[:axis])), int(np.prod(shape[axis:])))
    return b.reshape(b.Softmax(flat, axis=-1), *shape)


@contrib_function("Trilu", "X: A, k?: L -> Y: A", deciding=(1,), upper=1)
def expand_trilu(b: FunctionBody) -> str:
    """Expand Trilu to ONNX's Trilu."""
    return b.op("Trilu", *(b.input(i) for i in range(2) if b.has(i)), upper=b.attr("upper"))[0]


@contrib_function("GatherND", "data: Z, indices: I -> output: Z")
def gather_nd(b: FunctionBody) -> str:
    """Expand GatherND to ONNX's GatherND."""
    return b.GatherND(b.input(0), b.cast(b.input(1), "int64"))


@contrib_function("ExpandDims", "X: Z, axis: M -> Y: Z", deciding=(1,))
def expand_dims(b: FunctionBody) -> str:
    """Expand ExpandDims to ONNX's Unsqueeze of one axis."""
    axis = b.known(1)
    if axis is None:
        raise Declined("its axis is run-time data")
    return b.Unsqueeze(b.input(0), b.constant([int(axis.reshape(()))]))


@contrib_function("Range", "start: A, limit: A, delta?: A -> Y: A", deciding=(0, 1, 2))
def expand_range(b: FunctionBody) -> str:
    """Expand Range to ONNX's Range with a default step of 1."""
    return b.Range(b.input(0), b.input(1), b.input(2) if b.has(2) else b.number(1))


@contrib_function("Pad", "data: T, pads: L, value?: T -> output: T", deciding=(1,), mode="constant")
def expand_pad(b: FunctionBody) -> str:
    """Expand Pad to ONNX's Pad; ``pads`` may have a first axis of extent 1."""
    count, given_pads = 2 * len(b.shape(0)), b.known(1)
    if given_pads is not None and given_pads.size != count:
        raise Declined(f"pads has {given_pads.size} elements, where {count // 2} axes need {count}")
    value = [b.reshape(b.input(2))] if b.has(2) else []
    return b.op("Pad", b.input(0), b.reshape(b.input(1), count), *value, mode=b.attr("mode"))[0]
