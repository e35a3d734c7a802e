"""Who writes each element of a buffer: the address map that the verifier reasons over.

Exact, one entry an element: nothing here knows how storages were planned.
"""

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
    """Two writers, or one writer twice, touch the same element; ``first`` and ``second`` name them."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")
        self.first, self.second = first, second


@dataclass(frozen=True)
class Write:
    """One output of an operator, at its storage."""

    operator: str
    storage: Storage


@dataclass
class Owners:
    """The writers of one buffer of ``size`` elements. Raises WrittenTwice when they collide."""

    size: int
    writes: Sequence[Write]
    #: Where every writer fills a range without gaps, first and last element + 1 of each, and its place in ``writes``, in order.
    _ranges: list[tuple[int, int, int]] | None = None
    _map: Ints | None = None  # index into writes by element, from when ranges do not tell
    _known: dict[_Place, tuple[tuple[str, ...], bool]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for write in self.writes:
            if not is_injective(write.storage):
                raise WrittenTwice(write.operator, write.operator)
        self._ranges = self._disjoint_ranges()
        if self._ranges is None:
            self._map = self._paint_owners()

    def _disjoint_ranges(self) -> list[tuple[int, int, int]] | None:
        """The ranges, which are apart; None where one has gaps, or two meet."""
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
        """The operators that write elements of ``storage``, and whether every element has one."""
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
        # Counting costs a step for every write of the buffer, sorting one for every element that is read.
        places = np.flatnonzero(np.bincount(read)) if len(read) > len(self.writes) else np.unique(read)
        found = dict.fromkeys(self.writes[i - 1].operator for i in places.tolist() if i)
        return tuple(found), not len(places) or bool(places[0])

    def tasks(self, operator: ROperator) -> Ints:
        """Per element of the buffer the task of ``operator`` that writes it, -1 where none does."""
        result = np.full(self.size, -1, dtype=np.int32)
        for write in self.writes:
            if write.operator == operator.name:
                strided_view(result, write.storage)[...] = task_grid(operator, write.storage.tensor)
        return result


def strided_view(flat: Ints, storage: Storage) -> Ints:
    """The elements of ``storage`` in a flat buffer, as a writable view. The span must lie in the buffer."""
    size = flat.itemsize
    # An empty tensor may sit at the very end of its buffer, where there is no element to point at.
    return as_strided(
        flat[storage.offset :] if storage.offset < len(flat) else flat[:0], storage.shape, [s * size for s in storage.strides]
    )


def is_injective(storage: Storage) -> bool:
    """Whether distinct indices surely have distinct addresses: every stride steps over all that is inside it."""
    reach = 0
    for stride, extent in sorted((abs(s), n) for s, n in zip(storage.strides, storage.shape, strict=True) if n > 1):
        if stride <= reach:
            return False
        reach += stride * (extent - 1)
    return True


def is_gapless(storage: Storage) -> bool:
    """Whether a storage surely has every element between its first and its last one, however often."""
    reach = 0
    for stride, extent in sorted((abs(s), n) for s, n in zip(storage.strides, storage.shape, strict=True) if n > 1 and s):
        if stride > reach + 1:
            return False
        reach += stride * (extent - 1)
    return True


def task_grid(operator: ROperator, output: str) -> Ints:
    """The task index of every element of one of the operator's outputs, as an array that broadcasts to its shape."""
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
