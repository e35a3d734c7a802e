"""Data-dependent indexing: Gather and Scatter families, OneHot, ReverseSequence.

Indices known at compile time become literals, affine expressions or tables, whose bounds are exact.
Indices that are only known at run time count from the end where negative; one that ONNX forbids (out
of range) gives 0 rather than a read of memory that is not the tensor's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from rammer.frontend.lowering import CannotLower, Lowering, lowering
from rammer.frontend.operands import apply, axis_of, literal, out_axes
from rammer.ir import expr as ex
from rammer.ir.compute import Axis
from rammer.ir.expr import Cast, Expr, Load, Op, Table
from rammer.ir.reindex import reshape_indices
from rammer.ir.types import is_float, row_major

#: Longest table kept inside an expression; longer ones become constant tensors.
TABLE = 1024


def _normalised(ctx: Lowering, values: np.ndarray, extent: int) -> np.ndarray:
    """Static indices counted from the front. Raises CannotLower for one out of range."""
    indices = values.astype(np.int64)
    if indices.size and not (-extent <= indices.min() and indices.max() < extent):
        raise CannotLower(f"{ctx.node.op} has an index outside [{-extent}, {extent})")
    return np.where(indices < 0, indices + extent, indices)


def _wrapped(ctx: Lowering, tensor: str, position: Sequence[Expr], extent: int) -> Expr:
    """A run-time index, counted from the end where negative."""
    index: Expr = ctx.load(tensor, *position)
    dtype = ctx.type(tensor).dtype
    if dtype.startswith("uint"):
        return index
    below = apply("lt", index, literal(0, dtype))
    return apply("where", below, apply("add", index, literal(extent, dtype)), index)


def _static_index(ctx: Lowering, values: np.ndarray, axes: Sequence[Axis]) -> Expr:
    """``values[axes]`` as the simplest expression that gives it."""
    if values.size == 0:
        return ex.integer(0)
    flat = [int(v) for v in values.ravel()]
    step = flat[1] - flat[0] if len(flat) > 1 else 0
    position: Expr = ex.integer(0)
    for axis, stride in zip(axes, row_major(values.shape), strict=True):
        if axis.extent > 1:
            position = ex.add(position, ex.mul(axis.name, stride))
    if flat == [flat[0] + step * i for i in range(len(flat))]:
        return ex.add(ex.mul(position, step), flat[0])
    if len(flat) <= TABLE:
        return Table(tuple(flat), position)
    return ctx.load(ctx.constant(values, "index"), *[a.name for a in axes])


def _fill(ctx: Lowering, tensor: str) -> ex.Number:
    return 0.0 if is_float(ctx.type(tensor).dtype) else 0


@lowering("Gather")
def gather(ctx: Lowering) -> None:
    """``y[.., j.., ..] = x[.., indices[j..], ..]`` along one axis."""
    x, name, axes = ctx.input(0), ctx.input(1), out_axes(ctx)
    shape = ctx.shape(x)
    dim = axis_of(ctx, int(ctx.attr("axis", 0)), len(shape))
    picked = axes[dim : dim + len(ctx.shape(name))]
    known = ctx.graph.constant(name)
    if known is not None:
        index = _static_index(ctx, _normalised(ctx, known, shape[dim]), picked)
    else:
        index = _wrapped(ctx, name, [ex.as_index(a.name) for a in picked], shape[dim])
    rest = [ex.as_index(a.name) for a in (*axes[:dim], *axes[dim + len(picked) :])]
    indices = (*rest[:dim], index, *rest[dim:])
    ctx.emit(axes, Load(x, indices, _fill(ctx, x) if known is None else None), into=0)


@lowering("GatherElements")
def gather_elements(ctx: Lowering) -> None:
    """``y[i..] = x[i.. with indices[i..] at axis]``."""
    x, name, axes = ctx.input(0), ctx.input(1), out_axes(ctx)
    shape = ctx.shape(x)
    dim = axis_of(ctx, int(ctx.attr("axis", 0)), len(shape))
    _check_beside(ctx, dim)
    known = ctx.graph.constant(name)
    position: list[Expr] = [ex.as_index(a.name) for a in axes]
    if known is not None:
        index = _static_index(ctx, _normalised(ctx, known, shape[dim]), axes)
    else:
        index = _wrapped(ctx, name, position, shape[dim])
    position[dim] = index
    ctx.emit(axes, Load(x, tuple(position), _fill(ctx, x) if known is None else None), into=0)


def _check_beside(ctx: Lowering, dim: int) -> None:
    """BadInput where indices (input 1) reach beyond the data (input 0) along other axes than the one that they index."""
    data, indices = ctx.shape(ctx.input(0)), ctx.shape(ctx.input(1))
    if any(d != dim and m > n for d, (m, n) in enumerate(zip(indices, data, strict=True))):
        raise ctx.refused(f"indices of {list(indices)} reach beyond data of {list(data)} along other axes than {dim}")


@lowering("GatherND")
def gather_nd(ctx: Lowering) -> None:
    """``y[b.., j.., ..] = x[b.., indices[b.., j.., :], ..]``."""
    x, name, axes = ctx.input(0), ctx.input(1), out_axes(ctx)
    shape, batch = ctx.shape(x), int(ctx.attr("batch_dims", 0))
    *prefix, depth = ctx.shape(name)
    if batch + depth > len(shape) or tuple(prefix[:batch]) != shape[:batch]:
        raise ctx.refused(f"indices of {[*prefix, depth]} do not fit to data of {list(shape)} with batch_dims={batch}")
    lead, tail = axes[: len(prefix)], axes[len(prefix) :]
    known = ctx.graph.constant(name)
    indices: list[Expr] = [ex.as_index(a.name) for a in axes[:batch]]
    for k in range(depth):
        extent = shape[batch + k]
        if known is not None:
            indices.append(_static_index(ctx, _normalised(ctx, known[..., k], extent), lead))
        else:
            position = [*(ex.as_index(a.name) for a in lead), ex.integer(k)]
            indices.append(_wrapped(ctx, name, position, extent))
    indices += [ex.as_index(a.name) for a in tail]
    ctx.emit(axes, Load(x, tuple(indices), _fill(ctx, x) if known is None else None), into=0)


@lowering("OneHot")
def one_hot(ctx: Lowering) -> None:
    """``values[1]`` where the axis equals the index, else ``values[0]``; other indices match nothing."""
    name, values, axes = ctx.input(0), ctx.input(2), out_axes(ctx)
    dim = axis_of(ctx, int(ctx.attr("axis", -1)), len(axes))
    depth = axes[dim].extent
    rest = [ex.as_index(a.name) for d, a in enumerate(axes) if d != dim]
    index: Expr = ctx.load(name, *rest)
    if ctx.type(name).dtype != "int64":
        index = Cast("int64", index)
    wrapped = apply("where", apply("lt", index, ex.integer(0)), apply("add", index, ex.integer(depth)), index)
    hit = apply("eq", wrapped, ex.as_index(axes[dim].name))
    ctx.emit(axes, apply("where", hit, ctx.load(values, 1), ctx.load(values, 0)), into=0)


@lowering("ReverseSequence")
def reverse_sequence(ctx: Lowering) -> None:
    """The first ``sequence_lens[b]`` steps of each batch entry in reverse order."""
    x, lengths, axes = ctx.input(0), ctx.input(1), out_axes(ctx)
    batch, time = int(ctx.attr("batch_axis", 1)), int(ctx.attr("time_axis", 0))
    if {batch, time} != {0, 1} or ctx.shape(lengths) != (axes[batch].extent,):
        raise ctx.refused(
            f"batch_axis={batch}, time_axis={time} and {list(ctx.shape(lengths))} lengths do not fit to data of "
            f"{list(ctx.shape(x))}"
        )
    step = ex.as_index(axes[time].name)
    length = ctx.load(lengths, axes[batch].name)
    mirrored = apply("sub", apply("sub", length, ex.integer(1)), step)
    indices = [ex.as_index(a.name) for a in axes]
    indices[time] = apply("where", apply("lt", step, length), mirrored, step)
    ctx.emit(axes, Load(x, tuple(indices), _fill(ctx, x)), into=0)


@lowering("ScatterElements", "Scatter")
def scatter_elements(ctx: Lowering) -> None:
    """Updates at static positions along one axis, without a reduction."""
    shape, updates = ctx.out().shape, ctx.input(2)
    dim = axis_of(ctx, int(ctx.attr("axis", 0)), len(shape))
    _check_beside(ctx, dim)
    _check_updates(ctx, ctx.shape(ctx.input(1)))
    indices = _normalised(ctx, _scatter_indices(ctx), shape[dim])
    position: list[np.ndarray] = list(np.indices(indices.shape, sparse=True))
    position[dim] = indices
    source = np.full(shape, -1, np.int64)
    source[tuple(position)] = np.arange(indices.size).reshape(indices.shape)
    _emit_scatter(ctx, source, updates, len(shape))


@lowering("ScatterND")
def scatter_nd(ctx: Lowering) -> None:
    """Updates of elements or slices at static positions, without a reduction."""
    shape, updates = ctx.out().shape, ctx.input(2)
    *lead, depth = ctx.shape(ctx.input(1))
    if depth > len(shape):
        raise ctx.refused(f"indices of {list(ctx.shape(ctx.input(1)))} name {depth} axes of data {list(shape)}")
    _check_updates(ctx, (*lead, *shape[depth:]))
    indices = _scatter_indices(ctx)
    position = tuple(_normalised(ctx, indices[..., k], shape[k]) for k in range(depth))
    source = np.full(shape[:depth], -1, np.int64)
    source[position] = np.arange(indices[..., 0].size).reshape(indices.shape[:-1])
    _emit_scatter(ctx, source, updates, depth)


def _check_updates(ctx: Lowering, wanted: Sequence[int]) -> None:
    if (have := ctx.shape(ctx.input(2))) != tuple(wanted):
        raise ctx.refused(f"the updates have the shape {list(have)}, where data and indices ask for {list(wanted)}")


def _scatter_indices(ctx: Lowering) -> np.ndarray:
    mode = ctx.attr("reduction", "none")
    if mode != "none":
        raise CannotLower(f"{ctx.node.op} with reduction {mode!r}: its writes depend on each other")
    indices = ctx.static(1, "indices")
    if indices is None or indices.size == 0:
        raise CannotLower(f"{ctx.node.op} without indices")
    return indices


def _emit_scatter(ctx: Lowering, source: np.ndarray, updates: str, depth: int) -> None:
    """``source`` maps the first ``depth`` output axes to the update written there (row-major), or to -1."""
    x, axes = ctx.input(0), out_axes(ctx)
    lead, tail = axes[:depth], axes[depth:]
    written = ctx.shape(updates)[: len(ctx.shape(updates)) - len(tail)]
    which = _static_index(ctx, source, lead)
    flat = Axis("update", math.prod(written))
    prefix = [ex.substitute(i, {"update": which}) for i in reshape_indices(written, [flat])]
    index = (*prefix, *(ex.as_index(a.name) for a in tail))
    # Positions without an update read it at a negative index, which the guard turns into a value never seen.
    body = Op(
        "where",
        (apply("lt", which, ex.integer(0)), ctx.load(x, *[a.name for a in axes]), Load(updates, index, _fill(ctx, updates))),
    )
    ctx.emit(axes, body, into=0)


@lowering("TopK", "NonZero", "Unique", "Compress", "NonMaxSuppression")
def data_dependent(ctx: Lowering) -> None:
    """Never lowered: these select or order elements by value."""
    raise CannotLower(f"{ctx.node.op} selects elements by their values, which no tensor expression does")
