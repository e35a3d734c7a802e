"""Kernel family ``sliced``: a task whose operands exceed a tile takes its longest reduction in slices.

The exchange delivers one slice of the reduction axis after another into the same memory, and the task
accumulates. Other devices run such operators with their generic kernel: the result is the same sum.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from rammer.ir import expr as ex
from rammer.ir.compute import Axis, Compute
from rammer.ir.expr import Expr, Load, Op, Ref
from rammer.ir.operator import Connection, ROperator

FAMILY = "sliced"

#: Numbers of slices tried in turn.
SLICES = (2, 4, 8, 16, 32, 64, 128)

#: Prefix of the partial results' names.
PARTIAL = "__slice"

_STEP = {"sum": "add", "prod": "mul", "max": "max", "min": "min"}


def sliced(operator: ROperator, slices: int) -> ROperator:
    """``operator`` with its longest reduction cut in ``slices``."""
    return replace(operator, family=FAMILY, config=(("slices", slices),))


def slices_of(operator: ROperator) -> int:
    """Number of slices, 1 for every other family."""
    return dict(operator.config).get("slices", 1) if operator.family == FAMILY else 1


def longest(operator: ROperator) -> tuple[Compute, Axis] | None:
    """The longest reduction axis and its Compute; None if the operator reduces nothing."""
    pairs = [(c, r) for c in operator.computes for r in c.reduce]
    return max(pairs, key=lambda p: p[1].extent, default=None)


@lru_cache(maxsize=4096)
def unrolled(operator: ROperator) -> ROperator:
    """The same operator with one Compute a slice and one that combines them; others unchanged."""
    count, found = slices_of(operator), longest(operator)
    if count == 1 or found is None:
        return operator
    compute, axis = found
    width = -(-axis.extent // count)
    starts = range(0, axis.extent, width)
    parts = [_slice(compute, axis, number, start, width) for number, start in enumerate(starts)]
    total: Expr = _element(parts[0])
    for part in parts[1:]:
        total = Op(_STEP[compute.combiner or "sum"], (total, _element(part)))
    whole = Compute(compute.name, compute.dtype, compute.axes, total, origin=compute.origin)
    computes = [p for c in operator.computes for p in ([*parts, whole] if c is compute else [c])]
    links = _links(operator, compute, parts)
    return replace(operator, computes=tuple(computes), connections=links, family="", config=())


def _slice(compute: Compute, axis: Axis, number: int, start: int, width: int) -> Compute:
    size = min(width, axis.extent - start)
    body = ex.substitute(compute.body, {axis.name: ex.add(axis.name, start)})
    reduce = tuple(replace(r, extent=size) if r is axis else r for r in compute.reduce)
    name = f"{PARTIAL}{number}_{compute.name}"
    return Compute(name, compute.dtype, compute.axes, body, reduce, compute.combiner, compute.origin)


def _element(part: Compute) -> Load:
    return Load(part.name, tuple(Ref(a.name) for a in part.axes))


def _links(operator: ROperator, compute: Compute, parts: list[Compute]) -> tuple[Connection, ...]:
    """Old connections into the sliced Compute now lead to every slice; slices meet their sum in the tile."""
    links = []
    for link in operator.connections:
        if link.consumer == compute.name:
            links += [replace(link, consumer=p.name) for p in parts]
        else:
            links.append(link)
    return (*links, *(Connection(p.name, compute.name, "veu") for p in parts))
