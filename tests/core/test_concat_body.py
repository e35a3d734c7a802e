"""The piecewise convention: bodies from ``concat_body`` evaluate like a concatenation and are recognised."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rammer.ir.compute import Axis, Compute, ComputeGraph, verify_compute_graph
from rammer.ir.evaluate import evaluate_compute
from rammer.ir.expr import Const, Load, Op, Ref
from rammer.ir.piecewise import concat_body, piecewise_regions
from rammer.ir.types import TensorType


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=9).filter(any),
    st.integers(0, 2),
    st.integers(0, 2**32 - 1),
)
def test_concatenation(extents: list[int], dim: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    shapes = [tuple(n if d == dim else 2 + d for d in range(3)) for n in extents]
    parts = {f"p{i}": rng.standard_normal(s).astype(np.float32) for i, s in enumerate(shapes)}
    expected = np.concatenate(list(parts.values()), axis=dim)
    axes = tuple(Axis(f"i{d}", n) for d, n in enumerate(expected.shape))
    compute = Compute("y", "float32", axes, concat_body(list(zip(parts, extents, strict=True)), axes, dim))
    np.testing.assert_array_equal(evaluate_compute(compute, parts), expected)
    assert Compute.parse(str(compute)) == compute
    types = {n: TensorType("float32", a.shape) for n, a in {**parts, "y": expected}.items()}
    verify_compute_graph(ComputeGraph("g", tuple(parts), ("y",), (compute,), types))
    found = piecewise_regions(compute)
    if sum(n > 0 for n in extents) > 1:
        assert found is not None
        rebuilt = np.full(expected.shape, np.nan, np.float32)
        for box, load in found:
            rebuilt[tuple(slice(low, high) for low, high in box)] = parts[load.tensor]
        np.testing.assert_array_equal(rebuilt, expected)


def test_a_thousand_parts_print_and_reload() -> None:
    axes = (Axis("t", 1000), Axis("h", 2))
    compute = Compute("y", "float32", axes, concat_body([(f"p{i}", 1) for i in range(1000)], axes, 0))
    assert Compute.parse(str(compute)) == compute
    found = piecewise_regions(compute)
    assert found is not None
    assert [box[0] for box, _ in found] == [(i, i + 1) for i in range(1000)]


def test_other_computes_are_not_pieces() -> None:
    axes = (Axis("i", 4),)
    load = Load("x", (Ref("i"),))
    plain = Compute("y", "float32", axes, load)
    masked = Compute("y", "float32", axes, Op("where", (Op("lt", (load, Const(0.0))), load, load)))
    summed = Compute("y", "float32", (), load, axes, "sum")
    assert piecewise_regions(plain) is piecewise_regions(masked) is piecewise_regions(summed) is None
