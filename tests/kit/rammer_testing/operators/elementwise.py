"""Element-wise operators: arithmetic, functions of one variable, activations, comparisons, casts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from onnx import helper

from rammer.ir.types import SHORT, is_float
from rammer_testing.operators.draw import INTEGERS, MOST, Draw, DrawnValue
from rammer_testing.operators.registry import describe

#: Functions of one variable and their drawn ranges: wide enough for every branch, narrow enough for finite results.
DOMAIN: Final[Mapping[str, tuple[float, float]]] = {
    "Exp": (-20, 8),
    "Log": (1e-3, 100),
    "Sqrt": (0, 100),
    "Sin": (-30, 30),
    "Cos": (-30, 30),
    "Tan": (-1.3, 1.3),
    "Asin": (-1, 1),
    "Acos": (-1, 1),
    "Atan": (-50, 50),
    "Sinh": (-6, 6),
    "Cosh": (-6, 6),
    "Tanh": (-20, 20),
    "Asinh": (-50, 50),
    "Acosh": (1.05, 50),
    "Atanh": (-0.95, 0.95),
    "Erf": (-4, 4),
    "Sigmoid": (-30, 30),
    "Reciprocal": (0.1, 20),
    "Softplus": (-30, 30),
    "Mish": (-30, 30),
    "Elu": (-20, 20),
    "Selu": (-20, 20),
    "Celu": (-20, 20),
    "Softsign": (-50, 50),
    "Gelu": (-10, 10),
    "Swish": (-20, 20),
    "HardSwish": (-20, 20),
}


#: Choices of the float attributes of activations.
PARAMETERS: Final[Mapping[str, Mapping[str, tuple[float, ...]]]] = {
    "Elu": {"alpha": (0.5, 1.0, 2.0, 0.1)},
    "Celu": {"alpha": (0.5, 1.0, 2.0, 0.1)},
    "Swish": {"alpha": (0.5, 1.0, 2.0, 0.1)},
    "Selu": {"alpha": (1.5, 0.5), "gamma": (1.0, 0.5, 2.0)},
    "LeakyRelu": {"alpha": (0.01, 0.2, 0.0, -0.5, 1.5)},
    "ThresholdedRelu": {"alpha": (0.0, 0.5, 1.0, 1.5, -0.5)},
    "HardSigmoid": {"alpha": (0.2, 0.5, 1.0, 1.5), "beta": (0.5, 0.0, 0.25, 1.5)},
    "Shrink": {"lambd": (0.5, 0.0, 1.5), "bias": (0.0, 0.5, -0.25, 1.5)},
}


def broadcast(d: Draw, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape that broadcasts with ``shape``: equal, with ones, shorter, or with larger extents in place of ones."""
    roll = d.rng.random()
    if roll < 0.35:
        return shape
    made = [1 if d.chance(0.3) else (d.integer(2, 4) if n == 1 and d.chance(0.4) else n) for n in shape]
    if roll < 0.7:
        return tuple(made[d.integer(0, len(made)) :])
    return (d.integer(1, 3), *made) if len(made) < 5 and roll < 0.8 else tuple(made)


def fits(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    """Return True if two shapes broadcast to a small shape."""
    try:
        return int(np.prod(np.broadcast_shapes(a, b), dtype=np.int64)) <= MOST
    except ValueError:
        return False


def partner(d: Draw, x: DrawnValue, low: float = -3, high: float = 3, bound: bool = False, special: float = 0.4) -> DrawnValue:
    """Return an operand that broadcasts with ``x``: a value of the graph or a fresh one in [low, high]."""
    others = [v for v in d.values if v.dtype == x.dtype and fits(v.shape, x.shape) and (not bound or v.within(low, high))]
    if others and d.chance(0.0 if d.alone else 0.5):
        return d.one(others[-6:])
    shape = broadcast(d, x.shape)
    return d.fresh(x.dtype, shape if fits(shape, x.shape) else x.shape, low, high, special=special)


def _pair(d: Draw, x: DrawnValue, y: DrawnValue) -> list[str]:
    return [x.name, y.name] if d.chance(0.6) else [y.name, x.name]


@describe(
    *("Abs", "Neg", "Sign", "Floor", "Ceil", "Round", "Relu", "Not", "BitwiseNot", "IsNaN", "Identity", "HardSwish"),
    *{**DOMAIN, **PARAMETERS},
)
def unary(d: Draw, op: str) -> DrawnValue:
    # Up to opset 12 Erf accepts integers, with an undefined integer result. An unsigned Shrink cannot hold a negative difference.
    kinds = [t for t in d.types(op) if d.alone or op != "Erf" or is_float(t)]
    x = d.pick([t for t in kinds if not (d.alone and op == "Shrink" and t[0] == "u")], special=0.6)
    if op in DOMAIN:
        x = d.bounded(x, *DOMAIN[op])
    attributes: dict[str, Any] = {k: d.one(v) for k, v in PARAMETERS.get(op, {}).items() if d.chance(0.6)}
    if op == "Gelu" and d.chance(0.6):
        attributes["approximate"] = d.one(["none", "tanh"])
    return d.add(op, [x.name], **attributes)


@describe("IsInf")
def is_inf(d: Draw, op: str) -> DrawnValue:
    x = d.pick(d.types(op), special=0.7)
    return d.add(op, [x.name], detect_negative=d.one([None, 0, 1]), detect_positive=d.one([None, 0, 1]))


@describe("Add", "Sub", "Mul", weight=1.5)
def arithmetic(d: Draw, op: str) -> DrawnValue:
    x = d.pick(d.types(op), where=small, special=0.4)
    return d.add(op, _pair(d, x, partner(d, x, bound=not is_float(x.dtype))))


def small(v: DrawnValue) -> bool:
    """Return True if products of the value stay far from the limits of its type."""
    limit = {"float32": 1e6, "float64": 1e6, "float16": 60.0, "int8": 11, "uint8": 15, "int16": 180, "uint16": 250}
    return v.dtype == "bool" or v.within(-limit.get(v.dtype, 4e4), limit.get(v.dtype, 4e4))


@describe("Div")
def divide(d: Draw, op: str) -> DrawnValue:
    x = d.pick(d.types(op), where=small, special=0.4)
    y = partner(d, x, 1, 7, bound=True)
    if d.alone and d.chance(0.3):  # divisors of both signs, and 0
        x, y = d.fresh(x.dtype, x.shape), d.fresh(x.dtype, y.shape)
    elif is_float(x.dtype) and d.chance(0.3):
        y = d.add("Neg", [y.name])
    elif x.dtype in ("int32", "int64") and d.chance(0.4):
        y = d.fresh(x.dtype, y.shape, -7, -1)
    return d.add(op, [x.name, y.name])


@describe("Mod")
def modulo(d: Draw, op: str) -> DrawnValue:
    x = d.pick(d.types(op), where=small, special=0.3)
    fmod = 1 if is_float(x.dtype) else d.one([None, 0, 1])
    y = partner(d, x, 1, 7, bound=True, special=0.3)
    if not x.dtype.startswith("u") and d.chance(0.3):
        x, y = (d.fresh(x.dtype, x.shape) if d.alone else x), d.fresh(x.dtype, y.shape, -7, -1)
    return d.add(op, [x.name, y.name], fmod=fmod)


@describe("Pow")
def power(d: Draw, op: str) -> DrawnValue:
    x = d.bounded(d.pick(d.types(op, 0), where=small, special=0.2), 0.1, 3)
    if not is_float(x.dtype):
        x = d.fresh(x.dtype, x.shape, -3, 3)
    kinds = d.types(op, 1)
    kind = d.dtype(kinds) if d.since(op) >= 12 and d.chance(0.4) else x.dtype
    shape = broadcast(d, x.shape)
    shape = shape if fits(shape, x.shape) else x.shape
    if d.alone and d.chance(0.4):  # exponents with a form of their own
        exponents = [2] if kind[0] == "u" else [-2, -1, 0, 1, 2, 3, *([0.5, -0.5, 1.5] if is_float(kind) else [])]
        value = d.one(exponents)
        y = d.fresh(kind, (), value, value)
    else:
        low = -2 if d.alone or (is_float(x.dtype) and is_float(kind)) else 0
        y = d.fresh(kind, shape, low, 3, special=0.2 if is_float(kind) else 0.0)
    return d.add(op, [x.name, y.name])


@describe(
    "And", "Or", "Xor", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "Equal", "Less", "Greater", "LessOrEqual", "GreaterOrEqual"
)
def logical(d: Draw, op: str) -> DrawnValue:
    x = d.pick(d.types(op), special=0.4)
    return d.add(op, _pair(d, x, partner(d, x)))


@describe("BitShift")
def bit_shift(d: Draw, op: str) -> DrawnValue:
    x = d.pick(d.types(op), special=0.5)
    most = d.one([3, 5, np.dtype(x.dtype).itemsize * 8 + 3]) if d.alone else 5  # by the width of the type, and more
    return d.add(op, [x.name, partner(d, x, 0, most, bound=True, special=0.0).name], direction=d.one(["LEFT", "RIGHT"]))


@describe("Min", "Max", "Sum", "Mean")
def variadic(d: Draw, op: str) -> DrawnValue:
    x = d.pick(d.types(op), where=small, special=0.4)
    shape, names = x.shape, [x.name]
    for _ in range(d.integer(0, 3)):
        # Up to opset 7 "all inputs and outputs must have the same shape".
        y = partner(d, DrawnValue("", x.dtype, shape)) if d.since(op) >= 8 else d.fresh(x.dtype, shape)
        shape = np.broadcast_shapes(shape, y.shape)
        names.append(y.name)
    return d.add(op, names)


@describe("PRelu")
def prelu(d: Draw, op: str) -> DrawnValue:
    x = d.pick(d.types(op), where=small, special=0.4)
    shape = tuple(1 if d.chance(0.5) else n for n in x.shape)[d.integer(0, x.rank) :]
    return d.add(op, [x.name, d.fresh(x.dtype, shape, 0 if x.dtype.startswith("u") else -2, 2).name])


@describe("Clip")
def clip(d: Draw, op: str) -> DrawnValue:
    x = d.pick(d.types(op), special=0.4)
    low, high = d.real(-2, 3), d.real(-2, 3)
    if low > high and not (d.alone and d.since(op) >= 11):  # a minimum above the maximum has a meaning since opset 11
        low, high = high, low
    if d.since(op) < 11:
        return d.add(op, [x.name], min=low if d.chance(0.7) else None, max=high if d.chance(0.7) else None)
    if not is_float(x.dtype):
        low, high = int(max(low, 0)), int(max(high, 1))
    ends = [d.fresh(x.dtype, (), v, v).name if d.chance(0.7) else "" for v in (low, high)]
    return d.add(op, [x.name, *ends])


@describe("Where")
def where(d: Draw, op: str) -> DrawnValue:
    c = d.pick(("bool",))
    shape = broadcast(d, c.shape)
    x = d.fresh(d.dtype(d.types(op, 1)), shape if fits(shape, c.shape) else c.shape, special=0.3)
    others = [v for v in d.values if v.dtype in d.types(op, 1) and fits(v.shape, c.shape)]
    x = d.one(others) if others and not d.alone and d.chance(0.6) else x
    y = partner(d, DrawnValue("", x.dtype, np.broadcast_shapes(x.shape, c.shape)))
    return d.add(op, [c.name, *_pair(d, x, y)])


@describe("Cast", "CastLike", weight=1.5)
def cast(d: Draw, op: str) -> DrawnValue:
    source, like = d.pick(d.types(op)), d.pick(d.types(op, 1)) if op == "CastLike" else None
    target = like.dtype if like is not None else d.one(tuple(SHORT))
    if is_float(source.dtype) and target in INTEGERS:
        source = _whole(d, source, target)
    elif target.startswith("u") and not d.alone and not source.within(0, 250):
        source = d.fresh(source.dtype, source.shape, 0, 100)
    elif d.alone:
        source = d.fresh(source.dtype, source.shape, -9, 9, special=0.3)
    return d.add(op, [source.name, like.name]) if like is not None else d.add(op, [source.name], to=code(target))


def _whole(d: Draw, x: DrawnValue, target: str) -> DrawnValue:
    """Return floats that an integer type can hold, not near the next integer: multiples of one quarter."""
    # Of values outside an unsigned type, ONNX defines none, but models rely on that of -1.
    low = 0 if target.startswith("u") and not (d.alone and d.chance(0.3)) else -100 if target[0] != "u" else -1
    if x.known and x.within(low, 100):
        return x
    values = d.rng.integers(low * 4, 401, x.shape) / 4
    return d.with_elements(np.asarray(np.where(values < 0, np.floor(values), values) if low == -1 else values, x.dtype))


def code(dtype: str) -> int:
    """Return ONNX's number of an element type."""
    return int(helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))


@describe("Dropout")
def dropout(d: Draw, op: str) -> DrawnValue:
    x = d.pick(d.types(op))
    if d.since(op) < 12:  # the mask outside training is defined since then only
        return d.add(op, [x.name], ratio=d.one([None, 0.25]))
    wanted = [True, d.chance(0.3)]
    ratio = d.scalar("float32", d.one([0.0, 0.25])) if d.chance(0.4) else ""
    mode = d.plain(np.asarray(False)) if d.chance(0.3) else ""
    return d.add(op, [x.name, ratio, mode], wanted, seed=d.one([None, 7]))
