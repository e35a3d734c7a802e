"""Results of an operator in float64, with an error bound per element for the arithmetic of any device.

The evaluation includes a running error analysis: every value has a bound on its accumulated rounding (Higham, "Accuracy and
Stability of Numerical Algorithms", section 3.3). Whole numbers that the format represents have bound 0. With small integers a
contraction must therefore be exact, and a missing or repeated product is detected at any length.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from rammer.ir import expr as ex
from rammer.ir.compute import Axis, Compute, contraction_operands
from rammer.ir.evaluate import FUNCTIONS, evaluate_compute
from rammer.ir.expr import Cast, Const, Expr, Load, Op, Ref, Table
from rammer.ir.operator import ROperator
from rammer.ir.types import is_float
from rammer_testing.graphs import steps

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

#: Unit roundoff of float32, of truncated sums on tensor cores, and of float16; then the rounding of float32 operands of
#: contractions, by precision.
SINGLE, TRUNCATED, HALF = 2.0**-24, 2.0**-23, 2.0**-11
OPERANDS = {"tf32": 2.0**-11, "bfloat16": 2.0**-8}
#: Half the spacing of the smallest float16 numbers, and the smallest normal float32 number, below which a device may flush.
LEAST = {"float16": 2.0**-25, "float32": 2.0**-126}
#: Largest whole number up to which float32 represents all whole numbers.
WHOLE = 2.0**24
#: Functions that select digits or leave them unchanged, and the roundings of the other functions in units of the last place:
#: OpenCL C, "Relative Error as ULPs", full profile; CUDA's are smaller.
EXACT = steps.EXACT | {"shl", "shr", "mod", "fmod", "floordiv"}
ULPS = {"add": 1, "sub": 1, "mul": 1, "div": 5, "sqrt": 6, "pow": 32, "erf": 32, "tan": 10, "tanh": 10}
MOST_ULPS = 16


@dataclass(frozen=True)
class Bounded:
    """Values with an error bound per element; None for exact values."""

    value: Array
    error: Array | None = None


def bounded_results(operator: ROperator, tensors: Mapping[str, Array], precision: str = "float32") -> dict[str, Bounded]:
    """Return the outputs of ``operator``; float32 contractions may round operands according to ``precision``. Errors are infinite
    where rounding may change the result of a comparison."""
    known = {n: Bounded(v) for n, v in tensors.items()}
    with np.errstate(all="ignore"):
        for c in operator.computes:
            known[c.name] = _stored(c, _computed(c, known, OPERANDS.get(precision, 0.0)))
    return {n: known[n] for n in operator.outputs}


def _stored(c: Compute, result: Bounded) -> Bounded:
    """Return the result with the rounding of the store. float32 results inside an operator may stay unrounded: this only adds."""
    return _converted(result, c.dtype) if is_float(c.dtype) else result


def _converted(result: Bounded, dtype: str) -> Bounded:
    """Convert values to a floating-point type. Representable values with an error bound are rounded, too."""
    value = result.value
    kind = np.dtype(dtype)
    unit = {"float16": HALF, "float32": SINGLE}.get(dtype, 2.0**-53)
    inexact = value.astype(kind).astype(np.float64) != value
    if result.error is not None:
        inexact = inexact | (result.error > 0)
    if not inexact.any():
        return result
    return Bounded(value, _sum(result.error, np.where(inexact, unit * np.abs(value) + LEAST.get(dtype, 0.0), 0.0)))


def _computed(c: Compute, known: Mapping[str, Bounded], rounding: float) -> Bounded:
    if c.points and is_float(c.dtype) and (operands := contraction_operands(c)) is not None:
        return _contracted(c, operands, known, rounding)
    if c.points == 0:
        return Bounded(evaluate_compute(c, {n: known[n].value for n in c.reads}, precise=True))
    axes = (*c.axes, *c.reduce)
    body = _Body(axes, known).value(c.body)
    shape = tuple(a.extent for a in axes)
    value = np.broadcast_to(body.value, shape)
    error = None if body.error is None else np.broadcast_to(body.error, shape)
    return _reduced(c, value, error) if c.reduce else Bounded(value, error)


def _reduced(c: Compute, value: Array, error: Array | None) -> Bounded:
    over = tuple(range(len(c.axes), value.ndim))
    if c.combiner in ("max", "min"):
        result = (np.max if c.combiner == "max" else np.min)(value, axis=over)
        return Bounded(result, None if error is None else error.max(axis=over))
    if not np.issubdtype(value.dtype, np.floating):
        fold = np.prod if c.combiner == "prod" else np.sum
        return Bounded(np.asarray(fold(value, axis=over, dtype=np.dtype(c.dtype))))
    count = value.size // max(1, int(np.prod([a.extent for a in c.axes])))
    if c.combiner == "prod":
        result = np.prod(value, axis=over)
        relative = 0.0 if error is None else np.nan_to_num(error / np.abs(value)).sum(axis=over)
        return Bounded(result, np.abs(result) * (relative + count * SINGLE))
    result, size = value.sum(axis=over), np.abs(value).sum(axis=over)
    if error is None and _whole(value) and size.max(initial=0) < WHOLE:
        return Bounded(result)
    return Bounded(result, _sum(None if error is None else error.sum(axis=over), count * SINGLE * size))


def _contracted(c: Compute, operands: tuple[Load, Load], known: Mapping[str, Bounded], rounding: float) -> Bounded:
    """Return a sum of products with the rounding of the sum, the rounding of its operands, and their errors."""
    a, b = (known[load.tensor] for load in operands)
    names = [load.tensor for load in operands]

    def product(x: Array, y: Array) -> Array:
        if names[0] == names[1]:
            return evaluate_compute(c, {names[0]: x}, precise=True)
        return evaluate_compute(c, {names[0]: x, names[1]: y}, precise=True)

    value, size = product(a.value, b.value), product(np.abs(a.value), np.abs(b.value))
    count = int(np.prod([r.extent for r in c.reduce]))
    exact = a.error is None and b.error is None and _whole(a.value) and _whole(b.value)
    most = max(np.abs(np.nan_to_num(x.value)).max(initial=0) for x in (a, b))
    error: Array | None = None
    if not (exact and np.nan_to_num(size).max(initial=0) < WHOLE and most <= 1 / max(HALF, rounding)):
        error = ((count + 8) * TRUNCATED + 2.5 * rounding) * size
    if names[0] == names[1]:
        moved = None if a.error is None else product(np.abs(a.value) + a.error, a.value) - size
        return Bounded(value, _sum(error, moved))
    if a.error is not None:
        error = _sum(error, product(a.error, np.abs(b.value) + (b.error if b.error is not None else 0.0)))
    if b.error is not None:
        error = _sum(error, product(np.abs(a.value), b.error))
    return Bounded(value, error)


def _whole(value: Array) -> bool:
    return bool(np.array_equal(np.rint(value), value, equal_nan=True))


def _sum(a: Any, b: Any) -> Any:
    return b if a is None else a if b is None else a + b


@dataclass
class _Body:
    """An evaluator for the body of a Compute over ``axes`` that carries errors with values."""

    axes: tuple[Axis, ...]
    known: Mapping[str, Bounded]

    def __post_init__(self) -> None:
        self.memo: dict[Expr, Bounded] = {}

    def value(self, e: Expr) -> Bounded:
        """Evaluate one expression with its error."""
        if e not in self.memo:
            self.memo[e] = self._plain(e) if isinstance(e, Const | Ref | Table | Load) else self._changed(e)
        return self.memo[e]

    def _plain(self, e: Expr) -> Bounded:
        """Evaluate expressions that only read: once for values and once for errors."""
        loads = ex.loads(e)
        value = _evaluated(e, self.axes, {n: self.known[n].value for n in {ld.tensor for ld in loads}})
        if not isinstance(e, Load) or (error := self.known[e.tensor].error) is None:
            return Bounded(value)
        bare = Load(e.tensor, e.indices, None if e.fill is None else 0.0)
        others = {n: self.known[n].value for n in {ld.tensor for ld in loads}}
        return Bounded(value, _evaluated(bare, self.axes, {**others, e.tensor: error}))

    def _changed(self, e: Expr) -> Bounded:
        if isinstance(e, Cast):
            return self._cast(e)
        assert isinstance(e, Op)
        args = [self.value(a) for a in e.args]
        function = FUNCTIONS[e.fn]
        value = np.asarray(function(*(a.value for a in args)))
        error: Any = None
        for i, arg in enumerate(args):
            if arg.error is not None:
                error = _sum(error, _moved(e.fn, args, i, value))
        if np.issubdtype(value.dtype, np.floating) and e.fn not in EXACT:
            error = self._rounded(e.fn, value, error)
        return Bounded(value, error)

    @staticmethod
    def _rounded(fn: str, value: Array, error: Any) -> Any:
        plain = fn in ("add", "sub", "mul")
        if plain and error is None and (value.astype(np.float32) == value).all():
            return None
        return _sum(error, (ULPS.get(fn, MOST_ULPS)) * SINGLE * np.abs(value) + LEAST["float32"])

    def _cast(self, e: Cast) -> Bounded:
        arg = self.value(e.arg)
        if is_float(e.dtype):
            moved = Bounded(arg.value.astype(np.float64), arg.error)
            return _converted(moved, e.dtype) if e.dtype == "float16" else moved
        unsure = None if arg.error is None else np.where(arg.error > 0, np.inf, 0.0)
        return Bounded(arg.value.astype(e.dtype), unsure)


def _moved(fn: str, args: list[Bounded], which: int, value: Array) -> Array:
    """Return the change of the result if one argument is off by its error."""
    arg = args[which]
    assert arg.error is not None
    if not np.issubdtype(arg.value.dtype, np.floating):  # an uncertain comparison
        spread = np.abs(args[1].value - args[2].value) if fn == "where" and which == 0 else np.inf
        return np.where((arg.error > 0) & (spread != 0), np.inf, 0.0)
    ends = []
    for sign in (-1, 1):
        other = [a.value for a in args]
        other[which] = arg.value + sign * arg.error
        ends.append(np.asarray(FUNCTIONS[fn](*other)))
    if value.dtype == bool or np.issubdtype(value.dtype, np.integer):
        return np.where((ends[0] != value) | (ends[1] != value), np.inf, 0.0)
    far = np.maximum(np.abs(ends[0] - value), np.abs(ends[1] - value))
    return np.where(np.isnan(far) & ~np.isnan(value) & np.isfinite(value), np.inf, np.nan_to_num(far, posinf=np.inf))


def _evaluated(e: Expr, axes: tuple[Axis, ...], tensors: Mapping[str, Array]) -> Array:
    """Evaluate ``e`` at every point of ``axes``, broadcast along axes that it does not use."""
    used = ex.axes_of(e)
    mine = tuple(a for a in axes if a.name in used)
    found = evaluate_compute(Compute("body", _kind(e, tensors), mine, e), tensors, precise=True)
    return found.reshape(tuple(a.extent if a.name in used else 1 for a in axes))


def _kind(e: Expr, tensors: Mapping[str, Array]) -> str:
    if isinstance(e, Load):
        return str(tensors[e.tensor].dtype)
    return e.dtype if isinstance(e, Const | Table) else "int64"
