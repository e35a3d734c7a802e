"""Data-dependent indexing: the Gather family, OneHot, ReverseSequence.

Constant indices become literals, affine expressions or tables with exact bounds. Negative run-time indices count from the end. A
run-time index out of range, which ONNX forbids, gives 0 and never reads outside the tensor."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rammer.frontend.lower.lowering_registry import CannotLower, Lowering, lowering
from rammer.frontend.lower.operands import axis_of, make_literal, make_op, out_axes
from rammer.ir import expr as ex
from rammer.ir.compute import Axis
from rammer.ir.expr import Cast, Expr, Load, Table
from rammer.ir.types import is_float, row_major

#: Longest table inside an expression; longer tables become constant tensors.
TABLE = 1024


def normalise_indices(ctx: Lowering, values: np.ndarray, extent: int) -> np.ndarray:
    """Return static indices counted from the front. Raises CannotLower for an index out of range."""
    indices = values.astype(np.int64)
    if indices.size and not (-extent <= indices.min() and indices.max() < extent):
        raise CannotLower(f"{ctx.node.op} has an index outside [{-extent}, {extent})")
    return np.where(indices < 0, indices + extent, indices)


def wrap_index(ctx: Lowering, tensor: str, position: Sequence[Expr], extent: int, fill: int | None = None) -> Expr:
    """Return a run-time index; negative ones count from the end. Outside the index tensor it is ``fill``."""
    index: Expr = Load(tensor, tuple(position), fill)
    dtype = ctx.type(tensor).dtype
    if dtype.startswith("uint"):
        return index
    below = make_op("lt", index, make_literal(0, dtype))
    return make_op("where", below, make_op("add", index, make_literal(extent, dtype)), index)


def static_index(ctx: Lowering, values: np.ndarray, axes: Sequence[Axis]) -> Expr:
    """Return ``values[axes]`` as the simplest equal expression."""
    if values.size == 0:
        return ex.integer(0)
    flat = [int(v) for v in values.ravel()]
    step = flat[1] - flat[0] if len(flat) > 1 else 0
    position: Expr = ex.integer(0)
    for axis, stride in zip(axes, row_major(values.shape), strict=True):
        if axis.extent > 1:
            position = ex.make_add(position, ex.make_mul(axis.name, stride))
    if flat == [flat[0] + step * i for i in range(len(flat))]:
        return ex.make_add(ex.make_mul(position, step), flat[0])
    if len(flat) <= TABLE:
        return Table(tuple(flat), position)
    return ctx.load(ctx.constant(values, "index"), *[a.name for a in axes])


def fill_of(ctx: Lowering, tensor: str) -> ex.Number:
    """Return the value of an index outside of ``tensor``."""
    return 0.0 if is_float(ctx.type(tensor).dtype) else 0


@lowering("Gather")
def lower_gather(ctx: Lowering) -> None:
    """Lower Gather: ``y[.., j.., ..] = x[.., indices[j..], ..]`` along one axis."""
    x, name, axes = ctx.input(0), ctx.input(1), out_axes(ctx)
    shape = ctx.shape(x)
    dim = axis_of(ctx, int(ctx.attr("axis", 0)), len(shape))
    picked = axes[dim : dim + len(ctx.shape(name))]
    known = ctx.graph.constant(name)
    if known is not None:
        index = static_index(ctx, normalise_indices(ctx, known, shape[dim]), picked)
    else:
        index = wrap_index(ctx, name, [ex.as_index(a.name) for a in picked], shape[dim])
    rest = [ex.as_index(a.name) for a in (*axes[:dim], *axes[dim + len(picked) :])]
    indices = (*rest[:dim], index, *rest[dim:])
    ctx.emit(axes, Load(x, indices, fill_of(ctx, x) if known is None else None), into=0)


@lowering("GatherElements")
def gather_elements(ctx: Lowering) -> None:
    """Lower GatherElements: ``y[i..] = x[i.. with indices[i..] at axis]``."""
    x, name, axes = ctx.input(0), ctx.input(1), out_axes(ctx)
    shape = ctx.shape(x)
    dim = axis_of(ctx, int(ctx.attr("axis", 0)), len(shape))
    check_beside(ctx, dim)
    known = ctx.graph.constant(name)
    position: list[Expr] = [ex.as_index(a.name) for a in axes]
    if known is not None:
        index = static_index(ctx, normalise_indices(ctx, known, shape[dim]), axes)
    else:
        index = wrap_index(ctx, name, position, shape[dim])
    position[dim] = index
    ctx.emit(axes, Load(x, tuple(position), fill_of(ctx, x) if known is None else None), into=0)


def check_beside(ctx: Lowering, dim: int) -> None:
    """Raise BadInput if indices (input 1) exceed the data (input 0) along an axis that is not indexed."""
    data, indices = ctx.shape(ctx.input(0)), ctx.shape(ctx.input(1))
    if any(d != dim and m > n for d, (m, n) in enumerate(zip(indices, data, strict=True))):
        raise ctx.refused(f"indices of {list(indices)} reach beyond data of {list(data)} along axes other than {dim}")


@lowering("GatherND")
def gather_nd(ctx: Lowering) -> None:
    """Lower GatherND: ``y[b.., j.., ..] = x[b.., indices[b.., j.., :], ..]``."""
    x, name, axes = ctx.input(0), ctx.input(1), out_axes(ctx)
    shape, batch = ctx.shape(x), int(ctx.attr("batch_dims", 0))
    *prefix, depth = ctx.shape(name)
    if batch + depth > len(shape) or tuple(prefix[:batch]) != shape[:batch]:
        raise ctx.refused(f"indices of {[*prefix, depth]} do not match data of {list(shape)} with batch_dims={batch}")
    lead, tail = axes[: len(prefix)], axes[len(prefix) :]
    known = ctx.graph.constant(name)
    indices: list[Expr] = [ex.as_index(a.name) for a in axes[:batch]]
    for k in range(depth):
        extent = shape[batch + k]
        if known is not None:
            indices.append(static_index(ctx, normalise_indices(ctx, known[..., k], extent), lead))
        else:
            position = [*(ex.as_index(a.name) for a in lead), ex.integer(k)]
            indices.append(wrap_index(ctx, name, position, extent))
    indices += [ex.as_index(a.name) for a in tail]
    ctx.emit(axes, Load(x, tuple(indices), fill_of(ctx, x) if known is None else None), into=0)


@lowering("OneHot")
def one_hot(ctx: Lowering) -> None:
    """Lower OneHot: ``values[1]`` where the axis equals the index, else ``values[0]``; other indices match nothing."""
    name, values, axes = ctx.input(0), ctx.input(2), out_axes(ctx)
    dim = axis_of(ctx, int(ctx.attr("axis", -1)), len(axes))
    depth = axes[dim].extent
    rest = [ex.as_index(a.name) for d, a in enumerate(axes) if d != dim]
    index: Expr = ctx.load(name, *rest)
    if ctx.type(name).dtype != "int64":
        index = Cast("int64", index)
    place = make_op("where", make_op("lt", index, ex.integer(0)), make_op("add", index, ex.integer(depth)), index)
    hit = make_op("eq", place, ex.as_index(axes[dim].name))
    ctx.emit(axes, make_op("where", hit, ctx.load(values, 1), ctx.load(values, 0)), into=0)


@lowering("ReverseSequence")
def reverse_sequence(ctx: Lowering) -> None:
    """Lower ReverseSequence: the first ``sequence_lens[b]`` steps of each batch entry in reverse order."""
    x, lengths, axes = ctx.input(0), ctx.input(1), out_axes(ctx)
    batch, time = int(ctx.attr("batch_axis", 1)), int(ctx.attr("time_axis", 0))
    if {batch, time} != {0, 1} or ctx.shape(lengths) != (axes[batch].extent,):
        raise ctx.refused(
            f"batch_axis={batch}, time_axis={time} and {list(ctx.shape(lengths))} lengths do not match data of "
            f"{list(ctx.shape(x))}"
        )
    step = ex.as_index(axes[time].name)
    length = ctx.load(lengths, axes[batch].name)
    mirrored = make_op("sub", make_op("sub", length, ex.integer(1)), step)
    indices = [ex.as_index(a.name) for a in axes]
    indices[time] = make_op("where", make_op("lt", step, length), mirrored, step)
    ctx.emit(axes, Load(x, tuple(indices), fill_of(ctx, x)), into=0)


@lowering("NonZero", "Unique", "Compress", "NonMaxSuppression")
def data_dependent(ctx: Lowering) -> None:
    """Raise CannotLower: these operators select or order elements by value."""
    raise CannotLower(f"{ctx.node.op} selects elements by their values, which no tensor expression does")
