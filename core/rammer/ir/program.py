"""RProgram: ``prog[vEU][order]``, the static table that every device runs, with data derived from it. Its parts are in ``parts``
and importable from here; its text form is in ``program_text``."""

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
    """The program table and all data that a device needs to run it, except the values of constants. ``veus`` is the length of
    ``rows``."""

    @property
    def veus(self) -> int:
        """The number of rows."""
        return len(self.rows)

    @cached_property
    def operator(self) -> Mapping[str, ROperator]:
        """The operators by name."""
        return {o.name: o for o in self.operators}

    @cached_property
    def buffer(self) -> Mapping[str, Buffer]:
        """The buffers by name."""
        return {b.name: b for b in self.buffers}

    @cached_property
    def storage(self) -> Mapping[str, Storage]:
        """The storages by tensor."""
        return {s.tensor: s for s in self.storages}

    @cached_property
    def counter(self) -> Mapping[str, Counter]:
        """The counters by name."""
        return {c.name: c for c in self.counters}

    @cached_property
    def types(self) -> Mapping[str, TensorType]:
        """Types of all tensors, stored or interior to an operator."""
        types = {s.tensor: TensorType(self.buffer[s.buffer].dtype, s.shape) for s in self.storages}
        return {**{c.name: c.type for o in self.operators for c in o.computes}, **types}

    @property
    def turns(self) -> int:
        """The maximum trip count of the table."""
        return self.repeat.count if self.repeat is not None else 1

    def turns_at(self, length: Callable[[str], int]) -> int:
        """Return the trip count; ``length`` returns the value of a one-element input."""
        return self.repeat.turns(length) if self.repeat is not None else 1

    def moves(self, when: MoveTime) -> tuple[Move, ...]:
        """Return the moves of a loop program at one time."""
        return self.repeat.at(when) if self.repeat is not None else ()

    @property
    def moved_constants(self) -> frozenset[str]:
        """The constant buffers that moves read, even if other operators also read them."""
        moves = self.repeat.moves if self.repeat is not None else ()
        return frozenset(m.source for m in moves if self.buffer[m.source].kind == "constant")

    @cached_property
    def row_homes(self) -> tuple[int, ...]:
        """The device number of each row; 0 in a single-device program."""
        return tuple(h for h, home in enumerate(self.homes) for _ in range(home.rows)) if self.homes else (0,) * self.veus

    @property
    def arena_bytes(self) -> int:
        """The size of the arena in bytes."""
        return max((b.offset + b.nbytes for b in self.buffers if b.kind == "arena"), default=0)

    @property
    def permuted(self) -> tuple[str, ...]:
        """The buffers that hold a tensor in an axis order other than row-major, for example channels last."""
        return tuple(b.name for b in self.buffers if b.name in self.storage and not self.storage[b.name].row_major)

    @property
    def task_count(self) -> int:
        """The number of tasks in all rows."""
        return sum(map(len, self.rows))

    @cached_property
    def digest(self) -> str:
        """The hash of the program's text, a key for cached results."""
        return _text_digest(str(self))

    def __str__(self) -> str:
        return format_parts(self)

    @staticmethod
    def parse(text: str) -> RProgram:
        """Parse a program from the text of ``str``. Raises ValueError naming the line."""
        program = RProgram(**vars(parse_parts(text)))
        program.__dict__["digest"] = _text_digest(text)  # printing a large program again is slower than reading it
        return program


def _text_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class WaveTask:
    """A placed task, with its vEU and wave."""

    wave: int
    veu: int
    task: Task


def waves(program: RProgram) -> list[list[WaveTask]]:
    """Group tasks into waves: a wave starts where a wait needs a task of an earlier wave.

    A task's wave is at least that of its predecessor in the row. It is also later than the waves of the tasks that its counters
    need. Within a wave, tasks stay in row order. Raises ValueError if rows wait for each other in a cycle."""
    unfinished = {c.name: c.total for c in program.counters}
    reached = {c.name: 0 for c in program.counters}
    feeds = counters_by_operator(program)
    cursor = [0] * program.veus
    level = [0] * program.veus
    remaining, moved = program.task_count, True
    result: list[list[WaveTask]] = [[]] if remaining else []
    while remaining and moved:
        moved = False
        for veu, row in enumerate(program.rows):
            here, begin = level[veu], cursor[veu]
            for place in range(begin, len(row)):  # most tasks have no waits, and programs have very many tasks
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
        raise ValueError(f"rows wait for each other in a cycle; v{stuck} never passes {task}")
    return result


def counters_by_operator(program: RProgram) -> dict[str, list[Counter]]:
    """Return the counters to which each operator's tasks contribute."""
    feeds: dict[str, list[Counter]] = {}
    for counter in program.counters:
        feeds.setdefault(counter.operator, []).append(counter)
    return feeds


def tasks_of(program: RProgram) -> Iterator[tuple[int, int, Task]]:
    """Yield every task as (vEU, order, task)."""
    for veu, row in enumerate(program.rows):
        for order, task in enumerate(row):
            yield veu, order, task


def dense(tensor: str, buffer: str, shape: tuple[int, ...]) -> Storage:
    """Return a dense row-major storage that fills its buffer."""
    return Storage(tensor, buffer, 0, shape, row_major(shape))


def elements(shape: tuple[int, ...]) -> int:
    """Return the number of elements of a shape."""
    return math.prod(shape)
