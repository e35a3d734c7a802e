"""Packed arrangements of constant operands, computed by NumPy when a program is loaded."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from rammer.codegen import QUOTIENT, Packing, Unsuited, in_tiles, make_packing, pad_axis
from rammer.device.manifest import Array
from rammer.ir import expr as ex
from rammer.ir.compute import Axis
from rammer.ir.expr import Load

from rammer_rocm.panel.recognise import PanelProduct


def pack_rows(p: PanelProduct, unit: int) -> tuple[Packing, list[tuple[str, int]]]:
    """Return the row operand as ``[coordinates..., blocks, K, unit]``; tiles and blocks are padded with zeros.

    The coordinates are (name of a tile coordinate in the kernel, count), outermost first. Rows are read element by element, so
    they are always float32: the multiply instruction has a memory operand."""
    return _pack_operand(p, p.a, p.row, unit, "float32")


def pack_quads(p: PanelProduct, unit: int, rows: bool, factor: int) -> tuple[Packing, list[tuple[str, int]]]:
    """Return the row or column operand of a product of bytes in the same arrangement, with four bytes per ``int``. A non-zero
    ``factor`` stores ``factor`` times each line's sum before its K elements."""
    q = p.quads
    assert q is not None
    load, along = (q.a, p.row) if rows else (q.b, p.columns[0])
    if any(QUOTIENT in axis for axis in ex.axes_of(load)):
        raise Unsuited("grouped constants")
    place = next(i for i, r in enumerate(p.main.reduce) if r.name == q.axis)
    return _pack_operand(p, load, along, unit, "int32", Bytes(place, q.extent, q.types[0 if rows else 1], factor))


@dataclass(frozen=True)
class Bytes:
    """Conversion of lines of bytes to four-byte groups along axis ``place``, with ``extent`` bytes of type ``kind``."""

    place: int
    extent: int
    kind: str
    factor: int

    def __call__(self, lines: Array) -> Array:
        """Convert ``[outer, line, *reduction axes]`` to ``[outer, line, elements]`` of 32 bits."""
        d = 2 + self.place
        count = -(-self.extent // 4) * 4
        whole = np.moveaxis(pad_axis(lines, d, count), d, -1)
        fours = whole.reshape(*whole.shape[:-1], count // 4, 4).astype(self.kind)
        words = np.moveaxis(np.ascontiguousarray(fours).view(np.int32)[..., 0], -1, d)
        flat = words.reshape(*lines.shape[:2], -1)
        if not self.factor:
            return flat
        sums = lines.reshape(*lines.shape[:2], -1).astype(np.int64).sum(-1, keepdims=True) * self.factor
        return np.concatenate([sums.astype(np.int32), flat], axis=-1)


def pack_columns(p: PanelProduct, unit: int, dtype: str) -> tuple[Packing, list[tuple[str, int]]]:
    """Return the column operand in the same arrangement, along its single column axis, as ``dtype``."""
    if any(QUOTIENT in axis for axis in ex.axes_of(p.b)):
        raise Unsuited("grouped constant columns")
    return _pack_operand(p, p.b, p.columns[0], unit, dtype)


def _pack_operand(
    p: PanelProduct, load: Load, along: str, unit: int, dtype: str, quads: Bytes | None = None
) -> tuple[Packing, list[tuple[str, int]]]:
    used = ex.axes_of(load)
    fixed = [a for a in p.main.axes if a.name in used and a.name != along]
    grid = dict(zip((a.name for a in p.main.axes), p.operator.grid, strict=True))
    line, tile = (Axis(along, p.extent[along]), p.tile[along]) if along in used else (Axis("one__", 1), 1)
    tiles, blocks = -(-line.extent // tile), -(-tile // unit)
    coordinates = [(f"t_{a.name}", grid[a.name]) for a in fixed] + ([(f"t_{along}", tiles)] if along in used else [])
    depth = p.depth + bool(quads and quads.factor)
    size = math.prod(a.extent for a in fixed) * tiles * blocks * unit * depth
    reduce = [a if quads is None or i != quads.place else Axis(a.name, quads.extent) for i, a in enumerate(p.main.reduce)]

    def arrange(full: Array) -> Array:
        lines = full.reshape(-1, line.extent, *(r.extent for r in reduce))
        cut = in_tiles((quads(lines) if quads else lines).reshape(-1, line.extent, depth), tile, unit)
        return np.swapaxes(cut.reshape(-1, tiles, blocks, unit, depth), -1, -2)

    # Tiles of whole units are stored like their units: other tiles of these units share the same arrangement.
    lie = (unit, tiles * blocks) if tile == unit * blocks or tiles == 1 else (tile, unit)
    facts = ("panels", *lie) if quads is None else ("quads", *lie, quads)
    return make_packing(load, (*fixed, line, *reduce), size, arrange, *facts, dtype=dtype), coordinates
