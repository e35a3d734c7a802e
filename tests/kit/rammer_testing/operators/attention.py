"""ONNX Runtime's attention operators with all masks, caches and packings, and related embeddings and products."""

from __future__ import annotations

from typing import Any

import numpy as np

from rammer_testing.operators.case import Array, OperatorCase
from rammer_testing.operators.draw import Draw
from rammer_testing.operators.registry import describe_alone

_DOMAIN = "com.microsoft"
_OPSET = 17


def _mask(draw: Draw, batch: int, length: int, total: int) -> Array | None:
    """Return a mask in a random form; every query attends to some key."""
    form = draw.either(None, "keys", "ends", "both", "queries")
    if form is None:
        return None
    if form in ("keys", "queries"):
        shape = (batch, total) if form == "keys" else (batch, length, total)
        mask = draw.array(shape, "int32", low=0, high=1)
        mask[..., 0] = 1
        return mask
    ends = draw.array((batch,), "int32", low=1, high=total)
    if form == "ends":
        return ends
    return np.concatenate([ends, np.zeros(batch, np.int32)])


def _bias(draw: Draw, batch: int, heads: int, length: int, total: int) -> Array | None:
    shape = (draw.either(1, batch), draw.either(1, heads), length, total)
    return draw.array(shape) if draw.chance(0.3) else None


@describe_alone(f"{_DOMAIN}.Attention")
def attention(draw: Draw, op: str) -> OperatorCase:
    """Draw a case with projections inside the operator."""
    batch, length, heads, width = draw.size(1, 2), draw.size(1, 5), draw.size(1, 3), draw.either(2, 4)
    rows, past = draw.either(4, 6), draw.either(0, 0, 1, 3)
    hidden = heads * width
    sizes = [hidden, hidden, heads * draw.either(2, 4)] if not past and draw.chance(0.3) else None
    total = sum(sizes) if sizes else 3 * hidden
    operands = (
        draw.array((batch, length, rows)),
        draw.array((rows, total), low=-1, high=1),
        draw.array((total,)),  # ONNX Runtime 1.31 crashes without it
        _mask(draw, batch, length, past + length),
        draw.array((2, batch, heads, past, width)) if past else None,
        # ONNX Runtime 1.31 reads beyond a bias of fewer batches or heads, and crashes.
        draw.array((batch, heads, length, length)) if not past and draw.chance(0.3) else None,
    )
    attributes = {"num_heads": heads, "qkv_hidden_sizes": sizes, "unidirectional": draw.either(None, 0, 1)}
    attributes |= {"scale": draw.either(None, 0.3), "mask_filter_value": draw.either(None, -50.0)}
    return OperatorCase(op, _OPSET, operands, attributes, 2 if past or (not sizes and draw.chance(0.3)) else 1)


@describe_alone(f"{_DOMAIN}.MultiHeadAttention")
def multi_head_attention(draw: Draw, op: str) -> OperatorCase:
    """Draw a case with projected queries, keys and values: separate, packed or by heads."""
    batch, length, heads, width = draw.size(1, 2), draw.size(1, 5), draw.size(1, 3), draw.either(2, 4)
    # ONNX Runtime has no CPU kernel for packed forms; their test uses the unpacked equivalent.
    form = draw.either("apart", "apart", "apart", "heads", "packed", "pairs")
    hidden, past = heads * width, draw.either(0, 0, 2) if form == "apart" else 0
    keys, out = (length, width) if form == "packed" or past else (draw.size(1, 5), draw.either(width, 2))
    bias = None
    if form == "packed":
        operands: list[Array | None] = [draw.array((batch, length, heads, 3, width)), None, None]
    elif form == "pairs":
        operands = [draw.array((batch, length, hidden)), draw.array((batch, keys, heads, 2, width)), None]
    elif form == "heads":
        operands = [
            draw.array((batch, length, hidden)),
            draw.array((batch, heads, keys, width)),
            draw.array((batch, heads, keys, width)),
        ]
        bias = draw.array((3 * hidden,)) if draw.chance(0.4) else None
    else:
        operands = [
            draw.array((batch, length, hidden)),
            draw.array((batch, keys, hidden)),
            draw.array((batch, keys, heads * out)),
        ]
        bias = draw.array((2 * hidden + heads * out,)) if draw.chance(0.4) else None
    total = past + keys
    earlier = [draw.array((batch, heads, past, n)) if past else None for n in (width, out)]
    mask = _mask(draw, batch, length, total)
    operands += [bias, mask, _bias(draw, batch, heads, length, total), *earlier]
    attributes = {"num_heads": heads, "unidirectional": draw.either(None, 0, 1) if keys == length else None}
    attributes |= {"scale": draw.either(None, 0.3), "mask_filter_value": draw.either(None, -50.0)}
    if form == "apart" and past and draw.chance():  # a buffer with exactly these keys plus some spare rows
        room = 3
        operands[6:8] = [draw.array((batch, heads, past + length + room, n)) for n in (width, out)]
        return OperatorCase(op, _OPSET, (*operands, np.array([past], np.int32)), attributes, 3)
    outputs = draw.either(1, 4) if form == "heads" else 3 if past or (form == "apart" and draw.chance(0.3)) else 1
    absent = frozenset((1, 2)) if outputs == 4 else frozenset()
    kinds = ("float32",) * (outputs - len(absent))
    return OperatorCase(op, _OPSET, tuple(operands), attributes, outputs, absent=absent, made=kinds)


@describe_alone(f"{_DOMAIN}.GroupQueryAttention")
def group_query_attention(draw: Draw, op: str) -> OperatorCase:
    """Draw a case of a first or later call: rows of several lengths, packed or not, with or without rotation."""
    batch, shared, groups, width = draw.size(1, 2), draw.size(1, 2), draw.size(1, 3), draw.either(16, 32)
    heads, first = shared * groups, draw.chance()
    length, before = (draw.size(1, 5), 0) if first else (draw.either(1, 1, 2) if batch == 1 else 1, draw.size(1, 5))
    total = before + length
    packed = draw.chance(0.4)
    bits = draw.either(0, 0, 0, 4, 8)
    # A code at a rounding tie is its neighbour if a float16 differs in its last bit.
    kind = "float32" if bits else draw.either("float32", "float16")
    wide = (heads + 2 * shared) * width if packed else heads * width
    operands: list[Array | None] = [draw.array((batch, length, wide), kind, low=-1, high=1)]
    operands += [None if packed else draw.array((batch, length, shared * width), kind, low=-1, high=1) for _ in range(2)]
    spare = draw.either(0, 0, 2)  # a buffer that is longer than its contents
    buffer = before + (draw.either(0, length + spare))
    stored = {0: kind, 4: "uint8", 8: "int8"}[bits]
    columns = width // 2 if bits == 4 else width
    least, most = {0: (-1, 1), 4: (0, 255), 8: (-99, 99)}[bits]
    operands += [draw.array((batch, shared, buffer, columns), stored, low=least, high=most) for _ in range(2)]
    ends = np.full(batch, total - 1, np.int32)
    if batch > 1 and not first and before > 1 and draw.chance():
        ends[1] -= 1
    operands += [ends, np.array(total, np.int32)]
    attributes: dict[str, Any] = {"num_heads": heads, "kv_num_heads": shared, "scale": draw.either(None, 0.3)}
    attributes |= {"softcap": draw.either(None, 5.0), "local_window_size": draw.either(None, None, 1, 2)}
    if draw.chance():
        attributes |= {"do_rotary": 1, "rotary_interleaved": draw.either(None, 0, 1)}
        columns = width // 2
        operands += [draw.array((12, columns), kind, low=-1, high=1) for _ in range(2)]
    if bits:
        mode = draw.either("PER_TENSOR", "PER_CHANNEL")
        attributes |= {"k_quant_type": mode, "v_quant_type": mode, "kv_cache_bit_width": bits}
        scales = (1,) if mode == "PER_TENSOR" else (1, shared, 1, width)
        operands += [None] * (12 - len(operands)) + [draw.array(scales, low=0.01, high=0.2) for _ in range(2)]
    asked = draw.either(0, 0, 1, 2) if not bits else 0
    attributes["qk_output"] = asked or draw.either(None, 0)
    return OperatorCase(op, _OPSET, tuple(operands), attributes, 4 if asked else 3, frozenset({6}))


@describe_alone(f"{_DOMAIN}.RotaryEmbedding")
def rotary_embedding(draw: Draw, op: str) -> OperatorCase:
    """Draw a case with heads interleaved or in a separate dimension, and rotation of all or only the first columns."""
    batch, length, heads, half, rows = draw.size(1, 2), draw.size(1, 4), draw.size(1, 3), draw.either(2, 4), 10
    apart = draw.chance()
    attributes: dict[str, Any] = {"interleaved": draw.either(None, 0, 1), "scale": draw.either(None, 1.0, 2.0)}
    attributes["is_packed_batching"] = draw.either(None, 0, 1)
    width = 2 * half
    if draw.chance(0.4):
        width, attributes = width + draw.either(2, 4), {**attributes, "rotary_embedding_dim": 2 * half, "num_heads": heads}
    elif draw.chance():
        attributes["num_heads"] = heads
    shape = (batch, heads, length, width) if apart else (batch, length, heads * width)
    places = (
        draw.array((1,), "int64", low=0, high=5)
        if draw.chance(0.3)
        else draw.array((batch, length), "int64", low=0, high=rows - 1)
    )
    kind = draw.either("float32", "float32", "float16")
    caches = [draw.array((rows, half), kind, low=-1, high=1) for _ in range(2)]
    return OperatorCase(op, _OPSET, (draw.array(shape, kind), places, *caches), attributes)


@describe_alone(f"{_DOMAIN}.MatMulNBits")
def few_bits(draw: Draw, op: str) -> OperatorCase:
    """Draw a case with weights of 2, 4 or 8 bits in blocks, constant or not. The last block may extend past the end. Columns may
    have explicit blocks: ONNX Runtime then reads packed zero points in another order."""
    bits, block = draw.either(4, 4, 8, 2), draw.either(16, 32)
    rows, depth = draw.size(1, 9), block * draw.size(1, 3) - draw.either(0, 0, 4)
    blocks = -(-depth // block)
    kind = draw.either("float32", "float32", "float16")
    weights = draw.array((rows, blocks, block * bits // 8), "uint8", 0.0, 0, 255)
    scales = np.abs(draw.array(draw.either((rows * blocks,), (rows, blocks)), kind, low=0.01, high=0.2))
    own = draw.array((depth,), "int32", low=0, high=blocks - 1) if bits == 4 and draw.chance(0.2) else None
    points = draw.array((rows, -(-blocks * bits // 8)), "uint8", 0.0, 0, 255) if draw.chance() and own is None else None
    if bits == 4 and draw.chance(0.2):
        points = draw.array((rows, blocks), kind, low=0, high=15)
    attributes = {"K": depth, "N": rows, "bits": bits, "block_size": block}
    bias = draw.array((rows,), kind) if draw.chance(0.3) else None
    x = draw.array((*draw.shape(0, 2), draw.size(1, 4), depth), kind, low=-1, high=1)
    static = frozenset({1, 2, 3, 4}) if draw.chance(0.7) else frozenset()
    return OperatorCase(op, _OPSET, (x, weights, scales, points, own, bias), attributes, 1, static)


@describe_alone(f"{_DOMAIN}.GatherBlockQuantized")
def gathered_blocks(draw: Draw, op: str) -> OperatorCase:
    """Draw a case that gathers rows of a table of packed bytes; indices outside the table yield zeros."""
    bits, block, rows = draw.either(4, 4, 8), 16, draw.size(2, 7)
    blocks = draw.size(1, 3)
    table = draw.array((rows, blocks * block * bits // 8), "uint8", 0.0, 0, 255)
    scales = np.abs(draw.array((rows, blocks), "float32", low=0.01, high=0.2))
    points = draw.array((rows, -(-blocks * bits // 8)), "uint8", 0.0, 0, 255) if draw.chance() else None
    indices = draw.array(draw.shape(0, 2), draw.either("int32", "int64"), low=-rows - 1, high=rows)
    attributes = {"bits": bits, "block_size": block, "gather_axis": draw.either(None, 0), "quantize_axis": draw.either(None, 1)}
    return OperatorCase(op, 21, (table, indices, scales, points), attributes, 1, frozenset({0, 2, 3}))
