"""What tensors hold beyond the length: where a reduction would read it, what changes no result.

The producer of such a tensor writes zeros there (minus infinity for a maximum) with its epilogue, and the reduction stays the
static one that kernel families know: a product of attention reads weights that are zero and values that are zero. Only where the
producer cannot do so does the reduction ask for the length at every place.
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
#: Most maps behind a product that are looked through for siblings of it.
FOLLOWED: Final = 4
#: Of a value that is the same within and beyond the length, whatever it is.
_ROW: Final = "row"


@dataclass
class SkipMarker:
    """The computes of a program for a range, in order, ended at its lengths. ``shapes`` are those of all tensors, ``deep``
    the extents
    of reduction axes by compute, ``value`` gives an extent as an expression; ``dtypes`` are all tensors' element types."""

    computes: Sequence[Compute]
    shapes: Mapping[str, tuple[Dim, ...]]
    deep: Mapping[str, Mapping[str, Dim]]
    value: Callable[[Dim], Expr]
    dtypes: Mapping[str, str]
    inputs: Collection[str]  #: Those that hold zeros there.
    constants: Mapping[str, Array]
    names: Names
    needs: dict[Place, Number] = field(default_factory=dict)
    held: dict[Place, Number] = field(default_factory=dict)
    stops: dict[tuple[str, str], AffineExtent] = field(default_factory=dict)  #: By reduction, as it is called now, and axis.

    def result(self) -> list[Compute]:
        """The computes; what a product writes is ended by a map behind it."""
        self.producers = {c.name: c for c in self.computes}
        guarded = {c.name: self._axes_to_guard(c) for c in self.computes if c.combiner is not None}
        for place, fill in list(self.needs.items()):
            self.needs |= {(n, place[1]): fill for n in self._sibling_products(place[0]) if self._can_hold((n, place[1]), fill)}
        made = list[Compute]()
        for c in self.computes:
            made += self._pad_compute(replace(c, body=self._guard_reduction(c, guarded.get(c.name, ()))))
        return made

    def _note_stops(self, c: Compute, name: str) -> None:
        """All reductions stop: those that do not ask read what changes no result."""
        found = ((r, dim) for r, dim in self.deep.get(c.name, {}).items())
        self.stops |= {(name, r): dim for r, dim in found if isinstance(dim, AffineExtent)}

    def _sibling_products(self, name: str) -> list[str]:
        """Products of one tensor that may become one product with ``name``, or maps behind them: they end as it does, too."""
        c = self.producers.get(name)
        roots = self._product_roots(name, FOLLOWED)
        if c is None or roots is None:
            return []
        like = [o for o in self.computes if o is not c and (o.shape, o.dtype, o.combiner) == (c.shape, c.dtype, c.combiner)]
        return [o.name for o in like if o.form == c.form and self._product_roots(o.name, FOLLOWED) == roots]

    def _product_roots(self, name: str, steps: int) -> frozenset[str] | None:
        """The tensors, without constants, that the one product behind ``name`` multiplies; None where there is none."""
        c = self.producers.get(name)
        if c is None or not steps:
            return None
        read = [r for r in c.reads if r not in self.constants]
        if c.kind == "contraction":
            return frozenset(read)
        return self._product_roots(read[0], steps - 1) if c.combiner is None and len(read) == 1 else None

    # --- what reductions need -----------------------------------------------------------------

    def _axes_to_guard(self, c: Compute) -> list[str]:
        """Note what the reduction needs of what it reads; the axes for which it has to ask itself."""
        deep = ((r, dim) for r, dim in self.deep.get(c.name, {}).items() if isinstance(dim, AffineExtent))
        return [r for r, dim in deep if not self._is_past_row(c, r, dim) and not self._can_pad_operands(c, r, dim)]

    def _is_past_row(self, c: Compute, axis: str, dim: AffineExtent) -> bool:
        """Whether a running sum has left its row wherever ``axis`` lies beyond ``dim``: before the row begins, or behind a test
        of where it ends."""
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
        """Whether everything that ``c`` reads along ``axis`` can hold what changes no result."""
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
        """The dimension of a tensor along which ``operand`` walks with ``axis``, where it was made; None if there is none."""
        if not isinstance(operand, Load) or operand.fill is not None:
            return None
        at = [d for d, i in enumerate(operand.indices) if axis in ex.axes_of(i)]
        if len(at) != 1 or operand.indices[at[0]] != Ref(axis) or self.shapes[operand.tensor][at[0]] != dim:
            return None
        return self._dimension_origin(operand.tensor, at[0])

    def _dimension_origin(self, tensor: str, d: int) -> Place:
        """Where a dimension comes from, through maps that only rearrange."""
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
        """Whether a tensor can hold ``neutral`` beyond the length."""
        if place[0] in self.producers:
            return self.needs.get(place, neutral) == neutral
        return place[0] in self.inputs and neutral == 0  # what the runtime puts there

    def _is_finite(self, place: Place) -> bool:
        """Whether zero times what the tensor holds beyond the length is zero."""
        values = self.constants.get(place[0])
        return values is not None and bool(np.isfinite(values).all())

    def _guard_reduction(self, c: Compute, axes: Sequence[str]) -> Expr:
        """The body of a reduction that stops by itself along ``axes``."""
        body = c.body
        for name in axes:
            inside = Op("lt", (Ref(name), self.value(self.deep[c.name][name])))
            assert c.combiner is not None
            body = Op("where", (inside, body, combiner_identity(c.combiner, ex.dtype_of(body, self.dtypes))))
        return body

    # --- what is written ----------------------------------------------------------------------

    def _pad_compute(self, c: Compute) -> list[Compute]:
        """``c``, and behind a reduction a map, such that its tensor holds what is needed of it."""
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
        """What a map holds beyond the length along its dimension ``d``, where that follows from what it reads."""
        if c.combiner is not None or not isinstance(self.shapes[c.name][d], AffineExtent):
            return None
        return self._evaluate_padding(c.body, c.axes[d].name, self.shapes[c.name][d])

    def _evaluate_padding(self, e: Expr, axis: str, dim: Dim) -> Number | str | None:
        """A number, _ROW for what does not depend on ``axis``, or None. Minus infinity less a row's maximum is minus
        infinity, and zero
        over a row's sum zero: where they are not, the row is no number within the length either."""
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
