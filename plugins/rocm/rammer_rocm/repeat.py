"""Loop programs: repeated iterations, and the moves between two iterations. If one launch runs all iterations
(``source._TURNS``), the kernel reads the moves as data. Otherwise the host queues copies and iterations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

import numpy as np

from rammer.device.manifest import Array
from rammer.ir.program import MoveTime, Repeat, RProgram
from rammer.ir.types import itemsize

#: Move times in table order, and the 64-bit words of a move. Target: byte offset in iteration 0, and increment per iteration.
#: Source: the same. Then the size in bytes, and the ends of both buffers.
TIMES: Final[tuple[MoveTime, ...]] = ("once", "first", "before", "after", "last")
MOVE_WORDS: Final = 7

#: Byte addresses of target and source in iteration 0, their increments per iteration, and the size in bytes.
Copy: TypeAlias = tuple[int, int, int, int, int]


def move_rows(program: RProgram, places: Mapping[str, int]) -> list[list[list[int]]]:
    """Return the moves of each time as numbers; ``places`` maps buffers to their start bytes."""
    found = list[list[list[int]]]()
    for when in TIMES:
        found.append([])
        for m in program.moves(when):
            target, source = program.buffer[m.target], program.buffer[m.source]
            width, ends = itemsize(target.dtype), (places[m.target] + target.nbytes, places[m.source] + source.nbytes)
            row = [places[m.target] + m.target_first * width, m.target_by * width]
            found[-1].append([*row, places[m.source] + m.source_first * width, m.source_by * width, m.size * width, *ends])
    return found


def move_table(program: RProgram, places: Mapping[str, int]) -> Array:
    """Return the move table of ``program`` for its kernel. It holds the start index of each move time, then all moves."""
    starts, rows = [0], list[int]()
    for moves in move_rows(program, places):
        rows += [number for row in moves for number in row]
        starts.append(len(rows) // MOVE_WORDS)
    return np.array(starts + rows, np.int64)


def loop_record(program: RProgram, repeat: Repeat, memory: int, places: Mapping[str, int], in_kernel: bool) -> dict[str, Any]:
    """Return the record of a loop in a program's calls. ``memory`` is the number of its allocation. Without ``in_kernel``, the
    caller makes the moves."""
    record: dict[str, Any] = {"turns": repeat.count, "step": repeat.step, "memory": memory}
    if repeat.until is not None:
        stored = ((factor, program.storage[name]) for name, factor in repeat.until.terms)
        terms = [[factor, memory, places[s.buffer] + s.offset * itemsize("int64")] for factor, s in stored]
        record["until"] = [repeat.until.offset, terms]
    return record if in_kernel else {**record, "moves": move_rows(program, places)}


class Seam:
    """The copies between iterations of ``program``, cached per trip count; ``places`` maps buffers to their start bytes."""

    def __init__(self, program: RProgram, places: Mapping[str, int]) -> None:
        self.program, self.places = program, places
        self._copies: dict[tuple[MoveTime, int, int], list[Copy]] = {}

    def copies(self, when: MoveTime, turn: int, count: int) -> list[Copy]:
        """Return the copies of iteration ``turn`` of ``count``. Only the first and the last iteration may clip a slice at its
        buffer's end."""
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
        """Run all iterations. ``one`` runs an iteration, ``copy`` moves bytes (target, source, number), and ``length`` reads a
        one-element input."""
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
