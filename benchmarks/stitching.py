"""Stitched against apart on a CPU, by its own time; and how well predictions rank the tiles of one operator.

python benchmarks/stitching.py --cases 20 --seed 1      # random memory-bound graphs, with stitching and without
python benchmarks/stitching.py --ranks --seed 1         # rank correlation of predicted and measured, operator by operator
"""

from __future__ import annotations

import argparse
import resource
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import onnx

import rammer.compiler
from rammer.compiled.options import CompileOptions
from rammer.compiler import Compiler
from rammer.device.loader import Registry
from rammer.device.manifest import Backend, Loaded
from rammer.frontend.bind import bind
from rammer.frontend.reader import read_model
from rammer.ir.program import RProgram
from rammer.profile.probe import probe_program, random_inputs
from rammer.profile.store import KernelStore
from rammer.testing.cases import NetCase
from rammer.testing.nets import KINDS, model_of
from rammer.testing.single import subjects
from rammer.tile.search import ranked_tiles

#: Extents that are drawn, products of them that are worth timing, runs of a measurement and how often it is taken.
EXTENTS, WORK, RUNS, ROUNDS = (3, 8, 17, 64, 100, 256, 768, 1000), (50_000, 2_000_000), 20, 7
#: Measured times that differ by less are no order: the same kernel twice differs as much.
NOISE = 1.15
STITCH = rammer.compiler.stitch


def drawn(random: Random) -> NetCase:
    """A random memory-bound graph with several results."""
    tags = tuple(t for t in KINDS["stitched"].tags if t not in ("slice", "dims") and random.random() < 0.4)
    while True:
        sizes = {**{n: random.choice(EXTENTS) for n in ("b", "m", "depth")}, "t": random.randrange(3), "off": 1}
        if WORK[0] <= sizes["b"] * sizes["m"] * sizes["depth"] <= WORK[1]:
            return NetCase("stitched", sizes, tags, seed=random.randrange(1 << 20))


@dataclass(frozen=True)
class Predicted:
    """A program's operators, and its seconds by the delta and the latency evaluator."""

    operators: int
    delta: float
    latency: float


def predicted(program: RProgram, backend: Backend) -> Predicted:
    """What is predicted of a program, one operator after another."""
    types = {**program.types, **{c.name: c.type for o in program.operators for c in o.computes}}
    delta = sum(ranked_tiles(o, types, backend.vdevice)[0][0] for o in program.operators)
    return Predicted(len(program.operators), delta, program.predicted)


def programs(model: onnx.ModelProto, backend: Backend) -> tuple[list[Any], list[Predicted]]:
    """The model resident with stitching and without, and what is predicted of both."""
    found, counts = list[Any](), list[Predicted]()
    for stitching in (STITCH, lambda tile, *_: tile):
        rammer.compiler.stitch = stitching  # type: ignore[assignment]
        (segment,) = Compiler(backend, CompileOptions(), KernelStore(None)).compile(bind(read_model(model), {})).segments
        found.append((backend.load(segment.program, segment.constants), random_inputs(segment.program, np.random.default_rng(0))))  # type: ignore[union-attr]
        counts.append(predicted(segment.program, backend))  # type: ignore[union-attr]
    rammer.compiler.stitch = STITCH
    return found, counts


def cpu_seconds(loaded: Loaded, inputs: dict[str, Any], runs: int = RUNS) -> float:
    """CPU time of a run, of all threads."""
    before = resource.getrusage(resource.RUSAGE_SELF)
    for _ in range(runs):
        loaded.run(inputs)
    after = resource.getrusage(resource.RUSAGE_SELF)
    return (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / runs


def compare(cases: int, random: Random, backend: Backend) -> None:
    """CPU time apart over stitched, of graphs that are stitched at all."""
    ratios, times, guesses = list[float](), list[float](), list[Predicted]()
    while len(ratios) < cases:
        case = drawn(random)
        found, counts = programs(model_of(case.kind, case.sizes, case.tags, case.seed), backend)
        if counts[0].operators < counts[1].operators:
            best = [float("inf")] * 2
            for number in range(ROUNDS):
                for k in (0, 1) if number % 2 else (1, 0):
                    best[k] = min(best[k], cpu_seconds(*found[k]))
            ratios.append(best[1] / best[0])
            times, guesses = times + best, guesses + counts
            joined, apart = (f"{c.operators} operators {seconds * 1e6:8.1f} us" for c, seconds in zip(counts, best, strict=True))
            print(f"{ratios[-1]:6.2f}  {apart} -> {joined}  {case}", flush=True)
        for loaded, _ in found:
            loaded.close()
    slower = sum(r < 1 / 1.05 for r in ratios)
    print(f"{cases} graphs: median {statistics.median(ratios):.2f}, least {min(ratios):.2f}, {slower} slower by more than 5%")
    for name in ("delta", "latency"):
        guessed = [getattr(g, name) for g in guesses]
        gains = [apart / joined for joined, apart in zip(guessed[::2], guessed[1::2], strict=True)]
        whole, gain = correlation(guessed, times), correlation(gains, ratios, 1.02)
        print(f"{name} evaluator: rank correlation over programs {whole:.2f}, of gains {gain:.2f}")


def ranks(values: Sequence[float], alike: Callable[[float, float], bool]) -> np.ndarray:
    """Ranks, where neighbours that are ``alike`` share the mean of theirs."""
    order, result, group = np.argsort(values, kind="stable"), np.empty(len(values)), list[int]()
    for place, i in enumerate(order):
        if group and not alike(values[order[group[0]]], values[i]):
            group = []
        group.append(place)
        result[order[group]] = np.mean(group)
    return result


def correlation(guessed: Sequence[float], measured: Sequence[float], noise: float = NOISE) -> float:
    """Spearman's, NaN where all are alike."""
    a, b = ranks(guessed, lambda x, y: y <= x * 1.001), ranks(measured, lambda x, y: y <= x * noise)
    return float(np.corrcoef(a, b)[0, 1]) if a.std() and b.std() else float("nan")


def rank(cases: int, random: Random, backend: Backend) -> None:
    """Predicted and measured time of a dozen tiles of each operator: all tasks on one vEU."""
    found, deltas, all_predicted, all_measured = list[float](), list[float](), list[float](), list[float]()
    while len(found) < cases:
        case = drawn(random)
        for subject in subjects(case, backend):
            ranked = ranked_tiles(subject.operator, subject.binding.types, backend.vdevice)
            tiles = [*ranked[:2], *random.sample(ranked[2:], min(10, len(ranked[2:])))]
            guessed, measured = list[float](), list[float]()
            for _, tile, _ in tiles:
                tiled = subject.operator.tiled(tile)
                kernel = backend.kernel(tiled, subject.binding)
                program, constants = probe_program(tiled, subject.binding, 1, backend.vdevice.veus, tiled.task_count)
                loaded, inputs = backend.load(program, constants), random_inputs(program, np.random.default_rng(0))
                cpu_seconds(loaded, inputs, 1)
                measured.append(min(loaded.run(inputs).seconds for _ in range(3 * ROUNDS)))
                guessed.append(kernel.alone * tiled.task_count)
                loaded.close()
            spread = max(measured) / min(measured)
            if spread > NOISE and len(tiles) > 3:
                found.append(correlation(guessed, measured))
                deltas.append(correlation([seconds for seconds, _, _ in tiles], measured))
                print(f"{found[-1]:6.2f}  {len(tiles)} tiles, slowest {spread:.1f} times the fastest  {case}", flush=True)
            all_predicted, all_measured = all_predicted + guessed, all_measured + measured
    print(f"{len(found)} operators: mean rank correlation {np.nanmean(found):.2f}, median {np.nanmedian(found):.2f}")
    whole = correlation(all_predicted, all_measured)
    print(f"delta evaluator: mean {np.nanmean(deltas):.2f}; latency, of all tiles together: {whole:.2f}")


def main() -> int:
    """Compare, or rank; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="rocm")
    parser.add_argument("--ranks", action="store_true")
    options = parser.parse_args()
    (rank if options.ranks else compare)(options.cases, Random(options.seed), Registry().open(options.device))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
