"""Resize and Upsample, DepthToSpace and SpaceToDepth.

Coordinates depend only on shapes and attributes, so they become constant tables. A nearest resize is a map with table indices, a
linear resize a map over the corners. A cubic or antialiased resize is a short reduction per dimension."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np

from rammer.errors import BadInput
from rammer.frontend.lower.lowering_registry import CannotLower, Lowering, lowering
from rammer.frontend.lower.resize_coordinates import Kernel, Resampling
from rammer.frontend.read.limits import MAX_TABLE, check_positions
from rammer.ir import expr as ex
from rammer.ir.compute import Axis
from rammer.ir.expr import Cast, Const, Expr, Op, Table, integer
from rammer.ir.types import is_float

#: Dimensions that one map interpolates between corners; each other dimension is a separate pass.
MOST_CORNERS: Final = 3
#: Coordinate transformations that are a quotient of integers of the extents.
EXACT: Final = ("half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric")
#: Index and weight of the lower and the upper neighbour.
Sides: TypeAlias = "tuple[tuple[Expr, Expr], ...]"


@lowering("Resize", "Upsample")
def lower_resize(ctx: Lowering) -> None:
    """Lower Resize and Upsample in all modes of opsets 7 to 19; dimensions that keep their extent are copied."""
    modern = ctx.node.op == "Resize" and (ctx.node.version or ctx.graph.opset) >= 11
    transformation = str(ctx.attr("coordinate_transformation_mode", "half_pixel")) if modern else "asymmetric"
    mode = str(ctx.attr("mode", "nearest"))
    crop = transformation == "tf_crop_and_resize"
    dims = {d: r for d, r in enumerate(_make_resamplings(ctx, modern)) if crop or r.scale != 1 or r.out != r.source}
    places = {d: r.coordinates(transformation, nearest=mode == "nearest") for d, r in dims.items()}
    guard = _inside_source(dims, places) if crop else None
    if mode == "nearest":
        rounding = str(ctx.attr("nearest_mode", "round_prefer_floor")) if modern else "floor"
        _emit_nearest(ctx, {d: r.nearest(places[d], rounding) for d, r in dims.items()}, guard)
        return
    if mode not in ("linear", "bilinear", "cubic"):
        raise CannotLower(f"{ctx.node.op} with mode={mode!r}")
    kernel = Kernel(
        "cubic" if mode == "cubic" else "linear", float(ctx.attr("cubic_coeff_a", -0.75)), bool(ctx.attr("antialias", 0))
    )
    exclude = bool(ctx.attr("exclude_outside", 0))
    sized = modern and ctx.has(3) and ctx.attr("keep_aspect_ratio_policy", "stretch") == "stretch"
    if ctx.any_ratio and sized and kernel == Kernel("linear", kernel.a) and not exclude and transformation in EXACT:
        _emit_at_lengths(ctx, transformation)
        return
    taps = {d: r.taps(places[d], kernel, exclude) for d, r in dims.items()}
    _emit_weighted(ctx, taps, guard)


def _make_resamplings(ctx: Lowering, modern: bool) -> list[Resampling]:
    source, out = ctx.shape(ctx.input(0)), ctx.out().shape
    rank = len(source)
    axes = [int(a) % rank for a in ctx.attr("axes") or range(rank)]
    scales = _resize_scales(ctx, modern, source, axes)
    starts, ends = [0.0] * rank, [1.0] * rank
    crops = ctx.attr("coordinate_transformation_mode", "half_pixel") == "tf_crop_and_resize"
    roi = ctx.static(1, "roi") if modern and crops else None
    if roi is not None and roi.size:
        if roi.size != 2 * len(axes):
            raise BadInput(
                f"{ctx.node.op} of {len(axes)} axes has a roi of {roi.size} elements",
                f"node {ctx.node.name} ({ctx.node.op})",
                "give all starts, then all ends",
            )
        for i, axis in enumerate(axes):
            starts[axis], ends[axis] = float(roi[i]), float(roi[len(axes) + i])
    return [Resampling(source[d], out[d], scales[d], (starts[d], ends[d])) for d in range(rank)]


def _resize_scales(ctx: Lowering, modern: bool, source: Sequence[int], axes: Sequence[int]) -> list[float]:
    """Return the ratio of output to input for every dimension, from ``scales`` or ``sizes``."""
    given: Any = ctx.attr("scales")
    if given is None:
        given = ctx.static(2 if modern else 1, "scales")
    scales = [1.0] * len(source)
    if given is not None and len(given):
        for axis, scale in zip(axes, given, strict=True):
            scales[axis] = float(scale)
        return scales
    sizes = ctx.static(3, "sizes") if modern else None
    if sizes is None:
        raise CannotLower(f"{ctx.node.op} without scales or sizes")
    if any(n and not source[axis] for axis, n in zip(axes, sizes, strict=True)) and 0 not in ctx.out().shape:
        raise BadInput(
            f"{ctx.node.op} of a tensor of {list(source)}, which has no elements, to {[int(n) for n in sizes]}",
            f"node {ctx.node.name} ({ctx.node.op})",
            "give a larger input with --shape",
        )
    wanted = [int(n) / max(source[axis], 1) for axis, n in zip(axes, sizes, strict=True)]
    policy = ctx.attr("keep_aspect_ratio_policy", "stretch")
    if policy != "stretch":
        wanted = [min(wanted) if policy == "not_larger" else max(wanted)] * len(wanted)
    for axis, scale in zip(axes, wanted, strict=True):
        scales[axis] = scale
    return scales


def _inside_source(dims: dict[int, Resampling], places: dict[int, np.ndarray]) -> Expr | None:
    """Return True where an output position is within the source (None if all are)."""
    result: Expr | None = None
    for d, r in dims.items():
        inside = (places[d] >= 0) & (places[d] <= r.source - 1)
        if inside.all():
            continue
        test = Table(tuple(bool(v) for v in inside), ex.as_index(f"i{d}"), "bool")
        result = test if result is None else Op("and_", (result, test))
    return result


def _select_inside(ctx: Lowering, value: Expr, guard: Expr | None) -> Expr:
    if guard is None:
        return value
    outside = Const(float(ctx.attr("extrapolation_value", 0.0)), ctx.out().dtype)
    return Op("where", (guard, value, outside))


def _emit_nearest(ctx: Lowering, index: dict[int, np.ndarray], guard: Expr | None) -> None:
    axes = ctx.axes(ctx.node.outputs[0])
    indices = [_source_index(a.name, index[d]) if d in index else ex.as_index(a.name) for d, a in enumerate(axes)]
    ctx.emit(axes, _select_inside(ctx, ctx.load(ctx.input(0), *indices), guard), into=0)


def _source_index(axis: str, values: np.ndarray) -> Expr:
    """Return ``values[axis]`` as a quotient or a multiple of the axis if possible, else as a table."""
    n = np.arange(len(values))
    repeat = int(np.searchsorted(values, 1)) if len(values) else 1
    if repeat and np.array_equal(values, n // max(repeat, 1)):
        return ex.make_floordiv(axis, repeat)
    step = int(values[1] - values[0]) if len(values) > 1 else 0
    if step > 0 and np.array_equal(values, values[0] + n * step):
        return ex.make_add(ex.make_mul(axis, step), int(values[0]))
    check_positions(len(values), "Resize", MAX_TABLE)
    return Table(tuple(int(v) for v in values), ex.as_index(axis))


def _emit_weighted(ctx: Lowering, taps: dict[int, tuple[np.ndarray, np.ndarray]], guard: Expr | None) -> None:
    """Emit linear interpolation as one map over the corners, and wider kernels as one reduction per dimension."""
    dtype = ctx.out().dtype
    # float16 is only a storage format: weights and values between two dimensions are in float32.
    working = "float32" if dtype == "float16" else dtype if is_float(dtype) else "float64"
    for index, _ in taps.values():
        check_positions(index.size, "Resize", MAX_TABLE)
    # The corners of three dimensions are 8 loads; more dimensions would need 2 to the power of their number.
    corners = [d for d, (index, _) in taps.items() if index.shape[1] == 2][:MOST_CORNERS]
    source = ctx.input(0)
    for d, (index, weight) in taps.items():
        if d not in corners:
            source = _emit_pass(ctx, source, d, index, weight, working)
    axes = ctx.axes(ctx.node.outputs[0])
    found = {d: _table_sides(axes[d].name, *taps[d], working) for d in corners}
    value = _Corners(ctx, source, axes, found, working).over(corners, {})
    ctx.emit(axes, _select_inside(ctx, _cast_if_needed(value, working, dtype), guard), into=0)


def _table_sides(axis: str, index: np.ndarray, weight: np.ndarray, dtype: str) -> Sides:
    """Return the indices and weights of both neighbours as tables."""
    return tuple(
        (_source_index(axis, index[:, side]), Table(tuple(float(v) for v in weight[:, side]), ex.as_index(axis), dtype))
        for side in (0, 1)
    )


def _emit_at_lengths(ctx: Lowering, transformation: str) -> None:
    """Emit linear interpolation by arithmetic of one form for all extents, whose ratio may be any at each length of a range."""
    dtype, axes, source = ctx.out().dtype, ctx.axes(ctx.node.outputs[0]), ctx.shape(ctx.input(0))
    working = dtype if is_float(dtype) and dtype != "float16" else "float32"
    spatial = [d for d, r in enumerate(_make_resamplings(ctx, True)) if d > 1 or r.out != r.source]
    sides = {d: _length_sides(axes[d].name, source[d], axes[d].extent, transformation, working) for d in spatial}
    value = _Corners(ctx, ctx.input(0), axes, sides, working).over(spatial, {})
    ctx.emit(axes, _cast_if_needed(value, working, dtype), into=0)


def _length_sides(axis: str, source: int, out: int, transformation: str, dtype: str) -> Sides:
    """Return the indices and weights of both neighbours; the coordinate is ``above / below``."""
    at = ex.as_index(axis)
    if transformation == "align_corners":
        above, below = Op("mul", (at, integer(source - 1))), Op("max", (integer(out - 1), integer(1)))
    elif transformation == "asymmetric":
        above, below = Op("mul", (at, integer(source))), Op("add", (integer(out), integer(0)))
    else:
        middle = Op("mul", (ex.make_add(ex.make_mul(at, 2), 1), integer(source)))
        above, below = Op("sub", (middle, integer(out))), Op("mul", (integer(out), integer(2)))
    next_one = Op("floordiv", (Op("add", (above, below)), below))  # from positive numbers: a coordinate is above -1
    places = (Op("sub", (next_one, integer(1))), next_one)
    rest = Op("sub", (above, Op("mul", (places[0], below))))
    upper = Op("div", (Cast(dtype, rest), Cast(dtype, below)))
    weights = (Op("sub", (Const(1.0, dtype), upper)), upper)
    inside = (Op("max", (integer(0), Op("min", (p, integer(source - 1))))) for p in places)
    return tuple(zip(inside, weights, strict=True))


def _cast_if_needed(value: Expr, have: str, want: str) -> Expr:
    return value if have == want else Cast(want, value)


@dataclass(frozen=True)
class _Corners:
    """Linear interpolation of ``source`` between two neighbours along some dimensions, computed as ``dtype``. ``sides`` maps each
    dimension to the index and the weight of both neighbours."""

    ctx: Lowering
    source: str
    axes: Sequence[Axis]
    sides: Mapping[int, Sides]
    dtype: str

    def over(self, dims: Sequence[int], chosen: Mapping[int, Expr]) -> Expr:
        """Return the nested interpolation over ``dims``; ``chosen`` holds the indices already fixed."""
        if not dims:
            load = self.ctx.load(self.source, *[chosen.get(d, ex.as_index(a.name)) for d, a in enumerate(self.axes)])
            return _cast_if_needed(load, self.ctx.type(self.source).dtype, self.dtype)
        first, rest = dims[0], dims[1:]
        terms = [Op("mul", (self.over(rest, {**chosen, first: p}), factor)) for p, factor in self.sides[first]]
        return Op("add", (terms[0], terms[1]))


def _emit_pass(ctx: Lowering, source: str, dim: int, index: np.ndarray, weight: np.ndarray, dtype: str) -> str:
    """Resample one dimension: ``sum[k] source[.., index[o, k], ..] * weight[o, k]``."""
    out, count = index.shape
    axes = list(ctx.axes(source))
    axes[dim] = Axis(axes[dim].name, out)
    flat = ex.make_add(ex.make_mul(axes[dim].name, count), "k")
    indices: list[Expr] = [ex.as_index(a.name) for a in axes]
    indices[dim] = Table(tuple(int(v) for v in index.ravel()), flat)
    factor = Table(tuple(float(v) for v in weight.ravel()), flat, dtype)
    value = _cast_if_needed(ctx.load(source, *indices), ctx.type(source).dtype, dtype)
    return ctx.emit(axes, Op("mul", (value, factor)), (Axis("k", count),), "sum", into=f"pass{dim}")


@lowering("DepthToSpace")
def depth_to_space(ctx: Lowering) -> None:
    """Lower DepthToSpace: blocks of channels become blocks of pixels (modes DCR and CRD)."""
    block = int(ctx.attr("blocksize"))
    batch, channels, height, width = ctx.out().shape
    axes = (Axis("n", batch), Axis("c", channels), Axis("h", height), Axis("w", width))
    cell = ex.make_add(ex.make_mul(ex.make_mod("h", block), block), ex.make_mod("w", block))
    column_first = ctx.attr("mode", "DCR") == "CRD"
    depth = ex.make_add(ex.make_mul("c", block * block), cell) if column_first else ex.make_add(ex.make_mul(cell, channels), "c")
    ctx.emit(axes, ctx.load(ctx.input(0), "n", depth, ex.make_floordiv("h", block), ex.make_floordiv("w", block)), into=0)


@lowering("SpaceToDepth")
def space_to_depth(ctx: Lowering) -> None:
    """Lower SpaceToDepth: blocks of pixels become blocks of channels."""
    block = int(ctx.attr("blocksize"))
    channels = ctx.shape(ctx.input(0))[1]
    batch, depth, height, width = ctx.out().shape
    axes = (Axis("n", batch), Axis("c", depth), Axis("h", height), Axis("w", width))
    cell, channel = ex.make_floordiv("c", channels), ex.make_mod("c", channels)
    if ctx.attr("mode", "DCR") == "CRD":
        cell, channel = ex.make_mod("c", block * block), ex.make_floordiv("c", block * block)
    row = ex.make_add(ex.make_mul("h", block), ex.make_floordiv(cell, block))
    column = ex.make_add(ex.make_mul("w", block), ex.make_mod(cell, block))
    ctx.emit(axes, ctx.load(ctx.input(0), "n", channel, row, column), into=0)
