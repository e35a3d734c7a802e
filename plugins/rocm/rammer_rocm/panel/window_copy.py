"""Sliding windows without a copy for each tap: one padded copy of the tile's input serves all taps.

With stride 1, tap ``(kh, kw)`` of column ``(h, w)`` reads the copy at ``(h + kh) * pitch + (w + kw)``. Neighbouring columns are
neighbouring elements, so the multiplication reads the copy in place. Rows of the copy are longer than rows of the output. The few
columns between two rows are computed and dropped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from rammer.codegen import Unsuited, sides_of
from rammer.ir import expr as ex
from rammer.ir.expr import Load, integer

from rammer_rocm.panel.gather import Region
from rammer_rocm.panel.recognise import PanelProduct, dense_axes
from rammer_rocm.panel.reduction_loops import AxisWalk


@dataclass(frozen=True)
class PanelWindow:
    """The sliding window of a panel product. ``taps`` are the reduction axes that move a column axis (elements per step).
    ``spans`` is the reach of all taps of a column axis. ``channels`` are the other reduction axes."""

    p: PanelProduct
    taps: Mapping[str, tuple[str, int]]
    spans: Mapping[str, int]
    channels: tuple[str, ...]

    @property
    def pitch(self) -> int:
        """Number of elements from one row of the copy to the next."""
        inner = self.p.columns[-1]
        return self.p.tile[inner] + self.spans[inner]

    @property
    def rows(self) -> int:
        """Number of rows in the copy of a full tile."""
        outer = self.p.columns[:-1]
        return self.p.tile[outer[0]] + self.spans[outer[0]] if outer else 1

    @property
    def width(self) -> int:
        """Number of columns computed for a full tile, including those between rows."""
        outer = self.p.columns[:-1]
        return (self.p.tile[outer[0]] - 1 if outer else 0) * self.pitch + self.p.tile[self.p.columns[-1]]

    @property
    def count(self) -> int:
        """Number of copies: the product of the channels' extents."""
        return math.prod(self.p.extent[c] for c in self.channels)

    def block(self, lanes: int) -> int:
        """Return the elements between two channels: the copy and one vector of zeros, but no multiple of 4 KiB (cache sets)."""
        size = -(-self.rows * self.pitch // lanes) * lanes + lanes
        return size + lanes * (size % 1024 == 0)

    def region(self, lanes: int, walks: Mapping[str, AxisWalk] | None = None) -> Region:
        """Return the region to gather; all positions of the taps are gathered regardless of ``walks``."""
        reduced = [r for r in self.p.main.reduce if r.name in self.channels]
        steps = dense_axes(reduced)
        columns = tuple((c, f"(e_{c} + {self.spans[c]})", self.p.tile[c] + self.spans[c]) for c in self.p.columns)
        first = ex.substitute(self.p.b, {tap: integer(0) for tap in self.taps})
        if not isinstance(first, Load):
            raise Unsuited("no load")
        reduce = tuple((r.name, r.extent, steps[r.name] * self.block(lanes)) for r in reduced)
        own = {name: walk for name, walk in (walks or {}).items() if name in self.channels}
        return Region(first, reduce, columns, str(self.pitch), own)

    def steps(self, lanes: int) -> dict[str, int]:
        """Return the elements per step of each reduction axis."""
        result = {name: step for name, _, step in self.region(lanes).reduce}
        inner = self.p.columns[-1]
        for tap, (column, step) in self.taps.items():
            result[tap] = step * (1 if column == inner else self.pitch)
        return result


def window_of(p: PanelProduct) -> PanelWindow:
    """Return the window that slides over the columns of ``p``. Raises Unsuited if it has strides or more than two axes."""
    if len(p.columns) > 2 or (len(p.columns) == 2 and p.tile[p.columns[1]] != p.extent[p.columns[1]]):
        raise Unsuited("columns are not whole rows")
    taps, spans = dict[str, tuple[str, int]](), dict.fromkeys(p.columns, 0)
    tile, window = {c: p.tile[c] for c in p.columns}, {r.name: r.extent for r in p.main.reduce}
    places = (0,) * len(p.b.indices)
    for side in sides_of(p.b, tile, window, places, places):
        if not side.axes:
            continue
        if len(side.axes) > 1 or side.step != 1 or any(side.steps[r] < 0 for r in side.taps):
            raise Unsuited("columns are strided")
        taps |= {r: (side.axis, side.steps[r]) for r in side.taps}
        spans[side.axis] += side.length - tile[side.axis]
    used = [r for index in p.b.indices for r in ex.axes_of(index) if r in taps]
    if not taps or len(used) != len(taps):
        raise Unsuited("no window")
    if p.quads is not None and p.quads.axis in taps:
        raise Unsuited("taps are four bytes together")
    return PanelWindow(p, taps, spans, tuple(r.name for r in p.main.reduce if r.name not in taps))
