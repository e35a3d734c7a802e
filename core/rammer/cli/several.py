"""Runs and benchmarks of one model over several devices, printed by the process of device 0."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import click

from rammer.cli.common import Array, collect_inputs, describe_array, show_progress
from rammer.cli.files import note_source
from rammer.cli.options import InputChoice
from rammer.compile_options import Request
from rammer.distributed.joining import Joining
from rammer.distributed.report.distributed_text import SpreadTrace
from rammer.distributed.runtime.distributed_run import SpreadRuns, Timed
from rammer.distributed.runtime.distributed_session import SpreadModel, open_spread
from rammer.distributed.runtime.run_trace import traced_runs
from rammer.distributed.transport.counters import Counters
from rammer.errors import to_printable
from rammer.ir.names import shorten_name
from rammer.report.text_table import format_duration, format_size, plain_table
from rammer.runtime.shape_buckets import describe_lengths


def opened_spread(model: Path, names: tuple[str, ...], request: Request, joining: Joining) -> SpreadModel:
    """Open a model over several devices; it is closed when the command ends."""
    with show_progress(model.name) as sink:
        found = open_spread(model, names, request, joining, sink)
    click.get_current_context().call_on_close(found.close)
    note_source(found.source)
    return found


def prepare_runs(found: SpreadModel, choice: InputChoice) -> tuple[SpreadRuns, dict[str, Array]]:
    """Return the joined devices, and the inputs of a run."""
    with show_progress(found.source.head.name) as found.progress:
        inputs = found.checked(collect_inputs(found.source.head, choice, found.lengths))
        return found.prepare(inputs), inputs


def timed_runs(
    found: SpreadModel, runs: SpreadRuns, inputs: dict[str, Array], count: int
) -> tuple[dict[str, Array], list[float]]:
    """Run ``count`` times one after another, and return the outputs and the seconds of each run where device 0 is. One more run
    precedes if ``count`` is above 1. The first run reads the initial states, later runs those of the run before."""
    feeds, times = found.feeds(inputs), list[float]()
    outputs = dict[str, Array]()
    for number in range(count + (count > 1)):
        made, timed = runs.run_all([feeds])
        feeds = {n: a for n, a in feeds.items() if n not in found.joining.kept.values()}
        if made:
            outputs = made[0]
            times += timed.each if number or count == 1 else ()
    return outputs, times


def stream_runs(found: SpreadModel, runs: SpreadRuns, inputs: dict[str, Array], count: int) -> Timed:
    """Time ``count`` runs in flight, after a warm-up."""
    feeds = found.feeds(inputs)
    runs.run_all([feeds] * min(count, 2 * runs.joined.depth))
    return runs.run_all([feeds] * count)[1]


def trace_spread(found: SpreadModel, runs: SpreadRuns, inputs: dict[str, Array], count: int) -> SpreadTrace | None:
    """Trace ``count`` more runs in flight on each device. Returns None except where device 0 is."""
    marks = traced_runs(runs, [found.feeds(inputs)] * count)
    return SpreadTrace(runs.spread, marks, found.simulated) if marks is not None else None


def run_report(found: SpreadModel, runs: SpreadRuns, outputs: dict[str, Array], times: list[float], of: int) -> dict[str, Any]:
    """Return the report of ``rammer run`` on several devices as plain data. Counters are divided by the number ``of`` counted
    runs."""
    spread, asked, counters = runs.spread, runs.asked, runs.counters()
    hardware = [found.backend(n if n in runs.mine else found.alike[n]).hardware for n in range(len(found.names))]
    return {
        "model": found.source.head.name,
        "devices": [f"{n}: {h.name} ({h.kind})" for n, h in zip(found.names, hardware, strict=True)],
        "transport": runs.joined.transport.name,
        "how": spread.how,
        "compile_seconds": found.compile_seconds,
        "steps": [len(part.steps) for part in spread.parts],
        "tasks": spread.whole.task_count,
        "lengths": describe_lengths(found.lengths, asked.ranged.spans, len(found.made)) if asked.ranged is not None else "",
        "transfers": [{"transfer": str(t), "bytes": t.nbytes, "dynamic": t.late is not None} for t in spread.transfers],
        "predicted_latency_seconds": spread.predicted.latency,
        "predicted_interval_seconds": spread.predicted.interval,
        "latency_seconds": median(times) if times else 0.0,
        "iterations": len(times),
        "counters": [a_run(c, of) for c in counters],
        "notes": runs.notes,
        "outputs": [
            dict(zip(["name", "type", "min", "max", "nan"], describe_array(n, a), strict=True)) for n, a in outputs.items()
        ],
    }


def a_run(counters: Counters, count: int) -> dict[str, float]:
    """Return counters as the mean of ``count`` runs."""
    return {name: value / count for name, value in zip(counters.names(), counters.values(), strict=True)}


def show_spread(report: dict[str, Any], quiet: bool) -> None:
    """Print a report for people (on stderr when stdout carries JSON)."""
    moved, late = sum(t["bytes"] for t in report["transfers"]), sum(t["dynamic"] for t in report["transfers"])
    bound = f"{format_size(moved)} in all" if not late else f"at most {format_size(moved)} in all, {late} of a run's own shape"
    lines = [f"model     {shorten_name(report['model'])}"]
    lines += [
        f"device {n}  {name}, {steps} steps"
        for n, (name, steps) in enumerate(zip(report["devices"], report["steps"], strict=True))
    ]
    lines += [
        f"cut       {report['how']}; {len(report['transfers'])} transfers of {bound}, by {report['transport']}",
        f"compile   {format_duration(report['compile_seconds'])} ({report['tasks']} tasks)",
        f"latency   {format_duration(report['latency_seconds'])} wall time with host copies, median of {report['iterations']}",
        f"predicted {format_duration(report['predicted_latency_seconds'])}, and "
        f"{format_duration(report['predicted_interval_seconds'])} between runs in flight",
    ]
    lines += [f"lengths   {report['lengths']}"] * bool(report["lengths"])
    lines += [f"note      {note}" for note in report["notes"]]
    click.echo(to_printable("\n".join(lines)), err=quiet)
    table = [[o["name"], o["type"], o["min"], o["max"], o["nan"]] for o in report["outputs"]]
    click.echo(plain_table(table, ["output", "type", "min", "max", "NaN"]), err=quiet)
    click.echo("\n" + format_counters(report["counters"]), err=quiet)


def bench_spread(
    model: Path, names: tuple[str, ...], asked: tuple[Request, Joining], choice: InputChoice, count: int
) -> dict[str, Any] | None:
    """Measure the latency of sequential runs and the seconds between results of ``count`` runs in flight. Returns None except
    where device 0 is."""
    found = opened_spread(model, names, *asked)
    runs, inputs = prepare_runs(found, choice)
    _, times = timed_runs(found, runs, inputs, count)
    many = stream_runs(found, runs, inputs, count)
    row = {
        "model": model.stem,
        "on": ", ".join(found.names),
        "transport": runs.joined.transport.name,
        "in_flight": runs.joined.depth,
        "latency": median(times) if times else 0.0,
        "interval": many.whole / count,
        "predicted_latency": runs.spread.predicted.latency,
        "predicted_interval": runs.spread.predicted.interval,
    }
    first = 0 in runs.mine
    found.close()
    return row if first else None


def spread_table(rows: list[dict[str, Any]], form: Callable[..., str]) -> str:
    """Format the rows of ``bench_spread`` as a table, with units of time."""
    times = ("latency", "interval", "predicted_latency", "predicted_interval")
    heads = ["model", "on", "transport", "in flight", "latency", "between results", "predicted", "predicted between"]
    return form(
        [[*(r[k] for k in ("model", "on", "transport", "in_flight")), *(format_duration(r[k]) for k in times)] for r in rows],
        heads,
    )


def format_counters(counters: list[dict[str, float]]) -> str:
    """Return a table of the cost of transfers in one run, with a row for each device."""
    names = [n for n in counters[0] if n != "waited"]
    heads = ["device, a run", *(n.replace("_", " ").replace("nbytes", "bytes") for n in names), "waited"]
    rows = [[str(n), *(f"{c[k]:.10g}" for k in names), format_duration(c["waited"])] for n, c in enumerate(counters)]
    return plain_table(rows, heads)
