"""Memory of a GPU that others write into, mapped where they are: peers of one process directly, those of other processes by
handles of CUDA's inter-process memory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final

from rammer.errors import DeviceUnavailable

from rammer_cuda.driver import check_result, import_driver
from rammer_cuda.hardware import Unit, import_cupy

#: Bytes of which memory that other processes map is a multiple: what CUDA puts into one block goes to them as a whole (CUDA
#: Programming Guide, Interprocess Communication).
BLOCK: Final = 2 << 20


@dataclass(frozen=True, slots=True)
class Offer:
    """What the others need to reach a GPU's memory: the process that has it, its address there, its handle for other
    processes, and the GPU by its place on the bus."""

    process: int
    address: int
    handle: bytes
    bus: str


class PeerMemory:
    """At least ``nbytes`` of GPU ``index``, zeros at first. An allocation of its own: a handle gives away all of one."""

    def __init__(self, index: int, nbytes: int) -> None:
        self.unit = Unit(index)
        runtime, nbytes = import_cupy().cuda.runtime, -(-nbytes // BLOCK) * BLOCK
        with self.unit:
            self.address = int(runtime.malloc(nbytes))
            runtime.memset(self.address, 0, nbytes)
            runtime.deviceSynchronize()

    def offer(self, abroad: bool) -> Offer:
        """For the others; with a handle where some of them are processes ``abroad``. DeviceUnavailable where there is none."""
        handle = b""
        if abroad:
            with self.unit, between_processes("asking for a handle of a GPU's memory"):
                handle = bytes(import_cupy().cuda.runtime.ipcGetMemHandle(self.address))
        return Offer(os.getpid(), self.address, handle, bus_of(self.unit.id))

    def close(self) -> None:
        """Free it; closing again does nothing."""
        if self.address:
            with self.unit, suppress(import_cupy().cuda.runtime.CUDARuntimeError):  # a GPU that failed frees all by itself
                import_cupy().cuda.runtime.free(self.address)
            self.address = 0


class ReachedMemory:
    """The memory of all GPUs of a run, as GPU ``index`` of this process reaches it. DeviceUnavailable where it cannot."""

    def __init__(self, index: int, offers: Sequence[Offer]) -> None:
        self.unit, self.opened = Unit(index), list[int]()
        self.addresses = [self._map_offer(o) for o in offers]

    def _map_offer(self, offer: Offer) -> int:
        allow_access(self.unit.id, offer.bus)
        if offer.process == os.getpid():
            return offer.address
        with self.unit, between_processes(f"mapping memory of process {offer.process}"):
            found = int(import_cupy().cuda.runtime.ipcOpenMemHandle(offer.handle))  # and peer access, by its default flags
        self.opened.append(found)
        return found

    def close(self) -> None:
        """Let go of other processes' memory."""
        with self.unit:
            while self.opened:
                with suppress(import_cupy().cuda.runtime.CUDARuntimeError):  # its process may be gone
                    import_cupy().cuda.runtime.ipcCloseMemHandle(self.opened.pop())


@contextmanager
def between_processes(doing: str) -> Iterator[None]:
    """What CUDA refuses, DeviceUnavailable tells."""
    try:
        yield
    except import_cupy().cuda.runtime.CUDARuntimeError as problem:
        raise DeviceUnavailable(
            f"{doing} failed: {problem}",
            hint="processes of one container share GPUs' memory; --transport mpi goes through the host's",
        ) from problem


def bus_of(index: int) -> str:
    """The place of a GPU on the bus, ``0000:3b:00.0``: its name in every process."""
    api = import_driver()
    found = check_result(
        api.cuDeviceGetPCIBusId(32, check_result(api.cuDeviceGet(index), "finding a GPU")), "asking for a GPU's place"
    )
    return str(found.split(b"\0")[0].decode().lower())


def allow_access(index: int, bus: str) -> None:
    """GPU ``index`` may read and write the memory of the one at ``bus``."""
    api, runtime = import_driver(), import_cupy().cuda.runtime
    status, peer = api.cuDeviceGetByPCIBusId(bus.encode())
    if int(status) != 0:
        raise DeviceUnavailable(
            f"cuda:{index} cannot reach the GPU at {bus}: this process does not see it", hint="look at CUDA_VISIBLE_DEVICES"
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
    """Whether the driver lets GPU ``index`` into the memory of another one of this process."""
    api = import_driver()
    pair = [check_result(api.cuDeviceGet(i), "finding a GPU") for i in (index, peer)]
    return bool(check_result(api.cuDeviceCanAccessPeer(*pair), "asking for peer access"))


def link_attributes(index: int, peer: int) -> Mapping[str, int]:
    """What the driver says of the way between two GPUs: ``rank`` (lower is faster), ``atomics``."""
    api = import_driver()
    pair = [check_result(api.cuDeviceGet(i), "finding a GPU") for i in (index, peer)]
    names = {"rank": "PERFORMANCE_RANK", "atomics": "NATIVE_ATOMIC_SUPPORTED"}
    keys = {n: getattr(api.CUdevice_P2PAttribute, f"CU_DEVICE_P2P_ATTRIBUTE_{a}") for n, a in names.items()}
    return {n: int(check_result(api.cuDeviceGetP2PAttribute(k, *pair), "asking for a link")) for n, k in keys.items()}
