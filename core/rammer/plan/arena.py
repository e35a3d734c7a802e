"""Arena offsets: two buffers share bytes only where happens-before orders every use of them.

Liveness by wave is not enough, since rows run ahead of each other. A buffer reuses the bytes of another only after all readers
and writers of the old value. They must end before any writer of the new value starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import and_

import numpy as np
from numpy.typing import NDArray

from rammer.ir.prefix_set import PrefixSet
from rammer.ir.program import ALIGNMENT, Buffer, RProgram
from rammer.plan.waits import Order


@dataclass(frozen=True, slots=True)
class BufferUse:
    """An arena buffer: its bytes, and the names of operators that write and read it (without operators that have no tasks)."""

    buffer: str
    nbytes: int
    writers: tuple[str, ...]
    readers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Byte offset of each buffer. ``peak`` is the arena's size, ``total`` its size without reuse."""

    offsets: Mapping[str, int]
    peak: int
    total: int

    def __str__(self) -> str:
        share = self.peak / self.total if self.total else 1.0
        return f"arena {self.peak} of {self.total} bytes ({share:.0%}) in {len(self.offsets)} buffers"


def plan_memory(uses: Sequence[BufferUse], order: Order) -> MemoryPlan:
    """Return the offsets of the buffers: largest first, each in the smallest gap between its conflicts."""
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


def with_private_buffers(program: RProgram) -> RProgram:
    """Return ``program`` with every arena buffer at a separate offset."""
    buffers, offset = list[Buffer](), 0
    for b in program.buffers:
        buffers.append(replace(b, offset=offset) if b.kind == "arena" else b)
        offset += _align_up(b.nbytes) if b.kind == "arena" else 0
    return replace(program, buffers=tuple(buffers))


class Conflicts:
    """Buffers that must not share bytes, since some of their uses are unordered.

    A buffer is *ready* when all operators before each of its writers have ended. It is *over* for all operators after each of its
    users. A buffer that is ready only after another buffer's last user does not conflict with it, which settles most pairs."""

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
        """Return the buffers of the mask ``among`` that conflict with buffer ``i``."""
        near: NDArray[np.int64] = np.flatnonzero(among & (self.end >= self.first[i]) & (self.first <= self.end[i]))
        near = near[near != i]
        if not len(near):
            return near
        which, users = self.users.of(near)
        mine_later = ~np.bincount(which, ~self.ready[i].has(users), len(near)).astype(bool)
        which, writers = self.writers.of(near)
        # Numbers in ``over`` count from the last operator.
        theirs_later = ~np.bincount(which, ~self.over[i].has(self.last - writers), len(near)).astype(bool)
        theirs_later &= self.writers.count[near] > 0
        near = near[~(mine_later | theirs_later)]
        return near


class _Lists:
    """Concatenated lists of numbers, with fast selection of several lists."""

    def __init__(self, lists: list[list[int]]) -> None:
        self.lists = lists
        self.count = np.array([len(each) for each in lists], dtype=np.int64)
        self.start = np.cumsum(self.count) - self.count
        self.flat = np.array([n for each in lists for n in each], dtype=np.int64)

    def of(self, which: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the numbers of the selected lists, each with the index of its list in ``which``."""
        count = self.count[which]
        owner = np.repeat(np.arange(len(which)), count)
        inside = np.arange(len(owner)) - np.repeat(np.cumsum(count) - count, count)
        return owner, self.flat[np.repeat(self.start[which], count) + inside]


def _operators_after(order: Order) -> list[PrefixSet]:
    """Return for each operator those that start after all its tasks, numbered from the last operator."""
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
    """Return the start of the smallest gap of at least ``need`` bytes, or the end of all buffers."""
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
