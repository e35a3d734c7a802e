"""The block of threads that computes a task's tile: its sizes, from an operator's config and tile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


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
    items: int = 0
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
        """The threads of the block: ``items``, or whole warps."""
        return self.items or -(-self.works // 32) * 32


def shape_of(rows: Any, width: Any, config: Mapping[str, Any], tensor: bool = False, items: int = 0) -> Shape:
    """Return the block, or an array of blocks, of a task of ``rows x width`` under an operator's config. It has ``items``
    threads, or as many warps as it needs (0)."""
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
        items,
        bool(config.get("halo", 0)),
    )
