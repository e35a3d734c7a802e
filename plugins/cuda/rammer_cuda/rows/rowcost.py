"""What kernels on rows take."""

from __future__ import annotations

from rammer.device.manifest import Binding
from rammer.ir import expr as ex

from rammer_cuda.gpu import Gpu
from rammer_cuda.kernels.frame import WARP, moved_bytes
from rammer_cuda.rows.rowshape import SECTOR, PlacedRows, RowShape, shape_of
from rammer_cuda.rows.rowtraffic import row_traffic

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
    work = CHAIN * each * sum(ex.flops(c.body) + 1 for c in operator.computes) + len(placed.form.reductions) * _join(s)
    rounds = -(-busiest // _resident(s, each, gpu))
    cycles = START + max(BLOCK * blocks, lines + sectors + rounds * work)
    return max(cycles / gpu.model_clock, moved_bytes(operator, binding) / gpu.bandwidth)


def _resident(s: RowShape, each: int, gpu: Gpu) -> int:
    """Blocks that an SM has at once."""
    registers = min(255, REGISTERS + ELEMENT * each)
    return max(1, min(gpu.threads // s.threads, int(gpu.registers / (registers * s.threads)), RESIDENT))


def _join(s: RowShape) -> float:
    """Cycles of one reduction's way from all threads of a row to each."""
    near = WARP // min(s.side, WARP) if s.side else min(s.lanes, WARP)
    parts = s.threads // max(s.side, WARP) if s.side else s.lanes // WARP
    join = BUTTERFLY * (near.bit_length() - 1) + (WARP_READ * parts if parts > 1 else 0)
    return join + ((MEET + PEER * s.blocks) if s.blocks > 1 else 0)
