"""Collapsing of neighbouring axes that every access walks as one axis: longer rows, fewer divisions.

A 7 by 7 image has rows of 7, but an element-wise operator may treat it as one row of 49. After joining axes ``a`` and ``b`` the
first is fixed at 0 and the second runs over both. Every address stays the same, although the index along ``b`` alone exceeds its
extent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rammer.codegen.context import FunctionContext, Place
from rammer.codegen.stage_layout import Stage
from rammer.codegen.stage_reads import StageBody, collect_bodies, load_step
from rammer.codegen.symbolic_bounds import AxisBound, fold
from rammer.ir import expr as ex
from rammer.ir.compute import Axis, Compute
from rammer.ir.expr import Const, Expr, Load, integer


def collapse_axes(unit: FunctionContext, stage: Stage, stores: Sequence[Place]) -> Stage:
    """Return ``stage`` with its output axes joined where all loads and ``stores`` allow."""
    parts = collect_bodies(unit, stage.computes)
    for d in reversed(range(len(stage.box) - 1)):
        inner = stage.extents[d + 1]
        bound = stage.box[d + 1]
        whole = bound.low == integer(0) and bound.high == integer(stage.root.axes[d + 1].extent)
        # The next inner axis may itself be a joined axis, so its box counts, not its extent.
        whole = whole or (stage.box[d + 1].low == integer(0) and bound.high == integer(inner))
        if not whole or inner < 1 or stage.extents[d] <= 1:
            continue
        if all(p.strides[d] == p.strides[d + 1] * inner for p in stores) and all(
            _can_merge(unit, b, f"x{d}", f"x{d + 1}", inner) for b in parts
        ):
            stage = _merge_axes(stage, d, inner)
    return stage


def _merge_axes(stage: Stage, d: int, inner: int) -> Stage:
    outer = stage.box[d]
    low, high = (fold("mul", e, integer(inner)) for e in (outer.low, outer.high))
    box = (*stage.box[:d], AxisBound(integer(0), integer(1)), AxisBound(low, high, outer.solid), *stage.box[d + 2 :])
    extents = (*stage.extents[:d], 1, stage.extents[d] * inner, *stage.extents[d + 2 :])
    sizes = tuple(a.extent for a in stage.root.axes)
    sizes = (*sizes[:d], 1, sizes[d] * inner, *sizes[d + 2 :])
    computes = tuple(replace(c, axes=tuple(Axis(a.name, n) for a, n in zip(c.axes, sizes, strict=True))) for c in stage.computes)
    return replace(stage, computes=computes, box=box, extents=extents)


def collapse_reduction(unit: FunctionContext, c: Compute) -> Compute:
    """Return ``c`` with neighbouring reduction axes joined where its loads allow."""
    parts = collect_bodies(unit, (c,))
    for k in reversed(range(len(c.reduce) - 1)):
        a, b = c.reduce[k], c.reduce[k + 1]
        if unit.ends.keys() & {(c.name, a.name), (c.name, b.name)}:
            continue
        if a.extent > 1 and all(_can_merge(unit, p, f"{c.name}.{a.name}", f"{c.name}.{b.name}", b.extent) for p in parts):
            both = (Axis(a.name, 1), Axis(b.name, a.extent * b.extent))
            c = replace(c, reduce=(*c.reduce[:k], *both, *c.reduce[k + 2 :]))
    return c


def _can_merge(unit: FunctionContext, part: StageBody, outer: str, inner: str, extent: int) -> bool:
    """Return True if a body uses the two axes only in addresses, and there only as ``outer * extent + inner``."""
    pair = {outer, inner}
    if _axes_outside_loads(part.body) & pair:
        return False
    for load in ex.loads(part.body):
        if not ex.axes_of(load) & pair:
            continue
        if load.fill is not None and any(ex.axes_of(i) & pair for i in load.indices):
            return False
        if any(isinstance(n, Load) for i in load.indices for n in ex.walk(i)):
            return False
        if load.tensor in unit.inlined:
            continue
        steps = load_step(unit, load, outer), load_step(unit, load, inner)
        if steps[0] is None or steps[1] is None or steps[0] != steps[1] * extent:
            return False
    return True


def _axes_outside_loads(e: Expr) -> set[str]:
    if isinstance(e, Load | Const):
        return set()
    kids = ex.children(e)
    return {n for k in kids for n in _axes_outside_loads(k)} if kids else ex.axes_of(e)
