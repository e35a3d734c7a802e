"""The program's table as the persistent kernel reads it: ``prog[vEU][order]``, one fixed-size entry a task.

An entry is 32-bit words, so that a block can copy the next one while it computes::

    task | waits | signals | unused | (counter, threshold, total) a wait | counter a signal | pointers (two words each)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from rammer.ir.program import Counter, RProgram

#: Words before the waits of an entry.
HEAD = 4
#: Words that a thread copies at once; entries are multiples of it.
COPY = 4


@dataclass(frozen=True, slots=True)
class Form:
    """Sizes common to all entries: waits, signals and pointers that there is room for."""

    waits: int
    signals: int
    pointers: int

    @property
    def signal_at(self) -> int:
        """First word of the signals."""
        return HEAD + 3 * self.waits

    @property
    def pointer_at(self) -> int:
        """First word of the pointers, even since they are two words each."""
        return -(-(self.signal_at + self.signals) // 2) * 2

    @property
    def words(self) -> int:
        """Words of an entry."""
        return -(-(self.pointer_at + 2 * self.pointers) // COPY) * COPY


@dataclass(frozen=True, slots=True)
class Table:
    """``entries[order]`` of all rows one after another, and for each row its runs.

    A run is ``(kernel, first entry, entries)``: consecutive tasks of one kernel that read the same static operands at
    the same task index, so that what the kernel holds on chip stays valid. ``runs[first[v] : first[v + 1]]`` are row v's.
    """

    form: Form
    entries: NDArray[np.uint32]
    runs: NDArray[np.int32]
    first: NDArray[np.int32]
    counters: tuple[Counter, ...]


def make_table(program: RProgram, kernel_of: Mapping[str, int], pointers: Mapping[str, Sequence[int]],
               held: Mapping[str, tuple[object, ...]]) -> Table:  # fmt: skip
    """The table of ``program``. By operator: its kernel's number, the pointers that it takes, and what identifies the
    constants that the kernel holds on chip (() where it holds none)."""
    number = {c.name: i for i, c in enumerate(program.counters)}
    feeds: dict[str, list[Counter]] = {}
    for counter in program.counters:
        feeds.setdefault(counter.operator, []).append(counter)
    tasks = [t for row in program.rows for t in row]
    signalled = {t: tuple(number[c.name] for c in feeds.get(t[0], ()) if c.first <= t[1] < c.last)
                 for t in {(t.operator, t.index) for t in tasks}}  # fmt: skip
    form = Form(
        max((len(t.waits) for t in tasks), default=0), max(map(len, signalled.values()), default=0),
        max(map(len, pointers.values()), default=0),
    )  # fmt: skip
    words_of = {n: np.array(p, np.uint64).view(np.uint32) for n, p in pointers.items()}
    entries = np.zeros((len(tasks), form.words), np.uint32)
    for entry, task in zip(entries, tasks, strict=True):
        signals = signalled[task.operator, task.index]
        entry[:3] = task.index, len(task.waits), len(signals)
        for i, wait in enumerate(task.waits):
            at = number[wait.counter]
            entry[HEAD + 3 * i : HEAD + 3 * i + 3] = at, wait.threshold, program.counters[at].total
        entry[form.signal_at : form.signal_at + len(signals)] = signals
        words = words_of[task.operator]
        entry[form.pointer_at : form.pointer_at + len(words)] = words
    runs, first = _runs(program, kernel_of, held)
    return Table(form, entries, runs, first, program.counters)


def _runs(program: RProgram, kernel_of: Mapping[str, int],
          held: Mapping[str, tuple[object, ...]]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:  # fmt: skip
    runs, first, begin = list[tuple[int, int, int]](), [0], 0
    for row in program.rows:
        keys = ((kernel_of[t.operator], t.index, held[t.operator]) if held[t.operator] else (kernel_of[t.operator],) for t in row)
        for key, group in groupby(keys):
            count = len(list(group))
            runs.append((int(key[0]), begin, count))
            begin += count
        first.append(len(runs))
    return np.array(runs, np.int32).reshape(-1, 3), np.array(first, np.int32)
