"""Splitting of gathered tables into pieces, for devices whose tasks hold all data that they may read.

``y[i] = t[at[i]]`` becomes a view of ``t`` as pieces of equal size, a gather from each piece, and a selection:

    y_pieces[p, r] = t[p * step + r]
    y_each[i, p] = y_pieces[p, at[i] - p * step]
    y[i] = y_each[i, min(max(at[i], 0) // step, parts - 1)]

If the parts do not divide the extent, pieces are longer than ``step`` and overlap. The last piece ends with the tensor. An index
outside a piece yields an arbitrary element of it, which is never selected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import count, islice

from rammer.ir import expr as ex
from rammer.ir.compute import Axis, Compute
from rammer.ir.expr import Cast, Expr, Load, Op, Ref
from rammer.ir.types import TensorType


def find_gather_loads(compute: Compute, shapes: Sequence[Sequence[int]]) -> list[tuple[int, Load, int]]:
    """Return the loads of ``compute`` with a data-dependent dimension, each with that dimension's extent and number. ``shapes``
    are the shapes of the loaded tensors, load by load."""
    bounds = {a.name: (0, a.extent - 1) for a in (*compute.axes, *compute.reduce)}
    return [
        (shape[dim], load, dim)
        for load, shape in zip(compute.loads, shapes, strict=True)
        for dim, index in enumerate(load.indices)
        if ex.interval(index, bounds) is None
    ]


def in_pieces(
    compute: Compute, load: Load, dim: int, table: TensorType, parts: int, names: tuple[str, str]
) -> tuple[Compute, Compute, Compute]:
    """Return the three steps above for a map that reads ``table`` by ``load``, cut along ``dim``. ``names`` are the names of the
    first two Computes. The number of pieces is at most ``parts`` and the number of elements."""
    shape = table.shape
    step = shape[dim] // parts
    size = shape[dim] - (parts - 1) * step
    used = {a.name for a in compute.axes}
    part, *rest = islice((f"p{i}" for i in count() if f"p{i}" not in used), 1 + len(shape))
    place: list[Expr] = [Ref(a) for a in rest]
    place[dim] = ex.make_add(ex.make_mul(part, step), rest[dim])
    axes = [Axis(a, size if i == dim else n) for i, (a, n) in enumerate(zip(rest, shape, strict=True))]
    view = Compute(names[0], table.dtype, (Axis(part, parts), *axes), Load(load.tensor, tuple(place)), origin=compute.origin)
    at = Cast("int64", load.indices[dim])
    within: Expr = Op("sub", (at, ex.make_mul(part, step)))
    if load.fill is None:  # the index is inside the tensor, but not inside every piece
        within = Op("min", (Op("max", (within, ex.integer(0))), ex.integer(size - 1)))
    inside = Load(view.name, (Ref(part), *load.indices[:dim], within, *load.indices[dim + 1 :]), load.fill)
    each = replace(
        compute,
        name=names[1],
        axes=(*compute.axes, Axis(part, parts)),
        body=ex.transform(compute.body, lambda e: inside if e == load else None),
    )
    chosen = Op("min", (Op("floordiv", (Op("max", (at, ex.integer(0))), ex.integer(step))), ex.integer(parts - 1)))
    return view, each, replace(compute, body=Load(each.name, (*(Ref(a.name) for a in compute.axes), chosen)))
