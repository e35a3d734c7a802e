"""Runs on a GPU in turns, until it is at its clock and nobody else uses it, as far as that can be told.

A GPU that had nothing to do may begin at a sixth of its clock (345 of 1,980 MHz on an H200). And another process gets slices of
time, some milliseconds long: so few runs one after the other may all be beside its slices, which says nothing of the program.
On an H200 beside another process's products a graph's median of seven runs was what it is alone, that of a persistent kernel up
to ten times as much: it would have told the wrong one of two in 26 of 90 cases, and the least of turns did in none of 24.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Final

#: Turns of so many runs, so that constants stay in the caches as they would; and the least and the greatest number of turns.
RUNS: Final = 7
TURNS: Final = (2, 1000)
#: Seconds of all turns at the least, and those after which no more are taken. A run of a small program keeps the GPU busy for
#: less than its launch takes, and waits for milliseconds beside other processes: what the caller waits for counts, too.
SECONDS: Final = (0.1, 0.5)
#: How far half of the turns may be from the least of all where nothing disturbs them: on an idle H100 1.01 to 1.03.
STEADY: Final = 1.1


@dataclass(frozen=True)
class TurnTimes:
    """The least ``seconds`` of each, by its name; ``steady`` where runs were alike, so that another time would tell the same."""

    seconds: Mapping[str, float]
    steady: bool


def in_turns(replays: Mapping[str, Callable[[], float]], seconds: tuple[float, float] = SECONDS) -> TurnTimes:
    """Runs of each, whose seconds on the GPU ``replays`` give, until most turns are alike; ``seconds`` as ``SECONDS``."""
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
