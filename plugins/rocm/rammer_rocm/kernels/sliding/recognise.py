"""Recognition of windows that slide over an image (depthwise convolutions and pools): dimensions, taps and epilogue maps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
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

from rammer_rocm.kernels.vector import Vector

#: Row strides that shuffles can separate, and the maximum number of taps of a window (sums are not cut into blocks).
STRIDES, MOST_TAPS = (1, 2), 256
#: Rows of outputs that are computed together, and the maximum number of terms in their unrolled sums.
ROWS, MOST_TERMS = range(1, 9), 400
CONFIGS = {"rows": ROWS}


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


@dataclass(frozen=True)
class ImageForm(WindowForm):
    """A window operator with image rows ``high`` and columns ``wide``; ``outer`` are the other axes of the result."""

    high: Slide
    wide: Slide
    outer: tuple[str, ...]

    @property
    def planes(self) -> int:
        """Number of planes of a copied image."""
        return self.high.step * self.wide.step

    @property
    def pitch(self) -> int:
        """Number of elements from one row of a plane to the next."""
        return self.wide.length

    @property
    def images(self) -> int:
        """Number of images of a full task."""
        return math.prod(self.tile[a] for a in self.outer)

    @property
    def rows(self) -> int:
        """Number of rows of outputs that are computed together."""
        return dict(self.operator.config).get("rows", 1)

    @property
    def height(self) -> int:
        """Number of rows of outputs that are computed."""
        return -(-self.high.tile // self.rows) * self.rows

    def lanes(self, most: int) -> int:
        """Return the elements of a vector: at most enough for a row of outputs."""
        return min((n for n in (4, 8, 16) if n >= self.wide.tile and n <= most), default=most)

    def sums_pitch(self, lanes: int) -> int:
        """Return the elements from one row of sums to the next."""
        return -(-self.wide.tile // lanes) * lanes

    def plane(self, lanes: int) -> int:
        """Return the elements of a plane, plus one vector because vectors are copied and read whole."""
        rows = self.high.length - self.high.tile + self.height
        return -(-(rows * self.pitch) // lanes) * lanes + lanes

    def scratch(self, lanes: int) -> int:
        """Return the bytes of an image's planes and of its sums."""
        return 4 * (self.planes * self.plane(lanes) + self.height * self.sums_pitch(lanes))

    def tiled(self, tile: Mapping[str, int], rows: int) -> ImageForm:
        """Return this form with another tile and ``rows`` rows at once."""
        sizes = tuple(tile[a.name] for a in self.main.axes)
        operator = replace(self.operator, tile=sizes, family="image", config=(("rows", rows),))
        return replace(self, operator=operator, high=_cut(self.high, tile), wide=_cut(self.wide, tile))


def _cut(slide: Slide, tile: Mapping[str, int]) -> Slide:
    return replace(slide, tile=tile.get(slide.axis, 1))


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
    for c in after:
        Vector(1, lambda load: load.tensor).value(c.body)
    x, weights = _operands(main, binding)
    return WindowForm(operator, binding, main, x, weights, after, tuple(_slides(main, x, binding)))


def image_form(operator: ROperator, binding: Binding) -> ImageForm:
    """Return the form of a tiled or untiled operator. Raises Unsuited."""
    window = window_form(operator, binding)
    main, slides, weights = window.main, window.slides, window.weights
    wide = [s for s in slides if s.axis and s.stride == 1 and s.outputs > 1]
    if len(wide) != 1 or wide[0].step not in STRIDES:
        raise Unsuited("no row of an image")
    high = [s for s in slides if s.tap and s is not wide[0]]
    if len(high) > 1:
        raise Unsuited("more than two axes of windows")
    sliding = {wide[0].axis, *(s.axis for s in high)}
    if weights is not None and ex.axes_of(weights) & sliding:
        raise Unsuited("weights that differ along the image")
    outer = tuple(a.name for a in main.axes if a.name not in sliding)
    form = ImageForm(**vars(window), high=next(iter(high), Slide()), wide=wide[0], outer=outer)
    return _placed(form) if operator.tile else form


def _placed(form: ImageForm) -> ImageForm:
    found = replace(form, high=_cut(form.high, form.tile), wide=_cut(form.wide, form.tile))
    if found.wide.tile != found.wide.outputs:
        raise Unsuited("rows of an image in parts")
    return found


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
