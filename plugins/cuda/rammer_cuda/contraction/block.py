"""The block of threads that computes a task's tile: its sizes, from an operator's config and tile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rammer.codegen import Unsuited

#: Rows (or columns) of a warpgroup's product, threads of a warpgroup, and most columns (or rows) of the other operand of
#: float32: 128 results and as many partial sums a thread would not fit its registers.
GROUP, THREADS, MOST = 64, 128, 128


@dataclass(frozen=True, slots=True)
class Shape:
    """Tile sizes of one block, or of many as arrays: rows, columns, products, register tile, buffers, splits and slices. With
    ``tensor`` a warp accumulates ``tm x tn`` fragments of 16 x 8 on the tensor cores. With ``halo``, a convolution's input is
    staged with its halo."""

    bm: Any
    bn: Any
    bk: Any
    tm: Any
    tn: Any
    stages: Any
    split_k: Any
    slice_k: Any
    tensor: bool = False
    halo: bool = False

    @property
    def group(self) -> Any:
        """The threads that accumulate one slice."""
        if self.tensor:
            return self.bm // (16 * self.tm) * (self.bn // (8 * self.tn)) * 32
        return self.bm // self.tm * (self.bn // self.tn)

    @property
    def works(self) -> Any:
        """The threads that accumulate."""
        return self.group * self.slice_k

    @property
    def threads(self) -> Any:
        """The threads of the block: whole warps."""
        return -(-self.works // 32) * 32


def shape_of(rows: Any, width: Any, config: Mapping[str, Any], tensor: bool = False) -> Shape:
    """Return the block, or an array of blocks, of a task of ``rows x width`` under an operator's config."""
    tm, tn = config.get("tm", 4), config.get("tn", 4)
    # For threads, rows in pairs of register tiles, since neighbouring threads compute neighbouring rows.
    high, wide = (16 * tm, 8 * tn) if tensor else (2 * tm, tn)
    return Shape(
        -(-rows // high) * high,
        -(-width // wide) * wide,
        config.get("bk", 16),
        tm,
        tn,
        config.get("stages", 3),
        config.get("split_k", 1),
        config.get("slice_k", 1),
        tensor,
        bool(config.get("halo", 0)),
    )


@dataclass(frozen=True, slots=True)
class WarpgroupShape(Shape):
    """A block of warpgroups. With ``down``, a warpgroup's 64 are the tile's rows, otherwise its columns. ``producers`` warpgroups
    only copy."""

    down: bool = False
    producers: int = 1

    @property
    def group(self) -> Any:
        """The threads that multiply: a warpgroup for every ``GROUP`` rows (or columns)."""
        return self.through // GROUP * THREADS

    @property
    def through(self) -> Any:
        """The extent of the side that warpgroups divide."""
        return self.bm if self.down else self.bn

    @property
    def fixed(self) -> Any:
        """The extent of the undivided side."""
        return self.bn if self.down else self.bm

    @property
    def threads(self) -> Any:
        """The threads of the block, including the warpgroups that copy."""
        return self.group + THREADS * self.producers

    @property
    def ahead(self) -> Any:
        """The blocks that a copying warpgroup starts before it waits for the first of them."""
        return (self.stages - 2) // self.producers


def warpgroup_shape(
    rows: int, width: int, config: dict[str, int], down: bool, most: int = MOST, sixteens: bool = False
) -> WarpgroupShape:
    """Return the block of a task of ``rows x width``. Raise Unsuited if the undivided side is longer than ``most``. With
    ``sixteens``, the undivided side of an instruction is at most 24 elements or a multiple of 16."""
    through, fixed = (rows, width) if down else (width, rows)
    through, fixed = -(-through // GROUP) * GROUP, -(-fixed // 8) * 8
    fixed = -(-fixed // 16) * 16 if sixteens and fixed > 24 else fixed
    if fixed > most:
        raise Unsuited(f"{fixed} results of a thread's row")
    bm, bn = (through, fixed) if down else (fixed, through)
    return WarpgroupShape(
        bm,
        bn,
        config.get("bk", 32),
        1,
        fixed // 2,
        config.get("stages", 3),
        config.get("split_k", 1),
        1,
        False,
        bool(config.get("halo", 0)),
        down,
        config.get("producers", 1),
    )
