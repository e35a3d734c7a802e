"""Undecidable elements: comparisons, roundings and conversions to integers whose operands' errors reach across a step.

A few trajectories do not show every outcome. Of thirteen near ties, float32 may choose an outcome that no trajectory has. Values
that are equal in float64 by chance differ in all trajectories. So each decision is judged by its operand. The error is its
movement in the trajectories with a margin. If the error reaches across a step, the decision is undecided. Every result of an
undecided element is undecided, too, through any operators.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

import numpy as np

from rammer.ir import expr as ex
from rammer.ir.compute import Axis, Compute
from rammer.ir.evaluate import evaluate_compute
from rammer.ir.expr import Cast, Const, Expr, Load, Op, Ref

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
Step: TypeAlias = "tuple[Expr, tuple[Axis, ...]]"
#: Ratio of the assumed error to the movement in the trajectories, as for results.
MARGIN: Final = 4.0
#: Points at which each kind of decision changes: 0, whole numbers, whole numbers but 0, half-way between whole numbers.
CHANGES: Final = {
    "eq": "zero",
    "lt": "zero",
    "le": "zero",
    "sign": "zero",
    "floor": "whole",
    "ceil": "whole",
    "floordiv": "whole",
    "mod": "whole",
    "fmod": "cut",
    "round": "half",
}
_NEVER: Final = Const(False, "bool")


@dataclass
class Decisions:
    """The decisions of one Compute: the operand of each, and its movement."""

    middle: dict[Step, Array] = field(default_factory=dict)
    moved: dict[Step, Array] = field(default_factory=dict)

    def exact(self, e: Expr, axes: tuple[Axis, ...], operands: list[Array]) -> None:
        """Record the operand of a decision."""
        if change_of(e, operands):
            self.middle[e, axes] = value = _operand(e, operands)
            self.moved[e, axes] = np.zeros(value.shape)

    def disturbed(self, e: Expr, axes: tuple[Axis, ...], operands: list[Array]) -> None:
        """Record the movement of the operand in a trajectory."""
        if not change_of(e, operands):
            return
        have, want = _operand(e, operands), self.middle[e, axes]
        with np.errstate(all="ignore"):
            same = (have == want) | (np.isnan(have) & np.isnan(want))
            apart = np.where(same, 0.0, np.nan_to_num(np.abs(have - want), nan=np.inf))
        self.moved[e, axes] = np.maximum(self.moved[e, axes], apart)

    def undecided(self) -> dict[Step, Array]:
        """Return a mask of undecided elements for each decision that has some."""
        found = {}
        for step, moved in self.moved.items():
            e, middle, across = step[0], self.middle[step], np.zeros(moved.shape, bool)
            integer = isinstance(e, Cast) and e.dtype != "bool"
            if moved.any():
                change = "cut" if integer else CHANGES[e.fn] if isinstance(e, Op) else "zero"
                across = (moved > 0) & _across(change, middle, MARGIN * moved)
            if isinstance(e, Cast) and integer:
                across = across | _outside(e.dtype, middle, MARGIN * moved)
            if across.any():
                found[step] = across
        return found


def change_of(e: Expr, operands: list[Array]) -> bool:
    """Return True if a step makes a decision based on floats."""
    if isinstance(e, Op):
        return e.fn in CHANGES and operands[0].dtype.kind == "f"
    return isinstance(e, Cast) and operands[0].dtype.kind == "f" and np.dtype(e.dtype).kind in "iub"


def doubtful(
    compute: Compute, exact: Mapping[str, Array], known: Mapping[str, Array], undecided: Mapping[Step, Array]
) -> Array | None:
    """Return a mask of the elements of ``compute`` that depend on an undecided step or a doubtful element. ``known`` holds the
    masks of doubtful elements. Returns None if no element is doubtful. ``exact`` holds the values for selections and indices."""
    if not compute.points or not (undecided or any(n in known for n in compute.reads)):
        return None
    axes = (*compute.axes, *compute.reduce)
    if any(where != axes for _, where in undecided):  # evaluated in pieces
        return np.ones(compute.shape, bool)
    masks, places = dict[str, Array](), dict[Expr, Load]()
    for number, ((e, _), mask) in enumerate(undecided.items()):
        full = mask.reshape(mask.shape if mask.ndim == len(axes) else (1,) * len(axes))
        masks[f"?{number}"] = full
        at = tuple(Ref(a.name) if n > 1 else ex.integer(0) for a, n in zip(axes, full.shape, strict=True))
        places[e] = Load(f"?{number}", at)
    masks |= {f"?{n}": known[n] for n in compute.reads if n in known}
    body = _hangs(compute.body, frozenset(known), places, {})
    asked = replace(compute, dtype="bool", body=body, combiner="max" if compute.reduce else None)
    found = np.asarray(evaluate_compute(asked, {**exact, **masks}, precise=True))
    return found if found.any() else None


def _hangs(e: Expr, known: frozenset[str], places: Mapping[Expr, Load], memo: dict[Expr, Expr]) -> Expr:
    """Return a boolean expression that is true if ``e`` depends on an undecided element."""
    if e not in memo:
        if isinstance(e, Op) and e.fn == "where":
            chosen, *sides = (_hangs(a, known, places, memo) for a in e.args)
            result = chosen
            if any(s != _NEVER for s in sides):
                result = _either(chosen, Op("where", (e.args[0], *sides)))
        else:
            result = _NEVER
            for part in ex.children(e):
                result = _either(result, _hangs(part, known, places, memo))
            if isinstance(e, Load) and e.tensor in known:
                result = _either(result, Load(f"?{e.tensor}", e.indices, None if e.fill is None else False))
        memo[e] = _either(result, places[e]) if e in places else result
    return memo[e]


def _either(a: Expr, b: Expr) -> Expr:
    if _NEVER in (a, b):
        return b if a == _NEVER else a
    return Op("or_", (a, b))


def _operand(e: Expr, operands: list[Array]) -> Array:
    """Return the number that a decision depends on."""
    first = operands[0]
    with np.errstate(all="ignore"):
        if isinstance(e, Op) and e.fn in ("eq", "lt", "le"):
            return np.asarray(np.where(first == operands[1], 0.0, first - operands[1]))
        if isinstance(e, Op) and e.fn in ("floordiv", "mod", "fmod"):
            return np.asarray(first / operands[1])
    return np.asarray(first, np.float64)


def _outside(dtype: str, middle: Array, reach: Array) -> Array:
    """Return a mask of numbers that no integer of the type represents. ONNX's Cast: from 'floating point to fixed point:
    undefined if OOR'. The wrap of negative numbers to unsigned ones, as in NumPy, is guaranteed."""
    ends = np.iinfo(dtype)
    low = min(float(ends.min), -(2.0**63) if ends.min == 0 else 0.0)
    with np.errstate(all="ignore"):
        return np.asarray(~((middle - reach > low - 1) & (middle + reach < float(ends.max) + 1)))


def _across(change: str, middle: Array, reach: Array) -> Array:
    """Return a mask of the elements whose decision changes within ``reach`` of ``middle``."""
    with np.errstate(all="ignore"):
        if change == "zero":
            within = np.abs(middle) <= reach
        elif change == "cut":  # towards zero: 0 is not a step
            size = np.abs(middle)
            within = np.floor(size + reach) >= np.maximum(np.ceil(size - reach), 1)
        else:
            shifted = middle - 0.5 if change == "half" else middle
            within = np.floor(shifted + reach) >= np.ceil(shifted - reach)
    return np.asarray(within | np.isinf(reach))
