"""Wait planning: data dependences from addresses, reduced to the waits that each row needs.

A task waits on counters, and a counter counts the finished tasks of one operator. A wait is omitted if the row's earlier tasks
and waits already imply it, transitively. Rows before the same operator are processed together, so that the time grows with
operators, not with tasks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import groupby, pairwise, repeat
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from rammer.ir.collector import collector_paused
from rammer.ir.operator import ROperator
from rammer.ir.overlap import Shared, has_overlap
from rammer.ir.prefix_set import PrefixSet
from rammer.ir.program import Counter, Storage, Task, Wait
from rammer.ir.task_arrays import Longs
from rammer.schedule.policy import Schedule
from rammer.verify.happens_before import Ints


@dataclass(frozen=True)
class Order:
    """Operators that run tasks, in topological order, with happens-before as sets.

    If ``i`` is in ``before[j]``, every task of ``names[i]`` ends before any task of ``names[j]`` starts. ``needs[j]`` are the
    direct predecessors that are not implied by another one."""

    names: tuple[str, ...]
    needs: tuple[tuple[int, ...], ...]
    before: tuple[PrefixSet, ...]


@dataclass(frozen=True)
class Waits:
    """Rows with their waits, the counters that these use, and the order that they enforce."""

    counters: tuple[Counter, ...]
    rows: tuple[tuple[Task, ...], ...]
    order: Order


def find_dependences(operators: Iterable[ROperator], storages: Mapping[str, Storage]) -> dict[str, tuple[str, ...]]:
    """Return for each operator those that write an element that it reads, in topological order. ``operators`` are in topological
    order. Raises ValueError if an operator reads a tensor without a storage, or one that only a later operator writes."""
    written: dict[str, Shared] = {}
    listed = list(operators)
    for op in listed:
        for tensor in op.outputs:
            storage = _require_storage(storages, tensor, op.name)
            written.setdefault(storage.buffer, Shared()).add(op.name, storage)
    place = {op.name: i for i, op in enumerate(listed)}
    cached: dict[tuple[Storage, Storage], bool] = {}
    result: dict[str, tuple[str, ...]] = {}
    for op in listed:
        found: set[str] = set()
        for tensor in op.inputs:
            read = _require_storage(storages, tensor, op.name)
            for writer, target in written[read.buffer].near(read) if read.buffer in written else ():
                if writer not in found and writer != op.name and _has_overlap(read, target, cached):
                    found.add(writer)
        late = [w for w in found if place[w] > place[op.name]]
        if late:
            raise ValueError(f"operator {op.name} reads what the later operator {min(late)} writes")
        result[op.name] = tuple(sorted(found, key=place.__getitem__))
    return result


def _has_overlap(a: Storage, b: Storage, cached: dict[tuple[Storage, Storage], bool]) -> bool:
    if (a, b) not in cached:
        cached[a, b] = has_overlap(a, b)
    return cached[a, b]


def _require_storage(storages: Mapping[str, Storage], tensor: str, operator: str) -> Storage:
    if tensor not in storages:
        raise ValueError(f"operator {operator} uses tensor {tensor}, which has no storage")
    return storages[tensor]


@collector_paused()
def plan_waits(schedule: Schedule, storages: Mapping[str, Storage]) -> Waits:
    """Return counters and waits for a schedule: one counter for each operator that is waited for."""
    operators = stage_order(schedule)
    order = operator_order(schedule, find_dependences(operators, storages))
    tasks = {op.name: op.task_count for op in operators}
    placing = Placing(schedule.rows, order, tasks)
    rows = placing.place()
    counters = tuple(Counter(n, n, 0, tasks[n]) for i, n in enumerate(order.names) if i in placing.used)
    return Waits(counters, rows, order)


def stage_order(schedule: Schedule) -> tuple[ROperator, ...]:
    """Return the chosen operators, stage by stage. Raises ValueError if the stages do not list each one once."""
    chosen = {k.operator.name: k.operator for k in schedule.kernels}
    names = [name for stage in schedule.stages for name in stage]
    if sorted(names) != sorted(chosen) or len(chosen) != len(schedule.kernels):
        raise ValueError(f"stages list {len(names)} operators, kernels are chosen for {len(schedule.kernels)}")
    return tuple(chosen[name] for name in names)


def operator_order(schedule: Schedule, after: Mapping[str, tuple[str, ...]]) -> Order:
    """Return happens-before among operators that have tasks: data dependences, and barriers if requested."""
    tasks = {k.operator.name: k.operator.task_count for k in schedule.kernels}
    stages = [[n for n in stage if tasks[n]] for stage in schedule.stages]
    names = [name for stage in stages for name in stage]
    number = {name: i for i, name in enumerate(names)}
    fences = _stage_fences(stages) if schedule.barriers else {}
    needs: list[tuple[int, ...]] = []
    before: list[PrefixSet] = []
    for name in names:
        direct = {number[p] for p in (*after[name], *fences.get(name, ())) if p in number}
        needed, known = [], PrefixSet()
        for p in sorted(direct, reverse=True):  # latest first: it may imply the others
            if p not in known:
                needed.append(p)
                known = (known | before[p]).having(p)
        needs.append(tuple(needed))
        before.append(known)
    return Order(tuple(names), tuple(needs), tuple(before))


def _stage_fences(stages: Sequence[Sequence[str]]) -> dict[str, Sequence[str]]:
    """Return the previous stage with tasks as predecessors of every operator of a later stage."""
    filled = [stage for stage in stages if stage]
    return {name: earlier for earlier, later in pairwise(filled) for name in later}


Flags: TypeAlias = "NDArray[np.bool_]"
Rows: TypeAlias = "Sequence[Sequence[tuple[str, int]]]"


@dataclass(frozen=True)
class _Ends:
    """End positions of operators. ``done[o, v]`` is the position after operator o's last task on row v. ``rows[o]`` are the first
    and last row that run o, and ``places[o]`` their positions. These usually decide without a scan of all rows."""

    done: Ints
    rows: Longs
    places: Ints

    @staticmethod
    def of(done: Ints) -> _Ends:
        here = done > 0
        rows = np.stack([here.argmax(axis=1), done.shape[1] - 1 - here[:, ::-1].argmax(axis=1)], axis=1)
        return _Ends(done, rows, np.take_along_axis(done, rows, axis=1))

    def implied(self, ps: Longs, known: Ints, told: Ints, beyond: Ints) -> Flags:
        """Return an array (row, operator of ``ps``) that is True if the operator has surely ended for the clocks ``known``.

        The operators are checked in order. Each check also uses ``beyond[i]`` and the clocks ``told`` of earlier operators that
        are not implied."""
        most = beyond.copy()
        np.maximum(most[1:], np.maximum.accumulate(told[:-1], axis=0), out=most[1:])
        found = np.ones((len(known), len(ps)), bool)
        for rows, places in zip(self.rows[ps].T, self.places[ps].T, strict=True):
            found &= np.maximum(known[:, rows], most[np.arange(len(ps)), rows]) >= places
        asked = np.flatnonzero(found.any(axis=0))
        if not len(asked):
            return found
        known, begin = known.copy(), 0
        for i in asked.tolist():
            if i > begin:
                np.maximum(known, told[begin:i].max(axis=0), out=known)
            rows = np.flatnonzero(found[:, i])
            found[rows, i] = (np.maximum(known[rows], beyond[i]) >= self.done[ps[i]]).all(axis=1)
            lacking = ~found[:, i]
            known[lacking] = np.maximum(known[lacking], told[i])
            begin = i + 1
        return found


class Placing:
    """Placement of rows: a row advances when the operators that its next run of tasks needs are placed completely.

    Rows that are ready before the first operator advance together. The waits of a row do not depend on this order.

    ``now[v]`` is row v's vector clock (see ``verify.happens_before``): the number of tasks of each row that have certainly
    finished. ``finished[o]`` is the clock after waiting for all of operator o: the maximum over its rows at their last task of o.
    ``knows[o, v]`` is True if row v waited for operator o or derived that it has finished.
    """

    def __init__(self, rows: Rows, order: Order, tasks: Mapping[str, int]) -> None:
        number = {name: i for i, name in enumerate(order.names)}
        self.order = order
        self.runs = [[(number[name], indices) for name, indices in _runs(row)] for row in rows]
        self.left = [tasks[name] for name in order.names]
        self.wait = [Wait(name, total) for name, total in zip(order.names, self.left, strict=True)]
        shape = (len(order.names), len(rows))
        done = np.zeros(shape, np.int32)
        for veu, row in enumerate(self.runs):
            place = 0
            for me, indices in row:
                place += len(indices)
                done[me, veu] = place
        self.ends = _Ends.of(done) if done.size else _Ends(done, *np.zeros((2, 0, 2), np.int32))
        self.finished, self.knows = np.zeros(shape, np.int32), np.zeros(shape, bool)
        self.now = np.zeros((len(rows), len(rows)), np.int32)
        self.needs = [np.array(needs, np.int64) for needs in order.needs]
        self.lacking = list(map(len, order.needs))
        self.feeds: list[list[int]] = [[] for _ in order.names]
        for me, needs in enumerate(order.needs):
            for p in needs:
                self.feeds[p].append(me)
        self.placed = [list[Task]() for _ in rows]
        self.cursor = [0] * len(rows)
        self.at: list[list[int]] = [[] for _ in order.names]  # rows before each operator
        self.ready: list[int] = []  # a heap of operators with ready rows, in order
        self.used: set[int] = set()

    def place(self) -> tuple[tuple[Task, ...], ...]:
        """Return all rows with their waits. Rows in a deadlock wait for all their needs; ``verify`` reports it."""
        for veu in range(len(self.runs)):
            self._arrive_at_run(veu)
        while self.ready:
            me = heappop(self.ready)
            veus, self.at[me] = self.at[me], []
            self.together(me, veus)
            if not self.left[me]:
                for reader in self.feeds[me]:
                    self.lacking[reader] -= 1
                    if not self.lacking[reader] and self.at[reader]:
                        heappush(self.ready, reader)
            for veu in veus:
                self.cursor[veu] += 1
                self._arrive_at_run(veu)
        for veu, row in enumerate(self.runs):
            for me, indices in row[self.cursor[veu] :]:
                self._append_run(veu, me, indices, self._make_waits(self.needs[me]))
        return tuple(map(tuple, self.placed))

    def _arrive_at_run(self, veu: int) -> None:
        """Queue row ``veu`` before its next run."""
        if self.cursor[veu] < len(self.runs[veu]):
            me = self.runs[veu][self.cursor[veu]][0]
            if not self.lacking[me] and not self.at[me]:
                heappush(self.ready, me)
            self.at[me].append(veu)

    def together(self, me: int, veus: Sequence[int]) -> None:
        """Append the runs of ``me`` of these rows; the first task of each has the waits."""
        rows = np.array(veus)
        now = self.now[rows]
        waits = self._plan_waits(me, rows, now)
        for veu, wait in zip(veus, waits, strict=True):
            self._append_run(veu, me, self.runs[veu][self.cursor[veu]][1], wait)
        now[np.arange(len(veus)), rows] = [len(self.placed[veu]) for veu in veus]
        self.now[rows] = now
        np.maximum(self.finished[me], now.max(axis=0), out=self.finished[me])
        self.left[me] -= sum([len(self.runs[veu][self.cursor[veu]][1]) for veu in veus])

    def _plan_waits(self, me: int, rows: Longs, now: Ints) -> Sequence[tuple[Wait, ...]]:
        """Return the waits of each of ``rows`` before ``me``, and advance ``now`` to the clocks after them."""
        result: list[tuple[Wait, ...]] = [()] * len(rows)
        needs = self.needs[me]
        for asked, group in _alike(~self.knows[needs][:, rows].T):
            ps, before = needs[asked], now[group]
            told = self.finished[ps]
            missing = ~self.ends.implied(ps, before, told, np.zeros_like(told))  # latest first: it may imply the others
            for chosen, members in _alike(missing):
                mine, said, tell = group[members], ps[chosen], told[chosen]
                now[mine] = np.maximum(now[mine], tell.max(axis=0))
                for kept, few in _alike(self._not_spared(said, before[members], tell)):
                    waits = self._make_waits(said[kept])
                    for i in mine[few].tolist():
                        result[i] = waits
            self.knows[ps[:, None], rows[group]] = True
        return result

    def _not_spared(self, ps: Longs, before: Ints, told: Ints) -> Flags:
        """Return an array (row, operator of ``ps``) that is True if the wait stays necessary after the later ones."""
        later = np.zeros_like(told)
        later[:-1] = np.maximum.accumulate(told[:0:-1], axis=0)[::-1]
        return ~self.ends.implied(ps, before, told, later)

    def _make_waits(self, ps: Longs) -> tuple[Wait, ...]:
        """Return the waits for operators, and mark them as used."""
        numbers = sorted(ps.tolist())
        self.used.update(numbers)
        return tuple([self.wait[p] for p in numbers])

    def _append_run(self, veu: int, me: int, indices: Sequence[int], waits: tuple[Wait, ...]) -> None:
        """Append a run whose first task waits."""
        name, row = self.order.names[me], self.placed[veu]
        row.append(Task(name, indices[0], waits))
        if len(indices) > 1:
            row += map(Task, repeat(name), indices[1:])


def _alike(flags: Flags) -> Iterator[tuple[Longs, Longs]]:
    """Yield the set columns of each group of equal rows, and the rows; groups without set columns are skipped."""
    if not flags.any():
        return
    if (flags == flags[0]).all():
        yield np.flatnonzero(flags[0]), np.arange(len(flags))
        return
    groups: dict[bytes, list[int]] = {}
    for i, row in enumerate(flags):
        groups.setdefault(row.tobytes(), []).append(i)
    for members in groups.values():
        columns = np.flatnonzero(flags[members[0]])
        if len(columns):
            yield columns, np.array(members)


def _runs(row: Sequence[tuple[str, int]]) -> Iterator[tuple[str, list[int]]]:
    for name, group in groupby(row, key=lambda item: item[0]):
        yield name, [index for _, index in group]
