"""Substitution of affine indices in loads: a gather of consecutive rows becomes a slice.

Models read the first n rows of a table by a Range and a Gather. Both are constants if the length is fixed. For a range of lengths
they are operators, and a device would have to expect any row at any index. This module substitutes the affine expression into the
index, and reads constants instead of views of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np

from rammer.ir import expr as ex
from rammer.ir.compute import Compute
from rammer.ir.expr import Cast, Expr, Load, Op
from rammer.ir.reindex import collect_terms
from rammer.ir.types import TensorType

Interval: TypeAlias = "tuple[int, int]"
#: Axis -> its least and greatest value.
Area: TypeAlias = "Mapping[str, Interval]"


def placed_rows(
    computes: Sequence[Compute], types: Mapping[str, TensorType], constants: Collection[str], outputs: Collection[str]
) -> list[Compute]:
    """Return ``computes`` in order, with affine indices in loads, without the computes that become unused. ``types`` holds the
    types of all tensors."""
    return _PlacedRows(types, constants).placed(computes, outputs)


@dataclass
class _PlacedRows:
    types: Mapping[str, TensorType]
    constants: Collection[str]
    counts: dict[str, Compute] = field(default_factory=dict)  #: Tensors whose elements are affine in their indices.
    shown: dict[str, Compute] = field(default_factory=dict)  #: Views of a constant.

    def placed(self, computes: Sequence[Compute], outputs: Collection[str]) -> list[Compute]:
        made = list[Compute]()
        for c in computes:
            area = {a.name: (0, a.extent - 1) for a in (*c.axes, *c.reduce)}
            body = self._resolve_body(c.body, area, c.combiner is None)
            c = c if body is c.body else replace(c, body=body)
            made.append(c)
            if c.combiner is None and c.points:
                counted = replace(c, body=_simplify_integer(self._index(body, area), area))
                if _is_affine_integer(counted, area):
                    self.counts[c.name] = counted
                elif self._is_constant_view(body):
                    self.shown[c.name] = c
        read = {n for c in made for n in c.reads} | {*outputs}
        return [c for c in made if c.name in read or c.name not in self.counts.keys() | self.shown.keys()]

    def _is_constant_view(self, body: Expr) -> bool:
        plain = isinstance(body, Load) and body.tensor in self.constants and body.fill is None
        return plain and not any(map(ex.has_loads, ex.children(body)))

    def _resolve_body(self, e: Expr, area: Area, through: bool) -> Expr:
        """Return ``e`` with affine indices; if ``through``, loads of constant views become loads of the constant."""

        def rule(n: Expr) -> Expr | None:
            if not isinstance(n, Load):
                return None
            indices = tuple(self._index(i, area) for i in n.indices)
            inside = _is_in_bounds(indices, self.types[n.tensor], area)
            if inside and through and n.tensor in self.shown:
                return _element_at(self.shown[n.tensor], indices)
            changed = any(a is not b for a, b in zip(indices, n.indices, strict=True))
            return Load(n.tensor, indices, None if inside else n.fill) if changed else n

        return ex.transform(e, rule)

    def _index(self, e: Expr, area: Area) -> Expr:
        """Return an index in which loads of affine tensors are replaced by their expressions, if they are in bounds."""

        def rule(n: Expr) -> Expr | None:
            if not isinstance(n, Load):
                return None
            places = tuple(self._index(i, area) for i in n.indices)
            if n.tensor in self.counts and _is_in_bounds(places, self.types[n.tensor], area):
                return _element_at(self.counts[n.tensor], places)
            return n if places == n.indices else Load(n.tensor, places, n.fill)

        made = ex.transform(e, rule)
        return e if made == e else _simplify_integer(made, area)


def _element_at(c: Compute, indices: Sequence[Expr]) -> Expr:
    """Return the expression of an element of ``c``."""
    return ex.substitute(c.body, {a.name: i for a, i in zip(c.axes, indices, strict=True)})


def _is_affine_integer(c: Compute, area: Area) -> bool:
    """Return True if the elements of ``c`` are integers that are affine in their indices and fit their type."""
    if not np.issubdtype(np.dtype(c.dtype), np.integer) or ex.has_loads(c.body):
        return False
    return ex.affine_form(c.body) is not None and _can_represent(c.dtype, _integer_interval(c.body, area))


def _is_in_bounds(indices: Sequence[Expr], of: TensorType, area: Area) -> bool:
    """Return True if ``indices`` are within the tensor over the whole ``area``."""
    found = [(_integer_interval(i, area), extent) for i, extent in zip(indices, of.shape, strict=True)]
    return all(known is not None and known[0] >= 0 and known[1] < extent for known, extent in found)


def _simplify_integer(e: Expr, area: Area) -> Expr:
    """Return an integer expression without redundant conversions and decided selections, simplified if it is affine."""
    if isinstance(e, Load):
        return e
    kids = ex.children(e)
    parts = tuple(_simplify_integer(k, area) for k in kids)
    made = e if parts == kids else ex.rebuild_expr(e, parts)
    if isinstance(made, Cast):
        return made.arg if _can_represent(made.dtype, _integer_interval(made.arg, area)) else made
    if isinstance(made, Op) and made.fn == "where":
        decided = _decide_comparison(made.args[0], area)
        return made if decided is None else made.args[1 if decided else 2]
    return collect_terms(made)


def _can_represent(dtype: str, known: Interval | None) -> bool:
    """Return True if the integer type ``dtype`` holds all values of the interval."""
    if known is None or not np.issubdtype(np.dtype(dtype), np.integer):
        return False
    return np.iinfo(dtype).min <= known[0] and known[1] <= np.iinfo(dtype).max


def _decide_comparison(e: Expr, area: Area) -> bool | None:
    """Return True if ``a < b`` holds everywhere, False if it holds nowhere, or None if it is undecided."""
    if not isinstance(e, Op) or e.fn != "lt":
        return None
    a, b = (_integer_interval(x, area) for x in e.args)
    if a is None or b is None:
        return None
    return True if a[1] < b[0] else False if a[0] >= b[1] else None


def _integer_interval(e: Expr, area: Area) -> Interval | None:
    """Return the bounds of an integer expression, or None if it has loads or floats."""
    if any(isinstance(n, Load) or (isinstance(n, ex.Const) and isinstance(n.value, float)) for n in ex.walk(e)):
        return None
    return ex.interval(e, area)
