"""Packed arrangements of constant operands, made by NumPy when a program is loaded."""

from __future__ import annotations

import math

import numpy as np

from rammer.codegen.contraction import Operand, Product
from rammer.codegen.task import Array, Packing, packing_key, padded
from rammer.ir import expr as ex
from rammer.ir.compute import Axis, Compute
from rammer.ir.evaluate import evaluate

from rammer_cuda.contraction.depth import Depth
from rammer_cuda.contraction.wgmma import cores

#: How a packed constant's values are stored: as float32, as float32 rounded to tf32, as float16, or as one of these with
#: the last two axes arranged for warpgroup products (``wgmma.cores``).
FORMS = ("float32", "tf32", "float16", "cores", "cores of tf32", "cores of float16")


def pack(p: Product, operand: Operand, along: int | None, unit: int, depth: Depth,
         form: str = "float32", turned: int = 0) -> tuple[Packing, list[int]]:  # fmt: skip
    """``operand`` as ``[fixed axes..., tiles along axis ``along``, K blocks * BK, unit]``, padded with zeros, in one of
    ``FORMS``. With ``turned`` the end is ``[..., K blocks, unit, BK + turned]``.

    Also returns the positions of the fixed axes, outermost first.
    """
    used = ex.axes_of(operand.load)
    fixed = [d for d, a in enumerate(p.main.axes) if a.name in used and d != along]
    axes = [p.main.axes[d] for d in fixed]
    line = p.main.axes[along] if along is not None else Axis("one__", 1)
    tile = p.operator.tile[along] if along is not None else 1
    tiles = -(-line.extent // tile)
    size = math.prod(a.extent for a in axes) * tiles * depth.blocks * (depth.block + turned) * unit

    def make(values: Array) -> Array:
        dead = tuple(r for r in p.main.reduce if r not in depth.axes)
        body = (*axes, line, *depth.outer, depth.inner, *dead)
        kind = "float16" if form.endswith("float16") else "float32"
        full = evaluate(Compute("packed", kind, body, operand.load), {operand.tensor: values})
        outer = math.prod(a.extent for a in axes)
        taps = math.prod(a.extent for a in depth.outer)
        data = padded(full.reshape(outer, line.extent, taps, depth.inner.extent), 3, depth.padded)
        data = padded(data.reshape(outer, line.extent, -1), 2, depth.blocks * depth.block)
        data = padded(data, 1, tiles * tile).reshape(outer, tiles, tile, -1)
        data = padded(data, 2, unit)
        if turned:
            blocks = np.moveaxis(data.reshape(outer, tiles, unit, depth.blocks, depth.block), 3, 2)
            data = padded(blocks, 4, depth.block + turned)
        else:
            data = np.swapaxes(data, 2, 3)
        packed = np.ascontiguousarray(data, dtype=np.dtype(kind))
        packed = rounded_to_tf32(packed) if form.endswith("tf32") else packed
        return cores(packed) if form.startswith("cores") else packed

    key = packing_key(form, turned, str(operand.load), [str(a) for a in axes], str(line), tile, unit, str(depth))
    return Packing(key, size, make), fixed


def rounded_to_tf32(values: Array) -> Array:
    """float32 values rounded to 10 bits of mantissa, halves away from zero, as ``cvt.rna.tf32.f32`` does."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    # The carry of a large finite value reaches the exponent, and infinity is right then; NaN must not become one.
    rounded = np.where(np.isfinite(values), (bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000), bits)
    return rounded.astype(np.uint32).view(np.float32)
