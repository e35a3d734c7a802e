"""Folding of a program for a device with fewer vEUs: rows are merged, in an order that no wait can block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rammer.ir.program import Counter, RProgram, Task, WaveTask, waves

__all__ = ["fold"]


def fold(program: RProgram, veus: int) -> RProgram:
    """Return ``program`` on ``veus`` rows: row ``v`` joins row ``v mod veus``.

    Return ``program`` itself if it has at most ``veus`` rows. Rows are merged in a topological order of all tasks (wave by wave),
    so every task still follows its waits. Waits that the merged row implies, and counters without waits, are removed.

    Raises ValueError for ``veus`` < 1, for rows that wait for each other in a circle, and for a program over several devices.
    """
    if veus < 1:
        raise ValueError(f"a device needs at least one vEU, got {veus}")
    if veus >= program.veus:
        return program
    if program.homes:
        raise ValueError(f"program {program.name} has rows of {len(program.homes)} devices, which cannot be merged")
    merged: list[list[Task]] = [[] for _ in range(veus)]
    for wave in waves(program):
        for placed in sorted(wave, key=_task_row):  # stable: tasks of one row retain their order
            merged[placed.veu % veus].append(placed.task)
    rows = tuple(_drop_redundant_waits(row, program.counter) for row in merged)
    used = {wait.counter for row in rows for task in row for wait in task.waits}
    return replace(program, rows=rows, counters=tuple(c for c in program.counters if c.name in used))


def _task_row(placed: WaveTask) -> int:
    return placed.veu


def _drop_redundant_waits(row: list[Task], counters: Mapping[str, Counter]) -> tuple[Task, ...]:
    """Return the row without waits that an earlier wait or the row's previous tasks imply."""
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
    """Return True if the row itself ran every task that ``counter`` counts."""
    return done.get(counter.operator, set()).issuperset(range(counter.first, counter.last))
