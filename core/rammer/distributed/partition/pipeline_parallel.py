"""Pipelines over layers: consecutive devices, so that several runs are in flight.

The ordered Computes are cut into one section per device. The best cut has the least interval between results: that of the slowest
section or link. Ties are broken by the fewest bytes transferred."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rammer.distributed.partition.cut_graph import Spot
from rammer.distributed.partition.operator_cost import Costs
from rammer.distributed.partition.predict import Links, link_between
from rammer.ir.compute import ComputeGraph

__all__ = ["assign_pipeline"]

#: Maximum number of cut points searched; beyond it, those with the fewest bytes are searched.
MOST = 1500


def assign_pipeline(
    graph: ComputeGraph, costs: Sequence[Costs], links: Links, scale: Sequence[float] = ()
) -> dict[str, Spot] | None:
    """Return a spot for every Compute, one stage a device, or None if the graph has too few cut points. ``costs`` are those of
    each device. ``scale`` is the ratio of actual to estimated time of each device's section."""
    places, crossing = _cut_points(graph, costs[0].interior)
    ends = _best_cuts(
        places, crossing, [_prefix_seconds(graph, c) * s for c, s in zip(costs, scale or (1.0,) * len(costs), strict=True)], links
    )
    if ends is None:
        return None
    return {
        c.name: Spot(stage, stage) for k, c in enumerate(graph.computes) for stage in [int(np.searchsorted(ends, k, "right"))]
    }


def _prefix_seconds(graph: ComputeGraph, costs: Costs) -> NDArray[np.float64]:
    """Return the seconds of all Computes before each position."""
    return np.concatenate(([0.0], np.cumsum([costs.seconds[c.name] for c in graph.computes])))


def _cut_points(graph: ComputeGraph, interior: frozenset[str]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the cut points and the bytes that cross there. Cuts through an operator are used only if all others are absent."""
    made = {c.name: k for k, c in enumerate(graph.computes)}
    last = {n: k for k, c in enumerate(graph.computes) for n in c.reads if n in made}
    live, inner = np.zeros(len(made) + 1), np.zeros(len(made) + 1)
    for name, end in last.items():
        for amount, table in ((graph.types[name].nbytes, live), (int(name in interior), inner)):
            table[made[name] + 1] += amount
            table[end + 1 if end + 1 < len(table) else -1] -= amount
    live, inner = np.cumsum(live), np.cumsum(inner)
    found = np.flatnonzero((inner == 0) & (live > 0))
    found = found if len(found) else np.flatnonzero(live > 0)
    return np.sort(found[np.argsort(live[found], kind="stable")[:MOST]]), live


def _best_cuts(
    places: NDArray[np.int64], crossing: NDArray[np.float64], sums: Sequence[NDArray[np.float64]], links: Links
) -> list[int] | None:
    """Return the ends of all sections but the last one."""
    count = len(sums)
    if len(places) < count - 1:
        return None
    # best[i]: the least (slowest section or link, bytes) if this device's section ends at cut point i
    slowest, carried = sums[0][places], crossing[places]
    back = list[NDArray[np.int64]]()
    for device in range(1, count):
        ends = places if device < count - 1 else np.array([len(sums[0]) - 1])
        bandwidth = link_between(links, device - 1, device).bandwidth
        arrives = np.maximum(slowest, crossing[places] / bandwidth)
        spent = sums[device][ends][:, None] - sums[device][places][None, :]
        time = np.where(ends[:, None] > places[None, :], np.maximum(spent, arrives[None, :]), np.inf)
        least = time.min(axis=1)
        tie = np.where(time <= least[:, None] * (1 + 1e-9), carried[None, :], np.inf)
        choice = tie.argmin(axis=1)
        back.append(choice)
        slowest, carried = least, carried[choice] + (crossing[ends] if device < count - 1 else 0.0)
    if not np.isfinite(slowest[0]):
        return None
    at, chosen = 0, list[int]()
    for choice in reversed(back):
        at = int(choice[at])
        chosen.append(int(places[at]))
    return chosen[::-1]
