"""The specification of quantised operators in NumPy, tap by tap, since ``onnx.reference`` departs from ONNX's text.

It saturates through 32 bits (a large quotient becomes the least integer). It rounds after adding the zero point, so an odd one
changes the rounding of ties. It confuses scales and zero points of channels with those of two spatial dimensions. It confuses
those of rows with those of columns. It does not support negative axes of blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
from onnx import helper

from rammer.frontend.lower.window_extents import Extent, geometry_of

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
_Attributes: TypeAlias = "Mapping[str, Any]"
_Operands: TypeAlias = "Sequence[Array | None]"
#: Supported element types; others (4 bits, float8) are unsupported.
_KINDS: Final = ("uint8", "int8", "uint16", "int16")


def _quantize(attributes: _Attributes, operands: _Operands) -> Sequence[Array] | None:
    """Apply QuantizeLinear: 'y = saturate((x / y_scale) + y_zero_point)'; 'For (x / y_scale), it rounds to the nearest even'."""
    x, scale, zero = _operand(operands, 0), _operand(operands, 1), _optional(operands, 2)
    named = helper.tensor_dtype_to_np_dtype(attributes["output_dtype"]) if attributes.get("output_dtype") else np.uint8
    kind = np.dtype(named) if zero is None else zero.dtype
    if str(kind) not in _KINDS:
        return None
    precise = helper.tensor_dtype_to_np_dtype(attributes["precision"]) if attributes.get("precision") else scale.dtype
    grain = int(attributes.get("axis", 1)), int(attributes.get("block_size", 0))
    quotient = x.astype(precise) / _spread(scale, x.shape, *grain).astype(precise)
    return (_saturated(quotient, None if zero is None else _spread(zero, x.shape, *grain), kind),)


def _dequantize(attributes: _Attributes, operands: _Operands) -> Sequence[Array] | None:
    """Apply DequantizeLinear: 'y = (x - x_zero_point) * x_scale', in the scale's type."""
    x, scale, zero = _operand(operands, 0), _operand(operands, 1), _optional(operands, 2)
    if str(x.dtype) not in (*_KINDS, "int32"):
        return None
    named = attributes.get("output_dtype")
    grain = int(attributes.get("axis", 1)), int(attributes.get("block_size", 0))
    moved = x.astype(np.float64) - (0 if zero is None else _spread(zero, x.shape, *grain))
    made = moved.astype(np.float32) * _spread(scale, x.shape, *grain).astype(np.float32)
    return (made.astype(helper.tensor_dtype_to_np_dtype(named) if named else scale.dtype),)


def _spread(values: Array, shape: tuple[int, ...], axis: int, block: int) -> Array:
    """Broadcast scales or zero points of a tensor, of indices along an axis or of blocks of them to ``shape``."""
    if values.size == 1 and values.ndim <= 1:
        return values.reshape(())
    if values.ndim == 1 and not block:
        return values.reshape([-1 if d == axis % len(shape) else 1 for d in range(len(shape))])
    if values.ndim != len(shape) or not block or values.shape[axis] != -(-shape[axis] // block):
        raise ValueError(f"scales or zero points of shape {values.shape} for {shape}, with blocks of {block} along axis {axis}")
    return np.asarray(np.take(np.repeat(values, block, axis), range(shape[axis]), axis))


def _saturated(quotient: Array, zero: Array | None, kind: np.dtype[Any]) -> Array:
    """Round, add the zero point and saturate to ``kind``; NaN counts as 0."""
    ends = np.iinfo(kind)
    whole = np.nan_to_num(np.rint(quotient.astype(np.float64)), nan=0.0, posinf=np.inf, neginf=-np.inf)
    return np.asarray(np.clip(whole if zero is None else whole + zero, ends.min, ends.max).astype(kind))


def _integer_product(attributes: _Attributes, operands: _Operands) -> Sequence[Array]:
    """Apply MatMulInteger: 'Matrix product that behaves like numpy.matmul'; zero points 'per row for a and per column for b'."""
    a, b, of_a, of_b = _operand(operands, 0), _operand(operands, 1), _optional(operands, 2), _optional(operands, 3)
    return (_wrapped(_moved(a, of_a, True) @ _moved(b, of_b, False)),)


def _linear_product(attributes: _Attributes, operands: _Operands) -> Sequence[Array]:
    """Return the product with scales, rounded like QuantizeLinear's result."""
    a, of_a, zero_a, b, of_b, zero_b, of_y, zero = (_operand(operands, i) for i in range(8))
    total = _wrapped(_moved(a, zero_a, True) @ _moved(b, zero_b, False)).astype(np.float32)
    scale = _rows(of_a).astype(np.float32) * of_b.astype(np.float32) / _rows(of_y).astype(np.float32)
    return (_saturated(total * scale, _rows(zero), zero.dtype),)


def _rows(values: Array) -> Array:
    """Reshape to one number per row, or one for all."""
    return values.reshape(()) if values.size == 1 and values.ndim <= 1 else values[:, None] if values.ndim == 1 else values


def _moved(x: Array, zero: Array | None, rows: bool) -> Array:
    # float64 is exact for sums of fewer than 2^37 products, and its products are fast.
    return x.astype(np.float64) if zero is None else x.astype(np.float64) - (_rows(zero) if rows else zero)


def _wrapped(total: Array) -> Array:
    """Wrap to int32: 'accumulation may overflow if and only if in 32 bits'."""
    return total.astype(np.int64).astype(np.int32)


def _integer_convolution(attributes: _Attributes, operands: _Operands) -> Sequence[Array]:
    """Convolve after subtracting the zero points; padding is 0 after that."""
    x, w = _operand(operands, 0), _operand(operands, 1)
    return (_convolved(attributes, x, _optional(operands, 2), w, _optional(operands, 3), None),)


def _linear_convolution(attributes: _Attributes, operands: _Operands) -> Sequence[Array]:
    """Convolve with scales (optionally per output channel) and a 32-bit bias; round like QuantizeLinear."""
    x, of_x, zero_x, w, of_w, zero_w, of_y, zero = (_operand(operands, i) for i in range(8))
    total = _convolved(attributes, x, zero_x, w, zero_w, _optional(operands, 8))
    scale = of_x.reshape(()) * _features(of_w, total.ndim) / of_y.reshape(())
    return (_saturated(total.astype(np.float32) * scale, zero.reshape(()), zero.dtype),)


def _features(values: Array, rank: int) -> Array:
    """Reshape one number, or one per channel, to broadcast over ``rank - 1`` axes that start with the channels."""
    return values.reshape(()) if values.size == 1 else values.reshape(-1, *(1,) * (rank - 2))


def _convolved(
    attributes: _Attributes, x: Array, zero_x: Array | None, w: Array, zero_w: Array | None, bias: Array | None
) -> Array:
    """Convolve ``x [n, c, ..]`` with ``w [m, c / group, ..]`` in 32 bits, tap by tap."""
    (batch, _, *source), (features, each, *kernel) = x.shape, w.shape
    dims, groups = geometry_of("ConvInteger", attributes, source, kernel)[1], int(attributes.get("group", 1))
    moved = _framed(x.astype(np.float64) - (0 if zero_x is None else zero_x.reshape(())), dims, kernel)
    weights = w.astype(np.float64) - (0 if zero_w is None else _features(zero_w, w.ndim + 1))
    weights = weights.reshape(groups, features // groups, each, *kernel)
    out = [d.out for d in dims]
    count = int(np.prod(out))
    total = np.zeros((batch, groups, features // groups, count))
    for tap in np.ndindex(*kernel) if count else ():
        places = tuple(
            slice(t * d.dilation, t * d.dilation + (d.out - 1) * d.stride + 1, d.stride) for t, d in zip(tap, dims, strict=True)
        )
        total += weights[(..., *tap)] @ moved[(slice(None), slice(None), *places)].reshape(batch, groups, each, count)
    result = _wrapped(total).reshape(batch, features, *out)
    return result if bias is None else result + _features(bias, result.ndim)


def _framed(x: Array, dims: Sequence[Extent], kernel: Sequence[int]) -> Array:
    """Return the elements and zeros under the windows: padding added, or cropped where it is negative."""
    wide, inner = list[tuple[int, int]](), list[slice]()
    for d, k, n in zip(dims, kernel, x.shape[2:], strict=True):
        reach = (d.out - 1) * d.stride + (k - 1) * d.dilation + 1
        wide.append((max(d.begin, 0), max(reach - d.begin - n, 0)))
        inner.append(slice(max(-d.begin, 0), max(-d.begin, 0) + reach))
    return np.pad(x, [(0, 0), (0, 0), *wide])[(slice(None), slice(None), *inner)]


def _operand(operands: _Operands, index: int) -> Array:
    value = operands[index]
    assert value is not None
    return value


def _optional(operands: _Operands, index: int) -> Array | None:
    return operands[index] if index < len(operands) else None


#: Operator -> function of attributes and operands that returns its results, or None for unsupported element types.
QUANTISED: Final[Mapping[str, Callable[[_Attributes, _Operands], Sequence[Array] | None]]] = {
    "QuantizeLinear": _quantize,
    "DequantizeLinear": _dequantize,
    "MatMulInteger": _integer_product,
    "QLinearMatMul": _linear_product,
    "ConvInteger": _integer_convolution,
    "QLinearConv": _linear_convolution,
}
