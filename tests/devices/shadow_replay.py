"""A happens-before oracle: replays a program task by task over shadow memory, byte by byte.

It is slow and simple on purpose (for programs of a few thousand tasks), and independent of the core's verifier. It uses only
addresses, rows and waits. The bulk-synchronous barriers of the simulated chip hide races that another device would expose; this
oracle does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from rammer.ir.program import RProgram, Storage, Task, waves
from rammer.ir.types import itemsize

from rammer_ipu_sim.cycles import exact_boxes
from rammer_ipu_sim.spans import Spans
from rammer_ipu_sim.supersteps import group_batches, make_placed_tasks

Indices: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"

#: A task depends on counters only at their full totals; smaller thresholds order nothing.
NEVER = -1


@dataclass
class _Shadow:
    """The last writer (row and place) of each byte, and its latest reader in every row."""

    row: Indices
    place: Indices
    readers: Indices

    @staticmethod
    def blank(size: int, veus: int, ready: bool) -> _Shadow:
        """Return fresh shadow memory. ``ready`` memory (inputs, constants) counts as written before the run."""
        row = np.full(size, NEVER, dtype=np.int64)
        return _Shadow(row, np.full(size, -1 if ready else 0, dtype=np.int64), np.full((size, veus), -1, dtype=np.int64))


def find_races(program: RProgram) -> list[str]:
    """Return the accesses that waits and rows do not order, one line each; empty for a race-free program. Raises ValueError if
    rows wait for each other in a cycle."""
    return _Replay(program).run()


class _Replay:
    def __init__(self, program: RProgram) -> None:
        self.program = program
        fixed = {
            b.name: _Shadow.blank(b.nbytes, program.veus, b.kind in ("input", "constant", "state"))
            for b in program.buffers
            if b.kind != "arena"
        }
        self.shadows = {"": _Shadow.blank(program.arena_bytes, program.veus, False), **fixed}
        self.ends: dict[tuple[str, int], Indices] = {}
        self.problems: list[str] = []

    def run(self) -> list[str]:
        position = [0] * self.program.veus
        previous = [np.zeros(self.program.veus, dtype=np.int64) for _ in range(self.program.veus)]
        for wave in waves(self.program):
            for item in wave:
                clock = self._task_clock(item.task, previous[item.veu])
                self._replay_task(item.task, item.veu, position[item.veu], clock)
                position[item.veu] += 1
                clock = clock.copy()
                clock[item.veu] = position[item.veu]
                previous[item.veu] = self.ends[item.task.operator, item.task.index] = clock
        return self.problems

    def _task_clock(self, task: Task, before: Indices) -> Indices:
        """Return the number of tasks of each row that must have finished when ``task`` starts."""
        clock = before
        for wait in task.waits:
            counter = self.program.counter[wait.counter]
            if wait.threshold >= counter.total:
                for index in range(counter.first, counter.last):
                    clock = np.maximum(clock, self.ends[counter.operator, index])
        return clock

    def _replay_task(self, task: Task, veu: int, place: int, clock: Indices) -> None:
        operator = self.program.operator[task.operator]
        (batch,) = group_batches(operator, make_placed_tasks([veu], [0], [task.index]))
        name = f"{task.operator}[{task.index}]"
        boxes = exact_boxes(batch, self.program.types)
        for read in boxes.reads:
            shadow, where = self._shadow_bytes(read.tensor, read.box)
            if not _is_written(shadow, where, clock):
                self.problems.append(f"{name} reads {read.tensor} before it is written")
            shadow.readers[where, veu] = place
        for tensor, box in boxes.written.items():
            shadow, where = self._shadow_bytes(tensor, box)
            mine = clock.copy()
            mine[veu] = place + 1  # a task's reads precede its writes
            if not _is_unused(shadow, where, mine):
                self.problems.append(f"{name} writes {tensor} over memory still in use")
            shadow.row[where], shadow.place[where] = veu, place
            shadow.readers[where] = -1

    def _shadow_bytes(self, tensor: str, box: Spans) -> tuple[_Shadow, Indices]:
        storage = self.program.storage[tensor]
        buffer = self.program.buffer[storage.buffer]
        size = itemsize(buffer.dtype)
        first = _box_addresses(storage, box) * size
        where = (first[:, None] + np.arange(size)).reshape(-1)
        if buffer.kind == "arena":
            return self.shadows[""], where + buffer.offset
        return self.shadows[buffer.name], where


def _box_addresses(storage: Storage, box: Spans) -> Indices:
    total = np.array([storage.offset], dtype=np.int64)
    for span, stride in zip(box, storage.strides, strict=True):
        along = np.arange(int(span.low.flat[0]), int(span.high.flat[0]) + 1) * stride
        total = (total[:, None] + along).reshape(-1)
    return total


def _is_finished(rows: Indices, places: Indices, clock: Indices) -> Any:
    """Return True for tasks at ``places`` of ``rows`` that must have finished."""
    return places < np.where(rows >= 0, clock[rows], 0)


def _is_written(shadow: _Shadow, where: Indices, clock: Indices) -> bool:
    return bool(np.all(_is_finished(shadow.row[where], shadow.place[where], clock)))


def _is_unused(shadow: _Shadow, where: Indices, clock: Indices) -> bool:
    """Return True if every writer and reader of the old value must have finished."""
    written = shadow.row[where] >= 0
    writers = ~written | _is_finished(shadow.row[where], shadow.place[where], clock)
    return bool(np.all(writers) and np.all(shadow.readers[where] < clock))
