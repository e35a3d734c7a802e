"""Ranges that nobody gave: which program serves a length that comes after others."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ranged_models import RANGED, UNRANGED

import rammer
from rammer.ir.port import InputPort
from rammer.runtime.lengths import FIXED
from rammer.runtime.seen import FEWEST, Seen, doubling
from rammer.testing.some import some

PORTS = (InputPort("x", "float32", ("batch", "past")), InputPort("mask", "int64", ("batch", "total")))


def _shapes(batch: int, past: int, total: int) -> dict[str, tuple[int, ...]]:
    return {"x": (batch, past), "mask": (batch, total)}


@given(first=st.integers(0, 3000), value=st.integers(0, 5000))
def test_ranges_double_from_the_first_length(first: int, value: int) -> None:
    low, high = doubling(first, value)
    assert value < min(first, 1) or low <= value <= high
    assert all(doubling(first, n) == (low, high) for n in (low, high, (low + high) // 2))
    assert high < 2 * max(value, FEWEST)
    assert len({doubling(first, n) for n in range(1, 5001, 7)}) <= 11


def test_one_length_alone_has_no_range() -> None:
    seen = Seen(on=True)
    assert seen.learned(PORTS, _shapes(2, 5, 6)) is FIXED
    assert not seen.learned(PORTS, _shapes(2, 5, 6)).spans


def test_what_grows_alike_follows() -> None:
    """A decoder's mask grows with its past; the batch stays what it is, until it does not."""
    seen = Seen(on=True)
    seen.learned(PORTS, _shapes(2, 9, 10))
    found = seen.learned(PORTS, _shapes(2, 12, 13))
    assert (dict(found.spans), {n: str(e) for n, e in found.derived.items()}) == ({"past": (10, 18)}, {"total": "past + 1"})
    found = seen.learned(PORTS, _shapes(3, 20, 21))
    assert dict(found.spans) == {"batch": (1, 8), "past": (19, 36)}
    assert found.spans_of(PORTS, _shapes(3, 20, 21)) == found.spans


def test_what_grew_alike_by_chance_is_taken_apart() -> None:
    seen = Seen(on=True)
    seen.learned(PORTS, _shapes(1, 9, 10))
    assert len(seen.learned(PORTS, _shapes(2, 10, 11)).spans) == 1
    found = seen.learned(PORTS, _shapes(2, 14, 15))
    assert {*found.spans} == {"batch", "past"}
    assert {n: str(e) for n, e in found.derived.items()} == {"total": "past + 1"}


@pytest.mark.parametrize("device", ["toy", "rocm", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_a_second_length_gets_a_range(device: str, rng: np.random.Generator) -> None:
    """Right at all lengths, and with few programs, of which the first is that of the first length alone."""
    model = RANGED["attention"](rng)
    exe, plain = rammer.compile(model.proto, device), rammer.compile(model.proto, "toy", shapes=model.spans)
    for seq in (9, 12, 17, 18, 9, 10, 3):
        inputs = model.inputs({"seq": seq, "batch": 2}, rng)
        got = exe.run(inputs)
        if seq <= 9:
            expected = plain.run(inputs)
            for name in some(got):
                np.testing.assert_allclose(got[name], expected[name], 1e-4, 1e-5)
    assert sorted(str(s.compiled.ranged.spans) if s.compiled.ranged else "" for s in exe.cache.values()) == [
        "",
        "{'seq': (1, 9)}",
        "{'seq': (10, 18)}",
    ]
    exe.close()
    plain.close()


@pytest.mark.parametrize("name", UNRANGED)
def test_what_has_no_range_says_so_once(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    made, _ = UNRANGED[name]
    exe = rammer.compile(made(), "toy")
    for length in (4, 6, 7):
        exe.run({p.name: np.ones([length if isinstance(d, str) else d for d in p.shape], np.float32) for p in exe.head.inputs})
    assert capsys.readouterr().err.count("each shape is compiled on its own") == 1
    assert [s.compiled.ranged for s in some(exe.cache.values())] == [None] * len(exe.cache)
    exe.close()
