"""Candidate tiles and block shapes of products in a ring, ranked by cost (``ring_cost``)."""

from __future__ import annotations

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
from rammer.codegen.products.ring_cost import DepthWalk, Numbers, Processor, ProductInstruction, RingCost, Work, ring_seconds
from rammer.codegen.products.tiles import alike_tiles, at_lengths
from rammer.codegen.task_parameters import Unsuited
from rammer.device.manifest import Binding
from rammer.ir.compute import Compute
from rammer.ir.operator import ROperator

#: Buffers of a tensor-core kernel's ring, and the least blocks an SM should have room for, by bytes an element, with an upper
#: limit. Kernels in float16 are so short that room for parallel branches and early-starting dependents is worth more than depth
#: (BERT-base on an H200: 0.43 ms with rings of 3, 0.51 ms with rings of 8).
MOST_STAGES, LEAST_RESIDENT, MOST_RESIDENT = 8, {4: 2, 2: 4, 1: 4}, 6
#: Elements by which rows of both operands in local memory may be padded.
PADDING = 8
#: Threads of a tensor-core block that hide latency without crowding shared memory.
BEST_THREADS = 192

Config: TypeAlias = tuple[tuple[str, int], ...]


def find_roles(i: ProductInstruction, operator: ROperator, binding: Binding) -> Roles | None:
    """Return the roles of a contraction of the instruction's operand type and precision, or None if unsupported."""
    read = {binding.types[n].dtype for n in operator.computes[0].reads}
    kind = BYTE if read <= set(BYTES) else "float16" if "float16" in read else "float32"
    if i.dtype != kind or not i.serves(binding.precision):
        return None
    try:
        return roles_of(operator, binding, i.dtype, prologue=i.prologue)
    except Unsuited:
        return None


def ring_choices(cost: RingCost, operator: ROperator, binding: Binding, unit: Processor) -> Iterator[Choice]:
    """Yield the best few choices of every block shape and split, best predicted first; some have no kernel."""
    roles = find_roles(cost.instruction, operator, binding)
    if roles is None:
        return
    mains = at_lengths(roles.main, operator, binding.parts)
    alike = alike_tiles(roles.main.shape, roles.rows, roles.columns, roles.groups, tuple(c.shape for c in mains))
    blocks = np.array(list(alike), np.int64).reshape(-1, 2 + len(mains))
    places, seen = list(alike.values()), dict[tuple[object, ...], int]()
    for seconds, place, config in _rank_blocks(blocks, cost, roles, mains, binding, unit):
        for tile in places[place]:
            # Neighbours in the model's order are often equivalent.
            key = math.prod(tile), dict(config)["split_k"]
            seen[key] = seen.get(key, 0) + 1
            if seen[key] <= 3:
                yield Choice(seconds, replace(operator, tile=tile, family=cost.instruction.name, config=config))


def _rank_blocks(
    blocks: Numbers, cost: RingCost, roles: Roles, mains: Sequence[Compute], binding: Binding, unit: Processor
) -> Iterator[tuple[float, int, Config]]:
    """Yield (predicted seconds, position in ``blocks``, config) of every possible block, sorted.

    ``blocks`` has the rows, columns and number of tasks at each length; ``mains`` are the products there. A prediction depends on
    the tile only through these numbers. It is computed for all blocks and configs at once: tens of thousands."""
    if not len(blocks):
        return
    rows, width, *tasks = blocks.T[:, :, None]
    configs, table = _config_table(cost, unit.splits)
    depths = {bk: depth_of(roles.main.reduce, bk) for bk, _ in cost.blocks}
    walk = DepthWalk.each([depths[bk] for bk in table["bk"]])
    s = shape_of(rows, width, table, cost.tensor, cost.items)
    if cost.tensor:
        s = replace(s, stages=ring_buffers(s, cost.item, walk.blocks, -(-tasks[-1] * s.split_k // unit.sms), unit))
    possible = (s.works > cost.threads[0] // 2) & (s.works <= cost.threads[1]) & (s.split_k <= np.maximum(1, walk.blocks // 2))
    if cost.local:
        possible &= np.maximum(s.stages * s.bk * (s.bm + s.bn + PADDING), s.bm * s.bn * s.slice_k) * 4 <= cost.local
    if cost.tensor:
        possible &= _best_slices(s, configs, possible)
    lots = _copy_sizes(roles, binding, depths, table["bk"]) if cost.item == 1 else (0, 0)
    seconds = 0.0
    for main, count in zip(mains, tasks, strict=True):
        work = Work(count, rows * width, roles.changed, _is_likely_contiguous(roles, binding), lots=lots)
        ends = {bk: depth_of(main.reduce, bk) for bk in depths}
        here = walk if main is roles.main else DepthWalk.each([ends[bk] for bk in table["bk"]])
        seconds = seconds + ring_seconds(cost, s, here, work, unit) / len(mains)
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
        lots = {bk: 1 if operand is None else copy_bytes(operand, depth) for bk, depth in depths.items()}
        found.append(np.array([lots[bk] for bk in blocks]))
    return found[0], found[1]


def copy_bytes(operand: Operand, depth: Depth) -> int:
    """Return the bytes of an operand that are copied at a time."""
    if operand.packable:
        return 16
    inner = depth.inner
    together = operand.steps.get(inner.name, 0) == 1 and not any(inner.name in g.steps for g in operand.guards)
    if depth.flat or not together or not operand.aligned:
        return 1
    steps = (*(s for a, s in operand.steps.items() if a != inner.name), operand.constant, inner.extent)
    return next((n for n in (16, 8, 4) if all(s % n == 0 for s in steps)), 1)


def ring_buffers(shape: Shape, item: int, blocks: Numbers, per_sm: Numbers, unit: Processor) -> Numbers:
    """Return the buffers of the ring: the number that hides latency, limited by shared memory and the number of blocks."""
    room = unit.shared // np.maximum(LEAST_RESIDENT[item], np.minimum(per_sm, MOST_RESIDENT)) - 1024
    steps = -(-blocks // shape.split_k)
    most = np.minimum(room // (item * shape.bk * (shape.bm + shape.bn + 16)), np.minimum(MOST_STAGES, steps + 1))
    return np.maximum(3, most)


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
    lots = copy_bytes(p.a, depth_of(p.main.reduce, s.bk)), copy_bytes(p.b, depth_of(p.main.reduce, s.bk))
    work = Work(operator.task_count, p.row_count * p.width, changed, together=not p.b.guards, lots=lots)
    return float(ring_seconds(cost, s, DepthWalk.of(depth_of(p.main.reduce, s.bk)), work, unit)) - unit.launch
