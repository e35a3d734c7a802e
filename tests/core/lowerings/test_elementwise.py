"""Element-wise arithmetic compared with onnx's node tests and ONNX Runtime."""

from __future__ import annotations

import math
from typing import Any

import harness
import numpy as np
import pytest
from harness import check_node_case, check_random, node_cases, node_model, run_node_model

from rammer.frontend.lower.operators.elementwise import UNARY, VARIADIC
from rammer.ir import expr as ex

OTHERS = ("Mean", "Reciprocal", "Mod", "BitShift", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "BitwiseNot", "Pow")
BINARY = ("Add", "Sub", "Mul", "Div")


def _uniform(rng: np.random.Generator, *shape: int, low: float = -3.0, high: float = 3.0, dtype: str = "float32") -> np.ndarray:
    return rng.uniform(low, high, shape).astype(dtype)


def _integers(rng: np.random.Generator, *shape: int, low: int = -50, high: int = 50, dtype: str = "int32") -> np.ndarray:
    return rng.integers(low, high, shape).astype(dtype)


@pytest.mark.parametrize("case", node_cases(*UNARY, *BINARY, *VARIADIC, *OTHERS))
def test_node_case(case: Any, rng: np.random.Generator) -> None:
    check_node_case(rng, case)


#: Ranges in which each function is defined and smooth enough to compare.
DOMAINS = {
    "Sqrt": (0, 9),
    "Log": (0.01, 9),
    "Asin": (-0.99, 0.99),
    "Acos": (-0.99, 0.99),
    "Acosh": (1.01, 9),
    "Atanh": (-0.95, 0.95),
    "Tan": (-1.4, 1.4),
}


@pytest.mark.parametrize("op", sorted(UNARY))
def test_unary(op: str, rng: np.random.Generator) -> None:
    low, high = DOMAINS.get(op, (-3, 3))
    check_random(op, {"x": _uniform(rng, 3, 1, 5, low=low, high=high)})


@pytest.mark.parametrize("op", BINARY)
@pytest.mark.parametrize(("a", "b"), [((2, 3, 4), (2, 3, 4)), ((2, 1, 4), (3, 1)), ((), (5,)), ((1,), (2, 1, 3))])
def test_broadcast(op: str, a: tuple[int, ...], b: tuple[int, ...], rng: np.random.Generator) -> None:
    check_random(op, {"a": _uniform(rng, *a), "b": _uniform(rng, *b, low=0.5)})


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_integer_division_truncates(dtype: str, rng: np.random.Generator) -> None:
    divisor = np.where((d := _integers(rng, 60, low=-9, high=9, dtype=dtype)) == 0, 4, d).astype(dtype)
    check_random("Div", {"a": _integers(rng, 60, dtype=dtype), "b": divisor}, rtol=0, atol=0)


@pytest.mark.parametrize("fmod", [0, 1])
def test_modulo_signs(fmod: int, rng: np.random.Generator) -> None:
    divisor = np.where((d := _integers(rng, 80, low=-9, high=9)) == 0, 5, d).astype("int32")
    check_random("Mod", {"a": _integers(rng, 80), "b": divisor}, fmod=fmod, rtol=0, atol=0)


def test_float_modulo(rng: np.random.Generator) -> None:
    check_random("Mod", {"a": _uniform(rng, 50), "b": _uniform(rng, 50, low=0.3, high=2)}, fmod=1)


@pytest.mark.parametrize("op", ["Min", "Max", "Sum", "Mean"])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_variadic(op: str, count: int, rng: np.random.Generator) -> None:
    shapes = [(3, 4), (4,), (3, 1), (1, 1), (3, 4)]
    check_random(op, {f"x{i}": _uniform(rng, *shapes[i]) for i in range(count)})


@pytest.mark.parametrize("base", ["float32", "int32", "int64"])
@pytest.mark.parametrize("exponent", ["float32", "int32", "int64"])
def test_power_has_the_type_of_its_base(base: str, exponent: str, rng: np.random.Generator) -> None:
    x = _uniform(rng, 4, 5, low=1, high=4, dtype=base)
    graph = check_random("Pow", {"x": x, "e": _integers(rng, 5, low=0, high=4, dtype=exponent)})
    assert graph.computes[-1].dtype == base


@pytest.mark.parametrize("exponent", [-1.0, 0.0, 0.5, 1.0, 2.0, 3.0, 2.5])
def test_constant_powers(exponent: float, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    monkeypatch.setitem(harness.STATIC_INPUTS, "Pow", (1,))
    graph = check_random("Pow", {"x": _uniform(rng, 4, 5, low=0.2), "e": np.array(exponent, np.float32)})
    functions = {n.fn for n in ex.walk(graph.computes[-1].body) if isinstance(n, ex.Op)}
    assert ("pow" in functions) == (exponent in (0.0, 2.5))


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("constant", [False, True])
def test_powers_of_special_values_are_those_of_c(dtype: Any, constant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the exponent 0.5 is not a square root: C's pow of minus infinity is infinity, and that of -0 is 0."""
    if constant:
        monkeypatch.setitem(harness.STATIC_INPUTS, "Pow", (1,))
    x = np.array([0.0, -0.0, 1, -1, 4, -4, np.inf, -np.inf, np.nan], dtype)
    for exponent in (0.5, -0.5, 0.0, -0.0, 1.0, -1.0, 2.0, -2.0, 3.0, -3.0, 1.5, -1.5, np.inf, -np.inf, np.nan):
        inputs = {"x": x, "e": np.array(exponent, dtype)}
        (y,) = run_node_model(node_model("Pow", inputs), inputs)
        want = np.array([c_power(float(v), exponent) for v in x], dtype)
        np.testing.assert_array_equal(y, want, str(exponent))
        np.testing.assert_array_equal(np.signbit(y)[y == 0], np.signbit(want)[want == 0], str(exponent))


def c_power(base: float, exponent: float) -> float:
    """Return C's pow; Python's raises for a zero to a negative power and for a root of a negative number."""
    try:
        return math.pow(base, exponent)
    except ValueError:
        odd = exponent % 2 == 1
        return math.copysign(math.inf, base if odd else 1.0) if base == 0 else math.nan


def test_one_element_constants_become_literals(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    monkeypatch.setitem(harness.STATIC_INPUTS, "Mul", (1,))
    graph = check_random("Mul", {"x": _uniform(rng, 2, 3), "k": _uniform(rng, 1, 1)})
    assert not graph.constants and len(graph.computes[0].loads) == 1
    nan = np.full((1,), np.nan, np.float32)
    graph = check_random("Mul", {"x": _uniform(rng, 2, 3), "k": nan})
    assert len(graph.constants) == 1


def test_empty_tensors(rng: np.random.Generator) -> None:
    check_random("Add", {"a": _uniform(rng, 2, 0, 3), "b": _uniform(rng, 3)})
