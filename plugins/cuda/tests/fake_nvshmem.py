"""NVSHMEM emulated by the host: the parts of ``nvshmem.core`` of nvshmem4py 0.4 (names, parameters and guarantees).

Memory consists of files that processes map. Ordering is as weak as in NVSHMEM: puts arrive late and in any order unless ``quiet``
separates them."""

from __future__ import annotations

import ctypes
import os
import random
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from .fake_gpus import HostBlocks

#: Maximal delay of a put in seconds.
LATE = 0.002


class FakeBuffer:
    """A replacement of ``cuda.core.Buffer``."""

    def __init__(self, handle: int, size: int) -> None:
        self.handle, self.size = handle, size

    @staticmethod
    def from_handle(ptr: int, size: int) -> FakeBuffer:
        """Return a buffer that does not own its memory."""
        return FakeBuffer(ptr, size)


@dataclass
class FakeNvshmem:
    """The module in one process. ``folder`` has all processes' memory."""

    folder: Path
    rank: int = -1
    job: str = ""
    count: int = 0
    heaps: dict[int, FakeBuffer] = field(default_factory=dict)
    pending: list[tuple[int, bytes]] = field(default_factory=list)
    busy: threading.RLock = field(default_factory=threading.RLock)

    def __post_init__(self) -> None:
        self.blocks, self.others, self.chance = HostBlocks(self.folder), dict[str, int](), random.Random(self.rank)

    def get_unique_id(self, empty: bool = False) -> Any:
        """Return 128 bytes that identify a job of processes."""
        words = np.frombuffer(bytes(128) if empty else os.urandom(128), np.uint8).copy()
        return SimpleNamespace(words=words, ptr=words.ctypes.data)

    def init(
        self,
        device: Any = None,
        uid: Any = None,
        rank: int = -1,
        nranks: int = 0,
        mpi_comm: Any = None,
        initializer_method: str = "",
    ) -> None:
        """Start a process of the job that ``uid`` identifies."""
        if initializer_method != "uid" or not 0 <= rank < nranks or mpi_comm is not None:
            raise ValueError("what init was given")
        self.rank, self.job = rank, uid.words.tobytes().hex()[:16]
        threading.Thread(target=self._deliver, daemon=True).start()

    def buffer(self, size: int) -> FakeBuffer:
        """Return symmetric memory: the next allocation of every process."""
        place = self.blocks.malloc(size, self._name(self.count, self.rank))
        ctypes.memset(place, 0xEE, size)  # NVSHMEM does not promise zeros
        self.heaps[self.count] = FakeBuffer(place, size)
        self.count += 1
        return self.heaps[self.count - 1]

    def free(self, buffer: FakeBuffer) -> None:
        """Free a symmetric buffer and its file."""
        number = next(n for n, b in self.heaps.items() if b is buffer)
        self.blocks.free(self.heaps.pop(number).handle)

    def finalize(self) -> None:
        """Raise ValueError if buffers were not freed."""
        if self.heaps:
            raise ValueError(f"{len(self.heaps)} buffers were not freed")

    def put(self, dst: FakeBuffer, src: FakeBuffer, remote_pe: int = -1, stream: Any = None) -> None:
        """Queue a put on a stream between symmetric buffers."""
        stream.__cuda_stream__()
        number, offset = self._found(dst)
        self._found(src)
        to, size = self._there(number, remote_pe) + offset, min(dst.size, src.size)
        with self.busy:
            self.pending.append((to, ctypes.string_at(src.handle, size)))

    def quiet(self, stream: Any = None) -> None:
        """Deliver all pending puts before returning."""
        stream.__cuda_stream__()
        with self.busy:
            while self.pending:
                self._arrive()

    def _found(self, buffer: FakeBuffer) -> tuple[int, int]:
        for number, heap in self.heaps.items():
            if heap.handle <= buffer.handle and buffer.handle + buffer.size <= heap.handle + heap.size:
                return number, buffer.handle - heap.handle
        raise ValueError("no symmetric memory")

    def _there(self, number: int, rank: int) -> int:
        """Return the address here of another process's memory."""
        name = self._name(number, rank)
        while name not in self.others:
            self.others[name] = self.blocks.ipcOpenMemHandle(name.encode())
        return self.others[name]

    def _name(self, number: int, rank: int) -> str:
        return f"{self.job}_{number}_{rank}"

    def _deliver(self) -> None:
        while True:
            time.sleep(self.chance.random() * LATE)
            with self.busy:
                if self.pending:
                    self._arrive()

    def _arrive(self) -> None:
        """Deliver a random pending put."""
        to, values = self.pending.pop(self.chance.randrange(len(self.pending)))
        ctypes.memmove(to, values, len(values))
