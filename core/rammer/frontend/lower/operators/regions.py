"""RoiAlign: boxes of images, sampled between pixels."""

from __future__ import annotations

from rammer.frontend.lower.interpolation import Neighbours, Real
from rammer.frontend.lower.lowering_registry import CannotLower, Lowering, lowering
from rammer.frontend.lower.operands import whole_load
from rammer.ir import expr as ex
from rammer.ir.compute import Axis
from rammer.ir.expr import Cast, Expr

#: Most samples of a box within a pixel of another sample: their distance is at least half a pixel, or one pixel.
_NEAR = 7


@lowering("RoiAlign")
def roi_align(ctx: Lowering) -> None:
    """Lower RoiAlign: means (or largest terms) over samples in the bins of boxes.

    The number of samples per bin is ``sampling_ratio`` or decided at run time. In the latter case means are two products: the
    weights of a bin's samples on each row and on each column."""
    boxes = _Boxes(ctx)
    if ctx.shape(ctx.input(1)) != (boxes.count, 4) or ctx.shape(ctx.input(2)) != (boxes.count,):
        raise ctx.refused(f"boxes of {list(ctx.shape(ctx.input(1)))} with {list(ctx.shape(ctx.input(2)))} images")
    if 0 in ctx.shape(ctx.input(0)):
        raise CannotLower("RoiAlign of an empty tensor")
    mode = ctx.attr("mode", "avg")
    if boxes.ratio:
        _emit_sampled(boxes, mode)
    elif mode == "max":
        raise CannotLower("RoiAlign with mode='max' and a number of samples that depends on run-time data")
    else:
        _emit_averaged(boxes)


class _Boxes:
    """The boxes of a node, by dimension 0 (height) and 1 (width)."""

    def __init__(self, ctx: Lowering) -> None:
        self.ctx = ctx
        self.real = Real("float64" if ctx.out().dtype == "float64" else "float32")
        self.count, self.channels = ctx.out().shape[0], ctx.out().shape[1]
        self.extents = ctx.shape(ctx.input(0))[2:]
        self.bins = ctx.out().shape[2:]
        self.ratio = int(ctx.attr("sampling_ratio", 0))
        modern = ctx.node.version >= 16
        self.shifted = modern and ctx.attr("coordinate_transformation_mode", "half_pixel") == "half_pixel"

    def edge(self, dim: int, end: bool) -> Expr:
        """Return a box's border in pixels."""
        load = self.ctx.load(self.ctx.input(1), "r", (3 if end else 1) - dim)
        given: Expr = load if self.ctx.type(load.tensor).dtype == self.real.dtype else Cast(self.real.dtype, load)
        scaled = self.real.of("mul", given, float(self.ctx.attr("spatial_scale", 1.0)))
        return self.real.of("sub", scaled, 0.5) if self.shifted else scaled

    def size(self, dim: int) -> Expr:
        """Return the size of a bin in pixels."""
        whole = self.real.of("sub", self.edge(dim, True), self.edge(dim, False))
        whole = whole if self.shifted else self.real.of("max", whole, 1)
        return self.real.of("div", whole, self.bins[dim])

    def start(self, dim: int, name: str) -> Expr:
        """Return the start of bin ``name`` in pixels."""
        shift = self.real.of("mul", Cast(self.real.dtype, ex.as_index(name)), self.size(dim))
        return self.real.of("add", self.edge(dim, False), shift)

    def inside(self, at: Expr, dim: int) -> Expr:
        """Return True for a sample that counts: within a pixel of the image."""
        return self.real.of("and_", self.real.of("le", -1, at), self.real.of("le", at, self.extents[dim]))

    def element(self, *indices: Expr | str) -> Expr:
        """Return an element of the box's image."""
        load = self.ctx.load(self.ctx.input(0), self.ctx.load(self.ctx.input(2), "r"), "c", *indices, fill=0.0)
        return load if self.ctx.type(load.tensor).dtype == self.real.dtype else Cast(self.real.dtype, load)

    def emit(self, axes: tuple[Axis, ...], value: Expr) -> None:
        """Emit the output, converted from the working type."""
        dtype = self.ctx.out().dtype
        self.ctx.emit(axes, value if self.real.dtype == dtype else Cast(dtype, value), into=0)


def _emit_sampled(boxes: _Boxes, mode: str) -> None:
    """Emit the output from ``ratio`` samples of each bin along both dimensions, with four neighbours each."""
    ctx, real = boxes.ctx, boxes.real
    near, counts = [], list[str]()
    names = (("p", "s"), ("q", "t"))
    for dim, (bin_name, sample) in enumerate(names):
        spots = (Axis("r", boxes.count), Axis(bin_name, boxes.bins[dim]), Axis(sample, boxes.ratio))
        part = real.of("div", real.of("add", Cast(real.dtype, ex.as_index(sample)), 0.5), boxes.ratio)
        at = real.of("add", boxes.start(dim, bin_name), real.of("mul", part, boxes.size(dim)))
        near.append(Neighbours.of(ctx, real, real.clamped(at, 0, boxes.extents[dim] - 1), spots, str(dim)))
        counts.append(ctx.emit(spots, real.of("where", boxes.inside(at, dim), 1, 0), dtype=real.dtype, into=f"counts{dim}"))
    axes = (Axis("r", boxes.count), Axis("c", boxes.channels), Axis("p", boxes.bins[0]), Axis("q", boxes.bins[1]))
    points = [("r", *pair) for pair in names]
    weights = real.of("mul", ctx.load(counts[0], *points[0]), ctx.load(counts[1], *points[1]))
    terms = [_corner_term(boxes, near, points, corner, weights) for corner in ((0, 0), (0, 1), (1, 0), (1, 1))]
    samples = (Axis("s", boxes.ratio), Axis("t", boxes.ratio))
    joined = terms[0]
    for term in terms[1:]:
        joined = real.of("max" if mode == "max" else "add", joined, term)
    total = ctx.emit(axes, joined, samples, "max" if mode == "max" else "sum", dtype=real.dtype, into="total")
    value = whole_load(ctx, total, axes)
    boxes.emit(axes, value if mode == "max" else real.of("div", value, boxes.ratio**2))


def _corner_term(
    boxes: _Boxes, near: list[Neighbours], points: list[tuple[str, str, str]], corner: tuple[int, int], weight: Expr
) -> Expr:
    """Return one neighbour of a sample, times its weight."""
    ctx, real, at = boxes.ctx, boxes.real, list[Expr]()
    for side, place, point in zip(corner, near, points, strict=True):
        share, below = ctx.load(place.share, *point), ctx.load(place.below, *point)
        weight = real.of("mul", weight, share if side else real.of("sub", 1, share))
        at.append(Real("int32").of("add", below, 1) if side else below)
    return real.of("mul", weight, boxes.element(*at))


def _emit_averaged(boxes: _Boxes) -> None:
    """Emit means over as many samples as a bin has pixels: ``y = rows x columns'``, both of them products."""
    ctx, real = boxes.ctx, boxes.real
    rows, columns = _emit_bin_weights(boxes, 0, "p", "h"), _emit_bin_weights(boxes, 1, "q", "w")
    height, width = (Axis(n, e) for n, e in zip("hw", boxes.extents, strict=True))
    box, channel, high, wide = (
        Axis("r", boxes.count),
        Axis("c", boxes.channels),
        Axis("p", boxes.bins[0]),
        Axis("q", boxes.bins[1]),
    )
    body = real.of("mul", boxes.element("h", "w"), ctx.load(rows, "r", "p", "h"))
    strips = ctx.emit((box, channel, high, width), body, (height,), "sum", dtype=real.dtype, into="strips")
    body = real.of("mul", ctx.load(strips, "r", "c", "p", "w"), ctx.load(columns, "r", "q", "w"))
    total = ctx.emit((box, channel, high, wide), body, (width,), "sum", dtype=real.dtype, into="total")
    boxes.emit((box, channel, high, wide), whole_load(ctx, total, (box, channel, high, wide)))


def _emit_bin_weights(boxes: _Boxes, dim: int, bin_name: str, pixel: str) -> str:
    """Return ``[r, bin, pixel]``: the weight of the pixel, averaged over a bin's samples."""
    ctx, real, extent = boxes.ctx, boxes.real, boxes.extents[dim]
    spots = (Axis("r", boxes.count), Axis(bin_name, boxes.bins[dim]))
    size, start = (
        ctx.load(ctx.emit(spots, e, dtype=real.dtype, into=f"{n}{dim}"), "r", bin_name)
        for n, e in (("size", boxes.size(dim)), ("start", boxes.start(dim, bin_name)))
    )
    grid = real.of("max", real.of("ceil", size), 1)
    step = real.of("div", size, grid)
    here = Cast(real.dtype, ex.as_index(pixel))
    # Samples from the first one that is less than a pixel below; an empty bin has no samples.
    first = real.of("floor", real.of("sub", real.of("div", real.of("sub", real.of("sub", here, 1), start), step), 0.5))
    number = real.of("add", real.clamped(first, 0, 1e9), Cast(real.dtype, ex.as_index("k")))
    at = real.of("add", start, real.of("mul", real.of("add", number, 0.5), step))
    offset = real.of("abs", real.of("sub", real.clamped(at, 0, extent - 1), here))
    counts = real.of("and_", real.of("lt", number, real.of("ceil", size)), boxes.inside(at, dim))
    part = real.of("where", counts, real.of("max", real.of("sub", 1, offset), 0), 0)
    total = ctx.emit(
        (*spots, Axis(pixel, extent)), real.of("div", part, grid), (Axis("k", _NEAR),), "sum", dtype=real.dtype, into="falls"
    )
    return total
