"""Transfers of dynamic-shape tensors: the sender's pool and the receiver's slots.

The sender copies the dense tensor into a pool in its exposed memory. It then writes a record with extents and address into the
receiver's slot, followed by a flag. The receiver reads the tensor and acknowledges, which frees the pool's memory. It reads as
soon as the record is visible, in any wait. Records are sent only to free slots, so the receiver always has room.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from rammer.device.arrays import Array, HostRoom
from rammer.distributed.distributed_program import Transfer
from rammer.distributed.transport.memory_layout import ALIGNED, SLACK, WORD, Exposed, record_words, round_up
from rammer.errors import DeviceFailure


@dataclass(frozen=True, slots=True)
class KeptTensor:
    """A tensor in the pool: its transfer, run and offset."""

    transfer: Transfer
    run: int
    place: int


class SendPool:
    """The pool of device ``device`` in its exposed ``memory``."""

    def __init__(self, device: int, exposed: Exposed, memory: Array) -> None:
        late = [t for t in exposed.transfers if t.late and t.source == device]
        self.pool, self.depth = Pool(*exposed.pool(device)), exposed.depth
        self.acks = {t.name: view_words(memory, exposed.places[t.name].acks, exposed.depth) for t in late}
        self.held = list[KeptTensor]()

    def room(self, transfer: Transfer, run: int, nbytes: int) -> int | None:
        """Allocate ``nbytes`` bytes for a run's tensor and return their offset, or None if unread tensors occupy the space."""
        self.reclaim()
        place = self.pool.take(nbytes)
        if place is not None:
            self.held.append(KeptTensor(transfer, run, place))
        return place

    @property
    def oldest(self) -> KeptTensor:
        """The tensor that has waited longest for its reader."""
        return self.held[0]

    def reclaim(self) -> None:
        """Free the memory of tensors that were read."""
        read = [k for k in self.held if self.acks[k.transfer.name][k.run % self.depth] > k.run]
        for k in read:
            self.pool.give(k.place)
        self.held = [k for k in self.held if k not in read]


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """The message that announces a tensor: its shape, and its first byte in the sender's memory."""

    shape: tuple[int, ...]
    place: int

    def array(self) -> Array:
        """Return the record as it is sent."""
        return np.array([*self.shape, self.place], np.int64)

    @staticmethod
    def of(array: Array, transfer: Transfer) -> TensorRecord:
        """Decode a record. Raises DeviceFailure if it is invalid."""
        *shape, place = map(int, array)
        if any(not 0 <= n <= most for n, most in zip(shape, transfer.type.shape, strict=True)):
            raise DeviceFailure(
                f"a shape record contains {shape}", f"{transfer}", "the processes differ, or memory was overwritten"
            )
        return TensorRecord(tuple(shape), place)


class Arriving:
    """Receive buffers of one dynamic-shape transfer: ``depth`` slots of maximal size, filled past the actual shape."""

    def __init__(self, transfer: Transfer, exposed: Exposed, memory: Array) -> None:
        place, kind, self.transfer = exposed.places[transfer.name], transfer.type, transfer
        starts = [place.slots + n * place.stride for n in range(exposed.depth)]
        self._records = [view_words(memory, start, record_words(transfer)) for start in starts]
        self._flags = view_words(memory, place.flags, exposed.depth)
        self._read = np.zeros(exposed.depth, np.int64)
        self.shapes = [(0,) * len(kind.shape)] * exposed.depth
        self._room = exposed.room(transfer.target).with_that_of(HostRoom(ALIGNED, SLACK))
        self.slots = [self._room.zeros(kind.shape, kind.dtype) for _ in range(exposed.depth)]
        self._apart: Array | None = None
        for slot in self.slots:
            slot[...] = next(self._fill_values())[1]

    def has(self, run: int) -> bool:
        """Return True if a run's tensor was read."""
        return bool(self._read[run % len(self.slots)] > run)

    def told(self) -> Iterator[int]:
        """Yield the runs whose tensor is announced but unread."""
        yield from (int(run) - 1 for run in self._flags[self._flags > self._read])

    def record(self, run: int) -> TensorRecord:
        """Return the record of an announced run."""
        return TensorRecord.of(self._records[run % len(self.slots)], self.transfer)

    def into(self, run: int, shape: tuple[int, ...]) -> Array:
        """Return dense memory to read the tensor into: its part of the slot if that is contiguous, else a separate buffer."""
        place = self._slot_view(run, shape)
        if place.flags.c_contiguous:
            return place
        if self._apart is None:
            self._apart = self._room.zeros(self.transfer.type.shape, self.transfer.type.dtype)
        return self._apart.reshape(-1)[: place.size].reshape(shape)

    def arrived(self, run: int, values: Array) -> bool:
        """Store the tensor in the slot and fill the elements past its shape. Returns True if that took a copy."""
        place, number = self._slot_view(run, values.shape), run % len(self.slots)
        copied = not place.flags.c_contiguous
        if copied:
            np.copyto(place, values)
        fills = list(self._fill_values())
        # With equal fills only the previous content of the slot must be overwritten.
        ends = self.shapes[number] if len({f for _, f in fills}) == 1 else self.transfer.type.shape
        for axis, fill in reversed(fills):
            if values.shape[axis] < ends[axis]:
                self.slots[number][(*[slice(None)] * axis, slice(values.shape[axis], ends[axis]))] = fill
        self.shapes[number], self._read[number] = values.shape, run + 1
        return copied

    def _slot_view(self, run: int, shape: tuple[int, ...]) -> Array:
        return self.slots[run % len(self.slots)][tuple(map(slice, shape))]

    def _fill_values(self) -> Iterator[tuple[int, float]]:
        """Yield the dynamic axes with their fill values."""
        late = self.transfer.late
        if late is not None:
            yield from ((d, late.fills[d]) for d, e in enumerate(late.extents) if e is not None)


def bytes_of(values: Array) -> Array:
    """Return a dense array's memory as bytes, without a copy."""
    return values.reshape(-1).view(np.uint8)


def view_words(memory: Array, place: int, count: int) -> Array:
    """Return ``count`` words of ``memory`` as a view."""
    return memory[place : place + WORD * count].view(np.int64)


class Pool:
    """An allocator of blocks that start at multiples of ``ALIGNED``. Adjacent free blocks are merged."""

    def __init__(self, begin: int, nbytes: int) -> None:
        """Manage ``nbytes`` from byte ``begin`` on, both multiples of ``ALIGNED``."""
        self.nbytes = nbytes
        self._free: dict[int, int] = {begin: nbytes} if nbytes else {}  # first byte -> bytes
        self._taken: dict[int, int] = {}

    def take(self, nbytes: int) -> int | None:
        """Allocate a block from the smallest free range that fits, and return its first byte, or None if none fits."""
        need = max(ALIGNED, round_up(nbytes, ALIGNED))
        fitting = [(size, start) for start, size in self._free.items() if size >= need]
        if not fitting:
            return None
        size, start = min(fitting)
        del self._free[start]
        if size > need:
            self._free[start + need] = size - need
        self._taken[start] = need
        return start

    def give(self, start: int) -> None:
        """Free the block that starts at ``start``. Raises KeyError for an unknown block."""
        end = start + self._taken.pop(start)
        following = self._free.pop(end, 0)
        before = next((s for s, size in self._free.items() if s + size == start), start)
        self._free[before] = end + following - before
