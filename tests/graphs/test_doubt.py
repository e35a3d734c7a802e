"""Undecidable results: near ties, roundings, comparisons and dependent values are skipped, and all other values are compared."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from rammer_testing.graphs.case import Call, GraphCase
from rammer_testing.graphs.judge import Judge, Setting

f32 = np.float32
CUBES = np.array([0.76956755, 0.8129041, 0.5, 3.0], f32)


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    made = Judge(voices=False)
    yield made
    made.outside.close()


def _case(*nodes: Call, outputs: tuple[str, ...] = (), **inputs: Any) -> GraphCase:
    return GraphCase(17, {n: np.asarray(a) for n, a in inputs.items()}, {}, nodes, outputs or (nodes[-1].outputs[0],))


def _kind(judge: Judge, monkeypatch: pytest.MonkeyPatch, case: GraphCase, have: Any) -> str:
    """Return the verdict on a device that returns ``have``."""
    monkeypatch.setattr(Judge, "run", lambda *_: {case.outputs[0]: np.asarray(have)})
    return judge(case, Setting("toy")).kind


def _one_hot(place: int, extent: int) -> np.ndarray[Any, Any]:
    return np.eye(extent, dtype=f32)[place]


def test_of_many_near_ties_each_may_win_and_nothing_else(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    # In float32, Sigmoid of 16 to 17.2 is 1 except for the last bit or two. Sigmoid of 2 is 0.88.
    x = np.array([2, *(17.2 - 0.1 * np.arange(13))], f32)
    nodes = (Call("Sigmoid", ("x",), ("s",)), Call("Hardmax", ("s",), ("h",), {"axis": 0}), Call("Sign", ("h",), ("y",)))
    case = _case(*nodes, x=x)
    for place in range(1, 14):
        assert _kind(judge, monkeypatch, case, _one_hot(place, 14)) == "ok"
    clear = _case(*nodes, x=np.array([2, 1, 3, -1], f32))
    for place, kind in ((2, "ok"), (0, "device")):
        assert _kind(judge, monkeypatch, clear, _one_hot(place, 4)) == kind


def test_ties_of_the_data_are_decided(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    case = _case(Call("Hardmax", ("x",), ("y",), {"axis": 0}), x=np.array([1, 3, 3], f32))
    for place, kind in ((1, "ok"), (2, "device")):
        assert _kind(judge, monkeypatch, case, _one_hot(place, 3)) == kind


def test_equal_by_rounding_alone_is_undecided_and_so_is_what_hangs_on_it(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    x = CUBES[None, None]
    root = Call("LpPool", ("x",), ("r",), {"kernel_shape": [1], "p": 3})
    equal = _case(root, Call("Equal", ("x", "r"), ("y",)), x=x)
    half = _case(root, Call("Sub", ("x", "c"), ("d",)), Call("Equal", ("d", "r"), ("y",)), x=x, c=f32(0.25))
    for said, kind in ((True, "ok"), (False, "ok")):
        assert _kind(judge, monkeypatch, equal, np.full(x.shape, said)) == kind
    assert _kind(judge, monkeypatch, half, np.full(x.shape, False)) == "ok"
    assert _kind(judge, monkeypatch, half, np.full(x.shape, True)) == "device"
    # A selected value is undecided only where the choices differ in decided values.
    chosen = _case(root, Call("Equal", ("x", "r"), ("e",)), Call("Where", ("e", "x", "z"), ("y",)), x=x, z=np.zeros(1, f32))
    assert _kind(judge, monkeypatch, chosen, x) == "ok"
    rounded = _case(root, Call("Mul", ("r", "two"), ("t",)), Call("Floor", ("t",), ("y",)), x=x, two=f32(2))
    for place, said, kind in ((3, 6, "ok"), (3, 5, "ok"), (1, 0, "device")):  # the square root of 27, doubled, may be less than 6
        have = np.floor(2 * x)
        have[..., place] = said
        assert _kind(judge, monkeypatch, rounded, have) == kind


def test_one_value_equals_itself_however_it_was_rounded(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    sine = Call("Sin", ("x",), ("s",))
    case = _case(sine, Call("Equal", ("s", "s"), ("y",)), x=CUBES)
    assert _kind(judge, monkeypatch, case, np.full(4, True)) == "ok"
    assert _kind(judge, monkeypatch, case, np.array([True, True, False, True])) == "device"
    most = _case(sine, Call("ArgMax", ("s",), ("y",), {"axis": 0}), x=CUBES)
    assert _kind(judge, monkeypatch, most, np.array([1])) == "ok" and _kind(judge, monkeypatch, most, np.array([0])) == "device"


def test_a_value_of_16_bits_equals_its_own_copy(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    # Every reader has the rounded value, stored or not.
    copied = Call("Neg", ("s",), ("m",)), Call("Neg", ("m",), ("c",))
    case = _case(Call("Sqrt", ("x",), ("s",)), *copied, Call("Less", ("c", "s"), ("y",)), x=np.array([2, 3, 4], np.float16))
    assert _kind(judge, monkeypatch, case, np.array([False, False, False])) == "ok"
    assert _kind(judge, monkeypatch, case, np.array([True, False, False])) == "device"


def test_other_voices_are_asked_about_ties_and_not_about_nan() -> None:
    ties = np.array([[[[1, 3, 0], [3, 0, 3]], [[2, 2, 2], [2, 2, 2]]]], np.int8)
    pool = Call("MaxPool", ("x",), ("v", "y"), {"kernel_shape": [2, 2], "storage_order": 1})
    sign = (Call("Log", ("x",), ("l",)), Call("Sign", ("l",), ("y",)))
    asked = Judge()
    try:
        verdict = asked(_case(pool, outputs=("v", "y"), x=ties), Setting("toy"))
        assert verdict.kind == "ok" and verdict.voices == ("onnxruntime",)
        assert asked(_case(*sign, x=np.array([-1, 2], f32)), Setting("toy")).kind == "ok"
        alone = Call("MaxPool", ("x",), ("y",), {"kernel_shape": [1], "strides": [2], "pads": [1, 1]})
        assert asked(_case(alone, x=np.ones((1, 1, 1), f32)), Setting("toy")).kind == "ok"
    finally:
        asked.outside.close()
