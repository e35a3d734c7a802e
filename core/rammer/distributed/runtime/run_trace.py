"""Traced runs of a distributed program, with the activity of each device on one clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rammer.device.arrays import Array
from rammer.distributed.runtime.distributed_run import SpreadRuns
from rammer.distributed.transport.clock_offsets import CommonClock, estimate_offsets
from rammer.distributed.transport.event_log import Log, Mark
from rammer.distributed.transport.handshake import said_by_all

__all__ = ["SpreadMarks", "traced_runs"]


@dataclass(frozen=True)
class SpreadMarks:
    """The activity of each of ``devices``, in seconds by device 0's clock. ``clocks`` are the conversions to it."""

    devices: tuple[str, ...]
    clocks: tuple[CommonClock, ...]
    marks: tuple[tuple[Mark, ...], ...]

    @property
    def begin(self) -> float:
        """The begin of the first mark, or 0 without marks."""
        return min((m.begin for marks in self.marks for m in marks), default=0.0)


def traced_runs(
    runs: SpreadRuns, inputs: Sequence[Mapping[str, Array]], now: Callable[[], float] = time.perf_counter
) -> SpreadMarks | None:
    """Run with these inputs, several in flight, and return the marks in the process of device 0, None elsewhere. Called in every
    process alike. ``now`` is this process's clock, in seconds."""
    sites, seconds = runs.joined.sites, runs.joined.timeout
    with runs.ending():
        first = estimate_offsets(runs.fabric, sites, seconds, now)
        with runs.logging(now) as logs:
            runs.run_all(inputs)
        last = estimate_offsets(runs.fabric, sites, seconds, now)
        said = said_by_all(runs.fabric, {d: serialise_log(logs[d]) for d in runs.mine}, seconds)
    if not first:
        return None
    clocks = tuple(CommonClock(a, b) for a, b in zip(first, last, strict=True))
    marks = [[Mark(*m).moved(c.common) for m in words] for c, words in zip(clocks, said, strict=True)]
    return SpreadMarks(tuple(s.device for s in sites), clocks, tuple(map(tuple, marks)))


def serialise_log(log: Log) -> list[list[object]]:
    """Return the log as JSON values, to be sent to other processes."""
    return [m.values() for m in log.marks]
