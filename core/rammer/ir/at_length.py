"""Ranged operators at several of their lengths, at which their costs are evaluated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from rammer.ir.compute import Axis
from rammer.ir.expr import Ref
from rammer.ir.operator import ROperator

#: Default lengths at which operators are priced, as fractions of the longest: those of most buckets.
PARTS: Final = (0.6, 0.75, 0.9, 1.0)
#: Extents of at least ``LONG`` elements are rounded to multiples of ``STEP``. Row alignment depends on the bound, not on the
#: length.
LONG, STEP = 64, 16


def shrink_to_parts(operator: ROperator, parts: Sequence[float] = PARTS, inside: bool = False) -> tuple[ROperator, ...]:
    """Return ``operator`` at each fraction ``parts`` of the longest length, or itself if it never ends. The results have no
    endings, and their tiles are clipped. Tasks are skipped as a whole; with ``inside``, the length may end inside a task."""
    ends = ending_axes(operator)
    if not ends:
        return (operator,)
    return tuple(
        _shrink_operator(operator, ends, part, inside) if part < 1 else replace(operator, skips=(), reduce_bounds=())
        for part in parts
    )


def ending_axes(operator: ROperator) -> frozenset[tuple[str, str]]:
    """Return the (compute, axis) pairs along which elements past the length do not matter. Tasks are masked there, reductions
    stop, and all readers inside the operator do one of both."""
    stops = {(s.compute, s.axis) for s in operator.reduce_bounds}
    anchored = {e.axis for e in operator.skips if not e.before}
    last = {d for d, a in enumerate(operator.anchor.axes) if a.name in anchored}
    read: dict[str, list[set[bool]]] = {}
    found = set[tuple[str, str]]()
    for c in reversed(operator.computes):
        own = {r.name for r in c.reduce if (c.name, r.name) in stops}
        for d, a in enumerate(c.axes):
            says = set(read[c.name][d]) if c.name in read else set[bool]()
            says |= {d in last} if c.name in operator.outputs else set()
            own |= {a.name} if says == {True} else set()
        found |= {(c.name, name) for name in own}
        for load in c.loads:
            sides = read.setdefault(load.tensor, [set() for _ in load.indices])
            for side, index in zip(sides, load.indices, strict=True):
                side.add(isinstance(index, Ref) and index.axis in own)
    return frozenset(found)


def part_of(extent: int, part: float) -> int:
    """Return the fraction ``part`` of a masked extent, rounded up to ``STEP`` if the extent is at least ``LONG``."""
    step = STEP if extent >= LONG else 1
    return min(extent, max(math.ceil(extent * part / step), 1) * step)


def _shrink_operator(operator: ROperator, ends: frozenset[tuple[str, str]], part: float, inside: bool) -> ROperator:
    whole = dict[str, int]()  # whole tasks are skipped; a task that covers an axis is shortened only if its reductions stop
    for axis, size in () if inside else zip(operator.anchor.axes, operator.tile, strict=False):
        if (operator.anchor.name, axis.name) in ends and (size < axis.extent or not operator.reduce_bounds):
            whole[axis.name] = min(axis.extent, math.ceil(part_of(axis.extent, part) / size) * size)
    along = _anchor_axes(operator)

    def short(compute: str, axis: Axis) -> Axis:
        known = whole.get(along.get((compute, axis.name), "")) or part_of(axis.extent, part)
        return Axis(axis.name, known) if (compute, axis.name) in ends else axis

    computes = tuple(
        replace(c, axes=tuple(short(c.name, a) for a in c.axes), reduce=tuple(short(c.name, r) for r in c.reduce))
        for c in operator.computes
    )
    tile = tuple(min(t, a.extent) for t, a in zip(operator.tile, computes[-1].axes, strict=False))
    return operator.shorter(computes, tile)


def _anchor_axes(operator: ROperator) -> dict[tuple[str, str], str]:
    """Return the axes of the operator's Computes that map to anchor axes through loads, by compute and name."""
    anchor, axes = operator.anchor, {c.name: c.axes for c in operator.computes}
    found = {(anchor.name, a.name): a.name for a in anchor.axes}
    for c in reversed(operator.computes):
        for load in c.loads:
            for axis, index in zip(axes.get(load.tensor, ()), load.indices, strict=False):
                own = found.get((c.name, index.axis)) if isinstance(index, Ref) else None
                if own is not None:
                    found.setdefault((load.tensor, axis.name), own)
    return found
