"""Transport ``local``: devices of one process, one thread each. A write is an assignment in shared memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from threading import Condition
from typing import Final

import numpy as np

from rammer.distributed.transport.endpoint import Array, MemoryEndpoint
from rammer.distributed.transport.memory_layout import Exposed
from rammer.distributed.transport.protocol import Endpoint, Fabric, Party, Reach, Site, Transport
from rammer.errors import DeviceFailure


class LocalFabric:
    """A fabric of devices in this process."""

    def __init__(self, party: Party) -> None:
        self.party, self.mine = party, tuple(range(len(party.sites)))
        self._changed = Condition()

    def meet(self, words: Mapping[int, str], seconds: float) -> list[str]:
        """Return the words: all devices are in this process."""
        return [words[device] for device in self.mine]

    def expose(self, exposed: Exposed) -> Mapping[int, Endpoint]:
        """Allocate the memory of every device and return the endpoints."""
        memories = [aligned_zeros(n, exposed.aligned) for n in exposed.sizes]
        timeout = self.party.timeout
        return {d: MemoryEndpoint(d, exposed, LocalWriter(memories, d, self._changed), timeout) for d in self.mine}

    def close(self, failed: bool = False) -> None:
        """Do nothing: the arrays hold the memory."""


class LocalWriter(Reach):
    """A writer from device ``number`` into ``memories``, one per device, which wakes waiting threads."""

    def __init__(self, memories: list[Array], number: int, changed: Condition) -> None:
        self.memory, self._memories, self._changed = memories[number], memories, changed

    def write(self, target: int, place: int, values: Array, last: bool = False) -> None:
        """Copy the values, then notify waiting threads."""
        self._memories[target][place : place + values.size] = values
        with self._changed:
            self._changed.notify_all()

    def read(self, source: int, place: int, into: Array) -> None:
        """Copy the bytes into ``into``."""
        into[...] = self._memories[source][place : place + into.size]

    def kept(self) -> None:
        """Do nothing: threads see all writes before the flag that woke them."""

    def until(self, ready: Callable[[], bool], ended: Callable[[], bool], seconds: float) -> None:
        """Sleep between writes until ready."""
        with self._changed:
            self._changed.wait_for(lambda: ready() or ended(), seconds)

    def watched(self, doing: str, last: str = "") -> None:
        """Do nothing: threads of one process end with it."""


def aligned_zeros(nbytes: int, aligned: int) -> Array:
    """Return zeroed bytes that start at a multiple of ``aligned``."""
    whole = np.zeros(nbytes + aligned, np.uint8)
    start = -whole.ctypes.data % aligned
    return whole[start : start + nbytes]


def _link_refusal(a: Site, b: Site) -> str | None:
    return None if a.process == b.process else f"{a.device} and {b.device} are in two processes"


def _open(party: Party) -> Fabric:
    if len({s.process for s in party.sites}) > 1:
        raise DeviceFailure("transport local joins devices of one process")
    return LocalFabric(party)


#: The transport for devices of one process with host-visible memory.
LOCAL: Final = Transport("local", "memory of this process, a thread a device", lambda: None, _link_refusal, _open, reads=True)
