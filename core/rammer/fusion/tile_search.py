"""Tile search: the tile shapes worth trying for an operator, best predicted first.

Seeds are tiles that give each vEU one, two, four, ... tasks, split from the outer or the inner axes. A short local search halves
and doubles single axes from the best seeds. Layers and operators are searched separately (Welder, section 4.4): only the device
layer's tile is decided here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import combinations, product
from typing import TypeAlias

from rammer.device.manifest import Binding
from rammer.fusion.tile_traffic import DENSE, BoxPrices, TaskCost
from rammer.ir.at_length import PARTS
from rammer.ir.device import VDevice
from rammer.ir.operator import ROperator, inner_box
from rammer.ir.program import Storage
from rammer.ir.types import TensorType

__all__ = ["candidates"]

Tile: TypeAlias = "tuple[int, ...]"
#: Target numbers of tasks per vEU for the seeds.
ROUNDS = (1, 2, 4, 8, 32)


def candidates(operator: ROperator, binding: Binding, device: VDevice, count: int = 8) -> list[ROperator]:
    """Return up to ``count`` tiled copies of ``operator`` whose footprint fits, best predicted first. Returns [] if even
    single-element tiles exceed the vEU's memory."""
    ranked = ranked_tiles(operator, binding.types, device, parts=binding.parts, storages=binding.storages)
    return [operator.tiled(tile) for _, tile, _ in ranked[:count]]


def ranked_tiles(
    operator: ROperator,
    types: Mapping[str, TensorType],
    device: VDevice,
    step: Mapping[str, int] | None = None,
    parts: Sequence[float] = PARTS,
    storages: Mapping[str, Storage] = DENSE,
) -> list[tuple[float, Tile, TaskCost]]:
    """Return (predicted seconds, tile, cost) of every tile that fits, sorted. Tensors without a storage are in row-major order.

    If none fits and the device spills, tiles that spill are returned. ``step`` restricts the tile along an axis to multiples (or
    the whole extent), as register-tiled families need. Operators with endings are priced at ``parts`` of the longest length."""
    prices, shapes = BoxPrices(operator, types, device, storages), ended_shapes(operator, parts)
    return _rank_tiles(prices, step or {}, shapes, False) or (
        _rank_tiles(prices, step or {}, shapes, True) if device.spills else []
    )


def _rank_tiles(
    prices: BoxPrices, step: Mapping[str, int], shapes: Sequence[Tile], spilled: bool
) -> list[tuple[float, Tile, TaskCost]]:
    """Return ``ranked_tiles`` for results of ``shapes``; ``spilled`` tiles may exceed the vEU's memory."""
    operator, device = prices.operator, prices.device
    shape = operator.anchor.shape
    steps = tuple(max(1, a.extent) if d in operator.uncut else step.get(a.name, 1) for d, a in enumerate(operator.anchor.axes))
    tried: dict[Tile, tuple[float, TaskCost] | None] = {}

    def measure(tile: Tile) -> float:
        if tile not in tried:
            cost = prices.cost(inner_box(shape, tile))
            fits = prices.fits(cost, spilled)
            seconds = [cost.total(_task_count(s, tile), device) for s in shapes]
            tried[tile] = (sum(seconds) / len(seconds), cost) if fits else None
        known = tried[tile]
        return known[0] if known else math.inf

    for seed in sorted(_rounded_seeds(shape, steps, device.veus), key=measure)[:3]:
        _descend_tile(seed, shape, steps, measure)
    if not any(tried.values()):
        _descend_tile(_round_tile((1,) * len(shape), shape, steps), shape, steps, measure)
    found = [(known[0], tile, known[1]) for tile, known in tried.items() if known is not None]

    def rank(item: tuple[float, Tile, TaskCost]) -> tuple[float, int, Tile]:
        predicted, tile, cost = item
        return predicted, cost.traffic * _task_count(shape, tile), tile

    return sorted(found, key=rank)


def ended_shapes(operator: ROperator, parts: Sequence[float] = PARTS) -> list[Tile]:
    """Return the operator's result shapes at ``parts`` of the longest length, or its only shape without endings."""
    ends, axes = {e.axis for e in operator.skips}, operator.anchor.axes
    if not ends:
        return [operator.anchor.shape]
    return [tuple(math.ceil(a.extent * part) if a.name in ends else a.extent for a in axes) for part in parts]


def _task_count(shape: Tile, tile: Tile) -> int:
    return math.prod([-(-extent // size) for extent, size in zip(shape, tile, strict=True)])


@lru_cache(1 << 12)
def _rounded_seeds(shape: Tile, steps: Tile, veus: int) -> list[Tile]:
    """Return the rounded seeds, sorted so that the smallest of equal ones comes first."""
    return sorted({_round_tile(t, shape, steps) for t in _seed_tiles(shape, veus)})


@lru_cache(1 << 14)  # the search repeats for operators of one shape as a group grows
def _sorted_neighbours(tile: Tile, shape: Tile, steps: Tile) -> list[Tile]:
    """Return the tiles one move away, sorted."""
    return sorted({_round_tile(t, shape, steps) for t in _iter_neighbours(tile)})


def _seed_tiles(shape: Tile, veus: int) -> Iterator[Tile]:
    """Yield tiles for about ``ROUNDS`` tasks per vEU: cut the outer axes first, the inner first, or evenly."""
    yield shape
    for rounds in ROUNDS:
        for order in (range(len(shape)), range(len(shape) - 1, -1, -1)):
            tile, want = list(shape), veus * rounds
            for d in order:
                parts = min(want, max(shape[d], 1))
                tile[d] = -(-shape[d] // parts) if parts else 1
                want = -(-want // max(1, -(-shape[d] // max(tile[d], 1))))
            yield tuple(max(1, t) for t in tile)
        even, want = list(shape), veus * rounds
        while want > 1 and max(even, default=1) > 1:
            d = max(range(len(even)), key=lambda i: (even[i], -i))
            even[d], want = -(-even[d] // 2), -(-want // 2)
        yield tuple(max(1, t) for t in even)


def _round_tile(tile: Tile, shape: Tile, steps: Tile) -> Tile:
    whole = [t if s == 1 else -(-t // s) * s for t, s in zip(tile, steps, strict=True)]
    return tuple([(t if t < n else n) or 1 for t, n in zip(whole, shape, strict=True)])


def _descend_tile(tile: Tile, shape: Tile, steps: Tile, measure: Callable[[Tile], float]) -> None:
    """Move to the best neighbour (one axis halved or doubled, or one up and one down) while it improves."""
    best = measure(tile)
    for _ in range(6):
        around = _sorted_neighbours(tile, shape, steps)
        if not around:
            return
        nearest = min(around, key=measure)
        if measure(nearest) >= best:
            return
        tile, best = nearest, measure(nearest)


def _iter_neighbours(tile: Tile) -> Iterator[Tile]:
    # Change one or two axes at a time: the moves grow with pairs of axes, not with subsets.
    for first, second in combinations(range(-1, len(tile)), 2):
        for factors in product((2, -2), repeat=1 + (first >= 0)):
            moved = list(tile)
            for d, f in zip((second, first), factors, strict=False):
                moved[d] = tile[d] * f if f > 0 else max(1, tile[d] // -f)
            yield tuple(moved)
