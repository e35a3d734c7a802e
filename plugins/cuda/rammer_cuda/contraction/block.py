"""The block of warpgroups that computes a task's tile: its sizes, from an operator's config and tile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rammer.codegen import Unsuited
from rammer.codegen.products import Shape

#: Rows (or columns) of a warpgroup's product, threads of a warpgroup, and most columns (or rows) of the other operand of
#: float32: 128 results and as many partial sums a thread would not fit its registers.
GROUP, THREADS, MOST = 64, 128, 128


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
        down=down,
        halo=bool(config.get("halo", 0)),
        producers=config.get("producers", 1),
    )
