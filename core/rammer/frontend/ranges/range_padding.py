"""Padding of tensors past the length with values that do not change a reduction that reads them.

The producer of a tensor stores zeros there (minus infinity for a maximum) in its epilogue. The reduction stays static, as kernel
families expect: a product of attention reads zero weights and zero values. Only if the producer cannot pad does the reduction
test the length at every index.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

import numpy as np

from rammer.ir import expr as ex
from rammer.ir.compute import Compute, combiner_identity
from rammer.ir.expr import Const, Expr, Load, Number, Op, Ref
from rammer.ir.extent import AffineExtent, Dim
from rammer.ir.names import Names, make_identifier
from rammer.ir.types import is_float

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
#: A dimension of a tensor.
Place: TypeAlias = "tuple[str, int]"
#: Search depth for sibling products: the most maps after a product.
FOLLOWED: Final = 4
#: The mark of a value that is equal within and past the length.
_ROW: Final = "row"


@dataclass
class SkipMarker:
    """The computes of a program for a range, in order, masked at its lengths. ``shapes`` and ``dtypes`` are those of all tensors,
    ``deep`` holds the extents of reduction axes by compute. ``value`` converts an extent to an expression."""

    computes: Sequence[Compute]
    shapes: Mapping[str, tuple[Dim, ...]]
    deep: Mapping[str, Mapping[str, Dim]]
    value: Callable[[Dim], Expr]
    dtypes: Mapping[str, str]
    inputs: Collection[str]  #: Inputs that hold zeros past the length.
    constants: Mapping[str, Array]
    names: Names
    needs: dict[Place, Number] = field(default_factory=dict)
    held: dict[Place, Number] = field(default_factory=dict)
    stops: dict[tuple[str, str], AffineExtent] = field(default_factory=dict)  #: Keyed by current reduction name and axis.

    def result(self) -> list[Compute]:
        """Return the computes; the output of a product is masked by a map after it."""
        self.producers = {c.name: c for c in self.computes}
        self.computes = [self._pad_windows(c) for c in self.computes]
        guarded = {c.name: self._axes_to_guard(c) for c in self.computes if c.combiner is not None}
        for place, fill in list(self.needs.items()):
            self.needs |= {(n, place[1]): fill for n in self._sibling_products(place[0]) if self._can_hold((n, place[1]), fill)}
        made = list[Compute]()
        for c in self.computes:
            made += self._pad_compute(replace(c, body=self._guard_reduction(c, guarded.get(c.name, ()))))
        return made

    def _note_stops(self, c: Compute, name: str) -> None:
        """Record that all reductions of ``c`` stop at the length: those without a guard read neutral values past it."""
        found = ((r, dim) for r, dim in self.deep.get(c.name, {}).items())
        self.stops |= {(name, r): dim for r, dim in found if isinstance(dim, AffineExtent)}

    def _sibling_products(self, name: str) -> list[str]:
        """Return products of the same tensors that may be batched with ``name``, or maps after them: they are masked alike."""
        c = self.producers.get(name)
        roots = self._product_roots(name, FOLLOWED)
        if c is None or roots is None:
            return []
        like = [o for o in self.computes if o is not c and (o.shape, o.dtype, o.combiner) == (c.shape, c.dtype, c.combiner)]
        return [o.name for o in like if o.form == c.form and self._product_roots(o.name, FOLLOWED) == roots]

    def _product_roots(self, name: str, steps: int) -> frozenset[str] | None:
        """Return the non-constant operands of the single product before ``name``, or None if it does not exist."""
        c = self.producers.get(name)
        if c is None or not steps:
            return None
        read = [r for r in c.reads if r not in self.constants]
        if c.kind == "contraction":
            return frozenset(read)
        return self._product_roots(read[0], steps - 1) if c.combiner is None and len(read) == 1 else None

    # --- requirements of reductions -----------------------------------------------------------

    def _axes_to_guard(self, c: Compute) -> list[str]:
        """Record the padding that the reduction needs; return the axes on which it must test the length."""
        deep = ((r, dim) for r, dim in self.deep.get(c.name, {}).items() if isinstance(dim, AffineExtent))
        return [r for r, dim in deep if not self._is_past_row(c, r, dim) and not self._can_pad_operands(c, r, dim)]

    def _is_past_row(self, c: Compute, axis: str, dim: AffineExtent) -> bool:
        """Return True if a running sum past ``dim`` on ``axis`` is outside its row: before the row's start, or excluded by a test
        of its end."""
        assert c.combiner is not None
        neutral, body = combiner_identity(c.combiner, c.dtype), c.body
        end: Expr | None = None
        if isinstance(body, Op) and body.fn == "where":
            test, body, other = body.args
            if not isinstance(test, Op) or test.fn != "lt" or test.args[1] != self.value(dim) or other != neutral:
                return False
            end = test.args[0]
        if not isinstance(body, Load) or body.fill != neutral.value:
            return False
        at = [d for d, i in enumerate(body.indices) if axis in ex.axes_of(i)]
        form = ex.affine_form(body.indices[at[0]]) if len(at) == 1 else None
        if form is None or form[0].get(axis) not in (-1, 1) or (end is not None and end != body.indices[at[0]]):
            return False
        (factors, offset), shape = form, self.shapes[c.name]
        rows = [d for d, a in enumerate(c.axes) if factors.get(a.name) == 1 and shape[d] == dim]
        if len(factors) != 2 or not rows or self.shapes[body.tensor][at[0]] != dim:
            return False
        return offset <= 0 and end is None if factors[axis] < 0 else offset >= 0 and end is not None

    def _can_pad_operands(self, c: Compute, axis: str, dim: AffineExtent) -> bool:
        """Return True if every operand of ``c`` along ``axis`` can hold values that do not change the result."""
        operands = c.body.args if c.combiner == "sum" and isinstance(c.body, Op) and c.body.fn == "mul" else (c.body,)
        places = list[Place]()
        for operand in operands:
            place = self._operand_dimension(operand, axis, dim)
            if place is None or not is_float(self.dtypes[place[0]]):
                return False
            places.append(place)
        assert c.combiner is not None
        neutral = combiner_identity(c.combiner, c.dtype).value
        able = [p for p in places if self._can_hold(p, neutral)]
        if not able or any(p not in able and not self._is_finite(p) for p in places):
            return False
        self.needs |= dict.fromkeys(able, neutral)
        return True

    def _operand_dimension(self, operand: Expr, axis: str, dim: AffineExtent) -> Place | None:
        """Return the dimension of a tensor that ``operand`` traverses with ``axis``, at its origin, or None."""
        if not isinstance(operand, Load) or operand.fill is not None:
            return None
        at = [d for d, i in enumerate(operand.indices) if axis in ex.axes_of(i)]
        if len(at) != 1 or operand.indices[at[0]] != Ref(axis) or self.shapes[operand.tensor][at[0]] != dim:
            return None
        return self._dimension_origin(operand.tensor, at[0])

    def _dimension_origin(self, tensor: str, d: int) -> Place:
        """Return the origin of a dimension, through maps that only rearrange."""
        while (made := self.producers.get(tensor)) is not None and isinstance(made.body, Load) and made.body.fill is None:
            name, load = made.axes[d].name, made.body
            at = [k for k, i in enumerate(load.indices) if name in ex.axes_of(i)]
            if made.combiner or len(at) != 1 or load.indices[at[0]] != Ref(name):
                break
            if self.shapes[load.tensor][at[0]] != self.shapes[tensor][d]:
                break
            tensor, d = load.tensor, at[0]
        return tensor, d

    def _can_hold(self, place: Place, neutral: Number) -> bool:
        """Return True if a tensor can hold ``neutral`` past the length."""
        if place[0] in self.producers:
            return self.needs.get(place, neutral) == neutral
        return place[0] in self.inputs and neutral == 0  # the runtime pads inputs with zeros

    def _is_finite(self, place: Place) -> bool:
        """Return True if zero times the tensor's values past the length is zero."""
        values = self.constants.get(place[0])
        return values is not None and bool(np.isfinite(values).all())

    def _pad_windows(self, c: Compute) -> Compute:
        """Return a sum over windows without tests of the length, as kernel families expect it, where its operands can hold the
        zeros of the padding past the length. Padding past the memory stays that of the load. A running sum, whose reduction has
        the extent of a length, keeps its test: later passes compute it in blocks."""
        if c.combiner != "sum" or any(isinstance(dim, AffineExtent) for dim in self.deep.get(c.name, {}).values()):
            return c

        def without_test(e: Expr) -> Expr | None:
            if not isinstance(e, Op) or e.fn != "where":
                return None
            test, load, other = e.args
            if not isinstance(load, Load) or load.fill != 0 or not isinstance(other, Const) or other.value != 0:
                return None
            dims = self.shapes.get(load.tensor, ())
            ends = {
                Op("lt", (i, self.value(dim))): (load.tensor, d)
                for d, (i, dim) in enumerate(zip(load.indices, dims, strict=False))
            }
            tests = _conjuncts(test)
            places = [ends[t] for t in tests if t in ends]
            if len(places) < len(tests) or not is_float(self.dtypes[load.tensor]):
                return None
            if not all(self._can_hold(place, 0.0) for place in places):
                return None
            self.needs |= dict.fromkeys(places, 0.0)
            return load

        return replace(c, body=ex.transform(c.body, without_test))

    def _guard_reduction(self, c: Compute, axes: Sequence[str]) -> Expr:
        """Return the body of a reduction with a test of the length on ``axes``."""
        body = c.body
        for name in axes:
            inside = Op("lt", (Ref(name), self.value(self.deep[c.name][name])))
            assert c.combiner is not None
            body = Op("where", (inside, body, combiner_identity(c.combiner, ex.dtype_of(body, self.dtypes))))
        return body

    # --- padding of results -------------------------------------------------------------------

    def _pad_compute(self, c: Compute) -> list[Compute]:
        """Return ``c``, followed by a map if it is a reduction, so that its tensor holds the required padding."""
        wanted = {d: self.needs[c.name, d] for d in range(len(c.axes)) if (c.name, d) in self.needs}
        cut = {d: fill for d, fill in wanted.items() if self._padding_value(c, d) != fill}
        if not cut:
            ended = [c]
        elif c.combiner is None:
            ended = [replace(c, body=self._mask_body(c, c.body, cut))]
        else:
            whole = replace(c, name=make_identifier(f"{c.name}_whole", self.names))
            body = self._mask_body(c, Load(whole.name, tuple(Ref(a.name) for a in c.axes)), cut)
            ended = [whole, Compute(c.name, c.dtype, c.axes, body, origin=c.origin)]
        self._note_stops(c, ended[0].name)
        for d in range(len(c.axes)):
            known = wanted.get(d, self._padding_value(c, d))
            if isinstance(known, int | float):
                self.held[c.name, d] = known
        return ended

    def _mask_body(self, c: Compute, body: Expr, cut: Mapping[int, Number]) -> Expr:
        for d, fill in cut.items():
            inside = Op("lt", (Ref(c.axes[d].name), self.value(self.shapes[c.name][d])))
            body = Op("where", (inside, body, Const(fill, c.dtype)))
        return body

    def _padding_value(self, c: Compute, d: int) -> Number | str | None:
        """Return a map's value past the length along its dimension ``d``, if it follows from the operands."""
        if c.combiner is not None or not isinstance(self.shapes[c.name][d], AffineExtent):
            return None
        return self._evaluate_padding(c.body, c.axes[d].name, self.shapes[c.name][d])

    def _evaluate_padding(self, e: Expr, axis: str, dim: Dim) -> Number | str | None:
        """Return a number, _ROW for a value independent of ``axis``, or None. Minus infinity less a row's maximum is minus
        infinity, and zero over a row's sum is zero. Otherwise the row is NaN within the length, too."""
        if isinstance(e, Const):
            return e.value
        if axis not in ex.axes_of(e):
            return _ROW
        if isinstance(e, Load):
            at = [k for k, i in enumerate(e.indices) if axis in ex.axes_of(i)]
            same = e.fill is None and len(at) == 1 and e.indices[at[0]] == Ref(axis) and self.shapes[e.tensor][at[0]] == dim
            return self._stored_padding((e.tensor, at[0])) if same else None
        if not isinstance(e, Op):
            return None
        first, *others = (self._evaluate_padding(a, axis, dim) for a in e.args)
        if e.fn == "exp":
            return 0.0 if first == -math.inf else None
        if others != [_ROW]:
            return None
        kept = (e.fn in ("add", "sub") and first == -math.inf) or (e.fn == "div" and first == 0.0)
        return first if kept else None

    def _stored_padding(self, place: Place) -> Number | None:
        return self.held.get(place, 0.0 if place[0] in self.inputs else None)


def _conjuncts(test: Expr) -> list[Expr]:
    """Return the tests that ``test`` joins by "and"."""
    if isinstance(test, Op) and test.fn == "and_":
        return [t for part in test.args for t in _conjuncts(part)]
    return [test]
