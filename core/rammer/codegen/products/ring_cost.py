"""Cost of products in a ring of blocks that a group's threads fill: one formula, and an instruction's parameters as data.

A launch is a start, then rounds of as many blocks as a vEU holds. A block is one step for every block of products, and the store
of its tile. In a step, instruction issue, reads of local memory and copies add up."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

import numpy as np

from rammer.codegen.contraction_form import Product
from rammer.codegen.halo import length_under
from rammer.codegen.products.block import Shape
from rammer.codegen.products.depth import Depth
from rammer.device.manifest import Binding
from rammer.ir import expr as ex
from rammer.ir.expr import Load
from rammer.ir.operator import ROperator

#: A number, or an array of numbers for many blocks at once.
Numbers: TypeAlias = Any

#: Register tiles (rows, columns) of a thread.
REGISTERS = ((4, 4), (8, 4), (4, 8), (8, 8))
#: Block depths with their slices.
BLOCKS = ((8, 1), (16, 1), (16, 2), (32, 1), (32, 2), (32, 4))
#: Cycles of maps before the contraction, per step and per element of a thread, of a ring's busiest scheduler: a shared-memory
#: read, two dependent operations and a write before the step's barrier. And cycles of a producer, whose first block's maps are
#: not hidden. Counted from the instructions, not measured.
MAPS_STEP = 90
MAPS = 3.0
PRODUCER_MAPS = 6.0


class Processor(Protocol):
    """A unit with groups of threads: figures by which products are priced, per vEU unless said otherwise.

    ``shared`` is the local memory of a group in bytes, ``registers`` (of 32 bits) and ``threads`` are of a vEU.
    ``model_clock`` is in cycles per second, ``launch`` in seconds. ``delivered`` is the bytes that a vEU gets per cycle if all
    read, and ``bandwidth`` the bytes per second of the device's memory."""

    @property
    def sms(self) -> int: ...
    @property
    def shared(self) -> int: ...
    @property
    def registers(self) -> int: ...
    @property
    def threads(self) -> int: ...
    @property
    def model_clock(self) -> float: ...
    @property
    def launch(self) -> float: ...
    @property
    def delivered(self) -> float: ...
    @property
    def bandwidth(self) -> float: ...
    @property
    def splits(self) -> Sequence[int]:
        """The numbers of blocks that may share a sum."""
        ...

    def usable(self, split: int) -> int:
        """Return the vEUs that tasks of ``split`` blocks can fill at once."""
        ...


class OperandSupport(Protocol):
    """The operands that an instruction supports: their type, and maps before the contraction."""

    @property
    def dtype(self) -> str: ...
    @property
    def prologue(self) -> bool: ...

    def serves(self, precision: str) -> bool:
        """Return True if the instruction supports ``precision``."""
        ...


class ProductInstruction(OperandSupport, Protocol):
    """An instruction that adds products: ``lanes`` threads add ``depth`` products at a time, from operands of ``item`` bytes."""

    @property
    def name(self) -> str: ...
    @property
    def lanes(self) -> int: ...
    @property
    def depth(self) -> int: ...
    @property
    def item(self) -> int: ...

    def product(self, operator: ROperator, binding: Binding) -> Product:
        """Return the matrix product of a tiled operator. Raises Unsuited."""
        ...

    def block(self, p: Product) -> Shape:
        """Return the block of a tiled product under its config."""
        ...


@dataclass(frozen=True)
class DepthWalk:
    """The parameters of one ``Depth``, or of many: the number of blocks, the flat order, the presence of outer axes, and the
    number of taps."""

    blocks: Numbers
    flat: Numbers
    outer: Numbers
    taps: Numbers = 1

    @classmethod
    def of(cls, depth: Depth) -> DepthWalk:
        """Return the walk of one depth."""
        return cls(depth.blocks, depth.flat, bool(depth.outer), math.prod(a.extent for a in depth.outer))

    @classmethod
    def each(cls, depths: Sequence[Depth]) -> DepthWalk:
        """Return the walks of many depths as arrays."""
        walks = map(cls.of, depths)
        return cls(*(np.array(n) for n in zip(*((w.blocks, w.flat, w.outer, w.taps) for w in walks), strict=True)))


@dataclass(frozen=True)
class Work:
    """The work of a launch, or of many: its tasks and the results of each (``cells``).

    ``changed`` is the operand with maps before the contraction ("a", "b" or ""). ``halo`` is the elements of one channel under a
    task's windows. ``lots`` are the elements of rows and of columns copied at a time. ``ends`` are the bytes of all tasks that
    the maps after the sums store, and load from what earlier kernels wrote."""

    tasks: Numbers
    cells: Numbers
    changed: str = ""
    halo: Numbers = 0
    lots: tuple[Numbers, Numbers] = (4, 4)
    ends: int = 0


@dataclass(frozen=True, slots=True)
class LaunchCycles:
    """Cycles of a launch: from its start to the first products, the extra for convolutions' taps, and
    for a cluster's barriers."""

    start: float
    taps: float
    cluster: float

    def cycles(self, walk: DepthWalk, split: Numbers, rounds: Numbers, step: Numbers, end: Numbers) -> Numbers:
        """Return the cycles of ``rounds`` of blocks, with ``step`` cycles for each block of products and a final ``end``."""
        cycles = self.start + self.taps * walk.outer + self.cluster * (split > 1)
        return cycles + rounds * (-(-walk.blocks // split) * step + end)


@dataclass(frozen=True)
class RingCost:
    """The costs of an instruction in a ring that all threads fill, with the register tiles or fragments and block depths to try.

    The costs are cycles on one scheduler. ``step`` is per ring step, ``matrix`` per instruction, ``copy`` per copy of a thread,
    ``store`` per element of a thread in the epilogue. ``read`` is per shared-memory read of an operand, including rounding or
    splitting. ``reads`` counts reads for a tile's rows and columns; with ``port`` their cost is of a whole SM. ``l2`` applies to
    each cycle in which staging would keep L2 busy, ``peer`` to each byte read from others of a cluster. ``products`` is the
    number of instructions for one product. ``write`` is the cycles of a thread for each element that it stores, ``ends`` applies
    to each cycle in which the maps' loads and stores would keep L2 busy. ``threads`` are the least and the most threads that
    multiply, of a block of ``items`` threads (0: as many warps as it needs). The block has at most ``local`` bytes of local
    memory (0: any). A convolution's input may be staged with its halo, ``halo`` channels at a time (0: never)."""

    instruction: ProductInstruction
    tiles: tuple[tuple[int, int], ...]
    blocks: tuple[tuple[int, int], ...]
    launch: LaunchCycles
    step: float
    matrix: float
    read: float
    copy: float
    store: float
    l2: float
    peer: float
    reads: tuple[float, float]
    products: int = 1
    port: bool = False
    write: float = 0.0
    threads: tuple[int, int] = (64, 512)
    items: int = 0
    local: int = 0
    ends: float = 0.0
    halo: int = 0

    @property
    def tensor(self) -> bool:
        """Return True if warps multiply on tensor cores."""
        return self.instruction.lanes > 1

    @property
    def item(self) -> int:
        """The bytes of an element."""
        return self.instruction.item

    def configs(self, splits: Sequence[int]) -> list[tuple[tuple[str, int], ...]]:
        """Return the config of every block shape. The ring of tensor-core kernels also depends on the task
        (``choose.ring_buffers``)."""
        return [
            (
                ("tm", tm),
                ("tn", tn),
                ("bk", bk),
                ("split_k", split),
                ("slice_k", slices),
                *(() if self.tensor else (("stages", 4 if bk < 32 else 3),)),
            )
            for tm, tn in self.tiles
            for bk, slices in self.blocks
            for split in splits
        ]

    def issue(self, part: Numbers, tm: Numbers, tn: Numbers) -> Numbers:
        """Return the cycles of the instructions of a warp (of a thread) for ``part`` products."""
        return self.matrix * (part / self.instruction.depth * tm * tn * self.products)

    def reading(self, part: Numbers, tm: Numbers, tn: Numbers) -> Numbers:
        """Return the number of reads for ``part`` products."""
        return part / self.instruction.depth * (self.reads[0] * tm + self.reads[1] * tn)

    def warp(self, part: Numbers, tm: Numbers, tn: Numbers) -> Numbers:
        """Return the cycles of a warp for instructions and reads."""
        return self.issue(part, tm, tn) + self.read * self.reading(part, tm, tn)


#: The additional cost of a copy of one byte, and of one float16, as a factor: a thread loads, waits and stores. Not fitted.
BYTE_COPY, HALF_COPY = 2.0, 1.0


def ring_seconds(cost: RingCost, s: Shape, walk: DepthWalk, work: Work, unit: Processor) -> Numbers:
    """Return the seconds of one launch, or of many."""
    threads, part, cells = s.threads, s.bk / s.slice_k, work.cells
    warps, steps = threads / 32, -(-walk.blocks // s.split_k)
    if s.halo:
        steps = -(-(walk.blocks // walk.taps) // s.split_k) * walk.taps
    rows = work.halo / walk.taps if s.halo else s.bm
    if cost.item == 4:  # as in the fit
        copies = (s.bm / 4 + s.bn) * s.bk / threads
    else:
        alone = BYTE_COPY if cost.item == 1 else HALF_COPY
        copies = sum((1 + alone * (n == 1)) * e / n for n, e in zip(work.lots, (rows, s.bn), strict=True)) * s.bk / threads
    per_sm = -(-work.tasks * s.split_k // _usable_array(s.split_k, unit))
    resident = np.minimum(per_sm, _resident_blocks(cost, s, walk, work.halo, unit))
    busiest = np.ceil(resident * warps / 4)
    elements = resident * cells / threads * s.slice_k
    moved = busiest * copies * np.where(walk.flat, 2.5, 1.0)
    issued = busiest * (cost.issue(part, s.tm, s.tn) if cost.port else cost.warp(part, s.tm, s.tn))
    if cost.port:
        issued = issued + cost.read * (resident * warps * cost.reading(part, s.tm, s.tn))
    step = cost.step + issued + cost.copy * moved
    if work.changed:
        step = step + MAPS_STEP + MAPS * busiest * (s.bm if work.changed == "a" else s.bn) * s.bk / threads
    store = cost.store * elements + cost.write * resident * cells / threads + cost.peer * 4 * resident * cells * (s.split_k > 1)
    staged = work.tasks * s.split_k * steps * s.bk * (rows + s.bn) * cost.item
    cycles = cost.launch.cycles(replace(walk, blocks=steps * s.split_k), s.split_k, -(-per_sm // resident), step, store)
    cycles = cycles + (cost.l2 * staged + cost.ends * work.ends) / (unit.delivered * unit.sms)
    return cycles / unit.model_clock + unit.launch


def halo_elements(read: Load, tile: Mapping[str, int], depth: Depth) -> int:
    """Return the elements of one channel under a task's windows, or 0 without taps."""
    taps = {a.name: a.extent for a in depth.outer}
    if depth.flat or not taps:
        return 0
    count = 1
    for index in read.indices:
        form = ex.affine_form(index)
        if form is not None and depth.inner.name not in form[0]:
            count *= length_under(form[0], {**tile, **taps})
    return count


def halo_bytes(s: Shape, item: int, walk: DepthWalk, halo: Numbers) -> Numbers:
    """Return the bytes of a ring's halos of ``halo`` positions: one, or two if there are several blocks of channels."""
    return item * np.minimum(2, walk.blocks // walk.taps) * halo * (s.bk + 8)


def _resident_blocks(cost: RingCost, s: Shape, walk: DepthWalk, halo: Numbers, unit: Processor) -> Numbers:
    """Return the blocks that fit an SM together."""
    ring = cost.item * s.stages * s.bk * (s.bn if s.halo else s.bm + s.bn)
    ring = ring + halo_bytes(s, cost.item, walk, halo) if s.halo else ring
    shared = np.maximum(ring, 4 * s.bm * s.bn * s.slice_k)
    each = 4 * s.tm * s.tn + 8 * s.tm + 40 if cost.tensor else s.tm * s.tn + s.tm + s.tn + 40
    most = np.minimum(unit.shared // (shared + 1024), unit.registers // (s.threads * each))
    return np.maximum(1, np.minimum(most, unit.threads // s.threads))


def _usable_array(split: Numbers, unit: Processor) -> Numbers:
    """Return ``unit.usable`` for an array."""
    return np.array([unit.usable(max(1, n)) for n in range(int(np.max(split)) + 1)])[split]
