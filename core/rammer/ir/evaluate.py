"""NumPy evaluation of Computes: the reference result, and the simulator's arithmetic.

Affine loads become strided views, and a contraction of two views becomes one ``einsum``; other loads gather. float16 is a storage
format, as in C text: arithmetic is in float32, and results and casts are rounded. ``precise=True`` computes floats in float64,
the reference for tests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
from numpy.lib.stride_tricks import as_strided

from rammer.ir import expr as ex
from rammer.ir.compute import Axis, Compute, ComputeGraph, combiner_identity, contraction_operands
from rammer.ir.expr import Cast, Const, Expr, Load, Op, Ref, Table
from rammer.ir.reindex import reshape_indices
from rammer.ir.types import is_float

__all__ = ["evaluate_compute"]

Array = np.ndarray[Any, np.dtype[Any]]
#: A callback that receives every evaluation step (expression, axes, operands, value) and returns the value to use.
Watch: TypeAlias = Callable[[Expr, tuple[Axis, ...], list[Array], Array], Array]

#: Elements of one evaluation block; larger Computes are evaluated in slices of their first axis.
BLOCK = 1 << 24
#: Maximum ratio of a padded tensor to the elements that are read and written.
PADDED = 8


def _erf_array(x: Array) -> Array:
    flat = np.asarray(x, dtype=np.float64).ravel()
    return np.array(list(map(math.erf, flat.tolist())), dtype=x.dtype).reshape(x.shape)


def _ignore_warnings(fn: Callable[..., Array]) -> Callable[..., Array]:
    """Suppress warnings, so that integer division by zero and similar cases return NumPy's value."""

    def wrapped(*args: Array) -> Array:
        with np.errstate(all="ignore"):
            return fn(*args)

    return wrapped


def _divide_arrays(a: Array, b: Array) -> Array:
    kind = np.result_type(a, b)
    if np.issubdtype(kind, np.floating):
        return np.asarray(np.true_divide(a, b))
    quotient = np.floor_divide(a, b)
    if not np.issubdtype(kind, np.signedinteger):
        return np.asarray(quotient)
    # ONNX integer Div truncates towards zero. Division of magnitudes fails: that of the least integer is not representable.
    inexact = (quotient * b != a) & ((a < 0) != (b < 0)) & (b != 0)
    return np.asarray(quotient + inexact.astype(kind))


def _raise_power(a: Array, b: Array) -> Array:
    """Return ``a ** b`` as C's pow; for a broadcast exponent of 0.5, NumPy's root differs for -inf and -0."""
    result = np.asarray(np.power(a, b))
    root = np.equal(b, 0.5)
    return np.where(root & (np.isneginf(a) | (a == 0)), np.abs(a), result) if root.any() else result


def _make_bitcast(source: str, target: str) -> Callable[[Array], Array]:
    """Return a function that reinterprets bits as another type; ``precise`` values are first rounded to ``source``."""
    return lambda x: np.asarray(x).astype(source).view(target)


FUNCTIONS: dict[str, Callable[..., Array]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": _divide_arrays,
    "min": np.minimum,
    "max": np.maximum,
    "mod": np.mod,
    "floordiv": np.floor_divide,
    "fmod": np.fmod,
    "pow": _raise_power,
    "neg": np.negative,
    "abs": np.abs,
    "sign": np.sign,
    "floor": np.floor,
    "ceil": np.ceil,
    "round": np.rint,
    "sqrt": np.sqrt,
    "exp": np.exp,
    "log": np.log,
    "sin": np.sin,
    "cos": np.cos,
    "tan": np.tan,
    "asin": np.arcsin,
    "acos": np.arccos,
    "atan": np.arctan,
    "sinh": np.sinh,
    "cosh": np.cosh,
    "tanh": np.tanh,
    "asinh": np.arcsinh,
    "acosh": np.arccosh,
    "atanh": np.arctanh,
    "erf": _erf_array,
    "log1p": np.log1p,
    "expm1": np.expm1,
    "eq": np.equal,
    "lt": np.less,
    "le": np.less_equal,
    "not_": np.logical_not,
    "and_": np.bitwise_and,
    "or_": np.bitwise_or,
    "xor": np.bitwise_xor,
    "shl": np.left_shift,
    "shr": np.right_shift,
    "isnan": np.isnan,
    "isinf": np.isinf,
    "where": np.where,
    "as_uint32": _make_bitcast("float32", "uint32"),
    "as_float32": _make_bitcast("uint32", "float32"),
    "as_uint64": _make_bitcast("float64", "uint64"),
    "as_float64": _make_bitcast("uint64", "float64"),
}
REDUCERS: dict[str, Callable[..., Array]] = {"sum": np.sum, "max": np.max, "min": np.min, "prod": np.prod}


def evaluate_compute(compute: Compute, tensors: Mapping[str, Array], precise: bool = False, watch: Watch | None = None) -> Array:
    """Evaluate the whole output of ``compute``; ``precise`` computes floats in float64. ``watch`` may change the value of every
    step. A product of two loads and its sum are one step, which ``watch`` does not receive."""
    out_dtype = np.dtype("float64") if precise and is_float(compute.dtype) else np.dtype(compute.dtype)
    if compute.points == 0:
        start = combiner_identity(compute.combiner, compute.dtype).value if compute.combiner else 0
        return np.full(compute.shape, start, dtype=out_dtype)
    fast = _evaluate_contraction(compute, tensors, out_dtype)
    if fast is None and watch is None:
        fast = _evaluate_factored(compute, tensors, out_dtype, precise)
    if fast is None:
        fast = _evaluate_rearrangement(compute, tensors, out_dtype, precise, watch)
    if fast is not None:
        return fast
    return _evaluate_blocks(compute, tensors, out_dtype, precise, watch)


def run_graph(graph: ComputeGraph, inputs: Mapping[str, Array], precise: bool = True) -> dict[str, Array]:
    """Evaluate every tensor of ``graph`` by NumPy, inputs and constants included."""
    values: dict[str, Array] = {**graph.constants, **inputs}
    for compute in graph.computes:
        values[compute.name] = evaluate_compute(compute, values, precise)
    return values


#: Points from which the two sides of a concatenation are evaluated separately.
_LARGE = 1 << 14


def evaluate_positions(e: Expr, axes: tuple[Axis, ...]) -> Array:
    """Return the values of an expression without loads, over the box of ``axes``."""
    return np.broadcast_to(_evaluate_expr(e, axes, {}, {}, precise=True), tuple(a.extent for a in axes))


def _evaluate_rearrangement(
    compute: Compute, tensors: Mapping[str, Array], dtype: np.dtype[Any], precise: bool, watch: Watch | None = None
) -> Array | None:
    """Evaluate a reshape by NumPy, and a large concatenation by its sides, without an index per element."""
    body = compute.body
    if compute.reduce or not compute.axes:
        return None
    if isinstance(body, Load) and body.fill is None:
        tensor = np.asarray(tensors[body.tensor])
        same = tensor.size == compute.points and len(body.indices) == tensor.ndim
        if same and body.indices == reshape_indices(tensor.shape, compute.axes):
            return np.array(tensor, dtype=dtype).reshape(compute.shape)
        return None
    if compute.points < _LARGE or not isinstance(body, Op) or body.fn != "where":
        return None
    form = body.args[0]
    if not isinstance(form, Op) or form.fn != "lt" or not isinstance(form.args[0], Ref) or not isinstance(form.args[1], Const):
        return None
    place = next((i for i, a in enumerate(compute.axes) if Ref(a.name) == form.args[0]), None)
    if place is None or not 0 < form.args[1].value < compute.axes[place].extent:
        return None
    cut = int(form.args[1].value)
    sides = [
        _slice_compute(compute, place, start, size, side)
        for start, size, side in ((0, cut, body.args[1]), (cut, compute.axes[place].extent - cut, body.args[2]))
    ]
    return np.concatenate([evaluate_compute(side, tensors, precise, watch) for side in sides], axis=place)


def _slice_compute(compute: Compute, place: int, start: int, size: int, body: Expr) -> Compute:
    """Return a Compute of ``size`` positions of axis ``place`` from ``start``, with value ``body``."""
    axis = compute.axes[place]
    shifted = ex.substitute(body, {axis.name: ex.make_add(axis.name, start)}) if start else body
    axes = (*compute.axes[:place], Axis(axis.name, size), *compute.axes[place + 1 :])
    return Compute(compute.name, compute.dtype, axes, shifted, compute.reduce, compute.combiner)


def _evaluate_blocks(
    compute: Compute, tensors: Mapping[str, Array], dtype: np.dtype[Any], precise: bool, watch: Watch | None = None
) -> Array:
    """Evaluate slice by slice along the first output axis if the points exceed ``BLOCK``."""
    if not compute.axes or compute.points <= BLOCK or compute.axes[0].extent == 1:
        with np.errstate(over="ignore"):  # values beyond float16's range are stored as infinity
            return _evaluate_dense(compute, tensors, {}, precise, watch).astype(dtype)
    first = compute.axes[0]
    step = max(1, int(first.extent * BLOCK // compute.points))
    parts = []
    for start in range(0, first.extent, step):
        size = min(step, first.extent - start)
        parts.append(_evaluate_dense(_slice_compute(compute, 0, start, size, compute.body), tensors, {}, precise, watch))
    return np.concatenate(parts).astype(dtype)


def _evaluate_dense(
    compute: Compute, tensors: Mapping[str, Array], memo: dict[Expr, Array], precise: bool, watch: Watch | None = None
) -> Array:
    axes = (*compute.axes, *compute.reduce)
    body = _evaluate_expr(compute.body, axes, tensors, memo, precise, watch)
    body = np.broadcast_to(body, tuple(a.extent for a in axes))
    if not compute.reduce:
        return body
    over = tuple(range(len(compute.axes), len(axes)))
    wide = compute.combiner in ("sum", "prod") and not np.issubdtype(body.dtype, np.floating)
    kwargs: dict[str, Any] = {"dtype": np.dtype(compute.dtype)} if wide else {}
    return REDUCERS[compute.combiner or "sum"](body, axis=over, **kwargs)


def _evaluate_expr(
    e: Expr,
    axes: tuple[Axis, ...],
    tensors: Mapping[str, Array],
    memo: dict[Expr, Array],
    precise: bool,
    watch: Watch | None = None,
) -> Array:
    if e in memo:
        return memo[e]
    seen: list[Array] = []

    def sub(part: Expr) -> Array:
        value = _evaluate_expr(part, axes, tensors, memo, precise, watch)
        seen.append(value)
        return value

    def kind(dtype: str) -> str:
        return _arithmetic_dtype(dtype, precise)

    result: Array
    if isinstance(e, Const):
        result = np.asarray(e.value, dtype=kind(e.dtype))
    elif isinstance(e, Ref):
        place = [a.name for a in axes].index(e.axis)
        shape = [1] * len(axes)
        shape[place] = axes[place].extent
        result = np.arange(axes[place].extent, dtype=np.int64).reshape(shape)
    elif isinstance(e, Table):
        result = np.asarray(e.values, dtype=kind(e.dtype))[sub(e.index)]
    elif isinstance(e, Cast):
        stored = e.dtype if e.dtype == "float16" and not precise else kind(e.dtype)
        result = _ignore_warnings(lambda x: x.astype(stored).astype(kind(e.dtype), copy=False))(sub(e.arg))
    elif isinstance(e, Load):
        result = _evaluate_load(e, axes, tensors, sub, precise)
    else:
        result = _ignore_warnings(FUNCTIONS[e.fn])(*_harmonise_types([sub(a) for a in e.args], e))
    if watch is not None:
        result = watch(e, axes, seen, result)
    memo[e] = result
    return result


def _harmonise_types(args: list[Array], e: Op) -> list[Array]:
    """Convert literals to the type of the other arguments, as in C text and in NumPy's weak scalars."""
    start = 1 if e.fn == "where" else 0
    typed = [a.dtype for a, part in zip(args[start:], e.args[start:], strict=True) if not isinstance(part, Const)]
    if not typed:
        return args
    return args[:start] + [
        a.astype(typed[0]) if isinstance(part, Const) else a for a, part in zip(args[start:], e.args[start:], strict=True)
    ]


def _evaluate_load(
    load: Load, axes: tuple[Axis, ...], tensors: Mapping[str, Array], sub: Callable[[Expr], Array], precise: bool
) -> Array:
    tensor = np.asarray(tensors[load.tensor])
    tensor = tensor.astype(_arithmetic_dtype(str(tensor.dtype), precise), copy=False)
    view = strided_view(load, axes, tensor)
    if view is not None:
        return view
    indices = [sub(i).astype(np.int64) for i in load.indices]
    if load.fill is None:
        return np.asarray(tensor[tuple(indices)])
    inside = np.logical_and.reduce(np.broadcast_arrays(*[(i >= 0) & (i < n) for i, n in zip(indices, tensor.shape, strict=True)]))
    if 0 in tensor.shape:
        return np.full(inside.shape, load.fill, tensor.dtype)
    safe = tuple(np.clip(i, 0, n - 1) for i, n in zip(indices, tensor.shape, strict=True))
    return np.where(inside, tensor[safe], np.asarray(load.fill, dtype=tensor.dtype))


def strided_view(load: Load, axes: tuple[Axis, ...], tensor: Array) -> Array | None:
    """Return the load over all ``axes`` as a strided view (extent 1 on unused axes), or None if not affine."""
    forms = [ex.affine_form(i) for i in load.indices]
    if any(f is None for f in forms) or any(a.extent == 0 for a in axes):
        return None
    known = [f for f in forms if f is not None]
    extents = {a.name: a.extent for a in axes}
    spans = []
    for coefficients, constant in known:
        low = constant + sum(min(0, c * (extents[a] - 1)) for a, c in coefficients.items())
        high = constant + sum(max(0, c * (extents[a] - 1)) for a, c in coefficients.items())
        spans.append((low, high))
    padding = [(max(0, -lo), max(0, hi - n + 1)) for (lo, hi), n in zip(spans, tensor.shape, strict=True)]
    if any(p != (0, 0) for p in padding):
        if load.fill is None:
            raise IndexError(f"{load} reads outside {tensor.shape}")
        padded = math.prod(sum(p) + n for p, n in zip(padding, tensor.shape, strict=True))
        if padded > PADDED * (tensor.size + math.prod(a.extent for a in axes)):
            return None
        tensor = np.pad(tensor, padding, constant_values=load.fill)
    offset = sum((c + p[0]) * s for (_, c), p, s in zip(known, padding, tensor.strides, strict=True))
    strides = [sum(f[0].get(a.name, 0) * s for f, s in zip(known, tensor.strides, strict=True)) for a in axes]
    used = {name for f in known for name in f[0]}
    shape = tuple(a.extent if a.name in used else 1 for a in axes)
    return _restride_view(tensor, offset, shape, tuple(strides))


def _restride_view(tensor: Array, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Array:
    """Return a view that starts ``offset`` bytes after the tensor's first element."""
    flat = as_strided(tensor, shape=(1,), strides=(tensor.itemsize,))
    address = flat.__array_interface__["data"][0] + offset
    holder = _Holder(tensor, address, tensor.dtype, shape, strides)
    return np.asarray(holder)


class _Holder:
    """An object that exposes an address inside ``owner`` through the array interface and keeps ``owner`` alive."""

    def __init__(
        self, owner: Array, address: int, dtype: np.dtype[Any], shape: tuple[int, ...], strides: tuple[int, ...]
    ) -> None:
        self.owner = owner
        self.__array_interface__ = {
            "version": 3,
            "data": (address, True),
            "typestr": dtype.str,
            "shape": shape,
            "strides": strides,
        }


def _arithmetic_dtype(dtype: str, precise: bool) -> str:
    """Return the type in which values of ``dtype`` are computed."""
    if not is_float(dtype):
        return dtype
    return "float64" if precise else "float32" if dtype == "float16" else dtype


def _evaluate_contraction(compute: Compute, tensors: Mapping[str, Array], dtype: np.dtype[Any]) -> Array | None:
    """Evaluate ``sum[k] a * b`` over strided views through einsum (and so BLAS)."""
    operands = contraction_operands(compute)
    if operands is None:
        return None
    if np.issubdtype(dtype, np.floating):
        wide = np.dtype(_arithmetic_dtype(str(dtype), precise=False))
    elif dtype == np.int32 and _is_exact(compute, [np.asarray(tensors[load.tensor]) for load in operands]):
        wide = np.dtype(np.float64)
    else:
        return None
    axes = (*compute.axes, *compute.reduce)
    terms: list[Any] = []
    for load in operands:
        view = strided_view(load, axes, np.asarray(tensors[load.tensor]).astype(wide, copy=False))
        if view is None:
            return None
        used = [i for i, a in enumerate(axes) if a.name in ex.axes_of(load)]
        terms += [_squeeze_unused(view, used), used]
    covered = {i for used in terms[1::2] for i in used}
    if not set(range(len(compute.axes))) <= covered:
        return None
    total = np.asarray(np.einsum(*terms, list(range(len(compute.axes))), optimize=True))
    with np.errstate(over="ignore"):
        return total.astype(np.int64).astype(dtype) if dtype == np.int32 else total.astype(dtype, copy=False)


def _evaluate_factored(compute: Compute, tensors: Mapping[str, Array], dtype: np.dtype[Any], precise: bool) -> Array | None:
    """Evaluate ``sum[k] a * f(b, ..)`` of floats as a product of two tensors, computing the second one first. Neither factor may
    have all axes."""
    body, axes = compute.body, (*compute.axes, *compute.reduce)
    if compute.combiner != "sum" or not isinstance(body, Op) or body.fn != "mul" or not np.issubdtype(dtype, np.floating):
        return None
    a, b = body.args
    used = ex.axes_of(b)
    own = tuple(x for x in axes if x.name in used)
    if not isinstance(a, Load) or isinstance(b, Load) or len(own) in (0, len(axes)) or len(ex.axes_of(a)) == len(axes):
        return None
    kind, summed = "float64" if precise else "float32", {r.name for r in compute.reduce}
    if np.asarray(tensors[a.tensor]).dtype.kind != "f" or not summed <= used & ex.axes_of(a) or (dtype == np.float64) != precise:
        return None
    made = Load(".factor", tuple(Ref(x.name) for x in own))
    values = evaluate_compute(Compute("factor", kind, own, b), tensors, precise)
    product = replace(compute, body=Op("mul", (a, made)), used=None)
    return _evaluate_contraction(product, {**tensors, made.tensor: values}, dtype)


def _is_exact(compute: Compute, operands: list[Array]) -> bool:
    """Return True if sums of products of these integers are exact in float64."""
    if any(a.dtype.kind not in "iu" for a in operands):
        return False
    largest = [max(abs(int(a.min(initial=0))), abs(int(a.max(initial=0)))) for a in operands]
    return math.prod((*largest, *(r.extent for r in compute.reduce))) < 2**53


def _squeeze_unused(view: Array, used: list[int]) -> Array:
    unused = tuple(i for i in range(view.ndim) if i not in used)
    return view.squeeze(axis=unused)
