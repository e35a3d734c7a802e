"""The order in which a kernel walks the reduction axes: blocks of ``block`` products.

In *tap* order one axis (a convolution's channels) is cut into blocks for each value of the others (the kernel's taps). So a block
has one tap, whose address and padding tests are computed once. In *flat* order the axes form one long axis, and every element
computes its address. Flat order wastes nothing if all axes are short.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rammer.codegen.c_target import CTarget
from rammer.codegen.c_text import format_sum
from rammer.codegen.operations import spell_literal
from rammer.ir.compute import Axis, Compute
from rammer.ir.operator import ROperator

#: Tap order is chosen unless padding the axis to whole blocks costs more than this share of the products.
MOST_PADDING = 0.3


@dataclass(frozen=True)
class Stopped:
    """A reduced axis that ends early: the variable of its end, from 1 to the bound, and the definition."""

    axis: Axis
    name: str
    definition: str


@dataclass(frozen=True)
class Depth:
    """A walk of the reduction: ``outer`` axes (outermost first), the ``inner`` axis, products a block, and the order. The
    outermost axis and, in tap order, the inner one may be ``stopped`` at a length of the run; others run to the bound."""

    outer: tuple[Axis, ...]
    inner: Axis
    block: int
    flat: bool
    stopped: Mapping[str, Stopped] = field(default_factory=dict)

    @property
    def padded(self) -> int:
        """The extent of the inner axis in whole blocks (tap order), or unpadded (flat order)."""
        return self.inner.extent if self.flat else -(-self.inner.extent // self.block) * self.block

    @property
    def total(self) -> int:
        """The products for one output element, without padding."""
        return math.prod(a.extent for a in (*self.outer, self.inner))

    @property
    def per_tap(self) -> int:
        """The blocks of one tap (tap order)."""
        return -(-self.inner.extent // self.block)

    @property
    def halos(self) -> int:
        """The halos in shared memory: for the current channels and, if more follow, for those copied meanwhile."""
        return min(2, self.per_tap)

    @property
    def blocks(self) -> int:
        """The total number of blocks."""
        if self.flat:
            return -(-self.total // self.block)
        return math.prod(a.extent for a in self.outer) * self.per_tap

    def _stop_variable(self, axis: Axis) -> str:
        """Return the variable that ends an axis, or "" if the axis is walked to its bound."""
        possible = axis is self.axes[0] or (axis is self.inner and not self.flat)
        return self.stopped[axis.name].name if possible and axis.name in self.stopped else ""

    @property
    def stops(self) -> bool:
        """Return True if a run may have fewer blocks."""
        return any(map(self._stop_variable, self.axes))

    def definitions(self) -> Iterator[str]:
        """Yield statements that define the end of a run. ``deep`` is the end of the inner axis (in flat order: of all),
        ``per_tap`` the blocks of a tap, ``last`` the total blocks. The result is empty if the run ends at the bound."""
        if not self.stops:
            return
        yield from (self.stopped[a.name].definition for a in self.axes if self._stop_variable(a))
        first, below = self._stop_variable(self.axes[0]), math.prod(a.extent for a in self.axes[1:])
        if self.flat:
            yield f"const int deep = {first} * {below}, last = {ceiling_quotient('deep', self.block)};"
            return
        taps = (
            f"{first} * {math.prod(a.extent for a in self.outer[1:])}" if first else str(math.prod(a.extent for a in self.outer))
        )
        depth, per_tap = self._stop_variable(self.inner) or self.inner.extent, ceiling_quotient("deep", self.block)
        yield f"const int deep = {depth}, per_tap = {per_tap};"
        yield f"const int last = {f'{taps} * ' if self.outer else ''}per_tap;"

    @property
    def end(self) -> str:
        """The number of blocks of a run, as C text."""
        return "last" if self.stops else str(self.blocks)

    @property
    def deep(self) -> str:
        """The end of the inner axis in a run, or in flat order of all axes, as C text."""
        return "deep" if self.stops else str(self.total if self.flat else self.inner.extent)

    @property
    def per(self) -> str:
        """The blocks of a tap in a run (tap order), as C text."""
        return "per_tap" if self.stops else str(self.per_tap)

    def stored(self, kb: str) -> str:
        """Return the index of a run's block ``kb`` among the blocks of the bound, which is the packing order of constants."""
        if not self.stops or self.flat or not self.outer:
            return kb
        return f"({kb} / per_tap * {self.per_tap} + {kb} % per_tap)"

    @property
    def ragged(self) -> bool:
        """Return True if the last block (of a tap) may hold padding products."""
        return self.stops or (self.total if self.flat else self.inner.extent) % self.block > 0

    @property
    def axes(self) -> tuple[Axis, ...]:
        """All axes in the order of the walk, outermost first."""
        return (*self.outer, self.inner)


def taps_of(axes: tuple[Axis, ...], block: int) -> Depth:
    """Return the walk in tap order, along the longest axis."""
    live = [a for a in axes if a.extent > 1] or [axes[0]]
    inner = max(live, key=lambda a: a.extent)
    return Depth(tuple(a for a in live if a is not inner), inner, block, flat=False)


def depth_of(axes: tuple[Axis, ...], block: int) -> Depth:
    """Return the walk over the reduction ``axes`` in blocks of ``block``."""
    taps, live = taps_of(axes, block), [a for a in axes if a.extent > 1] or [axes[0]]
    if taps.blocks * block <= (1 + MOST_PADDING) * taps.total or not taps.outer:
        return taps
    return Depth(tuple(live[:-1]), live[-1], block, flat=True)


def stopped_axes(
    operator: ROperator, c: Compute, axes: Sequence[Axis], lengths: Mapping[str, str], target: CTarget
) -> dict[str, Stopped]:
    """Return the ``axes`` of the reduction ``c`` that stop at a length, by name. ``lengths`` are the pointers of the lengths."""
    found = dict[str, Stopped]()
    extents = {s.axis: s.extent for s in operator.reduce_bounds if s.compute == c.name}
    for number, axis in enumerate(axes):
        if axis.name in extents and axis.extent > 1:
            extent, name = extents[axis.name], f"stop{number}"
            value = format_sum([(f"{lengths[n]}[0]", f) for n, f in extent.terms], extent.offset)
            one, most = (spell_literal(target, n, "int64") for n in (1, axis.extent))
            text = f"const int {name} = (int)rm_min_i64(rm_max_i64({value}, {one}), {most});"
            found[axis.name] = Stopped(axis, name, text)
    return found


def ceiling_quotient(value: str, block: int) -> str:
    """Return C text for the number of blocks of size ``block`` that hold ``value``."""
    return value if block == 1 else f"({value} + {block - 1}) / {block}"
