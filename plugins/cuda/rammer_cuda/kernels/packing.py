"""Packed arrangements of constant operands, made by NumPy when a program is loaded."""

from __future__ import annotations

import math

import numpy as np

from rammer.codegen.contraction import Operand, Product
from rammer.codegen.task import Array, Packing, packing_key, padded
from rammer.ir import expr as ex
from rammer.ir.compute import Axis, Compute
from rammer.ir.evaluate import evaluate

from rammer_cuda.kernels.depth import Depth


def pack(p: Product, operand: Operand, along: int | None, unit: int, depth: Depth) -> tuple[Packing, list[int]]:
    """``operand`` as ``[fixed axes..., tiles along axis ``along``, K blocks * BK, unit]``, padded with zeros.

    Also returns the positions of the fixed axes, outermost first.
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
        data = padded(full.reshape(outer, line.extent, taps, depth.inner.extent), 3, depth.padded)
        data = padded(data.reshape(outer, line.extent, -1), 2, depth.blocks * depth.block)
        data = padded(data, 1, tiles * tile).reshape(outer, tiles, tile, -1)
        return np.ascontiguousarray(np.swapaxes(padded(data, 2, unit), 2, 3), dtype=np.float32)

    key = packing_key(str(operand.load), [str(a) for a in axes], str(line), tile, unit, str(depth))
    return Packing(key, size, make), fixed
