"""Element-wise arithmetic: unary functions, broadcasting binary and variadic operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce

import numpy as np

from rammer.frontend.lower.lowering_registry import Lowering, LoweringFn, lowering
from rammer.frontend.lower.operands import apply, literal, operand, out_axes
from rammer.ir.expr import Cast, Const, Expr
from rammer.ir.types import is_float

#: ONNX operator -> scalar operation, one operand.
UNARY = {
    "Neg": "neg",
    "Abs": "abs",
    "Sign": "sign",
    "Floor": "floor",
    "Ceil": "ceil",
    "Round": "round",
    "Sqrt": "sqrt",
    "Exp": "exp",
    "Log": "log",
    "Erf": "erf",
    "Sin": "sin",
    "Cos": "cos",
    "Tan": "tan",
    "Asin": "asin",
    "Acos": "acos",
    "Atan": "atan",
    "Sinh": "sinh",
    "Cosh": "cosh",
    "Tanh": "tanh",
    "Asinh": "asinh",
    "Acosh": "acosh",
    "Atanh": "atanh",
}
#: ONNX operator -> scalar operation, two broadcast operands of one type.
BINARY = {
    "Add": "add",
    "Sub": "sub",
    "Mul": "mul",
    "Div": "div",
    "BitwiseAnd": "and_",
    "BitwiseOr": "or_",
    "BitwiseXor": "xor",
}
#: ONNX operator -> scalar operation folded over any number of broadcast operands.
VARIADIC = {"Min": "min", "Max": "max", "Sum": "add"}

#: Operands that are folded one after another, and most that one expression reads.
MAX_CHAIN = 8
MAX_OPERANDS = 32


def _unary(fn: str) -> LoweringFn:
    def lower(ctx: Lowering) -> None:
        axes = out_axes(ctx)
        ctx.emit(axes, apply(fn, operand(ctx, 0, axes)), into=0)

    return lower


def _binary(fn: str) -> LoweringFn:
    def lower(ctx: Lowering) -> None:
        axes = out_axes(ctx)
        ctx.emit(axes, apply(fn, operand(ctx, 0, axes), operand(ctx, 1, axes)), into=0)

    return lower


def _variadic(fn: str) -> LoweringFn:
    def lower(ctx: Lowering) -> None:
        ctx.emit(out_axes(ctx), _folded(ctx, fn), into=0)

    return lower


def _folded(ctx: Lowering, fn: str) -> Expr:
    """All operands under ``fn``: a chain of a few, and of more a tree over partial results, so that no expression
    is deep and no kernel reads more than MAX_OPERANDS tensors."""
    axes = out_axes(ctx)
    terms = [operand(ctx, i, axes) for i in range(len(ctx.node.inputs))]
    while len(terms) > MAX_OPERANDS:
        parts = [_tree(fn, terms[i : i + MAX_OPERANDS]) for i in range(0, len(terms), MAX_OPERANDS)]
        terms = [ctx.load(ctx.emit(axes, part), *(a.name for a in axes)) for part in parts]
    return _tree(fn, terms)


def _tree(fn: str, terms: Sequence[Expr]) -> Expr:
    if len(terms) <= MAX_CHAIN:
        return reduce(lambda a, b: apply(fn, a, b), terms)
    middle = len(terms) // 2
    return apply(fn, _tree(fn, terms[:middle]), _tree(fn, terms[middle:]))


def _register(table: dict[str, str], maker: Callable[[str], LoweringFn]) -> None:
    for op, fn in table.items():
        lowering(op)(maker(fn))


_register(UNARY, _unary)
_register(BINARY, _binary)
_register(VARIADIC, _variadic)


@lowering("Mean")
def mean(ctx: Lowering) -> None:
    """Mean of the operands (not over an axis)."""
    count = literal(len(ctx.node.inputs), ctx.out().dtype)
    ctx.emit(out_axes(ctx), apply("div", _folded(ctx, "add"), count), into=0)


@lowering("Reciprocal")
def reciprocal(ctx: Lowering) -> None:
    """``1 / x``."""
    axes = out_axes(ctx)
    ctx.emit(axes, apply("div", literal(1, ctx.out().dtype), operand(ctx, 0, axes)), into=0)


@lowering("Mod")
def modulo(ctx: Lowering) -> None:
    """C's ``fmod`` (sign of the dividend) or, with ``fmod=0``, the sign of the divisor."""
    axes = out_axes(ctx)
    fn = "fmod" if ctx.attr("fmod", 0) else "mod"
    ctx.emit(axes, apply(fn, operand(ctx, 0, axes), operand(ctx, 1, axes)), into=0)


@lowering("BitShift")
def bit_shift(ctx: Lowering) -> None:
    """Shift left or right (unsigned)."""
    axes = out_axes(ctx)
    fn = "shl" if ctx.attr("direction") == "LEFT" else "shr"
    ctx.emit(axes, apply(fn, operand(ctx, 0, axes), operand(ctx, 1, axes)), into=0)


@lowering("BitwiseNot")
def bitwise_not(ctx: Lowering) -> None:
    """``x ^ all ones``."""
    axes, dtype = out_axes(ctx), ctx.out().dtype
    ones = -1 if np.issubdtype(np.dtype(dtype), np.signedinteger) else int(np.iinfo(dtype).max)
    ctx.emit(axes, apply("xor", operand(ctx, 0, axes), literal(ones, dtype)), into=0)


@lowering("Pow")
def power(ctx: Lowering) -> None:
    """``base ** exponent`` in the type of the base."""
    axes, dtype = out_axes(ctx), ctx.out().dtype
    base, exponent = operand(ctx, 0, axes), operand(ctx, 1, axes)
    body = _small_power(base, exponent, dtype)
    ctx.emit(axes, _general_power(ctx, base, exponent, dtype) if body is None else body, into=0)


def _small_power(base: Expr, exponent: Expr, dtype: str) -> Expr | None:
    """The exponents that networks use, without a transcendental function."""
    if not isinstance(exponent, Const):
        return None
    if exponent.value == 1:
        return base
    if exponent.value == 2:
        return apply("mul", base, base)
    if exponent.value == 3:
        return apply("mul", apply("mul", base, base), base)
    if is_float(dtype) and exponent.value == 0.5:
        # C's pow of minus infinity is infinity, and that of -0 is 0.
        infinite = apply("eq", base, literal(-np.inf, dtype))
        return apply("sqrt", apply("where", infinite, literal(np.inf, dtype), apply("add", base, literal(0.0, dtype))))
    return apply("div", literal(1, dtype), base) if is_float(dtype) and exponent.value == -1 else None


def _general_power(ctx: Lowering, base: Expr, exponent: Expr, dtype: str) -> Expr:
    kind = exponent.dtype if isinstance(exponent, Const) else ctx.type(ctx.input(1)).dtype
    if not is_float(dtype) and not is_float(kind):
        return _integer_power(base, _converted(_within(exponent, dtype), dtype) if kind != dtype else exponent, dtype)
    if kind == dtype:
        return apply("pow", base, exponent)
    if is_float(dtype):
        return apply("pow", base, _converted(exponent, dtype))
    # An integer base to a fractional power is computed as a float and truncated.
    return Cast(dtype, apply("pow", _converted(base, kind), exponent))


def _within(exponent: Expr, dtype: str) -> Expr:
    """An integer literal that ``dtype`` cannot hold as the nearest one of its parity: only powers of 0, 1 and -1 are left, and
    those know no more of it."""
    if not isinstance(exponent, Const):
        return exponent
    value, ends = int(exponent.value), np.iinfo(dtype)
    nearest = min(max(value, int(ends.min)), int(ends.max))
    return Const(nearest - (1 if nearest > 0 else -1) * ((nearest - value) & 1), exponent.dtype)


def _integer_power(base: Expr, exponent: Expr, dtype: str) -> Expr:
    """A negative exponent of an integer gives the quotient without its fraction: 0, but for 1 and -1."""
    if dtype.startswith("u") or (isinstance(exponent, Const) and exponent.value >= 0):
        return apply("pow", base, exponent)
    zero, one = literal(0, dtype), literal(1, dtype)
    whole = apply("pow", base, apply("max", exponent, zero))
    odd = apply("eq", apply("and_", exponent, one), one)
    sign = apply("where", odd, base, apply("mul", base, base))
    unit = apply("eq", apply("mul", base, base), one)
    inverse = apply("where", unit, sign, zero)
    return apply("where", apply("lt", exponent, zero), inverse, whole)


def _converted(value: Expr, dtype: str) -> Expr:
    return literal(value.value, dtype) if isinstance(value, Const) else Cast(dtype, value)
