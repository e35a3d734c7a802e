"""A program's schedule in time, predicted from the kernels' task times: a text chart and a Perfetto trace.

A task starts when its row has reached it and every counter that it waits for is full. It has its kernel's duration with every vEU
busy. Launches, transfers and memory traffic between tasks are not drawn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rammer.device.manifest import Span
from rammer.ir.operator import RKernel
from rammer.ir.program import RProgram, counters_by_operator, waves
from rammer.report.text_table import format_duration
from rammer.report.trace_events import Event, TaskEvents, name_event, trace_json

#: Columns of the text chart, and its maximum number of rows (a chip has a thousand).
WIDTH = 72
MOST_ROWS = 64
_MARKS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"


def task_seconds(program: RProgram, kernels: Mapping[str, Sequence[RKernel]]) -> dict[str, float]:
    """Return the seconds of one task of every operator, from the kernel that the program uses; 0 if unknown."""
    chosen = {o.name: chosen_kernel(program, kernels, o.name) for o in program.operators}
    return {name: kernel.crowded if kernel is not None else 0.0 for name, kernel in chosen.items()}


def chosen_kernel(program: RProgram, kernels: Mapping[str, Sequence[RKernel]], operator: str) -> RKernel | None:
    """Return the kernel that the program uses for an operator, or None if it is unknown."""
    used = program.operator[operator]
    form = used.tile, used.family, used.config
    return next((k for k in kernels.get(operator, ()) if (k.operator.tile, k.operator.family, k.operator.config) == form), None)


def task_spans(program: RProgram, seconds: Mapping[str, float]) -> list[Span]:
    """Return every task with its predicted start and end, in an order that the waits allow."""
    free = [0.0] * program.veus
    full = {c.name: 0.0 for c in program.counters}
    feeds = counters_by_operator(program)
    result = []
    for wave in waves(program):
        for placed in wave:
            task = placed.task
            start = max([free[placed.veu], *(full[w.counter] for w in task.waits)])
            end = start + seconds[task.operator]
            free[placed.veu] = end
            for counter in feeds.get(task.operator, ()):
                if counter.first <= task.index < counter.last:
                    full[counter.name] = max(full[counter.name], end)
            result.append(Span(placed.veu, task.operator, task.index, start, end))
    return result


def gantt_chart(program: RProgram, seconds: Mapping[str, float], width: int = WIDTH) -> str:
    """Return a chart with one line per vEU and one letter per operator. ``.`` marks a waiting vEU; ``width`` columns span the
    whole time."""
    found = task_spans(program, seconds)
    total = max((s.end for s in found), default=0.0)
    if not total:
        return f"schedule {program.name}: no task times are known"
    marks = {o.name: _MARKS[i % len(_MARKS)] for i, o in enumerate(program.operators)}
    busy = sum(s.end - s.start for s in found) / (total * program.veus)
    lines = [f"schedule {program.name} on {program.veus} vEUs: {format_duration(total)} without launches, {busy:.0%} busy"]
    lines += [
        f"  {marks[o.name]} {o.name}: {o.task_count} tasks, {format_duration(seconds[o.name])} each" for o in program.operators
    ]
    by_row: list[list[Span]] = [[] for _ in range(program.veus)]
    for span in found:
        by_row[span.veu].append(span)
    lines += _chart_lines(by_row[:MOST_ROWS], marks, total, width)
    if program.veus > MOST_ROWS:
        lines.append(f"  ... and {program.veus - MOST_ROWS} more vEUs")
    return "\n".join(lines)


def _chart_lines(rows: Sequence[Sequence[Span]], marks: Mapping[str, str], total: float, width: int) -> Iterator[str]:
    for veu, row in enumerate(rows):
        cells = ["."] * width
        for span in row:
            first = min(int(span.start / total * width), width - 1)
            last = min(max(round(span.end / total * width), first + 1), width)
            cells[first:last] = marks[span.operator] * (last - first)
        yield f"  v{veu:<4}|{''.join(cells)}|"


def chrome_trace(programs: Sequence[tuple[RProgram, Mapping[str, float]]], kinds: Mapping[str, str]) -> str:
    """Return a Chrome trace: one process per program, one thread per vEU. ``kinds`` has the types of ONNX nodes by name."""
    events = list[Event]()
    for number, (program, seconds) in enumerate(programs):
        tasks = TaskEvents.of(program, kinds)
        events.append(name_event("process_name", program.name, number))
        events += [tasks.event(s, number, s.veu) for s in task_spans(program, seconds)]
    return trace_json(events)
