"""Packed constants: another arrangement of a constant's values, computed by NumPy when a program is loaded."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from rammer.codegen.task_parameters import Array, Packing, packing_key, pad_axis
from rammer.ir.compute import Axis, Compute
from rammer.ir.evaluate import evaluate_compute, strided_view
from rammer.ir.expr import Load
from rammer.ir.reindex import reshape_indices


def make_packing(
    load: Load, axes: Sequence[Axis], size: int, arrange: Callable[[Array], Array], *facts: object, dtype: str = "float32"
) -> Packing:
    """Return a packing of the values that ``load`` of a constant reads at every point of ``axes``, as ``dtype``.

    ``arrange`` gets them with the extents of ``axes``, maybe read-only, and returns ``size`` elements. ``facts`` describe all
    that it does; equal facts print alike."""
    bare = Load("constant", load.indices, load.fill)

    def make(values: Array) -> Array:
        found = _view_constant(bare, axes, values)
        if found is None:
            found = evaluate_compute(Compute("packed", dtype, tuple(axes), bare), {bare.tensor: values})
        return np.asarray(arrange(found.astype(dtype, copy=False)), dtype)

    return Packing(packing_key(str(bare), [str(a) for a in axes], dtype, *facts), size, make, dtype)


def _view_constant(load: Load, axes: Sequence[Axis], values: Array) -> Array | None:
    """Return the values of ``load`` as a view of the constant without a copy, or None if impossible."""
    shape = tuple(a.extent for a in axes)
    if values.size == math.prod(shape) and load.indices == reshape_indices(values.shape, axes):
        return values.reshape(shape)
    found = strided_view(load, tuple(axes), values) if values.size else None
    return None if found is None else np.broadcast_to(found, shape)


def in_tiles(lines: Array, tile: int, unit: int) -> Array:
    """Reshape ``[outer, line, ...]`` to ``[outer, tiles, elements of a tile, ...]``. The last tile is padded with zeros, and each
    tile to a multiple of ``unit``."""
    outer, extent, *rest = lines.shape
    tiles = -(-extent // tile)
    cut = pad_axis(lines, 1, tiles * tile).reshape(outer, tiles, tile, *rest)
    return pad_axis(cut, 2, -(-tile // unit) * unit)
