"""Candidate tiles of a product, and the product at the lengths at which it is priced."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import product

from rammer.ir.at_length import shrink_to_parts
from rammer.ir.compute import Compute
from rammer.ir.operator import ROperator

#: Row tiles that are tried (elements), and the range of column tiles.
ROWS = (8, 16, 32, 64, 128)
FEWEST_COLUMNS, MOST_COLUMNS = 12, 132
#: Maximum number of even parts of an axis that are tried.
PARTS = 24
#: For tiles of several partial rows: the minimum elements of a row (32 bytes of float32, read together). FULLER: the minimum
#: ratio of their filled fraction to that of the fullest other tile. The cost was not fitted to these tiles. Their predictions are
#: 0.14 off in the mean.
LEAST_WIDE, FULLER = 8, 1.25


def at_lengths(main: Compute, operator: ROperator, parts: Sequence[float]) -> list[Compute]:
    """Return the product at each of ``parts`` of the longest length, at which it is priced; a static product alone."""
    found = [o.computes for o in shrink_to_parts(operator, parts)]
    return [main if cs == operator.computes else next((c for c in cs if c.name == main.name), main) for cs in found]


def task_count(shape: tuple[int, ...], tile: tuple[int, ...]) -> int:
    """Return the number of tasks of a product of this shape."""
    return math.prod(-(-extent // t) for extent, t in zip(shape, tile, strict=True))


@lru_cache(256)
def alike_tiles(
    shape: tuple[int, ...],
    rows: tuple[int, ...],
    columns: tuple[int, ...],
    groups: frozenset[int],
    lengths: tuple[tuple[int, ...], ...],
) -> dict[tuple[int, ...], list[tuple[int, ...]]]:
    """Return tiles grouped by rows, columns and tasks at each of ``lengths``, on which a prediction depends. Tiles divide the
    full shape or the shape at the last length. Several families share the cached result."""
    alike: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for tile in sorted({*_enumerate_tiles(shape, rows, columns, groups), *_enumerate_tiles(lengths[-1], rows, columns, groups)}):
        height, width = (math.prod(tile[d] for d in side) for side in (rows, columns))
        alike.setdefault((height, width, *(task_count(s, tile) for s in lengths)), []).append(tile)
    return alike


def _enumerate_tiles(
    shape: tuple[int, ...], rows: tuple[int, ...], columns: tuple[int, ...], groups: frozenset[int]
) -> list[tuple[int, ...]]:
    """Return row tiles near ``ROWS`` combined with column tiles; axes in neither group have tile 1."""
    tall = tile_parts([shape[d] for d in rows], ROWS[0], ROWS[-1], groups)
    wide = tile_parts([shape[d] for d in columns], FEWEST_COLUMNS, MOST_COLUMNS, frozenset())
    return sorted({one_tile(len(shape), (*rows, *columns), (*row, *column)) for row, column in product(tall, wide)})


def one_tile(rank: int, axes: Sequence[int], extents: Sequence[int]) -> tuple[int, ...]:
    """Return the tile of these extents along ``axes``, and of 1 along all others."""
    tile = [1] * rank
    for d, extent in zip(axes, extents, strict=True):
        tile[d] = extent
    return tuple(tile)


def tile_parts(extents: Sequence[int], fewest: int, most: int, groups: frozenset[int]) -> list[tuple[int, ...]]:
    """Return tiles of a flattened group of axes: inner axes whole, one axis split, the outer ones 1."""
    if not extents:
        return [()]
    found = set[tuple[int, ...]]()
    below = 1
    for k in range(len(extents) - 1, -1, -1):
        for size in _tile_sizes(extents[k], groups if k == 0 else frozenset()):
            if below * size <= most and (below * size >= fewest or math.prod(extents) == below * size):
                found.add((*([1] * k), size, *extents[k + 1 :]))
        below *= extents[k]
    return sorted(found) or [tuple([1] * (len(extents) - 1) + [min(extents[-1], most)])]


def filled_fraction(extents: Sequence[int], tile: Sequence[int], group: int) -> float:
    """Return the fraction of positions that hold elements if tiles are padded to multiples of ``group``."""
    size = math.prod(tile)
    return math.prod(extents) / (task_count(tuple(extents), tuple(tile)) * -(-size // group) * group)


def patch_tiles(extents: Sequence[int], group: int, most: int, others: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Return tiles of several partial rows, of up to ``most`` elements, if ``others`` leave much of their groups empty. A row of
    86 needs two groups of 64, and a piece of 5 x 12 needs one. Of tiles with equal groups and tasks, the squarest is returned."""
    if len(extents) < 2 or not others:
        return []
    high, wide = extents[-2:]
    least = FULLER * max(filled_fraction(extents, t, group) for t in others)
    found = dict[tuple[int, int], tuple[int, ...]]()
    for h, groups in product({-(-high // n) for n in range(1, high)}, range(1, most // group + 1)):
        w = groups * group // h
        w = -(-wide // -(-wide // w)) if w else 0
        if not LEAST_WIDE <= w < wide:
            continue
        tile = (*([1] * (len(extents) - 2)), h, w)
        if filled_fraction(extents, tile, group) >= least:
            key = -(-math.prod(tile) // group), task_count(tuple(extents), tile)
            found[key] = min(found.get(key, tile), tile, key=sum)
    return sorted(found.values())


def _tile_sizes(extent: int, groups: frozenset[int]) -> list[int]:
    """Return tile sizes along an axis: even parts (long axes in multiples of 8), powers of two; only divisors of ``groups``."""
    even = {-(-extent // n) for n in range(1, min(extent, PARTS) + 1)}
    if extent > MOST_COLUMNS and not groups:
        even = {-(-s // 8) * 8 for s in even}
    return sorted(s for s in even | {s for s in ROWS if s < extent} if all(g % s == 0 for g in groups))
