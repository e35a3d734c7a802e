"""Cost model of a product on one SM: one formula, and the parameters of every instruction as data.

A launch is a start, then rounds of as many blocks as an SM holds. A block is one step for every block of products, and the store
of its tile. The cost of a step depends on the pipeline. In a ring that all threads fill (``ring_seconds``), instruction issue,
shared-memory reads and copies add up. With producers and consumers (``warpgroup_seconds``), a step is the maximum of four times:

- the tensor cores' work for all blocks of the SM,
- the bytes that the SM gets from L2,
- the producers' work,
- one consumer's chain of waiting, converting, multiplying and adding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

from rammer.codegen.products import BLOCKS, MAPS_STEP, PRODUCER_MAPS, REGISTERS, Depth, DepthWalk, LaunchCycles, RingCost, Work

from rammer_cuda.contraction.block import GROUP, THREADS, WarpgroupShape
from rammer_cuda.contraction.instruction import FFMA, MMA_BF16, MMA_F16, MMA_I8, MMA_TF32, MMA_TF32X3
from rammer_cuda.contraction.warpgroup import WGMMA_F16, WGMMA_I8, WGMMA_TF32, WGMMA_TF32X3, Wgmma
from rammer_cuda.gpu import L2_BYTES, Gpu

#: Fragments of 16 x 8 a warp on tensor cores, and block depths with their slices.
FRAGMENTS = ((1, 2), (1, 4), (1, 7), (2, 2), (2, 4), (2, 7), (4, 4))
HALF_BLOCKS = ((32, 1), (32, 2), (64, 1), (64, 2), (64, 4))
BYTE_BLOCKS = ((32, 1), (64, 1), (64, 2), (128, 1), (128, 2), (128, 4))
#: Cycles of a producer per copy of a thread, fitted with the costs of ``WGMMA_TF32X3_COST``.
COPY = 6.8
#: The default launch of warpgroups. Taps are the first halo.
WARPGROUP_LAUNCH = LaunchCycles(1630, 830, 3530)


@dataclass(frozen=True)
class WarpgroupCost:
    """The costs of an instruction of warpgroups, with its block depths.

    ``step``, ``convert`` and ``add`` are cycles of a consumer per block, per instruction's products and per result. ``ready`` is
    cycles of a producer per 16 bytes a thread of the constant, ``l2`` the bytes that an SM gets in a cycle. With ``ahead``, all
    but the step overlaps with the previous block's products. ``products`` is the number of instructions for one product. ``held``
    is the extra registers of a thread per product of a block, ``start`` the extra cycles of a launch. ``order`` and ``copy`` are
    a producer's cycles per block and per copy of a thread. ``store`` and ``write`` are those of the epilogue per element of a
    thread and of the block. ``peer`` and ``ends`` are as in ``RingCost``."""

    instruction: Wgmma
    blocks: tuple[int, ...]
    products: int
    step: float
    convert: float
    add: float
    ready: float
    l2: float
    held: float
    ahead: bool
    start: float = 0.0
    launch: LaunchCycles = WARPGROUP_LAUNCH
    order: float = 640
    copy: float = COPY
    store: float = 100
    write: float = 0.3
    peer: float = 0.0
    ends: float = 0.0

    @property
    def item(self) -> int:
        """The bytes of an element."""
        return self.instruction.staged[0].item

    def copies(self, elements: float) -> float:
        """Return the copies of one thread for ``elements``: of 16 bytes in float16 and bytes, else of 4, as in the fit."""
        return elements / THREADS / (16 // self.item if self.item < 4 else 1)

    def registers(self, s: WarpgroupShape) -> Any:
        """Return the registers of a thread: sums (also outside the tensor cores for split products), operands, addresses."""
        return (s.fixed if self.instruction.parts > 1 else s.fixed // 2 + 10) + int(self.held * s.bk) + 30

    def shared(self, s: WarpgroupShape, halo: int, halos: int = 2) -> Any:
        """Return the bytes of shared memory: buffers of both operands with the constant's other halves, or the results."""
        read = halos * (halo + 16) if s.halo else s.stages * (s.through + 8)
        return max(self.item * s.bk * (read + self.instruction.parts * s.stages * s.fixed), 4 * s.bm * s.bn)


#: Fitted to 736 kernels of 47 layers on an H200; the measured time over the predicted has a standard deviation of 0.18.
FFMA_COST = RingCost(
    FFMA, REGISTERS, BLOCKS, LaunchCycles(1900, 850, 2100), 160, 2.1, 0.1, 7.0, 6.0, 0.0, 0.0, (0.25, 0.25), port=True, write=30
)
#: Fitted together with FFMA's; additions outside are in ``matrix``. The writes of both are of a later fit, to 127 kernels of
#: SqueezeNet on an H100: without them large tiles of one block of products take up to 1.5 us longer than predicted.
TF32X3_COST = RingCost(
    MMA_TF32X3,
    FRAGMENTS,
    BLOCKS[1:],
    LaunchCycles(1900, 850, 2100),
    160,
    13.0,
    13.6,
    4.2,
    10.0,
    0.0,
    0.0,
    (4, 2),
    products=3,
    write=30,
)
#: On 798 kernels of 55 layers on an H200. The costs minimise the slowdown of the first choice, and of the best of the first four,
#: relative to the best kernel: 8% and 2%.
TF32_COST = RingCost(MMA_TF32, FRAGMENTS, BLOCKS[1:], LaunchCycles(2300, 30, 1600), 72, 5.5, 8.7, 8.4, 11.3, 0.08, 0.09, (4, 2))
#: Fitted to 232 kernels of 66 products of ResNet-50 (batch 1, 8 and 32), ViT-B/16 and a decoder on an H200, then near these costs
#: to 181 kernels, most of them first choices of those models, BERT-base and Swin-T: measured over predicted has a standard
#: deviation of 0.14 (0.17 before).
F16_COST = RingCost(
    MMA_F16,
    FRAGMENTS,
    HALF_BLOCKS,
    LaunchCycles(2563, 20, 2790),
    200,
    4.1,
    14.4,
    7.9,
    12.1,
    0.168,
    0.08,
    (1, 0.5),
    ends=1.42,
    halo=64,
)
#: Not fitted: the costs of tf32, with instructions for twice the products in the same time (dense bfloat16 at the rate of
#: float16, 989 TFLOP/s, and tf32 at half of it, 495: NVIDIA H100 and H200 datasheets), and one rounding for two reads.
BF16_COST = RingCost(
    MMA_BF16, FRAGMENTS, ((16, 1), (32, 1), (32, 2)), LaunchCycles(2300, 30, 1600), 72, 5.5, 6.5, 8.4, 11.3, 0.08, 0.09, (8, 4)
)
#: Not fitted: earlier costs of float16, with instructions for twice the products in the same time (1,979 TOPS of bytes and 989
#: TFLOP/s of float16, dense: NVIDIA H200 datasheet).
I8_COST = RingCost(MMA_I8, FRAGMENTS, BYTE_BLOCKS, LaunchCycles(1910, 0, 1600), 190, 9.5, 12.0, 11.5, 12.0, 0.5, 0.075, (1, 0.5))
#: Cycles of one tensor instruction per 8 columns.
MATRIX = 4.0
#: The factor of a producer's copy if the walk is flat, which has no cost per block.
FLAT = 8.8
#: The speedup of several producers of a flat walk is their number to this power: each computes an address for each element, next
#: to warps that convert. And cycles of a copy of a single halo, which overlaps with no products. Fitted, with FLAT, to 106
#: kernels of SqueezeNet on an H100 (deviation 0.17 before, 0.12 now). For 15 others, of Inception V3 and DeepSpeech2 on an H200,
#: the predicted time was 0.56 to 0.92 of the measured one, and is now 0.76 to 1.11 of it.
TOGETHER, ALONE = 0.25, 60.0
#: Fitted, with the default costs of warpgroups, to 450 kernels of 60 layers on an H200, with more weight on the faster ones of a
#: layer. The measured time over the predicted has a standard deviation of 0.14. The fastest of the three best predicted is 0.3%
#: slower than the fastest of all, 7% at worst.
WGMMA_TF32X3_COST = WarpgroupCost(WGMMA_TF32X3, (32, 64), 3, 460, 85, 0.5, 100, 17.0, 1, False)
#: Not fitted: derived from the fitted costs. A conversion costs half: 4 instructions instead of 12 for halving, with the same 4
#: reads. Additions outside cost zero. The cost of 100 for a copy of the constant and its halving becomes the copy alone. Bytes
#: limit few of the fitted kernels but most of these, so the rate of L2 is the measured one.
WGMMA_TF32_COST = WarpgroupCost(WGMMA_TF32, (32, 64), 1, 460, 42, 0.0, COPY, L2_BYTES, 0.5, False)
#: Without conversions, without a wait for its products, and with copies that signal their barriers. An instruction has 16
#: products in the same time. Fitted to 154 kernels of 25 products of ResNet-50 (batch 1, 8 and 32), ViT-B/16 (1 and 8) and
#: BERT-base on an H200: a standard deviation of 0.15. The costs are 11% above that fit: first choices are those that it
#: underestimates, and with less these would replace faster kernels of ``F16_COST``.
WGMMA_F16_COST = WarpgroupCost(
    WGMMA_F16,
    (64, 128),
    1,
    338,
    0.0,
    0.0,
    9.4,
    19.6,
    0,
    True,
    launch=LaunchCycles(3160, 1310, 2490),
    order=19,
    copy=21.1,
    store=156,
    write=0.21,
    peer=0.026,
    ends=0.18,
)
#: Costs of bytes, with 32 products an instruction. In 26 of 27 products of ResNet-50 (batch 1, H200) the fastest of them was 0.3
#: to 1.9 us slower than the fastest of I8_COST, for any predictions of the two: ``start``.
WGMMA_I8_COST = WarpgroupCost(WGMMA_I8, (64, 128), 1, 300, 0.0, 0.0, COPY, L2_BYTES, 0, True, 2000)

#: In the order in which families are tried.
RING_COSTS: Final = (FFMA_COST, TF32X3_COST, TF32_COST, F16_COST, BF16_COST, I8_COST)
WARPGROUP_COSTS: Final = (WGMMA_TF32X3_COST, WGMMA_TF32_COST, WGMMA_F16_COST, WGMMA_I8_COST)


def warpgroup_seconds(cost: WarpgroupCost, s: WarpgroupShape, depth: Depth, work: Work, gpu: Gpu) -> float:
    """Return the seconds of one launch. Maps before the contraction are on the non-constant operand."""
    groups, instructions, cells = s.through // GROUP, s.bk / cost.instruction.form.k, work.cells
    per_sm = -(-work.tasks * s.split_k // gpu.usable(s.split_k))
    registers = s.threads * cost.registers(s)
    resident = max(1, min(gpu.shared // (cost.shared(s, work.halo, depth.halos) + 1024), gpu.registers // registers, per_sm))
    tensor = MATRIX * cost.products * instructions * s.fixed / 8
    read = (work.halo if s.halo else s.through) * s.bk / (math.prod(a.extent for a in depth.outer) if s.halo else 1)
    ready = cost.ready * s.fixed * s.bk * cost.item / (16 * THREADS)
    maps = MAPS_STEP + PRODUCER_MAPS * read / THREADS if work.changed else 0.0
    copying = (cost.copy * FLAT * cost.copies(read) if depth.flat else cost.order + cost.copy * cost.copies(read)) + ready + maps
    converting = cost.convert * instructions + cost.add * s.fixed / 2
    alone = cost.step + (max(converting, tensor) if cost.ahead else converting + tensor)
    moved = resident * cost.item * (read + s.bk * s.fixed) / cost.l2
    shared = s.producers**TOGETHER if depth.flat else s.producers
    step = max(tensor * groups * resident, alone, copying / shared * math.sqrt(resident), moved)
    store = cost.store * resident * cells / s.threads + cost.write * resident * cells / s.split_k
    store += 4 * cost.peer * resident * cells * (s.split_k > 1)
    if s.halo and depth.halos == 1:
        store += ALONE * cost.copies(work.halo * s.bk)
    cycles = cost.launch.cycles(DepthWalk.of(depth), s.split_k, -(-per_sm // resident), step, store + maps)
    cycles += cost.ends * work.ends / (L2_BYTES * gpu.sms)
    return float((cost.start + cycles) / gpu.model_clock + gpu.launch)
