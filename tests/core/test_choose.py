"""The choice of the fastest program, with failures, temporary load and earlier measurements."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import product
from random import Random

import numpy as np
import pytest

from rammer.compile_options import CompileOptions
from rammer.compiled.segments import ProgramSegment
from rammer.compiler.compiler import Compiler
from rammer.compiler.policy_choice import segment_opener
from rammer.device.loader import Registry
from rammer.errors import DeviceFailure, DeviceUnavailable
from rammer.frontend.read.reader import read_model
from rammer.ir.program import RProgram
from rammer.schedule.baselines import Sequential
from rammer.tuning import fastest_program as choose
from rammer.tuning.fastest_program import RACE, SAME, TimeCache, fastest_program
from rammer.tuning.kernel_store import KernelStore
from rammer_testing.net import Net
from rammer_testing.nonempty import some
from rammer_testing.programs import random_net

BASE = random_net(Random(1), 3).program(Sequential(), 2)


def program_of(policy: str) -> RProgram:
    return replace(BASE, policy=policy)


@dataclass
class Bench:
    """Programs by policy with the seconds of a run. Some fail when loaded, when run, or when others are loaded; ``slowed`` is the
    slowdown of a run by its number."""

    seconds: Mapping[str, float]
    unloadable: Collection[str] = ()
    failing: Collection[str] = ()
    large: Collection[str] = ()
    slowed: Callable[[int], float] = lambda run: 1.0
    open: set[str] = field(default_factory=set)
    runs: int = 0

    @contextmanager
    def __call__(self, program: RProgram) -> Iterator[Callable[[], float]]:
        name = program.policy
        if name in self.unloadable or (name in self.large and self.open):
            raise DeviceFailure(f"{name} has no room")
        self.open.add(name)
        try:
            yield lambda: self.run(name)
        finally:
            self.open.remove(name)

    def run(self, name: str) -> float:
        assert name in self.open
        if name in self.failing:
            raise DeviceFailure(f"{name} broke")
        self.runs += 1
        return self.seconds[name] * self.slowed(self.runs)

    @property
    def programs(self) -> list[RProgram]:
        return [program_of(n) for n in self.seconds]


def test_the_fastest_is_kept_and_it_is_said_what_each_took(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "RACE", replace(RACE, settled=0.0))  # hundreds of iterations of a bench take less
    bench = Bench({"a": 5.0, "b": 1.05, "c": 1.0})
    best, why = fastest_program(bench.programs, bench)
    assert best.policy == "c" and why == "c, by measurement: a 5000 ms, b 1050 ms, c 1000 ms"
    assert bench.runs < 3 * RACE.most and not bench.open  # slow programs are measured no more


def test_of_what_takes_the_same_the_better_prediction_is_kept() -> None:
    bench = Bench({"a": 1.002, "b": 1.0})
    assert fastest_program(bench.programs, bench)[0].policy == "a"


def test_a_load_on_some_of_the_first_turns_decides_nothing(rng: np.random.Generator) -> None:
    """Check with at most two of the first three iterations of each program slowed, by less than a half."""
    for _ in range(20):
        times = np.cumprod([1e-5, *rng.uniform(1.01, 1.3, 3)])[rng.permutation(4)].tolist()
        quiet, loads = rng.integers(3, size=4), rng.uniform(1.0, 1.49, (3, 4))

        def slowed(run: int, quiet: np.ndarray = quiet, loads: np.ndarray = loads) -> float:
            turn, place = divmod(run - 1, 4)
            return 1.0 if turn > 2 or quiet[place] == turn else float(loads[turn, place])

        bench = Bench(dict(zip("abcd", times, strict=True)), slowed=slowed)
        assert fastest_program(bench.programs, bench)[0].policy == min(bench.seconds, key=bench.seconds.__getitem__)


@pytest.mark.parametrize("block", [1, 2, 3, 5, 7])
def test_what_slows_the_machine_for_a_while_decides_nothing(block: int, rng: np.random.Generator) -> None:
    # Every second block of this many runs is slowed by up to three times; a program with a quiet run in the first iterations
    # remains.
    seconds = dict(zip("abcd", rng.uniform(1.0, 1.09, 4).tolist(), strict=True))
    loads = rng.uniform(1.2, 3.0, 200)
    bench = Bench(seconds, slowed=lambda run: float(loads[run // block % 200]) if run // block % 2 else 1.0)
    best, why = fastest_program(bench.programs, bench)
    quiet = {n: any(not (r // block % 2) for r in range(i + 1, 13, 4)) for i, n in enumerate(seconds)}
    assert seconds[best.policy] <= SAME * min(s for n, s in seconds.items() if quiet[n]), why


@pytest.mark.parametrize("states", [*product(("well", "unloadable", "failing", "large"), repeat=3)])
def test_what_does_not_run_is_left_out_and_the_fastest_of_the_others_is_kept(
    states: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    names = {kind: [n for n, s in zip("abc", states, strict=True) if s == kind] for kind in ("unloadable", "failing", "large")}
    bench = Bench({"a": 3.0, "b": 2.0, "c": 1.0}, **names)
    best, why = fastest_program(bench.programs, bench)
    lost = [n for n, s in zip("abc", states, strict=True) if s in ("unloadable", "failing")]
    left = [n for n in "abc" if n not in lost]
    assert best.policy == (left[-1] if left else "a") and not bench.open
    assert f"{best.policy}, by " + ("measurement" if left else "prediction: no program ran") in why
    told = capsys.readouterr().err
    assert all(f"policy {n} is left out: {n} " in told for n in lost) and told.count("left out") == len(lost)
    assert {n for n in "abc" if f"{n} left out" in why} == ({*lost} if left else set())


def test_without_a_device_to_measure_the_first_prediction_is_kept_and_it_is_said() -> None:
    def opened(program: RProgram) -> Iterator[Callable[[], float]]:
        raise DeviceUnavailable("compiled without the card")

    best, why = fastest_program([program_of("a"), program_of("b")], contextmanager(opened))
    assert best.policy == "a" and why == "a, by prediction: compiled without the card"


def test_what_was_measured_together_is_not_measured_again() -> None:
    backend, store = Registry().open("toy"), KernelStore(None)
    kept, bench = TimeCache(backend, store), Bench({"a": 2.0, "b": 1.0, "c": 3.0})
    first = fastest_program(bench.programs, bench, kept)
    runs = bench.runs
    again = fastest_program(bench.programs, bench, kept)
    assert again[0] == first[0] and bench.runs == runs
    assert again[1] == first[1].replace("by measurement", "by measurement before")
    fastest_program(bench.programs[:2], bench, kept)  # not cached for fewer programs: their times include load by others
    assert bench.runs > runs


def test_a_set_of_which_one_failed_is_measured_again() -> None:
    kept = TimeCache(Registry().open("toy"), KernelStore(None))
    broken, well = Bench({"a": 2.0, "b": 1.0}, failing="b"), Bench({"a": 2.0, "b": 1.0})
    assert [fastest_program(b.programs, b, kept)[0].policy for b in some([broken, well])] == ["a", "b"]


def test_programs_are_timed_with_their_own_constants(rng: np.random.Generator) -> None:
    """Check programs of one model whose constants of one name differ in shape, as after different passes."""
    backend, segments = Registry().open("toy"), []
    for width in (3, 5):
        net = Net((), rng)
        model = net.model(net.node("MatMul", net.input(2, 4), net.weight(4, width)))
        (segment,) = Compiler(backend, CompileOptions(), KernelStore(None)).compile_model(read_model(model), {}).segments
        assert isinstance(segment, ProgramSegment)
        segments.append(segment)
    assert {*segments[0].constants} == {*segments[1].constants} != set()
    for segment in some(segments):
        with segment_opener(backend, segments)(segment.program) as run:
            assert run() > 0
