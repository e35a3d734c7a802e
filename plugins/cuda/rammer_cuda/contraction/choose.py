"""Candidate tiles and block shapes of contractions, ranked by cost (``contraction.cost``), and the kernel families."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import product
from typing import Final, TypeAlias

import numpy as np

from rammer.codegen import BYTE, BYTES, Choice, Operand, Roles, Unsuited, operand_of, roles_of, with_quotients
from rammer.device.manifest import Binding
from rammer.ir.compute import Axis, Compute
from rammer.ir.expr import Load
from rammer.ir.operator import ROperator
from rammer.ir.types import itemsize

from rammer_cuda.contraction.block import GROUP, Shape, WarpgroupShape, shape_of, warpgroup_shape
from rammer_cuda.contraction.cost import (
    RING_COSTS,
    WARPGROUP_COSTS,
    DepthWalk,
    Numbers,
    RingCost,
    WarpgroupCost,
    Work,
    halo_bytes,
    halo_elements,
    ring_seconds,
    warpgroup_seconds,
)
from rammer_cuda.contraction.depth import Depth, depth_of
from rammer_cuda.contraction.instruction import Instruction
from rammer_cuda.contraction.kernel import contraction_kernel
from rammer_cuda.contraction.tiles import alike_tiles, at_lengths, one_tile, patch_tiles, task_count, tile_parts
from rammer_cuda.family import Family
from rammer_cuda.gpu import Gpu

#: Candidate splits; ``cost`` has the block shapes.
SPLITS = (1, 2, 3, 4, 6, 8)
#: Buffers of a tensor-core kernel's ring, and the least blocks an SM should have room for, by bytes an element, with an upper
#: limit. Kernels in float16 are so short that room for parallel branches and early-starting dependents is worth more than depth
#: (BERT-base on an H200: 0.43 ms with rings of 3, 0.51 ms with rings of 8).
MOST_STAGES, LEAST_RESIDENT, MOST_RESIDENT = 8, {4: 2, 2: 4, 1: 4}, 6
#: Channels of a block with a halo in a ring.
HALO_BLOCK = 64
#: Threads of a tensor-core block that hide latency without crowding shared memory.
BEST_THREADS = 192
#: Least and most threads of a block.
THREADS = (64, 512)
#: Candidates for warpgroups: buffers of the ring and producers; warpgroups of a block; the least columns (or rows) of the
#: constant, of a tile if it has as many, and in all. With fewer, most of an instruction's 8 would be padding.
STAGES, PRODUCERS = (6, 5, 4, 3), (1, 2)
MOST_GROUPS, FEWEST, LEAST = 4, 16, 5
#: The least share of a warpgroup's rows that a tile fills.
FILLED = 0.7
#: Splits of warpgroups: clusters of 3, 6 or 7 blocks measured up to twice as slow as their number of SMs suggests.
EVEN_SPLITS = (1, 2, 4, 8)

Config = tuple[tuple[str, int], ...]
Candidates: TypeAlias = Callable[[ROperator, Binding, Gpu], Iterable[Choice]]
Seconds: TypeAlias = Callable[[ROperator, Binding, Gpu], float]


def _find_roles(i: Instruction, operator: ROperator, binding: Binding) -> Roles | None:
    """Return the roles of a contraction of the instruction's operand type and precision, or None if unsupported."""
    read = {binding.types[n].dtype for n in operator.computes[0].reads}
    kind = BYTE if read <= set(BYTES) else "float16" if "float16" in read else "float32"
    if i.dtype != kind or not i.serves(binding.precision):
        return None
    try:
        return roles_of(operator, binding, i.dtype, prologue=i.prologue)
    except Unsuited:
        return None


def _end_bytes(main: Compute, after: Sequence[Compute], operator: ROperator, binding: Binding) -> int:
    """Return the bytes of results, and of results of earlier kernels that the maps ``after`` a product of the shape of ``main``
    read."""
    inside = {main.name, *(c.name for c in after), *binding.constants}
    read = {n for c in after for n in c.reads if n not in inside and binding.types[n].shape == after[-1].shape}
    return math.prod(main.shape) * sum(itemsize(binding.types[n].dtype) for n in (*operator.outputs, *read))


# --- a ring that all threads fill ---------------------------------------------------------------


def ring_choices(cost: RingCost, operator: ROperator, binding: Binding, gpu: Gpu) -> Iterator[Choice]:
    """Yield the best few choices of every block shape and split, best predicted first; some have no kernel."""
    roles = _find_roles(cost.instruction, operator, binding)
    if roles is None:
        return
    mains = at_lengths(roles.main, operator, binding.parts)
    alike = alike_tiles(roles.main.shape, roles.rows, roles.columns, roles.groups, tuple(c.shape for c in mains))
    blocks = np.array(list(alike), np.int64).reshape(-1, 2 + len(mains))
    places, seen = list(alike.values()), dict[tuple[object, ...], int]()
    ends = [_end_bytes(c, roles.after, operator, binding) for c in mains]
    ranked = _rank_blocks(blocks, cost, roles, mains, ends, binding, gpu)
    halos = _tiles_by_halo(roles, alike, binding) if cost.item == 2 and len(mains) == 1 else {}
    if halos:
        wide = np.array(list(halos), np.int64)
        others = _rank_blocks(wide[:, :-1], cost, roles, mains, ends, binding, gpu, wide[:, -1:])
        known = len(places)
        ranked = heapq.merge(ranked, ((t, known + place, config) for t, place, config in others), key=lambda r: r[0])
        places += halos.values()
    for seconds, place, config in ranked:
        for tile in places[place]:
            # Neighbours in the model's order are often equivalent.
            key = math.prod(tile), dict(config)["split_k"], dict(config).get("halo", 0)
            seen[key] = seen.get(key, 0) + 1
            if seen[key] <= 3:
                yield Choice(seconds, replace(operator, tile=tile, family=cost.instruction.name, config=config))


def _tiles_by_halo(
    roles: Roles, alike: Mapping[tuple[int, ...], Sequence[tuple[int, ...]]], binding: Binding
) -> dict[tuple[int, ...], list[tuple[int, ...]]]:
    """Return the tiles of a channels-last convolution by (rows, columns, tasks, elements of one channel under the rows)."""
    main, found = roles.main, dict[tuple[int, ...], list[tuple[int, ...]]]()
    depth, names = depth_of(main.reduce, HALO_BLOCK), [a.name for a in main.axes]
    if depth.flat or not depth.outer or roles.a.tensor in binding.constants or roles.b.tensor not in binding.constants:
        return found
    if binding.storages[roles.a.tensor].strides[-1] == 1 or depth.inner.extent % HALO_BLOCK:
        return found
    for key, tiles in alike.items():
        for tile in tiles:
            halo = halo_elements(roles.a, dict(zip(names, tile, strict=True)), depth)
            found.setdefault((*key, halo), []).append(tile)
    return found


def _rank_blocks(
    blocks: Numbers,
    cost: RingCost,
    roles: Roles,
    mains: Sequence[Compute],
    ends: Sequence[int],
    binding: Binding,
    gpu: Gpu,
    halo: Numbers = 0,
) -> Iterator[tuple[float, int, Config]]:
    """Yield (predicted seconds, position in ``blocks``, config) of every possible block, sorted.

    ``blocks`` has the rows, columns and number of tasks at each length; ``mains`` are the products there, ``ends`` as in
    ``Work``. A prediction depends on the tile only through these numbers. It is computed for all blocks and configs at once: tens
    of thousands."""
    if not len(blocks):
        return
    rows, width, *tasks = blocks.T[:, :, None]
    configs, table = _config_table(cost, SPLITS if gpu.clusters else (1,))
    depths = {bk: depth_of(roles.main.reduce, bk) for bk, _ in cost.blocks}
    walk = DepthWalk.each([depths[bk] for bk in table["bk"]])
    haloed = bool(np.any(halo))
    s = replace(shape_of(rows, width, table, cost.tensor), halo=haloed)
    if cost.tensor:
        s = replace(s, stages=ring_buffers(s, cost.item, walk, halo, -(-tasks[-1] * s.split_k // gpu.sms), gpu))
    possible = (s.works > THREADS[0] // 2) & (s.works <= THREADS[1]) & (s.split_k <= np.maximum(1, walk.blocks // 2))
    if haloed:  # each block of a split has whole blocks of channels
        possible = possible & (table["bk"] == HALO_BLOCK) & (s.split_k <= walk.blocks // walk.taps)
        possible = possible & (halo_bytes(s, cost.item, walk, halo) + cost.item * 3 * s.bk * (s.bn + 8) < gpu.shared)
    if cost.tensor:
        possible &= _best_slices(s, configs, possible)
    lots = _copy_sizes(roles, binding, depths, table["bk"], (rows, width), cost.item) if cost.item < 4 else (4, 4)
    seconds = 0.0
    for main, count, moved in zip(mains, tasks, ends, strict=True):
        work = Work(count, rows * width, roles.changed, halo=halo, lots=lots, ends=moved)
        shorter = {bk: depth_of(main.reduce, bk) for bk in depths}
        here = walk if main is roles.main else DepthWalk.each([shorter[bk] for bk in table["bk"]])
        seconds = seconds + ring_seconds(cost, s, here, work, gpu) / len(mains)
    ranked = np.where(possible, seconds, np.inf)
    stages = np.broadcast_to(s.stages, ranked.shape)
    for index in np.argsort(ranked, axis=None, kind="stable")[: int(possible.sum())]:
        place, which = divmod(int(index), len(configs))
        config = configs[which]
        if cost.tensor:
            config = (*config, ("stages", int(stages[place, which])), *([("halo", 1)] * haloed))
        yield float(ranked[place, which]), place, config


def _best_slices(s: Shape, configs: Sequence[Config], possible: Numbers) -> Numbers:
    """Return a mask of the best of the configs that differ only in their slices. The model rates them nearly equal; slices
    provide warps that hide each other's latency."""
    distance = np.where(possible, np.abs(np.log2(np.maximum(s.threads, 1) / BEST_THREADS)), np.inf)
    alike: dict[Config, list[int]] = {}
    for i, config in enumerate(configs):
        alike.setdefault(tuple(c for c in config if c[0] != "slice_k"), []).append(i)
    best = np.zeros_like(possible)
    for group in alike.values():
        chosen = np.array(group)[np.argmin(distance[:, group], axis=1)]
        best[np.arange(len(best)), chosen] = True
    return best


def _copy_sizes(
    roles: Roles, binding: Binding, depths: Mapping[int, Depth], blocks: Sequence[int], sizes: tuple[Numbers, Numbers], item: int
) -> tuple[Numbers, Numbers]:
    """Return the elements of rows and of columns that are probably copied at a time, for tiles of ``sizes`` rows and columns and
    each depth in ``blocks``."""
    main = roles.main
    found = list[Numbers]()
    for load, side, size in ((roles.a, roles.rows, sizes[0]), (roles.b, roles.columns, sizes[1])):
        try:
            operand = operand_of(with_quotients(load, {a.name: 1 for a in main.axes}), main, binding)
        except Unsuited:
            operand = None
        axes = [main.axes[d] for d in side]
        lots = {bk: 1 if operand is None else _copied_together(operand, depth, axes, size, item) for bk, depth in depths.items()}
        found.append(np.concatenate([np.broadcast_to(lots[bk], np.shape(size)) for bk in blocks], axis=1))
    return found[0], found[1]


def _copied_together(operand: Operand, depth: Depth, side: Sequence[Axis], size: Numbers, item: int) -> Numbers:
    """Return the elements of an operand that are copied at a time: products, or of float16 neighbours along ``side``, of which a
    tile has ``size``."""
    lot = 16 // item
    if operand.packable:
        return lot
    if not operand.aligned:
        return 1
    inner = depth.inner
    if operand.steps.get(inner.name, 0) == 1 and not any(inner.name in g.steps for g in operand.guards):
        steps = (*(s for a, s in operand.steps.items() if a != inner.name), operand.constant, inner.extent)
        return next((n for n in ((16, 8, 4) if item == 1 else (8, 4)) if all(s % n == 0 for s in steps)), 1)
    along = next((a for a in reversed(side) if a.extent > 1), None)
    if item == 1 or operand.guards or along is None or operand.steps.get(along.name, 0) != 1:
        return 1
    others = (operand.constant, *(n for name, n in operand.steps.items() if name not in {a.name for a in side}))
    if any(n % lot for n in (*others, math.prod(a.extent for a in side))):
        return 1
    return np.where(size % lot == 0, lot, 1)


def ring_buffers(shape: Shape, item: int, walk: DepthWalk, halo: Numbers, per_sm: Numbers, gpu: Gpu) -> Numbers:
    """Return the buffers of the ring: the number that hides latency, limited by shared memory and the number of blocks."""
    room = gpu.shared // np.maximum(LEAST_RESIDENT[item], np.minimum(per_sm, MOST_RESIDENT)) - 1024
    steps, rows = -(-walk.blocks // shape.split_k), shape.bm + 8
    if shape.halo:
        room, rows = room - halo_bytes(shape, item, walk, halo), 0
    most = np.minimum(room // (item * shape.bk * (rows + shape.bn + 8)), np.minimum(MOST_STAGES, steps + 1))
    return np.maximum(3, np.minimum(most, walk.taps + 1) if shape.halo else most)


@cache
def _config_table(cost: RingCost, splits: Sequence[int]) -> tuple[list[Config], dict[str, Numbers]]:
    """Return all configs, and their numbers by name."""
    configs = cost.configs(splits)
    return configs, {n: np.array([dict(c)[n] for c in configs], np.int64) for n, _ in configs[0]}


def ring_time(cost: RingCost, operator: ROperator, binding: Binding, gpu: Gpu) -> float:
    """Return predicted seconds of all tasks of a tiled operator, without its launch."""
    p = cost.instruction.product(operator, binding)
    s = cost.instruction.block(p)
    changed = "a" if p.a.prologue else "b" if p.b.prologue else ""
    sides = (p.a, p.rows, p.row_count), (p.b, p.columns, p.width)
    depth = depth_of(p.main.reduce, s.bk)
    lots = [_copied_together(o, depth, [p.axis(d) for d in side], n, cost.item) if cost.item < 4 else 4 for o, side, n in sides]
    ends = _end_bytes(p.main, p.after, operator, binding)
    sizes = dict(zip((a.name for a in p.main.axes), operator.tile, strict=True))
    halo = halo_elements(p.a.load, sizes, depth) if s.halo else 0
    work = Work(operator.task_count, p.row_count * p.width, changed, halo=halo, lots=(lots[0], lots[1]), ends=ends)
    return float(ring_seconds(cost, s, DepthWalk.of(depth_of(p.main.reduce, s.bk)), work, gpu)) - gpu.launch


# --- warpgroups ---------------------------------------------------------------------------------


def warpgroup_choices(cost: WarpgroupCost, operator: ROperator, binding: Binding, gpu: Gpu) -> Iterator[Choice]:
    """Yield the best two choices of every tile, best predicted first; some have no kernel. The result is empty if the operands or
    the precision are unsupported."""
    roles = _find_roles(cost.instruction, operator, binding)
    if roles is None:
        return
    mains = at_lengths(roles.main, operator, binding.parts)
    found = [
        p
        for down in _row_orientations(cost, roles, binding)
        for p in _predict_configs(cost, roles, mains, down, operator, binding, gpu)
    ]
    seen: dict[tuple[int, ...], int] = {}
    for seconds, tile, config in sorted(found):
        seen[tile] = seen.get(tile, 0) + 1
        if seen[tile] <= 2:
            yield Choice(seconds, replace(operator, tile=tile, family=cost.instruction.name, config=config))


def _row_orientations(cost: WarpgroupCost, roles: Roles, binding: Binding) -> tuple[bool, ...]:
    """Return the possible values of ``down`` (a warpgroup's 64 are rows), or () if the operands are unsupported."""
    constants = [ld.tensor in binding.constants for ld in (roles.a, roles.b)]
    rows, columns = (math.prod(roles.main.shape[d] for d in side) for side in (roles.rows, roles.columns))
    if cost.instruction.constant:
        fixed = columns if constants[1] else rows
        return () if constants[0] == constants[1] or fixed < LEAST else (constants[1],)
    sides = (roles.a, roles.rows), (roles.b, roles.columns)
    if min(rows, columns) < LEAST or not all(_by_16_bytes(cost, load, side, roles, binding) for load, side in sides):
        return ()
    return False, True


def _by_16_bytes(cost: WarpgroupCost, load: Load, side: tuple[int, ...], roles: Roles, binding: Binding) -> bool:
    """Return True if some tile's elements of ``load`` can be copied 16 bytes at a time, or packed. This check avoids building
    each kernel to find out."""
    main = roles.main
    try:
        operand = operand_of(with_quotients(load, {a.name: 1 for a in main.axes}), main, binding)
    except Unsuited:
        return False
    if operand.packable:
        return True
    depth, lot = depth_of(main.reduce, cost.blocks[0]), 16 // cost.item
    deep = operand.steps.get(depth.inner.name, 0) == 1 and depth.inner.extent % lot == 0
    if cost.item == 1:
        return bool(_copied_together(operand, depth, [], 0, 1) == lot)
    return operand.aligned and (deep or (not operand.guards and any(operand.steps.get(main.axes[d].name) == 1 for d in side)))


def _predict_configs(
    cost: WarpgroupCost,
    roles: Roles,
    mains: Sequence[Compute],
    down: bool,
    operator: ROperator,
    binding: Binding,
    gpu: Gpu,
) -> Iterator[tuple[float, tuple[int, ...], Config]]:
    read, names = roles.a if down else roles.b, [a.name for a in roles.main.axes]
    depths = {bk: depth_of(roles.main.reduce, bk) for bk in cost.blocks}
    known: dict[tuple[int, ...], list[tuple[float, Config]]] = {}
    ends = [_end_bytes(c, roles.after, operator, binding) for c in mains]
    shapes = dict.fromkeys((roles.main.shape, mains[-1].shape))
    for tile in dict.fromkeys(tile for shape in shapes for tile in _warpgroup_tiles(shape, roles, down, cost.instruction.most)):
        rows, width = (math.prod(tile[d] for d in side) for side in (roles.rows, roles.columns))
        tasks = tuple(task_count(c.shape, tile) for c in mains)
        sizes = dict(zip(names, tile, strict=True))
        halo = halo_elements(read, sizes, depths[cost.blocks[0]]) if cost.instruction.constant else 0
        key = (rows, width, *tasks, halo)
        if key not in known:
            known[key] = []
            work = [Work(n, rows * width, roles.changed, halo=halo, ends=e) for n, e in zip(tasks, ends, strict=True)]
            block = partial(warpgroup_shape, rows, width, down=down, most=cost.instruction.most, sixteens=cost.item == 1)
            for config in _fitting_configs(cost, block, halo, depths, gpu):
                shape = block(dict(config))
                times = [
                    warpgroup_seconds(cost, shape, depth_of(c.reduce, shape.bk), w, gpu) for c, w in zip(mains, work, strict=True)
                ]
                known[key].append((sum(times) / len(times), config))
        for seconds, config in known[key]:
            yield seconds, tile, config


def _warpgroup_tiles(shape: tuple[int, ...], roles: Roles, down: bool, most_fixed: int) -> Iterator[tuple[int, ...]]:
    """Yield tiles of a result of this ``shape``: whole warpgroups of rows (``down``) or columns by up to ``most_fixed`` of the
    other side."""
    through, fixed = (roles.rows, roles.columns) if down else (roles.columns, roles.rows)
    groups = frozenset() if down else roles.groups
    whole, most = [shape[d] for d in through], MOST_GROUPS * GROUP
    parts = tile_parts(whole, 8, most, roles.groups if down else frozenset())
    for long in (*parts, *([] if down and roles.groups else patch_tiles(whole, GROUP, most, parts))):
        size = math.prod(long)
        if size < FILLED * -(-size // GROUP) * GROUP and size != math.prod(shape[d] for d in through):
            continue
        for short in tile_parts([shape[d] for d in fixed], FEWEST, most_fixed, groups):
            yield one_tile(len(shape), (*through, *fixed), (*long, *short))


def _fitting_configs(
    cost: WarpgroupCost, block: Callable[[dict[str, int]], WarpgroupShape], halo: int, depths: dict[int, Depth], gpu: Gpu
) -> Iterator[Config]:
    """Yield the configs whose ``block`` fits the SM: of each kind the one with the most buffers."""
    way = () if cost.instruction.constant else (("down", int(block({}).down)),)
    for bk, haloed, producers in product(cost.blocks, (0, 1), PRODUCERS):
        if haloed and (not halo or not depths[bk].outer or depths[bk].flat):
            continue
        for stages in STAGES:
            shape = block({"bk": bk, "stages": stages, "halo": haloed, "producers": producers})
            if haloed and math.prod(a.extent for a in depths[bk].outer) < shape.ahead * producers:
                continue
            if cost.shared(shape, halo, depths[bk].halos) <= gpu.shared:
                break
        else:
            continue
        if shape.threads * cost.registers(shape) > gpu.registers:
            continue
        for split in EVEN_SPLITS:
            if split <= max(1, depths[bk].blocks // 2):
                yield (("bk", bk), ("stages", stages), ("split_k", split), ("halo", haloed), ("producers", producers), *way)


def warpgroup_time(cost: WarpgroupCost, operator: ROperator, binding: Binding, gpu: Gpu) -> float:
    """Return predicted seconds of all tasks of a tiled operator, without its launch."""
    p = cost.instruction.product(operator, binding)
    s = cost.instruction.block(p)
    depth, read = depth_of(p.main.reduce, s.bk), p.a.load if s.down else p.b.load
    halo = halo_elements(read, dict(zip((a.name for a in p.main.axes), operator.tile, strict=True)), depth)
    changed = "a" if operator.prologue else ""
    ends = _end_bytes(p.main, p.after, operator, binding)
    work = Work(operator.task_count, p.row_count * p.width, changed, halo=halo, ends=ends)
    return warpgroup_seconds(cost, s, depth, work, gpu) - gpu.launch


# --- the families -------------------------------------------------------------------------------


def _blocks_per_task(operator: ROperator) -> int:
    """Return the blocks of a task, each on an SM: parts of one sum."""
    return max(1, dict(operator.config).get("split_k", 1))


def _make_family(i: Instruction, keys: Sequence[str], candidates: Candidates, seconds: Seconds) -> Family:
    configs = dict.fromkeys(keys, range(0, 1025))
    threads: Callable[[ROperator, Binding], int] = lambda o, b: int(i.block(i.product(o, b)).threads)  # noqa: E731
    return Family(
        i.name,
        configs,
        candidates,
        seconds,
        contraction_kernel,
        i.needs,
        product=True,
        spread=_blocks_per_task,
        threads=threads,
        operand_rounding=i.operand_rounding,
    )


_RING = ("tm", "tn", "bk", "split_k", "slice_k", "stages", "halo")
_WARPGROUPS = ("bk", "stages", "split_k", "halo", "producers", "down")
#: Families of single threads and warps, then families of warpgroups.
PRODUCTS: Final = (
    *(_make_family(c.instruction, _RING, partial(ring_choices, c), partial(ring_time, c)) for c in RING_COSTS),
    *(
        _make_family(c.instruction, _WARPGROUPS, partial(warpgroup_choices, c), partial(warpgroup_time, c))
        for c in WARPGROUP_COSTS
    ),
)
