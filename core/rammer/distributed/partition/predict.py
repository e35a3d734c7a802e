"""Predicted time of a partitioned model: every device runs its steps in order, and every link its transfers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from rammer.distributed.distributed_program import DevicePart, Link, Prediction, Transfer

__all__ = ["ASSUMED", "Links", "StepTime", "link_between", "predict_lower_bound", "predict_run", "step_times"]

#: Links between devices, by (source, target).
Links: TypeAlias = Mapping[tuple[int, int], Link]
#: Assumed for an unmeasured link between two processes of one host: seconds, bytes a second.
ASSUMED: Final = (5e-6, 5e9)


@dataclass(frozen=True)
class StepTime:
    """The timing view of a step: seconds, arrivals and departures."""

    seconds: float
    arrivals: tuple[str, ...]
    departures: tuple[str, ...]


def link_between(links: Links, source: int, target: int) -> Link:
    """Return the link from one device to another, measured or assumed."""
    return links.get((source, target)) or Link(source, target, *ASSUMED, "assumed")


def step_times(parts: Sequence[DevicePart]) -> list[list[StepTime]]:
    """Return steps with the predicted times of their programs."""
    return [[StepTime(s.program.predicted, s.arrivals, s.departures) for s in part.steps] for part in parts]


def predict_run(
    devices: Sequence[Sequence[StepTime]],
    transfers: Sequence[Transfer],
    links: Links,
    results: Sequence[str] = (),
    alone: tuple[float, ...] = (),
) -> Prediction:
    """Predict one run from its start to its last result, and the interval between independent runs.

    The interval is that of the busiest device or link. A link, and every section shared by links, carries one transfer at a time;
    its latency occupies neither device nor link."""
    known = {t.name: t for t in transfers}
    link = {(t.source, t.target): link_between(links, t.source, t.target) for t in transfers}
    clock, free, there = [0.0] * len(devices), dict[str, float](), dict[str, float]()
    at, moved = [0] * len(devices), True
    while moved:
        moved = False
        for device, steps in enumerate(devices):
            while at[device] < len(steps) and all(a in there for a in steps[at[device]].arrivals):
                step, moved = steps[at[device]], True
                clock[device] = max([clock[device], *(there[a] for a in step.arrivals)]) + step.seconds
                for name in step.departures:
                    way, nbytes = link[known[name].source, known[name].target], known[name].nbytes
                    begin = max([clock[device], *(free.get(s, 0.0) for s, _ in way.stretches)])
                    free |= {s: begin + nbytes / rate for s, rate in way.stretches}
                    there[name] = begin + way.seconds(nbytes)
                at[device] += 1
    busy, carried = tuple(sum(s.seconds for s in steps) for steps in devices), _link_seconds(transfers, link)
    seconds = {t.name: link[t.source, t.target].seconds(t.nbytes) for t in transfers}
    latency = max([*clock, *(there[r] for r in results if r in there)], default=0.0)
    return Prediction(latency, max([*busy, *carried.values()], default=0.0), busy, seconds, alone)


def predict_lower_bound(
    devices: Sequence[Sequence[StepTime]], transfers: Sequence[Transfer], links: Links, results: Sequence[str] = ()
) -> Prediction:
    """Return a lower bound of ``predict_run`` for steps that take at least these times. Transfers do not wait for each other, but
    every section carries all of its transfers."""
    ways = {(t.source, t.target): link_between(links, t.source, t.target) for t in transfers}
    alone = {key: replace(way, through=()) for key, way in ways.items()}
    free = tuple(replace(t, source=2 * k, target=2 * k + 1) for k, t in enumerate(transfers))  # each with a separate link
    pairs = zip(free, transfers, strict=True)
    renamed = {(f.source, f.target): replace(alone[t.source, t.target], source=f.source, target=f.target) for f, t in pairs}
    first = predict_run(devices, free, renamed, results)
    carried = max(_link_seconds(transfers, ways).values(), default=0.0)
    return Prediction(max(first.latency, carried), max(*first.busy, carried), first.busy)


def _link_seconds(transfers: Sequence[Transfer], ways: Links) -> dict[str, float]:
    """Return the seconds of each link section for all of its transfers in a run."""
    carried: dict[str, float] = {}
    for t in transfers:
        for stretch, rate in ways[t.source, t.target].stretches:
            carried[stretch] = carried.get(stretch, 0.0) + t.nbytes / rate
    return carried
