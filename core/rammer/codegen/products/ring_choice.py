"""Candidate tiles and block shapes of products in a ring, ranked by cost (``ring_cost``)."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import TypeAlias

import numpy as np

from rammer.codegen.contraction_form import BYTE, BYTES, Operand, Roles, operand_of, roles_of, with_quotients
from rammer.codegen.kernel_family import Choice
from rammer.codegen.products.block import Shape, shape_of
from rammer.codegen.products.depth import Depth, depth_of
from rammer.codegen.products.ring_cost import (
    DepthWalk,
    Numbers,
    OperandSupport,
    Processor,
    RingCost,
    Work,
    halo_bytes,
    halo_elements,
    ring_seconds,
)
from rammer.codegen.products.tiles import alike_tiles, at_lengths
from rammer.codegen.task_parameters import Unsuited
from rammer.device.manifest import Binding
from rammer.ir.compute import Axis, Compute
from rammer.ir.operator import ROperator
from rammer.ir.types import itemsize

#: Buffers of a tensor-core kernel's ring, and the least blocks an SM should have room for, by bytes an element, with an upper
#: limit. Kernels in float16 are so short that room for parallel branches and early-starting dependents is worth more than depth
#: (BERT-base on an H200: 0.43 ms with rings of 3, 0.51 ms with rings of 8). Room for two blocks is enough: with room for four,
#: ResNet-50 at batch 8 takes 0.603 ms instead of 0.594, BERT-base 0.417 instead of 0.409, ViT-B/16 0.593 instead of 0.584.
MOST_STAGES, LEAST_RESIDENT, MOST_RESIDENT = 8, {4: 2, 2: 2, 1: 4}, 6
#: Elements by which rows of both operands in local memory may be padded.
PADDING = 8
#: Threads of a tensor-core block that hide latency without crowding shared memory.
BEST_THREADS = 192

Config: TypeAlias = tuple[tuple[str, int], ...]


def find_roles(i: OperandSupport, operator: ROperator, binding: Binding) -> Roles | None:
    """Return the roles of a contraction of the instruction's operand type and precision, or None if unsupported."""
    read = {binding.types[n].dtype for n in operator.computes[0].reads}
    kind = BYTE if read <= set(BYTES) else "float16" if "float16" in read else "float32"
    if i.dtype != kind or not i.serves(binding.precision):
        return None
    try:
        return roles_of(operator, binding, i.dtype, prologue=i.prologue)
    except Unsuited:
        return None


def end_bytes(main: Compute, after: Sequence[Compute], operator: ROperator, binding: Binding) -> int:
    """Return the bytes of results, and of results of earlier kernels that the maps ``after`` a product of the shape of ``main``
    read."""
    inside = {main.name, *(c.name for c in after), *binding.constants}
    read = {n for c in after for n in c.reads if n not in inside and binding.types[n].shape == after[-1].shape}
    return math.prod(main.shape) * sum(itemsize(binding.types[n].dtype) for n in (*operator.outputs, *read))


def ring_choices(cost: RingCost, operator: ROperator, binding: Binding, unit: Processor) -> Iterator[Choice]:
    """Yield the best few choices of every block shape and split, best predicted first; some have no kernel."""
    roles = find_roles(cost.instruction, operator, binding)
    if roles is None:
        return
    mains = at_lengths(roles.main, operator, binding.parts)
    alike = alike_tiles(roles.main.shape, roles.rows, roles.columns, roles.groups, tuple(c.shape for c in mains))
    blocks = np.array(list(alike), np.int64).reshape(-1, 2 + len(mains))
    places, seen = list(alike.values()), dict[tuple[object, ...], int]()
    lengths = [(c, end_bytes(c, roles.after, operator, binding)) for c in mains]
    ranked = _rank_blocks(np.pad(blocks, ((0, 0), (0, 1))), cost, roles, lengths, binding, unit)
    halos = _tiles_by_halo(cost.halo, roles, alike, binding) if cost.halo and len(mains) == 1 else {}
    if halos:
        wide = np.array(list(halos), np.int64)
        others = _rank_blocks(wide, cost, roles, lengths, binding, unit)
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
    channels: int, roles: Roles, alike: Mapping[tuple[int, ...], Sequence[tuple[int, ...]]], binding: Binding
) -> dict[tuple[int, ...], list[tuple[int, ...]]]:
    """Return the tiles of a channels-last convolution by (rows, columns, tasks, elements of one channel under the rows)."""
    main, found = roles.main, dict[tuple[int, ...], list[tuple[int, ...]]]()
    depth, names = depth_of(main.reduce, channels), [a.name for a in main.axes]
    if depth.flat or not depth.outer or roles.a.tensor in binding.constants or roles.b.tensor not in binding.constants:
        return found
    if binding.storages[roles.a.tensor].strides[-1] == 1 or depth.inner.extent % channels:
        return found
    for key, tiles in alike.items():
        for tile in tiles:
            halo = halo_elements(roles.a, dict(zip(names, tile, strict=True)), depth)
            found.setdefault((*key, halo), []).append(tile)
    return found


def _rank_blocks(
    blocks: Numbers, cost: RingCost, roles: Roles, lengths: Sequence[tuple[Compute, int]], binding: Binding, unit: Processor
) -> Iterator[tuple[float, int, Config]]:
    """Yield (predicted seconds, position in ``blocks``, config) of every possible block, sorted.

    ``blocks`` has the rows, columns, number of tasks at each length, and halo, of all or of none; ``lengths`` are the products
    there with their ``Work.ends``. A prediction depends on the tile only through these numbers. It is computed for all blocks and
    configs at once: tens of thousands."""
    if not len(blocks):
        return
    rows, width, *tasks, halo = blocks.T[:, :, None]
    configs, table = _config_table(cost, unit.splits)
    depths = {bk: depth_of(roles.main.reduce, bk) for bk, _ in cost.blocks}
    walk = DepthWalk.each([depths[bk] for bk in table["bk"]])
    haloed = bool(np.any(halo))
    s = replace(shape_of(rows, width, table, cost.tensor, cost.items), halo=haloed)
    if cost.tensor:
        s = replace(s, stages=ring_buffers(s, cost.item, walk, halo, -(-tasks[-1] * s.split_k // unit.sms), unit))
    possible = (s.works > cost.threads[0] // 2) & (s.works <= cost.threads[1]) & (s.split_k <= np.maximum(1, walk.blocks // 2))
    if cost.local:
        possible &= np.maximum(s.stages * s.bk * (s.bm + s.bn + PADDING), s.bm * s.bn * s.slice_k) * 4 <= cost.local
    if haloed:  # each block of a split has whole blocks of channels
        possible = possible & (table["bk"] == cost.halo) & (s.split_k <= walk.blocks // walk.taps)
        possible = possible & (halo_bytes(s, cost.item, walk, halo) + cost.item * 3 * s.bk * (s.bn + 8) < unit.shared)
    if cost.tensor:
        possible &= _best_slices(s, configs, possible)
    lots = _copy_sizes(roles, binding, depths, table["bk"], (rows, width), cost.item) if cost.item < 4 else (4, 4)
    seconds = 0.0
    for (main, moved), count in zip(lengths, tasks, strict=True):
        work = Work(count, rows * width, roles.changed, halo=halo, lots=lots, ends=moved)
        shorter = {bk: depth_of(main.reduce, bk) for bk in depths}
        here = walk if main is roles.main else DepthWalk.each([shorter[bk] for bk in table["bk"]])
        seconds = seconds + ring_seconds(cost, s, here, work, unit) / len(lengths)
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
        lots = {bk: 1 if operand is None else copied_together(operand, depth, axes, size, item) for bk, depth in depths.items()}
        found.append(np.concatenate([np.broadcast_to(lots[bk], np.shape(size)) for bk in blocks], axis=1))
    return found[0], found[1]


def copied_together(operand: Operand, depth: Depth, side: Sequence[Axis], size: Numbers, item: int) -> Numbers:
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


def ring_buffers(shape: Shape, item: int, walk: DepthWalk, halo: Numbers, per_sm: Numbers, unit: Processor) -> Numbers:
    """Return the buffers of the ring: the number that hides latency, limited by shared memory and the number of blocks."""
    room = unit.shared // np.maximum(LEAST_RESIDENT[item], np.minimum(per_sm, MOST_RESIDENT)) - 1024
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


def ring_time(cost: RingCost, operator: ROperator, binding: Binding, unit: Processor) -> float:
    """Return predicted seconds of all tasks of a tiled operator, without its launch."""
    p = cost.instruction.product(operator, binding)
    s = cost.instruction.block(p)
    changed = "a" if p.a.prologue else "b" if p.b.prologue else ""
    sides = (p.a, p.rows, p.row_count), (p.b, p.columns, p.width)
    depth = depth_of(p.main.reduce, s.bk)
    lots = [copied_together(o, depth, [p.axis(d) for d in side], n, cost.item) if cost.item < 4 else 4 for o, side, n in sides]
    ends = end_bytes(p.main, p.after, operator, binding)
    sizes = dict(zip((a.name for a in p.main.axes), operator.tile, strict=True))
    halo = halo_elements(p.a.load, sizes, depth) if s.halo else 0
    work = Work(operator.task_count, p.row_count * p.width, changed, halo=halo, lots=(lots[0], lots[1]), ends=ends)
    return float(ring_seconds(cost, s, DepthWalk.of(depth_of(p.main.reduce, s.bk)), work, unit)) - unit.launch
