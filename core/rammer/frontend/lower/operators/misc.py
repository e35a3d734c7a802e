"""Casts, copies, generators of constants, and triangular selection."""

from __future__ import annotations

import numpy as np

from rammer.frontend.lower.lowering_registry import CannotLower, Lowering, lowering
from rammer.frontend.lower.operands import emit_copy, load_operand, make_literal, make_op, out_axes, whole_load
from rammer.ir import expr as ex
from rammer.ir.expr import Cast, Expr
from rammer.ir.types import SHORT, is_float, itemsize


@lowering("Identity")
def lower_identity(ctx: Lowering) -> None:
    """Lower Identity to ``x``."""
    emit_copy(ctx, ctx.input(0))


@lowering("Dropout")
def lower_dropout(ctx: Lowering) -> None:
    """Lower Dropout for inference: a copy, and a mask that is true everywhere."""
    training, ratio = ctx.static(2, "training_mode"), ctx.static(1, "ratio") if ctx.has(2) else None
    if training is not None and bool(training.item()) and (ratio is None or float(ratio.item()) != 0.0):
        raise CannotLower("Dropout in training mode draws random numbers")
    emit_copy(ctx, ctx.input(0))
    if ctx.wants(1):
        axes = out_axes(ctx, 1)
        ctx.emit(axes, make_literal(True, "bool"), into=1)


@lowering("Cast", "CastLike")
def lower_cast(ctx: Lowering) -> None:
    """Lower Cast and CastLike by C's rules: floats truncate towards zero, non-zero is true."""
    axes, target, source = out_axes(ctx), ctx.out().dtype, ctx.type(ctx.input(0)).dtype
    if target not in SHORT or source not in SHORT:
        raise CannotLower(f"{ctx.node.op} from {source} to {target}: the element type is unsupported")
    x = load_operand(ctx, 0, axes)
    body: Expr
    if target == source:
        body = x
    elif target == "bool":
        body = make_op("not_", make_op("eq", x, make_literal(0, source)))
    else:
        body = Cast(target, x)
    ctx.emit(axes, body, into=0)


@lowering("BitCast")
def bit_cast(ctx: Lowering) -> None:
    """Lower BitCast: the same bits as another type, through the unsigned integer of equal width."""
    axes, target, source = out_axes(ctx), ctx.out().dtype, ctx.type(ctx.input(0)).dtype
    odd = {source, target} & {"bool", "float16"}
    if odd and source != target:
        raise CannotLower(f"BitCast from {source} to {target}: {odd.pop()} has no bit representation on a device")
    x: Expr = whole_load(ctx, ctx.input(0), axes)
    if source != target and is_float(source):
        x = make_op(f"as_uint{8 * itemsize(source)}", x)
    if source != target and is_float(target):
        x = make_op(f"as_{target}", Cast(f"uint{8 * itemsize(target)}", x))
    ctx.emit(axes, Cast(target, x), into=0)


@lowering("Trilu")
def lower_trilu(ctx: Lowering) -> None:
    """Lower Trilu: the upper or lower triangle of the last two axes; ``k`` shifts the diagonal."""
    axes, dtype = out_axes(ctx), ctx.out().dtype
    shift = ctx.static(1, "k")
    offset = 0 if shift is None else int(shift.item())
    row, column = ex.make_add(axes[-2].name, offset), ex.as_index(axes[-1].name)
    kept = make_op("le", row, column) if ctx.attr("upper", 1) else make_op("le", column, row)
    ctx.emit(axes, make_op("where", kept, load_operand(ctx, 0, axes), make_literal(0, dtype)), into=0)


@lowering("EyeLike")
def eye_like(ctx: Lowering) -> None:
    """Lower EyeLike: ones on diagonal ``k``."""
    axes, dtype = out_axes(ctx), ctx.out().dtype
    hit = make_op("eq", ex.make_add(axes[0].name, int(ctx.attr("k", 0))), ex.as_index(axes[1].name))
    ctx.emit(axes, make_op("where", hit, make_literal(1, dtype), make_literal(0, dtype)), into=0)


@lowering("Range")
def lower_range(ctx: Lowering) -> None:
    """Lower Range to ``start + i * delta``; all three inputs are constant."""
    axes, dtype = out_axes(ctx), ctx.out().dtype
    start, delta = ctx.static(0, "start"), ctx.static(2, "delta")
    if start is None or delta is None:
        raise CannotLower("Range without start or delta")
    step = make_op("mul", Cast(dtype, ex.as_index(axes[0].name)), make_literal(delta.item(), dtype))
    ctx.emit(axes, make_op("add", step, make_literal(start.item(), dtype)), into=0)


@lowering("ConstantOfShape")
def constant_of_shape(ctx: Lowering) -> None:
    """Lower ConstantOfShape: one value everywhere."""
    value = ctx.attr("value")
    scalar = 0.0 if value is None else np.asarray(value).reshape(-1)[0].item()
    ctx.emit(out_axes(ctx), make_literal(scalar, ctx.out().dtype), into=0)


@lowering("Constant")
def lower_constant(ctx: Lowering) -> None:
    """Lower Constant: a literal tensor."""
    for name in ("value", "value_float", "value_floats", "value_int", "value_ints"):
        value = ctx.attr(name)
        if value is not None:
            emit_copy(ctx, ctx.constant(np.asarray(value, dtype=ctx.out().dtype)))
            return
    raise CannotLower("Constant of strings")


@lowering("Shape")
def lower_shape(ctx: Lowering) -> None:
    """Lower Shape: the extents of the input, or a range of them."""
    extents = ctx.shape(ctx.input(0))
    end = ctx.attr("end")
    part = extents[int(ctx.attr("start", 0)) : None if end is None else int(end)]
    emit_copy(ctx, ctx.constant(np.asarray(part, np.int64)))


@lowering("Size")
def lower_size(ctx: Lowering) -> None:
    """Lower Size: the number of elements of the input."""
    ctx.emit((), make_literal(ctx.type(ctx.input(0)).size, "int64"), into=0)
