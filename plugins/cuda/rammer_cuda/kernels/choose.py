"""Which tiles and block shapes are worth trying for a contraction, by a small model of one SM.

A block costs, for every block of products, the largest of its instruction issue, its shared-memory reads and its
share of L2 bandwidth; blocks on one SM add up; what no block hides (launch, first loads, epilogue, cluster
barriers) is a constant. The constants were fitted to single layers measured on an H200.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rammer.codegen.contraction import Roles, product_of, roles_of
from rammer.codegen.task import Unsuited
from rammer.device.manifest import Binding
from rammer.ir.device import VDevice
from rammer.ir.operator import ROperator

from rammer_cuda.kernels.depth import Depth, depth_of
from rammer_cuda.kernels.gemm import Shape, gemm, gemm_tf32x3, shape_of

#: Row tiles that are tried (elements), and the range of column tiles.
ROWS = (8, 16, 32, 64, 128)
FEWEST_COLUMNS, MOST_COLUMNS = 12, 132
#: Register tiles (rows, columns), block depths with their slices, and splits that are tried.
REGISTERS = ((4, 4), (8, 4), (4, 8), (8, 8))
BLOCKS = ((8, 1), (16, 1), (16, 2), (32, 1), (32, 2), (32, 4))
#: The same for tensor cores: fragments of 16 x 8 a warp.
FRAGMENTS = ((1, 2), (1, 4), (1, 7), (2, 2), (2, 4), (2, 7), (4, 4))
TENSOR_BLOCKS = ((16, 1), (16, 2), (32, 1), (32, 2), (32, 4))
SPLITS = (1, 2, 3, 4, 6, 8)
#: Even parts of an axis that are tried.
PARTS = 24
#: Threads of a block.
THREADS = (64, 512)
#: Cycles of a launch: from its start to the first products, for convolutions' taps more, and for a cluster's barriers.
START, TAPS, CLUSTER = 1900, 850, 2100
#: Cycles per ring step, per product of the busiest scheduler, per 16-byte shared-memory read of a warp, per copy of a
#: thread, and per element of a thread in the epilogue. Fitted to 736 kernels of 47 layers on an H200; the measured
#: time over the predicted has a standard deviation of 0.18.
STEP, PRODUCT, READ, COPY, STORE = 160, 2.1, 0.1, 7.0, 6.0
#: The same on tensor cores: per matrix instruction, with its share of the additions outside, and per operand element
#: that is read and split.
MATRIX, SPLIT, TENSOR_COPY, TENSOR_STORE = 13.0, 13.6, 4.2, 14.8
#: SMs of the graphics processing clusters of an H200; which ones lack SMs differs from chip to chip.
GROUPS = (18, 18, 18, 18, 16, 16, 14, 14)
#: Bytes of shared memory and registers of an SM.
SM_SHARED, SM_REGISTERS = 227 << 10, 64 << 10


@dataclass(frozen=True, slots=True)
class Choice:
    """A tiled operator with its predicted seconds for all tasks, launch included."""

    operator: ROperator
    seconds: float


def gemm_candidates(operator: ROperator, binding: Binding, device: VDevice, count: int) -> list[Choice]:
    """Up to ``count`` gemm versions of ``operator``, best predicted first; [] where it is no matrix product."""
    try:
        roles = roles_of(operator, binding)
    except Unsuited:
        return []
    splits = SPLITS if _clusters(device) else (1,)
    depths = {bk: depth_of(roles.main.reduce, bk) for bk, _ in BLOCKS}
    found = list[Choice]()
    for tile in _tiles(roles):
        rows = math.prod(tile[d] for d in roles.rows)
        width = math.prod(tile[d] for d in roles.columns)
        tasks = math.prod(-(-a.extent // t) for a, t in zip(roles.main.axes, tile, strict=True))
        for family, config in _configs(splits):
            shape = shape_of(rows, width, dict(config), family == "gemm_tf32x3")
            if not THREADS[0] // 2 < shape.works <= THREADS[1] or shape.split > max(1, depths[shape.bk].blocks // 2):
                continue
            seconds = predicted(shape, depths[shape.bk], tasks, rows * width, device)
            found.append(Choice(replace(operator, tile=tile, family=family, config=config), seconds))
    found.sort(key=lambda c: (c.seconds, c.operator.tile, c.operator.config))
    return _expressible(_diverse(found), binding, device, count)


def _clusters(device: VDevice) -> bool:
    """Whether thread-block clusters exist: from compute capability 9.0 on, which has 227 KiB of shared memory."""
    return device.layer("veu").capacity > 200 << 10


def _diverse(choices: Sequence[Choice]) -> Iterator[Choice]:
    """The best few of every block shape and split: neighbours in the model's order are often equals."""
    seen: dict[tuple[object, ...], int] = {}
    for c in choices:
        config = dict(c.operator.config)
        key = (c.operator.family, math.prod(c.operator.tile), config["split"])
        seen[key] = seen.get(key, 0) + 1
        if seen[key] <= 3:
            yield c


def _expressible(choices: Iterator[Choice], binding: Binding, device: VDevice, count: int) -> list[Choice]:
    result = list[Choice]()
    limit = device.layer("veu").capacity
    for choice in choices:
        try:
            make = gemm_tf32x3 if choice.operator.family == "gemm_tf32x3" else gemm
            if make(choice.operator, binding).dynamic <= limit:
                result.append(choice)
        except Unsuited:
            continue
        if len(result) >= count:
            break
    return result


def _configs(splits: Sequence[int]) -> list[tuple[str, tuple[tuple[str, int], ...]]]:
    """(family, config) of every block shape."""
    kinds = (("gemm", REGISTERS, BLOCKS), ("gemm_tf32x3", FRAGMENTS, TENSOR_BLOCKS))
    return [
        (family, (("tm", tm), ("tn", tn), ("bk", bk), ("stages", 4 if bk < 32 else 3), ("split", split), ("slices", slices)))
        for family, tiles, blocks in kinds for tm, tn in tiles for bk, slices in blocks for split in splits
    ]  # fmt: skip


def _tiles(roles: Roles) -> list[tuple[int, ...]]:
    """Row tiles near ``ROWS`` by column tiles; axes of neither kind have tile 1."""
    shape, result = roles.main.shape, set[tuple[int, ...]]()
    for row in _parts([shape[d] for d in roles.rows], ROWS[0], ROWS[-1], roles.groups):
        for column in _parts([shape[d] for d in roles.columns], FEWEST_COLUMNS, MOST_COLUMNS, frozenset()):
            tile = [1] * len(shape)
            for d, t in (*zip(roles.rows, row, strict=True), *zip(roles.columns, column, strict=True)):
                tile[d] = t
            result.add(tuple(tile))
    return sorted(result)


def _parts(extents: Sequence[int], fewest: int, most: int, groups: frozenset[int]) -> list[tuple[int, ...]]:
    """Tiles of a flattened group of axes: inner axes whole, one axis split, the outer ones 1."""
    if not extents:
        return [()]
    found = set[tuple[int, ...]]()
    below = 1
    for k in range(len(extents) - 1, -1, -1):
        for size in _sizes(extents[k], groups if k == 0 else frozenset()):
            if below * size <= most and (below * size >= fewest or math.prod(extents) == below * size):
                found.add((*([1] * k), size, *extents[k + 1 :]))
        below *= extents[k]
    return sorted(found) or [tuple([1] * (len(extents) - 1) + [min(extents[-1], most)])]


def _sizes(extent: int, groups: frozenset[int]) -> list[int]:
    """Tile sizes along an axis: even parts (long axes in multiples of 8), powers of two; only divisors of ``groups``."""
    even = {-(-extent // n) for n in range(1, min(extent, PARTS) + 1)}
    if extent > MOST_COLUMNS and not groups:
        even = {-(-s // 8) * 8 for s in even}
    return sorted(s for s in even | {s for s in ROWS if s < extent} if all(g % s == 0 for g in groups))


def gemm_seconds(operator: ROperator, binding: Binding, device: VDevice) -> float:
    """Predicted seconds of all tasks of a tiled gemm operator, without its launch."""
    p = product_of(operator, binding)
    shape = shape_of(p.row_count, p.width, dict(operator.config), operator.family == "gemm_tf32x3")
    depth = depth_of(p.main.reduce, shape.bk)
    return predicted(shape, depth, operator.task_count, p.row_count * p.width, device) - device.launch


def predicted(shape: Shape, depth: Depth, tasks: int, cells: int, device: VDevice) -> float:
    """Seconds for all ``tasks`` of one launch."""
    clock = device.flops / 256.0
    warps = shape.threads / 32
    steps = -(-depth.blocks // shape.split)
    vectors = (shape.tm + shape.tn) / 4
    part = shape.bk / shape.slices
    copies = (shape.bm / 4 + shape.bn) * shape.bk / shape.threads
    per_sm = -(-tasks * shape.split // _usable(shape.split, device.veus))
    resident = min(per_sm, _resident(shape))
    busiest = math.ceil(resident * warps / 4)
    elements = resident * cells / shape.threads * shape.slices
    moved = busiest * copies * (2.5 if depth.flat else 1)
    if shape.tensor:
        instructions = part / 8 * shape.tm * shape.tn * 3
        split = part / 8 * (4 * shape.tm + 2 * shape.tn)
        step = STEP + busiest * (MATRIX * instructions + SPLIT * split) + TENSOR_COPY * moved
        store = TENSOR_STORE * elements
    else:
        reads = resident * warps * part * vectors
        step = STEP + PRODUCT * busiest * part * shape.tm * shape.tn + READ * reads + COPY * moved
        store = STORE * elements
    cycles: float = START + (TAPS if depth.outer else 0) + (CLUSTER if shape.split > 1 else 0)
    cycles += -(-per_sm // resident) * (steps * step + store)
    return cycles / clock + device.launch


def _usable(split: int, sms: int) -> int:
    """SMs that clusters of ``split`` blocks can fill at once: a cluster stays inside one processing cluster."""
    groups = [g * sms // sum(GROUPS) for g in GROUPS]
    return max(split, sum(g // split * split for g in groups))


def _resident(shape: Shape) -> int:
    """Blocks that fit an SM together."""
    shared = 4 * max(shape.stages * shape.bk * (shape.bm + shape.bn), shape.bm * shape.bn * shape.slices)
    each = 4 * shape.tm * shape.tn + 8 * shape.tm + 40 if shape.tensor else shape.tm * shape.tn + shape.tm + shape.tn + 40
    registers = shape.threads * each
    return max(1, min(SM_SHARED // (shared + 1024), SM_REGISTERS // registers, 2048 // shape.threads))
