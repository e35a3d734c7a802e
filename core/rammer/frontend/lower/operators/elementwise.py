"""Element-wise operators: a formula of the ONNX operator schemas for each, over broadcast operands."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Final, TypeAlias

import numpy as np

from rammer.frontend.lower.lowering_registry import Lowering, lowering
from rammer.frontend.lower.operands import load_operand, make_literal, make_op, out_axes
from rammer.ir.expr import Cast, Const, Expr
from rammer.ir.types import is_float

#: Operands that are folded in sequence, and the most operands that one expression reads.
MAX_CHAIN = 8
MAX_OPERANDS = 32


@dataclass(frozen=True)
class Form:
    """The element type of the result of a formula, and the attributes of its operator."""

    dtype: str
    attributes: Mapping[str, Any]

    def literal(self, value: float) -> Const:
        """Return a literal of the element type."""
        return make_literal(value, self.dtype)

    def attr(self, name: str, default: float) -> Const:
        """Return a number among the attributes as a literal."""
        return self.literal(float(self.attributes.get(name, default)))


#: A function from a form and the operands to the result.
Formula: TypeAlias = Callable[..., Expr]


def _operation(fn: str) -> Formula:
    return lambda form, *operands: make_op(fn, *operands)


def _sigmoid(form: Form, x: Expr) -> Expr:
    """Return ``1 / (1 + exp(-x))``; an infinite exponential gives 0, so the result is finite for every x."""
    return make_op("div", form.literal(1), make_op("add", form.literal(1), make_op("exp", make_op("neg", x))))


def _softplus(form: Form, x: Expr) -> Expr:
    """Return ``log(1 + exp(x))`` as ``max(x, 0) + log1p(exp(-|x|))``, which cannot overflow and keeps small terms."""
    tail = make_op("log1p", make_op("exp", make_op("neg", make_op("abs", x))))
    return make_op("add", make_op("max", x, form.literal(0)), tail)


def _below_zero(form: Form, x: Expr, negative: Expr) -> Expr:
    return make_op("where", make_op("lt", x, form.literal(0)), negative, x)


def _elu(form: Form, x: Expr, alpha: float = 1.0) -> Expr:
    return _below_zero(form, x, make_op("mul", form.attr("alpha", alpha), make_op("expm1", x)))


def _celu(form: Form, x: Expr) -> Expr:
    alpha = form.attr("alpha", 1.0)
    return _below_zero(form, x, make_op("mul", alpha, make_op("expm1", make_op("div", x, alpha))))


def _swish(form: Form, x: Expr) -> Expr:
    alpha = form.attr("alpha", 1.0)
    return make_op("mul", x, _sigmoid(form, x if alpha.value == 1 else make_op("mul", alpha, x)))


def _clamped_line(form: Form, x: Expr, alpha: Const, beta: Const) -> Expr:
    line = make_op("add", make_op("mul", x, alpha), beta)
    return make_op("min", make_op("max", line, form.literal(0)), form.literal(1))


def _gelu(form: Form, x: Expr) -> Expr:
    """Return ``x/2 * (1 + erf(x / sqrt 2))``, or its tanh approximation (Hendrycks and Gimpel, arXiv 1606.08415)."""
    k = form.literal
    if form.attributes.get("approximate", "none") == "tanh":
        cubic = make_op("add", x, make_op("mul", k(0.044715), make_op("mul", make_op("mul", x, x), x)))
        inner = make_op("tanh", make_op("mul", k(math.sqrt(2 / math.pi)), cubic))
    else:
        inner = make_op("erf", make_op("mul", x, k(math.sqrt(0.5))))
    return make_op("mul", make_op("mul", k(0.5), x), make_op("add", k(1), inner))


def _shrink(form: Form, x: Expr) -> Expr:
    """Return ``x < -lambd ? x + bias : x > lambd ? x - bias : 0``; integers are compared as floats."""
    wide = form if is_float(form.dtype) else Form("float64", form.attributes)
    x = x if wide is form else Cast(wide.dtype, x)
    shift, end = wide.attr("bias", 0.0), wide.attr("lambd", 0.5)
    above = make_op("where", make_op("lt", end, x), make_op("sub", x, shift), wide.literal(0))
    body = make_op("where", make_op("lt", x, wide.literal(-end.value)), make_op("add", x, shift), above)
    return body if wide is form else Cast(form.dtype, body)


def _bitwise_not(form: Form, x: Expr) -> Expr:
    ones = -1 if np.issubdtype(np.dtype(form.dtype), np.signedinteger) else int(np.iinfo(form.dtype).max)
    return make_op("xor", x, form.literal(ones))


#: Operators of one operand whose scalar operation has the same name.
UNARY: Final = (
    *("Abs", "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Ceil", "Cos", "Cosh", "Erf", "Exp", "Floor", "Log", "Neg"),
    *("Round", "Sign", "Sin", "Sinh", "Sqrt", "Tan", "Tanh"),
)
#: ONNX operator -> its formula.
FORMULAS: Final[Mapping[str, Formula]] = {
    **{op: _operation(op.lower()) for op in UNARY},
    "Add": _operation("add"),
    "Sub": _operation("sub"),
    "Mul": _operation("mul"),
    "Div": _operation("div"),
    "Mod": lambda form, x, y: make_op("fmod" if form.attributes.get("fmod", 0) else "mod", x, y),
    "Reciprocal": lambda form, x: make_op("div", form.literal(1), x),
    "BitShift": lambda form, x, y: make_op("shl" if form.attributes.get("direction") == "LEFT" else "shr", x, y),
    "BitwiseAnd": _operation("and_"),
    "BitwiseOr": _operation("or_"),
    "BitwiseXor": _operation("xor"),
    "BitwiseNot": _bitwise_not,
    "And": _operation("and_"),
    "Or": _operation("or_"),
    "Xor": _operation("xor"),
    "Not": _operation("not_"),
    "IsNaN": _operation("isnan"),
    "Equal": _operation("eq"),
    "Less": _operation("lt"),
    "LessOrEqual": _operation("le"),
    "Greater": lambda form, x, y: make_op("lt", y, x),
    "GreaterOrEqual": lambda form, x, y: make_op("le", y, x),
    "Where": _operation("where"),
    "Relu": lambda form, x: make_op("max", x, form.literal(0)),
    "LeakyRelu": lambda form, x: _below_zero(form, x, make_op("mul", x, form.attr("alpha", 0.01))),
    "PRelu": lambda form, x, slope: _below_zero(form, x, make_op("mul", x, slope)),
    "ThresholdedRelu": lambda form, x: make_op("where", make_op("lt", form.attr("alpha", 1.0), x), x, form.literal(0)),
    "Elu": _elu,
    "Celu": _celu,
    "Selu": lambda form, x: make_op("mul", form.attr("gamma", 1.0507009873554805), _elu(form, x, 1.6732632423543772)),
    "Sigmoid": _sigmoid,
    "Swish": _swish,
    "HardSigmoid": lambda form, x: _clamped_line(form, x, form.attr("alpha", 0.2), form.attr("beta", 0.5)),
    "HardSwish": lambda form, x: make_op("mul", x, _clamped_line(form, x, form.literal(1 / 6), form.literal(0.5))),
    "Softplus": _softplus,
    "Softsign": lambda form, x: make_op("div", x, make_op("add", form.literal(1), make_op("abs", x))),
    "Mish": lambda form, x: make_op("mul", x, make_op("tanh", _softplus(form, x))),
    "Gelu": _gelu,
    "Shrink": _shrink,
}
#: ONNX operator -> scalar operation folded over any number of operands.
VARIADIC: Final[Mapping[str, str]] = {"Min": "min", "Max": "max", "Sum": "add"}


@lowering(*FORMULAS)
def lower_formula(ctx: Lowering) -> None:
    """Lower an operator of ``FORMULAS`` to a map."""
    axes = out_axes(ctx)
    operands = [load_operand(ctx, i, axes) for i in range(len(ctx.node.inputs))]
    ctx.emit(axes, FORMULAS[ctx.node.op](Form(ctx.out().dtype, ctx.node.attributes), *operands), into=0)


@lowering(*VARIADIC)
def lower_variadic(ctx: Lowering) -> None:
    """Lower an operator of ``VARIADIC`` to a map."""
    ctx.emit(out_axes(ctx), _fold_operands(ctx, VARIADIC[ctx.node.op]), into=0)


@lowering("Mean")
def lower_mean(ctx: Lowering) -> None:
    """Lower Mean of the operands (not over an axis)."""
    count = make_literal(len(ctx.node.inputs), ctx.out().dtype)
    ctx.emit(out_axes(ctx), make_op("div", _fold_operands(ctx, "add"), count), into=0)


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


@lowering("IsInf")
def is_inf(ctx: Lowering) -> None:
    """Lower IsInf: true where x is infinite with a sign that ``detect_positive`` and ``detect_negative`` allow."""
    axes, dtype = out_axes(ctx), ctx.type(ctx.input(0)).dtype
    x, zero = load_operand(ctx, 0, axes), make_literal(0, dtype)
    positive, negative = bool(ctx.attr("detect_positive", 1)), bool(ctx.attr("detect_negative", 1))
    if not positive and not negative:
        ctx.emit(axes, make_literal(False, "bool"), into=0)
        return
    found = make_op("isinf", x)
    if not negative:
        found = make_op("and_", found, make_op("lt", zero, x))
    if not positive:
        found = make_op("and_", found, make_op("lt", x, zero))
    ctx.emit(axes, found, into=0)


@lowering("Clip")
def lower_clip(ctx: Lowering) -> None:
    """Lower Clip to ``min(max(x, low), high)``; each bound is optional, a scalar input or (old opsets) an attribute."""
    axes, dtype = out_axes(ctx), ctx.out().dtype
    body = load_operand(ctx, 0, axes)
    for index, name, fn in ((1, "min", "max"), (2, "max", "min")):
        if ctx.has(index):
            body = make_op(fn, body, load_operand(ctx, index, axes))
        elif ctx.attr(name) is not None:
            body = make_op(fn, body, make_literal(ctx.attr(name), dtype))
    ctx.emit(axes, body, into=0)


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
