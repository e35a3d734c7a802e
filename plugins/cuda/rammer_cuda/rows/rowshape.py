"""The row form of an operator for the ``rowwise`` family: its rows, their layout, and the threads that share one."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

from rammer.codegen import (
    Accesses,
    RowForm,
    Unsuited,
    address_step,
    can_join_axes,
    collect_accesses,
    compute_type,
    map_form,
    row_form,
)
from rammer.codegen.products import WARP
from rammer.device.manifest import ALIGNED_ELEMENTS, Binding
from rammer.ir import expr as ex
from rammer.ir.expr import Load
from rammer.ir.operator import ROperator
from rammer.ir.types import itemsize

#: Threads that share a row, maximum elements of a thread, and maximum threads of a block.
LANES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
MOST_ELEMENTS, MOST_THREADS = 32, 1024
#: Numbers of rows whose threads are interleaved, if any: whole sectors of 4-byte elements.
SIDES = (8, 16, 32, 64)
#: Maximum elements of a row of an operator without reductions, whose row length is free.
MAP_ELEMENTS = 2048
#: Bytes of a sector: the transfer unit of memory and its cache.
SECTOR = 32
#: Types supported in reductions here: those that warp shuffles move.
SHUFFLED = frozenset(("float32", "float64", "int32", "int64", "uint32", "uint64"))


@dataclass(frozen=True, slots=True)
class RowShape:
    """The block of a row kernel: ``lanes`` threads per row, ``vector`` adjacent elements per load, ``chunks`` loads per thread.

    A block has ``rows`` rows, and ``blocks`` share a row. The lanes of a row are neighbours; with ``side``, that number of rows
    is interleaved, lane by lane."""

    lanes: int
    vector: int
    chunks: int
    rows: int
    blocks: int = 1
    side: int = 0

    @property
    def across(self) -> int:
        """Threads that share a row, over all blocks."""
        return self.lanes * self.blocks

    @property
    def sided(self) -> bool:
        """True if interleaved rows fill warps, with a thread for each row."""
        return self.lanes > 1 and self.rows <= self.side and self.side * self.lanes >= WARP

    @property
    def threads(self) -> int:
        """Threads of the block: whole warps."""
        return -(-(self.side or self.rows) * self.lanes // WARP) * WARP


@dataclass(frozen=True, slots=True)
class RowAccess:
    """A load or store of a tensor, with its address steps between neighbours along each row axis and element axis. Steps are in
    elements of ``size`` bytes, None if not fixed. The first element is ``start`` bytes past the buffer's start."""

    load: Load
    by_row: tuple[int | None, ...]
    by_element: tuple[int | None, ...]
    size: int
    start: int
    stored: bool

    @property
    def fixed(self) -> bool:
        """True if all steps are fixed."""
        return None not in self.by_row and None not in self.by_element

    @property
    def along(self) -> int:
        """The step between neighbouring elements."""
        return abs(self.by_element[-1] or 0) if self.by_element else 0

    @property
    def across(self) -> int:
        """The step between neighbouring rows."""
        return abs(self.by_row[-1] or 0) if self.by_row else 0


@dataclass(frozen=True)
class PlacedRows:
    """The rows of an operator, tiled or not, and the storages of its tensors."""

    form: RowForm
    binding: Binding

    @property
    def operator(self) -> ROperator:
        """The operator of the row form."""
        return self.form.operator

    def tiled(self, operator: ROperator) -> PlacedRows:
        """Return the same rows with another tile; the layout is unchanged."""
        made = PlacedRows(replace(self.form, operator=operator), self.binding)
        made.__dict__.update({"strides": self.strides, "joined": self.joined, "accesses": self.accesses})
        return made

    @cached_property
    def strides(self) -> dict[str, tuple[int, ...]]:
        """Strides of every stored tensor."""
        return strides_of(self.operator, self.binding)

    @cached_property
    def joined(self) -> bool:
        """True if all accesses walk a row's elements as one axis."""
        return can_join_axes(self.form, self.strides)

    @cached_property
    def accesses(self) -> tuple[RowAccess, ...]:
        """The memory reads and writes of one element of a row."""
        found = collect_accesses(self.form)
        return tuple(self._row_access(ld, found) for ld in found.loads if ld.tensor in self.strides)

    def _row_access(self, load: Load, found: Accesses) -> RowAccess:
        strides, size = self.strides[load.tensor], itemsize(self.binding.types[load.tensor].dtype)
        by_row, by_element = (tuple(address_step(load, strides, a) for a in axes) for axes in (found.rows, found.elements))
        fixed = [s * f[1] for s, f in zip(strides, map(ex.affine_form, load.indices), strict=True) if f is not None]
        start = (self.binding.storages[load.tensor].offset % ALIGNED_ELEMENTS + sum(fixed)) * size  # part of a kernel's key
        return RowAccess(load, by_row, by_element, size, start, load.tensor in self.operator.outputs)

    @property
    def unit(self) -> int:
        """Neighbouring rows in a sector if an access has adjacent rows with strided elements, else 1."""
        sizes = [a.size for a in self.accesses if a.fixed and a.across == 1 and a.along > 1]
        return SECTOR // min(sizes) if sizes else 1


def strides_of(operator: ROperator, binding: Binding) -> dict[str, tuple[int, ...]]:
    """Return strides of the stored tensors."""
    return {n: binding.storages[n].strides for n in (*operator.inputs, *operator.outputs)}


def shape_of(form: RowForm) -> RowShape:
    """Return the block of a tiled operator under its config."""
    operator, config = form.operator, dict(form.operator.config)
    lanes, vector, blocks = config.get("lanes", WARP), config.get("vector", 1), config.get("blocks", 1)
    rows = math.prod(t for t, r in zip(operator.tile, form.row_of, strict=True) if r is not None)
    return RowShape(lanes, vector, -(-form.length // (lanes * blocks * vector)), rows, blocks, config.get("side", 0))


def rows_of(operator: ROperator, binding: Binding) -> PlacedRows:
    """Return the rows of an operator. Raises Unsuited with the reason if it does not apply."""
    form = row_form(operator) or map_form(operator, strides_of(operator, binding), MAP_ELEMENTS)
    if form is None:
        raise Unsuited("no operator on rows")
    if any(c.kind != "reduction" for c in form.reductions):
        raise Unsuited("sums of products and windows read their operands many times")
    if any(compute_type(c.dtype) not in SHUFFLED for c in form.reductions):
        raise Unsuited("a reduction of a type that warps do not shuffle")
    return PlacedRows(form, binding)
