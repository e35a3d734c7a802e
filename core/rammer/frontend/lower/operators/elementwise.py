"""Element-wise arithmetic: unary functions, broadcasting binary and variadic operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce

import numpy as np

from rammer.frontend.lower.lowering_registry import Lowering, LoweringFn, lowering
from rammer.frontend.lower.operands import load_operand, make_literal, make_op, out_axes
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

#: Operands that are folded in sequence, and the most operands that one expression reads.
MAX_CHAIN = 8
MAX_OPERANDS = 32


def _make_unary(fn: str) -> LoweringFn:
    def lower(ctx: Lowering) -> None:
        axes = out_axes(ctx)
        ctx.emit(axes, make_op(fn, load_operand(ctx, 0, axes)), into=0)

    return lower


def _make_binary(fn: str) -> LoweringFn:
    def lower(ctx: Lowering) -> None:
        axes = out_axes(ctx)
        ctx.emit(axes, make_op(fn, load_operand(ctx, 0, axes), load_operand(ctx, 1, axes)), into=0)

    return lower


def _make_variadic(fn: str) -> LoweringFn:
    def lower(ctx: Lowering) -> None:
        ctx.emit(out_axes(ctx), _fold_operands(ctx, fn), into=0)

    return lower


def _fold_operands(ctx: Lowering, fn: str) -> Expr:
    """Return all operands folded under ``fn``: a chain of a few, or a tree over partial results of more. This keeps expressions
    shallow, and no kernel reads more than MAX_OPERANDS tensors."""
    axes = out_axes(ctx)
    terms = [load_operand(ctx, i, axes) for i in range(len(ctx.node.inputs))]
    while len(terms) > MAX_OPERANDS:
        parts = [_balanced_tree(fn, terms[i : i + MAX_OPERANDS]) for i in range(0, len(terms), MAX_OPERANDS)]
        terms = [ctx.load(ctx.emit(axes, part), *(a.name for a in axes)) for part in parts]
    return _balanced_tree(fn, terms)


def _balanced_tree(fn: str, terms: Sequence[Expr]) -> Expr:
    if len(terms) <= MAX_CHAIN:
        return reduce(lambda a, b: make_op(fn, a, b), terms)
    middle = len(terms) // 2
    return make_op(fn, _balanced_tree(fn, terms[:middle]), _balanced_tree(fn, terms[middle:]))


def _register_table(table: dict[str, str], maker: Callable[[str], LoweringFn]) -> None:
    for op, fn in table.items():
        lowering(op)(maker(fn))


_register_table(UNARY, _make_unary)
_register_table(BINARY, _make_binary)
_register_table(VARIADIC, _make_variadic)


@lowering("Mean")
def lower_mean(ctx: Lowering) -> None:
    """Lower Mean of the operands (not over an axis)."""
    count = make_literal(len(ctx.node.inputs), ctx.out().dtype)
    ctx.emit(out_axes(ctx), make_op("div", _fold_operands(ctx, "add"), count), into=0)


@lowering("Reciprocal")
def lower_reciprocal(ctx: Lowering) -> None:
    """Lower Reciprocal to ``1 / x``."""
    axes = out_axes(ctx)
    ctx.emit(axes, make_op("div", make_literal(1, ctx.out().dtype), load_operand(ctx, 0, axes)), into=0)


@lowering("Mod")
def lower_mod(ctx: Lowering) -> None:
    """Lower Mod to C's ``fmod`` (sign of the dividend) or, with ``fmod=0``, the sign of the divisor."""
    axes = out_axes(ctx)
    fn = "fmod" if ctx.attr("fmod", 0) else "mod"
    ctx.emit(axes, make_op(fn, load_operand(ctx, 0, axes), load_operand(ctx, 1, axes)), into=0)


@lowering("BitShift")
def bit_shift(ctx: Lowering) -> None:
    """Lower BitShift, left or right (unsigned)."""
    axes = out_axes(ctx)
    fn = "shl" if ctx.attr("direction") == "LEFT" else "shr"
    ctx.emit(axes, make_op(fn, load_operand(ctx, 0, axes), load_operand(ctx, 1, axes)), into=0)


@lowering("BitwiseNot")
def bitwise_not(ctx: Lowering) -> None:
    """Lower BitwiseNot to ``x ^ all ones``."""
    axes, dtype = out_axes(ctx), ctx.out().dtype
    ones = -1 if np.issubdtype(np.dtype(dtype), np.signedinteger) else int(np.iinfo(dtype).max)
    ctx.emit(axes, make_op("xor", load_operand(ctx, 0, axes), make_literal(ones, dtype)), into=0)


@lowering("Pow")
def lower_pow(ctx: Lowering) -> None:
    """Lower Pow to ``base ** exponent`` in the type of the base."""
    axes, dtype = out_axes(ctx), ctx.out().dtype
    base, exponent = load_operand(ctx, 0, axes), load_operand(ctx, 1, axes)
    body = _small_power(base, exponent, dtype)
    ctx.emit(axes, _general_power(ctx, base, exponent, dtype) if body is None else body, into=0)


def _small_power(base: Expr, exponent: Expr, dtype: str) -> Expr | None:
    """Return a power without transcendental functions for common exponents, else None."""
    if not isinstance(exponent, Const):
        return None
    if exponent.value == 1:
        return base
    if exponent.value == 2:
        return make_op("mul", base, base)
    if exponent.value == 3:
        return make_op("mul", make_op("mul", base, base), base)
    if is_float(dtype) and exponent.value == 0.5:
        # C's pow of minus infinity is infinity, and that of -0 is 0.
        infinite = make_op("eq", base, make_literal(-np.inf, dtype))
        return make_op(
            "sqrt", make_op("where", infinite, make_literal(np.inf, dtype), make_op("add", base, make_literal(0.0, dtype)))
        )
    return make_op("div", make_literal(1, dtype), base) if is_float(dtype) and exponent.value == -1 else None


def _general_power(ctx: Lowering, base: Expr, exponent: Expr, dtype: str) -> Expr:
    kind = exponent.dtype if isinstance(exponent, Const) else ctx.type(ctx.input(1)).dtype
    if not is_float(dtype) and not is_float(kind):
        return _integer_power(base, _convert_value(_clamp_exponent(exponent, dtype), dtype) if kind != dtype else exponent, dtype)
    if kind == dtype:
        return make_op("pow", base, exponent)
    if is_float(dtype):
        return make_op("pow", base, _convert_value(exponent, dtype))
    # An integer base to a fractional power is computed as a float and truncated.
    return Cast(dtype, make_op("pow", _convert_value(base, kind), exponent))


def _clamp_exponent(exponent: Expr, dtype: str) -> Expr:
    """Return an integer literal clamped to ``dtype`` with its parity preserved. Only powers of 0, 1 and -1 remain finite there,
    and they depend on the parity alone."""
    if not isinstance(exponent, Const):
        return exponent
    value, ends = int(exponent.value), np.iinfo(dtype)
    nearest = min(max(value, int(ends.min)), int(ends.max))
    return Const(nearest - (1 if nearest > 0 else -1) * ((nearest - value) & 1), exponent.dtype)


def _integer_power(base: Expr, exponent: Expr, dtype: str) -> Expr:
    """Return an integer power; a negative exponent gives the truncated quotient: 0, except for 1 and -1."""
    if dtype.startswith("u") or (isinstance(exponent, Const) and exponent.value >= 0):
        return make_op("pow", base, exponent)
    zero, one = make_literal(0, dtype), make_literal(1, dtype)
    whole = make_op("pow", base, make_op("max", exponent, zero))
    odd = make_op("eq", make_op("and_", exponent, one), one)
    sign = make_op("where", odd, base, make_op("mul", base, base))
    unit = make_op("eq", make_op("mul", base, base), one)
    inverse = make_op("where", unit, sign, zero)
    return make_op("where", make_op("lt", exponent, zero), inverse, whole)


def _convert_value(value: Expr, dtype: str) -> Expr:
    return make_literal(value.value, dtype) if isinstance(value, Const) else Cast(dtype, value)
