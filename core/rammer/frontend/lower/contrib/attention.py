"""ONNX Runtime's attention operators, which its optimiser creates in encoders and decoders, as products around a softmax."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rammer.frontend.lower.contrib.function import Declined, FunctionBody, contrib_function

#: Mask value of keys that are never visible.
_LEAST = {"float32": -3.4028234663852886e38, "float16": -65504.0, "bfloat16": -3.3895313892515355e38}


@dataclass(frozen=True)
class HeadShapes:
    """The extents of one use: batch, heads, queries, earlier keys and all keys."""

    batch: int
    count: int
    length: int
    past: int
    total: int


def attend_heads(b: FunctionBody, q: str, k: str, v: str, mask: str, scale: str) -> str:
    """Return ``Softmax(q @ k' * scale + mask) @ v``; operands and result are ``[batch, heads, length, width]``."""
    scores = b.Mul(b.MatMul(q, b.Transpose(k, perm=[0, 1, 3, 2])), scale)
    return b.MatMul(b.Softmax(b.Add(scores, mask) if mask else scores, axis=-1), v)


def split_heads(b: FunctionBody, x: str, batch: int, length: int, heads: int, width: int) -> str:
    """Return ``x [batch, length, heads * width]`` as ``[batch, heads, length, width]``."""
    return b.Transpose(b.reshape(x, batch, length, heads, width), perm=[0, 2, 1, 3])


def joined_heads(b: FunctionBody, x: str, batch: int, length: int, hidden: int) -> str:
    """Return ``x [batch, heads, length, width]`` as ``[batch, length, heads * width]``."""
    return b.reshape(b.Transpose(x, perm=[0, 2, 1, 3]), batch, length, hidden)


def causal_mask(b: FunctionBody, at: HeadShapes, like: int = 0) -> str:
    """Return a mask ``[1, 1, length, total]``: 0 for keys up to the query's position, else the least number."""
    seen = np.arange(at.total)[None, :] <= at.past + np.arange(at.length)[:, None]
    values = np.where(seen, 0.0, _LEAST[b.dtype(like)])[None, None]
    return b.cast(b.constant(values.astype(np.float32)), b.dtype(like))


def add_masks(b: FunctionBody, *masks: str) -> str:
    """Return the sum of the non-empty masks, or "" if all are empty."""
    given = [m for m in masks if m]
    total = given[0] if given else ""
    for mask in given[1:]:
        total = b.Add(total, mask)
    return total


def mask_bias(b: FunctionBody, seen: str, like: int = 0) -> str:
    """Return 0 where ``seen`` (bool) is true, else the filter value."""
    return b.Where(seen, b.number(0.0, like), b.number(b.use.attr("mask_filter_value", -10000.0), like))


def key_mask(b: FunctionBody, index: int, at: HeadShapes, like: int = 0) -> str:
    """Return the mask of input ``index`` as ``[batch or 1, 1, length or 1, total]``, or "" if it is absent.

    The input has one number per key (rank 2), or per query and key (ranks 3 and 4). With rank 1 it has the end of the keys in
    each row and optionally the start."""
    if not b.has(index):
        return ""
    shape, mask = b.shape(index), b.input(index)
    if len(shape) == 1:
        return mask_bias(b, _range_mask(b, mask, shape[0], at), like)
    if shape == (at.batch, at.total):
        seen = b.reshape(mask, at.batch, 1, 1, at.total)
    elif shape == (at.batch, at.length, at.total):
        seen = b.reshape(mask, at.batch, 1, at.length, at.total)
    elif len(shape) == 4 and shape[:2] == (at.batch, 1) and shape[2] == shape[3] >= at.total:
        seen = b.slice(b.slice(mask, 2, at.past, at.past + at.length), 3, 0, at.total)
    else:
        raise Declined(f"a mask of shape {list(shape)}, where {at.batch} rows of {at.total} keys are attended to")
    return mask_bias(b, b.Greater(seen, b.constant(0, "int32")), like)


def _range_mask(b: FunctionBody, mask: str, count: int, at: HeadShapes) -> str:
    """Return True where a key is before the end of its row and not before the start."""
    if count not in (at.batch, 2 * at.batch):
        raise Declined(f"a mask of {count} numbers for {at.batch} rows")
    place = b.constant(np.arange(at.total, dtype=np.int32))
    ends = b.reshape(b.slice(mask, 0, 0, at.batch), at.batch, 1, 1, 1)
    seen = b.Less(place, ends)
    if count == 2 * at.batch:
        starts = b.reshape(b.slice(mask, 0, at.batch, count), at.batch, 1, 1, 1)
        seen = b.And(seen, b.GreaterOrEqual(place, starts))
    return seen


def default_scale(b: FunctionBody, width: int) -> float:
    """Return the attribute ``scale``, or 1 over the root of the width if it is absent."""
    return float(b.use.attr("scale", 0.0)) or 1.0 / float(np.sqrt(max(width, 1)))


@contrib_function(
    "Attention",
    "input: T, weights: T, bias?: T, mask_index?: M, past?: T, attention_bias?: T, past_sequence_length?: M2"
    " -> output: T, present?: T",
    num_heads=int, unidirectional=0, qkv_hidden_sizes=list[int], do_rotary=0, rotary_embedding_dim=0, mask_filter_value=-10000.0,
    scale=0.0, past_present_share_buffer=0,
)  # fmt: skip
def expand_attention(b: FunctionBody) -> list[str]:
    """Expand Attention: projections and attention in one operator."""
    _check_plain(b, 6)
    (batch, length, _), heads = b.shape(0, 3), b.attr("num_heads")
    sizes = list(b.attr("qkv_hidden_sizes")) or [b.shape(1, 2)[1] // 3] * 3
    product = b.MatMul(b.input(0), b.input(1))
    if b.has(2):
        product = b.Add(product, b.input(2))
    parts = b.split(product, 2, sizes)
    return self_attended(b, parts, sizes, (batch, length, heads), (3, 4, 5))


def self_attended(
    b: FunctionBody,
    parts: list[str],
    sizes: list[int],
    extents: tuple[int, int, int],
    places: tuple[int, int, int],
    like: int = 0,
) -> list[str]:
    """Return attention over projections, with mask, past and bias at these inputs, and the present keys and values. Input
    ``like`` has their element type."""
    (batch, length, heads), (mask, past, bias) = extents, places
    if heads < 1 or len(sizes) != 3 or sizes[0] != sizes[1] or any(n % heads for n in sizes):
        raise Declined(f"{heads} heads share projections of {sizes}")
    q, k, v = (split_heads(b, x, batch, length, heads, n // heads) for x, n in zip(parts, sizes, strict=True))
    before, present = 0, ""
    if b.has(past):
        before = b.shape(past, 5)[3]
        earlier = [b.Squeeze(x, b.constant([0])) for x in b.split(b.input(past), 0, [1, 1])]
        k, v = b.Concat(earlier[0], k, axis=2), b.Concat(earlier[1], v, axis=2)
    if b.wants(1):
        present = b.Concat(b.Unsqueeze(k, b.constant([0])), b.Unsqueeze(v, b.constant([0])), axis=0)
    at = HeadShapes(batch, heads, length, before, before + length)
    masks = [
        key_mask(b, mask, at, like),
        causal_mask(b, at, like) if b.attr("unidirectional") else "",
        b.input(bias) if bias >= 0 else "",
    ]
    y = attend_heads(b, q, k, v, add_masks(b, *masks), b.number(default_scale(b, sizes[0] // heads), like))
    return [joined_heads(b, y, batch, length, sizes[2]), present]


def _check_plain(b: FunctionBody, shared: int) -> None:
    if b.attr("do_rotary"):
        raise Declined("rotary embedding inside of it is not supported")
    if b.use.attr("past_present_share_buffer", 0) or b.has(shared):
        raise Declined("keys and values in a shared buffer are not supported")


@contrib_function(
    "MultiHeadAttention",
    "query: T, key?: T, value?: T, bias?: T, key_padding_mask?: M, attention_bias?: T, past_key?: T, past_value?: T,"
    " past_sequence_length?: M, cache_indirection?: M -> output: T, present_key?: T, present_value?: T, qk?: T2",
    num_heads=int, mask_filter_value=-10000.0, scale=0.0, unidirectional=0,
)  # fmt: skip
def multi_head_attention(b: FunctionBody) -> list[str]:
    """Expand MultiHeadAttention over projections, packed or not. New keys are appended to the past or written into its buffer."""
    if b.has(9):
        raise Declined("beams that share keys and values are not supported")
    if b.attr("num_heads") < 1:
        raise Declined(f"it has {b.attr('num_heads')} heads")
    q, k, v, (batch, length, width) = _split_operands(b)
    keys, out = _key_extents(b, length, width)
    heads, past = b.attr("num_heads"), 0
    if b.has(8):
        k, v, total, masks = _in_buffers(b, (k, v), (batch, length, keys))
    else:
        if b.has(6) and b.has(7):
            past = b.shape(6, 4)[2]
            k, v = b.Concat(b.input(6), k, axis=2), b.Concat(b.input(7), v, axis=2)
        total = past + keys
        at = HeadShapes(batch, heads, length, past, total)
        masks = [key_mask(b, 4, at), causal_mask(b, at) if b.attr("unidirectional") else "", b.input(5)]
    scores = b.Mul(b.MatMul(q, b.Transpose(k, perm=[0, 1, 3, 2])), b.number(default_scale(b, width)))
    mask = add_masks(b, *masks)
    scores = b.Add(scores, mask) if mask else scores
    if b.wants(3) and b.has(8):
        raise Declined("products of queries and keys as a result are supported where no key is put into a buffer")
    y = b.MatMul(b.Softmax(scores, axis=-1), v)
    return [joined_heads(b, y, batch, length, heads * out), k, v, scores]


def _in_buffers(b: FunctionBody, new: tuple[str, str], extents: tuple[int, int, int]) -> tuple[str, str, int, list[str]]:
    """Return the buffers with the ``new`` keys and values after the past ones, their length, and masks. Input 8 holds the number
    of past keys."""
    (batch, length, keys), room = extents, b.shape(6, 4)[2]
    heads, places = b.attr("num_heads"), b.constant(np.arange(room).reshape(1, 1, room, 1))
    past = b.reshape(b.cast(b.input(8), "int64"), 1, 1, 1, 1)
    which = b.Clip(b.Sub(places, past), b.constant(0), b.constant(keys - 1))
    inside = b.And(b.GreaterOrEqual(places, past), b.Less(places, b.Add(past, b.constant(keys))))
    kept = []
    for place, x in zip((6, 7), new, strict=True):
        moved = b.GatherElements(x, b.Expand(which, b.constant(list(b.shape(place, 4)))), axis=2)
        kept.append(b.Where(inside, moved, b.input(place)))
    ahead = np.arange(length) if b.attr("unidirectional") else np.full(length, keys - 1)
    last = b.Add(past, b.constant(ahead.reshape(1, 1, length, 1)))
    seen = b.LessOrEqual(b.constant(np.arange(room).reshape(1, 1, 1, room)), last)
    masks = [b.Where(seen, b.number(0.0), b.number(_LEAST[b.dtype()]))]
    if b.has(4):
        rank, have = len(b.shape(4)), b.shape(4)[-1] if len(b.shape(4)) in (2, 3) else room
        mask = key_mask(b, 4, HeadShapes(batch, heads, length, 0, have))
        masks.append(pad_mask(b, mask, (batch, 1, length if rank == 3 else 1), have, room))
    if b.has(5):
        masks.append(pad_mask(b, b.input(5), b.shape(5, 4)[:3], b.shape(5)[3], room))
    return kept[0], kept[1], room, masks


def pad_mask(b: FunctionBody, mask: str, lead: tuple[int, ...], have: int, want: int) -> str:
    """Return the mask extended with zeros for keys that are hidden anyway."""
    if have == want:
        return mask
    if have > want:
        raise Declined(f"a mask of {have} keys for a buffer of {want}")
    return b.Concat(mask, b.cast(b.constant(np.zeros((*lead, want - have), np.float32)), b.dtype()), axis=3)


def _split_operands(b: FunctionBody) -> tuple[str, str, str, tuple[int, int, int]]:
    """Return queries, keys and values by heads, with bias, and (batch, queries, width of a head)."""
    heads, shape = b.attr("num_heads"), b.shape(0)
    if len(shape) == 5:
        batch, length, _, count, width = shape
        if count != 3 or b.has(1):
            raise Declined(f"packed queries, keys and values have the shape {list(shape)}")
        if b.has(3):
            raise Declined("packed queries, keys and values with a bias are not supported")
        q, k, v = (_unpack_heads(b, b.input(0), i, 3) for i in range(3))
        return q, k, v, (batch, length, width)
    batch, length, total = b.shape(0, 3)
    width = total // heads
    bias = _split_biases(b, total)
    q = split_heads(b, _add_bias(b, b.input(0), bias[0]), batch, length, heads, width)
    if not b.has(1):
        raise Declined("queries without keys are not supported")
    rank = len(b.shape(1))
    if rank == 5:
        if b.has(3):
            raise Declined("packed keys and values with a bias are not supported")
        return q, _unpack_heads(b, b.input(1), 0, 2), _unpack_heads(b, b.input(1), 1, 2), (batch, length, width)
    if rank == 4:
        return q, b.input(1), b.input(2), (batch, length, width)  # already with bias
    keys, wide = b.shape(1, 3)[1], b.shape(2, 3)[2]
    k = split_heads(b, _add_bias(b, b.input(1), bias[1]), batch, keys, heads, width)
    v = split_heads(b, _add_bias(b, b.input(2), bias[2]), batch, keys, heads, wide // heads)
    return q, k, v, (batch, length, width)


def _key_extents(b: FunctionBody, length: int, width: int) -> tuple[int, int]:
    """Return the number of keys without the past, and the width of a head's values."""
    if len(b.shape(0)) == 5:
        return length, width
    shape = b.shape(1)
    if len(shape) == 5:
        return shape[1], shape[4]
    if len(shape) == 4:
        return shape[2], b.shape(2, 4)[3]
    return shape[1], b.shape(2, 3)[2] // int(b.attr("num_heads"))


def _split_biases(b: FunctionBody, total: int) -> list[str]:
    if not b.has(3):
        return ["", "", ""]
    size = b.shape(3, 1)[0]
    return b.split(b.input(3), 0, [total, total, size - 2 * total])


def _add_bias(b: FunctionBody, x: str, bias: str) -> str:
    return b.Add(x, bias) if bias else x


def _unpack_heads(b: FunctionBody, x: str, which: int, count: int) -> str:
    """Return tensor ``which`` of ``count`` packed ones, ``[batch, length, heads, count, width]``, by heads."""
    part = b.split(x, 3, [1] * count)[which]
    return b.Transpose(b.Squeeze(part, b.constant([3])), perm=[0, 2, 1, 3])
