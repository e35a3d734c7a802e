"""Transport ``mpi``: one process a device, connected by MPI's one-sided windows (mpi4py), over any network of MPI.

All processes lock a window permanently. A payload is ``Put`` and flushed, so it arrives before its flag is sent. The flag is put
without a flush: before its word is written again, the other side has answered. A waiting process reads its memory and lets MPI
progress, since networks without hardware support need that to deliver a write.

MPI has no time limits: a watchdog thread (``watchdog.py``) ends the process if a call blocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, Final

import numpy as np

from rammer.distributed.transport.endpoint import Array, MemoryEndpoint
from rammer.distributed.transport.memory_layout import Exposed
from rammer.distributed.transport.mpi_launch import cancel_leave, leave_at_exit, load_mpi
from rammer.distributed.transport.protocol import Endpoint, Fabric, Party, Reach, Site, Transport
from rammer.distributed.transport.watchdog import Watch
from rammer.errors import DeviceFailure, MissingDependency, of_system

#: Polls before a waiting process yields its core, and before it sleeps between polls.
EAGER, PATIENT = 300, 3000
#: Seconds between polls after a long wait.
NAP = 5e-5
#: Polls between two checks for a device that has ended.
SELDOM = 64


class MpiFabric:
    """A fabric of this process's device, by rank, and those of other processes."""

    def __init__(self, party: Party) -> None:
        self.party, self.mpi = party, load_mpi(party.timeout)
        self.comm = self.mpi.COMM_WORLD
        if len(party.sites) != self.comm.size:
            raise DeviceFailure(f"{len(party.sites)} devices for {self.comm.size} processes")
        self.mine: tuple[int, ...] = (self.comm.rank,)
        self.watch = Watch(f"device {self.comm.rank} ({party.sites[self.comm.rank].device})", party.timeout)
        self._windows: list[Any] = []
        self._closed = False

    def meet(self, words: Mapping[int, str], seconds: float) -> list[str]:
        """Exchange the words of all processes: lengths first, then texts."""
        rank, size = self.comm.rank, self.comm.size
        own = np.frombuffer(words[rank].encode(), np.uint8).copy()
        counts, length = np.zeros(size, np.int64), np.array([own.size], np.int64)
        self._await_request(self.comm.Iallgather(length, counts), seconds)
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        whole = np.zeros(int(starts[-1]), np.uint8)
        into = [whole, [int(c) for c in counts], [int(s) for s in starts[:-1]], self.mpi.BYTE]
        self._await_request(self.comm.Iallgatherv([own, self.mpi.BYTE], into), seconds)
        return [whole[a:b].tobytes().decode() for a, b in pairwise(starts)]

    def _await_request(self, request: Any, seconds: float) -> None:
        deadline, polls = time.monotonic() + seconds, 0
        while not request.Test():
            polls += 1
            if time.monotonic() > deadline:
                sites = ", ".join(s.device for s in self.party.sites)
                raise DeviceFailure(
                    f"device {self.comm.rank} waits for the other processes ({sites}), not connected within {seconds:g} s",
                    hint="one of them hangs or has died",
                )
            rest_between_polls(polls)

    def expose(self, exposed: Exposed) -> Mapping[int, Endpoint]:
        """Allocate a window by MPI; between processes of one host it is shared memory."""
        mpi, rank = self.mpi, self.comm.rank
        info = mpi.Info.Create()
        info.Set("alloc_shared_noncontig", "true")
        self.watch.doing("allocating windows")
        window = mpi.Win.Allocate(exposed.sizes[rank] + exposed.aligned, 1, info, self.comm)
        info.Free()
        self._windows.append(window)
        whole = np.frombuffer(window.tomemory(), np.uint8)
        whole[:] = 0
        start = -whole.ctypes.data % exposed.aligned
        window.Lock_all()
        self.watch.doing("")
        starts = [int(s) for s in self.meet({rank: str(start)}, self.party.timeout)]
        memory = whole[start : start + exposed.sizes[rank]]
        writer = MpiWriter(mpi, window, self.comm, memory, starts, self.watch)
        return {rank: MemoryEndpoint(rank, exposed, writer, self.party.timeout)}

    def close(self, failed: bool = False) -> None:
        """Free the windows in all processes. A process that has failed frees nothing, since other
        processes do not wait for it."""
        if self._closed:
            return
        self._closed = True
        if not failed and self._windows:
            self.watch.doing("freeing windows")
            for window in self._windows:
                window.Unlock_all()
                window.Free()
            self.watch.doing("")
        self.watch.close()
        if not failed:
            leave_at_exit(self.party.timeout)
        else:
            cancel_leave()


class MpiWriter(Reach):
    """A writer into other processes' windows; ``starts`` are the offsets of their memory."""

    def __init__(self, mpi: Any, window: Any, comm: Any, memory: Array, starts: list[int], watch: Watch) -> None:
        self.memory, self._mpi, self._window, self._comm, self._starts, self._watch = memory, mpi, window, comm, starts, watch

    def write(self, target: int, place: int, values: Array, last: bool = False) -> None:
        """Write values, complete at the target on return except for the ``last``, which saves a round trip."""
        mpi = self._mpi
        try:
            self._window.Put([values, mpi.BYTE], target, [self._starts[target] + place, values.size, mpi.BYTE])
            (self._window.Flush_local if last else self._window.Flush)(target)
        except mpi.Exception as problem:
            raise DeviceFailure(f"MPI failed to write to device {target}: {problem}") from problem

    def read(self, source: int, place: int, into: Array) -> None:
        """Read bytes by a flushed get, complete on return."""
        mpi = self._mpi
        try:
            self._window.Get([into, mpi.BYTE], source, [self._starts[source] + place, into.size, mpi.BYTE])
            self._window.Flush(source)
        except mpi.Exception as problem:
            raise DeviceFailure(f"MPI failed to read from device {source}: {problem}") from problem

    def kept(self) -> None:
        """Synchronise the window's copies of memory."""
        self._window.Sync()

    def until(self, ready: Callable[[], bool], ended: Callable[[], bool], seconds: float) -> None:
        """Poll until ready: first continuously, later with sleeps."""
        window, comm, any_source = self._window, self._comm, self._mpi.ANY_SOURCE

        def work() -> None:
            window.Sync()
            comm.Iprobe(any_source)  # lets MPI progress

        poll_until(ready, ended, seconds, work)

    def watched(self, doing: str, last: str = "") -> None:
        """Set the watch, which ends the process if MPI blocks for too long."""
        self._watch.doing(doing, last)


def poll_until(ready: Callable[[], bool], ended: Callable[[], bool], seconds: float, work: Callable[[], None]) -> bool:
    """Call ``work`` until ``ready``, until another device has ``ended``, or for ``seconds`` at most; return True if ready. Polls
    continuously at first, later with sleeps."""
    deadline, polls = time.monotonic() + seconds, 0
    while not ready():
        work()
        polls += 1
        if polls % SELDOM == 0 and (ended() or time.monotonic() > deadline):
            return False
        rest_between_polls(polls)
    return True


def rest_between_polls(polls: int) -> None:
    """Sleep between two polls, depending on the number of ``polls``."""
    if polls > EAGER:
        time.sleep(NAP if polls > PATIENT else 0)


def open_fabric(fabric: Callable[[Party], Fabric], party: Party, name: str) -> Fabric:
    """Open the fabric of transport ``name``. System errors are converted to RammerErrors."""
    try:
        return fabric(party)
    except Exception as problem:
        if (told := of_system(problem, f"transport {name}")) is not None:
            raise told from problem
        raise


def _probe_mpi() -> None:
    """Check the requirements without initialising MPI."""
    from importlib.util import find_spec

    if find_spec("mpi4py") is None:
        raise MissingDependency("mpi4py", "pip install 'rammer-core[mpi]', and MPI itself (openmpi-bin)")


def _link_refusal(a: Site, b: Site) -> str | None:
    if a.process == b.process:
        return f"{a.device} and {b.device} are in one process"
    return None


def _open(party: Party) -> Fabric:
    return open_fabric(MpiFabric, party, "mpi")


#: The transport for devices of several processes, on one host or several.
MPI: Final = Transport("mpi", "one-sided windows of mpi4py, a process a device", _probe_mpi, _link_refusal, _open, reads=True)
