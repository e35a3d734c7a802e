"""The constants of ``kernels/plain.py`` of rocm, fitted to tiles of random memory-bound operators on one core of this machine.

python benchmarks/plain_fit.py --cases 40 --seed 5001

Least squares of relative errors, of every tile and of how tiles of one operator differ; errors far beyond others count less.
Every constant is pulled towards what vendors' tables say of the instruction, and at least a quarter of it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any, Final, TypeAlias

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from stitching import Ranked, ranked_operators

from rammer.device.loader import Registry
from rammer.ir.device import VDevice

from rammer_rocm.kernels.plain import PlainTasks, plain

Array: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"

#: Cycles at the clock that the device names, before anything is measured: throughputs and latencies of 512-bit instructions (AMD,
#: Software Optimization Guide for the Zen 4 Microarchitecture; at 3.7 GHz, where the device names 2.6), bytes by a core's share.
EXPECTED: Final = {
    **{"task": 15.0, "nest": 3.0, "loop": 3.0, "nested": 1.0, "load": 0.7, "spread": 0.35, "gather": 0.7, "store": 1.4},
    **{"operation": 0.7, "quotient": 7.0, "function": 2.3, "wait": 2.1, "fold": 4.0, "line": 0.7, "page": 5.0},
    **{"element": 0.7, "element_load": 0.35, "element_store": 0.7, "element_quotient": 3.5, "element_function": 5.0},
    **{"element_step": 1.5, "near_read": 0.02, "near_write": 0.02, "near_run": 0.3, "again_near": 0.02},
    **{"far_read": 0.04, "far_write": 0.04, "far_run": 3.0, "again_far": 0.04},
}
#: What the prior and differences between tiles of one operator weigh beside one operator's errors, and errors that count half.
PRIOR, WITHIN, HALF = 0.05, 3.0, (0.3, 0.15)


def counted(found: Ranked, device: VDevice) -> Array:
    """Cycles of each tile for a constant of 1, tile by constant."""
    tasks = PlainTasks(found.subject.operator, found.subject.binding, device)
    tiled = [found.subject.operator.tiled(tile) for tile in found.tiles]
    return np.array([[o.task_count * mean.get(n, 0.0) for n in EXPECTED] for o in tiled for mean in [tasks.mean(o)]])


def solved(rows: Array, wanted: Array, start: Array, least: Array) -> Array:
    """The least squares of ``rows @ x - wanted`` with every x at least ``least``, by coordinates."""
    square, right, x = rows.T @ rows, rows.T @ wanted, start.copy()
    for _ in range(400):
        for j in range(len(x)):
            x[j] = max(least[j], x[j] - (square[j] @ x - right[j]) / square[j, j])
    return x


def fitted(counts: Sequence[Array], times: Sequence[Array]) -> Array:
    """The constants, in order of ``EXPECTED``; ``times`` in cycles."""
    prior = np.array(list(EXPECTED.values()))
    x = prior.copy()
    for _ in range(12):
        rows, wanted = [np.diag(np.sqrt(PRIOR) / prior)], [np.full(len(prior), np.sqrt(PRIOR))]
        for made, seen in zip(counts, times, strict=True):
            middle = float(np.median(seen))
            errors = made @ x / seen - 1
            weights = np.sqrt(1 / len(seen) / (1 + np.abs(errors) / HALF[0]))
            rows, wanted = [*rows, made / seen[:, None] * weights[:, None]], [*wanted, weights]
            apart, differ = (made - np.median(made, axis=0)) / middle, seen / middle - 1
            errors = apart @ x - differ
            weights = np.sqrt(WITHIN / len(seen) / (1 + np.abs(errors) / HALF[1]))
            rows, wanted = [*rows, apart * weights[:, None]], [*wanted, differ * weights]
        x = solved(np.vstack(rows), np.concatenate(wanted), x, prior / 4)
    return x


def main() -> int:
    """Measure, fit and print; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    backend = Registry().open("rocm")
    found = [r for r in ranked_operators(options.cases, Random(options.seed), backend) if plain(r.subject.operator)]
    clock = backend.vdevice.flops / (2 * backend.vdevice.vector)
    x = fitted([counted(r, backend.vdevice) for r in found], [np.array(r.measured) * clock for r in found])
    for name, cycles in zip(EXPECTED, x, strict=True):
        print(f'    "{name}": {cycles:.2g},')
    print(f"{sum(len(r.tiles) for r in found)} tiles of {len(found)} operators")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
