"""Pad: every mode is a map with a guarded load (constant) or a folded index (other modes)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rammer.frontend.lower.lowering_registry import CannotLower, Lowering, lowering
from rammer.frontend.read.limits import MAX_TABLE, check_positions
from rammer.ir import expr as ex
from rammer.ir.compute import Axis
from rammer.ir.expr import Expr, Load, Number, Op, Table
from rammer.ir.types import is_float


@lowering("Pad")
def lower_pad(ctx: Lowering) -> None:
    """Lower Pad by static amounts; negative amounts crop."""
    mode = str(ctx.attr("mode", "constant"))
    shape = ctx.shape(ctx.input(0))
    begin, end = _pad_amounts(ctx, len(shape))
    axes = ctx.axes(ctx.node.outputs[0])
    if mode == "constant":
        _emit_constant(ctx, axes, begin, end)
        return
    if mode not in ("edge", "reflect", "wrap"):
        raise CannotLower(f"Pad with mode={mode!r}")
    indices = [_fold_index(mode, a, n, b, e) for a, n, b, e in zip(axes, shape, begin, end, strict=True)]
    ctx.emit(axes, ctx.load(ctx.input(0), *indices), into=0)


def _pad_amounts(ctx: Lowering, rank: int) -> tuple[list[int], list[int]]:
    """Return the numbers of elements added before and after each dimension."""
    given = ctx.attr("pads")
    static = ctx.static(1, "pads")
    pads = [int(p) for p in (given if static is None else static.ravel())]
    chosen = ctx.static(3, "axes")
    axes = range(rank) if chosen is None else [int(a) % rank for a in chosen.ravel()]
    begin, end = [0] * rank, [0] * rank
    for i, axis in enumerate(axes):
        begin[axis], end[axis] = pads[i], pads[len(axes) + i]
    return begin, end


def _emit_constant(ctx: Lowering, axes: Sequence[Axis], begin: Sequence[int], end: Sequence[int]) -> None:
    x = ctx.input(0)
    indices = [ex.make_add(a.name, -b) for a, b in zip(axes, begin, strict=True)]
    if all(b <= 0 and e <= 0 for b, e in zip(begin, end, strict=True)):
        ctx.emit(axes, ctx.load(x, *indices), into=0)
        return
    known = ctx.graph.constant(ctx.input(2)) if ctx.has(2) else np.asarray(ctx.attr("value", 0.0))
    if known is not None:
        value = _to_number(known.ravel()[0] if known.size else 0, ctx.out().dtype)
        ctx.emit(axes, ctx.load(x, *indices, fill=value), into=0)
        return
    zero = _to_number(0, ctx.out().dtype)
    inside = _inside_condition(axes, ctx.shape(x), begin)
    value_load = Load(ctx.input(2), tuple(ex.integer(0) for _ in ctx.shape(ctx.input(2))))
    ctx.emit(axes, Op("where", (inside, ctx.load(x, *indices, fill=zero), value_load)), into=0)


def _to_number(value: object, dtype: str) -> Number:
    if dtype == "bool":
        return bool(value)
    array = np.asarray(value)
    return float(array) if is_float(dtype) else int(array)


def _inside_condition(axes: Sequence[Axis], shape: Sequence[int], begin: Sequence[int]) -> Expr:
    """Return True where a position of the output holds an element of the input."""
    result: Expr = ex.Const(True, "bool")
    for a, n, b in zip(axes, shape, begin, strict=True):
        above = Op("le", (ex.integer(b), ex.as_index(a.name)))
        below = Op("lt", (ex.as_index(a.name), ex.integer(b + n)))
        result = Op("and_", (result, Op("and_", (above, below))))
    return result


def _fold_index(mode: str, axis: Axis, extent: int, begin: int, end: int) -> Expr:
    """Return the source index along one dimension."""
    position = ex.make_add(axis.name, -begin)
    if begin <= 0 and end <= 0:
        return position
    if extent == 0:
        raise CannotLower(f"Pad with mode={mode!r} of an empty dimension")
    if mode == "wrap":
        return ex.make_mod(position, extent)
    if mode == "edge":
        return Op("min", (Op("max", (position, ex.integer(0))), ex.integer(extent - 1)))
    # A pad longer than the tensor reflects repeatedly: a triangle wave, which a table represents simply.
    check_positions(axis.extent, "Pad", MAX_TABLE)
    period = max(2 * (extent - 1), 1)
    wave = (np.arange(axis.extent) - begin) % period
    return Table(tuple(int(min(p, period - p)) if extent > 1 else 0 for p in wave), ex.as_index(axis.name))
