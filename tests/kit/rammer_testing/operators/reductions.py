"""Reductions, extremes and running sums."""

from __future__ import annotations

import numpy as np

from rammer.frontend.op_traits import Trait, operators
from rammer.ir.types import is_float
from rammer_testing.operators.draw import Draw, DrawnValue, Reject
from rammer_testing.operators.elementwise import small
from rammer_testing.operators.registry import describe
from rammer_testing.operators.shapes import axis_of, some_axes

_POSITIVE = ("ReduceLogSum",)
_WRAPPED = ("ReduceSum", "ReduceProd", "ReduceMax", "ReduceMin", "ReduceL1")
_ROUNDED = ("ReduceLogSum", "ReduceLogSumExp", "ReduceL2")


@describe(*operators(Trait.REDUCTION))
def reduce(d: Draw, op: str) -> DrawnValue:
    kinds = d.types(op)
    if d.alone and d.chance(0.5):  # integers of all sizes where sums wrap around, and values at which logarithms break
        kinds = tuple(t for t in kinds if is_float(t) or op in _WRAPPED)
    x = d.pick(kinds, (0, 5), where=small, special=0.2 if all(is_float(t) or op in _WRAPPED for t in kinds) else 0.0)
    if d.alone:
        return _reduced(d, op, x)
    if op in _ROUNDED and not is_float(x.dtype):
        raise Reject("a root or logarithm that is nearly whole is cut to either neighbour")
    if op in _POSITIVE:
        x = d.bounded(x, 0.05, 20)
    if op == "ReduceProd":
        x = d.bounded(x, 0.5, 1.5) if is_float(x.dtype) else d.bounded(x, 0, 2)
    if op == "ReduceLogSumExp":
        x = d.bounded(x, -30, 30)
    return _reduced(d, op, x)


def _reduced(d: Draw, op: str, x: DrawnValue) -> DrawnValue:
    axes = some_axes(d, x.rank, 1)
    nothing = 0 in [x.shape[a] for a in axes or range(x.rank)]
    if nothing and (op == "ReduceMean" or (op in ("ReduceMax", "ReduceMin") and not d.alone)):
        raise Reject("the mean or extreme of nothing")
    keep = d.one([None, 0, 1])
    if d.since(op) < 18 and (op != "ReduceSum" or d.since(op) < 13):
        axes = [a % x.rank for a in axes] if d.opset < 11 else axes
        return d.add(op, [x.name], axes=axes if axes and d.chance(0.8) else None, keepdims=keep)
    noop = d.one([None, None, 0, 1])
    if noop == 1 and d.chance(0.5):
        return d.add(op, [x.name, d.static([]) if d.chance(0.5) else ""], keepdims=keep, noop_with_empty_axes=1)
    return d.add(op, [x.name, d.static(axes) if axes and d.chance(0.8) else ""], keepdims=keep, noop_with_empty_axes=noop or None)


@describe("ArgMax", "ArgMin")
def arg_extreme(d: Draw, op: str) -> DrawnValue:
    x = d.pick(d.types(op), (1, 4), where=lambda v: v.size > 0, special=0.5)
    axis = axis_of(d, x.rank) if d.since(op) >= 11 else d.integer(0, x.rank - 1)
    last = d.one([None, 0, 1]) if d.takes(op, "select_last_index") else None
    return d.add(op, [x.name], axis=axis if d.chance(0.8) else None, keepdims=d.one([None, 0, 1]), select_last_index=last)


@describe("CumSum", "CumProd")
def cumulative(d: Draw, op: str) -> DrawnValue:
    x = d.pick(d.types(op), (1, 4), where=small)
    if op == "CumProd":
        x = d.bounded(x, 0.5, 1.5) if is_float(x.dtype) else d.bounded(x, 0, 2)
    axis = d.plain(np.asarray(axis_of(d, x.rank), d.one(["int64", "int32"])))
    return d.add(op, [x.name, axis], exclusive=d.one([None, 0, 1]), reverse=d.one([None, 0, 1]))


@describe("TopK")
def top_k(d: Draw, op: str) -> DrawnValue:
    x = d.pick(d.types(op), (1, 4), where=lambda v: v.size > 0 and (not d.alone or v.size <= 100))
    if d.alone:  # distinct values: the order of ties is undefined before opset 24
        x = d.with_elements(d.rng.permutation(x.size).reshape(x.shape).astype(x.dtype))
    axis = d.integer(0, x.rank - 1) if d.since(op) < 11 else axis_of(d, x.rank)
    count = d.static([d.integer(0 if d.alone and d.chance(0.1) else 1, x.shape[axis])])
    extra = {"largest": d.one([None, 0, 1])} if d.since(op) >= 11 else {}
    return d.add(op, [x.name, count], [True, True], axis=axis, **extra)
