"""Index expressions with collected terms, and those of Reshape: the source element of a row-major output position.

A position is a sum of terms ``coefficient * axis``. Division by a stride and reduction modulo an extent are simplified with the
bounds of the axes. Aligned splits and merges thus have minimal forms. These are ``i // k`` and ``i % k`` for a merged axis, ``i *
k + j`` for a split one, ``i`` for an equal one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from rammer.ir import expr as ex
from rammer.ir.compute import Axis
from rammer.ir.expr import Expr
from rammer.ir.types import row_major

#: (axis, coefficient), with a positive coefficient.
Term = tuple[Axis, int]


def reshape_indices(source: tuple[int, ...], axes: Sequence[Axis]) -> tuple[Expr, ...]:
    """Return the indices into a tensor of shape ``source`` of the element at row-major position ``axes``. Both sides have equal
    numbers of elements; an empty tensor has indices of 0."""
    target = tuple(a.extent for a in axes)
    if 0 in source:
        return tuple(ex.integer(0) for _ in source)
    terms = [(a, s) for a, s in zip(axes, row_major(target), strict=True) if a.extent > 1]
    return tuple(_extract_digit(terms, s, n) for s, n in zip(row_major(source), source, strict=True))


def collect_terms(index: Expr) -> Expr:
    """Return ``index`` with its terms collected if it is affine in the axes, else ``index``."""
    form = ex.affine_form(index)
    return index if form is None else ex.make_add(_sum_named_terms(form[0].items()), form[1])


def _extract_digit(terms: Sequence[Term], stride: int, extent: int) -> Expr:
    """Return ``(sum of terms) // stride % extent``."""
    if extent == 1:
        return ex.integer(0)
    period = stride * extent
    # Multiples of stride * extent change neither the quotient's residue nor the remainder below it.
    kept = [(a, c) for a, c in terms if c % period]
    whole = [(a, c // stride) for a, c in kept if c % stride == 0]
    quotient, top = _divide_terms([(a, c) for a, c in kept if c % stride], stride)
    total = ex.make_add(_sum_terms(whole), quotient)
    return total if _maximum_sum(whole) + top < extent else ex.make_mod(total, extent)


def _divide_terms(terms: Sequence[Term], divisor: int) -> tuple[Expr, int]:
    """Return ``(sum of terms) // divisor`` and its maximum."""
    top = _maximum_sum(terms) // divisor
    if top == 0:
        return ex.integer(0), 0
    # Small terms cannot carry into a common factor of the large terms and the divisor.
    for count in range(1, len(terms) + 1):
        factor = math.gcd(divisor, *(c for _, c in terms[:count]))
        if _maximum_sum(terms[count:]) < factor:
            reduced = [(a, c // factor) for a, c in terms[:count]]
            return ex.make_floordiv(_sum_terms(reduced), divisor // factor), top
    raise AssertionError("unreachable: with no term left over, any factor exceeds their maximum")


def _sum_terms(terms: Iterable[Term]) -> Expr:
    return _sum_named_terms((axis.name, coefficient) for axis, coefficient in terms)


def _sum_named_terms(terms: Iterable[tuple[str, int]]) -> Expr:
    """Return the sum of coefficients times named axes."""
    total: Expr = ex.integer(0)
    for axis, coefficient in terms:
        total = ex.make_add(total, ex.make_mul(axis, coefficient))
    return total


def _maximum_sum(terms: Sequence[Term]) -> int:
    return sum(c * (a.extent - 1) for a, c in terms)
