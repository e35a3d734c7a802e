"""Decoder attention whose keys and values stay in buffers of fixed length: one token per call, or sparse blocks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rammer.frontend.lower.contrib.attention import (
    HeadShapes,
    add_masks,
    default_scale,
    joined_heads,
    key_mask,
    pad_mask,
    split_heads,
)
from rammer.frontend.lower.contrib.function import Declined, FunctionBody, contrib_function
from rammer.frontend.lower.contrib.rotary import gather_angles, rotate_columns

#: Mask value of hidden keys.
_LEAST = {"float16": -65504.0}


def _least_number(b: FunctionBody) -> str:
    return b.number(_LEAST.get(b.dtype(), -3.0e38))


@contrib_function(
    "DecoderMaskedMultiHeadAttention",
    "query: T, key?: T, value?: T, mask_index?: M, attention_bias?: T, past_key?: T, past_value?: T, past_sequence_length?: M,"
    " beam_width?: M, cache_indirection?: M, bias?: T -> output: T, present_key?: T, present_value?: T, qk?: T2",
    num_heads=int, scale=float | None, mask_filter_value=float | None, past_present_share_buffer=int | None, output_qk=int | None,
)  # fmt: skip
def decoder_masked_attention(b: FunctionBody) -> list[str]:
    """Expand DecoderMaskedMultiHeadAttention: one query per row, over the input keys or a buffer that includes the new key."""
    heads, (batch, length, hidden) = b.attr("num_heads"), b.shape(0, 3)
    if b.has(9) or length != 1 or heads < 1:
        raise Declined(f"{length} queries by {heads} heads{', with beams' if b.has(9) else ''}")
    packed = not b.has(1)
    hidden = hidden // 3 if packed else hidden
    width = hidden // heads
    parts = b.split(b.input(0), 2, [hidden] * 3) if packed else [b.input(i) for i in range(3)]
    biases = b.split(b.input(10), 0, [hidden, hidden, b.shape(10, 1)[0] - 2 * hidden]) if b.has(10) else []
    cross = not b.has(5)
    if cross and (packed or b.wants(1) or b.wants(2)):
        raise Declined("keys by heads are needed without past keys")
    for i, bias in enumerate(biases[:1] if cross else biases):
        parts[i] = b.Add(parts[i], bias)
    q, *rest = (split_heads(b, x, batch, 1, heads, width) for x in (parts[:1] if cross else parts))
    if cross:
        k, v, total = parts[1], parts[2], b.shape(1, 4)[2]
        masks = [key_mask(b, 3, HeadShapes(batch, heads, 1, 0, total)) if b.has(3) else ""]
    else:
        k, v, total, masks = _update_buffers(b, rest, batch, heads)
    scores = b.Mul(b.MatMul(q, b.Transpose(k, perm=[0, 1, 3, 2])), b.number(default_scale(b, width)))
    mask = add_masks(b, *masks)
    scores = b.Add(scores, mask) if mask else scores
    y = b.MatMul(b.Softmax(scores, axis=-1), v)
    if b.wants(3) and not cross:
        raise Declined("products of queries and keys as a result are supported where no key is put into a buffer")
    return [joined_heads(b, y, batch, 1, heads * width), "" if cross else k, "" if cross else v, scores if b.wants(3) else ""]


def _update_buffers(b: FunctionBody, new: list[str], batch: int, heads: int) -> tuple[str, str, int, list[str]]:
    """Return keys and values with the ``new`` ones inserted, the length of the buffers, and the masks that hide keys."""
    if not b.use.attr("past_present_share_buffer", 0) or not b.has(7):
        raise Declined("past keys need past_present_share_buffer and past_sequence_length")
    total = b.shape(5, 4)[2]
    places = b.constant(np.arange(total).reshape(1, 1, total, 1))
    own = b.reshape(b.cast(b.input(7), "int64"), 1, 1, 1, 1)
    k, v = (b.Where(b.Equal(places, own), x, b.input(5 + i)) for i, x in enumerate(new))
    seen = b.LessOrEqual(b.constant(np.arange(total).reshape(1, 1, 1, total)), own)
    masks = [b.Where(seen, b.number(0.0), _least_number(b))]
    if b.has(3):
        at = HeadShapes(batch, heads, 1, 0, b.shape(3, 2)[1])
        masks.append(pad_mask(b, key_mask(b, 3, at), (batch, 1, 1), at.total, total))
    if b.has(4):
        lead, bias = b.shape(4, 4)[:3], b.shape(4)[3]
        masks.append(pad_mask(b, b.input(4), lead, bias, total))
    return k, v, total, masks


@dataclass(frozen=True)
class SparseGroup:
    """The extents of one use: ``groups`` heads share each of ``shared`` keys and values, in buffers of ``total`` positions."""

    batch: int
    shared: int
    groups: int
    length: int
    width: int
    total: int

    @staticmethod
    def of(b: FunctionBody) -> SparseGroup:
        """Return the extents from operands and attributes."""
        heads, shared, (batch, length, hidden) = b.attr("num_heads"), b.attr("kv_num_heads"), b.shape(0, 3)
        if shared < 1 or heads < 1 or heads % shared:
            raise Declined(f"{heads} heads share {shared} keys")
        width = hidden // heads if b.has(1) else hidden // (heads + 2 * shared)
        past = b.shape(3, 4)
        if past[:2] != (batch, shared) or past[3] != width or b.shape(4) != past or b.shape(8) != (batch,):
            raise Declined(f"keys of {list(past)} for {batch} rows of {shared} heads of {width} columns")
        return SparseGroup(batch, shared, heads // shared, length, width, past[2])

    def operands(self, b: FunctionBody) -> list[str]:
        """Return queries, keys and values by heads."""
        counts = [self.shared * self.groups, self.shared, self.shared]
        parts = [b.input(i) for i in range(3)] if b.has(1) else b.split(b.input(0), 2, [n * self.width for n in counts])
        return [split_heads(b, x, self.batch, self.length, n, self.width) for x, n in zip(parts, counts, strict=True)]

    def before(self, b: FunctionBody) -> str:
        """Return the number of past keys of each row, ``[batch, 1, 1, 1]``: 0 in a prompt."""
        longest = b.reshape(b.cast(b.input(7), "int64"), 1, 1, 1, 1)
        ends = b.reshape(b.cast(b.input(8), "int64"), self.batch, 1, 1, 1)
        is_prompt, length = b.Equal(longest, b.constant(self.length)), b.constant(self.length)
        return b.Where(is_prompt, b.constant(0), b.Max(b.Sub(ends, length), b.constant(0)))

    def present(self, b: FunctionBody, new: str, index: int, before: str) -> str:
        """Return the buffer of input ``index`` with the ``new`` keys after the past ones."""
        places = b.constant(np.arange(self.total).reshape(1, 1, self.total, 1))
        which = b.Clip(b.Sub(places, before), b.constant(0), b.constant(self.length - 1))
        wide = b.constant([self.batch, self.shared, self.total, self.width])
        moved = b.GatherElements(new, b.Expand(which, wide), axis=2)
        inside = b.And(b.GreaterOrEqual(places, before), b.Less(places, b.Add(before, b.constant(self.length))))
        return b.Where(inside, moved, b.input(index))

    def seen(self, b: FunctionBody, before: str) -> str:
        """Return a mask ``[batch, heads, length, total]`` that is true for earlier keys in the blocks of the query's layout."""
        block, (layouts, rows), (_, most) = b.attr("sparse_block_size"), b.shape(5, 2), b.shape(6, 2)
        heads, blocks = self.shared * self.groups, rows - 1
        if block < 1 or layouts < 1 or heads % layouts or blocks < 1:
            raise Declined(f"{layouts} layouts of {blocks} blocks of {block} keys for {heads} heads")
        entry = b.constant(np.arange(most, dtype=np.int32).reshape(1, 1, most, 1))
        first, last = (b.reshape(b.slice(b.input(5), 1, i, blocks + i), layouts, blocks, 1, 1) for i in (0, 1))
        own = b.And(b.GreaterOrEqual(entry, first), b.Less(entry, last))
        column = b.constant(np.arange(blocks, dtype=np.int32).reshape(1, 1, 1, blocks))
        is_there = b.And(own, b.Equal(b.reshape(b.input(6), layouts, 1, most, 1), column))
        mask = b.ReduceMax(b.cast(is_there, "int32"), b.constant([2]), keepdims=0)  # [layouts, query blocks, key blocks]
        keys = np.minimum(np.arange(self.total) // block, blocks - 1)
        mask = b.Gather(mask, b.constant(keys), axis=2)
        place = b.Add(b.reshape(before, self.batch, 1), b.constant(np.arange(self.length)[None]))
        rows_of = b.Clip(b.Div(place, b.constant(block)), b.constant(0), b.constant(blocks - 1))
        picked = b.Gather(b.Gather(mask, rows_of, axis=1), b.constant(np.arange(heads) % layouts), axis=0)
        picked = b.cast(b.Transpose(picked, perm=[1, 0, 2, 3]), "bool")
        causal = b.LessOrEqual(b.constant(np.arange(self.total).reshape(1, 1, 1, -1)), b.reshape(place, self.batch, 1, -1, 1))
        return b.And(picked, causal)


@contrib_function(
    "SparseAttention",
    "query: T, key?: T, value?: T, past_key: T, past_value: T, block_row_indices: M, block_col_indices: M,"
    " total_sequence_length: M, key_total_sequence_lengths: M, cos_cache?: T, sin_cache?: T"
    " -> output: T, present_key: T, present_value: T",
    num_heads=int, kv_num_heads=int, sparse_block_size=int, scale=float | None, do_rotary=int | None,
    rotary_interleaved=int | None,
)  # fmt: skip
def sparse_attention(b: FunctionBody) -> list[str]:
    """Expand SparseAttention: causal attention to the key blocks that a layout lists for each query block."""
    at = SparseGroup.of(b)
    q, k, v = at.operands(b)
    before = at.before(b)
    if b.use.attr("do_rotary", 0):
        places = b.Add(b.reshape(before, at.batch, 1), b.constant(np.arange(at.length)[None]))
        turn = gather_angles(b, (9, 10), places)
        widths = (at.width, 2 * b.shape(9, 2)[1])
        q, k = (rotate_columns(b, x, turn, widths, bool(b.use.attr("rotary_interleaved", 0))) for x in (q, k))
    keys, values = at.present(b, k, 3, before), at.present(b, v, 4, before)
    heads, wide = at.shared * at.groups, (at.batch, at.shared, at.groups)
    q = b.reshape(q, *wide, at.length, at.width)
    scores = b.MatMul(q, b.Unsqueeze(b.Transpose(keys, perm=[0, 1, 3, 2]), b.constant([2])))
    mask = b.reshape(at.seen(b, before), *wide, at.length, at.total)
    scores = b.Where(mask, b.Mul(scores, b.number(default_scale(b, at.width))), _least_number(b))
    y = b.MatMul(b.Softmax(scores, axis=-1), b.Unsqueeze(values, b.constant([2])))
    y = b.reshape(y, at.batch, heads, at.length, at.width)
    return [joined_heads(b, y, at.batch, at.length, heads * at.width), keys, values]
