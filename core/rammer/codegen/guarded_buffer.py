"""A buffer that detects writes of generated kernels outside their tensor."""

from __future__ import annotations

import ctypes
from typing import Any, TypeAlias

import numpy as np

from rammer.ir.program import Storage

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


class GuardedBuffer:
    """A tensor placed by its storage in a buffer of sentinel values."""

    def __init__(self, storage: Storage, value: Array | None, dtype: str, rng: np.random.Generator) -> None:
        size = max(storage.span()[1], 1)
        self.buffer = rng.integers(1, 100, size + 16).astype(dtype)
        kind = np.dtype(dtype).itemsize
        strides = tuple(s * kind for s in storage.strides)
        self.view = np.lib.stride_tricks.as_strided(self.buffer[storage.offset :], storage.shape, strides)
        if value is not None:
            self.view[...] = value
        self.before = self.buffer.copy()
        self.pointer = ctypes.c_void_p(self.buffer.ctypes.data + storage.offset * kind)

    def untouched_outside(self) -> bool:
        """Return True if only the elements of the tensor changed."""
        after = self.buffer.copy()
        saved = self.view.copy()
        self.view[...] = 0
        blank = self.buffer.copy()
        self.buffer[...] = self.before
        self.view[...] = 0
        same = bool(np.array_equal(blank, self.buffer, equal_nan=blank.dtype.kind == "f"))
        self.buffer[...] = after
        assert np.array_equal(self.view, saved, equal_nan=saved.dtype.kind == "f")
        return same
