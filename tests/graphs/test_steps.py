"""Error bounds of the oracle follow the float32 operations step by step: correct devices pass, larger errors fail."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from rammer_testing.graphs.case import Call, GraphCase
from rammer_testing.graphs.judge import Judge, Setting, reference_outputs

Array = np.ndarray[Any, Any]
f32 = np.float32


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    made = Judge(voices=False)
    yield made
    made.outside.close()


def _case(*nodes: Call, opset: int = 17, **inputs: Any) -> GraphCase:
    return GraphCase(opset, {n: np.asarray(a) for n, a in inputs.items()}, {}, nodes, (nodes[-1].outputs[0],))


def _kind(judge: Judge, monkeypatch: pytest.MonkeyPatch, case: GraphCase, have: Any, precision: str = "float32") -> str:
    """Return the verdict on a device that returns ``have``."""
    monkeypatch.setattr(Judge, "run", lambda *_: {case.outputs[0]: np.asarray(have)})
    return judge(case, Setting("toy", precision=precision)).kind


def _interpolated(a: np.float32) -> tuple[Array, float]:
    """Return [a, -2a] at a third, which is 0, and the result of a device that fuses one product with the sum."""
    rounded = f32(f32(-2) * a * f32(1 / 3))
    return np.array([[[a, f32(-2) * a]]], f32), float(a) * float(f32(2 / 3)) + float(rounded)


@pytest.mark.parametrize("op", ["Resize", "Upsample"])
def test_weights_that_cancel(judge: Judge, monkeypatch: pytest.MonkeyPatch, op: str) -> None:
    x, honest = _interpolated(f32(0.7731))
    assert honest != 0
    if op == "Resize":
        sizes = {"sizes": np.array([1, 1, 4])}
        call = Call(op, ("x", "", "", "sizes"), ("y",), {"mode": "linear", "coordinate_transformation_mode": "align_corners"})
        right = np.array([[[x[0, 0, 0], honest, x[0, 0, 0] * f32(-1), x[0, 0, 1]]]], f32)
    else:
        sizes = {"scales": np.array([1, 1, 3], f32)}
        call = Call(op, ("x", "scales"), ("y",), {"mode": "linear"})
        right = np.array([[[x[0, 0, 0], honest, -x[0, 0, 0], *[x[0, 0, 1]] * 3]]], f32)
    case = GraphCase(9 if op == "Upsample" else 17, {"x": x}, sizes, (call,), ("y",))
    assert _kind(judge, monkeypatch, case, right) == "ok"
    for at, error in ((1, 5e-5), (1, 1e-3), (0, 1e-4)):
        wrong = right.copy()
        wrong[0, 0, at] += f32(error)
        assert _kind(judge, monkeypatch, case, wrong) == "device"


def test_summands_within_an_activation_that_cancel(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.array([-2.9998869, 2.0], f32)
    # A fused multiply-add, and a device that rounds the product first and uses another sixth.
    case = _case(Call("HardSwish", ("x",), ("y",)), x=x)
    sixth = np.nextafter(f32(1 / 6), f32(0))
    for weight in (f32(1 / 6), sixth):
        inner = np.clip((x * weight) + f32(0.5), f32(0), f32(1))
        assert _kind(judge, monkeypatch, case, x * inner) == "ok"
    assert _kind(judge, monkeypatch, case, x * (inner + f32(5e-5))) == "device"


def test_rounding_decides_whether_halves_are_equal(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.array([0.5001, 0.7, 1.0], f32)
    y = np.array([0.5002, 0.7, 1.5], f32)
    case = _case(Call("Equal", ("x", "y"), ("z",)), x=x, y=y)
    # float16 cannot represent a difference of 1e-4 at 0.5; float32 can.
    assert _kind(judge, monkeypatch, case, [True, True, False], "float16") == "ok"
    assert _kind(judge, monkeypatch, case, [True, True, True], "float16") == "device"
    assert _kind(judge, monkeypatch, case, [True, True, False]) == "device"
    assert _kind(judge, monkeypatch, case, [False, True, False]) == "ok"


def test_no_number_as_an_integer_is_undefined(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    base, exponent = np.array([1, 3, -1], np.int32), np.array([0.301], f32)
    case = _case(Call("Pow", ("x", "e"), ("y",)), x=base, e=exponent)
    for last in (0, -(2**31), 7):
        assert _kind(judge, monkeypatch, case, np.array([1, 1, last], np.int32)) == "ok"
    assert _kind(judge, monkeypatch, case, np.array([1, 2, 0], np.int32)) == "device"
    masked = _case(
        Call("Pow", ("x", "e"), ("p",)),
        Call("BitwiseAnd", ("p", "m"), ("y",)),
        opset=18,
        e=np.array([-1.5], f32),
        x=np.array([0, 4], np.int32),
        m=np.array([-(2**31), 7], np.int32),
    )
    for first in (0, -(2**31)):  # every bit of dependent values is undefined
        assert _kind(judge, monkeypatch, masked, np.array([first, 0], np.int32)) == "ok"
    assert _kind(judge, monkeypatch, masked, np.array([0, 1], np.int32)) == "device"
    back = _case(Call("Cast", ("x",), ("y",), {"to": 12}), x=np.array([-1.0, 3.0], f32))  # to uint32, where -1 wraps
    assert _kind(judge, monkeypatch, back, np.array([2**32 - 1, 3], np.uint32)) == "ok"
    assert _kind(judge, monkeypatch, back, np.array([0, 3], np.uint32)) == "device"


def test_outputs_left_out_are_no_inputs_of_the_reference() -> None:
    nodes = (Call("Dropout", ("x",), ("d", "")), Call("Clip", ("d", "", "high"), ("y",)))
    said = reference_outputs(_case(*nodes, x=np.array([-3, 1, 5], f32), high=f32(2)))
    assert said is not None and np.array_equal(said["y"], np.array([-3, 1, 2], f32))
