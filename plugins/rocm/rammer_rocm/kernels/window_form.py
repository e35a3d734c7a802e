"""Recognition of windows that slide over an image: dimensions, taps and epilogue maps."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

from rammer.codegen import Unsuited, check_followers, is_length
from rammer.codegen.vector_text import STORED
from rammer.device.manifest import Binding
from rammer.ir import expr as ex
from rammer.ir.compute import Compute, contraction_operands
from rammer.ir.expr import Load
from rammer.ir.operator import ROperator

from rammer_rocm.kernels.vector import check_maps

#: Maximum number of taps of a window (sums are not cut into blocks).
MOST_TAPS = 256


@dataclass(frozen=True, slots=True)
class Slide:
    """A dimension of the image, read at ``first + step * axis + reach * tap``. It has ``extent`` elements at stride ``stride``.
    ``outputs`` is the axis's extent, and ``tile`` its extent in a task."""

    axis: str = ""
    outputs: int = 1
    tile: int = 1
    step: int = 1
    tap: str = ""
    taps: int = 1
    reach: int = 0
    first: int = 0
    extent: int = 1
    stride: int = 0

    @property
    def staged(self) -> int:
        """Number of elements under a tile, including its halo."""
        return (self.tile - 1) * self.step + (self.taps - 1) * self.reach + 1

    @property
    def length(self) -> int:
        """Number of elements of one plane along this dimension: every ``step``-th staged element."""
        return self.tile + (self.taps - 1) * self.reach // self.step

    def shared(self, outputs: int) -> dict[tuple[int, int], list[tuple[int, int]]]:
        """Map each (plane, position) that ``outputs`` neighbouring outputs read to its (output, tap) pairs."""
        found = dict[tuple[int, int], list[tuple[int, int]]]()
        for j, tap in product(range(outputs), range(self.taps)):
            place, plane = divmod(tap * self.reach, self.step)
            found.setdefault((plane, place + j), []).append((j, tap))
        return found


@dataclass(frozen=True)
class WindowForm:
    """An operator of windows on images: ``x`` is the image's load, and ``weights`` a constant's load or None. ``after`` are the
    epilogue maps, ``slides`` the image's dimensions."""

    operator: ROperator
    binding: Binding
    main: Compute
    x: Load
    weights: Load | None
    after: tuple[Compute, ...]
    slides: tuple[Slide, ...]

    @cached_property
    def tile(self) -> dict[str, int]:
        """Tile size by axis name."""
        return {a.name: t for a, t in zip(self.main.axes, self.operator.tile, strict=True)}


def window_form(operator: ROperator, binding: Binding) -> WindowForm:
    """Return the windows of an operator and their epilogue maps. Raises Unsuited."""
    main, after = operator.main, operator.computes[1:]
    if operator.computes[0] is not main or operator.skips or 0 in main.shape:
        raise Unsuited("more than windows and the maps after them")
    if operator.anchor.shape != main.shape or not 1 <= math.prod(r.extent for r in main.reduce) <= MOST_TAPS:
        raise Unsuited("no short window")
    check_followers(main, after)
    names = (*operator.inputs, *(c.name for c in operator.computes))
    if not {binding.types[n].dtype for n in names if not is_length(n, binding)} <= STORED.keys():
        raise Unsuited("no floats")
    check_maps(operator)
    x, weights = _operands(main, binding)
    return WindowForm(operator, binding, main, x, weights, after, tuple(_slides(main, x, binding)))


def _operands(main: Compute, binding: Binding) -> tuple[Load, Load | None]:
    """Return the load of the image and that of the weights."""
    operands = contraction_operands(main)
    if operands is None:
        if not isinstance(main.body, Load) or main.combiner not in ("sum", "max"):
            raise Unsuited("no window of one image")
        return main.body, None
    known = [o for o in operands if o.tensor in binding.constants and o.fill is None]
    taps = {r.name for r in main.reduce if r.extent > 1}
    if len(known) != 1 or not ex.axes_of(known[0]) >= taps:
        raise Unsuited("no known weights")
    return operands[operands[0] is known[0]], known[0]


def _slides(main: Compute, x: Load, binding: Binding) -> Iterator[Slide]:
    """Yield the dimensions of the image.

    Raises Unsuited unless each is read along at most one result axis and one window axis."""
    axes, taps = ({a.name: a.extent for a in group if a.extent > 1} for group in (main.axes, main.reduce))
    storage, shape, seen = binding.storages[x.tensor], binding.types[x.tensor].shape, list[str]()
    for index, stride, extent in zip(x.indices, storage.strides, shape, strict=True):
        form = ex.affine_form(index)
        if form is None:
            raise Unsuited(f"{x} is not affine")
        along, over = ([n for n in form[0] if n in group] for group in (axes, taps))
        if len(along) > 1 or len(over) > len(along) or any(f <= 0 for f in form[0].values()):
            raise Unsuited("no window that slides along one axis")
        seen += along + over
        slide = Slide(first=form[1], extent=extent, stride=stride)
        for axis in along:
            slide = replace(slide, axis=axis, outputs=axes[axis], tile=axes[axis], step=form[0][axis])
        for tap in over:
            slide = replace(slide, tap=tap, taps=taps[tap], reach=form[0][tap])
        if not over and not (along and stride == 1) and not _inside(slide):
            raise Unsuited("padding outside the image")
        yield slide
    if len(seen) != len(set(seen)) or not taps.keys() <= set(seen):
        raise Unsuited("an axis runs through no dimension or through several")


def _inside(slide: Slide) -> bool:
    return slide.first >= 0 and slide.first + slide.staged <= slide.extent
