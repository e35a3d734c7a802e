"""Which wait is at fault when a persistent kernel gives up.

One wait that never ends soon stops every row, and which block notices first is chance. The one at fault waits for
tasks that no stopped row still has before it: all of them ran, or none ever will.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rammer.ir.program import RProgram, Task


@dataclass(frozen=True, slots=True)
class Hang:
    """``veu`` stopped before entry ``order`` of its row, ``task``, waiting for ``awaited``."""

    veu: int
    order: int
    task: Task
    awaited: str


def find_hang(
    program: RProgram, stopped: Sequence[int], seen: Mapping[str, int], epoch: int, words: Mapping[str, Sequence[str]]
) -> Hang:
    """The wait at fault. ``stopped`` is, for each row, one more than the entry that it stopped before (0: it finished);
    ``seen`` are the counters' values in run ``epoch``; ``words`` the tensors that an operator may get as words."""
    place = {(t.operator, t.index): (v, i) for v, row in enumerate(program.rows) for i, t in enumerate(row)}
    writer = {t: o for o in program.operators for t in o.outputs}
    hangs = list[Hang]()
    for veu, order in ((v, n - 1) for v, n in enumerate(stopped) if n):
        task = program.rows[veu][order]
        for awaited, tasks in _unfinished(program, task, seen, epoch):
            if not any(stopped[v] and i >= stopped[v] - 1 for v, i in (place[t] for t in tasks)):
                return Hang(veu, order, task, awaited)
            hangs.append(Hang(veu, order, task, awaited))
        for tensor in words.get(task.operator, ()):
            hangs += [Hang(veu, order, task, f"words of {tensor}")] if writer[tensor].name != task.operator else []
    return hangs[0]  # rows that wait for each other in a circle, or for words that were lost


def _unfinished(program: RProgram, task: Task, seen: Mapping[str, int], epoch: int) -> list[tuple[str, list[tuple[str, int]]]]:
    """The waits of ``task`` that are not over, as (text, contributing tasks)."""
    result = list[tuple[str, list[tuple[str, int]]]]()
    for wait in task.waits:
        counter = program.counter[wait.counter]
        wanted = epoch * counter.total + wait.threshold
        if seen[counter.name] < wanted:
            text = f"counter {counter.name} to reach {wanted}, but it stayed at {seen[counter.name]}"
            result.append((text, [(counter.operator, i) for i in range(counter.first, counter.last)]))
    return result
