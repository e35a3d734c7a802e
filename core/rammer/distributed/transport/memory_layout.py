"""Where everything that crosses arrives: slots for tensors, and words for flags, in the memory that each device exposes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from rammer.device.in_place import ANY, HostRoom
from rammer.distributed.distributed_program import Transfer

__all__ = ["ALIGNED", "LAST_WORDS", "SLACK", "WORD", "Exposed", "Slots", "record_words", "round_up"]

#: Bytes; slots begin at multiples of it, so that every load of a vector is aligned as in a device's own memory.
ALIGNED: Final = 256
#: Bytes behind each slot that belong to nobody: kernels may load whole vectors.
SLACK: Final = 256
#: Bytes of a word: a run's number.
WORD: Final = 8
#: Bytes in which each device tells another one why it ended.
LAST_WORDS: Final = 512


@dataclass(frozen=True, slots=True)
class Slots:
    """First bytes: in the target's memory of the slots and of the words that say what is in them, in the source's of the words
    that say which slots are free again. ``stride`` is from slot to slot. Of a tensor whose shape is a run's, slots hold a
    ``record_words`` of it, and more words of the source, ``acks``, say what was read from its pool."""

    slots: int
    stride: int
    flags: int
    credits: int
    acks: int = 0


@dataclass(frozen=True)
class Exposed:
    """Everything that crosses between ``devices`` (their names), in ``depth`` slots each: so many runs may be in flight. All
    devices derive the same one, so that only the addresses where their memory begins are exchanged. ``rooms`` are what each
    device asks of arrays that its programs read where they are, and slots have: they begin there, and behind the last one are
    the bytes that may be read."""

    devices: tuple[str, ...]
    transfers: tuple[Transfer, ...]
    depth: int = 1
    rooms: tuple[HostRoom, ...] = ()

    def __post_init__(self) -> None:
        if self.depth < 1:
            raise ValueError(f"{self.depth} slots")
        if self.rooms and len(self.rooms) != len(self.devices):
            raise ValueError(f"{len(self.rooms)} rooms for {len(self.devices)} devices")

    @cached_property
    def transfer(self) -> dict[str, Transfer]:
        """By name."""
        return {t.name: t for t in self.transfers}

    @cached_property
    def _layout_plan(self) -> tuple[dict[str, Slots], tuple[int, ...], tuple[tuple[int, int], ...]]:
        """Places by transfer, and of each device the bytes that it exposes and its pool."""
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
        """What ``device`` asks of arrays."""
        return self.rooms[device] if self.rooms else ANY

    def pool(self, device: int) -> tuple[int, int]:
        """First byte and bytes of the memory in which ``device`` keeps tensors whose shape is a run's: room for all of one run at
        the most; of shorter runs several have room."""
        return self._layout_plan[2][device]

    @property
    def aligned(self) -> int:
        """What each device's memory, and slots in it, begin at a multiple of."""
        return int(np.lcm.reduce([ALIGNED, *(room.aligned for room in self.rooms)]))

    @property
    def places(self) -> dict[str, Slots]:
        """By transfer."""
        return self._layout_plan[0]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes by device."""
        return self._layout_plan[1]

    def last_words(self, device: int) -> int:
        """Where in everybody's memory ``device`` tells why it ended."""
        return LAST_WORDS * device

    def called(self, device: int) -> str:
        """A device in messages."""
        return f"device {device} ({self.devices[device]})"

    def arriving(self, device: int) -> Sequence[Transfer]:
        """What ``device`` receives."""
        return [t for t in self.transfers if t.target == device]


def record_words(transfer: Transfer) -> int:
    """Words of what is told of a tensor whose shape is a run's: its extents, and where it begins in the source's memory."""
    return len(transfer.type.shape) + 1


def round_up(n: int, step: int) -> int:
    """The next multiple."""
    return -(-n // step) * step
