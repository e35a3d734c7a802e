"""What a repeated program moves between its turns: one exchange, in which no task runs."""

from __future__ import annotations

import math
from typing import Final

from rammer.ir.program import MoveTime, RProgram
from rammer.ir.types import itemsize

from rammer_ipu_sim.chip import Chip
from rammer_ipu_sim.cycles import StepCycles
from rammer_ipu_sim.memory import HomeMemory

#: What moves once, and what in every turn.
ONCE: Final[tuple[MoveTime, ...]] = ("once", "first", "last")
EACH: Final[tuple[MoveTime, ...]] = ("before", "after")


def exchanges(program: RProgram) -> int:
    """Supersteps that only move, in all turns."""
    once, each = (sum(bool(program.moves(when)) for when in times) for times in (ONCE, EACH))
    return once + each * program.turns


def moved(program: RProgram, chip: Chip, memory: HomeMemory, when: MoveTime, turn: int) -> list[StepCycles]:
    """Move what is to be moved then; the cycles of the tile that receives most."""
    moves, received = program.moves(when), 0
    for move in moves:
        to, first = move.places(turn)
        image = memory.read(move.target)
        image[to : to + move.size] = memory.read(move.source)[first : first + move.size]
        memory.write(move.target, image)
        received += min(memory.homes[move.target].block, move.size) * itemsize(program.buffer[move.target].dtype)
    exchange = math.ceil(received / chip.exchange_bytes)
    return [StepCycles((when,), 0, 1, 0, exchange, chip.sync_cycles, 0)] if moves else []
