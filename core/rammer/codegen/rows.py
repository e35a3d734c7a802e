"""Which output axis becomes the vector lanes of a stage, and where along it no padding test can fail."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rammer.codegen.bounds import fold, span, tidy
from rammer.codegen.layout import Stage
from rammer.codegen.unit import Place, Unit
from rammer.ir import expr as ex
from rammer.ir.compute import Compute
from rammer.ir.expr import Expr, Interval, Load, Op, Ref, integer

#: Reduction points beyond which a load's weight in the choice of the lane axis no longer grows.
_WEIGHT = 64


@dataclass(frozen=True, slots=True)
class Row:
    """Axis number ``axis`` is computed ``width`` elements at a time.

    ``interior`` is the half-open range where no padding test along it fails (None: there are no such tests).
    ``certain``: every task's box is at least ``width`` wide; ``exact``: and a multiple of it.
    """

    axis: int
    width: int
    interior: tuple[Expr, Expr] | None
    certain: bool
    exact: bool


@dataclass(frozen=True, slots=True)
class _Read:
    """A load as seen from a stage: its indices in the stage's axes, and how often an element makes it."""

    load: Load
    weight: int
    ranges: Mapping[str, Interval]


def choose_row(unit: Unit, stage: Stage, stores: list[Place]) -> Row | None:
    """The axis with the cheapest memory accesses, or None where scalar code is as good."""
    if not unit.target.vectors or any(c.dtype != "float32" for c in stage.computes):
        return None
    reads = [r for c in stage.computes for r in _reads(unit, c, _point(c), 1, unit.ranges)]
    best: tuple[float, int] | None = None
    for d in reversed(range(len(stage.extents))):
        count = stage.extents[d]
        width = _width(unit, count)
        if not width:
            continue
        cost = sum(r.weight * _steps(unit, r.load, f"x{d}", width) for r in reads)
        cost += sum(_cost(p.strides[d], width) for p in stores)
        cost *= -(-count // width) / count
        if best is None or cost < best[0]:
            best = cost, d
    scalar = sum(r.weight for r in reads) + len(stores)
    if best is None or best[0] >= scalar:
        return None
    return _row(unit, stage, reads, best[1])


def _row(unit: Unit, stage: Stage, reads: list[_Read], d: int) -> Row:
    bound, count = stage.box[d], stage.extents[d]
    ranges = [ends for r in reads for ends in _interior(unit, r, f"x{d}")]
    low, high = ranges[0] if ranges else bound.span
    for start, end in ranges[1:]:
        low, high = fold("max", low, start), fold("min", high, end)
    width = _width(unit, count)
    certain = fold("sub", bound.high, bound.low) == integer(count)
    return Row(d, width, (low, high) if ranges else None, certain, certain and count % width == 0)


def choose_blocking(unit: Unit, stage: Stage, fixed: int, limit: int, axes: int) -> dict[int, int]:
    """Elements computed together along up to ``axes`` axes other than ``fixed``, at most ``limit`` in all.

    An axis qualifies when every task's box has the same size along it and the reductions' loads repeat
    along it. The axis whose loads repeat most comes first.
    """
    reads = [r for c in stage.computes for r in _reads(unit, c, _point(c), 1, unit.ranges) if r.weight > 1]
    gains = []
    for d, (bound, count) in enumerate(zip(stage.box, stage.extents, strict=True)):
        shared = sum(
            1.0 + (f"x{fixed}" in ex.axes_of(r.load)) for r in reads if f"x{d}" not in ex.axes_of(r.load)
        )
        moved = any(f"x{d}" in ex.axes_of(r.load) for r in reads)
        if d != fixed and shared and moved and fold("sub", bound.high, bound.low) == integer(count):
            gains.append((-shared, -d))
    result: dict[int, int] = {}
    for _, negative in sorted(gains)[:axes]:
        count = stage.extents[-negative]
        block = next((b for b in (4, 3, 2) if count % b == 0 and b <= limit), 1)
        if block > 1:
            result[-negative] = block
            limit //= block
    return result


def _width(unit: Unit, count: int) -> int:
    """The vector width that covers ``count`` elements with the fewest vectors; 0 if none fits."""
    fitting = [w for w in unit.target.vectors if w <= count]
    return min(fitting, key=lambda w: (-(-count // w), w), default=0)


def _point(c: Compute) -> dict[str, Expr]:
    return {a.name: Ref(f"x{d}") for d, a in enumerate(c.axes)}


def _reads(unit: Unit, c: Compute, axes: Mapping[str, Expr], weight: int,
           ranges: Mapping[str, Interval]) -> Iterator[_Read]:  # fmt: skip
    """Every load of ``c``, through producers computed in place; reduction axes are named ``compute.axis``."""
    inner = {**ranges, **{f"{c.name}.{r.name}": (0, max(r.extent - 1, 0)) for r in c.reduce}}
    names: dict[str, Expr] = {r.name: Ref(f"{c.name}.{r.name}") for r in c.reduce}
    weight = min(weight * math.prod(r.extent for r in c.reduce), _WEIGHT)
    for load in ex.loads(ex.substitute(c.body, {**axes, **names})):
        yield _Read(load, weight, inner)
        producer = unit.inlined.get(load.tensor)
        if producer is not None:
            place = dict(zip((a.name for a in producer.axes), load.indices, strict=True))
            yield from _reads(unit, producer, place, weight, inner)


def _steps(unit: Unit, load: Load, lane: str, width: int) -> float:
    """Cost of a load for one row of lanes, in vector accesses."""
    if load.tensor in unit.inlined or lane not in ex.axes_of(load):
        return 0.0
    forms = [ex.affine(i) for i in load.indices]
    if unit.dtypes[load.tensor] != "float32" or any(f is None for f in forms):
        return 2.0 * width
    strides = unit.places[load.tensor].strides
    return _cost(
        sum(s * f[0].get(lane, 0) for s, f in zip(strides, forms, strict=True) if f is not None), width
    )


def _cost(step: int, width: int) -> float:
    return {0: 0.5, 1: 1.0, 2: 2.0}.get(step, 2.0 * width)


def _interior(unit: Unit, read: _Read, lane: str) -> Iterator[tuple[Expr, Expr]]:
    """Lane ranges (half-open) where the padding tests of a load along the lane hold."""
    if read.load.fill is None:
        return
    for index, extent in zip(read.load.indices, unit.shapes[read.load.tensor], strict=True):
        form, reach = ex.affine(index), ex.interval(index, read.ranges)
        step = form[0].get(lane, 0) if form is not None else 0
        if step <= 0 or (reach is not None and reach[0] >= 0 and reach[1] < extent):
            continue
        rest = tidy(Op("sub", (index, ex.mul(lane, step))))
        free = {
            n: (integer(r[0]), integer(r[1])) if "." in n else (Ref(n), Ref(n))
            for n, r in read.ranges.items()
        }
        ends = span(rest, free)
        if ends is None:
            continue
        low = tidy(ex.mul(fold("floordiv", ends[0], integer(step)), -1))
        room = fold("sub", integer(extent - 1), ends[1])
        yield low, fold("add", fold("floordiv", room, integer(step)), integer(1))
