"""Normalisation operators and softmax."""

from __future__ import annotations

import numpy as np

from rammer_testing.operators.draw import Draw, DrawnValue, Reject
from rammer_testing.operators.elementwise import small
from rammer_testing.operators.images import image
from rammer_testing.operators.registry import describe
from rammer_testing.operators.shapes import axis_of, some_axes


def parameter(d: Draw, dtype: str, shape: tuple[int, ...], positive: bool = False) -> str:
    """Return a scale, shift, mean or variance, mostly a constant."""
    return d.fresh(dtype, shape, 0.25 if positive else -1.5, 1.5, constant=d.chance(0.75)).name


def spread(v: DrawnValue) -> bool:
    """Return True if normalisation is well defined: some elements, not all equal along any normalised axis."""
    return small(v) and v.size > 0 and v.array is not None and float(v.array.std()) > 0.05


@describe("Softmax", "LogSoftmax", "Hardmax", weight=1.3)
def softmax(d: Draw, op: str) -> DrawnValue:
    old = d.since(op) < 13
    x = d.bounded(d.pick(d.types(op), (1, 5), special=0.2), -50, 50)
    axis = d.integer(-x.rank if d.opset >= 11 else 0, x.rank - 1)
    if old and d.opset < 11 and d.chance(0.1):
        axis = x.rank
    return d.add(op, [x.name], axis=axis if d.chance(0.8) else None)


@describe("BatchNormalization", weight=1.5)
def batch_normalization(d: Draw, op: str) -> DrawnValue:
    x = image(d, op, (2, 5) if d.chance(0.3) else (3, 4))
    c = (x.shape[1],) if x.rank > 1 else (1,)
    names = [parameter(d, x.dtype, c), parameter(d, x.dtype, c), parameter(d, x.dtype, c), parameter(d, x.dtype, c, True)]
    return d.add(op, [x.name, *names], epsilon=d.one([None, 1e-3]), momentum=d.one([None, 0.8]))


@describe("InstanceNormalization")
def instance_normalization(d: Draw, op: str) -> DrawnValue:
    x = _spread_image(d, op)
    c = (x.shape[1],)
    return d.add(op, [x.name, parameter(d, x.dtype, c), parameter(d, x.dtype, c)], epsilon=d.one([None, 1e-2]))


def _spread_image(d: Draw, op: str) -> DrawnValue:
    x = image(d, op)
    if not spread(x) and not d.alone:
        raise Reject("all equal")
    return x


@describe("GroupNormalization")
def group_normalization(d: Draw, op: str) -> DrawnValue:
    x = _spread_image(d, op)
    groups = d.one([g for g in range(1, x.shape[1] + 1) if x.shape[1] % g == 0])
    c = (x.shape[1] if d.since(op) >= 21 else groups,)
    return d.add(op, [x.name, parameter(d, x.dtype, c), parameter(d, x.dtype, c)], num_groups=groups, epsilon=d.one([None, 1e-2]))


@describe("LayerNormalization", "RMSNormalization", weight=1.5)
def layer_normalization(d: Draw, op: str) -> DrawnValue:
    x = d.pick(d.types(op), (1, 4), where=spread)
    axis = axis_of(d, x.rank)
    shape = x.shape[axis % x.rank :]
    names = [parameter(d, x.dtype, shape)]
    if op == "LayerNormalization" and d.chance(0.5):
        names.append(parameter(d, x.dtype, shape))
    wanted = [True, d.chance(0.2), d.chance(0.2)] if op == "LayerNormalization" else [True]
    return d.add(op, [x.name, *names], wanted, axis=axis if axis != -1 or d.chance(0.5) else None, epsilon=d.one([None, 1e-3]))


@describe("MeanVarianceNormalization")
def mean_variance(d: Draw, op: str) -> DrawnValue:
    x = d.pick(d.types(op), (4, 4), where=spread) if d.chance(0.5) else d.pick(d.types(op), (1, 4), where=spread)
    if x.rank == 4 and d.chance(0.3):
        return d.add(op, [x.name])
    axes = [a % x.rank for a in some_axes(d, x.rank, 1)]
    # The operator has no effective epsilon: for equal elements along the axes, libraries differ on 0 / 0.
    if x.array is None or float(x.array.astype(np.float64).std(axis=tuple(axes)).min()) < 0.05:
        raise Reject("all equal")
    return d.add(op, [x.name], axes=sorted(axes))


@describe("LpNormalization")
def lp_normalization(d: Draw, op: str) -> DrawnValue:
    x = d.pick(d.types(op), (1, 4), where=None if d.alone else spread)
    if d.alone and x.array is not None and d.chance(0.2):  # rows of zeros stay zeros
        x = d.with_elements(np.where(np.arange(x.shape[-1]) < 1, np.asarray(0, x.dtype), x.array))
    return d.add(op, [x.name], axis=axis_of(d, x.rank) if d.chance(0.8) else None, p=d.one([None, 1, 2]))
