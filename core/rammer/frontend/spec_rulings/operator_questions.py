"""Decisions between the voices that define an operator's result (``rammer.frontend.spec_rulings.rulings``), and their predicates
for one use of an operator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, TypeAlias

import numpy as np

from rammer.frontend.lower.resize_coordinates import Resampling
from rammer.frontend.lower.window_extents import geometry_of
from rammer.frontend.read.limits import MAX_TABLE
from rammer.ir.operator_use import Use as Use

Voice: TypeAlias = Literal["rammer", "onnxruntime", "reference"]


@dataclass(frozen=True)
class Decision:
    """A condition ``holds`` under which the voices in ``wrong`` violate the specification, quoted in ``words``."""

    ops: tuple[str, ...]
    when: str
    holds: Callable[[Use], bool]
    wrong: tuple[Voice, ...]
    words: str


def is_any_use(use: Use) -> bool:
    """Return True for every use."""
    return True


def has_attribute(*names: str) -> Callable[[Use], bool]:
    """Return True if a use has one of these attributes with a value other than 0 or empty."""
    return lambda use: any(use.attr(n) not in (None, (), "", 0) for n in names)


def has_auto_padding(use: Use) -> bool:
    """Return True if the operator computes its padding automatically."""
    return use.attr("auto_pad", "NOTSET") not in ("NOTSET", "")


def has_irregular_windows(use: Use) -> bool:
    """Return True if no window fits, or if VALID or SAME does not yield regular windows."""
    kernel, source = tuple(use.attr("kernel_shape") or ()), use.shape()[2:]
    mode, dims = geometry_of(use.op, use.attributes, source, kernel)
    spans = [(k - 1) * d.dilation + 1 for k, d in zip(kernel, dims, strict=True)]
    if mode == "VALID" and use.attr("ceil_mode", 0):
        return True
    if mode.startswith("SAME"):
        return any(d.dilation != 1 or d.stride > span for d, span in zip(dims, spans, strict=True))
    return any(d.out < 1 for d in dims)


def padding_alone(use: Use) -> bool:
    """Return True if a window covers only padding."""
    kernel, source = tuple(use.attr("kernel_shape") or ()), use.shape()[2:]
    _, dims = geometry_of(use.op, use.attributes, source, kernel)
    return any(
        n < d.dilation or (k - 1) * d.dilation < d.begin or (d.out - 1) * d.stride - d.begin >= n
        for n, k, d in zip(source, kernel, dims, strict=True)
    )


def unusual_cell(use: Use) -> bool:
    """Return True if a recurrent layer is not forward, or has activations or sequence lengths."""
    return use.attr("direction", "forward") != "forward" or bool(use.attr("activations")) or use.has(4)


def has_empty_sequence(use: Use) -> bool:
    """Return True if a sequence of a recurrent layer may have an initial state but zero steps."""
    lengths = use.value(4)
    return use.has(4) and (use.has(5) or use.has(6)) and (lengths is None or bool((lengths == 0).any()))


def is_zero_input(use: Use) -> bool:
    """Return True if the first input is a constant of zeros."""
    known = use.value(0)
    return known is not None and not np.any(known)


def has_zero_scale(use: Use) -> bool:
    """Return True if a constant scale that divides contains 0."""
    divisor = use.value(1 if use.op == "QuantizeLinear" else 6)
    return divisor is not None and not np.all(divisor)


def has_int32_overflow(use: Use) -> bool:
    """Return True if a quotient of constants in quantisation exceeds 32 bits."""
    x, scale = use.value(0), use.value(1)
    if x is None or scale is None or not x.size or not scale.size:
        return False
    return float(np.abs(x).max()) >= 2.0**31 * float(np.abs(scale).min())


def has_odd_zero_point(use: Use) -> bool:
    """Return True if the zero point of a quantised product is a constant with an odd value."""
    zero = use.value(7)
    return zero is not None and bool((zero % 2).any())


def by_channel(use: Use) -> bool:
    """Return True if scales or zero points are per channel and images are not two-dimensional."""
    each = use.shape(4) if use.op == "QLinearConv" else use.shape(3)
    return each not in ((), (1,)) and len(use.shape()) != 4


def beside_pixels(use: Use) -> bool:
    """Return True if rounding out / source moves a position off a pixel that it would hit exactly."""
    sizes, mode = use.value(3), use.attr("coordinate_transformation_mode", "half_pixel")
    if sizes is None or use.attr("mode", "nearest") == "nearest" or mode in ("align_corners", "tf_crop_and_resize"):
        return False
    extents = [use.shape()[d] for d in use.attr("axes") or range(len(use.shape()))]
    for source, out in ((n, int(m)) for n, m in zip(extents, sizes, strict=False) if n and 0 < m < MAX_TABLE):
        if Fraction(out / source) * source != out:
            x = Resampling(source, out, out / source).coordinates(mode)
            if bool((np.abs(x - np.rint(x)) < 1e-9).any()):
                return True
    return False


def has_cancelling_terms(use: Use) -> bool:
    """Return True if the terms of a symmetric coordinate cancel at a switch of the nearest element."""
    if (use.attr("coordinate_transformation_mode"), use.attr("mode", "nearest")) != ("half_pixel_symmetric", "nearest"):
        return False
    between = 0.0 if use.attr("nearest_mode") in ("floor", "ceil") else 0.5
    given = use.value(2) if use.shape(2) not in ((), (0,)) else use.value(3)
    if given is None:
        return False
    extents = [use.shape()[d] for d in use.attr("axes") or range(len(use.shape()))]
    for source, by in ((n, float(m)) for n, m in zip(extents, given, strict=False) if n):
        scale = by if given.dtype.kind == "f" else by / source
        out = int(np.floor(source * scale + 1e-9))
        if 0 < out < MAX_TABLE:
            x = Resampling(source, out, scale).coordinates("half_pixel_symmetric") - between
            if scale != 1 and bool((np.abs(x - np.rint(x)) < 1e-6).any()):
                return True
    return False


def rounded_tie(use: Use) -> bool:
    """Return True if float32 rounding of a position over its scale selects another nearest element than float64 does."""
    mode, scales = use.attr("coordinate_transformation_mode", "half_pixel"), use.value(2)
    if use.attr("mode", "nearest") != "nearest" or mode in ("align_corners", "tf_crop_and_resize") or scales is None:
        return False
    extents = [use.shape()[d] for d in use.attr("axes") or range(len(use.shape()))]
    for source, scale in ((n, float(s)) for n, s in zip(extents, scales, strict=False)):
        out = int(source * scale)
        if 0 < out < MAX_TABLE and scale != 1:
            r, between = Resampling(source, out, scale), 0.0 if use.attr("nearest_mode") in ("floor", "ceil") else 0.5
            single, double = (r.coordinates(mode, nearest=n) - between for n in (True, False))
            if bool(((single != double) & (single == np.rint(single))).any()):
                return True
    return False


def infinite_root(use: Use) -> bool:
    """Return True if a power with exponent 0.5 may have minus infinity as its base."""
    base, exponent = use.value(0), use.value(1)
    half = exponent is None or bool((np.asarray(exponent) == 0.5).any())
    return half and (base is None or (base.dtype.kind == "f" and bool(np.isneginf(base).any())))


def is_backward_slice(use: Use) -> bool:
    """Return True if a Slice may go backwards from before the first element."""
    starts, steps = use.value(1), use.value(4)
    if not use.has(4) or (steps is not None and bool((steps > 0).all())):
        return False
    return starts is None or bool((starts < -min(use.shape(), default=0)).any())


def wrapped_again(use: Use) -> bool:
    """Return True if a wrapping Pad may add more on one side than the extent that it repeats."""
    if use.attr("mode", "constant") != "wrap":
        return False
    pads, axes, shape = use.value(1), use.value(3), use.shape()
    if pads is None or (use.has(3) and axes is None):
        return True
    extents = [shape[int(a)] for a in axes] if axes is not None else [*shape]
    return any(int(p) > n for p, n in zip(pads, [*extents, *extents], strict=False))
