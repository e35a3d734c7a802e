"""All tasks of a program as arrays: what the verifier looks at instead of one object after the other."""

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
    """The tasks of all rows, row after row. Operators are numbered as they come, tasks operator by operator:
    ``base[operator] + index``.

    By place in the table: ``operator`` (number, -1 where the program has none of that name), ``index``, ``veu`` and ``place``.
    """

    program: RProgram
    number: Mapping[str, int]
    counts: Longs
    operator: Longs
    index: Longs
    veu: Longs
    place: Longs

    @staticmethod
    def of(program: RProgram) -> TaskTable:
        """Of a program whose operators have names of their own. OverflowError where an index is beyond 64 bits."""
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
        """The number of each operator's task 0."""
        return np.cumsum(self.counts) - self.counts

    @cached_property
    def task(self) -> Longs:
        """The numbers of the tasks, by place in the table. Every task must be one of the program's."""
        return self.first[self.operator] + self.index

    def each_once(self) -> bool:
        """Whether every task of every operator is in the table exactly once, and nothing else is."""
        known = self.operator >= 0
        if not known.all() or not ((self.index >= 0) & (self.index < self.counts[self.operator])).all():
            return False
        total = int(self.counts.sum())
        return len(self.task) == total and bool((np.bincount(self.task, minlength=total) == 1).all())


def sorted_runs(values: Longs) -> tuple[Longs, Longs]:
    """The positions of ``values`` (not negative) in their order, equal ones as they come, and where among those each distinct
    value begins. (The first use of NumPy's ``unique`` takes 20 ms: it imports masked arrays.)"""
    order = np.argsort(values, kind="stable")
    return order, np.flatnonzero(np.diff(values[order], prepend=-1))


def distinct_values(values: Longs) -> Longs:
    """Distinct ``values`` (not negative) in order."""
    ordered = np.sort(values, axis=None)
    return ordered[np.flatnonzero(np.diff(ordered, prepend=-1))]
