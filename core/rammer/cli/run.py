"""The command ``rammer run``: one model on one device, and its outputs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import click
import numpy as np

from rammer.cli.common import Array, collect_inputs, describe_array, open_model, show_progress
from rammer.cli.files import STDOUT, InputPath, OutputPath, write_file, write_text
from rammer.cli.joining import joining_options, parse_devices
from rammer.cli.options import COUNT, InputChoice, Tolerance, compile_options, device_flag, input_options, tolerance_options
from rammer.commands import gather_options
from rammer.compile_options import Request
from rammer.compiled.segments import ProgramSegment
from rammer.device.manifest import Backend
from rammer.distributed.joining import Joining
from rammer.errors import BadInput, Mismatch, to_printable
from rammer.ir.names import shorten_name
from rammer.report.operator_times import grouped, summarise_float32
from rammer.report.output_errors import HEADERS, compare_outputs, difference_rows
from rammer.report.text_table import format_duration, plain_table
from rammer.runtime.executable import Executable, is_check_requested
from rammer.runtime.inputs import load_npz, save_npz
from rammer.runtime.loaded_model import LoadedModel, Timing
from rammer.runtime.shape_buckets import describe_lengths


@dataclass(frozen=True)
class Wanted:
    """The number of runs, and the files that runs write or are compared with."""

    iterations: int
    save_inputs: Path | None
    save_outputs: Path | None
    expected: Path | None
    trace_file: Path | None
    json_file: Path | None
    check: bool
    joining: Joining

    @property
    def quiet(self) -> bool:
        """Return True if stdout carries the report alone."""
        return str(self.json_file) == STDOUT


@click.command()
@click.argument("model", type=InputPath())
@device_flag(
    "device",
    "Default: the first working device with a clock. NAME,NAME: one model over several; under mpirun each process has one.",
    "--devices",
    default="",
)
@compile_options
@input_options
@click.option("--iterations", type=COUNT, default=1, show_default=True, help="Timed runs (median shown).")
@click.option("--save-inputs", type=OutputPath(), help="Write the inputs to an .npz file.")
@click.option("--save-outputs", type=OutputPath(), help="Write the outputs to an .npz file.")
@click.option("--expected", type=InputPath(), help="Compare with the outputs in this .npz file.")
@tolerance_options
@click.option(
    "--trace",
    "trace_file",
    type=OutputPath(),
    help="Measure when and where every task runs, on devices that record it: a Chrome trace in this file, a summary here. "
    "Several devices: the steps of each device, on one clock.",
)
@click.option("--json", "json_file", type=OutputPath(stdout=True), help="Write the report as JSON ('-': stdout).")
@click.option("--check", is_flag=True, help="Run once first and report operators with an index out of range, NaN or infinity.")
@joining_options
@gather_options("wanted", Wanted, *(f.name for f in fields(Wanted)))
def command(model: Path, device: str, wanted: Wanted, tolerance: Tolerance, choice: InputChoice, request: Request) -> None:
    """Run MODEL (an ONNX file, or a file written by `rammer compile`).

    Example: rammer run model.onnx --device rocm --shape x:1x3x224x224 --iterations 20
    """

    want = load_npz(wanted.expected) if wanted.expected else None
    if names := parse_devices(device, wanted.joining, request):
        if wanted.check:
            raise BadInput("a model over several devices cannot be checked", "--check", "run the model on one of them")
        run_spread(model, names, wanted, (want, tolerance), choice, request)
        return
    with show_progress(model.name) as sink:
        exe = open_model(model, device, request, sink)
        if wanted.trace_file is not None:
            require_tracer(exe)  # refuse before anything is compiled or written
        inputs = exe.checked(collect_inputs(exe.head, choice, exe.lengths))
        if wanted.check or is_check_requested():
            exe.check_run(inputs)
        special = exe.prepare(inputs)
    outputs, timings = run_repeatedly(special, inputs, wanted.iterations)
    report = build_report(exe, special, outputs, timings)
    print_report(report, quiet=wanted.quiet)
    save_arrays(wanted.save_inputs, inputs)
    save_arrays(wanted.save_outputs, outputs)
    if wanted.trace_file is not None:
        click.echo(write_trace(exe, special, inputs, wanted.trace_file), err=wanted.quiet)
    finish_report(report, wanted, outputs, want, tolerance.of(exe.options.precision))


def finish_report(
    report: dict[str, Any], wanted: Wanted, outputs: dict[str, Array], want: dict[str, Array] | None, close: tuple[float, float]
) -> None:
    """Compare with the expected outputs, and write the report. Raises Mismatch if an output differs by more than ``close``."""
    found = compare_outputs(outputs, want, *close) if want is not None else []
    if found:
        report["differences"] = [dict(zip(HEADERS, row, strict=True)) for row in difference_rows(found)]
        click.echo(plain_table(difference_rows(found), HEADERS), err=wanted.quiet)
    write_json(wanted.json_file, report)
    if not all(d.good for d in found):
        raise Mismatch(f"{sum(not d.good for d in found)} of {len(found)} outputs differ from {wanted.expected}")


def run_spread(
    model: Path,
    names: tuple[str, ...],
    wanted: Wanted,
    judged: tuple[dict[str, Array] | None, Tolerance],
    choice: InputChoice,
    request: Request,
) -> None:
    """Run a model over several devices; the process of device 0 prints, saves and compares."""
    from rammer.cli.several import opened_spread, prepare_runs, run_report, show_spread, timed_runs, trace_spread

    found = opened_spread(model, names, request, wanted.joining)
    runs, inputs = prepare_runs(found, choice)
    outputs, times = timed_runs(found, runs, inputs, wanted.iterations)
    report = run_report(found, runs, outputs, times, wanted.iterations + (wanted.iterations > 1))
    traced = trace_spread(found, runs, inputs, wanted.iterations) if wanted.trace_file is not None else None
    first = 0 in runs.mine
    found.close()  # all processes together: the rest may exceed their timeout
    if first:
        show_spread(report, quiet=wanted.quiet)
        save_arrays(wanted.save_inputs, inputs)
        save_arrays(wanted.save_outputs, outputs)
        if wanted.trace_file is not None and traced is not None:
            write_text(wanted.trace_file, traced.chrome())
            click.echo(to_printable(f"\n{traced}"), err=wanted.quiet)
        want, tolerance = judged
        finish_report(report, wanted, outputs, want, tolerance.of(request.chosen.precision))


def run_repeatedly(special: LoadedModel, inputs: dict[str, Array], count: int) -> tuple[dict[str, Array], list[Timing]]:
    """Run ``count`` timed runs, after one warm-up if ``count`` is above 1."""
    if count > 1:
        special.run(inputs)
    timings = []
    for _ in range(count):
        outputs, timing = special.run(inputs)
        timings.append(timing)
    return outputs, timings


def build_report(exe: Executable, special: LoadedModel, outputs: dict[str, Array], timings: list[Timing]) -> dict[str, Any]:
    """Return the report of ``run`` as plain data."""
    hardware, device, ranged = exe.backend.hardware, exe.backend.vdevice, special.compiled.ranged
    return {
        "model": exe.head.name,
        "device": exe.device,
        "hardware": f"{hardware.name} ({hardware.kind})",
        "simulated": device.simulated,
        "policy": exe.options.policy,
        "precision": exe.options.precision,
        "float32": list(special.compiled.float32),
        "layout": exe.options.layout,
        "channels_last": sum(len(p.permuted) for p in special.compiled.programs),
        "compile_seconds": special.compile_seconds,
        "kernels": special.kernels,
        "tasks": sum(p.task_count for p in special.compiled.programs),
        "host_nodes": [f"{s.node} ({s.why})" for s in special.host_nodes],
        "host_types": grouped(special.host_nodes),
        "later": str(special.compiled.rest or ""),
        "lengths": describe_lengths(exe.lengths, ranged.spans, len(exe.cache)) if ranged is not None else "",
        "device_seconds": float(np.median([t.device for t in timings])),
        "host_seconds": float(np.median([t.host for t in timings])),
        "latency_seconds": float(np.median([t.total for t in timings])),
        "iterations": len(timings),
        "notes": list(timings[-1].notes),
        "outputs": [
            dict(zip(["name", "type", "min", "max", "nan"], describe_array(n, a), strict=True)) for n, a in outputs.items()
        ],
    }


def print_report(report: dict[str, Any], quiet: bool = False) -> None:
    """Print a report for people (on stderr when stdout carries JSON)."""
    clock = "simulated" if report["simulated"] else "measured"
    lines = [
        f"model     {shorten_name(report['model'])}",
        f"device    {report['device']}: {report['hardware']}",
        f"compile   {format_duration(report['compile_seconds'])} (policy {report['policy']}, {report['precision']}, "
        f"{_describe_layout(report)}{report['kernels']} launches, {report['tasks']} tasks)",
        f"latency   {format_duration(report['device_seconds'])} on the device ({clock}); "
        f"{format_duration(report['latency_seconds'])} wall time with host copies, median of {report['iterations']}",
        f"on host   {len(report['host_nodes'])} operators{_host_fraction(report)}"
        + "".join(f"\n          {n}" for n in report["host_types"]),
    ]
    lines += [f"float32   {line}" for line in summarise_float32(report["float32"])]
    lines += [f"{name:10}{report[name]}" for name in ("lengths", "later") if report[name]]
    lines += [f"note      {note}" for note in report["notes"]]
    click.echo(to_printable("\n".join(lines)), err=quiet)
    table = [[o["name"], o["type"], o["min"], o["max"], o["nan"]] for o in report["outputs"]]
    click.echo(plain_table(table, ["output", "type", "min", "max", "NaN"]), err=quiet)


def _host_fraction(report: dict[str, Any]) -> str:
    """Format the fraction of time that host operators take, or "" without host operators."""
    total = report["latency_seconds"]
    return f", {report['host_seconds'] / total:.0%} of the time" if report["host_nodes"] and total else ""


def _describe_layout(report: dict[str, Any]) -> str:
    """Describe the effect of a layout other than the model's, including the one chosen in a compiled file."""
    count = report["channels_last"]
    return f"{count} buffers channels last, " if count or report["layout"] != "keep" else ""


def require_tracer(exe: Executable) -> Backend:
    """Return the opened device. Raises BadInput if it records no task times."""
    if not exe.backend.records_tasks:
        raise BadInput(
            f"device {exe.device} does not record when its tasks run",
            "--trace",
            "rammer inspect --stage trace shows the predicted schedule of any device",
        )
    return exe.backend


def write_trace(exe: Executable, special: LoadedModel, inputs: dict[str, Array], path: Path) -> str:
    """Write the measured trace of one more run and return its summary. Raises BadInput if the device records no task times."""
    from rammer.report.measured_trace import measured_trace, summarise_run

    device = require_tracer(exe)
    programs: list[tuple[ProgramSegment, Mapping[str, Array]]] = []
    special.run(inputs, lambda segment, feeds: programs.append((segment, feeds)))
    found = [device.trace(s.program, s.constants, feeds) for s, feeds in programs]
    write_text(path, measured_trace([(r.program.name, r) for r in found], special.compiled.node_types))
    units = exe.backend.vdevice.veus
    return "\n".join(str(summarise_run(r, units)) for r in found)


def save_arrays(path: Path | None, arrays: dict[str, Array]) -> None:
    """Write an .npz file if ``path`` is set."""
    if path is not None:
        write_file(path, lambda file: save_npz(file, arrays))


def write_json(path: Path | None, report: dict[str, Any]) -> None:
    """Write a report as JSON to a file, or to stdout for ``-``."""
    if path is not None:
        write_text(path, json.dumps(report, indent=2) + "\n")
