"""Vector clocks of an RProgram: what each task knows to have finished when it starts.

Component ``v`` of a task's clock is how many tasks of row ``v`` have certainly finished. A clock
changes only where a task waits, so one is kept per segment: a stretch of a row from one waiting task up to the next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rammer.ir.program import Counter, RProgram

Ints = NDArray[np.int32]


class Deadlock(Exception):
    """No row can go on; ``veu`` and ``place`` point at one task that never starts."""

    def __init__(self, veu: int, place: int, counter: str) -> None:
        super().__init__(f"v{veu} never passes its task {place}, which waits for {counter}")
        self.veu, self.place, self.counter = veu, place, counter


@dataclass(frozen=True)
class Clocks:
    """Clocks of all tasks. Tasks are numbered operator by operator: ``base[operator] + index``.

    ``veu[t]`` and ``place[t]`` are the row and position of task t, ``clock[segment[t]]`` what had
    finished when its segment began. ``done[o, v]`` is the position after operator o's last task on row v (0 =
    none there); ``known[o, v]`` the least that any task of operator o knows of row v when it starts.
    """

    number: Mapping[str, int]
    base: Mapping[str, int]
    veu: Ints
    place: Ints
    segment: Ints
    clock: Ints
    done: Ints
    known: Ints

    def operator_before(self, first: str, second: str) -> bool:
        """Whether every task of ``first`` ends before any task of ``second`` starts."""
        return bool((self.done[self.number[first]] <= self.known[self.number[second]]).all())

    def tasks_before(self, firsts: NDArray[np.integer], second: int) -> bool:
        """Whether every task in ``firsts`` ends before task ``second`` starts (numbers as in ``base``)."""
        rows, places = self.veu[firsts], self.place[firsts]
        row = self.veu[second]
        reach = np.where(rows == row, self.place[second], self.clock[self.segment[second], rows])
        return bool((places < reach).all())


def compute_clocks(program: RProgram) -> Clocks:
    """Walk all rows as far as their waits allow. The program's tasks and counters must be well-formed.

    Raises Deadlock when rows wait for each other in a circle.
    """
    base, total = {}, 0
    for operator in program.operators:
        base[operator.name] = total
        total += operator.task_count
    walk = _Walk(program, base, total)
    walk.run()
    number = {o.name: i for i, o in enumerate(program.operators)}
    clock = walk.clock[: walk.segments]
    done, known = _operators(program, base, walk, clock)
    return Clocks(number, base, walk.veu, walk.place, walk.segment, clock, done, known)


def _operators(program: RProgram, base: Mapping[str, int], walk: _Walk, clock: Ints) -> tuple[Ints, Ints]:
    """``done`` and ``known`` of every operator (see ``Clocks``)."""
    shape = (len(program.operators), program.veus)
    done = np.zeros(shape, dtype=np.int32)
    known = np.full(shape, np.iinfo(np.int32).max, dtype=np.int32)
    for o, operator in enumerate(program.operators):
        if not operator.task_count:
            continue
        tasks = slice(base[operator.name], base[operator.name] + operator.task_count)
        veu, place, segment = walk.veu[tasks], walk.place[tasks], walk.segment[tasks]
        np.maximum.at(done[o], veu, place + 1)
        # The first task of an operator in a row's segment knows least, so it stands for the rest.
        rank = np.lexsort((place, segment))
        first = rank[np.unique(segment[rank], return_index=True)[1]]
        known[o] = _least(clock, segment[first], veu[first], place[first])
    return done, known


def _least(clock: Ints, segments: Ints, veus: Ints, places: Ints) -> Ints:
    """Component-wise minimum of task clocks; a task knows its own row up to its own place."""
    table = clock[segments]
    table[np.arange(len(segments)), veus] = places
    result: Ints = table.min(axis=0)
    return result


class _Walk:
    """Event-driven walk: a row runs until a wait stops it, and a finished counter wakes its waiters."""

    def __init__(self, program: RProgram, base: Mapping[str, int], total: int) -> None:
        veus = program.veus
        self.rows = program.rows
        self.base = base
        self.veu = np.zeros(total, dtype=np.int32)
        self.place = np.zeros(total, dtype=np.int32)
        self.segment = np.zeros(total, dtype=np.int32)
        waits = sum(bool(t.waits) for row in program.rows for t in row)
        self.clock = np.zeros((veus + waits, veus), dtype=np.int32)
        self.segments = 0
        self.feeds: dict[str, list[Counter]] = {}
        for counter in program.counters:
            self.feeds.setdefault(counter.operator, []).append(counter)
        self.missing = {c.name: c.total for c in program.counters}
        self.finished = {c.name: np.zeros(veus, dtype=np.int32) for c in program.counters}
        self.waiting: dict[str, list[int]] = {c.name: [] for c in program.counters}
        self.now = np.zeros((veus, veus), dtype=np.int32)
        self.cursor = [0] * veus
        self.current = [-1] * veus
        self.ready = deque(range(veus))

    def run(self) -> None:
        while self.ready:
            self._advance(self.ready.popleft())
        for veu, (cursor, row) in enumerate(zip(self.cursor, self.rows, strict=True)):
            if cursor < len(row):
                stuck = next(w.counter for w in row[cursor].waits if self.missing[w.counter])
                raise Deadlock(veu, cursor, stuck)

    def _advance(self, veu: int) -> None:
        """Run row ``veu`` up to a wait that is not satisfied yet, or to its end."""
        row, position = self.rows[veu], self.cursor[veu]
        numbers: list[int] = []
        fed: dict[str, list[int]] = {}  # counter -> [tasks that count for it, position after the last one]
        start = position
        if self.current[veu] < 0:
            self._begin(veu)
        while position < len(row):
            task = row[position]
            if task.waits:
                self._flush(veu, start, numbers, fed)
                numbers, fed, start = [], {}, position
                blocked = next((w.counter for w in task.waits if self.missing[w.counter]), None)
                if blocked is not None:
                    self.waiting[blocked].append(veu)
                    self.cursor[veu] = position
                    return
                for wait in task.waits:
                    np.maximum(self.now[veu], self.finished[wait.counter], out=self.now[veu])
                self._begin(veu)
            numbers.append(self.base[task.operator] + task.index)
            position += 1
            for counter in self.feeds.get(task.operator, ()):
                if counter.first <= task.index < counter.last:
                    entry = fed.setdefault(counter.name, [0, 0])
                    entry[0] += 1
                    entry[1] = position
        self._flush(veu, start, numbers, fed)
        self.cursor[veu] = position

    def _begin(self, veu: int) -> None:
        """Start a segment of row ``veu``, which knows what the row knows now."""
        self.current[veu] = self.segments
        self.clock[self.segments] = self.now[veu]
        self.segments += 1

    def _flush(self, veu: int, start: int, numbers: list[int], fed: Mapping[str, list[int]]) -> None:
        """Record finished tasks, and tell the counters that they count for."""
        if not numbers:
            return
        self.veu[numbers] = veu
        self.place[numbers] = np.arange(start, start + len(numbers))
        self.segment[numbers] = self.current[veu]
        for name, (count, position) in fed.items():
            self.now[veu, veu] = position
            np.maximum(self.finished[name], self.now[veu], out=self.finished[name])
            self.missing[name] -= count
            if not self.missing[name]:
                self.ready.extend(self.waiting[name])
                self.waiting[name] = []
        self.now[veu, veu] = start + len(numbers)
