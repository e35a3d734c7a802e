"""Layout of exposed memory: slots for tensors, and words for flags, in the memory that each device exposes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from rammer.device.arrays import HostRoom
from rammer.distributed.distributed_program import Transfer

__all__ = ["ALIGNED", "LAST_WORDS", "SLACK", "WORD", "Exposed", "Slots", "record_words", "round_up"]

#: Bytes; slots start at multiples of it, so that every vector load is aligned as in a device's memory.
ALIGNED: Final = 256
#: Unused bytes after each slot: kernels may load whole vectors.
SLACK: Final = 256
#: Bytes of a word: a run's number.
WORD: Final = 8
#: Bytes of the message in which each device reports to another why it ended.
LAST_WORDS: Final = 512


@dataclass(frozen=True, slots=True)
class Slots:
    """Byte offsets of one transfer: slots and flags in the target's memory, credits in the source's.

    Flags describe the content of slots, credits mark free slots. ``stride`` is the distance between slots. For a dynamic shape,
    slots hold a record of ``record_words`` words, and ``acks`` in the source's memory mark tensors read from its pool."""

    slots: int
    stride: int
    flags: int
    credits: int
    acks: int = 0


@dataclass(frozen=True)
class Exposed:
    """The exposed memory for all transfers between ``devices`` (their names), with ``depth`` slots each: the runs in flight.

    All devices derive equal layouts, so that only the base addresses of their memory are exchanged. ``rooms`` are each device's
    requirements on arrays accessed in place. Slots meet their alignment, and the readable bytes follow the last slot."""

    devices: tuple[str, ...]
    transfers: tuple[Transfer, ...]
    depth: int = 1
    rooms: tuple[HostRoom, ...] = ()

    def __post_init__(self) -> None:
        if self.depth < 1:
            raise ValueError(f"the number of slots must be at least 1, got {self.depth}")
        if self.rooms and len(self.rooms) != len(self.devices):
            raise ValueError(f"{len(self.rooms)} rooms for {len(self.devices)} devices")

    @cached_property
    def transfer(self) -> dict[str, Transfer]:
        """The transfers by name."""
        return {t.name: t for t in self.transfers}

    @cached_property
    def _layout_plan(self) -> tuple[dict[str, Slots], tuple[int, ...], tuple[tuple[int, int], ...]]:
        """Slots by transfer, the exposed bytes of each device, and its pool."""
        words = WORD * self.depth
        tops = [LAST_WORDS * len(self.devices)] * len(self.devices)
        flags, credits, places = dict[str, int](), dict[str, int](), dict[str, Slots]()
        for t in self.transfers:
            flags[t.name], credits[t.name] = tops[t.target], tops[t.source]
            tops[t.target] += words
            tops[t.source] += words * (2 if t.late else 1)
        for t in self.transfers:
            start = round_up(tops[t.target], self.aligned)
            stride = round_up(WORD * record_words(t) if t.late else t.nbytes + SLACK, self.aligned)
            places[t.name] = Slots(start, stride, flags[t.name], credits[t.name], credits[t.name] + words)
            tops[t.target] = start + stride * self.depth
        pools = list[tuple[int, int]]()
        for device, top in enumerate(tops):
            kept = sum(round_up(t.nbytes, ALIGNED) for t in self.transfers if t.late and t.source == device)
            pools.append((round_up(top, ALIGNED), kept))
            tops[device] = sum(pools[-1]) if kept else top
        sizes = (round_up(top + self.room(device).beyond, self.aligned) for device, top in enumerate(tops))
        return places, tuple(sizes), tuple(pools)

    def room(self, device: int) -> HostRoom:
        """Return the array requirements of ``device``."""
        return self.rooms[device] if self.rooms else HostRoom()

    def pool(self, device: int) -> tuple[int, int]:
        """Return first byte and size of the pool in which ``device`` stores dynamic-shape tensors. It holds all tensors of one
        run at maximal size, or of several shorter runs."""
        return self._layout_plan[2][device]

    @property
    def aligned(self) -> int:
        """The alignment of each device's memory and of the slots in it."""
        return int(np.lcm.reduce([ALIGNED, *(room.aligned for room in self.rooms)]))

    @property
    def places(self) -> dict[str, Slots]:
        """The slots by transfer."""
        return self._layout_plan[0]

    @property
    def sizes(self) -> tuple[int, ...]:
        """The exposed bytes by device."""
        return self._layout_plan[1]

    def last_words(self, device: int) -> int:
        """Return the offset in every memory at which ``device`` writes why it ended."""
        return LAST_WORDS * device

    def called(self, device: int) -> str:
        """Return the name of a device for messages."""
        return f"device {device} ({self.devices[device]})"

    def arriving(self, device: int) -> Sequence[Transfer]:
        """Return the transfers that ``device`` receives."""
        return [t for t in self.transfers if t.target == device]


def record_words(transfer: Transfer) -> int:
    """Return the words of the record of a dynamic-shape tensor: its extents, and its address in the source's memory."""
    return len(transfer.type.shape) + 1


def round_up(n: int, step: int) -> int:
    """Round ``n`` up to a multiple of ``step``."""
    return -(-n // step) * step
