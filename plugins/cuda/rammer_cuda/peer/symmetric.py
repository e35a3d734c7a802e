"""The transport ``nvshmem``: GPUs of one host or several, one process each, which write to each other's symmetric memory.

NVSHMEM's puts are queued on a stream with values that the host passes. They would also be sent after a wait that has failed, so
copies are sent. ``rm_exchange`` writes tensors, flags and credits to this GPU's memory as if to another's, and waits with a
limit. NVSHMEM then *mirrors* that memory to the other side, words after all tensors have arrived (``quiet``). After a failed wait
the copy is unchanged, and mirroring it again has no effect.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Final

from rammer.distributed.transport import MPI, Endpoint, Exposed, Fabric, Party, Site, start_timeout, watch_collective
from rammer.errors import DeviceFailure, MissingDependency

from rammer_cuda.hardware import Unit, import_cupy
from rammer_cuda.peer.entries import PeerEntry, PeerKind
from rammer_cuda.peer.exchange import End
from rammer_cuda.peer.fabric import PeerEndpoint, index_of
from rammer_cuda.peer.layout import LINE, SLOT, PeerLayout, Route

#: Bytes of a flag or a credit.
WORD: Final = 4
#: Bytes of the identity by which processes connect (``nvshmemx_uniqueid_v1``: a version, and 124).
IDENTITY: Final = 128
HINT: Final = "pip install -e 'plugins/cuda[nvshmem]' (nvshmem4py for CUDA 13; for CUDA 12 nvshmem4py-cu12)"


def import_nvshmem() -> Any:
    """Import the module ``nvshmem.core``. Raises MissingDependency without it or NVSHMEM's library."""
    try:
        import nvshmem.core as module
    except ImportError as problem:
        raise MissingDependency(f"nvshmem4py ({problem})", HINT) from problem
    return module


def probe() -> None:
    """Check the requirements, without initialising NVSHMEM."""
    if find_spec("nvshmem") is None:
        raise MissingDependency("nvshmem4py, which was not found", HINT)
    import_cupy()
    MPI.probe()


def connects(a: Site, b: Site) -> str | None:
    """Return the reason why two sites cannot join by NVSHMEM, or None."""
    for site in (a, b):
        if site.device.partition(":")[0] != "cuda" or site.kind != "gpu":
            return f"{site.device} is not a GPU of cuda"
    return f"{a.device} and {b.device} are in one process" if a.process == b.process else None


@dataclass(frozen=True)
class StagedLayout:
    """The layout of copies that GPU ``number`` sends. Offsets are bytes. It has ``depth`` slots and a word of each route that
    starts there, and a word of each route that ends there."""

    layout: PeerLayout
    number: int

    @property
    def words(self) -> Mapping[str, int]:
        """Offset of each route's word: the flag if it starts here, the credit if it ends here."""
        own = [r for r in self.layout.routes if self.number in (r.source, r.target)]
        return {r.name: k * LINE for k, r in enumerate(own)}

    @property
    def slots(self) -> Mapping[str, int]:
        """Offset of each route's first slot."""
        found, top = dict[str, int](), -(-len(self.words) * LINE // SLOT) * SLOT
        for route in self.layout.routes:
            if route.source == self.number:
                found[route.name] = top
                top += self.layout.depth * self.layout.stride(route)
        return found

    @property
    def nbytes(self) -> int:
        """Total bytes, at least one slot."""
        ends = (
            self.slots[r.name] + self.layout.depth * self.layout.stride(r) for r in self.layout.routes if r.name in self.slots
        )
        return max(SLOT, len(self.words) * LINE, *ends)


class Heap:
    """``nbytes`` of symmetric memory of this process's GPU ``unit``, initially zero. All processes create it together, with the
    same size and offset in the heap."""

    def __init__(self, unit: Any, nbytes: int) -> None:
        self.unit, self.nbytes = unit, nbytes
        with unit:
            self.buffer = import_nvshmem().buffer(nbytes)
            self.address = int(self.buffer.handle)
            import_cupy().cuda.runtime.memset(self.address, 0, nbytes)
            import_cupy().cuda.runtime.deviceSynchronize()

    def part(self, address: int, nbytes: int) -> Any:
        """Return bytes of the heap as an NVSHMEM buffer."""
        return type(self.buffer).from_handle(address, nbytes)

    def close(self) -> None:
        """Free the memory, together in all processes; closing again does nothing."""
        if self.buffer is not None:
            with self.unit:
                import_nvshmem().free(self.buffer)
            self.buffer = None


@dataclass(frozen=True)
class StreamHandle:
    """A stream as NVSHMEM accepts it (the protocol of cuda.core)."""

    handle: int

    def __cuda_stream__(self) -> tuple[int, int]:
        """Return the protocol's version and the stream."""
        return 0, self.handle


@dataclass(frozen=True)
class Mirror:
    """A range of this GPU's bytes that is copied to an address of GPU ``target``."""

    source: Any
    to: Any
    target: int


class SymmetricEnd(End):
    """The ends of all transfers of a GPU whose peers are reached by NVSHMEM. Tensors arrive in ``heap``. ``staged`` has copies of
    those sent, in the layout ``StagedLayout``."""

    how, copies = "transfers by NVSHMEM (puts on a stream)", 1
    #: A launch's writes are sent after it ends.
    meets = False

    def __init__(self, index: int, number: int, layout: PeerLayout, heaps: tuple[Heap, Heap], limit: float) -> None:
        self.heap, self.staged = heaps
        self.places = StagedLayout(layout, number)
        # In a put, a symmetric address means that offset in the other GPU's memory.
        super().__init__(index, number, layout, [self.heap.address] * layout.devices, limit)

    def landing(self, name: str, slot: int) -> int:
        """Return the address of the staged slot."""
        route, layout = self.routes[name], self.layout
        return self.staged.address + self.places.slots[name] + slot % layout.depth * layout.stride(route)

    def flagged(self, name: str) -> int:
        """Return the address of the staged word."""
        return self.staged.address + self.places.words[name]

    credited = flagged

    def exchange(self, entries: Sequence[PeerEntry]) -> MirroredExchange:
        """Return a launch of these entries, in any order, followed by puts."""
        first, last = list[Mirror](), list[Mirror]()
        for e in entries:
            route = self.layout.routes[e.name]
            if e.kind == PeerKind.PUT:
                first += self._payload_mirrors(route, e) if route.nbytes else []
                last.append(self._make_mirror(e.flag, self.word(route.target, route.name, "flag"), WORD, route.target))
            elif e.kind == PeerKind.CREDIT:
                last.append(self._make_mirror(e.flag, self.word(route.source, route.name, "credit"), WORD, route.source))
        return MirroredExchange(super().exchange(entries), first, last)

    def _payload_mirrors(self, route: Route, e: PeerEntry) -> list[Mirror]:
        """Return the mirrors of a slot's tensor."""
        slot = (e.to - self.staged.address - self.places.slots[route.name]) // self.layout.stride(route)
        return [self._make_mirror(e.to, self.slot(route.name, slot), route.nbytes, route.target)]

    def _make_mirror(self, source: int, to: int, nbytes: int, target: int) -> Mirror:
        return Mirror(self.staged.part(source, nbytes), self.heap.part(to, nbytes), target)


class MirroredExchange:
    """A launch whose writes are mirrored to other GPUs: ``first``, and after their arrival ``last``."""

    def __init__(self, launch: Any, first: Sequence[Mirror], last: Sequence[Mirror]) -> None:
        self.kernel, self.first, self.last = launch, first, last

    def launch(self, stream: int) -> None:
        """Queue the launch and the puts on the stream with this handle."""
        self.kernel.launch(stream)
        handle = StreamHandle(stream)
        for m in self.first:
            import_nvshmem().put(m.to, m.source, remote_pe=m.target, stream=handle)
        if self.last:
            import_nvshmem().quiet(stream=handle)  # puts are unordered: earlier words must have arrived, too
        for m in self.last:
            import_nvshmem().put(m.to, m.source, remote_pe=m.target, stream=handle)


class SymmetricFabric:
    """A fabric of this process's GPU and those of other processes, joined by NVSHMEM. Control messages use ``words``: MPI."""

    def __init__(self, party: Party, words: Fabric | None = None) -> None:
        self.party, self.words = party, words or MPI.open(party)
        self.mine, self.opened = self.words.mine, list[Any]()
        (self.number,) = self.mine
        self.index = index_of(party.sites[self.number].device)
        self._join_processes()

    def _join_processes(self) -> None:
        """Initialise NVSHMEM in all processes, with an identity from the first one."""
        api, rank = import_nvshmem(), self.number
        with Unit(self.index):
            made = api.get_unique_id(empty=rank != 0)
            said = ctypes.string_at(made.ptr, IDENTITY).hex() if rank == 0 else ""
            said = self.meet({rank: said}, start_timeout(self.party.timeout))[0]
            ctypes.memmove(made.ptr, bytes.fromhex(said), IDENTITY)
            with watch_collective("beginning NVSHMEM", start_timeout(self.party.timeout)):
                api.init(
                    device=nvshmem_device(self.index), uid=made, rank=rank, nranks=len(self.party.sites), initializer_method="uid"
                )
        self.begun = True

    def meet(self, words: Mapping[int, str], seconds: float) -> list[str]:
        """Exchange messages by the other transport."""
        return self.words.meet(words, seconds)

    def expose(self, exposed: Exposed) -> Mapping[int, Endpoint]:
        """Allocate equal memory in all processes. It is zero before the first write."""
        routes, timeout = tuple(Route(t.name, t.nbytes, t.source, t.target) for t in exposed.transfers), self.party.timeout
        layout, devices = PeerLayout(routes, len(exposed.devices), exposed.depth), range(len(exposed.devices))
        sizes = max(map(layout.nbytes, devices)), max(StagedLayout(layout, d).nbytes for d in devices)
        unit = Unit(self.index)
        with watch_collective("allocating symmetric memory", timeout):
            heap, staged = (Heap(unit, nbytes) for nbytes in sizes)
        self.opened += [heap, staged]
        flags = self.words.expose(Exposed(exposed.devices, (), exposed.depth))[self.number]
        end = SymmetricEnd(self.index, self.number, layout, (heap, staged), timeout)
        self.opened.append(end)
        self.meet({self.number: "zeros"}, timeout)
        return {self.number: PeerEndpoint(end, flags, timeout)}

    def close(self, failed: bool = False) -> None:
        """Free symmetric memory together in all processes; after a failure it is freed at the process's end."""
        if not failed and self.begun:
            self.meet({self.number: "over"}, self.party.timeout)
            with watch_collective("leaving NVSHMEM", self.party.timeout):
                for thing in self.opened:
                    thing.close()
                import_nvshmem().finalize()
        self.opened, self.begun = [], False
        self.words.close(failed)


def nvshmem_device(index: int) -> Any:
    """Return GPU ``index`` as an NVSHMEM device. Raises MissingDependency without cuda.core, and DeviceFailure if the GPU does
    not exist."""
    try:
        from cuda.core import Device
    except ImportError as problem:
        raise MissingDependency("cuda-core", HINT) from problem
    try:
        found = Device(index)
        found.set_current()
    except Exception as problem:
        raise DeviceFailure(f"cuda:{index} is not available: {problem}") from problem
    return found
