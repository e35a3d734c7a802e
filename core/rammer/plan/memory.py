"""Arena offsets: two buffers share bytes only where happens-before orders every use of them.

Liveness by wave is not enough, since rows run ahead of each other: a buffer may take the place of
another only if every reader and writer of the old value ends before any writer of the new one starts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rammer.ir.program import ALIGNMENT
from rammer.plan.waits import Order


@dataclass(frozen=True, slots=True)
class Use:
    """An arena buffer: bytes, and which operators write and read it (names; those without tasks omitted)."""

    buffer: str
    nbytes: int
    writers: tuple[str, ...]
    readers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Byte offset of each buffer; ``peak`` is the arena's size, ``total`` what it would be without reuse."""

    offsets: Mapping[str, int]
    peak: int
    total: int

    def __str__(self) -> str:
        share = self.peak / self.total if self.total else 1.0
        return f"arena {self.peak} of {self.total} bytes ({share:.0%}) in {len(self.offsets)} buffers"


def plan_memory(uses: Sequence[Use], order: Order) -> MemoryPlan:
    """Place the largest buffers first, each at the lowest gap among those it must not overlap."""
    sizes = np.array([_aligned(u.nbytes) for u in uses], dtype=np.int64)
    clash = conflicts(uses, order)
    offsets = np.zeros(len(uses), dtype=np.int64)
    placed = np.zeros(len(uses), dtype=bool)
    for i in sorted(range(len(uses)), key=lambda i: (-sizes[i], i)):
        others = np.flatnonzero(clash[i] & placed)
        offsets[i] = _gap(offsets[others], sizes[others], int(sizes[i]))
        placed[i] = sizes[i] > 0
    peak = int((offsets + sizes).max(initial=0))
    return MemoryPlan({u.buffer: int(o) for u, o in zip(uses, offsets, strict=True)}, peak, int(sizes.sum()))


def conflicts(uses: Sequence[Use], order: Order) -> NDArray[np.bool_]:
    """``[i, j]``: buffers i and j must not share bytes, since some uses of them are unordered."""
    before = _matrix(order)
    number = {name: i for i, name in enumerate(order.names)}
    # ready[b, x]: operator x has ended before any writer of buffer b starts.
    ready = np.zeros((len(uses), len(order.names)), dtype=bool)
    for b, use in enumerate(uses):
        writers = [number[w] for w in use.writers]
        ready[b] = before[writers].all(axis=0) if writers else False
    turned = np.ascontiguousarray(ready.T)
    after = np.zeros((len(uses), len(uses)), dtype=bool)
    for a, use in enumerate(uses):
        after[a] = turned[[number[x] for x in {*use.writers, *use.readers}]].all(axis=0)
    result: NDArray[np.bool_] = ~(after | after.T)
    np.fill_diagonal(result, False)
    return result


def _matrix(order: Order) -> NDArray[np.bool_]:
    """``[j, i]``: operator i happens before operator j."""
    count = len(order.names)
    width = -(-count // 8)
    raw = b"".join(bits.to_bytes(width, "little") for bits in order.before)
    packed = np.frombuffer(raw, dtype=np.uint8).reshape(count, width)
    return np.unpackbits(packed, axis=1, count=count, bitorder="little").astype(bool)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _gap(offsets: NDArray[np.int64], sizes: NDArray[np.int64], need: int) -> int:
    """Start of the smallest gap of at least ``need`` bytes, the end of all when there is none."""
    if not len(offsets) or not need:
        return 0
    rank = np.argsort(offsets, kind="stable")
    starts = offsets[rank]
    ends = np.maximum.accumulate(starts + sizes[rank])
    free_from = np.concatenate(([0], ends[:-1]))
    room = starts - free_from
    fits = np.flatnonzero(room >= need)
    if not len(fits):
        return int(ends[-1])
    return int(free_from[fits[np.argmin(room[fits])]])
