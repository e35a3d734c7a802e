"""Sliding-window geometry shared by convolution and pooling, in ONNX's vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rammer.frontend.lowering import CannotLower, Lowering
from rammer.ir import expr as ex
from rammer.ir.compute import Axis
from rammer.ir.expr import Expr, Load, Number

_SPATIAL = {1: ("w",), 2: ("h", "w"), 3: ("d", "h", "w")}


def spatial_names(rank: int) -> tuple[str, ...]:
    """Axis names of ``rank`` spatial dimensions: ``w``; ``h, w``; ``d, h, w``; then ``s0, s1, ...``."""
    return _SPATIAL.get(rank) or tuple(f"s{d}" for d in range(rank))


@dataclass(frozen=True)
class Window:
    """A window sliding over spatial extents: one entry a dimension, all in elements.

    ``begin`` and ``end`` are the paddings before and after; ``out`` the number of window positions.
    """

    source: tuple[int, ...]
    out: tuple[int, ...]
    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    begin: tuple[int, ...]
    end: tuple[int, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the spatial axes."""
        return spatial_names(len(self.out))

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The output's spatial axes."""
        return tuple(Axis(n, e) for n, e in zip(self.names, self.out, strict=True))

    @property
    def taps(self) -> tuple[Axis, ...]:
        """The reduction axes ``kh, kw``; dimensions of extent 1 have none."""
        return tuple(Axis(f"k{n}", k) for n, k in zip(self.names, self.kernel, strict=True) if k > 1)

    @property
    def tap_indices(self) -> tuple[Expr, ...]:
        """Index into the kernel along every spatial dimension (0 where its extent is 1)."""
        return tuple(
            ex.as_index(f"k{n}" if k > 1 else 0) for n, k in zip(self.names, self.kernel, strict=True)
        )

    @property
    def indices(self) -> tuple[Expr, ...]:
        """Source index of each tap: ``out * stride + tap * dilation - begin``."""
        return tuple(
            ex.add(ex.add(ex.mul(name, s), ex.mul(tap, d)), -p)
            for name, s, tap, d, p in zip(
                self.names, self.strides, self.tap_indices, self.dilations, self.begin, strict=True
            )
        )

    @property
    def padded(self) -> bool:
        """Whether any tap falls outside the source."""
        return any(
            p > 0 or (o - 1) * s + (k - 1) * d - p >= n
            for n, o, k, s, d, p in zip(
                self.source, self.out, self.kernel, self.strides, self.dilations, self.begin, strict=True
            )
        )

    def load(self, tensor: str, batch: Sequence[Expr | int | str], fill: Number) -> Load:
        """``tensor[batch..., window]``, guarded by ``fill`` where a tap can fall outside."""
        leading = tuple(ex.as_index(i) for i in batch)
        return Load(tensor, (*leading, *self.indices), fill if self.padded else None)


def window_of(ctx: Lowering, source: Sequence[int], kernel: Sequence[int]) -> Window:
    """The window of a convolution or pooling node from its attributes and declared output shape."""
    rank = len(source)
    out = ctx.out().shape[-rank:]
    strides = _ints(ctx, "strides", rank)
    dilations = _ints(ctx, "dilations", rank)
    begin, end = _paddings(ctx, source, kernel, strides, dilations)
    return Window(tuple(source), out, tuple(kernel), strides, dilations, begin, end)


def _ints(ctx: Lowering, name: str, rank: int) -> tuple[int, ...]:
    return tuple(int(v) for v in ctx.attr(name) or (1,) * rank)


def _paddings(ctx: Lowering, source: Sequence[int], kernel: Sequence[int], strides: Sequence[int],
              dilations: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:  # fmt: skip
    rank = len(source)
    mode = ctx.attr("auto_pad", "NOTSET")
    if mode in ("NOTSET", ""):
        pads = tuple(int(p) for p in ctx.attr("pads") or (0,) * (2 * rank))
        return pads[:rank], pads[rank:]
    if mode == "VALID":
        return (0,) * rank, (0,) * rank
    if mode not in ("SAME_UPPER", "SAME_LOWER"):
        raise CannotLower(f"{ctx.node.op} with auto_pad={mode!r}")
    totals = [
        max((-(-n // s) - 1) * s + (k - 1) * d + 1 - n, 0)
        for n, k, s, d in zip(source, kernel, strides, dilations, strict=True)
    ]
    small, large = tuple(t // 2 for t in totals), tuple(t - t // 2 for t in totals)
    return (small, large) if mode == "SAME_UPPER" else (large, small)
