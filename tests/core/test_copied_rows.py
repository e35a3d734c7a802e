"""Copies of normalised rows for each product that reads them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from rammer.ir.compute import Compute, ComputeGraph, verify_compute_graph
from rammer.ir.evaluate import run_graph
from rammer.ir.types import TensorType
from rammer.passes.compute.copy_rows import copy_rows
from rammer_testing.nonempty import some

ROWS = (
    "s: f32[m:2] = sum[k:8] x[m, k] * x[m, k]",
    "r: f32[m:2] = 1.0 / sqrt(s[m] + 1.0)",
    "v: f32[m:2, k:8] = x[m, k] * r[m]",
    "q: f32[m:2, n:5] = sum[k:8] v[m, k] * w0[k, n]",
    "p: f32[m:2, n:4] = sum[k:8] v[m, k] * w1[k, n]",
)


def graph_of(lines: Sequence[str], outputs: tuple[str, ...], rng: np.random.Generator) -> ComputeGraph:
    """Return the lines as a graph over the input ``x`` and constant weights."""
    computes = tuple(map(Compute.parse, lines))
    shapes = {"x": (2, 8), "w0": (8, 5), "w1": (8, 4)}
    types = {n: TensorType("float32", s) for n, s in shapes.items()} | {c.name: c.type for c in computes}
    weights = {n: rng.standard_normal(shapes[n]).astype(np.float32) for n in ("w0", "w1")}
    return ComputeGraph("g", ("x",), outputs, computes, types, weights)


def test_each_product_gets_the_reductions_and_the_maps_after_them(rng: np.random.Generator) -> None:
    before = graph_of(ROWS, ("q", "p"), rng)
    after = copy_rows(before, few=2)
    verify_compute_graph(after)
    assert [c.name for c in after.computes] == ["s", "r", "v", "q", "s_copy1", "r_copy1", "v_copy1", "p"]
    assert [len(after.consumers()[n]) for n in ("v", "v_copy1")] == [1, 1]
    x = {"x": rng.standard_normal((2, 8)).astype(np.float32)}
    want, have = (run_graph(g, x, precise=False) for g in (before, after))
    assert all(np.array_equal(want[n], have[n]) for n in some(before.outputs))
    assert copy_rows(after, few=2) is after


@pytest.mark.parametrize(
    ("lines", "outputs", "few"),
    [
        (ROWS, ("q", "p"), 1),
        (ROWS, ("q", "p", "v"), 2),
        ((*ROWS, "y: f32[m:2, k:8] = v[m, k] + 1.0"), ("q", "p", "y"), 2),
        (("v: f32[m:2, k:8] = x[m, k] + 1.0", *ROWS[3:]), ("q", "p"), 2),
        (ROWS[:4], ("q",), 2),
    ],
    ids=["many rows", "an output", "another reader", "only maps", "one product"],
)
def test_other_rows_are_not_copied(lines: tuple[str, ...], outputs: tuple[str, ...], few: int, rng: np.random.Generator) -> None:
    graph = graph_of(lines, outputs, rng)
    assert copy_rows(graph, few) is graph
