"""What the ``rowwise`` family sees in an operator: its rows, where they lie, and how many threads share one."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

from rammer.codegen import operations as ops
from rammer.codegen.rowform import Accesses, RowForm, address_step, can_join_axes, collect_accesses, map_form, row_form
from rammer.codegen.task_parameters import Unsuited
from rammer.device.manifest import ALIGNED_ELEMENTS, Binding
from rammer.ir import expr as ex
from rammer.ir.expr import Load
from rammer.ir.operator import ROperator
from rammer.ir.types import itemsize

from rammer_cuda.kernels.frame import WARP

#: Threads that share a row, most elements a thread keeps, and threads of a block.
LANES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
MOST_ELEMENTS, MOST_THREADS = 32, 1024
#: Rows whose threads are neighbours, where that is so: whole sectors of 4-byte elements.
SIDES = (8, 16, 32, 64)
#: Most elements of a row of an operator without reductions, whose rows are as long as one likes.
MAP_ELEMENTS = 2048
#: Bytes of a sector: what memory and its cache move at once.
SECTOR = 32
#: Types that a reduction may have here: those that warp shuffles move.
SHUFFLED = frozenset(("float32", "float64", "int32", "int64", "uint32", "uint64"))


@dataclass(frozen=True, slots=True)
class RowShape:
    """``lanes`` threads a row and block, ``vector`` neighbouring elements a load, ``chunks`` loads a thread, ``rows`` a block;
    ``blocks`` share a row. The lanes of a row are neighbours; with ``side`` those of so many rows are, lane by lane."""

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
        """Whether rows side by side fill warps, and have a thread each."""
        return self.lanes > 1 and self.rows <= self.side and self.side * self.lanes >= WARP

    @property
    def threads(self) -> int:
        """Threads of the block: whole warps."""
        return -(-(self.side or self.rows) * self.lanes // WARP) * WARP


@dataclass(frozen=True, slots=True)
class RowAccess:
    """A ``load`` of a stored tensor, or a store: elements between its addresses at neighbours along each row axis and each
    element axis (None where that is not fixed), of ``size`` bytes each; the first one is ``start`` bytes behind the buffer's."""

    load: Load
    by_row: tuple[int | None, ...]
    by_element: tuple[int | None, ...]
    size: int
    start: int
    stored: bool

    @property
    def fixed(self) -> bool:
        """Whether all steps are."""
        return None not in self.by_row and None not in self.by_element

    @property
    def along(self) -> int:
        """Of neighbouring elements."""
        return abs(self.by_element[-1] or 0) if self.by_element else 0

    @property
    def across(self) -> int:
        """Of neighbouring rows."""
        return abs(self.by_row[-1] or 0) if self.by_row else 0


@dataclass(frozen=True)
class PlacedRows:
    """The rows of an operator, tiled or not, and where its tensors lie."""

    form: RowForm
    binding: Binding

    @property
    def operator(self) -> ROperator:
        """The operator."""
        return self.form.operator

    def tiled(self, operator: ROperator) -> PlacedRows:
        """The same with another tile: rows and elements lie where they did."""
        made = PlacedRows(replace(self.form, operator=operator), self.binding)
        made.__dict__.update({"strides": self.strides, "joined": self.joined, "accesses": self.accesses})
        return made

    @cached_property
    def strides(self) -> dict[str, tuple[int, ...]]:
        """Of every stored tensor."""
        return strides_of(self.operator, self.binding)

    @cached_property
    def joined(self) -> bool:
        """Whether all accesses walk a row's elements as one axis."""
        return can_join_axes(self.form, self.strides)

    @cached_property
    def accesses(self) -> tuple[RowAccess, ...]:
        """What an element of a row reads and writes in memory."""
        found = collect_accesses(self.form)
        return tuple(self._row_access(ld, found) for ld in found.loads if ld.tensor in self.strides)

    def _row_access(self, load: Load, found: Accesses) -> RowAccess:
        strides, size = self.strides[load.tensor], itemsize(self.binding.types[load.tensor].dtype)
        by_row, by_element = (tuple(address_step(load, strides, a) for a in axes) for axes in (found.rows, found.elements))
        fixed = [s * f[1] for s, f in zip(strides, map(ex.affine_form, load.indices), strict=True) if f is not None]
        start = (self.binding.storages[load.tensor].offset % ALIGNED_ELEMENTS + sum(fixed)) * size  # what a kernel's key tells
        return RowAccess(load, by_row, by_element, size, start, load.tensor in self.operator.outputs)

    @property
    def unit(self) -> int:
        """Neighbouring rows in a sector, where an access has rows next to each other and their elements apart; else 1."""
        sizes = [a.size for a in self.accesses if a.fixed and a.across == 1 and a.along > 1]
        return SECTOR // min(sizes) if sizes else 1


def strides_of(operator: ROperator, binding: Binding) -> dict[str, tuple[int, ...]]:
    """Strides of the stored tensors."""
    return {n: binding.storages[n].strides for n in (*operator.inputs, *operator.outputs)}


def shape_of(form: RowForm) -> RowShape:
    """The block of a tiled operator under its config."""
    operator, config = form.operator, dict(form.operator.config)
    lanes, vector, blocks = config.get("lanes", WARP), config.get("vector", 1), config.get("blocks", 1)
    rows = math.prod(t for t, r in zip(operator.tile, form.row_of, strict=True) if r is not None)
    return RowShape(lanes, vector, -(-form.length // (lanes * blocks * vector)), rows, blocks, config.get("side", 0))


def rows_of(operator: ROperator, binding: Binding) -> PlacedRows:
    """The rows of an operator; Unsuited says why it has none."""
    form = row_form(operator) or map_form(operator, strides_of(operator, binding), MAP_ELEMENTS)
    if form is None:
        raise Unsuited("no operator on rows")
    if any(c.kind != "reduction" for c in form.reductions):
        raise Unsuited("sums of products and windows read their operands many times")
    if any(ops.compute_type(c.dtype) not in SHUFFLED for c in form.reductions):
        raise Unsuited("a reduction of a type that warps do not shuffle")
    return PlacedRows(form, binding)
