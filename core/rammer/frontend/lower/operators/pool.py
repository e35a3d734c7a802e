"""Pooling over windows and over whole images."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from rammer.frontend.lower.lowering_registry import Lowering, lowering
from rammer.frontend.lower.operands import emit_narrowed, widen_float16
from rammer.frontend.lower.sliding_windows import SlidingWindow, spatial_names, window_of
from rammer.frontend.read.limits import MAX_TABLE, check_positions
from rammer.ir import expr as ex
from rammer.ir.compute import Axis
from rammer.ir.expr import Cast, Const, Expr, Load, Op, Table
from rammer.ir.types import is_float


@lowering("MaxPool")
def max_pool(ctx: Lowering) -> None:
    """Lower MaxPool; padding never wins. Indices are those of the first maximum in the whole tensor."""
    x = ctx.input(0)
    dtype = ctx.type(x).dtype
    lowest: ex.Number = -np.inf if is_float(dtype) else int(np.iinfo(dtype).min)
    window = _pool_window(ctx)
    reduce, axes = window.taps, _output_axes(ctx, window)
    value = window.load(x, ("n", "c"), lowest)
    largest = ctx.emit(axes, value, reduce, "max" if reduce else None, into=0 if ctx.wants(0) else "t")
    if ctx.wants(1):
        _emit_indices(ctx, window, value, ctx.load(largest, *[a.name for a in axes]))


def _emit_indices(ctx: Lowering, window: SlidingWindow, value: Load, largest: Load) -> None:
    """Emit output 1: "the flatten 1-D indices of selected values". The first maximum in row-major order is selected, independent
    of ``storage_order``: that is "used only to convert an n-tuple index value into a single integer value"."""
    axes = _output_axes(ctx, window)
    places = list(zip(window.indices, window.source, strict=True))
    columns = bool(ctx.attr("storage_order", 0)) and len(places) > 1 and 0 not in window.source
    searched = columns and bool(window.taps)
    place = _flat_index(reversed(places) if columns and not searched else places)
    plane = ex.make_add(ex.make_mul("n", axes[1].extent), "c")
    place = ex.make_add(ex.make_mul(plane, int(np.prod(window.source))), place)
    if not window.taps:
        ctx.emit(axes, place, into=1)
        return
    chosen: Expr = Op("eq", (value, largest))
    if is_float(ctx.type(value.tensor).dtype):
        # A NaN is the maximum but equals nothing.
        chosen = Op("or_", (chosen, Op("isnan", (value,))))
    for index, extent in places if window.padded or ctx.ranged else ():
        inside = Op("and_", (Op("le", (ex.integer(0), index)), Op("lt", (index, ex.integer(extent)))))
        chosen = Op("and_", (chosen, inside))
    candidate = Op("where", (chosen, place, ex.integer(ctx.type(value.tensor).size)))
    if not searched:
        ctx.emit(axes, candidate, window.taps, "min", into=1, dtype="int64")
        return
    first = ctx.emit(axes, candidate, window.taps, "min", dtype="int64", into="first")
    ctx.emit(axes, _by_columns(ctx.load(first, *[a.name for a in axes]), window.source), into=1)


def _flat_index(places: Iterable[tuple[Expr, int]]) -> Expr:
    """Return the flat index of an element within its plane; the last of ``places`` varies fastest."""
    place: Expr = ex.integer(0)
    for index, extent in places:
        place = ex.make_add(ex.make_mul(place, extent), index)
    return place


def _by_columns(place: Expr, source: Sequence[int]) -> Expr:
    """Convert a row-major flat index to column-major order within the same plane of extents ``source``."""
    plane = int(np.prod(source))
    places, inner = list[tuple[Expr, int]](), plane
    for extent in source:
        inner //= extent
        places.append((ex.make_mod(ex.make_floordiv(place, inner), extent), extent))
    return ex.make_add(ex.make_mul(ex.make_floordiv(place, plane), plane), _flat_index(reversed(places)))


@lowering("AveragePool")
def average_pool(ctx: Lowering) -> None:
    """Lower AveragePool: the sum of each window divided by the number of counted elements."""
    window = _pool_window(ctx)
    total = _window_sum(ctx, window, widen_float16(ctx, window.load(ctx.input(0), ("n", "c"), 0.0)))
    axes = _output_axes(ctx, window)
    value = ctx.load(total, *[a.name for a in axes])
    count = (_ranged_counts if ctx.ranged else _window_counts)(ctx, window, ctx.type(total).dtype)
    emit_narrowed(ctx, axes, Op("div", (value, count)))


@lowering("LpPool")
def lp_pool(ctx: Lowering) -> None:
    """Lower LpPool: ``(sum |x|^p)^(1/p)`` of each window; padding counts as zero."""
    window = _pool_window(ctx)
    power = int(ctx.attr("p", 2))
    total = _window_sum(ctx, window, raise_to_power(widen_float16(ctx, window.load(ctx.input(0), ("n", "c"), 0.0)), power))
    axes = _output_axes(ctx, window)
    emit_narrowed(ctx, axes, take_root(ctx.load(total, *[a.name for a in axes]), power))


def raise_to_power(x: Expr, power: int) -> Expr:
    """Return ``|x|^power``; squares are written as products, which are exact and cheap."""
    if power == 2:
        return Op("mul", (x, x))
    magnitude = Op("abs", (x,))
    return magnitude if power == 1 else Op("pow", (magnitude, Const(power)))


def take_root(x: Expr, power: int) -> Expr:
    """Return the ``power``-th root of a non-negative ``x``."""
    if power == 2:
        return Op("sqrt", (x,))
    return x if power == 1 else Op("pow", (x, Const(1.0 / power)))


def _pool_window(ctx: Lowering) -> SlidingWindow:
    kernel = [int(k) for k in ctx.attr("kernel_shape")]
    return window_of(ctx, ctx.shape(ctx.input(0))[2:], kernel)


def _output_axes(ctx: Lowering, window: SlidingWindow) -> tuple[Axis, ...]:
    batch, channels, *_ = ctx.shape(ctx.input(0))
    return (Axis("n", batch), Axis("c", channels), *window.axes)


def _window_sum(ctx: Lowering, window: SlidingWindow, body: Expr) -> str:
    return ctx.emit(_output_axes(ctx, window), body, window.taps, "sum" if window.taps else None, into="sum")


def _ranged_counts(ctx: Lowering, window: SlidingWindow, dtype: str) -> Expr:
    """Return the number of counted elements in each window by arithmetic of one form for all extents. A window may be longer than
    its extent at some lengths of a range."""
    include_pad = bool(ctx.attr("count_include_pad", 0))
    is_floor = not ctx.attr("ceil_mode", 0) and not str(ctx.attr("auto_pad", "")).startswith("SAME")
    result: Expr = ex.integer(1)
    for d, name in enumerate(window.names):
        kernel, step, begin = ex.integer(window.kernel[d]), window.dilations[d], window.begin[d]
        if is_floor and (include_pad or max(begin, window.end[d]) <= 0):
            result = Op("mul", (result, kernel))  # at every length, all taps of all windows count
            continue
        start, extent = ex.make_mul(name, window.strides[d]), window.source[d] + (window.end[d] if include_pad else 0)
        taps_until = [
            Op("max", (ex.integer(0), Op("min", (kernel, ex.make_floordiv(Op("sub", (ex.integer(n), start)), step)))))
            for n in (begin + extent + step - 1, begin + step - 1)
        ]
        result = Op("mul", (result, taps_until[0] if include_pad else Op("sub", tuple(taps_until))))
    return Cast(dtype, result)


def _window_counts(ctx: Lowering, window: SlidingWindow, dtype: str) -> Expr:
    """Return the number of counted elements in each window, as a product of one factor per dimension."""
    constant = 1
    result: Expr | None = None
    for name, per_position in zip(window.names, _extents_counted(window, bool(ctx.attr("count_include_pad", 0))), strict=True):
        counts = np.unique(per_position)
        if len(counts) == 1:
            constant *= int(counts[0])
            continue
        check_positions(len(per_position), "pooling", MAX_TABLE)
        factor = Table(tuple(float(c) for c in per_position), ex.as_index(name), dtype)
        result = factor if result is None else Op("mul", (result, factor))
    if result is None:
        return Const(constant, dtype)
    return result if constant == 1 else Op("mul", (result, Const(constant, dtype)))


def _extents_counted(window: SlidingWindow, include_pad: bool) -> list[np.ndarray[tuple[int], np.dtype[np.int64]]]:
    result = []
    for d, extent in enumerate(window.source):
        check_positions(window.out[d], "pooling")
        low = -window.begin[d] if include_pad else 0
        high = extent + window.end[d] if include_pad else extent
        starts = np.arange(window.out[d]) * window.strides[d] - window.begin[d]
        step, last = window.dilations[d], window.kernel[d] - 1
        # Taps k with low <= start + k * step < high, counted in closed form: a kernel may be huge.
        result.append(np.maximum(0, np.minimum(last, (high - 1 - starts) // step) - np.maximum(0, -((starts - low) // step)) + 1))
    return result


@lowering("GlobalMaxPool", "GlobalAveragePool", "GlobalLpPool")
def global_pool(ctx: Lowering) -> None:
    """Lower the pools over all spatial dimensions, which keep extent 1."""
    x = ctx.input(0)
    batch, channels, *extents = ctx.shape(x)
    names = spatial_names(len(extents))
    axes = (Axis("n", batch), Axis("c", channels), *[Axis(n, 1) for n in names])
    reduce = tuple(Axis(f"k{n}", e) for n, e in zip(names, extents, strict=True))
    value = ctx.load(x, "n", "c", *[r.name for r in reduce])
    if ctx.node.op == "GlobalMaxPool":
        ctx.emit(axes, value, reduce, "max", into=0)
        return
    power = int(ctx.attr("p", 2))
    norm = ctx.node.op == "GlobalLpPool"
    wide = widen_float16(ctx, value)
    total = ctx.emit(axes, raise_to_power(wide, power) if norm else wide, reduce, "sum", into="sum")
    element = ctx.load(total, *[a.name for a in axes])
    emit_narrowed(ctx, axes, take_root(element, power) if norm else Op("div", (element, Const(int(np.prod(extents))))))
