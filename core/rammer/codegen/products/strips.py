"""The division of a task's tile among its threads: equal strips of neighbouring elements along every axis."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from rammer.codegen.context import FunctionContext, Place
from rammer.codegen.scalar import Block
from rammer.codegen.symbolic_bounds import canonicalise_sum
from rammer.device.manifest import Binding
from rammer.ir.expr import Expr, Load, Ref, integer, make_add
from rammer.ir.operator import ROperator
from rammer.ir.types import itemsize

Code = TypeVar("Code", covariant=True)


class Frame(Protocol[Code]):
    """A kernel under construction whose ``threads`` threads are numbered ``tid``. ``block`` collects the statements; its task
    begins at ``o0, o1, ...`` along the anchor's axes."""

    block: Block
    unit: FunctionContext
    places: dict[str, Place]
    threads: int

    def line(self, text: str) -> None:
        """Write one statement to the kernel."""
        ...

    def variable(self, name: str, text: str, extent: int) -> Ref:
        """Define an integer variable in ``[0, extent)``."""
        ...

    def constants(self, loads: Sequence[Load]) -> list[Load]:
        """Return the ``loads`` that read values known at compile time."""
        ...

    def kernel(self, prefix: str) -> Code:
        """Return the finished kernel; its name is ``prefix`` and a hash of the text."""
        ...


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

    def base(self, frame: Frame[object], number: str) -> list[Expr]:
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

    def own(self, frame: Frame[object], point: tuple[Expr, ...]) -> list[str]:
        """Return the tests that ``point`` belongs to the task. Strips that were moved back or extend past the tile hold elements
        of other tasks."""
        tests = []
        for d, (tile, count) in enumerate(zip(self.operator.tile, self.operator.grid, strict=True)):
            if count > 1 and self.moved(d):
                text = frame.unit.index(point[d]).text
                tests += [f"{text} >= o{d}", f"{text} < o{d} + {tile}"]
        return tests


def contiguous_tile(shape: Sequence[int], size: int, multiples: Sequence[int] = ()) -> tuple[int, ...]:
    """Return a contiguous tile of about ``size`` elements: inner axes whole, one split evenly, outer ones 1. The split axis gets
    a multiple of its entry in ``multiples`` (or the whole extent)."""
    tile, below = [1] * len(shape), 1
    for d in range(len(shape) - 1, -1, -1):
        if below * shape[d] <= size:
            tile[d] = shape[d]
            below *= shape[d]
            continue
        part, step = -(-shape[d] // -(-shape[d] * below // size)), multiples[d] if multiples else 1
        tile[d] = min(shape[d], -(-part // step) * step)
        break
    return tuple(tile)


def moved_bytes(operator: ROperator, binding: Binding) -> int:
    """Return the bytes that all tasks read and write, each element once. A tensor with data-dependent indices counts as many
    elements as it has reads, at most all."""
    read: dict[str, int] = {}
    for c in operator.computes:
        for load in c.loads:
            read[load.tensor] = read.get(load.tensor, 0) + c.points
    own = sum(binding.types[n].nbytes for n in operator.outputs)
    return own + sum(min(binding.types[n].nbytes, read[n] * itemsize(binding.types[n].dtype)) for n in operator.inputs)
