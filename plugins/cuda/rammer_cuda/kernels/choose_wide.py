"""Tiles and blocks worth trying for ``gemm_wgmma3``, by the same model of one SM as ``choose``'s with other units at work.

For every block of products an SM takes the longest of: the tensor cores' work for all its blocks, the bytes that it
gets from L2, the copying warpgroups' work, and one multiplying warpgroup's own chain of waiting, converting, multiplying
and adding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice

from rammer.codegen.contraction import Roles, operand_type, product_of, roles_of
from rammer.codegen.task import Unsuited
from rammer.device.manifest import Binding
from rammer.ir import expr as ex
from rammer.ir.device import VDevice
from rammer.ir.expr import Load
from rammer.ir.operator import ROperator

from rammer_cuda.kernels.choose import SM_REGISTERS, SM_SHARED, Choice, tile_parts, usable
from rammer_cuda.kernels.depth import Depth, depth_of
from rammer_cuda.kernels.wide import GROUP, MOST, THREADS, Wide, gemm_wgmma3, runs_down, wide_shape
from rammer_cuda.targets import model_clock

#: Block depths, buffers of the ring and copying warpgroups that are tried.
BLOCKS, STAGES, COPIERS = (32, 64), (6, 5, 4, 3), (1, 2)
#: Warpgroups of a block, and fewest columns (or rows) of the constant.
MOST_GROUPS, FEWEST = 4, 16
#: Share of a warpgroup's rows that a tile must fill.
FILLED = 0.7
#: Splits: clusters of 3 or 6 blocks measured up to twice as slow as their number of SMs says.
SPLITS = (1, 2, 4, 8)
#: Cycles of a launch, with the first patch, with a cluster's barriers. Fitted to 450 kernels of 60 layers on an H200, the
#: faster ones of a layer weighing more: the measured time over the predicted has a standard deviation of 0.14, and the
#: fastest of the three best predicted is 0.3% slower than the fastest of all, 7% at worst.
START, TAPS, CLUSTER = 1630, 830, 3530
#: Cycles of one tensor instruction per 8 columns; of a multiplying warpgroup per block, per 8 products and per result.
MATRIX, STEP, CONVERT, ADD = 4.0, 460, 85, 0.5
#: Cycles of a copying warpgroup per block, per copy of a thread (more where the walk is flat), and per 512 elements halved.
ORDER, COPY, FLAT, HALVE = 640, 6.8, 6.0, 100
#: Bytes a cycle from L2, and cycles per element of a thread and per element of the block in the epilogue.
BYTES, STORE, WRITE = 17.0, 100, 0.3


def wide_candidates(operator: ROperator, binding: Binding, device: VDevice, count: int) -> list[Choice]:
    """Up to ``count`` versions of ``operator``, best predicted first; [] where it has not one constant operand."""
    return list(islice(_expressible(wide_choices(operator, binding, device), binding), count))


def wide_choices(operator: ROperator, binding: Binding, device: VDevice) -> Iterator[Choice]:
    """The best two of every tile, best predicted first; some cannot be expressed as a kernel."""
    try:
        roles = roles_of(operator, binding)
    except Unsuited:
        return
    constants = [ld.tensor in binding.constants for ld in (roles.a, roles.b)]
    if constants[0] == constants[1] or operand_type((roles.a, roles.b), binding) != "float32":
        return
    seen: dict[tuple[int, ...], int] = {}
    for seconds, tile, config in sorted(_predictions(roles, constants[1], device)):
        seen[tile] = seen.get(tile, 0) + 1
        if seen[tile] <= 2:
            yield Choice(replace(operator, tile=tile, family="gemm_wgmma3", config=config), seconds)


def _predictions(roles: Roles, down: bool,
                 device: VDevice) -> Iterator[tuple[float, tuple[int, ...], tuple[tuple[str, int], ...]]]:  # fmt: skip
    read, names = roles.a if down else roles.b, [a.name for a in roles.main.axes]
    depths = {bk: depth_of(roles.main.reduce, bk) for bk in BLOCKS}
    known: dict[tuple[int, ...], list[tuple[float, tuple[tuple[str, int], ...]]]] = {}
    for tile in _tiles(roles, down):
        rows, width = (math.prod(tile[d] for d in side) for side in (roles.rows, roles.columns))
        tasks = math.prod(-(-a.extent // t) for a, t in zip(roles.main.axes, tile, strict=True))
        patch = patch_elements(read, dict(zip(names, tile, strict=True)), depths[BLOCKS[0]])
        key = (rows, width, tasks, patch)
        if key not in known:
            known[key] = []
            for config in _configs(rows, width, down, patch, depths, device):
                shape = wide_shape(rows, width, dict(config), down)
                seconds = wide_predicted(shape, depths[shape.bk], patch, tasks, rows * width, device)
                known[key].append((seconds, config))
        for seconds, config in known[key]:
            yield seconds, tile, config


def _expressible(choices: Iterable[Choice], binding: Binding) -> Iterator[Choice]:
    for choice in choices:
        try:
            gemm_wgmma3(choice.operator, binding)
        except Unsuited:
            continue
        yield choice


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


def _configs(rows: int, width: int, down: bool, patch: int, depths: dict[int, Depth],
             device: VDevice) -> Iterator[tuple[tuple[str, int], ...]]:  # fmt: skip
    kinds = ((bk, patched, copiers) for bk in BLOCKS for patched in ((0, 1) if patch else (0,)) for copiers in COPIERS)
    for bk, patched, copiers in kinds:
        for stages in STAGES:
            config = {"bk": bk, "stages": stages, "patch": patched, "copiers": copiers}
            shape = wide_shape(rows, width, config, down)
            if patched and math.prod(a.extent for a in depths[bk].outer) < shape.ahead * copiers:
                continue
            if _shared(shape, patch) <= device.layer("veu").capacity:
                break
        else:
            continue
        if shape.threads * _registers(shape) > SM_REGISTERS:
            continue
        for split in SPLITS:
            if split <= max(1, depths[bk].blocks // 2):
                yield (("bk", bk), ("stages", stages), ("split", split), ("patch", patched), ("copiers", copiers))


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


def _shared(shape: Wide, patch: int) -> int:
    """Bytes of shared memory: buffers of both operands with the constant's other halves, or the results in their place."""
    through, fixed = (shape.bm, shape.bn) if shape.down else (shape.bn, shape.bm)
    read = 2 * (patch + 16) if shape.patch else shape.stages * (through + 8)
    return 4 * max(shape.bk * (read + 2 * shape.stages * fixed), shape.bm * shape.bn)


def _registers(shape: Wide) -> int:
    """Registers of a thread: sums inside and outside the tensor cores, both halves of the operand, addresses."""
    return (shape.bn if shape.down else shape.bm) + shape.bk + 30


def wide_seconds(operator: ROperator, binding: Binding, device: VDevice) -> float:
    """Predicted seconds of all tasks of a tiled operator, without its launch."""
    p = product_of(operator, binding)
    shape = wide_shape(p.row_count, p.width, dict(operator.config), runs_down(p))
    depth = depth_of(p.main.reduce, shape.bk)
    read = p.a.load if shape.down else p.b.load
    patch = patch_elements(read, dict(zip((a.name for a in p.main.axes), operator.tile, strict=True)), depth)
    return wide_predicted(shape, depth, patch, operator.task_count, p.row_count * p.width, device) - device.launch


def wide_predicted(shape: Wide, depth: Depth, patch: int, tasks: int, cells: int, device: VDevice) -> float:
    """Seconds for all ``tasks`` of one launch."""
    through, fixed = (shape.bm, shape.bn) if shape.down else (shape.bn, shape.bm)
    groups, eighths = through // GROUP, shape.bk / 8
    per_sm = -(-tasks * shape.split // usable(shape.split, device.veus))
    registers = shape.threads * _registers(shape)
    resident = max(1, min(SM_SHARED // (_shared(shape, patch) + 1024), SM_REGISTERS // registers, per_sm))
    work = MATRIX * 3 * eighths * fixed / 8
    taps = math.prod(a.extent for a in depth.outer) if shape.patch else 1
    read = (patch if shape.patch else through) * shape.bk / taps
    copying = ORDER + COPY * read / THREADS * (FLAT if depth.flat else 1) + HALVE * fixed * shape.bk / 512
    alone = STEP + CONVERT * eighths + ADD * fixed / 2 + work
    moved = resident * 4 * (read + shape.bk * fixed) / BYTES
    step = max(work * groups * resident, alone, copying / shape.copiers * math.sqrt(resident), moved)
    store = STORE * resident * cells / shape.threads + WRITE * resident * cells / shape.split
    cycles: float = START + (TAPS if depth.outer else 0) + (CLUSTER if shape.split > 1 else 0)
    cycles += -(-per_sm // resident) * (-(-depth.blocks // shape.split) * step + store)
    return cycles / model_clock(device) + device.launch
