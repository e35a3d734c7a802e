"""Timelines of GPU kernels: fraction of busy SMs over time, from per-task records or from kernel intervals."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rammer.device.manifest import Span
from rammer.report.measured_trace import union_length


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel (or copy, without blocks) recorded by CUPTI: seconds from the first start, and its number of blocks."""

    name: str
    start: float
    end: float
    blocks: int


@dataclass(frozen=True)
class Timeline:
    """The fraction ``busy[i]`` of busy SMs from ``times[i]`` to ``times[i + 1]``, in seconds from the first start."""

    times: tuple[float, ...]
    busy: tuple[float, ...]

    @property
    def span(self) -> float:
        """Seconds from the first start to the last end."""
        return self.times[-1] - self.times[0]

    @property
    def utilisation(self) -> float:
        """Mean fraction of busy SMs over the span."""
        return float(np.dot(self.busy, np.diff(self.times))) / self.span


def _steps(weights: Iterable[tuple[float, float, float]]) -> Timeline:
    """Return the sum of (start, end, weight) at every time, at most 1."""
    change: dict[float, float] = {}
    for start, end, weight in weights:
        change[start] = change.get(start, 0.0) + weight
        change[end] = change.get(end, 0.0) - weight
    times = sorted(change)
    level = np.cumsum([change[t] for t in times])
    return Timeline(tuple(times), tuple(float(min(1.0, max(0.0, v))) for v in level[:-1]))


def measured(spans: Sequence[Span], units: int) -> Timeline:
    """Return the fraction of units that run a task: concurrent tasks on a unit count once."""
    by_unit: dict[int, list[tuple[float, float]]] = {}
    for s in spans:
        by_unit.setdefault(s.veu, []).append((s.start, s.end))
    return _steps((a, b, 1 / units) for intervals in by_unit.values() for a, b in _union(intervals))


def _union(intervals: list[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def bound(kernels: Sequence[Kernel], units: int) -> Timeline:
    """Return an upper bound of the busy SMs. A kernel of b blocks keeps at most min(b, SMs) of them busy while it runs. The real
    value is lower if blocks end early, wait, or are uneven."""
    return _steps((k.start, k.end, min(1.0, k.blocks / units)) for k in kernels)


def idle(kernels: Sequence[Kernel]) -> float:
    """Return the fraction of the span without a running kernel."""
    span = max(k.end for k in kernels) - min(k.start for k in kernels)
    return 1 - union_length((k.start, k.end) for k in kernels) / span


def gap(kernels: Sequence[Kernel]) -> float:
    """Return median seconds from the latest previous end to a kernel's start; 0 if it starts earlier."""
    ordered = sorted(kernels, key=lambda k: k.start)
    reach, gaps = ordered[0].end, []
    for k in ordered[1:]:
        gaps.append(max(0.0, k.start - reach))
        reach = max(reach, k.end)
    return float(np.median(gaps)) if gaps else 0.0


def replays(events: Sequence[Mapping[str, Any]]) -> list[list[Kernel]]:
    """Return GPU events of a torch profile (a Chrome trace's ``traceEvents``), one list per graph launch. All kernels of one
    launch carry its correlation number."""
    found: dict[int, list[Kernel]] = {}
    for e in events:
        if e.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        grid = e["args"].get("grid", (0, 0, 0))
        kernel = Kernel(e["name"], e["ts"] * 1e-6, (e["ts"] + e["dur"]) * 1e-6, int(np.prod(grid)))
        found.setdefault(int(e["args"]["correlation"]), []).append(kernel)
    return [_from_zero(kernels) for kernels in found.values()]


def _from_zero(kernels: list[Kernel]) -> list[Kernel]:
    first = min(k.start for k in kernels)
    return [Kernel(k.name, k.start - first, k.end - first, k.blocks) for k in kernels]


def typical(runs: Sequence[list[Kernel]]) -> list[Kernel]:
    """Return the run of median span among those with the most kernels (others are the profiler's)."""
    most = max(map(len, runs))
    whole = sorted((r for r in runs if len(r) == most), key=lambda r: max(k.end for k in r))
    return whole[len(whole) // 2]


def by_name(kernels: Sequence[Kernel]) -> list[tuple[str, int, float]]:
    """Return (name, number, summed seconds) by kernel name, the longest first."""
    found: dict[str, list[float]] = {}
    for k in kernels:
        found.setdefault(k.name, []).append(k.end - k.start)
    return sorted(((n, len(t), sum(t)) for n, t in found.items()), key=lambda r: -r[2])
