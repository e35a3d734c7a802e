"""Packed constants: another arrangement of a constant's values, made by NumPy when a program is loaded."""

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
    """What ``load`` of a constant reads at every point of ``axes``, as ``dtype``: ``arrange`` gets it with their extents, maybe
    read-only, and gives ``size`` elements. ``facts``, which print alike if they are alike, say all that it does."""
    bare = Load("constant", load.indices, load.fill)

    def make(values: Array) -> Array:
        found = _view_constant(bare, axes, values)
        if found is None:
            found = evaluate_compute(Compute("packed", dtype, tuple(axes), bare), {bare.tensor: values})
        return np.asarray(arrange(found.astype(dtype, copy=False)), dtype)

    return Packing(packing_key(str(bare), [str(a) for a in axes], dtype, *facts), size, make, dtype)


def _view_constant(load: Load, axes: Sequence[Axis], values: Array) -> Array | None:
    """What ``load`` reads as a view of the constant, which takes no memory; None where there is no such."""
    shape = tuple(a.extent for a in axes)
    if values.size == math.prod(shape) and load.indices == reshape_indices(values.shape, axes):
        return values.reshape(shape)
    found = strided_view(load, tuple(axes), values) if values.size else None
    return None if found is None else np.broadcast_to(found, shape)


def in_tiles(lines: Array, tile: int, unit: int) -> Array:
    """``[outer, line, ...]`` as ``[outer, tiles, elements of a tile, ...]``: the last tile filled up with zeros, and each tile to
    whole ``unit``s."""
    outer, extent, *rest = lines.shape
    tiles = -(-extent // tile)
    cut = pad_axis(lines, 1, tiles * tile).reshape(outer, tiles, tile, *rest)
    return pad_axis(cut, 2, -(-tile // unit) * unit)
