"""Launches of entries, on a stream or as nodes of a CUDA graph, on the GPU that owns the transfers' ends."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from rammer.errors import DeviceFailure

from rammer_cuda.compile import compile_cubin
from rammer_cuda.driver import check_result, import_driver
from rammer_cuda.hardware import Unit, device_architecture, import_cupy
from rammer_cuda.peer.entries import (
    ENTRIES,
    ENTRY,
    FAILURE,
    THREADS,
    PeerEntry,
    PeerKind,
    blocks_of,
    encode_entries,
    exchange_text,
    spread_over,
)
from rammer_cuda.peer.layout import PeerLayout, Route

#: Minimum bytes that a block writes, and the maximum blocks of one payload. Below 64 MiB the copy engine is not faster (measured
#: between two H200s: 58 us, and 51 by blocks, at 16 MiB; 184 and 188 at 64). It also copies after a wait that timed out.
EACH: Final = 16 << 10
MOST: Final = 132
#: cudaMemcpyDeviceToHost, cudaMemcpyHostToDevice, and cudaMemcpyDefault: the driver derives the kind from the addresses.
TO_HOST: Final = 2
TO_DEVICE: Final = 1
ANYWHERE: Final = 4


class End:
    """The ends of all transfers of GPU ``index``, device ``number`` of ``layout``, whose memories start at ``addresses``.
    ``limit`` is the timeout of a wait, in seconds."""

    #: A description of the transfers for users, and the intermediate copies of a tensor.
    how, copies = "transfers by NVLink or PCIe into the other GPU's memory", 0
    #: True if one launch may write and wait for another GPU: its writes arrive before it ends.
    meets = True

    def __init__(self, index: int, number: int, layout: PeerLayout, addresses: Sequence[int], limit: float) -> None:
        self.unit, self.number, self.layout, self.addresses = Unit(index), number, layout, addresses
        self.limit, self.names = limit, {r.name: i for i, r in enumerate(layout.routes)}
        self.routes: Mapping[str, Route] = {r.name: r for r in layout.routes}
        with self.unit:
            self.failure = import_cupy().zeros(len(FAILURE), np.uint32)
            code = compile_cubin(exchange_text(), device_architecture(index)).code
            self.module = check_result(import_driver().cuModuleLoadData(code), "loading a module")
            self.function = check_result(import_driver().cuModuleGetFunction(self.module, b"rm_exchange"), "finding rm_exchange")
            import_cupy().cuda.get_current_stream().synchronize()

    def word(self, device: int, name: str, kind: str) -> int:
        """Return the address of a route's word in a GPU's memory."""
        return self.addresses[device] + self.layout.words[device][name, kind]

    def slot(self, name: str, slot: int) -> int:
        """Return the address at which a route's tensor arrives, as this GPU reaches it."""
        route = self.routes[name]
        return self.addresses[route.target] + self.layout.slots[name] + slot % self.layout.depth * self.layout.stride(route)

    def landing(self, name: str, slot: int) -> int:
        """Return the address to which this GPU writes a route's tensor."""
        return self.slot(name, slot)

    def flagged(self, name: str) -> int:
        """Return the address to which this GPU writes the route's flag."""
        return self.word(self.routes[name].target, name, "flag")

    def credited(self, name: str) -> int:
        """Return the address to which this GPU writes the credit of a route that ends here."""
        return self.word(self.routes[name].source, name, "credit")

    def put(self, name: str, slot: int, source: int, nbytes: int | None = None) -> PeerEntry:
        """Return an entry that writes the tensor at address ``source`` into a free slot, then its flag. With 0 bytes it writes
        the flag alone."""
        route = self.routes[name]
        size = route.nbytes if nbytes is None else nbytes
        flag, count = self.flagged(name), self.word(self.number, name, "sent")
        credit = self.word(self.number, name, "credit")
        entry = PeerEntry(
            PeerKind.PUT,
            self.names[name],
            flag,
            count,
            credit,
            self.layout.depth,
            self.landing(name, slot),
            source if size else 0,
            size,
        )
        return spread_over(entry, MOST, EACH)

    def room(self, name: str) -> PeerEntry:
        """Return an entry that waits until the slot of the next put is free."""
        credit, count = self.word(self.number, name, "credit"), self.word(self.number, name, "sent")
        return PeerEntry(PeerKind.ROOM, self.names[name], 0, count, credit, self.layout.depth)

    def wait(self, name: str) -> PeerEntry:
        """Return an entry that waits for the tensor of the next run."""
        return PeerEntry(
            PeerKind.WAIT, self.names[name], self.word(self.number, name, "flag"), self.word(self.number, name, "got")
        )

    def credit(self, name: str) -> PeerEntry:
        """Return an entry that releases the oldest unreleased tensor."""
        return PeerEntry(PeerKind.CREDIT, self.names[name], self.credited(name), self.word(self.number, name, "given"))

    def exchange(self, entries: Sequence[PeerEntry]) -> Any:
        """Return a launch of these entries, in any order."""
        return Exchange(self, entries)

    def waited(self) -> float:
        """Return the seconds that all waits of this GPU took, for flags and slots, after all launches have finished."""
        ends = [(r.name, "sent" if r.source == self.number else "got") for r in self.layout.routes]
        with self.unit:
            words = np.zeros(2, np.uint64)
            total = 0
            for name, kind in ends:
                if self.number in (self.routes[name].source, self.routes[name].target):
                    import_cupy().cuda.runtime.memcpy(
                        words.ctypes.data, self.word(self.number, name, kind), words.nbytes, TO_HOST
                    )
                    total += int(words[1])
        return total * 1e-9

    def check(self, words: Sequence[int] | None = None) -> None:
        """Raise DeviceFailure with the transfer's name if an earlier wait timed out. ``words`` are those of ``failure``, if
        already read."""
        if words is None:
            with self.unit:
                words = import_cupy().asnumpy(self.failure).tolist()
        failed, kind, name, wanted, seen = words
        if failed:
            raise self.reported(PeerKind(kind), self.layout.routes[name], wanted, seen)

    def reported(self, kind: PeerKind, route: Route, wanted: int, seen: int) -> DeviceFailure:
        """Return the error that reports a wait that timed out."""
        if kind == PeerKind.WAIT:
            what = f"device {route.target} waited {self.limit:.3g} s for device {route.source} to send {route.name}"
            have = f"run {wanted} of it; {seen} arrived"
        else:
            what = f"device {route.source} waited {self.limit:.3g} s for device {route.target} to give back {route.name}"
            have = f"after run {wanted}; {seen} were given back"
        return DeviceFailure(what, have, "a device of this run has ended, hangs, or is slower than the limit")

    def close(self) -> None:
        """Unload the module; closing again does nothing."""
        with self.unit:
            if self.module is not None:
                check_result(import_driver().cuModuleUnload(self.module), "unloading a module")
            self.module = None


class Exchange:
    """A launch of ``rm_exchange``."""

    def __init__(self, end: End, entries: Sequence[PeerEntry]) -> None:
        self.end, self.blocks = end, blocks_of(entries)
        self.values: list[Any] = [
            (ctypes.c_uint64 * (ENTRY * ENTRIES // 8)).from_buffer_copy(encode_entries(entries).tobytes()),
            ctypes.c_void_p(end.failure.data.ptr),
            ctypes.c_uint64(int(end.limit * 1e9)),
        ]
        self.parameters = (ctypes.c_void_p * len(self.values))(*[ctypes.addressof(v) for v in self.values])

    def launch(self, stream: int) -> None:
        """Queue the launch on the stream with this handle, of its GPU."""
        pointer = ctypes.addressof(self.parameters)
        check_result(
            import_driver().cuLaunchKernel(self.end.function, self.blocks, 1, 1, THREADS, 1, 1, 0, stream, pointer, 0),
            "launching an exchange",
        )

    def node(self, graph: Any, after: Sequence[Any]) -> Any:
        """Return a node of ``graph`` after the nodes ``after``."""
        node = import_driver().CUDA_KERNEL_NODE_PARAMS()
        node.func = self.end.function
        node.gridDimX, node.gridDimY, node.gridDimZ = self.blocks, 1, 1
        node.blockDimX, node.blockDimY, node.blockDimZ = THREADS, 1, 1
        node.kernelParams = ctypes.addressof(self.parameters)
        made = import_driver().cuGraphAddKernelNode(graph, list(after), len(after), node)
        return check_result(made, "adding an exchange to a graph")


class Copy:
    """A copy by the copy engine, within this GPU's memory."""

    def __init__(self, unit: Unit, to: int, source: int, nbytes: int) -> None:
        self.unit, self.to, self.source, self.nbytes = unit, to, source, nbytes

    def launch(self, stream: int) -> None:
        import_cupy().cuda.runtime.memcpyAsync(self.to, self.source, self.nbytes, ANYWHERE, stream)

    def node(self, graph: Any, after: Sequence[Any]) -> Any:
        """Return a node of ``graph`` after the nodes ``after``."""
        api = import_driver()
        what = api.CUDA_MEMCPY3D()
        what.srcMemoryType = what.dstMemoryType = api.CUmemorytype.CU_MEMORYTYPE_DEVICE
        what.srcDevice, what.dstDevice, what.WidthInBytes, what.Height, what.Depth = self.source, self.to, self.nbytes, 1, 1
        context = check_result(api.cuCtxGetCurrent(), "querying the context")
        made = api.cuGraphAddMemcpyNode(graph, list(after), len(after), what, context)
        return check_result(made, "adding a copy to a graph")
