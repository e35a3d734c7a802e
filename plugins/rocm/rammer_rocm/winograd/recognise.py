"""Recognition of 3 x 3 convolutions for Winograd's F(2x2, 3x3): their axes and task sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from rammer.codegen import Unsuited, check_followers, is_length
from rammer.codegen.vector_text import STORED
from rammer.device.manifest import Binding
from rammer.ir import expr as ex
from rammer.ir.compute import Compute, contraction_operands
from rammer.ir.expr import Load
from rammer.ir.extent import AffineExtent
from rammer.ir.operator import ROperator

from rammer_rocm.kernels.vector import check_maps
from rammer_rocm.kernels.window_form import Slide, WindowForm
from rammer_rocm.panel.recognise import ended_axes

#: Outputs of a square along each side, taps, and inputs under them; number of positions of a square's inputs.
SIDE, TAPS, UNDER = 2, 3, 4
PLACES = UNDER * UNDER
#: With fewer channels, sums have few terms. If all of these are 0 or padding, an error that scales with other weights would be
#: visible.
LEAST_CHANNELS = 16


@dataclass(frozen=True)
class WinogradForm(WindowForm):
    """A convolution of 3 x 3 with feature axis ``row`` and channel axis ``channel``. ``high`` and ``wide`` are the image's
    dimensions, the only ones in ``slides``. ``outer`` are the axes of images."""

    row: str
    channel: str
    high: Slide
    wide: Slide
    outer: tuple[str, ...]

    @property
    def kernel(self) -> Load:
        """The load of the weights."""
        assert self.weights is not None
        return self.weights

    @property
    def mr(self) -> int:
        """Number of features of a register tile."""
        return dict(self.operator.config).get("mr", 8)

    @property
    def nv(self) -> int:
        """Number of vectors of squares in a register tile."""
        return dict(self.operator.config).get("nv", 2)

    @property
    def channels(self) -> int:
        """Number of channels that are summed."""
        return next(r.extent for r in self.main.reduce if r.name == self.channel)

    @property
    def images(self) -> int:
        """Number of images of a full task."""
        return math.prod(self.tile[a] for a in self.outer)

    @property
    def down(self) -> int:
        """Number of rows of squares per image of a full task."""
        return -(-self.tile[self.high.axis] // SIDE)

    @property
    def across(self) -> int:
        """Number of squares in a row."""
        return -(-self.wide.outputs // SIDE)

    @property
    def squares(self) -> int:
        """Number of squares of a full task."""
        return self.images * self.down * self.across

    def pitch(self, lanes: int) -> int:
        """Return the elements of a row of the copied image: whole vectors of squares, and the excess that is read."""
        return SIDE * lanes * -(-self.across // lanes) + lanes

    def image(self, lanes: int) -> int:
        """Return the elements of the copied image of a channel."""
        return (SIDE * self.down + TAPS - 1) * self.pitch(lanes) + lanes

    def line(self, lanes: int) -> int:
        """Return the elements of a panel's row, plus one vector because vectors are written whole."""
        return -(-self.squares // lanes) * lanes + lanes

    def panel(self, lanes: int) -> int:
        """Return the elements from one position's panel to the next: no multiple of 4 KiB (cache sets)."""
        return self.channels * self.line(lanes) + lanes

    def scratch(self, lanes: int) -> int:
        """Return the bytes of the copied image, the panels, and the products and outputs of some features."""
        products = PLACES * self.mr * self.line(lanes)
        return 4 * (self.image(lanes) + PLACES * self.panel(lanes) + products + SIDE * self.pitch(lanes))

    @property
    def ends(self) -> dict[str, AffineExtent]:
        """The ends of images in a ranged program, by axis."""
        return ended_axes(self.operator)

    def tiled(self, tile: Mapping[str, int], mr: int, nv: int) -> WinogradForm:
        """Return this form with another tile, ``mr`` features and ``nv`` vectors at once."""
        sizes = tuple(tile[a.name] for a in self.main.axes)
        made = replace(self.operator, tile=sizes, family="winograd", config=(("mr", mr), ("nv", nv)))
        return replace(self, operator=made)


def winograd_form(operator: ROperator, binding: Binding) -> WinogradForm:
    """Return the form of a tiled or untiled operator. Raises Unsuited."""
    main, after = operator.main, operator.computes[1:]
    operands = contraction_operands(main) if operator.computes[0] is main and main.kind == "contraction" else None
    if operands is None or operator.reduce_bounds or 0 in main.shape or operator.anchor.shape != main.shape:
        raise Unsuited("more than a product and the maps after it")
    check_followers(main, after)
    check_maps(operator)
    names = (*operator.inputs, *(c.name for c in operator.computes))
    if not {binding.types[n].dtype for n in names if not is_length(n, binding)} <= STORED.keys():
        raise Unsuited("no floats")
    known = [o for o in operands if o.tensor in binding.constants and o.fill is None]
    if len(known) != 1:
        raise Unsuited("no known weights")
    weights, x = known[0], operands[operands[0] is known[0]]
    if x.fill not in (None, 0, 0.0):
        raise Unsuited("padding with a value other than 0")
    high, wide, channel = _image(main, x, binding)
    if math.prod(r.extent for r in main.reduce if r.name == channel) < LEAST_CHANNELS:
        raise Unsuited("few channels")
    rows = [a.name for a in main.axes if a.name in ex.axes_of(weights)]
    summed = {r.name for r in main.reduce if r.extent > 1 or r.name == channel}
    if len(rows) != 1 or rows[0] in ex.axes_of(x) or summed != {channel, high.tap, wide.tap}:
        raise Unsuited("no convolution of one group")
    outer = tuple(a.name for a in main.axes if a.name not in (*rows, high.axis, wide.axis))
    if any(axis not in outer for axis in ended_axes(operator)):
        raise Unsuited("images with a dynamic end")
    window = WindowForm(operator, binding, main, x, weights, after, (high, wide))
    form = WinogradForm(**vars(window), row=rows[0], channel=channel, high=high, wide=wide, outer=outer)
    if operator.tile:
        _check_tile(form)
    return form


def _check_tile(form: WinogradForm) -> None:
    high = form.tile[form.high.axis]
    if form.tile[form.wide.axis] != form.wide.outputs or (high % SIDE and high != form.high.outputs):
        raise Unsuited("squares in parts")


def _image(main: Compute, x: Load, binding: Binding) -> tuple[Slide, Slide, str]:
    """Return the image's rows and columns, and the channel axis. Raises Unsuited unless all other dimensions are read inside the
    tensor."""
    axes, reduce = ({a.name: a.extent for a in group if a.extent > 1} for group in (main.axes, main.reduce))
    storage, shape = binding.storages[x.tensor], binding.types[x.tensor].shape
    slides, channels = list[Slide](), list[str]()
    for index, stride, extent in zip(x.indices, storage.strides, shape, strict=True):
        form = ex.affine_form(index)
        if form is None:
            raise Unsuited(f"{x} is not affine")
        along, over = ([n for n in form[0] if n in group] for group in (axes, reduce))
        if along and over:
            steps = {form[0][n] for n in (*along, *over)}
            if len(along) > 1 or len(over) > 1 or steps != {1} or reduce[over[0]] != TAPS:
                raise Unsuited("a window other than 3, or with a stride")
            outputs = axes[along[0]]
            slides.append(Slide(along[0], outputs, outputs, 1, over[0], TAPS, 1, form[1], extent, stride))
            continue
        channels += over
        reach = sum(f * ({**axes, **reduce}[n] - 1) for n, f in form[0].items() if n in (*along, *over))
        if min(form[0].values(), default=1) < 0 or form[1] < 0 or form[1] + reach >= extent:
            raise Unsuited("padding outside the image")
    if len(slides) != 2 or slides[1].stride != 1 or len(channels) != 1:
        raise Unsuited("the image is not stored channels first")
    return slides[0], slides[1], channels[0]
