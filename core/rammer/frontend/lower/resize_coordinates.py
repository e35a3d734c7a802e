"""Source coordinates and weights of Resize, computed at compile time.

The formulas are ONNX's (operator Resize, attributes ``coordinate_transformation_mode``, ``nearest_mode``,
``cubic_coeff_a``, ``antialias`` and ``exclude_outside``). ``align_corners`` maps the corners of the integer output extent to
the corners of the source, as PyTorch and ONNX Runtime do; ONNX's reference divides by the fractional product of extent and scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rammer.frontend.lower.lowering_registry import CannotLower
from rammer.frontend.read.limits import MAX_TABLE, check_positions

Array = np.ndarray[Any, np.dtype[Any]]

#: Coordinates below this are 0. float64 errs by 2^-53 of terms below ``MAX_TABLE`` = 2^18. A true coordinate this small would
#: need an output of 2^25 elements.
CANCELLED = 2.0**-25


@dataclass(frozen=True)
class Resampling:
    """A resized dimension: extents in elements, ``scale`` is output over input, ``roi`` relative."""

    source: int
    out: int
    scale: float
    roi: tuple[float, float] = (0.0, 1.0)

    def coordinates(self, mode: str, *, nearest: bool = False) -> Array:
        """Return the source coordinate of each output position (float64, shape ``[out]``). ``nearest`` rounds positions over the
        scale to float32, which absorbs the error of a float32 scale: 1.5 / 0.6 is 2.5."""
        check_positions(self.out, "Resize")
        y = np.arange(self.out, dtype=np.float64)
        if mode == "align_corners":
            return y * (self.source - 1) / max(self.out - 1, 1)
        if mode == "asymmetric":
            return self._over_scale(y, nearest)
        if mode == "tf_crop_and_resize":
            return self._crop_coordinates(y)
        if mode == "tf_half_pixel_for_nn":
            return self._over_scale(y + 0.5, nearest)
        if mode == "pytorch_half_pixel" and self.out == 1:
            return y * 0
        offset = 0.0
        if mode == "half_pixel_symmetric":
            offset = self.source / 2 * (1 - self.out / (self.scale * self.source))
        elif mode not in ("half_pixel", "pytorch_half_pixel"):
            raise CannotLower(f"Resize with coordinate_transformation_mode={mode!r}")
        return offset + self._over_scale(y + 0.5, nearest and not offset) - 0.5

    def _over_scale(self, y: Array, single: bool) -> Array:
        quotient = y / self.scale
        return quotient.astype(np.float32).astype(np.float64) if single else quotient

    def _crop_coordinates(self, y: Array) -> Array:
        start, end = self.roi
        span = (end - start) * (self.source - 1)
        middle = y * 0 + span / 2 if self.out == 1 else y * span / (self.out - 1)
        return middle + start * (self.source - 1)

    def nearest(self, x: Array, mode: str) -> Array:
        """Return the index of the nearest source element of coordinates ``x`` (int64, clamped)."""
        # Scales are float32. Single precision, which ONNX Runtime uses too, absorbs their relative error at ties. A residue of
        # cancelling terms (1/6 + 1/3 - 1/2) would remain, and become 1 by ``ceil``.
        single = np.where(np.abs(x) < CANCELLED, 0.0, x).astype(np.float32)
        rounded: dict[str, Array] = {
            "floor": np.floor(single),
            "ceil": np.ceil(single),
            "round_prefer_floor": np.ceil(single - 0.5),
            "round_prefer_ceil": np.floor(single + 0.5),
        }
        if mode not in rounded:
            raise CannotLower(f"Resize with nearest_mode={mode!r}")
        return np.clip(rounded[mode], 0, self.source - 1).astype(np.int64)

    def taps(self, x: Array, kernel: Kernel, exclude_outside: bool) -> tuple[Array, Array]:
        """Return the indices (clamped) and weights of the source elements of each position, both ``[out, taps]``."""
        shrink = min(self.scale, 1.0) if kernel.antialias else 1.0
        below = int(np.floor(-kernel.radius / shrink)) + 1
        check_positions(self.out * (2 - 2 * below), "Resize", MAX_TABLE)  # before any table is allocated
        steps = np.arange(below, 2 - below)
        # ONNX prefers the left neighbour: at an integer coordinate the base is one below it.
        base = np.ceil(x) - 1
        weights = kernel.weights((steps[None, :] - (x - base)[:, None]) * shrink)
        index = base[:, None].astype(np.int64) + steps[None, :]
        if exclude_outside:
            weights = np.where((index < 0) | (index >= self.source), 0.0, weights)
        if exclude_outside or kernel.antialias:
            total = weights.sum(axis=1, keepdims=True)
            weights = weights / np.where(total == 0, 1.0, total)
        return np.clip(index, 0, self.source - 1), weights


@dataclass(frozen=True)
class Kernel:
    """An interpolation kernel: ``linear`` (radius 1) or ``cubic`` (radius 2, coefficient ``a``)."""

    mode: str
    a: float = -0.75
    antialias: bool = False

    @property
    def radius(self) -> int:
        """The distance, in source elements, beyond which the weight is zero."""
        return 1 if self.mode == "linear" else 2

    def weights(self, distance: Array) -> Array:
        """Return the weight at a signed distance (source elements)."""
        d: Array = np.abs(distance)
        if self.mode == "linear":
            return np.asarray(np.clip(1 - d, 0, 1))
        near: Array = (self.a + 2) * d**3 - (self.a + 3) * d**2 + 1
        far = self.a * d**3 - 5 * self.a * d**2 + 8 * self.a * d - 4 * self.a
        return np.asarray(np.where(d <= 1, near, np.where(d < 2, far, 0.0)))
