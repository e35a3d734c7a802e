"""Figures of measured traces, compared with hand-computed values."""

from __future__ import annotations

import json
from dataclasses import replace
from random import Random

import numpy as np

from rammer.device.manifest import Recorded, Span
from rammer.ir.program import RProgram
from rammer.report.measured_trace import measured_trace, summarise_run, union_length
from rammer.schedule.wavefront import Wavefront
from rammer_testing.nonempty import some
from rammer_testing.programs import random_net


def two() -> RProgram:
    """Make a program whose second operator reads the first one's result."""
    program = random_net(Random(3), 6).program(Wavefront(), 2)
    maker = {t: o for o in program.operators for t in o.outputs}
    second = next(o for o in program.operators if any(t in maker for t in o.inputs))
    first = next(maker[t] for t in second.inputs if t in maker)
    return replace(program, operators=(first, second))


def test_figures() -> None:
    program = two()
    a, b = (o.name for o in program.operators)
    spans = [
        Span(0, a, 0, 0.0, 2.0),
        Span(0, a, 1, 1.0, 3.0),  # two at once on unit 0: 3 s busy
        Span(1, a, 2, 0.0, 1.0),
        Span(1, b, 0, 5.0, 10.0),  # 6 s busy; all units idle from 3 to 5
    ]
    found = summarise_run(Recorded(program, spans), units=3)
    assert np.isclose(found.span, 10) and np.isclose(found.utilisation, 9 / 30) and np.isclose(found.idle, 0.2)
    times = {o.name: o for o in found.operators}
    assert (times[a].tasks, times[a].seconds, times[a].work, times[a].gap) == (3, 3.0, 5.0, 0.0)
    assert (times[b].tasks, times[b].seconds, times[b].work, times[b].gap) == (1, 5.0, 5.0, 2.0)
    assert found.gap == 2.0
    text = str(found)
    assert "units busy 30.0%; no task anywhere 20.0% of the time" in text and a in text and b in text


def test_a_run_without_tasks_has_figures() -> None:
    for spans in ([], [Span(0, "o", 0, 1.0, 1.0)]):
        found = summarise_run(Recorded(two(), spans), units=3)
        assert (found.span, found.utilisation, found.idle, found.gap) == (0, 0, 0, 0) and "units busy 0.0%" in str(found)


def test_unions() -> None:
    assert union_length([]) == 0 and union_length([(2, 3), (0, 1), (0.5, 2.5)]) == 3
    assert union_length([(0, 10), (1, 2), (10, 11)]) == 11


def test_tasks_at_once_on_a_unit_have_lanes_of_their_own() -> None:
    spans = [Span(7, "o", 0, 0.0, 2.0), Span(7, "o", 1, 1.0, 3.0), Span(7, "o", 2, 2.0, 4.0), Span(8, "o", 3, 0.0, 1.0)]
    events = [e for e in json.loads(measured_trace([("p", Recorded(two(), spans))], {}))["traceEvents"] if e["ph"] == "X"]
    lanes = {e["args"]["task"]: e["tid"] for e in events}
    assert lanes[0] == lanes[2] != lanes[1] and lanes[3] not in (lanes[0], lanes[1])
    by_lane: dict[int, list[tuple[float, float]]] = {}
    for e in events:
        by_lane.setdefault(e["tid"], []).append((e["ts"], e["ts"] + e["dur"]))
    for intervals in some(by_lane.values()):
        assert np.isclose(union_length(intervals), sum(end - start for start, end in intervals))
