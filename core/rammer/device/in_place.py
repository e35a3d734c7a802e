"""Host arrays that programs access in place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np

from rammer.device.arrays import Array

__all__ = ["ANY", "HostRoom", "InPlace", "room_of"]


@dataclass(frozen=True, slots=True)
class HostRoom:
    """The requirements on a dense host array that a device's programs access in place. It starts at a multiple of ``aligned``
    bytes. The ``beyond`` bytes after it are readable, with arbitrary content."""

    aligned: int = 64
    beyond: int = 0

    def has(self, array: Any) -> bool:
        """Return True if ``array`` meets the requirements, as far as its base array shows."""
        if not isinstance(array, np.ndarray) or not array.flags.c_contiguous or not array.nbytes:
            return False
        whole = array
        while isinstance(whole.base, np.ndarray):
            whole = whole.base
        end = np.lib.array_utils.byte_bounds(whole)[1] - array.nbytes - array.ctypes.data
        return array.ctypes.data % self.aligned == 0 and end >= self.beyond

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Array:
        """Return a new zero-filled array that meets the requirements."""
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        whole = np.zeros(size + self.aligned + self.beyond, np.uint8)
        start = -whole.ctypes.data % self.aligned
        return whole[start : start + size].view(dtype).reshape(shape)

    def with_that_of(self, other: HostRoom) -> HostRoom:
        """Return the requirements that satisfy both."""
        return HostRoom(int(np.lcm(self.aligned, other.aligned)), max(self.beyond, other.beyond))


#: Requirements of a device that declares none.
ANY: Final = HostRoom()


@runtime_checkable
class InPlace(Protocol):
    """A Backend that shares the host's memory and declares which arrays its programs access in place."""

    @property
    def host_room(self) -> HostRoom:
        """The requirements on an array that programs access in place."""
        ...


def room_of(backend: Any) -> HostRoom:
    """Return the requirements that a Backend places on host arrays."""
    return backend.host_room if isinstance(backend, InPlace) else ANY
