"""Traffic and predicted seconds of kernels on rows.

A *piece* is a contiguous range of bytes that one access of a warp touches. A partly covered sector counts as whole. Suppose that
pieces begin equally often at all multiples of ``g`` bytes. Then a piece of ``w`` bytes touches ``(w + size - g) / size`` sectors
of ``size`` bytes in the mean.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rammer.codegen.products import WARP, moved_bytes
from rammer.device.manifest import Binding
from rammer.ir import expr as ex

from rammer_cuda.gpu import Gpu
from rammer_cuda.rows.rowshape import SECTOR, PlacedRows, RowAccess, RowShape, shape_of

#: Bytes of a line of the first cache; an SM looks up one line at a time.
LINE = 128


@dataclass(frozen=True, slots=True)
class RowTraffic:
    """The traffic of all tasks: ``lines`` that warps touch, and bytes of ``sectors``. Sectors of loads are counted per block,
    whose first cache keeps them; sectors of stores per warp."""

    lines: float = 0.0
    sectors: float = 0.0

    def __add__(self, other: RowTraffic) -> RowTraffic:
        return RowTraffic(self.lines + other.lines, self.sectors + other.sectors)


@dataclass(frozen=True, slots=True)
class _Pieces:
    """``count`` pieces of ``width`` bytes that begin at multiples of ``grain`` bytes."""

    count: float
    width: float
    grain: int

    def touch(self, size: int) -> float:
        """Return the number of memory units of ``size`` bytes that are touched."""
        return self.count * _touched_parts(self.width, size, self.grain)


def _touched_parts(width: float, size: int, grain: int) -> float:
    """Return the mean number of memory units of ``size`` bytes that ``width`` contiguous bytes touch."""
    return max(1.0, (width + size - math.gcd(grain, size)) / size)


def row_traffic(placed: PlacedRows) -> tuple[RowTraffic, RowTraffic]:
    """Return the load and store traffic of a tiled operator."""
    totals = [RowTraffic(), RowTraffic()]
    for access in placed.accesses:
        totals[access.stored] += _Touched(placed, access).traffic()
    return totals[0], totals[1]


class _Touched:
    """The memory that one load or store of a tiled operator's kernel touches, at every element of every row."""

    def __init__(self, placed: PlacedRows, access: RowAccess) -> None:
        self.operator, self.form, self.a, self.joined = placed.operator, placed.form, access, placed.joined
        self.s = s = shape_of(placed.form)
        self.rows = math.prod(a.extent for a in self.form.rows)
        self.lanes = WARP // min(s.side, WARP) if s.side else min(s.lanes, WARP)
        self.run = self._run()
        self.warp = self.run / math.ceil(self.run / (WARP // self.lanes))  #: Neighbouring rows of a warp.
        #: Elements of a row that one load of all lanes of a warp reads.
        self.reach = self.form.length / math.ceil(self.form.length / (self.lanes * s.vector))

    def traffic(self) -> RowTraffic:
        """Return the traffic of all tasks."""
        if not self.a.fixed:
            return RowTraffic(self.rows * self.form.length, self.rows * self.form.length * SECTOR)
        lines, pieces, block = self._pieces()
        return RowTraffic(lines.touch(LINE), (pieces if self.a.stored else block).touch(SECTOR) * SECTOR)

    def _pieces(self) -> tuple[_Pieces, _Pieces, _Pieces]:
        """Return a warp's pieces for lines, its pieces for sectors, and a block's pieces."""
        rows, length, size, along = self.rows, self.form.length, self.a.size, self.a.along
        grain, broad = self._tile_alignment(WARP // self.lanes), self._tile_alignment()
        warp, run = (self.warp, self.run) if self.a.across == 1 else (1.0, 1.0)
        if not any(self.a.by_element):
            return self._one_a_row(grain, broad)
        if self.rows > 1 and not any(self.a.by_row):  # all rows of a warp read the same elements
            near = _Pieces(rows / self.warp * length / self.reach, self.reach * along * size, grain)
            return near, near, _Pieces(self.operator.task_count, length * along * size, broad)
        wide = along == 1 and self.s.vector > 1 and size in (2, 4) and grain % (size * self.s.vector) == 0
        loads = length / self.reach * (1 if wide else self.s.vector)
        if along == 1 and 0 <= (self.a.across - length) * size < SECTOR:  # neighbouring rows are contiguous
            return self._adjacent_row_pieces(loads, grain, broad)
        span = _Pieces(rows / warp * loads, self.reach * along * size, math.gcd(grain, self.lanes * self.s.vector * along * size))
        strided = _Pieces(rows / warp * length, warp * size, grain)
        lanes = along * size * (1 if wide else self.s.vector)  # bytes between simultaneous accesses of neighbouring lanes
        whole = _Pieces(rows / run, length * along * size, broad)
        block = whole if along * size < SECTOR else _Pieces(rows / run * length, run * size, broad)
        return (span if lanes < LINE else strided), (span if lanes < SECTOR else strided), block

    def _one_a_row(self, grain: int, broad: int) -> tuple[_Pieces, _Pieces, _Pieces]:
        """Return ``_pieces`` of accesses with one element per row."""
        rows, distance = self.rows, self.a.across * self.a.size
        each = _Pieces(rows, self.a.size, self.a.size)
        near, whole = (_Pieces(rows / n, max(n * distance, self.a.size), g) for n, g in ((self.warp, grain), (self.run, broad)))
        return (near if distance < LINE else each), (near if distance < SECTOR else each), (whole if distance < SECTOR else each)

    def _adjacent_row_pieces(self, loads: float, grain: int, broad: int) -> tuple[_Pieces, _Pieces, _Pieces]:
        """Return ``_pieces`` of contiguous rows: those of a warp are one if the gaps between them are small."""
        rows, across, size = self.rows, self.a.across, self.a.size
        whole = _Pieces(rows / self.run, self.run * across * size, broad)
        near = _Pieces(rows / self.warp * loads, self.warp * across * size, grain)
        each = _Pieces(rows * loads, self.reach * size, math.gcd(grain, self.lanes * self.s.vector * size))
        gap = (across - self.reach) * size
        return (near if gap < LINE else each), (near if gap < SECTOR else each), whole

    def _tile_alignment(self, parts: int = 0) -> int:
        """Return the alignment of tiles in bytes, or of ``parts`` of this number of rows."""
        steps = (*self.a.by_row, *(() if self.joined and self.a.along == 1 else self.a.by_element))
        starts = [abs(n) * self.a.size for n in steps if n is not None and abs(n) > 1]
        if self.a.across == 1:
            tile = self.operator.tile[self.form.row_of.index(len(self.form.rows) - 1)]
            starts += [self.a.size * t for t in (tile, parts) if 0 < t < self.form.rows[-1].extent]
        return math.gcd(*starts, self.a.start)

    def _run(self) -> float:
        """Return the mean number of adjacent rows in a tile."""
        run, steps = 1.0, self.a.by_row
        for k in range(len(self.form.rows) - 1, -1, -1):
            extent, tile = self.form.rows[k].extent, self.operator.tile[self.form.row_of.index(k)]
            run *= extent / math.ceil(extent / tile)
            if tile < extent or k == 0 or steps[k - 1] != extent * (steps[k] or 0):
                break
        return run


#: Cycles from a launch to the last store of an empty row, of launching one more block, of one butterfly step, of reading one
#: warp's result in shared memory, and of an operation of a thread. SM cycles for a line that a warp loads or stores, for a sector
#: that a block loads from the second cache, and for one that a warp stores there. Fitted to 1,870 kernels of 59 random graphs on
#: an H200: the measured time over the predicted has a standard deviation of 0.16.
START, BLOCK, BUTTERFLY, WARP_READ, CHAIN = 792, 1.22, 20, 36, 2.06
LOAD_LINE, STORE_LINE, LOAD_SECTOR, STORE_SECTOR = 0.78, 1.48, 0.81, 1.04
#: Cycles of a cluster's barrier, and of reading one value from another of its blocks.
MEET, PEER = 600, 30
#: Base registers of a thread, registers per element, and maximum blocks of an SM.
REGISTERS, ELEMENT, RESIDENT = 24, 1.3, 32


def row_seconds(placed: PlacedRows, binding: Binding, gpu: Gpu) -> float:
    """Return the predicted seconds of all tasks, without the launch. Block launches overlap the work on lines, sectors and
    rounds; the longer one counts. The bytes' time is a lower bound."""
    operator, s = placed.operator, shape_of(placed.form)
    blocks, each = operator.task_count * s.blocks, s.chunks * s.vector
    busiest, (loads, stores) = -(-blocks // gpu.sms), row_traffic(placed)
    lines = (LOAD_LINE * loads.lines + STORE_LINE * stores.lines) * busiest / max(blocks, 1)
    sectors = (LOAD_SECTOR * loads.sectors + STORE_SECTOR * stores.sectors) / SECTOR / gpu.sms
    work = CHAIN * each * sum(ex.count_flops(c.body) + 1 for c in operator.computes) + len(placed.form.reductions) * join_cycles(
        s
    )
    rounds = -(-busiest // _resident(s, each, gpu))
    cycles = START + max(BLOCK * blocks, lines + sectors + rounds * work)
    return max(cycles / gpu.model_clock, moved_bytes(operator, binding) / gpu.bandwidth)


def _resident(s: RowShape, each: int, gpu: Gpu) -> int:
    """Return the number of blocks resident on an SM."""
    registers = min(255, REGISTERS + ELEMENT * each)
    return max(1, min(gpu.threads // s.threads, int(gpu.registers / (registers * s.threads)), RESIDENT))


def join_cycles(s: RowShape) -> float:
    """Return the cycles to combine one reduction over all threads of a row."""
    near = WARP // min(s.side, WARP) if s.side else min(s.lanes, WARP)
    parts = s.threads // max(s.side, WARP) if s.side else s.lanes // WARP
    join = BUTTERFLY * (near.bit_length() - 1) + (WARP_READ * parts if parts > 1 else 0)
    return join + ((MEET + PEER * s.blocks) if s.blocks > 1 else 0)
