"""Files mapped into memory: values stay in their file and use memory only while they are read."""

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
#: Device, inode, bytes, and times of the last content and metadata change (nanoseconds) of a file. The content time can be set
#: back by ``touch`` and by copies that preserve times, the metadata time cannot.
FileState: TypeAlias = tuple[int, int, int, int, int]


@dataclass(frozen=True)
class Content:
    """The content of a file when it was hashed: the digest, and a function that hashes it again. ``settled`` is True if the file
    had been unchanged long enough for any later write to change its state. ``again`` raises OSError if the file is unreadable."""

    digest: str
    settled: bool
    again: Callable[[Mapped], Content]


@dataclass(eq=False)
class Mapped:
    """A read-only file in memory. A replaced file keeps its content here. Writes in place change the content; ``check`` detects
    them. Unmappable files are read instead: ``file`` is None, and the content is fixed."""

    path: Path
    data: mmap.mmap | bytes = field(repr=False)
    file: BinaryIO | None = field(repr=False)
    state: FileState
    content: Content | None = None

    @staticmethod
    def of(path: Path) -> Mapped:
        """Map a file. Raises OSError or ValueError if it is unreadable or not a regular file."""
        file = open(path, "rb", buffering=0, opener=_without_waiting)  # noqa: SIM115 - the caller closes it
        try:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise OSError(errno.EINVAL, "it is not an ordinary file", str(path))
            try:
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except (OSError, ValueError):  # the file is empty, mapping is unsupported, or too many files are open
                content = file.read()
                file.close()
                return Mapped(path, content, None, state_of(found))
            result = _MAPPED[id(data)] = Mapped(path, data, file, state_of(found))
            return result
        except BaseException:
            file.close()
            raise

    def check(self, thoroughly: bool = False) -> None:
        """Raise BadInput if the file's content changed since it was hashed, or mapped if it was not hashed.

        An equal file state means equal content; otherwise (after a new link, for example) the content is compared. With
        ``thoroughly``, the content is also compared if a write could have preserved the state."""
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
        """Close the file after all necessary data were read and checked: later changes do not matter."""
        if self.file is not None:
            self.file.close()
        self.file, self.data = None, b""

    def _has_content(self, content: Content) -> bool:
        """Hash the file again and return True if its content is unchanged."""
        try:
            now = content.again(self)
        except OSError:
            return False
        if now.digest == content.digest:
            self.content = now
        return now.digest == content.digest


#: Mapped files by the identity of their mappings, which they own.
_MAPPED: Final[WeakValueDictionary[int, Mapped]] = WeakValueDictionary()


def check_file(array: Array) -> None:
    """Run ``Mapped.check`` on the file that holds an array's values, before they are read. Reading a truncated part of a mapped
    file ends the process."""
    file = _MAPPED.get(id(_file_of(array)))
    if file is not None:
        file.check()


def _without_waiting(path: str, flags: int) -> int:
    """Open a file without blocking, even if it is a pipe."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def state_of(found: os.stat_result) -> FileState:
    """Return the part of a file's state that changes when it is written."""
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def in_memory(array: Array) -> Array:
    """Return a copy of a mapped array in memory; other arrays are returned unchanged."""
    if _file_of(array) is None:
        return array
    result = np.array(array)
    result.flags.writeable = False
    release_pages(array)
    return result


def is_mapped(array: Array) -> bool:
    """Return True if the values are in a mapped file."""
    return _file_of(array) is not None


def dense_order(array: Array) -> tuple[int, ...] | None:
    """Return the axes in storage order if the values are contiguous, else None."""
    if array.flags.c_contiguous:
        return tuple(range(array.ndim))
    order = tuple(int(d) for d in np.argsort([-s for s in array.strides], kind="stable"))
    return order if array.transpose(order).flags.c_contiguous else None


def place_of(array: Array, file: Mapped) -> int | None:
    """Return the byte offset of an array's values in a file. Returns None for values elsewhere, or if a stride is negative."""
    if _file_of(array) is not file.data or any(s < 0 for s in array.strides):
        return None
    return _data_address(array) - _data_address(np.frombuffer(file.data, np.uint8))


def is_continuation(run: Sequence[Array], piece: Array, axis: int, new: bool) -> bool:
    """Return True if ``piece`` continues ``run`` at a constant stride in the same buffer. All pieces then form one array,
    concatenated (stacked if ``new``) along ``axis``."""
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
    """Return consecutive arrays (``is_continuation``) as one view, or None if the view has gaps."""
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
    """Release the memory of a mapped array's pages: later reads load the file again. Other arrays are unchanged."""
    base = _file_of(array)
    if base is None or not hasattr(base, "madvise") or not array.size:  # Windows lacks madvise
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
    """Return the owner of an array's memory: a mapped file, or the base array of a view."""
    base: Any = array
    while not isinstance(base, mmap.mmap):
        inner = base.obj if isinstance(base, memoryview) else getattr(base, "base", None)
        if inner is None:
            break
        base = inner
    return base


def _data_address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])
