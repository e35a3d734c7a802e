"""Repeated programs: the turn again and again, and what is to be moved between two turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rammer.ir.program import MoveTime, RProgram
from rammer.ir.types import itemsize


def turns(
    program: RProgram,
    places: Mapping[str, int],
    one: Callable[[], None],
    copy: Callable[[int, int, int], None],
    length: Callable[[str], int],
) -> None:
    """All turns of ``program``, whose buffers begin at byte ``places``: ``one`` runs a turn, ``copy`` moves bytes (target,
    source, number), ``length`` reads an input of one element."""
    count = program.turns_at(length)
    skipped = program.turns - count

    def move(when: MoveTime, turn: int = 0) -> None:
        for m in program.moves(when):
            target, source = program.buffer[m.target], program.buffer[m.source]
            width, (to, first, size) = itemsize(target.dtype), m.part(turn, skipped, target.size, source.size)
            if size:
                copy(places[m.target] + to * width, places[m.source] + first * width, size * width)

    move("once")
    move("first")
    for turn in range(count):
        move("before", turn)
        one()
        move("after", turn)
    move("last")
