"""Element-wise operators at critical values: activations, arithmetic, comparison, casts, clipping."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import helper

from rammer_testing.operators.case import OperandDraw, OperatorCase, accepted, family

#: Float attributes by operator.
ACTIVATIONS: dict[str, tuple[str, ...]] = {
    "Elu": ("alpha",),
    "Selu": ("alpha", "gamma"),
    "Celu": ("alpha",),
    "LeakyRelu": ("alpha",),
    "ThresholdedRelu": ("alpha",),
    "HardSigmoid": ("alpha", "beta"),
    "Shrink": ("bias", "lambd"),
    "Swish": ("alpha",),
    **{
        op: ()
        for op in (
            "Relu",
            "Sigmoid",
            "Softplus",
            "Softsign",
            "HardSwish",
            "Mish",
            "Gelu",
            "Neg",
            "Abs",
            "Sign",
            "Floor",
            "Ceil",
            "Round",
            "Sqrt",
            "Exp",
            "Log",
            "Erf",
            "Sin",
            "Cos",
            "Tan",
            "Asin",
            "Acos",
            "Atan",
            "Sinh",
            "Cosh",
            "Tanh",
            "Asinh",
            "Acosh",
            "Atanh",
            "Reciprocal",
            "IsNaN",
            "Not",
            "BitwiseNot",
            "Identity",
        )
    },
}


@family(*ACTIVATIONS)
def unary(draw: OperandDraw, op: str) -> OperatorCase:
    """Draw a case of one operand."""
    opset = draw.opset(op)
    attributes = {a: draw.pick(None, 0.3, 1.7) for a in ACTIVATIONS[op]}
    if op == "Gelu":
        attributes = {"approximate": draw.pick(None, "none", "tanh")}
    dtype = draw.dtype(op, opset)
    if op == "Shrink" and dtype.startswith("u"):
        dtype = "float32"  # an unsigned type cannot hold a negative difference
    x = draw.array(draw.shape(), dtype, special=draw.pick(0.0, 0.6), low=draw.pick(-1, -3, -30), high=9)
    return OperatorCase(op, opset, (x,), attributes)


def _broadcast(draw: OperandDraw, count: int) -> list[tuple[int, ...]]:
    """Return shapes that broadcast with one another."""
    whole = draw.shape(0, 4)
    result = []
    for _ in range(count):
        part = tuple(1 if draw.chance(0.25) else n for n in whole)
        result.append(part[draw.random.randint(0, len(part)) :] if draw.chance(0.3) else part)
    return result


@family(
    "Add",
    "Sub",
    "Mul",
    "Div",
    "And",
    "Or",
    "Xor",
    "Equal",
    "Less",
    "LessOrEqual",
    "Greater",
    "GreaterOrEqual",
    "PRelu",
    "BitwiseAnd",
    "BitwiseOr",
    "BitwiseXor",
)
def binary(draw: OperandDraw, op: str) -> OperatorCase:
    """Draw a case of two operands of one type."""
    opset = draw.opset(op)
    dtype = draw.dtype(op, opset)
    one, two = _broadcast(draw, 2)
    if op == "PRelu":
        one = tuple(np.broadcast_shapes(one, two))
    special = draw.pick(0.0, 0.4)
    b = draw.array(two, dtype, special=0.0 if op == "PRelu" else special)
    if op == "Div" and not dtype.startswith("float") and draw.chance(0.8):
        b = np.where(b == 0, np.ones_like(b), b)
    return OperatorCase(op, opset, (draw.array(one, dtype, special=special), b), static=frozenset(draw.pick((), (), (1,))))


@family("Mod")
def modulo(draw: OperandDraw, op: str) -> OperatorCase:
    """Draw a case with both signs, zeros, and both modulo rules."""
    opset = draw.opset(op)
    dtype = draw.dtype(op, opset)
    fmod = 1 if dtype.startswith("float") else draw.pick(None, 1)
    one, two = _broadcast(draw, 2)
    b = draw.array(two, dtype, special=draw.pick(0.0, 0.3), low=-7, high=7)
    if not dtype.startswith("float"):
        b = np.where(b == 0, np.ones_like(b), b)
    return OperatorCase(op, opset, (draw.array(one, dtype, draw.pick(0.0, 0.3), -9, 9), b), {"fmod": fmod})


@family("BitShift")
def shift(draw: OperandDraw, op: str) -> OperatorCase:
    """Draw a case of shifts, including shifts by the width of the type and more."""
    opset = draw.opset(op)
    dtype = draw.dtype(op, opset)
    bits = np.dtype(dtype).itemsize * 8
    one, two = _broadcast(draw, 2)
    by = np.asarray(draw.array(two, "int64", low=0, high=draw.pick(3, bits - 1, bits + 3)), dtype)
    return OperatorCase(op, opset, (draw.array(one, dtype, 0.5, 0, 9), by), {"direction": draw.pick("LEFT", "RIGHT")})


@family("Pow")
def power(draw: OperandDraw, op: str) -> OperatorCase:
    """Draw a case of bases and exponents of different types, including negative ones."""
    opset = draw.opset(op)
    dtype = draw.dtype(op, opset)
    other = draw.dtype(op, opset, 1) if opset >= 12 else dtype
    one, two = _broadcast(draw, 2)
    exponent = draw.array(two if draw.chance() else (), other, draw.pick(0.0, 0.2) if other[0] == "f" else 0, -3, 3)
    if draw.chance(0.4):
        halves = (0.5, -0.5, 1.5) if other[0] == "f" else ()
        exponent = np.asarray(draw.pick(-2, -1, 0, 1, 2, 3, *halves), other) if other[0] != "u" else np.asarray(2, other)
    return OperatorCase(
        op, opset, (draw.array(one, dtype, draw.pick(0.0, 0.2), -3, 3), exponent), static=frozenset(draw.pick((), (1,)))
    )


@family("Min", "Max", "Sum", "Mean")
def variadic(draw: OperandDraw, op: str) -> OperatorCase:
    """Draw a case of one to four operands."""
    opset = draw.opset(op)
    dtype = draw.dtype(op, opset)
    shapes = _broadcast(draw, draw.random.randint(1, 4))
    if opset < 8:
        shapes = [shapes[0]] * len(shapes)
    return OperatorCase(op, opset, tuple(draw.array(s, dtype, draw.pick(0.0, 0.4)) for s in shapes))


@family("Where")
def where(draw: OperandDraw, op: str) -> OperatorCase:
    """Draw a case in which three shapes broadcast."""
    opset = draw.opset(op)
    dtype = draw.dtype(op, opset, 1)
    c, one, two = _broadcast(draw, 3)
    return OperatorCase(op, opset, (draw.array(c, "bool"), draw.array(one, dtype, 0.3), draw.array(two, dtype, 0.3)))


@family("IsInf")
def is_inf(draw: OperandDraw, op: str) -> OperatorCase:
    """Draw a case with any combination of detected signs."""
    opset = draw.opset(op)
    attributes = {"detect_negative": draw.pick(None, 0, 1), "detect_positive": draw.pick(None, 0, 1)}
    return OperatorCase(op, opset, (draw.array(draw.shape(), draw.dtype(op, opset), 0.7),), attributes)


@family("Clip")
def clip(draw: OperandDraw, op: str) -> OperatorCase:
    """Draw a case with bounds as attributes or operands, absent bounds, or a minimum above the maximum."""
    opset = draw.opset(op)
    dtype = draw.dtype(op, opset)
    x = draw.array(draw.shape(), dtype, draw.pick(0.0, 0.4), -5, 5)
    if opset < 11:
        return OperatorCase(op, opset, (x,), {"min": draw.pick(None, -1.0, 3.0), "max": draw.pick(None, 1.0, 2.0)})
    low, high = draw.pick(None, 1, 3, 0), draw.pick(None, 2, 4)
    bounds = tuple(None if b is None else np.asarray(b, dtype) for b in (low, high))
    return OperatorCase(op, opset, (x, *bounds), static=frozenset(draw.pick((), (1, 2))))


@family("Cast")
def cast(draw: OperandDraw, op: str) -> OperatorCase:
    """Draw a case between any types, including values that the target cannot hold if ONNX defines the result."""
    opset = draw.opset(op)
    source = draw.dtype(op, opset)
    target = str(draw.random.choice(accepted(op, opset)))
    x = draw.array(draw.shape(), source, draw.pick(0.0, 0.3), -9, 9)
    if source.startswith("float") and not target.startswith("float") and target != "bool":
        # Values outside the target are undefined ("Cast ... undefined if OOR"): only -1 to an unsigned type is retained, because
        # models rely on it.
        x = np.where(np.isfinite(x) & (np.abs(x) < 100), x, np.asarray(-1, x.dtype))
    return OperatorCase(op, opset, (x,), {"to": helper.np_dtype_to_tensor_dtype(np.dtype(target))})


@family("CastLike")
def cast_like(draw: OperandDraw, op: str) -> OperatorCase:
    """Draw a cast to the type of another tensor."""
    opset = draw.opset(op)
    case: Any = cast(draw, "Cast")
    target = helper.tensor_dtype_to_np_dtype(case.attributes["to"])
    return OperatorCase(op, opset, (case.operands[0], np.zeros(draw.shape(0, 1), target)))
