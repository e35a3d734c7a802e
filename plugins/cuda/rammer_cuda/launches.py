"""From an RProgram to launches: which tasks go together, and which launch waits for which.

A launch is the tasks of one operator in one wave. Edges come from the program's waits and from memory:
two launches that touch the same bytes, one of them writing, keep the program's order. Everything else may
run at the same time, so parallel branches of a model stay parallel.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from rammer.errors import DeviceFailure
from rammer.ir.program import RProgram, Storage, WaveTask, waves
from rammer.ir.types import itemsize
from rammer.plan.overlap import overlap


@dataclass(frozen=True, slots=True)
class Launch:
    """``tasks`` of ``operator``, after the launches whose positions are in ``after``."""

    operator: str
    tasks: tuple[int, ...]
    after: tuple[int, ...]


def launches(program: RProgram) -> list[Launch]:
    """Launches in a legal order. DeviceFailure for a program whose rows interleave two dependent operators."""
    placed = waves(program)
    groups = [group for number, wave in enumerate(placed) for group in _wave_groups(program, number, wave)]
    index = {(g.wave, g.operator): i for i, g in enumerate(groups)}
    needs = _waits(program, placed, index)
    _memory(program, groups, needs)
    direct = _reduce(needs)
    return [Launch(g.operator, tuple(sorted(g.tasks)), direct[i]) for i, g in enumerate(groups)]


@dataclass(frozen=True, slots=True)
class _Group:
    wave: int
    operator: str
    tasks: list[int]


def _wave_groups(program: RProgram, number: int, wave: list[WaveTask]) -> list[_Group]:
    """One wave's operators with their tasks, in an order that every row agrees with where they depend on
    each other."""
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
    pending = {n: {p for p in before.get(n, ()) if p != n and _conflict(program, p, n)} for n in tasks}
    result: list[_Group] = []
    while pending:
        ready = [n for n in pending if not pending[n] & pending.keys()]
        if not ready:
            raise DeviceFailure(
                f"rows interleave tasks of dependent operators {', '.join(pending)} without waits",
                where=f"program {program.name}, wave {number}", hint="schedule with a built-in policy",
            )  # fmt: skip
        for name in ready:
            result.append(_Group(number, name, tasks[name]))
            del pending[name]
    return result


def _waits(program: RProgram, placed: list[list[WaveTask]], index: dict[tuple[int, str], int]) -> list[int]:
    """Launch -> bit set of the launches that its rows have waited for."""
    wave_of = {(t.task.operator, t.task.index): t.wave for wave in placed for t in wave}
    contributing = {
        c.name: _bits({index[wave_of[c.operator, t], c.operator] for t in range(c.first, c.last)})
        for c in program.counters
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


def _memory(program: RProgram, groups: list[_Group], needs: list[int]) -> None:
    """Add an edge for every pair that touches the same bytes, one of them writing, unless already ordered."""
    accesses = _Accesses(program, groups)
    reach: list[int] = []
    for later in range(len(groups)):
        before = _closure(needs[later], reach)
        for earlier in accesses.candidates(later):
            if not before >> earlier & 1 and accesses.conflict(earlier, later):
                needs[later] |= 1 << earlier
                before |= reach[earlier] | 1 << earlier
        reach.append(before)


class _Accesses:
    """Byte ranges that each launch reads and writes, in one address space: the arena first, then every other
    buffer at a place of its own."""

    def __init__(self, program: RProgram, groups: list[_Group]) -> None:
        self.program, self.operators = program, [g.operator for g in groups]
        base = program.arena_bytes
        self.base: dict[str, int] = {}
        for b in program.buffers:
            self.base[b.name] = b.offset if b.kind == "arena" else base
            base += 0 if b.kind == "arena" else b.nbytes + 1
        rows: list[tuple[int, int, int, bool]] = []
        for number, name in enumerate(self.operators):
            operator = program.operator[name]
            for tensor in dict.fromkeys((*operator.inputs, *operator.outputs)):
                storage = program.storage[tensor]
                rows.append((number, *_bytes(program, storage, self.base[storage.buffer]), tensor in operator.outputs))
        self.launch, self.low, self.high = (np.array([r[i] for r in rows], np.int64) for i in range(3))
        self.writes = np.array([r[3] for r in rows], bool)
        self.known: dict[tuple[str, str], bool] = {}

    def candidates(self, later: int) -> list[int]:
        """Earlier launches, latest first, with a byte range that meets one of ``later``'s, one of them a write."""
        first, end = np.searchsorted(self.launch, [later, later + 1])
        found: set[int] = set()
        for i in range(first, end):
            meets = (self.low[:first] < self.high[i]) & (self.high[:first] > self.low[i])
            found.update(self.launch[:first][meets & (self.writes[:first] | self.writes[i])].tolist())
        return sorted(found, reverse=True)

    def conflict(self, earlier: int, later: int) -> bool:
        """Whether the two share an element exactly, not only a range."""
        pair = self.operators[earlier], self.operators[later]
        if pair not in self.known:
            self.known[pair] = _conflict(self.program, *pair)
        return self.known[pair]


def _conflict(program: RProgram, a: str, b: str) -> bool:
    """Whether the operators touch common bytes and at least one of them writes there."""
    first, second = program.operator[a], program.operator[b]
    pairs = [(first.outputs, (*second.inputs, *second.outputs)), (first.inputs, second.outputs)]
    return any(_shared(program, x, y) for xs, ys in pairs for x in xs for y in ys)


def _shared(program: RProgram, x: str, y: str) -> bool:
    p, q = program.storage[x], program.storage[y]
    if p.buffer == q.buffer:
        return overlap(p, q)
    s, t = program.buffer[p.buffer], program.buffer[q.buffer]
    if s.kind != "arena" or t.kind != "arena":
        return False
    (a, b), (c, d) = _bytes(program, p, s.offset), _bytes(program, q, t.offset)
    return a < d and c < b


def _bytes(program: RProgram, storage: Storage, start: int) -> tuple[int, int]:
    """Half-open range of the bytes between a storage's first and last element, in a buffer that begins at ``start``."""
    size = itemsize(program.buffer[storage.buffer].dtype)
    low, high = storage.span()
    return start + low * size, start + high * size


def _bits(members: set[int]) -> int:
    return sum(1 << m for m in members)


def _closure(direct: int, reach: list[int]) -> int:
    """``direct`` and everything before its members."""
    result, rest = 0, direct
    while rest:
        top = rest.bit_length() - 1
        result |= reach[top] | 1 << top
        rest &= ~result
    return result


def _reduce(needs: list[int]) -> list[tuple[int, ...]]:
    """Direct predecessors only: those that no other predecessor already implies."""
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


def consecutive(tasks: Iterable[int]) -> int | None:
    """The first of consecutive task indices, or None if there is a gap."""
    listed = list(tasks)
    return listed[0] if listed == list(range(listed[0], listed[0] + len(listed))) else None
