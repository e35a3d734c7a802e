"""Packed arrangements of constant operands, made by NumPy when a program is loaded."""

from __future__ import annotations

import math

import numpy as np

from rammer.codegen.contraction import QUOTIENT
from rammer.codegen.packing import in_tiles, packing
from rammer.codegen.task import Array, Packing, Unsuited
from rammer.ir import expr as ex
from rammer.ir.compute import Axis
from rammer.ir.expr import Load

from rammer_rocm.kernels.contraction import PanelProduct


def pack_rows(p: PanelProduct, unit: int) -> tuple[Packing, list[tuple[str, int]]]:
    """The row operand as ``[coordinates..., blocks, K, unit]``; tiles and blocks are padded with zeros.

    The coordinates are (name of a tile coordinate in the kernel, count), outermost first. Rows are read element by element, so
    they are float32 whatever the tensor is: an instruction multiplies by one of them in memory.
    """
    return _pack(p, p.a, p.row, unit, "float32")


def pack_columns(p: PanelProduct, unit: int, dtype: str) -> tuple[Packing, list[tuple[str, int]]]:
    """The column operand in the same arrangement, along its single column axis, as ``dtype``."""
    if any(QUOTIENT in axis for axis in ex.axes_of(p.b)):
        raise Unsuited("grouped constant columns")
    return _pack(p, p.b, p.columns[0], unit, dtype)


def _pack(p: PanelProduct, load: Load, along: str, unit: int, dtype: str) -> tuple[Packing, list[tuple[str, int]]]:
    used = ex.axes_of(load)
    fixed = [a for a in p.main.axes if a.name in used and a.name != along]
    grid = dict(zip((a.name for a in p.main.axes), p.operator.grid, strict=True))
    line, tile = (Axis(along, p.extent[along]), p.tile[along]) if along in used else (Axis("one__", 1), 1)
    tiles, blocks = -(-line.extent // tile), -(-tile // unit)
    coordinates = [(f"t_{a.name}", grid[a.name]) for a in fixed] + ([(f"t_{along}", tiles)] if along in used else [])
    size = math.prod(a.extent for a in fixed) * tiles * blocks * unit * p.depth

    def arrange(full: Array) -> Array:
        cut = in_tiles(full.reshape(-1, line.extent, p.depth), tile, unit)
        return np.swapaxes(cut.reshape(-1, tiles, blocks, unit, p.depth), -1, -2)

    return packing(load, (*fixed, line, *p.main.reduce), size, arrange, "panels", tile, unit, dtype=dtype), coordinates
