"""RProgram: ``prog[vEU][order]``, the static table that every device runs. Data only; see ``text``.

Tasks name an operator and a tile, never source. Buffers and storages say where tensors live; counters
and waits say what must have finished.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, TypeAlias

from rammer.ir.operator import ROperator
from rammer.ir.types import TensorType, itemsize

BufferKind: TypeAlias = Literal["input", "output", "constant", "arena"]

#: Arena offsets are multiples of this many bytes: one cache line, and the widest vector load.
ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Buffer:
    """``size`` elements of ``dtype``; ``offset`` (bytes) places an arena buffer, others stand alone."""

    name: str
    dtype: str
    size: int
    kind: BufferKind
    offset: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return self.size * itemsize(self.dtype)


@dataclass(frozen=True, slots=True)
class Storage:
    """Where a tensor lives: element ``offset`` into ``buffer`` and element ``strides`` per axis."""

    tensor: str
    buffer: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def span(self) -> tuple[int, int]:
        """Half-open range of element addresses within the buffer; empty tensors give an empty range."""
        if 0 in self.shape:
            return self.offset, self.offset
        reach = [(n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)]
        return self.offset + sum(min(r, 0) for r in reach), self.offset + sum(max(r, 0) for r in reach) + 1


@dataclass(frozen=True, slots=True)
class Counter:
    """Counts finished tasks ``first .. last-1`` of ``operator``."""

    name: str
    operator: str
    first: int
    last: int

    @property
    def total(self) -> int:
        """Number of contributing tasks, the full threshold."""
        return self.last - self.first


@dataclass(frozen=True, slots=True)
class Wait:
    """Proceed only when ``counter`` has reached ``threshold`` (in this run)."""

    counter: str
    threshold: int


@dataclass(frozen=True, slots=True)
class Task:
    """Tile ``index`` of ``operator``, after its waits."""

    operator: str
    index: int
    waits: tuple[Wait, ...] = ()


@dataclass(frozen=True, slots=True)
class Port:
    """A program input or output: the ONNX name and the tensor."""

    external: str
    tensor: str


@dataclass(frozen=True)
class RProgram:
    """The table with everything a device needs to run it, except the values of the constants.

    ``veus`` is the length of ``rows``; ``predicted`` the policy's estimate in seconds (0 = none).
    """

    name: str
    policy: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    buffers: tuple[Buffer, ...]
    storages: tuple[Storage, ...]
    operators: tuple[ROperator, ...]
    counters: tuple[Counter, ...]
    rows: tuple[tuple[Task, ...], ...]
    predicted: float = field(default=0.0, compare=False)

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
    def arena_bytes(self) -> int:
        """Bytes of the arena."""
        return max((b.offset + b.nbytes for b in self.buffers if b.kind == "arena"), default=0)

    @property
    def task_count(self) -> int:
        """Tasks in all rows."""
        return sum(map(len, self.rows))

    def __str__(self) -> str:
        from rammer.ir.text import format_program

        return format_program(self)

    @staticmethod
    def parse(text: str) -> RProgram:
        """Inverse of ``str``. Raises ValueError naming the line."""
        from rammer.ir.text import parse_program

        return parse_program(text)


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
    result: list[list[WaveTask]] = []
    remaining, moved = program.task_count, True
    while remaining and moved:
        moved = False
        for veu, row in enumerate(program.rows):
            while cursor[veu] < len(row) and all(unfinished[w.counter] == 0 for w in row[cursor[veu]].waits):
                task = row[cursor[veu]]
                level[veu] = max([level[veu], *(reached[w.counter] + 1 for w in task.waits)])
                while len(result) <= level[veu]:
                    result.append([])
                result[level[veu]].append(WaveTask(level[veu], veu, task))
                for counter in feeds.get(task.operator, ()):
                    if counter.first <= task.index < counter.last:
                        unfinished[counter.name] -= 1
                        reached[counter.name] = max(reached[counter.name], level[veu])
                cursor[veu] += 1
                remaining -= 1
                moved = True
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
    from rammer.ir.types import row_major

    return Storage(tensor, buffer, 0, shape, row_major(shape))


def elements(shape: tuple[int, ...]) -> int:
    """Number of elements of a shape."""
    return math.prod(shape)
