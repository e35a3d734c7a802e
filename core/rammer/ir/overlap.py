"""Exact overlap test of two storages of one buffer.

Spans alone are not exact: two channel slices of a batched concat interleave, so that their spans overlap although they share no
element. A dependence between them would make a DenseNet block wait for itself."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from rammer.ir.program import Storage

#: Contiguous runs enumerated per storage. Beyond it, overlapping spans count as an overlap, which is safe.
MAX_RUNS = 1 << 20


def has_overlap(a: Storage, b: Storage) -> bool:
    """Return True if ``a`` and ``b`` (same buffer) share an element; over-approximates beyond ``MAX_RUNS``."""
    (a_low, a_high), (b_low, b_high) = a.span(), b.span()
    if a_low >= a_high or b_low >= b_high or a_high <= b_low or b_high <= a_low:
        return False
    x, y = _merged_dims(a), _merged_dims(b)
    if _is_one_run(x) and _is_one_run(y):
        return True
    if max(_run_count(x), _run_count(y)) > MAX_RUNS:
        return True
    (starts, length), (others, other_length) = _run_starts(a_low, x), _run_starts(b_low, y)
    # Only the last other run that starts before the end of each run can reach it.
    before = np.searchsorted(others, starts + length, side="left") - 1
    return bool(np.any((before >= 0) & (others[before] + other_length > starts)))


@dataclass
class Shared:
    """Index of storages of one buffer, such as the parts of a concatenation, that finds overlaps without visiting all. ``items``
    are in insertion order, each with its name."""

    items: list[tuple[str, Storage]] = field(default_factory=list)

    def add(self, name: str, storage: Storage) -> None:
        """Append a storage and invalidate the index."""
        self.items.append((name, storage))
        self.__dict__.pop("_index", None)

    @cached_property
    def _index(self) -> tuple[list[int], list[int], list[int]]:
        """Positions in ``items`` sorted by lowest element, the lowest elements, and the running maxima of the highest."""
        spans = [storage.span() for _, storage in self.items]
        order = sorted(range(len(spans)), key=lambda i: spans[i])
        return order, [spans[i][0] for i in order], list(accumulate((spans[i][1] for i in order), max))

    def near(self, storage: Storage) -> list[tuple[str, Storage]]:
        """Return all items that may share an element with ``storage``, in their order."""
        if len(self.items) < 2:
            return self.items
        order, lows, highs = self._index
        low, high = storage.span()
        return [self.items[i] for i in sorted(order[bisect_right(highs, low) : bisect_left(lows, high)])]


def _merged_dims(storage: Storage) -> list[tuple[int, int]]:
    """Return (stride, extent) pairs with positive strides, outermost first, contiguous neighbours merged."""
    pairs = sorted(((abs(s), n) for s, n in zip(storage.strides, storage.shape, strict=True) if n > 1 and s), reverse=True)
    merged: list[tuple[int, int]] = []
    for stride, extent in pairs:
        if merged and merged[-1][0] == stride * extent:
            merged[-1] = (stride, merged[-1][1] * extent)
        else:
            merged.append((stride, extent))
    return merged


def _is_one_run(dims: list[tuple[int, int]]) -> bool:
    return not dims or (len(dims) == 1 and dims[0][0] == 1)


def _run_count(dims: list[tuple[int, int]]) -> int:
    outer = dims[:-1] if dims and dims[-1][0] == 1 else dims
    return math.prod(extent for _, extent in outer)


def _run_starts(low: int, dims: list[tuple[int, int]]) -> tuple[NDArray[np.int64], int]:
    """Return the sorted starts of the contiguous runs, and their common length."""
    length = 1
    if dims and dims[-1][0] == 1:
        length, dims = dims[-1][1], dims[:-1]
    starts = np.array([low], dtype=np.int64)
    for stride, extent in dims:
        starts = (starts[:, None] + stride * np.arange(extent, dtype=np.int64)).ravel()
    return np.unique(starts), length
