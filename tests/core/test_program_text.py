"""The text of a program: short, and parsed back to an equal object."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rammer.device.manifest import Binding
from rammer.ir.operator import ROperator
from rammer.ir.parts import PRECISIONS
from rammer.ir.program import RProgram, waves
from rammer.schedule.baselines import Sequential
from rammer.schedule.policy_registry import list_policies, parse_policy
from rammer.schedule.wavefront import Wavefront
from rammer.verify.verifier import verify
from rammer_testing.nonempty import some
from rammer_testing.programs import TaskNet, adding, random_net, recurrent_net, summing


@settings(max_examples=40)
@given(
    st.integers(0, 10**6),
    st.integers(1, 12),
    st.integers(1, 30),
    st.sampled_from(sorted(list_policies())),
    st.sampled_from(PRECISIONS),
)
def test_text_reloads_to_an_equal_program(seed: int, operators: int, veus: int, policy: str, precision: str) -> None:
    random = Random(seed)
    program = replace(random_net(random, operators).program(parse_policy(policy), veus), precision=precision)
    program = replace(program, operators=tuple(with_kernel(o, random) for o in program.operators))
    again = RProgram.parse(str(program))
    assert again == program and str(again) == str(program)
    assert again.predicted == program.predicted
    assert verify(again) == verify(program)


def with_kernel(operator: ROperator, random: Random) -> ROperator:
    """Return the operator with or without a family, and with or without a config."""
    config = tuple((key, random.randrange(-1, 1025)) for key in random.sample(("threads", "bk", "halo"), random.randrange(3)))
    return replace(operator, family=random.choice(("", "", "gemm")), config=config)


def test_a_program_says_what_its_kernels_were_chosen_for() -> None:
    plain = two_steps().program(Wavefront(), 6)
    text = str(plain)
    rounded = replace(plain, precision="tf32")
    assert rounded != plain and str(rounded) == text.replace(" s\n", " s in tf32\n", 1) != text
    assert Binding.of(RProgram.parse(str(rounded)), ()).precision == "tf32"
    for word in ("float32", "tf33", "tf32 tf32", "TF32", ""):
        with pytest.raises(ValueError, match="line 1: not a line of a program"):
            RProgram.parse(text.replace(" s\n", f" s in {word}\n", 1))


def two_steps() -> TaskNet:
    net = TaskNet().tensor("x", 12).add(adding("a", 12, ["x"], 2))
    return net.add(summing("y", 6, "a", 1, 12))


def test_alike_rows_print_folded() -> None:
    text = str(two_steps().program(Wavefront(), 6))
    assert [line.strip() for line in text.splitlines() if line.strip().startswith(("row", "counter"))] == [
        "counter a: a[0:6]",
        "row v0..v5: a[0+1:1:1] | wait(a>=6) y[0+1:1:1]",
    ]


def test_round_robin_rows_print_folded() -> None:
    text = str(two_steps().program(Sequential(), 3))
    assert text.splitlines()[-1] == "  row v0..v2: a[0+1:2:3] | wait(a>=6) y[0+1:2:3]"


def test_a_large_program_stays_readable() -> None:
    program = recurrent_net(layers=2, steps=10, tasks=128).program(Sequential(), 128)
    assert len([line for line in str(program).splitlines() if line.startswith("  row")]) == 1


def test_a_wrong_line_is_named() -> None:
    lines = str(two_steps().program(Sequential(), 3)).splitlines()
    lines[-1] = lines[-1].replace("a[0+1:2:3]", "a[0+1:2")
    with pytest.raises(ValueError, match=rf"line {len(lines)}: not a run of tasks"):
        RProgram.parse("\n".join(lines))
    with pytest.raises(ValueError, match="line 2: not a line of a program"):
        RProgram.parse(lines[0] + "\nnonsense here\n")


@settings(max_examples=25)
@given(st.integers(0, 10**6), st.integers(1, 10), st.integers(1, 8))
def test_waves_hold_every_task_once_and_in_order(seed: int, operators: int, veus: int) -> None:
    program = random_net(Random(seed), operators).program(Wavefront(), veus)
    found = waves(program)
    assert sum(map(len, found)) == program.task_count
    wave_of = {(t.task.operator, t.task.index): t.wave for wave in found for t in wave}
    for wave in some(found):
        for item in wave:
            for wait in item.task.waits:
                counter = program.counter[wait.counter]
                needed = range(counter.first, counter.last)
                assert max(wave_of[counter.operator, i] for i in needed) < item.wave
