"""Ranges inferred from runs: selection of the program for a length that follows others."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ranged_models import RANGED, UNRANGED, parsed

import rammer
from rammer.cli.run import build_report, run_repeatedly
from rammer.ir.port import ModelPort
from rammer.jit.continuation import Continuation
from rammer.runtime.auto_ranges import FEWEST, LengthHistory, doubling_range
from rammer.runtime.shape_buckets import FIXED, bucket_bounds, find_bucket
from rammer_testing.nonempty import some

PORTS = (ModelPort("x", "float32", ("batch", "past")), ModelPort("mask", "int64", ("batch", "total")))


def _shapes(batch: int, past: int, total: int) -> dict[str, tuple[int, ...]]:
    return {"x": (batch, past), "mask": (batch, total)}


@given(first=st.integers(0, 3000), value=st.integers(0, 5000))
def test_ranges_double_from_the_first_length(first: int, value: int) -> None:
    low, high = doubling_range(first, value)
    assert value < min(first, 1) or low <= value <= high
    assert all(doubling_range(first, n) == (low, high) for n in (low, high, (low + high) // 2))
    assert high < 2 * max(value, FEWEST)
    assert len({doubling_range(first, n) for n in range(1, 5001, 7)}) <= 11


def test_one_length_alone_has_no_range() -> None:
    seen = LengthHistory(on=True)
    assert seen.learned(PORTS, _shapes(2, 5, 6)) is FIXED
    assert not seen.learned(PORTS, _shapes(2, 5, 6)).spans


def test_what_grows_alike_follows() -> None:
    """Check that a decoder's mask grows with its past; the batch stays fixed until it changes."""
    seen = LengthHistory(on=True)
    seen.learned(PORTS, _shapes(2, 9, 10))
    found = seen.learned(PORTS, _shapes(2, 12, 13))
    assert (dict(found.spans), {n: str(e) for n, e in found.derived.items()}) == ({"past": (10, 18)}, {"total": "past + 1"})
    found = seen.learned(PORTS, _shapes(3, 20, 21))
    assert dict(found.spans) == {"batch": (1, 8), "past": (19, 36)}
    assert found.spans_of(PORTS, _shapes(3, 20, 21)) == found.spans


def test_what_grew_alike_by_chance_is_taken_apart() -> None:
    seen = LengthHistory(on=True)
    seen.learned(PORTS, _shapes(1, 9, 10))
    assert len(seen.learned(PORTS, _shapes(2, 10, 11)).spans) == 1
    found = seen.learned(PORTS, _shapes(2, 14, 15))
    assert {*found.spans} == {"batch", "past"}
    assert {n: str(e) for n, e in found.derived.items()} == {"total": "past + 1"}


@pytest.mark.slow
@pytest.mark.parametrize("device", ["toy", "rocm", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_a_second_length_gets_a_range(device: str, rng: np.random.Generator) -> None:
    """Check results at all lengths, with few programs; the first one is that of the first length alone."""
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


def test_arrays_are_bound_up_to_their_lengths_where_runs_have_shown_these() -> None:
    seen = LengthHistory(on=True)
    assert seen.until(PORTS, _shapes(2, 40, 41)) is FIXED
    seen.learned(PORTS, _shapes(2, 9, 10))
    assert seen.until(PORTS, _shapes(2, 40, 41)) is FIXED
    seen.learned(PORTS, _shapes(2, 12, 13))
    found = seen.until(PORTS, _shapes(2, 40, 41))
    assert (dict(found.spans), {n: str(e) for n, e in found.derived.items()}) == ({"past": (1, 40)}, {"total": "past + 1"})
    assert not seen.until(PORTS, _shapes(2, 1, 2)).spans
    seen.learned(PORTS, _shapes(3, 20, 21))
    assert dict(seen.until(PORTS, _shapes(4, 40, 41)).spans) == {"batch": (1, 4), "past": (1, 40)}


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("device", ["toy", "rocm", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("given", [False, True])
def test_arrays_of_any_length_are_bound(device: str, given: bool, rng: np.random.Generator) -> None:
    """Check arrays of another length than a range's greatest, which are bound for this length only. If the range is inferred from
    runs, shorter lengths are supported too."""
    model = RANGED["attention"](rng)
    exe, plain = rammer.compile(model.proto, device, shapes=model.spans if given else {}), rammer.compile(model.proto, "toy")
    plain.length_history.on = False
    for seq, found in ((5, False), (6, not given)):
        inputs = model.inputs({"seq": seq, "batch": 2}, rng)
        bound, shorter = exe.bind(inputs), model.inputs({"seq": 3, "batch": 2}, rng)
        assert bool(bound.lengths) == found
        for point in [{}, {"seq": 3}] if found else [{}]:
            bound.write(shorter if point else inputs)
            bound.run(**point)
            got, expected = bound.to_host(), plain.run(shorter if point else inputs)
            for name in some(expected):
                np.testing.assert_allclose(got[name], expected[name], 1e-4, 1e-5)
        for length in (5, 7):
            exe.run(model.inputs({"seq": length, "batch": 2}, rng))
    exe.close()
    plain.close()


def test_states_stay_where_runs_have_shown_a_range(rng: np.random.Generator) -> None:
    """Check a cache that grows in place, up to the size of its array."""
    model = RANGED["cache"](rng)
    exe, plain = rammer.compile(model.proto, "toy"), rammer.compile(model.proto, "toy", shapes=model.spans)
    state = model.inputs({"past": 0}, rng)["past"]
    for past in (0, 1, 2):
        exe.run(model.inputs({"past": past}, rng))
    step = model.inputs({"past": 0}, rng)
    bound = exe.bind({**step, "past": np.zeros((state.shape[0], 9, *state.shape[2:]), state.dtype)}, {"present": "past"})
    for past in range(9):
        x = rng.standard_normal(step["x"].shape).astype(np.float32)
        expected = plain.run({**step, "x": x, "past": state})
        bound.write({"x": x})
        bound.run(past=past)
        np.testing.assert_allclose(bound.to_host("y")["y"], expected["y"], 1e-4, 1e-5)
        state = expected["present"]
    exe.close()
    plain.close()


def test_arrays_of_a_model_without_a_range_are_bound_for_their_shapes(capsys: pytest.CaptureFixture[str]) -> None:
    name = next(iter(UNRANGED))
    exe = rammer.compile(UNRANGED[name][0](), "toy")

    def ones(length: int) -> dict[str, np.ndarray]:
        return {p.name: np.ones([length if isinstance(d, str) else d for d in p.shape], np.float32) for p in exe.head.inputs}

    exe.run(ones(4))
    exe.length_history.learned(exe.head.inputs, {n: a.shape for n, a in ones(6).items()})
    bound = exe.bind(ones(6))
    bound.run()
    assert capsys.readouterr().err.count("each shape is compiled on its own") == 1
    expected = exe.run(ones(6))
    for output in some(expected):
        np.testing.assert_array_equal(bound.to_host()[output], expected[output])
    exe.close()


def test_what_serves_a_run_is_told(rng: np.random.Generator) -> None:
    """Check the message for a given range and for an inferred one, and its absence without a range."""
    model = RANGED["cache"](rng)
    found = []
    for spans in (model.spans, {}):
        exe = rammer.compile(model.proto, "toy", shapes=spans)
        for past in (1, 9, 8):
            inputs = exe.checked(model.inputs({"past": past}, rng))
            special = exe.prepare(inputs)
            found.append(build_report(exe, special, *run_repeatedly(special, inputs, 1))["lengths"])
        exe.close()
    of, (short, long, last) = (
        f"of past=0..9, which takes {len(bucket_bounds((0, 9)))} programs",
        (find_bucket((0, 9), n) for n in (1, 9, 8)),
    )
    assert found == [
        f"past={short[0]}..{short[1]} {of}; 1 so far",
        f"past={long[0]}..{long[1]} {of}; 2 so far",
        f"past={last[0]}..{last[1]} {of}; {len({short, long, last})} so far",
        "",
        "past=9..16, a range observed in earlier runs; 2 programs so far",
        "past=1..8, a range observed in earlier runs; 3 programs so far",
    ]


@pytest.mark.parametrize("name", UNRANGED)
def test_what_has_no_range_says_so_once(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    made, _ = UNRANGED[name]
    exe = rammer.compile(made(), "toy")
    for length in (4, 6, 7):
        exe.run({p.name: np.ones([length if isinstance(d, str) else d for d in p.shape], np.float32) for p in exe.head.inputs})
    assert capsys.readouterr().err.count("each shape is compiled on its own") == 1
    assert [s.compiled.ranged for s in some(exe.cache.values())] == [None] * len(exe.cache)
    exe.close()


def test_a_range_takes_the_step_that_the_model_accepts(rng: np.random.Generator) -> None:
    """Check a reshape that only accepts multiples of four, and a later length with a smaller step than the first ones."""
    proto = parsed("grouped (float[a] x) => (float[4, b] y) { r = Reshape(x, four)  y = Tanh(r) }", four=np.array([4, -1]))
    exe = rammer.compile(proto, "toy")
    for length in (16, 48, 64, 56, 60, 36):
        x = rng.standard_normal(length).astype(np.float32)
        np.testing.assert_allclose(exe.run({"x": x})["y"], np.tanh(x.reshape(4, -1)), 1e-5)
    found = [s.compiled.ranged for s in exe.cache.values() if s.compiled.ranged is not None]
    assert {r.steps["a"] for r in some(found)} <= {4, 8, 16}
    assert len(exe.cache) <= 5
    exe.close()


def test_selected_rows_have_ranges_from_the_first_run(rng: np.random.Generator) -> None:
    constants = {"zero": np.float32(0), "first": np.array([0])}
    text = """chosen (float[40, 3] x, float[40] s) => (float[k, 3] y) {
        c = Greater(s, zero)  n = NonZero(c)  i = Squeeze(n, first)  v = Gather(x, i)  y = Softmax(v)
    }"""
    exe = rammer.compile(parsed(text, **constants), "toy")
    for rows in (24, 20, 13, 40, 24, 0, 1):
        x, s = rng.standard_normal((40, 3)).astype(np.float32), -np.ones(40, np.float32)
        s[rng.permutation(40)[:rows]] = 1
        weights = np.exp(x[s > 0])
        np.testing.assert_allclose(exe.run({"x": x, "s": s})["y"], weights / weights.sum(axis=1, keepdims=True), 1e-5)
    (special,) = exe.cache.values()
    assert isinstance(special.following, Continuation)
    assert len(special.following.residents.held) <= 4  # 13..24, 25..48, none and one
    exe.close()
