"""Tile propagation over many tasks at once: bounds as arrays over the grid of a batch of tasks. Every array here has one axis per
output axis of the operator's anchor. An axis has length one if all tiles along it have the same value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, TypeAlias

import numpy as np

from rammer.ir import expr as ex
from rammer.ir.compute import Compute
from rammer.ir.expr import Cast, Const, Expr, Load, Op, Ref, Table
from rammer.ir.operator import ROperator
from rammer.ir.types import TensorType

from rammer_ipu_sim.supersteps import Places, select_cells

Numbers: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"

#: Prefix of the axes that ``pin_indices`` adds.
PIN = "__pin"


@dataclass(frozen=True)
class IndexRange:
    """The inclusive bounds of one axis for every task of a batch; ``high < low`` is empty."""

    low: Numbers
    high: Numbers

    @cached_property
    def size(self) -> Numbers:
        """Number of elements, never negative."""
        size: Numbers = np.maximum(self.high - self.low + 1, 0)
        return size

    def uniform(self) -> IndexRange:
        """Return the same lower bounds with the largest size for every task."""
        size = int(self.size.max(initial=0))
        return IndexRange(self.low, self.low + size - 1)

    def select(self, places: Places) -> IndexRange:
        """Return the bounds for the tasks at ``places``."""
        return IndexRange(select_cells(self.low, places), select_cells(self.high, places))


Spans: TypeAlias = "tuple[IndexRange, ...]"


@lru_cache(1024)
def constant_grid(value: int, rank: int) -> Numbers:
    """Return ``value`` for every task of a grid of ``rank`` axes, as a read-only array."""
    made = np.full((1,) * rank, value, dtype=np.int64)
    made.flags.writeable = False
    return made


def is_affine(load: Load) -> bool:
    """Return True if every index is affine in the axes."""
    return all(ex.affine_form(i) is not None for i in load.indices)


def expression_bounds(e: Expr, axes: Mapping[str, IndexRange], rank: int) -> IndexRange | None:
    """Return the bounds as ``rammer.ir.expr.interval`` does, for all tasks of a batch; None if ``e`` depends on data."""
    if isinstance(e, Ref):
        return axes[e.axis]
    form = ex.affine_form(e)
    if form is not None:
        low = high = constant_grid(form[1], rank)
        for name, c in form[0].items():
            a = axes[name]
            low = low + c * (a.low if c > 0 else a.high)
            high = high + c * (a.high if c > 0 else a.low)
        return IndexRange(low, high)
    if isinstance(e, Const | Load):
        return None
    if isinstance(e, Cast):
        return expression_bounds(e.arg, axes, rank)
    if isinstance(e, Table):
        return _table_bounds(e, expression_bounds(e.index, axes, rank), rank)
    parts = [expression_bounds(a, axes, rank) for a in (e.args[1:] if e.fn == "where" else e.args)]
    known = [p for p in parts if p is not None]
    return _combine_bounds(e.fn, known) if len(known) == len(parts) else None


def _table_bounds(e: Table, inner: IndexRange | None, rank: int) -> IndexRange | None:
    values = np.asarray(e.values)
    if not len(values):
        return None
    if inner is None:
        return IndexRange(constant_grid(int(values.min()), rank), constant_grid(int(values.max()), rank))
    first = np.clip(inner.low, 0, len(values) - 1)
    last = np.clip(inner.high, first, len(values) - 1)
    pairs, place = np.unique(np.stack(np.broadcast_arrays(first, last), -1).reshape(-1, 2), axis=0, return_inverse=True)
    shape = np.broadcast_shapes(first.shape, last.shape)
    low = np.array([int(values[a : b + 1].min()) for a, b in pairs], dtype=np.int64)[place.ravel()].reshape(shape)
    high = np.array([int(values[a : b + 1].max()) for a, b in pairs], dtype=np.int64)[place.ravel()].reshape(shape)
    return IndexRange(low, high)


def _combine_bounds(fn: str, p: list[IndexRange]) -> IndexRange | None:
    if fn == "neg":
        return IndexRange(-p[0].high, -p[0].low)
    if len(p) != 2:
        return None
    a, b = p
    if fn == "where":
        return IndexRange(np.minimum(a.low, b.low), np.maximum(a.high, b.high))
    if fn in ("add", "min", "max"):
        pick = {"add": np.add, "min": np.minimum, "max": np.maximum}[fn]
        return IndexRange(pick(a.low, b.low), pick(a.high, b.high))
    if fn == "sub":
        return IndexRange(a.low - b.high, a.high - b.low)
    if fn == "mul":
        corners = [x * y for x in (a.low, a.high) for y in (b.low, b.high)]
        return IndexRange(np.minimum.reduce(corners), np.maximum.reduce(corners))
    if fn not in ("floordiv", "mod") or np.any(b.low != b.high) or np.any(b.low <= 0):
        return None
    first, last = a.low // b.low, a.high // b.low
    if fn == "floordiv":
        return IndexRange(first, last)
    same = first == last
    return IndexRange(np.where(same, a.low % b.low, 0), np.where(same, a.high % b.low, b.low - 1))


def pin_indices(body: Expr, axes: Mapping[str, IndexRange], rank: int) -> tuple[Expr, dict[str, IndexRange]]:
    """Return ``body`` with affine load indices if possible, and ``axes`` with the added axes. A non-affine part of an index may
    have one value within each task, as in grouped convolutions. Every part of this kind becomes a separate axis of length one."""
    known = dict(axes)

    def constant_part(e: Expr) -> Expr | None:
        if not isinstance(e, Op | Table) or ex.affine_form(e) is not None:
            return None
        span = expression_bounds(e, axes, rank)
        if span is None or np.any(span.low != span.high):
            return None
        name = f"{PIN}{len(known)}"
        known[name] = span
        return Ref(name)

    def load(e: Expr) -> Expr | None:
        if not isinstance(e, Load) or is_affine(e):
            return None
        return Load(e.tensor, tuple(ex.transform(i, constant_part) for i in e.indices), e.fill)

    return ex.transform(body, load), known


def load_spans(load: Load, axes: Mapping[str, IndexRange], shape: tuple[int, ...], rank: int, clip: bool) -> Spans:
    """Return the box that ``load`` reads: clipped to the tensor, or (``clip=False``) the plain bounds of its indices. Indices
    that depend on data read their whole axis. Non-affine loads are always clipped."""
    result = []
    clip = clip or not is_affine(load)
    for index, extent in zip(load.indices, shape, strict=True):
        span = expression_bounds(index, axes, rank) or IndexRange(constant_grid(0, rank), constant_grid(extent - 1, rank))
        if clip:
            low = np.minimum(np.maximum(span.low, 0), extent)
            span = IndexRange(low, np.maximum(low - 1, np.minimum(span.high, extent - 1)))
        result.append(span)
    return tuple(result)


def axis_spans(compute: Compute, spans: Spans, rank: int) -> dict[str, IndexRange]:
    """Return the bounds of all axes of ``compute``: output axes over ``spans``, reduction axes whole."""
    axes = {a.name: s for a, s in zip(compute.axes, spans, strict=True)}
    return axes | {r.name: IndexRange(constant_grid(0, rank), constant_grid(r.extent - 1, rank)) for r in compute.reduce}


def join_boxes(a: Spans, b: Spans) -> Spans:
    """Return the hull of two boxes, task by task; an empty box contributes nothing."""
    empty_a, empty_b = _is_empty(a), _is_empty(b)
    result = []
    for p, q in zip(a, b, strict=True):
        low = np.where(empty_a, q.low, np.where(empty_b, p.low, np.minimum(p.low, q.low)))
        high = np.where(empty_a, q.high, np.where(empty_b, p.high, np.maximum(p.high, q.high)))
        result.append(_drop_constant_axes(IndexRange(low, high)))
    return tuple(result)


def _is_empty(spans: Spans) -> Any:
    result: Any = False
    for s in spans:
        result = result | (s.high < s.low)
    return result


def _drop_constant_axes(span: IndexRange) -> IndexRange:
    """Drop grid axes along which both bounds are constant, so that equal boxes can be compared."""
    low, high = np.broadcast_arrays(span.low, span.high)
    for d in range(low.ndim):
        if low.shape[d] > 1:
            first = (slice(None),) * d + (slice(0, 1),)
            if np.all(low == low[first]) and np.all(high == high[first]):
                low, high = low[first], high[first]
    return IndexRange(low, high)


def written_boxes(operator: ROperator, output: Spans) -> dict[str, Spans]:
    """Return the boxes of every output that tasks write, from their boxes of the anchor."""
    rank, shapes = len(output), {c.name: c.shape for c in operator.computes}
    result = dict[str, Spans]()
    for name, own in operator.shared.items():
        whole = (IndexRange(constant_grid(0, rank), constant_grid(n - 1, rank)) for n in shapes[name])
        result[name] = tuple(w if d is None else output[d] for d, w in zip(own, whole, strict=True))
    return result


def propagate_boxes(operator: ROperator, output: Spans, types: Mapping[str, TensorType], clip: bool) -> dict[str, Spans]:
    """Propagate the tasks' output boxes backwards to a box of every Compute of ``operator``. ``clip=True`` returns exactly the
    needed boxes. ``clip=False`` returns boxes of one size for all tasks, which may be partly outside their tensors."""
    rank = len(output)
    inside = {c.name for c in operator.computes}
    result = written_boxes(operator, output)
    for c in reversed(operator.computes):
        if c.name not in result:
            continue
        if not clip:
            result[c.name] = tuple(s.uniform() for s in result[c.name])
        body, axes = c.body, axis_spans(c, result[c.name], rank)
        if not clip:
            body, axes = pin_indices(body, axes, rank)
        for load in ex.loads(body):
            if load.tensor in inside:
                box = load_spans(load, axes, types[load.tensor].shape, rank, clip)
                known = result.get(load.tensor)
                result[load.tensor] = box if known is None else join_boxes(known, box)
    return result
