"""Folding of rows: legal, complete and equal in value for any number of vEUs."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rammer.errors import DeviceFailure
from rammer.ir.fold_rows import fold
from rammer.ir.program import Counter, RProgram, Wait, tasks_of, waves
from rammer.runtime.host_memory import HostMemory
from rammer.schedule.policy_registry import list_policies
from rammer.verify.verifier import VerifyError, verify
from rammer_testing.nonempty import some
from rammer_testing.programs import random_net, recurrent_net


def run(program: RProgram, seed: int) -> np.ndarray:
    """Run the program on the host, one task after another in wave order."""
    memory = HostMemory(program, {})
    rng = np.random.default_rng(seed)
    memory.write_inputs({p.external: rng.standard_normal(program.storage[p.tensor].shape) for p in program.inputs})
    for wave in waves(program):
        for placed in wave:
            memory.run_task(program.operator[placed.task.operator], placed.task.index)
    return memory.read_outputs()["y"]


def plain(program: RProgram) -> set[tuple[str, int]]:
    return {(t.operator, t.index) for _, _, t in tasks_of(program)}


@pytest.mark.slow
@settings(max_examples=25)
@given(st.integers(0, 2**32), st.integers(1, 9), st.integers(1, 9), st.sampled_from(["sequential", "greedy", "wavefront", "ios"]))
def test_folded_programs_are_legal_and_compute_the_same(seed: int, veus: int, fewer: int, policy: str) -> None:
    program = random_net(Random(seed), 8).program(list_policies()[policy], veus)
    folded = fold(program, fewer)
    assert folded.veus == min(veus, fewer)
    assert plain(folded) == plain(program)
    verify(folded)
    assert RProgram.parse(str(folded)) == folded
    want, have = run(program, seed), run(folded, seed)
    assert np.isfinite(want).all()
    np.testing.assert_array_equal(have, want)


def test_one_row_needs_no_waits() -> None:
    folded = fold(recurrent_net(3, 5, 4).program(list_policies()["wavefront"], 6), 1)
    assert not folded.counters
    assert not any(t.waits for _, _, t in some(tasks_of(folded)))


def test_enough_veus_leave_the_program_alone() -> None:
    program = recurrent_net(2, 2, 4).program(list_policies()["wavefront"], 3)
    assert fold(program, 3) is program
    assert fold(program, 64) is program


def test_waits_on_other_rows_stay() -> None:
    program = recurrent_net(2, 6, 8).program(list_policies()["wavefront"], 8)
    folded = fold(program, 2)
    verify(folded)
    assert folded.counters
    bare = replace(folded, rows=tuple(tuple(replace(t, waits=()) for t in row) for row in folded.rows))
    with pytest.raises(VerifyError):
        verify(bare)


def test_mistakes_are_refused() -> None:
    program = recurrent_net(1, 2, 2).program(list_policies()["wavefront"], 2)
    with pytest.raises(ValueError, match="at least one vEU, got 0"):
        fold(program, 0)
    first, *rest = program.rows[0]
    last = program.operators[-1]
    stuck = replace(first, waits=(Wait(last.name, last.task_count),))
    circle = replace(
        program,
        rows=((stuck, *rest), *program.rows[1:]),
        counters=(*program.counters, Counter(last.name, last.name, 0, last.task_count)),
    )
    with pytest.raises(ValueError, match="in a cycle"):
        fold(circle, 1)


def test_memory_that_this_process_cannot_have_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the process's limit, which may be below the memory that the device reports."""
    program = random_net(Random(1), 4).program(list_policies()["wavefront"], 2)
    monkeypatch.setattr("rammer.runtime.host_memory.available_bytes", lambda: 16)
    for limit in (0, 1 << 60):
        with pytest.raises(DeviceFailure, match="bytes, the limit is 16"):
            HostMemory(program, {}, limit)
