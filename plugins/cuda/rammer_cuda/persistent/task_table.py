"""The program's table as the persistent kernel reads it: ``prog[vEU][order]``, one fixed-size entry per task.

An entry is 32-bit words, so that a block can copy the next one while it computes::

    task | waits | signals | run | (counter, threshold, total) a wait | (counter, tasks) a signal | pointers (two words each)

If all waits for a counter need all of its tasks, only the last task on each row signals, for all of them. A signal waits until
the writes are visible everywhere, which lasts as long as a small task.

The run word is used in the first entry of a run: its kernel, and in the higher bits its number of entries.
"""

from __future__ import annotations

from collections import Counter as Counting
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rammer.errors import DeviceFailure
from rammer.ir.program import Counter, RProgram

#: Words before the waits of an entry.
HEAD = 4
#: Bits of a kernel's number in the run word.
KERNEL_BITS = 12
#: Maximum signals of a task: those of a warp.
MOST_SIGNALS = 32
#: Words that a thread copies at once; entries are multiples of it.
COPY = 4


@dataclass(frozen=True, slots=True)
class EntryForm:
    """Sizes common to all entries: the maximum waits, signals and pointers."""

    waits: int
    signals: int
    pointers: int

    @property
    def signal_at(self) -> int:
        """The first word of the signals."""
        return HEAD + 3 * self.waits

    @property
    def pointer_at(self) -> int:
        """The first word of the pointers, even since they are two words each."""
        return -(-(self.signal_at + 2 * self.signals) // 2) * 2

    @property
    def words(self) -> int:
        """The number of words of an entry."""
        return -(-(self.pointer_at + 2 * self.pointers) // COPY) * COPY


@dataclass(frozen=True, slots=True)
class RowTable:
    """The entries of all rows in order (``entries[order]``), and the runs of each row.

    A run is ``(kernel, first entry, entries)``: consecutive tasks of one kernel that read the same static operands at the same
    task index. The constants that the kernel holds on chip thus stay valid. ``runs[first[v] : first[v + 1]]`` are row v's, and
    its entries begin at ``rows[v]``.
    """

    form: EntryForm
    entries: NDArray[np.uint32]
    runs: NDArray[np.int32]
    first: NDArray[np.int32]
    rows: NDArray[np.int32]
    counters: tuple[Counter, ...]


def make_table(
    program: RProgram, kernel_of: Mapping[str, int], pointers: Mapping[str, Sequence[int]], held: Mapping[str, tuple[object, ...]]
) -> RowTable:
    """Return the table of ``program``. The arguments are by operator: its kernel's number, its pointers, and the identity of the
    constants that the kernel holds on chip (() without any)."""
    number = {c.name: i for i, c in enumerate(program.counters)}
    tasks = [t for row in program.rows for t in row]
    waits = [(entry, i, number[w.counter], w.threshold) for entry, t in enumerate(tasks) for i, w in enumerate(t.waits)]
    signals = _collect_signals(program)
    form = EntryForm(
        max((w[1] + 1 for w in waits), default=0),
        max((s[1] + 1 for s in signals), default=0),
        max(map(len, pointers.values()), default=0),
    )
    if form.signals > MOST_SIGNALS:
        raise DeviceFailure(f"a task has {form.signals} signals, but the persistent kernel supports {MOST_SIGNALS}")
    entries = np.zeros((len(tasks), form.words), np.uint32)
    place = {o.name: i for i, o in enumerate(program.operators)}
    operator = np.array([place[t.operator] for t in tasks], np.int64)
    entries[:, 0] = [t.index for t in tasks]
    entries[:, 1] = [len(t.waits) for t in tasks]
    signalling, which, counted, amount = np.array(signals, np.int64).reshape(-1, 4).T
    np.add.at(entries[:, 2], signalling, 1)
    entries[signalling, form.signal_at + 2 * which], entries[signalling, form.signal_at + 2 * which + 1] = counted, amount
    waiting, which, awaited, threshold = np.array(waits, np.int64).reshape(-1, 4).T
    totals = np.array([c.total for c in program.counters], np.int64)
    for word, values in enumerate((awaited, threshold, totals[awaited])):
        entries[waiting, HEAD + 3 * which + word] = values
    words = np.zeros((len(place), form.pointers), np.uint64)
    for name, addresses in pointers.items():
        words[place[name], : len(addresses)] = addresses
    entries[:, form.pointer_at : form.pointer_at + 2 * form.pointers] = words.view(np.uint32)[operator]
    runs, first = _group_runs(program, entries[:, 0].astype(np.int64), operator, kernel_of, held)
    if runs[:, 0].max(initial=0) >> KERNEL_BITS or runs[:, 2].max(initial=0) >> 32 - KERNEL_BITS:
        raise DeviceFailure("the program has more kernels, or tasks in a row, than the persistent kernel supports")
    entries[runs[:, 1], 3] = runs[:, 0] | runs[:, 2] << KERNEL_BITS
    rows = np.cumsum([0, *map(len, program.rows)], dtype=np.int32)
    return RowTable(form, entries, runs, first, rows, program.counters)


def _collect_signals(program: RProgram) -> list[tuple[int, int, int, int]]:
    """Return (entry, index of its signal, counter, number of finished tasks) of all rows in order."""
    feeds: dict[str, list[tuple[int, Counter]]] = {}
    for i, counter in enumerate(program.counters):
        feeds.setdefault(counter.operator, []).append((i, counter))
    totals = {c.name: c.total for c in program.counters}
    early = {w.counter for row in program.rows for t in row for w in t.waits if w.threshold != totals[w.counter]}
    result, entry = list[tuple[int, int, int, int]](), 0
    for row in program.rows:
        fed = [[(i, c) for i, c in feeds.get(t.operator, ()) if c.first <= t.index < c.last] for t in row]
        last = {i: n for n, some in enumerate(fed) for i, _ in some}
        count = Counting(i for some in fed for i, _ in some)
        for n, some in enumerate(fed):
            said = [(i, 1 if c.name in early else count[i]) for i, c in some if c.name in early or last[i] == n]
            result += [(entry + n, which, i, amount) for which, (i, amount) in enumerate(said)]
        entry += len(row)
    return result


def _group_runs(
    program: RProgram,
    index: NDArray[np.int64],
    operator: NDArray[np.int64],
    kernel_of: Mapping[str, int],
    held: Mapping[str, tuple[object, ...]],
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return the runs of tasks and each row's first run; ``operator`` has each task's operator index, row after row."""
    kernels = np.array([kernel_of[o.name] for o in program.operators], np.int64)
    alike: dict[object, int] = {}
    kind = np.array([alike.setdefault((kernel_of[o.name], held[o.name]), len(alike)) for o in program.operators], np.int64)
    holds = np.array([bool(held[o.name]) for o in program.operators], bool)
    keys = np.stack([kind[operator], np.where(holds[operator], index, -1)])
    rows = np.cumsum([0, *map(len, program.rows)])
    fresh = np.ones(len(operator) + 1, bool)
    fresh[1:-1] = (keys[:, 1:] != keys[:, :-1]).any(axis=0)
    fresh[rows] = True
    begins = np.flatnonzero(fresh)
    runs = np.stack([kernels[operator[begins[:-1]]], begins[:-1], np.diff(begins)], axis=1)
    return runs.astype(np.int32), np.searchsorted(begins, rows).astype(np.int32)
