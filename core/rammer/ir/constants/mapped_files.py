"""Files mapped into memory: values stay in their file, and take memory only while somebody reads them."""

from __future__ import annotations

import errno
import mmap
import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeAlias
from weakref import WeakValueDictionary

import numpy as np

from rammer.errors import BadInput

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
#: Of a file: device, number, bytes, and when its content and what is known of it changed last (nanoseconds). Nobody can set back
#: the last, as copies that keep times and ``touch`` do the one before.
FileState: TypeAlias = tuple[int, int, int, int, int]


@dataclass(frozen=True)
class Content:
    """What a file held when it was hashed: the digest, and how to hash it again, which also says if the file was ``settled``:
    left alone for so long before that a later write shows in its state. OSError if the file cannot be read."""

    digest: str
    settled: bool
    again: Callable[[Mapped], Content]


@dataclass(eq=False)
class Mapped:
    """A file in memory, read-only. A file that is replaced stays as it was here; one that is written to in place does not, which
    ``check`` notices. What cannot be mapped is read, and ``file`` is None: nothing changes it."""

    path: Path
    data: mmap.mmap | bytes = field(repr=False)
    file: BinaryIO | None = field(repr=False)
    state: FileState
    content: Content | None = None

    @staticmethod
    def of(path: Path) -> Mapped:
        """Map a file. OSError or ValueError if it cannot be read, or is no ordinary file."""
        file = open(path, "rb", buffering=0, opener=_without_waiting)  # noqa: SIM115 - the caller closes it
        try:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise OSError(errno.EINVAL, "it is not an ordinary file", str(path))
            try:
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except (OSError, ValueError):  # it is empty, its file system maps none, or no more files can be open
                content = file.read()
                file.close()
                return Mapped(path, content, None, state_of(found))
            result = _MAPPED[id(data)] = Mapped(path, data, file, state_of(found))
            return result
        except BaseException:
            file.close()
            raise

    def check(self, thoroughly: bool = False) -> None:
        """BadInput if the file does not hold what it held when it was hashed, or mapped if nobody has hashed it.

        Its state decides if that is the same; if not (a link to it was made, say), its content does. ``thoroughly``: the content
        decides also where a write could have left the state as it was.
        """
        if self.file is None:
            return
        found, content = state_of(os.fstat(self.file.fileno())), self.content
        if found == self.state and (content is None or content.settled or not thoroughly):
            return
        same = found[2:4] == self.state[2:4] if content is None else found[2] == self.state[2] and self._has_content(content)
        if not same:
            raise BadInput(
                "the model file was written to after it was opened", str(self.path), "open the model again, or replace the file"
            )
        self.state = found

    def retire(self) -> None:
        """Give the file back when everything that is needed of it was read and checked: later changes do not matter."""
        if self.file is not None:
            self.file.close()
        self.file, self.data = None, b""

    def _has_content(self, content: Content) -> bool:
        """Hash the file again and return True if it holds what it held."""
        try:
            now = content.again(self)
        except OSError:
            return False
        if now.digest == content.digest:
            self.content = now
        return now.digest == content.digest


#: Files by the identity of their mappings, which they own.
_MAPPED: Final[WeakValueDictionary[int, Mapped]] = WeakValueDictionary()


def check_file(array: Array) -> None:
    """``Mapped.check`` of the file that an array's values are in, before they are read: to read what was cut off a file ends the
    process."""
    file = _MAPPED.get(id(_file_of(array)))
    if file is not None:
        file.check()


def _without_waiting(path: str, flags: int) -> int:
    """Open a file; a pipe, too, at once."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def state_of(found: os.stat_result) -> FileState:
    """Return what of a file's state changes when it is written to."""
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def in_memory(array: Array) -> Array:
    """A copy of a mapped array, which then is no file's; others as they are."""
    if _file_of(array) is None:
        return array
    result = np.array(array)
    result.flags.writeable = False
    release_pages(array)
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
    return _data_address(array) - _data_address(np.frombuffer(file.data, np.uint8))


def is_continuation(run: Sequence[Array], piece: Array, axis: int, new: bool) -> bool:
    """Whether ``piece`` lies behind those of ``run`` in one memory as it would along dimension ``axis`` of one array, which is a
    new dimension if ``new``: as far behind the last as that behind the one before it."""
    last = run[-1]
    rest = [(a.shape if new else (*a.shape[:axis], *a.shape[axis + 1 :]), a.strides, a.dtype) for a in (last, piece)]
    if (
        rest[0] != rest[1]
        or piece.dtype.hasobject
        or not piece.size
        or not last.size
        or _memory_owner(last) is not _memory_owner(piece)
    ):
        return False
    step = _data_address(piece) - _data_address(last)
    if new:
        return step > 0 if len(run) == 1 else step == _data_address(last) - _data_address(run[-2])
    return bool(step == last.strides[axis] * last.shape[axis])


def as_one(run: Sequence[Array], axis: int, new: bool) -> Array | None:
    """Two or more arrays that follow each other (``is_continuation``) as one view; None where it has gaps."""
    first = run[0]
    shape, strides = list(first.shape), list(first.strides)
    if new:
        shape.insert(axis, len(run))
        strides.insert(axis, _data_address(run[1]) - _data_address(first))
    else:
        shape[axis] = sum(a.shape[axis] for a in run)
    made: Array = np.lib.stride_tricks.as_strided(first, shape, strides, writeable=False)
    return made if dense_order(made) is not None else None


def release_pages(array: Array) -> None:
    """Give back the memory that a mapped array's values took: who reads it again reads the file. Others stay as they are."""
    base = _file_of(array)
    if base is None or not hasattr(base, "madvise") or not array.size:  # Windows has none
        return
    steps = [(n - 1) * s for n, s in zip(array.shape, array.strides, strict=True)]
    start = _data_address(array) - _data_address(np.frombuffer(base, np.uint8)) + sum(s for s in steps if s < 0)
    stop = start + sum(map(abs, steps)) + array.itemsize
    first, end = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, stop // mmap.PAGESIZE * mmap.PAGESIZE
    if end > first:
        base.madvise(mmap.MADV_DONTNEED, first, end - first)


def _file_of(array: Array) -> mmap.mmap | None:
    base = _memory_owner(array)
    return base if isinstance(base, mmap.mmap) else None


def _memory_owner(array: Array) -> object:
    """What has the memory of an array: a file, or the array of which it is a view."""
    base: Any = array
    while not isinstance(base, mmap.mmap):
        inner = base.obj if isinstance(base, memoryview) else getattr(base, "base", None)
        if inner is None:
            break
        base = inner
    return base


def _data_address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])
