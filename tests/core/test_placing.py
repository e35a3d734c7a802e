"""Waits planned for many rows at once, compared with planning per row, and the growth of planning."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from itertools import groupby
from random import Random

import pytest

from rammer.plan.waits import Order, Placing, plan_waits
from rammer.schedule.policy import Schedule
from rammer.schedule.policy_registry import parse_policy
from rammer_testing.growth.measure import growth
from rammer_testing.nonempty import some
from rammer_testing.programs import TaskNet, branching_net, device, random_net, recurrent_net

POLICIES = ("sequential", "greedy", "wavefront", "wavefront{lean=0}")


def one_by_one(schedule: Schedule, order: Order, totals: Mapping[str, int]) -> list[list[tuple[str, ...]]]:
    """Return the waits of every task, planned row by row. A row continues when all predecessors of its next run are placed."""
    number, veus = {n: i for i, n in enumerate(order.names)}, len(schedule.rows)
    runs = [[(number[n], len(list(g))) for n, g in groupby(row, key=lambda t: t[0])] for row in schedule.rows]
    done = {(o, v): 0 for o in range(len(order.names)) for v in range(veus)}
    for v, row in enumerate(runs):
        place = 0
        for me, count in row:
            place += count
            done[me, v] = place
    now, finished = ([[0] * veus for _ in range(n)] for n in (veus, len(order.names)))
    left, cursor, result = [totals[n] for n in order.names], [0] * veus, [list[tuple[str, ...]]() for _ in runs]

    def ended(p: int, *clocks: list[int]) -> bool:
        return all(done[p, v] <= max(c[v] for c in clocks) for v in range(veus))

    moving = True
    while moving:
        moving = False
        for v, row in enumerate(runs):
            while cursor[v] < len(row) and not any(left[p] for p in order.needs[row[cursor[v]][0]]):
                me, count = row[cursor[v]]
                before, chosen = now[v], list[int]()
                for p in order.needs[me]:
                    if not ended(p, before, *(finished[q] for q in chosen)):
                        chosen.append(p)
                for p in chosen[:]:
                    if ended(p, before, *(finished[q] for q in chosen if q != p)):
                        chosen.remove(p)
                now[v] = [max(at) for at in zip(before, *(finished[q] for q in chosen), strict=True)]
                now[v][v] += count
                finished[me] = [max(at) for at in zip(finished[me], now[v], strict=True)]
                result[v] += [tuple(order.names[p] for p in sorted(chosen)), *[()] * (count - 1)]
                left[me] -= count
                cursor[v], moving = cursor[v] + 1, True
    return result


def anywhere(random: Random, schedule: Schedule) -> Schedule:
    """Move the tasks to random rows, in the order of the stages."""
    tasks = {n: [t for row in schedule.rows for t in row if t[0] == n] for stage in schedule.stages for n in stage}
    rows: list[list[tuple[str, int]]] = [[] for _ in schedule.rows]
    for task in (t for stage in schedule.stages for n in stage for t in tasks[n]):
        random.choice(rows).append(task)
    return replace(schedule, rows=tuple(map(tuple, rows)))


@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(16))
def test_rowstogether_wait_as_each_would(seed: int) -> None:
    random, waits = Random(seed), 0
    for veus in (1, 2, 5, 9):
        if random.random() < 0.6:
            net = random_net(random, random.randint(5, 20), random.choice((5, 24)))
        else:
            net = branching_net(random, random.randint(2, 30), random.choice((1, 3, 10)), random.choice((1, 3, 10)))
        totals = {o.name: o.task_count for o in net.operators}
        for policy in some(POLICIES):
            schedule = parse_policy(policy)(net.graph(), device(veus))
            for tried in (schedule, anywhere(random, replace(schedule, barriers=random.random() < 0.5))):
                found = plan_waits(tried, net.storages)
                told = [[tuple(w.counter for w in t.waits) for t in row] for row in found.rows]
                assert told == one_by_one(tried, found.order, totals)
                waits += sum(map(len, (w for row in told for w in row)))
    assert waits > 20


NETS = {"cells": lambda: recurrent_net(5, 20, 100), "branches": lambda: branching_net(Random(2), 100, 100, 30)}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", NETS)
def test_rows_meet_before_operators(name: str, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a hundred thousand tasks cost as much as their thousand operators: 0.8 to 1.1 s, half of planning per row."""
    net, groups = NETS[name](), list[int]()
    together = Placing.together

    def noted(self: Placing, me: int, veus: list[int]) -> None:
        groups.append(len(veus))
        together(self, me, veus)

    monkeypatch.setattr(Placing, "together", noted)
    plan_waits(parse_policy(policy)(net.graph(), device(132)), net.storages)
    assert sum(groups) >= 10_000 and len(groups) <= 1.5 * len(net.operators)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_whole_programs_grow_with_their_operators(policy: str) -> None:
    """Check by counting calls, which machine load does not change."""
    nets: dict[int, TaskNet] = {steps: recurrent_net(4, steps, 20) for steps in (8, 16, 32)}
    assert growth(lambda steps: nets[steps].program(parse_policy(policy), 20), 8) < 2.3


@pytest.mark.large
@pytest.mark.parametrize("policy", POLICIES)
def test_a_hundred_thousand_tasks(policy: str) -> None:
    """Check that ten times the tasks take ten times as long; on a shared processor at most 25 times."""
    spent = dict[int, float]()
    for steps in (10, 100):
        net = recurrent_net(10, steps, 100)
        begin = time.process_time()
        program = net.program(parse_policy(policy), 132)
        spent[steps] = time.process_time() - begin
        assert program.task_count == 1000 * steps
    assert spent[100] < 25 * spent[10], spent
