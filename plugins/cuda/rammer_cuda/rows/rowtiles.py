"""Tiles for rows: the threads that share one, and the rows of a block."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from rammer.codegen import RowForm
from rammer.codegen.products import WARP
from rammer.ir.operator import ROperator

from rammer_cuda.gpu import Gpu
from rammer_cuda.kernels.frame import VECTOR
from rammer_cuda.rows.rowshape import LANES, MOST_ELEMENTS, MOST_THREADS, SIDES, PlacedRows

#: Blocks that may share a row (the largest cluster that every GPU with clusters can schedule), and the minimum length for it.
CLUSTERS, LONG = (1, 2, 4, 8), 8192
#: Target numbers of threads of a block.
BLOCKS = (64, 128, 256)


def enumerate_tilings(placed: PlacedRows, gpu: Gpu) -> Iterator[PlacedRows]:
    """Yield tilings by lanes and vectors: at most ``MOST_ELEMENTS`` per thread, and idle lanes are excluded. Blocks aim at
    ``BLOCKS`` threads. Rows that are neighbours in memory fill whole sectors if their number suffices."""
    form, unit = placed.form, placed.unit
    long = gpu.clusters and form.reductions and form.length >= LONG
    for lanes, vector, blocks in product(LANES, (VECTOR, 1), CLUSTERS if long else (1,)):
        fits = form.length % vector == 0 and -(-form.length // (lanes * blocks * vector)) * vector <= MOST_ELEMENTS
        if fits and lanes * blocks * vector < 2 * max(form.length, 2) and (blocks == 1 or lanes >= BLOCKS[-1]):
            least = unit if unit * lanes <= BLOCKS[-1] else 1
            for tile in sorted({tile_of(form, max(least, threads // lanes), unit) for threads in BLOCKS}):
                config = (("lanes", lanes), ("vector", vector), *([("blocks", blocks)] * (blocks > 1)))
                yield placed.tiled(_with_tile(form.operator, tile, config))
    for lanes, side, blocks in product(
        LANES[1:], SIDES if unit > 1 and form.reductions else (), CLUSTERS if gpu.clusters else (1,)
    ):
        fits = -(-form.length // (lanes * blocks)) <= MOST_ELEMENTS and lanes * blocks < 2 * form.length
        if fits and WARP <= lanes * side <= MOST_THREADS:
            config = (("lanes", lanes), ("side", side), *([("blocks", blocks)] * (blocks > 1)))
            yield placed.tiled(_with_tile(form.operator, tile_of(form, side, min(unit, side)), config))


def _with_tile(operator: ROperator, tile: tuple[int, ...], config: tuple[tuple[str, int], ...]) -> ROperator:
    return replace(operator, tile=tile, family="rowwise", config=config)


def tile_of(form: RowForm, rows: int, unit: int = 1) -> tuple[int, ...]:
    """Return a tile of about ``rows`` neighbouring rows: inner row axes whole, one split evenly, the outer ones 1. The split is
    in multiples of ``unit`` if possible."""
    tile = [a.extent for a in form.operator.anchor.axes]
    for d in range(len(tile) - 1, -1, -1):
        if form.row_of[d] is None:
            continue
        extent, part = tile[d], max(1, min(rows, tile[d]))
        if unit <= part < extent:
            part -= part % unit
            even = -(-extent // -(-extent // part))
            tile[d] = -(-even // unit) * unit
        else:
            tile[d] = -(-extent // -(-extent // part))
        rows //= tile[d]
        unit //= math.gcd(unit, tile[d])
    return tuple(tile)
