"""Repeated programs: the turn again and again, and what is to be moved between two turns.

Where one launch runs all turns (``source._TURNS``), moves are data that the kernel reads; else the host copies, and queues turns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

import numpy as np

from rammer.device.manifest import Array
from rammer.ir.program import MoveTime, RProgram
from rammer.ir.types import itemsize

#: The times of moves in the order of their table, and 64-bit words of one: bytes from the program's memory to where it goes in
#: turn 0, and how much further on in every turn; the same of where it comes from; its bytes, and where both buffers end.
TIMES: Final[tuple[MoveTime, ...]] = ("once", "first", "before", "after", "last")
MOVE_WORDS: Final = 7

#: Byte addresses of target and source in turn 0, how much further on they are in every turn, and how many bytes.
Copy: TypeAlias = tuple[int, int, int, int, int]


def move_table(program: RProgram, places: Mapping[str, int]) -> Array:
    """The moves of ``program``, whose buffers begin at byte ``places``, as its kernel reads them: where those of each time
    begin, then all of them."""
    starts, rows = [0], list[int]()
    for when in TIMES:
        for m in program.moves(when):
            target, source = program.buffer[m.target], program.buffer[m.source]
            width, ends = itemsize(target.dtype), (places[m.target] + target.nbytes, places[m.source] + source.nbytes)
            rows += [places[m.target] + m.target_first * width, m.target_by * width]
            rows += [places[m.source] + m.source_first * width, m.source_by * width, m.size * width, *ends]
        starts.append(len(rows) // MOVE_WORDS)
    return np.array(starts + rows, np.int64)


class Seam:
    """The copies of ``program``, whose buffers begin at byte ``places``: worked out once for each number of turns."""

    def __init__(self, program: RProgram, places: Mapping[str, int]) -> None:
        self.program, self.places = program, places
        self._copies: dict[tuple[MoveTime, int, int], list[Copy]] = {}

    def copies(self, when: MoveTime, turn: int, count: int) -> list[Copy]:
        """Those of one turn of ``count``. Only the first turn and the last of all may have a slice that ends with its buffer."""
        edge = turn if turn in (0, count - 1) else -1
        key = when, edge, count
        if key not in self._copies:
            if len(self._copies) > 1024:
                self._copies.clear()
            self._copies[key] = self._plan_copies(when, max(edge, 0), count, edge < 0)
        return self._copies[key]

    def _plan_copies(self, when: MoveTime, turn: int, count: int, whole: bool) -> list[Copy]:
        program, found = self.program, list[Copy]()
        skipped = program.turns - count
        for m in program.moves(when):
            target, source = program.buffer[m.target], program.buffer[m.source]
            width, (to, first) = itemsize(target.dtype), m.places(0, skipped)
            size = m.size if whole else m.part(turn, skipped, target.size, source.size)[2]
            if size:
                begin = self.places[m.target] + to * width, self.places[m.source] + first * width
                found.append((*begin, m.target_by * width, m.source_by * width, size * width))
        return found

    def run(self, one: Callable[[], None], copy: Callable[[int, int, int], None], length: Callable[[str], int]) -> None:
        """All turns: ``one`` runs a turn, ``copy`` moves bytes (target, source, number), ``length`` reads an input of one
        element."""
        count = self.program.turns_at(length)

        def move(when: MoveTime, turn: int = 0) -> None:
            for target, source, on, by, nbytes in self.copies(when, turn, count):
                copy(target + turn * on, source + turn * by, nbytes)

        move("once")
        move("first")
        for turn in range(count):
            move("before", turn)
            one()
            move("after", turn)
        move("last")
