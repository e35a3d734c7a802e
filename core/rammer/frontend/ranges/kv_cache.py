"""KV caches that grow in place: an output that continues an input is stored over it.

Exporters concatenate the keys of the past with those of the new token, or scatter them into a cache (TensorScatter). Both
expressions test each position for old or new. ``append_in_place`` moves that test to the front, as ``where(lt(i, position),
past[..], new)``. Elements before the position are read and written unchanged. Thus the two tensors may share memory
(``verify.in_place_state``), and tasks before it are skipped. If the position is a length of a range, the past gets the extent of
the output that continues it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from rammer.frontend.ranges.range_bounds import EndedTensor, RangeBounds
from rammer.ir import expr as ex
from rammer.ir.compute import Compute, ComputeGraph
from rammer.ir.expr import Const, Expr, Load, Op, Ref
from rammer.ir.extent import AffineExtent, Dim, Ranged
from rammer.ir.types import TensorType
from rammer.verify.in_place_state import extent_of, is_continuation, written_rows

#: An integer expression: the factors of indices and lengths, and a constant.
Linear = tuple[dict[Expr, int], int]


@dataclass(frozen=True)
class Appended:
    """A graph, its outputs that may alias inputs (``kept``), and the ranges that their tasks write (``ended``)."""

    graph: ComputeGraph
    kept: Mapping[str, str] = field(default_factory=dict)
    ended: Mapping[str, EndedTensor] = field(default_factory=dict)


def append_in_place(graph: ComputeGraph, wanted: Mapping[str, str], ranged: Ranged | None = None) -> Appended:
    """Return ``graph`` with outputs of ``wanted`` (output: input) stored over their inputs if possible; others are unchanged."""
    found = Appended(graph)
    for output, past in wanted.items():
        more = _Append(_without_copies(found.graph, past), past, output, ranged).result()
        if more is not None:
            found = Appended(more.graph, {**found.kept, **more.kept}, {**found.ended, **more.ended})
    return found


def _without_copies(graph: ComputeGraph, past: str) -> ComputeGraph:
    """Return ``graph`` without reads of copies of ``past``, which exporters make by concatenation with nothing."""
    copies = {c.name: past for c in graph.computes if c.name not in graph.outputs and _is_copy(c, past)}
    if not copies:
        return graph
    kept = (c for c in graph.computes if c.name not in copies)
    return replace(graph, computes=tuple(replace(c, body=ex.rename_tensors(c.body, copies)) for c in kept))


def _is_copy(compute: Compute, past: str) -> bool:
    return compute.combiner is None and compute.body == Load(past, tuple(Ref(a.name) for a in compute.axes))


def merge_ended(ended: RangeBounds | None, more: Mapping[str, EndedTensor]) -> RangeBounds | None:
    """Return ``ended`` extended by outputs stored over their inputs, which already hold zeros past the length."""
    if not more:
        return ended
    made = dict(ended.tensors) if ended is not None else {}
    for name, new in more.items():
        old = made.get(name, new)
        fills = tuple(None if e is not None and f == 0 else f for e, f in zip(new.extents, old.fills, strict=True))
        extents = tuple(e if e is not None else known for e, known in zip(new.extents, old.extents, strict=True))
        made[name] = EndedTensor(new.shape, extents, fills, new.starts, new.rows)
    return RangeBounds(made, ended.stops if ended is not None else ())


@dataclass
class _Append:
    graph: ComputeGraph
    past: str
    output: str
    ranged: Ranged | None

    def result(self) -> Appended | None:
        """Return the graph with the output stored over the input, or None."""
        graph, past, output = self.graph, self.past, self.output
        compute, types = graph.producers.get(output), graph.types
        readers = [c.name for c in graph.consumers().get(past, ())]
        if compute is None or past not in graph.inputs or readers != [output] or types[past].dtype != types[output].dtype:
            return None
        if len(types[past].shape) != len(types[output].shape) or compute.combiner is not None:
            return None
        widened = replace(compute, body=self._drop_past_guards(compute))
        places = [(d, at) for d in range(len(compute.axes)) for at in self._append_positions(widened, d)]
        made = next((m for d, at in places if (m := self._canonicalise_append(widened, d, at)) is not None), None)
        if made is None and types[past] == types[output] and is_continuation(widened, past):
            made = widened, self._find_row_window(widened)
        if made is None:
            return None
        compute, ended = made
        computes = tuple(compute if c.name == output else c for c in graph.computes)
        kinds = {**types, past: TensorType(types[past].dtype, types[output].shape)}
        return Appended(replace(graph, computes=computes, types=kinds), {output: past}, {} if ended is None else {output: ended})

    def _find_row_window(self, compute: Compute) -> EndedTensor | None:
        """Return the written rows of the output, if each index along another axis has a separate row window."""
        rows, nothing = written_rows(compute, self.past), (None,) * len(compute.axes)
        at = rows[1].terms[0][0] if rows is not None else ""
        known = at in self.graph.inputs and self.graph.types[at].dtype == "int64"
        return EndedTensor(compute.shape, nothing, nothing, (), rows) if known else None

    def _drop_past_guards(self, compute: Compute) -> Expr:
        """Return the body with unguarded reads of the past at the output's index: the past has the extent of the output."""
        own = tuple(Ref(a.name) for a in compute.axes)

        def rule(e: Expr) -> Expr | None:
            return Load(self.past, own) if isinstance(e, Load) and e.tensor == self.past and e.indices == own else None

        return ex.transform(compute.body, rule)

    def _append_positions(self, compute: Compute, d: int) -> list[Expr]:
        """Return the positions at which new elements may begin along an axis: the past's length, or an
        index input of the model."""
        shapes = self.ranged.shapes if self.ranged is not None else {}
        old, new = (shapes.get(n, self.graph.types[n].shape)[d] for n in (self.past, self.output))
        if old != new:
            return [self._length_expr(old)] if self.ranged is not None else []
        inputs = [n for n in self.graph.inputs if self.graph.types[n] in (TensorType("int64", ()), TensorType("int64", (1,)))]
        read = {load.tensor for load in ex.loads(compute.body)}
        return [Load(n, (ex.integer(0),) * len(self.graph.types[n].shape)) for n in inputs if n in read]

    def _length_expr(self, dim: Dim) -> Expr:
        if isinstance(dim, int):
            return ex.integer(dim)
        assert self.ranged is not None
        total: Expr = ex.integer(dim.offset)
        for name, factor in dim.terms:
            total = ex.make_add(ex.make_mul(Load(self.ranged.lengths[name], ()), factor), total)
        return total

    def _canonicalise_append(self, compute: Compute, d: int, at: Expr) -> tuple[Compute, EndedTensor | None] | None:
        """Return a compute that first tests if an index is before ``at`` along axis ``d``. Return None unless that test separates
        old elements from new ones."""
        axis, own = Ref(compute.axes[d].name), tuple(Ref(a.name) for a in compute.axes)
        body = _fold_unit_axes(compute)
        old, new = Load(self.past, own), _assume_side(body, axis, at, below=False)
        if _assume_side(body, axis, at, below=True) != old:
            return None
        made = replace(compute, body=Op("where", (Op("lt", (axis, at)), old, new)))
        if not is_continuation(made, self.past):
            return None
        begin, end = extent_of(at), self._end(new, axis, at, d)
        if begin is None:
            return None
        nowhere: list[AffineExtent | None] = [None] * len(own)
        extents, starts = nowhere.copy(), nowhere.copy()
        extents[d], starts[d] = end, begin
        return made, EndedTensor(compute.shape, tuple(extents), (None,) * len(own), tuple(starts))

    def _end(self, new: Expr, axis: Ref, at: Expr, d: int) -> AffineExtent | None:
        """Return the end of the new elements: the output's current length, or the start of further old elements."""
        dim = self.ranged.shapes[self.output][d] if self.ranged is not None else 0
        if isinstance(dim, AffineExtent):
            return extent_of(self._length_expr(dim))
        for e in (n for n in ex.walk(new) if isinstance(n, Op) and n.fn == "lt"):
            found = _subtract_linear(e.args[1], e.args[0], axis, at)
            if found is None or found[0] != -1:
                continue
            end = ex.make_add(at, found[1])
            rest = _assume_side(new, axis, end, below=False)
            if isinstance(rest, Load) and rest.tensor == self.past:
                return extent_of(end)
        return None


def _fold_unit_axes(compute: Compute) -> Expr:
    """Return the body with axes of extent 1 replaced by index 0 in loads of one-dimensional tensors."""
    single = {a.name: ex.integer(0) for a in compute.axes if a.extent == 1}

    def rule(e: Expr) -> Expr | None:
        if isinstance(e, Load) and len(e.indices) == 1 and isinstance(e.indices[0], Ref) and e.indices[0].axis in single:
            return replace(e, indices=(single[e.indices[0].axis],))
        return None

    return ex.transform(compute.body, rule)


def _assume_side(e: Expr, axis: Ref, at: Expr, below: bool) -> Expr:
    """Return ``e`` for ``axis`` below ``at``, or else not below it; selections decided by this are removed."""

    def rule(n: Expr) -> Expr | None:
        if not isinstance(n, Op) or n.fn != "where":
            return None
        known = _decide_condition(n.args[0], axis, at, below)
        return None if known is None else _assume_side(n.args[1 if known else 2], axis, at, below)

    return ex.transform(e, rule)


def _decide_condition(e: Expr, axis: Ref, at: Expr, below: bool) -> bool | None:
    """Return True or False if a condition is decided for ``axis`` on its side of ``at``, else None."""
    if isinstance(e, Op) and e.fn == "and_":
        parts = [_decide_condition(a, axis, at, below) for a in e.args]
        return False if False in parts else True if None not in parts else None
    if not isinstance(e, Op) or e.fn not in ("lt", "le"):
        return None
    found = _subtract_linear(e.args[1], e.args[0], axis, at)
    if found is None:
        return None
    factor, rest = found[0], found[1] - (e.fn == "lt")  # the condition: factor * (axis - at) + rest >= 0
    least = -factor if below else 0  # the product's value one step from the position, its least if it grows away from it
    grows = -factor if below else factor
    if grows >= 0 and rest + least >= 0:
        return True
    return False if grows <= 0 and rest + least < 0 else None


def _subtract_linear(a: Expr, b: Expr, axis: Ref, at: Expr) -> tuple[int, int] | None:
    """Return ``a - b`` as a factor of ``axis - at`` and a constant, or None if other terms remain."""
    form, position = _linear_form(Op("sub", (a, b))), _linear_form(at)
    if form is None or position is None:
        return None
    terms, number = form
    factor = terms.get(axis, 0)
    left = {e: terms.get(e, 0) + factor * position[0].get(e, 0) for e in {*terms, *position[0]} - {axis}}
    return None if any(left.values()) else (factor, number + factor * position[1])


def _linear_form(e: Expr) -> Linear | None:
    """Return a linear form in indices and one-element loads, or None if ``e`` is not linear."""
    if isinstance(e, Const):
        return ({}, e.value) if isinstance(e.value, int) else None
    if isinstance(e, Ref) or (isinstance(e, Load) and all(isinstance(i, Const) for i in e.indices)):
        return {e: 1}, 0
    if not isinstance(e, Op) or e.fn not in ("add", "sub", "mul"):
        return None
    known = [_linear_form(a) for a in e.args]
    if known[0] is None or known[1] is None:
        return None
    (a, m), (b, n) = known[0], known[1]
    if e.fn == "mul":
        if a and b:
            return None
        terms, factor = (b, m) if not a else (a, n)
        return {t: f * factor for t, f in terms.items()}, m * n
    sign = 1 if e.fn == "add" else -1
    return {t: a.get(t, 0) + sign * b.get(t, 0) for t in {*a, *b}}, m + sign * n
