"""Rotary embeddings: pairs of columns rotated by angles that grow with the position."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rammer.frontend.lower.contrib.attention import joined_heads, split_heads
from rammer.frontend.lower.contrib.function import Array, Declined, FunctionBody, contrib_function


def rotate_columns(b: FunctionBody, x: str, angles: tuple[str, str], widths: tuple[int, int], interleaved: bool) -> str:
    """Rotate ``x [batch, heads, length, width]`` by cosines and sines that broadcast to ``[batch, 1, length, rotary / 2]``.

    Only the first ``rotary`` columns are rotated; ``widths`` holds both widths. Pairs are adjacent columns if ``interleaved``,
    else halves."""
    (width, rotary), (cos, sin) = widths, angles
    rest = ""
    if rotary < width:
        x, rest = b.split(x, 3, [rotary, width - rotary])
    if interleaved:
        count = b.constant([-1])
        even, odd = (b.Slice(x, b.constant([i]), b.constant([rotary]), b.constant([3]), b.constant([2])) for i in range(2))
        one, two = _rotate_pair(b, even, odd, cos, sin)
        pairs = b.Concat(b.Unsqueeze(one, count), b.Unsqueeze(two, count), axis=-1)
        turned = b.Reshape(pairs, b.constant([0, 0, 0, -1]))
    else:
        left, right = b.split(x, 3, [rotary // 2, rotary // 2])
        one, two = _rotate_pair(b, left, right, cos, sin)
        turned = b.Concat(one, two, axis=-1)
    return b.Concat(turned, rest, axis=-1) if rest else turned


def _rotate_pair(b: FunctionBody, x: str, y: str, cos: str, sin: str) -> tuple[str, str]:
    return b.Sub(b.Mul(x, cos), b.Mul(y, sin)), b.Add(b.Mul(x, sin), b.Mul(y, cos))


def gather_angles(b: FunctionBody, caches: tuple[int, int], places: str) -> tuple[str, str]:
    """Return cosines and sines at ``places [batch or 1, length]``, with an axis for heads."""
    one, two = (b.Unsqueeze(b.Gather(b.input(i), places), b.constant([1])) for i in caches)
    return one, two


@dataclass(frozen=True)
class TurnedHeads:
    """The extents of one use: ``x [batch, heads, length, width]``, whose first ``rotary`` columns are rotated."""

    x: str
    batch: int
    heads: int
    length: int
    width: int
    rotary: int

    @staticmethod
    def of(b: FunctionBody, heads: int) -> TurnedHeads:
        """Return the extents of input 0, which has an axis of heads or concatenated heads. Input 2 is a cache."""
        shape, half, given = b.shape(0), b.shape(2, 2)[1], b.attr("rotary_embedding_dim")
        if half < 1:
            raise Declined("the caches have no columns")
        if len(shape) == 4:
            batch, heads, length, width = shape
            x = b.input(0)
        else:
            batch, length, total = b.shape(0, 3)
            heads = heads or (total // (2 * half) if not given else 0)
            if not heads or total % heads:
                raise Declined(f"{heads} heads share a hidden size of {total}")
            width = total // heads
            x = split_heads(b, b.input(0), batch, length, heads, width)
        rotary = given or width
        if rotary != 2 * half or rotary > width:
            raise Declined(f"the caches have {half} columns, where {rotary} of {width} are rotated")
        return TurnedHeads(x, batch, heads, length, width, rotary)

    def turned(self, b: FunctionBody, turn: tuple[str, str]) -> str:
        """Return the result in the shape of input 0, from cosines and sines."""
        y = rotate_columns(b, self.x, turn, (self.width, self.rotary), bool(b.attr("interleaved")))
        return y if len(b.shape(0)) == 4 else joined_heads(b, y, self.batch, self.length, self.heads * self.width)


@contrib_function(
    "RotaryEmbedding", "input: T, position_ids: L, cos_cache: T, sin_cache: T -> output: T",
    interleaved=0, num_heads=0, rotary_embedding_dim=0, is_packed_batching=0, scale=1.0,
)  # fmt: skip
def rotary_embedding(b: FunctionBody) -> str:
    """Expand RotaryEmbedding: rotate column pairs by angles that grow with the position. Packed batches have more positions than
    the caches."""
    at = TurnedHeads.of(b, b.attr("num_heads"))
    places = b.input(1)
    if b.shape(1) in ((1,), ()):
        places = b.Unsqueeze(b.Add(b.reshape(places, 1), b.constant(np.arange(at.length))), b.constant([0]))
    elif b.shape(1) not in ((at.batch, at.length), (1, at.length)):
        raise Declined(f"positions of {list(b.shape(1))} for {at.batch} rows of {at.length}")
    return at.turned(b, gather_angles(b, (2, 3), places))


@contrib_function(
    "MRotaryEmbedding", "input: T, position_ids: L, cos_cache: T, sin_cache: T -> output: T",
    mrope_section=tuple[int, ...], mrope_layout=0, interleaved=0, num_heads=0, rotary_embedding_dim=0, is_packed_batching=0,
    scale=1.0,
)  # fmt: skip
def multimodal_rotary_embedding(b: FunctionBody) -> str:
    """Expand MultimodalRotaryEmbedding: each column pair is rotated by one of a token's three positions (time, height, width)."""
    at = TurnedHeads.of(b, b.attr("num_heads"))
    if b.shape(1) != (3, at.batch, at.length):
        raise Declined(f"positions of {list(b.shape(1))} for {at.batch} rows of {at.length}")
    streams = _pair_streams(b, at.rotary // 2)
    tokens = at.batch * at.length
    places = b.Transpose(b.reshape(b.input(1), 3, tokens), perm=[1, 0])
    rows = b.Gather(places, b.constant(streams), axis=1)
    turn = [b.GatherElements(b.input(i), rows, axis=0) for i in (2, 3)]
    if b.attr("scale") != 1:
        turn = [b.Mul(x, b.number(b.attr("scale"))) for x in turn]
    cos, sin = (b.reshape(x, at.batch, 1, at.length, at.rotary // 2) for x in turn)
    return at.turned(b, (cos, sin))


def _pair_streams(b: FunctionBody, half: int) -> Array:
    """Return the index of the position (0 to 2) that rotates each pair of columns."""
    sections, layout = list(b.attr("mrope_section")), b.attr("mrope_layout")
    if len(sections) != 3 or min(sections) < 0 or sum(sections) != half or layout not in (0, 1):
        raise Declined(f"mrope_section is {sections} and mrope_layout {layout}, where {half} pairs are rotated")
    if not layout:
        return np.repeat(np.arange(3), sections)
    streams = np.zeros(half, np.int64)
    for stream in (1, 2):
        streams[stream : 3 * sections[stream] : 3] = stream
    return streams
