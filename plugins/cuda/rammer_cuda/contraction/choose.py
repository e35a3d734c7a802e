"""Candidate tiles and block shapes of contractions, ranked by cost (``contraction.cost``), and the kernel families."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Final, TypeAlias

from rammer.codegen import Choice, Roles, Unsuited, operand_of, with_quotients
from rammer.codegen.products import (
    Config,
    Depth,
    Work,
    at_lengths,
    copied_together,
    depth_of,
    end_bytes,
    find_roles,
    halo_elements,
    one_tile,
    patch_tiles,
    ring_choices,
    ring_time,
    task_count,
    tile_parts,
)
from rammer.device.manifest import Binding
from rammer.ir.compute import Compute
from rammer.ir.expr import Load
from rammer.ir.operator import ROperator

from rammer_cuda.contraction.block import GROUP, WarpgroupShape, warpgroup_shape
from rammer_cuda.contraction.cost import RING_COSTS, WARPGROUP_COSTS, WarpgroupCost, warpgroup_seconds
from rammer_cuda.contraction.instruction import RING, Instruction
from rammer_cuda.contraction.kernel import contraction_kernel
from rammer_cuda.family import Family
from rammer_cuda.gpu import Gpu

#: Candidates for warpgroups: buffers of the ring and producers; warpgroups of a block; the least columns (or rows) of the
#: constant, of a tile if it has as many, and in all. With fewer, most of an instruction's 8 would be padding.
STAGES, PRODUCERS = (6, 5, 4, 3), (1, 2)
MOST_GROUPS, FEWEST, LEAST = 4, 16, 5
#: The least share of a warpgroup's rows that a tile fills.
FILLED = 0.7
#: Splits of warpgroups: clusters of 3, 6 or 7 blocks measured up to twice as slow as their number of SMs suggests.
EVEN_SPLITS = (1, 2, 4, 8)

Candidates: TypeAlias = Callable[[ROperator, Binding, Gpu], Iterable[Choice]]
Seconds: TypeAlias = Callable[[ROperator, Binding, Gpu], float]


# --- warpgroups ---------------------------------------------------------------------------------


def warpgroup_choices(cost: WarpgroupCost, operator: ROperator, binding: Binding, gpu: Gpu) -> Iterator[Choice]:
    """Yield the best two choices of every tile, best predicted first; some have no kernel. The result is empty if the operands or
    the precision are unsupported."""
    roles = find_roles(cost.instruction, operator, binding)
    if roles is None:
        return
    mains = at_lengths(roles.main, operator, binding.parts)
    lengths = [(c, end_bytes(c, roles.after, operator, binding)) for c in mains]
    found = [p for down in _row_orientations(cost, roles, binding) for p in _predict_configs(cost, roles, lengths, down, gpu)]
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
        return bool(copied_together(operand, depth, [], 0, 1) == lot)
    return operand.aligned and (deep or (not operand.guards and any(operand.steps.get(main.axes[d].name) == 1 for d in side)))


def _predict_configs(
    cost: WarpgroupCost, roles: Roles, lengths: Sequence[tuple[Compute, int]], down: bool, gpu: Gpu
) -> Iterator[tuple[float, tuple[int, ...], Config]]:
    read, names = roles.a if down else roles.b, [a.name for a in roles.main.axes]
    depths = {bk: depth_of(roles.main.reduce, bk) for bk in cost.blocks}
    known: dict[tuple[int, ...], list[tuple[float, Config]]] = {}
    mains, ends = zip(*lengths, strict=True)
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
    ends = end_bytes(p.main, p.after, operator, binding)
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
        fused_forms=frozenset({"trailing maps", "leading maps"} if i.prologue else {"trailing maps"}),
    )


_RING = ("tm", "tn", "bk", "split_k", "slice_k", "stages", "halo")
_WARPGROUPS = ("bk", "stages", "split_k", "halo", "producers", "down")
#: Families of single threads and warps, then families of warpgroups.
PRODUCTS: Final = (
    *(_make_family(RING[c.instruction.name], _RING, partial(ring_choices, c), partial(ring_time, c)) for c in RING_COSTS),
    *(
        _make_family(c.instruction, _WARPGROUPS, partial(warpgroup_choices, c), partial(warpgroup_time, c))
        for c in WARPGROUP_COSTS
    ),
)
