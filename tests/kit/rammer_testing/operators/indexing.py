"""Operators with index operands: Gather, Scatter and related ones."""

from __future__ import annotations

import numpy as np

from rammer_testing.operators.draw import NUMBERS, Draw, DrawnValue, Reject
from rammer_testing.operators.elementwise import small
from rammer_testing.operators.registry import describe
from rammer_testing.operators.shapes import anything, axis_of


def indices(d: Draw, shape: tuple[int, ...], extent: int, unsigned: bool = False, dtype: str = "int64") -> DrawnValue:
    """Return indices along an axis of ``extent`` elements, some counted from the end."""
    if extent == 0 and np.prod(shape, dtype=np.int64):
        raise Reject("nothing to index")
    return d.fresh(dtype, shape, 0 if unsigned else -extent, max(extent - 1, 0))


def _kind(d: Draw) -> str:
    return d.one(["int64", "int64", "int32"])


@describe("Gather", weight=2)
def gather(d: Draw, op: str) -> DrawnValue:
    x = anything(d, op, (1, 4))
    axis = axis_of(d, x.rank)
    where = indices(d, d.shape(0, 2), x.shape[axis], d.since(op) < 11, _kind(d))
    return d.add(op, [x.name, where.name], axis=axis if axis or d.chance(0.5) else None)


@describe("GatherElements")
def gather_elements(d: Draw, op: str) -> DrawnValue:
    x = anything(d, op, (1, 4))
    axis = axis_of(d, x.rank)
    shape = tuple(d.integer(1, 5) if i == axis % x.rank else d.integer(min(1, n), n) for i, n in enumerate(x.shape))
    return d.add(op, [x.name, indices(d, shape, x.shape[axis], dtype=_kind(d)).name], axis=axis)


@describe("GatherND")
def gather_nd(d: Draw, op: str) -> DrawnValue:
    x = anything(d, op, (1, 4))
    batch = d.integer(0, min(x.rank - 1, 2)) if d.takes(op, "batch_dims") and d.chance(0.3) else 0
    depth = d.integer(1, x.rank - batch)
    shape = (*x.shape[:batch], *d.shape(0, 2), depth)
    return d.add(
        op,
        [x.name, _tuples(d, shape, x.shape[batch : batch + depth]).name],
        batch_dims=batch or (0 if d.takes(op, "batch_dims") and d.chance(0.3) else None),
    )


def _tuples(d: Draw, shape: tuple[int, ...], extents: tuple[int, ...]) -> DrawnValue:
    """Return index tuples along the last axis, each within its extent."""
    if 0 in extents:
        raise Reject("nothing to index")
    columns = [d.rng.integers(-n, n, shape[:-1]) for n in extents]
    return d.with_elements(np.stack(columns, axis=-1).astype(np.int64) if columns else np.zeros(shape, np.int64))


@describe("OneHot")
def one_hot(d: Draw, op: str) -> DrawnValue:
    depth = d.integer(1, 6)
    where = d.fresh(d.one(["int64", "int32", "float32"]), d.shape(1, 3), -depth - 1, depth + 1)
    if where.dtype == "float32":
        where = d.with_elements(np.asarray(d.rng.integers(-depth, depth, where.shape), np.float32))
    pair = d.fresh(d.dtype(d.types(op, 2) if d.alone and d.chance(0.4) else ("float32", "int64", "int32")), (2,))
    count = d.plain(np.asarray(depth if d.chance(0.5) else [depth], "int64"))
    return d.add(op, [where.name, count, pair.name], axis=d.integer(-where.rank - 1, where.rank) if d.chance(0.7) else None)


@describe("ReverseSequence")
def reverse_sequence(d: Draw, op: str) -> DrawnValue:
    x = anything(d, op, (2, 4))
    batch, time = d.one([(0, 1), (1, 0)])
    lengths = d.fresh("int64", (x.shape[batch],), 1 if x.shape[time] else 0, x.shape[time])
    return d.add(op, [x.name, lengths.name], batch_axis=batch, time_axis=time)


@describe("Scatter", "ScatterElements")
def scatter_elements(d: Draw, op: str) -> DrawnValue:
    x = d.pick(d.types(op), (1, 3), where=small)
    axis = axis_of(d, x.rank) if d.opset >= 11 else d.integer(0, x.rank - 1)
    extent = x.shape[axis]
    modes = [None, "none"] if d.takes(op, "reduction") else [None]
    if d.takes(op, "reduction") and (d.alone or x.dtype in NUMBERS):
        modes += ["add", "mul", *(["min", "max"] if d.since(op) >= 18 else [])]
    mode = d.one(modes)
    shape = [d.integer(min(1, n), n) for n in x.shape]
    if mode in (None, "none"):
        # The winner of two writes to one element is undefined, so every index occurs at most once along the axis.
        places = np.argsort(d.rng.random(x.shape), axis=axis)
        where = places[tuple(slice(0, n) for n in shape)].astype(np.int64)
    else:
        where = np.asarray(d.rng.integers(0, max(extent, 1), shape), np.int64)
    if extent and d.opset >= 11:
        where = where - extent * (d.rng.random(where.shape) < 0.3)
    held = d.with_elements(where.astype(np.int64))
    return d.add(op, [x.name, held.name, d.fresh(x.dtype, shape).name], axis=axis, reduction=mode)


@describe("ScatterND")
def scatter_nd(d: Draw, op: str) -> DrawnValue:
    x = d.pick(d.types(op), (1, 3), where=lambda v: small(v) and v.size > 0)
    depth = d.integer(1, x.rank)
    cells = int(np.prod(x.shape[:depth]))
    modes = ["none"] if not d.takes(op, "reduction") or not (d.alone or x.dtype in NUMBERS) else ["none", "add", "mul"]
    mode = d.one([*modes, *(["min", "max"] if d.since(op) >= 18 and len(modes) > 1 else [])])
    count = d.integer(1, min(cells, 6))
    chosen = d.rng.permutation(cells)[:count] if mode == "none" else d.rng.integers(0, cells, count)
    where = np.stack(np.unravel_index(chosen, x.shape[:depth]), axis=-1).astype(np.int64)
    held = d.with_elements(where)
    updates = d.fresh(x.dtype, (count, *x.shape[depth:]))
    return d.add(
        op,
        [x.name, held.name, updates.name],
        reduction=mode if mode != "none" or (d.takes(op, "reduction") and d.chance(0.3)) else None,
    )


@describe("TensorScatter")
def tensor_scatter(d: Draw, op: str) -> DrawnValue:
    x = d.pick(d.types(op), (2, 4), where=lambda v: small(v) and v.size > 0)
    axis = d.integer(1, x.rank - 1)
    length = d.integer(1, x.shape[axis])
    names = [x.name, d.fresh(x.dtype, tuple(length if i == axis else n for i, n in enumerate(x.shape))).name]
    mode = d.one([None, "linear", "circular"])
    if d.chance(0.7):
        most = x.shape[axis] - 1 if mode == "circular" else x.shape[axis] - length
        names.append(d.fresh("int64", (x.shape[0],), 0, most).name)
    return d.add(op, names, axis=axis - d.one([0, x.rank]), mode=mode)
