"""Interleaved timing of runs on a GPU, until the clock is up and other processes seem to leave it alone.

An idle GPU may start at a sixth of its clock (345 of 1,980 MHz on an H200). Another process gets time slices of some
milliseconds. A few consecutive runs may all overlap them or miss them, which misrepresents the program. With another process's
products on an H200, a graph's median of seven runs was undisturbed. That of a persistent kernel was up to ten times as long. The
median would have selected the slower of two in 26 of 90 cases, the interleaved minimum in 0 of 24.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Final

#: Consecutive runs per iteration, so that constants stay in the caches; and the minimum and maximum number of iterations.
RUNS: Final = 7
TURNS: Final = (2, 1000)
#: Minimum seconds of all iterations, and the limit after which they end. A small program's run occupies the GPU for less than its
#: launch lasts, and waits for milliseconds if other processes run. The caller's waiting time therefore counts, too.
SECONDS: Final = (0.1, 0.5)
#: The maximum ratio of the median iteration to the fastest on an undisturbed GPU: 1.01 to 1.03 on an idle H100.
STEADY: Final = 1.1


@dataclass(frozen=True)
class TurnTimes:
    """The minimum ``seconds`` by name; ``steady`` if the runs were alike, so that a repetition would agree."""

    seconds: Mapping[str, float]
    steady: bool


def in_turns(replays: Mapping[str, Callable[[], float]], seconds: tuple[float, float] = SECONDS) -> TurnTimes:
    """Time interleaved runs of all ``replays`` (GPU seconds) until most iterations are alike; ``seconds`` as ``SECONDS``."""
    leasts: dict[str, list[float]] = {name: [] for name in replays}
    begun, busy = time.perf_counter(), 0.0

    def steady() -> bool:
        return all(median(found) <= STEADY * min(found) for found in leasts.values())

    for turn in range(1, TURNS[1] + 1):
        for name, replay in replays.items():
            runs = [replay() for _ in range(RUNS)]
            busy += sum(runs)
            leasts[name].append(min(runs))
        spent = max(busy, time.perf_counter() - begun)
        if turn >= TURNS[0] and spent >= seconds[0] and (steady() or spent >= seconds[1]):
            break
    return TurnTimes({name: min(found) for name, found in leasts.items()}, steady())
