"""Tiles and blocks worth trying for warpgroup products, by the same model of one SM as ``choose``'s with other units at work.

For every block of products an SM takes the longest of: the tensor cores' work for all its blocks, the bytes that it
gets from L2, the copying warpgroups' work, and one multiplying warpgroup's own chain of waiting, converting, multiplying
and adding. Families with one product for one hide that chain behind their products (``contraction.warpgroup``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from rammer.codegen.contraction import Roles, operand_of, product_of, roles_of, with_quotients
from rammer.codegen.task import Unsuited
from rammer.device.manifest import Binding
from rammer.ir import expr as ex
from rammer.ir.expr import Load
from rammer.ir.operator import ROperator

from rammer_cuda.contraction.block import GROUP, MOST, THREADS, Wide, wide_shape
from rammer_cuda.contraction.choose import L2_BYTES, tile_parts, usable
from rammer_cuda.contraction.depth import Depth, depth_of
from rammer_cuda.contraction.kernel import contraction
from rammer_cuda.contraction.warpgroup import WARPGROUPS
from rammer_cuda.family import Choice
from rammer_cuda.gpu import Gpu
from rammer_cuda.kernels.task import TaskKernel

#: Buffers of the ring and copying warpgroups that are tried.
STAGES, COPIERS = (6, 5, 4, 3), (1, 2)
#: Warpgroups of a block, and fewest columns (or rows) of the constant: of a tile if there are as many, and in all. With fewer
#: most of an instruction's 8 would be padding.
MOST_GROUPS, FEWEST, LEAST = 4, 16, 5
#: Share of a warpgroup's rows that a tile must fill.
FILLED = 0.7
#: Splits: clusters of 3 or 6 blocks measured up to twice as slow as their number of SMs says.
SPLITS = (1, 2, 4, 8)
#: Cycles of a launch, with the first patch, with a cluster's barriers. Fitted to 450 kernels of 60 layers on an H200, the
#: faster ones of a layer weighing more: the measured time over the predicted has a standard deviation of 0.14, and the
#: fastest of the three best predicted is 0.3% slower than the fastest of all, 7% at worst.
START, TAPS, CLUSTER = 1630, 830, 3530
#: Cycles of one tensor instruction per 8 columns.
MATRIX = 4.0
#: Cycles of a copying warpgroup per block, per copy of a thread (more where the walk is flat).
ORDER, COPY, FLAT = 640, 6.8, 6.0
#: Cycles per element of a thread and per element of the block in the epilogue.
STORE, WRITE = 100, 0.3
#: Cycles of a copying warpgroup for maps before the contraction, per block and per element of a thread; nothing hides
#: those of the first block. Counted from the instructions, not measured.
CHANGE_STEP, CHANGE = 90, 6.0


@dataclass(frozen=True, slots=True)
class WideFamily:
    """One family of warpgroup products: its element type, block depths, products an instruction and instructions for one,
    and copies of the constant in shared memory. ``step``, ``convert`` and ``add`` are cycles of a multiplying warpgroup
    per block, per instruction's products and per result, ``ready`` of a copying warpgroup per 16 bytes a thread of the
    constant, ``l2`` the bytes that an SM gets in a cycle. With ``ahead`` all but the step runs while the block before is
    multiplied. ``packed`` says that exactly one operand is a constant, ``held`` registers of a thread besides sums and
    addresses per product of a block."""

    name: str
    make: Callable[[ROperator, Binding], TaskKernel]
    dtype: str
    blocks: tuple[int, ...]
    deep: int
    products: int
    parts: int
    step: float
    convert: float
    add: float
    ready: float
    l2: float
    held: float
    ahead: bool
    packed: bool

    @property
    def prologue(self) -> bool:
        """Whether maps before the contraction can be computed: on float32 elements, in shared memory."""
        return self.dtype == "float32"

    @property
    def item(self) -> int:
        """Bytes of an element."""
        return 2 if self.dtype == "float16" else 4

    def copies(self, elements: float) -> float:
        """Copies of one thread for so many elements: of 16 bytes in float16, else of 4, as the figures were fitted."""
        return elements / THREADS / (8 if self.item == 2 else 1)

    def registers(self, fixed: int, bk: int) -> int:
        """Registers of a thread: sums (on the tensor cores and, of products in parts, outside), operands, addresses."""
        return (fixed if self.parts > 1 else fixed // 2 + 10) + int(self.held * bk) + 30


#: Fitted (see ``START``).
WGMMA3 = WideFamily("gemm_wgmma3", contraction, "float32", (32, 64), 8, 3, 2, 460, 85, 0.5, 100, 17.0, 1, False, True)
#: Not fitted: derived from the fitted figures. A conversion is taken as half, 4 instructions for the 12 of halving beside the
#: same 4 reads; nothing is added outside; what was 100 for a copy of the constant and its halving is the copy alone. Bytes
#: bound few of the kernels of the fit but most of these: the rate of L2 is the measured one.
WGMMA1 = WideFamily("gemm_wgmma1", contraction, "float32", (32, 64), 8, 1, 1, 460, 42, 0.0, COPY, L2_BYTES, 0.5, False, True)
#: The same without anything to convert, and without a wait for its own products, which is taken as 160 of a step; an
#: instruction has 16 products in the same time.
WGMMA_F16 = WideFamily("gemm_wgmma_f16", contraction, "float16", (64, 128), 16, 1, 1, 300, 0.0, 0.0, COPY, L2_BYTES, 0,
                       True, False)  # fmt: skip


def wide_family(dtype: str, precision: str) -> WideFamily:
    """The family for operands of ``dtype`` in the precision that the user allows."""
    if dtype == "float16":
        return WGMMA_F16
    return WGMMA1 if precision == "tf32" else WGMMA3


def wide_choices(family: WideFamily, operator: ROperator, binding: Binding, gpu: Gpu) -> Iterator[Choice]:
    """The best two of every tile, best predicted first; some cannot be expressed as a kernel. None where the operands or the
    precision are another family's."""
    dtype = "float16" if any(binding.types[n].dtype == "float16" for n in operator.computes[0].reads) else "float32"
    if family is not wide_family(dtype, binding.precision):
        return
    try:
        roles = roles_of(operator, binding, dtype, prologue=family.prologue)
    except Unsuited:
        return
    found = [p for down in _ways(family, roles, binding) for p in _predictions(family, roles, down, gpu)]
    seen: dict[tuple[int, ...], int] = {}
    for seconds, tile, config in sorted(found):
        seen[tile] = seen.get(tile, 0) + 1
        if seen[tile] <= 2:
            yield Choice(seconds, replace(operator, tile=tile, family=family.name, config=config))


def _ways(family: WideFamily, roles: Roles, binding: Binding) -> tuple[bool, ...]:
    """Whether a warpgroup's 64 are rows, as far as the family can choose; () where it cannot take the operands."""
    constants = [ld.tensor in binding.constants for ld in (roles.a, roles.b)]
    rows, columns = (math.prod(roles.main.shape[d] for d in side) for side in (roles.rows, roles.columns))
    if family.packed:
        fixed = columns if constants[1] else rows
        return () if constants[0] == constants[1] or fixed < LEAST else (constants[1],)
    sides = (roles.a, roles.rows), (roles.b, roles.columns)
    if min(rows, columns) < LEAST or not all(_by_16_bytes(load, side, roles, binding) for load, side in sides):
        return ()
    return False, True


def _by_16_bytes(load: Load, side: tuple[int, ...], roles: Roles, binding: Binding) -> bool:
    """Whether some tile's elements of ``load`` can be copied 16 bytes at a time, or packed: kernels would say so one by one."""
    main = roles.main
    try:
        operand = operand_of(with_quotients(load, {a.name: 1 for a in main.axes}), main, binding)
    except Unsuited:
        return False
    if operand.packable:
        return True
    depth, lot = depth_of(main.reduce, WGMMA_F16.blocks[0]), 16 // WGMMA_F16.item
    deep = operand.steps.get(depth.inner.name, 0) == 1 and depth.inner.extent % lot == 0 and not depth.flat
    return operand.aligned and (deep or (not operand.guards and any(operand.steps.get(main.axes[d].name) == 1 for d in side)))


def _predictions(family: WideFamily, roles: Roles, down: bool,
                 gpu: Gpu) -> Iterator[tuple[float, tuple[int, ...], tuple[tuple[str, int], ...]]]:  # fmt: skip
    read, names = roles.a if down else roles.b, [a.name for a in roles.main.axes]
    depths = {bk: depth_of(roles.main.reduce, bk) for bk in family.blocks}
    known: dict[tuple[int, ...], list[tuple[float, tuple[tuple[str, int], ...]]]] = {}
    for tile in _tiles(roles, down):
        rows, width = (math.prod(tile[d] for d in side) for side in (roles.rows, roles.columns))
        tasks = math.prod(-(-a.extent // t) for a, t in zip(roles.main.axes, tile, strict=True))
        patch = patch_elements(read, dict(zip(names, tile, strict=True)), depths[family.blocks[0]]) if family.packed else 0
        key = (rows, width, tasks, patch)
        if key not in known:
            known[key] = []
            for config in _configs(family, rows, width, down, patch, depths, gpu):
                shape = wide_shape(rows, width, dict(config), down)
                seconds = wide_predicted(family, shape, depths[shape.bk], patch, tasks, rows * width, gpu, bool(roles.changed))
                known[key].append((seconds, config))
        for seconds, config in known[key]:
            yield seconds, tile, config


def _tiles(roles: Roles, down: bool) -> Iterator[tuple[int, ...]]:
    """Whole warpgroups of rows (``down``) or columns by up to ``MOST`` of the other side."""
    shape = roles.main.shape
    through, fixed = (roles.rows, roles.columns) if down else (roles.columns, roles.rows)
    groups = frozenset() if down else roles.groups
    for long in tile_parts([shape[d] for d in through], 8, MOST_GROUPS * GROUP, roles.groups if down else frozenset()):
        size = math.prod(long)
        if size < FILLED * -(-size // GROUP) * GROUP and size != math.prod(shape[d] for d in through):
            continue
        for short in tile_parts([shape[d] for d in fixed], FEWEST, MOST, groups):
            tile = [1] * len(shape)
            for d, t in (*zip(through, long, strict=True), *zip(fixed, short, strict=True)):
                tile[d] = t
            yield tuple(tile)


def _configs(family: WideFamily, rows: int, width: int, down: bool, patch: int, depths: dict[int, Depth],
             gpu: Gpu) -> Iterator[tuple[tuple[str, int], ...]]:  # fmt: skip
    kinds = ((bk, patched, copiers) for bk in family.blocks
             for patched in ((0, 1) if patch and depths[bk].outer and not depths[bk].flat else (0,))
             for copiers in COPIERS)  # fmt: skip
    way = () if family.packed else (("down", int(down)),)
    for bk, patched, copiers in kinds:
        for stages in STAGES:
            config = {"bk": bk, "stages": stages, "patch": patched, "copiers": copiers}
            shape = wide_shape(rows, width, config, down)
            if patched and math.prod(a.extent for a in depths[bk].outer) < shape.ahead * copiers:
                continue
            if _shared(family, shape, patch) <= gpu.shared:
                break
        else:
            continue
        if shape.threads * _registers(family, shape) > gpu.registers:
            continue
        for split in SPLITS:
            if split <= max(1, depths[bk].blocks // 2):
                yield (("bk", bk), ("stages", stages), ("split", split), ("patch", patched), ("copiers", copiers), *way)


def patch_elements(read: Load, tile: Mapping[str, int], depth: Depth) -> int:
    """Elements of one channel under a task's windows; 0 without taps."""
    taps = {a.name: a.extent for a in depth.outer}
    if depth.flat or not taps:
        return 0
    count = 1
    for index in read.indices:
        form = ex.affine(index)
        if form is not None and depth.inner.name not in form[0]:
            count *= 1 + sum((taps.get(a, tile.get(a, 1)) - 1) * abs(s) for a, s in form[0].items())
    return count


def _shared(family: WideFamily, shape: Wide, patch: int) -> int:
    """Bytes of shared memory: buffers of both operands with the constant's other halves, or the results in their place."""
    through, fixed = (shape.bm, shape.bn) if shape.down else (shape.bn, shape.bm)
    read = 2 * (patch + 16) if shape.patch else shape.stages * (through + 8)
    return max(family.item * shape.bk * (read + family.parts * shape.stages * fixed), 4 * shape.bm * shape.bn)


def _registers(family: WideFamily, shape: Wide) -> int:
    return family.registers(shape.bn if shape.down else shape.bm, shape.bk)


def wide_seconds(family: WideFamily, operator: ROperator, binding: Binding, gpu: Gpu) -> float:
    """Predicted seconds of all tasks of a tiled operator, without its launch."""
    p = product_of(operator, binding, family.dtype, prologue=family.prologue)
    shape = wide_shape(p.row_count, p.width, dict(operator.config), WARPGROUPS[family.name].runs_down(p))
    depth = depth_of(p.main.reduce, shape.bk)
    read = p.a.load if shape.down else p.b.load
    patch = patch_elements(read, dict(zip((a.name for a in p.main.axes), operator.tile, strict=True)), depth)
    cells, changed = p.row_count * p.width, bool(operator.prologue)
    return wide_predicted(family, shape, depth, patch, operator.task_count, cells, gpu, changed) - gpu.launch


def wide_predicted(family: WideFamily, shape: Wide, depth: Depth, patch: int, tasks: int, cells: int, gpu: Gpu,
                   changed: bool = False) -> float:  # fmt: skip
    """Seconds for all ``tasks`` of one launch; ``changed``: the operand that is no constant passes through maps first."""
    through, fixed = (shape.bm, shape.bn) if shape.down else (shape.bn, shape.bm)
    groups, instructions = through // GROUP, shape.bk / family.deep
    per_sm = -(-tasks * shape.split // usable(shape.split, gpu.sms))
    registers = shape.threads * _registers(family, shape)
    resident = max(1, min(gpu.shared // (_shared(family, shape, patch) + 1024), gpu.registers // registers, per_sm))
    work = MATRIX * family.products * instructions * fixed / 8
    taps = math.prod(a.extent for a in depth.outer) if shape.patch else 1
    read = (patch if shape.patch else through) * shape.bk / taps
    ready = family.ready * fixed * shape.bk * family.item / (16 * THREADS)
    change = CHANGE_STEP + CHANGE * read / THREADS if changed else 0.0
    copying = ORDER + COPY * family.copies(read) * (FLAT if depth.flat else 1) + ready + change
    converting = family.convert * instructions + family.add * fixed / 2
    alone = family.step + (max(converting, work) if family.ahead else converting + work)
    moved = resident * family.item * (read + shape.bk * fixed) / family.l2
    step = max(work * groups * resident, alone, copying / shape.copiers * math.sqrt(resident), moved)
    store = STORE * resident * cells / shape.threads + WRITE * resident * cells / shape.split
    cycles: float = START + (TAPS if depth.outer else 0) + (CLUSTER if shape.split > 1 else 0)
    cycles += -(-per_sm // resident) * (-(-depth.blocks // shape.split) * step + store + change)
    return cycles / gpu.model_clock + gpu.launch
