"""Random memory-bound graphs on an NVIDIA GPU: stitched beside apart, of those that some price stitches.

python benchmarks/stitched_cuda.py --seed 1 --graphs 66 --programs made.pickle --ahead     # compile them, time nothing
python benchmarks/stitched_cuda.py --seed 1 --graphs 66 --programs made.pickle --markdown h200_stitched_graphs.md

Graphs are drawn by the seed, one after the other, and the first so many that any of the prices stitches are timed: none is left
out for how it turned out. Several processes compile them, so that their kernels are in the cache; then the distinct programs of
each graph take turns, in the order drawn, until the seconds are up. ``--ahead --target sm_90a`` needs no GPU.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import pickle
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, Final

import click
import numpy as np
from entry import run
from facts import environment_of, section
from stitching import STITCH, drawn

import rammer.compiler
from rammer.compiled.options import CompileOptions
from rammer.compiler import Compiler
from rammer.device.loader import Registry
from rammer.device.manifest import Binding
from rammer.errors import BadInput, DeviceFailure, RammerError
from rammer.frontend.bind import bind
from rammer.frontend.reader import read_model
from rammer.ir.program import RProgram
from rammer.profile.probe import random_inputs
from rammer.profile.store import KernelStore
from rammer.report.table import duration, markdown
from rammer_bench.graph import Array
from rammer_testing.cases import NetCase
from rammer_testing.nets import model_of

#: The device, as programs are loaded: as graphs of launches, since of small graphs nothing else is chosen.
DEVICE, OPTIONS = "cuda", {"executor": "graph"}
#: The least and the greatest number of elements of a graph.
WORK: Final = (200_000, 20_000_000)
#: What is changed of the VDevice: nothing, what operators of a launch share, what predictions err by, and both.
PRICES: Final[Mapping[str, Mapping[str, float]]] = {
    "as built": {},
    "no shared start": {"start": 0.0},
    "no doubt": {"doubt": 0.0},
    "neither": {"start": 0.0, "doubt": 0.0},
}
#: Runs of a program each time, and how often each has its turn.
RUNS, TURNS = 15, 5
#: From what ratio on a stitched graph is called slower.
SLOWER: Final = (1.03, 1.05)
HEADERS: Final = ("graph", "apart", "stitched", "apart / stitched", *(f"apart / {p}" for p in PRICES if p != "as built"))

Made = tuple[RProgram, Mapping[str, Array]]


@dataclass(frozen=True)
class DrawnGraph:
    """A graph with its distinct programs, and the numbers of those that are apart and that each price makes; ``why`` there are
    none."""

    case: NetCase
    programs: Sequence[Made] = ()
    by: Mapping[str, int] = field(default_factory=dict)
    why: str = ""

    @property
    def stitched(self) -> bool:
        """Whether any price stitches it."""
        return len(self.programs) > 1


@dataclass(frozen=True)
class TimedGraph:
    """Seconds of a run and kernels of the graph's program, by price and ``apart``."""

    case: NetCase
    times: Mapping[str, tuple[float, int]]

    def gain(self, price: str) -> float:
        """How many times longer it takes apart."""
        return self.times["apart"][0] / self.times[price][0]


@lru_cache(1)
def opened(target: str) -> Any:
    """The device, once a process."""
    return Registry().open(DEVICE, target=target, options=OPTIONS)


def programs(case: NetCase, target: str) -> DrawnGraph:
    """The graph's programs; if they differ, their kernels are in the cache as well."""
    found, by, backend = dict[str, Made](), dict[str, int](), opened(target)
    model, own = model_of(case.kind, case.sizes, case.tags, case.seed), backend.vdevice
    try:
        for name, price in {"apart": {}, **PRICES}.items():
            rammer.compiler.stitch = STITCH if name != "apart" else lambda tile, *_: tile
            backend.vdevice = replace(own, **price)
            (segment,) = Compiler(backend, CompileOptions(), KernelStore(None)).compile(bind(read_model(model), {})).segments
            made: Made = segment.program, dict(segment.constants)  # type: ignore[union-attr]
            found.setdefault(key := repr([(o.head(), [c.name for c in o.computes]) for o in made[0].operators]), made)
            by[name] = [*found].index(key)
        if len(found) > 1:
            write(list(found.values()), backend)
        return DrawnGraph(case, tuple(found.values()), by)
    except RammerError as problem:
        return DrawnGraph(case, why=problem.what)
    finally:
        rammer.compiler.stitch, backend.vdevice = STITCH, own


def write(made: Sequence[Made], backend: Any) -> None:
    """Compile what the programs launch, into the cache."""
    from rammer_cuda.compile import compile_all
    from rammer_cuda.executor import launched
    from rammer_cuda.source import Writer, translation_unit

    for program, constants in made:
        _, kernels = launched(program, Binding.of(program, constants), backend.gpu, Writer(), kept=True)
        compile_all({k.entry: translation_unit([k]) for k in kernels.values()}, backend.gpu.architecture)


def draw(graphs: int, seed: int, processes: int, target: str) -> Iterator[DrawnGraph]:
    """The first so many graphs that any price stitches, with those between them that none does."""
    random, left = Random(seed), graphs
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        while left > 0:
            cases = [drawn(random, WORK) for _ in range(4 * processes)]
            for found in pool.map(partial(programs, target=target), cases):
                if left > 0:
                    left -= found.stitched
                    yield found


def timed(graph: DrawnGraph, backend: Any) -> TimedGraph:
    """All distinct programs of a graph in turns: of each the least median."""
    loaded = list[Any]()
    try:
        inputs = random_inputs(graph.programs[0][0], np.random.default_rng(0))
        for program, constants in graph.programs:
            loaded.append(backend.load(program, constants))
            loaded[-1].run(inputs)
        best = [math.inf] * len(loaded)
        for _ in range(TURNS):
            best = [min(b, median(one.replay() for _ in range(RUNS))) for b, one in zip(best, loaded, strict=True)]
        return TimedGraph(graph.case, {name: (best[i], loaded[i].kernels) for name, i in graph.by.items()})
    finally:
        for one in loaded:
            one.close()


def summary(rows: Sequence[TimedGraph], asked: int, drawn_graphs: int) -> str:
    """What the table comes to, of each price."""
    lines = [f"Of {drawn_graphs} graphs drawn some price stitches {asked}; {len(rows)} of these, in the order drawn, were timed."]
    for price in PRICES:
        gains, alike = [r.gain(price) for r in rows], sum(r.times[price] == r.times["apart"] for r in rows)
        slow = " and ".join(f"{sum(g < 1 / s for g in gains)} by more than {s - 1:.0%}" for s in SLOWER)
        ends = f"{min(gains):.2f} to {max(gains):.2f}"
        lines.append(
            f"- {price}: apart takes {median(gains):.2f} as long in the median, {ends}; slower {slow}; {alike} left apart"
        )
    return "\n".join(lines)


def cells(row: TimedGraph) -> list[str]:
    """One line of the table."""
    told = [f"{row.times[p][1]} kernels, {duration(row.times[p][0])}" for p in ("apart", "as built")]
    return [f"`{row.case}`", *told, *(f"{row.gain(p):.2f}" for p in PRICES)]


@click.command(help=__doc__)
@click.option("--graphs", default=66, show_default=True, type=click.IntRange(1), help="That any price stitches.")
@click.option("--seed", default=1, show_default=True, help="Of the draw.")
@click.option("--processes", default=os.cpu_count() or 1, show_default="cores", type=click.IntRange(1), help="That compile.")
@click.option("--seconds", default=math.inf, help="After which no further graph is timed.")
@click.option("--programs", "kept", type=click.Path(path_type=Path), help="Where they are kept; read where it is there.")
@click.option("--ahead", is_flag=True, help="Time nothing.")
@click.option("--target", default="", help="With --ahead: compile for this architecture.")
@click.option("--markdown", "path", type=click.Path(path_type=Path), help="Write the table.")
def main(
    graphs: int, seed: int, processes: int, seconds: float, kept: Path | None, ahead: bool, target: str, path: Path | None
) -> None:
    """Draw, compile, time and print."""
    if target and not ahead:
        raise BadInput(f"nothing runs on target {target}", "--target", "it goes with --ahead")
    asked = (graphs, seed)
    if kept is not None and kept.is_file():
        known, found = pickle.loads(kept.read_bytes())
        if known != asked:
            raise BadInput(f"{kept} has {known[0]} graphs of seed {known[1]}", "--programs", "another file, or these numbers")
    else:
        found = list(draw(graphs, seed, processes, target))
        if kept is not None:
            kept.write_bytes(pickle.dumps((asked, found)))
    for graph in (g for g in found if g.why):
        click.echo(f"not compiled: {graph.case}: {graph.why}")
    chosen = [g for g in found if g.stitched]
    click.echo(
        f"{len(found)} graphs drawn, {len(chosen)} that some price stitches, {sum(len(g.programs) for g in chosen)} programs"
    )
    if not ahead:
        report(chosen, len(found), seconds, f"--graphs {graphs} --seed {seed}", path)


def report(chosen: Sequence[DrawnGraph], drawn_graphs: int, seconds: float, asked: str, path: Path | None) -> None:
    """Time what is chosen, print it, and write the table."""
    backend, begun, rows = opened(""), time.perf_counter(), list[TimedGraph]()
    for graph in chosen:
        if time.perf_counter() - begun > seconds:
            break
        try:
            rows.append(timed(graph, backend))
        except DeviceFailure as problem:
            click.echo(f"failed: {graph.case}: {problem.what}")
            continue
        click.echo(" | ".join(cells(rows[-1])))
    if not rows:
        raise DeviceFailure("no graph was timed", hint="more --seconds")
    said = summary(rows, len(chosen), drawn_graphs)
    click.echo(said)
    if path is not None:
        called = f"`python benchmarks/stitched_cuda.py {asked}`, kernels by prediction, `--option executor=graph`."
        title = f"# Random graphs, stitched and apart\n\n{called}\n\n{said}"
        table = markdown([cells(r) for r in sorted(rows, key=lambda r: r.gain("as built"))], HEADERS)
        path.write_text(f"{title}\n\n{table}\n\n{section(environment_of(True))}")


if __name__ == "__main__":
    run(main)
