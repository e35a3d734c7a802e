"""Data movement operators: reshaping, slicing, padding, gathering, scattering, generating."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import helper, numpy_helper

from rammer_testing.operators.case import OperandDraw, OperatorCase, family


@family("Reshape", "Flatten", "Squeeze", "Unsqueeze", "Expand", "Tile", "Transpose", "Shape", "Size")
def rearrange(draw: OperandDraw, op: str) -> OperatorCase:
    """Draw a case that rearranges or repeats elements."""
    opset = draw.opset(op)
    shape = draw.shape(1, 4, least=draw.pick(1, 1, 0))
    rank = len(shape)
    low = -rank if opset >= 11 else 0
    dtype = draw.dtype(op, opset)
    attributes: dict[str, Any] = {}
    second: Any = None
    if op == "Reshape":
        second = draw.pick([-1], [0, -1] if 0 not in shape else [*shape], [1, *shape], [*reversed(shape)])
        if 0 in shape and -1 in second:
            second = [*shape[::-1]]
        if opset >= 14 and 0 in second and 0 in shape:
            attributes["allowzero"] = 1
        elif 0 in shape:
            second = [*shape]
    elif op == "Flatten":
        attributes["axis"] = draw.pick(None, draw.random.randint(low, rank)) if rank > 1 else draw.pick(0, 1)
    elif op == "Transpose":
        attributes["perm"] = draw.pick(None, draw.random.sample(range(rank), rank))
    elif op == "Expand":
        second = [n if draw.chance() else 1 for n in shape]
        shape = tuple(1 if draw.chance(0.3) else n for n in shape)
        second = draw.pick([3, *second], second)
    elif op == "Tile":
        second = draw.ints(rank, 0 if draw.chance(0.2) else 1, 3)
    elif op in ("Squeeze", "Unsqueeze"):
        return _squeezed(draw, op, opset, dtype, shape)
    elif op == "Shape" and opset >= 15:
        attributes = {
            "start": draw.pick(None, draw.random.randint(-rank, rank)),
            "end": draw.pick(None, draw.random.randint(-rank, rank)),
        }
    operands = (draw.array(shape, dtype, 0.2), None if second is None else np.array(second, np.int64))
    return OperatorCase(op, opset, operands, attributes, static=frozenset((1,)))


def _squeezed(draw: OperandDraw, op: str, opset: int, dtype: str, shape: tuple[int, ...]) -> OperatorCase:
    if op == "Squeeze":
        shape = tuple(1 if draw.chance() else n for n in shape)
        ones = [d for d, n in enumerate(shape) if n == 1]
        axes = None if draw.chance(0.3) else draw.random.sample(ones, draw.random.randint(0, len(ones)))
    else:
        rank = len(shape) + draw.random.randint(1, 2)
        axes = draw.random.sample(range(rank), rank - len(shape))
        axes = [a - rank if draw.chance(0.3) and opset >= 11 else a for a in axes]
    x = draw.array(shape, dtype, 0.2)
    if opset < 13:
        return OperatorCase(op, opset, (x,), {"axes": axes or None} if op == "Squeeze" else {"axes": axes})
    operand = np.array(axes, np.int64) if axes else None
    return OperatorCase(op, opset, (x, operand), static=frozenset((1,)))


@family("Concat")
def concat(draw: OperandDraw, op: str) -> OperatorCase:
    """Draw a case with parts of different length, including empty ones."""
    opset = draw.opset(op)
    shape = list(draw.shape(1, 4))
    axis = draw.random.randrange(len(shape))
    dtype = draw.dtype(op, opset)
    parts = [tuple(draw.size(0, 3) if d == axis else n for d, n in enumerate(shape)) for _ in range(draw.size(1, 4))]
    shown = axis - len(shape) if draw.chance(0.3) and opset >= 11 else axis
    return OperatorCase(op, opset, tuple(draw.array(p, dtype, 0.2) for p in parts), {"axis": shown})


@family("Split")
def split(draw: OperandDraw, op: str) -> OperatorCase:
    """Draw a case of equal or explicit parts, or of one part per result."""
    opset = draw.opset(op)
    shape = list(draw.shape(1, 3))
    axis, count = draw.random.randrange(len(shape)), draw.random.randint(1, 3)
    sizes = draw.ints(count, 0 if draw.chance(0.2) else 1, 3)
    equal = draw.chance(0.4)
    sizes = [sizes[0] or 1] * count if equal else sizes
    shape[axis] = sum(sizes)
    attributes: dict[str, Any] = {"axis": axis - len(shape) if draw.chance(0.3) and opset >= 11 else axis}
    operand = None
    if equal and opset >= 18:
        attributes["num_outputs"] = count
    elif not equal and opset >= 13:
        operand = np.array(sizes, np.int64)
    elif not equal:
        attributes["split"] = sizes
    x = draw.array(tuple(shape), draw.dtype(op, opset), 0.2)
    return OperatorCase(op, opset, (x, operand), attributes, count, frozenset((1,)))


@family("Slice")
def slice_(draw: OperandDraw, op: str) -> OperatorCase:
    """Draw a case with starts and ends far outside, or negative steps."""
    opset = draw.opset(op)
    shape = draw.shape(1, 4)
    axes = draw.random.sample(range(len(shape)), draw.random.randint(1, len(shape)))
    steps = [draw.pick(1, 1, 2, 3, -1, -2) if opset >= 10 else 1 for _ in axes]
    # For a backward slice from before the first element, the specification starts at the first; NumPy and the reference return an
    # empty slice.
    starts = [draw.random.randint(-8 if s > 0 else -shape[a], 8) for s, a in zip(steps, axes, strict=True)]
    # For an end on the wrong side of the start the specification is open: ONNX Runtime copies an element.
    ends = [draw.pick((2**63 - 1) if s > 0 else -(2**63), draw.random.randint(-8, 8)) for s in steps]
    x = draw.array(shape, draw.dtype(op, opset), 0.2)
    if opset < 10:
        return OperatorCase(op, opset, (x,), {"axes": axes, "starts": starts, "ends": ends})
    shown = [a - len(shape) if draw.chance(0.3) else a for a in axes]
    if shown == list(range(len(axes))) and draw.chance():
        shown = []
    kind = draw.pick(np.int64, np.int64, np.int32)
    ends = [int(np.clip(e, np.iinfo(kind).min, np.iinfo(kind).max)) for e in ends]
    given = steps if any(s != 1 for s in steps) or draw.chance() else None
    rest = [None if v is None or v == [] else np.array(v, kind) for v in (starts, ends, shown, given)]
    return OperatorCase(op, opset, (x, *rest), static=frozenset((1, 2, 3, 4)))


@family("Pad")
def pad(draw: OperandDraw, op: str) -> OperatorCase:
    """Draw a case of any mode, with negative amounts, axes, or a value of any type."""
    opset = draw.opset(op)
    shape = draw.shape(1, 4)
    dtype = draw.dtype(op, opset)
    mode = draw.pick(None, "constant", "reflect", "edge", *(["wrap"] if opset >= 19 else []))
    axes = list(range(len(shape)))
    if opset >= 18 and draw.chance(0.4):
        axes = draw.random.sample(axes, draw.random.randint(1, len(axes)))
    begin, end = ([_amount(draw, mode, shape[a]) for a in axes] for _ in range(2))
    for i, a in enumerate(axes):
        if shape[a] + begin[i] + end[i] < 1:
            begin[i] = end[i] = 0
    x = draw.array(shape, dtype, 0.1)
    if opset < 11:
        return OperatorCase(op, opset, (x,), {"mode": mode, "pads": [*begin, *end], "value": draw.pick(None, 2.5)})
    value = draw.array((), dtype) if draw.chance(0.4) and mode in (None, "constant") else None
    shown = None if len(axes) == len(shape) and axes == sorted(axes) else np.array(axes, np.int64)
    operands = (x, np.array([*begin, *end], np.int64), value, *([] if shown is None else [shown]))
    return OperatorCase(op, opset, operands, {"mode": mode}, static=frozenset(draw.pick((1, 3), (1, 2, 3))))


def _amount(draw: OperandDraw, mode: str | None, extent: int) -> int:
    if mode in ("reflect", "wrap"):
        return draw.random.randint(0, extent - 1)
    return int(draw.pick(0, 1, 2, -1 if extent > 1 else 0))


def _indices(draw: OperandDraw, shape: tuple[int, ...], extent: int, negative: bool = True) -> Any:
    return draw.array(shape, draw.pick("int64", "int64", "int32"), low=-extent if negative else 0, high=extent - 1)


@family("Gather", "GatherElements")
def gather(draw: OperandDraw, op: str) -> OperatorCase:
    """Draw a case with negative or scalar indices on any axis."""
    opset = draw.opset(op)
    shape = draw.shape(1, 3)
    axis = draw.random.randrange(len(shape))
    negative = opset >= 11
    wanted = draw.shape(0, 2)
    if op == "GatherElements":
        wanted = tuple(draw.size() if d == axis else draw.random.randint(1, n) for d, n in enumerate(shape))
    shown = draw.pick(axis, axis - len(shape)) if opset >= 11 or op == "Gather" else axis
    return OperatorCase(
        op,
        opset,
        (draw.array(shape, draw.dtype(op, opset), 0.2), _indices(draw, wanted, shape[axis], negative)),
        {"axis": shown},
        static=frozenset(draw.pick((), (1,))),
    )


@family("GatherND")
def gather_nd(draw: OperandDraw, op: str) -> OperatorCase:
    """Draw a case of slices or elements, with batches."""
    opset = draw.opset(op)
    shape = draw.shape(1, 4)
    batch = draw.random.randint(0, min(len(shape) - 1, 1)) if opset >= 12 else 0
    depth = draw.random.randint(1, len(shape) - batch)
    lead = (*shape[:batch], *draw.shape(0 if batch else 1, 2))
    columns = [draw.array(lead, "int64", low=-n, high=n - 1) for n in shape[batch : batch + depth]]
    indices = np.stack(columns, axis=-1)
    return OperatorCase(
        op,
        opset,
        (draw.array(shape, draw.dtype(op, opset), 0.2), indices),
        {"batch_dims": batch} if opset >= 12 else {},
        static=frozenset(draw.pick((), (1,))),
    )


@family("ScatterElements", "ScatterND")
def scatter(draw: OperandDraw, op: str) -> OperatorCase:
    """Draw a case with or without a reduction; without one all indices are distinct."""
    opset = draw.opset(op)
    modes = [None, "none"] + (["add", "mul"] if opset >= 16 else []) + (["min", "max"] if opset >= 18 else [])
    mode = draw.pick(*modes)
    shape = draw.shape(1, 3)
    dtype = draw.dtype(op, opset)
    static = frozenset(draw.pick((), (1,), (1,)))
    attributes: dict[str, Any] = {"reduction": mode} if opset >= 16 else {}
    if op == "ScatterElements":
        axis = draw.random.randrange(len(shape))
        wanted = tuple(draw.random.randint(1, n) for n in shape)
        if mode in (None, "none"):
            order = [draw.random.sample(range(shape[axis]), wanted[axis]) for _ in range(int(np.prod(wanted)) // wanted[axis])]
            rest = tuple(n for d, n in enumerate(wanted) if d != axis)
            indices = np.moveaxis(np.array(order, np.int64).reshape(*rest, wanted[axis]), -1, axis)
            indices = np.where(draw.array(wanted, "bool"), indices, indices - shape[axis])
        else:
            indices = draw.array(wanted, "int64", low=-shape[axis], high=shape[axis] - 1)
        attributes["axis"] = axis - len(shape) if draw.chance(0.3) else axis
        return OperatorCase(op, opset, (draw.array(shape, dtype), indices, draw.array(wanted, dtype)), attributes, static=static)
    depth = draw.random.randint(1, len(shape))
    places = list(np.ndindex(*shape[:depth]))
    count = draw.random.randint(1, len(places))
    repeated = mode not in (None, "none")
    chosen = draw.random.choices(places, k=count) if repeated else draw.random.sample(places, count)
    indices = np.array(chosen, np.int64).reshape(count, depth)
    return OperatorCase(
        op, opset, (draw.array(shape, dtype), indices, draw.array((count, *shape[depth:]), dtype)), attributes, static=static
    )


@family("OneHot")
def one_hot(draw: OperandDraw, op: str) -> OperatorCase:
    """Draw a case in which indices outside the range match nothing."""
    opset = draw.opset(op, 9)
    shape, depth = draw.shape(1, 3), draw.size(1, 4)
    indices = np.asarray(draw.array(shape, "int64", low=-depth - 1, high=depth + 1), draw.pick("int64", "float32", "int32"))
    values = draw.array((2,), draw.dtype(op, opset, 2))
    return OperatorCase(
        op,
        opset,
        (indices, np.asarray(depth, np.int64), values),
        {"axis": draw.pick(None, draw.random.randint(-len(shape) - 1, len(shape)))},
        static=frozenset((1,)),
    )


@family("ReverseSequence")
def reverse_sequence(draw: OperandDraw, op: str) -> OperatorCase:
    """Draw a case of both axis orders."""
    opset = draw.opset(op)
    shape = draw.shape(2, 4)
    time = draw.pick(0, 1)
    lengths = np.array(draw.ints(shape[1 - time], 1, shape[time]), np.int64)
    return OperatorCase(
        op,
        opset,
        (draw.array(shape, draw.dtype(op, opset), 0.2), lengths),
        {"time_axis": time, "batch_axis": 1 - time},
        static=frozenset(draw.pick((), (1,))),
    )


@family("DepthToSpace", "SpaceToDepth")
def blocks(draw: OperandDraw, op: str) -> OperatorCase:
    """Draw a case of pixel blocks."""
    opset, block = draw.opset(op), draw.size(1, 3)
    n, c, h, w = (draw.size(1, 3) for _ in range(4))
    shape = (n, c * block * block, h, w) if op == "DepthToSpace" else (n, c, h * block, w * block)
    mode = {"mode": draw.pick(None, "DCR", "CRD")} if op == "DepthToSpace" and opset >= 11 else {}
    return OperatorCase(op, opset, (draw.array(shape, draw.dtype(op, opset), 0.2),), {"blocksize": block, **mode})


@family("Trilu")
def trilu(draw: OperandDraw, op: str) -> OperatorCase:
    """Draw a case with diagonals far outside."""
    opset = draw.opset(op)
    k = draw.pick(None, np.asarray(draw.random.randint(-7, 7), np.int64))
    return OperatorCase(
        op,
        opset,
        (draw.array(draw.shape(2, 4), draw.dtype(op, opset), 0.2), k),
        {"upper": draw.pick(None, 0, 1)},
        static=frozenset((1,)),
    )


@family("EyeLike")
def eye_like(draw: OperandDraw, op: str) -> OperatorCase:
    """Draw a case of any diagonal and type."""
    opset = draw.opset(op)
    code = draw.pick(None, *(helper.np_dtype_to_tensor_dtype(np.dtype(t)) for t in ("float64", "int32", "uint8")))
    return OperatorCase(
        op, opset, (draw.array(draw.shape(2, 2), draw.dtype(op, opset)),), {"dtype": code, "k": draw.pick(None, -1, 2)}
    )


@family("Range")
def range_(draw: OperandDraw, op: str) -> OperatorCase:
    """Draw a case of both directions, or of an empty range."""
    opset, dtype = draw.opset(op), draw.pick("float32", "float64", "int16", "int32", "int64")
    step = draw.pick(1, 2, -1, -3, 0.3 if dtype[0] == "f" else 1)
    values = [np.asarray(v, dtype) for v in (draw.random.randint(-5, 5), draw.random.randint(-9, 9), step)]
    return OperatorCase(op, opset, tuple(values), static=frozenset((0, 1, 2)))


@family("ConstantOfShape")
def constant_of_shape(draw: OperandDraw, op: str) -> OperatorCase:
    """Draw a case with a value of any type."""
    opset = draw.opset(op, 9)
    value = draw.pick(None, numpy_helper.from_array(draw.array((1,), draw.pick("float32", "int64", "bool", "uint8", "float64"))))
    return OperatorCase(op, opset, (np.array(draw.shape(0, 3), np.int64),), {"value": value}, static=frozenset((0,)))


@family("TopK")
def top_k(draw: OperandDraw, op: str) -> OperatorCase:
    """Draw a case of the largest or smallest values, sorted. Values are distinct: the order of ties is
    undefined before opset 24."""
    opset = draw.opset(op, 10)
    shape = draw.shape(1, 3)
    axis = draw.random.randrange(len(shape))
    dtype = draw.dtype(op, opset)
    count = int(np.prod(shape))
    x = (
        np.array(draw.random.sample(range(min(count, 100)), min(count, 100)), dtype).reshape(shape)
        if count <= 100
        else draw.array(shape, dtype)
    )
    attributes: dict[str, Any] = {"axis": axis - len(shape) if draw.chance(0.3) and opset >= 11 else axis}
    if opset >= 11:
        attributes["largest"] = draw.pick(None, 0, 1)
    return OperatorCase(
        op,
        opset,
        (x, np.array([draw.random.randint(0 if draw.chance(0.1) else 1, shape[axis])], np.int64)),
        attributes,
        2,
        frozenset((1,)),
    )


@family("Dropout")
def dropout(draw: OperandDraw, op: str) -> OperatorCase:
    """Draw a case of inference mode."""
    opset = draw.opset(op)
    x = draw.array(draw.shape(), draw.dtype(op, opset))
    if opset < 12:
        return OperatorCase(op, opset, (x,), {"ratio": draw.pick(None, 0.3)})
    ratio = draw.pick(None, np.asarray(0.3, np.float32))
    return OperatorCase(op, opset, (x, ratio), outputs=draw.pick(1, 2), static=frozenset((1,)))
