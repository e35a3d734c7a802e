"""Transport ``messages``: one process a device, connected by MPI messages (mpi4py), for processes on different hosts.

One-sided data is ordered before its flag only by a reply of the target, which is slow between hosts. Messages between two
processes do not overtake each other (MPI 4.0, 3.5), so a tensor and its flag use the same channel. A write is a header (memory,
offset, size) and the bytes. The target receives them directly at their destination, without an intermediate buffer of ours.
Transfers are two-sided: the target receives whenever it waits or writes. Messages that arrive while it computes stay in buffers
of MPI and the system.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from rammer.distributed.transport.endpoint import Array, MemoryEndpoint
from rammer.distributed.transport.local import aligned_zeros
from rammer.distributed.transport.memory_layout import Exposed
from rammer.distributed.transport.mpi import MPI, MpiFabric, open_fabric, poll_until, rest_between_polls
from rammer.distributed.transport.protocol import Endpoint, Fabric, Party, Reach, Transport
from rammer.distributed.transport.watchdog import Watch
from rammer.errors import DeviceFailure

#: Words of a header: memory, first byte there, bytes. A process's last header has END for its memory.
HEADER: Final = 3
END: Final = -1
#: Bytes of a message. MPI sends small messages at once, and negotiates large ones first: a round trip. Open MPI's
#: limit over TCP is 64 KiB (``ompi_info --param btl tcp --level 9``, btl_tcp_eager_limit).
PIECE: Final = 48 << 10
#: Tags of headers and of bytes.
ABOUT, BYTES = 1, 2


@dataclass
class Source:
    """The state of receiving from another process: the receives of an incomplete write, and a flag for its end."""

    pending: list[Any] = field(default_factory=list)
    over: bool = False


class Mailbox:
    """The memories that this process exposes, numbered in order of exposure, and its messages to and from other processes."""

    def __init__(self, mpi: Any, comm: Any) -> None:
        self.memories: list[Array] = []
        self._mpi, self._comm = mpi, comm
        self._header = np.zeros(HEADER, np.int64)
        self._sources = {rank: Source() for rank in range(comm.size) if rank != comm.rank}

    def send(self, target: int, number: int, place: int, values: Array) -> None:
        """Send values and return when MPI has accepted all. Receives meanwhile: two processes that write to each other would
        deadlock."""
        mpi, comm = self._mpi, self._comm
        header = np.array([number, place, values.size], np.int64)
        sent = [comm.Isend(header, target, ABOUT)]
        sent += [comm.Isend([values[i : i + PIECE], mpi.BYTE], target, BYTES) for i in range(0, values.size, PIECE)]
        polls = 0
        while not mpi.Request.Testall(sent):
            self.receive()
            polls += 1
            rest_between_polls(polls)

    def receive(self) -> None:
        """Receive available messages, from each process in order."""
        for rank, source in self._sources.items():
            while self._has_arrived(source) and not source.over and self._comm.Iprobe(rank, ABOUT):
                self._comm.Recv(self._header, rank, ABOUT)
                number, place, size = (int(n) for n in self._header)
                if number == END:
                    source.over = True
                    break
                if not (0 <= number < len(self.memories) and 0 <= place <= place + size <= self.memories[number].size):
                    raise DeviceFailure(f"process {rank} wrote {size} bytes where nothing is exposed")
                into = self.memories[number][place : place + size]
                source.pending = [
                    self._comm.Irecv([into[i : i + PIECE], self._mpi.BYTE], rank, BYTES) for i in range(0, size, PIECE)
                ]

    def _has_arrived(self, source: Source) -> bool:
        if source.pending and self._mpi.Request.Testall(source.pending):
            source.pending = []
        return not source.pending

    def end(self) -> None:
        """Send the end marker to all processes."""
        for rank in self._sources:
            self.send(rank, END, 0, np.zeros(0, np.uint8))

    @property
    def over(self) -> bool:
        """True if all other processes have sent the end marker and all data has arrived."""
        return all(source.over for source in self._sources.values())


class MessageFabric:
    """A fabric of this process's device, by its rank, and those of other processes."""

    def __init__(self, party: Party) -> None:
        self.party, self._mpi = party, MpiFabric(party)
        self.mine = self._mpi.mine
        self._box: Mailbox | None = None
        self._closed = False

    def meet(self, words: Mapping[int, str], seconds: float) -> list[str]:
        return self._mpi.meet(words, seconds)

    def expose(self, exposed: Exposed) -> Mapping[int, Endpoint]:
        """Allocate the memory, and synchronise so that the first write finds it."""
        rank, watch = self.mine[0], self._mpi.watch
        if self._box is None:
            watch.doing("opening a communicator")
            self._box = Mailbox(self._mpi.mpi, self._mpi.comm.Dup())
            watch.doing("")
        self._box.memories.append(aligned_zeros(exposed.sizes[rank], exposed.aligned))
        self.meet({rank: ""}, self.party.timeout)
        writer = MessageWriter(self._mpi.mpi, self._box, len(self._box.memories) - 1, watch)
        return {rank: MemoryEndpoint(rank, exposed, writer, self.party.timeout)}

    def close(self, failed: bool = False) -> None:
        """Receive all outstanding messages before MPI ends, unless a process has failed."""
        if self._closed:
            return
        self._closed = True
        if not failed and self._box is not None:
            self._mpi.watch.doing("receiving the last messages")
            box = self._box
            box.end()
            poll_until(lambda: box.over, lambda: False, self.party.timeout, box.receive)
            self._mpi.watch.doing("")
        self._mpi.close(failed)


class MessageWriter(Reach):
    """A writer into memory ``number`` of other processes."""

    def __init__(self, mpi: Any, box: Mailbox, number: int, watch: Watch) -> None:
        self.memory: Array = box.memories[number]
        self._mpi, self._box, self._number, self._watch = mpi, box, number, watch

    def write(self, target: int, place: int, values: Array, last: bool = False) -> None:
        """Send the values through MPI, which preserves the order: later writes become visible later."""
        try:
            self._box.send(target, self._number, place, values)
        except self._mpi.Exception as problem:
            raise DeviceFailure(f"MPI failed to send to device {target}: {problem}") from problem

    def until(self, ready: Callable[[], bool], ended: Callable[[], bool], seconds: float) -> None:
        """Poll until ready: first continuously, later with sleeps."""
        poll_until(ready, ended, seconds, self._box.receive)

    def watched(self, doing: str, last: str = "") -> None:
        """Set the watch, which ends the process if MPI blocks for too long."""
        self._watch.doing(doing, last)


def _open(party: Party) -> Fabric:
    return open_fabric(MessageFabric, party, "messages")


#: The transport for devices of several processes whose hosts are connected by an ordinary network.
MESSAGES = Transport(
    "messages", "messages of mpi4py, received where they are read, a process a device", MPI.probe, MPI.connects, _open, -1, far=1
)
