"""Whole models over two GPUs, beside one: a decoder split by heads, a pipeline of ResNet-50, a wavefront of LSTMs.

python benchmarks/peer_programs.py --models decoder,resnet50,lstm8 --markdown programs.md     (about two minutes on two H200s)

Results are compared with those of one GPU. Times are of runs queued one behind the other, from events on the GPUs: seconds a run,
where a run begins when the one before has ended (latency), or several are in flight (throughput).
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import onnx

sys.path.insert(0, str(Path(__file__).resolve().parent))

from entry import run
from facts import environment_of, section
from peer_models import SplitDecoder
from zoo.cnn import resnet50
from zoo.sequence import lstm_tc

from rammer.compiled.options import CompileOptions
from rammer.compiler import Compiler
from rammer.device.loader import Registry
from rammer.frontend.reader import read_model
from rammer.ir.spread import Link
from rammer.place.measured import MeasuredDevices, seconds_of
from rammer.place.spreading import compile_spread
from rammer.profile.store import KernelStore
from rammer.report.table import markdown
from rammer.runtime.spread_run import Joined, SpreadRuns
from rammer.transport.find import choose
from rammer.transport.protocol import Site

#: Between two H200s, as ``peer_transfers.py`` measures: seconds, bytes a second.
LINKS = tuple(Link(a, 1 - a, 5e-6, 360e9, "measured") for a in (0, 1))


@dataclass(frozen=True)
class Case:
    """A model, its placement by hand ("": found), what it is cut for, and how many runs are in flight while it is timed."""

    proto: onnx.ModelProto
    whole: onnx.ModelProto
    place: str
    goal: str
    depth: int
    wanted: float


def decoder() -> Case:
    """One token, 256 earlier ones."""
    split, whole = SplitDecoder(2), SplitDecoder(1)
    proto = split.model()
    return Case(proto, whole.model(), "\n".join(split.place), "latency", 1, 1.5)


def resnet() -> Case:
    """A stream of batches of 8."""
    proto = resnet50(0, batch=8)
    return Case(proto, proto, "", "throughput", 3, 1.8)


def lstm8() -> Case:
    """8 layers of 1,024 units, 100 steps."""
    proto = lstm_tc(0, layers=8, hidden=1024)
    return Case(proto, proto, "", "latency", 1, 1.0)


CASES = {"decoder": decoder, "resnet50": resnet, "lstm8": lstm8}


def opened(devices: Sequence[int], tune: str) -> list[Compiler]:
    """A compiler a GPU."""
    registry, store = Registry(), KernelStore.default()
    made = []
    for d in devices:
        backend = registry.open(f"cuda:{d}")
        made.append(Compiler(backend, CompileOptions(tune=tune), store, registry, device="cuda"))
    return made


def drawn(proto: onnx.ModelProto, seed: int) -> dict[str, np.ndarray]:
    """Random inputs; ``x_0`` and ``x_1`` are one value."""
    rng, found = np.random.default_rng(seed), dict[str, np.ndarray]()
    for port in read_model(proto).inputs:
        found[port.name] = rng.standard_normal([int(d or 0) for d in port.shape]).astype(np.float32)
    return {n: found["x_0"] if n.startswith("x_") else v for n, v in found.items()}


def unsplit(given: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The inputs of the decoder that is not split, from those of its halves."""
    halves = {n: [given[n], given[f"{n[:-2]}_1"]] for n in given if n.endswith("_0") and n != "x_0"}
    return {"x_0": given["x_0"], **{n: np.concatenate(pair, 1) for n, pair in halves.items()}}


class OneGpu:
    """The model on one GPU, inputs and outputs there."""

    def __init__(self, compiler: Compiler, proto: onnx.ModelProto, given: Mapping[str, np.ndarray]) -> None:
        import cupy as cp

        model = read_model(proto)
        compiled = compiler.compile_model(model, {p.name: tuple(int(d or 0) for d in p.shape) for p in model.inputs})
        (segment,) = compiled.segments
        self.loaded = compiler.backend.load(segment.program, segment.constants)
        names = {p.external for p in segment.program.inputs}
        self.found = self.loaded.run({n: v for n, v in given.items() if n in names}).outputs
        self.bound = self.loaded.bind({n: cp.asarray(v) for n, v in given.items() if n in names}, {})
        self.predicted = segment.program.predicted

    def seconds(self, count: int) -> float:
        """A run, of ``count`` one behind the other."""
        import cupy as cp

        best = float("inf")
        for _ in range(3):
            events = cp.cuda.Event(), cp.cuda.Event()
            events[0].record(self.bound.stream)
            for _ in range(count):
                self.bound.run()
            events[1].record(self.bound.stream)
            events[1].synchronize()
            best = min(best, cp.cuda.get_elapsed_time(*events) * 1e-3 / count)
        return best


def queued(parts: Sequence[Any], count: int, first: int) -> float:
    """Seconds a run of both parts, inputs there; one thread a GPU. The host waits for a slot as in any run."""

    def go(part: Any) -> None:
        with part.end.unit:
            for run_ in range(first, first + count):
                if run_ - first >= part.depth:
                    part.wait(run_ - part.depth)
                part.queue(run_)
            for run_ in range(max(first, first + count - part.depth), first + count):
                part.wait(run_)

    threads = [threading.Thread(target=go, args=(p,)) for p in parts]
    begin = time.perf_counter()
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return (time.perf_counter() - begin) / count


def graphs(parts: Sequence[Any], count: int, first: int) -> float:
    """Seconds a run by the GPU's events, the host ahead of both GPUs."""
    import cupy as cp

    events = []
    for part in parts:
        with part.end.unit:
            events.append((cp.cuda.Event(), cp.cuda.Event()))
            events[-1][0].record(part.stream)
    for n in range(first, first + count):
        for part in parts:
            with part.end.unit:
                slot = part.slots[n % part.depth]
                for piece in slot.steps:
                    piece.launch(part.stream.ptr)
                for piece in slot.results:
                    piece.launch(part.aside.ptr)
    for part, (_, done) in zip(parts, events, strict=True):
        with part.end.unit:
            done.record(part.stream)
            done.synchronize()
            part.aside.synchronize()
            part.end.check()
    return max(cp.cuda.get_elapsed_time(*e) for e in events) * 1e-3 / count


def measured(name: str, case: Case, devices: Sequence[int], tune: str, say: Any) -> list[str]:
    """A line of the table."""
    begin = time.perf_counter()
    compilers = opened(devices, tune)
    given = drawn(case.proto, 1)
    one = OneGpu(compilers[0], case.whole, unsplit(given) if case.whole is not case.proto else given)
    alone = one.seconds(30)
    say(f"{name}: one GPU {alone * 1e6:.1f} us (predicted {one.predicted * 1e6:.1f}), {time.perf_counter() - begin:.1f} s")
    model = read_model(case.proto)
    shapes = {p.name: tuple(int(d or 0) for d in p.shape) for p in model.inputs}
    pairs = [(f"cuda:{d}", c) for d, c in zip(devices, compilers, strict=True)]
    known = MeasuredDevices(LINKS, lambda parts: [seconds_of(p, c.backend) for p, c in zip(parts, compilers, strict=True)])
    spread = compile_spread(pairs, model, shapes, known, case.goal, case.place)
    predicted = f"predicted {spread.predicted.latency * 1e6:.1f} us, interval {spread.predicted.interval * 1e6:.1f}"
    steps = [len(p.steps) for p in spread.parts]
    say(f"{name}: {spread.how}, {steps} steps, {len(spread.transfers)} transfers, {predicted}")
    sites = tuple(Site(f"cuda:{d}", "gpu", 0) for d in devices)
    runs = SpreadRuns(spread, dict(enumerate(c.backend for c in compilers)), Joined(sites, choose(Registry(), sites), case.depth))
    try:
        outputs, _ = runs.run_all([given, *[drawn(case.proto, 2 + k) for k in range(3)], given])
        error = max(far(outputs[k][n], v) for n, v in one.found.items() for k in (0, -1))
        say(f"{name}: error {error:.2g} of one GPU's; {runs.notes[0]}")
        parts = [runs.parts[d] for d in sorted(runs.parts)]
        both = min(graphs(parts, 30, 5 + 30 * k) for k in range(3))
        hosted = queued(parts, 30, 5 + 90)
        waited = ", ".join(f"{p.end.waited() * 1e6 / 125:.1f}" for p in parts)
        say(f"{name}: both {both * 1e6:.1f} us, with the host {hosted * 1e6:.1f}, waited a run {waited} us")
        say(f"{name}: " + "; ".join(str(c) for c in runs.counters()))
    finally:
        runs.close()
        one.loaded.close()
    say(f"{name}: {time.perf_counter() - begin:.1f} s in all")
    figures = [f"{t * 1e6:.1f}" for t in (alone, both, hosted)]
    return [name, spread.how, *figures, f"{alone / both:.2f}", f"{case.wanted}", f"{error:.1g}"]


def far(found: np.ndarray, wanted: np.ndarray) -> float:
    """The largest difference over the largest value; NaN stays."""
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


HEADERS = ("model", "cut", "one GPU us", "two GPUs us", "with the host's copies us", "times", "wanted", "error")


@click.command()
@click.option("--devices", default="0,1", show_default=True, help="Two GPUs.")
@click.option("--models", default=",".join(CASES), show_default=True)
@click.option("--tune", default="off", show_default=True)
@click.option("--markdown", "markdown_file", type=click.Path(path_type=Path), help="Write the table.")
def main(devices: str, models: str, tune: str, markdown_file: Path | None) -> None:
    """Measure and print the table."""
    begin, rows = time.perf_counter(), []

    def say(text: str) -> None:
        click.echo(f"{time.perf_counter() - begin:6.1f} s  {text}", err=True)

    for name in models.split(","):
        try:
            rows.append(measured(name, CASES[name](), [int(d) for d in devices.split(",")], tune, say))
        except Exception:  # the others are worth having
            say(f"{name}: {traceback.format_exc()}")
    text = markdown(rows, HEADERS)
    click.echo(text)
    if markdown_file:
        markdown_file.write_text(f"# Models over two GPUs\n\n{text}\n\n{section(environment_of(gpu=True))}")
    if len(rows) < len(models.split(",")):
        sys.exit(1)


if __name__ == "__main__":
    run(main)
