"""Cached launches of large programs (``rammer.ir.launches``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rammer.ir import launches
from rammer.ir.launches import Launch, first_consecutive, make_launches
from rammer.ir.program import RProgram

from rammer_cuda.kernel_cache import Cached

#: Minimum tasks of a program whose launches are cached: fewer are planned in a few milliseconds.
CACHED_FROM = 1_000


def cached_launches(program: RProgram) -> list[Launch]:
    """Return ``make_launches``, cached for the next process if the program is large. Best effort."""
    if program.task_count < CACHED_FROM:
        return make_launches(program)
    return Cached(program, "launches", Path(launches.__file__).read_text()).get(
        lambda record: _decode_plan(record, program), lambda: make_launches(program), _encode_plan
    )


def _encode_plan(plan: list[Launch]) -> list[list[object]]:
    return [
        [x.operator, [x.tasks[0], len(x.tasks)] if first_consecutive(x.tasks) is not None else [*x.tasks, None], x.after]
        for x in plan
    ]


def _decode_plan(record: Any, program: RProgram) -> list[Launch]:
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
