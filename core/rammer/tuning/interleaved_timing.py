"""Interleaved timing: in each round every subject has a burst of runs, so that other load slows all subjects alike.

Another process may occupy a device for some milliseconds, and the clock of an idle GPU rises slowly. A few consecutive runs may
all overlap such a time, which misrepresents the subject. The fastest burst of each subject is compared: with another process on
an H200, medians selected the slower of two programs in 26 of 90 cases, interleaved minima in 0 of 24."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Final, Generic, TypeVar

from rammer.errors import DeviceFailure

__all__ = ["STEADY", "InterleavedTimes", "Rounds", "time_interleaved"]

Key = TypeVar("Key")
#: The maximum ratio of the median round to the fastest on an undisturbed device: 1.01 to 1.03 on an idle H100.
STEADY: Final = 1.1


@dataclass(frozen=True)
class Rounds:
    """Limits of a timing: ``burst`` consecutive runs per round, and the minimum and maximum number of rounds.

    Rounds continue for the first number of ``seconds``, and until the times are steady if ``until_steady``, but not beyond the
    second number. After ``settled`` seconds, ``drop`` applies: after so many rounds, subjects that take longer than this multiple
    of the best time are timed no further."""

    burst: int = 1
    least: int = 2
    most: int = 1000
    seconds: tuple[float, float] = (0.0, math.inf)
    until_steady: bool = False
    drop: tuple[tuple[int, float], ...] = ()
    settled: float = 0.0

    @staticmethod
    def exactly(count: int) -> Rounds:
        """Return the limits of ``count`` rounds with one run of each subject."""
        return Rounds(least=count, most=count)


@dataclass
class InterleavedTimes(Generic[Key]):
    """The times of all rounds by subject (seconds; the best run of each burst), and the failures by subject."""

    rounds: dict[Key, list[float]]
    lost: dict[Key, DeviceFailure] = field(default_factory=dict)

    def all_run(self) -> InterleavedTimes[Key]:
        """Return these times. Raises the DeviceFailure of a subject that failed."""
        for problem in self.lost.values():
            raise problem
        return self

    @property
    def best(self) -> dict[Key, float]:
        """The minimum time of each subject."""
        return {key: min(found) for key, found in self.rounds.items()}

    @property
    def medians(self) -> dict[Key, float]:
        """The median round of each subject."""
        return {key: median(found) for key, found in self.rounds.items()}

    @property
    def steady(self) -> bool:
        """True if most rounds were alike, so that a repetition would agree."""
        return all(median(found) <= STEADY * min(found) for found in self.rounds.values())


def time_interleaved(runs: Mapping[Key, Callable[[], float]], limits: Rounds) -> InterleavedTimes[Key]:
    """Time the subjects ``runs``, functions that run once and return the seconds by the device's clock. A subject that fails with
    DeviceFailure is dropped."""
    times, left, begun = InterleavedTimes({key: list[float]() for key in runs}), dict(runs), time.perf_counter()
    for number in range(1, limits.most + 1):
        for key in [*left]:
            try:
                times.rounds[key].append(min([left[key]() for _ in range(limits.burst)]))
            except DeviceFailure as problem:
                times.lost[key] = problem
                del left[key], times.rounds[key]
        spent, best = time.perf_counter() - begun, times.best
        margin = next((m for n, m in limits.drop if number >= n and spent > limits.settled), math.inf)
        left = {key: run for key, run in left.items() if best[key] <= margin * min(best.values())}
        enough = number >= limits.least and spent >= limits.seconds[0] and (not limits.until_steady or times.steady)
        if enough or not left or (number > 1 and spent >= limits.seconds[1]) or (margin < math.inf and len(left) < 2):
            break
    return times
