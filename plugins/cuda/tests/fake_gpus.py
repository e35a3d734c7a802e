"""GPUs emulated by the host. Arrays and streams have the parts that one device of a distributed model uses. Launch entries are
executed one by one, and a simulated chip computes the programs. A launch ends before it returns."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from rammer.device.arrays import HostRoom
from rammer.device.manifest import Array, Backend
from rammer.ir.program import RProgram

from rammer_cuda.bound import Places
from rammer_cuda.peer.entries import FAILURE, PeerEntry, PeerKind
from rammer_cuda.peer.exchange import End
from rammer_cuda.peer.layout import PeerLayout


class HostArray(np.ndarray[Any, Any]):
    """A NumPy array that exposes its address as CuPy arrays do."""

    @property
    def data(self) -> Any:  # type: ignore[override]
        return SimpleNamespace(ptr=self.ctypes.data)


class HostStream:
    """A stream whose queued work has always finished."""

    ptr = 0

    def __init__(self, non_blocking: bool = True) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        """Do nothing: the event is already complete."""

    def synchronize(self) -> None:
        """Do nothing: no work is pending."""

    def record(self, stream: Any = None) -> None:
        """Do nothing: recorded work is complete."""


class HostEvent(HostStream):
    """An event complete at the moment of its recording."""

    at = 0.0

    def __init__(self, disable_timing: bool = False) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        """Record the current time: earlier queued work is complete."""
        self.at = time.perf_counter()


def at_address(shape: tuple[int, ...], dtype: str, place: int) -> Array:
    """Return the array at an address."""
    size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    memory = (ctypes.c_uint8 * max(size, 1)).from_address(place)
    return np.frombuffer(memory, dtype, int(np.prod(shape, dtype=np.int64))).reshape(shape).view(HostArray)


def memcpy(to: int, source: int, nbytes: int, kind: int, stream: int) -> None:
    """Copy the bytes immediately."""
    ctypes.memmove(to, source, nbytes)


def host_cupy() -> Any:
    """Return the replacement of the module CuPy."""
    runtime = SimpleNamespace(
        memcpyAsync=memcpy,
        memcpy=lambda to, s, n, kind: memcpy(to, s, n, kind, 0),
        deviceSynchronize=lambda: None,
        CUDARuntimeError=OSError,
    )
    cuda = SimpleNamespace(
        Stream=HostStream,
        Event=HostEvent,
        get_elapsed_time=lambda a, b: (b.at - a.at) * 1e3,
        UnownedMemory=lambda place, size, owner: place,
        MemoryPointer=lambda memory, offset: memory + offset,
        alloc_pinned_memory=bytearray,
        runtime=runtime,
    )
    return SimpleNamespace(cuda=cuda, zeros=lambda s, d: np.zeros(s, d).view(HostArray), ndarray=at_address)


class HostMemory:
    """Bytes that begin at a multiple of 256."""

    def __init__(self, nbytes: int) -> None:
        self.whole = np.zeros(nbytes + 256, np.uint8)
        self.address = self.whole.ctypes.data + -self.whole.ctypes.data % 256


class HostUnit:
    """A device context for any index, without effect."""

    def __init__(self, index: int) -> None:
        self.id = index

    def __enter__(self) -> HostUnit:
        return self

    def __exit__(self, *problem: object) -> None:
        """Do nothing: the context stays active."""


class HostBlocks:
    """Allocations stored as files of a folder, which other processes map by a handle, as in CUDA's runtime. A handle has 64
    bytes. An unknown handle raises OSError."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.names, self.maps, self.made = folder, dict[int, str](), dict[int, mmap.mmap](), 0

    def malloc(self, nbytes: int, name: str = "") -> int:
        """Create a file and return the address of its bytes."""
        name, self.made = name or f"{os.getpid()}_{self.made}", self.made + 1
        (self.folder / name).write_bytes(bytes(nbytes))
        return self._mapped(name)

    def memset(self, place: int, value: int, nbytes: int) -> None:
        ctypes.memset(place, value, nbytes)

    def ipcGetMemHandle(self, place: int) -> bytes:
        """Return a handle for other processes."""
        return self.names[place].encode().ljust(64, b"\0")

    def ipcOpenMemHandle(self, handle: bytes) -> int:
        """Return the address here of another process's allocation."""
        return self._mapped(handle.rstrip(b"\0").decode())

    def ipcCloseMemHandle(self, place: int) -> None:
        """Unmap an allocation in this process."""
        self.maps.pop(place).close()
        del self.names[place]

    def free(self, place: int) -> None:
        """Unmap and delete the file."""
        name = self.names[place]
        self.ipcCloseMemHandle(place)
        (self.folder / name).unlink()

    def _mapped(self, name: str) -> int:
        with (self.folder / name).open("r+b") as file:
            found = mmap.mmap(file.fileno(), 0)
        place = ctypes.addressof(ctypes.c_uint8.from_buffer(found))
        self.names[place], self.maps[place] = name, found
        return place


class HostEnd(End):
    """The transfer end of a GPU whose launches the host executes."""

    def __init__(self, index: int, number: int, layout: PeerLayout, addresses: Sequence[int], limit: float) -> None:
        self.unit: Any = HostUnit(index)
        self.number, self.layout, self.addresses, self.limit = number, layout, addresses, limit
        self.names = {r.name: i for i, r in enumerate(layout.routes)}
        self.routes = {r.name: r for r in layout.routes}
        self.failure = np.zeros(len(FAILURE), np.uint32).view(HostArray)
        self.launches, self.module = 0, None

    def exchange(self, entries: Sequence[PeerEntry]) -> Any:
        """Return a launch of the entries."""
        return SimpleNamespace(launch=lambda stream: self.carry_out(entries))

    def check(self, words: Sequence[int] | None = None) -> None:
        """Raise the failure recorded in the host's words."""
        super().check(self.failure.tolist() if words is None else words)

    def carry_out(self, entries: Sequence[PeerEntry]) -> None:
        """Execute the entries as ``rm_exchange`` does: puts and credits first, since its blocks run concurrently."""
        self.launches += 1
        for e in sorted(entries, key=lambda e: e.kind in (PeerKind.WAIT, PeerKind.ROOM)):
            number = word(e.count) + 1
            wanted = number if e.kind == PeerKind.WAIT else number - e.depth
            asked = e.flag if e.kind == PeerKind.WAIT else e.credit
            if self.failure[0] or (asked and not self.reached(asked, wanted, e)):
                return
            if e.kind == PeerKind.PUT:
                ctypes.memmove(e.to, e.source, e.nbytes)
            if e.kind != PeerKind.ROOM:
                set_word(e.count, number)
            if e.kind in (PeerKind.PUT, PeerKind.CREDIT):
                set_word(e.flag, number)

    def reached(self, place: int, wanted: int, e: PeerEntry) -> bool:
        """Return True if a word reaches a number within the limit."""
        begin = time.monotonic()
        while word(place) < wanted:
            if time.monotonic() - begin > self.limit:
                self.failure[:] = 1, e.kind, e.name, wanted, word(place)
                return False
            time.sleep(1e-5)
        return True


def word(place: int) -> int:
    """Return the 32-bit word at an address."""
    return int(ctypes.c_uint32.from_address(place).value)


def set_word(place: int, value: int) -> None:
    ctypes.c_uint32.from_address(place).value = value


@dataclass
class HostResident:
    """Arrays by the names of ports."""

    arrays: dict[str, Array]

    def with_buffers(self, buffers: Mapping[str, Any]) -> HostResident:
        """Return the same with these buffers."""
        return HostResident(dict(buffers))


class HostProgram:
    """A program that another device computes in place of a GPU."""

    def __init__(self, program: RProgram, loaded: Any) -> None:
        self.program, self.loaded, self.resident = program, loaded, HostResident({})

    def launchable_on(self, there: HostResident) -> Any:
        """Return a launch that reads and writes the arrays."""

        def launch(stream: int) -> None:
            found = self.loaded.run({p.external: np.asarray(there.arrays[p.external]) for p in self.program.inputs}).outputs
            for name, values in found.items():
                np.copyto(there.arrays[name], values)

        return SimpleNamespace(launch=launch)

    def turning(self, inner: Any, there: HostResident) -> Any:
        """Return ``inner``: one iteration suffices."""
        return inner

    def check_finished(self) -> None:
        """Do nothing: the program has finished."""

    def close(self) -> None:
        self.loaded.close()


@dataclass(frozen=True)
class HostBackend:
    """A backend that loads programs on another device."""

    backend: Backend

    @property
    def host_room(self) -> HostRoom:
        return self.backend.host_room

    def load(self, program: RProgram, constants: Mapping[str, Array]) -> HostProgram:
        return HostProgram(program, self.backend.load(program, constants))


def host_place(resident: Any, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> Places:
    """Return the arrays as they are, without copies."""
    return Places(dict(inputs), dict(outputs), {**inputs, **outputs})
