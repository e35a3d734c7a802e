"""Packed arrangements of constant operands, made by NumPy when a program is loaded."""

from __future__ import annotations

import hashlib
import math

import numpy as np

from rammer.ir import expr as ex
from rammer.ir.compute import Axis, Compute
from rammer.ir.evaluate import evaluate

from rammer_cuda.kernels.contraction import Operand, Product
from rammer_cuda.kernels.depth import Depth
from rammer_cuda.kernels.task import Array, Packing
from rammer_cuda.kernels.wgmma import cores


def pack(p: Product, operand: Operand, along: int | None, unit: int, depth: Depth,
         cored: bool = False) -> tuple[Packing, list[int]]:  # fmt: skip
    """``operand`` as ``[fixed axes..., tiles along axis ``along``, K blocks * BK, unit]``, padded with zeros.

    With ``cored`` the K and unit axes are as ``wgmma.cores`` makes them. Also returns the positions of the fixed axes,
    outermost first.
    """
    used = ex.axes_of(operand.load)
    fixed = [d for d, a in enumerate(p.main.axes) if a.name in used and d != along]
    axes = [p.main.axes[d] for d in fixed]
    line = p.main.axes[along] if along is not None else Axis("one__", 1)
    tile = p.operator.tile[along] if along is not None else 1
    tiles = -(-line.extent // tile)
    size = math.prod(a.extent for a in axes) * tiles * depth.blocks * depth.block * unit

    def make(values: Array) -> Array:
        dead = tuple(r for r in p.main.reduce if r not in depth.axes)
        body = (*axes, line, *depth.outer, depth.inner, *dead)
        full = evaluate(Compute("packed", "float32", body, operand.load), {operand.tensor: values})
        outer = math.prod(a.extent for a in axes)
        taps = math.prod(a.extent for a in depth.outer)
        data = _padded(full.reshape(outer, line.extent, taps, depth.inner.extent), 3, depth.padded)
        data = _padded(data.reshape(outer, line.extent, -1), 2, depth.blocks * depth.block)
        data = _padded(data, 1, tiles * tile).reshape(outer, tiles, tile, -1)
        data = np.ascontiguousarray(np.swapaxes(_padded(data, 2, unit), 2, 3), dtype=np.float32)
        return cores(data) if cored else data

    text = repr((str(operand.load), [str(a) for a in axes], str(line), tile, unit, str(depth), cored))
    return Packing(hashlib.sha256(text.encode()).hexdigest()[:16], size, make), fixed


def _padded(array: Array, axis: int, count: int) -> Array:
    """``array`` with zeros appended along ``axis`` up to ``count``."""
    missing = count - array.shape[axis]
    return np.pad(array, [(0, missing if d == axis else 0) for d in range(array.ndim)]) if missing else array
