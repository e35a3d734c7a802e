"""Running sums in blocks: results equal to unblocked sums for every combiner, with far fewer reads."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rammer.ir.compute import Combiner, Compute, ComputeGraph, combiner_identity, verify_compute_graph
from rammer.ir.evaluate import run_graph
from rammer.ir.types import TensorType
from rammer.passes.compute.blocked_scan import SHORT, scan_in_blocks

LINE = "y: {kind}[n:2, i:{n}, m:3] = {combiner}[k:{n}] pad(x[n, {place}, m], {fill})"
#: Index of the elements of a running sum: up to the element or from it on, inclusive or exclusive.
PLACES = {"i + k * -1": "before", "(i + k * -1) + -1": "before, exclusive", "i + k": "behind", "(i + k) + 1": "behind, exclusive"}


def graph(n: int, combiner: Combiner = "sum", place: str = "i + k * -1", kind: str = "f32") -> ComputeGraph:
    """Return a running sum of rows of ``n``, and a map of it."""
    dtype = {"f32": "float32", "f16": "float16", "i32": "int32", "f64": "float64"}[kind]
    fill = combiner_identity(combiner, dtype).value
    y = Compute.parse(LINE.format(n=n, combiner=combiner, place=place, kind=kind, fill=fill))
    z = Compute.parse(f"z: {kind}[n:2, i:{n}, m:3] = y[n, i, m] * y[n, i, m]")
    return ComputeGraph("g", ("x",), ("z", "y"), (y, z), {"x": TensorType(dtype, (2, n, 3)), "y": y.type, "z": replace(y.type)})


def reads(g: ComputeGraph) -> int:
    """Return the number of elements that all computes read or combine."""
    return sum(c.points for c in g.computes)


@settings(max_examples=40)
@given(
    n=st.integers(1, 300),
    combiner=st.sampled_from(["sum", "max", "min", "prod"]),
    place=st.sampled_from(list(PLACES)),
    rng=st.integers(0, 2**32 - 1).map(np.random.default_rng),
)
def test_blocks_give_what_the_whole_gives(n: int, combiner: Combiner, place: str, rng: np.random.Generator) -> None:
    whole = graph(n, combiner, place, "f64")
    cut = scan_in_blocks(whole)
    verify_compute_graph(cut)
    assert (cut is whole) == (n <= SHORT)
    inputs = {"x": rng.uniform(0.9, 1.1, (2, n, 3))}
    for name, expected in run_graph(whole, inputs).items():
        np.testing.assert_allclose(run_graph(cut, inputs)[name], expected, rtol=1e-11)


@pytest.mark.parametrize("place", PLACES)
def test_integers_wrap_as_they_do_in_one_row(place: str, rng: np.random.Generator) -> None:
    whole, inputs = graph(97, place=place, kind="i32"), {"x": rng.integers(-(2**31), 2**31, (2, 97, 3)).astype(np.int32)}
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(run_graph(scan_in_blocks(whole), inputs)["y"], run_graph(whole, inputs)["y"])


@pytest.mark.parametrize("n", [100, 1009, 4096, 65_536])
def test_what_is_read_grows_little_faster_than_the_row(n: int) -> None:
    """Check that blocks read at most three rows of the longest block; the direct form reads the square."""
    assert reads(graph(n)) > 6 * n * n
    assert reads(scan_in_blocks(graph(n))) < 100 * 6 * n


def test_half_precision_is_rounded_once() -> None:
    cut = scan_in_blocks(graph(500, kind="f16"))
    assert [c.dtype for c in cut.computes if c.name not in ("y", "z")] == ["float32"] * (len(cut.computes) - 2)


@pytest.mark.parametrize(
    "line",
    [
        "y: f32[n:2, i:90, m:3] = sum[k:9] pad(x[n, i + k * -1, m], 0.0)",  # a window
        "y: f32[n:2, i:90, m:3] = sum[k:90] pad(x[n, i + k * -1, m], 1.0)",  # elements outside contribute
        "y: f32[n:2, i:90, m:3] = max[k:90] pad(x[n, i + k * -1, m], 0.0)",
        "y: f32[n:2, i:90, m:3] = sum[k:90] pad(x[n, i + k * -2, m], 0.0)",  # every other element
        "y: f32[n:2, i:90, m:3] = sum[k:90] pad(x[n, (i + k * -1) + 2, m], 0.0)",  # elements on either side
        "y: f32[n:2, i:90, m:3] = sum[k:90] pad(x[n, i + k * -1, i // 45], 0.0)",  # a diagonal
    ],
)
def test_other_forms_stay(line: str) -> None:
    y = Compute.parse(line)
    whole = ComputeGraph("g", ("x",), ("y",), (y,), {"x": TensorType("float32", (2, 90, 3)), "y": y.type})
    assert scan_in_blocks(whole) is whole
