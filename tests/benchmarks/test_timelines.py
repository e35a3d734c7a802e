"""Timelines from spans and from kernels, compared with hand-computed values."""

from __future__ import annotations

import numpy as np
from timelines import Kernel, bound, by_name, gap, idle, measured, replays, typical

from rammer.device.manifest import Span

KERNELS = [Kernel("a", 0.0, 4.0, 2), Kernel("b", 2.0, 6.0, 100), Kernel("a", 8.0, 10.0, 1)]


def test_a_bound_adds_up_to_all_units() -> None:
    found = bound(KERNELS, 4)
    assert found.times == (0, 2, 4, 6, 8, 10) and found.busy == (0.5, 1.0, 1.0, 0.0, 0.25)
    assert np.isclose(found.utilisation, (1 + 2 + 2 + 0 + 0.5) / 10) and found.span == 10
    assert np.isclose(idle(KERNELS), 0.2) and gap(KERNELS) == 1.0
    assert by_name(KERNELS) == [("a", 2, 6.0), ("b", 1, 4.0)]


def test_tasks_at_once_on_a_unit_count_once() -> None:
    spans = [Span(0, "o", 0, 0.0, 2.0), Span(0, "o", 1, 1.0, 3.0), Span(1, "o", 2, 2.0, 4.0)]
    found = measured(spans, 4)
    assert found.times == (0, 2, 3, 4) and np.allclose(found.busy, (0.25, 0.5, 0.25))
    assert np.isclose(found.utilisation, (3 + 2) / 16)


def test_a_profile_is_split_by_launch() -> None:
    def event(name: str, ts: float, correlation: int, **more: object) -> dict[str, object]:
        return {"cat": "kernel", "name": name, "ts": ts, "dur": 2.0, "args": {"correlation": correlation, **more}}

    events = [
        event("k", 10.0, 1, grid=[2, 3, 1]),
        event("l", 13.0, 1, grid=[1, 1, 1]),
        event("k", 50.0, 2, grid=[2, 3, 1]),
        {"cat": "cpu_op", "name": "x", "ts": 0.0, "dur": 1.0},
    ]
    runs = replays(events)
    assert [len(r) for r in runs] == [2, 1]
    chosen = typical(runs)
    assert [(k.name, k.blocks) for k in chosen] == [("k", 6), ("l", 1)]
    assert np.allclose([(k.start, k.end) for k in chosen], [(0, 2e-6), (3e-6, 5e-6)])
