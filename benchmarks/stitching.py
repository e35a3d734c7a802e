"""Stitched against apart on a CPU, by its own time; and how well predictions rank the tiles of one operator.

taskset -c 0 python benchmarks/stitching.py --cases 20 --seed 1    # random memory-bound graphs, with stitching and without
python benchmarks/stitching.py --ranks --seed 1                    # rank correlation of predicted and measured, by operator

On one core, since of two threads one waits for the other, and that is CPU time as well.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import onnx

import rammer.compiler
from rammer.compiled.options import CompileOptions
from rammer.compiler import Compiler
from rammer.device.loader import Registry
from rammer.device.manifest import Backend
from rammer.frontend.bind import bind
from rammer.frontend.reader import read_model
from rammer.ir.program import RProgram
from rammer.profile.probe import probe_program, random_inputs
from rammer.profile.store import KernelStore
from rammer.tile.search import ranked_tiles
from rammer_testing.cases import NetCase
from rammer_testing.nets import KINDS, model_of
from rammer_testing.single import UntiledOperator, subjects

#: Extents that are drawn, products of them that are worth timing, runs of a measurement and how often it is taken.
EXTENTS, WORK, RUNS, ROUNDS = (3, 8, 17, 64, 100, 256, 768, 1000), (50_000, 2_000_000), 15, 4
#: From what ratio on a stitched graph is called slower, and how often it is measured again: other work on the machine may last.
SLOWER, AGAIN = 1.05, 3
#: Measured times that differ by less are no order: the same kernel twice differs as much.
NOISE = 1.15
STITCH = rammer.compiler.stitch


def drawn(random: Random, work: tuple[int, int] = WORK) -> NetCase:
    """A random memory-bound graph with several results, of ``work`` elements."""
    tags = tuple(t for t in KINDS["stitched"].tags if t not in ("slice", "dims") and random.random() < 0.4)
    while True:
        sizes = {**{n: random.choice(EXTENTS) for n in ("b", "m", "depth")}, "t": random.randrange(3), "off": 1}
        if work[0] <= sizes["b"] * sizes["m"] * sizes["depth"] <= work[1]:
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


def programs(model: onnx.ModelProto, backend: Backend, tune: str = "off") -> tuple[list[Any], list[Predicted]]:
    """The model resident with stitching and without, and what is predicted of both."""
    found, counts = list[Any](), list[Predicted]()
    for stitching in (STITCH, lambda tile, *_: tile):
        rammer.compiler.stitch = stitching  # type: ignore[assignment]
        (segment,) = Compiler(backend, CompileOptions(tune=tune), KernelStore(None)).compile(bind(read_model(model), {})).segments
        found.append(backend.load(segment.program, segment.constants))  # type: ignore[union-attr]
        found[-1].run(random_inputs(segment.program, np.random.default_rng(0)))  # type: ignore[union-attr]
        counts.append(predicted(segment.program, backend))  # type: ignore[union-attr]
    rammer.compiler.stitch = STITCH
    return found, counts


def compare(cases: int, random: Random, backend: Backend, tune: str) -> None:
    """CPU time apart over stitched, of graphs that are stitched at all."""
    ratios, times, guesses = list[float](), list[float](), list[Predicted]()
    while len(ratios) < cases:
        case = drawn(random)
        found, counts = programs(model_of(case.kind, case.sizes, case.tags, case.seed), backend, tune)
        if counts[0].operators < counts[1].operators:
            best = fastest(found)
            for _ in range(AGAIN if best[1] < best[0] / SLOWER else 0):
                best = list(map(min, best, fastest(found)))
            ratios.append(best[1] / best[0])
            times, guesses = times + best, guesses + counts
            joined, apart = (f"{c.operators} operators {seconds * 1e6:8.1f} us" for c, seconds in zip(counts, best, strict=True))
            print(f"{ratios[-1]:6.2f}  {apart} -> {joined}  {case}", flush=True)
        for loaded in found:
            loaded.close()
    slower = sum(r < 1 / SLOWER for r in ratios)
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


@dataclass(frozen=True)
class Ranked:
    """An operator with some of its tiles: predicted by the delta evaluator, by the latency evaluator, and measured (seconds)."""

    case: NetCase
    subject: UntiledOperator
    tiles: list[tuple[int, ...]]
    deltas: list[float]
    guessed: list[float]
    measured: list[float]

    @property
    def spread(self) -> float:
        """The slowest tile's time over the fastest one's."""
        return max(self.measured) / min(self.measured)


def ranked_operators(cases: int, random: Random, backend: Backend) -> Iterator[Ranked]:
    """So many operators of random graphs whose tiles differ, a dozen tiles of each, and those whose tiles do not on the way: all
    tasks on one vEU."""
    while cases > 0:
        case = drawn(random)
        for subject in subjects(case, backend):
            ranked = ranked_tiles(subject.operator, subject.binding.types, backend.vdevice)
            tiles = [*ranked[:2], *random.sample(ranked[2:], min(10, len(ranked[2:])))]
            loaded, guessed = list[Any](), list[float]()
            for _, tile, _ in tiles:
                tiled = subject.operator.tiled(tile)
                program, constants = probe_program(tiled, subject.binding, 1, backend.vdevice.veus, tiled.task_count)
                loaded.append(backend.load(program, constants))
                loaded[-1].run(random_inputs(program, np.random.default_rng(0)))
                guessed.append(backend.kernel(tiled, subject.binding).alone * tiled.task_count)
            found = Ranked(case, subject, [t for _, t, _ in tiles], [s for s, _, _ in tiles], guessed, fastest(loaded))
            for program in loaded:
                program.close()
            yield found
            cases -= found.spread > NOISE and len(tiles) > 3


def fastest(loaded: Sequence[Any]) -> list[float]:
    """The least CPU time of a run of each, of all threads. Runs of one follow each other, so that what it reads is where the last
    one left it: others in between would empty the caches that cores share."""
    best = [math.inf] * len(loaded)
    for _ in range(ROUNDS):
        for k, program in enumerate(loaded):
            program.execute()
            for _ in range(RUNS):
                before = time.process_time()
                program.execute()
                best[k] = min(best[k], time.process_time() - before)
    return best


def pairs(guessed: Sequence[float], measured: Sequence[float]) -> tuple[int, int]:
    """Of how many pairs, whose measured times differ by more than noise, the prediction has the order; and how many there are."""
    apart = [(i, j) for i, a in enumerate(measured) for j, b in enumerate(measured) if b > a * NOISE]
    return sum(guessed[i] < guessed[j] for i, j in apart), len(apart)


def rank(cases: int, random: Random, backend: Backend) -> None:
    """How well the tiles of each operator are ranked."""
    found = list[Ranked]()
    told, deltas, lost, right, count = list[float](), list[float](), list[float](), 0, 0
    for r in ranked_operators(cases, random, backend):
        found.append(r)
        if r.spread > NOISE and len(r.tiles) > 3:
            told.append(correlation(r.guessed, r.measured))
            deltas.append(correlation(r.deltas, r.measured))
            lost.append(r.measured[int(np.argmin(r.guessed))] / min(r.measured))
            right, count = right + pairs(r.guessed, r.measured)[0], count + pairs(r.guessed, r.measured)[1]
            print(f"{told[-1]:6.2f}  {len(r.tiles)} tiles, slowest {r.spread:.1f} times the fastest  {r.case}", flush=True)
    print(f"{len(told)} operators: mean rank correlation {np.nanmean(told):.2f}, median {np.nanmedian(told):.2f}")
    whole = correlation([g for r in found for g in r.guessed], [m for r in found for m in r.measured])
    print(f"delta evaluator: mean {np.nanmean(deltas):.2f}; latency, of all tiles together: {whole:.2f}")
    print(f"{right / count:.3f} of {count} pairs that differ by more than {NOISE - 1:.0%} in order")
    print(f"the tile predicted best takes {np.mean(lost):.2f} times the best one's time in the mean, {max(lost):.2f} at most")


def main() -> int:
    """Compare, or rank; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="rocm")
    parser.add_argument("--ranks", action="store_true")
    parser.add_argument("--tune", default="off", help="quick: kernels and plans are measured before they are chosen")
    options = parser.parse_args()
    random, backend = Random(options.seed), Registry().open(options.device)
    if options.ranks:
        rank(options.cases, random, backend)
    else:
        compare(options.cases, random, backend, options.tune)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
