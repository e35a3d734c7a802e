"""The arena: buffers share bytes only if every use of one precedes every write of the other."""

from __future__ import annotations

from functools import reduce
from itertools import combinations
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rammer.ir.prefix_set import PrefixSet
from rammer.ir.program import ALIGNMENT, Port
from rammer.plan.arena import BufferUse, Conflicts, plan_memory
from rammer.plan.program_builder import Interface, build_program
from rammer.plan.waits import Order
from rammer.schedule.baselines import Sequential
from rammer.schedule.ios import IOS
from rammer.schedule.wavefront import Wavefront
from rammer_testing.nonempty import some
from rammer_testing.programs import TaskNet, adding, random_net, summing


@st.composite
def plans(draw: st.DrawFn) -> tuple[list[BufferUse], Order, dict[str, set[str]]]:
    """Draw a random DAG of operators, buffers with random sizes, writers and readers, and each operator's ancestors."""
    count = draw(st.integers(1, 12))
    names = [f"o{i}" for i in range(count)]
    before: dict[str, set[str]] = {}
    needs = list[tuple[int, ...]]()
    for i, name in enumerate(names):
        needs.append(tuple(j for j in range(i) if draw(st.booleans())))
        before[name] = {a for p in needs[-1] for a in {names[p]} | before[names[p]]}
    past = tuple(reduce(PrefixSet.having, (names.index(a) for a in before[n]), PrefixSet()) for n in names)
    some = st.lists(st.sampled_from(names), max_size=3, unique=True)
    uses = [
        BufferUse(f"b{i}", draw(st.integers(0, 500)), tuple(draw(some) or [draw(st.sampled_from(names))]), tuple(draw(some)))
        for i in range(draw(st.integers(2, 12)))
    ]
    return uses, Order(tuple(names), tuple(needs), past), before


def ordered(a: BufferUse, b: BufferUse, before: dict[str, set[str]]) -> bool:
    """Return True if all uses of a precede all writes of b."""
    return all(x in before[w] for w in b.writers for x in (*a.writers, *a.readers))


@pytest.mark.slow
@settings(max_examples=300)
@given(plans())
def test_buffers_overlap_only_when_ordered(case: tuple[list[BufferUse], Order, dict[str, set[str]]]) -> None:
    uses, order, before = case
    plan = plan_memory(uses, order)
    for a, b in some(combinations(uses, 2)):
        start, other = plan.offsets[a.buffer], plan.offsets[b.buffer]
        if start < other + b.nbytes and other < start + a.nbytes:
            assert ordered(a, b, before) or ordered(b, a, before)
    assert all(offset % ALIGNMENT == 0 for offset in some(plan.offsets.values()))
    assert max(plan.offsets[u.buffer] + u.nbytes for u in uses) <= plan.peak <= plan.total


@given(plans())
def test_conflicts_are_symmetric_and_exact(case: tuple[list[BufferUse], Order, dict[str, set[str]]]) -> None:
    uses, order, before = case
    conflicts, among = Conflicts(uses, order), np.ones(len(uses), dtype=bool)
    found = [set(conflicts.of(i, among).tolist()) for i in range(len(uses))]
    for (i, a), (j, b) in some(combinations(enumerate(uses), 2)):
        assert (j in found[i]) == (i in found[j]) == (not (ordered(a, b, before) or ordered(b, a, before)))


def test_a_chain_needs_two_buffers() -> None:
    net = TaskNet().tensor("x", 64)
    for i in range(20):
        net.add(summing(f"t{i}", 64, f"t{i - 1}" if i else "x", 16, 64))
    for policy in (Sequential(), Wavefront(), IOS()):
        program = net.program(policy, 4)
        assert program.arena_bytes == 2 * 64 * 4


def test_unordered_branches_share_nothing() -> None:
    net = TaskNet().tensor("x", 64)
    for branch in "abc":
        net.add(adding(f"{branch}0", 64, ["x"], 16)).add(adding(f"{branch}1", 64, [f"{branch}0"], 16))
    net.add(adding("y", 64, ["a1", "b1", "c1"], 16))
    # By waves the first three buffers would be free; by happens-before only within a branch, where both are live.
    assert net.program(Wavefront(), 4).arena_bytes == 6 * 64 * 4
    assert net.program(Sequential(), 4).arena_bytes == 4 * 64 * 4


def test_the_plan_reports_peak_and_sum() -> None:
    order = Order(("a", "b", "c"), ((), (0,), (1,)), (PrefixSet(), PrefixSet(1), PrefixSet(2)))
    uses = [BufferUse("p", 100, ("a",), ("b",)), BufferUse("q", 64, ("b",), ("c",)), BufferUse("r", 100, ("c",), ())]
    plan = plan_memory(uses, order)
    assert (plan.peak, plan.total) == (192, 320) and plan.offsets == {"p": 0, "r": 0, "q": 128}
    assert str(plan) == "arena 192 of 320 bytes (60%) in 3 buffers"


def test_nothing_to_place() -> None:
    plan = plan_memory([], Order((), (), ()))
    assert (plan.peak, plan.total, dict(plan.offsets)) == (0, 0, {})


def test_random_programs_reuse_memory_and_verify() -> None:
    saved = 0
    for seed in range(25):
        net = random_net(Random(seed), 14)
        program = net.program(Sequential(), 3)
        total = sum(-(-b.nbytes // ALIGNMENT) * ALIGNMENT for b in program.buffers if b.kind == "arena")
        saved += total - program.arena_bytes
    assert saved > 0


def test_an_output_without_a_writer_is_an_internal_error() -> None:
    net = TaskNet().tensor("x", 8).add(adding("a", 8, ["x"], 4))
    schedule = net.schedule(Sequential(), 2)
    with pytest.raises(ValueError, match=r"internal: output 'x' .* lives in the state buffer b_x, .* a copy compute"):
        build_program(Interface("p", (Port("x", "x"),), (Port("x", "x"),), ()), schedule, net)


def test_only_used_constants_become_buffers() -> None:
    net = TaskNet(constants=("w", "unused")).tensor("x", 8).tensor("w", 8).tensor("unused", 8)
    program = net.add(adding("a", 8, ["x", "w"], 4)).program(Sequential(), 2)
    assert {b.name: b.kind for b in program.buffers} == {"b_x": "input", "b_a": "output", "b_w": "constant"}
