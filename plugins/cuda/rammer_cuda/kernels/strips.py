"""The division of a task's tile among its threads: equal strips of neighbouring elements along every axis."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from rammer.codegen import canonicalise_sum
from rammer.ir.expr import Expr, integer, make_add
from rammer.ir.operator import ROperator

from rammer_cuda.kernels.frame import Frame


@dataclass(frozen=True)
class Strips:
    """Strips of ``sizes`` elements (one number per axis of the anchor) over the tile of ``operator``.

    Neighbouring strips are neighbours along the last axis of ``order``, a permutation of the axes ((): their own order)."""

    operator: ROperator
    sizes: tuple[int, ...]
    order: tuple[int, ...] = ()

    @property
    def fits(self) -> bool:
        """True if a strip is at most as long as the tile along every axis."""
        return all(s <= t for s, t in zip(self.sizes, self.operator.tile, strict=True))

    @property
    def each(self) -> int:
        """Elements of a strip."""
        return math.prod(self.sizes)

    @property
    def along(self) -> list[int]:
        """Strips of a task along every axis."""
        return [-(-t // s) for t, s in zip(self.operator.tile, self.sizes, strict=True)]

    @property
    def count(self) -> int:
        """The number of strips of a task."""
        return math.prod(self.along)

    def base(self, frame: Frame, number: str) -> list[Expr]:
        """Define variables ``x0, x1, ...``: the first element of strip ``number``. Strips past the tensor's end are moved back to
        end on it."""
        axes, along = self.operator.anchor.axes, self.along
        result: list[Expr] = [integer(0)] * len(axes)
        below, first = self.count, True
        for d in self.order or range(len(axes)):
            axis, count = axes[d], along[d]
            below //= count
            if axis.extent == self.sizes[d]:
                continue
            text = f"{number} / {below}" if below > 1 else number
            parts = [] if self.operator.grid[d] == 1 else [f"o{d}"]
            if count > 1:
                digit = text if first else f"{text} % {count}"
                parts.append(f"{digit} * {self.sizes[d]}" if self.sizes[d] > 1 else digit)
            first = first and count == 1
            start = " + ".join(parts) or "0"
            if self.moved(d):
                start = f"min({start}, {axis.extent - self.sizes[d]})"
            ref = frame.variable(f"x{d}", start, axis.extent)
            frame.unit.ranges[ref.axis] = (0, axis.extent - self.sizes[d])
            result[d] = ref
        return result

    def points(self, base: list[Expr]) -> list[tuple[Expr, ...]]:
        """Return the elements of the strip that starts at ``base``, row by row."""
        shifts = itertools.product(*(range(s) for s in self.sizes))
        return [tuple(canonicalise_sum(make_add(b, i)) for b, i in zip(base, shift, strict=True)) for shift in shifts]

    def moved(self, d: int) -> bool:
        """Return True if a strip along axis ``d`` may extend past the tensor's end."""
        tile, extent = self.operator.tile[d], self.operator.anchor.axes[d].extent
        return extent > self.sizes[d] and bool(tile % self.sizes[d] or extent % tile)

    def own(self, frame: Frame, point: tuple[Expr, ...]) -> list[str]:
        """Return the tests that ``point`` belongs to the task. Strips that were moved back or extend past the tile hold elements
        of other tasks."""
        tests = []
        for d, (tile, count) in enumerate(zip(self.operator.tile, self.operator.grid, strict=True)):
            if count > 1 and self.moved(d):
                text = frame.unit.index(point[d]).text
                tests += [f"{text} >= o{d}", f"{text} < o{d} + {tile}"]
        return tests
