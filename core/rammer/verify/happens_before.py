"""Vector clocks of an RProgram: the tasks that have finished when each task starts.

Component ``v`` of a task's clock is the number of tasks of row ``v`` that have certainly finished. A clock changes only at a
wait. So one clock is stored per segment: a stretch of a row from one waiting task up to the next. Rows with the same waits at the
same positions have equal clocks for all other rows, so they share segments. The clock component of a task's row is the task's
position.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rammer.ir.program import RProgram
from rammer.ir.task_arrays import Longs, TaskTable, distinct_values, sorted_runs

Ints = NDArray[np.int32]


class Deadlock(Exception):
    """A cycle of waiting rows; ``veu`` and ``place`` are the position of one task that never starts."""

    def __init__(self, veu: int, place: int, counter: str) -> None:
        super().__init__(f"v{veu} never passes its task {place}, which waits for {counter}")
        self.veu, self.place, self.counter = veu, place, counter


@dataclass(frozen=True)
class Clocks:
    """Clocks of all tasks. Tasks are numbered operator by operator: ``base[operator] + index``.

    ``veu[t]`` and ``place[t]`` are the row and position of task t. ``clock[segment[t]]`` counts the finished tasks of other rows
    at the start of its segment. ``done[o, v]`` is the position after operator o's last task on row v (0 without tasks there).
    ``known[o, v]`` is the minimum clock component v over the tasks of operator o.
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
        """Return True if every task of ``first`` ends before any task of ``second`` starts."""
        return bool((self.done[self.number[first]] <= self.known[self.number[second]]).all())

    def tasks_before(self, firsts: NDArray[np.integer], second: int) -> bool:
        """Return True if every task in ``firsts`` ends before task ``second`` starts (numbers as in ``base``)."""
        rows, places = self.veu[firsts], self.place[firsts]
        row = self.veu[second]
        reach = np.where(rows == row, self.place[second], self.clock[self.segment[second], rows])
        return bool((places < reach).all())


def compute_clocks(program: RProgram, tasks: TaskTable | None = None) -> Clocks:
    """Compute the clocks by running all rows as far as their waits allow. The program's tasks and counters must be well-formed.
    ``tasks`` is its table, if already computed. Raises Deadlock when rows wait for each other in a circle."""
    table = tasks or TaskTable.of(program)
    walk = _Walk(program, table)
    walk.run()
    veu, place, segment = np.zeros((3, len(table.task)), np.int32)
    veu[table.task], place[table.task], segment[table.task] = table.veu, table.place, walk.segment
    done, known = _operator_clocks(table, walk)
    base = {o.name: int(first) for o, first in zip(program.operators, table.first, strict=True)}
    return Clocks(table.number, base, veu, place, segment, walk.clock, done, known)


def _operator_clocks(table: TaskTable, walk: _Walk) -> tuple[Ints, Ints]:
    """Return ``done`` and ``known`` of every operator (see ``Clocks``)."""
    veus, segments = table.program.veus, len(walk.clock)
    done = np.zeros((len(table.counts), veus), np.int32)
    known = np.full(done.shape, np.iinfo(np.int32).max, np.int32)
    on_row = table.operator * veus + table.veu
    np.maximum.at(done.reshape(-1), on_row, (table.place + 1).astype(np.int32))
    # The first task of an operator on a row has its minimum clock. Rows that share its segment have equal clocks, unless a row is
    # alone there: its component for itself is the task's position.
    order, begins = sorted_runs(on_row)
    first = order[begins]
    order, begins = sorted_runs(table.operator[first] * segments + walk.segment[first])
    first, alone = first[order[begins]], np.flatnonzero(np.diff(begins, append=len(order)) == 1)
    least = walk.clock[walk.segment[first]]
    least[alone, table.veu[first[alone]]] = table.place[first[alone]]
    operators = table.operator[first]
    begins = np.flatnonzero(np.diff(operators, prepend=-1))
    if len(begins):
        known[operators[begins]] = np.minimum.reduceat(least, begins)
    return done, known


@dataclass
class _Group:
    """A group of rows with equal waits: their positions and counters. Segment 0 precedes all waits; segment i begins at
    ``places[i - 1]``. The first segment has the number ``begin`` among the segments of all groups."""

    begin: int
    places: tuple[int, ...]
    waits: list[tuple[int, ...]]
    next: int = 1  #: The first segment that has not run.


class _Walk:
    """A simulation of all groups of rows. Each advances while its waits are satisfied; the clocks do not depend on the order."""

    def __init__(self, program: RProgram, table: TaskTable) -> None:
        self.program, self.table = program, table
        self.number = {c.name: i for i, c in enumerate(program.counters)}
        self.group_of: list[_Group] = []
        self.segments = 0
        self._group_rows()
        self.clock = np.zeros((self.segments, program.veus), np.int32)
        self.finished = np.zeros((len(program.counters), program.veus), np.int32)
        self.clocks, self.done = list(self.clock), list(self.finished)  # as lists of rows, because NumPy indexing is slow
        self.feeds: list[list[int]] = [[] for _ in range(self.segments)]
        self.feeding: list[Longs] = []
        self._map_counter_feeds()
        self.left = [len(f) for f in self.feeding]

    def _group_rows(self) -> None:
        """Sort rows into groups, and assign every task its segment."""
        known: dict[object, _Group] = {}
        parts = [np.zeros(0, np.int64)]
        for row in self.program.rows:
            waiting = [(place, task.waits) for place, task in enumerate(row) if task.waits]
            places = tuple([place for place, _ in waiting])
            same = places, tuple([id(waits) for _, waits in waiting])  # rows of one line of text share their waits
            if same not in known:
                listed = [tuple([self.number[w.counter] for w in waits]) for _, waits in waiting]
                known[same] = known.setdefault((places, *listed), _Group(self.segments, places, listed))
                self.segments = max(self.segments, known[same].begin + 1 + len(places))
            group = known[same]
            self.group_of.append(group)
            parts.append(group.begin + np.searchsorted(np.array(places, np.int64), np.arange(len(row)), side="right"))
        self.groups, self.segment = list({g.begin: g for g in self.group_of}.values()), np.concatenate(parts)

    def _map_counter_feeds(self) -> None:
        """Compute the segments that feed each counter, the counters that each segment feeds, and the initial clocks of counters.
        A counter's initial clock has, for each row, the position after the last counted task."""
        counters, table = self.program.counters, self.table
        where = np.empty(len(table.task), np.int64)
        where[table.task] = np.arange(len(table.task))
        first = table.first.tolist()
        begins = np.array([first[table.number[c.operator]] + c.first for c in counters], np.int64)
        totals = np.array([c.total for c in counters], np.int64)
        counter = np.repeat(np.arange(len(counters)), totals)
        counted = where[np.arange(len(counter)) + np.repeat(begins - (np.cumsum(totals) - totals), totals)]
        rows = counter * self.program.veus + table.veu[counted]
        np.maximum.at(self.finished.reshape(-1), rows, (table.place[counted] + 1).astype(np.int32))
        fed, feeding = np.divmod(distinct_values(counter * self.segments + self.segment[counted]), max(self.segments, 1))
        self.feeding = np.split(feeding, np.searchsorted(fed, np.arange(1, len(counters)))) if counters else []
        for number, segment in zip(fed.tolist(), feeding.tolist(), strict=True):
            self.feeds[segment].append(number)

    def run(self) -> None:
        """Run until no group is ready. Raises Deadlock for the remaining groups."""
        waiting: dict[int, list[_Group]] = {}
        ready = list(self.groups)
        for group in self.groups:
            self._count_segment(group.begin, waiting, ready)
        while ready:
            group = ready.pop()
            low = group.next
            while group.next <= len(group.waits) and not any([self.left[c] for c in group.waits[group.next - 1]]):
                group.next += 1
            if group.next > low:
                self._propagate_clocks(group, low)
                for segment in range(group.begin + low, group.begin + group.next):
                    self._count_segment(segment, waiting, ready)
            # A group waits in one list at a time, that of its first unfilled counter; a full counter wakes its list.
            if group.next <= len(group.waits):
                lacking = next((c for c in group.waits[group.next - 1] if self.left[c]), None)
                (ready if lacking is None else waiting.setdefault(lacking, [])).append(group)
        for veu, group in enumerate(self.group_of):
            if group.next <= len(group.waits):
                stuck = next(c for c in group.waits[group.next - 1] if self.left[c])
                raise Deadlock(veu, group.places[group.next - 1], self.program.counters[stuck].name)

    def _propagate_clocks(self, group: _Group, low: int) -> None:
        """Compute the clocks of the segments of ``group`` from ``low`` up to its next, from the previous
        clock and the counters."""
        for segment, waits in enumerate(group.waits[low - 1 : group.next - 1], group.begin + low):
            known = self.clocks[segment - 1]
            for counter in waits:
                known = np.maximum(known, self.done[counter], out=self.clocks[segment])

    def _count_segment(self, segment: int, waiting: dict[int, list[_Group]], ready: list[_Group]) -> None:
        """Record that ``segment`` has run, and wake the groups that wait for full counters."""
        for counter in self.feeds[segment]:
            self.left[counter] -= 1
            if not self.left[counter]:
                told = self.clock[self.feeding[counter]].max(axis=0)
                np.maximum(self.done[counter], told, out=self.done[counter])
                ready += waiting.pop(counter, ())
