"""Comparison, logic and selection, with one strict and one weak order; the other comparisons swap operands."""

from __future__ import annotations

from rammer.frontend.lower.lowering_registry import Lowering, LoweringFn, lowering
from rammer.frontend.lower.operands import load_operand, make_literal, make_op, out_axes

#: ONNX operator -> (scalar operation, True if its operands are swapped).
BINARY = {
    "Equal": ("eq", False),
    "Less": ("lt", False),
    "LessOrEqual": ("le", False),
    "Greater": ("lt", True),
    "GreaterOrEqual": ("le", True),
    "And": ("and_", False),
    "Or": ("or_", False),
    "Xor": ("xor", False),
}


def _make_binary(fn: str, swapped: bool) -> LoweringFn:
    def lower(ctx: Lowering) -> None:
        axes = out_axes(ctx)
        left, right = load_operand(ctx, 0, axes), load_operand(ctx, 1, axes)
        ctx.emit(axes, make_op(fn, right, left) if swapped else make_op(fn, left, right), into=0)

    return lower


for _op, (_fn, _swapped) in BINARY.items():
    lowering(_op)(_make_binary(_fn, _swapped))


@lowering("Not")
def logical_not(ctx: Lowering) -> None:
    """Lower Not to ``!x``."""
    axes = out_axes(ctx)
    ctx.emit(axes, make_op("not_", load_operand(ctx, 0, axes)), into=0)


@lowering("IsNaN")
def is_nan(ctx: Lowering) -> None:
    """Lower IsNaN: true where x is NaN."""
    axes = out_axes(ctx)
    ctx.emit(axes, make_op("isnan", load_operand(ctx, 0, axes)), into=0)


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


@lowering("Where")
def lower_where(ctx: Lowering) -> None:
    """Lower Where to ``condition ? x : y``, all three broadcast."""
    axes = out_axes(ctx)
    ctx.emit(axes, make_op("where", *[load_operand(ctx, i, axes) for i in range(3)]), into=0)
