"""Operators that run on the host in all or some uses: strings, paths, data-dependent result lengths, large inverses."""

from __future__ import annotations

from typing import Final

import numpy as np

from rammer.frontend.lower.contrib.function import CODES, Declined, FunctionBody, contrib_function

#: Rows of the largest matrix whose inverse is unrolled.
MOST_ROWS = 16
#: The first ONNX opset that reinterprets the bits of a number as another type.
_BITS_OPSET = 26
#: Operators without a tensor expression.
HOST_ONLY: Final = ("Tokenizer", "DynamicTimeWarping", "Unique", "BifurcationDetector")


def without_expression(b: FunctionBody) -> str:
    """Decline every use of the operator."""
    raise Declined(f"{b.use.op} has no tensor expression")


contrib_function(
    "Tokenizer", "X: Z -> Y: Z", hosted=True, mincharnum=int, pad_value=str, mark=int, separators=list[str], tokenexp=str | None
)(without_expression)  # fmt: skip
contrib_function("DynamicTimeWarping", "input: F -> output: M", hosted=True)(without_expression)
contrib_function("Unique", "x: Z -> y: Z, idx: L, counts: L", hosted=True)(without_expression)
contrib_function(
    "BifurcationDetector", "src_tokens: L, cur_tokens: L, prev_suffix_match_idx: L, pred_tokens?: L -> tokens: L, idx: L",
    hosted=True, max_ngram_size=3, min_ngram_size=1,
)(without_expression)  # fmt: skip


@contrib_function("Inverse", "X: T -> Y: T", hosted=True)
def expand_inverse(b: FunctionBody) -> str:
    """Expand Inverse: Gauss-Jordan elimination with the largest pivot of each column; the host inverts large matrices."""
    shape = b.shape(0)
    if len(shape) < 2 or shape[-1] != shape[-2] or not 1 <= shape[-1] <= MOST_ROWS:
        raise Declined(f"matrices of {list(shape)} are inverted on the host")
    rows, batch = shape[-1], int(np.prod(shape[:-2]))
    kind = "float64" if b.dtype() == "float64" else "float32"
    unit = np.broadcast_to(np.eye(rows, dtype=kind), (batch, rows, rows))
    both = b.Concat(b.reshape(b.cast(b.input(0), kind), batch, rows, rows), b.constant(np.ascontiguousarray(unit)), axis=2)
    numbers, zero = b.constant(np.arange(rows).reshape(1, rows, 1)), b.constant(0, kind)
    for place in range(rows):
        column = b.slice(both, 2, place, place + 1)
        below = b.Abs(b.slice(column, 1, place, rows))
        pivot = b.Add(b.ArgMax(below, axis=1, keepdims=1), b.constant(place))
        is_pivot, is_own = b.Equal(numbers, pivot), b.Equal(numbers, b.constant(place))
        chosen = b.ReduceSum(b.Where(is_pivot, both, zero), b.constant([1]), keepdims=1)
        swapped = b.Where(is_pivot, b.slice(both, 1, place, place + 1), both)
        chosen = b.Div(chosen, b.slice(chosen, 2, place, place + 1))
        reduced = b.Sub(swapped, b.Mul(b.slice(swapped, 2, place, place + 1), chosen))
        both = b.Where(is_own, chosen, reduced)
    return b.reshape(b.cast(b.slice(both, 2, rows, 2 * rows), b.dtype()), *shape)


@contrib_function("MurmurHash3", "X: Y -> Y: N", hosted=True, seed=0, positive=1)
def murmur_hash3(b: FunctionBody) -> str:
    """Expand MurmurHash3: the 32-bit hash of each number's bits; the host hashes strings."""
    if not b.use.inputs[0]:
        raise Declined("strings are hashed on the host")
    b.opset = _BITS_OPSET
    wide = b.dtype() in ("int64", "uint64", "float64")
    bits = b.BitCast(b.input(0), to=CODES["uint64" if wide else "uint32"])
    blocks = [bits]
    if wide:
        high = b.BitShift(bits, b.constant(32, "uint64"), direction="RIGHT")
        low = b.BitwiseAnd(bits, b.constant(0xFFFFFFFF, "uint64"))
        blocks = [b.cast(x, "uint32") for x in (low, high)]
    value = b.constant(b.attr("seed") & 0xFFFFFFFF, "uint32")
    for block in blocks:
        block = b.Mul(_rotate_left(b, b.Mul(block, _uint32_constant(b, 0xCC9E2D51)), 15), _uint32_constant(b, 0x1B873593))
        value = b.Add(
            b.Mul(_rotate_left(b, b.BitwiseXor(value, block), 13), _uint32_constant(b, 5)), _uint32_constant(b, 0xE6546B64)
        )
    value = b.BitwiseXor(value, _uint32_constant(b, 4 * len(blocks)))
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        value = b.BitwiseXor(value, b.BitShift(value, _uint32_constant(b, shift), direction="RIGHT"))
        value = b.Mul(value, _uint32_constant(b, factor)) if factor != 1 else value
    return value if b.attr("positive") else b.BitCast(value, to=CODES["int32"])


def _uint32_constant(b: FunctionBody, value: int) -> str:
    return b.constant(value, "uint32")


def _rotate_left(b: FunctionBody, x: str, count: int) -> str:
    up, down = (b.BitShift(x, _uint32_constant(b, n), direction=way) for n, way in ((count, "LEFT"), (32 - count, "RIGHT")))
    return b.BitwiseOr(up, down)
