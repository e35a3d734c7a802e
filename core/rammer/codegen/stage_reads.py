"""The loads of a stage in the stage's axes, and their cost in vector accesses."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rammer.codegen import rowform
from rammer.codegen.context import FunctionContext
from rammer.ir import expr as ex
from rammer.ir.compute import Compute
from rammer.ir.expr import Expr, Interval, Load, Ref

#: Number of reduction points above which a load's weight no longer grows.
WEIGHT = 64


@dataclass(frozen=True, slots=True)
class StageLoad:
    """A load with its indices in the stage's axes. ``reducer`` is the Compute whose reduction makes it ("" outside any).
    ``weight`` is its number per element. ``ranges`` are the numeric ranges of the axes in it."""

    load: Load
    reducer: str
    weight: int
    ranges: Mapping[str, Interval]


@dataclass(frozen=True, slots=True)
class StageBody:
    """The body of a Compute of the stage, or of a producer computed in place, in the stage's axes."""

    body: Expr
    reducer: str
    weight: int
    ranges: Mapping[str, Interval]


def collect_bodies(unit: FunctionContext, computes: tuple[Compute, ...]) -> list[StageBody]:
    """Return every body that an element of a stage evaluates.

    Output axes are ``x0, x1, ...``; reduction axes ``compute.axis``."""
    seen: set[tuple[str, tuple[Expr, ...]]] = set()
    return [b for c in computes for b in _visit_bodies(unit, c, _output_point(c), ("", 1), unit.ranges, seen)]


def collect_loads(unit: FunctionContext, computes: tuple[Compute, ...]) -> list[StageLoad]:
    """Return every load of an element of a stage."""
    return [StageLoad(load, b.reducer, b.weight, b.ranges) for b in collect_bodies(unit, computes) for load in ex.loads(b.body)]


def _output_point(c: Compute) -> tuple[Expr, ...]:
    return tuple(Ref(f"x{d}") for d in range(len(c.axes)))


def _visit_bodies(
    unit: FunctionContext,
    c: Compute,
    point: tuple[Expr, ...],
    outer: tuple[str, int],
    ranges: Mapping[str, Interval],
    seen: set[tuple[str, tuple[Expr, ...]]],
) -> Iterator[StageBody]:
    if (c.name, point) in seen:
        return
    seen.add((c.name, point))
    axes = dict(zip((a.name for a in c.axes), point, strict=True))
    inner = {**ranges, **{f"{c.name}.{r.name}": (0, max(r.extent - 1, 0)) for r in c.reduce}}
    names: dict[str, Expr] = {r.name: Ref(f"{c.name}.{r.name}") for r in c.reduce}
    weight = min(outer[1] * math.prod(r.extent for r in c.reduce), WEIGHT)
    body = ex.substitute(c.body, {**axes, **names})
    reducer = outer[0] or (c.name if c.reduce else "")
    yield StageBody(body, reducer, weight, inner)
    for load in ex.loads(body):
        producer = unit.inlined.get(load.tensor)
        if producer is not None:
            yield from _visit_bodies(unit, producer, load.indices, (reducer, weight), inner, seen)


def load_step(unit: FunctionContext, load: Load, axis: str) -> int | None:
    """Return the elements between a stored tensor's addresses at neighbouring values of ``axis``, or None if not fixed."""
    return rowform.address_step(load, unit.places[load.tensor].strides, Ref(axis))


def access_cost(unit: FunctionContext, load: Load, lane: str, width: int) -> float:
    """Return the cost of a load for one vector of lanes, in vector accesses: 0 if it is one scalar."""
    if load.tensor in unit.inlined or lane not in ex.axes_of(load):
        return 0.0
    if unit.dtypes[load.tensor] not in unit.lanes:
        return 2.0 * width
    return vector_cost(load_step(unit, load, lane), width)


def vector_cost(lane_stride: int | None, width: int) -> float:
    """Return the cost of one vector with lane stride ``lane_stride``: strides other than 1 and 2 are accessed lane by lane."""
    return {0: 0.5, 1: 1.0, 2: 2.0}.get(-1 if lane_stride is None else lane_stride, 1.5 * width)
