"""Functions of lengths that are found from values, and the lengths that they are found at."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rammer.frontend.ranges.dimension_ranges import probe_points
from rammer.frontend.ranges.length_fit import LengthFit, MoreProbes
from rammer.ir.extent import Dim, NoRange, Point, Ranged
from rammer_testing.nonempty import some
from rammer_testing.strided_ranges import Tally


def fitted(
    extents: Sequence[Callable[[Point], int]], spans: dict[str, tuple[int, int]], steps: dict[str, int]
) -> tuple[LengthFit, list[Dim]]:
    """Return the functions through ``extents``, which are found in this order, at as many lengths as needed."""
    points = probe_points(spans, steps)
    while True:
        fit = LengthFit(points, spans, steps)
        try:
            found = [fit.extent([extent(p) for p in points], f"extent {n}") for n, extent in enumerate(extents)]
            fit.settle()
        except MoreProbes as more:
            assert not any(p in points for p in some(more.points))
            points = [*points, *more.points]
        else:
            return fit, found


def value_at(fit: LengthFit, dim: Dim, point: Point) -> int:
    whole = Ranged({}, {}, formulas=fit.formulas).complete(point)
    return dim if isinstance(dim, int) else dim.at(whole)


@given(
    windows=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(0, 3)), min_size=1, max_size=5),
    low=st.integers(100, 200),
    more=st.integers(20, 400),
    step=st.sampled_from([1, 1, 2, 8, 12]),
)
def test_extents_behind_strides_are_exact(windows: list[tuple[int, int, int]], low: int, more: int, step: int) -> None:
    """Check a chain of windows (kernel, stride, padding) at every length of a range."""

    def extent(count: int) -> Callable[[Point], int]:
        def at(point: Point) -> int:
            n = point["w"]
            for kernel, stride, padding in windows[:count]:
                n = (n + padding - kernel) // stride + 1
            return n

        return at

    high = low + max(more // step, 2) * step
    extents = [extent(count) for count in range(1, len(windows) + 1)]
    assume(min(e({"w": low}) for e in extents) >= 1)
    fit, found = fitted(extents, {"w": (low, high)}, {"w": step} if step > 1 else {})
    for length in range(low, high + 1, step):
        assert [value_at(fit, dim, {"w": length}) for dim in found] == [e({"w": length}) for e in extents]


def test_a_flattened_image_is_a_product() -> None:
    extents = [lambda p: p["h"] // 2, lambda p: (p["w"] + 1) // 2, lambda p: 3 * (p["h"] // 2) * ((p["w"] + 1) // 2)]
    fit, found = fitted(extents, {"h": (10, 40), "w": (9, 33)}, {})
    for point in ({"h": 11, "w": 30}, {"h": 38, "w": 9}, {"h": 23, "w": 24}):
        assert [value_at(fit, dim, point) for dim in found] == [e(point) for e in extents]


def test_a_shrinking_extent_is_refused() -> None:
    with pytest.raises(NoRange, match="shrinks"):
        fitted([lambda p: 50 - p["w"] // 2], {"w": (10, 40)}, {})


def test_a_derived_length_has_a_readable_name() -> None:
    fit, (found,) = fitted([lambda p: (p["w"] + 3) // 4], {"w": (10, 99)}, {})
    assert str(found) == "((w + 3) // 4)"
    assert {*fit.formulas} == {str(found)}


@pytest.mark.slow
def test_random_strided_graphs_are_right_at_every_length() -> None:
    tally = Tally()
    for seed in range(8):
        tally.try_graph(seed, "toy")
    assert not tally.faults
    assert tally.ranged >= 6
