"""Activation functions, each one map over its input. Formulas are those of the ONNX operator schemas."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

from rammer.frontend.lower.lowering_registry import Lowering, lowering
from rammer.frontend.lower.operands import load_operand, make_literal, make_op, out_axes
from rammer.ir.expr import Cast, Const, Expr
from rammer.ir.types import is_float

#: Function that returns a literal of the operator's element type.
Literal: TypeAlias = Callable[[float], Const]


def _emit_map(ctx: Lowering, formula: Callable[[Expr, Literal], Expr]) -> None:
    """Emit ``formula(x, k)``, where ``k`` makes literals of the output's element type."""
    axes, dtype = out_axes(ctx), ctx.out().dtype
    ctx.emit(axes, formula(load_operand(ctx, 0, axes), lambda v: make_literal(v, dtype)), into=0)


def sigmoid_of(x: Expr, k: Literal) -> Expr:
    """Return ``1 / (1 + exp(-x))``; an infinite exponential gives 0, so the result is finite for every x."""
    return make_op("div", k(1), make_op("add", k(1), make_op("exp", make_op("neg", x))))


def softplus_of(x: Expr, k: Literal) -> Expr:
    """Return ``log(1 + exp(x))`` as ``max(x, 0) + log1p(exp(-|x|))``, which cannot overflow and keeps small terms."""
    tail = make_op("log1p", make_op("exp", make_op("neg", make_op("abs", x))))
    return make_op("add", make_op("max", x, k(0)), tail)


def _below_zero(x: Expr, k: Literal, negative: Expr) -> Expr:
    return make_op("where", make_op("lt", x, k(0)), negative, x)


def _clamp_value(x: Expr, low: Expr, high: Expr) -> Expr:
    return make_op("min", make_op("max", x, low), high)


def _exp_minus_1(x: Expr) -> Expr:
    return make_op("expm1", x)


@lowering("Relu")
def lower_relu(ctx: Lowering) -> None:
    """Lower Relu to ``max(x, 0)``."""
    _emit_map(ctx, lambda x, k: make_op("max", x, k(0)))


@lowering("LeakyRelu")
def leaky_relu(ctx: Lowering) -> None:
    """Lower LeakyRelu to ``x < 0 ? alpha * x : x``."""
    alpha = float(ctx.attr("alpha", 0.01))
    _emit_map(ctx, lambda x, k: _below_zero(x, k, make_op("mul", x, k(alpha))))


@lowering("PRelu")
def lower_prelu(ctx: Lowering) -> None:
    """Lower PRelu to ``x < 0 ? slope * x : x`` with a broadcast slope."""
    slope = load_operand(ctx, 1, out_axes(ctx))
    _emit_map(ctx, lambda x, k: _below_zero(x, k, make_op("mul", x, slope)))


@lowering("Elu")
def lower_elu(ctx: Lowering) -> None:
    """Lower Elu to ``x < 0 ? alpha * (exp(x) - 1) : x``."""
    alpha = float(ctx.attr("alpha", 1.0))
    _emit_map(ctx, lambda x, k: _below_zero(x, k, make_op("mul", k(alpha), _exp_minus_1(x))))


@lowering("Selu")
def lower_selu(ctx: Lowering) -> None:
    """Lower Selu to ``gamma * (x < 0 ? alpha * (exp(x) - 1) : x)``."""
    alpha = float(ctx.attr("alpha", 1.6732632423543772))
    gamma = float(ctx.attr("gamma", 1.0507009873554805))

    def formula(x: Expr, k: Literal) -> Expr:
        return make_op("mul", k(gamma), _below_zero(x, k, make_op("mul", k(alpha), _exp_minus_1(x))))

    _emit_map(ctx, formula)


@lowering("Celu")
def lower_celu(ctx: Lowering) -> None:
    """Lower Celu to ``x < 0 ? alpha * (exp(x / alpha) - 1) : x``."""
    alpha = float(ctx.attr("alpha", 1.0))

    def formula(x: Expr, k: Literal) -> Expr:
        return _below_zero(x, k, make_op("mul", k(alpha), _exp_minus_1(make_op("div", x, k(alpha)))))

    _emit_map(ctx, formula)


@lowering("ThresholdedRelu")
def thresholded_relu(ctx: Lowering) -> None:
    """Lower ThresholdedRelu to ``x > alpha ? x : 0``."""
    alpha = float(ctx.attr("alpha", 1.0))
    _emit_map(ctx, lambda x, k: make_op("where", make_op("lt", k(alpha), x), x, k(0)))


@lowering("Sigmoid")
def lower_sigmoid(ctx: Lowering) -> None:
    """Lower Sigmoid, the logistic function."""
    _emit_map(ctx, sigmoid_of)


@lowering("Swish")
def lower_swish(ctx: Lowering) -> None:
    """Lower Swish to ``x * sigmoid(alpha * x)``."""
    alpha = float(ctx.attr("alpha", 1.0))

    def formula(x: Expr, k: Literal) -> Expr:
        scaled = x if alpha == 1 else make_op("mul", k(alpha), x)
        return make_op("mul", x, sigmoid_of(scaled, k))

    _emit_map(ctx, formula)


@lowering("HardSigmoid")
def hard_sigmoid(ctx: Lowering) -> None:
    """Lower HardSigmoid to ``alpha * x + beta`` clipped to [0, 1]."""
    alpha, beta = float(ctx.attr("alpha", 0.2)), float(ctx.attr("beta", 0.5))
    _emit_map(ctx, lambda x, k: _clamped_line(x, k, alpha, beta))


def _clamped_line(x: Expr, k: Literal, alpha: float, beta: float) -> Expr:
    return _clamp_value(make_op("add", make_op("mul", x, k(alpha)), k(beta)), k(0), k(1))


@lowering("HardSwish")
def hard_swish(ctx: Lowering) -> None:
    """Lower HardSwish to ``x`` times the hard sigmoid with slope 1/6."""
    _emit_map(ctx, lambda x, k: make_op("mul", x, _clamped_line(x, k, 1 / 6, 0.5)))


@lowering("Softplus")
def lower_softplus(ctx: Lowering) -> None:
    """Lower Softplus to ``log(1 + exp(x))``."""
    _emit_map(ctx, softplus_of)


@lowering("Mish")
def lower_mish(ctx: Lowering) -> None:
    """Lower Mish to ``x * tanh(softplus(x))``."""
    _emit_map(ctx, lambda x, k: make_op("mul", x, make_op("tanh", softplus_of(x, k))))


@lowering("Softsign")
def lower_softsign(ctx: Lowering) -> None:
    """Lower Softsign to ``x / (1 + |x|)``."""
    _emit_map(ctx, lambda x, k: make_op("div", x, make_op("add", k(1), make_op("abs", x))))


@lowering("Gelu")
def lower_gelu(ctx: Lowering) -> None:
    """Lower Gelu to ``x/2 * (1 + erf(x / sqrt 2))``, or its tanh approximation (Hendrycks and Gimpel, arXiv 1606.08415)."""
    approximate = ctx.attr("approximate", "none") == "tanh"

    def formula(x: Expr, k: Literal) -> Expr:
        if approximate:
            cubic = make_op("add", x, make_op("mul", k(0.044715), make_op("mul", make_op("mul", x, x), x)))
            inner = make_op("tanh", make_op("mul", k(math.sqrt(2 / math.pi)), cubic))
        else:
            inner = make_op("erf", make_op("mul", x, k(math.sqrt(0.5))))
        return make_op("mul", make_op("mul", k(0.5), x), make_op("add", k(1), inner))

    _emit_map(ctx, formula)


@lowering("Shrink")
def lower_shrink(ctx: Lowering) -> None:
    """Lower Shrink to ``x < -lambd ? x + bias : x > lambd ? x - bias : 0``; integers are compared as floats."""
    bias, lambd = float(ctx.attr("bias", 0.0)), float(ctx.attr("lambd", 0.5))
    axes, dtype = out_axes(ctx), ctx.out().dtype
    wide = dtype if is_float(dtype) else "float64"
    x = load_operand(ctx, 0, axes)
    x = x if wide == dtype else Cast(wide, x)
    shift, zero = make_literal(bias, wide), make_literal(0, wide)
    above = make_op("where", make_op("lt", make_literal(lambd, wide), x), make_op("sub", x, shift), zero)
    below = make_op("lt", x, make_literal(-lambd, wide))
    body: Expr = make_op("where", below, make_op("add", x, shift), above)
    ctx.emit(axes, body if wide == dtype else Cast(dtype, body), into=0)


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
