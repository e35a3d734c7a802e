"""Shape operators: correct values, bodies that are a single load, and minimal index expressions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from harness import check_node_case, check_random, node_cases, node_model, run_node_model
from hypothesis import given, settings
from hypothesis import strategies as st

from rammer.errors import BadInput
from rammer.ir import expr as ex
from rammer.ir.compute import Axis, Compute, ComputeGraph
from rammer.ir.evaluate import evaluate_compute
from rammer.ir.expr import Load
from rammer.ir.reindex import reshape_indices
from rammer_testing.nonempty import some

VIEWS = ("Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Expand", "Tile", "Split", "Slice")


@pytest.mark.parametrize("case", node_cases(*VIEWS, "Concat"))
def test_node_case(case: Any, rng: np.random.Generator) -> None:
    check_node_case(rng, case)


GENERATORS = st.integers(0, 2**32 - 1).map(np.random.default_rng)


def _data(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def _ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def _one_load(graph: ComputeGraph) -> None:
    assert all(isinstance(c.body, Load) and c.body.fill is None for c in some(graph.computes))


@pytest.mark.parametrize(
    ("op", "shape", "more", "attributes"),
    [
        ("Reshape", (2, 3, 4), _ints(0, -1), {}),
        ("Reshape", (0, 3), _ints(3, 0), {"allowzero": 1}),
        ("Reshape", (1,), _ints(), {}),
        ("Flatten", (2, 3, 4), None, {"axis": 2}),
        ("Flatten", (2, 3, 4), None, {"axis": 0}),
        ("Flatten", (2, 3, 4), None, {"axis": -1}),
        ("Squeeze", (2, 1, 4, 1), None, {}),
        ("Squeeze", (2, 1, 4, 1), _ints(-1), {}),
        ("Unsqueeze", (2, 4), _ints(3, 0), {}),
        ("Transpose", (2, 3, 4), None, {}),
        ("Transpose", (2, 3, 4, 5), None, {"perm": [2, 0, 3, 1]}),
        ("Expand", (3, 1), _ints(2, 1, 5), {}),
        ("Tile", (2, 1, 3), _ints(2, 3, 1), {}),
    ],
)
def test_rearrangements_are_one_load(
    op: str, shape: tuple[int, ...], more: np.ndarray | None, attributes: dict[str, Any], rng: np.random.Generator
) -> None:
    inputs = {"x": _data(rng, *shape)} | ({} if more is None else {"more": more})
    _one_load(check_random(op, inputs, rtol=0, atol=0, **attributes))


@pytest.mark.parametrize("parts", [[(2, 3)], [(2, 3), (2, 1), (2, 4)], [(2, 0), (2, 2)], [(2, 0), (2, 0)]])
@pytest.mark.parametrize("dtype", ["float32", "int64", "bool"])
def test_concat(parts: list[tuple[int, ...]], dtype: str, rng: np.random.Generator) -> None:
    inputs = {f"x{i}": (_data(rng, *s) * 3).astype(dtype) for i, s in enumerate(parts)}
    check_random("Concat", inputs, axis=-1, rtol=0, atol=0)


def test_long_concat(rng: np.random.Generator) -> None:
    check_random("Concat", {f"x{i}": _data(rng, 2, 1 + i % 3) for i in range(300)}, axis=1, rtol=0, atol=0)


def test_split(rng: np.random.Generator) -> None:
    x = _data(rng, 7, 4)
    _one_load(check_random("Split", {"x": x, "s": _ints(1, 4, 2)}, outputs=3, axis=-2, rtol=0, atol=0))
    _one_load(check_random("Split", {"x": x}, outputs=3, num_outputs=3, rtol=0, atol=0))


@settings(max_examples=40)
@given(st.data())
def test_slice_as_specified(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    dims = data.draw(st.lists(st.sampled_from(range(len(shape))), unique=True, min_size=1))
    bound = st.one_of(st.integers(-7, 7), st.sampled_from([2**63 - 1, -(2**63) + 1]))
    cuts = [(data.draw(bound), data.draw(bound), data.draw(st.sampled_from([-3, -2, -1, 1, 2, 3]))) for _ in dims]
    x = _data(data.draw(GENERATORS), *shape)
    named = [d - len(shape) if data.draw(st.booleans()) else d for d in dims]
    inputs = {
        "x": x,
        "s": _ints(*(c[0] for c in cuts)),
        "e": _ints(*(c[1] for c in cuts)),
        "a": _ints(*named),
        "t": _ints(*(c[2] for c in cuts)),
    }
    expected = x
    for d, cut in zip(dims, cuts, strict=True):
        expected = np.take(expected, _positions(*cut, shape[d]), axis=d)
    (y,) = run_node_model(node_model("Slice", inputs), inputs)
    np.testing.assert_array_equal(y, expected)


def _positions(start: int, end: int, step: int, extent: int) -> list[int]:
    """Return the positions of the specification: negative bounds count from the end, then both are clamped."""
    last = extent if step > 0 else extent - 1
    start = min(max(start + extent if start < 0 else start, 0), last)
    end = min(max(end + extent if end < 0 else end, 0 if step > 0 else -1), last)
    return list(range(start, end, step))


def _factors(draw: st.DrawFn, size: int) -> tuple[int, ...]:
    shape = []
    while size > 1 and len(shape) < 4:
        shape.append(draw(st.sampled_from([d for d in range(1, size + 1) if size % d == 0])))
        size //= shape[-1]
    return tuple(draw(st.permutations([*shape, size])))


@st.composite
def reshapes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    size = draw(st.sampled_from([1, 2, 12, 24, 30, 36, 60, 64, 72, 210]))
    return _factors(draw, size), _factors(draw, size)


@pytest.mark.slow
@settings(max_examples=300)
@given(reshapes())
def test_reshape_indices_are_right(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    source, target = shapes
    axes = tuple(Axis(f"i{d}", n) for d, n in enumerate(target))
    x = np.arange(math.prod(source)).reshape(source)
    compute = Compute("y", "int64", axes, Load("x", reshape_indices(source, axes)))
    np.testing.assert_array_equal(evaluate_compute(compute, {"x": x}), x.reshape(target))
    bounds = {a.name: (0, a.extent - 1) for a in axes}
    for index, extent in some(zip(reshape_indices(source, axes), source, strict=True)):
        span = ex.interval(index, bounds)
        assert span is not None and 0 <= span[0] <= span[1] < extent


@settings(max_examples=200)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_splits_merges_and_unit_axes_are_minimal(extents: list[int], data: st.DataObject) -> None:
    """Check that a split is affine. A merge has one quotient and one remainder, each of a single axis."""
    fine = tuple(extents)
    cut = data.draw(st.integers(0, len(fine)))
    coarse = (math.prod(fine[:cut]), math.prod(fine[cut:]))
    split = reshape_indices(coarse, [Axis(f"i{d}", n) for d, n in enumerate(fine)])
    assert all(ex.affine_form(i) is not None for i in some(split))
    units = tuple(n for e in fine for n in (1, e))
    equal = reshape_indices(units, [Axis(f"i{d}", n) for d, n in enumerate(fine)])
    assert equal == tuple(i for d, n in enumerate(fine) for i in (ex.integer(0), ex.as_index(f"i{d}" if n > 1 else 0)))


def test_reshape_expressions_read_well() -> None:
    def text(source: tuple[int, ...], target: tuple[int, ...]) -> str:
        return ", ".join(map(str, reshape_indices(source, [Axis(n, e) for n, e in zip("ijkl", target)])))  # noqa: B905

    assert text((6, 4), (24,)) == "i // 4, i % 4"
    assert text((24,), (6, 4)) == "(i * 4) + j"
    assert text((2, 3, 4), (6, 4)) == "i // 3, i % 3, j"
    assert text((6, 4, 5), (2, 3, 20)) == "(i * 3) + j, k // 5, k % 5"
    assert text((1, 8, 1), (2, 1, 4)) == "0, (i * 4) + k, 0"
    assert text((2, 2, 6), (6, 2, 2)) == "i // 3, (((i * 2) + j) // 3) % 2, (((i * 4) + (j * 2)) + k) % 6"


@pytest.mark.parametrize("perm", [[1, 0], [0, 1, 3], [0, 0, 1], [0, 1, -1], [1, 0, 2, 3]])
def test_a_transposition_names_every_axis_once(perm: list[int]) -> None:
    inputs = {"x": np.zeros((2, 3, 4), np.float32)}
    with pytest.raises(BadInput, match="perm"):
        run_node_model(node_model("Transpose", inputs, opset=7, perm=perm), inputs)
