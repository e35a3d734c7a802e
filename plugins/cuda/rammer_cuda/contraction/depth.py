"""The order in which a kernel walks the reduction axes: blocks of ``block`` products.

In *tap* order one axis (a convolution's channels) is cut into blocks for each value of the others (the
kernel's taps), so that a block has one tap: its address and its padding tests are worked out once. In *flat* order
the axes are one long axis and every element works out its own address; it wastes nothing where no axis is long.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rammer.ir.compute import Axis

#: Tap order is taken unless padding the axis to whole blocks costs more than this share of the products.
MOST_PADDING = 0.3


@dataclass(frozen=True)
class Depth:
    """``outer`` axes (outermost first), the ``inner`` axis, products a block, and the number of blocks."""

    outer: tuple[Axis, ...]
    inner: Axis
    block: int
    flat: bool

    @property
    def padded(self) -> int:
        """Extent of the inner axis in whole blocks (tap order), or as it is (flat order)."""
        return self.inner.extent if self.flat else -(-self.inner.extent // self.block) * self.block

    @property
    def total(self) -> int:
        """Products for one output element, without padding."""
        return math.prod(a.extent for a in (*self.outer, self.inner))

    @property
    def per_tap(self) -> int:
        """Blocks of one tap (tap order)."""
        return -(-self.inner.extent // self.block)

    @property
    def blocks(self) -> int:
        """Blocks in all."""
        if self.flat:
            return -(-self.total // self.block)
        return math.prod(a.extent for a in self.outer) * self.per_tap

    @property
    def axes(self) -> tuple[Axis, ...]:
        """All axes in the order of the walk, outermost first."""
        return (*self.outer, self.inner)


def depth_of(axes: tuple[Axis, ...], block: int) -> Depth:
    """The walk over the reduction ``axes`` in blocks of ``block``."""
    live = [a for a in axes if a.extent > 1] or [axes[0]]
    inner = max(live, key=lambda a: a.extent)
    outer = tuple(a for a in live if a is not inner)
    taps = Depth(outer, inner, block, flat=False)
    if taps.blocks * block <= (1 + MOST_PADDING) * taps.total or not outer:
        return taps
    return Depth(tuple(live[:-1]), live[-1], block, flat=True)
