"""Sliding-window geometry shared by convolution and pooling, in ONNX's vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rammer.frontend.lower.lowering_registry import CannotLower, Lowering
from rammer.frontend.lower.window_extents import PADDING_MODES, geometry_of
from rammer.ir import expr as ex
from rammer.ir.compute import Axis
from rammer.ir.expr import Expr, Load, Number

_SPATIAL = {1: ("w",), 2: ("h", "w"), 3: ("d", "h", "w")}


def spatial_names(rank: int) -> tuple[str, ...]:
    """Return the axis names of ``rank`` spatial dimensions: ``w``; ``h, w``; ``d, h, w``; then ``s0, s1, ...``."""
    return _SPATIAL.get(rank) or tuple(f"s{d}" for d in range(rank))


@dataclass(frozen=True)
class SlidingWindow:
    """A window sliding over spatial extents: one entry per dimension, all in elements. ``begin`` and ``end`` are the paddings
    before and after; ``out`` is the number of window positions."""

    source: tuple[int, ...]
    out: tuple[int, ...]
    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    begin: tuple[int, ...]
    end: tuple[int, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the spatial axes."""
        return spatial_names(len(self.out))

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The spatial axes of the output."""
        return tuple(Axis(n, e) for n, e in zip(self.names, self.out, strict=True))

    @property
    def taps(self) -> tuple[Axis, ...]:
        """The reduction axes ``kh, kw``; dimensions of extent 1 are omitted."""
        return tuple(Axis(f"k{n}", k) for n, k in zip(self.names, self.kernel, strict=True) if k > 1)

    @property
    def tap_indices(self) -> tuple[Expr, ...]:
        """The kernel index along every spatial dimension (0 if its extent is 1)."""
        return tuple(ex.as_index(f"k{n}" if k > 1 else 0) for n, k in zip(self.names, self.kernel, strict=True))

    @property
    def indices(self) -> tuple[Expr, ...]:
        """The source index of each tap: ``out * stride + tap * dilation - begin``."""
        return tuple(
            ex.make_add(ex.make_add(ex.make_mul(name, s), ex.make_mul(tap, d)), -p)
            for name, s, tap, d, p in zip(self.names, self.strides, self.tap_indices, self.dilations, self.begin, strict=True)
        )

    @property
    def padded(self) -> bool:
        """True if any tap is outside the source."""
        return any(
            p > 0 or (o - 1) * s + (k - 1) * d - p >= n
            for n, o, k, s, d, p in zip(self.source, self.out, self.kernel, self.strides, self.dilations, self.begin, strict=True)
        )

    def touching(self) -> tuple[SlidingWindow, tuple[int, ...]]:
        """Return the window without leading and trailing taps that read only padding, and its first remaining tap per dimension.
        A wide dilation over a small image leaves one tap of three. At least one tap remains."""
        ends = list[tuple[int, int]]()
        for n, o, k, s, d, p in zip(self.source, self.out, self.kernel, self.strides, self.dilations, self.begin, strict=True):
            starts = ((t, max(0, -(-(p - t * d) // s))) for t in range(k))
            taps = [t for t, first in starts if first < o and first * s + t * d - p < n] or [0]
            ends.append((taps[0], taps[-1]))
        kernel = tuple(last - first + 1 for first, last in ends)
        begin = tuple(p - first * d for (first, _), p, d in zip(ends, self.begin, self.dilations, strict=True))
        return replace(self, kernel=kernel, begin=begin), tuple(first for first, _ in ends)

    def load(self, tensor: str, batch: Sequence[Expr | int | str], fill: Number) -> Load:
        """Return the load ``tensor[batch..., window]``, guarded by ``fill`` if a tap can be outside."""
        leading = tuple(ex.as_index(i) for i in batch)
        return Load(tensor, (*leading, *self.indices), fill if self.padded else None)


def window_of(ctx: Lowering, source: Sequence[int], kernel: Sequence[int]) -> SlidingWindow:
    """Return the window of a convolution or pooling node from its attributes."""
    mode, dims = geometry_of(ctx.node.op, ctx.node.attributes, source, kernel)
    if mode not in PADDING_MODES:
        raise CannotLower(f"{ctx.node.op} with auto_pad={mode!r}")
    out = tuple(d.out for d in dims)
    return SlidingWindow(
        tuple(source),
        out,
        tuple(kernel),
        tuple(d.stride for d in dims),
        tuple(d.dilation for d in dims),
        tuple(d.begin for d in dims),
        tuple(d.end for d in dims),
    )
