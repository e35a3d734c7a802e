"""Block-quantised weights of a few bits with a scale per block, as ONNX's DequantizeLinear of unchanged constants."""

from __future__ import annotations

from typing import Any, TypeAlias

import ml_dtypes
import numpy as np

from rammer.frontend.lower.contrib.function import Declined, FunctionBody, contrib_function

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

#: Types of unsigned integers by bits; DequantizeLinear of the body's opset has no 2-bit type.
_KINDS = {2: ml_dtypes.uint4, 4: ml_dtypes.uint4, 8: np.uint8}


def unpack_bits(packed: Array, bits: int, count: int) -> Array:
    """Return ``count`` integers of ``bits`` along the last axis, the lowest bits of each byte first."""
    each = 8 // bits
    parts = packed[..., None] >> (np.arange(each, dtype=np.uint8) * np.uint8(bits)) & np.uint8((1 << bits) - 1)
    wide = parts.reshape(*packed.shape[:-1], packed.shape[-1] * each)[..., :count]
    return np.asarray(wide.astype(_KINDS[bits]))


@contrib_function(
    "MatMulNBits", "A: T, B: A2, scales: T, zero_points?: X3, g_idx?: M, bias?: T -> Y: T",
    K=int, N=int, bits=4, block_size=int, accuracy_level=0, weight_prepacked=0,
)  # fmt: skip
def mat_mul_n_bits(b: FunctionBody) -> str:
    """Return ``A @ dequantised(B)' + bias``. ``B [N, blocks, bytes]`` has a scale and an optional zero point per block. ``g_idx``
    may assign columns to blocks."""
    bits, block, rows, depth = b.attr("bits"), b.attr("block_size"), b.attr("N"), b.attr("K")
    if bits not in _KINDS:
        raise Declined(f"{bits} bits are not supported; 2, 4 and 8 are")
    if b.attr("weight_prepacked"):
        raise Declined("weights in a kernel-specific order are not supported")
    if block < 1 or rows < 1 or depth < 1:
        raise Declined(f"N is {rows}, K is {depth} and block_size {block}")
    blocks = -(-depth // block)
    if b.dtype(1) != "uint8" or int(np.prod(b.shape(1))) != rows * blocks * (block * bits // 8):
        raise Declined(f"weights of {list(b.shape(1))} for {rows} rows of {blocks} blocks of {block}")
    codes = _weight_integers(b, (rows, blocks, block), bits, depth)
    scales, zero = b.reshape(b.input(2), rows, blocks), _zero_points(b, (rows, blocks), bits)
    if b.has(4) or (b.has(3) and b.dtype(3) != "uint8"):
        own = b.input(4) if b.has(4) else b.constant(np.arange(depth) // block)
        points, factors = (b.Gather(x, own, axis=1) for x in (b.cast(zero, b.dtype(0)), scales))
        made = b.Mul(b.Sub(b.cast(codes, b.dtype(0)), points), factors)
    else:
        made = b.DequantizeLinear(codes, scales, zero, axis=1, block_size=block)
    y = b.MatMul(b.input(0), b.Transpose(made, perm=[1, 0]))
    return b.Add(y, b.input(5)) if b.has(5) else y


def _weight_integers(b: FunctionBody, shape: tuple[int, int, int], bits: int, depth: int) -> str:
    """Return the integers of input 1, ``[rows, depth]``, as packed constants if the input is constant."""
    rows, blocks, block = shape
    packed = b.known(1)
    if packed is not None:
        whole = unpack_bits(packed.reshape(rows, blocks, -1), bits, block).reshape(rows, -1)
        return b.constant(np.ascontiguousarray(whole[:, :depth]))
    opened_codes = emit_unpack(b, b.reshape(b.input(1), rows, blocks, -1), bits, block)
    return b.slice(b.reshape(opened_codes, rows, blocks * block), 1, 0, depth)


def _zero_points(b: FunctionBody, shape: tuple[int, int], bits: int) -> str:
    """Return a zero point per block, integers or floats; half of the range if the input is absent."""
    rows, blocks = shape
    plain = b.known(1) is not None
    if not b.has(3):
        return b.constant(np.full(shape, 1 << (bits - 1), np.uint8).astype(_KINDS[bits] if plain else np.uint8))
    if b.dtype(3) != "uint8":
        return b.reshape(b.input(3), rows, blocks)
    if int(np.prod(b.shape(3))) != rows * -(-blocks * bits // 8):
        raise Declined(f"zero points of {list(b.shape(3))} for {rows} rows of {blocks} blocks")
    given = b.known(3)
    if given is not None and plain:
        return b.constant(unpack_bits(given.reshape(rows, -1), bits, blocks))
    points = emit_unpack(b, b.reshape(b.input(3), rows, -1), bits, blocks)
    return b.cast(points, "uint4") if plain and bits < 8 else points


@contrib_function(
    "GatherBlockQuantized", "data: W, indices: I, scales: T, zero_points?: W -> output: T",
    gather_axis=0, quantize_axis=1, block_size=128, bits=4,
)  # fmt: skip
def gather_block_quantized(b: FunctionBody) -> str:
    """Return rows of a block-quantised table: bytes, scales and zero points are gathered, then dequantised. An index out of range
    gives zeros."""
    shape, bits, kind = b.shape(0), b.attr("bits"), b.dtype(0)
    rank = len(shape)
    if not rank or len(b.shape(2)) != rank:
        raise Declined(f"data of {list(shape)} have scales of {list(b.shape(2))}")
    gather, along = b.attr("gather_axis") % rank, b.attr("quantize_axis") % rank
    axis = along if along < gather else along + len(b.shape(1)) - 1
    extent = b.constant(shape[gather], b.dtype(1))
    inside = b.And(b.Less(b.input(1), extent), b.GreaterOrEqual(b.input(1), b.Neg(extent)))
    places = b.Where(inside, b.input(1), b.constant(0, b.dtype(1)))
    if kind.startswith("float"):
        result = _gathered_floats(b, places, gather, along)
    else:
        result = _gathered_integers(b, places, (gather, along, axis), bits)
    lead = [*(1,) * gather, *b.shape(1), *(1,) * (rank - gather - 1)]
    return b.Where(b.reshape(inside, *lead), result, b.number(0.0, 2))


def _gathered_integers(b: FunctionBody, places: str, axes: tuple[int, int, int], bits: int) -> str:
    (gather, along, axis), shape, kind = axes, b.shape(0), b.dtype(0)
    if gather == along:
        raise Declined(f"axis {along} is gathered and quantised")
    if kind == "uint8" and (along != len(shape) - 1 or bits not in _KINDS):
        raise Declined("packed bytes need 2, 4 or 8 bits and a quantised last axis")
    wide = {"int4": "int8", "uint4": "uint8"}.get(kind, kind)  # ONNX's Gather has no 4-bit types
    data = b.Gather(b.cast(b.input(0), wide) if wide != kind else b.input(0), places, axis=gather)
    scales, zero = b.Gather(b.input(2), places, axis=gather), _gathered_points(b, places, gather, bits, kind)
    if kind == "uint8":
        data = emit_unpack(b, data, bits, shape[-1] * (8 // bits))
    return b.DequantizeLinear(data, scales, zero, axis=axis, block_size=b.attr("block_size"))


def _gathered_points(b: FunctionBody, places: str, gather: int, bits: int, kind: str) -> str:
    """Return the zero points of the gathered rows, in 8 bits."""
    blocks = b.shape(2)[-1]
    wide = "int8" if kind == "int4" else "uint8"
    if not b.has(3):
        middle = b.constant(np.full(b.shape(2), 1 << (bits - 1) if kind == "uint8" else 0, np.dtype(wide)))
        return b.Gather(middle, places, axis=gather)
    if kind == "uint8":
        return emit_unpack(b, b.Gather(b.input(3), places, axis=gather), bits, blocks)
    return b.Gather(b.cast(b.input(3), wide), places, axis=gather)


def _gathered_floats(b: FunctionBody, places: str, gather: int, along: int) -> str:
    """Return gathered rows of short floats times their scales; one scale may serve a whole axis."""
    shape, scales, block = b.shape(0), b.shape(2), b.attr("block_size") or max(b.shape(0)[along], 1)
    fits = all(n in (shape[i], 1) for i, n in enumerate(scales) if i != along)
    if b.has(3) or block < 0 or scales[along] != -(-shape[along] // block) or not fits:
        raise Declined(f"scales of {list(scales)} for floats of {list(shape)} in blocks of {block}")
    wide = b.Gather(b.input(2), b.constant(np.arange(shape[along]) // block), axis=along)
    if scales[gather] == 1 and gather != along:
        wide = b.Expand(wide, b.constant([n if i == gather else 1 for i, n in enumerate(shape)]))
    data = b.Gather(b.cast(b.input(0), "float16"), places, axis=gather)  # float16 holds every number of these types
    return b.Mul(b.cast(data, b.dtype(2)), b.Gather(wide, places, axis=gather))


def emit_unpack(b: FunctionBody, packed: str, bits: int, count: int, high_first: bool = False) -> str:
    """Unpack bytes into integers of ``bits`` along the last axis on the device, as ``unpack_bits`` does for constants."""
    if bits == 8:
        return packed
    shifts = sorted(range(0, 8, bits), reverse=high_first)
    parts = [b.BitShift(packed, b.constant(n, "uint8"), direction="RIGHT") for n in shifts]
    last = b.constant([-1])
    columns = [b.Unsqueeze(b.BitwiseAnd(x, b.constant((1 << bits) - 1, "uint8")), last) for x in parts]
    wide = b.Concat(*columns, axis=-1)
    shape = b.Concat(b.Shape(packed, start=0, end=-1), b.constant([-1]), axis=0)
    return b.Slice(b.Reshape(wide, shape), b.constant([0]), b.constant([count]), b.constant([-1]))


@contrib_function(
    "MatMulBnb4", "A: T, B: U, absmax: T -> Y: T", K=int, N=int, block_size=int, quant_type=int, transB=1, training_mode=0
)  # fmt: skip
def mat_mul_bnb4(b: FunctionBody) -> str:
    """Return ``A @ dequantised(B)'``: 4-bit indices into a table of 16 numbers, high halves first, in blocks that span rows."""
    rows, depth, block, kind = b.attr("N"), b.attr("K"), b.attr("block_size"), b.attr("quant_type")
    count = rows * depth
    if kind not in (0, 1) or block < 1 or rows < 1 or depth < 1:
        raise Declined(f"N is {rows}, K is {depth}, block_size {block} and quant_type {kind}")
    if b.shape(1) != (-(-count // 2),) or b.shape(2) != (-(-count // block),):
        raise Declined(f"{count} weights in blocks of {block} have the shapes {list(b.shape(1))} and {list(b.shape(2))}")
    block = min(block, count)
    codes = emit_unpack(b, b.input(1), 4, count, high_first=True)
    values = b.Gather(b.constant(_TABLES[kind]), b.cast(codes, "int32"))
    scales = b.Expand(b.Unsqueeze(b.cast(b.input(2), "float32"), b.constant([1])), b.constant([-(-count // block), block]))
    weights = b.reshape(b.Mul(values, b.slice(b.reshape(scales, -1), 0, 0, count)), rows, depth)
    weights = b.cast(weights, b.dtype(0))
    return b.MatMul(b.input(0), b.Transpose(weights, perm=[1, 0]) if b.attr("transB") else weights)


#: The numbers of the 4-bit codes: 4-bit floats, and the quantiles of a normal distribution.
_TABLES = (
    np.concatenate([sign * np.array([0, 0.0625, 8, 12, 4, 6, 2, 3]) / 12 for sign in (1, -1)]).astype(np.float32),
    np.array(
        [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
         -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
         0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0],
        np.float32,
    ),
)  # fmt: skip
