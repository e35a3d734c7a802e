"""Vector clocks of an RProgram: what each task knows to have finished when it starts.

Component ``v`` of a task's clock is how many tasks of row ``v`` have certainly finished. A clock
changes only where a task waits, so one is kept per segment: a stretch of a row from one waiting task up to the next.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from rammer.ir.program import RProgram, Task

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
    done, known = _operators(program, base, walk, walk.clock)
    return Clocks(number, base, walk.veu, walk.place, walk.segment, walk.clock, done, known)


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


#: A stretch of a row up to its next waiting task: the counters that it waits for first, those that its tasks count for (with how
#: many, and the position after the last of them), and where it ends.
_Segment: TypeAlias = "tuple[tuple[int, ...], list[tuple[int, int, int]], int]"


class _Walk:
    """All rows side by side: in each round those whose waits are over run one segment. What a task knows does not depend on
    the order, so that rows are taken together, and NumPy is asked a few times a round."""

    def __init__(self, program: RProgram, base: Mapping[str, int], total: int) -> None:
        self.program, veus = program, program.veus
        self.number = {c.name: i for i, c in enumerate(program.counters)}
        self.feeds: dict[str, list[tuple[int, int, int]]] = {}
        for number, counter in enumerate(program.counters):
            self.feeds.setdefault(counter.operator, []).append((number, counter.first, counter.last))
        self.veu, self.place, self.segment = (np.zeros(total, dtype=np.int32) for _ in range(3))
        self.rows: list[list[_Segment]] = []
        self.first: list[int] = []  # the number of a row's first segment
        self.segments = 0
        for veu, row in enumerate(program.rows):
            self._row(veu, row, base)
        self.clock = np.zeros((self.segments, veus), dtype=np.int32)
        self.missing = np.array([c.total for c in program.counters], dtype=np.int64)
        self.finished = np.zeros((len(program.counters), veus), dtype=np.int32)
        self.now = np.zeros((veus, veus), dtype=np.int32)
        self.cursor = [0] * veus

    def _row(self, veu: int, row: tuple[Task, ...], base: Mapping[str, int]) -> None:
        """Cut a row into segments, and number its tasks."""
        begins = [0, *(place for place, task in enumerate(row) if task.waits)]
        cut = [self._cut(row, low, high) for low, high in zip(begins, (*begins[1:], len(row)), strict=True)]
        tasks = np.array([base[t.operator] + t.index for t in row], dtype=np.int64)
        self.veu[tasks], self.place[tasks] = veu, np.arange(len(row))
        lengths = np.diff(np.array([*begins, len(row)]))
        self.segment[tasks] = np.repeat(np.arange(self.segments, self.segments + len(cut)), lengths)
        self.rows.append(cut)
        self.first.append(self.segments)
        self.segments += len(cut)

    def _cut(self, row: tuple[Task, ...], low: int, high: int) -> _Segment:
        if low == high:
            return (), [], high
        fed: dict[int, tuple[int, int, int]] = {}
        for place in range(low, high):
            task = row[place]
            for number, first, last in self.feeds.get(task.operator, ()):
                if first <= task.index < last:
                    fed[number] = number, fed[number][1] + 1 if number in fed else 1, place + 1
        return tuple([self.number[w.counter] for w in row[low].waits]), list(fed.values()), high

    def run(self) -> None:
        """Rounds until nothing is ready. Raises Deadlock for what is left."""
        waiting: dict[int, list[int]] = {}
        ready = list(range(len(self.rows)))
        while ready:
            self._round(ready)
            # A row waits in one list at a time, that of the first counter it lacks; a full counter wakes its list.
            asked = ready + [veu for c in [c for c in waiting if not self.missing[c]] for veu in waiting.pop(c)]
            ready = []
            for veu in asked:
                if self.cursor[veu] < len(self.rows[veu]):
                    lacking = next((c for c in self.rows[veu][self.cursor[veu]][0] if self.missing[c]), None)
                    (ready if lacking is None else waiting.setdefault(lacking, [])).append(veu)
        for veu, (cursor, cut) in enumerate(zip(self.cursor, self.rows, strict=True)):
            if cursor < len(cut):
                stuck = next(c for c in cut[cursor][0] if self.missing[c])
                raise Deadlock(veu, cut[cursor - 1][2], self.program.counters[stuck].name)

    def _round(self, ready: list[int]) -> None:
        """One segment of every row that is ready."""
        cut = [self.rows[veu][self.cursor[veu]] for veu in ready]
        for turn in range(max(len(waits) for waits, _, _ in cut)):
            pairs = [(veu, s[0][turn]) for veu, s in zip(ready, cut, strict=True) if turn < len(s[0])]
            rows, counters = np.array(pairs).T
            self.now[rows] = np.maximum(self.now[rows], self.finished[counters])
        self.clock[[self.first[veu] + self.cursor[veu] for veu in ready]] = self.now[ready]
        fed = [(c, veu, count, place) for veu, s in zip(ready, cut, strict=True) for c, count, place in s[1]]
        if fed:
            counters, rows, counts, places = np.array(sorted(fed)).T
            known = self.now[rows]
            known[np.arange(len(rows)), rows] = places
            first = np.flatnonzero(np.diff(counters, prepend=-1))
            full = counters[first]
            self.finished[full] = np.maximum(self.finished[full], np.maximum.reduceat(known, first))
            self.missing[full] -= np.add.reduceat(counts, first)
        self.now[ready, ready] = [end for _, _, end in cut]
        for veu in ready:
            self.cursor[veu] += 1
