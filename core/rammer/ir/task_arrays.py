"""The tasks of a program as arrays, for the vectorised checks of the verifier."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from rammer.ir.program import RProgram

Longs: TypeAlias = "NDArray[np.int64]"


@dataclass(frozen=True)
class TaskTable:
    """A table of the tasks of all rows, row by row. Operators are numbered in order, tasks operator by operator: ``base[operator]
    + index``. Arrays by table position: ``operator`` (number, -1 for an unknown name), ``index``, ``veu`` and ``place``."""

    program: RProgram
    number: Mapping[str, int]
    counts: Longs
    operator: Longs
    index: Longs
    veu: Longs
    place: Longs

    @staticmethod
    def of(program: RProgram) -> TaskTable:
        """Return the table of a program with unique operator names. Raises OverflowError if an index exceeds 64 bits."""
        number = {o.name: i for i, o in enumerate(program.operators)}
        counts = np.array([o.task_count for o in program.operators], np.int64)
        operator = np.array([number.get(t.operator, -1) for row in program.rows for t in row], np.int64)
        index = np.array([t.index for row in program.rows for t in row], np.int64)
        lengths = [len(row) for row in program.rows]
        veu = np.repeat(np.arange(len(lengths)), lengths)
        ends = np.cumsum(lengths, dtype=np.int64) if lengths else np.zeros(0, np.int64)
        place = np.arange(len(veu)) - np.repeat(ends - lengths, lengths)
        return TaskTable(program, number, counts, operator, index, veu, place)

    @cached_property
    def first(self) -> Longs:
        """The number of the first task of each operator."""
        return np.cumsum(self.counts) - self.counts

    @cached_property
    def task(self) -> Longs:
        """The task numbers by table position. Every task must belong to the program."""
        return self.first[self.operator] + self.index

    def each_once(self) -> bool:
        """Return True if the table contains every task of every operator exactly once, and no other tasks."""
        known = self.operator >= 0
        if not known.all() or not ((self.index >= 0) & (self.index < self.counts[self.operator])).all():
            return False
        total = int(self.counts.sum())
        return len(self.task) == total and bool((np.bincount(self.task, minlength=total) == 1).all())


def sorted_runs(values: Longs) -> tuple[Longs, Longs]:
    """Return a stable sort order of ``values`` (not negative), and the start of each distinct value in it. (The first use of
    NumPy's ``unique`` costs 20 ms: it imports masked arrays.)"""
    order = np.argsort(values, kind="stable")
    return order, np.flatnonzero(np.diff(values[order], prepend=-1))


def distinct_values(values: Longs) -> Longs:
    """Return the distinct ``values`` (not negative) in order."""
    ordered = np.sort(values, axis=None)
    return ordered[np.flatnonzero(np.diff(ordered, prepend=-1))]
