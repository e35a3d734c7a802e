"""Packed constants: another arrangement of a constant's values, made by NumPy when a program is loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from rammer.codegen.task import Array, Packing, packing_key, padded
from rammer.ir.compute import Axis, Compute
from rammer.ir.evaluate import evaluate
from rammer.ir.expr import Load


def packing(
    load: Load, axes: Sequence[Axis], size: int, arrange: Callable[[Array], Array], *facts: object, dtype: str = "float32"
) -> Packing:
    """What ``load`` of a constant reads at every point of ``axes``, as ``dtype``: ``arrange`` gets it with their extents, and
    gives ``size`` elements. ``facts``, which print alike if they are alike, say all that it does."""
    bare = Load("constant", load.indices, load.fill)

    def make(values: Array) -> Array:
        found = evaluate(Compute("packed", dtype, tuple(axes), bare), {bare.tensor: values})
        return np.ascontiguousarray(arrange(found), dtype)

    return Packing(packing_key(str(bare), [str(a) for a in axes], dtype, *facts), size, make, dtype)


def in_tiles(lines: Array, tile: int, unit: int) -> Array:
    """``[outer, line, ...]`` as ``[outer, tiles, elements of a tile, ...]``: the last tile filled up with zeros, and each tile to
    whole ``unit``s."""
    outer, extent, *rest = lines.shape
    tiles = -(-extent // tile)
    cut = padded(lines, 1, tiles * tile).reshape(outer, tiles, tile, *rest)
    return padded(cut, 2, -(-tile // unit) * unit)
