"""Packed constants: another arrangement of a constant's values, made by NumPy when a program is loaded."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from rammer.codegen.task_parameters import Array, Packing, packing_key, padded
from rammer.ir.compute import Axis, Compute
from rammer.ir.evaluate import evaluate, strided
from rammer.ir.expr import Load
from rammer.ir.reindex import reshape_indices


def packing(
    load: Load, axes: Sequence[Axis], size: int, arrange: Callable[[Array], Array], *facts: object, dtype: str = "float32"
) -> Packing:
    """What ``load`` of a constant reads at every point of ``axes``, as ``dtype``: ``arrange`` gets it with their extents, maybe
    read-only, and gives ``size`` elements. ``facts``, which print alike if they are alike, say all that it does."""
    bare = Load("constant", load.indices, load.fill)

    def make(values: Array) -> Array:
        found = _viewed(bare, axes, values)
        if found is None:
            found = evaluate(Compute("packed", dtype, tuple(axes), bare), {bare.tensor: values})
        return np.asarray(arrange(found.astype(dtype, copy=False)), dtype)

    return Packing(packing_key(str(bare), [str(a) for a in axes], dtype, *facts), size, make, dtype)


def _viewed(load: Load, axes: Sequence[Axis], values: Array) -> Array | None:
    """What ``load`` reads as a view of the constant, which takes no memory; None where there is no such."""
    shape = tuple(a.extent for a in axes)
    if values.size == math.prod(shape) and load.indices == reshape_indices(values.shape, axes):
        return values.reshape(shape)
    found = strided(load, tuple(axes), values) if values.size else None
    return None if found is None else np.broadcast_to(found, shape)


def in_tiles(lines: Array, tile: int, unit: int) -> Array:
    """``[outer, line, ...]`` as ``[outer, tiles, elements of a tile, ...]``: the last tile filled up with zeros, and each tile to
    whole ``unit``s."""
    outer, extent, *rest = lines.shape
    tiles = -(-extent // tile)
    cut = padded(lines, 1, tiles * tile).reshape(outer, tiles, tile, *rest)
    return padded(cut, 2, -(-tile // unit) * unit)
