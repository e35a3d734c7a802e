"""The printed form of a model over several devices: who computes what, what crosses, and what it is predicted to take."""

from __future__ import annotations

from collections.abc import Iterator

from rammer.ir.names import quoted
from rammer.ir.spread import DevicePart, DeviceStep, Spread
from rammer.report.table import duration, size

__all__ = ["describe_spread"]


def describe_spread(spread: Spread) -> str:
    """Devices with their steps and rows, transfers with bytes and predicted times, and the whole table."""
    return "\n".join([*_head(spread), *_devices(spread), *_transfers(spread), str(spread.whole)])


def _head(spread: Spread) -> Iterator[str]:
    predicted = spread.predicted
    alone = ", ".join(duration(s) if s else "no room" for s in dict.fromkeys(predicted.alone))
    yield f"spread {spread.whole.name} over {len(spread.parts)} devices: {spread.how}"
    yield f"  predicted {duration(predicted.latency)} a run, {duration(predicted.interval)} between runs in flight; alone {alone}"


def _devices(spread: Spread) -> Iterator[str]:
    row = 0
    for number, (part, home) in enumerate(zip(spread.parts, spread.whole.homes, strict=True)):
        rows = f"rows v{row}..v{row + home.rows - 1}" if home.rows else "no rows"
        row += home.rows
        busy = duration(spread.predicted.busy[number]) if spread.predicted.busy else "?"
        held = sum(v.nbytes for step in part.steps for v in step.constants.values())
        yield f"  device {number} {quoted(part.device)}: {rows}, busy {busy}, {size(held)} of constants"
        yield from _steps(spread, number, part)


def _steps(spread: Spread, device: int, part: DevicePart) -> Iterator[str]:
    given = {i.tensor: i.name for i in spread.inputs}
    ends = {o.tensor: o.name for o in spread.outputs if o.device == device}
    for number, step in enumerate(part.steps):
        reads = [f"input {quoted(given[t])}" for t in step.inputs if t in given] + list(step.arrivals)
        makes = [f"output {quoted(ends[t])}" for t in step.outputs if t in ends]
        makes += [f"{quoted(s.output)} for input {quoted(s.input)}" for s in spread.states if s.tensor in step.outputs]
        makes += step.departures
        said = [f"{word} {', '.join(what)}" for word, what in (("reads", reads), ("makes", makes)) if what]
        yield f"    step {number}: {'; '.join([f'{_what(step)}, {duration(step.program.predicted)}', *said])}"


def _what(step: DeviceStep) -> str:
    if step.host is not None:
        return f"{step.host.title} on the host"
    turns = f" in {step.program.turns} turns" if step.program.repeat is not None else ""
    return f"{len(step.program.operators)} operators by {step.program.policy}{turns}"


def _transfers(spread: Spread) -> Iterator[str]:
    for t in spread.transfers:
        seconds = spread.predicted.transfers.get(t.name)
        yield f"  {t}: {size(t.nbytes)}{f', {duration(seconds)}' if seconds is not None else ''}"
