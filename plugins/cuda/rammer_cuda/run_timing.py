"""Timing of a program's runs on a GPU, until the clock is up and other processes seem to leave it alone.

An idle GPU may start at a sixth of its clock (345 of 1,980 MHz on an H200). Another process gets time slices of some
milliseconds. A few consecutive runs may all overlap them or miss them, which misrepresents the program.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Final

#: Consecutive runs per iteration, so that constants stay in the caches; and the minimum and maximum number of iterations.
RUNS: Final = 7
TURNS: Final = (2, 1000)
#: Minimum seconds of all iterations, and the limit after which they end. A small program's run occupies the GPU for less than its
#: launch lasts, and waits for milliseconds if other processes run. The caller's waiting time therefore counts, too.
SECONDS: Final = (0.05, 0.1)
#: The maximum ratio of the median iteration to the fastest on an undisturbed GPU: 1.01 to 1.03 on an idle H100.
STEADY: Final = 1.1


def undisturbed_seconds(replay: Callable[[], float]) -> float:
    """Return the minimum of ``replay`` (GPU seconds of a run), repeated until most iterations are alike or for ``SECONDS``."""
    found, begun, busy = list[float](), time.perf_counter(), 0.0
    for turn in range(1, TURNS[1] + 1):
        runs = [replay() for _ in range(RUNS)]
        busy += sum(runs)
        found.append(min(runs))
        spent, steady = max(busy, time.perf_counter() - begun), median(found) <= STEADY * min(found)
        if turn >= TURNS[0] and spent >= SECONDS[0] and (steady or spent >= SECONDS[1]):
            break
    return min(found)
