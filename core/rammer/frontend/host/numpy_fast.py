"""NumPy functions for shape arithmetic and similar operators, for bodies that the host interprets.

Each returns the result of its tensor expression, or None. The general path (``evaluator.evaluate_proto``) then computes the value
or reports the error: an operand out of range, inconsistent types, an older version of the operator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
from onnx import NodeProto, helper

from rammer.frontend.host.operators import OPERATORS
from rammer.ir.graph import Node

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
#: A function from operands (None for an absent one) to the single output.
Plain: TypeAlias = "Callable[[Sequence[Any]], Any]"

#: Types whose arithmetic NumPy implements.
TYPES: Final = frozenset(map(np.dtype, ("float32", "float64", "int32", "int64", "bool")))
#: Integers above it may not be representable in another type.
_SAFE: Final = 1 << 31
#: The first version of an operator with the operands expected here.
_SINCE: Final = {
    "Unsqueeze": 13,
    "Squeeze": 13,
    "Slice": 10,
    "ReduceMax": 18,
    "ReduceMin": 18,
    "Add": 7,
    "Sub": 7,
    "Mul": 7,
    "Reshape": 5,
}


def make_plain(node: Node, proto: NodeProto) -> Plain | None:
    """Return the NumPy function that computes ``node``, or None if the general path must compute it."""
    if node.domain or node.version < _SINCE.get(node.op, 1) or len(proto.output) != 1:
        return None
    found = _find_function(node)
    if found is None:
        return None

    def computed(operands: Sequence[Any]) -> Any:
        if not all(a is None or (isinstance(a, np.ndarray) and a.dtype in TYPES) for a in operands):
            return None
        try:
            with np.errstate(all="ignore"):
                result = found(*operands)
        except (ValueError, IndexError, TypeError, OverflowError):  # the general path reports the error
            return None
        return None if result is None else np.asarray(result)

    return computed


Attributes: TypeAlias = Mapping[str, Any]


def _find_function(node: Node) -> Callable[..., Any] | None:
    if node.op in OPERATORS:
        own = OPERATORS[node.op]
        return lambda *operands: (found := own(node.attributes, operands)) and found[0]
    make = PLAIN.get(node.op)
    return None if make is None else make(node.attributes)


def _make_binary(function: Callable[[Any, Any], Any], kinds: str) -> Callable[[Attributes], Callable[..., Any]]:
    def of(attributes: Attributes) -> Callable[..., Any]:
        return lambda x, y: function(x, y) if x.dtype == y.dtype and x.dtype.kind in kinds else None

    return of


def _make_gather(attributes: Attributes) -> Callable[..., Any]:
    axis = attributes.get("axis", 0)
    return lambda x, places: (
        np.take(x, places, axis) if x.ndim and x.size and places.dtype.kind == "i" else None
    )  # IndexError if out of range


def _make_unsqueeze(attributes: Attributes) -> Callable[..., Any]:
    return lambda x, axes: np.expand_dims(x, tuple(axes.tolist()))


def _make_squeeze(attributes: Attributes) -> Callable[..., Any]:
    return lambda x, axes=None: np.squeeze(x, None if axes is None else tuple(axes.tolist()))


def _make_concat(attributes: Attributes) -> Callable[..., Any]:
    axis = attributes["axis"]
    return lambda *parts: np.concatenate(parts, axis) if len({p.dtype for p in parts}) == 1 else None


def _make_slice(attributes: Attributes) -> Callable[..., Any]:
    def cut(x: Array, starts: Array, ends: Array, axes: Array | None = None, steps: Array | None = None) -> Any:
        places = range(len(starts)) if axes is None else axes.tolist()
        strides = [1] * len(starts) if steps is None else steps.tolist()
        if any(s <= 0 for s in strides):
            return None
        parts = [slice(None)] * x.ndim
        for axis, start, end, stride in zip(places, starts.tolist(), ends.tolist(), strides, strict=True):
            parts[axis] = slice(start, end, stride)
        return np.array(x[tuple(parts)])

    return cut


def _make_reshape(attributes: Attributes) -> Callable[..., Any]:
    keep = not attributes.get("allowzero", 0)

    def reshaped(x: Array, shape: Array) -> Any:
        return x.reshape([x.shape[i] if n == 0 and keep else n for i, n in enumerate(shape.tolist())])

    return reshaped


def _make_where(attributes: Attributes) -> Callable[..., Any]:
    return lambda c, x, y: np.where(c, x, y) if x.dtype == y.dtype and c.dtype == np.bool_ else None


def _make_cast(attributes: Attributes) -> Callable[..., Any]:
    wanted = np.dtype(helper.tensor_dtype_to_np_dtype(attributes["to"]))

    def cast(x: Array) -> Any:
        if wanted not in TYPES:
            return None
        narrow = x.dtype.kind in "if" and wanted.kind == "i" and (x.dtype.kind == "f" or wanted.itemsize < x.dtype.itemsize)
        if narrow and not bool((np.abs(x) < _SAFE).all()):  # false for NaN
            return None
        return x.astype(wanted)

    return cast


def _make_fill(attributes: Attributes) -> Callable[..., Any]:
    value = np.asarray(attributes.get("value", np.zeros(1, np.float32))).reshape(-1)
    return lambda shape: np.full(shape.tolist(), value[0], value.dtype)


def _make_expand(attributes: Attributes) -> Callable[..., Any]:
    return lambda x, shape: np.array(np.broadcast_to(x, np.broadcast_shapes(x.shape, tuple(shape.tolist()))))


def _make_extreme(function: Any) -> Callable[[Attributes], Callable[..., Any]]:
    def of(attributes: Attributes) -> Callable[..., Any]:
        keep, alone = bool(attributes.get("keepdims", 1)), bool(attributes.get("noop_with_empty_axes", 0))

        def reduced(x: Array, axes: Array | None = None) -> Any:
            every = axes is None or not axes.size
            if not x.size or x.dtype == np.bool_ or (every and alone):
                return None
            found = function(x, axis=None if axes is None or every else tuple(axes.tolist()), keepdims=keep)
            return None if np.isnan(found).any() else found  # expressions define the result for NaN

        return reduced

    return of


#: Operator -> a function from its attributes to the function that computes its output from its operands.
PLAIN: Final[Mapping[str, Callable[[Attributes], Callable[..., Any]]]] = {
    "Add": _make_binary(np.add, "if"),
    "Sub": _make_binary(np.subtract, "if"),
    "Mul": _make_binary(np.multiply, "if"),
    "Equal": _make_binary(np.equal, "ifb"),
    "Less": _make_binary(np.less, "if"),
    "Greater": _make_binary(np.greater, "if"),
    "And": _make_binary(np.logical_and, "b"),
    "Or": _make_binary(np.logical_or, "b"),
    "Not": lambda attributes: lambda x: ~x if x.dtype == np.bool_ else None,
    "Identity": lambda attributes: lambda x: x,
    "Shape": lambda attributes: lambda x: np.array(x.shape[attributes.get("start", 0) : attributes.get("end", x.ndim)], np.int64),
    "Size": lambda attributes: lambda x: np.array(x.size, np.int64),
    "Gather": _make_gather,
    "Unsqueeze": _make_unsqueeze,
    "Squeeze": _make_squeeze,
    "Concat": _make_concat,
    "Slice": _make_slice,
    "Reshape": _make_reshape,
    "Transpose": lambda attributes: lambda x: np.array(x.transpose(attributes.get("perm") or None), order="C"),
    "Where": _make_where,
    "Cast": _make_cast,
    "ConstantOfShape": _make_fill,
    "Expand": _make_expand,
    "ReduceMax": _make_extreme(np.max),
    "ReduceMin": _make_extreme(np.min),
}
