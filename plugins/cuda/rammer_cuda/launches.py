"""From an RProgram to launches: which tasks go together, and which launch waits for which.

A launch is the tasks of one operator in one wave. Edges come from the program's waits and from memory:
two launches that touch the same bytes, one of them writing, keep the program's order. Everything else may
run at the same time, so parallel branches of a model stay parallel.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rammer.errors import DeviceFailure
from rammer.ir.program import RProgram, Storage, waves
from rammer.plan.overlap import overlap


@dataclass(frozen=True, slots=True)
class Launch:
    """``tasks`` of ``operator``, after the launches whose positions are in ``after``."""

    operator: str
    tasks: tuple[int, ...]
    after: tuple[int, ...]


def launches(program: RProgram) -> list[Launch]:
    """Launches in a legal order. DeviceFailure for a program whose rows interleave two dependent operators."""
    groups = _groups(program)
    index = {key: i for i, key in enumerate(groups)}
    needs = _waits(program, index)
    _memory(program, list(groups), needs)
    reduced = _reduce(needs)
    return [Launch(op, tuple(sorted(tasks)), reduced[i]) for i, ((_, op), tasks) in enumerate(groups.items())]


def _groups(program: RProgram) -> dict[tuple[int, str], list[int]]:
    """(wave, operator) -> tasks, ordered by wave and then by first appearance in the rows."""
    groups: dict[tuple[int, str], list[int]] = {}
    for number, wave in enumerate(waves(program)):
        order: dict[str, set[str]] = {}
        rows: dict[int, list[str]] = {}
        for placed in wave:
            groups.setdefault((number, placed.task.operator), []).append(placed.task.index)
            row = rows.setdefault(placed.veu, [])
            if placed.task.operator not in row[-1:]:
                order.setdefault(placed.task.operator, set()).update(row)
                row.append(placed.task.operator)
        _sort_wave(program, groups, number, order)
    return groups


def _sort_wave(program: RProgram, groups: dict[tuple[int, str], list[int]], wave: int,
               order: dict[str, set[str]]) -> None:  # fmt: skip
    """Put one wave's groups in an order that every row agrees with where operators depend on each other."""
    names = [op for number, op in groups if number == wave]
    pending = {n: {p for p in order.get(n, ()) if p != n and _conflict(program, p, n)} for n in names}
    while pending:
        ready = [n for n in names if n in pending and not pending[n] & set(pending)]
        if not ready:
            raise DeviceFailure(
                f"rows interleave tasks of dependent operators {', '.join(pending)} without waits",
                where=f"program {program.name}, wave {wave}", hint="schedule with a built-in policy",
            )  # fmt: skip
        for name in ready:
            groups[wave, name] = groups.pop((wave, name))
            del pending[name]


def _waits(program: RProgram, index: dict[tuple[int, str], int]) -> list[set[int]]:
    """Launch -> launches that its rows have waited for."""
    contributing: dict[str, set[int]] = {}
    place = {(t.task.operator, t.task.index): index[n, t.task.operator]
             for n, wave in enumerate(waves(program)) for t in wave}  # fmt: skip
    for counter in program.counters:
        tasks = range(counter.first, counter.last)
        contributing[counter.name] = {place[counter.operator, t] for t in tasks}
    needs: list[set[int]] = [set() for _ in index]
    for row in program.rows:
        waited: set[int] = set()
        for task in row:
            for wait in task.waits:
                waited |= contributing[wait.counter]
            mine = place[task.operator, task.index]
            needs[mine] |= waited - {mine}
    return needs


def _memory(program: RProgram, groups: list[tuple[int, str]], needs: list[set[int]]) -> None:
    """Add an edge for every pair that touches the same bytes, unless the two are already ordered."""
    before: list[set[int]] = []
    conflicts: dict[tuple[str, str], bool] = {}
    for later, (_, b) in enumerate(groups):
        reach = set(needs[later])
        for n in needs[later]:
            reach |= before[n]
        for earlier in range(later - 1, -1, -1):
            a = groups[earlier][1]
            if earlier in reach or a == b:
                continue
            if (a, b) not in conflicts:
                conflicts[a, b] = _conflict(program, a, b)
            if conflicts[a, b]:
                needs[later].add(earlier)
                reach |= before[earlier] | {earlier}
        before.append(reach)


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
    (a, b), (c, d) = _bytes(program, p), _bytes(program, q)
    return a < d and c < b


def _bytes(program: RProgram, storage: Storage) -> tuple[int, int]:
    """Arena bytes between a storage's first and last element."""
    buffer = program.buffer[storage.buffer]
    size = buffer.nbytes // max(buffer.size, 1)
    low, high = storage.span()
    return buffer.offset + low * size, buffer.offset + high * size


def _reduce(needs: list[set[int]]) -> list[tuple[int, ...]]:
    """Direct predecessors only: those that no other predecessor already implies."""
    reach: list[set[int]] = []
    result = []
    for direct in needs:
        implied: set[int] = set()
        for n in direct:
            implied |= reach[n]
        result.append(tuple(sorted(direct - implied)))
        reach.append(direct | implied)
    return result


def consecutive(tasks: Iterable[int]) -> int | None:
    """The first of consecutive task indices, or None if there is a gap."""
    listed = list(tasks)
    return listed[0] if listed == list(range(listed[0], listed[0] + len(listed))) else None
