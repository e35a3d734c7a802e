"""Which of several programs for the same graph is the fastest, by whole runs on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rammer.errors import DeviceUnavailable
from rammer.ir.program import RProgram

__all__ = ["fastest_program"]

#: Runs of each program at first and, up to LONG seconds a run, in each further round.
RUNS, RUNS_AGAIN, LONG = 5, 12, 0.02
#: How many times the best so far a program may have taken to be in the next round. What else a machine does makes runs longer, by
#: up to a half, for some tenths of a second: so a few runs at one time tell little, and the shortest of several times counts.
ROUNDS = (1.5, 1.5, 1.1)


def fastest_program(programs: Sequence[RProgram], timed: Callable[[RProgram, int], float]) -> tuple[RProgram, str]:
    """The fastest program and a line that says why; ``timed`` is a program's seconds by so many runs, of which the least counts.

    Where the device is not here, the first one.
    """
    if len(programs) == 1:
        return programs[0], f"{programs[0].policy}: every policy does the same"
    try:
        seconds = [timed(p, RUNS) for p in programs]
    except DeviceUnavailable as problem:
        return programs[0], f"{programs[0].policy}, by prediction: {problem.what}"
    for margin in ROUNDS:
        close = [i for i, s in enumerate(seconds) if s <= margin * min(seconds)]
        again = {i: timed(programs[i], RUNS_AGAIN if min(seconds) < LONG else RUNS) for i in close if len(close) > 1}
        if all(seconds[i] == s for i, s in again.items()):  # none is close, or a clock that repeats exactly, as simulators' do
            break
        seconds = [min(s, again.get(i, s)) for i, s in enumerate(seconds)]
    best = min(range(len(programs)), key=seconds.__getitem__)
    said = ", ".join(f"{p.policy} {s * 1e3:.4g} ms" for p, s in zip(programs, seconds, strict=True))
    return programs[best], f"{programs[best].policy}, by measurement: {said}"
