"""QuantizeLinear, DequantizeLinear and DynamicQuantizeLinear: maps between numbers and their codes.

A scale and a zero point apply to the whole tensor, an axis index, or a block of axis indices. They are loaded from their tensors,
constant or not, so layers that differ only in them share kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from rammer.frontend.lower.lowering_registry import CannotLower, Lowering, lowering
from rammer.frontend.lower.operands import axis_of, out_axes, whole_load
from rammer.ir import expr as ex
from rammer.ir.compute import Axis, Combiner
from rammer.ir.expr import Cast, Const, Expr, Load, Op

#: Types of codes here; ``frontend.lower.emulated_types`` converts codes of fewer bits, and of floats, to these.
CODES: Final = ("uint8", "int8", "uint16", "int16")
_EXTREMES: Final[tuple[Combiner, ...]] = ("min", "max")


@dataclass(frozen=True)
class Granularity:
    """The granularity of a scale: the whole tensor, an index along ``axis``, or ``block`` consecutive indices."""

    axis: int
    block: int

    def load(self, ctx: Lowering, name: str, axes: Sequence[Axis]) -> Load:
        """Return a load of the scale or zero point of the element at ``axes``. Raise BadInput if their shapes do not fit."""
        have, shape = ctx.shape(name), tuple(a.extent for a in axes)
        if have in ((), (1,)) and not (have and self.block):
            return ctx.load(name, *have and (0,))
        axis = axis_of(ctx, self.axis, len(shape))
        blocks = -(-shape[axis] // self.block) if self.block else shape[axis]
        if have != ((*shape[:axis], blocks, *shape[axis + 1 :]) if self.block else (blocks,)):
            raise ctx.refused(f"a tensor of {list(shape)} has scales or zero points of {list(have)}")
        place = ex.make_floordiv(axes[axis].name, self.block) if self.block else ex.as_index(axes[axis].name)
        return ctx.load(name, *([place if d == axis else a.name for d, a in enumerate(axes)] if self.block else [place]))


def _granularity_of(ctx: Lowering) -> Granularity:
    return Granularity(int(ctx.attr("axis", 1)), int(ctx.attr("block_size", 0)))


def can_be_nonzero(ctx: Lowering, name: str) -> bool:
    """Return True if a zero point may differ from 0."""
    value = ctx.graph.constant(name) if name else np.zeros(())
    return value is None or bool(np.any(value))


def saturate_quotient(quotient: Expr, zero: Expr | None, kind: str, sure: bool = False) -> Expr:
    """Return the code of type ``kind`` of a float32 quotient: round (ties to even), add ``zero``, and saturate. A NaN becomes 0;
    ``sure`` means that the quotient is never NaN."""
    whole: Expr = Op("round", (quotient,))
    if not sure:
        whole = Op("where", (Op("isnan", (quotient,)), Const(0.0), whole))
    if zero is not None:
        whole = Op("add", (whole, Cast("float32", zero)))
    ends = np.iinfo(kind)
    cut = Op("min", (Op("max", (whole, Const(float(ends.min)))), Const(float(ends.max))))
    return Cast(kind, Cast("int32", cut))


@lowering("QuantizeLinear")
def lower_quantize(ctx: Lowering) -> None:
    """Lower QuantizeLinear: ``y = saturate(round(x / scale) + zero)``; the quotient is always in float32."""
    kind, zero = ctx.out().dtype, ctx.node.inputs[2] if ctx.has(2) else ""
    if kind not in CODES:
        raise CannotLower(f"QuantizeLinear to {kind}")
    axes, grain = out_axes(ctx), _granularity_of(ctx)
    x, scale = whole_load(ctx, ctx.input(0), axes), grain.load(ctx, ctx.input(1), axes)
    moved = grain.load(ctx, zero, axes) if zero else None
    quotient = Op("div", (to_float32(ctx, x), to_float32(ctx, scale)))
    ctx.emit(axes, saturate_quotient(quotient, moved if can_be_nonzero(ctx, zero) else None, kind), into=0)


def to_float32(ctx: Lowering, x: Load) -> Expr:
    """Return an operand as float32."""
    return x if ctx.type(x.tensor).dtype == "float32" else Cast("float32", x)


@lowering("DequantizeLinear")
def lower_dequantize(ctx: Lowering) -> None:
    """Lower DequantizeLinear: ``y = (x - zero) * scale``; the difference is in integers, the product in float32."""
    zero = ctx.node.inputs[2] if ctx.has(2) else ""
    if ctx.type(ctx.input(0)).dtype not in (*CODES, "int32"):
        raise CannotLower(f"DequantizeLinear of {ctx.type(ctx.input(0)).dtype}")
    axes, grain = out_axes(ctx), _granularity_of(ctx)
    scale = grain.load(ctx, ctx.input(1), axes)
    moved = grain.load(ctx, zero, axes) if zero else None
    number: Expr = whole_load(ctx, ctx.input(0), axes)
    if moved is not None and can_be_nonzero(ctx, zero):
        number = Op("sub", (Cast("int32", number), Cast("int32", moved)))
    product = Op("mul", (Cast("float32", number), to_float32(ctx, scale)))
    dtype = ctx.out().dtype
    ctx.emit(axes, product if dtype == "float32" else Cast(dtype, product), into=0)


@lowering("DynamicQuantizeLinear")
def lower_dynamic_quantize(ctx: Lowering) -> None:
    """Lower DynamicQuantizeLinear: codes over the range of the tensor and 0. ``scale = (max(0, max x) - min(0, min x)) / 255``,
    and ``zero`` is ``round(0 - min / scale)``, saturated to a byte. A tensor of zeros has scale 0 and codes 0."""
    x = ctx.input(0)
    axes = ctx.axes(x)
    load, zero = whole_load(ctx, x, axes), Const(0.0)
    # An empty tensor has the range of 0 alone.
    ends = {n: _emit_extreme(ctx, x, axes, n) if ctx.type(x).size else "" for n in _EXTREMES}
    low, high = (Op(n, (zero, ctx.load(e))) if e else zero for n, e in ends.items())
    scale = ctx.emit((), Op("div", (Op("sub", (high, low)), Const(255.0))), into=1 if ctx.wants(1) else "scale")
    least = Op("div", (Op("sub", (zero, low)), ctx.load(scale)))
    point = ctx.emit((), saturate_quotient(least, None, "uint8"), into=2 if ctx.wants(2) else "zero")
    if ctx.wants(0):
        quotient = Op("div", (load, ctx.load(scale)))
        ctx.emit(axes, saturate_quotient(quotient, ctx.load(point), "uint8"), into=0)


def _emit_extreme(ctx: Lowering, x: str, axes: Sequence[Axis], combiner: Combiner) -> str:
    """Emit the least or greatest element, first per row, so that several tasks share the work."""
    rows = axes[:-1] if len(axes) > 1 else ()
    inner = axes[len(rows) :]
    name = ctx.emit(rows, whole_load(ctx, x, axes), inner, combiner if inner else None, into=combiner)
    return ctx.emit((), whole_load(ctx, name, rows), rows, combiner, into=f"{combiner}_of_rows") if rows else name
