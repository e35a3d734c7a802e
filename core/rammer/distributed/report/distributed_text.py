"""Printed form of a distributed program: device assignments, transfers, and predicted times."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from rammer.distributed.distributed_program import DevicePart, DeviceStep, DistributedProgram
from rammer.distributed.runtime.run_trace import SpreadMarks
from rammer.distributed.transport.clock_offsets import CommonClock
from rammer.distributed.transport.event_log import Mark
from rammer.ir.names import quote_text
from rammer.report.measured_trace import union_length
from rammer.report.text_table import format_duration, format_size, plain_table


def describe_spread(spread: DistributedProgram) -> str:
    """Return devices with their steps and rows, transfers with bytes and predicted times, and the whole table."""
    return "\n".join([*_header_lines(spread), *_device_lines(spread), *_transfer_lines(spread), str(spread.whole)])


def _header_lines(spread: DistributedProgram) -> Iterator[str]:
    predicted = spread.predicted
    alone = ", ".join(format_duration(s) if s else "no room" for s in dict.fromkeys(predicted.alone))
    yield f"spread {spread.whole.name} over {len(spread.parts)} devices: {spread.how}"
    latency, interval = format_duration(predicted.latency), format_duration(predicted.interval)
    yield f"  predicted {latency} a run, {interval} between runs in flight; alone {alone}"


def _device_lines(spread: DistributedProgram) -> Iterator[str]:
    row = 0
    for number, (part, home) in enumerate(zip(spread.parts, spread.whole.homes, strict=True)):
        rows = f"rows v{row}..v{row + home.rows - 1}" if home.rows else "no rows"
        row += home.rows
        busy = format_duration(spread.predicted.busy[number]) if spread.predicted.busy else "?"
        held = sum(v.nbytes for step in part.steps for v in step.constants.values())
        yield f"  device {number} {quote_text(part.device)}: {rows}, busy {busy}, {format_size(held)} of constants"
        yield from _step_lines(spread, number, part)


def _step_lines(spread: DistributedProgram, device: int, part: DevicePart) -> Iterator[str]:
    given = {i.tensor: i.name for i in spread.inputs}
    ends = {o.tensor: o.name for o in spread.outputs if o.device == device}
    for number, step in enumerate(part.steps):
        reads = [f"input {quote_text(given[t])}" for t in step.inputs if t in given] + list(step.arrivals)
        makes = [f"output {quote_text(ends[t])}" for t in step.outputs if t in ends]
        makes += [f"{quote_text(s.output)} for input {quote_text(s.input)}" for s in spread.states if s.tensor in step.outputs]
        makes += step.departures
        said = [f"{word} {', '.join(what)}" for word, what in (("reads", reads), ("makes", makes)) if what]
        yield f"    step {number}: {'; '.join([f'{_describe_step(step)}, {format_duration(step.program.predicted)}', *said])}"


def _describe_step(step: DeviceStep) -> str:
    if step.host is not None:
        return f"{step.host.title} on the host"
    turns = f" in {step.program.turns} turns" if step.program.repeat is not None else ""
    return f"{len(step.program.operators)} operators by {step.program.policy}{turns}"


def _transfer_lines(spread: DistributedProgram) -> Iterator[str]:
    for t in spread.transfers:
        seconds = spread.predicted.transfers.get(t.name)
        yield f"  {t}: {format_size(t.nbytes)}{f', {format_duration(seconds)}' if seconds is not None else ''}"


#: Rows of a device in a trace, with the kinds of their marks.
ROWS: Final[Mapping[str, Collection[str]]] = {
    "steps": ("step", "outputs", "whole"),
    "waits": ("wait", "room"),
    "writes": ("write",),
}
Event = dict[str, object]


@dataclass(frozen=True)
class SpreadTrace:
    """A trace of runs of ``spread``. Steps of ``simulated`` devices last as long as their simulator takes."""

    spread: DistributedProgram
    found: SpreadMarks
    simulated: frozenset[int] = field(default=frozenset())

    @property
    def devices(self) -> tuple[str, ...]:
        """The names of the devices."""
        return self.found.devices

    def chrome(self) -> str:
        """Return JSON in the Chrome trace format, with times in microseconds. Each device is a process with rows of steps, waits
        and writes. Each transfer of a run is an arrow, from its flag write to the first step that reads it."""
        events = [e for d in range(len(self.devices)) for e in (*self._name_events(d), *self._span_events(d))]
        events += self._arrow_events()
        clocks = [{"device": d, "ahead": c.first.ahead, "error": c.error} for d, c in enumerate(self.found.clocks)]
        other = {"clocks_seconds": clocks, "notes": self.notes()}
        return json.dumps({"displayTimeUnit": "ns", "traceEvents": events, "otherData": other})

    def _name_events(self, device: int) -> Iterator[Event]:
        name = f"device {device} {self.devices[device]}"
        name += " (simulated: a step lasts as long as the simulator takes)" if device in self.simulated else ""
        yield {"name": "process_name", "ph": "M", "pid": device, "args": {"name": name}}
        for row, label in enumerate(ROWS):
            yield {"name": "thread_name", "ph": "M", "pid": device, "tid": row, "args": {"name": label}}

    def _span_events(self, device: int) -> Iterator[Event]:
        for row, kinds in enumerate(ROWS.values()):
            for mark in sorted((m for m in self.found.marks[device] if m.kind in kinds), key=lambda m: m.begin):
                start, end = self._to_nanoseconds(mark.begin), self._to_nanoseconds(mark.end)
                yield {
                    "name": span_name(mark),
                    "cat": mark.kind,
                    "ph": "X",
                    "pid": device,
                    "tid": row,
                    "ts": start / 1e3,
                    "dur": (end - start) / 1e3,
                    "args": {"run": mark.run, **self._mark_facts(device, mark)},
                }

    def _mark_facts(self, device: int, mark: Mark) -> dict[str, object]:
        if mark.kind == "write":
            transfer = self.spread.transfer[mark.name]
            return {"bytes": transfer.nbytes, "to": transfer.target, "flag_us": self._to_nanoseconds(mark.facts["flag"]) / 1e3}
        if mark.kind == "step":
            step = self.spread.parts[device].steps[int(mark.name)]
            names = [o.name for o in step.program.operators]
            what = f"{len(names)} operators, {names[0]} to {names[-1]}" if len(names) > 1 else "".join(names)
            return {"computes": what, "device_us": mark.facts["seconds"] * 1e6, "by": mark.facts["clock"]}
        return {}

    def _to_nanoseconds(self, seconds: float) -> int:
        """Return the nanoseconds since the start of the trace."""
        return round((seconds - self.found.begin) * 1e9)

    def _arrow_events(self) -> Iterator[Event]:
        ends = {(m.run, d, m.kind, m.name): m for d, marks in enumerate(self.found.marks) for m in marks}
        readers = self.readers()
        for source, marks in enumerate(self.found.marks):
            for number, mark in enumerate(m for m in marks if m.kind == "write"):
                target = self.spread.transfer[mark.name].target
                read = ends.get((mark.run, target, *readers[mark.name]))
                if read is None:  # on a device that runs its steps without the host
                    continue
                common = {"name": mark.name, "cat": "transfer", "id": f"{source}.{number}"}
                yield {**common, "ph": "s", "pid": source, "tid": 2, "ts": self._to_nanoseconds(mark.facts["flag"]) / 1e3}
                yield {**common, "ph": "f", "bp": "e", "pid": target, "tid": 0, "ts": self._to_nanoseconds(read.begin) / 1e3}

    def readers(self) -> dict[str, tuple[str, str]]:
        """Return the kind and name of the mark of each transfer's first reader, by transfer."""
        steps = [(n, s) for part in self.spread.parts for n, s in enumerate(part.steps)]
        found = {name: ("step", str(n)) for n, step in steps for name in step.arrivals}
        return {t.name: found.get(t.name, ("outputs", "")) for t in self.spread.transfers}

    def notes(self) -> list[str]:
        """Return remarks on spans that could be misread."""
        found = [
            f"device {d} ({self.devices[d]}) is simulated: its steps last as long as the simulator takes; "
            "the chip's own time is in each step's arguments"
            for d in sorted(self.simulated)
        ]
        whole = [d for d, marks in enumerate(self.found.marks) if any(m.kind == "whole" for m in marks)]
        return found + [
            f"device {d} ({self.devices[d]}) runs its steps without the host, which sees all runs as one" for d in whole
        ]

    def __str__(self) -> str:
        spans = [m for marks in self.found.marks for m in marks]
        whole = max((m.end for m in spans), default=0.0) - self.found.begin
        count = len({m.run for m in spans})
        rows = [self._summary_row(d, max(whole, 1e-12)) for d in range(len(self.devices))]
        return "\n".join(
            [
                f"trace: {count} runs in {format_duration(whole)}, by the clock of device 0",
                plain_table(rows, ["device", "on", *ROWS, "clock"]),
                *(f"note      {n}" for n in self.notes()),
            ]
        )

    def _summary_row(self, device: int, whole: float) -> list[Any]:
        shares = [union_length(_mark_intervals(self.found.marks[device], kinds)) / whole for kinds in ROWS.values()]
        clock, own = self.found.clocks[device], self.found.clocks[device].error == 0
        said = (
            "device 0's"
            if own
            else f"{format_duration(abs(clock.first.ahead))} {_way(clock)}, known to {format_duration(clock.error)}"
        )
        return [device, self.devices[device], *(f"{s:.1%}" for s in shares), said]


def _way(clock: CommonClock) -> str:
    return "ahead" if clock.first.ahead >= 0 else "behind"


def _mark_intervals(marks: Sequence[Mark], kinds: Collection[str]) -> Iterator[tuple[float, float]]:
    return ((m.begin, m.end) for m in marks if m.kind in kinds)


def span_name(mark: Mark) -> str:
    """Return the display name of a span."""
    words = {"step": "step ", "wait": "for ", "room": "for a slot of ", "whole": "runs: "}
    return f"{words.get(mark.kind, '')}{mark.name or mark.kind}"
