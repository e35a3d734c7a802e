"""Repeated programs: the turn's launch again and again, and between two turns one kernel that moves all that is to be moved."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from rammer.ir.types import itemsize

from rammer_cuda.compile import compile_cubin
from rammer_cuda.device import source
from rammer_cuda.driver import check, driver
from rammer_cuda.resident import Resident

if TYPE_CHECKING:
    from rammer_cuda.bound import Launchable

#: The bits of moves in a launch (``device/moves.cuh``).
BITS: Final = {"once": 1, "first": 1, "before": 2, "after": 4, "last": 8}
THREADS: Final = 256
#: Bytes that a thread moves at once, and most blocks for one move.
WIDE, MOST_BLOCKS = 16, 64


class RepeatedLaunch:
    """All turns of a program whose turn is ``inner``, on the addresses of ``resident``.

    What one turn leaves and what the next one gets lie in different places, and so do what moves first and before a turn, or
    behind the last: one launch moves both.
    """

    def __init__(self, inner: Launchable, resident: Resident) -> None:
        self.inner, self.resident = inner, resident
        rows, longest = entries(resident)
        self.table = resident.cp.asarray(rows)
        self.blocks = min(max(-(-longest // (THREADS * WIDE)), 1), MOST_BLOCKS), len(rows)
        self.function = resident.function(compile_cubin(source("moves"), resident.gpu.architecture).code, "rm_moves", 0)

    def launch(self, stream: int) -> None:
        """Queue all turns on the stream with this handle. Where a length says how many there are, what is queued before is
        waited for: the length may be its result."""
        program = self.resident.program
        turns = program.turns_at(lambda name: self.length(name, stream))
        self.skipped = program.turns - turns
        for turn in range(turns):
            self.move(turn, BITS["before"] | (BITS["after"] if turn else BITS["first"]), stream)
            self.inner.launch(stream)
        self.move(turns, BITS["after"] | BITS["last"], stream)

    def length(self, tensor: str, stream: int) -> int:
        """An input of one element."""
        value, api, storage = np.zeros(1, np.int64), driver(), self.resident.program.storage[tensor]
        place = int(self.resident.buffers[storage.buffer].data.ptr) + storage.offset * value.itemsize
        check(api.cuMemcpyDtoHAsync(value.ctypes.data, place, value.nbytes, stream), "reading a length")
        check(api.cuStreamSynchronize(stream), "reading a length")
        return int(value[0])

    def move(self, turn: int, whens: int, stream: int) -> None:
        if not self.blocks[1]:
            return
        numbers = [ctypes.c_int(n) for n in (turn, whens, self.skipped)]
        values: list[Any] = [ctypes.c_void_p(self.table.data.ptr), *numbers]
        pointers = (ctypes.c_void_p * len(values))(*[ctypes.addressof(v) for v in values])
        grid = (*self.blocks, 1)
        launched = driver().cuLaunchKernel(self.function, *grid, THREADS, 1, 1, 0, stream, ctypes.addressof(pointers), 0)
        check(launched, "launching what moves between turns")

    def close(self) -> None:
        """Free the turn."""
        self.inner.close()


def entries(resident: Resident) -> tuple[Any, int]:
    """The table of moves, and the bytes of the longest."""
    program, rows, longest = resident.program, [], 0
    for move in program.repeat.moves if program.repeat is not None else ():
        width = itemsize(program.buffer[move.target].dtype)
        names, firsts = (move.target, move.source), move.places(0)
        begins = [int(resident.buffers[n].data.ptr) + first * width for n, first in zip(names, firsts, strict=True)]
        left = [(program.buffer[n].size - first) * width for n, first in zip(names, firsts, strict=True)]
        nbytes = move.size * width
        longest = max(longest, nbytes)
        rows.append((*begins, move.target_by * width, move.source_by * width, nbytes, *left, BITS[move.when]))
    return np.array(rows, np.int64).reshape(-1, 8), longest
