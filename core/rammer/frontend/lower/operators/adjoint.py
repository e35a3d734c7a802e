"""Col2Im and MaxUnpool, the inverse rearrangements of convolution and pooling."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rammer.frontend.lower.lowering_registry import CannotLower, Lowering, lowering
from rammer.frontend.lower.operands import make_literal, make_op
from rammer.frontend.lower.operators.gather import fill_of
from rammer.frontend.lower.operators.scatter import MOST_STEPS
from rammer.frontend.lower.sliding_windows import spatial_names
from rammer.ir import expr as ex
from rammer.ir.compute import Axis
from rammer.ir.expr import Cast, Expr, Load
from rammer.ir.reindex import reshape_indices
from rammer.ir.types import row_major


@lowering("Col2Im")
def lower_col2im(ctx: Lowering) -> None:
    """Lower Col2Im: ``y[n, c, i..] = sum[k..] x[n, c k.., o..]`` over taps and positions with ``o stride + k dilation - pad =
    i``."""
    image, block = ctx.static(1, "image_shape"), ctx.static(2, "block_shape")
    if image is None or block is None:
        raise CannotLower("Col2Im without its shapes")
    extents, kernel = [int(n) for n in image], [int(n) for n in block]
    rank = len(extents)
    strides, dilations = (_integer_attribute(ctx, name, rank, 1) for name in ("strides", "dilations"))
    pads = _integer_attribute(ctx, "pads", 2 * rank, 0)
    outs = [
        (n + pads[d] + pads[rank + d] - (k - 1) * dilations[d] - 1) // strides[d] + 1
        for d, (n, k) in enumerate(zip(extents, kernel, strict=True))
    ]
    batch, rows, columns = ctx.shape(ctx.input(0))
    taps = math.prod(kernel)
    if rows != ctx.out().shape[1] * taps or columns != math.prod(outs) or min(outs) < 1:
        raise ctx.refused(f"{rows} rows of {columns} columns do not make {extents} by blocks of {kernel}")
    names = spatial_names(rank)
    each = [Axis(f"k{n}", k) for n, k in zip(names, kernel, strict=True)]
    places = [Axis(n, o) for n, o in zip(names, outs, strict=True)]
    whole = (Axis("n", batch), Axis("c", rows // taps), *each, *places)
    row: Expr = ex.make_mul("c", taps)
    column: Expr = ex.integer(0)
    for axis, stride in zip(each, row_major(tuple(kernel)), strict=True):
        row = ex.make_add(row, ex.make_mul(axis.name, stride))
    for axis, stride in zip(places, row_major(tuple(outs)), strict=True):
        column = ex.make_add(column, ex.make_mul(axis.name, stride))
    blocks = ctx.emit(whole, ctx.load(ctx.input(0), "n", row, column), into="blocks")
    axes = (*whole[:2], *[Axis(n, e) for n, e in zip(names, extents, strict=True)])
    at: list[Expr] = []
    test: Expr | None = None
    for d, (axis, tap) in enumerate(zip(axes[2:], each, strict=True)):
        place = ex.make_add(ex.make_add(axis.name, pads[d]), ex.make_mul(tap.name, -dilations[d]))
        at.append(ex.make_floordiv(place, strides[d]))
        if strides[d] > 1:
            hit = make_op("eq", ex.make_mod(place, strides[d]), ex.integer(0))
            test = hit if test is None else make_op("and_", test, hit)
    value: Expr = ctx.load(blocks, "n", "c", *[a.name for a in each], *at, fill=fill_of(ctx, blocks))
    if test is not None:
        value = make_op("where", test, value, make_literal(0, ctx.out().dtype))
    ctx.emit(axes, value, each, "sum", into=0)


def _integer_attribute(ctx: Lowering, name: str, count: int, default: int) -> list[int]:
    given = [int(n) for n in ctx.attr(name) or [default] * count]
    if len(given) != count:
        raise ctx.refused(f"{name} has {len(given)} numbers, where {count} are needed")
    return given


@lowering("MaxUnpool")
def max_unpool(ctx: Lowering) -> None:
    """Lower MaxUnpool: ``y[indices[j]] = x[j]``, 0 elsewhere. Every output element scans all inputs; the last one with its index
    wins. Indices count through the shape of the attributes; a larger ``output_shape`` is zero-padded at the end."""
    x, indices, axes = ctx.input(0), ctx.input(1), ctx.axes(ctx.node.outputs[0])
    shape, inner = ctx.shape(x), unpooled_shape(ctx.shape(ctx.input(0)), ctx.node.attributes)
    count = math.prod(shape)
    if ctx.shape(indices) != shape or len(inner) != len(axes):
        raise ctx.refused(f"indices of {list(ctx.shape(indices))} for elements of {list(shape)}")
    if count * math.prod(inner) > MOST_STEPS:
        raise CannotLower(f"MaxUnpool would take {count * math.prod(inner)} steps, more than {MOST_STEPS}")
    places, each = [Axis(f"i{d}", n) for d, n in enumerate(inner)], Axis("u", count)
    here: Expr = ex.integer(0)
    for axis, stride in zip(places, row_major(inner), strict=True):
        here = ex.make_add(here, ex.make_mul(axis.name, stride))
    named = Load(indices, reshape_indices(shape, [each]))
    hit = make_op("eq", named if ctx.type(indices).dtype == "int64" else Cast("int64", named), here)
    found = make_op("where", hit, ex.as_index(each.name), ex.integer(-1))
    which = ctx.emit(places, found, (each,), "max", dtype="int64", into="which")
    at = ctx.load(which, *[a.name for a in axes], fill=-1)
    source = [ex.substitute(i, {each.name: at}) for i in reshape_indices(shape, [each])]
    value = Load(x, tuple(source), fill_of(ctx, x))
    ctx.emit(axes, make_op("where", make_op("lt", at, ex.integer(0)), make_literal(0, ctx.out().dtype), value), into=0)


def unpooled_shape(shape: Sequence[int], attributes: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the shape before the pooling with these attributes."""
    kernel = attributes["kernel_shape"]
    strides, pads = attributes.get("strides") or [1] * len(kernel), attributes.get("pads") or [0] * 2 * len(kernel)
    spatial = [
        (n - 1) * strides[d] + k - pads[d] - pads[len(kernel) + d] for d, (n, k) in enumerate(zip(shape[2:], kernel, strict=True))
    ]
    return (*shape[:2], *[int(n) for n in spatial])
