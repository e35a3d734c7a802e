"""GPU memory that others write to in place: direct access between peers of one process, CUDA IPC handles between processes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final

from rammer.errors import DeviceUnavailable

from rammer_cuda.driver import check_result, import_driver
from rammer_cuda.hardware import Unit, import_cupy

#: Granularity of memory that other processes map: CUDA shares whole blocks (CUDA Programming Guide, Interprocess Communication).
BLOCK: Final = 2 << 20


@dataclass(frozen=True, slots=True)
class Offer:
    """The data needed to reach a GPU's memory: its process, its address there, its handle for other processes, and its bus ID."""

    process: int
    address: int
    handle: bytes
    bus: str


class PeerMemory:
    """At least ``nbytes`` of GPU ``index``, initially zero. A separate allocation, since a handle shares an entire allocation."""

    def __init__(self, index: int, nbytes: int) -> None:
        self.unit = Unit(index)
        runtime, nbytes = import_cupy().cuda.runtime, -(-nbytes // BLOCK) * BLOCK
        with self.unit:
            self.address = int(runtime.malloc(nbytes))
            runtime.memset(self.address, 0, nbytes)
            runtime.deviceSynchronize()

    def offer(self, abroad: bool) -> Offer:
        """Return the offer to others, with a handle if some are processes ``abroad``. Raises DeviceUnavailable if CUDA refuses a
        handle."""
        handle = b""
        if abroad:
            with self.unit, between_processes("getting a handle of a GPU's memory"):
                handle = bytes(import_cupy().cuda.runtime.ipcGetMemHandle(self.address))
        return Offer(os.getpid(), self.address, handle, bus_of(self.unit.id))

    def close(self) -> None:
        """Free the memory; closing again does nothing."""
        if self.address:
            with self.unit, suppress(import_cupy().cuda.runtime.CUDARuntimeError):  # a failed GPU has already freed everything
                import_cupy().cuda.runtime.free(self.address)
            self.address = 0


class ReachedMemory:
    """The memory of all GPUs of a run, as GPU ``index`` of this process reaches it. Raises DeviceUnavailable if it cannot."""

    def __init__(self, index: int, offers: Sequence[Offer]) -> None:
        self.unit, self.opened = Unit(index), list[int]()
        self.addresses = [self._map_offer(o) for o in offers]

    def _map_offer(self, offer: Offer) -> int:
        allow_access(self.unit.id, offer.bus)
        if offer.process == os.getpid():
            return offer.address
        with self.unit, between_processes(f"mapping memory of process {offer.process}"):
            found = int(import_cupy().cuda.runtime.ipcOpenMemHandle(offer.handle))  # also enables peer access, by default flags
        self.opened.append(found)
        return found

    def close(self) -> None:
        """Unmap the memory of other processes."""
        with self.unit:
            while self.opened:
                with suppress(import_cupy().cuda.runtime.CUDARuntimeError):  # its process may be gone
                    import_cupy().cuda.runtime.ipcCloseMemHandle(self.opened.pop())


@contextmanager
def between_processes(doing: str) -> Iterator[None]:
    """Convert CUDA's errors to DeviceUnavailable."""
    try:
        yield
    except import_cupy().cuda.runtime.CUDARuntimeError as problem:
        raise DeviceUnavailable(
            f"{doing} failed: {problem}",
            hint="processes of one container share GPUs' memory; --transport mpi goes through the host's",
        ) from problem


def bus_of(index: int) -> str:
    """Return the bus ID of a GPU, ``0000:3b:00.0``: its name in every process."""
    api = import_driver()
    found = check_result(
        api.cuDeviceGetPCIBusId(32, check_result(api.cuDeviceGet(index), "finding a GPU")), "querying a GPU's bus address"
    )
    return str(found.split(b"\0")[0].decode().lower())


def allow_access(index: int, bus: str) -> None:
    """Let GPU ``index`` read and write the memory of the GPU at ``bus``."""
    api, runtime = import_driver(), import_cupy().cuda.runtime
    status, peer = api.cuDeviceGetByPCIBusId(bus.encode())
    if int(status) != 0:
        raise DeviceUnavailable(
            f"cuda:{index} cannot reach the GPU at {bus}: this process does not see it", hint="check CUDA_VISIBLE_DEVICES"
        )
    if int(peer) == index:
        return
    if not can_reach(index, int(peer)):
        raise DeviceUnavailable(f"cuda:{index} cannot reach the memory of cuda:{int(peer)}: the driver allows no peer access")
    with Unit(index):
        try:
            runtime.deviceEnablePeerAccess(int(peer))
        except runtime.CUDARuntimeError as problem:
            if problem.status != ALREADY:
                raise


#: cudaErrorPeerAccessAlreadyEnabled.
ALREADY = 704


def can_reach(index: int, peer: int) -> bool:
    """Return True if the driver lets GPU ``index`` access the memory of another GPU of this process."""
    api = import_driver()
    pair = [check_result(api.cuDeviceGet(i), "finding a GPU") for i in (index, peer)]
    return bool(check_result(api.cuDeviceCanAccessPeer(*pair), "querying peer access"))
