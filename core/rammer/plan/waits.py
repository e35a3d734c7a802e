"""Who waits for whom: data dependences from addresses, reduced to the waits that each row needs.

A task waits on counters, and a counter counts the finished tasks of one operator. A wait is left out where the task's
row already knows: from what it ran and waited for, and from what those whom it waited for had run and waited for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np

from rammer.ir.clocks import Ints
from rammer.ir.collector import collector_paused
from rammer.ir.operator import ROperator
from rammer.ir.past import Past
from rammer.ir.program import Counter, Storage, Task, Wait
from rammer.plan.overlap import Shared, overlap
from rammer.schedule.policy import Schedule


@dataclass(frozen=True)
class Order:
    """Operators that run tasks, in topological order, with happens-before as sets.

    Where ``i`` is in ``before[j]``, every task of ``names[i]`` ends before any task of ``names[j]``
    starts; ``needs[j]`` are the direct predecessors that no other one implies.
    """

    names: tuple[str, ...]
    needs: tuple[tuple[int, ...], ...]
    before: tuple[Past, ...]


@dataclass(frozen=True)
class Waits:
    """Rows with their waits, the counters those use, and the order that they enforce."""

    counters: tuple[Counter, ...]
    rows: tuple[tuple[Task, ...], ...]
    order: Order


def dependences(operators: Iterable[ROperator], storages: Mapping[str, Storage]) -> dict[str, tuple[str, ...]]:
    """For each operator those that write an element which it reads, in topological order.

    ``operators`` come in topological order. Raises ValueError when an operator reads a tensor without a
    storage, or one that only a later operator writes.
    """
    written: dict[str, Shared] = {}
    listed = list(operators)
    for op in listed:
        for tensor in op.outputs:
            storage = _storage(storages, tensor, op.name)
            written.setdefault(storage.buffer, Shared()).add(op.name, storage)
    place = {op.name: i for i, op in enumerate(listed)}
    cached: dict[tuple[Storage, Storage], bool] = {}
    result: dict[str, tuple[str, ...]] = {}
    for op in listed:
        found: set[str] = set()
        for tensor in op.inputs:
            read = _storage(storages, tensor, op.name)
            for writer, target in written[read.buffer].near(read) if read.buffer in written else ():
                if writer not in found and writer != op.name and _overlap(read, target, cached):
                    found.add(writer)
        late = [w for w in found if place[w] > place[op.name]]
        if late:
            raise ValueError(f"operator {op.name} reads what the later operator {min(late)} writes")
        result[op.name] = tuple(sorted(found, key=place.__getitem__))
    return result


def _overlap(a: Storage, b: Storage, cached: dict[tuple[Storage, Storage], bool]) -> bool:
    if (a, b) not in cached:
        cached[a, b] = overlap(a, b)
    return cached[a, b]


def _storage(storages: Mapping[str, Storage], tensor: str, operator: str) -> Storage:
    if tensor not in storages:
        raise ValueError(f"operator {operator} uses tensor {tensor}, which has no storage")
    return storages[tensor]


@collector_paused()
def plan_waits(schedule: Schedule, storages: Mapping[str, Storage]) -> Waits:
    """Counters and waits for a schedule: one counter for each operator that somebody waits for."""
    operators = stage_order(schedule)
    order = operator_order(schedule, dependences(operators, storages))
    tasks = {op.name: op.task_count for op in operators}
    placing = _Placing(schedule.rows, order, tasks)
    rows = placing.place()
    counters = tuple(Counter(n, n, 0, tasks[n]) for i, n in enumerate(order.names) if i in placing.used)
    return Waits(counters, rows, order)


def stage_order(schedule: Schedule) -> tuple[ROperator, ...]:
    """The chosen operators, stage by stage. Raises ValueError if the stages do not list each one once."""
    chosen = {k.operator.name: k.operator for k in schedule.kernels}
    names = [name for stage in schedule.stages for name in stage]
    if sorted(names) != sorted(chosen) or len(chosen) != len(schedule.kernels):
        raise ValueError(f"stages list {len(names)} operators, kernels are chosen for {len(schedule.kernels)}")
    return tuple(chosen[name] for name in names)


def operator_order(schedule: Schedule, after: Mapping[str, tuple[str, ...]]) -> Order:
    """Happens-before among the operators that have tasks: data dependences, and barriers where asked."""
    tasks = {k.operator.name: k.operator.task_count for k in schedule.kernels}
    stages = [[n for n in stage if tasks[n]] for stage in schedule.stages]
    names = [name for stage in stages for name in stage]
    number = {name: i for i, name in enumerate(names)}
    fences = _fences(stages) if schedule.barriers else {}
    needs: list[tuple[int, ...]] = []
    before: list[Past] = []
    for name in names:
        direct = {number[p] for p in (*after[name], *fences.get(name, ())) if p in number}
        needed, known = [], Past()
        for p in sorted(direct, reverse=True):  # latest first: it may imply the others
            if p not in known:
                needed.append(p)
                known = (known | before[p]).having(p)
        needs.append(tuple(needed))
        before.append(known)
    return Order(tuple(names), tuple(needs), tuple(before))


def _fences(stages: Sequence[Sequence[str]]) -> dict[str, Sequence[str]]:
    """The whole previous stage, for every operator of a later one. A stage without tasks fences nothing."""
    filled = [stage for stage in stages if stage]
    return {name: earlier for earlier, later in pairwise(filled) for name in later}


class _Placing:
    """Rows advance together, each as far as the operators that its next run of tasks needs have been placed whole.

    ``now[v]`` is row v's vector clock (see ``ir.clocks``): of each row, the tasks that have certainly finished.
    ``done[o, v]`` is the position after operator o's last task on row v, ``finished[o]`` what whoever waits for all of
    o knows then: what each of its rows knew when it ran its last task of o.
    """

    def __init__(self, rows: Sequence[Sequence[tuple[str, int]]], order: Order, tasks: Mapping[str, int]) -> None:
        number = {name: i for i, name in enumerate(order.names)}
        self.order = order
        self.runs = [[(number[name], indices) for name, indices in _runs(row)] for row in rows]
        self.totals = [tasks[name] for name in order.names]
        self.left = list(self.totals)
        self.wait = [Wait(name, total) for name, total in zip(order.names, self.totals, strict=True)]
        shape = (len(order.names), len(rows))
        self.done, self.finished = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        self.now = np.zeros((len(rows), len(rows)), np.int32)
        for veu, row in enumerate(self.runs):
            place = 0
            for me, indices in row:
                place += len(indices)
                self.done[me, veu] = place
        hosts = [np.flatnonzero(done) for done in self.done]
        self.witnesses = [[(int(v), int(self.done[o, v])) for v in {*h[:1], *h[-1:]}] for o, h in enumerate(hosts)]
        self.placed = [list[Task]() for _ in rows]
        self.cursor = [0] * len(rows)
        self.known = [Past()] * len(rows)  # operators that a row knows to be finished: cheaper to ask
        self.waiting: dict[int, list[int]] = {}
        self.used: set[int] = set()

    def place(self) -> tuple[tuple[Task, ...], ...]:
        """All rows with their waits. Where rows can never meet, whatever they need is waited for: ``verify`` tells."""
        ready = deque(range(len(self.runs)))
        while ready:
            self._advance(ready.popleft(), ready)
        for veu, row in enumerate(self.runs):
            for me, indices in row[self.cursor[veu] :]:
                self._append(veu, me, indices, sorted(self.order.needs[me]))
        return tuple(map(tuple, self.placed))

    def _advance(self, veu: int, ready: deque[int]) -> None:
        row, now = self.runs[veu], self.now[veu]
        while self.cursor[veu] < len(row):
            me, indices = row[self.cursor[veu]]
            blocked = next((p for p in self.order.needs[me] if self.left[p]), None)
            if blocked is not None:
                self.waiting.setdefault(blocked, []).append(veu)
                return
            self._append(veu, me, indices, self._waits(veu, me))
            self.cursor[veu] += 1
            now[veu] += len(indices)
            np.maximum(self.finished[me], now, out=self.finished[me])
            self.left[me] -= len(indices)
            if not self.left[me]:
                ready.extend(self.waiting.pop(me, ()))

    def _waits(self, veu: int, me: int) -> list[int]:
        """The operators that row ``veu`` must wait for before it runs ``me``; notes what it knows afterwards."""
        missing = [p for p in self.order.needs[me] if p not in self.known[veu]]
        if not missing:
            return missing
        now, chosen = self.now[veu], list[int]()
        before = now.copy() if len(missing) > 1 else now
        for p in missing:  # latest first: it may imply the others
            if not self._implied(p, (now,)):
                chosen.append(p)
                np.maximum(now, self.finished[p], out=now)
        self.known[veu] |= self.order.before[me]
        for p in chosen[:-1]:  # or a later one of the list implies it after all
            if self._implied(p, (before, *(self.finished[q] for q in chosen if q != p))):
                chosen.remove(p)
        return sorted(chosen)

    def _implied(self, p: int, clocks: Sequence[Ints]) -> bool:
        """Whether a row that knows all that these clocks say knows all of operator ``p`` to be finished."""
        for veu, place in self.witnesses[p]:  # mostly one row tells, without a look at all of them
            if all(place > clock[veu] for clock in clocks):
                return False
        known = clocks[0] if len(clocks) == 1 else np.maximum.reduce(clocks)
        return not (self.done[p] > known).any()

    def _append(self, veu: int, me: int, indices: Sequence[int], waits: Sequence[int]) -> None:
        """Place a run, of which the first task waits."""
        name = self.order.names[me]
        self.used.update(waits)
        row = self.placed[veu]
        row.append(Task(name, indices[0], tuple([self.wait[p] for p in waits])))
        row += [Task(name, index) for index in indices[1:]]


def _runs(row: Sequence[tuple[str, int]]) -> Iterator[tuple[str, list[int]]]:
    for name, group in groupby(row, key=lambda item: item[0]):
        yield name, [index for _, index in group]
