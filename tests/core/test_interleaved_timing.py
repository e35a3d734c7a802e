"""Interleaved timing: the order of runs, its limits, and subjects that fail or are slow."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from rammer.errors import DeviceFailure
from rammer.tuning import interleaved_timing
from rammer.tuning.interleaved_timing import Rounds, time_interleaved


class Clock:
    """A clock that subjects advance. ``subject`` returns a subject with these times of its runs, the last one repeated."""

    def __init__(self) -> None:
        self.now, self.order = 0.0, list[str]()

    def subject(self, name: str, times: Sequence[float]) -> Callable[[], float]:
        left = list(times)

        def run() -> float:
            self.order.append(name)
            seconds = left.pop(0) if len(left) > 1 else left[0]
            self.now += seconds
            return seconds

        return run


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(interleaved_timing.time, "perf_counter", lambda: made.now)
    return made


def test_subjects_alternate_in_bursts(clock: Clock) -> None:
    runs = {"a": clock.subject("a", [5.0, 3.0, 4.0]), "b": clock.subject("b", [1.0])}
    times = time_interleaved(runs, Rounds(burst=2, least=3, most=3))
    assert "".join(clock.order) == "aabb" * 3
    assert times.rounds == {"a": [3.0, 4.0, 4.0], "b": [1.0] * 3}
    assert times.best == {"a": 3.0, "b": 1.0} and times.medians == {"a": 4.0, "b": 1.0} and not times.steady


@pytest.mark.parametrize(("times", "steady"), [([1.0], True), ([3.0, 3.0, 1.0], True), ([1.0, 3.0, 1.5], False)])
def test_rounds_continue_until_times_are_steady_or_the_limit(clock: Clock, times: list[float], steady: bool) -> None:
    found = time_interleaved({"": clock.subject("", times)}, Rounds(seconds=(10.0, 30.0), until_steady=True))
    assert found.steady == steady and (10.0 <= clock.now < 13.0 if steady else 30.0 <= clock.now < 33.0)


def test_two_rounds_are_the_least(clock: Clock) -> None:
    time_interleaved({"": clock.subject("", [100.0])}, Rounds(least=20, seconds=(0.3, 4.0)))
    assert len(clock.order) == 2


@pytest.mark.parametrize(("settled", "last"), [(0.0, 3), (20.0, 4)])
def test_slow_subjects_are_dropped_after_some_rounds(clock: Clock, settled: float, last: int) -> None:
    runs = {name: clock.subject(name, [seconds]) for name, seconds in (("a", 1.0), ("b", 1.05), ("c", 1.5), ("d", 1.7))}
    times = time_interleaved(runs, Rounds(least=30, most=30, drop=((8, 1.1), (3, 1.5)), settled=settled))
    assert {n: clock.order.count(n) for n in "abcd"} == {"a": 30, "b": 30, "c": 8, "d": last}
    assert [*times.best] == ["a", "b", "c", "d"]


def test_subjects_that_fail_are_dropped(clock: Clock) -> None:
    def broken() -> float:
        raise DeviceFailure("broken")

    times = time_interleaved({"a": broken, "b": clock.subject("b", [1.0])}, Rounds.exactly(4))
    assert times.best == {"b": 1.0} and [*times.lost] == ["a"] and clock.order == ["b"] * 4
    with pytest.raises(DeviceFailure, match="broken"):
        times.all_run()
    assert time_interleaved({"a": broken}, Rounds.exactly(4)).best == {}
