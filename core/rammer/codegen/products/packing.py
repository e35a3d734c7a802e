"""The arrangement of product blocks in shared memory, and constants packed in that arrangement at load time.

An arrangement maps product ``k`` of element ``e`` of a block ``[k][e]`` to an offset (elements: rows of one operand, columns of
the other). It provides C text for kernels and packs NumPy arrays. Tests check that both agree."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from rammer.codegen.contraction_form import Operand, Product
from rammer.codegen.packed_constants import in_tiles, make_packing
from rammer.codegen.products.depth import Depth
from rammer.codegen.task_parameters import Packing, pad_axis
from rammer.device.manifest import Array
from rammer.ir import expr as ex
from rammer.ir.compute import Axis

#: Columns of a core matrix, and products of two core matrices in float32: the depth of one tf32 instruction.
CORE = 8
DEEP = 8
#: Constants shared by kernels are padded to a multiple of this number of products, by elements in 16 bytes. All block depths
#: divide it. BEYOND: elements past the last one that a tile may read.
SHARED, BEYOND = {4: 64, 8: 128, 16: 128}, 256


class Arrangement(Protocol):
    """The order of ``block`` products of ``unit`` elements in shared memory."""

    def pitch(self, unit: int, block: int) -> int:
        """Return the elements from one row in shared memory to the next."""

    def size(self, unit: int, block: int) -> int:
        """Return the total number of elements, padding included."""

    def place(self, k: str, e: str, unit: int, block: int) -> str:
        """Return C text for the offset of product ``k`` of element ``e``, or of its 16-byte group."""

    def ahead(self, products: int, elements: int, unit: int, block: int) -> int | None:
        """Return the distance from any product and element to those ``products`` and ``elements`` further on. Returns None if the
        distance depends on the position."""

    def packed(self, values: Array) -> Array:
        """Return ``values[..., k, e]`` in this arrangement."""


@dataclass(frozen=True, slots=True)
class Rows:
    """An arrangement with one row per product, ``[k][e]``.

    With ``spread``, rows have 8 (mod 16) elements, so lanes that read different products read different banks. Rows without that
    padding get ``least`` extra elements, for threads that write down the columns."""

    spread: bool = False
    least: int = 0

    def pitch(self, unit: int, block: int) -> int:
        return unit + ((8 - unit) % 16 * self.spread or self.least)

    def size(self, unit: int, block: int) -> int:
        return block * self.pitch(unit, block)

    def place(self, k: str, e: str, unit: int, block: int) -> str:
        return f"{k} * {self.pitch(unit, block)} + {e}"

    def ahead(self, products: int, elements: int, unit: int, block: int) -> int | None:
        return products * self.pitch(unit, block) + elements

    def packed(self, values: Array) -> Array:
        return pad_axis(values, values.ndim - 1, self.pitch(values.shape[-1], 0))


@dataclass(frozen=True, slots=True)
class Turned:
    """An arrangement with one row per element, ``[e][k]``, each one ``lot`` (16 bytes) longer. ldmatrix reads rows of an odd
    number of lots without conflicts."""

    lot: int

    def pitch(self, unit: int, block: int) -> int:
        return block + self.lot

    def size(self, unit: int, block: int) -> int:
        return unit * self.pitch(unit, block)

    def place(self, k: str, e: str, unit: int, block: int) -> str:
        return f"{e} * {self.pitch(unit, block)} + {k}"

    def ahead(self, products: int, elements: int, unit: int, block: int) -> int | None:
        return elements * self.pitch(unit, block) + products

    def packed(self, values: Array) -> Array:
        turned = np.swapaxes(values, -2, -1)
        return pad_axis(turned, values.ndim - 1, self.pitch(0, turned.shape[-1]))


@dataclass(frozen=True, slots=True)
class Cores:
    """An arrangement in core matrices of 8 elements by a ``lot`` (16 bytes) of products.

    Matrices of the next elements follow each other, then those of the next products. With ``across``, a lot holds elements of one
    product (float16)."""

    lot: int
    across: bool = False

    def pitch(self, unit: int, block: int) -> int:
        return unit

    def size(self, unit: int, block: int) -> int:
        return unit * block

    def place(self, k: str, e: str, unit: int, block: int) -> str:
        if self.across:
            return f"{k} / {CORE} * {CORE * unit} + {e} * {CORE} + {k} % {CORE} * {self.lot}"
        return f"{k} * {unit} + {e} * {self.lot}"

    def ahead(self, products: int, elements: int, unit: int, block: int) -> int | None:
        if self.across and products % CORE:
            return None
        return products * unit + elements * (CORE if self.across else self.lot)

    def packed(self, values: Array) -> Array:
        assert not self.across, "constants are packed along products"
        return to_core_matrices(values)


def to_core_matrices(values: Array, order: Sequence[int] = range(DEEP)) -> Array:
    """Return ``values[..., k, n]`` as wgmma's operand B, ``[..., k / 8, 8 / w, n / 8, 8, w]``.

    Core matrices have 8 columns by the ``w`` products in 16 bytes (4 of float32, 8 of float16). For bytes the result is ``[..., k
    / 16, 1, n / 8, 8, 16]``. Position i of 8 products holds product ``order[i]``."""
    *outer, deep, columns = values.shape
    wide = 16 // values.itemsize
    split = values.reshape(*outer, deep // DEEP, DEEP, columns)
    if [*order] != [*range(DEEP)]:  # indexing copies
        split = split[..., list(order), :]
    # Core matrices of bytes have 16 products, two times DEEP.
    eights = (deep // DEEP, DEEP // wide) if wide <= DEEP else (deep // wide, 1)
    matrices = split.reshape(*outer, *eights, wide, columns // CORE, CORE)
    return np.ascontiguousarray(np.moveaxis(matrices, -3, -1))


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks of products of ``unit`` elements, in the order of ``depth`` and in ``arrangement``. ``kind`` is "float32", "tf32"
    (float32 rounded to tf32), "float16" or "int8" (bytes with the constant's sign)."""

    unit: int
    depth: Depth
    arrangement: Arrangement = Rows()
    kind: str = "float32"


def pack_operand(p: Product, operand: Operand, along: int | None, blocks: Blocks) -> tuple[Packing, list[int]]:
    """Pack ``operand`` as ``[fixed axes..., tiles along axis ``along``, K blocks, a block of products]``, padded with zeros. Also
    returns the positions of the fixed axes, outermost first."""
    unit, depth, arrangement, kind = blocks.unit, blocks.depth, blocks.arrangement, blocks.kind
    fixed, axes, line = _split_axes(p, operand, along)
    tile = p.operator.tile[along] if along is not None else 1
    tiles = -(-line.extent // tile)
    size = math.prod(a.extent for a in axes) * tiles * depth.blocks * arrangement.size(unit, depth.block)

    taps = math.prod(a.extent for a in depth.outer)

    def arrange(full: Array) -> Array:
        data = pad_axis(full.reshape(-1, line.extent, taps, depth.inner.extent), 3, depth.padded)
        data = pad_axis(data.reshape(-1, line.extent, taps * depth.padded), 2, depth.blocks * depth.block)
        lines = in_tiles(data, tile, unit).reshape(-1, tiles, unit, depth.blocks, depth.block)
        turned = np.moveaxis(lines, 2, -1)
        return arrangement.packed(rounded_to_tf32(turned) if kind == "tf32" else turned)

    facts = kind, str(arrangement), tile, unit, str(depth)
    return make_packing(
        operand.load, _packed_axes(p, depth, axes, line), size, arrange, *facts, dtype=_packed_dtype(kind, operand)
    ), fixed


def _split_axes(p: Product, operand: Operand, along: int | None) -> tuple[list[int], list[Axis], Axis]:
    """Return an operand's fixed axes, as positions and axes, and the axis along its unit."""
    used = ex.axes_of(operand.load)
    fixed = [d for d, a in enumerate(p.main.axes) if a.name in used and d != along]
    return fixed, [p.main.axes[d] for d in fixed], p.main.axes[along] if along is not None else Axis("one__", 1)


def _packed_axes(p: Product, depth: Depth, axes: Sequence[Axis], line: Axis) -> tuple[Axis, ...]:
    """Return all axes of an operand in packing order."""
    return (*axes, line, *depth.outer, depth.inner, *(r for r in p.main.reduce if r not in depth.axes))


def _packed_dtype(kind: str, operand: Operand) -> str:
    return {"float16": "float16", "int8": "int8" if operand.signed else "uint8"}.get(kind, "float32")


@dataclass(frozen=True, slots=True)
class Common:
    """A constant's order that all tiles and block depths share: ``[products / wide][elements][wide]``.

    A row holds ``wide`` products of all elements. The next fixed axes start every ``size`` elements. ``tap`` is the number of
    rows of a tap (0 in flat order or without taps)."""

    wide: int
    elements: int
    size: int
    tap: int

    @property
    def row(self) -> int:
        """Elements of a row."""
        return self.elements * self.wide


def common_order(p: Product, operand: Operand, along: int | None, blocks: Blocks) -> Common | None:
    """Return the order that kernels of other tiles share, or None if sharing is impossible. Copies of 16 bytes need neighbours of
    one row, and a tile must start with a full copy."""
    unit, depth, order = blocks.unit, blocks.depth, blocks.arrangement
    lot = {"float16": 8, "int8": 16}.get(blocks.kind, 4)
    if along is None or isinstance(order, Turned) or (isinstance(order, Cores) and order.across):
        return None
    wide = order.lot if isinstance(order, Cores) else 1
    tile, line = p.operator.tile[along], p.main.axes[along].extent
    begins = tile < line and tile * wide % lot
    if begins or unit * wide % lot or depth.block % wide or SHARED[lot] % depth.block:
        return None
    step = SHARED[lot]
    inner = depth.inner.extent if depth.flat else -(-depth.inner.extent // step) * step
    deep = -(-math.prod(a.extent for a in depth.outer) * inner // step) * step
    elements = -(-line // lot) * lot
    return Common(wide, elements, deep * elements, inner // wide if depth.outer and not depth.flat else 0)


def pack_common(p: Product, operand: Operand, along: int, blocks: Blocks, common: Common) -> tuple[Packing, list[int]]:
    """Pack ``operand`` as ``[fixed axes..., rows, elements, products of a row]``; also return the positions of the fixed axes.
    Reads past the last element return the next row, or zeros past all rows. Their results are never stored."""
    fixed, axes, line = _split_axes(p, operand, along)
    depth, wide, kind = blocks.depth, common.wide, blocks.kind
    taps, deep = math.prod(a.extent for a in depth.outer), common.size // common.elements
    inner = common.tap * wide or depth.inner.extent
    size = math.prod(a.extent for a in axes) * common.size + BEYOND * wide

    def arrange(full: Array) -> Array:
        data = pad_axis(full.reshape(-1, line.extent, taps, depth.inner.extent), 3, inner).reshape(-1, line.extent, taps * inner)
        split = pad_axis(pad_axis(data, 2, deep), 1, common.elements).reshape(-1, common.elements, deep // wide, wide)
        rows = np.ascontiguousarray(np.swapaxes(split, 1, 2)).reshape(-1)
        return pad_axis(rounded_to_tf32(rows) if kind == "tf32" else rows, 0, size)

    facts = "common", kind, wide, str(common), BEYOND
    return make_packing(
        operand.load, _packed_axes(p, depth, axes, line), size, arrange, *facts, dtype=_packed_dtype(kind, operand)
    ), fixed


def rounded_to_tf32(values: Array) -> Array:
    """Round float32 values to 10 bits of mantissa, halves away from zero, as ``cvt.rna.tf32.f32`` does."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    # The carry of a large finite value reaches the exponent and correctly gives infinity. NaN must not become infinity.
    rounded = np.where(np.isfinite(values), (bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000), bits)
    return rounded.astype(np.uint32).view(np.float32)
