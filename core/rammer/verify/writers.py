"""Map of each element of a buffer to its writer, used by the verifier. The map is exact, with one entry per element, and
independent of the planner's storages."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import itemgetter
from typing import TypeAlias

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from rammer.ir.operator import ROperator
from rammer.ir.program import Storage

Ints = NDArray[np.int32]
#: Offset, shape and strides.
_Place: TypeAlias = "tuple[int, tuple[int, ...], tuple[int, ...]]"


class WrittenTwice(Exception):
    """Two writes of one element, by two writers or by one; ``first`` and ``second`` name the writers."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")
        self.first, self.second = first, second


@dataclass(frozen=True)
class Write:
    """An output of an operator, at its storage."""

    operator: str
    storage: Storage


@dataclass
class Owners:
    """The writers of one buffer of ``size`` elements. Raises WrittenTwice when they collide."""

    size: int
    writes: Sequence[Write]
    #: First element, last element + 1 and index in ``writes`` of each writer, in order, if every writer fills a gapless range.
    _ranges: list[tuple[int, int, int]] | None = None
    _map: Ints | None = None  # index into writes by element, if ranges are not enough
    _known: dict[_Place, tuple[tuple[str, ...], bool]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for write in self.writes:
            if not is_injective(write.storage):
                raise WrittenTwice(write.operator, write.operator)
        self._ranges = self._disjoint_ranges()
        if self._ranges is None:
            self._map = self._paint_owners()

    def _disjoint_ranges(self) -> list[tuple[int, int, int]] | None:
        """Return the disjoint ranges, or None if a range has gaps or two overlap."""
        found = list[tuple[int, int, int]]()
        for i, write in enumerate(self.writes):
            low, high = write.storage.span()
            if high - low != math.prod(write.storage.shape):
                return None
            if low < high:
                found.append((low, high, i))
        found.sort()
        return None if any(a[1] > b[0] for a, b in pairwise(found)) else found

    def _paint_owners(self) -> Ints:
        owner = np.full(self.size, -1, dtype=np.int32)
        for i, write in enumerate(self.writes):
            view = strided_view(owner, write.storage)
            taken = view[view >= 0]
            if taken.size:
                raise WrittenTwice(self.writes[int(taken.flat[0])].operator, write.operator)
            view[...] = i
        return owner

    def of(self, storage: Storage) -> tuple[tuple[str, ...], bool]:
        """Return the operators that write elements of ``storage``, and True if every element has a writer."""
        key = (storage.offset, storage.shape, storage.strides)
        if key not in self._known:
            self._known[key] = self._find_writers(storage)
        return self._known[key]

    def _find_writers(self, storage: Storage) -> tuple[tuple[str, ...], bool]:
        low, high = storage.span()
        if low >= high:
            return (), True
        if self._ranges is not None:
            begin = bisect_right(self._ranges, low, key=itemgetter(1))
            met = self._ranges[begin : bisect_left(self._ranges, high, begin, key=itemgetter(0))]
            whole = bool(met) and met[0][0] <= low and high <= met[-1][1] and all(a[1] == b[0] for a, b in pairwise(met))
            if (whole and len(met) == 1) or len(self.writes) < 2 or is_gapless(storage):
                return tuple(dict.fromkeys(self.writes[i].operator for i in sorted(i for _, _, i in met))), whole
            if self._map is None:
                self._map = self._paint_owners()
        assert self._map is not None
        read = (strided_view(self._map, storage) + 1).ravel()
        # Counting is linear in the writes of the buffer, sorting is proportional to the elements read.
        places = np.flatnonzero(np.bincount(read)) if len(read) > len(self.writes) else np.unique(read)
        found = dict.fromkeys(self.writes[i - 1].operator for i in places.tolist() if i)
        return tuple(found), not len(places) or bool(places[0])

    def tasks(self, operator: ROperator) -> Ints:
        """Return, per element of the buffer, the task of ``operator`` that writes it, or -1."""
        result = np.full(self.size, -1, dtype=np.int32)
        for write in self.writes:
            if write.operator == operator.name:
                strided_view(result, write.storage)[...] = task_grid(operator, write.storage.tensor)
        return result


def strided_view(flat: Ints, storage: Storage) -> Ints:
    """Return the elements of ``storage`` in a flat buffer as a writable view. The span must be within the buffer."""
    size = flat.itemsize
    # An empty tensor may start at the end of its buffer, where the buffer has no element.
    return as_strided(
        flat[storage.offset :] if storage.offset < len(flat) else flat[:0], storage.shape, [s * size for s in storage.strides]
    )


def is_injective(storage: Storage) -> bool:
    """Return True if distinct indices have distinct addresses: every stride exceeds the span of the inner axes."""
    reach = 0
    for stride, extent in sorted((abs(s), n) for s, n in zip(storage.strides, storage.shape, strict=True) if n > 1):
        if stride <= reach:
            return False
        reach += stride * (extent - 1)
    return True


def is_gapless(storage: Storage) -> bool:
    """Return True if a storage covers every element between its first and last, possibly repeatedly."""
    reach = 0
    for stride, extent in sorted((abs(s), n) for s, n in zip(storage.strides, storage.shape, strict=True) if n > 1 and s):
        if stride > reach + 1:
            return False
        reach += stride * (extent - 1)
    return True


def task_grid(operator: ROperator, output: str) -> Ints:
    """Return the task index of every element of an operator's output, as an array that broadcasts to its shape."""
    own = operator.shared[output]
    result = np.zeros((1,) * len(own), dtype=np.int32)
    step = 1
    for i, (axis, tile, count) in reversed(list(enumerate(zip(operator.anchor.axes, operator.tile, operator.grid, strict=True)))):
        if i in own:
            shape = [1] * result.ndim
            shape[own.index(i)] = axis.extent
            result = result + (np.arange(axis.extent, dtype=np.int32) // tile * step).reshape(shape)
        step *= count
    return result
