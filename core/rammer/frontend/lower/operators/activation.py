"""Activation functions; each one map over its input. Formulas are those of the ONNX operator schemas."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

from rammer.frontend.lower.lowering_registry import Lowering, lowering
from rammer.frontend.lower.operands import apply, literal, operand, out_axes
from rammer.ir.expr import Cast, Const, Expr
from rammer.ir.types import is_float

#: A literal of the operator's element type.
Literal: TypeAlias = Callable[[float], Const]


def _map(ctx: Lowering, formula: Callable[[Expr, Literal], Expr]) -> None:
    """Emit ``formula(x, k)``, where ``k`` makes literals of the output's element type."""
    axes, dtype = out_axes(ctx), ctx.out().dtype
    ctx.emit(axes, formula(operand(ctx, 0, axes), lambda v: literal(v, dtype)), into=0)


def sigmoid_of(x: Expr, k: Literal) -> Expr:
    """``1 / (1 + exp(-x))``; an infinite exponential gives 0, so the result is finite for every x."""
    return apply("div", k(1), apply("add", k(1), apply("exp", apply("neg", x))))


def softplus_of(x: Expr, k: Literal) -> Expr:
    """``log(1 + exp(x))`` as ``max(x, 0) + log1p(exp(-|x|))``, which cannot overflow and keeps what is small."""
    tail = apply("log1p", apply("exp", apply("neg", apply("abs", x))))
    return apply("add", apply("max", x, k(0)), tail)


def _below_zero(x: Expr, k: Literal, negative: Expr) -> Expr:
    return apply("where", apply("lt", x, k(0)), negative, x)


def _bounded(x: Expr, low: Expr, high: Expr) -> Expr:
    return apply("min", apply("max", x, low), high)


def _exp_minus_1(x: Expr) -> Expr:
    return apply("expm1", x)


@lowering("Relu")
def relu(ctx: Lowering) -> None:
    """``max(x, 0)``."""
    _map(ctx, lambda x, k: apply("max", x, k(0)))


@lowering("LeakyRelu")
def leaky_relu(ctx: Lowering) -> None:
    """``x < 0 ? alpha * x : x``."""
    alpha = float(ctx.attr("alpha", 0.01))
    _map(ctx, lambda x, k: _below_zero(x, k, apply("mul", x, k(alpha))))


@lowering("PRelu")
def prelu(ctx: Lowering) -> None:
    """``x < 0 ? slope * x : x`` with a broadcast slope."""
    slope = operand(ctx, 1, out_axes(ctx))
    _map(ctx, lambda x, k: _below_zero(x, k, apply("mul", x, slope)))


@lowering("Elu")
def elu(ctx: Lowering) -> None:
    """``x < 0 ? alpha * (exp(x) - 1) : x``."""
    alpha = float(ctx.attr("alpha", 1.0))
    _map(ctx, lambda x, k: _below_zero(x, k, apply("mul", k(alpha), _exp_minus_1(x))))


@lowering("Selu")
def selu(ctx: Lowering) -> None:
    """``gamma * (x < 0 ? alpha * (exp(x) - 1) : x)``."""
    alpha = float(ctx.attr("alpha", 1.6732632423543772))
    gamma = float(ctx.attr("gamma", 1.0507009873554805))

    def formula(x: Expr, k: Literal) -> Expr:
        return apply("mul", k(gamma), _below_zero(x, k, apply("mul", k(alpha), _exp_minus_1(x))))

    _map(ctx, formula)


@lowering("Celu")
def celu(ctx: Lowering) -> None:
    """``x < 0 ? alpha * (exp(x / alpha) - 1) : x``."""
    alpha = float(ctx.attr("alpha", 1.0))

    def formula(x: Expr, k: Literal) -> Expr:
        return _below_zero(x, k, apply("mul", k(alpha), _exp_minus_1(apply("div", x, k(alpha)))))

    _map(ctx, formula)


@lowering("ThresholdedRelu")
def thresholded_relu(ctx: Lowering) -> None:
    """``x > alpha ? x : 0``."""
    alpha = float(ctx.attr("alpha", 1.0))
    _map(ctx, lambda x, k: apply("where", apply("lt", k(alpha), x), x, k(0)))


@lowering("Sigmoid")
def sigmoid(ctx: Lowering) -> None:
    """The logistic function."""
    _map(ctx, sigmoid_of)


@lowering("Swish")
def swish(ctx: Lowering) -> None:
    """``x * sigmoid(alpha * x)``."""
    alpha = float(ctx.attr("alpha", 1.0))

    def formula(x: Expr, k: Literal) -> Expr:
        scaled = x if alpha == 1 else apply("mul", k(alpha), x)
        return apply("mul", x, sigmoid_of(scaled, k))

    _map(ctx, formula)


@lowering("HardSigmoid")
def hard_sigmoid(ctx: Lowering) -> None:
    """``alpha * x + beta`` clipped to [0, 1]."""
    alpha, beta = float(ctx.attr("alpha", 0.2)), float(ctx.attr("beta", 0.5))
    _map(ctx, lambda x, k: _line(x, k, alpha, beta))


def _line(x: Expr, k: Literal, alpha: float, beta: float) -> Expr:
    return _bounded(apply("add", apply("mul", x, k(alpha)), k(beta)), k(0), k(1))


@lowering("HardSwish")
def hard_swish(ctx: Lowering) -> None:
    """``x`` times the hard sigmoid with slope 1/6."""
    _map(ctx, lambda x, k: apply("mul", x, _line(x, k, 1 / 6, 0.5)))


@lowering("Softplus")
def softplus(ctx: Lowering) -> None:
    """``log(1 + exp(x))``."""
    _map(ctx, softplus_of)


@lowering("Mish")
def mish(ctx: Lowering) -> None:
    """``x * tanh(softplus(x))``."""
    _map(ctx, lambda x, k: apply("mul", x, apply("tanh", softplus_of(x, k))))


@lowering("Softsign")
def softsign(ctx: Lowering) -> None:
    """``x / (1 + |x|)``."""
    _map(ctx, lambda x, k: apply("div", x, apply("add", k(1), apply("abs", x))))


@lowering("Gelu")
def gelu(ctx: Lowering) -> None:
    """``x/2 * (1 + erf(x / sqrt 2))``, or its tanh approximation (Hendrycks and Gimpel, arXiv 1606.08415)."""
    approximate = ctx.attr("approximate", "none") == "tanh"

    def formula(x: Expr, k: Literal) -> Expr:
        if approximate:
            cubic = apply("add", x, apply("mul", k(0.044715), apply("mul", apply("mul", x, x), x)))
            inner = apply("tanh", apply("mul", k(math.sqrt(2 / math.pi)), cubic))
        else:
            inner = apply("erf", apply("mul", x, k(math.sqrt(0.5))))
        return apply("mul", apply("mul", k(0.5), x), apply("add", k(1), inner))

    _map(ctx, formula)


@lowering("Shrink")
def shrink(ctx: Lowering) -> None:
    """``x < -lambd ? x + bias : x > lambd ? x - bias : 0``; integers are compared as floats."""
    bias, lambd = float(ctx.attr("bias", 0.0)), float(ctx.attr("lambd", 0.5))
    axes, dtype = out_axes(ctx), ctx.out().dtype
    wide = dtype if is_float(dtype) else "float64"
    x = operand(ctx, 0, axes)
    x = x if wide == dtype else Cast(wide, x)
    shift, zero = literal(bias, wide), literal(0, wide)
    above = apply("where", apply("lt", literal(lambd, wide), x), apply("sub", x, shift), zero)
    below = apply("lt", x, literal(-lambd, wide))
    body: Expr = apply("where", below, apply("add", x, shift), above)
    ctx.emit(axes, body if wide == dtype else Cast(dtype, body), into=0)


@lowering("Clip")
def clip(ctx: Lowering) -> None:
    """``min(max(x, low), high)``; each bound is optional, a scalar input or (old opsets) an attribute."""
    axes, dtype = out_axes(ctx), ctx.out().dtype
    body = operand(ctx, 0, axes)
    for index, name, fn in ((1, "min", "max"), (2, "max", "min")):
        if ctx.has(index):
            body = apply(fn, body, operand(ctx, index, axes))
        elif ctx.attr(name) is not None:
            body = apply(fn, body, literal(ctx.attr(name), dtype))
    ctx.emit(axes, body, into=0)
