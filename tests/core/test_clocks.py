"""What tasks know of each other, against a plain walk, and the checks of tasks, against plain loops."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from task_oracle import with_task

from rammer.ir.clocks import Deadlock, compute_clocks
from rammer.ir.program import Counter, RProgram, Task, Wait
from rammer.ir.wellformed import VerifyError, check_form
from rammer.schedule.fold import fold
from rammer.schedule.sequential import Sequential
from rammer.schedule.wavefront import Wavefront
from rammer.testing.programs import random_net, recurrent_net
from rammer.testing.some import some

Key = tuple[str, int]


def plain_clocks(program: RProgram) -> dict[Key, list[int]] | None:
    """How many tasks of each row have surely finished when a task starts: one task after the other. None for a circle."""
    counters = {c.name: c for c in program.counters}
    before: dict[Key, list[int]] = {}
    after: dict[Key, list[int]] = {}
    now, cursor, moved = [[0] * program.veus for _ in program.rows], [0] * program.veus, True
    while moved:
        moved = False
        for veu, row in enumerate(program.rows):
            while cursor[veu] < len(row):
                task = row[cursor[veu]]
                needed = [
                    (counters[w.counter].operator, i)
                    for w in task.waits
                    for i in range(counters[w.counter].first, counters[w.counter].last)
                ]
                if any(key not in after for key in needed):
                    break
                now[veu] = [max(parts) for parts in zip(now[veu], *(after[key] for key in needed), strict=True)]
                before[task.operator, task.index] = list(now[veu])
                cursor[veu], moved = cursor[veu] + 1, True
                now[veu][veu] = cursor[veu]
                after[task.operator, task.index] = list(now[veu])
    return before if all(c == len(row) for c, row in zip(cursor, program.rows, strict=True)) else None


def programs() -> Iterator[RProgram]:
    """Planned, folded, and with counters of parts of operators."""
    for seed in range(12):
        program = random_net(Random(seed), 7, length=16).program((Sequential(), Wavefront())[seed % 2], 1 + seed % 5)
        yield program
        yield fold(program, 2)
        yield in_halves(program)
    yield RProgram.parse(str(recurrent_net(layers=3, steps=4, tasks=4).program(Wavefront(), 6)))


def in_halves(program: RProgram) -> RProgram:
    """Every counter of several tasks in two, some waits for the first of them only."""
    halves = dict[str, list[Counter]]()
    for c in program.counters:
        middle = (c.first + c.last) // 2
        parts = [(lo, hi) for lo, hi in ((c.first, middle), (middle, c.last)) if lo < hi]
        halves[c.name] = [Counter(f"{c.name}_{i}", c.operator, lo, hi) for i, (lo, hi) in enumerate(parts)]

    def waits(task: Task) -> tuple[Wait, ...]:
        return tuple(Wait(h.name, h.total) for w in task.waits for h in halves[w.counter][: 2 - task.index % 2])

    rows = tuple(tuple(replace(t, waits=waits(t)) for t in row) for row in program.rows)
    return replace(program, rows=rows, counters=tuple(h for part in halves.values() for h in part))


def turned(program: RProgram, random: Random) -> RProgram:
    """Two tasks of a row exchanged, or a wait moved: now and then a circle."""
    rows = [list(row) for row in program.rows]
    row = random.choice([r for r in rows if len(r) > 1] or [rows[0]])
    a, b = random.randrange(len(row)), random.randrange(len(row))
    row[a], row[b] = (
        (row[b], row[a]) if random.random() < 0.5 else (replace(row[a], waits=row[b].waits), replace(row[b], waits=row[a].waits))
    )
    return replace(program, rows=tuple(map(tuple, rows)))


def test_clocks_are_those_of_a_plain_walk() -> None:
    random, circles = Random(1), 0
    for program in some(programs()):
        for made in (program, *(turned(program, random) for _ in range(6))):
            wanted = plain_clocks(made)
            if wanted is None:
                circles += 1
                with pytest.raises(Deadlock) as stuck:
                    compute_clocks(made)
                task = made.rows[stuck.value.veu][stuck.value.place]
                assert stuck.value.counter in [w.counter for w in task.waits]
                continue
            check_clocks(made, wanted)
    assert 5 < circles < 200


def check_clocks(program: RProgram, wanted: dict[Key, list[int]]) -> None:
    clocks = compute_clocks(program)
    for operator in some(program.operators):
        number, mine = clocks.number[operator.name], range(operator.task_count)
        least = np.min([wanted[operator.name, i] for i in mine], axis=0)
        assert clocks.known[number].tolist() == least.tolist()
        for veu, row in some(enumerate(program.rows)):
            places = [place for place, t in enumerate(row) if t.operator == operator.name]
            assert clocks.done[number, veu] == (max(places) + 1 if places else 0)
            for place in places:
                task = clocks.base[operator.name] + row[place].index
                assert (clocks.veu[task], clocks.place[task]) == (veu, place)
                known = clocks.clock[clocks.segment[task]].tolist()
                known[veu] = place
                assert known == wanted[operator.name, row[place].index]


def plainly_wrong(program: RProgram) -> bool:
    """Whether not every task occurs exactly once, or one waits for anything but a counter's full count."""
    full = {c.name: c.total for c in program.counters}
    listed = [(t.operator, t.index) for row in program.rows for t in row]
    return sorted(listed) != sorted((o.name, i) for o in program.operators for i in range(o.task_count)) or any(
        full.get(w.counter) != w.threshold for row in program.rows for t in row for w in t.waits
    )


def test_tasks_are_refused_as_plain_loops_do() -> None:
    random, refused = Random(2), 0
    for program in programs():
        for _ in range(20):
            veu = random.choice([v for v, row in enumerate(program.rows) if row])
            place = random.randrange(len(program.rows[veu]))
            task, other = program.rows[veu][place], random.choice([t for row in program.rows for t in row])
            index = random.choice([-1, 0, 1, 2, 99, 1 << 62, 1 << 70])
            wait = Wait(random.choice([c.name for c in program.counters] + ["nobody"]), random.choice([1, 2, 3, 4]))
            changed = random.choice(
                [
                    (),
                    (task, task),
                    (other,),
                    (replace(task, index=index),),
                    (Task("nobody", 0),),
                    (replace(task, waits=(*task.waits, wait)),),
                    (task,),
                ]
            )
            edited = with_task(program, veu, place, *changed)
            wrong = plainly_wrong(edited)
            refused += wrong
            if wrong:
                with pytest.raises(VerifyError):
                    check_form(edited)
            else:
                check_form(edited)
    assert refused > 300
