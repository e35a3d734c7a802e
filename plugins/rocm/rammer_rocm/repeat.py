"""Repeated programs: the turn again and again, and what is to be moved between two turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rammer.ir.program import MoveTime, RProgram
from rammer.ir.types import itemsize


def turns(program: RProgram, places: Mapping[str, int], one: Callable[[], None], copy: Callable[[int, int, int], None]) -> None:
    """All turns of ``program``, whose buffers begin at byte ``places``: ``one`` runs a turn, ``copy`` moves bytes (target,
    source, number)."""

    def move(when: MoveTime, turn: int = 0) -> None:
        for m in program.moves(when):
            width, (to, first) = itemsize(program.buffer[m.target].dtype), m.places(turn)
            if m.size:
                copy(places[m.target] + to * width, places[m.source] + first * width, m.size * width)

    move("once")
    move("first")
    for turn in range(program.turns):
        move("before", turn)
        one()
        move("after", turn)
    move("last")
