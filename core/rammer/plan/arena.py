"""Arena offsets: two buffers share bytes only where happens-before orders every use of them.

Liveness by wave is not enough, since rows run ahead of each other: a buffer may take the place of
another only if every reader and writer of the old value ends before any writer of the new one starts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_

import numpy as np
from numpy.typing import NDArray

from rammer.ir.prefix_set import PrefixSet
from rammer.ir.program import ALIGNMENT
from rammer.plan.waits import Order


@dataclass(frozen=True, slots=True)
class BufferUse:
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


def plan_memory(uses: Sequence[BufferUse], order: Order) -> MemoryPlan:
    """Place the largest buffers first, each at the lowest gap among those it must not overlap."""
    sizes = np.array([_align_up(u.nbytes) for u in uses], dtype=np.int64)
    conflicts = Conflicts(uses, order)
    offsets = np.zeros(len(uses), dtype=np.int64)
    placed = np.zeros(len(uses), dtype=bool)
    for i in sorted(range(len(uses)), key=lambda i: (-sizes[i], i)):
        others = conflicts.of(i, placed)
        offsets[i] = _smallest_gap(offsets[others], sizes[others], int(sizes[i]))
        placed[i] = sizes[i] > 0
    peak = int((offsets + sizes).max(initial=0))
    return MemoryPlan({u.buffer: int(o) for u, o in zip(uses, offsets, strict=True)}, peak, int(sizes.sum()))


class Conflicts:
    """Which buffers must not share bytes, since some uses of them are unordered.

    A buffer is *ready* when all operators before each of its writers have ended, and *over* for all that come after each of
    its users. What is ready only after another buffer's last user has no conflict with it, which settles most pairs.
    """

    def __init__(self, uses: Sequence[BufferUse], order: Order) -> None:
        number = {name: i for i, name in enumerate(order.names)}
        self.last = len(order.names) - 1
        self.writers = _Lists([[number[w] for w in u.writers] for u in uses])
        self.users = _Lists([[number[x] for x in {*u.writers, *u.readers}] for u in uses])
        after = _operators_after(order)
        everything = PrefixSet(len(order.names))
        self.ready = [reduce(and_, (order.before[w] for w in ws), everything) if ws else PrefixSet() for ws in self.writers.lists]
        self.over = [reduce(and_, (after[x] for x in xs), everything) for xs in self.users.lists]
        self.first = np.array([r.base for r in self.ready], dtype=np.int64)
        self.end = np.array([max(xs, default=-1) for xs in self.users.lists], dtype=np.int64)

    def of(self, i: int, among: NDArray[np.bool_]) -> NDArray[np.int64]:
        """The buffers of ``among`` (a truth value for each) that buffer ``i`` is in conflict with."""
        near: NDArray[np.int64] = np.flatnonzero(among & (self.end >= self.first[i]) & (self.first <= self.end[i]))
        near = near[near != i]
        if not len(near):
            return near
        which, users = self.users.of(near)
        mine_later = ~np.bincount(which, ~self.ready[i].has(users), len(near)).astype(bool)
        which, writers = self.writers.of(near)
        # Numbers count from the end in what comes after.
        theirs_later = ~np.bincount(which, ~self.over[i].has(self.last - writers), len(near)).astype(bool)
        theirs_later &= self.writers.count[near] > 0
        near = near[~(mine_later | theirs_later)]
        return near


class _Lists:
    """Lists of numbers, of which some are taken together."""

    def __init__(self, lists: list[list[int]]) -> None:
        self.lists = lists
        self.count = np.array([len(each) for each in lists], dtype=np.int64)
        self.start = np.cumsum(self.count) - self.count
        self.flat = np.array([n for each in lists for n in each], dtype=np.int64)

    def of(self, which: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The numbers of all these lists, each with the place of its list in ``which``."""
        count = self.count[which]
        owner = np.repeat(np.arange(len(which)), count)
        inside = np.arange(len(owner)) - np.repeat(np.cumsum(count) - count, count)
        return owner, self.flat[np.repeat(self.start[which], count) + inside]


def _operators_after(order: Order) -> list[PrefixSet]:
    """For each operator those that start after all its tasks, numbered from the last operator on."""
    last = len(order.names) - 1
    result = [PrefixSet()] * len(order.names)
    for reader in range(last, -1, -1):
        mine = result[reader].having(last - reader)
        for p in order.needs[reader]:
            result[p] = result[p] | mine
    return result


def _align_up(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _smallest_gap(offsets: NDArray[np.int64], sizes: NDArray[np.int64], need: int) -> int:
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
