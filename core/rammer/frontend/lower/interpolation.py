"""Interpolated reads at run-time coordinates, shared by GridSample, DeformConv and RoiAlign."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from rammer.frontend.lower.lowering_registry import Lowering
from rammer.frontend.lower.operands import make_literal, make_op
from rammer.ir.compute import Axis
from rammer.ir.expr import Cast, Expr, Number

#: Indices, one for each sampled dimension -> the element there, 0 outside the tensor.
Element: TypeAlias = Callable[[Sequence[Expr]], Expr]


@dataclass(frozen=True)
class Real:
    """Arithmetic in one floating-point type."""

    dtype: str

    def number(self, value: Number) -> Expr:
        """Return a literal of this type."""
        return make_literal(value, self.dtype)

    def of(self, fn: str, *args: Expr | Number) -> Expr:
        """Return ``fn`` of expressions and literals."""
        return make_op(fn, *[self.number(a) if isinstance(a, int | float) else a for a in args])

    def clamped(self, x: Expr, low: Number, high: Number) -> Expr:
        """Return ``x`` clamped to ``low`` and ``high``."""
        return self.of("min", self.of("max", x, low), high)

    def reflected(self, x: Expr, low: float, high: float) -> Expr:
        """Return ``x`` mirrored at both bounds until it is between them."""
        span = high - low
        if span <= 0:
            return self.number(low)
        beyond = self.of("fmod", self.of("abs", self.of("sub", x, low)), 2 * span)
        return self.of("add", self.of("where", self.of("le", beyond, span), beyond, self.of("sub", 2 * span, beyond)), low)


def to_index(x: Expr) -> Expr:
    """Return a whole floating-point number as an int32 index, which vector units can convert."""
    return Cast("int32", x)


@dataclass(frozen=True)
class Neighbours:
    """The neighbours of sampled coordinates along one dimension, as tensors over the same axes.

    ``below`` is the element below each coordinate, ``share`` the weight of the element above. They are computed once for all
    channels, whose work is mainly reads."""

    below: str
    share: str

    @staticmethod
    def of(ctx: Lowering, real: Real, at: Expr, axes: Sequence[Axis], name: str) -> Neighbours:
        """Return the neighbours of coordinates ``at``, which are finite and near the tensor."""
        place = ctx.load(ctx.emit(axes, at, dtype=real.dtype, into=f"at{name}"), *[a.name for a in axes])
        floor = real.of("floor", place)
        below = ctx.emit(axes, to_index(floor), dtype="int32", into=f"below{name}")
        return Neighbours(below, ctx.emit(axes, real.of("sub", place, floor), dtype=real.dtype, into=f"share{name}"))


def interpolate_linear(ctx: Lowering, real: Real, element: Element, places: Sequence[Neighbours], point: Sequence[Expr]) -> Expr:
    """Return the linear interpolation between the two neighbours along each dimension; ``point`` indexes their tensors."""
    return _interpolate_dimension(ctx, real, element, places, point, ())


def _interpolate_dimension(
    ctx: Lowering, real: Real, element: Element, places: Sequence[Neighbours], point: Sequence[Expr], chosen: tuple[Expr, ...]
) -> Expr:
    if not places:
        return element(chosen)
    share, below = ctx.load(places[0].share, *point), ctx.load(places[0].below, *point)
    near = _interpolate_dimension(ctx, real, element, places[1:], point, (*chosen, below))
    far = _interpolate_dimension(
        ctx, real, element, places[1:], point, (*chosen, make_op("add", below, make_literal(1, "int32")))
    )
    return real.of("add", real.of("mul", near, real.of("sub", 1, share)), real.of("mul", far, share))


def cubic_weight(real: Real, distance: Expr) -> Expr:
    """Return the weight of an element at this distance (0 to 2): cubic convolution with a = -0.75."""
    a = -0.75
    squared = real.of("mul", distance, distance)
    inner = real.of("add", real.of("mul", real.of("sub", real.of("mul", a + 2, distance), a + 3), squared), 1)
    steps = real.of("sub", real.of("mul", a, distance), 5 * a)
    outer = real.of("sub", real.of("mul", real.of("add", real.of("mul", steps, distance), 8 * a), distance), 4 * a)
    return real.of("where", real.of("le", distance, 1), inner, outer)
