"""Statistics of a measured trace: utilisation of the units, idle time, and time per operator."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rammer.device.manifest import Recorded, Span
from rammer.ir.program import RProgram
from rammer.report.text_table import format_duration, plain_table
from rammer.report.trace_events import Event, TaskEvents, name_event, trace_json

#: Operators listed in a summary, longest first.
MOST_OPERATORS = 20
#: Threads per unit in a Chrome trace: more than its concurrent tasks (an SM holds at most 32 blocks).
LANES = 64


@dataclass(frozen=True, slots=True)
class OperatorTime:
    """Times of an operator in a trace: from its first task's start to its last task's end, and ``work`` summed over tasks.
    ``gap`` is from the last end among its producers to its first start (0 without producers)."""

    name: str
    tasks: int
    seconds: float
    work: float
    gap: float


@dataclass(frozen=True)
class Summary:
    """Statistics of one run. Times in seconds; fractions between 0 and 1.

    ``utilisation``: time that a unit ran at least one task, over all units and the whole span. ``idle``: fraction of the span in
    which all units were idle. ``gap``: median time from the last end of an operator's producers to its start."""

    units: int
    span: float
    utilisation: float
    idle: float
    gap: float
    operators: tuple[OperatorTime, ...]

    def __str__(self) -> str:
        lines = [
            f"trace: {format_duration(self.span)} from the first task's start to the last one's end on {self.units} units",
            f"  units busy {self.utilisation:.1%}; no task anywhere {self.idle:.1%} of the time; median gap between "
            f"dependent operators {format_duration(self.gap)}",
        ]
        ranked = sorted(self.operators, key=lambda o: -o.seconds)
        rows = [
            [o.name, o.tasks, format_duration(o.seconds), format_duration(o.work / o.tasks), format_duration(o.gap)]
            for o in ranked[:MOST_OPERATORS]
        ]
        rest = len(ranked) - len(rows)
        return "\n".join(
            [
                *lines,
                plain_table(rows, ["operator", "tasks", "first start to last end", "a task", "gap before"]),
                *([f"... and {rest} more operators"] if rest else []),
            ]
        )


def union_length(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of intervals."""
    total, reach = 0.0, -np.inf
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reach))
        reach = max(reach, end)
    return float(total)


def summarise_run(run: Recorded, units: int) -> Summary:
    """Return the statistics of one run on a device with ``units`` units; all 0 if all tasks have zero duration."""
    spans = run.spans
    if not any(s.end > s.start for s in spans):
        return Summary(units, 0.0, 0.0, 0.0, 0.0, ())
    span = max(s.end for s in spans) - min(s.start for s in spans)
    by_unit: dict[int, list[tuple[float, float]]] = {}
    for s in spans:
        by_unit.setdefault(s.veu, []).append((s.start, s.end))
    busy = sum(union_length(intervals) for intervals in by_unit.values())
    idle = 1 - union_length((s.start, s.end) for s in spans) / span
    operators, before = operator_times(run), _operator_producers(run.program)
    gaps = [o.gap for o in operators if before[o.name]]
    return Summary(units, span, busy / (units * span), idle, float(np.median(gaps)) if gaps else 0.0, operators)


def operator_times(run: Recorded) -> tuple[OperatorTime, ...]:
    """Return the times of every operator, in the program's order."""
    found: dict[str, list[Span]] = {}
    for s in run.spans:
        found.setdefault(s.operator, []).append(s)
    start = {name: min(s.start for s in group) for name, group in found.items()}
    end = {name: max(s.end for s in group) for name, group in found.items()}
    before = _operator_producers(run.program)
    return tuple(
        OperatorTime(
            o.name,
            len(found[o.name]),
            end[o.name] - start[o.name],
            sum(s.end - s.start for s in found[o.name]),
            start[o.name] - max((end[p] for p in before[o.name]), default=start[o.name]),
        )
        for o in run.program.operators
        if o.name in found
    )


def _operator_producers(program: RProgram) -> Mapping[str, list[str]]:
    """Return a map from each operator to its producers."""
    maker = {t: o.name for o in program.operators for t in o.outputs}
    return {o.name: list(dict.fromkeys(maker[t] for t in o.inputs if t in maker)) for o in program.operators}


def measured_trace(runs: Sequence[tuple[str, Recorded]], kinds: Mapping[str, str]) -> str:
    """Return a Chrome trace with one process per run, given with its name. A unit that runs several tasks at once has one thread
    for each. ``kinds`` has the types of ONNX nodes by name."""
    events = list[Event]()
    for number, (name, run) in enumerate(runs):
        tasks, lanes = TaskEvents.of(run.program, kinds), dict[tuple[int, int], float]()
        events.append(name_event("process_name", name, number))
        for s in sorted(run.spans, key=lambda s: s.start):
            lane = next(k for k in range(len(lanes) + 1) if lanes.get((s.veu, k), s.start) <= s.start)
            thread = s.veu * LANES + lane
            if (s.veu, lane) not in lanes:
                events.append(name_event("thread_name", f"unit {s.veu}" + (f".{lane}" if lane else ""), number, thread))
            lanes[s.veu, lane] = s.end
            events.append(tasks.event(s, number, thread))
    return trace_json(events)
