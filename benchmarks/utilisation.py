"""Utilisation of a device's units: rammer's timed tasks, with waves and without.

On a GPU the tasks are compared with torch's kernels in a CUDA graph, in one process.

    On a GPU:  python benchmarks/utilisation.py --models lstm_tc,inception_v3 --folder results
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import click
import onnx

sys.path.insert(0, str(Path(__file__).resolve().parent))

from entry import run
from facts import environment_of, section
from measuring import ROUNDS, Settings, Way, compile_ahead, opened, subject, take_turns
from tables.scheduling import RAMMER
from timelines import Kernel, Timeline, bound, by_name, gap, idle, measured, replays, typical
from zoo import SEED

from rammer.compile_options import TUNING_LEVELS
from rammer.errors import DeviceUnavailable, RammerError
from rammer.report.measured_trace import Summary, measured_trace, summarise_run
from rammer.report.text_table import format_duration, markdown_table
from rammer_bench.graph import Array
from rammer_bench.prepare import capture, event_seconds, gpu_name, set_torch_precision, torch_module
from rammer_bench.to_torch import load_torch

#: Replays under the profiler (the typical one counts), and replays timed without it.
PROFILED, TIMED = 15, 50
HEADERS = ("model", "runner", "median, not traced", "traced span", "kernels", "SMs busy", "by", "nothing runs", "median gap")
#: Ways with waves and without (sequential operators).
WAYS = (Way("wavefront", {"policy": "wavefront"}), Way("wavefront off", {"policy": "sequential"}))
#: Longest names of operators and kernels in a table.
NAME = 60

#: Explanation of task timing: on a GPU, and elsewhere.
BY_CLOCK = """\
- **rammer, tasks**: its kernels built once more so that every block notes its SM, the time when its wait for earlier kernels
  ended, and the time when its last warp ended (`%globaltimer`). An SM is busy while it has at least one such block. What a
  block does before that wait, fetching constants, is not counted, nor are launches. Where rammer runs a model by one persistent
  kernel, a task starts when the last value that it waits for is there, as the block's first thread sees it.
"""
BY_DEVICE = """\
- **rammer, tasks**: when each task ran on which unit, as the device records it; a unit is busy while it has at least one. A
  simulator's times are simulated.
"""
BOUND = """\
- **kernel bound**: CUPTI's interval and grid of every kernel of one graph replay (torch.profiler). A kernel of *b* blocks keeps
  at most min(*b*, SMs) SMs busy while it runs, and kernels at the same time add up to at most all SMs. It is an **upper bound**:
  a kernel whose blocks end early, or one whose interval is mostly launch and drain, counts as fully busy. rammer's row by
  this method is there to compare like with like; its row by tasks has no counterpart for torch, whose kernels record nothing.
"""
REST = """\
- **nothing runs** is the share of the traced span without any task (kernel) on any unit; **median gap** is from the last end of
  what an operator reads to its first task's start (kernel bound: from the last end so far to the next kernel's start).
- **median, not traced** is of ordinary runs; tracing and CUPTI make them longer.
"""


@dataclass(frozen=True)
class Result:
    """One row of the table, with its timeline and its breakdown of time."""

    runner: str
    method: str
    seconds: float
    kernels: int
    timeline: Timeline
    idle: float
    gap: float
    parts: Sequence[tuple[str, int, float]]

    def cells(self, model: str) -> list[str]:
        """Return the table's cells."""
        t = self.timeline
        return [
            model,
            self.runner,
            format_duration(self.seconds),
            format_duration(t.span),
            str(self.kernels),
            f"{'at most ' if self.method == 'kernel bound' else ''}{t.utilisation:.1%}",
            self.method,
            f"{self.idle:.1%}",
            format_duration(self.gap),
        ]


def profile(replay: Callable[[], Any]) -> list[Kernel]:
    """Return the kernels of a typical replay, recorded by CUPTI."""
    torch = load_torch()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as found:
        for _ in range(PROFILED):
            replay()
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        found.export_chrome_trace(str(path))
        return typical(replays(json.loads(path.read_text())["traceEvents"]))


def from_kernels(runner: str, seconds: float, kernels: list[Kernel], units: int) -> Result:
    """Return a row computed from kernel intervals."""
    return Result(
        runner, "kernel bound", seconds, len(kernels), bound(kernels, units), idle(kernels), gap(kernels), by_name(kernels)
    )


def torch_result(model: onnx.ModelProto, inputs: Mapping[str, Array], units: int, seconds_of: int = TIMED) -> Result:
    """Return the row of torch in a CUDA graph."""
    torch = load_torch()
    set_torch_precision("float32")
    module, feeds = torch_module(model, inputs, "cuda", "float32")

    def call() -> Any:
        with torch.no_grad():
            return module(*feeds)

    call()
    replay, _held = capture(call)
    seconds = median(event_seconds(replay) for _ in range(seconds_of))
    return from_kernels("torch-graph", seconds, profile(replay), units)


def rammer_results(
    key: str, way: Way, settings: Settings, folder: Path, name: str, gpu: bool
) -> tuple[list[Result], Summary, int]:
    """Return rammer's rows by tasks (on a GPU also by kernels), the summary and the device's units.

    Also writes the Chrome trace."""
    model = subject(key, settings.seed, checked=False)
    program = opened(model.path, model.feeds, way, settings)
    try:
        backend = program.exe.backend
        if not backend.records_tasks:
            raise DeviceUnavailable(f"device {settings.device} does not record when its tasks run")
        (segment,) = program.segments
        units = backend.vdevice.veus
        take_turns([program], settings.rounds)
        seconds = median(program.seconds)
        arrays = program.exe.checked(model.feeds)
        run = backend.trace(segment.program, segment.constants, {p.external: arrays[p.external] for p in segment.program.inputs})
        (folder / f"trace_{name}_{key.replace(':', '-')}_{way.name}.json").write_text(measured_trace([(key, run)], {}))
        summary = summarise_run(run, units)
        parts = sorted(((o.name, o.tasks, o.seconds) for o in summary.operators), key=lambda r: -r[2])
        count, line = program.special.kernels, measured(run.spans, units)
        found = [Result(f"rammer, {way.name}", "tasks", seconds, count, line, summary.idle, summary.gap, parts)]
        if gpu:
            found.append(from_kernels(f"rammer, {way.name}", seconds, profile(program.bound.run), units))
        return found, summary, units
    finally:
        program.close()


def document(results: Mapping[str, Sequence[Result]], settings: Settings, units: int, failures: Sequence[str]) -> str:
    """Return the Markdown file with all tables."""
    gpu = any(r.method == "kernel bound" for found in results.values() for r in found)
    rows = [r.cells(model) for model, found in results.items() for r in found]
    parts = []
    for model, found in results.items():
        for r in found:
            if r.runner.startswith("rammer") and r.method == "kernel bound":
                continue
            total = sum(p[2] for p in r.parts)
            top = [[f"`{n[:NAME]}`", c, format_duration(t), f"{t / total:.1%}"] for n, c, t in r.parts[:12]]
            what, unit = "kernels of one name, summed", "kernels"
            if r.method == "tasks":
                what, unit = "operators, from first start to last end", "tasks"
            parts.append(f"### {model}, {r.runner}: {what}\n\n" + markdown_table(top, ["name", unit, "time", "of the sum"]))
    head = f"# Utilisation and scheduling overhead, {settings.device}\n\n"
    head += f"Batch 1, float32, {units} units, --tune {settings.tune}.\n\n"
    method = (BY_CLOCK + BOUND if gpu else BY_DEVICE) + REST
    missing = "\nWithout a row:\n\n" + "\n".join(failures) + "\n" if failures else ""
    return (
        head
        + markdown_table(rows, HEADERS)
        + "\n\n"
        + method
        + missing
        + "\n"
        + "\n\n".join((*parts, section(environment_of(gpu))))
    )


@click.command()
@click.option("--device", default="cuda", show_default=True)
@click.option("--models", default=",".join(RAMMER), show_default=True, help="Keys of the zoo, with commas.")
@click.option("--folder", default="utilisation", type=click.Path(path_type=Path), show_default=True, help="Results.")
@click.option("--name", default="utilisation", show_default=True, help="Of the result's files.")
@click.option("--tune", default="off", show_default=True, type=click.Choice(TUNING_LEVELS))
@click.option("--rounds", default=ROUNDS, show_default=True, help="Turns of each program.")
@click.option("--seed", default=SEED, show_default=True, help="Of weights and inputs.")
@click.option("--ahead", default=0, metavar="N", help="N processes compile before anything is measured.")
def main(device: str, models: str, folder: Path, name: str, tune: str, rounds: int, seed: int, ahead: int) -> None:
    """Measure and write the table and the traces, model by model."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = Settings((device,), tuple(models.split(",")), tune, seed=seed, rounds=rounds, ahead=ahead)
    compile_ahead(settings, WAYS)
    gpu = device.partition(":")[0] == "cuda" and bool(gpu_name())
    results: dict[str, list[Result]] = {}
    there, failures, units = dict[str, list[Result]](), list[str](), 0
    for key in settings.models:
        results[key] = []
        for way in WAYS:
            click.echo(f"{key}: {way.name}")
            try:
                found, summary, units = rammer_results(key, way, settings, folder, name, gpu)
            except RammerError as problem:
                failures.append(f"- {key}, {way.name}: {problem.what.splitlines()[0]}")
                continue
            click.echo(str(summary))
            results[key] += found
        if gpu:
            model = subject(key, seed, checked=False)
            results[key].append(torch_result(onnx.load(str(model.path)), model.feeds, units))
        there = {key: found for key, found in results.items() if found}
        if there:
            (folder / f"{name}.md").write_text(document(there, settings, units, failures))
    if not there:
        raise DeviceUnavailable("nothing was traced", hint="\n".join(failures))
    click.echo(markdown_table([r.cells(m) for m, found in results.items() for r in found], HEADERS))


if __name__ == "__main__":
    run(main)
