"""Schedules in time: no vEU runs two tasks at once, and no task starts before its waits are over."""

from __future__ import annotations

import json
from random import Random

import numpy as np

from rammer.device.manifest import Span
from rammer.ir.program import RProgram
from rammer.report.predicted_trace import MOST_ROWS, WIDTH, chrome_trace, gantt_chart, task_spans
from rammer.schedule.wavefront import Wavefront
from rammer_testing.nonempty import some
from rammer_testing.programs import random_net


def random_program(seed: int) -> tuple[RProgram, dict[str, float]]:
    rng = np.random.default_rng(seed)
    program = random_net(Random(seed), 12).program(Wavefront(), 4)
    return program, {o.name: float(rng.uniform(1e-7, 1e-5)) for o in program.operators}


def check(program: RProgram, seconds: dict[str, float], found: list[Span]) -> None:
    place = {(s.operator, s.index): s for s in found}
    assert len(place) == len(found) == program.task_count
    for veu, row in some(enumerate(program.rows)):
        free = 0.0
        for task in row:
            span = place[task.operator, task.index]
            assert span.veu == veu
            ends = [
                place[c.operator, i].end for w in task.waits for c in [program.counter[w.counter]] for i in range(c.first, c.last)
            ]
            assert span.start == max([free, *ends])
            assert span.end == span.start + seconds[task.operator]
            free = span.end


def test_spans_follow_rows_and_waits(rng: np.random.Generator) -> None:
    for seed in rng.integers(0, 1 << 30, 20).tolist():
        program, seconds = random_program(seed)
        check(program, seconds, task_spans(program, seconds))


def test_the_chart_has_a_line_for_each_veu() -> None:
    program, seconds = random_program(1)
    text = gantt_chart(program, seconds)
    chart = [line for line in text.splitlines() if line.endswith("|")]
    assert len(chart) == program.veus <= MOST_ROWS
    assert {len(line) for line in chart} == {WIDTH + 9}
    assert all(f" {o.name}: {o.task_count} tasks" in text for o in some(program.operators))
    assert gantt_chart(program, dict.fromkeys(seconds, 0.0)).endswith("no task times are known")


def test_the_trace_is_json_with_every_task() -> None:
    program, seconds = random_program(2)
    events = json.loads(chrome_trace([(program, seconds)], {}))["traceEvents"]
    tasks = [e for e in events if e["ph"] == "X"]
    assert len(tasks) == program.task_count
    waiting = {(t.operator, t.index): len(t.waits) for row in program.rows for t in row if t.waits}
    found = {(e["name"], e["args"]["task"]): e["args"]["waits"].count(" tasks of ") for e in tasks if "waits" in e["args"]}
    assert found == waiting and found
    for operator in some(program.operators):
        (facts,) = {(e["args"]["bytes"], e["args"]["flop"]) for e in tasks if e["name"] == operator.name}
        assert facts[0] > 0 and facts[1] == operator.flops // operator.task_count
    total = sum(s.end - s.start for s in task_spans(program, seconds))
    assert np.isclose(sum(e["dur"] for e in tasks) * 1e-6, total)
