"""Candidate tiles and block shapes of contractions, ranked by cost (``contraction.cost``), and the kernel families."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import product
from typing import Final, TypeAlias

import numpy as np

from rammer.codegen import BYTE, BYTES, Choice, Operand, Roles, Unsuited, operand_of, roles_of, with_quotients
from rammer.codegen.products.block import Shape, shape_of
from rammer.codegen.products.depth import Depth, depth_of
from rammer.codegen.products.tiles import alike_tiles, at_lengths, one_tile, patch_tiles, task_count, tile_parts
from rammer.device.manifest import Binding
from rammer.ir.compute import Compute
from rammer.ir.expr import Load
from rammer.ir.operator import ROperator

from rammer_cuda.contraction.block import GROUP, MOST, WarpgroupShape, warpgroup_shape
from rammer_cuda.contraction.cost import (
    RING_COSTS,
    WARPGROUP_COSTS,
    DepthWalk,
    Numbers,
    RingCost,
    WarpgroupCost,
    Work,
    halo_elements,
    ring_seconds,
    warpgroup_seconds,
)
from rammer_cuda.contraction.instruction import Instruction
from rammer_cuda.contraction.kernel import contraction_kernel
from rammer_cuda.family import Family
from rammer_cuda.gpu import Gpu

#: Candidate splits; ``cost`` has the block shapes.
SPLITS = (1, 2, 3, 4, 6, 8)
#: Buffers of a tensor-core kernel's ring, and the least blocks an SM should have room for, by bytes an element, with an upper
#: limit. Kernels in float16 are so short that room for parallel branches and early-starting dependents is worth more than depth
#: (BERT-base on an H200: 0.43 ms with rings of 3, 0.51 ms with rings of 8).
MOST_STAGES, LEAST_RESIDENT, MOST_RESIDENT = 8, {4: 2, 2: 4, 1: 4}, 6
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
#: Splits of warpgroups: clusters of 3 or 6 blocks measured up to twice as slow as their number of SMs suggests.
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
    for seconds, place, config in _rank_blocks(blocks, cost, roles, mains, binding, gpu):
        for tile in places[place]:
            # Neighbours in the model's order are often equivalent.
            key = math.prod(tile), dict(config)["split_k"]
            seen[key] = seen.get(key, 0) + 1
            if seen[key] <= 3:
                yield Choice(seconds, replace(operator, tile=tile, family=cost.instruction.name, config=config))


def _rank_blocks(
    blocks: Numbers, cost: RingCost, roles: Roles, mains: Sequence[Compute], binding: Binding, gpu: Gpu
) -> Iterator[tuple[float, int, Config]]:
    """Yield (predicted seconds, position in ``blocks``, config) of every possible block, sorted.

    ``blocks`` has the rows, columns and number of tasks at each length; ``mains`` are the products there. A prediction depends on
    the tile only through these numbers. It is computed for all blocks and configs at once: tens of thousands."""
    if not len(blocks):
        return
    rows, width, *tasks = blocks.T[:, :, None]
    configs, table = _config_table(cost, SPLITS if gpu.clusters else (1,))
    depths = {bk: depth_of(roles.main.reduce, bk) for bk, _ in cost.blocks}
    walk = DepthWalk.each([depths[bk] for bk in table["bk"]])
    s = shape_of(rows, width, table, cost.tensor)
    if cost.tensor:
        s = replace(s, stages=ring_buffers(s, cost.item, walk.blocks, -(-tasks[-1] * s.split_k // gpu.sms), gpu))
    possible = (s.works > THREADS[0] // 2) & (s.works <= THREADS[1]) & (s.split_k <= np.maximum(1, walk.blocks // 2))
    if cost.tensor:
        possible &= _best_slices(s, configs, possible)
    lots = _copy_sizes(roles, binding, depths, table["bk"]) if cost.item == 1 else (0, 0)
    seconds = 0.0
    for main, count in zip(mains, tasks, strict=True):
        work = Work(count, rows * width, roles.changed, _is_likely_contiguous(roles, binding), lots=lots)
        ends = {bk: depth_of(main.reduce, bk) for bk in depths}
        here = walk if main is roles.main else DepthWalk.each([ends[bk] for bk in table["bk"]])
        seconds = seconds + ring_seconds(cost, s, here, work, gpu) / len(mains)
    ranked = np.where(possible, seconds, np.inf)
    stages = np.broadcast_to(s.stages, ranked.shape)
    for index in np.argsort(ranked, axis=None, kind="stable")[: int(possible.sum())]:
        place, which = divmod(int(index), len(configs))
        config = configs[which]
        if cost.tensor:
            config = (*config, ("stages", int(stages[place, which])))
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


def _is_likely_contiguous(roles: Roles, binding: Binding) -> bool:
    """Return True if eight columns or eight products of ``b`` are probably contiguous, as 16-byte copies of float16 need."""
    columns = math.prod(roles.main.shape[d] for d in roles.columns)
    deep = roles.main.reduce[-1].extent
    return roles.b.tensor in binding.constants or (roles.b.fill is None and (columns % 8 == 0 or deep % 8 == 0))


def _copy_sizes(roles: Roles, binding: Binding, depths: Mapping[int, Depth], blocks: Sequence[int]) -> tuple[Numbers, Numbers]:
    """Return the probable copy sizes in bytes of rows and of columns, for each depth in ``blocks``."""
    main = roles.main
    found = list[Numbers]()
    for load in (roles.a, roles.b):
        try:
            operand = operand_of(with_quotients(load, {a.name: 1 for a in main.axes}), main, binding)
        except Unsuited:
            operand = None
        lots = {bk: 1 if operand is None else _copy_bytes(operand, depth) for bk, depth in depths.items()}
        found.append(np.array([lots[bk] for bk in blocks]))
    return found[0], found[1]


def _copy_bytes(operand: Operand, depth: Depth) -> int:
    """Return the bytes of an operand that are copied at a time."""
    if operand.packable:
        return 16
    inner = depth.inner
    together = operand.steps.get(inner.name, 0) == 1 and not any(inner.name in g.steps for g in operand.guards)
    if depth.flat or not together or not operand.aligned:
        return 1
    steps = (*(s for a, s in operand.steps.items() if a != inner.name), operand.constant, inner.extent)
    return next((n for n in (16, 8, 4) if all(s % n == 0 for s in steps)), 1)


def ring_buffers(shape: Shape, item: int, blocks: Numbers, per_sm: Numbers, gpu: Gpu) -> Numbers:
    """Return the buffers of the ring: the number that hides latency, limited by shared memory and the number of blocks."""
    room = gpu.shared // np.maximum(LEAST_RESIDENT[item], np.minimum(per_sm, MOST_RESIDENT)) - 1024
    steps = -(-blocks // shape.split_k)
    most = np.minimum(room // (item * shape.bk * (shape.bm + shape.bn + 16)), np.minimum(MOST_STAGES, steps + 1))
    return np.maximum(3, most)


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
    lots = _copy_bytes(p.a, depth_of(p.main.reduce, s.bk)), _copy_bytes(p.b, depth_of(p.main.reduce, s.bk))
    work = Work(operator.task_count, p.row_count * p.width, changed, together=not p.b.guards, lots=lots)
    return float(ring_seconds(cost, s, DepthWalk.of(depth_of(p.main.reduce, s.bk)), work, gpu)) - gpu.launch


# --- warpgroups ---------------------------------------------------------------------------------


def warpgroup_choices(cost: WarpgroupCost, operator: ROperator, binding: Binding, gpu: Gpu) -> Iterator[Choice]:
    """Yield the best two choices of every tile, best predicted first; some have no kernel. The result is empty if the operands or
    the precision are unsupported."""
    roles = _find_roles(cost.instruction, operator, binding)
    if roles is None:
        return
    mains = at_lengths(roles.main, operator, binding.parts)
    found = [p for down in _row_orientations(cost, roles, binding) for p in _predict_configs(cost, roles, mains, down, gpu)]
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
    deep = operand.steps.get(depth.inner.name, 0) == 1 and depth.inner.extent % lot == 0 and not depth.flat
    if cost.item == 1:
        return _copy_bytes(operand, depth) == lot
    return operand.aligned and (deep or (not operand.guards and any(operand.steps.get(main.axes[d].name) == 1 for d in side)))


def _predict_configs(
    cost: WarpgroupCost, roles: Roles, mains: Sequence[Compute], down: bool, gpu: Gpu
) -> Iterator[tuple[float, tuple[int, ...], Config]]:
    read, names = roles.a if down else roles.b, [a.name for a in roles.main.axes]
    depths = {bk: depth_of(roles.main.reduce, bk) for bk in cost.blocks}
    known: dict[tuple[int, ...], list[tuple[float, Config]]] = {}
    shapes = dict.fromkeys((roles.main.shape, mains[-1].shape))
    for tile in dict.fromkeys(tile for shape in shapes for tile in _warpgroup_tiles(shape, roles, down)):
        rows, width = (math.prod(tile[d] for d in side) for side in (roles.rows, roles.columns))
        tasks = tuple(task_count(c.shape, tile) for c in mains)
        sizes = dict(zip(names, tile, strict=True))
        halo = halo_elements(read, sizes, depths[cost.blocks[0]]) if cost.instruction.constant else 0
        key = (rows, width, *tasks, halo)
        if key not in known:
            known[key] = []
            work = [Work(count, rows * width, roles.changed, halo=halo) for count in tasks]
            block = partial(warpgroup_shape, rows, width, down=down, sixteens=cost.item == 1)
            for config in _fitting_configs(cost, block, halo, depths, gpu):
                shape = block(dict(config))
                times = [
                    warpgroup_seconds(cost, shape, depth_of(c.reduce, shape.bk), w, gpu) for c, w in zip(mains, work, strict=True)
                ]
                known[key].append((sum(times) / len(times), config))
        for seconds, config in known[key]:
            yield seconds, tile, config


def _warpgroup_tiles(shape: tuple[int, ...], roles: Roles, down: bool) -> Iterator[tuple[int, ...]]:
    """Yield tiles of a result of this ``shape``: whole warpgroups of rows (``down``) or columns by up to ``MOST`` of the other
    side."""
    through, fixed = (roles.rows, roles.columns) if down else (roles.columns, roles.rows)
    groups = frozenset() if down else roles.groups
    whole, most = [shape[d] for d in through], MOST_GROUPS * GROUP
    parts = tile_parts(whole, 8, most, roles.groups if down else frozenset())
    for long in (*parts, *([] if down and roles.groups else patch_tiles(whole, GROUP, most, parts))):
        size = math.prod(long)
        if size < FILLED * -(-size // GROUP) * GROUP and size != math.prod(shape[d] for d in through):
            continue
        for short in tile_parts([shape[d] for d in fixed], FEWEST, MOST, groups):
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
    work = Work(operator.task_count, p.row_count * p.width, changed, halo=halo)
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


_RING = ("tm", "tn", "bk", "split_k", "slice_k", "stages")
_WARPGROUPS = ("bk", "stages", "split_k", "halo", "producers", "down")
#: Families of single threads and warps, then families of warpgroups.
PRODUCTS: Final = (
    *(_make_family(c.instruction, _RING, partial(ring_choices, c), partial(ring_time, c)) for c in RING_COSTS),
    *(
        _make_family(c.instruction, _WARPGROUPS, partial(warpgroup_choices, c), partial(warpgroup_time, c))
        for c in WARPGROUP_COSTS
    ),
)
