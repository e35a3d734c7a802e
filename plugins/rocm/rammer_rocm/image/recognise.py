"""Recognition of windows over images whose columns are contiguous: image rows, columns and task sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from rammer.codegen import Unsuited
from rammer.device.manifest import Binding
from rammer.ir import expr as ex
from rammer.ir.operator import ROperator

from rammer_rocm.kernels.window_form import Slide, WindowForm, window_form

#: Row strides that shuffles can separate.
STRIDES = (1, 2)
#: Rows of outputs that are computed together, and the maximum number of terms in their unrolled sums.
ROWS, MOST_TERMS = range(1, 9), 400
CONFIGS = {"rows": ROWS}


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
