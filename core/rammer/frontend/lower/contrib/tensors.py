"""Distances, slices, token hashes and other operators on tensors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rammer.frontend.lower.contrib.function import Declined, FunctionBody, contrib_function

#: The least result of a pooled word in ONNX Runtime.
_LEAST_POOLED = -1e12
#: Largest number of captured states of a request.
_MAX_CAPTURED = 8


@contrib_function("SampleOp", "X: Y -> Y: Y")
def sample_op(b: FunctionBody) -> str:
    """Expand SampleOp to a copy of the input."""
    return b.Identity(b.input(0))


@contrib_function("CDist", "A: T, B: T -> C: T", metric="sqeuclidean")
def pair_distances(b: FunctionBody) -> str:
    """Expand CDist: distances of all row pairs; differences are squared, so that near rows keep their digits."""
    (_, columns), (_, others), metric = b.shape(0, 2), b.shape(1, 2), b.attr("metric")
    if columns != others or metric not in ("euclidean", "sqeuclidean"):
        raise Declined(
            f"the metric {metric!r} of rows of {columns} and {others} elements; euclidean and sqeuclidean are supported"
        )
    difference = b.Sub(b.Unsqueeze(b.input(0), b.constant([1])), b.Unsqueeze(b.input(1), b.constant([0])))
    total = b.ReduceSum(b.Mul(difference, difference), b.constant([2]), keepdims=0)
    return b.Sqrt(total) if metric == "euclidean" else total


@contrib_function("MatMulInteger16", "A: H, B: H2 -> Y: M")
def mat_mul_integer16(b: FunctionBody) -> str:
    """Expand MatMulInteger16: a product of 16-bit integers in 32 bits."""
    return b.MatMul(b.cast(b.input(0), "int32"), b.cast(b.input(1), "int32"))


@contrib_function("UnfoldTensor", "input: A -> output: A", size=int, dim=-1, step=1)
def unfold_tensor(b: FunctionBody) -> str:
    """Expand UnfoldTensor: all slices along an axis, whose elements become the last axis."""
    shape, size, step = b.shape(0), b.attr("size"), b.attr("step")
    axis = b.attr("dim") % max(len(shape), 1)
    if not shape or size < 1 or step < 1 or size > shape[axis]:
        raise Declined(f"slices of {size} elements with step {step} of {list(shape)}")
    places = np.arange(0, shape[axis] - size + 1, step)[:, None] + np.arange(size)
    slices = b.Gather(b.input(0), b.constant(places), axis=axis)
    rank = len(shape) + 1
    return b.Transpose(slices, perm=[*(i for i in range(rank) if i != axis + 1), axis + 1])


@contrib_function("NGramRepeatBlock", "input_ids: L, scores: F -> scores_out: F", ngram_size=int)
def block_repeated_ngrams(b: FunctionBody) -> str:
    """Expand NGramRepeatBlock: the score of a token that would repeat an n-gram is minus infinity."""
    (batch, length), (_, words), size = b.shape(0, 2), b.shape(1, 2), b.attr("ngram_size")
    if size < 1:
        raise Declined(f"ngram_size is {size}")
    if length < size:
        return b.Identity(b.input(1))
    places = np.arange(length - size + 1)[:, None] + np.arange(size)
    ids = b.Gather(b.input(0), b.constant(places), axis=1)
    repeats = b.constant(np.ones((batch, len(places)), bool))
    if size > 1:
        tail = b.Unsqueeze(b.slice(b.input(0), 1, length - size + 1, length), b.constant([1]))
        same = b.cast(b.Equal(b.slice(ids, 2, 0, size - 1), tail), "int32")
        repeats = b.cast(b.ReduceMin(same, b.constant([2]), keepdims=0), "bool")
    last = b.Squeeze(b.slice(ids, 2, size - 1, size), b.constant([2]))
    zeros = b.constant(np.zeros((batch, words), np.float32))
    marked = b.ScatterElements(zeros, last, b.cast(repeats, "float32"), axis=1, reduction="max")
    return b.Where(b.Greater(marked, b.constant(0, "float32")), b.number(-np.inf, 1), b.input(1))


@contrib_function(
    "WordConvEmbedding", "Sequence: M, W: F, B: F, C: F -> Y: F",
    embedding_size=int | None, conv_window_size=int | None, char_embedding_size=int | None,
)  # fmt: skip
def word_conv_embedding(b: FunctionBody) -> str:
    """Expand WordConvEmbedding: look up and convolve the characters of each word; each filter contributes its maximum."""
    (count, length), (filters, _, window, width) = b.shape(0, 2), b.shape(1, 4)
    if window > length or b.shape(3, 2)[1] != width or b.shape(2, 1)[0] != filters:
        raise Declined(f"windows of {window} characters of {width} numbers for words of {length} characters of {b.shape(3)[1]}")
    ids, zero = b.input(0), b.constant(0, "int32")
    begins = b.Greater(b.slice(ids, 1, 0, 1), zero)
    used = b.ReduceSum(b.cast(b.Greater(ids, zero), "int32"), b.constant([1]), keepdims=1)
    used = b.Where(begins, b.Max(used, b.constant(window, "int32")), zero)
    places = b.constant(np.arange(length, dtype=np.int32)[None])
    chars = b.Where(b.Unsqueeze(b.Less(places, used), b.constant([2])), b.Gather(b.input(3), ids), b.number(0.0, 1))
    y = b.Tanh(b.Conv(b.reshape(chars, count, 1, length, width), b.input(1), b.input(2)))
    y = b.reshape(y, count, filters, length - window + 1)
    steps = b.constant(np.arange(length - window + 1, dtype=np.int32)[None])
    inside = b.Less(steps, b.Sub(used, b.constant(window - 1, "int32")))
    pooled = b.ReduceMax(
        b.Where(b.Unsqueeze(inside, b.constant([1])), y, b.number(_LEAST_POOLED, 1)), b.constant([2]), keepdims=0
    )
    return b.Where(begins, pooled, b.number(0.0, 1))


@dataclass(frozen=True)
class PackedTokens:
    """The concatenated tokens of several requests, and the tokens before each request. Input ``past`` has the last ``before``
    tokens of each request. Request ``i`` has the tokens from ``starts[i]`` up to ``starts[i + 1]``."""

    count: int
    requests: int
    before: int
    starts: str

    def places(self, b: FunctionBody, back: int | str, at: str, request: str) -> str:
        """Return indices into the past followed by all tokens: ``back`` tokens before index ``at`` of a request."""
        start = b.Gather(self.starts, request)
        distance = b.constant(back) if isinstance(back, int) else back
        place = b.Sub(at, distance)
        older = b.Sub(b.Mul(b.Add(request, b.constant(1)), b.constant(self.before)), b.Sub(start, place))
        return b.Where(b.GreaterOrEqual(place, start), b.Add(place, b.constant(self.requests * self.before)), older)

    def trailing(self, b: FunctionBody, ends: str) -> str:
        """Return the indices of the tokens before ``ends [requests, n]``: ``[requests, n, before]``."""
        backs = b.constant(np.arange(self.before, 0, -1))
        request = b.constant(np.arange(self.requests)[:, None, None])
        return self.places(b, backs, b.Unsqueeze(ends, b.constant([2])), request)

    def begins(self, b: FunctionBody) -> str:
        """Return the index of each request's first token."""
        return b.slice(self.starts, 0, 0, self.requests)


@dataclass(frozen=True)
class NeighbourHashes:
    """Hashes of each token and its predecessors; absent inputs are ""."""

    tokens: str
    past: str
    offsets: str
    end: str
    segments: str
    past_segments: str

    def written(self, b: FunctionBody, at: PackedTokens) -> list[str]:
        """Return hashes ``[tokens, heads]``, all tokens after those of the past, and their segments."""
        kind, missing = b.dtype(), b.reshape(self.end) if self.end else b.constant(b.attr("pad_id"), b.dtype())
        past = b.reshape(self.past, -1) if self.past else b.Expand(missing, b.constant([at.requests * at.before]))
        whole = b.Concat(past, self.tokens, axis=0)
        place = b.constant(np.arange(at.count))
        started = b.LessOrEqual(b.Unsqueeze(at.begins(b), b.constant([0])), b.Unsqueeze(place, b.constant([1])))
        request = b.Sub(b.ReduceSum(b.cast(started, "int64"), b.constant([1]), keepdims=0), b.constant(1))
        segments = ""
        if self.segments:
            first = b.Gather(self.segments, at.begins(b))
            unknown = b.Expand(b.Unsqueeze(first, b.constant([1])), b.constant([at.requests, at.before]))
            segments = b.Concat(b.reshape(self.past_segments or unknown, -1), self.segments, axis=0)
        tokens, crossed, newer = [self.tokens], "", place
        for back in range(1, at.before + 1):
            older = at.places(b, back, place, request)
            token = b.Gather(whole, older)
            borders = [b.Equal(token, missing)] if b.attr("reset_on_eos") and self.end else []
            if segments:
                now = b.Add(place, b.constant(at.requests * at.before)) if back == 1 else newer
                borders.append(b.Not(b.Equal(b.Gather(segments, older), b.Gather(segments, now))))
            for border in borders:
                crossed = b.Or(crossed, border) if crossed else border
            tokens.append(b.Where(crossed, missing, token) if crossed else token)
            newer = older
        return [_mixed_hashes(b, tokens, self.offsets, kind), whole, segments]


def _mixed_hashes(b: FunctionBody, tokens: list[str], offsets: str, kind: str) -> str:
    """Return the hashes of ``tokens[0]`` with one or more predecessors ``tokens[k]``, in unsigned integers that wrap around."""
    unsigned, heads = f"u{kind}", b.attr("n_head_per_ngram")
    factors = b.split(b.slice(b.cast(b.input(1), unsigned), 0, 0, len(tokens)), 0, [1] * len(tokens))
    mixes, mix = list[str](), ""
    for place, (token, factor) in enumerate(zip(tokens, factors, strict=True)):
        product = b.Mul(b.cast(token, unsigned), factor)
        mix = b.BitwiseXor(mix, product) if place else product
        mixes += [b.Unsqueeze(mix, b.constant([-1]))] * (heads if place else 0)
    found = b.Mod(b.cast(b.Concat(*mixes, axis=-1), kind), b.input(2))
    return b.cast(b.Add(b.cast(found, unsigned), b.cast(offsets, unsigned)), kind) if offsets else found


def _check_hashes(b: FunctionBody) -> int:
    """Return the number of predecessors in a hash. Raise Declined if operands do not fit."""
    size, heads = b.attr("max_ngram_size"), b.attr("n_head_per_ngram")
    if size < 2 or heads < 1 or b.shape(1, 1)[0] < size or b.shape(2, 1)[0] != (size - 1) * heads:
        raise Declined(f"{size} tokens by {heads} heads, for {b.shape(1)} factors and {b.shape(2)} vocabularies")
    return int(size - 1)


@contrib_function(
    "NGramHashMapping",
    "input_ids: I, multipliers: I, vocab_sizes: I, past_ids?: I, head_offsets?: I, eos_token_id?: I, segment_ids?: M"
    " -> hash_ids: I, present_ids?: I",
    max_ngram_size=int, n_head_per_ngram=int, pad_id=int, reset_on_eos=0,
)  # fmt: skip
def ngram_hash_mapping(b: FunctionBody) -> list[str]:
    """Expand NGramHashMapping: hashes of each token with a number of predecessors, which end at boundaries."""
    before, (batch, length) = _check_hashes(b), b.shape(0, 2)
    if b.has(3) and b.shape(3) != (batch, before):
        raise Declined(f"past_ids of {list(b.shape(3))}, where {[batch, before]} is needed")
    starts = b.constant(np.arange(batch + 1) * length)
    at = PackedTokens(batch * length, batch, before, starts)
    segments = b.reshape(b.input(6), -1) if b.has(6) else ""
    hashes = NeighbourHashes(b.reshape(b.input(0), -1), b.input(3), b.input(4), b.input(5), segments, "")
    found, whole, _ = hashes.written(b, at)
    ends = b.Unsqueeze(b.slice(starts, 0, 1, batch + 1), b.constant([1]))
    present = b.reshape(b.Gather(whole, at.trailing(b, ends)), batch, before)
    return [b.reshape(found, batch, length, b.shape(2)[0]), present]


@contrib_function(
    "VarlenNGramHashMapping",
    "input_ids: I, multipliers: I, vocab_sizes: I, cumulative_sequence_length: M, past_ids?: I, head_offsets?: I,"
    " eos_token_id?: I, segment_ids?: M, past_segment_ids?: M, capture_count?: M"
    " -> hash_ids: I, present_ids?: I, present_segment_ids?: M, state_update?: I",
    max_ngram_size=int, n_head_per_ngram=int, pad_id=int, reset_on_eos=0, state_update_capacity=0,
)  # fmt: skip
def varlen_ngram_hash_mapping(b: FunctionBody) -> list[str]:
    """Expand VarlenNGramHashMapping: token hashes of concatenated requests of several lengths."""
    before, (count,), (bounds,) = _check_hashes(b), b.shape(0, 1), b.shape(3, 1)
    requests, capacity = bounds - 1, b.attr("state_update_capacity")
    if (
        requests < 1
        or not 0 <= capacity <= _MAX_CAPTURED
        or bool(capacity) != b.has(9)
        or any(b.has(i) and b.shape(i) != (requests, before) for i in (4, 8))
    ):
        raise Declined(f"{bounds} bounds of requests, with a capacity of {capacity} and {before} tokens before each")
    starts = b.cast(b.input(3), "int64")
    at = PackedTokens(count, requests, before, starts)
    hashes = NeighbourHashes(*(b.input(i) for i in (0, 4, 5, 6, 7, 8)))
    found, whole, segments = hashes.written(b, at)
    ends = b.Unsqueeze(b.slice(starts, 0, 1, bounds), b.constant([1]))
    last = at.trailing(b, ends)
    present = b.reshape(b.Gather(whole, last), requests, before)
    parts = b.reshape(b.Gather(segments, last), requests, before) if segments else ""
    update = ""
    if capacity:
        steps = b.constant(np.arange(1, capacity + 1)[None])
        begins = b.Unsqueeze(at.begins(b), b.constant([1]))
        tops = b.Min(b.Add(begins, steps), ends)
        used = b.LessOrEqual(steps, b.Min(b.reshape(b.cast(b.input(9), "int64"), requests, 1), b.Sub(ends, begins)))
        states = b.Gather(whole, at.trailing(b, tops))
        update = b.Where(b.Unsqueeze(used, b.constant([2])), states, b.constant(b.attr("pad_id"), b.dtype()))
    return [found, present, parts, update]
