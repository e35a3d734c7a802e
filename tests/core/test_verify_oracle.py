"""The verifier against a brute-force oracle: planned programs are legal, and no illegal edit passes."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from task_oracle import dropped_waits, is_legal, lost_and_doubled, moved_buffers, narrowed_counters, rejected, swapped_neighbours

from rammer.schedule.baselines import Sequential
from rammer.schedule.policy_registry import list_policies, parse_policy
from rammer.schedule.wavefront import Wavefront
from rammer_testing.programs import TaskNet, random_net, summing


def gathering_net(seed: int, operators: int) -> TaskNet:
    """Return a random DAG in which every task reads all of one or two tensors. Almost every wait is necessary."""
    random = Random(seed)
    net, names = TaskNet().tensor("x", 8), ["x"]
    for i in range(operators):
        net.add(summing(f"t{i}", 8, random.choice(names[-3:]), random.choice([1, 2, 3, 8]), 8))
        names.append(f"t{i}")
    return net


# --- the oracle and the verifier ------------------------------------------------------------------


@settings(max_examples=25)
@given(st.integers(0, 10**6), st.integers(1, 7), st.integers(1, 4), st.sampled_from(sorted(list_policies())))
def test_planned_programs_are_legal_by_brute_force(seed: int, operators: int, veus: int, policy: str) -> None:
    program = random_net(Random(seed), operators, length=16).program(parse_policy(policy), veus)
    assert is_legal(program)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("edit", [dropped_waits, swapped_neighbours, moved_buffers])
def test_whatever_the_oracle_rejects_the_verifier_rejects(edit) -> None:  # type: ignore[no-untyped-def]
    wrong = caught = tried = 0
    for seed in range(5):
        for net in (random_net(Random(seed), 6, length=16), gathering_net(seed, 6)):
            for policy in (Sequential(), Wavefront()):
                for program in edit(net.program(policy, 3)):
                    illegal, found = not is_legal(program), rejected(program)
                    assert found or not illegal, f"missed a mistake in\n{program}"
                    wrong, caught, tried = wrong + illegal, caught + found, tried + 1
    assert wrong > 20, f"only {wrong} of {tried} edits were mistakes"
    # The verifier checks whole operators and buffers where possible, so it may refuse a little more.
    assert caught <= wrong + 0.35 * tried


EDITS = (dropped_waits, swapped_neighbours, moved_buffers, lost_and_doubled, narrowed_counters)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("case", range(500))
def test_no_illegal_program_passes_on_any_device(case: int, seed: int) -> None:
    """Check 500 random graphs, each on a random device by a random policy. Each program is legal, and every illegal edit is
    refused."""
    random = Random(f"{seed} {case}")
    net = random_net(random, random.randint(1, 8), length=random.choice([5, 12, 16]))
    policy, veus = random.choice(sorted(list_policies())), random.randint(1, 9)
    program = net.program(parse_policy(policy), veus)
    assert is_legal(program)
    for edit in EDITS:
        for wrong in edit(program):
            assert rejected(wrong) or is_legal(wrong), f"{edit.__name__} for {veus} vEUs by {policy}\n{wrong}"
