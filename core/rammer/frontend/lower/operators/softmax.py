"""Softmax, LogSoftmax and Hardmax: reductions and maps, which the tile graph fuses into one kernel. Before opset 13 the input is
coerced to two dimensions split at ``axis``, so all later ones are normalised together. From 13 on only ``axis`` is."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rammer.frontend.lower.lowering_registry import Lowering, lowering
from rammer.frontend.lower.operands import emit_narrowed, whole_load, widen_float16
from rammer.ir import expr as ex
from rammer.ir.compute import Axis
from rammer.ir.expr import Const, Expr, Load, Op


def _split_axes(ctx: Lowering) -> tuple[tuple[Axis, ...], list[Axis], list[Axis]]:
    """Return all axes, the kept ones and the normalised ones."""
    axes = ctx.axes(ctx.input(0))
    coerced = (ctx.node.version or ctx.graph.opset) < 13
    first = int(ctx.attr("axis", 1 if coerced else -1))
    first = first if first >= 0 else first + len(axes)
    stop = len(axes) if coerced else first + 1
    return axes, [*axes[:first], *axes[stop:]], list(axes[first:stop])


def _emit_reduction(ctx: Lowering, kept: Sequence[Axis], over: Sequence[Axis], body: Expr, hint: str) -> Load:
    """Emit a reduction (``max`` or ``sum``, by ``hint``) and return its load at the kept axes."""
    name = ctx.emit(kept, body, over, "max" if hint == "max" else "sum", into=hint)
    return whole_load(ctx, name, kept)


@lowering("Softmax")
def lower_softmax(ctx: Lowering) -> None:
    """Lower Softmax: ``exp(x - max) / sum(exp(x - max))``, as four Computes."""
    axes, kept, over = _split_axes(ctx)
    x = widen_float16(ctx, whole_load(ctx, ctx.input(0), axes))
    if not over:
        ctx.emit(axes, Const(1.0, ctx.out().dtype), into=0)
        return
    largest = _emit_reduction(ctx, kept, over, x, "max")
    exponential = whole_load(ctx, ctx.emit(axes, Op("exp", (Op("sub", (x, largest)),)), into="exp"), axes)
    total = _emit_reduction(ctx, kept, over, exponential, "sum")
    emit_narrowed(ctx, axes, Op("div", (exponential, total)))


@lowering("LogSoftmax")
def log_softmax(ctx: Lowering) -> None:
    """Lower LogSoftmax: ``(x - max) - log(sum(exp(x - max)))``."""
    axes, kept, over = _split_axes(ctx)
    x = widen_float16(ctx, whole_load(ctx, ctx.input(0), axes))
    if not over:
        ctx.emit(axes, Const(0.0, ctx.out().dtype), into=0)
        return
    shifted = Op("sub", (x, _emit_reduction(ctx, kept, over, x, "max")))
    total = _emit_reduction(ctx, kept, over, Op("exp", (shifted,)), "sum")
    logarithm = whole_load(ctx, ctx.emit(kept, Op("log", (total,)), into="log"), kept)
    emit_narrowed(ctx, axes, Op("sub", (shifted, logarithm)))


@lowering("Hardmax")
def lower_hardmax(ctx: Lowering) -> None:
    """Lower Hardmax: 1 at the first maximum, 0 elsewhere."""
    axes, kept, over = _split_axes(ctx)
    dtype = ctx.out().dtype
    if not over:
        ctx.emit(axes, Const(1.0, dtype), into=0)
        return
    x = whole_load(ctx, ctx.input(0), axes)
    largest = _emit_reduction(ctx, kept, over, x, "max")
    place: Expr = ex.integer(0)
    for axis in over:
        place = ex.make_add(ex.make_mul(place, axis.extent), axis.name)
    last = ex.integer(max(math.prod(a.extent for a in over) - 1, 0))
    # A NaN is the maximum but equals nothing; the first one counts, as for ArgMax.
    candidate = Op("where", (Op("or_", (Op("eq", (x, largest)), Op("isnan", (x,)))), place, last))
    first = whole_load(ctx, ctx.emit(kept, candidate, over, "min", dtype="int64", into="first"), kept)
    chosen = Op("eq", (place, first))
    ctx.emit(axes, Op("where", (chosen, Const(1.0, dtype), Const(0.0, dtype))), into=0)
