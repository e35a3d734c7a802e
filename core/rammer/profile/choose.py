"""Which of several programs for the same graph is the fastest, by whole runs on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rammer.errors import DeviceUnavailable
from rammer.ir.program import RProgram

__all__ = ["fastest_program"]

#: Runs of each program, and of those that then came within CLOSE of the best: what differs by less than timers do.
RUNS, RUNS_AGAIN, CLOSE = 5, 20, 1.1


def fastest_program(programs: Sequence[RProgram], timed: Callable[[RProgram, int], float]) -> tuple[RProgram, str]:
    """The fastest program and a line that says why; ``timed`` is a program's seconds by so many runs.

    Where the device is not here, the first one.
    """
    if len(programs) == 1:
        return programs[0], f"{programs[0].policy}: every policy does the same"
    try:
        seconds = [timed(p, RUNS) for p in programs]
    except DeviceUnavailable as problem:
        return programs[0], f"{programs[0].policy}, by prediction: {problem.what}"
    close = [i for i, s in enumerate(seconds) if s <= CLOSE * min(seconds)]
    if len(close) > 1:
        for i in close:
            seconds[i] = timed(programs[i], RUNS_AGAIN)
    best = min(close, key=seconds.__getitem__)
    said = ", ".join(f"{p.policy} {s * 1e3:.4g} ms" for p, s in zip(programs, seconds, strict=True))
    return programs[best], f"{programs[best].policy}, by measurement: {said}"
