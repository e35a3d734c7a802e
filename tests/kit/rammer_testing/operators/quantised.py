"""Quantised operators, quantised operator groups in the style of quantisers, and one host operator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from onnx import helper

from rammer_testing.graphs.case import Array
from rammer_testing.operators.draw import Draw, DrawnValue, Reject
from rammer_testing.operators.elementwise import small
from rammer_testing.operators.images import image, window
from rammer_testing.operators.registry import describe

#: Powers of two: quantisation is then often exact, and the evaluation detects ties.
STEPS: Final = (0.03125, 0.0625, 0.25, 1.0)
#: Scales of sums of products.
COARSE: Final = (0.25, 1.0, 8.0)


def point(d: Draw, dtype: str) -> int:
    """Return a random zero point; that of a single operator may be the largest code."""
    if d.alone and dtype != "int32" and d.chance(0.1):
        return int(np.iinfo(dtype).max)
    return d.integer(0, 200) if dtype.startswith("uint") else 0 if dtype == "int32" else d.integer(-50, 50)


def steps(d: Draw, dtype: str = "float32", shape: tuple[int, ...] = ()) -> str:
    """Return an operand of scales: of a single operator any number, and also computed."""
    values = d.rng.uniform(0.05, 3, shape) if d.alone else d.rng.choice(STEPS, shape)
    return _scaled(d, np.asarray(values, dtype))


def coarse(d: Draw) -> str:
    """Return an operand of one scale for sums of products."""
    return _scaled(d, np.asarray(d.rng.uniform(0.1, 8) if d.alone else d.one(COARSE), np.float32))


def _scaled(d: Draw, array: Array) -> str:
    return d.with_elements(array).name if d.alone else d.plain(array)


def points(d: Draw, dtype: str, shape: tuple[int, ...] = ()) -> str:
    """Return an operand of zero points."""
    numbers = d.rng.permutation(point(d, dtype) + np.arange(int(np.prod(shape))) % 9)
    return _scaled(d, np.asarray(np.minimum(numbers, np.iinfo(dtype).max).reshape(shape), dtype))


def result(d: Draw, x: DrawnValue) -> list[str]:
    """Return the operands of a result's scale and zero point."""
    kind = x.dtype if d.alone and d.chance(0.7) else d.one(["uint8", "int8"])
    return [coarse(d), points(d, kind)]


@dataclass(frozen=True)
class Grain:
    """The elements that share a scale: the whole tensor, an index along an axis, or a block of indices along it."""

    axis: int | None
    block: int | None
    shape: tuple[int, ...]


def grain(d: Draw, op: str, x: DrawnValue) -> Grain:
    """Return a granularity that the operator supports at this opset."""
    if not x.rank or d.since(op) < 13 or d.chance(0.5):
        return Grain(None, None, ())
    axis = d.integer(-x.rank, x.rank - 1)
    extent = x.shape[axis]
    if 0 in x.shape:
        raise Reject("no scales")
    if not d.takes(op, "block_size") or d.chance(0.5):
        return Grain(axis, None, (extent,))
    block = d.integer(1, extent)
    blocks = list(x.shape)
    blocks[axis] = -(-extent // block)
    return Grain(axis, block, tuple(blocks))


@describe("QuantizeLinear", weight=1.4)
def quantize(d: Draw, op: str) -> DrawnValue:
    if not d.alone and d.chance(0.6):
        return group(d)
    narrow = d.since(op) >= 19 and d.chance(0.2)
    x = d.pick(("float16",) if narrow else ("float32",), (0, 4), where=small)
    x = d.fresh(x.dtype, x.shape, -40, 40) if d.alone else x
    if not narrow and d.chance(0.1):  # beyond the range of 32 bits
        x = d.fresh("float32", x.shape, -1e11, 1e11)
    target = d.one(["uint8", "int8", "uint16", "int16"] if d.since(op) >= 21 else ["uint8", "int8"])
    g = grain(d, op, x)
    given: dict[str, Any] = {"axis": g.axis, "block_size": g.block}
    zero, named = "", d.takes(op, "output_dtype") and d.chance(0.4)
    if named:
        given["output_dtype"] = int(helper.np_dtype_to_tensor_dtype(np.dtype(target)))
    if (target != "uint8" and not named) or d.chance(0.6):
        zero = points(d, target, g.shape)
    return d.add(op, [x.name, steps(d, x.dtype, g.shape), zero], **given)


@describe("DequantizeLinear", weight=0.7)
def dequantize(d: Draw, op: str) -> DrawnValue:
    x = d.pick(("uint8", "int8", "int32", *(("uint16", "int16") if d.since(op) >= 21 else ())), (0, 4), special=0.3)
    g = grain(d, op, x)
    zero = points(d, x.dtype, g.shape) if x.dtype != "int32" and d.chance(0.7) else ""
    scale = steps(d, "float16" if d.since(op) >= 19 and d.chance(0.2) else "float32", g.shape)
    return d.add(op, [x.name, scale, zero], axis=g.axis, block_size=g.block)


@describe("DynamicQuantizeLinear", weight=0.4)
def dynamic(d: Draw, op: str) -> DrawnValue:
    x = d.pick(("float32",), (1, 4), where=lambda v: small(v) and v.size > 0)
    if d.alone:
        return d.add(op, [d.fresh("float32", x.shape, d.one([-3, 0, 1])).name], [True, True, True])
    # Other implementations deviate from ONNX for all-zero tensors only; a row of other numbers prevents this.
    row = d.fresh("float32", (1, *x.shape[1:]), 1, 2)
    joined = d.add("Concat", [x.name, row.name], axis=0)
    return d.add(op, [joined.name], [True, True, True])


@describe("MatMulInteger", weight=0.5)
def matmul_integer(d: Draw, op: str) -> DrawnValue:
    x = d.pick(("uint8", "int8"), (2, 3), special=0.3)
    y = d.fresh(d.one(["uint8", "int8"]), (x.shape[-1], d.extent()), -20, 20, special=0.3)
    return d.add(op, [x.name, y.name, *(points(d, v.dtype) if d.chance(0.5) else "" for v in (x, y))])


@describe("ConvInteger", "QLinearConv", weight=0.6)
def quantised_conv(d: Draw, op: str) -> DrawnValue:
    x = image(d, op)
    if 0 in x.shape:
        raise Reject("no window fits")
    channels, kernel = x.shape[1], [d.integer(1, min(n, 3)) for n in x.shape[2:]]
    group = d.one([g for g in range(1, channels + 1) if channels % g == 0])
    features = group * d.integer(1, 3)
    fixed = None if d.alone else True
    kinds = ["uint8"] if x.dtype == "uint8" and d.chance(0.5) else ["int8"]
    w = d.fresh(d.one(kinds), (features, channels // group, *kernel), -20, 20, constant=fixed)
    if op == "ConvInteger":
        each = (features,) if d.chance(0.3) else ()
        names = [x.name, w.name, points(d, x.dtype) if d.chance(0.4) else "", points(d, w.dtype, each) if d.chance(0.4) else ""]
    else:
        each = (features,) if d.chance(0.4) else ()
        names = [x.name, steps(d), points(d, x.dtype), w.name, steps(d, shape=each), points(d, w.dtype, each)]
        names += result(d, x)
        names += [d.fresh("int32", (features,), -500, 500, constant=fixed).name] if d.chance(0.5) else []
    given = window(d, op, x.shape[2:], kernel)
    return d.add(
        op, names, group=group if group > 1 or d.chance(0.2) else None, kernel_shape=kernel if d.chance(0.5) else None, **given
    )


@describe("QLinearMatMul", weight=0.6)
def qlinear_matmul(d: Draw, op: str) -> DrawnValue:
    x = d.pick(("uint8", "int8"), (2, 3), special=0.3)
    # ONNX Runtime multiplies operands of one type only.
    kind = x.dtype if d.alone and d.chance(0.8) else d.one(["uint8", "int8"])
    y = d.fresh(kind, (x.shape[-1], d.extent()), -50, 50, constant=None if d.alone else True, special=0.3)
    each = (y.shape[1],) if y.shape[1] and d.chance(0.3) else ()
    names = [x.name, steps(d), points(d, x.dtype), y.name, steps(d, shape=each), points(d, y.dtype, each)]
    return d.add(op, [*names, *result(d, x)])


# --- quantised groups: dequantised codes, operators on them, codes again -------------------------------------------


@dataclass(frozen=True)
class Scaled:
    """Dequantised numbers with the scale and zero point used for them."""

    value: DrawnValue
    scale: str
    zero: str


def numbers(d: Draw, codes: DrawnValue) -> Scaled:
    """Return dequantised codes with one scale."""
    scale, zero = steps(d), points(d, codes.dtype)
    return Scaled(d.add("DequantizeLinear", [codes.name, scale, zero]), scale, zero)


def weights(d: Draw, kind: str, shape: tuple[int, ...], axis: int) -> DrawnValue:
    """Return dequantised constant codes, with one scale or one per index of an axis. The zero point is mostly 0."""
    kind = d.one(["int8", kind])
    codes = d.fresh(kind, shape, -99 if kind == "int8" else 0, 99, constant=True)
    each = (shape[axis],) if d.since("DequantizeLinear") >= 13 and shape[axis] and d.chance(0.4) else ()
    zero = points(d, kind, each) if d.chance(0.4) else d.plain(np.zeros(each, kind))
    return d.add("DequantizeLinear", [codes.name, steps(d, shape=each), zero], axis=axis if each else None)


def group(d: Draw) -> DrawnValue:
    """Add DequantizeLinear, one to three operators and QuantizeLinear; the scale is the same if elements only move."""
    x = numbers(d, d.pick(("uint8", "int8"), (1, 4)))
    y = x.value
    kind = "uint8" if str(d.value(x.zero).dtype) == "uint8" else "int8"
    for _ in range(d.integer(1, 2)):
        y = d.one([_product, _windows, _moves, _moves, _added])(d, y, kind)
    if d.chance(0.5):
        y = d.add("Relu", [y.name])
    same = d.chance(0.4)
    return d.add("QuantizeLinear", [y.name, x.scale if same else coarse(d), x.zero])


def _product(d: Draw, x: DrawnValue, kind: str) -> DrawnValue:
    if x.rank < 2 or x.size == 0:
        raise Reject("no rows")
    if d.chance(0.3) and x.rank == 2:
        turned = d.chance(0.5)
        n = d.integer(1, 6)
        w = weights(d, kind, (n, x.shape[1]) if turned else (x.shape[1], n), 0 if turned else 1)
        return d.add("Gemm", [x.name, w.name], transB=int(turned), alpha=d.one([None, 0.5]))
    return d.add("MatMul", [x.name, weights(d, kind, (x.shape[-1], d.integer(1, 6)), 1).name])


def _windows(d: Draw, x: DrawnValue, kind: str) -> DrawnValue:
    if x.rank < 3 or 0 in x.shape:
        raise Reject("no image")
    kernel = [d.integer(1, min(n, 3)) for n in x.shape[2:]]
    op = d.one(["Conv", "Conv", "MaxPool", "AveragePool", "GlobalAveragePool"])
    if op == "GlobalAveragePool":
        return d.add(op, [x.name])
    given = window(d, op, x.shape[2:], kernel)
    if op != "Conv":
        return d.add(op, [x.name], kernel_shape=kernel, **given)
    group = d.one([g for g in range(1, x.shape[1] + 1) if x.shape[1] % g == 0])
    features = group * d.integer(1, 3)
    names = [x.name, weights(d, kind, (features, x.shape[1] // group, *kernel), 0).name]
    if d.chance(0.5):
        bias = d.fresh("int32", (features,), -500, 500, constant=True)
        names.append(d.add("DequantizeLinear", [bias.name, steps(d)]).name)
    return d.add(op, names, group=group if group > 1 else None, **given)


def _moves(d: Draw, x: DrawnValue, kind: str) -> DrawnValue:
    op = d.one(["Transpose", "Flatten", "Concat", "Identity", "Expand", "Tile"])
    if op == "Transpose":
        return d.add(op, [x.name], perm=[int(i) for i in d.rng.permutation(x.rank)])
    if op == "Concat":
        other = numbers(d, d.fresh(kind, x.shape, 0, 99)).value if d.chance(0.5) else x
        return d.add(op, [x.name, other.name], axis=d.integer(0, x.rank - 1))
    if op in ("Expand", "Tile"):
        more = [2, *x.shape] if op == "Expand" else [d.integer(1, 2) for _ in x.shape]
        return d.add(op, [x.name, d.static(more)])
    return d.add(op, [x.name])


def _added(d: Draw, x: DrawnValue, kind: str) -> DrawnValue:
    other = numbers(d, d.fresh(kind, x.shape, 0, 99)).value
    return d.add(d.one(["Add", "Mul", "Sub"]), [x.name, other.name])
