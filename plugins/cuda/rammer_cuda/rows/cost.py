"""Traffic and predicted seconds of kernels on rows.

A *piece* is neighbouring bytes of what one access of a warp touches. A sector within which a piece begins or ends counts
whole: where pieces begin at all multiples of ``g`` bytes alike, one of ``w`` bytes touches ``(w + size - g) / size`` sectors
of ``size`` bytes in the mean.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rammer.device.manifest import Binding
from rammer.ir import expr as ex

from rammer_cuda.gpu import Gpu
from rammer_cuda.kernels.frame import WARP, moved_bytes
from rammer_cuda.rows.rowshape import SECTOR, PlacedRows, RowAccess, RowShape, shape_of

#: Bytes of a line of the first cache, of which an SM looks up one at a time.
LINE = 128


@dataclass(frozen=True, slots=True)
class RowTraffic:
    """Of all tasks: ``lines`` that warps touch, and bytes of ``sectors``: of loads those that a block touches, whose first cache
    keeps them; of stores those of every warp."""

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
        """Parts of memory of ``size`` bytes."""
        return self.count * _touched_parts(self.width, size, self.grain)


def _touched_parts(width: float, size: int, grain: int) -> float:
    """How many parts of memory of ``size`` bytes ``width`` neighbouring bytes touch in the mean."""
    return max(1.0, (width + size - math.gcd(grain, size)) / size)


def row_traffic(placed: PlacedRows) -> tuple[RowTraffic, RowTraffic]:
    """What a tiled operator loads and stores."""
    totals = [RowTraffic(), RowTraffic()]
    for access in placed.accesses:
        totals[access.stored] += _Touched(placed, access).traffic()
    return totals[0], totals[1]


class _Touched:
    """What one load or store of a tiled operator's kernel touches, at every element of every row."""

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
        """Of all tasks."""
        if not self.a.fixed:
            return RowTraffic(self.rows * self.form.length, self.rows * self.form.length * SECTOR)
        lines, pieces, block = self._pieces()
        return RowTraffic(lines.touch(LINE), (pieces if self.a.stored else block).touch(SECTOR) * SECTOR)

    def _pieces(self) -> tuple[_Pieces, _Pieces, _Pieces]:
        """In which a warp's accesses lie, for its lines and for its sectors; and those of a block."""
        rows, length, size, along = self.rows, self.form.length, self.a.size, self.a.along
        grain, broad = self._tile_alignment(WARP // self.lanes), self._tile_alignment()
        warp, run = (self.warp, self.run) if self.a.across == 1 else (1.0, 1.0)
        if not any(self.a.by_element):
            return self._one_a_row(grain, broad)
        if self.rows > 1 and not any(self.a.by_row):  # all rows of a warp read the same
            near = _Pieces(rows / self.warp * length / self.reach, self.reach * along * size, grain)
            return near, near, _Pieces(self.operator.task_count, length * along * size, broad)
        wide = along == 1 and size * self.s.vector == 16 and grain % 16 == 0
        loads = length / self.reach * (1 if wide else self.s.vector)
        if along == 1 and 0 <= (self.a.across - length) * size < SECTOR:  # neighbouring rows follow each other
            return self._adjacent_row_pieces(loads, grain, broad)
        span = _Pieces(rows / warp * loads, self.reach * along * size, math.gcd(grain, self.lanes * self.s.vector * along * size))
        apart = _Pieces(rows / warp * length, warp * size, grain)
        lanes = along * size * (1 if wide else self.s.vector)  # bytes between what neighbouring lanes touch at once
        whole = _Pieces(rows / run, length * along * size, broad)
        block = whole if along * size < SECTOR else _Pieces(rows / run * length, run * size, broad)
        return (span if lanes < LINE else apart), (span if lanes < SECTOR else apart), block

    def _one_a_row(self, grain: int, broad: int) -> tuple[_Pieces, _Pieces, _Pieces]:
        """``_pieces`` of what each row has one of."""
        rows, apart = self.rows, self.a.across * self.a.size
        each = _Pieces(rows, self.a.size, self.a.size)
        near, whole = (_Pieces(rows / n, max(n * apart, self.a.size), g) for n, g in ((self.warp, grain), (self.run, broad)))
        return (near if apart < LINE else each), (near if apart < SECTOR else each), (whole if apart < SECTOR else each)

    def _adjacent_row_pieces(self, loads: float, grain: int, broad: int) -> tuple[_Pieces, _Pieces, _Pieces]:
        """``_pieces`` of rows that follow each other: those of a warp are one where the gaps between are small."""
        rows, across, size = self.rows, self.a.across, self.a.size
        whole = _Pieces(rows / self.run, self.run * across * size, broad)
        near = _Pieces(rows / self.warp * loads, self.warp * across * size, grain)
        each = _Pieces(rows * loads, self.reach * size, math.gcd(grain, self.lanes * self.s.vector * size))
        gap = (across - self.reach) * size
        return (near if gap < LINE else each), (near if gap < SECTOR else each), whole

    def _tile_alignment(self, parts: int = 0) -> int:
        """Bytes of which tiles begin at multiples, or ``parts`` of so many rows."""
        steps = (*self.a.by_row, *(() if self.joined and self.a.along == 1 else self.a.by_element))
        starts = [abs(n) * self.a.size for n in steps if n is not None and abs(n) > 1]
        if self.a.across == 1:
            tile = self.operator.tile[self.form.row_of.index(len(self.form.rows) - 1)]
            starts += [self.a.size * t for t in (tile, parts) if 0 < t < self.form.rows[-1].extent]
        return math.gcd(*starts, self.a.start)

    def _run(self) -> float:
        """Rows of a tile that lie next to each other, in the mean of all tiles."""
        run, steps = 1.0, self.a.by_row
        for k in range(len(self.form.rows) - 1, -1, -1):
            extent, tile = self.form.rows[k].extent, self.operator.tile[self.form.row_of.index(k)]
            run *= extent / math.ceil(extent / tile)
            if tile < extent or k == 0 or steps[k - 1] != extent * (steps[k] or 0):
                break
        return run


#: Cycles from a launch to the last store of a row with nothing to do, of launching one more block, of one butterfly step, of
#: reading one warp's result in shared memory, and of an operation of a thread; those of an SM for a line that a warp loads or
#: stores, for a sector that a block loads from the second cache, and for one that a warp stores there. Fitted to 1,870 kernels
#: of 59 random graphs on an H200: the measured time over the predicted has a standard deviation of 0.16.
START, BLOCK, BUTTERFLY, WARP_READ, CHAIN = 792, 1.22, 20, 36, 2.06
LOAD_LINE, STORE_LINE, LOAD_SECTOR, STORE_SECTOR = 0.78, 1.48, 0.81, 1.04
#: Cycles of a cluster's barrier, and of reading one value of another block of it.
MEET, PEER = 600, 30
#: Registers of a thread by those for its elements, and blocks of an SM at most.
REGISTERS, ELEMENT, RESIDENT = 24, 1.3, 32


def row_seconds(placed: PlacedRows, binding: Binding, gpu: Gpu) -> float:
    """Predicted seconds of all tasks, without the launch: of launching blocks, of what lines and sectors and the work of each
    round of blocks take, or of the bytes, whichever take longer."""
    operator, s = placed.operator, shape_of(placed.form)
    blocks, each = operator.task_count * s.blocks, s.chunks * s.vector
    busiest, (loads, stores) = -(-blocks // gpu.sms), row_traffic(placed)
    lines = (LOAD_LINE * loads.lines + STORE_LINE * stores.lines) * busiest / max(blocks, 1)
    sectors = (LOAD_SECTOR * loads.sectors + STORE_SECTOR * stores.sectors) / SECTOR / gpu.sms
    work = CHAIN * each * sum(ex.count_flops(c.body) + 1 for c in operator.computes) + len(placed.form.reductions) * _join_cycles(
        s
    )
    rounds = -(-busiest // _resident(s, each, gpu))
    cycles = START + max(BLOCK * blocks, lines + sectors + rounds * work)
    return max(cycles / gpu.model_clock, moved_bytes(operator, binding) / gpu.bandwidth)


def _resident(s: RowShape, each: int, gpu: Gpu) -> int:
    """Blocks that an SM has at once."""
    registers = min(255, REGISTERS + ELEMENT * each)
    return max(1, min(gpu.threads // s.threads, int(gpu.registers / (registers * s.threads)), RESIDENT))


def _join_cycles(s: RowShape) -> float:
    """Cycles of one reduction's way from all threads of a row to each."""
    near = WARP // min(s.side, WARP) if s.side else min(s.lanes, WARP)
    parts = s.threads // max(s.side, WARP) if s.side else s.lanes // WARP
    join = BUTTERFLY * (near.bit_length() - 1) + (WARP_READ * parts if parts > 1 else 0)
    return join + ((MEET + PEER * s.blocks) if s.blocks > 1 else 0)
