"""Launches of an RProgram: the grouping of tasks, and the dependencies between launches.

A launch is the tasks of one operator in one wave. Edges come from the program's waits and from memory. Two launches that touch
the same bytes keep the program's order if one of them writes. All other launches may run at the same time, so parallel branches
of a model stay parallel.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from rammer.errors import DeviceFailure
from rammer.ir.overlap import has_overlap
from rammer.ir.program import RProgram, Storage, WaveTask, waves
from rammer.ir.types import itemsize

__all__ = ["Launch", "decode_plan", "encode_plan", "first_consecutive", "make_launches", "reduce_edges"]


@dataclass(frozen=True, slots=True)
class Launch:
    """``tasks`` of ``operator``, after the launches whose positions are in ``after``. A launch of several operators has a
    combined name and combined task numbers; ``parts`` lists the operators with their tasks."""

    operator: str
    tasks: tuple[int, ...]
    after: tuple[int, ...]
    parts: tuple[tuple[str, tuple[int, ...]], ...] = ()


def make_launches(program: RProgram) -> list[Launch]:
    """Return launches in a legal order. Raises DeviceFailure if the program's rows interleave two dependent operators."""
    placed = waves(program)
    ranges = _Ranges(program)
    groups = [group for number, wave in enumerate(placed) for group in _wave_groups(program, ranges, number, wave)]
    index = {(g.wave, g.operator): i for i, g in enumerate(groups)}
    needs = _awaited_launches(program, placed, index)
    _add_memory_edges(ranges, groups, needs)
    return _join_launches(groups, reduce_edges(needs))


#: An operator and the predecessors of its launch.
_Key: TypeAlias = tuple[str, tuple[int, ...]]


def _join_launches(groups: Sequence[_Together], direct: Sequence[tuple[int, ...]]) -> list[Launch]:
    """Return the launches of ``groups``, one for all groups of an operator with the same predecessors. A row that ran the only
    predecessor needs no wait, so its tasks are in an earlier wave than those of other rows."""
    place, index, result = list[int](), dict[_Key, int](), dict[_Key, list[int]]()
    for group, before in zip(groups, direct, strict=True):
        key = group.operator, tuple(sorted({place[i] for i in before}))
        result.setdefault(key, []).extend(group.tasks)
        place.append(index.setdefault(key, len(index)))
    return [Launch(name, tuple(sorted(tasks)), after) for (name, after), tasks in result.items()]


def encode_plan(plan: Sequence[Launch]) -> list[list[object]]:
    """Return a plan as JSON data, which ``decode_plan`` reads. Launches of several operators lose their parts."""
    return [
        [x.operator, [x.tasks[0], len(x.tasks)] if first_consecutive(x.tasks) is not None else [*x.tasks, None], x.after]
        for x in plan
    ]


def decode_plan(record: Any, program: RProgram) -> list[Launch]:
    """Decode a cached plan. Raises ValueError or a similar error unless it launches every task once, after earlier launches."""
    plan = [Launch(operator, _decode_tasks(tasks, program.task_count), tuple(after)) for operator, tasks, after in record]
    found: dict[str, set[int]] = {}
    for place, launch in enumerate(plan):
        found.setdefault(launch.operator, set()).update(launch.tasks)
        if not all(0 <= before < place for before in launch.after):
            raise ValueError(f"launch {place} waits for a later launch")
    wanted = {o.name: o.task_count for o in program.operators if o.task_count}
    if {n: len(tasks) for n, tasks in found.items()} != wanted or sum(len(x.tasks) for x in plan) != program.task_count:
        raise ValueError("not every task is launched once")
    if any(min(tasks) < 0 or max(tasks) >= wanted[n] for n, tasks in found.items()):
        raise ValueError("a launch has unknown tasks")
    return plan


def _decode_tasks(listed: list[int], most: int) -> tuple[int, ...]:
    """Return tasks from [first, number], with ``number`` of at most ``most``, or from a list that ends in None."""
    if listed[-1] is not None and not 0 <= listed[1] <= most:
        raise ValueError(f"a launch has {listed[1]} tasks")
    return tuple(listed[:-1]) if listed[-1] is None else tuple(range(listed[0], listed[0] + listed[1]))


@dataclass(frozen=True, slots=True)
class _Together:
    wave: int
    operator: str
    tasks: list[int]


def _wave_groups(program: RProgram, ranges: _Ranges, number: int, wave: list[WaveTask]) -> list[_Together]:
    """Return one wave's operators with their tasks, dependent ones in the order of every row."""
    tasks: dict[str, list[int]] = {}
    before: dict[str, set[str]] = {}
    rows: dict[int, list[str]] = {}
    for placed in wave:
        name = placed.task.operator
        tasks.setdefault(name, []).append(placed.task.index)
        row = rows.setdefault(placed.veu, [])
        if name not in row[-1:]:
            before.setdefault(name, set()).update(row)
            row.append(name)
    pending = {n: {p for p in before.get(n, ()) if p != n and ranges.conflict(p, n)} for n in tasks}
    result: list[_Together] = []
    while pending:
        ready = [n for n in pending if not pending[n] & pending.keys()]
        if not ready:
            raise DeviceFailure(
                f"rows interleave tasks of dependent operators {', '.join(pending)} without waits",
                where=f"program {program.name}, wave {number}",
                hint="schedule with a built-in policy",
            )
        for name in ready:
            result.append(_Together(number, name, tasks[name]))
            del pending[name]
    return result


def _awaited_launches(program: RProgram, placed: list[list[WaveTask]], index: dict[tuple[int, str], int]) -> list[int]:
    """Return the bit set of launches that the rows of each launch have waited for."""
    wave_of = {(t.task.operator, t.task.index): t.wave for wave in placed for t in wave}
    contributing = {
        c.name: _to_bit_set({index[wave_of[c.operator, t], c.operator] for t in range(c.first, c.last)}) for c in program.counters
    }
    needs = [0] * len(index)
    for row in program.rows:
        waited = 0
        for task in row:
            for wait in task.waits:
                waited |= contributing[wait.counter]
            mine = index[wave_of[task.operator, task.index], task.operator]
            needs[mine] |= waited & ~(1 << mine)
    return needs


def _add_memory_edges(ranges: _Ranges, groups: list[_Together], needs: list[int]) -> None:
    """Add an edge for every unordered pair that touches the same bytes, if one of them writes."""
    accesses = _Accesses(ranges, groups)
    reach: list[int] = []
    for later in range(len(groups)):
        before = _transitive_closure(needs[later], reach)
        for earlier in accesses.candidates(later):
            if not before >> earlier & 1 and accesses.conflict(earlier, later):
                needs[later] |= 1 << earlier
                before |= reach[earlier] | 1 << earlier
        reach.append(before)


@dataclass(frozen=True, slots=True)
class _Access:
    """A tensor of an operator: its storage and half-open byte range."""

    storage: Storage
    low: int
    high: int
    writes: bool


class _Ranges:
    """Byte ranges that each operator reads and writes, in one address space. The arena comes first, then every other buffer in a
    separate range."""

    def __init__(self, program: RProgram) -> None:
        self.program = program
        base = program.arena_bytes
        self.base: dict[str, int] = {}
        for b in program.buffers:
            self.base[b.name] = b.offset if b.kind == "arena" else base
            base += 0 if b.kind == "arena" else b.nbytes + 1
        self.of = {
            o.name: [self._make_access(t, t in o.outputs) for t in dict.fromkeys((*o.inputs, *o.outputs))]
            for o in program.operators
        }
        self.known: dict[tuple[str, str], bool] = {}

    def _make_access(self, tensor: str, writes: bool) -> _Access:
        storage = self.program.storage[tensor]
        item = itemsize(self.program.buffer[storage.buffer].dtype)
        low, high = storage.span()
        base = self.base[storage.buffer]
        return _Access(storage, base + low * item, base + high * item, writes)

    def conflict(self, earlier: str, later: str) -> bool:
        """Return True if the operators touch common elements and at least one of them writes there. Tasks of one operator are
        independent."""
        pair = earlier, later
        if pair not in self.known:
            self.known[pair] = earlier != later and any(
                (a.writes or b.writes) and a.low < b.high and b.low < a.high and _has_shared_element(a.storage, b.storage)
                for a in self.of[earlier]
                for b in self.of[later]
            )
        return self.known[pair]


def _has_shared_element(a: Storage, b: Storage) -> bool:
    """Return True if two storages whose byte ranges overlap share an element; exact within one buffer."""
    return a.buffer != b.buffer or has_overlap(a, b)


class _Accesses:
    """The byte ranges of every launch."""

    def __init__(self, ranges: _Ranges, groups: list[_Together]) -> None:
        self.ranges, self.operators = ranges, [g.operator for g in groups]
        rows = [(number, a.low, a.high, a.writes) for number, name in enumerate(self.operators) for a in ranges.of[name]]
        self.launch, self.low, self.high = (np.array([r[i] for r in rows], np.int64) for i in range(3))
        self.writes = np.array([r[3] for r in rows], bool)

    def candidates(self, later: int) -> list[int]:
        """Return earlier launches, latest first, with a byte range that overlaps one of ``later``'s, if one of them writes."""
        first, end = np.searchsorted(self.launch, [later, later + 1])
        found: set[int] = set()
        for i in range(first, end):
            meets = (self.low[:first] < self.high[i]) & (self.high[:first] > self.low[i])
            found.update(self.launch[:first][meets & (self.writes[:first] | self.writes[i])].tolist())
        return sorted(found, reverse=True)

    def conflict(self, earlier: int, later: int) -> bool:
        """Return True if the two share an element exactly, not only a range."""
        return self.ranges.conflict(self.operators[earlier], self.operators[later])


def _to_bit_set(members: set[int]) -> int:
    return sum(1 << m for m in members)


def _transitive_closure(direct: int, reach: list[int]) -> int:
    """Return ``direct`` and all predecessors of its members."""
    result, rest = 0, direct
    while rest:
        top = rest.bit_length() - 1
        result |= reach[top] | 1 << top
        rest &= ~result
    return result


def reduce_edges(needs: list[int]) -> list[tuple[int, ...]]:
    """Return the direct predecessors of each launch from bit sets, without those that other predecessors imply."""
    reach: list[int] = []
    result = []
    for direct in needs:
        kept, rest, before = list[int](), direct, 0
        while rest:
            top = rest.bit_length() - 1
            kept.append(top)
            before |= reach[top] | 1 << top
            rest &= ~before
        result.append(tuple(reversed(kept)))
        reach.append(before)
    return result


def first_consecutive(tasks: Iterable[int]) -> int | None:
    """Return the first of consecutive task indices, or None for a gap."""
    listed = list(tasks)
    return listed[0] if listed == list(range(listed[0], listed[0] + len(listed))) else None
