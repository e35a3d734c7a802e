"""``tcp``: one process a device, joined by connections of our own; MPI starts the processes and introduces them, and no more.

For hosts that are some way apart. MPI orders a flag behind one-sided data only by a wait for the target's answer, and over TCP
Open MPI brings data in only while the target calls it. Here a thread of the target receives into the slots themselves, in the
order of writing: a tensor and its flag take one way, not three (``wires.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from rammer.errors import DeviceFailure, of_system
from rammer.transport.endpoint import Array, MemoryEndpoint
from rammer.transport.exposed import Exposed
from rammer.transport.local import zeros
from rammer.transport.mpi import MPI, MpiFabric
from rammer.transport.protocol import Endpoint, Fabric, Party, Transport
from rammer.transport.watch import Watch
from rammer.transport.wires import Inbox, Wire, wired

#: Of a connection that does not take what is written.
HINT: Final = "the other process is slow, hangs or has died; --timeout SECONDS lets it take longer"


class TcpFabric:
    """This process's device, by its rank, and the others'. Connections are made with the first memory."""

    def __init__(self, party: Party) -> None:
        self.party, self._mpi, self._inbox = party, MpiFabric(party), Inbox()
        self.mine = self._mpi.mine
        self._wires: dict[int, Wire] | None = None
        self._closed = False

    def meet(self, words: Mapping[int, str], seconds: float) -> list[str]:
        """By MPI."""
        return self._mpi.meet(words, seconds)

    def expose(self, exposed: Exposed) -> Mapping[int, Endpoint]:
        """An allocation; all say that theirs is there, so the first write finds one."""
        rank, seconds = self.mine[0], self.party.timeout
        memory = zeros(exposed.sizes[rank], exposed.aligned)
        number = self._inbox.add(memory, exposed)
        if self._wires is None:
            try:
                self._wires = wired(rank, self._inbox, lambda word: self.meet({rank: word}, seconds), seconds)
            except OSError as problem:
                raise DeviceFailure(f"device {rank} cannot connect: {problem}") from problem
        self.meet({rank: ""}, seconds)
        writer = TcpWriter(self._wires, self._inbox, number, self._mpi.watch)
        return {rank: MemoryEndpoint(rank, exposed, writer, seconds)}

    def close(self, failed: bool = False) -> None:
        """Whoever has ``failed`` only stops writing: what it has written still goes out."""
        if self._closed:
            return
        self._closed = True
        for wire in (self._wires or {}).values():
            wire.done()
        if not failed:
            for wire in (self._wires or {}).values():
                wire.close(self.party.timeout)
        self._mpi.close(failed)


class TcpWriter:
    """Writes into memory ``number`` of other processes."""

    def __init__(self, wires: Mapping[int, Wire], inbox: Inbox, number: int, watch: Watch) -> None:
        self.memory: Array = inbox.memories[number]
        self._wires, self._inbox, self._number, self._watch = wires, inbox, number, watch

    def write(self, target: int, place: int, values: Array, last: bool = False) -> None:
        """The system has taken it, and brings it in order; a payload may leave with the flag that follows."""
        try:
            self._wires[target].write(self._number, place, values, more=not last)
        except OSError as problem:
            raise DeviceFailure(f"the connection to device {target} failed: {problem}", hint=HINT) from problem

    def until(self, ready: Callable[[], bool], ended: Callable[[], bool], seconds: float) -> None:
        """Asleep between words that arrive."""
        with self._inbox.changed:
            self._inbox.changed.wait_for(lambda: ready() or ended(), seconds)

    def watched(self, doing: str, last: str = "") -> None:
        """All that blocks here has a limit; the launcher's end of this process is told as with MPI."""
        self._watch.doing(doing, last)


def _open(party: Party) -> Fabric:
    try:
        return TcpFabric(party)
    except Exception as problem:
        if (told := of_system(problem, "transport tcp")) is not None:
            raise told from problem
        raise


#: For devices of several processes whose hosts have an ordinary network between them.
TCP = Transport(
    "tcp", "connections over TCP, a process a device (MPI starts them)", MPI.probe, MPI.connects, _open, rank=-1, far=1
)
