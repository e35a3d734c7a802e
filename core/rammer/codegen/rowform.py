"""The row form of an operator: softmax, normalisations, pooling over whole images, any joined reductions.

A *row* is the set of values that one reduction combines. All reductions of the operator run over the same rows. Each result is
either one value per row or one value per element of the rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from rammer.codegen.stage_layout import needed_reductions
from rammer.ir import expr as ex
from rammer.ir.compute import Axis, Compute, computed_at
from rammer.ir.expr import Expr, Load, Ref, integer
from rammer.ir.operator import ROperator

#: For each axis of a result its position among the axes of rows or of elements, or None; and both.
Places: TypeAlias = "tuple[int | None, ...]"
RowAxes: TypeAlias = "tuple[Places, Places]"


@dataclass(frozen=True)
class RowForm:
    """An operator as work on rows.

    ``rows`` are the axes that number the rows and ``elements`` those within a row (extents above 1 only). ``row_of[d]`` and
    ``element_of[d]`` are the positions of the anchor's axis ``d`` among them, or None; an axis with neither has extent 1.
    ``others`` has both for results of another shape than the anchor's. ``reductions`` are in program order.
    """

    operator: ROperator
    rows: tuple[Axis, ...]
    elements: tuple[Axis, ...]
    row_of: tuple[int | None, ...]
    element_of: tuple[int | None, ...]
    reductions: tuple[Compute, ...]
    others: Mapping[str, RowAxes] = field(default_factory=dict)

    @property
    def length(self) -> int:
        """Number of elements of a row."""
        result = 1
        for axis in self.elements:
            result *= axis.extent
        return result

    def whole(self, output: str) -> bool:
        """Return True if a result has one value per element, not one per row."""
        return any(d is not None for d in self._output_axes(output)[1])

    def reduced(self, c: Compute, rows: tuple[Expr, ...], elements: tuple[Expr, ...]) -> dict[str, Expr]:
        """Return the axes of the reduction ``c`` at a row and an element of it."""
        return _map_live_axes(c.axes, rows) | _map_live_axes(c.reduce, elements)

    def point(self, output: str, rows: tuple[Expr, ...], elements: tuple[Expr, ...]) -> tuple[Expr, ...]:
        """Return a result's point at a row and an element of it."""
        result: list[Expr] = []
        for r, e in zip(*self._output_axes(output), strict=True):
            result.append(rows[r] if r is not None else elements[e] if e is not None else integer(0))
        return tuple(result)

    def _output_axes(self, output: str) -> RowAxes:
        return self.others.get(output, (self.row_of, self.element_of))


def _map_live_axes(axes: tuple[Axis, ...], values: tuple[Expr, ...]) -> dict[str, Expr]:
    live = iter(values)
    return {a.name: next(live) if a.extent > 1 else integer(0) for a in axes}


def row_form(operator: ROperator) -> RowForm | None:
    """Return the row form of ``operator``, or None without a reduction or with reductions over different rows."""
    reductions = tuple(c for c in operator.computes if c.reduce)
    anchor = operator.anchor
    if not reductions or any(0 in (*c.shape, *(r.extent for r in c.reduce)) for c in operator.computes):
        return None
    lead = reductions[-1]
    rows, elements = _live_axes(lead.axes), _live_axes(lead.reduce)
    same = all(
        _live_extents(c.axes) == _live_extents(lead.axes) and _live_extents(c.reduce) == _live_extents(lead.reduce)
        for c in reductions
    )
    row_of = _row_places(operator, lead)
    if not same or not elements or row_of is None:
        return None
    element_of = _element_places(anchor, row_of, elements)
    written = [c for c in operator.computes if c.name in operator.outputs]
    others = {c.name: _other_places(operator, c, row_of, (rows, elements)) for c in written if c.shape != anchor.shape}
    found = {name: places for name, places in others.items() if places is not None}
    if element_of is None or len(found) < len(others):
        return None
    return RowForm(operator, rows, elements, row_of, element_of, reductions, found)


def map_form(operator: ROperator, strides: Mapping[str, tuple[int, ...]], most: int) -> RowForm | None:
    """Return the row form of an operator without reductions, or None with a reduction or without an axis.

    A row is the inner axes that all accesses walk as one, up to ``most`` elements, and at least the innermost axis. Inner axes
    are those with the smaller strides in the result. ``strides`` as in ``can_join_axes``."""
    anchor = operator.anchor
    order = strides.get(anchor.name, ())
    live = [d for d, a in enumerate(anchor.axes) if a.extent > 1]
    live = sorted(live, key=lambda d: -abs(order[d])) if order else live
    outputs = [c.shape == anchor.shape for c in operator.computes if c.name in operator.outputs]
    if any(c.reduce for c in operator.computes) or not live or 0 in anchor.shape or not all(outputs):
        return None
    for k in range(len(live)):
        rows, inner = live[:k], live[k:]
        row_of = tuple(rows.index(d) if d in rows else None for d in range(len(anchor.axes)))
        element_of = tuple(inner.index(d) if d in inner else None for d in range(len(anchor.axes)))
        axes = anchor.axes
        form = RowForm(operator, tuple(axes[d] for d in rows), tuple(axes[d] for d in inner), row_of, element_of, ())
        if len(inner) == 1 or (form.length <= most and can_join_axes(form, strides)):
            return form
    return None


def _element_places(c: Compute, row_of: Places, elements: tuple[Axis, ...]) -> Places | None:
    """Return the position of each axis of a result among the element axes: of all of them in order, or of none."""
    rest = [d for d, a in enumerate(c.axes) if a.extent > 1 and row_of[d] is None]
    if rest and [c.axes[d].extent for d in rest] != [e.extent for e in elements]:
        return None
    return tuple(rest.index(d) if d in rest else None for d in range(len(c.axes)))


def _other_places(operator: ROperator, c: Compute, row_of: Places, axes: tuple[tuple[Axis, ...], ...]) -> RowAxes | None:
    """Return the positions of a result of another shape than the anchor's that shares the anchor's rows."""
    rows, elements = axes
    own = tuple(None if d is None or a.extent < 2 else row_of[d] for d, a in zip(operator.shared[c.name], c.axes, strict=True))
    element_of = _element_places(c, own, elements)
    return None if element_of is None or {*own} - {None} != {*range(len(rows))} else (own, element_of)


def _row_places(operator: ROperator, lead: Compute) -> Places | None:
    """Return the positions of the anchor's axes among the live row axes, or None if rows are not plain axes."""
    anchor = operator.anchor
    if anchor is lead:
        indices: tuple[Expr, ...] = tuple(Ref(a.name) for a in anchor.axes)
    else:
        found = needed_reductions({c.name: c for c in operator.computes}, anchor, tuple(Ref(a.name) for a in anchor.axes))
        places = {i for c, i in found if c is lead}
        if len(places) != 1:
            return None
        indices = places.pop()
    live = [i for i, a in zip(indices, lead.axes, strict=True) if a.extent > 1]
    if not all(isinstance(i, Ref) for i in live) or len(set(live)) < len(live):
        return None
    return tuple(live.index(Ref(a.name)) if a.extent > 1 and Ref(a.name) in live else None for a in anchor.axes)


def _live_axes(axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
    return tuple(a for a in axes if a.extent > 1)


def _live_extents(axes: tuple[Axis, ...]) -> list[int]:
    return [a.extent for a in _live_axes(axes)]


def can_join_axes(form: RowForm, strides: Mapping[str, tuple[int, ...]]) -> bool:
    """Return True if every access walks the element axes as one long axis: the first ones at 0, the last over all elements.
    ``strides`` are those of the stored tensors, in elements."""
    found = collect_accesses(form)
    names = {e.axis for e in found.elements}
    extents = [a.extent for a in form.elements]
    return not found.outside & names and all(_has_uniform_steps(ld, strides, found.elements, extents) for ld in found.loads)


@dataclass(frozen=True)
class Accesses:
    """The memory accesses of one element of a row, as loads at the axes ``rows`` and ``elements``. ``outside`` are the axes that
    expressions use otherwise."""

    rows: tuple[Ref, ...]
    elements: tuple[Ref, ...]
    loads: tuple[Load, ...]
    outside: frozenset[str]


def collect_accesses(form: RowForm) -> Accesses:
    """Return every access of an operator in row form, except of reductions that it has already computed."""
    rows = tuple(Ref(f"row{k}__") for k in range(len(form.rows)))
    elements = tuple(Ref(f"element{k}__") for k in range(len(form.elements)))
    results = [Load(name, form.point(name, rows, elements)) for name in form.operator.outputs]
    inlined = {c.name: c for c in form.operator.computes if not c.reduce}
    bodies = [ex.substitute(c.body, form.reduced(c, rows, elements)) for c in form.reductions]
    bodies += [result for result in results if result.tensor in inlined]
    loads, outside = _collect_reads(bodies, inlined)
    computed = {c.name for c in form.reductions}
    found = [ld for ld in loads if ld.tensor not in computed] + results
    return Accesses(rows, elements, tuple(dict.fromkeys(found)), frozenset(outside))


def _collect_reads(bodies: Iterable[Expr], inlined: Mapping[str, Compute]) -> tuple[list[Load], set[str]]:
    """Return the loads of stored tensors, and the axes used outside loads, with in-place producers expanded. The expanded
    expression is not built, since it doubles with each producer in a chain that is read twice. Indices are left as they are."""
    found, outside, seen = dict[Load, None](), set[str](), set[Load]()

    def visit(e: Expr) -> None:
        if not isinstance(e, Load):
            kids = ex.children(e)
            outside.update(() if kids else ex.axes_of(e))
            for kid in kids:
                visit(kid)
        elif e.fill is not None or e.tensor not in inlined:
            found[e] = None
        elif e not in seen:
            seen.add(e)
            c = inlined[e.tensor]
            visit(ex.substitute(c.body, dict(zip((a.name for a in c.axes), e.indices, strict=True))))

    for body in bodies:
        visit(body)
    return list(found), outside


def address_step(load: Load, strides: tuple[int, ...], axis: Ref) -> int | None:
    """Return the elements between the addresses of ``load`` at neighbouring values of ``axis``, or None if not fixed."""
    forms = [ex.affine_form(i) for i in load.indices]
    if any(f is None and axis.axis in ex.axes_of(i) for f, i in zip(forms, load.indices, strict=True)):
        return None
    return sum(s * f[0].get(axis.axis, 0) for s, f in zip(strides, forms, strict=True) if f is not None)


def inline_producers(e: Expr, inlined: Mapping[str, Compute]) -> Expr:
    """Return ``e`` with every unpadded load of a producer in ``inlined`` replaced by the producer's expression."""

    def rule(n: Expr) -> Expr | None:
        if isinstance(n, Load) and n.fill is None and n.tensor in inlined:
            c = inlined[n.tensor]
            indices = (inline_producers(i, inlined) for i in n.indices)
            return inline_producers(computed_at(c, indices), inlined)
        return None

    return ex.transform(e, rule)


def _has_uniform_steps(load: Load, strides: Mapping[str, tuple[int, ...]], elements: tuple[Ref, ...], extents: list[int]) -> bool:
    if not ex.axes_of(load) & {e.axis for e in elements}:
        return True
    if load.fill is not None or load.tensor not in strides:
        return False
    steps = [address_step(load, strides[load.tensor], e) for e in elements]
    fixed = [s for s in steps if s is not None]
    return len(fixed) == len(steps) and all(a == b * n for a, b, n in zip(fixed, fixed[1:], extents[1:], strict=False))
