"""The constants of ``kernels/plain.py`` of rocm, fitted to kernels that stitching asks about on one core of this machine.

taskset -c 0 python benchmarks/plain_fit.py --cases 160 --seed 9001

Of every operator that the latency evaluator is asked about for random memory-bound graphs the best tile and two others. Least
squares of relative errors: of every tile, of how tiles of one operator differ, and of how an operator differs from two of its
parts; errors far beyond others count less, and what starting a run takes is taken off. Every constant is pulled towards what
vendors' tables say of the instruction, and at least a quarter of it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Final, TypeAlias

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from stitching import STITCH, drawn, fastest

import rammer.compiler
from rammer.compiled.options import CompileOptions
from rammer.compiler import Compiler
from rammer.device.loader import Registry
from rammer.device.manifest import Backend, Binding
from rammer.frontend.bind import bind
from rammer.frontend.reader import read_model
from rammer.ir.device import VDevice
from rammer.ir.operator import ROperator
from rammer.profile.probe import probe_program, random_inputs
from rammer.profile.store import KernelStore
from rammer_testing.cases import NetCase
from rammer_testing.nets import model_of

from rammer_rocm.kernels.generic import generic_choices
from rammer_rocm.kernels.plain import PlainTasks, plain

Array: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"

#: Cycles at the clock that the device names, before anything is measured: throughputs and latencies of 512-bit instructions (AMD,
#: Software Optimization Guide for the Zen 4 Microarchitecture; at 3.7 GHz, where the device names 2.6), less where a core does
#: several at once; bytes by a core's share.
EXPECTED: Final = {
    **{"task": 15.0, "nest": 3.0, "loop": 1.0, "nested": 0.3, "load": 0.7, "spread": 0.35, "gather": 0.7, "store": 0.7},
    **{"operation": 0.4, "quotient": 2.0, "function": 2.3, "wait": 2.1, "fold": 0.7, "line": 0.7, "page": 1.0, "scatter": 0.7},
    **{"conflict": 2.0, "far_conflict": 3.0, "element": 0.3, "element_load": 0.1, "element_store": 0.3, "element_quotient": 2.0},
    **{"element_function": 2.0, "element_step": 0.5, "near_read": 0.02, "near_write": 0.02, "near_run": 0.3, "again_near": 0.01},
    **{"far_read": 0.02, "far_write": 0.02, "far_run": 2.0, "again_far": 0.02, "outer_read": 0.02, "outer_write": 0.02},
}
#: What the prior, differences between tiles of one operator and such from its parts weigh beside one operator's errors, and
#: errors that count half.
PRIOR, WITHIN, JOINED, HALF = 0.05, 1.0, 4.0, (0.3, 0.15)
#: Seconds below which an error is one of the clock; bytes from which on a program's tensors leave every cache.
SHORT, LARGE = 4e-6, 20e6


@dataclass(frozen=True)
class MeasuredTiles:
    """An operator of graph number ``graph``, tiles of it, and their seconds."""

    graph: int
    operator: ROperator
    binding: Binding
    tiles: Sequence[tuple[int, ...]]
    seconds: Sequence[float]


def asked(case: NetCase, backend: Backend) -> list[tuple[ROperator, Binding]]:
    """The operators that stitching asks the latency evaluator about."""
    found: dict[str, tuple[ROperator, Binding]] = {}

    def spying(tile: Any, device: Any, latency: Any, aliases: Any, binding: Any, *rest: Any) -> Any:
        def noted(operator: ROperator) -> float:
            found.setdefault(binding.key(operator), (operator, binding))
            return float(latency(operator))

        return STITCH(tile, device, noted, aliases, binding, *rest)

    rammer.compiler.stitch = spying  # type: ignore[assignment, attr-defined]
    model = read_model(model_of(case.kind, case.sizes, case.tags, case.seed))
    Compiler(backend, CompileOptions(), KernelStore(None)).compile(bind(model, {}))
    rammer.compiler.stitch = STITCH  # type: ignore[attr-defined]
    return [(o, b) for o, b in found.values() if plain(o) and _nbytes(o, b) <= LARGE]


def _nbytes(operator: ROperator, binding: Binding) -> int:
    return sum(binding.types[n].nbytes for n in dict.fromkeys((*operator.inputs, *operator.outputs)))


def measured(cases: int, random: Random, backend: Backend) -> Iterator[MeasuredTiles]:
    """The operators of so many random graphs."""
    for number, case in enumerate(drawn(random) for _ in range(cases)):
        for operator, binding in asked(case, backend):
            options = [c.operator.tile for c in generic_choices(operator, binding, backend.vdevice)]
            tiles, loaded = [*options[:1], *random.sample(options[1:], min(2, len(options) - 1))], list[Any]()
            for tile in tiles:
                tiled = operator.tiled(tile)
                program, constants = probe_program(tiled, binding, 1, backend.vdevice.veus, tiled.task_count)
                loaded.append(backend.load(program, constants))
                loaded[-1].run(random_inputs(program, np.random.default_rng(0)))
            yield MeasuredTiles(number, operator, binding, tiles, fastest(loaded))
            for program in loaded:
                program.close()


def counted(found: MeasuredTiles, device: VDevice) -> Array:
    """Cycles of each tile for a constant of 1, tile by constant."""
    tasks, tiled = PlainTasks(found.operator, found.binding, device), map(found.operator.tiled, found.tiles)
    return np.array([[o.task_count * mean.get(n, 0.0) for n in EXPECTED] for o in tiled for mean in [tasks.mean(o)]])


def joined(found: Sequence[MeasuredTiles]) -> list[tuple[int, int, int]]:
    """Which operators compute what two others do."""
    places: dict[tuple[int, frozenset[str]], int] = {}
    for i, r in enumerate(found):
        places[r.graph, frozenset(c.name for c in r.operator.computes)] = i
    return [
        (whole, i, rest)
        for (graph, computes), i in places.items()
        for (other, wider), whole in places.items()
        if graph == other and computes < wider and (rest := places.get((graph, wider - computes), -1)) > i
    ]


def solved(rows: Array, wanted: Array, start: Array, least: Array) -> Array:
    """The least squares of ``rows @ x - wanted`` with every x at least ``least``, by coordinates."""
    square, right, x = rows.T @ rows, rows.T @ wanted, start.copy()
    for _ in range(400):
        for j in range(len(x)):
            x[j] = max(least[j], x[j] - (square[j] @ x - right[j]) / square[j, j])
    return x


def fitted(counts: Sequence[Array], times: Sequence[Array], short: float, parts: Sequence[tuple[int, int, int]]) -> Array:
    """The constants, in order of ``EXPECTED``; ``times`` in cycles, of which ``short`` ones are within the clock's own error.
    ``parts`` as of ``joined``."""
    prior = np.array(list(EXPECTED.values()))
    x = prior.copy()
    for _ in range(12):
        rows, wanted = [np.diag(np.sqrt(PRIOR) / prior)], [np.full(len(prior), np.sqrt(PRIOR))]
        for made, seen in zip(counts, times, strict=True):
            scale, middle = seen + short, float(np.mean(seen)) + short
            errors = (made @ x - seen) / scale
            weights = np.sqrt(1 / len(seen) / (1 + np.abs(errors) / HALF[0]))
            rows, wanted = [*rows, made / scale[:, None] * weights[:, None]], [*wanted, seen / scale * weights]
            apart, differ = (made - made.mean(axis=0)) / middle, (seen - seen.mean()) / middle
            errors = apart @ x - differ
            weights = np.sqrt(WITHIN / len(seen) / (1 + np.abs(errors) / HALF[1]))
            rows, wanted = [*rows, apart * weights[:, None]], [*wanted, differ * weights]
        for whole, *rest in parts:
            apart, differ = counts[whole][0] - sum(counts[i][0] for i in rest), times[whole][0] - sum(times[i][0] for i in rest)
            scale = sum(times[i][0] for i in rest) + short
            weight = np.sqrt(JOINED / (1 + abs(apart @ x - differ) / scale / HALF[1])) / scale
            rows, wanted = [*rows, apart[None] * weight], [*wanted, np.array([differ * weight])]
        x = solved(np.vstack(rows), np.concatenate(wanted), x, prior / 4)
    return x


def main() -> int:
    """Measure, fit and print; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    backend = Registry().open("rocm")
    found = list(measured(options.cases, Random(options.seed), backend))
    clock, start = backend.vdevice.flops / (2 * backend.vdevice.vector), min(min(r.seconds) for r in found)
    times = [(np.array(r.seconds) - start) * clock for r in found]
    x = fitted([counted(r, backend.vdevice) for r in found], times, SHORT * clock, joined(found))
    for name, cycles in zip(EXPECTED, x, strict=True):
        print(f'    "{name}": {cycles:.2g},')
    print(f"{sum(len(r.tiles) for r in found)} tiles of {len(found)} operators")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
