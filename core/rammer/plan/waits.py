"""Who waits for whom: data dependences from addresses, reduced to the waits that each row needs.

A task waits on counters, and a counter counts the finished tasks of one operator. A wait is left out where the task's
row already knows: from what it ran and waited for, and from what those whom it waited for had run and waited for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rammer.ir.collector import collector_paused
from rammer.ir.operator import ROperator
from rammer.ir.past import Past
from rammer.ir.program import Counter, Storage, Task
from rammer.plan.overlap import Shared, overlap
from rammer.plan.placing import Placing
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
    placing = Placing(schedule.rows, order, tasks)
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
