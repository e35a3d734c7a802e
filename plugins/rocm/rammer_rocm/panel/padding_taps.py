"""Taps of a window that are outside the image for a whole task: they are neither gathered nor multiplied.

Consider a 3 x 3 window with dilation 12 on an image of 33 x 33: 43% of its products are in the padding. A tile of 11 x 11 columns
skips whole rows and columns of taps: a corner keeps four taps. Every skipped product has a zero of the padding as factor."""

from __future__ import annotations

from dataclasses import dataclass

from rammer.device.manifest import Binding
from rammer.ir import expr as ex

from rammer_rocm.panel.recognise import PanelProduct

#: Maximum mean fraction of remaining taps for which skipping pays off: loops over taps with skips cannot be joined.
WORTH = 0.9


@dataclass(frozen=True, slots=True)
class Skip:
    """The relation of a tap axis and a column axis. Tap ``k`` of axis ``tap`` (``taps`` taps) reads position ``step * column +
    reach * k + constant`` of ``size``. The columns are along ``axis``, which has ``columns`` columns."""

    tap: str
    taps: int
    axis: str
    columns: int
    step: int
    reach: int
    constant: int
    size: int

    def left(self, origin: int, count: int) -> tuple[int, int]:
        """Return the range of taps (first, end) that read the image in ``count`` columns from ``origin``."""
        last = self.step * (origin + count - 1) + self.constant
        low = max(0, -(last // self.reach))
        room = self.size - 1 - self.constant - self.step * origin
        return low, max(low, min(self.taps, room // self.reach + 1))

    def share(self, tile: int) -> float:
        """Return the mean fraction of taps that remain in tasks of ``tile`` columns."""
        origins = range(0, self.columns, tile)
        ends = [self.left(o, min(tile, self.columns - o)) for o in origins]
        return sum(high - low for low, high in ends) / (self.taps * len(ends))

    def text(self, origin: str, count: str) -> tuple[str, str]:
        """Return C expressions of ``left``; division rounds towards zero."""
        last = f"{self.step} * ({origin} + {count} - 1) + {self.constant}"
        room = f"{self.size - 1 - self.constant} - {self.step} * {origin}"
        low = f"max(0, ({self.reach - 1} - ({last})) / {self.reach})"
        return low, f"({room} < 0 ? 0 : min({self.taps}, ({room}) / {self.reach} + 1))"


def skips_of(p: PanelProduct, binding: Binding) -> tuple[Skip, ...]:
    """Return the taps that some task skips."""
    return tuple(s for s in outside_taps(p, binding) if s.share(p.tile[s.axis]) <= WORTH)


def outside_taps(p: PanelProduct, binding: Binding) -> tuple[Skip, ...]:
    """Return the taps that may be outside the image for some tile: only of a stored column operand with zero padding."""
    if p.b.fill != 0.0 or p.quads is not None or p.b.tensor in p.before:
        return ()
    window, found = {r.name: r.extent for r in p.main.reduce}, list[Skip]()
    for index, size in zip(p.b.indices, binding.types[p.b.tensor].shape, strict=True):
        form = ex.affine_form(index)
        if form is None:
            continue
        taps, axes = [a for a in form[0] if a in window], [a for a in form[0] if a not in window]
        if len(taps) == 1 and len(axes) == 1 and axes[0] in p.tile and form[0][taps[0]] > 0 and form[0][axes[0]] > 0:
            (tap,), (axis,) = taps, axes
            found.append(Skip(tap, window[tap], axis, p.extent[axis], form[0][axis], form[0][tap], form[1], size))
    names = [s.tap for s in found]
    return tuple(s for s in found if names.count(s.tap) == 1)
