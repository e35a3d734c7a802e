"""What a repeated program moves between its turns: one exchange, in which no task runs."""

from __future__ import annotations

import math
from typing import Final, TypeAlias

from rammer.ir.program import MoveTime, RProgram
from rammer.ir.types import itemsize

from rammer_ipu_sim.chip import Chip
from rammer_ipu_sim.chips import ChipMemories
from rammer_ipu_sim.cycles import StepCycles
from rammer_ipu_sim.memory import HomeMemory

#: Where buffers are.
Held: TypeAlias = HomeMemory | ChipMemories
#: What moves once, and what in every turn.
ONCE: Final[tuple[MoveTime, ...]] = ("once", "first", "last")
EACH: Final[tuple[MoveTime, ...]] = ("before", "after")


def exchanges(program: RProgram) -> int:
    """Supersteps that only move, in all turns."""
    once, each = (sum(bool(program.moves(when)) for when in times) for times in (ONCE, EACH))
    return once + each * program.turns


def moved(program: RProgram, chip: Chip, memory: Held, when: MoveTime, turn: int, skipped: int) -> list[StepCycles]:
    """Move what is to be moved then, ``skipped`` turns less than there may be; the cycles of the tile that receives most."""
    moves, received = program.moves(when), 0
    for move in moves:
        image, source = memory.read(move.target), memory.read(move.source)
        to, first, size = move.part(turn, skipped, len(image), len(source))
        image[to : to + size] = source[first : first + size]
        memory.write(move.target, image)
        received += min(memory.homes[move.target].block, size) * itemsize(program.buffer[move.target].dtype)
    exchange = math.ceil(received / chip.exchange_bytes)
    return [StepCycles((when,), 0, 1, 0, exchange, chip.sync_cycles, 0)] if moves else []
