"""What a product costs, by a small model of one SM: one formula, and the figures of every instruction as data.

A launch is a start, then rounds of as many blocks as an SM holds; a block is so many steps, one for every block of products,
and the store of its tile. What a step costs depends on who does what. Of a ring that all threads fill (``ring_seconds``) the
issue of instructions, reads of shared memory and copies add up. With producers and consumers (``warpgroup_seconds``) a step
takes the longest of the tensor cores' work for all blocks of the SM, the bytes that it gets from L2, the producers' work, and
one consumer's own chain of waiting, converting, multiplying and adding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, TypeAlias

import numpy as np

from rammer.codegen.halo import length_under
from rammer.ir import expr as ex
from rammer.ir.expr import Load

from rammer_cuda.contraction.block import GROUP, THREADS, Shape, WarpgroupShape
from rammer_cuda.contraction.depth import Depth
from rammer_cuda.contraction.instruction import FFMA, MMA_BF16, MMA_F16, MMA_I8, MMA_TF32, MMA_TF32X3, Instruction
from rammer_cuda.contraction.warpgroup import WGMMA_F16, WGMMA_I8, WGMMA_TF32, WGMMA_TF32X3, Wgmma
from rammer_cuda.gpu import Gpu

#: A number, or an array of numbers for many blocks at once.
Numbers: TypeAlias = Any

#: Register tiles (rows, columns) of FFMA, and fragments of 16 x 8 a warp on tensor cores.
REGISTERS = ((4, 4), (8, 4), (4, 8), (8, 8))
FRAGMENTS = ((1, 2), (1, 4), (1, 7), (2, 2), (2, 4), (2, 7), (4, 4))
#: Block depths with their slices.
BLOCKS = ((8, 1), (16, 1), (16, 2), (32, 1), (32, 2), (32, 4))
HALF_BLOCKS = ((32, 1), (32, 2), (64, 1), (64, 2), (64, 4))
BYTE_BLOCKS = ((32, 1), (64, 1), (64, 2), (128, 1), (128, 2), (128, 4))
#: Cycles of maps before the contraction, per step and per element of a thread, of a ring's busiest scheduler: a shared-memory
#: read, two dependent operations and a write before the step's barrier; and of a producer, of which nothing hides those of
#: the first block. Counted from the instructions, not measured.
MAPS_STEP, MAPS, PRODUCER_MAPS = 90, 3.0, 6.0
#: SMs of the graphics processing clusters of an H200; which ones lack SMs differs from chip to chip.
GROUPS = (18, 18, 18, 18, 16, 16, 14, 14)
#: Bytes that L2 gives an SM in a cycle when all SMs read (measured on an H200: 5.5 TB/s).
L2_BYTES = 21.0


@dataclass(frozen=True)
class DepthWalk:
    """Of a ``Depth``, or of many: the number of blocks, whether the order is flat, whether there are outer axes."""

    blocks: Numbers
    flat: Numbers
    outer: Numbers

    @classmethod
    def of(cls, depth: Depth) -> DepthWalk:
        """One walk."""
        return cls(depth.blocks, depth.flat, bool(depth.outer))

    @classmethod
    def each(cls, depths: Sequence[Depth]) -> DepthWalk:
        """Many."""
        return cls(*(np.array(n) for n in zip(*((d.blocks, d.flat, bool(d.outer)) for d in depths), strict=True)))


@dataclass(frozen=True)
class Work:
    """What a launch has to do, or many: its tasks, the results of each (``cells``), which operand passes through maps first ("a",
    "b" or ""), whether 16 bytes of columns are copied at a time where elements are float16, elements of one channel under a
    task's windows, and the elements of rows and of columns that are copied at a time where they are bytes."""

    tasks: Numbers
    cells: Numbers
    changed: str = ""
    together: bool = True
    halo: int = 0
    lots: tuple[Numbers, Numbers] = (16, 16)


@dataclass(frozen=True, slots=True)
class LaunchCycles:
    """Cycles of a launch: from its start to the first products, for convolutions' taps more, for a cluster's barriers."""

    start: float
    taps: float
    cluster: float

    def cycles(self, walk: DepthWalk, split: Numbers, rounds: Numbers, step: Numbers, end: Numbers) -> Numbers:
        """Cycles of ``rounds`` of blocks, of ``step`` cycles for each block of products and ``end`` behind them."""
        cycles = self.start + self.taps * walk.outer + self.cluster * (split > 1)
        return cycles + rounds * (-(-walk.blocks // split) * step + end)


@dataclass(frozen=True)
class RingCost:
    """An instruction in a ring that all threads fill: register tiles or fragments and block depths that are tried, and what it
    costs. Cycles on one scheduler per ring step, instruction, shared-memory read of an operand with what it takes to round or
    split it (``reads`` of them for a tile's rows and columns; of a whole SM with ``port``), copy of a thread, and element of a
    thread in the epilogue; of each cycle that staging would keep L2 busy, and per byte read from others of a cluster.
    ``products`` instructions for one; ``write`` cycles of a thread for each element that it stores."""

    instruction: Instruction
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

    @property
    def tensor(self) -> bool:
        """Whether warps multiply on tensor cores."""
        return self.instruction.form.threads > 1

    @property
    def item(self) -> int:
        """Bytes of an element."""
        return self.instruction.staged[0].item

    def configs(self, splits: Sequence[int]) -> list[tuple[tuple[str, int], ...]]:
        """The config of every block shape; the ring of tensor-core kernels depends on the task too (``choose.ring``)."""
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
        """Cycles of the instructions of a warp (of a thread) for ``part`` products."""
        return self.matrix * (part / self.instruction.form.k * tm * tn * self.products)

    def reading(self, part: Numbers, tm: Numbers, tn: Numbers) -> Numbers:
        """Reads for ``part`` products."""
        return part / self.instruction.form.k * (self.reads[0] * tm + self.reads[1] * tn)

    def warp(self, part: Numbers, tm: Numbers, tn: Numbers) -> Numbers:
        """Cycles of a warp for both."""
        return self.issue(part, tm, tn) + self.read * self.reading(part, tm, tn)


@dataclass(frozen=True)
class WarpgroupCost:
    """An instruction of warpgroups with its block depths. ``step``, ``convert`` and ``add`` are cycles of a consumer
    per block, per instruction's products and per result, ``ready`` of a producer per 16 bytes a thread of the
    constant, ``l2`` the bytes that an SM gets in a cycle. With ``ahead`` all but the step runs while the block before is
    multiplied. ``products`` instructions for one, ``held`` registers of a thread besides sums and addresses per product of a
    block, ``start`` cycles of a launch besides those of all warpgroups."""

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

    @property
    def item(self) -> int:
        """Bytes of an element."""
        return self.instruction.staged[0].item

    def copies(self, elements: float) -> float:
        """Copies of one thread for so many elements: of 16 bytes in float16 and bytes, else of 4, as the figures were fitted."""
        return elements / THREADS / (16 // self.item if self.item < 4 else 1)

    def registers(self, s: WarpgroupShape) -> Any:
        """Registers of a thread: sums (on the tensor cores and, of products in parts, outside), operands, addresses."""
        return (s.fixed if self.instruction.parts > 1 else s.fixed // 2 + 10) + int(self.held * s.bk) + 30

    def shared(self, s: WarpgroupShape, halo: int, halos: int = 2) -> Any:
        """Bytes of shared memory: buffers of both operands with the constant's other halves, or the results in their place."""
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
#: Those of one product, on 798 kernels of 55 layers in tf32 and 784 of 27 in float16 on an H200, minimise by how much the first
#: and the best of the first four choices are slower than the best: by 8%, and by 2%.
TF32_COST = RingCost(MMA_TF32, FRAGMENTS, BLOCKS[1:], LaunchCycles(2300, 30, 1600), 72, 5.5, 8.7, 8.4, 11.3, 0.08, 0.09, (4, 2))
F16_COST = RingCost(
    MMA_F16, FRAGMENTS, HALF_BLOCKS, LaunchCycles(1910, 0, 1600), 190, 9.5, 12.0, 11.5, 12.0, 0.5, 0.075, (1, 0.5)
)
#: Not fitted: that of tf32, with instructions for twice the products in the same time (dense bfloat16 at the rate of float16, 989
#: TFLOP/s, and tf32 at half of it, 495: NVIDIA H100 and H200 datasheets), and one rounding for two reads.
BF16_COST = RingCost(
    MMA_BF16, FRAGMENTS, ((16, 1), (32, 1), (32, 2)), LaunchCycles(2300, 30, 1600), 72, 5.5, 6.5, 8.4, 11.3, 0.08, 0.09, (8, 4)
)
#: Not fitted: that of float16, with instructions for twice the products in the same time (1,979 TOPS of bytes and 989 TFLOP/s of
#: float16, dense: NVIDIA H200 datasheet).
I8_COST = RingCost(MMA_I8, FRAGMENTS, BYTE_BLOCKS, LaunchCycles(1910, 0, 1600), 190, 9.5, 12.0, 11.5, 12.0, 0.5, 0.075, (1, 0.5))
#: Cycles that a copy of one byte takes of a thread besides: it loads, waits and stores.
BYTE_COPY = 2.0

#: Of warpgroups, all fitted to 450 kernels of 60 layers on an H200, the faster ones of a layer weighing more: the measured
#: time over the predicted has a standard deviation of 0.14, and the fastest of the three best predicted is 0.3% slower than
#: the fastest of all, 7% at worst. Taps are the first halo.
WARPGROUP_LAUNCH = LaunchCycles(1630, 830, 3530)
#: Cycles of one tensor instruction per 8 columns.
MATRIX = 4.0
#: Cycles of a producer per block, per copy of a thread (more where the walk is flat, which has no order to find out).
ORDER, COPY, FLAT = 640, 6.8, 8.8
#: Producers of a flat walk are faster together by this power of their number only: each element has an address to be worked out,
#: beside warps that convert. And cycles of a copy of a halo that is the only one: nothing is multiplied meanwhile. Fitted, with
#: FLAT, to 106 kernels of SqueezeNet on an H100 (deviation 0.17 before, 0.12 now). 15 others, of Inception V3 and DeepSpeech2 on
#: an H200, had been predicted to take 0.56 to 0.92 of what was measured, and are predicted to take 0.76 to 1.11 of it.
TOGETHER, ALONE = 0.25, 60.0
#: Cycles per element of a thread and per element of the block in the epilogue.
STORE, WRITE = 100, 0.3
WGMMA_TF32X3_COST = WarpgroupCost(WGMMA_TF32X3, (32, 64), 3, 460, 85, 0.5, 100, 17.0, 1, False)
#: Not fitted: derived from the fitted figures. A conversion is taken as half, 4 instructions for the 12 of halving beside the
#: same 4 reads; nothing is added outside; what was 100 for a copy of the constant and its halving is the copy alone. Bytes
#: bound few of the kernels of the fit but most of these: the rate of L2 is the measured one.
WGMMA_TF32_COST = WarpgroupCost(WGMMA_TF32, (32, 64), 1, 460, 42, 0.0, COPY, L2_BYTES, 0.5, False)
#: The same without anything to convert, and without a wait for its own products, which is taken as 160 of a step; an
#: instruction has 16 products in the same time.
WGMMA_F16_COST = WarpgroupCost(WGMMA_F16, (64, 128), 1, 300, 0.0, 0.0, COPY, L2_BYTES, 0, True)
#: Of bytes, with 32 products an instruction. In 26 of 27 products of ResNet-50 (batch 1, H200) the fastest of them took 0.3 to
#: 1.9 us longer than the fastest of I8_COST, however the two had been predicted: ``start``.
WGMMA_I8_COST = WarpgroupCost(WGMMA_I8, (64, 128), 1, 300, 0.0, 0.0, COPY, L2_BYTES, 0, True, 2000)

#: In the order in which families are asked.
RING_COSTS: Final = (FFMA_COST, TF32X3_COST, TF32_COST, F16_COST, BF16_COST, I8_COST)
WARPGROUP_COSTS: Final = (WGMMA_TF32X3_COST, WGMMA_TF32_COST, WGMMA_F16_COST, WGMMA_I8_COST)


def ring_seconds(cost: RingCost, s: Shape, walk: DepthWalk, work: Work, gpu: Gpu) -> Numbers:
    """Seconds of one launch, or of many."""
    threads, part, cells = s.threads, s.bk / s.slice_k, work.cells
    warps, steps, lot = threads / 32, -(-walk.blocks // s.split_k), 16 // cost.item
    copies = (s.bm / lot + s.bn / (lot if cost.item == 2 and work.together else 1)) * s.bk / threads
    if cost.item == 1:
        copies = sum((1 + BYTE_COPY * (n == 1)) * e / n for n, e in zip(work.lots, (s.bm, s.bn), strict=True)) * s.bk / threads
    per_sm = -(-work.tasks * s.split_k // _usable_array(s.split_k, gpu.sms))
    resident = np.minimum(per_sm, _resident_blocks(cost, s, gpu))
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
    staged = work.tasks * s.split_k * steps * s.bk * (s.bm + s.bn) * cost.item
    cycles = cost.launch.cycles(walk, s.split_k, -(-per_sm // resident), step, store)
    return (cycles + cost.l2 * staged / (L2_BYTES * gpu.sms)) / gpu.model_clock + gpu.launch


def _usable_array(split: Numbers, sms: int) -> Numbers:
    """``usable_sms`` for an array."""
    return np.array([usable_sms(max(1, n), sms) for n in range(int(np.max(split)) + 1)])[split]


@cache
def usable_sms(split: int, sms: int) -> int:
    """SMs that clusters of ``split_k`` blocks can fill at once: a cluster stays inside one processing cluster."""
    groups = [g * sms // sum(GROUPS) for g in GROUPS]
    return max(split, sum(g // split * split for g in groups))


def _resident_blocks(cost: RingCost, s: Shape, gpu: Gpu) -> Numbers:
    """Blocks that fit an SM together."""
    shared = np.maximum(cost.item * s.stages * s.bk * (s.bm + s.bn), 4 * s.bm * s.bn * s.slice_k)
    each = 4 * s.tm * s.tn + 8 * s.tm + 40 if cost.tensor else s.tm * s.tn + s.tm + s.tn + 40
    most = np.minimum(gpu.shared // (shared + 1024), gpu.registers // (s.threads * each))
    return np.maximum(1, np.minimum(most, gpu.threads // s.threads))


def warpgroup_seconds(cost: WarpgroupCost, s: WarpgroupShape, depth: Depth, work: Work, gpu: Gpu) -> float:
    """Seconds of one launch; what passes through maps first is the operand that is no constant."""
    groups, instructions, cells = s.through // GROUP, s.bk / cost.instruction.form.k, work.cells
    per_sm = -(-work.tasks * s.split_k // usable_sms(s.split_k, gpu.sms))
    registers = s.threads * cost.registers(s)
    resident = max(1, min(gpu.shared // (cost.shared(s, work.halo, depth.halos) + 1024), gpu.registers // registers, per_sm))
    tensor = MATRIX * cost.products * instructions * s.fixed / 8
    read = (work.halo if s.halo else s.through) * s.bk / (math.prod(a.extent for a in depth.outer) if s.halo else 1)
    ready = cost.ready * s.fixed * s.bk * cost.item / (16 * THREADS)
    maps = MAPS_STEP + PRODUCER_MAPS * read / THREADS if work.changed else 0.0
    copying = (COPY * FLAT * cost.copies(read) if depth.flat else ORDER + COPY * cost.copies(read)) + ready + maps
    converting = cost.convert * instructions + cost.add * s.fixed / 2
    alone = cost.step + (max(converting, tensor) if cost.ahead else converting + tensor)
    moved = resident * cost.item * (read + s.bk * s.fixed) / cost.l2
    shared = s.producers**TOGETHER if depth.flat else s.producers
    step = max(tensor * groups * resident, alone, copying / shared * math.sqrt(resident), moved)
    store = STORE * resident * cells / s.threads + WRITE * resident * cells / s.split_k
    if s.halo and depth.halos == 1:
        store += ALONE * cost.copies(work.halo * s.bk)
    cycles = WARPGROUP_LAUNCH.cycles(DepthWalk.of(depth), s.split_k, -(-per_sm // resident), step, store + maps)
    return float((cost.start + cycles) / gpu.model_clock + gpu.launch)


def halo_elements(read: Load, tile: Mapping[str, int], depth: Depth) -> int:
    """Elements of one channel under a task's windows; 0 without taps."""
    taps = {a.name: a.extent for a in depth.outer}
    if depth.flat or not taps:
        return 0
    count = 1
    for index in read.indices:
        form = ex.affine_form(index)
        if form is not None and depth.inner.name not in form[0]:
            count *= length_under(form[0], {**tile, **taps})
    return count
