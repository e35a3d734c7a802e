"""Arrays of the host that programs use where they are, and what a run copies of those that they do not."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np

from rammer.device.arrays import Array
from rammer.device.manifest import Bound

__all__ = ["ANY", "Copying", "HostRoom", "InPlace", "copied_by", "room_of"]


@dataclass(frozen=True, slots=True)
class HostRoom:
    """What a device asks of a dense array that its programs shall use in its place: it begins at a multiple of ``aligned`` bytes,
    and ``beyond`` bytes behind it may be read, whatever is in them."""

    aligned: int = 64
    beyond: int = 0

    def has(self, array: Any) -> bool:
        """Whether ``array`` is one such, as far as the array that it is a view of tells."""
        if not isinstance(array, np.ndarray) or not array.flags.c_contiguous or not array.nbytes:
            return False
        whole = array
        while isinstance(whole.base, np.ndarray):
            whole = whole.base
        end = np.lib.array_utils.byte_bounds(whole)[1] - array.nbytes - array.ctypes.data
        return array.ctypes.data % self.aligned == 0 and end >= self.beyond

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Array:
        """A new array that has it."""
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        whole = np.zeros(size + self.aligned + self.beyond, np.uint8)
        start = -whole.ctypes.data % self.aligned
        return whole[start : start + size].view(dtype).reshape(shape)

    def with_that_of(self, other: HostRoom) -> HostRoom:
        """What has both."""
        return HostRoom(int(np.lcm(self.aligned, other.aligned)), max(self.beyond, other.beyond))


#: Of a device that says nothing.
ANY: Final = HostRoom()


@runtime_checkable
class InPlace(Protocol):
    """A Backend whose memory is the host's may say which arrays its programs read and write where they are."""

    @property
    def host_room(self) -> HostRoom:
        """What such an array has."""
        ...


@runtime_checkable
class Copying(Protocol):
    """A Bound may also say what its runs copy. One that does not is taken to copy all that it is given."""

    @property
    def copied(self) -> tuple[Collection[str], Collection[str]]:
        """Inputs and outputs whose array is another memory than the one in which the program computes: each run copies between
        the two."""
        ...


def copied_by(bound: Bound) -> tuple[Collection[str], Collection[str]]:
    """The inputs and outputs that a Bound's runs copy."""
    return bound.copied if isinstance(bound, Copying) else (bound.inputs, bound.outputs)


def room_of(backend: Any) -> HostRoom:
    """What a Backend asks of arrays."""
    return backend.host_room if isinstance(backend, InPlace) else ANY
