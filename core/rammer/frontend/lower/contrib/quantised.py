"""Integer operators of ONNX Runtime's quantiser: dequantise, compute and quantise, or multiply integers."""

from __future__ import annotations

from typing import Any

import numpy as np

from rammer.frontend.lower.contrib.attention import self_attended
from rammer.frontend.lower.contrib.function import Declined, FunctionBody, contrib_function
from rammer.frontend.lower.contrib.fused import channels_first, channels_last, given_attributes
from rammer.frontend.lower.contrib.norms import apply_layer_norm

_POOL: dict[str, Any] = {
    "auto_pad": "NOTSET",
    "kernel_shape": tuple[int, ...],
    "strides": list[int],
    "pads": list[int],
    "ceil_mode": 0,
}
_TWO = "A: Q, A_scale: F, A_zero_point?: Q, B: Q, B_scale: F, B_zero_point?: Q, C_scale: F, C_zero_point?: Q -> C: Q"
_ONE = "X: Q, X_scale: F, X_zero_point?: Q, Y_scale: F, Y_zero_point?: Q -> Y: Q"


def _scalar_input(b: FunctionBody, index: int) -> str:
    """Return a one-element input as a scalar, or "" if it is absent. Raise Declined for more elements."""
    if not b.has(index):
        return ""
    shape = b.shape(index)
    if int(np.prod(shape)) != 1:
        raise Declined(f"input {index} has the shape {list(shape)}, where it needs one element")
    return b.reshape(b.input(index)) if shape else b.input(index)


def dequantise_input(b: FunctionBody, index: int, scale: int = 0) -> str:
    """Return the dequantised input ``index``; ``scale`` is the input index of its scale, which the zero point follows."""
    place = scale or index + 1
    return b.op("DequantizeLinear", b.input(index), _scalar_input(b, place), _scalar_input(b, place + 1))[0]


def quantise_output(b: FunctionBody, y: str, scale: int) -> str:
    """Return ``y`` quantised to the type of input 0."""
    zero = _scalar_input(b, scale + 1) or b.constant(0, b.dtype(0))
    return b.QuantizeLinear(y, _scalar_input(b, scale), zero)


@contrib_function("QLinearAdd", _TWO)
def q_linear_add(b: FunctionBody) -> str:
    """Expand QLinearAdd: ``A + B``."""
    return quantise_output(b, b.Add(dequantise_input(b, 0), dequantise_input(b, 3)), 6)


@contrib_function("QLinearMul", _TWO)
def q_linear_mul(b: FunctionBody) -> str:
    """Expand QLinearMul: ``A * B``."""
    return quantise_output(b, b.Mul(dequantise_input(b, 0), dequantise_input(b, 3)), 6)


@contrib_function("QLinearSigmoid", _ONE)
def q_linear_sigmoid(b: FunctionBody) -> str:
    """Expand QLinearSigmoid: Sigmoid of dequantised numbers."""
    return quantise_output(b, b.Sigmoid(dequantise_input(b, 0)), 3)


@contrib_function("QLinearLeakyRelu", _ONE, alpha=0.01)
def q_linear_leaky_relu(b: FunctionBody) -> str:
    """Expand QLinearLeakyRelu: LeakyRelu of dequantised numbers."""
    return quantise_output(b, b.LeakyRelu(dequantise_input(b, 0), alpha=b.attr("alpha")), 3)


@contrib_function(
    "QLinearGlobalAveragePool", "X: Q, x_scale: F, x_zero_point: Q, y_scale: F, y_zero_point: Q -> Y: Q", channels_last=0
)  # fmt: skip
def q_linear_global_average_pool(b: FunctionBody) -> str:
    """Expand QLinearGlobalAveragePool: the mean over all pixels of an image."""
    rank = len(b.shape(0))
    axes = range(1, rank - 1) if b.attr("channels_last") else range(2, rank)
    return quantise_output(b, b.ReduceMean(dequantise_input(b, 0), b.constant(list(axes)), keepdims=1), 3)


@contrib_function(
    "QLinearAveragePool", _ONE.replace("X_", "x_").replace("Y_", "y_"), channels_last=0, count_include_pad=0, **_POOL
)
def q_linear_average_pool(b: FunctionBody) -> str:
    """Expand QLinearAveragePool: AveragePool of dequantised numbers."""
    rank, last = len(b.shape(0)), b.attr("channels_last")
    x = dequantise_input(b, 0)
    x = channels_first(b, x, rank) if last else x
    y = b.op("AveragePool", x, **given_attributes(b, (*_POOL, "count_include_pad")))[0]
    return quantise_output(b, channels_last(b, y, rank) if last else y, 3)


@contrib_function("QLinearConcat", "Y_scale: F, Y_zero_point: Q, inputs*: X -> Y: Q", axis=int)
def q_linear_concat(b: FunctionBody) -> str:
    """Expand QLinearConcat: Concat of tensors, each followed by its scale and zero point."""
    count = len(b.use.inputs) - 2
    if count < 3 or count % 3:
        raise Declined(f"{count} inputs are not tensors with scales and zero points")
    parts = [dequantise_input(b, i) for i in range(2, count + 2, 3)]
    return b.QuantizeLinear(b.Concat(*parts, axis=b.attr("axis")), _scalar_input(b, 0), _scalar_input(b, 1))


@contrib_function("QLinearSoftmax", "X: Q, X_scale: F, x_zero_point?: Q, y_scale: F, y_zero_point: Q -> Y: Q", axis=-1, opset=int)
def q_linear_softmax(b: FunctionBody) -> str:
    """Expand QLinearSoftmax: Softmax, up to opset 12 over all axes from ``axis`` on."""
    shape, x = b.shape(0), dequantise_input(b, 0)
    if not shape:
        raise Declined("it has no axis")
    axis = b.attr("axis") % len(shape)
    if b.attr("opset") >= 13 or axis == len(shape) - 1:
        return quantise_output(b, b.Softmax(x, axis=axis), 3)
    flat = b.reshape(x, int(np.prod(shape[:axis])), int(np.prod(shape[axis:])))
    return quantise_output(b, b.reshape(b.Softmax(flat, axis=-1), *shape), 3)


@contrib_function(
    "QLinearWhere",
    "condition: B, X: Q, x_scale: F, x_zero_point: Q, Y: Q, y_scale: F, y_zero_point: Q, z_scale: F, z_zero_point: Q -> Z: Q",
)
def q_linear_where(b: FunctionBody) -> str:
    """Expand QLinearWhere: Where of dequantised numbers."""
    return b.QuantizeLinear(
        b.Where(b.input(0), dequantise_input(b, 1), dequantise_input(b, 4)), _scalar_input(b, 7), _scalar_input(b, 8)
    )


@contrib_function("QuantizeLinear", "x: T, y_scale: T, y_zero_point?: P -> y: P", axis=1)
def quantize_linear(b: FunctionBody) -> str:
    """Expand QuantizeLinear to ONNX's operator, for opsets before ONNX had these types."""
    return b.op("QuantizeLinear", b.input(0), b.input(1), b.input(2), axis=b.attr("axis"))[0]


@contrib_function("DequantizeLinear", "x: P, x_scale: T, x_zero_point?: P -> y: T", axis=1)
def dequantize_linear(b: FunctionBody) -> str:
    """Expand DequantizeLinear to ONNX's operator, for opsets before ONNX had these types."""
    return b.op("DequantizeLinear", b.input(0), b.input(1), b.input(2), axis=b.attr("axis"))[0]


@contrib_function("NhwcMaxPool", "x: Q -> y: Q", dilations=list[int], **_POOL)
def nhwc_max_pool(b: FunctionBody) -> str:
    """Expand NhwcMaxPool: MaxPool with channels last."""
    rank = len(b.shape(0))
    y = b.op("MaxPool", channels_first(b, b.input(0), rank), **given_attributes(b, (*_POOL, "dilations")))[0]
    return channels_last(b, y, rank)


@contrib_function(
    "QLinearConv",
    "x: Q, x_scale: F, x_zero_point: Q, w: Q2, w_scale: F, w_zero_point: Q2, y_scale: F, y_zero_point: Q3, B?: M -> y: Q3",
    channels_last=0, group=1, dilations=list[int], auto_pad="NOTSET", kernel_shape=list[int], strides=list[int], pads=list[int],
)  # fmt: skip
def q_linear_conv(b: FunctionBody) -> str:
    """Expand QLinearConv to ONNX's operator, optionally with channels last."""
    rank, last = len(b.shape(0)), b.attr("channels_last")
    x = channels_first(b, b.input(0), rank) if last else b.input(0)
    names = ("group", "dilations", "auto_pad", "kernel_shape", "strides", "pads")
    y = b.op("QLinearConv", x, *(b.input(i) for i in range(1, 9)), **given_attributes(b, names))[0]
    return channels_last(b, y, rank) if last else y


def scale_total(b: FunctionBody, total: str, *scales: str) -> str:
    """Return sums of integer products as numbers, scaled and in floating point."""
    factor = scales[0] if len(scales) == 1 else b.Mul(*scales)
    return b.Mul(b.cast(total, "float32"), factor)


@contrib_function("DynamicQuantizeMatMul", "A: F, B: Q, b_scale: F, b_zero_point?: Q, bias?: F -> Y: F")
def dynamic_quantize_mat_mul(b: FunctionBody) -> str:
    """Expand DynamicQuantizeMatMul: ``A``, quantised at run time, times integers."""
    codes, scale, zero = b.op("DynamicQuantizeLinear", b.input(0), outputs=3)
    total = b.op("MatMulInteger", codes, b.input(1), zero, b.input(3))[0]
    y = scale_total(b, total, scale, b.input(2))
    return b.Add(y, b.input(4)) if b.has(4) else y


@contrib_function(
    "MatMulIntegerToFloat", "A: Q, B: Q2, a_scale: T, b_scale: T, a_zero_point?: Q, b_zero_point?: Q2, bias?: T -> Y: T"
)  # fmt: skip
def mat_mul_integer_to_float(b: FunctionBody) -> str:
    """Expand MatMulIntegerToFloat: an integer product as floats."""
    total = b.op("MatMulInteger", b.input(0), b.input(1), b.input(4), b.input(5))[0]
    y = scale_total(b, total, b.cast(_scalar_input(b, 2), "float32"), b.cast(b.input(3), "float32"))
    y = b.Add(y, b.cast(b.input(6), "float32")) if b.has(6) else y
    return b.cast(y, b.dtype(2))


@contrib_function(
    "QGemm",
    "A: Q, a_scale: F, a_zero_point: Q, B: Q2, b_scale: F, b_zero_point: Q2, C?: M, y_scale?: F, y_zero_point?: Q3 -> Y: X",
    transA=0, transB=0, alpha=1.0,
)  # fmt: skip
def q_gemm(b: FunctionBody) -> str:
    """Expand QGemm: ``alpha * A @ B + C`` of integers, whose bias has the scale of the product; the
    result is floats or integers."""
    x = b.Transpose(b.input(0), perm=[1, 0]) if b.attr("transA") else b.input(0)
    w = b.Transpose(b.input(3), perm=[1, 0]) if b.attr("transB") else b.input(3)
    total = b.op("MatMulInteger", x, w, _scalar_input(b, 2), _column_parameter(b, 5))[0]
    total = b.Add(total, b.input(6)) if b.has(6) else total
    factor = b.Mul(b.Mul(_scalar_input(b, 1), _column_parameter(b, 4)), b.constant(b.attr("alpha"), "float32"))
    y = scale_total(b, total, factor)
    return b.op("QuantizeLinear", y, _scalar_input(b, 7), _scalar_input(b, 8))[0] if b.has(7) else y


def _column_parameter(b: FunctionBody, index: int) -> str:
    """Return a one-element parameter as a scalar, or one value per column."""
    return _scalar_input(b, index) if int(np.prod(b.shape(index))) == 1 else b.input(index)


@contrib_function(
    "QAttention",
    "input: Q, weight: Q2, bias: T, input_scale: T, weight_scale: T, mask_index?: M, input_zero_point?: Q,"
    " weight_zero_point?: Q2, past?: T -> output: T, present?: T",
    num_heads=int, unidirectional=0, do_rotary=0, past_present_share_buffer=0, mask_filter_value=-10000.0, scale=0.0,
)  # fmt: skip
def q_attention(b: FunctionBody) -> list[str]:
    """Expand QAttention: attention whose projections are an integer product."""
    if b.attr("do_rotary") or b.attr("past_present_share_buffer") or b.dtype(2) != "float32":
        raise Declined("rotary embedding, shared buffers and other numbers than float32 are not supported")
    batch, length, _ = b.shape(0, 3)
    columns = b.shape(1, 2)[1]
    total = b.op("MatMulInteger", b.input(0), b.input(1), _scalar_input(b, 6), _column_parameter(b, 7) if b.has(7) else "")[0]
    product = b.Add(scale_total(b, total, _scalar_input(b, 3), _column_parameter(b, 4)), b.input(2))
    sizes = [columns // 3] * 3
    parts = b.split(product, 2, sizes)
    return self_attended(b, parts, sizes, (batch, length, b.attr("num_heads")), (5, 8, -1), like=2)


@contrib_function(
    "QEmbedLayerNormalization",
    "input_ids: M, segment_ids?: M, word: Q, position: Q, segment?: Q, gamma: Q, beta: Q, mask?: M, word_scale: F,"
    " position_scale: F, segment_scale?: F, gamma_scale: F, beta_scale: F, word_zero: Q, position_zero: Q,"
    " segment_zero?: Q, gamma_zero: Q, beta_zero: Q -> output: F, mask_index: M",
    epsilon=1e-12,
)
def q_embed_layer_normalization(b: FunctionBody) -> list[str]:
    """Expand QEmbedLayerNormalization: integer words, positions and segments, added as numbers and normalised."""
    batch, length = b.shape(0, 2)
    rows = {2: b.Gather(b.input(2), b.input(0)), 3: b.slice(b.input(3), 0, 0, length)}
    if b.has(1):
        rows[4] = b.Gather(b.input(4), b.input(1))
    made = {i: b.DequantizeLinear(x, _scalar_input(b, i + 6), _scalar_input(b, i + 11)) for i, x in rows.items()}
    total = b.Add(made[2], made[3])
    total = b.Add(total, made[4]) if b.has(1) else total
    gamma, beta = (b.DequantizeLinear(b.input(i), _scalar_input(b, i + 6), _scalar_input(b, i + 11)) for i in (5, 6))
    counted = b.ReduceSum(b.input(7), b.constant([1]), keepdims=0) if b.has(7) else b.constant([0] * batch, "int32")
    return [apply_layer_norm(b, total, gamma, beta)[0], counted]
