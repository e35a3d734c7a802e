"""Which tiles and block shapes are worth trying for a contraction, by a small model of one SM.

A block costs, for every block of products, the largest of its instruction issue, its shared-memory reads and its
share of L2 bandwidth; blocks on one SM add up; what no block hides (launch, first loads, epilogue, cluster
barriers) is a constant. The constants were fitted to single layers measured on an H200.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from typing import Any, TypeAlias

import numpy as np

from rammer.device.manifest import Binding
from rammer.ir.device import VDevice
from rammer.ir.operator import ROperator

from rammer_cuda.kernels.contraction import Roles, product_of, roles_of
from rammer_cuda.kernels.depth import Depth, depth_of
from rammer_cuda.kernels.gemm import Shape, gemm, gemm_tf32x3, shape_of
from rammer_cuda.kernels.task import Unsuited

#: An array of integers or floats.
Numbers: TypeAlias = "np.ndarray[Any, Any]"

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
    return list(islice(expressible(gemm_choices(operator, binding, device), binding, device), count))


def gemm_choices(operator: ROperator, binding: Binding, device: VDevice) -> Iterator[Choice]:
    """The best few of every block shape and split, best predicted first; some cannot be expressed as a kernel."""
    try:
        roles = roles_of(operator, binding)
    except Unsuited:
        return iter(())
    return _diverse(operator, _ranked(roles, device))


def _ranked(roles: Roles, device: VDevice) -> Iterator[tuple[float, tuple[int, ...], str, tuple[tuple[str, int], ...]]]:
    """(predicted seconds, tile, family, config) of every block that is possible, sorted.

    The prediction knows a tile by its rows, columns and number only, and is worked out for all of them and all configs
    at once: there are tens of thousands.
    """
    alike: dict[tuple[int, int, int], list[tuple[int, ...]]] = {}
    for tile in _tiles(roles):
        rows, width = (math.prod(tile[d] for d in side) for side in (roles.rows, roles.columns))
        tasks = math.prod(-(-a.extent // t) for a, t in zip(roles.main.axes, tile, strict=True))
        alike.setdefault((rows, width, tasks), []).append(tile)
    if not alike:
        return
    rows, width, tasks = np.array(list(alike), np.int64).T[:, :, None]
    places, table = list(alike.values()), _table(SPLITS if _clusters(device) else (1,))
    shape = _shapes(rows, width, table)
    depths = {bk: depth_of(roles.main.reduce, bk) for bk, _ in BLOCKS}
    blocks = np.array([depths[bk].blocks for bk in table.columns["bk"]])
    flat = np.array([depths[bk].flat for bk in table.columns["bk"]])
    outer = np.array([bool(depths[bk].outer) for bk in table.columns["bk"]])
    seconds = _seconds(shape, blocks, flat, outer, tasks, rows * width, device)
    possible = (shape.works > THREADS[0] // 2) & (shape.works <= THREADS[1]) & (shape.split <= np.maximum(1, blocks // 2))
    ranked = np.where(possible, seconds, np.inf)
    for index in np.argsort(ranked, axis=None, kind="stable")[: int(possible.sum())]:
        place, which = divmod(int(index), len(table.configs))
        family, config = table.configs[which]
        for tile in places[place]:
            yield float(ranked[place, which]), tile, family, config


def _clusters(device: VDevice) -> bool:
    """Whether thread-block clusters exist: from compute capability 9.0 on, which has 227 KiB of shared memory."""
    return device.layer("veu").capacity > 200 << 10


def _diverse(operator: ROperator, ranked: Iterator[tuple[float, tuple[int, ...], str, tuple[tuple[str, int], ...]]],
             ) -> Iterator[Choice]:  # fmt: skip
    """The best few of every block shape and split: neighbours in the model's order are often equals."""
    seen: dict[tuple[object, ...], int] = {}
    for seconds, tile, family, config in ranked:
        key = (family, math.prod(tile), dict(config)["split"])
        seen[key] = seen.get(key, 0) + 1
        if seen[key] <= 3:
            yield Choice(replace(operator, tile=tile, family=family, config=config), seconds)


def expressible(choices: Iterable[Choice], binding: Binding, device: VDevice) -> Iterator[Choice]:
    """Those of ``choices`` that their family can write a kernel for, which fits the shared memory."""
    limit = device.layer("veu").capacity
    for choice in choices:
        try:
            make = gemm_tf32x3 if choice.operator.family == "gemm_tf32x3" else gemm
            if make(choice.operator, binding).dynamic <= limit:
                yield choice
        except Unsuited:
            continue


@dataclass(frozen=True)
class _Table:
    """Every (family, config), and the configs' numbers by name."""

    configs: tuple[tuple[str, tuple[tuple[str, int], ...]], ...]
    columns: Mapping[str, Numbers]


@cache
def _table(splits: Sequence[int]) -> _Table:
    configs = tuple(_configs(splits))
    names = [name for name, _ in configs[0][1]]
    columns = {n: np.array([dict(config)[n] for _, config in configs], np.int64) for n in names}
    return _Table(configs, columns | {"tensor": np.array([f == "gemm_tf32x3" for f, _ in configs])})


@dataclass(frozen=True)
class _Shapes:
    """``Shape`` for arrays of blocks."""

    bm: Numbers
    bn: Numbers
    bk: Numbers
    tm: Numbers
    tn: Numbers
    stages: Numbers
    split: Numbers
    slices: Numbers
    tensor: Numbers
    works: Numbers

    @property
    def threads(self) -> Numbers:
        """Threads of a block: whole warps."""
        return -(-self.works // 32) * 32


def _shapes(rows: Numbers, width: Numbers, table: _Table) -> _Shapes:
    """``shape_of`` for rows and widths (down) by configs (across)."""
    c = table.columns
    tm, tn, tensor = c["tm"], c["tn"], c["tensor"]
    high, wide = np.where(tensor, 16 * tm, tm), np.where(tensor, 8 * tn, tn)
    pairs = np.where(tensor, 1, 2) * high
    bm, bn = -(-rows // pairs) * pairs, -(-width // wide) * wide
    works = bm // high * (bn // wide) * np.where(tensor, 32, 1) * c["slices"]
    return _Shapes(bm, bn, c["bk"], tm, tn, c["stages"], c["split"], c["slices"], tensor, works)


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
    for row in tile_parts([shape[d] for d in roles.rows], ROWS[0], ROWS[-1], roles.groups):
        for column in tile_parts([shape[d] for d in roles.columns], FEWEST_COLUMNS, MOST_COLUMNS, frozenset()):
            tile = [1] * len(shape)
            for d, t in (*zip(roles.rows, row, strict=True), *zip(roles.columns, column, strict=True)):
                tile[d] = t
            result.add(tuple(tile))
    return sorted(result)


def tile_parts(extents: Sequence[int], fewest: int, most: int, groups: frozenset[int]) -> list[tuple[int, ...]]:
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
    s = shape
    numbers = (s.bm, s.bn, s.bk, s.tm, s.tn, s.stages, s.split, s.slices, s.tensor, s.works)
    return float(_seconds(_Shapes(*map(np.asarray, numbers)), np.asarray(depth.blocks), np.asarray(depth.flat),
                          np.asarray(bool(depth.outer)), np.asarray(tasks), np.asarray(cells), device))  # fmt: skip


def _seconds(s: _Shapes, blocks: Numbers, flat: Numbers, outer: Numbers, tasks: Numbers, cells: Numbers,
             device: VDevice) -> Numbers:  # fmt: skip
    """``predicted`` for arrays: blocks of products, whether their walk is flat or has outer axes, tasks, elements."""
    threads, part = s.threads, s.bk / s.slices
    warps, steps = threads / 32, -(-blocks // s.split)
    per_sm = -(-tasks * s.split // _filled(s.split, device.veus))
    resident = np.minimum(per_sm, _resident(s))
    busiest = np.ceil(resident * warps / 4)
    elements = resident * cells / threads * s.slices
    moved = busiest * (s.bm / 4 + s.bn) * s.bk / threads * np.where(flat, 2.5, 1.0)
    split = part / 8 * (4 * s.tm + 2 * s.tn)
    matrix = busiest * (MATRIX * part / 8 * s.tm * s.tn * 3 + SPLIT * split) + TENSOR_COPY * moved
    plain = PRODUCT * busiest * part * s.tm * s.tn + READ * resident * warps * part * (s.tm + s.tn) / 4 + COPY * moved
    step, store = STEP + np.where(s.tensor, matrix, plain), np.where(s.tensor, TENSOR_STORE, STORE) * elements
    cycles = START + TAPS * outer + CLUSTER * (s.split > 1) + -(-per_sm // resident) * (steps * step + store)
    return np.asarray(cycles / (device.flops / 256.0) + device.launch)


def _filled(split: Numbers, sms: int) -> Numbers:
    """``usable`` for an array."""
    sizes = np.arange(int(split.max()) + 1)
    return np.array([usable(max(1, int(n)), sms) for n in sizes])[split]


@cache
def usable(split: int, sms: int) -> int:
    """SMs that clusters of ``split`` blocks can fill at once: a cluster stays inside one processing cluster."""
    groups = [g * sms // sum(GROUPS) for g in GROUPS]
    return max(split, sum(g // split * split for g in groups))


def _resident(s: _Shapes) -> Numbers:
    """Blocks that fit an SM together."""
    shared = 4 * np.maximum(s.stages * s.bk * (s.bm + s.bn), s.bm * s.bn * s.slices)
    each = np.where(s.tensor, 4 * s.tm * s.tn + 8 * s.tm + 40, s.tm * s.tn + s.tm + s.tn + 40)
    most = np.minimum(SM_SHARED // (shared + 1024), SM_REGISTERS // (s.threads * each))
    return np.asarray(np.maximum(1, np.minimum(most, 2048 // s.threads)))
