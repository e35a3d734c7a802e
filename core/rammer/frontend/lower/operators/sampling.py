"""GridSample and DeformConv: images sampled between pixels at run-time coordinates.

The image coordinates are computed once for all channels, as one tensor per dimension. Pixels outside the image are 0 through the
guard of the load, or their coordinates are moved inside first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from rammer.frontend.lower.interpolation import Element, Neighbours, Real, cubic_weight, interpolate_linear, to_index
from rammer.frontend.lower.lowering_registry import CannotLower, Lowering, lowering
from rammer.frontend.lower.operands import make_op, whole_load
from rammer.frontend.lower.sliding_windows import spatial_names
from rammer.ir import expr as ex
from rammer.ir.compute import Axis
from rammer.ir.expr import Cast, Expr, Op
from rammer.ir.types import is_float

#: Dimension limit of images: more dimensions would need 2 to the power of their number loads.
MOST_DIMENSIONS: Final = 4


@lowering("GridSample")
def grid_sample(ctx: Lowering) -> None:
    """Lower GridSample: ``y[n, c, o..] = x[n, c, grid[n, o.., :]]``; the grid ranges from -1 to 1, its last dimension first."""
    x, grid = ctx.input(0), ctx.input(1)
    (batch, channels, *extents), dtype = ctx.shape(x), ctx.type(x).dtype
    mode = {"bilinear": "linear", "bicubic": "cubic"}.get(ctx.attr("mode", "linear"), ctx.attr("mode", "linear"))
    _check_grid(ctx, batch, extents)
    if mode != "nearest" and not is_float(dtype):
        raise CannotLower(f"GridSample between elements of {dtype}")
    if len(extents) > MOST_DIMENSIONS:
        raise CannotLower(f"GridSample over {len(extents)} dimensions")
    names = spatial_names(len(extents))
    outs = [Axis(n, e) for n, e in zip(names, ctx.shape(grid)[1:-1], strict=True)]
    axes = (Axis("n", batch), Axis("c", channels), *outs)
    real = Real("float64" if "float64" in (dtype, ctx.type(grid).dtype) else "float32")
    places, spots = [_pixel_coordinate(ctx, real, d, n, mode) for d, n in enumerate(extents)], (axes[0], *outs)

    def element(at: Sequence[Expr]) -> Expr:
        load = ctx.load(x, "n", "c", *at, fill=0.0 if is_float(dtype) else 0)
        return load if mode == "nearest" or real.dtype == dtype else Cast(real.dtype, load)

    if mode == "cubic":
        _emit_cubic(ctx, real, element, places, axes)
        return
    point = [ex.as_index(a.name) for a in spots]
    if mode == "nearest":
        pixels = [ctx.emit(spots, to_index(p), dtype="int32", into=f"pixel{d}") for d, p in enumerate(places)]
        ctx.emit(axes, element([ctx.load(p, *point) for p in pixels]), into=0)
        return
    near = [Neighbours.of(ctx, real, p, spots, str(d)) for d, p in enumerate(places)]
    value = interpolate_linear(ctx, real, element, near, point)
    ctx.emit(axes, value if real.dtype == dtype else Cast(dtype, value), into=0)


def _check_grid(ctx: Lowering, batch: int, extents: Sequence[int]) -> None:
    given = ctx.shape(ctx.input(1))
    if len(given) != len(extents) + 2 or given[0] != batch or given[-1] != len(extents):
        raise ctx.refused(f"a grid of {list(given)} does not match an input of {list(ctx.shape(ctx.input(0)))}")


def _pixel_coordinate(ctx: Lowering, real: Real, dim: int, extent: int, mode: str) -> Expr:
    """Return coordinates in pixels along ``dim``, padded unless the mode is cubic, whose pixels are padded one by one."""
    grid, aligned = ctx.input(1), bool(ctx.attr("align_corners", 0))
    rank = ctx.shape(grid)[-1]
    given: Expr = ctx.load(grid, "n", *spatial_names(rank), rank - 1 - dim)
    given = given if ctx.type(grid).dtype == real.dtype else Cast(real.dtype, given)
    shifted = real.of("add", given, 1)
    if aligned:
        at = real.of("mul", real.of("div", shifted, 2), extent - 1)
    else:
        at = real.of("div", real.of("sub", real.of("mul", shifted, extent), 1), 2)
    if mode == "nearest":
        at = real.of("round", at)
    if mode != "cubic":
        return _pad_coordinate(ctx, real, at, extent)
    # Unless reflected, pixels more than four outside the image equal those four outside.
    return at if ctx.attr("padding_mode", "zeros") == "reflection" else real.clamped(at, -4, extent + 3)


def _pad_coordinate(ctx: Lowering, real: Real, at: Expr, extent: int) -> Expr:
    """Return a coordinate padded by ``padding_mode``; with zeros it stays outside the image, but near."""
    mode, aligned = ctx.attr("padding_mode", "zeros"), bool(ctx.attr("align_corners", 0))
    if mode == "zeros":
        return real.clamped(at, -2, extent + 1)
    if mode == "reflection":
        at = real.reflected(at, 0, extent - 1) if aligned else real.reflected(at, -0.5, extent - 0.5)
    return real.clamped(at, 0, extent - 1)


def _emit_cubic(ctx: Lowering, real: Real, element: Element, places: Sequence[Expr], axes: Sequence[Axis]) -> None:
    """Emit the cubic mode: one reduction over four pixels along each dimension."""
    dtype, extents = ctx.out().dtype, ctx.shape(ctx.input(0))[2:]
    point = [a.name for a in (axes[0], *axes[2:])]
    taps = [Axis(f"k{d}", 4) for d in range(len(places))]
    at, value = list[Expr](), real.number(1)
    for d, (place, tap) in enumerate(zip(places, taps, strict=True)):
        spots = (axes[0], *axes[2:])
        where, tap_axes = ctx.load(ctx.emit(spots, place, dtype=real.dtype, into=f"at{d}"), *point), (*spots, tap)
        step = real.of("sub", Cast(real.dtype, ex.as_index(tap.name)), 1)
        below = real.of("floor", where)
        pixel = real.of("round", _pad_coordinate(ctx, real, real.of("add", below, step), extents[d]))
        picked = ctx.emit(tap_axes, to_index(pixel), dtype="int32", into=f"pixel{d}")
        distance = real.of("abs", real.of("sub", real.of("sub", where, below), step))
        weight = ctx.load(ctx.emit(tap_axes, cubic_weight(real, distance), dtype=real.dtype, into=f"weight{d}"), *point, tap.name)
        at.append(ctx.load(picked, *point, tap.name))
        value = weight if d == 0 else Op("mul", (value, weight))
    body = Op("mul", (element(at), value))
    if real.dtype == dtype:
        ctx.emit(axes, body, taps, "sum", into=0)
        return
    total = ctx.emit(axes, body, taps, "sum", dtype=real.dtype, into="total")
    ctx.emit(axes, Cast(dtype, whole_load(ctx, total, axes)), into=0)


@lowering("DeformConv")
def deform_conv(ctx: Lowering) -> None:
    """Lower DeformConv: a convolution with taps moved by ``offset``, sampled between pixels and weighted by ``mask``. The samples
    form one tensor, which is then contracted with the weights."""
    x, w = ctx.input(0), ctx.input(1)
    (batch, channels, *extents), (features, per_group, *kernel) = ctx.shape(x), ctx.shape(w)
    outs = ctx.out().shape[2:]
    group, offsets = int(ctx.attr("group", 1)), int(ctx.attr("offset_group", 1))
    taps, rank = math.prod(kernel), len(extents)
    wanted = (batch, offsets * taps * rank, *outs)
    if ctx.shape(ctx.input(2)) != wanted or channels % offsets or per_group * group != channels or features % group:
        raise ctx.refused(f"offsets of {list(ctx.shape(ctx.input(2)))} do not match an image of {list(ctx.shape(x))}")
    if ctx.has(4) and ctx.shape(ctx.input(4)) != (batch, offsets * taps, *outs):
        raise ctx.refused(f"a mask of {list(ctx.shape(ctx.input(4)))} does not match offsets of {list(wanted)}")
    if ctx.has(3) and ctx.shape(ctx.input(3)) != (features,):
        raise ctx.refused(f"a bias of {list(ctx.shape(ctx.input(3)))} does not match {features} features")
    names = spatial_names(rank)
    spots = (Axis("n", batch), Axis("g", offsets), *[Axis(f"k{n}", k) for n, k in zip(names, kernel, strict=True)])
    axes = (*spots, *[Axis(n, e) for n, e in zip(names, outs, strict=True)])
    real = Real("float64" if ctx.out().dtype == "float64" else "float32")
    places = [Neighbours.of(ctx, real, _tap_coordinate(ctx, real, d, axes, rank), axes, str(d)) for d in range(rank)]
    read = _emit_read(ctx, real, places, axes, channels // offsets)
    _emit_product(ctx, read, axes)


def _tap_index(axes: Sequence[Axis], rank: int) -> Expr:
    """Return the flat index of the tap at a point of ``axes`` (n, g, k.., o..), counted through offset groups and kernel."""
    flat: Expr = ex.as_index("g")
    for axis in axes[2 : 2 + rank]:
        flat = ex.make_add(ex.make_mul(flat, axis.extent), axis.name)
    return flat


def _tap_coordinate(ctx: Lowering, real: Real, dim: int, axes: Sequence[Axis], rank: int) -> Expr:
    """Return the image coordinate of a tap along ``dim``, moved near the image if it is far outside."""
    kernel, out = axes[2 + dim], axes[2 + rank + dim]
    stride, dilation, pad = (
        int((ctx.attr(name) or (default,) * 2 * rank)[dim]) for name, default in (("strides", 1), ("dilations", 1), ("pads", 0))
    )
    given = ctx.load(
        ctx.input(2), "n", ex.make_add(ex.make_mul(_tap_index(axes, rank), rank), dim), *[a.name for a in axes[2 + rank :]]
    )
    moved: Expr = given if ctx.type(ctx.input(2)).dtype == real.dtype else Cast(real.dtype, given)
    still = ex.make_add(ex.make_add(ex.make_mul(out.name, stride), ex.make_mul(kernel.name, dilation)), -pad)
    at = real.of("add", Cast(real.dtype, still), moved)
    return real.clamped(at, -2, ctx.shape(ctx.input(0))[2 + dim] + 1)


def _emit_read(ctx: Lowering, real: Real, places: Sequence[Neighbours], axes: Sequence[Axis], share: int) -> str:
    """Return the samples of the taps per channel, ``[n, c, k.., o..]``; ``share`` channels have the same offsets."""
    x, rank = ctx.input(0), len(places)
    wide = (axes[0], Axis("c", ctx.shape(x)[1]), *axes[2:])
    shared = {"g": ex.make_floordiv("c", share)}
    point = [shared.get(a.name, ex.as_index(a.name)) for a in axes]

    def element(indices: Sequence[Expr]) -> Expr:
        load = ctx.load(x, "n", "c", *indices, fill=0.0)
        return load if ctx.type(x).dtype == real.dtype else Cast(real.dtype, load)

    value = interpolate_linear(ctx, real, element, places, point)
    if ctx.has(4):
        mask: Expr = ctx.load(
            ctx.input(4), "n", ex.substitute(_tap_index(axes, rank), shared), *[a.name for a in axes[2 + rank :]]
        )
        value = make_op("mul", value, mask if ctx.type(ctx.input(4)).dtype == real.dtype else Cast(real.dtype, mask))
    return ctx.emit(wide, value, dtype=real.dtype, into="read")


def _emit_product(ctx: Lowering, read: str, axes: Sequence[Axis]) -> None:
    """Emit the contraction of the samples with the weights, and the bias."""
    features, per_group, *kernel = ctx.shape(ctx.input(1))
    group, rank, dtype = int(ctx.attr("group", 1)), len(kernel), ctx.out().dtype
    outs = (Axis("n", axes[0].extent), Axis("m", features), *axes[2 + rank :])
    channel: Expr = ex.as_index("c")
    if group > 1:
        channel = ex.make_add(ex.make_mul(ex.make_floordiv("m", features // group), per_group), channel)
    taps = [a.name for a in axes[2 : 2 + rank]]
    weight: Expr = ctx.load(ctx.input(1), "m", "c", *taps)
    working = ctx.type(read).dtype
    data = ctx.load(read, "n", channel, *taps, *[a.name for a in outs[2:]])
    body = make_op("mul", data, weight if dtype == working else Cast(working, weight))
    plain = not ctx.has(3) and working == dtype
    total = ctx.emit(outs, body, (Axis("c", per_group), *axes[2 : 2 + rank]), "sum", dtype=working, into=0 if plain else "conv")
    if plain:
        return
    result: Expr = whole_load(ctx, total, outs)
    if ctx.has(3):
        bias = ctx.load(ctx.input(3), "m")
        result = make_op("add", result, bias if dtype == working else Cast(working, bias))
    ctx.emit(outs, result if working == dtype else Cast(dtype, result), into=0)
