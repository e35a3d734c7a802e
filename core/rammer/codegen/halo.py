"""The halo of a convolution: the part of a tensor that a tile reads through its windows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rammer.codegen.task_parameters import Unsuited
from rammer.ir import expr as ex
from rammer.ir.expr import Load


@dataclass(frozen=True, slots=True)
class Side:
    """A dimension of a tensor with its ``extent`` and ``stride`` in memory, read at ``constant`` plus ``steps[axis] * axis``.
    ``axes`` are those of the tile and ``taps`` those of the window; a tile with its halo covers ``length`` elements."""

    extent: int
    stride: int
    steps: Mapping[str, int]
    constant: int
    axes: tuple[str, ...]
    taps: tuple[str, ...]
    length: int

    @property
    def axis(self) -> str:
        """The tile's axis, if at most one, or "" without an axis."""
        return self.axes[0] if self.axes else ""

    @property
    def tap(self) -> str:
        """The window's axis, if at most one, or "" without an axis."""
        return self.taps[0] if self.taps else ""

    @property
    def step(self) -> int:
        """Elements from one point of the tile to the next."""
        return self.steps.get(self.axis, 0)

    @property
    def reach(self) -> int:
        """Elements from one tap to the next."""
        return self.steps.get(self.tap, 0)


def sides_of(
    load: Load, tile: Mapping[str, int], window: Mapping[str, int], strides: Sequence[int], shape: Sequence[int]
) -> Iterator[Side]:
    """Yield the dimensions of a stored tensor that axes of a ``tile`` or of a ``window``, with their extents, index. Raises
    Unsuited if an index is not affine."""
    counts = {**tile, **window}
    for index, stride, extent in zip(load.indices, strides, shape, strict=True):
        form = ex.affine_form(index)
        if form is None:
            raise Unsuited(f"{load} is not affine")
        steps, constant = form
        axes, taps = tuple(a for a in steps if a in tile), tuple(a for a in steps if a in window)
        if axes or taps:
            yield Side(extent, stride, steps, constant, axes, taps, length_under(steps, counts))


def length_under(steps: Mapping[str, int], counts: Mapping[str, int]) -> int:
    """Return the elements of a dimension from the first to the last that are read, with ``counts`` values of each axis."""
    return 1 + sum((counts.get(a, 1) - 1) * abs(s) for a, s in steps.items())
