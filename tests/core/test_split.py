"""Splits of reductions (rfactor): equal values, and splits only of reductions that do not fit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rammer.ir.compute import Compute, ComputeGraph, verify_compute_graph
from rammer.ir.device import MemoryLayer, VDevice
from rammer.ir.evaluate import run_graph
from rammer.ir.types import TensorType
from rammer.passes.compute.rfactor import rfactor, split_deep
from rammer.passes.compute.split_gather import in_pieces

LINE = "y: f32[n:2, m:3] = {combiner}[k:{k}, j:2] x[n, k, j] * w[k, m]"


def graph(k: int, combiner: str = "sum") -> ComputeGraph:
    y = Compute.parse(LINE.format(k=k, combiner=combiner))
    z = Compute.parse("z: f32[n:2, m:3] = max(y[n, m], 0.0)")
    types = {"x": TensorType("float32", (2, k, 2)), "w": TensorType("float32", (k, 3)), "y": y.type, "z": z.type}
    return ComputeGraph("g", ("x", "w"), ("z",), (y, z), types)


def staged(capacity: int) -> VDevice:
    layers = (MemoryLayer("far", "device", 1 << 30, 1e9), MemoryLayer("near", "veu", capacity, 1e10))
    return VDevice("d", "test", 4, layers, 1e9, 1e-6, staged=True)


GENERATORS = st.integers(0, 2**32 - 1).map(np.random.default_rng)


@settings(max_examples=30)
@given(
    parts=st.sampled_from([2, 3, 4, 6, 12]),
    combiner=st.sampled_from(["sum", "max", "min", "prod"]),
    rng=GENERATORS,
)
def test_split_equals_whole(parts: int, combiner: str, rng: np.random.Generator) -> None:
    g = graph(12, combiner)
    partial, final = rfactor(g.computes[0], "k", parts)
    split = ComputeGraph("s", g.inputs, g.outputs, (partial, final, g.computes[1]), {**g.types, partial.name: partial.type})
    verify_compute_graph(split)
    inputs = {n: rng.standard_normal(g.types[n].shape) for n in g.inputs}
    np.testing.assert_allclose(run_graph(split, inputs)["z"], run_graph(g, inputs)["z"], rtol=1e-12)


def test_only_what_does_not_fit_is_split() -> None:
    g = graph(1024)
    assert split_deep(g, staged(1 << 20)) is g
    small = split_deep(g, staged(4096))
    verify_compute_graph(small)
    assert [c.name for c in small.computes] == ["y_partial", "y", "z"]
    # One element reads 2 rows of k and one column: 12 bytes a step of k, plus 4 for the element itself.
    assert small.computes[0].reduce[0].extent * 12 + 4 <= 4096


def test_a_split_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="5 parts do not divide k:12"):
        rfactor(graph(12).computes[0], "k", 5)


@settings(max_examples=40)
@given(extent=st.integers(2, 40), parts=st.integers(2, 40), fill=st.sampled_from([None, 0.5]), rng=GENERATORS)
def test_a_table_in_pieces_gives_what_the_whole_does(
    extent: int, parts: int, fill: float | None, rng: np.random.Generator
) -> None:
    """Check also parts that do not divide the extent, and indices outside the table if the load has a fill value."""
    table, parts = TensorType("float32", (3, extent)), min(parts, extent)
    read = "x[at[n, m] - 1, at[m, n]]" if fill is None else f"pad(x[1, at[n, m]], {fill})"
    y = Compute.parse(f"y: f32[n:4, m:4] = {read} * 2.0")
    whole = ComputeGraph("g", ("x", "at"), ("y",), (y,), {"x": table, "at": TensorType("int64", (4, 4)), "y": y.type})
    if fill is None:
        low, high = 1, min(4, extent)
    else:
        low, high = -5, extent + 5
    inputs = {"x": rng.standard_normal(table.shape), "at": rng.integers(low, high, (4, 4))}
    load = next(ld for ld in y.loads if ld.tensor == "x")
    made = in_pieces(y, load, 1, table, parts, ("v", "e"))
    cut = replace(whole, computes=made, types={**whole.types, **{c.name: c.type for c in made}})
    verify_compute_graph(cut)
    np.testing.assert_array_equal(run_graph(cut, inputs)["y"], run_graph(whole, inputs)["y"])


def test_only_a_table_that_does_not_fit_is_cut() -> None:
    """Check a device whose tasks stage all that they may read: memory for a column of 1,000 numbers, and less."""
    y = Compute.parse("y: f32[n:2, m:3] = pad(x[at[n], m], 0.0)")
    types = {"x": TensorType("float32", (1000, 3)), "at": TensorType("int64", (2,)), "y": y.type}
    g = ComputeGraph("g", ("x", "at"), ("y",), (y,), types)
    assert split_deep(g, staged(1 << 12)) is g
    small = split_deep(g, staged(1 << 10))
    verify_compute_graph(small)
    assert [c.name for c in small.computes] == ["y_pieces", "y_each", "y"]
    assert 4 * small.types["y_pieces"].shape[1] + 12 <= 1 << 10
    values = {"x": np.arange(3000.0).reshape(1000, 3), "at": np.array([999, 0])}
    np.testing.assert_array_equal(run_graph(small, values)["y"], values["x"][[999, 0]])
