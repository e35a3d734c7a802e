"""Grouped-query attention over keys of this and earlier calls: decoders as ONNX Runtime's model builder writes them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rammer.frontend.lower.contrib.attention import default_scale, joined_heads, split_heads
from rammer.frontend.lower.contrib.blocks import emit_unpack
from rammer.frontend.lower.contrib.function import Declined, FunctionBody, contrib_function
from rammer.frontend.lower.contrib.rotary import gather_angles, rotate_columns
from rammer.frontend.read.limits import MAX_POSITIONS


@dataclass(frozen=True)
class StoredKeys:
    """The storage of a buffer of keys or values: plain numbers, or integers of ``bits`` with a scale (an input's index)."""

    kind: str
    width: int
    bits: int = 0
    scale: int = 0

    @staticmethod
    def of(b: FunctionBody, at: QueryGroup, place: int, mode: str) -> StoredKeys:
        """Return the storage of the buffer of input ``place``. Raise Declined if scales do not fit."""
        given = b.dtype(place) if b.has(place) else ""
        if mode == "NONE":
            if given not in ("", b.dtype()):
                raise Declined(f"keys and values of {given} without scales")
            return StoredKeys(b.dtype(), at.width)
        bits, scale = b.attr("kv_cache_bit_width") or 8, place + 9
        kind = "uint8" if bits == 4 else "int8"
        counts = {"PER_TENSOR": 1, "PER_CHANNEL": at.shared * at.width}
        known = bits in (4, 8) and mode in counts and b.has(scale) and at.width * bits % 8 == 0
        if not known or int(np.prod(b.shape(scale))) != counts[mode] or given not in ("", kind):
            raise Declined(f"keys and values of {given or kind}, {bits} bits and the mode {mode!r}")
        return StoredKeys(kind, at.width * bits // 8, bits, scale)

    def scales(self, b: FunctionBody, at: QueryGroup) -> str:
        """Return scales that broadcast to ``[batch, shared, places, width]``."""
        whole = int(np.prod(b.shape(self.scale))) == 1
        return b.reshape(b.input(self.scale), *((1, 1, 1, 1) if whole else (1, at.shared, 1, at.width)))

    def packed(self, b: FunctionBody, at: QueryGroup, x: str) -> str:
        """Return new keys or values in their storage type."""
        if not self.bits:
            return x
        most = 1 << (self.bits - 1)
        codes = b.Round(b.Div(b.cast(x, "float32"), self.scales(b, at)))
        codes = b.Clip(codes, b.constant(-most, "float32"), b.constant(most - 1, "float32"))
        if self.bits == 8:
            return b.cast(codes, "int8")
        codes = b.cast(b.Add(codes, b.constant(most, "float32")), "uint8")
        pairs = b.reshape(codes, at.batch, at.shared, at.length, self.width, 2)
        low, high = (b.Squeeze(half, b.constant([4])) for half in b.split(pairs, 4, [1, 1]))
        return b.BitwiseOr(low, b.BitShift(high, b.constant(4, "uint8"), direction="LEFT"))

    def opened(self, b: FunctionBody, at: QueryGroup, x: str) -> str:
        """Return the numbers in the buffer, dequantised."""
        if not self.bits:
            return x
        codes = emit_unpack(b, x, 4, at.width) if self.bits == 4 else x
        numbers = b.cast(codes, "float32")
        numbers = b.Sub(numbers, b.constant(8, "float32")) if self.bits == 4 else numbers
        return b.cast(b.Mul(numbers, self.scales(b, at)), b.dtype())


@dataclass(frozen=True)
class QueryGroup:
    """The extents of one use: ``groups`` heads share each of ``shared`` keys and values. A call has ``length`` queries and
    returns ``total`` positions. Its past has ``buffer`` positions, 0 in the first call, which does not read them."""

    batch: int
    shared: int
    groups: int
    length: int
    width: int
    buffer: int
    total: int

    @staticmethod
    def of(b: FunctionBody) -> QueryGroup:
        """Return the extents from operands and attributes."""
        heads, shared = b.attr("num_heads"), b.attr("kv_num_heads")
        if shared < 1 or heads < 1 or heads % shared:
            raise Declined(f"{heads} heads share {shared} keys")
        if b.attr("sliding_window_cache"):
            raise Declined("a cache that slides is not supported")
        batch, length, hidden = b.shape(0, 3)
        width = hidden // heads if b.has(1) else hidden // (heads + 2 * shared)
        known = b.known(6)
        assert known is not None  # one of the operands that decide shapes
        if known.size != 1:
            raise Declined(f"total_sequence_length has {known.size} elements")
        total = int(known.reshape(()))
        if not length <= total <= MAX_POSITIONS:
            raise Declined(f"total_sequence_length is {total}, where {length} queries are the last ones of it")
        before = b.shape(3, 4)[2] if b.has(3) else 0
        return QueryGroup(batch, shared, heads // shared, length, width, 0 if total == length else before, max(before, total))

    @property
    def first(self) -> bool:
        """True if the past is empty."""
        return not self.buffer

    def operands(self, b: FunctionBody) -> list[str]:
        """Return queries, keys and values by heads."""
        heads, width = self.shared * self.groups, self.width
        sizes, counts = [heads * width, self.shared * width, self.shared * width], [heads, self.shared, self.shared]
        parts = [b.input(i) for i in range(3)] if b.has(1) else b.split(b.input(0), 2, sizes)
        made = [split_heads(b, x, self.batch, self.length, n, width) for x, n in zip(parts, counts, strict=True)]
        for i, place in enumerate((14, 15)):
            if b.has(place):
                made[i] = b.RMSNormalization(made[i], b.input(place), axis=-1, epsilon=b.attr("qk_norm_epsilon"))
        return made

    def past(self, b: FunctionBody) -> str:
        """Return the number of past keys of each row, ``[batch, 1]``; ``seqlens_k`` is the position of the last key."""
        if self.first:
            return b.constant(np.zeros((self.batch, 1), np.int64))
        last = b.reshape(b.cast(b.input(5), "int64"), self.batch, 1)
        return b.Max(b.Sub(last, b.constant(self.length - 1)), b.constant(0))

    def present(self, b: FunctionBody, new: str, index: int, past: str, stored: StoredKeys) -> str:
        """Return ``[batch, shared, total, width]``: the past keys of input ``index``, then the ``new`` ones, then zeros."""
        places = b.constant(np.arange(self.total)[None, None, :, None])
        before = b.reshape(past, self.batch, 1, 1, 1)
        if self.first:
            return self._padded(b, new, self.length, stored)
        if self.length > 1:
            shape = b.constant([self.batch, self.shared, self.total, stored.width])
            which = b.Clip(b.Sub(places, before), b.constant(0), b.constant(self.length - 1))
            new = b.GatherElements(new, b.Expand(which, shape), axis=2)
        inside = b.Less(places, b.Add(before, b.constant(self.length)))
        old = self._padded(b, b.input(index), self.buffer, stored)
        return b.Where(b.Less(places, before), old, b.Where(inside, new, b.cast(b.constant(0, "int32"), stored.kind)))

    def _padded(self, b: FunctionBody, x: str, length: int, stored: StoredKeys) -> str:
        if self.total == length:
            return x
        zeros = np.zeros((self.batch, self.shared, self.total - length, stored.width), np.int32)
        return b.Concat(x, b.cast(b.constant(zeros), stored.kind), axis=2)

    def seen(self, b: FunctionBody, past: str) -> str:
        """Return the mask of visible keys per query, ``[batch, 1, 1, length, total]``."""
        keys = b.constant(np.arange(self.total)[None, None, None, None, :])
        ahead = np.arange(self.length) if b.attr("causal") else np.full(self.length, self.length - 1)
        own = b.Add(b.reshape(past, self.batch, 1, 1, 1, 1), b.constant(ahead[None, None, None, :, None]))
        seen = b.LessOrEqual(keys, own)
        window = b.attr("local_window_size")
        if window >= 0:
            seen = b.And(seen, b.Greater(keys, b.Sub(own, b.constant(window))))
        return seen

    def attended(self, b: FunctionBody, q: str, k: str, v: str, past: str) -> list[str]:
        """Return the attention result, ``[batch, heads, length, width]``, and the products or weights
        selected by ``qk_output``."""
        q = b.reshape(q, self.batch, self.shared, self.groups, self.length, self.width)
        k, v = (b.reshape(x, self.batch, self.shared, 1, self.total, self.width) for x in (k, v))
        scores = b.Mul(b.MatMul(q, b.Transpose(k, perm=[0, 1, 2, 4, 3])), b.number(default_scale(b, self.width)))
        if b.attr("softcap"):
            cap = b.number(b.attr("softcap"))
            scores = b.Mul(b.Tanh(b.Div(scores, cap)), cap)
        if b.has(10):
            scores = b.Add(scores, self._bias(b))
        seen = self.seen(b, past)
        hidden = b.Where(seen, b.number(0.0), b.number(-65504.0 if b.dtype() == "float16" else -3.0e38))
        shares = self._softmax_scores(b, b.Add(scores, hidden))
        shape = (self.batch, self.shared * self.groups, self.length)
        shown = ""
        if b.attr("qk_output"):
            shown = shares if b.attr("qk_output") == 2 else b.Where(seen, scores, b.number(0.0))
            known = b.known(6)
            assert known is not None  # one of the operands that decide shapes
            shown = b.slice(b.reshape(shown, *shape, self.total), 3, 0, int(known.reshape(())))
        return [b.reshape(b.MatMul(shares, v), *shape, self.width), shown]

    def _bias(self, b: FunctionBody) -> str:
        """Return the bias, padded or cut to the number of keys, by groups."""
        batch, heads, length, total = b.shape(10, 4)
        bias = b.input(10)
        if total < self.total:
            bias = b.Concat(
                bias, b.cast(b.constant(np.zeros((batch, heads, length, self.total - total), np.float32)), b.dtype()), axis=3
            )
        elif total > self.total:
            bias = b.slice(bias, 3, 0, self.total)
        shared, groups = (1, 1) if heads == 1 else (self.shared, self.groups)
        return b.reshape(bias, batch, shared, groups, length, self.total)

    def _softmax_scores(self, b: FunctionBody, scores: str) -> str:
        """Return the softmax; a sink acts as one more key."""
        if not b.has(11) and not b.attr("smooth_softmax"):
            return b.Softmax(scores, axis=-1)
        shape = (1, self.shared, self.groups, 1, 1)
        sink = b.reshape(b.input(11), *shape) if b.has(11) else b.cast(b.constant(np.zeros(shape, np.float32)), b.dtype())
        column = b.Expand(sink, b.constant([self.batch, self.shared, self.groups, self.length, 1]))
        return b.slice(b.Softmax(b.Concat(scores, column, axis=-1), axis=-1), 4, 0, self.total)


@contrib_function(
    "GroupQueryAttention",
    "query: T, key?: T, value?: T, past_key?: X, past_value?: X, seqlens_k: M, total_sequence_length: M,"
    " cos_cache?: T, sin_cache?: T, position_ids?: L, attention_bias?: T, head_sink?: T, k_scale?: F, v_scale?: F,"
    " q_norm_weight?: T, k_norm_weight?: T -> output: T, present_key?: X, present_value?: X, output_qk?: T",
    deciding=(6,),
    num_heads=int, kv_num_heads=int, scale=0.0, softcap=0.0, local_window_size=-1, do_rotary=0, rotary_interleaved=0,
    smooth_softmax=0, qk_output=0, k_quant_type="NONE", v_quant_type="NONE", kv_cache_bit_width=0, sliding_window_cache=0,
    causal=1, qk_norm_epsilon=1e-6,
)  # fmt: skip
def group_query_attention(b: FunctionBody) -> list[str]:
    """Expand GroupQueryAttention: causal attention with keys and values shared by several heads."""
    at = QueryGroup.of(b)
    q, k, v = at.operands(b)
    past = at.past(b)
    if b.attr("do_rotary"):
        places = b.input(9) if b.has(9) else b.Add(past, b.constant(np.arange(at.length)))
        turn = gather_angles(b, (7, 8), places)
        widths = (at.width, 2 * b.shape(7, 2)[1])
        q, k = (rotate_columns(b, x, turn, widths, bool(b.attr("rotary_interleaved"))) for x in (q, k))
    stored = [StoredKeys.of(b, at, place, b.attr(f"{name}_quant_type")) for place, name in ((3, "k"), (4, "v"))]
    kept = [at.present(b, how.packed(b, at, x), 3 + i, past, how) for i, (how, x) in enumerate(zip(stored, (k, v), strict=True))]
    keys, values = (how.opened(b, at, x) for how, x in zip(stored, kept, strict=True))
    y, shown = at.attended(b, q, keys, values, past)
    return [joined_heads(b, y, at.batch, at.length, at.shared * at.groups * at.width), *kept, shown]
