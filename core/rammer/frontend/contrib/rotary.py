"""Rotary embeddings: pairs of columns turned by angles that grow with their place."""

from __future__ import annotations

import numpy as np

from rammer.frontend.contrib.attention import joined_heads, split_heads
from rammer.frontend.contrib.function import Declined, FunctionBody, function


def rotated(b: FunctionBody, x: str, angles: tuple[str, str], widths: tuple[int, int], interleaved: bool) -> str:
    """``x [batch, heads, length, width]`` turned by cosines and sines that meet ``[batch, 1, length, rotary / 2]``; only the
    first ``rotary`` columns (``widths`` are both). Pairs are neighbours where ``interleaved``, else halves."""
    (width, rotary), (cos, sin) = widths, angles
    rest = ""
    if rotary < width:
        x, rest = b.split(x, 3, [rotary, width - rotary])
    if interleaved:
        count = b.constant([-1])
        even, odd = (b.Slice(x, b.constant([i]), b.constant([rotary]), b.constant([3]), b.constant([2])) for i in range(2))
        one, two = _turned(b, even, odd, cos, sin)
        pairs = b.Concat(b.Unsqueeze(one, count), b.Unsqueeze(two, count), axis=-1)
        turned = b.Reshape(pairs, b.constant([0, 0, 0, -1]))
    else:
        left, right = b.split(x, 3, [rotary // 2, rotary // 2])
        one, two = _turned(b, left, right, cos, sin)
        turned = b.Concat(one, two, axis=-1)
    return b.Concat(turned, rest, axis=-1) if rest else turned


def _turned(b: FunctionBody, x: str, y: str, cos: str, sin: str) -> tuple[str, str]:
    return b.Sub(b.Mul(x, cos), b.Mul(y, sin)), b.Add(b.Mul(x, sin), b.Mul(y, cos))


def angles(b: FunctionBody, caches: tuple[int, int], places: str) -> tuple[str, str]:
    """Cosines and sines at ``places [batch or 1, length]``, with an axis for heads."""
    one, two = (b.Unsqueeze(b.Gather(b.input(i), places), b.constant([1])) for i in caches)
    return one, two


@function(
    "RotaryEmbedding", "input: T, position_ids: L, cos_cache: T, sin_cache: T -> output: T",
    interleaved=0, num_heads=0, rotary_embedding_dim=0, is_packed_batching=0, scale=1.0,
)  # fmt: skip
def rotary_embedding(b: FunctionBody) -> str:
    """Turns pairs of columns by angles that grow with the place; heads are an axis of their own or lie side by side."""
    if b.attr("is_packed_batching"):
        raise Declined("packed batches are not supported")
    shape, half, given = b.shape(0), b.shape(2, 2)[1], b.attr("rotary_embedding_dim")
    if half < 1:
        raise Declined("the caches have no columns")
    if len(shape) == 4:
        batch, heads, length, width = shape
        x = b.input(0)
    else:
        batch, length, total = b.shape(0, 3)
        heads = b.attr("num_heads") or (total // (2 * half) if not given else 0)
        if not heads or total % heads:
            raise Declined(f"{heads} heads share a hidden size of {total}")
        width = total // heads
        x = split_heads(b, b.input(0), batch, length, heads, width)
    rotary = given or width
    if rotary != 2 * half or rotary > width:
        raise Declined(f"the caches have {half} columns, where {rotary} of {width} are turned")
    places = b.input(1)
    if b.shape(1) in ((1,), ()):
        places = b.Unsqueeze(b.Add(b.reshape(places, 1), b.constant(np.arange(length))), b.constant([0]))
    elif b.shape(1) not in ((batch, length), (1, length)):
        raise Declined(f"places of {list(b.shape(1))} for {batch} rows of {length}")
    y = rotated(b, x, angles(b, (2, 3), places), (width, rotary), bool(b.attr("interleaved")))
    return y if len(shape) == 4 else joined_heads(b, y, batch, length, heads * width)
