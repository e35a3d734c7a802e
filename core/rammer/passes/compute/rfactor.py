"""Splitting of tasks whose operands exceed a vEU's memory: reductions by ``rfactor``, tables into pieces (``split_gather.py``).

A device that stages all operands of a task cannot hold those of one output element of a very deep contraction. VGG's first fully
connected layer reads 25,088 weights per output. The reduction becomes two ordinary Computes, partial sums and their sum. Tables
that are indexed by data are split likewise, such as a column of a table of 37,000 words.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from rammer.fusion.tile_traffic import task_footprint
from rammer.ir import expr as ex
from rammer.ir.compute import Axis, Compute, ComputeGraph
from rammer.ir.device import VDevice
from rammer.ir.expr import Expr, Load
from rammer.ir.names import Names, make_identifier
from rammer.ir.operator import ROperator
from rammer.ir.types import TensorType
from rammer.passes.compute.split_gather import find_gather_loads, in_pieces


def rfactor(compute: Compute, axis: str, parts: int, name: str = "") -> tuple[Compute, Compute]:
    """Rewrite ``sum[k] f(k)`` to ``partial[.., p] = sum[k'] f(p*K' + k')`` and ``sum[p] partial[.., p]``.

    Partial sums of float16 are float32, so that the result is rounded once. ``name`` is the name of the partial sums. Raises
    ValueError if ``parts`` does not divide the axis' extent or ``axis`` is not reduced."""
    extents = {r.name: r.extent for r in compute.reduce}
    if axis not in extents:
        raise ValueError(f"compute {compute.name}: {axis} is not a reduction axis")
    inner, rest = divmod(extents[axis], parts)
    if rest:
        raise ValueError(f"compute {compute.name}: {parts} parts do not divide {axis}:{extents[axis]}")
    taken = {a.name for a in (*compute.axes, *compute.reduce)}
    part = next(n for n in (f"{axis}p", *(f"{axis}p{i}" for i in range(len(taken) + 1))) if n not in taken)
    body = ex.substitute(compute.body, {axis: ex.make_add(ex.make_mul(part, inner), axis)})
    partial = replace(
        compute,
        dtype="float32" if compute.dtype == "float16" and compute.combiner in ("sum", "prod") else compute.dtype,
        name=name or f"{compute.name}_partial",
        axes=(*compute.axes, Axis(part, parts)),
        body=body,
        reduce=tuple(Axis(r.name, inner) if r.name == axis else r for r in compute.reduce),
    )
    whole: Expr = Load(partial.name, tuple(ex.Ref(a.name) for a in partial.axes))
    return partial, replace(compute, body=whole, reduce=(Axis(part, parts),))


def split_deep(graph: ComputeGraph, device: VDevice) -> ComputeGraph:
    """Return ``graph`` with every reduction and table map split whose smallest task exceeds a vEU of ``device``."""
    computes: list[Compute] = []
    types, taken = dict(graph.types), Names(graph.types)
    for c in graph.computes:
        parts = (_split_reduction if c.reduce else _split_table)(c, types, device, taken)
        computes += parts or (c,)
        types |= {p.name: p.type for p in parts or ()}
    return replace(graph, computes=tuple(computes), types=types) if len(types) > len(graph.types) else graph


def _split_reduction(
    compute: Compute, types: Mapping[str, TensorType], device: VDevice, taken: Names
) -> tuple[Compute, Compute] | None:
    """Return the smallest split along the longest reduction axis after which the task of one output element fits."""
    if _can_fit_task(compute, types, device):
        return None
    longest = max(compute.reduce, key=lambda r: r.extent)
    name = make_identifier(f"{compute.name}_partial", taken)
    for parts in _list_divisors(longest.extent)[1:]:
        partial, final = rfactor(compute, longest.name, parts, name)
        known = {**types, partial.name: partial.type}
        if _can_fit_task(partial, known, device) and _can_fit_task(final, known, device):
            return partial, final
    return None  # the tile search reports the operator that does not fit


def _split_table(compute: Compute, types: Mapping[str, TensorType], device: VDevice, taken: Names) -> tuple[Compute, ...] | None:
    """Return a split of a map's longest table into almost the fewest pieces (within a fifth) that let one element's task fit."""
    if _can_fit_task(compute, types, device):
        return None
    found = find_gather_loads(compute, [types[ld.tensor].shape for ld in compute.loads])
    if not found:
        return None
    extent, load, dim = max(found, key=lambda f: f[0])
    names, parts = (f"{compute.name}_pieces", f"{compute.name}_each"), 2
    while parts <= extent:
        made = in_pieces(compute, load, dim, types[load.tensor], parts, names)
        known = {**types, **{c.name: c.type for c in made}}
        if all(_can_fit_task(c, known, device) for c in made[1:]):
            pieces, each = (make_identifier(n, taken) for n in names)
            return in_pieces(compute, load, dim, types[load.tensor], parts, (pieces, each))
        parts = parts * 6 // 5 + 1
    return None  # as above


def _list_divisors(number: int) -> list[int]:
    low = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return low + [number // n for n in reversed(low) if n * n != number]


def _can_fit_task(compute: Compute, types: Mapping[str, TensorType], device: VDevice) -> bool:
    capacity = device.layer("veu").capacity
    operator = ROperator(compute.name, (compute,), (), (compute.name,), (1,) * len(compute.axes))
    if not capacity or not compute.points:
        return True
    return task_footprint(operator, operator.boxes(operator.inner_box(), types), types, device) <= capacity
