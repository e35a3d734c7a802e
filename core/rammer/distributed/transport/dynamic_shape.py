"""Tensors whose shape a run decides: what their sender keeps for others, and what their reader makes of it.

The sender copies the tensor, dense, into a pool in the memory that it exposes, and writes a record, its extents and its place,
into the reader's slot, a flag behind it. The reader reads the tensor from there and acknowledges, and that memory is the pool's
again. It reads as soon as it sees the record, whatever it waits for: a slot is told of only when it is free, so it has room.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from rammer.device.arrays import Array
from rammer.device.in_place import HostRoom
from rammer.distributed.distributed_program import Transfer
from rammer.distributed.transport.memory_layout import ALIGNED, SLACK, WORD, Exposed, record_words, round_up
from rammer.errors import DeviceFailure


@dataclass(frozen=True, slots=True)
class KeptTensor:
    """A tensor in the pool: of which transfer and run, and where."""

    transfer: Transfer
    run: int
    place: int


class SendPool:
    """What device ``device`` keeps in ``memory``, which it exposes."""

    def __init__(self, device: int, exposed: Exposed, memory: Array) -> None:
        late = [t for t in exposed.transfers if t.late and t.source == device]
        self.pool, self.depth = Pool(*exposed.pool(device)), exposed.depth
        self.acks = {t.name: view_words(memory, exposed.places[t.name].acks, exposed.depth) for t in late}
        self.held = list[KeptTensor]()

    def room(self, transfer: Transfer, run: int, nbytes: int) -> int | None:
        """Where so many bytes have been taken for a run's tensor; None where too many others are not read yet."""
        self.reclaim()
        place = self.pool.take(nbytes)
        if place is not None:
            self.held.append(KeptTensor(transfer, run, place))
        return place

    @property
    def oldest(self) -> KeptTensor:
        """What has waited longest for its reader."""
        return self.held[0]

    def reclaim(self) -> None:
        """What was read is the pool's again."""
        read = [k for k in self.held if self.acks[k.transfer.name][k.run % self.depth] > k.run]
        for k in read:
            self.pool.give(k.place)
        self.held = [k for k in self.held if k not in read]


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """What a sender tells of a tensor: its shape, and its first byte in the sender's memory."""

    shape: tuple[int, ...]
    place: int

    def array(self) -> Array:
        """As it crosses."""
        return np.array([*self.shape, self.place], np.int64)

    @staticmethod
    def of(array: Array, transfer: Transfer) -> TensorRecord:
        """DeviceFailure for what cannot be."""
        *shape, place = map(int, array)
        if any(not 0 <= n <= most for n, most in zip(shape, transfer.type.shape, strict=True)):
            raise DeviceFailure(f"a record says {shape}", f"{transfer}", "the processes differ, or memory was overwritten")
        return TensorRecord(tuple(shape), place)


class Arriving:
    """What a device has read of one transfer: a slot each of ``depth``, which has the extents of the longest and what the
    transfer says beyond the run's."""

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
        """Whether a run's tensor was read."""
        return bool(self._read[run % len(self.slots)] > run)

    def told(self) -> Iterator[int]:
        """Runs whose tensor can be read, and was not."""
        yield from (int(run) - 1 for run in self._flags[self._flags > self._read])

    def record(self, run: int) -> TensorRecord:
        """Of a run that was told of."""
        return TensorRecord.of(self._records[run % len(self.slots)], self.transfer)

    def into(self, run: int, shape: tuple[int, ...]) -> Array:
        """Where the tensor is to be read to, dense: its place in the slot if that lies in one piece, else memory beside it."""
        place = self._slot_view(run, shape)
        if place.flags.c_contiguous:
            return place
        if self._apart is None:
            self._apart = self._room.zeros(self.transfer.type.shape, self.transfer.type.dtype)
        return self._apart.reshape(-1)[: place.size].reshape(shape)

    def arrived(self, run: int, values: Array) -> bool:
        """They were read. The slot has them and, beyond, what is said of there; whether that took a copy."""
        place, number = self._slot_view(run, values.shape), run % len(self.slots)
        copied = not place.flags.c_contiguous
        if copied:
            np.copyto(place, values)
        fills = list(self._fill_values())
        # Where all fills are one number, only what lay in the slot before has to go.
        ends = self.shapes[number] if len({f for _, f in fills}) == 1 else self.transfer.type.shape
        for axis, fill in reversed(fills):
            if values.shape[axis] < ends[axis]:
                self.slots[number][(*[slice(None)] * axis, slice(values.shape[axis], ends[axis]))] = fill
        self.shapes[number], self._read[number] = values.shape, run + 1
        return copied

    def _slot_view(self, run: int, shape: tuple[int, ...]) -> Array:
        return self.slots[run % len(self.slots)][tuple(map(slice, shape))]

    def _fill_values(self) -> Iterator[tuple[int, float]]:
        """Axes along which it ends, and what lies beyond."""
        late = self.transfer.late
        if late is not None:
            yield from ((d, late.fills[d]) for d, e in enumerate(late.extents) if e is not None)


def bytes_of(values: Array) -> Array:
    """A dense array's memory as bytes; no copy."""
    return values.reshape(-1).view(np.uint8)


def view_words(memory: Array, place: int, count: int) -> Array:
    """So many words of ``memory``."""
    return memory[place : place + WORD * count].view(np.int64)


class Pool:
    """Blocks of some bytes, which begin at multiples of ``ALIGNED``. Whatever fits into all of it fits once all blocks were given
    back: neighbours that are free are one."""

    def __init__(self, begin: int, nbytes: int) -> None:
        """``nbytes`` from byte ``begin`` on, both multiples of ``ALIGNED``."""
        self.nbytes = nbytes
        self._free: dict[int, int] = {begin: nbytes} if nbytes else {}  # first byte -> bytes
        self._taken: dict[int, int] = {}

    def take(self, nbytes: int) -> int | None:
        """The first byte of a block, cut from the smallest stretch that it fits into; None where there is none."""
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
        """The block that begins there is free. KeyError where none does."""
        end = start + self._taken.pop(start)
        behind = self._free.pop(end, 0)
        before = next((s for s, size in self._free.items() if s + size == start), start)
        self._free[before] = end + behind - before
