"""Waits: dependences from addresses, full thresholds, and no repeated wait on a row."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from random import Random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from task_oracle import dropped_waits

from rammer.ir.overlap import has_overlap
from rammer.ir.program import Counter, RProgram, Storage, Wait
from rammer.plan.waits import find_dependences, operator_order, plan_waits
from rammer.schedule.baselines import Sequential
from rammer.schedule.ios import IOS
from rammer.schedule.policy import Schedule
from rammer.schedule.wavefront import Wavefront
from rammer.verify.verifier import VerifyError, verify
from rammer_testing.growth.measure import growth
from rammer_testing.nonempty import some
from rammer_testing.programs import TaskNet, adding, copying, kernel, random_net, recurrent_net, summing


def addresses(storage: Storage) -> set[int]:
    """Return every element address, one by one."""
    return {
        storage.offset + sum(i * s for i, s in zip(index, storage.strides, strict=True))
        for index in product(*(range(n) for n in storage.shape))
    }


@st.composite
def storages(draw: st.DrawFn) -> Storage:
    rank = draw(st.integers(0, 3))
    shape = tuple(draw(st.integers(0, 4)) for _ in range(rank))
    strides = tuple(draw(st.sampled_from([-6, -2, 0, 1, 1, 2, 3, 4, 6, 12, 24])) for _ in range(rank))
    return Storage("t", "b", draw(st.integers(20, 40)), shape, strides)


@pytest.mark.slow
@settings(max_examples=300)
@given(storages(), storages())
def test_overlap_is_exact(a: Storage, b: Storage) -> None:
    assert has_overlap(a, b) == bool(addresses(a) & addresses(b))


def dense_block(batch: int) -> TaskNet:
    """Return DenseNet: operators on one concat buffer. Each operator reads the channels before its output and writes the next
    ones."""
    net = TaskNet().tensor("x", batch, 2)
    net.buffers["cat"] = ("float32", batch * 4)
    for name, first, channels in (("c0", 0, 2), ("c1", 2, 1), ("c2", 3, 1), ("upto0", 0, 1), ("upto1", 2, 1), ("whole", 0, 4)):
        net.storages[name] = Storage(name, "cat", first, (batch, channels), (4, 1))
    net.add(copying("c0", (batch, 2), "x", (1, 2)))
    net.add(copying("c1", (batch, 1), "upto0", (1, 1)))
    net.add(copying("c2", (batch, 1), "upto1", (1, 1)))
    return net.add(copying("y", (batch, 4), "whole", (1, 4)))


@pytest.mark.parametrize("batch", [1, 3])
def test_concat_parts_depend_on_what_they_read_only(batch: int) -> None:
    after = dense_block(batch).after
    assert after == {"c0": (), "c1": ("c0",), "c2": ("c1",), "y": ("c0", "c1", "c2")}


@pytest.mark.parametrize("policy", [Sequential(), Wavefront(), IOS()])
def test_concat_programs_verify(policy: Sequential | Wavefront | IOS) -> None:
    program = dense_block(3).program(policy, 2)
    assert program.task_count == 12


def test_reading_before_writing_is_an_error() -> None:
    net = TaskNet().tensor("x", 4).add(adding("a", 4, ["x"], 2)).add(adding("b", 4, ["a"], 2))
    with pytest.raises(ValueError, match="operator b reads what the later operator a writes"):
        find_dependences(reversed(net.operators), net.storages)
    del net.storages["x"]
    with pytest.raises(ValueError, match="operator a uses tensor x, which has no storage"):
        find_dependences(net.operators, net.storages)


def test_a_row_waits_once_and_not_for_what_is_implied() -> None:
    net = TaskNet().tensor("x", 8).add(adding("a", 8, ["x"], 2))
    net.add(summing("b", 4, "a", 1, 8)).add(summing("c", 4, "b", 1, 4))
    net.add(adding("d", 4, ["b", "c"], 1))  # waits for c, which implies b
    program = net.program(Wavefront(), 2)
    assert program.counters == (Counter("a", "a", 0, 4), Counter("b", "b", 0, 4), Counter("c", "c", 0, 4))
    assert [(t.operator, t.index, t.waits) for t in program.rows[0]] == [
        ("a", 0, ()),
        ("a", 1, ()),
        ("b", 0, (Wait("a", 4),)),
        ("b", 1, ()),
        ("c", 0, (Wait("b", 4),)),
        ("c", 1, ()),
        ("d", 0, (Wait("c", 4),)),
        ("d", 1, ()),
    ]


def test_one_row_needs_no_waits() -> None:
    program = random_net(Random(3), 12).program(Wavefront(), 1)
    assert not program.counters and not any(t.waits for t in some(program.rows[0]))


def test_barriers_wait_for_the_whole_previous_stage() -> None:
    net = TaskNet().tensor("x", 4).add(adding("a", 4, ["x"], 2)).add(adding("b", 4, ["x"], 2)).add(adding("c", 4, ["a"], 2))
    net.add(adding("y", 4, ["b", "c"], 2))
    program = net.program(Sequential(), 2)
    assert program.rows[0][1].waits == (Wait("a", 2),)  # b reads nothing of a, but stages are separated
    rows = net.program(Wavefront(), 2).rows
    assert [w.counter for row in some(rows) for t in row if t.operator == "b" for w in t.waits] == []


def test_empty_operators_are_never_waited_for() -> None:
    net = TaskNet().tensor("x", 4).tensor("none", 0).add(adding("e", 0, ["none"], 1)).add(adding("a", 4, ["x"], 2))
    net.add(adding("f", 0, ["e"], 1)).add(adding("y", 4, ["a"], 2))
    for policy in (Sequential(), Wavefront(), IOS()):
        program = net.program(policy, 2)
        assert [c.name for c in program.counters] == ["a"]


def test_stages_must_list_every_operator() -> None:
    net = TaskNet().tensor("x", 4).add(adding("a", 4, ["x"], 2))
    schedule = Schedule((kernel(net.operators[0]),), (("a", "b"),), ((("a", 0), ("a", 1)),), False, 0.0)
    with pytest.raises(ValueError, match="stages list 2 operators, kernels are chosen for 1"):
        plan_waits(schedule, net.storages)


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.integers(1, 12), st.integers(1, 6))
def test_order_is_the_closure_of_the_dependences(seed: int, operators: int, veus: int) -> None:
    net = random_net(Random(seed), operators)
    order = operator_order(net.schedule(Wavefront(), veus), net.after)
    place = {n: i for i, n in enumerate(order.names)}

    def reach(name: str) -> set[str]:
        return {a for p in net.after[name] for a in {p} | reach(p)}

    for name in some(order.names):
        assert {n for n in order.names if place[n] in order.before[place[name]]} == reach(name)
        implied = {a for p in order.needs[place[name]] for a in reach(order.names[p])}
        assert not implied & {order.names[p] for p in order.needs[place[name]]}


@pytest.mark.slow
@settings(max_examples=25)
@given(st.integers(0, 10**6), st.integers(1, 10), st.integers(1, 5))
def test_no_wait_can_be_spared(seed: int, operators: int, veus: int) -> None:
    """Check that without any one wait, a task may start before a producer has finished."""
    program = random_net(Random(seed), operators).program(Wavefront(), veus)
    assert verify(program).task_reads == 0
    found = list(dropped_waits(program))
    assume(found)
    for less in found:
        try:
            assert verify(less).task_reads > 0  # legal only because that one task needs few of the operator's tasks
        except VerifyError:
            continue


def test_what_others_knew_need_not_be_waited_for() -> None:
    """Check that a wait for ``b`` implies ``a``: both rows run ``b`` after ``a``, though ``b`` does not depend on ``a``."""
    net = TaskNet().tensor("x", 4).add(adding("a", 4, ["x"], 2)).add(adding("b", 4, ["x"], 2)).add(summing("y", 4, "b", 2, 4))
    net.add(adding("z", 4, ["a", "b"], 2))
    rows = net.program(Wavefront(), 2).rows
    assert [w.counter for row in rows for t in row for w in t.waits] == ["b", "b"]


def test_rows_that_block_each_other_are_left_to_the_verifier() -> None:
    net = TaskNet().tensor("x", 4).add(adding("a", 4, ["x"], 2)).add(adding("b", 4, ["a"], 2))
    rows = ((("b", 0), ("a", 0)), (("a", 1), ("b", 1)))
    schedule = Schedule(tuple(map(kernel, net.operators)), (("a",), ("b",)), rows, False, 0.0)
    waits = plan_waits(schedule, net.storages)
    assert [[t.waits for t in row] for row in waits.rows] == [[(Wait("a", 2),), ()], [(), (Wait("a", 2),)]]
    program = replace(net.program(Wavefront(), 2), rows=waits.rows, counters=waits.counters)
    with pytest.raises(VerifyError, match="rows wait for each other in a cycle: nothing can finish counter a"):
        verify(program)


def waits_of(program: RProgram) -> int:
    return sum(len(t.waits) for row in program.rows for t in row)


@pytest.mark.slow
def test_planning_grows_with_the_tasks() -> None:
    """Check the number of calls instead of seconds. A hundred thousand tasks took 1 s of a processor, but 1.8 s on a shared
    machine."""
    nets = {steps: recurrent_net(layers=10, steps=steps, tasks=100) for steps in (4, 8, 16)}
    schedules = {steps: net.schedule(Wavefront(), 132) for steps, net in nets.items()}
    assert growth(lambda steps: plan_waits(schedules[steps], nets[steps].storages), 4) < 2.2
    waits = plan_waits(schedules[16], nets[16].storages)
    assert sum(map(len, waits.rows)) == 16_000 and len(waits.counters) == 159


def test_planned_programs_verify_without_looking_at_single_tasks() -> None:
    for seed in range(10):
        program = random_net(Random(seed), 10).program(Wavefront(), 4)
        assert verify(program).task_reads == 0 and waits_of(program) == verify(program).waits
