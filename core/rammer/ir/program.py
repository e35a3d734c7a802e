"""RProgram: ``prog[vEU][order]``, the static table that every device runs, with what follows from it.

Its parts are in ``parts`` and importable from here; its text form is in ``text``.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from rammer.ir.operator import ROperator
from rammer.ir.parts import (
    ALIGNMENT,
    Buffer,
    BufferKind,
    Counter,
    HomeDevice,
    Move,
    MoveTime,
    Port,
    ProgramParts,
    Repeat,
    Storage,
    Task,
    Wait,
)
from rammer.ir.program_text import format_parts, parse_parts
from rammer.ir.types import TensorType, row_major

__all__ = [
    "ALIGNMENT",
    "Buffer",
    "BufferKind",
    "Counter",
    "HomeDevice",
    "Move",
    "MoveTime",
    "Port",
    "RProgram",
    "Repeat",
    "Storage",
    "Task",
    "Wait",
    "WaveTask",
    "dense",
    "elements",
    "tasks_of",
    "waves",
]


@dataclass(frozen=True)
class RProgram(ProgramParts):
    """The table with everything a device needs to run it, except the values of the constants.

    ``veus`` is the length of ``rows``.
    """

    @property
    def veus(self) -> int:
        """Number of rows."""
        return len(self.rows)

    @cached_property
    def operator(self) -> Mapping[str, ROperator]:
        """Operators by name."""
        return {o.name: o for o in self.operators}

    @cached_property
    def buffer(self) -> Mapping[str, Buffer]:
        """Buffers by name."""
        return {b.name: b for b in self.buffers}

    @cached_property
    def storage(self) -> Mapping[str, Storage]:
        """Storages by tensor."""
        return {s.tensor: s for s in self.storages}

    @cached_property
    def counter(self) -> Mapping[str, Counter]:
        """Counters by name."""
        return {c.name: c for c in self.counters}

    @cached_property
    def types(self) -> Mapping[str, TensorType]:
        """Types of all tensors, stored or interior to an operator."""
        types = {s.tensor: TensorType(self.buffer[s.buffer].dtype, s.shape) for s in self.storages}
        return {**{c.name: c.type for o in self.operators for c in o.computes}, **types}

    @property
    def turns(self) -> int:
        """How often the table runs, at most."""
        return self.repeat.count if self.repeat is not None else 1

    def turns_at(self, length: Callable[[str], int]) -> int:
        """How often it runs where ``length`` gives the inputs of one element, by tensor."""
        return self.repeat.turns(length) if self.repeat is not None else 1

    def moves(self, when: MoveTime) -> tuple[Move, ...]:
        """What a repeated program moves then."""
        return self.repeat.at(when) if self.repeat is not None else ()

    @property
    def moved_constants(self) -> frozenset[str]:
        """The constant buffers that are read by moves, whoever else reads them."""
        moves = self.repeat.moves if self.repeat is not None else ()
        return frozenset(m.source for m in moves if self.buffer[m.source].kind == "constant")

    @cached_property
    def row_homes(self) -> tuple[int, ...]:
        """The number of the device of each row; 0 of a program for one."""
        return tuple(h for h, home in enumerate(self.homes) for _ in range(home.rows)) if self.homes else (0,) * self.veus

    @property
    def arena_bytes(self) -> int:
        """Bytes of the arena."""
        return max((b.offset + b.nbytes for b in self.buffers if b.kind == "arena"), default=0)

    @property
    def permuted(self) -> tuple[str, ...]:
        """The buffers that hold a tensor in another order than that of its axes, such as channels last."""
        return tuple(b.name for b in self.buffers if b.name in self.storage and not self.storage[b.name].row_major)

    @property
    def task_count(self) -> int:
        """Tasks in all rows."""
        return sum(map(len, self.rows))

    @cached_property
    def digest(self) -> str:
        """Hash of the program's text, for keeping what was computed from it."""
        return _text_digest(str(self))

    def __str__(self) -> str:
        return format_parts(self)

    @staticmethod
    def parse(text: str) -> RProgram:
        """Inverse of ``str``. Raises ValueError naming the line."""
        program = RProgram(**vars(parse_parts(text)))
        program.__dict__["digest"] = _text_digest(text)  # printing a large program again takes longer than reading it
        return program


def _text_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class WaveTask:
    """A task placed: its vEU and wave."""

    wave: int
    veu: int
    task: Task


def waves(program: RProgram) -> list[list[WaveTask]]:
    """Group tasks into waves: a wave starts where a wait needs a task of an earlier wave.

    A task's wave is the larger of its predecessor's in the row and one more than the latest wave among
    the tasks its counters need. Within a wave, tasks keep row order. Raises ValueError when rows wait
    for each other in a circle.
    """
    unfinished = {c.name: c.total for c in program.counters}
    reached = {c.name: 0 for c in program.counters}
    feeds: dict[str, list[Counter]] = {}
    for counter in program.counters:
        feeds.setdefault(counter.operator, []).append(counter)
    cursor = [0] * program.veus
    level = [0] * program.veus
    remaining, moved = program.task_count, True
    result: list[list[WaveTask]] = [[]] if remaining else []
    while remaining and moved:
        moved = False
        for veu, row in enumerate(program.rows):
            here, begin = level[veu], cursor[veu]
            for place in range(begin, len(row)):  # most tasks wait for nothing, and there are very many
                task = row[place]
                if task.waits:
                    if any([unfinished[w.counter] for w in task.waits]):
                        break
                    here = max([here, *[reached[w.counter] + 1 for w in task.waits]])
                    while len(result) <= here:
                        result.append([])
                result[here].append(WaveTask(here, veu, task))
                for counter in feeds.get(task.operator, ()):
                    if counter.first <= task.index < counter.last:
                        unfinished[counter.name] -= 1
                        reached[counter.name] = max(reached[counter.name], here)
            else:
                place = len(row)
            level[veu], cursor[veu] = here, place
            remaining -= place - begin
            moved = moved or place > begin
    if remaining:
        stuck = next(v for v, row in enumerate(program.rows) if cursor[v] < len(row))
        task = program.rows[stuck][cursor[stuck]]
        raise ValueError(f"rows wait for each other in a circle; v{stuck} never passes {task}")
    return result


def tasks_of(program: RProgram) -> Iterator[tuple[int, int, Task]]:
    """Every task as (vEU, order, task)."""
    for veu, row in enumerate(program.rows):
        for order, task in enumerate(row):
            yield veu, order, task


def dense(tensor: str, buffer: str, shape: tuple[int, ...]) -> Storage:
    """A dense row-major storage filling its own buffer."""
    return Storage(tensor, buffer, 0, shape, row_major(shape))


def elements(shape: tuple[int, ...]) -> int:
    """Number of elements of a shape."""
    return math.prod(shape)
