"""Float rounding inside one expression: the rounding of every intermediate value, not only of the result.

``x * (1 - t) + x' * t`` near 0 has an error proportional to its terms, and so has ``max(0, x / 6 + 0.5)`` at -3. Every value that
the type of the step cannot represent is moved by some roundings, and later steps propagate them. Weights in tables and literals
have the one value of their type. A representable value is unchanged, since IEEE arithmetic does not round it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import numpy as np

from rammer.ir import expr as ex
from rammer.ir.compute import Axis
from rammer.ir.expr import Cast, Const, Expr, Load, Op, Table
from rammer.ir.types import is_float
from rammer_testing.graphs.uncertain_elements import Decisions

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
#: Half a unit in the last place, and the smallest number above 0.
UNIT: Final = {"float16": 2.0**-11, "float32": 2.0**-24, "float64": 2.0**-53}
TINY: Final = {"float16": 2.0**-24, "float32": 2.0**-126, "float64": 0.0}
#: Functions without rounding.
EXACT: Final = frozenset(
    {
        "max",
        "min",
        "where",
        "eq",
        "lt",
        "le",
        "isnan",
        "isinf",
        "neg",
        "abs",
        "sign",
        "floor",
        "ceil",
        "round",
        "and_",
        "or_",
        "not_",
        "xor",
    }
)


@dataclass
class Steps:
    """A watch of the evaluations of one Compute (``rammer.ir.evaluate.Watch``).

    The first evaluation is exact (``exact``), later ones are disturbed (``disturbed``). ``dtypes`` are the element types of the
    tensors; ``amplified`` is the error of a step in roundings."""

    dtypes: Mapping[str, str]
    rng: np.random.Generator
    amplified: float
    kinds: dict[Expr, str] = field(default_factory=dict)
    decisions: Decisions = field(default_factory=Decisions)

    def exact(self, e: Expr, axes: tuple[Axis, ...], operands: list[Array], value: Array) -> Array:
        """Return ``value`` unchanged and record the operands of decisions."""
        self.decisions.exact(e, axes, operands)
        return value

    def disturbed(self, e: Expr, axes: tuple[Axis, ...], operands: list[Array], value: Array) -> Array:
        """Return ``value`` with a possible rounding of the step's type."""
        self.decisions.disturbed(e, axes, operands)
        if value.dtype.kind != "f" or isinstance(e, Load) or (isinstance(e, Op) and e.fn in EXACT):
            return value
        kind = self._kind(e)
        with np.errstate(all="ignore"):
            if isinstance(e, Const | Table):
                return np.asarray(value.astype(kind).astype(value.dtype))
            cost = ex.OPS[e.fn].flops if isinstance(e, Op) else 1
            noise = np.where(_held(e, kind, operands, value), 0, cost * UNIT[kind] * np.abs(value) + TINY[kind])
            moved = value + self.amplified * noise * self.rng.uniform(-1, 1, value.shape)
        return np.where(np.isfinite(moved), moved, value)

    def _kind(self, e: Expr) -> str:
        """Return the type in which ``e`` computes; float16 is a storage format only."""
        if e not in self.kinds:
            self.kinds[e] = self._found(e)
        return self.kinds[e]

    def _found(self, e: Expr) -> str:
        if isinstance(e, Const | Table | Cast):
            kind = e.dtype
        elif isinstance(e, Load):
            kind = self.dtypes[e.tensor]
        elif isinstance(e, Op):
            args = e.args[1:] if e.fn == "where" else e.args
            kind = self._kind(next((a for a in args if not isinstance(a, Const)), args[0]))
        else:
            kind = "int64"
        return "float32" if kind == "float16" else kind


def _held(e: Expr, kind: str, operands: list[Array], value: Array) -> Array:
    """Return a mask of the values that the type of the step represents exactly."""
    if not is_float(kind) or (kind == "float64" and isinstance(e, Cast)):
        return np.ones(value.shape, bool)
    if kind == "float64":  # rounding in float64 is detected for whole numbers only
        whole = np.logical_and.reduce(np.broadcast_arrays(*(a == np.rint(a) for a in (value, *operands))))
        return np.broadcast_to(whole, value.shape)
    normal = (value == 0) | (np.abs(value) >= TINY[kind])
    return np.asarray(normal & (value == value.astype(kind)))
