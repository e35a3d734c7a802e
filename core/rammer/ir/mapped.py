"""Files mapped into memory: values stay in their file, and take memory only while somebody reads them."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np

from rammer.errors import BadInput

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
#: Of a file: bytes, and when they were written last (nanoseconds).
State: TypeAlias = tuple[int, int]


@dataclass(frozen=True)
class Mapped:
    """A file in memory, read-only. A file that is replaced stays as it was here; one that is written to in place does not, which
    ``check`` tells."""

    path: Path
    data: mmap.mmap = field(repr=False)
    file: BinaryIO = field(repr=False)
    state: State

    @staticmethod
    def of(path: Path) -> Mapped:
        """OSError or ValueError where it cannot be mapped: it is empty, or its file system cannot."""
        file = path.open("rb", buffering=0)
        try:
            state = _state(file)
            return Mapped(path, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), file, state)
        except BaseException:
            file.close()
            raise

    def check(self) -> None:
        """BadInput where the file was written to since it was mapped: values are others then, or are not there any more."""
        if _state(self.file) != self.state:
            raise BadInput(
                "the model file was written to after it was opened", str(self.path), "open the model again, or replace the file"
            )


def _state(file: BinaryIO) -> State:
    return state_of(os.fstat(file.fileno()))


def state_of(found: os.stat_result) -> State:
    """What of a file's state changes when it is written to."""
    return found.st_size, found.st_mtime_ns


def in_memory(array: Array) -> Array:
    """A copy of a mapped array, which then is no file's; others as they are."""
    if _file_of(array) is None:
        return array
    result = np.array(array)
    result.flags.writeable = False
    released(array)
    return result


def is_mapped(array: Array) -> bool:
    """Whether the values are in a file."""
    return _file_of(array) is not None


def dense_order(array: Array) -> tuple[int, ...] | None:
    """The axes in the order in which the values lie, one next to the other; None where they do not."""
    if array.flags.c_contiguous:
        return tuple(range(array.ndim))
    order = tuple(int(d) for d in np.argsort([-s for s in array.strides], kind="stable"))
    return order if array.transpose(order).flags.c_contiguous else None


def place_of(array: Array, file: Mapped) -> int | None:
    """Where the values of an array begin in a file, in bytes; None where they are none of it, or some lie before the first."""
    if _file_of(array) is not file.data or any(s < 0 for s in array.strides):
        return None
    return _address(array) - _address(np.frombuffer(file.data, np.uint8))


def follows(run: Sequence[Array], piece: Array, axis: int, new: bool) -> bool:
    """Whether ``piece`` lies behind those of ``run`` in one memory as it would along dimension ``axis`` of one array, which is a
    new dimension if ``new``: as far behind the last as that behind the one before it."""
    last = run[-1]
    rest = [(a.shape if new else (*a.shape[:axis], *a.shape[axis + 1 :]), a.strides, a.dtype) for a in (last, piece)]
    if rest[0] != rest[1] or piece.dtype.hasobject or not piece.size or not last.size or _owner(last) is not _owner(piece):
        return False
    step = _address(piece) - _address(last)
    if new:
        return step > 0 if len(run) == 1 else step == _address(last) - _address(run[-2])
    return bool(step == last.strides[axis] * last.shape[axis])


def as_one(run: Sequence[Array], axis: int, new: bool) -> Array | None:
    """Two or more arrays that follow each other (``follows``) as one view; None where it has gaps."""
    first = run[0]
    shape, strides = list(first.shape), list(first.strides)
    if new:
        shape.insert(axis, len(run))
        strides.insert(axis, _address(run[1]) - _address(first))
    else:
        shape[axis] = sum(a.shape[axis] for a in run)
    made: Array = np.lib.stride_tricks.as_strided(first, shape, strides, writeable=False)
    return made if dense_order(made) is not None else None


def released(array: Array) -> None:
    """Give back the memory that a mapped array's values took: who reads it again reads the file. Others stay as they are."""
    base = _file_of(array)
    if base is None or not hasattr(base, "madvise") or not array.size:  # Windows has none
        return
    steps = [(n - 1) * s for n, s in zip(array.shape, array.strides, strict=True)]
    start = _address(array) - _address(np.frombuffer(base, np.uint8)) + sum(s for s in steps if s < 0)
    stop = start + sum(map(abs, steps)) + array.itemsize
    first, end = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, stop // mmap.PAGESIZE * mmap.PAGESIZE
    if end > first:
        base.madvise(mmap.MADV_DONTNEED, first, end - first)


def _file_of(array: Array) -> mmap.mmap | None:
    base = _owner(array)
    return base if isinstance(base, mmap.mmap) else None


def _owner(array: Array) -> object:
    """What has the memory of an array: a file, or the array of which it is a view."""
    base: Any = array
    while not isinstance(base, mmap.mmap):
        inner = base.obj if isinstance(base, memoryview) else getattr(base, "base", None)
        if inner is None:
            break
        base = inner
    return base


def _address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])
