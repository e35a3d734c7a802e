"""Programs over several devices: the verifier compared with a simulator with one memory per device, and planted faults."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from home_nets import (
    LENGTH,
    HomeNet,
    acknowledged,
    crossed,
    doubled,
    dropped,
    early,
    elsewhere,
    misheard,
    reused,
    transfers,
    unheard,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from task_oracle import is_legal

from rammer.ir.evaluate import evaluate_compute
from rammer.ir.fold_rows import fold
from rammer.ir.program import RProgram
from rammer.verify.multi_device import FETCH
from rammer.verify.verifier import VerifyError, verify
from rammer_testing.spreads import Play, Stuck

X = np.random.default_rng(0).standard_normal(LENGTH).astype(np.float32)


def rejected(program: RProgram) -> str:
    try:
        verify(program)
    except VerifyError as problem:
        return str(problem)
    return ""


def played(program: RProgram, seed: int, lazy: bool) -> np.ndarray | None:
    """Return the result of one order of execution; None if it deadlocks."""
    try:
        return Play(program, {}, Random(seed), lazy).run({p.external: X for p in program.inputs})["y"]
    except Stuck:
        return None


def wrong(program: RProgram, right: np.ndarray, runs: int = 4) -> bool:
    """Return True if some order of execution shows a fault."""
    results = (played(program, seed, bool(seed % 2)) for seed in range(runs))
    return any(r is None or not np.array_equal(r, right) for r in results)


def reference(net: HomeNet) -> np.ndarray:
    program = net.program()
    held = {p.tensor: X for p in program.inputs}
    for operator in program.operators:
        held[operator.anchor.name] = evaluate_compute(operator.anchor, held)
    return held["y"]


@pytest.mark.slow
@settings(max_examples=25)
@given(st.integers(0, 10**6), st.integers(1, 8), st.integers(2, 4))
def test_random_programs_are_legal_print_and_compute(seed: int, operators: int, devices: int) -> None:
    net = HomeNet(seed, operators, devices)
    program = net.program()
    verify(program)
    assert is_legal(program)
    assert RProgram.parse(str(program)) == program and RProgram.parse(str(program)).digest == program.digest
    for lazy in (False, True):
        np.testing.assert_allclose(played(program, seed, lazy), reference(net), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("edit", [unheard, early, misheard, dropped, doubled, reused, crossed, elsewhere])
def test_the_verifier_refuses_whatever_goes_wrong(edit: Callable[[RProgram], Iterator[RProgram]]) -> None:
    """Check each kind of fault: the verifier refuses every fault of the simulator, and both detect enough of them."""
    shown = caught = tried = 0
    for seed in range(12):
        program = HomeNet(seed, 6, 2 + seed % 3).program()
        right = played(program, 0, lazy=False)
        assert right is not None
        edits = list(edit(program))
        for edited in Random(seed).sample(edits, min(len(edits), 5)):
            bad, found = wrong(edited, right), rejected(edited)
            assert found or not bad, f"missed a fault in\n{edited}"
            shown, caught, tried = shown + bad, caught + bool(found), tried + 1
    least = {doubled: 0, crossed: 2}.get(edit, 6)  # writing the same value twice changes no result
    enough = {crossed: 2}.get(edit, 8)  # many rows may wait without creating a cycle
    assert tried >= 15 and caught >= enough and shown >= least, (tried, caught, shown)


def test_what_is_said_of_a_fault() -> None:
    program = next(p for p in (HomeNet(s, 6, 2).program() for s in range(9)) if len(transfers(p)) > 1)
    for edit, message in (
        (unheard, "and its row has not waited for"),
        (misheard, "which does not arrive here"),
        (dropped, "parts of which are never written"),
        (elsewhere, "a transfer is missing"),
    ):
        assert any(message in rejected(edited) for edited in edit(program))
    one = transfers(program)[0]
    more = replace(one, tile=(LENGTH // 2,))
    plain = replace(one, family="")
    for other, message in ((more, "more than a copy in one task"), (plain, "a transfer is missing")):
        operators = tuple(other if o.name == one.name else o for o in program.operators)
        edited = replace(program, operators=operators, counters=tuple(c for c in program.counters))
        assert message in rejected(edited) or "on no row" in rejected(edited) or "full count" in rejected(edited)


@pytest.mark.slow
def test_a_fetch_is_acknowledged_where_it_reads_and_nowhere_else() -> None:
    heard = stray = 0
    for seed in range(30):
        for home, near, edited in acknowledged(HomeNet(seed, 6, 3).program()):
            said = rejected(edited)
            heard, stray = heard + (near and not said), stray + (not near)
            assert ("which does not arrive here" in said) if not near else ("arrive" not in said), (home, said)
    assert heard >= 5 and stray >= 5, (heard, stray)


def test_a_fetch_has_one_form() -> None:
    program = next(p for p in (HomeNet(s, 6, 2).program() for s in range(9)) if any(o.family == FETCH for o in p.operators))
    one = next(o for o in program.operators if o.family == FETCH)
    (source,) = (load.tensor for load in one.anchor.loads if program.types[load.tensor].dtype == "float32")
    bare = replace(one.anchor, body=next(load for load in one.anchor.loads if load.tensor == source))
    for other, message in (
        (replace(one, computes=(bare,)), "more than a copy in one task, up to a record"),
        (replace(one, family=""), "a transfer is missing"),
    ):
        operators = tuple(other if o.name == one.name else o for o in program.operators)
        assert message in rejected(replace(program, operators=operators))


def test_homes_must_be_the_programs() -> None:
    program = HomeNet(3, 5, 2).program()
    fewer = (replace(program.homes[0], rows=program.homes[0].rows + 1), *program.homes[1:])
    assert "do not add up to" in rejected(replace(program, homes=fewer))
    assert "a transfer or a buffer of another device" in rejected(replace(program, homes=()))
    with pytest.raises(ValueError, match="cannot be merged"):
        fold(program, 1)


def test_one_device_prints_as_ever() -> None:
    from rammer.schedule.wavefront import Wavefront
    from rammer_testing.programs import TaskNet, adding

    text = str(TaskNet().tensor("x", 4).add(adding("y", 4, ["x"], 2)).program(Wavefront(), 2))
    assert "home" not in text and " in 0" not in text
