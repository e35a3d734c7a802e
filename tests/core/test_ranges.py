"""Programs for a range of lengths: results at each length, independence of data past the length, and causes of NoRange."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ranged_models import RANGED, UNRANGED, RangedModel
from ranged_programs import program_of, same_at

from rammer.errors import BadInput
from rammer.frontend.ranges.anti_unify import NoRange
from rammer.frontend.ranges.dimension_ranges import probe_points
from rammer.ir.extent import LEAST, AffineExtent
from rammer.ir.port import ModelPort
from rammer.runtime.shape_buckets import BUCKETS, FIXED_LEAST, FIXED_PART, LONE, WASTE, Lengths, Span, bucket_bounds, find_bucket
from rammer_testing.nonempty import some


@pytest.mark.slow
@pytest.mark.parametrize("name", RANGED)
def test_results_do_not_depend_on_what_lies_beyond_the_length(name: str, rng: np.random.Generator) -> None:
    """Check every length of the range. Input elements past the length are NaN, except where zeros are guaranteed."""
    model = RANGED[name](rng)
    found, tried = program_of(model), 0
    for symbol, (low, high) in some(model.spans.items()):
        for length in range(low, high + 1):
            point = {s: int(rng.integers(least, most + 1)) for s, (least, most) in model.spans.items()} | {symbol: length}
            same_at(model, found, point, rng)
            tried += 1
    assert tried > 8


def test_attention_reads_zeros_beyond_the_length_and_asks_nowhere_else(rng: np.random.Generator) -> None:
    """Check that products keep the forms of kernel families: only the epilogues before them read the length."""
    graph, ranged, _ = program_of(RANGED["attention"](rng))
    length = ranged.lengths["seq"]
    asking = {c.name: c.kind for c in graph.computes if length in c.reads}
    # The siblings of the values have the same mask, so that the three may still be one product.
    assert asking == dict.fromkeys(("q0", "k0", "v0", "t", "y", "pooled"), "map")
    assert sum(c.kind == "contraction" for c in graph.computes) == 5


@pytest.mark.parametrize("name", UNRANGED)
def test_what_is_no_one_program_says_why(name: str) -> None:
    made, why = UNRANGED[name]
    proto = made()
    symbols = {d.dim_param for i in proto.graph.input for d in i.type.tensor_type.shape.dim if d.dim_param}
    with pytest.raises(BadInput, match=why) as raised:
        program_of(RangedModel(proto, dict.fromkeys(sorted(symbols), (1, 9))))
    assert name == "found" or isinstance(raised.value, NoRange)


@given(low=st.integers(0, 40), more=st.integers(1, 600), data=st.data())
def test_buckets_cover_a_range_once(low: int, more: int, data: st.DataObject) -> None:
    span = (low, max(low + more, 3))
    value = data.draw(st.integers(*span))
    first, last = find_bucket(span, value)
    assert span[0] <= first <= value <= last <= span[1]
    assert all(find_bucket(span, n) == (first, last) for n in (first, last))
    found = {find_bucket(span, n) for n in range(span[0], span[1] + 1)}
    assert len(found) <= BUCKETS
    assert sorted(high for _, high in found) == sorted(bucket_bounds(span))


def waste(span: Span, longest: Sequence[int], fixed: float) -> float:
    """Return the geometric mean of the time of a length in its bucket over its time alone. A launch costs as much as ``fixed``
    elements."""
    lengths = np.arange(span[0], span[1] + 1)
    ends = np.array(sorted(longest))
    return float(np.exp(np.mean(np.log((ends[np.searchsorted(ends, lengths)] + fixed) / (lengths + fixed)))))


@given(low=st.integers(1, 300), more=st.integers(1, 600))
def test_buckets_waste_a_tenth_or_are_as_many_as_there_may_be(low: int, more: int) -> None:
    """Check also that the waste is at most that of halving, if halving has as many buckets."""
    span = (low, low + more)
    found, fixed = bucket_bounds(span), max(span[1] * FIXED_PART, FIXED_LEAST)
    assert len(found) == BUCKETS or waste(span, found, fixed) < WASTE + 0.05
    assert LONE not in found or span[0] == LONE
    halves = [span[1] >> k for k in range(BUCKETS) if k == 0 or span[1] >> k >= max(low, LEAST + 1)]
    if len(found) >= len(halves):
        assert waste(span, found, fixed) <= waste(span, halves, fixed) * 1.01
    assert (
        len(bucket_bounds((1, 512))) == 5
        and bucket_bounds((1, 32))[-2:] == (7, LONE)
        and bucket_bounds((1, 32), lone=False)[-1] == 7
    )


def test_probes_reach_both_ends() -> None:
    points = probe_points({"seq": (1, 512), "batch": (1, 8)})
    assert points[0] == {"seq": 512, "batch": 8}
    for name, high in (("seq", 512), ("batch", 8)):
        alone = {p[name] for p in points if all(p[n] == points[0][n] for n in p if n != name)}
        assert {high, high - 1, 2, 3} <= alone


def test_an_extent_is_affine() -> None:
    extent = AffineExtent((("seq", 2), ("past", 1)), 3)
    assert (str(extent), extent.at({"seq": 5, "past": 7})) == ("2*seq + past + 3", 20)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"other": (1, 9)}, "open dimension"),
        ({"seq": (9, 1)}, "range"),
        ({"seq": (0, 2)}, "range"),
        ({"seq": (1, 9), "all": "seq * seq"}, "sum"),
        ({"all": "seq + 1"}, "sum"),
    ],
)
def test_what_no_length_can_be_is_refused(said: dict[str, tuple[int, int] | str], why: str) -> None:
    with pytest.raises(BadInput, match=why):
        Lengths.of((ModelPort("x", "float32", (1, "seq", "all")),), said)


def test_a_length_may_follow_from_others() -> None:
    ports = (ModelPort("x", "float32", ("past", "tokens")), ModelPort("mask", "int64", ("total",)))
    lengths = Lengths.of(ports, {"past": (0, 64), "tokens": (1, 8), "total": "past + 2*tokens + 3"})
    assert lengths.whole({"past": 5, "tokens": 2}) == {"past": 5, "tokens": 2, "total": 12}
    spans = lengths.spans_of(ports, {"x": (5, 2), "mask": (12,)})
    assert spans == {"past": (0, 24), "tokens": (1, 4)}
    assert lengths.longest(ports, {"x": (5, 2), "mask": (12,)}, spans) == {"x": (24, 4), "mask": (35,)}
    assert lengths.spans_of(ports, {"x": (5, 2), "mask": (11,)}) == {}
