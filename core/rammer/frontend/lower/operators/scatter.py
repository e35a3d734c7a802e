"""Scatter: elements and slices written, added, multiplied or compared at index positions; TensorScatter.

A Compute defines every element of its output, so a scatter determines the updates of each output position. Constant indices
become a table, as wide as the largest number of updates of one position. With run-time indices, every position scans its
candidate updates: those along its line (ScatterElements), or all (ScatterND). Of several updates of one position the last one
wins, as in NumPy and ONNX Runtime. An index out of range, which ONNX forbids, matches no position.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from rammer.frontend.lower.lowering_registry import CannotLower, Lowering, lowering
from rammer.frontend.lower.operands import axis_of, emit_copy, make_op, out_axes, whole_load
from rammer.frontend.lower.operators.gather import check_beside, fill_of, normalise_indices, static_index, wrap_index
from rammer.ir import compute as cp
from rammer.ir import expr as ex
from rammer.ir.compute import Axis, Combiner
from rammer.ir.expr import Cast, Expr, Load
from rammer.ir.reindex import reshape_indices
from rammer.ir.types import row_major

#: Limit of scanned updates over all positions; beyond it the host runs the scatter, scanning the updates once.
MOST_STEPS: Final = 1 << 24
#: Reduction name -> combiner of the updates of one position with each other and with the data.
_COMBINERS: Final[dict[str, Combiner]] = {"add": "sum", "mul": "prod", "max": "max", "min": "min"}
#: For bool, sums are or, and products and.
_OF_BOOL: Final = {"add": "max", "mul": "min"}
_BOOL_STEPS: Final = {"max": "or_", "min": "and_"}


@dataclass(frozen=True)
class _Combining:
    """The combination of updates (``none``: the last one wins) and its element type."""

    word: str
    dtype: str

    @property
    def combiner(self) -> Combiner | None:
        """The combiner of the updates of one position, or None."""
        word = _OF_BOOL.get(self.word, self.word) if self.dtype == "bool" else self.word
        return None if word == "none" else _COMBINERS[word]

    @property
    def working(self) -> str:
        """The type of the combination: float16 is summed in float32 and rounded once."""
        return "float32" if self.dtype == "float16" else self.dtype

    def widened(self, x: Expr) -> Expr:
        """Return ``x`` in the type that is combined."""
        return x if self.working == self.dtype else Cast(self.working, x)

    @property
    def nothing(self) -> Expr:
        """The identity of the combiner."""
        assert self.combiner is not None
        return cp.combiner_identity(self.combiner, self.working)

    def joined(self, x: Expr, total: Expr) -> Expr:
        """Return the combination of the data and the updates, in the output's type."""
        step = _BOOL_STEPS[str(self.combiner)] if self.dtype == "bool" else self.word
        both = make_op(step, self.widened(x), total)
        return both if self.working == self.dtype else Cast(self.dtype, both)


@lowering("ScatterElements", "Scatter")
def scatter_elements(ctx: Lowering) -> None:
    """Lower ScatterElements: ``y[.., indices[j..], ..] = x (op) updates[j..]`` along one axis."""
    shape, written = ctx.out().shape, ctx.shape(ctx.input(1))
    dim = axis_of(ctx, int(ctx.attr("axis", 0)), len(shape))
    check_beside(ctx, dim)
    _check_updates(ctx, written)
    known = ctx.graph.constant(ctx.input(1))
    if 0 in written:
        emit_copy(ctx, ctx.input(0))
    elif known is not None:
        indices = normalise_indices(ctx, known, shape[dim])
        position: list[np.ndarray] = list(np.indices(indices.shape, sparse=True))
        position[dim] = indices
        flat = np.ravel_multi_index(tuple(np.broadcast_arrays(*position)), shape)
        _by_table(ctx, flat.ravel(), len(shape))
    else:
        _along_lines(ctx, dim)


@lowering("ScatterND")
def scatter_nd(ctx: Lowering) -> None:
    """Lower ScatterND: ``y[indices[j.., :], ..] = x (op) updates[j.., ..]``, with elements or slices."""
    shape = ctx.out().shape
    *lead, depth = ctx.shape(ctx.input(1))
    if depth > len(shape):
        raise ctx.refused(f"indices of {list(ctx.shape(ctx.input(1)))} name {depth} axes of data {list(shape)}")
    _check_updates(ctx, (*lead, *shape[depth:]))
    known = ctx.graph.constant(ctx.input(1))
    if 0 in ctx.shape(ctx.input(2)) or 0 in shape:
        emit_copy(ctx, ctx.input(0))
    elif known is not None:
        columns = [normalise_indices(ctx, known[..., k], shape[k]) for k in range(depth)]
        flat = np.ravel_multi_index(columns, shape[:depth]) if depth else np.zeros(lead, np.int64)
        _by_table(ctx, np.asarray(flat).ravel(), depth)
    else:
        _among_all(ctx, depth)


def _check_updates(ctx: Lowering, wanted: Sequence[int]) -> None:
    if (have := ctx.shape(ctx.input(2))) != tuple(wanted):
        raise ctx.refused(f"the updates have the shape {list(have)}, where data and indices need {list(wanted)}")


def _check_steps(ctx: Lowering, count: int) -> None:
    if count > MOST_STEPS:
        raise CannotLower(f"{ctx.node.op} would take {count} steps, more than {MOST_STEPS}")


def _make_combining(ctx: Lowering) -> _Combining:
    return _Combining(ctx.attr("reduction", "none"), ctx.out().dtype)


# --- constant indices ---------------------------------------------------------------------------


def _by_table(ctx: Lowering, flat: np.ndarray, depth: int) -> None:
    """Emit the scatter from a table: ``flat[j]`` is the position of update ``j`` in the first ``depth`` output axes."""
    how, axes = _make_combining(ctx), out_axes(ctx)
    places = math.prod(a.extent for a in axes[:depth])
    if how.combiner is None:
        source = np.full(places, -1, np.int64)
        source[flat] = np.arange(flat.size)  # the last update of a position wins
        _emit_write(ctx, static_index(ctx, source.reshape([a.extent for a in axes[:depth]]), axes[:depth]), depth)
        return
    most = int(np.bincount(flat).max())
    _check_steps(ctx, most * ctx.out().size)
    order = np.argsort(flat, kind="stable")
    nth = np.arange(flat.size) - np.searchsorted(flat[order], flat[order])
    source = np.full((places, most), -1, np.int64)
    source[flat[order], nth] = order
    each = Axis("u", most)
    which = static_index(ctx, source.reshape([*(a.extent for a in axes[:depth]), most]), (*axes[:depth], each))
    update = make_op("where", make_op("lt", which, ex.integer(0)), how.nothing, how.widened(_load_update(ctx, which, depth)))
    _emit_combined(ctx, how, update, each)


def _load_update(ctx: Lowering, which: Expr, depth: int) -> Load:
    """Return update ``which``, counted through the axes before the slice; the fill value if it is out of range."""
    updates, tail = ctx.input(2), out_axes(ctx)[depth:]
    written = ctx.shape(updates)[: len(ctx.shape(updates)) - len(tail)]
    prefix = [ex.substitute(i, {"update": which}) for i in reshape_indices(written, [Axis("update", math.prod(written))])]
    return Load(updates, (*prefix, *(ex.as_index(a.name) for a in tail)), fill_of(ctx, updates))


def _emit_write(ctx: Lowering, which: Expr, depth: int) -> None:
    """Emit update ``which`` if it is not negative, else the data."""
    axes = out_axes(ctx)
    kept = whole_load(ctx, ctx.input(0), axes)
    ctx.emit(axes, make_op("where", make_op("lt", which, ex.integer(0)), kept, _load_update(ctx, which, depth)), into=0)


def _emit_combined(ctx: Lowering, how: _Combining, update: Expr, each: Axis) -> None:
    """Emit the data combined with the updates of every position; ``update`` is the value at a point of axis ``each``."""
    axes = out_axes(ctx)
    if each.extent == 1:
        total = ex.substitute(update, {each.name: ex.integer(0)})
    else:
        made = ctx.emit(axes, update, (each,), how.combiner, dtype=how.working, into="total")
        total = whole_load(ctx, made, axes)
    ctx.emit(axes, how.joined(whole_load(ctx, ctx.input(0), axes), total), into=0)


# --- run-time indices -------------------------------------------------------------------------------


def _along_lines(ctx: Lowering, dim: int) -> None:
    """Emit ScatterElements: a position scans the updates along axis ``dim`` at its other coordinates."""
    how, axes, indices, updates = _make_combining(ctx), out_axes(ctx), ctx.input(1), ctx.input(2)
    shape, written = ctx.out().shape, ctx.shape(ctx.input(1))
    _check_steps(ctx, ctx.out().size * written[dim])
    each = Axis("u", written[dim])
    point = [ex.as_index(each.name if d == dim else a.name) for d, a in enumerate(axes)]
    whole = all(m == n for d, (m, n) in enumerate(zip(written, shape, strict=True)) if d != dim)
    # Outside the updates, the index matches no position.
    named = wrap_index(ctx, indices, point, shape[dim], None if whole else -shape[dim] - 1)
    hit = make_op("eq", named if ctx.type(indices).dtype == "int64" else Cast("int64", named), ex.as_index(axes[dim].name))
    if how.combiner is not None:
        update = Load(updates, tuple(point), None if whole else fill_of(ctx, updates))
        _emit_combined(ctx, how, make_op("where", hit, how.widened(update), how.nothing), each)
        return
    which = whole_load(ctx, _emit_last_update(ctx, axes, hit, each), axes)
    point[dim] = which
    body = make_op(
        "where", make_op("lt", which, ex.integer(0)), whole_load(ctx, ctx.input(0), axes), _load_or_fill(ctx, updates, point)
    )
    ctx.emit(axes, body, into=0)


def _among_all(ctx: Lowering, depth: int) -> None:
    """Emit ScatterND: a position scans all updates."""
    how, axes = _make_combining(ctx), out_axes(ctx)
    count = math.prod(ctx.shape(ctx.input(1))[:-1])
    places = axes if how.combiner is not None else axes[:depth]
    _check_steps(ctx, count * math.prod(a.extent for a in places))
    each = Axis("u", count)
    named = ctx.load(_named_places(ctx, each, depth), each.name)
    here: Expr = ex.integer(0)
    for axis, stride in zip(axes[:depth], row_major(ctx.out().shape[:depth]), strict=True):
        here = ex.make_add(here, ex.make_mul(axis.name, stride))
    hit = make_op("eq", named, here)
    if how.combiner is not None:
        update = how.widened(_load_update(ctx, ex.as_index(each.name), depth))
        _emit_combined(ctx, how, make_op("where", hit, update, how.nothing), each)
        return
    _emit_write(ctx, whole_load(ctx, _emit_last_update(ctx, places, hit, each), places), depth)


def _named_places(ctx: Lowering, each: Axis, depth: int) -> str:
    """Return the position of every update, counted through the first ``depth`` output axes; -1 if out of range."""
    indices, shape = ctx.input(1), ctx.out().shape
    lead = reshape_indices(ctx.shape(indices)[:-1], [each])
    place: Expr = ex.integer(0)
    inside: Expr | None = None
    for k, stride in enumerate(row_major(shape[:depth])):
        index = wrap_index(ctx, indices, [*lead, ex.integer(k)], shape[k])
        fits = make_op("and_", make_op("le", ex.integer(0), index), make_op("lt", index, ex.integer(shape[k])))
        inside = fits if inside is None else make_op("and_", inside, fits)
        place = ex.make_add(place, index if stride == 1 else make_op("mul", index, ex.integer(stride)))
    return ctx.emit((each,), place if inside is None else make_op("where", inside, place, ex.integer(-1)), into="place")


def _emit_last_update(ctx: Lowering, axes: Sequence[Axis], hit: Expr, each: Axis) -> str:
    """Return the last update of axis ``each`` that hits, or -1 if no update hits."""
    found = make_op("where", hit, ex.as_index(each.name), ex.integer(-1))
    return ctx.emit(axes, found, (each,), "max", dtype="int64", into="which")


def _load_or_fill(ctx: Lowering, tensor: str, point: Sequence[Expr]) -> Load:
    return Load(tensor, tuple(point), fill_of(ctx, tensor))


# --- caches -----------------------------------------------------------------------------------------


@lowering("TensorScatter")
def tensor_scatter(ctx: Lowering) -> None:
    """Lower TensorScatter: ``y[b, .., s, ..] = update[b, .., s - write_indices[b], ..]`` where that index is in range. The
    circular mode computes the index modulo the cache's length."""
    axes, update = out_axes(ctx), ctx.input(1)
    dim = axis_of(ctx, int(ctx.attr("axis", -2)), len(axes))
    length = ctx.shape(update)[dim]
    if (
        dim == 0
        or length > axes[dim].extent
        or ctx.shape(update) != tuple(length if d == dim else a.extent for d, a in enumerate(axes))
    ):
        raise ctx.refused(
            f"an update of {list(ctx.shape(update))} does not match a cache of {list(ctx.out().shape)} at axis {dim}"
        )
    step: Expr = ex.as_index(axes[dim].name)
    if ctx.has(2):
        if ctx.shape(ctx.input(2)) != (axes[0].extent,):
            raise ctx.refused(f"{list(ctx.shape(ctx.input(2)))} write indices for a batch of {axes[0].extent}")
        step = make_op("sub", step, ctx.load(ctx.input(2), axes[0].name))
        if ctx.attr("mode", "linear") == "circular":
            step = make_op("mod", step, ex.integer(axes[dim].extent))
    written = make_op("and_", make_op("le", ex.integer(0), step), make_op("lt", step, ex.integer(length)))
    point = [step if d == dim else ex.as_index(a.name) for d, a in enumerate(axes)]
    ctx.emit(axes, make_op("where", written, _load_or_fill(ctx, update, point), whole_load(ctx, ctx.input(0), axes)), into=0)
