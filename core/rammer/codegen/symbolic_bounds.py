"""Symbolic boxes: the bounds of index expressions as expressions of the tile's origin.

``rammer.ir.expr.interval`` bounds an index by numbers; here the bounds are expressions themselves. One analysis thus gives both
the C text of a task's boxes and, evaluated by NumPy over all tasks, their largest sizes. The two can never disagree."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np

from rammer.ir import expr as ex
from rammer.ir.expr import Cast, Const, Expr, Interval, Load, Op, Ref, Table, integer

#: Inclusive lower and upper bound.
Span: TypeAlias = "tuple[Expr, Expr]"
Numbers: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"

_FOLD: dict[str, Callable[[int, int], int]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "min": min,
    "max": max,
    "floordiv": lambda a, b: a // b,
    "mod": lambda a, b: a % b,
}
_EVALUATE: dict[str, Callable[..., Numbers]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "floordiv": np.floor_divide,
    "mod": np.mod,
    "where": np.where,
    "lt": np.less,
    "eq": np.equal,
}


@dataclass(frozen=True, slots=True)
class AxisBound:
    """An axis of a box: half-open ``[low, high)``; ``solid`` if it can never be empty."""

    low: Expr
    high: Expr
    solid: bool = True

    @property
    def last(self) -> Expr:
        """The inclusive upper bound."""
        return fold("sub", self.high, integer(1))

    @property
    def span(self) -> Span:
        """The inclusive lower and upper bound."""
        return self.low, self.last


def fold(fn: str, a: Expr, b: Expr) -> Expr:
    """Return ``fn(a, b)`` on integers, evaluated if both are literals, simplified if affine."""
    if isinstance(a, Const) and isinstance(b, Const) and not (fn in ("floordiv", "mod") and b.value == 0):
        return integer(_FOLD[fn](int(a.value), int(b.value)))
    if fn in ("min", "max"):
        return a if a == b else Op(fn, (a, b))
    if fn == "floordiv" and b == integer(1):
        return a
    return canonicalise_sum(Op(fn, (a, b)))


def to_linear_form(e: Expr) -> tuple[dict[Expr, int], int]:
    """Return ``e`` as a sum of terms with integer factors and a constant; any other expression is one term."""
    if isinstance(e, Const) and e.dtype == "int64":
        return {}, int(e.value)
    if isinstance(e, Op) and e.fn in ("add", "sub", "neg", "mul"):
        parts = [to_linear_form(a) for a in e.args]
        if e.fn == "neg":
            return _add_scaled({}, 0, parts[0], -1)
        if e.fn in ("add", "sub"):
            return _add_scaled(*parts[0], parts[1], 1 if e.fn == "add" else -1)
        for this, other in (parts, parts[::-1]):
            if not this[0]:
                return _add_scaled({}, 0, other, this[1])
    whole = isinstance(e, Table) or (isinstance(e, Op) and e.fn in ("floordiv", "mod", "min", "max"))
    # Loads and the expressions around them may hold floats, where reordering would change the result.
    return {ex.rebuild_expr(e, tuple(canonicalise_sum(k) for k in ex.children(e))) if whole else e: 1}, 0


def _add_scaled(
    terms: dict[Expr, int], constant: int, other: tuple[dict[Expr, int], int], factor: int
) -> tuple[dict[Expr, int], int]:
    constant += factor * other[1]
    if not other[0]:
        return terms, constant
    if not terms and factor == 1:
        return other[0], constant
    total = {t: terms.get(t, 0) + factor * other[0].get(t, 0) for t in {**terms, **other[0]}}
    return {t: c for t, c in total.items() if c}, constant


def canonicalise_sum(e: Expr) -> Expr:
    """Return an integer expression as a sum of terms, the constant last."""
    return e if isinstance(e, ex.ATOMS) else _cached_sum(e)


@lru_cache(1 << 14)  # kernels of one operator need the same addresses a thousand times
def _cached_sum(e: Expr) -> Expr:
    terms, constant = to_linear_form(e)
    if terms == {e: 1}:
        return e
    total: Expr | None = None
    for term in sorted(terms, key=str):
        factor = terms[term]
        if total is None:
            total = ex.make_mul(term, factor)
        elif factor < 0:
            total = Op("sub", (total, ex.make_mul(term, -factor)))
        else:
            total = Op("add", (total, ex.make_mul(term, factor)))
    if total is None:
        return integer(constant)
    if constant < 0:
        return Op("sub", (total, integer(-constant)))
    return ex.make_add(total, constant)


def index_span(e: Expr, axes: Mapping[str, Span]) -> Span | None:
    """Return symbolic bounds of an integer expression while axes range over ``axes``, or None if data-dependent. They are never
    wider than ``rammer.ir.expr.interval`` on the same box, so a task reads no more than tile propagation predicted."""
    form = ex.affine_form(e)
    if form is not None:
        return _affine_span(form, axes)
    if isinstance(e, Cast):
        return index_span(e.arg, axes)
    if isinstance(e, Table):
        return _table_span(e, axes)
    if not isinstance(e, Op):
        return None
    parts = [index_span(a, axes) for a in (e.args[1:] if e.fn == "where" else e.args)]
    known = [p for p in parts if p is not None]
    if len(known) < len(parts):
        return None
    if e.fn == "neg":
        return fold("sub", integer(0), known[0][1]), fold("sub", integer(0), known[0][0])
    return _combine_spans(e.fn, known[0], known[1]) if len(known) == 2 else None


def _affine_span(form: tuple[dict[str, int], int], axes: Mapping[str, Span]) -> Span:
    low: Expr = integer(form[1])
    high: Expr = integer(form[1])
    for name, c in form[0].items():
        first, last = axes[name] if c > 0 else axes[name][::-1]
        low = fold("add", low, fold("mul", first, integer(c)))
        high = fold("add", high, fold("mul", last, integer(c)))
    return low, high


def _table_span(e: Table, axes: Mapping[str, Span]) -> Span | None:
    values = [int(v) for v in e.values]
    if not values or e.dtype.startswith("float"):
        return None
    inner = index_span(e.index, axes)
    rising = all(a <= b for a, b in itertools.pairwise(values))
    if inner is None or not rising:
        return integer(min(values)), integer(max(values))
    top = integer(len(values) - 1)
    ends = (fold("max", inner[0], integer(0)), fold("min", inner[1], top))
    low, high = (Table(e.values, end, e.dtype) for end in ends)
    return low, high


def _combine_spans(fn: str, p: Span, q: Span) -> Span | None:
    if fn in ("min", "max"):
        return fold(fn, p[0], q[0]), fold(fn, p[1], q[1])
    if fn == "where":
        return fold("min", p[0], q[0]), fold("max", p[1], q[1])
    if fn == "add":
        return fold("add", p[0], q[0]), fold("add", p[1], q[1])
    if fn == "sub":
        return fold("sub", p[0], q[1]), fold("sub", p[1], q[0])
    if fn == "mul":
        corners = [fold("mul", a, b) for a in p for b in q]
        return _fold_chain("min", corners), _fold_chain("max", corners)
    divisor = q[0]
    if fn not in ("floordiv", "mod") or q[0] != q[1] or not isinstance(divisor, Const) or int(divisor.value) <= 0:
        return None
    quotients = fold("floordiv", p[0], divisor), fold("floordiv", p[1], divisor)
    if fn == "floordiv":
        return quotients
    last = integer(int(divisor.value) - 1)
    if quotients[0] == quotients[1]:
        return fold("mod", p[0], divisor), fold("mod", p[1], divisor)
    same = Op("eq", quotients)
    return Op("where", (same, fold("mod", p[0], divisor), integer(0))), Op("where", (same, fold("mod", p[1], divisor), last))


def _fold_chain(fn: str, parts: Sequence[Expr]) -> Expr:
    result = parts[0]
    for part in parts[1:]:
        result = fold(fn, result, part)
    return result


def interval_within(e: Expr, ranges: Mapping[str, Interval], least: int, most: int) -> Interval | None:
    """Return the numeric bounds of ``e`` if those of every sub-expression are in ``[least, most]``, else None."""
    if isinstance(e, Op):
        parts = list[Interval]()
        for arg in e.args:
            part = interval_within(arg, ranges, least, most)
            if part is None:
                return None
            parts.append(part)
        found = ex.combine_intervals(e.fn, parts)
    elif isinstance(e, Load) or any(interval_within(k, ranges, least, most) is None for k in ex.children(e)):
        return None
    else:
        found = ex.interval(e, ranges)
    return found if found is not None and least <= found[0] and found[1] <= most else None


def clip_bounds(bounds: Span | None, extent: int, ranges: Mapping[str, Interval]) -> AxisBound:
    """Return the box of a tensor axis read through an index with ``bounds`` (None reads the whole axis). ``ranges`` are numeric
    ranges of the variables; they show which clips can never act."""
    if bounds is None:
        return AxisBound(integer(0), integer(extent))
    low, high = bounds[0], fold("add", bounds[1], integer(1))
    floor, ceiling = ex.interval(low, ranges), ex.interval(high, ranges)
    if floor is None or floor[0] < 0:
        low = fold("max", low, integer(0))
    if floor is None or floor[1] > extent:
        low = fold("min", low, integer(extent))
    if ceiling is None or ceiling[1] > extent:
        high = fold("min", high, integer(extent))
    if floor is None or ceiling is None or floor[0] < 0 or ceiling[1] > extent:
        high = fold("max", high, low)
    solid = floor is not None and ceiling is not None and floor[1] < extent and ceiling[0] > 0
    return AxisBound(low, high, solid)


def join_boxes(a: Sequence[AxisBound], b: Sequence[AxisBound]) -> tuple[AxisBound, ...]:
    """Return the hull of two boxes, where an empty one contributes nothing (as ``rammer.ir.operator.hull``)."""
    if tuple(a) == tuple(b):
        return tuple(a)
    empty_a, empty_b = _empty_condition(a), _empty_condition(b)
    result = []
    for p, q in zip(a, b, strict=True):
        low, high = fold("min", p.low, q.low), fold("max", p.high, q.high)
        if empty_b is not None:
            low, high = _select_bound(empty_b, p.low, low), _select_bound(empty_b, p.high, high)
        if empty_a is not None:
            low, high = _select_bound(empty_a, q.low, low), _select_bound(empty_a, q.high, high)
        result.append(AxisBound(low, high, p.solid or q.solid))
    return tuple(result)


def _select_bound(condition: Expr, a: Expr, b: Expr) -> Expr:
    return a if a == b else Op("where", (condition, a, b))


def _empty_condition(box: Sequence[AxisBound]) -> Expr | None:
    """Return a condition that is true if the box is empty, or None if it never is."""
    result: Expr | None = None
    for b in box:
        if not b.solid:
            test = Op("lt", (fold("sub", b.high, b.low), integer(1)))
            result = test if result is None else Op("where", (result, integer(1), test))
    return result


def evaluate_index(e: Expr, values: Mapping[str, Numbers]) -> Numbers:
    """Return the value of an integer expression for arrays of variable values (they broadcast)."""
    if isinstance(e, Const):
        return np.asarray(int(e.value), dtype=np.int64)
    if isinstance(e, Ref):
        return values[e.axis]
    if isinstance(e, Table):
        return np.asarray([int(v) for v in e.values], dtype=np.int64)[evaluate_index(e.index, values)]
    if isinstance(e, Cast | Load):
        raise ValueError(f"not a bound: {e}")
    return _EVALUATE[e.fn](*(evaluate_index(a, values) for a in e.args))
