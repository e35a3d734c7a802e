"""Packed arrangements of constant operands, made by NumPy when a program is loaded."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from rammer.codegen.contraction import QUOTIENT
from rammer.codegen.task import Array, Packing, Unsuited, packing_key, padded
from rammer.ir import expr as ex
from rammer.ir.compute import Axis, Compute
from rammer.ir.evaluate import evaluate
from rammer.ir.expr import Load

from rammer_rocm.kernels.contraction import PanelProduct


def pack_rows(p: PanelProduct, unit: int) -> tuple[Packing, list[tuple[str, int]]]:
    """The row operand as ``[coordinates..., blocks, K, unit]``; tiles and blocks are padded with zeros.

    The coordinates are (name of a tile coordinate in the kernel, count), outermost first.
    """
    return _pack(p, p.a, p.row, unit)


def pack_columns(p: PanelProduct, unit: int) -> tuple[Packing, list[tuple[str, int]]]:
    """The column operand in the same arrangement, along its single column axis."""
    if any(QUOTIENT in axis for axis in ex.axes_of(p.b)):
        raise Unsuited("grouped constant columns")
    return _pack(p, p.b, p.columns[0], unit)


def _pack(p: PanelProduct, load: Load, along: str, unit: int) -> tuple[Packing, list[tuple[str, int]]]:
    used = ex.axes_of(load)
    fixed = [a for a in p.main.axes if a.name in used and a.name != along]
    grid = dict(zip((a.name for a in p.main.axes), p.operator.grid, strict=True))
    split = along in used
    extent, tile = (p.extent[along], p.tile[along]) if split else (1, 1)
    tiles, blocks = -(-extent // tile), -(-tile // unit)
    axes = (*fixed, *([Axis(along, extent)] if split else []))
    coordinates = [(f"t_{a.name}", grid[a.name]) for a in fixed] + ([(f"t_{along}", tiles)] if split else [])
    size = math.prod(a.extent for a in fixed) * tiles * blocks * unit * p.depth

    def make(values: Array) -> Array:
        return _arranged(values, load, axes, p.main.reduce, split, (tiles, tile, blocks, unit))

    key = packing_key(str(load), [str(a) for a in (*axes, *p.main.reduce)], tiles, tile, blocks, unit, split)
    return Packing(key, size, make), coordinates


def _arranged(
    values: Array, load: Load, axes: Sequence[Axis], reduce: Sequence[Axis], split: bool, shape: tuple[int, int, int, int]
) -> Array:
    tiles, tile, blocks, unit = shape
    depth = math.prod(r.extent for r in reduce)
    full = evaluate(Compute("packed", "float32", (*axes, *reduce), load), {load.tensor: values})
    outer = tuple(a.extent for a in (axes[:-1] if split else axes))
    lines = full.reshape((*outer, axes[-1].extent if split else 1, depth))
    lines = padded(lines, lines.ndim - 2, tiles * tile).reshape((*outer, tiles, tile, depth))
    lines = padded(lines, lines.ndim - 2, blocks * unit).reshape((*outer, tiles, blocks, unit, depth))
    return np.ascontiguousarray(np.swapaxes(lines, -1, -2), dtype=np.float32)
