"""Quantised operators and others that run on the host: a graph with one is several segments."""

from __future__ import annotations

from typing import Final

import numpy as np

from rammer.testing.graphs.draw import Draw, Reject, Val
from rammer.testing.graphs.operators.elementwise import small
from rammer.testing.graphs.operators.images import image
from rammer.testing.graphs.operators.registry import describe

#: Powers of two: what is quantised then is often exact, and where a tie is, the evaluation sees it.
STEPS: Final = (0.03125, 0.0625, 0.25, 1.0)


def point(d: Draw, dtype: str) -> int:
    """A zero point."""
    return d.integer(0, 200) if dtype == "uint8" else d.integer(-50, 50) if dtype == "int8" else 0


@describe("QuantizeLinear", weight=0.7)
def quantize(d: Draw, op: str) -> Val:
    x = d.pick(("float32",), (0, 4), where=small)
    target = d.one(["uint8", "int8"])
    axis = d.integer(-x.rank, x.rank - 1) if x.rank and d.since(op) >= 13 and d.chance(0.4) else None
    shape = () if axis is None else (x.shape[axis],)
    if 0 in shape:
        raise Reject("no scales")
    scale = d._plain(np.asarray(d.rng.choice(STEPS, shape), np.float32))
    zero = d._plain(np.full(shape, point(d, target), target)) if target == "int8" or d.chance(0.7) else ""
    return d.add(op, [x.name, scale, zero], axis=axis)


@describe("DequantizeLinear", weight=0.7)
def dequantize(d: Draw, op: str) -> Val:
    x = d.pick(("uint8", "int8", "int32"), (0, 4))
    axis = d.integer(-x.rank, x.rank - 1) if x.rank and d.since(op) >= 13 and d.chance(0.4) else None
    shape = () if axis is None else (x.shape[axis],)
    if 0 in shape:
        raise Reject("no scales")
    scale = d._plain(np.asarray(d.rng.choice(STEPS, shape), np.float32))
    zero = d._plain(np.full(shape, point(d, x.dtype), x.dtype)) if x.dtype != "int32" and d.chance(0.7) else ""
    return d.add(op, [x.name, scale, zero], axis=axis)


@describe("DynamicQuantizeLinear", weight=0.4)
def dynamic(d: Draw, op: str) -> Val:
    x = d.pick(("float32",), (1, 4), where=lambda v: small(v) and v.size > 0)
    # Other voices depart from ONNX's words over zeros alone; a row of other numbers beside them is none.
    row = d.fresh("float32", (1, *x.shape[1:]), 1, 2)
    joined = d.add("Concat", [x.name, row.name], axis=0)
    return d.add(op, [joined.name], [True, True, True])


@describe("MatMulInteger", weight=0.5)
def matmul_integer(d: Draw, op: str) -> Val:
    x = d.pick(("uint8", "int8"), (2, 3))
    y = d.fresh(d.one(["uint8", "int8"]), (x.shape[-1], d.extent()), -20, 20)
    points = [d._plain(np.asarray(point(d, v.dtype), v.dtype)) if d.chance(0.5) else "" for v in (x, y)]
    return d.add(op, [x.name, y.name, *points])


@describe("ConvInteger", weight=0.4)
def conv_integer(d: Draw, op: str) -> Val:
    x = image(d, op, (4, 4))
    if 0 in x.shape:
        raise Reject("no window fits")
    kernel = [d.integer(1, min(n, 3)) for n in x.shape[2:]]
    w = d.fresh("uint8" if x.dtype == "uint8" else "int8", (d.integer(1, 4), x.shape[1], *kernel), -20, 20, constant=True)
    points = [d._plain(np.asarray(point(d, v.dtype), v.dtype)) if d.chance(0.4) else "" for v in (x, w)]
    return d.add(op, [x.name, w.name, *points], strides=d.one([None, [1, 2], [2, 1]]), pads=d.one([None, [0, 1, 1, 0]]))


@describe("QLinearMatMul", weight=0.4)
def qlinear_matmul(d: Draw, op: str) -> Val:
    x = d.pick(("uint8",), (2, 2))
    y = d.fresh("uint8", (x.shape[-1], d.extent()), 0, 50, constant=True)
    numbers = []
    for _ in range(3):
        numbers += [d.scalar("float32", d.one(STEPS)), d._plain(np.asarray(point(d, "uint8"), "uint8"))]
    return d.add(op, [x.name, *numbers[:2], y.name, *numbers[2:]])


@describe("Det", weight=0.4)
def determinant(d: Draw, op: str) -> Val:
    n = d.integer(1, 4)
    x = d.fresh("float32", (*d.shape(0, 2), n, n))
    return d.add(op, [x.name])
