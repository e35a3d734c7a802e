"""Comparison of float16 results with float32 ones, by the errors that 11 bits without limits of range would make."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from rammer.ir.compute import ComputeGraph
from rammer.ir.evaluate import evaluate_compute, run_graph

#: Largest finite float16, relative error of float16, and how many times the errors of random roundings are allowed.
LIMIT, UNIT, FACTOR = 65504.0, 2.0**-11, 6.0


def spread_of(graph: ComputeGraph, feeds: Mapping[str, np.ndarray], rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Return the largest change of results in four trials. In a trial, every value has a relative error of at most half
    precision."""
    want, found = run_graph(graph, feeds), dict[str, np.ndarray]()
    for _ in range(4):

        def noisy(x: np.ndarray) -> np.ndarray:
            return x * (1 + UNIT * rng.uniform(-1, 1, x.shape)) if x.dtype.kind == "f" else x

        values = {n: noisy(np.asarray(v)) for n, v in {**graph.constants, **feeds}.items()}
        for c in graph.computes:
            values[c.name] = noisy(evaluate_compute(c, values, precise=True))
        for name in graph.outputs:
            error = np.abs(values[name] - want[name])
            found[name] = np.maximum(found.get(name, 0.0), np.where(np.isfinite(error), error, np.inf))
    return found


def complaint(have: np.ndarray, want: np.ndarray, spread: np.ndarray) -> str:
    """Return the difference between ``have`` and ``want`` as a message, or an empty string."""
    inside = np.isfinite(want) & (np.abs(want) <= LIMIT)
    if not np.isfinite(have[inside]).all():
        return "not finite where float32 is finite and within float16's range"
    scale = np.abs(want[inside]).max(initial=0.0)
    allowed = FACTOR * spread.max(axis=-1, keepdims=True) + 2 * UNIT * scale + 1e-5
    off = np.abs(have - want) - allowed
    return f"off by {np.abs(have - want)[inside].max():.3g} of {scale:.3g}" if (off[inside] > 0).any() else ""
