"""The transport ``import_nvshmem``: GPUs of several hosts, or of one, a process each, which write into each other's symmetric
memory.

NVSHMEM's puts are queued on a stream with values that the host gives. They would go out behind a wait that has failed, too, so
what goes out is a copy: ``rm_exchange`` writes tensors, flags and credits into memory of this GPU's own, as it would into
another's, and waits, with a limit, as ever; NVSHMEM then *mirrors* that memory to the other side, tensors first and words when
all tensors are there (``quiet``). Behind a wait that failed the copy is what it was, and mirroring it again changes nothing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Final

from rammer.distributed.transport.memory_layout import Exposed
from rammer.distributed.transport.mpi import MPI
from rammer.distributed.transport.mpi_launch import start_timeout, watch_collective
from rammer.distributed.transport.protocol import Endpoint, Fabric, Party, Site
from rammer.errors import DeviceFailure, MissingDependency

from rammer_cuda.hardware import Unit, import_cupy
from rammer_cuda.peer.entries import PeerEntry, PeerKind
from rammer_cuda.peer.exchange import End
from rammer_cuda.peer.fabric import PeerEndpoint, index_of
from rammer_cuda.peer.layout import LINE, SLOT, PeerLayout, Route

#: Bytes of a flag or a credit.
WORD: Final = 4
#: Bytes of the identity by which processes find each other (``nvshmemx_uniqueid_v1``: a version, and 124).
IDENTITY: Final = 128
HINT: Final = "pip install -e 'plugins/cuda[nvshmem]' (nvshmem4py for CUDA 13; for CUDA 12 nvshmem4py-cu12)"


def import_nvshmem() -> Any:
    """The module ``nvshmem.core``; MissingDependency without it or NVSHMEM's library."""
    try:
        import nvshmem.core as module
    except ImportError as problem:
        raise MissingDependency(f"nvshmem4py ({problem})", HINT) from problem
    return module


def probe() -> None:
    """Look for what is needed, without beginning NVSHMEM."""
    if find_spec("nvshmem") is None:
        raise MissingDependency("nvshmem4py, which was not found", HINT)
    import_cupy()
    MPI.probe()


def connects(a: Site, b: Site) -> str | None:
    """Why two sites are not joined by NVSHMEM, or None."""
    for site in (a, b):
        if site.device.partition(":")[0] != "cuda" or site.kind != "gpu":
            return f"{site.device} is no GPU of cuda"
    return f"{a.device} and {b.device} are in one process" if a.process == b.process else None


@dataclass(frozen=True)
class StagedLayout:
    """Where GPU ``number`` has copies of what it sends: ``depth`` slots and a word of each route that begins there, a word of
    each that ends there. Offsets are bytes."""

    layout: PeerLayout
    number: int

    @property
    def words(self) -> Mapping[str, int]:
        """By route: of its flag where it begins here, of its credit where it ends here."""
        own = [r for r in self.layout.routes if self.number in (r.source, r.target)]
        return {r.name: k * LINE for k, r in enumerate(own)}

    @property
    def slots(self) -> Mapping[str, int]:
        """By route, of the first."""
        found, top = dict[str, int](), -(-len(self.words) * LINE // SLOT) * SLOT
        for route in self.layout.routes:
            if route.source == self.number:
                found[route.name] = top
                top += self.layout.depth * self.layout.stride(route)
        return found

    @property
    def nbytes(self) -> int:
        """Of all; at least one slot."""
        ends = (
            self.slots[r.name] + self.layout.depth * self.layout.stride(r) for r in self.layout.routes if r.name in self.slots
        )
        return max(SLOT, len(self.words) * LINE, *ends)


class Heap:
    """``nbytes`` of symmetric memory of this process's GPU, zeros at first: as much, and at the same place of the heap, in all
    processes, which call this together. ``unit`` is the GPU."""

    def __init__(self, unit: Any, nbytes: int) -> None:
        self.unit, self.nbytes = unit, nbytes
        with unit:
            self.buffer = import_nvshmem().buffer(nbytes)
            self.address = int(self.buffer.handle)
            import_cupy().cuda.runtime.memset(self.address, 0, nbytes)
            import_cupy().cuda.runtime.deviceSynchronize()

    def part(self, address: int, nbytes: int) -> Any:
        """Bytes of it as NVSHMEM takes them."""
        return type(self.buffer).from_handle(address, nbytes)

    def close(self) -> None:
        """All free it together; closing again does nothing."""
        if self.buffer is not None:
            with self.unit:
                import_nvshmem().free(self.buffer)
            self.buffer = None


@dataclass(frozen=True)
class StreamHandle:
    """A stream as NVSHMEM takes it (the protocol of cuda.core)."""

    handle: int

    def __cuda_stream__(self) -> tuple[int, int]:
        """Version of the protocol, and the stream."""
        return 0, self.handle


@dataclass(frozen=True)
class Mirror:
    """Bytes of this GPU's that go to the same place, or another one, of GPU ``target``."""

    source: Any
    to: Any
    target: int


class SymmetricEnd(End):
    """The ends of all transfers of a GPU whose peers are reached by NVSHMEM. ``heap`` has what arrives, ``staged`` copies of what
    departs, at the places of ``StagedLayout``."""

    how, copies = "transfers by NVSHMEM (puts on a stream)", 1
    #: What a launch has written goes out behind it.
    meets = False

    def __init__(self, index: int, number: int, layout: PeerLayout, heaps: tuple[Heap, Heap], limit: float) -> None:
        self.heap, self.staged = heaps
        self.places = StagedLayout(layout, number)
        # A symmetric address means, in a put, that place of the other's memory.
        super().__init__(index, number, layout, [self.heap.address] * layout.devices, limit)

    def landing(self, name: str, slot: int) -> int:
        """The copy."""
        route, layout = self.routes[name], self.layout
        return self.staged.address + self.places.slots[name] + slot % layout.depth * layout.stride(route)

    def flagged(self, name: str) -> int:
        """The copy."""
        return self.staged.address + self.places.words[name]

    credited = flagged

    def exchange(self, entries: Sequence[PeerEntry]) -> MirroredExchange:
        """A launch of these entries, in no order, and then puts."""
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
        """A slot's tensor."""
        slot = (e.to - self.staged.address - self.places.slots[route.name]) // self.layout.stride(route)
        return [self._make_mirror(e.to, self.slot(route.name, slot), route.nbytes, route.target)]

    def _make_mirror(self, source: int, to: int, nbytes: int, target: int) -> Mirror:
        return Mirror(self.staged.part(source, nbytes), self.heap.part(to, nbytes), target)


class MirroredExchange:
    """A launch, and what it wrote goes to the others: what is ``first``, and when that is there, what is ``last``."""

    def __init__(self, launch: Any, first: Sequence[Mirror], last: Sequence[Mirror]) -> None:
        self.kernel, self.first, self.last = launch, first, last

    def launch(self, stream: int) -> None:
        """Queue it on the stream with this handle."""
        self.kernel.launch(stream)
        handle = StreamHandle(stream)
        for m in self.first:
            import_nvshmem().put(m.to, m.source, remote_pe=m.target, stream=handle)
        if self.last:
            import_nvshmem().quiet(stream=handle)  # also the words before these have got there: puts keep no order
        for m in self.last:
            import_nvshmem().put(m.to, m.source, remote_pe=m.target, stream=handle)


class SymmetricFabric:
    """This process's GPU and the others', joined by NVSHMEM; ``words`` say what processes tell each other: MPI."""

    def __init__(self, party: Party, words: Fabric | None = None) -> None:
        self.party, self.words = party, words or MPI.open(party)
        self.mine, self.opened = self.words.mine, list[Any]()
        (self.number,) = self.mine
        self.index = index_of(party.sites[self.number].device)
        self._join_processes()

    def _join_processes(self) -> None:
        """Begin NVSHMEM in all processes, by an identity that the first one makes."""
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
        """By the other transport."""
        return self.words.meet(words, seconds)

    def expose(self, exposed: Exposed) -> Mapping[int, Endpoint]:
        """All allocate as much; zeros are there before anybody writes."""
        routes, timeout = tuple(Route(t.name, t.nbytes, t.source, t.target) for t in exposed.transfers), self.party.timeout
        layout, devices = PeerLayout(routes, len(exposed.devices), exposed.depth), range(len(exposed.devices))
        sizes = max(map(layout.nbytes, devices)), max(StagedLayout(layout, d).nbytes for d in devices)
        unit = Unit(self.index)
        with watch_collective("allocating symmetric memory", timeout):
            heap, staged = (Heap(unit, nbytes) for nbytes in sizes)
        self.opened += [heap, staged]
        beside = self.words.expose(Exposed(exposed.devices, (), exposed.depth))[self.number]
        end = SymmetricEnd(self.index, self.number, layout, (heap, staged), timeout)
        self.opened.append(end)
        self.meet({self.number: "zeros"}, timeout)
        return {self.number: PeerEndpoint(end, beside, timeout)}

    def close(self, failed: bool = False) -> None:
        """All free what is symmetric together; who has failed leaves that to the end of the process."""
        if not failed and self.begun:
            self.meet({self.number: "over"}, self.party.timeout)
            with watch_collective("leaving NVSHMEM", self.party.timeout):
                for thing in self.opened:
                    thing.close()
                import_nvshmem().finalize()
        self.opened, self.begun = [], False
        self.words.close(failed)


def nvshmem_device(index: int) -> Any:
    """GPU ``index`` as NVSHMEM takes it. MissingDependency without cuda.core; DeviceFailure for one that is not there."""
    try:
        from cuda.core import Device
    except ImportError as problem:
        raise MissingDependency("cuda-core", HINT) from problem
    try:
        found = Device(index)
        found.set_current()
    except Exception as problem:
        raise DeviceFailure(f"cuda:{index} is not there: {problem}") from problem
    return found
