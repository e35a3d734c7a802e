"""Reductions, normalisations and other operators along rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from rammer.frontend.op_traits import Trait, operators
from rammer_testing.operators.case import OperandDraw, OperatorCase, family

_AXES_OPERAND = {"ReduceSum": 13}


@family(*operators(Trait.REDUCTION))
def reduction(draw: OperandDraw, op: str) -> OperatorCase:
    """Draw a case with any axes, none or all; empty tensors; values at which logarithms and exponentials break."""
    opset = draw.opset(op)
    shape = draw.shape(0, 4, least=draw.pick(1, 1, 1, 0))
    rank, empty = len(shape), 0 in shape
    special = draw.pick(0.0, 0.0, 0.2)
    dtype = draw.dtype(op, opset)
    if empty and op == "ReduceMean":
        dtype = "float32"  # an integer mean of no elements is undefined
    if not dtype.startswith("float") and op not in ("ReduceSum", "ReduceProd", "ReduceMax", "ReduceMin", "ReduceL1"):
        special = 0.0  # a mean or a root of sums that wrap around is undefined
    x = draw.array(shape, dtype, special, low=draw.pick(0, -3), high=draw.pick(3, 3, 200 if dtype != "int8" else 3))
    axes = draw.random.sample(range(rank), draw.random.randint(0, rank))
    axes = [a - rank if draw.chance(0.3) and opset >= 11 else a for a in axes]
    given = None if draw.chance(0.2) or not axes else axes
    attributes: dict[str, Any] = {"keepdims": draw.pick(None, 0, 1)}
    if opset < _AXES_OPERAND.get(op, 18):
        return OperatorCase(op, opset, (x,), {**attributes, "axes": given})
    if draw.chance(0.3):
        attributes["noop_with_empty_axes"] = 1
        given = draw.pick(given, [])
    operand = None if given is None else np.array(given, np.int64)
    return OperatorCase(op, opset, (x, operand), attributes, static=frozenset((1,)))


@family("ArgMax", "ArgMin")
def arg_extreme(draw: OperandDraw, op: str) -> OperatorCase:
    """Draw a case with ties, NaN, and both index selections."""
    opset = draw.opset(op)
    x = draw.array(draw.shape(1, 4), draw.dtype(op, opset), draw.pick(0.0, 0.5), -2, 2)
    if draw.chance(0.3) and x.dtype.kind == "f":
        x = np.round(x)
    attributes = {"axis": draw.random.randint(-x.ndim if opset >= 11 else 0, x.ndim - 1), "keepdims": draw.pick(None, 0, 1)}
    if opset >= 12:
        attributes["select_last_index"] = draw.pick(None, 0, 1)
    return OperatorCase(op, opset, (x,), attributes)


@family("Softmax", "LogSoftmax", "Hardmax")
def softmax(draw: OperandDraw, op: str) -> OperatorCase:
    """Draw a case of rows with infinities or ties, and axes of both meanings."""
    opset = draw.opset(op)
    x = draw.array(draw.shape(1, 4), draw.dtype(op, opset), draw.pick(0.0, 0.0, 0.2), -3, draw.pick(3, 100))
    if op == "Hardmax" and draw.chance():
        x = np.round(x)
    low = -x.ndim if opset >= 11 else 0
    return OperatorCase(
        op, opset, (x,), {"axis": draw.pick(None, draw.random.randint(low, x.ndim - 1)) if x.ndim > 1 or opset >= 13 else 0}
    )


@family("CumSum", "CumProd")
def cumulative(draw: OperandDraw, op: str) -> OperatorCase:
    """Draw a case of reverse or exclusive sums."""
    opset = draw.opset(op)
    x = draw.array(draw.shape(1, 3), draw.dtype(op, opset))
    axis = np.asarray(draw.random.randint(-x.ndim, x.ndim - 1), draw.pick("int32", "int64"))
    return OperatorCase(
        op, opset, (x, axis), {"reverse": draw.pick(None, 1), "exclusive": draw.pick(None, 1)}, static=frozenset((1,))
    )


@family("LpNormalization")
def lp_normalization(draw: OperandDraw, op: str) -> OperatorCase:
    """Draw a case of both norms; rows of zeros stay zeros."""
    opset = draw.opset(op)
    x = draw.array(draw.shape(1, 4), draw.dtype(op, opset))
    x[..., :1] = np.where(draw.chance(0.2), 0, x[..., :1])
    return OperatorCase(
        op, opset, (x,), {"p": draw.pick(None, 1, 2), "axis": draw.pick(None, draw.random.randint(-x.ndim, x.ndim - 1))}
    )


@family("LayerNormalization", "RMSNormalization")
def layer_normalization(draw: OperandDraw, op: str) -> OperatorCase:
    """Draw a case with any axis, optional results, and values whose variance cancels."""
    opset = draw.opset(op)
    dtype = draw.dtype(op, opset)
    x = draw.array(draw.shape(1, 4), dtype)
    axis = draw.pick(None, draw.random.randint(-x.ndim, x.ndim - 1))
    tail = x.shape[-1 if axis is None else axis :]
    bias = draw.array(tail, dtype) if draw.chance() and op == "LayerNormalization" else None
    outputs = draw.pick(1, 1, 3) if op == "LayerNormalization" else 1
    return OperatorCase(op, opset, (x, draw.array(tail, dtype), bias), {"axis": axis, "epsilon": draw.pick(None, 0.1)}, outputs)


@family("InstanceNormalization", "GroupNormalization")
def channel_normalization(draw: OperandDraw, op: str) -> OperatorCase:
    """Draw a case with statistics of channels or channel groups."""
    opset = draw.opset(op)
    dtype = draw.dtype(op, opset)
    groups, depth = draw.size(1, 3), draw.size(1, 3) if op == "GroupNormalization" else 1
    x = draw.array((draw.size(1, 3), groups * depth, *draw.shape(1, 3)), dtype)
    scales = groups * depth if opset >= 21 or op == "InstanceNormalization" else groups
    attributes = {"epsilon": draw.pick(None, 0.1)} | ({"num_groups": groups} if op == "GroupNormalization" else {})
    return OperatorCase(op, opset, (x, draw.array((scales,), dtype), draw.array((scales,), dtype)), attributes)


@family("BatchNormalization")
def batch_normalization(draw: OperandDraw, op: str) -> OperatorCase:
    """Draw a case of inference mode, with constant or computed statistics."""
    opset = draw.opset(op, 9)
    dtype = draw.dtype(op, opset)
    shape = draw.shape(2, 4)
    rows = [draw.array(shape[1:2], dtype) for _ in range(3)]
    variance = np.abs(draw.array(shape[1:2], dtype)) + np.asarray(0.1, dtype)
    return OperatorCase(
        op,
        opset,
        (draw.array(shape, dtype), *rows, variance),
        {"epsilon": draw.pick(None, 0.1)},
        static=frozenset(draw.pick((), (1, 2, 3, 4))),
    )


@family("MeanVarianceNormalization")
def mean_variance_normalization(draw: OperandDraw, op: str) -> OperatorCase:
    """Draw a case over any axes."""
    opset = draw.opset(op, 9)
    x = draw.array(tuple(draw.size(2, 4) for _ in range(4)), draw.pick("float32", "float32", "float16"))
    return OperatorCase(op, opset, (x,), {"axes": draw.pick(None, [0, 2, 3], [2, 3], [1])})


@family("MatMul")
def matmul(draw: OperandDraw, op: str) -> OperatorCase:
    """Draw a case of vectors, matrices or stacks of matrices."""
    opset = draw.opset(op)
    dtype = draw.dtype(op, opset)
    m, k, n = (draw.random.randint(0 if draw.chance(0.1) else 1, 5) for _ in range(3))
    batch = draw.shape(0, 2)
    left = draw.pick((k,), (m, k), (*batch, m, k))
    right = draw.pick((k,), (k, n), (*[1 if draw.chance(0.3) else b for b in batch], k, n))
    return OperatorCase(op, opset, (draw.array(left, dtype), draw.array(right, dtype)), static=frozenset(draw.pick((), (1,))))


@family("Gemm")
def gemm(draw: OperandDraw, op: str) -> OperatorCase:
    """Draw a case with transposed operands, factors, and any shape of the third operand."""
    opset = draw.opset(op)
    dtype = draw.dtype(op, opset)
    whole = not dtype.startswith("float")
    m, k, n = (draw.random.randint(0 if draw.chance(0.07) else 1, 5) for _ in range(3))
    flip_a, flip_b = draw.pick(None, 1), draw.pick(None, 1)
    c = draw.pick(None, (m, n), (n,), (m, 1), (1, n), (1,), ())
    if c is None and opset < 11:
        c = (n,)
    attributes = {
        "transA": flip_a,
        "transB": flip_b,
        "alpha": draw.pick(None, 2.0 if whole else 0.5),
        "beta": draw.pick(None, 0.0, 3.0),
    }
    operands = (
        draw.array((k, m) if flip_a else (m, k), dtype),
        draw.array((n, k) if flip_b else (k, n), dtype),
        None if c is None else draw.array(c, dtype),
    )
    return OperatorCase(op, opset, operands, attributes, static=frozenset(draw.pick((), (1, 2))))


@family("Einsum")
def einsum(draw: OperandDraw, op: str) -> OperatorCase:
    """Draw a case of products, diagonals, ellipses or implicit results."""
    opset = draw.opset(op)
    equation = draw.pick(
        "ij,jk->ik",
        "ij,jk",
        "i,i->",
        "i,j->ij",
        "ii->i",
        "ii",
        "bij,bjk->bik",
        "...ij,...jk->...ik",
        "ij->ji",
        "ij->",
        "ij->i",
        "abc,cd->abd",
        "ij,ij->ij",
        "bhqd,bhkd->bhqk",
        "...i->...",
        "i,ij,j->",
        "ba",
        "iij->j",
    )
    extents = {label: draw.size(1, 4) for label in "abcdhijkqe"}
    shapes = [
        [*([2] if "..." in term else []), *[extents[c] for c in term if c != "."]] for term in equation.split("->")[0].split(",")
    ]
    dtype = draw.pick("float32", "float32", "float64", "int32", "int64")
    return OperatorCase(op, opset, tuple(draw.array(tuple(s), dtype) for s in shapes), {"equation": equation})
