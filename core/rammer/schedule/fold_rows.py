"""Folding a program for a device with fewer vEUs: rows are merged, in an order that no wait can block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rammer.ir.program import Counter, RProgram, Task, WaveTask, waves

__all__ = ["fold"]


def fold(program: RProgram, veus: int) -> RProgram:
    """``program`` on ``veus`` rows: row ``v`` joins row ``v mod veus``. With enough vEUs, the program itself.

    Rows are merged in a topological order of all tasks (wave by wave), so every task still follows what it waited
    for; waits that the merged row implies are left out, and counters that nobody waits for any more. Raises
    ValueError for ``veus`` < 1, for a program whose rows wait for each other in a circle, and for one over several devices.
    """
    if veus < 1:
        raise ValueError(f"a device needs at least one vEU, got {veus}")
    if veus >= program.veus:
        return program
    if program.homes:
        raise ValueError(f"program {program.name} has rows of {len(program.homes)} devices, which cannot be merged")
    merged: list[list[Task]] = [[] for _ in range(veus)]
    for wave in waves(program):
        for placed in sorted(wave, key=_task_row):  # stable: tasks of one row keep their order
            merged[placed.veu % veus].append(placed.task)
    rows = tuple(_drop_redundant_waits(row, program.counter) for row in merged)
    used = {wait.counter for row in rows for task in row for wait in task.waits}
    return replace(program, rows=rows, counters=tuple(c for c in program.counters if c.name in used))


def _task_row(placed: WaveTask) -> int:
    return placed.veu


def _drop_redundant_waits(row: list[Task], counters: Mapping[str, Counter]) -> tuple[Task, ...]:
    """The row without waits for what it has already waited for, or has itself run all of."""
    done: dict[str, set[int]] = {}
    waited: set[str] = set()
    result = []
    for task in row:
        waits = tuple(w for w in task.waits if w.counter not in waited and not _has_run_counted(counters[w.counter], done))
        waited.update(w.counter for w in waits)
        result.append(replace(task, waits=waits))
        done.setdefault(task.operator, set()).add(task.index)
    return tuple(result)


def _has_run_counted(counter: Counter, done: Mapping[str, set[int]]) -> bool:
    """Whether the row itself ran every task that ``counter`` counts."""
    return done.get(counter.operator, set()).issuperset(range(counter.first, counter.last))
