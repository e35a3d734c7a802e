"""Affine addresses of loads in the buffers of their tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from rammer.ir import expr as ex
from rammer.ir.compute import Axis
from rammer.ir.evaluate import FUNCTIONS
from rammer.ir.expr import Const, Expr, Load, Op, Ref, Table
from rammer.ir.program import Storage
from rammer.ir.reindex import reshape_indices
from rammer.ir.types import row_major

#: Maximum number of points at which an index that is not syntactically affine is evaluated.
MAX_POINTS = 1 << 22

#: ``offset + sum(stride * axis)``, in elements.
Address = tuple[int, tuple[int, ...]]


def load_address(indices: Sequence[Expr], axes: Sequence[Axis], storage: Storage) -> Address | None:
    """Return the address of ``storage`` at ``indices`` as an affine function of ``axes``, or None.

    Affine indices are decided by form. The sum of the others is evaluated at every value of their axes (at most ``MAX_POINTS``
    points), which is exact. Axes of extent 1 get stride 0."""
    offset, strides = storage.offset, dict.fromkeys((a.name for a in axes), 0)
    rest: list[tuple[int, Expr]] = []
    for index, stride in zip(indices, storage.strides, strict=True):
        form = ex.affine_form(index)
        if form is None:
            rest.append((stride, index))
            continue
        offset += form[1] * stride
        for name, coefficient in form[0].items():
            strides[name] += coefficient * stride
    if rest:
        found = _affine_address(rest, axes)
        if found is None:
            return None
        offset += found[0]
        for name, step in found[1].items():
            strides[name] += step
    return offset, tuple(strides[a.name] if a.extent > 1 else 0 for a in axes)


def _affine_address(terms: Sequence[tuple[int, Expr]], axes: Sequence[Axis]) -> tuple[int, dict[str, int]] | None:
    """Return ``sum(stride * index)`` as (offset, step by axis) if it is affine at every point of its axes."""
    used = set[str]().union(*(ex.axes_of(i) for _, i in terms))
    span = [a for a in axes if a.name in used]
    if math.prod(a.extent for a in span) > MAX_POINTS or any(a.extent == 0 for a in span):
        return None
    grid = {a.name: np.arange(a.extent, dtype=np.int64).reshape([-1 if b is a else 1 for b in span]) for a in span}
    value = np.zeros((1,) * len(span), np.int64)
    for stride, index in terms:
        part = index_values(index, grid)
        if part is None:
            return None
        value = value + stride * part
    value = np.broadcast_to(value, [a.extent for a in span])
    origin = int(value[(0,) * len(span)])
    steps = {a.name: int(np.take(value, 1, axis=d).flat[0]) - origin if a.extent > 1 else 0 for d, a in enumerate(span)}
    line = np.full((1,) * len(span), origin, np.int64)
    for a in span:
        line = line + steps[a.name] * grid[a.name]
    return (origin, steps) if np.array_equal(value, line) else None


def index_values(index: Expr, grid: dict[str, np.ndarray[Any, Any]]) -> np.ndarray[Any, Any] | None:
    """Return an index over the grid of its axes, or None if it depends on data or is not integer."""
    if isinstance(index, Const):
        return np.asarray(int(index.value), np.int64)
    if isinstance(index, Ref):
        return grid[index.axis]
    if isinstance(index, Table):
        inner = index_values(index.index, grid)
        return None if inner is None else np.asarray(index.values, np.int64)[inner]
    if not isinstance(index, Op):
        return None
    args = [index_values(a, grid) for a in index.args]
    known = [a for a in args if a is not None]
    return np.asarray(FUNCTIONS[index.fn](*known)) if len(known) == len(args) else None


def dense_storage(tensor: str, buffer: str, shape: tuple[int, ...]) -> Storage:
    """Return row-major storage at the start of ``buffer``."""
    return Storage(tensor, buffer, 0, shape, row_major(shape))


def view_storage(tensor: str, load: Load, axes: Sequence[Axis], source: Storage) -> Storage | None:
    """Return the storage of ``tensor[axes] = load`` as a view of ``source``, or None if its address is not affine."""
    address = load_address(load.indices, axes, source)
    if address is None:
        return None
    return Storage(tensor, source.buffer, address[0], tuple(a.extent for a in axes), address[1])


def invert_view(source: str, shape: tuple[int, ...], load: Load, axes: Sequence[Axis], target: Storage) -> Storage | None:
    """Return the storage of ``source`` for which ``tensor[axes] = load`` (a load of it) is stored exactly in ``target``. Returns
    None unless the load visits every element of ``source`` once and the result is affine."""
    address = load_address(load.indices, axes, dense_storage(source, source, shape))
    if address is None or math.prod(shape) != math.prod(a.extent for a in axes):
        return None
    order = sorted((d for d, a in enumerate(axes) if a.extent > 1), key=lambda d: -address[1][d])
    digits = [axes[d] for d in order]
    if tuple(address[1][d] for d in order) != row_major(tuple(a.extent for a in digits)):
        return None
    # The load's axes are the digits of the source's row-major index, so a Reshape inverts it.
    mine = tuple(Axis(f"s{d}", n) for d, n in enumerate(shape))
    indices: list[Expr] = [ex.integer(0) for _ in axes]
    for d, index in zip(order, reshape_indices(tuple(a.extent for a in digits), mine), strict=True):
        indices[d] = index
    place = load_address(indices, mine, target)
    return None if place is None else Storage(source, target.buffer, place[0], shape, place[1])
