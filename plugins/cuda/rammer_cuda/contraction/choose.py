"""Which tiles and block shapes are worth trying for a contraction, by a small model of one SM.

A block costs, for every block of products, the largest of its instruction issue, its shared-memory reads and its
share of L2 bandwidth; blocks on one SM add up; what no block hides (launch, first loads, epilogue, cluster
barriers) is a constant. The constants were fitted to single layers measured on an H200.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any, TypeAlias

import numpy as np

from rammer.codegen.contraction import Roles, product_of, roles_of
from rammer.codegen.task import Unsuited
from rammer.device.manifest import Binding
from rammer.ir.operator import ROperator

from rammer_cuda.contraction.block import Shape, shape_of
from rammer_cuda.contraction.depth import Depth, depth_of
from rammer_cuda.contraction.families import F16, Family, TensorCost, families_of
from rammer_cuda.family import Choice
from rammer_cuda.gpu import Gpu

#: An array of integers or floats.
Numbers: TypeAlias = "np.ndarray[Any, Any]"

#: Row tiles that are tried (elements), and the range of column tiles.
ROWS = (8, 16, 32, 64, 128)
FEWEST_COLUMNS, MOST_COLUMNS = 12, 132
#: Splits that are tried; ``families`` has the block shapes.
SPLITS = (1, 2, 3, 4, 6, 8)
#: Buffers of a tensor-core kernel's ring, and the blocks an SM should have room for, at least by bytes an element: kernels
#: in float16 are so short that room beside them, for parallel branches and for dependents that start early, is worth
#: more than depth (BERT-base on an H200: 0.43 ms with rings of 3, 0.51 ms with rings of 8).
MOST_STAGES, LEAST_RESIDENT, MOST_RESIDENT = 8, {4: 2, 2: 4}, 6
#: Threads of a tensor-core block that hide latency without crowding shared memory.
BEST_THREADS = 192
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
#: Cycles of maps before the contraction, per ring step and per element of a thread on the busiest scheduler: a shared-memory
#: read, two dependent operations and a write before the step's barrier. Counted from the instructions, not measured.
CHANGE_STEP, CHANGE = 90, 3.0
#: SMs of the graphics processing clusters of an H200; which ones lack SMs differs from chip to chip.
GROUPS = (18, 18, 18, 18, 16, 16, 14, 14)
#: Bytes that L2 gives an SM in a cycle when all SMs read (measured on an H200: 5.5 TB/s).
L2_BYTES = 21.0
#: Bytes of shared memory that blocks of an SM share, as the fit counted them; an SM of an A100 has fewer.
ROOM = 227 << 10


def gemm_choices(family: Family, operator: ROperator, binding: Binding, gpu: Gpu) -> Iterator[Choice]:
    """The best few of every block shape and split, best predicted first; some cannot be expressed as a kernel."""
    try:
        narrow = any(binding.types[n].dtype == "float16" for n in operator.computes[0].reads)
        roles = roles_of(operator, binding, "float16" if narrow else "float32", prologue=not narrow)
    except Unsuited:
        return
    if family not in families_of(roles, binding):
        return
    alike = _alike(roles.main.shape, roles.rows, roles.columns, roles.groups)
    blocks = np.array(list(alike), np.int64).reshape(-1, 3)
    places, seen = list(alike.values()), dict[tuple[object, ...], int]()
    for seconds, place, config in _ranked(blocks, family, roles, binding, gpu):
        for tile in places[place]:
            # Neighbours in the model's order are often equals.
            key = math.prod(tile), dict(config)["split"]
            seen[key] = seen.get(key, 0) + 1
            if seen[key] <= 3:
                yield Choice(seconds, replace(operator, tile=tile, family=family.name, config=config))


@lru_cache(256)
def _alike(shape: tuple[int, ...], rows: tuple[int, ...], columns: tuple[int, ...],
           groups: frozenset[int]) -> dict[tuple[int, int, int], list[tuple[int, ...]]]:  # fmt: skip
    """Tiles by their rows, columns and tasks: what a prediction depends on. Several families ask for the same ones."""
    alike: dict[tuple[int, int, int], list[tuple[int, ...]]] = {}
    for tile in _tiles(shape, rows, columns, groups):
        height, width = (math.prod(tile[d] for d in side) for side in (rows, columns))
        tasks = math.prod(-(-extent // t) for extent, t in zip(shape, tile, strict=True))
        alike.setdefault((height, width, tasks), []).append(tile)
    return alike


def _ranked(blocks: Numbers, family: Family, roles: Roles, binding: Binding,
            gpu: Gpu) -> Iterator[tuple[float, int, tuple[tuple[str, int], ...]]]:  # fmt: skip
    """(predicted seconds, position in ``blocks``, config) of every possible block, sorted; ``blocks`` has the
    rows, columns and number of tasks.

    A prediction depends on a tile by these alone, and is worked out for all blocks and configs at once: there are tens
    of thousands.
    """
    if not len(blocks):
        return
    rows, width, tasks = blocks.T[:, :, None]
    configs, table = _table(family, SPLITS if gpu.clusters else (1,))
    depths = {bk: depth_of(roles.main.reduce, bk) for bk, _ in family.blocks}
    walk = _Walk(*(np.array([value(depths[bk]) for bk in table["bk"]]) for value in _WALK))
    s = _shapes(rows, width, table, family.cost is not None)
    if family.cost is not None:
        item, per_sm = 32 // family.cost.depth, -(-tasks * s.split // gpu.sms)
        s = replace(s, stages=ring(s, item, walk.blocks, per_sm))
    possible = (s.works > THREADS[0] // 2) & (s.works <= THREADS[1]) & (s.split <= np.maximum(1, walk.blocks // 2))
    if family.cost is not None:
        possible &= _best_slices(s, configs, possible)
    seconds = _seconds(s, walk, tasks, rows * width, gpu, family.cost, _together(roles, binding),
                       roles.changed)  # fmt: skip
    ranked = np.where(possible, seconds, np.inf)
    stages = np.broadcast_to(s.stages, ranked.shape)
    for index in np.argsort(ranked, axis=None, kind="stable")[: int(possible.sum())]:
        place, which = divmod(int(index), len(configs))
        config = configs[which]
        if family.cost is not None:
            config = (*config, ("stages", int(stages[place, which])))
        yield float(ranked[place, which]), place, config


def _best_slices(s: Shapes, configs: Sequence[tuple[tuple[str, int], ...]], possible: Numbers) -> Numbers:
    """Which of the configs that differ in their slices alone to take: they are nearly equals to the model; what they are
    for is warps that hide each other's latency."""
    distance = np.where(possible, np.abs(np.log2(np.maximum(s.threads, 1) / BEST_THREADS)), np.inf)
    alike: dict[tuple[tuple[str, int], ...], list[int]] = {}
    for i, config in enumerate(configs):
        alike.setdefault(tuple(c for c in config if c[0] != "slices"), []).append(i)
    best = np.zeros_like(possible)
    for group in alike.values():
        chosen = np.array(group)[np.argmin(distance[:, group], axis=1)]
        best[np.arange(len(best)), chosen] = True
    return best


def _together(roles: Roles, binding: Binding) -> bool:
    """Whether eight columns or eight products of ``b`` probably lie together: what 16-byte copies of float16 need."""
    columns = math.prod(roles.main.shape[d] for d in roles.columns)
    deep = roles.main.reduce[-1].extent
    return roles.b.tensor in binding.constants or (roles.b.fill is None and (columns % 8 == 0 or deep % 8 == 0))


def ring(shape: Shapes, item: int, blocks: Numbers, per_sm: Numbers) -> Numbers:
    """Buffers of the ring: what is in flight hides latency, as far as shared memory and the number of blocks go."""
    room = ROOM // np.maximum(LEAST_RESIDENT[item], np.minimum(per_sm, MOST_RESIDENT)) - 1024
    steps = -(-blocks // shape.split)
    most = np.minimum(room // (item * shape.bk * (shape.bm + shape.bn + 16)), np.minimum(MOST_STAGES, steps + 1))
    return np.asarray(np.maximum(3, most))


@cache
def _table(family: Family, splits: Sequence[int]) -> tuple[list[tuple[tuple[str, int], ...]], dict[str, Numbers]]:
    """The configs of a family, and their numbers by name."""
    configs = family.configs(splits)
    return configs, {n: np.array([dict(c)[n] for c in configs], np.int64) for n, _ in configs[0]}


@dataclass(frozen=True)
class _Walk:
    """``Depth`` for arrays: the number of blocks, whether the order is flat, whether there are outer axes."""

    blocks: Numbers
    flat: Numbers
    outer: Numbers


_WALK: tuple[Callable[[Depth], Any], ...] = (lambda d: d.blocks, lambda d: d.flat, lambda d: bool(d.outer))


@dataclass(frozen=True)
class Shapes:
    """``Shape`` for arrays of blocks."""

    bm: Numbers
    bn: Numbers
    bk: Numbers
    tm: Numbers
    tn: Numbers
    stages: Numbers
    split: Numbers
    slices: Numbers
    works: Numbers

    @property
    def threads(self) -> Numbers:
        """Threads of a block: whole warps."""
        return np.asarray(-(-self.works // 32) * 32)


def _shapes(rows: Numbers, width: Numbers, c: Mapping[str, Numbers], tensor: bool) -> Shapes:
    """``shape_of`` for rows and widths (down) by configs (across)."""
    tm, tn = c["tm"], c["tn"]
    high, wide = (16 * tm, 8 * tn) if tensor else (tm, tn)
    pairs = high if tensor else 2 * high
    bm, bn = -(-rows // pairs) * pairs, -(-width // wide) * wide
    works = bm // high * (bn // wide) * (32 if tensor else 1) * c["slices"]
    return Shapes(bm, bn, c["bk"], tm, tn, c.get("stages", np.array(3)), c["split"], c["slices"], works)


def _tiles(shape: tuple[int, ...], rows: tuple[int, ...], columns: tuple[int, ...],
           groups: frozenset[int]) -> list[tuple[int, ...]]:  # fmt: skip
    """Row tiles near ``ROWS`` by column tiles; axes of neither kind have tile 1."""
    result = set[tuple[int, ...]]()
    for row in tile_parts([shape[d] for d in rows], ROWS[0], ROWS[-1], groups):
        for column in tile_parts([shape[d] for d in columns], FEWEST_COLUMNS, MOST_COLUMNS, frozenset()):
            tile = [1] * len(shape)
            for d, t in (*zip(rows, row, strict=True), *zip(columns, column, strict=True)):
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


def gemm_seconds(family: Family, operator: ROperator, binding: Binding, gpu: Gpu) -> float:
    """Predicted seconds of all tasks of a tiled gemm operator, without its launch."""
    p = product_of(operator, binding, "float16" if family is F16 else "float32", prologue=family is not F16)
    shape = shape_of(p.row_count, p.width, dict(operator.config), family.cost is not None)
    depth = depth_of(p.main.reduce, shape.bk)
    return predicted(shape, depth, operator.task_count, p.row_count * p.width, gpu, family.cost,
                     not p.b.guards, "a" if p.a.prologue else "b" if p.b.prologue else "") - gpu.launch  # fmt: skip


def predicted(shape: Shape, depth: Depth, tasks: int, cells: int, gpu: Gpu, cost: TensorCost | None = None,
              together: bool = True, changed: str = "") -> float:  # fmt: skip
    """Seconds for all ``tasks`` of one launch; ``together`` says that 16 bytes of columns are copied at a time where
    elements are float16, ``changed`` which operand passes through maps first ("a", "b" or "")."""
    s = shape
    numbers = (s.bm, s.bn, s.bk, s.tm, s.tn, s.stages, s.split, s.slices, s.works)
    walk = _Walk(*(np.asarray(value(depth)) for value in _WALK))
    shapes = Shapes(*map(np.asarray, numbers))
    return float(_seconds(shapes, walk, np.asarray(tasks), np.asarray(cells), gpu, cost, together, changed))


def _seconds(s: Shapes, walk: _Walk, tasks: Numbers, cells: Numbers, gpu: Gpu, cost: TensorCost | None,
             together: bool, changed: str) -> Numbers:  # fmt: skip
    """``predicted`` for arrays."""
    narrow = cost is not None and cost.depth == 16
    item = 2 if narrow else 4
    threads, part = s.threads, s.bk / s.slices
    warps, steps = threads / 32, -(-walk.blocks // s.split)
    copies = (s.bm / 8 + s.bn / (8 if together else 1) if narrow else s.bm / 4 + s.bn) * s.bk / threads
    per_sm = -(-tasks * s.split // _filled(s.split, gpu.sms))
    resident = np.minimum(per_sm, _resident(s, item, cost is not None, gpu))
    busiest = np.ceil(resident * warps / 4)
    elements = resident * cells / threads * s.slices
    moved = busiest * copies * np.where(walk.flat, 2.5, 1.0)
    if cost is not None:
        work = cost.matrix * cost.instructions(part, s.tm, s.tn) + cost.read * cost.reads(part, s.tm, s.tn)
        step = cost.step + busiest * work + cost.copy * moved
        store = cost.store * elements + cost.peer * 4 * resident * cells * (s.split > 1)
    else:
        reads = resident * warps * part * (s.tm + s.tn) / 4
        step = STEP + PRODUCT * busiest * part * s.tm * s.tn + READ * reads + COPY * moved
        store = STORE * elements
    if changed:
        step = step + CHANGE_STEP + CHANGE * busiest * (s.bm if changed == "a" else s.bn) * s.bk / threads
    start, taps, cluster = (cost.start, cost.taps, cost.cluster) if cost else (START, TAPS, CLUSTER)
    cycles = start + taps * walk.outer + cluster * (s.split > 1) + -(-per_sm // resident) * (steps * step + store)
    if cost is not None:
        staged = tasks * s.split * steps * s.bk * (s.bm + s.bn) * item
        cycles = cycles + cost.l2 * staged / (L2_BYTES * gpu.sms)
    return np.asarray(cycles / gpu.model_clock + gpu.launch)


def _filled(split: Numbers, sms: int) -> Numbers:
    """``usable`` for an array."""
    sizes = np.arange(int(split.max()) + 1)
    return np.asarray(np.array([usable(max(1, int(n)), sms) for n in sizes])[split])


@cache
def usable(split: int, sms: int) -> int:
    """SMs that clusters of ``split`` blocks can fill at once: a cluster stays inside one processing cluster."""
    groups = [g * sms // sum(GROUPS) for g in GROUPS]
    return max(split, sum(g // split * split for g in groups))


def _resident(s: Shapes, item: int, tensor: bool, gpu: Gpu) -> Numbers:
    """Blocks that fit an SM together; ``item`` bytes an element of the operands."""
    shared = np.maximum(item * s.stages * s.bk * (s.bm + s.bn), 4 * s.bm * s.bn * s.slices)
    each = 4 * s.tm * s.tn + 8 * s.tm + 40 if tensor else s.tm * s.tn + s.tm + s.tn + 40
    most = np.minimum(ROOM // (shared + 1024), gpu.registers // (s.threads * each))
    return np.asarray(np.maximum(1, np.minimum(most, gpu.threads // s.threads)))
