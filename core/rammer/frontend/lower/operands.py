"""Operands of element-wise lowerings: literals of the right type and broadcast loads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rammer.frontend.lower.lowering_registry import CannotLower, Lowering, axes_of_shape
from rammer.ir.compute import Axis
from rammer.ir.expr import Cast, Const, Expr, Load, Number, Op


def out_axes(ctx: Lowering, index: int = 0) -> tuple[Axis, ...]:
    """Return axes ``i0, i1, ...`` of output ``index``."""
    return axes_of_shape(ctx.out(index).shape)


def make_literal(value: Number, like: str) -> Const:
    """Return a literal of element type ``like``."""
    return Const(value, like)


def make_op(fn: str, *args: Expr) -> Op:
    """Return the operation ``fn(args)``."""
    return Op(fn, args)


def load_operand(ctx: Lowering, index: int, axes: Sequence[Axis]) -> Expr:
    """Return input ``index`` broadcast over ``axes``; a one-element constant becomes a literal."""
    name = ctx.input(index)
    value = ctx.graph.constant(name)
    if value is not None and value.size == 1:
        scalar = value.reshape(()).item()
        # NaN stays a tensor: a literal NaN would make equal expressions compare unequal.
        if scalar == scalar:
            return Const(scalar, str(value.dtype))
    return ctx.broadcast(name, axes)


def emit_copy(ctx: Lowering, tensor: str, output: int = 0) -> None:
    """Emit output ``output`` as a copy of ``tensor``, which has its shape."""
    axes = out_axes(ctx, output)
    ctx.emit(axes, ctx.load(tensor, *[a.name for a in axes]), into=output)


def static_ints(ctx: Lowering, index: int, attribute: str) -> tuple[int, ...] | None:
    """Return integers from optional static input ``index`` or, in old opsets, from ``attribute``."""
    value = ctx.static(index, attribute)
    if value is not None:
        return tuple(int(v) for v in np.asarray(value).ravel())
    listed = ctx.attr(attribute)
    return None if listed is None else tuple(int(v) for v in listed)


def axis_of(ctx: Lowering, value: int, rank: int) -> int:
    """Return ``value`` as a dimension in ``[0, rank)``. Raises CannotLower outside ``[-rank, rank)``."""
    if not -rank <= value < rank:
        raise CannotLower(f"axis {value} of {ctx.node.op} is outside rank {rank}")
    return value % rank


def whole_load(ctx: Lowering, tensor: str, axes: Sequence[Axis]) -> Load:
    """Return ``tensor`` indexed by all of ``axes`` in order."""
    return ctx.load(tensor, *[a.name for a in axes])


def widen_float16(ctx: Lowering, x: Load) -> Expr:
    """Return ``x``, in float32 if it is float16: values between a sum and the next step have that precision."""
    return Cast("float32", x) if ctx.type(x.tensor).dtype == "float16" else x


def emit_narrowed(ctx: Lowering, axes: Sequence[Axis], value: Expr) -> None:
    """Emit output 0 from ``value``, computed from ``widen_float16`` operands: float32 if the output is float16."""
    dtype = ctx.out().dtype
    ctx.emit(axes, Cast(dtype, value) if dtype == "float16" else value, into=0)
