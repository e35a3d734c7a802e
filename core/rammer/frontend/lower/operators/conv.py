"""Conv and ConvTranspose, in any number of spatial dimensions.

Both are one contraction and, with a bias, a map. A transposed convolution of stride ``s`` is computed by phase: output position
``q*s + r`` uses only the taps ``s*t + r``. With separate axes ``q`` and ``r`` it is a contraction without wasted multiplications.
Its operands share no output axis, and the result already has the output's layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rammer.frontend.lower.lowering_registry import Lowering, lowering
from rammer.frontend.lower.sliding_windows import spatial_names, window_of
from rammer.frontend.lower.window_extents import transposed_of
from rammer.ir import expr as ex
from rammer.ir.compute import Axis
from rammer.ir.expr import Expr, Load, Op


@lowering("Conv")
def lower_conv(ctx: Lowering) -> None:
    """Lower Conv: ``y[n,m,..] = sum[c,k..] x[n, g(m)*cg + c, window] * w[m,c,k..] (+ b[m])``."""
    x, w = ctx.input(0), ctx.input(1)
    batch, _, *source = ctx.shape(x)
    features, per_group, *kernel = ctx.shape(w)
    group = int(ctx.attr("group", 1))
    whole = window_of(ctx, source, kernel)
    window, first = (whole, (0,) * len(kernel)) if ctx.ranged else whole.touching()
    channel = ex.as_index("c" if per_group != 1 else 0)
    if group > 1:
        channel = ex.make_add(ex.make_mul(ex.make_floordiv("m", features // group), per_group), channel)
    axes = (Axis("n", batch), Axis("m", features), *window.axes)
    reduce = (*([Axis("c", per_group)] if per_group != 1 else []), *window.taps)
    taps = (ex.make_add(tap, start) for tap, start in zip(window.tap_indices, first, strict=True))
    weight = ctx.load(w, "m", "c" if per_group != 1 else 0, *taps)
    body = Op("mul", (window.load(x, ("n", channel), 0.0), weight))
    _emit_with_bias(ctx, axes, body, reduce)


def _emit_with_bias(ctx: Lowering, axes: Sequence[Axis], body: Expr, reduce: Sequence[Axis]) -> None:
    """Emit the contraction and, if present, the bias (input 2) as a separate map."""
    biased = ctx.has(2)
    total = ctx.emit(axes, body, reduce, "sum" if reduce else None, into="conv" if biased else 0)
    if biased:
        _emit_bias(ctx, axes, ctx.load(total, *[a.name for a in axes]))


def _emit_bias(ctx: Lowering, axes: Sequence[Axis], value: Load) -> None:
    ctx.emit(axes, Op("add", (value, ctx.load(ctx.input(2), "m"))), into=0)


@dataclass(frozen=True)
class _Spread:
    """A spatial dimension of a transposed convolution (elements). With dilation 1 the kernel is split into ``stride`` phases of
    ``taps`` taps. Otherwise the input is zero-stuffed first (``stuffed``) and the window slides over it with stride 1."""

    name: str
    source: int
    out: int
    kernel: int
    stride: int
    dilation: int
    begin: int

    @property
    def phases(self) -> int:
        return self.stride if self.dilation == 1 else 1

    @property
    def taps(self) -> int:
        return -(-self.kernel // self.phases)

    @property
    def extent(self) -> int:
        """The extent of the input that the contraction reads."""
        return self.source if self.dilation == 1 or not self.source else (self.source - 1) * self.stride + 1

    @property
    def positions(self) -> int:
        """The number of whole phase groups covering ``[0, begin + out)``; the cropped head is computed, too."""
        return self.out if self.phases == 1 else -(-(self.begin + self.out) // self.phases)

    @property
    def axes(self) -> tuple[Axis, ...]:
        quotient = Axis(self.name, self.positions)
        return (quotient,) if self.phases == 1 else (quotient, Axis(f"r{self.name}", self.phases))

    @property
    def tap_axis(self) -> tuple[Axis, ...]:
        return (Axis(f"k{self.name}", self.taps),) if self.taps > 1 else ()

    @property
    def tap(self) -> Expr:
        return ex.as_index(f"k{self.name}" if self.taps > 1 else 0)

    @property
    def source_index(self) -> Expr:
        shift = self.begin if self.phases == 1 else 0
        return ex.make_add(ex.make_add(self.name, ex.make_mul(self.tap, -self.dilation)), shift)

    @property
    def weight_index(self) -> Expr:
        return self.tap if self.phases == 1 else ex.make_add(ex.make_mul(self.tap, self.stride), f"r{self.name}")

    @property
    def gather(self) -> tuple[Expr, ...]:
        """The indices of the phase-split result for output position ``name``."""
        if self.phases == 1:
            return (ex.as_index(self.name),)
        position = ex.make_add(self.name, self.begin)
        return ex.make_floordiv(position, self.phases), ex.make_mod(position, self.phases)

    @property
    def reads_outside(self) -> bool:
        shift = self.begin if self.phases == 1 else 0
        return shift < (self.taps - 1) * self.dilation or self.positions - 1 + shift >= self.extent

    @property
    def weights_outside(self) -> bool:
        return self.taps * self.phases > self.kernel


@lowering("ConvTranspose")
def conv_transpose(ctx: Lowering) -> None:
    """Lower ConvTranspose, the adjoint of Conv with respect to its input; weights are ``[C, M/group, k...]``."""
    x, w = ctx.input(0), ctx.input(1)
    batch, channels, *source = ctx.shape(x)
    _, per_group, *kernel = ctx.shape(w)
    group = int(ctx.attr("group", 1))
    dims = _make_spreads(ctx, source, kernel)
    if any(d.extent != d.source for d in dims):
        x = _insert_zeros(ctx, x, dims)
    depth = channels // group
    channel = ex.as_index("c" if depth != 1 else 0)
    feature = ex.as_index("m")
    if group > 1:
        channel = ex.make_add(ex.make_mul(ex.make_floordiv("m", per_group), depth), channel)
        feature = ex.make_mod("m", per_group)
    axes = (Axis("n", batch), Axis("m", per_group * group), *[a for d in dims for a in d.axes])
    reduce = (*([Axis("c", depth)] if depth != 1 else []), *[a for d in dims for a in d.tap_axis])
    data = ctx.load(x, "n", channel, *[d.source_index for d in dims], fill=0.0 if any(d.reads_outside for d in dims) else None)
    weight = ctx.load(
        w, channel, feature, *[d.weight_index for d in dims], fill=0.0 if any(d.weights_outside for d in dims) else None
    )
    body = Op("mul", (data, weight))
    if all(d.phases == 1 for d in dims):
        _emit_with_bias(ctx, axes, body, reduce)
        return
    split = ctx.emit(axes, body, reduce, "sum" if reduce else None, into="phases")
    _interleave_phases(ctx, split, batch, per_group * group, dims)


def _interleave_phases(ctx: Lowering, split: str, batch: int, features: int, dims: Sequence[_Spread]) -> None:
    axes = (Axis("n", batch), Axis("m", features), *[Axis(d.name, d.out) for d in dims])
    value = ctx.load(split, "n", "m", *[i for d in dims for i in d.gather])
    if ctx.has(2):
        _emit_bias(ctx, axes, value)
    else:
        ctx.emit(axes, value, into=0)


def _insert_zeros(ctx: Lowering, x: str, dims: Sequence[_Spread]) -> str:
    """Return ``x`` with ``stride - 1`` zeros between neighbours (only for dilated kernels with a stride)."""
    batch, channels, *_ = ctx.shape(x)
    axes = (Axis("n", batch), Axis("c", channels), *[Axis(d.name, d.extent) for d in dims])
    stretched = [d for d in dims if d.extent != d.source]
    steps = {d.name: d.stride for d in stretched}
    body: Expr = ctx.load(x, "n", "c", *[ex.make_floordiv(d.name, steps.get(d.name, 1)) for d in dims])
    for name, step in steps.items():
        present = Op("eq", (ex.make_mod(name, step), ex.integer(0)))
        body = Op("where", (present, body, ex.Const(0.0, ctx.type(x).dtype)))
    return ctx.emit(axes, body, into="stuffed")


def _make_spreads(ctx: Lowering, source: Sequence[int], kernel: Sequence[int]) -> list[_Spread]:
    """Return the geometry of each dimension."""
    dims = transposed_of(ctx.node.attributes, source, kernel)
    return [
        _Spread(name, n, d.out, k, d.stride, d.dilation, d.begin)
        for name, n, k, d in zip(spatial_names(len(source)), source, kernel, dims, strict=True)
    ]
